"""The tutorials and the other executed pages, cell by cell: a failure names the line in the page."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import time
import warnings
from pathlib import Path

import pytest

from ddtree_numba.pictures.drawing import Picture
from ddtree_numba.pictures.slider import StepSlider

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for folder in ("docs", "tutorials")
    for page in (ROOT / folder).rglob("*.md")
    if "{code-cell}" in page.read_text()
)
SLOWEST_CELL = 60.0  # seconds
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?:---\n.*?^---\n|(?:^:[^\n]*\n)*)?(.*?)^```$", re.M | re.S)

pytestmark = pytest.mark.skipif(
    not PAGES, reason="the pages are not here: this is an installed package, not the repository"
)


def cells_of(page: Path) -> list[tuple[int, str]]:
    """Return (line in the page, source) of every cell."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in CELL.finditer(text)]


def run_cell(source: str, line: int, page: Path, names: dict) -> object:
    """Run a cell as Jupyter does, its lines numbered as in the page; return what its last expression gives."""
    tree = ast.parse(source, str(page))
    ast.increment_lineno(tree, line)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(page), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(page), "eval"), names) if last else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_cell_runs(page: Path) -> None:
    names: dict = {"__name__": "__main__"}
    cells = cells_of(page)
    assert len(cells) == page.read_text().count("```{code-cell}"), f"{page}: a cell that the pattern does not see"
    for line, source in cells:
        where = f"{page.relative_to(ROOT)}:{line + 1}"
        complaints, started = io.StringIO(), time.perf_counter()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(complaints),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("error")
            # On a GPU: lessons hand NumPy arrays to kernels, and the first of them says that this costs copies.
            warnings.filterwarnings("ignore", message="Host array used in CUDA kernel")
            shown = run_cell(source, line, page, names)
            if isinstance(shown, Picture | StepSlider):
                assert "nan" not in str(shown).lower(), f"{where}: a number in the picture is NaN"
        took = time.perf_counter() - started
        assert took < SLOWEST_CELL, f"{where}: took {took:.0f} s"
        assert not complaints.getvalue(), f"{where}: printed to stderr: {complaints.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_command_at_the_end_names_what_is_there(page: Path) -> None:
    for path in re.findall(r"^\$ pytest (\S+)", page.read_text(), re.M):
        file, _, test = path.partition("::")
        assert (ROOT / file).exists(), f"{page.name}: {file} is not there"
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{page.name}: {path} is not there"


def test_a_failing_cell_names_its_line_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```{code-cell} python\n---\ntags: [hide-cell]\n---\na = 1\n1 / 0\n```\n")
    [(line, source)] = cells_of(page)
    with pytest.raises(ZeroDivisionError) as caught:
        run_cell(source, line, page, {})
    assert caught.traceback[-1].lineno + 1 == 8
