"""Every tutorial as a notebook to take away: written beside its page, and linked from it.

A notebook stands alone: its first cell installs the released package where it is missing, code that the page includes
from a file is shown by a cell, from the installed package, and what was measured is a table in its text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
from measured import KERNELS, part

_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.S)
_BLOCK = re.compile(r"^```\{(code-cell|source-of|ladder|costs)\} *([^\n]*)\n(.*?)^```$", re.M | re.S)
_OPTIONS = re.compile(r"\A---\n(.*?)^---\n", re.M | re.S)
_PAGE_LINK = re.compile(r"\]\((\d\d_\w+)\.md\)")

_FIRST_CELL = '''\
try:
    import ddtree_numba
except ModuleNotFoundError:
    extra = ""  # with a GPU "[cu12]" or "[cu13]": what nvidia-smi says at its top
    %pip install -q "ddtree-numba{extra}==VERSION"

import importlib
import inspect

from IPython.display import Markdown


def source_of(name):
    """Show the source of an object, from the file that runs."""
    module, _, attribute = name.rpartition(".")
    target = getattr(importlib.import_module(module), attribute)
    return Markdown("```python\\n" + inspect.getsource(inspect.unwrap(target)) + "```")'''


def to_notebook(text: str, version: str, report: dict[str, Any]) -> nbformat.NotebookNode:
    """Return the notebook of a tutorial's MyST `text`, with its share of the kernels' `report`."""
    cells = [nbformat.v4.new_code_cell(_FIRST_CELL.replace("VERSION", version))]
    text = _FRONT_MATTER.sub("", text)
    position = 0
    for block in _BLOCK.finditer(text):
        cells += _markdown(text[position : block.start()])
        kind, argument, body = block.groups()
        if kind == "source-of":
            cells.append(nbformat.v4.new_code_cell(f'source_of("{argument}")'))
        elif kind == "code-cell":
            cells.append(_code(body))
        else:
            cells += _markdown("\n".join(part(kind, argument, body.splitlines(), report)))
        position = block.end()
    cells += _markdown(text[position:])
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same at every build
    return notebook


def _markdown(text: str) -> list[nbformat.NotebookNode]:
    text = _PAGE_LINK.sub(r"](\1.ipynb)", text).strip()
    text = re.sub(r"\]\((\.\./docs/[\w/]+)\.md\)", r"](\1.html)", text)
    return [nbformat.v4.new_markdown_cell(text)] if text else []


def _code(body: str) -> nbformat.NotebookNode:
    options = _OPTIONS.match(body)
    cell = nbformat.v4.new_code_cell(body[options.end() if options else 0 :].strip())
    if options and "hide-cell" in options[1]:
        cell.metadata["tags"] = ["hide-cell"]
        cell.metadata["jupyter"] = {"source_hidden": True}
    return cell


def _link(app: Any, docname: str, source: list[str]) -> None:
    """Put the link below a tutorial's heading."""
    if docname.startswith("tutorials/"):
        name = docname.partition("/")[2]
        link = (
            f'\n\n```{{raw}} html\n<p><a href="{name}.ipynb" download>Take this page away as a notebook</a></p>\n```\n'
        )
        source[0] = re.sub(r"^# .*$", lambda heading: heading[0] + link, source[0], count=1, flags=re.M)


def _write(app: Any, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        measured = Path(app.config.measured_data, KERNELS)
        report = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {}
        for page in sorted(Path(app.srcdir, "tutorials").glob("*.md")):
            target = Path(app.outdir, "tutorials", page.with_suffix(".ipynb").name)
            nbformat.write(to_notebook(page.read_text(), app.config.version, report), target)


def setup(app: Any) -> dict[str, Any]:
    """Register both steps."""
    app.connect("source-read", _link)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
