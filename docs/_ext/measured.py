"""``{measured}``: tables of what the scripts measured, from every JSON file in `docs/_data`; no number is typed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

DATA = Path(__file__).resolve().parents[1] / "_data"


def as_markdown(report: dict[str, Any]) -> list[str]:
    """Return one report as lines of MyST: where and when, then runs of a decode, or counts and measured numbers."""
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    lines = [f"On {report['machine']}, {report['date']}. {versions}.", ""]
    if tests := report.get("tests"):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in tests.items())
        lines += [f"Tests: {counts}; {report.get('gpu_tests', 0)} of them need a GPU.", ""]
    if runs := report.get("runs"):
        same = "the same text in every mode" if report["identical"] else "the modes differ"
        lines += [f"Prompt `{report['prompt']}`, stages in {report['backend']}; {same}.", ""]
        columns = [name for name in runs[0] if isinstance(runs[0][name], (int, float)) or name == "mode"]
        lines += ["| " + " | ".join(name.replace("_", " ") for name in columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(_number(run[name]) for name in columns) + " |" for run in runs] + [""]
    if measured := report.get("measured"):
        for names in dict.fromkeys(tuple(numbers) for numbers in measured.values()):
            alike = {test.rpartition("/")[2]: n for test, n in measured.items() if tuple(n) == names}
            lines += [*_table(names, alike), ""]
    return lines


def _table(names: tuple[str, ...], measured: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of what was measured alike: a row for each measurement, or, of a single one, for each number."""
    words = [name.replace("_", " ") for name in names]
    if len(measured) == 1:
        [(where, numbers)] = measured.items()
        rows = [[word, _number(value)] for word, value in zip(words, numbers.values(), strict=True)]
        head = [where, "measured"]
    else:
        rows = [[f"`{where}`", *map(_number, numbers.values())] for where, numbers in measured.items()]
        head = ["where", *words]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class Measured(SphinxDirective):
    """Show every report, newest first."""

    def run(self) -> list[nodes.Node]:
        """Return their sections."""
        reports = []
        for file in DATA.glob("*.json"):
            self.env.note_dependency(str(file))
            reports.append((file.stem.replace("_", " "), json.loads(file.read_text())))
        lines: list[str] = []
        for name, report in sorted(reports, key=lambda item: item[1]["date"], reverse=True):
            lines += [f"## {name}", "", *as_markdown(report)]
        holder = nodes.Element()
        self.state.nested_parse(StringList(lines, str(DATA)), self.content_offset, holder, match_titles=True)
        return holder.children


def _entry(app: Any, docname: str, source: list[str]) -> None:
    """Put the page into the site's contents when there is something on it."""
    if docname == app.config.root_doc and any(DATA.glob("*.json")):
        source[0] = source[0].replace("\ntroubleshooting\n", "\nmeasured\ntroubleshooting\n")


def setup(app: Any) -> dict[str, Any]:
    """Register the directive and the page's entry."""
    app.add_directive("measured", Measured)
    app.connect("source-read", _entry)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
