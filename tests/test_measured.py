"""The tables of what was measured, from a report that is made up here and stands nowhere else."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.site import ROOT, needs_sphinx

pytestmark = [
    needs_sphinx,
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the pages are not here: an installed package"),
]

MADE_UP = {
    "machine": "no machine at all",
    "versions": {"numba": "0.0"},
    "date": "2001-01-01",
    "note": "One page failed.",
    "rows": [
        {
            "id": "top_b64",
            "work": "64 requests of 15 depths",
            "ours_us": 200.04,
            "floor_us": 50.0,
            "peers": {"torch": 1900.0, "a peer": None},
            "max_rel_error": 1.25e-7,
        },
        {
            "id": "attn_big",
            "work": "8 requests",
            "ours_us": 4000.0,
            "floor_us": 1000.0,
            "peers": {"torch": 2000.0, "a peer": 40400.0},
            "max_rel_error": 1e-3,
            "peer_errors": {"torch": 0.0123},
        },
    ],
    "ladder": [
        {
            "id": work,
            "stage": stage,
            "rung": rung,
            "predicted_us": predicted,
            "ours_us": ours,
            "floor_us": 100.0,
            "bytes_read": read,
            "flop": 5e9,
            "changed": changed,
        }
        for work, stage, rung, predicted, ours, read, changed in [
            ("attn_small", "tree_attention", "naive", None, 8000.0, 16e9, "nothing yet"),
            ("attn_small", "tree_attention", "shared_tile", 900.0, 1000.0, 2e9, "tiles"),
            ("attn_big", "tree_attention", "naive", 70.0, 500.0, None, "nothing yet"),
            ("tree_64", "best_first_tree", "warp", 20.0, 25.0, 1e6, "registers"),
        ]
    ],
    "ceilings": {"a rate": 4.25, "another": None},
    "skipped": {"a peer on top_b64": "no such peer"},
    "costs": {"launch_python_us": 28.04, "graph_replay_us": 5.5, "other_us": 0.31},
    "profiles": [
        {
            "id": "tree_64",
            "bound": "The chain of nodes.",
            "figures": {"of a node": 107, "of all": 268714},
        }
    ],
}

PAGE = """# Page

```{measured}
```

## A lesson

before

```{ladder} tree_attention
### Only with numbers

*what* the clock says
```

```{costs}
Costs of a launch:
```

after
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return importlib.import_module("measured")


def build(folder: Path, report: dict[str, Any] | None) -> subprocess.CompletedProcess:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    if report is not None:
        (data / "h200.json").write_text(json.dumps(report))
    settings = ["import sys", f"sys.path.insert(0, {str(ROOT / 'docs' / '_ext')!r})", 'root_doc = "page"']
    settings += ['extensions = ["myst_parser", "measured"]', f"measured_data = {str(data)!r}"]
    (folder / "conf.py").write_text("\n".join(settings))
    (folder / "page.md").write_text(PAGE)
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "text", str(folder), str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": ""})


def shown(folder: Path, report: dict[str, Any] | None) -> str:
    """Return the page as text."""
    done = build(folder, report)
    assert done.returncode == 0, done.stderr
    return (folder / "out" / "page.txt").read_text()


def rows_of(lines: list[str]) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_without_the_file_there_is_nothing(tmp_path: Path) -> None:
    assert shown(tmp_path, None).split() == ["Page", "****", "A", "lesson", "========", "before", "after"]


def test_a_report_without_these_parts_shows_none_of_them(tmp_path: Path) -> None:
    text = shown(tmp_path, {key: MADE_UP[key] for key in ("machine", "versions", "date", "rows")})
    assert "64 requests" in text and "Only with numbers" not in text and "Costs of a launch" not in text


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    text = shown(tmp_path, MADE_UP)
    page, _, lesson = text.partition("A lesson")
    assert "On no machine at all, 2001-01-01. numba 0.0." in page
    for part in (
        "64 requests",
        "40,400",
        "naive",
        "registers",
        "a launch from Python",
        "28.0",
        "a rate",
        "no such peer",
        "One page failed.",
        "What bounds",
        "The chain of nodes.",
        "107",
        "268,714",
    ):
        assert part in page, part
    order = ["before", "Only with numbers", "what* the clock says", "naive", "Costs of a launch", "28.0", "after"]
    assert [lesson.index(part) for part in order] == sorted(lesson.index(part) for part in order)
    assert "registers" not in lesson, "another stage's rung"


def test_work_floor_and_peers(measured: Any) -> None:
    head, marks, first, second = rows_of(measured.kernels_table(MADE_UP["rows"]))
    assert head[:4] == ["work", "ours, µs", "floor, µs", "of the floor"]
    assert measured._error(0.0) == "0"
    assert head[4:] == ["others, µs", "largest relative error"]
    assert marks == ["---", *["---:"] * 3, "---", "---:"]
    assert first[0] == "64 requests of 15 depths (`top_b64`)"
    assert first[1:] == ["200.0", "50.0", "25%", "torch 1,900 (9.50×)", "1.2e-07"]
    assert second[1:] == [
        "4,000",
        "1,000",
        "25%",
        "torch 2,000 (0.50×), a peer 40,400 (10×)",
        "1.0e-03 (torch 1.2e-02)",
    ]


def test_ladder(measured: Any) -> None:
    lines = measured.ladder_tables(MADE_UP, "tree_attention")
    assert [line for line in lines if line.startswith("`")] == [
        "`tree_attention` on `attn_small`:",
        "`tree_attention` on `attn_big` (8 requests):",
    ]
    rows = {
        tuple(row[:2]): row[2:] for row in rows_of(lines[: lines.index("`tree_attention` on `attn_big` (8 requests):")])
    }
    assert rows["`naive`", "nothing yet"] == ["–", "8,000", "–", "1%", "16,000", "2", "0.625"]
    assert rows["`shared_tile`", "tiles"] == ["900.0", "1,000", "8.00×", "10%", "2,000", "2", "5"]
    *_, alone = rows_of(lines)
    assert alone[2:] == ["70.0", "500.0", "–", "20%", "–", "–", "10"], "of another work: no one before, nothing read"
    assert measured.ladder_tables(MADE_UP, "accept_walk") == [] == measured.ladder_tables({}, "tree_attention")


def test_a_long_table_is_folded_below_its_largest_numbers(measured: Any) -> None:
    report = {f"tests/test_a.py::test_big[{n}]": {"error": n / 10, "lse": float(n)} for n in range(13)}
    lines = measured.as_markdown({"machine": "m", "date": "d", "measured": report})
    summary = rows_of(lines[: next(n for n, line in enumerate(lines) if "dropdown" in line)])
    assert summary[2:] == [["`test_a.py::test_big`", "13", "1.2", "12"]]
    assert ":::{dropdown} All 13 cases" in lines and len(rows_of(lines)) == 3 + 2 + 13
    del report["tests/test_a.py::test_big[12]"]
    assert not any(
        "dropdown" in line for line in measured.as_markdown({"machine": "m", "date": "d", "measured": report})
    )


def test_costs(measured: Any) -> None:
    _, _, *rows = rows_of(measured.costs_table(MADE_UP))
    assert rows == [
        [measured.COSTS["launch_python_us"], "28.0"],
        [measured.COSTS["graph_replay_us"], "5.5"],
        ["other", "0.3"],
    ]


@pytest.mark.parametrize("part, key", [("rows", "floor_us"), ("ladder", "changed")])
def test_a_report_that_lacks_something_fails_the_build(tmp_path: Path, part: str, key: str) -> None:
    report = copy.deepcopy(MADE_UP)
    del report[part][0][key]
    done = build(tmp_path, report)
    assert done.returncode != 0 and f"{part}[0]: got no {key}, needs" in done.stderr


@pytest.mark.usefixtures("measured")
def test_a_notebook_has_the_tables_in_its_text() -> None:
    from notebooks import to_notebook

    page = "# Title\n\n```{ladder} tree_attention\nRungs:\n```\n\nthen\n\n```{costs}\nCosts:\n```\n"
    sources = [cell.source for cell in to_notebook(page, "9.9", MADE_UP).cells]
    assert (
        sources[2].startswith("Rungs:\n\n`tree_attention` on `attn_small`:\n\n| rung |")
        and "no machine at all" in sources[2]
    )
    assert sources[4].startswith("Costs:\n\n| what | µs |")
    assert [cell.source for cell in to_notebook(page, "9.9", {}).cells][1:] == ["# Title", "then"]
