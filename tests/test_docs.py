"""The site builds without a warning and a network, and its pages work in a browser, on a phone and on paper."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import pkgutil
import re
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import ddtree_numba
from tests.site import ROOT, built, chromium, needs_browser, needs_sphinx, open_page
from tests.test_docstrings import public_names

pytestmark = [
    needs_sphinx,
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the pages are not here: an installed package"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the browser's driver
]

HEAVIEST_PAGE = 1_500_000  # bytes


def pages() -> list[Path]:
    return sorted(built()[0].rglob("*.html"))


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name == "id" and value:
                self.anchors.add(value)


def links_of(page: Path) -> _Links:
    links = _Links()
    links.feed(page.read_text())
    return links


def test_the_site_builds_without_a_warning() -> None:
    folder, said = built()
    assert "WARNING: " not in said.replace("[IPKernelApp] WARNING", "")
    assert (folder / "docs" / "index.html").exists() and (folder / "index.html").exists()


def test_every_tutorial_is_there_and_ran() -> None:
    for source in sorted((ROOT / "tutorials").glob("*.md")):
        page = (built()[0] / "tutorials" / source.with_suffix(".html").name).read_text()
        assert "kernels run on: simulator" in page, f"{source.name}: does not say what it ran on"
        assert "Traceback" not in page, f"{source.name}: shows a traceback"


def test_links_inside_the_site_lead_somewhere() -> None:
    known = {page: links_of(page) for page in pages()}
    for page, links in known.items():
        for target in links.targets:
            if re.match(r"[a-z]+:|//", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path.partition("?")[0]).resolve() if path else page
            assert file.exists(), f"{page.name}: {target} leads nowhere"
            if anchor and file in known:
                assert anchor in known[file].anchors, f"{page.name}: {target} has no such place"


def test_no_page_asks_the_network_for_anything() -> None:
    for page in pages():
        asked = re.findall(r"""(?:src=|<link[^>]*href=|@import |url\()["']?(https?://[^"') >]+)""", page.read_text())
        assert not asked, f"{page.name}: {asked}"


def test_no_page_names_a_folder_of_the_machine_that_built_it() -> None:
    for page in pages():
        assert str(ROOT) not in page.read_text(), page.name


def test_links_out_of_the_site_are_whole() -> None:
    """What can be told without a network; `sphinx-build -b linkcheck` asks each of them (CONTRIBUTING.md)."""
    papers = set(re.findall(r"arxiv\.org/abs/\d{4}\.\d{5}\b", (ROOT / "docs" / "bibliography.md").read_text()))
    for page in pages():
        for target in (target for target in links_of(page).targets if re.match(r"[a-z]+:|//", target)):
            if target.startswith("data:"):
                continue
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./~%#?&=+-]*)?", target), f"{page.name}: {target}"
            assert "github.com" not in target or re.fullmatch(
                r"https://github\.com/[\w.-]+/[\w.-]+((/(issues|pull)/\d+|/(blob|tree)/.+))?", target
            ), f"{page.name}: {target}"
            paper = re.search(r"arxiv\.org/.*", target)
            assert not paper or paper[0] in papers, f"{page.name}: {target} is not in the bibliography"


def test_every_stage_has_its_page() -> None:
    for module in (ROOT / "ddtree_numba" / "stages").glob("[!_]*"):
        assert (built()[0] / "docs" / "reference" / f"{module.stem}.html").exists(), module.stem


def test_every_public_name_is_in_the_reference() -> None:
    inventory = zlib.decompress((built()[0] / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    entries = {line.split(" ", 1)[0] for line in inventory.splitlines() if " py:" in line}
    documented: dict[str, list[object]] = {}
    for entry in entries:
        documented.setdefault(entry.rpartition(".")[2], []).append(resolved(entry))
    gaps: list[str] = []
    modules = [info.name for info in pkgutil.walk_packages(ddtree_numba.__path__, "ddtree_numba.")]
    for module_name in ("ddtree_numba", *modules):
        source = Path(importlib.util.find_spec(module_name).origin)
        module = None
        with contextlib.suppress(ImportError):  # a bridge needs the package that it leads to
            module = importlib.import_module(module_name)
        for name in public_names(ast.parse(source.read_text(encoding="utf-8"))):
            here = getattr(module, name, None)  # an intrinsic is not there without a GPU
            same = [
                other for other in documented.get(name, ()) if other is here or (not callable(here) and other == here)
            ]
            if f"{module_name}.{name}" not in entries and not (here is not None and same):
                gaps.append(f"{module_name}.{name}")
    assert not gaps, gaps


def test_every_array_of_a_kernel_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    lines = ["Do it.", "", "pool (B, N float32, any order): changed,", "in place.", "table (B int32), w (B uint32)."]
    lines += ["sizes (Sizes).", "Launch: grid B."]
    importlib.import_module("source_of")._arrays_as_list(None, "function", "kernel", None, None, lines)
    assert [line for line in lines if line] == [
        "Do it.",
        "- ``pool (B, N float32, any order)``: changed,",
        "  in place.",
        "- ``table (B int32), w (B uint32)``.",
        "- ``sizes (Sizes)``.",
        "- **Launch**: grid B.",
    ]


def resolved(entry: str) -> object:
    """Return the object of a dotted name, None for what is there on a GPU alone."""
    parts = entry.split(".")
    for cut in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found: object = importlib.import_module(".".join(parts[:cut]))
            for part in parts[cut:]:
                found = getattr(found, part, None)
            return found
    return None


@needs_browser
def test_every_page_opens_without_an_error_is_light_and_fits_a_phone_and_a_desk() -> None:
    with chromium() as browser:
        page, _ = open_page(browser, "index.html")  # sends its reader on
        page.wait_for_url("**/docs/index.html")
        for file in pages():
            path = file.relative_to(built()[0]).as_posix()
            if path == "index.html":
                continue
            page, complaints = open_page(browser, path, viewport={"width": 390, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path}: scrolls sideways"
            weight = page.evaluate(WEIGHT)
            assert 0 < weight < HEAVIEST_PAGE, f"{path}: {weight} bytes"
            page.set_viewport_size({"width": 1280, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path}: scrolls sideways"
            assert not complaints, f"{path}: {complaints}"
            page.context.close()


# Everything that the page has fetched, uncompressed: itself, scripts, styles, pictures.
WEIGHT = """[...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce((sum, entry) => sum + entry.decodedBodySize, 0)"""


@needs_browser
def test_every_slider_moves_by_keyboard_and_mouse() -> None:
    sliders = 0
    with chromium() as browser:
        for file in (file for file in pages() if "ddt-steps" in file.read_text()):
            path = file.relative_to(built()[0]).as_posix()
            page, complaints = open_page(browser, path)
            for figure in page.locator("figure.ddt-steps").all():
                slider, output, seen = figure.locator("input"), figure.locator("output"), figure.locator("li:visible")
                steps = figure.locator("li").count()
                slider.focus()
                page.keyboard.press("Home")
                assert output.inner_text() == f"step 1 of {steps}" and seen.count() == 1, path
                before = seen.inner_html()
                page.keyboard.press("ArrowRight")
                assert output.inner_text() == f"step 2 of {steps}" and seen.count() == 1, path
                assert seen.inner_html() != before, f"{path}: a step that shows nothing new"
                assert slider.get_attribute("aria-valuetext") == seen.locator(".ddt-caption").inner_text(), path
                page.keyboard.press("End")
                assert output.inner_text() == f"step {steps} of {steps}", path
                slider.click(position={"x": 2, "y": slider.bounding_box()["height"] / 2})
                assert output.inner_text() == f"step 1 of {steps}", path
                sliders += 1
            assert not complaints, f"{path}: {complaints}"
            page.context.close()
    assert sliders >= 6, "heap, bitmask, softmax, walk, commit and the stride"


@needs_browser
def test_without_a_script_and_on_paper_all_steps_are_there() -> None:
    with chromium() as browser:
        page, _ = open_page(browser, "tutorials/03_best_first_tree.html", java_script_enabled=False)
        figure = page.locator("figure.ddt-steps").first
        assert figure.locator("li:visible").count() == 8 and not figure.locator("input").is_visible()
        page, _ = open_page(browser, "tutorials/03_best_first_tree.html")
        page.emulate_media(media="print")
        figure = page.locator("figure.ddt-steps").first
        assert figure.locator("li:visible").count() == 8 and not figure.locator("input").is_visible()


@needs_browser
def test_pictures_follow_the_theme_switch() -> None:
    def colours(page) -> tuple[str, str]:
        style = "(e) => getComputedStyle(e)"
        ink = page.locator("figure svg text").first.evaluate(
            f"({style})(document.querySelector('figure svg text')).fill"
        )
        return ink, page.evaluate(f"({style})(document.body).backgroundColor")

    with chromium() as browser:
        page, _ = open_page(
            browser, "tutorials/03_best_first_tree.html", color_scheme="light", viewport={"width": 1200, "height": 800}
        )
        light = colours(page)
        for _ in range(3):  # the switch goes round: auto, and both themes
            page.locator("button.theme-toggle:visible").first.click()
            if page.evaluate("document.body.dataset.theme") == "dark":
                break
        dark = colours(page)
        assert light[0] != dark[0] and light[1] != dark[1]


@needs_browser
def test_search_finds_the_bonus_token() -> None:
    with chromium() as browser:
        page, complaints = open_page(browser, "search.html?q=bonus+token")
        page.wait_for_selector("ul.search li a")
        found = page.locator("ul.search li a").all_inner_texts()
        assert any("accept walk" in title.lower() for title in found), found
        assert not complaints


@pytest.mark.parametrize("name", [page.stem for page in sorted((ROOT / "tutorials").glob("*.md"))])
def test_the_notebook_to_take_away_runs(name: str) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(built()[0] / "tutorials" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert f'%pip install -q "ddtree-numba{{extra}}=={ddtree_numba.__version__}"' in notebook.cells[0].source
    assert not re.search(r"\{(code-cell|source-of|literalinclude)\}", str(notebook)), (
        "a directive that Jupyter can't show"
    )
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    ).execute()
    said = [str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("kernels run on" in text for text in said), "does not say what it ran on"
    assert not any("'stderr'" in text for text in said), "printed to stderr"


def test_the_first_cell_of_a_notebook_installs_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from IPython.core.interactiveshell import InteractiveShell

    notebook = nbformat.read(built()[0] / "tutorials" / "00_a_first_kernel.ipynb", as_version=4)
    asked: list[str] = []
    shell = InteractiveShell()
    shell.register_magic_function(asked.append, magic_name="pip")
    shell.run_cell(notebook.cells[0].source)
    assert asked == [], "it is here already"
    monkeypatch.setitem(sys.modules, "ddtree_numba", None)  # as where it is not installed
    shell.run_cell(notebook.cells[0].source)
    shell.run_cell(notebook.cells[0].source.replace('extra = ""', 'extra = "[cu13]"'))
    version = ddtree_numba.__version__
    assert asked == [f'install -q "ddtree-numba{extra}=={version}"' for extra in ("", "[cu13]")]
