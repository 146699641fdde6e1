"""Tables of what scripts measured, from the JSON files in `docs/_data`; no number is typed in.

``{measured}`` shows every report. ``{ladder} tree_attention`` shows the rungs of one stage and ``{costs}`` what
launches cost, both from `h200.json`, below the lines that the directive encloses. Where that file is not there, or has
nothing of the kind, they show nothing at all, their lines included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

KERNELS = "h200.json"
TITLES = {
    "h200": "Kernels on an H200",
    "h200_profiles": "What the profiler says",
    "h200_checks": "Tests and errors on an H200",
    "cpu": "The command and the small model on a CPU",
    "generate": "The run in the README's picture",
    "kdtr": "A KDTR file of 1 GiB: written and copied to the disk with fsync, read from the page cache",
}  # in the order of the page; other files follow under their own names
COSTS = {
    "launch_python_us": "a launch from Python with eight arrays, the host's time",
    "launch_prepared_us": "the same with its arguments laid out beforehand",
    "graph_replay_us": "six such kernels as one graph",
    "draft_graph_us": "the draft side of a round, the GPU's time",
    "commit_graph_us": "the commit side of a round, the GPU's time",
    "round_wall_us": "both sides, from Python's call to the end",
}
LONG = 12  # rows; a longer table is folded below its largest numbers
NOTHING = "–"  # a peer that can't do the work, a prediction that nobody made

Row = dict[str, Any]


# ---- one report ----


def as_markdown(report: dict[str, Any]) -> list[str]:
    """Return one report as lines of MyST: where and when, then whatever it holds of what is known here."""
    lines = [*_where(report), ""]
    if note := report.get("note"):
        lines += [note, ""]
    if tests := report.get("tests"):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in tests.items())
        lines += [f"Tests: {counts}; {report.get('gpu_tests', 0)} of them need a GPU.", ""]
    if runs := report.get("runs"):
        same = "the same text in every mode" if report["identical"] else "the modes differ"
        lines += [f"Prompt `{report['prompt']}`, stages in {report['backend']}; {same}.", ""]
        columns = [name for name in runs[0] if isinstance(runs[0][name], (int, float)) or name == "mode"]
        lines += _table([name.replace("_", " ") for name in columns], ([run[name] for name in columns] for run in runs))
    if rows := report.get("rows"):
        lines += ["### Against the floor and the others", "", *kernels_table(rows)]
    if rates := {name: rate for name, rate in report.get("ceilings", {}).items() if rate is not None}:
        lines += [
            "The rates behind the floors: " + ", ".join(f"`{n}` {_number(r)}" for n, r in rates.items()) + ".",
            "",
        ]
    for name, reason in {**report.get("skipped", {}), **report.get("failed", {})}.items():
        lines += [f"Not measured: {name}: {reason}", ""]
    if report.get("ladder"):
        lines += ["### Rung by rung", ""]
        for stage in dict.fromkeys(row["stage"] for row in report["ladder"]):
            lines += ladder_tables(report, stage)
    if report.get("costs"):
        lines += ["### What a launch costs", "", *costs_table(report)]
    for profile in report.get("profiles", []):
        lines += _profile(profile)
    if measured := report.get("measured"):
        for names in dict.fromkeys(tuple(numbers) for numbers in measured.values()):
            alike = {test.rpartition("/")[2]: n for test, n in measured.items() if tuple(n) == names}
            lines += _alike(names, alike)
    return lines


def _where(report: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    return [f"On {report['machine']}, {report['date']}. {versions}."]


def _profile(profile: Row) -> list[str]:
    """Return what a profiler said of one work: its conclusion, and the numbers that show it."""
    _check("profiles", [profile], ("id", "bound", "figures"))
    return [
        f"### What bounds `{profile['id']}`",
        "",
        profile["bound"],
        "",
        *_table(["what", "measured"], profile["figures"].items()),
    ]


def _alike(names: tuple[str, ...], measured: dict[str, Row]) -> list[str]:
    """Return a table of what was measured alike: a row for each measurement, or, of a single one, for each number."""
    words = [name.replace("_", " ") for name in names]
    if len(measured) == 1:
        [(where, numbers)] = measured.items()
        return _table([where, "measured"], zip(words, numbers.values(), strict=True))
    rows = [[f"`{where}`", *numbers.values()] for where, numbers in measured.items()]
    if len(rows) <= LONG:
        return _table(["where", *words], rows)
    tests: dict[str, list[Row]] = {}
    for where, numbers in measured.items():
        tests.setdefault(where.partition("[")[0], []).append(numbers)
    largest = [[f"`{test}`", len(of), *(max(n[name] for n in of) for name in names)] for test, of in tests.items()]
    head = ["test", "cases", *(f"{word}, at most" for word in words)]
    folded = [f":::{{dropdown}} All {len(rows)} cases", "", *_table(["where", *words], rows), ":::", ""]
    return [*_table(head, largest), *folded]


# ---- kernels: rows, ladder, costs ----


def kernels_table(rows: Sequence[Row]) -> list[str]:
    """Return a row for each work: our time, its floor, how much of the floor is reached, every peer with its ratio."""
    _check("rows", rows, ("id", "work", "ours_us", "floor_us", "peers", "max_rel_error"))
    head = ["work", "ours, µs", "floor, µs", "of the floor", "others, µs", "largest relative error"]
    return _table(head, map(_kernel, rows))


def _kernel(row: Row) -> Iterator[Any]:
    yield f"{row['work']} (`{row['id']}`)"
    yield _time(row["ours_us"])
    yield _time(row["floor_us"])
    yield _share(row["floor_us"], row["ours_us"])
    peers = [(name, time) for name, time in row["peers"].items() if time is not None]
    yield ", ".join(f"{name} {_time(time)} ({_times(time / row['ours_us'])})" for name, time in peers) or NOTHING
    others = ", ".join(f"{name} {_error(error)}" for name, error in row.get("peer_errors", {}).items())
    yield _error(row["max_rel_error"]) + (f" ({others})" if others else "")


def ladder_tables(report: dict[str, Any], stage: str) -> list[str]:
    """Return a table for each work that rungs of `stage` were timed on, in the order in which they were climbed."""
    rows = [row for row in report.get("ladder", []) if row["stage"] == stage]
    fields = ("id", "rung", "changed", "predicted_us", "ours_us", "floor_us", "bytes_read", "flop")
    _check("ladder", rows, fields)
    head = ["rung", "what changed", "predicted, µs", "measured, µs", "over the one before", "of the floor"]
    head += ["reads, MB", "TB/s", "TFLOP/s"]
    works = {row["id"]: row["work"] for row in report.get("rows", [])}
    lines: list[str] = []
    for work, rungs in groupby(rows, key=lambda row: row["id"]):
        words = f" ({works[work]})" if work in works else ""
        lines += [f"`{stage}` on `{work}`{words}:", "", *_table(head, _rungs(list(rungs)))]
    return lines


def _rungs(rows: Sequence[Row]) -> Iterator[list[Any]]:
    before = None
    for row in rows:
        ours = row["ours_us"]
        yield [
            f"`{row['rung']}`",
            row["changed"],
            _time(row["predicted_us"]),
            _time(ours),
            NOTHING if before is None else _times(before / ours),
            _share(row["floor_us"], ours),
            NOTHING if row["bytes_read"] is None else row["bytes_read"] / 1e6,
            NOTHING if row["bytes_read"] is None else row["bytes_read"] / ours / 1e6,
            NOTHING if row["flop"] is None else row["flop"] / ours / 1e6,
        ]
        before = ours


def costs_table(report: dict[str, Any]) -> list[str]:
    """Return a row for each cost."""
    costs = report.get("costs", {})
    words = {name: COSTS.get(name, name.removesuffix("_us").replace("_", " ")) for name in costs}
    return _table(["what", "µs"], ([words[name], _time(us)] for name, us in costs.items()))


def _check(part: str, rows: Iterable[Row], names: Iterable[str]) -> None:
    for number, row in enumerate(rows):
        if missing := [name for name in names if name not in row]:
            raise ValueError(f"{part}[{number}]: got no {', '.join(missing)}, needs {', '.join(names)}")


# ---- numbers as text ----


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return a table and an empty line; numbers stand to the right."""
    cells = [list(row) for row in rows]
    numeric = [column > 0 and all(_is_number(row[column]) for row in cells) for column in range(len(head))]
    marks = ["---:" if right else "---" for right in numeric]
    lines = ["| " + " | ".join(row) + " |" for row in (head, marks, *(map(_number, row) for row in cells))]
    return [*lines, ""]


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) or cell == NOTHING or (isinstance(cell, str) and cell[:1].isdigit())


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def _time(us: float | None) -> str:
    """Return microseconds with four digits at most, as far as a repetition would agree."""
    if us is None:
        return NOTHING
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 1 else f"{us:.1g}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def _share(floor_us: float | None, ours_us: float) -> str:
    return NOTHING if floor_us is None else f"{floor_us / ours_us:.0%}"


# ---- directives ----


class _FromData(SphinxDirective):
    def reports(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name of the file, its report)."""
        for file in sorted(Path(self.config.measured_data).glob("*.json")):
            self.env.note_dependency(str(file))
            yield file.name, json.loads(file.read_text(encoding="utf-8"))

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        holder = nodes.Element()
        place = self.get_source_info()[0]
        self.state.nested_parse(StringList(lines, place), self.content_offset, holder, match_titles=True)
        return holder.children


class Measured(_FromData):
    """Show every report, in the order of `TITLES`."""

    def run(self) -> list[nodes.Node]:
        """Return their sections."""
        lines: list[str] = []
        reports = {name.removesuffix(".json"): report for name, report in self.reports()}
        for name in sorted(
            reports, key=lambda name: (list(TITLES).index(name) if name in TITLES else len(TITLES), name)
        ):
            lines += [f"## {TITLES.get(name, name.replace('_', ' '))}", "", *as_markdown(reports[name])]
        return self.parsed(lines)


class _Part(_FromData):
    """Show a part of the kernels' report below the directive's own lines, or nothing."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return both, or nothing."""
        report = dict(self.reports()).get(KERNELS, {})
        return self.parsed(part(self.name, " ".join(self.arguments), list(self.content), report))


class Ladder(_Part):
    """Show the rungs of a stage."""

    required_arguments = 1


class Costs(_Part):
    """Show what launches cost."""


def part(kind: str, argument: str, words: list[str], report: dict[str, Any]) -> list[str]:
    """Return a ``{ladder} argument`` or ``{costs}`` with its `words`, for a page or a notebook; [] without numbers."""
    table = ladder_tables(report, argument) if kind == "ladder" else costs_table(report) if report.get("costs") else []
    return [*words, "", *table, *_where(report), ""] if table else []


def setup(app: Any) -> dict[str, Any]:
    """Register the directives and the folder that they read."""
    app.add_config_value("measured_data", str(Path(__file__).resolve().parents[1] / "_data"), "env", str)
    app.add_directive("measured", Measured)
    app.add_directive("ladder", Ladder)
    app.add_directive("costs", Costs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
