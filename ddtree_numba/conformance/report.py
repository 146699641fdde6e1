"""The outcome of a run, as a table, JSON and JUnit XML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from rich.table import Table
from rich.text import Text

from ddtree_numba.conformance.runner import FAILED, PASSED, UNSUPPORTED, Result

__all__ = ["as_json", "as_junit", "as_table", "exit_code"]


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 when something passed and nothing failed, else 1: a run that checked nothing proves nothing."""
    counts = Counter(result.status for result in results)
    return 0 if counts[PASSED] and not counts[FAILED] else 1


def as_table(results: Sequence[Result], every: bool = False) -> Table:
    """Return a row for each failed case (with `every`, for each case) and one for each stage."""
    table = Table()
    for title in ("case", "result", "why"):
        table.add_column(title, overflow="fold")
    for result in results:
        if every or result.status == FAILED:
            table.add_row(Text(result.case), Text(result.status, style=_STYLES[result.status]), Text(_why(result)))
    if table.row_count:
        table.add_section()
    for stage in dict.fromkeys(result.stage for result in results):
        of_stage = [result for result in results if result.stage == stage]
        table.add_row(Text(stage, style="bold"), Text(_counts(of_stage)), Text(_left_out(of_stage)))
    table.caption = f"all {len(results)} cases: {_counts(results)}"
    if mistakes := Counter(result.mistakes[0] for result in results if len(result.mistakes) == 1):
        told = ", ".join(f"{name} ({count} cases)" for name, count in mistakes.most_common())
        table.caption += f"\nanswers are exactly those of: {told}"
    return table


_STYLES = {PASSED: "green", FAILED: "red", UNSUPPORTED: "dim"}


def _why(result: Result) -> str:
    if result.status != FAILED:
        return _left_out([result])
    named = f" (as: {'; '.join(result.mistakes)})" if result.mistakes else ""
    return f"{result.difference}\nrule {result.rule}{named}: {result.detail}"


def _counts(results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in (PASSED, FAILED, UNSUPPORTED) if counts[status])


def _left_out(results: Sequence[Result]) -> str:
    names = dict.fromkeys(name for result in results if result.status == PASSED for name in result.left_out)
    return f"not compared, because not returned: {', '.join(names)}" if names else ""


def as_json(results: Sequence[Result], engine: str) -> dict[str, Any]:
    """Return the outcome as what `json.dumps` takes."""
    counts = Counter(result.status for result in results)
    return {
        "engine": engine,
        "passed": counts[PASSED],
        "failed": counts[FAILED],
        "not_supported": counts[UNSUPPORTED],
        "cases": [result._asdict() for result in results],
    }


def as_junit(results: Sequence[Result], engine: str) -> str:
    """Return the outcome as JUnit XML: a suite for each stage."""
    root = ElementTree.Element("testsuites", name="ddtree conformance")
    for stage in dict.fromkeys(result.stage for result in results):
        of_stage = [result for result in results if result.stage == stage]
        counts = Counter(result.status for result in of_stage)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=stage,
            tests=str(len(of_stage)),
            failures=str(counts[FAILED]),
            errors="0",
            skipped=str(counts[UNSUPPORTED]),
            time=f"{sum(result.seconds for result in of_stage):.6f}",
        )
        for result in of_stage:
            _add_case(suite, result, engine)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, result: Result, engine: str) -> None:
    name = result.case.partition("/")[2]
    where = {"classname": f"ddtree.{result.stage}", "name": name, "time": f"{result.seconds:.6f}"}
    case = ElementTree.SubElement(suite, "testcase", where)
    if result.status == FAILED:
        failure = ElementTree.SubElement(case, "failure", message=_clean(result.difference), type=result.rule)
        failure.text = _clean(f"{_why(result)}\nguards against: {result.guards}\nengine: {engine}")
    elif result.status == UNSUPPORTED:
        ElementTree.SubElement(case, "skipped", message="not supported")


def _clean(text: str) -> str:
    """Replace what XML can't hold."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
