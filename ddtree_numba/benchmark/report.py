"""The report of a run: rows, ladder and costs as JSON, and the table that a terminal shows."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import platform
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from rich.table import Table

from ddtree_numba.backend import describe
from ddtree_numba.benchmark.attention import AttentionCase
from ddtree_numba.benchmark.candidates import TopCase
from ddtree_numba.benchmark.case import Case, Tools
from ddtree_numba.benchmark.ceilings import Ceilings
from ddtree_numba.benchmark.costs import COSTS
from ddtree_numba.benchmark.ladder import LADDERS, PREDICTED_US, Ladder
from ddtree_numba.benchmark.rounds import RoundCase
from ddtree_numba.benchmark.trees import TreeCase

__all__ = ["CASES", "PARTS", "Progress", "count_steps", "make_report", "summary"]

CASES: tuple[Case, ...] = (
    TopCase("top_b64", 64),
    TopCase("top_b1", 1),
    TreeCase("tree_b1_n64", 1, 64),
    TreeCase("tree_b64_n64", 64, 64),
    TreeCase("tree_b1_n1024", 1, 1024),
    RoundCase("round_b1"),
    AttentionCase(8, 33, 64, 8192),
    AttentionCase(1, 33, 64, 65536),
    AttentionCase(1, 33, 64, 8192),
    AttentionCase(16, 33, 8, 8192),
    AttentionCase(1, 17, 64, 2048),
)
"""The lines of the table."""

PARTS: tuple[str, ...] = (*(case.id for case in CASES), *(ladder.id for ladder in LADDERS), "costs")
"""What can be chosen, in the order of the report."""

Progress = Callable[[str], None]
"""Is told what is measured next."""

_PACKAGES = ("ddtree-numba", "numpy", "numba", "numba-cuda", "cuda-bindings", "torch")


def count_steps(parts: Collection[str]) -> int:
    """Return how often `make_report` of `parts` calls its `progress`."""
    rungs = sum(1 + len(ladder.rungs) for ladder in LADDERS if ladder.id in parts)
    return sum(case.id in parts for case in CASES) + rungs + ("costs" in parts) * len(COSTS)


def make_report(parts: Collection[str], tools: Tools, ceilings: Ceilings, progress: Progress) -> dict[str, Any]:
    """Measure `parts`; what fails stands in "failed" with its reason, and the others go on."""
    report: dict[str, Any] = {
        "machine": describe(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "ceilings": ceilings.as_json(),
        "rows": [],
        "ladder": [],
        "costs": {},
        "skipped": {} if tools.torch else {"torch": "not installed, or it sees no GPU: its columns are empty"},
        "failed": {},
    }

    def attempt(name: str, what: Callable[[], None]) -> None:
        progress(name)
        try:
            what()
        except Exception as error:  # of any library, and the next line must not suffer for it
            report["failed"][name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        gc.collect()

    for case in CASES:
        if case.id in parts:
            attempt(case.id, partial(_add_row, report, case, tools, ceilings))
    for ladder in LADDERS:
        if ladder.id in parts:
            _climb(ladder, tools, ceilings, report["ladder"], attempt)
    if "costs" in parts:
        for number, cost in enumerate(COSTS):
            attempt(f"costs, {number + 1} of {len(COSTS)}", partial(_add_cost, report, cost, tools))
    return report


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _add_cost(report: dict[str, Any], cost: Callable[[Tools], dict[str, float]], tools: Tools) -> None:
    report["costs"].update(cost(tools))


def _add_row(report: dict[str, Any], case: Case, tools: Tools, ceilings: Ceilings) -> None:
    prepared = case.prepare(tools)
    error = prepared.check()
    ours = prepared.time()
    peers: dict[str, float | None] = dict.fromkeys(case.peer_names)
    peer_errors: dict[str, float] = {}
    for name, measure in prepared.peers().items():
        try:
            peers[name] = measure()
            peer_errors = peer_errors or dict(prepared.peer_errors())
        except Exception as fault:  # a peer that can't do it is no fault of ours
            report["skipped"][f"{name} on {case.id}"] = " ".join(f"{type(fault).__name__}: {fault}".split())[:200]
    row = {
        "id": case.id,
        "work": case.work,
        "ours_us": ours,
        "floor_us": ceilings.floor_us(prepared.read_and_written, prepared.flop),
        "peers": peers,
        "max_rel_error": error,
        "peer_errors": peer_errors,
    }
    report["rows"].append(row)


def _climb(
    ladder: Ladder, tools: Tools, ceilings: Ceilings, rows: list[dict[str, Any]], attempt: Callable[..., None]
) -> None:
    prepared: list[Any] = []
    attempt(ladder.id, lambda: prepared.append(ladder.case.prepare(tools)))

    def rung_row(rung: str) -> None:
        prepared[0].check(rung)
        rows.append(
            {
                "id": ladder.case.id,
                "stage": ladder.stage,
                "rung": rung,
                "predicted_us": PREDICTED_US.get((ladder.stage, rung)),
                "ours_us": prepared[0].time(rung),
                "floor_us": ceilings.floor_us(prepared[0].read_and_written, prepared[0].flop),
                "bytes_read": ladder.bytes_read(rung),
                "flop": prepared[0].flop or None,
                "changed": ladder.changed(rung),
            }
        )

    for rung in ladder.rungs if prepared else ():
        attempt(f"{ladder.id}: {rung}", partial(rung_row, rung))


def summary(report: dict[str, Any]) -> list[Table | str]:
    """Return what a terminal shows of a report."""
    parts: list[Table | str] = []
    if report["rows"]:
        table = _table("id", "ours µs", "floor µs", "of floor", "peer", "peer µs", "ratio", "error")
        for row in report["rows"]:
            ours, floor = row["ours_us"], row["floor_us"]
            lead = [row["id"], _us(ours), _us(floor), f"{floor / ours:.0%}"]
            for name, us in row["peers"].items():
                ratio = "" if us is None else f"{us / ours:.2f}x"
                table.add_row(*lead, name, _us(us), ratio, f"{row['max_rel_error']:.1e}" if lead[0] else "")
                lead = [""] * 4
        parts.append(table)
    if report["ladder"]:
        table = _table("stage", "rung", "predicted µs", "µs", "floor µs", "read MB")
        for row in report["ladder"]:
            read = "" if row["bytes_read"] is None else f"{row['bytes_read'] / 1e6:,.4g}"
            times = _us(row["predicted_us"]), _us(row["ours_us"]), _us(row["floor_us"])
            table.add_row(row["stage"], row["rung"], *times, read)
        parts.append(table)
    if report["costs"]:
        table = _table("cost", "µs")
        for name, us in report["costs"].items():
            table.add_row(name.removesuffix("_us"), _us(us))
        parts.append(table)
    rates = {name: value for name, value in report["ceilings"].items() if value is not None}
    parts.append("floors from: " + ", ".join(f"{name} {value:.4g}" for name, value in rates.items()))
    parts += [f"skipped: {name}: {reason}" for name, reason in report["skipped"].items()]
    parts += [f"FAILED: {name}: {reason}" for name, reason in report["failed"].items()]
    return parts


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(titles):
        words = place == 0 or title in ("peer", "rung")
        table.add_column(title, justify="left" if words else "right", no_wrap=True)
    return table


def _us(us: float | None) -> str:
    if us is None:
        return "–"
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 1 else f"{us:.1g}"
