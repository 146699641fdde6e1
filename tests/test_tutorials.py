"""The tutorials and the other executed pages, cell by cell: a failure names the line in the page."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import signal
import warnings
from collections.abc import Iterator
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
    if source.startswith("%%writefile "):
        name, _, content = source.removeprefix("%%writefile ").partition("\n")
        Path(name.strip()).write_text(content)
        return None
    tree = ast.parse(source, str(page))
    ast.increment_lineno(tree, line)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(page), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(page), "eval"), names) if last else None


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the running line after `seconds`: a cell that never ends must not hold up the suite."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_page(page: Path, slowest: float = SLOWEST_CELL) -> None:
    """Run a page's cells in order; whatever one of them does wrong is an error that names its line in the page."""
    names: dict = {"__name__": "__main__"}
    cells = cells_of(page)
    assert len(cells) == page.read_text().count("```{code-cell}"), f"{page}: a cell that the pattern does not see"
    for line, source in cells:
        where = f"{page.name}:{line + 1}"
        complaints = io.StringIO()
        with (
            at_most(slowest),
            warnings.catch_warnings(),
            contextlib.redirect_stderr(complaints),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("error")
            # On a GPU: lessons hand NumPy arrays to kernels, and the first of them says that this costs copies.
            warnings.filterwarnings("ignore", message=".*Host array used in CUDA kernel")
            shown = run_cell(source, line, page, names)
            if isinstance(shown, Picture | StepSlider):
                assert "nan" not in str(shown).lower(), f"{where}: a number in the picture is NaN"
        assert not complaints.getvalue(), f"{where}: printed to stderr: {complaints.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_cell_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # a page may go to a folder of its own
    check_page(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_command_at_the_end_names_what_is_there(page: Path) -> None:
    for path in re.findall(r"^\$ pytest (\S+)", page.read_text(), re.M):
        file, _, test = path.partition("::")
        assert (ROOT / file).exists(), f"{page.name}: {file} is not there"
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{page.name}: {path} is not there"


@pytest.mark.parametrize(
    "bad, error, words",
    [
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("assert a == 2", AssertionError, "^$"),
        ("import warnings; warnings.warn('beware')", UserWarning, "beware"),
        ("while True: pass", TimeoutError, "took more than 0.5 s"),
    ],
)
def test_a_bad_cell_names_its_line_in_the_page(tmp_path: Path, bad: str, error: type, words: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n```{{code-cell}} python\n---\ntags: [hide-cell]\n---\na = 1\n{bad}\n```\n")
    with pytest.raises(error, match=words) as caught:
        check_page(page, slowest=0.5)
    [place] = [entry.lineno + 1 for entry in caught.traceback if str(entry.path) == str(page)]
    assert place == 8


def test_a_cell_that_prints_to_stderr_or_draws_nan_names_its_line_too(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "# Title\n\n```{code-cell} python\n"
    page.write_text(f"{head}import sys\nprint('beware', file=sys.stderr)\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:4: printed to stderr: beware"):
        check_page(page)
    page.write_text(
        f"{head}from ddtree_numba.pictures import bar_chart\nbar_chart([1.0, float('nan')], 'ab', y_label='y')\n```\n"
    )
    with pytest.raises(AssertionError, match=r"page\.md:4: a number in the picture is NaN"):
        check_page(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_that_is_shown_fits_its_box(page: Path) -> None:
    for line, source in cells_of(page):
        before = page.read_text().splitlines()[:line]
        if any("remove-input" in text for text in before[-4:]):
            continue
        for number, text in enumerate(source.splitlines(), line + 1):
            assert len(text) <= 110, f"{page.name}:{number}: {len(text)} columns"


@pytest.mark.parametrize("page", sorted((ROOT / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_has_its_parts(page: Path) -> None:
    text = page.read_text()
    parts = [
        "\n**Goal.** ",
        "\n**Before this.** ",
        "\n## Exercises\n",
        "\n## What goes wrong\n",
        "\n## The command that proves it\n",
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), dict(zip(parts, places, strict=True))
    exercises = text[places[2] : places[3]]
    answers = re.findall(r"^tags: \[hide-cell\]$", exercises, re.M)
    assert len(answers) == len(re.findall(r"^\*\*\d\.\*\* ", exercises, re.M)) in (1, 2), (
        "an exercise without its answer"
    )
    assert "https://github.com/" in text[places[3] : places[4]], "a bug that really happened, and where"
    assert "kernels run on" in text
