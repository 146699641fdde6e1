"""The site builds without a warning and a network, and its pages work in a browser, on a phone and on paper."""

from __future__ import annotations

import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.site import ROOT, built, chromium, needs_browser, needs_sphinx, open_page

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


def test_pages_are_light() -> None:
    for page in pages():
        files = [
            page,
            *(
                (page.parent / t.partition("?")[0]).resolve()
                for t in links_of(page).targets
                if ".js" in t or ".css" in t
            ),
        ]
        weight = sum(file.stat().st_size for file in set(files) if file.is_file())
        assert weight < HEAVIEST_PAGE, f"{page.name}: {weight} bytes"


def test_every_stage_has_its_page() -> None:
    for module in (ROOT / "ddtree_numba" / "stages").glob("[!_]*"):
        assert (built()[0] / "docs" / "reference" / f"{module.stem}.html").exists(), module.stem


def test_every_public_name_is_in_the_reference() -> None:
    inventory = zlib.decompress((built()[0] / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split(" ", 1)[0].rpartition(".")[2] for line in inventory.splitlines()}
    gaps: list[str] = []
    for file in sorted((ROOT / "ddtree_numba").rglob("*.py")):
        if file.stem not in ("cli", "show"):
            listed = re.search(r"^__all__ = \[(.*?)\]", file.read_text(), re.S | re.M)
            names = re.findall(r'"(\w+)"', listed[1]) if listed else []
            missing = [name for name in names if name not in documented and not name.startswith(("launch_", "__"))]
            gaps += [f"{file.relative_to(ROOT)}: {missing}"] if missing else []
    assert not gaps, gaps


@needs_browser
def test_every_page_opens_without_an_error_and_fits_a_phone() -> None:
    with chromium() as browser:
        for file in pages():
            if file.parent == built()[0]:
                continue  # the redirect, the search page and the index of names
            path = file.relative_to(built()[0]).as_posix()
            page, complaints = open_page(browser, path, viewport={"width": 390, "height": 800})
            assert not complaints, f"{path}: {complaints}"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path}: scrolls sideways"
            page.context.close()


@needs_browser
def test_the_slider_moves_by_keyboard_and_mouse() -> None:
    with chromium() as browser:
        page, complaints = open_page(browser, "tutorials/03_best_first_tree.html")
        slider, output = page.locator(".ddt-bar input").first, page.locator(".ddt-bar output").first
        seen = page.locator("figure.ddt-steps").first.locator("li:visible")
        assert output.inner_text() == "step 1 of 8" and seen.count() == 1
        before = seen.inner_text()
        slider.focus()
        page.keyboard.press("ArrowRight")
        assert output.inner_text() == "step 2 of 8" and seen.count() == 1 and seen.inner_text() != before
        assert slider.get_attribute("aria-valuetext") == seen.locator(".ddt-caption").inner_text()
        page.keyboard.press("End")
        assert output.inner_text() == "step 8 of 8"
        slider.click(position={"x": 2, "y": slider.bounding_box()["height"] / 2})
        assert output.inner_text() == "step 1 of 8"
        assert not complaints


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
    assert "ddtree-numba==" in notebook.cells[0].source
    assert not re.search(r"\{(code-cell|source-of|literalinclude)\}", str(notebook)), (
        "a directive that Jupyter can't show"
    )
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    ).execute()
    said = [str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("kernels run on" in text for text in said), "does not say what it ran on"
    assert not any("'stderr'" in text for text in said), "printed to stderr"
