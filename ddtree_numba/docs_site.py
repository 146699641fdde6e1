"""The documentation site on this machine: built from a clone of the repository, served to this machine alone."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_numba.refusal import RefusedError

__all__ = ["LocalServer", "build_command", "docs", "find_sources"]

BUILDER = ("sphinx", "myst_nb", "furo", "sphinx_design", "sphinx_copybutton", "latex2mathml")
"""The modules that the extra `docs` brings."""

_STAMP = ".built"  # in the site's folder: when its last whole build began
_PAGES = ("docs", "tutorials")
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")


def docs(
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="DIR", help="The clone of the repository.", show_default="the nearest"),
    ] = None,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Serve on this port; 0 takes a free one.")] = 0,
    build_only: Annotated[bool, typer.Option("--build-only", help="Build, print the first page and end.")] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Serve without opening a browser.")] = False,
) -> None:
    """Build this project's documentation and show it.

    A minute or two where something has changed, and no network. From a clone, with the extra `docs` installed.
    """
    if not 0 <= port <= 65535:
        raise RefusedError("--port", port, "a whole number from 0 to 65535")
    root = find_sources(source)
    if missing := [name for name in BUILDER if find_spec(name) is None]:
        raise RefusedError("docs", f"no {', '.join(missing)}", f"pip install '.[docs]' in {root}")
    if build_only:
        print(_built(root) / "index.html")
        return
    site = root / ".site"
    try:
        server = LocalServer(site, port)
    except OSError as error:
        raise RefusedError("--port", f"{port} ({error.strerror})", "a free one, or 0") from None
    with server:  # the port is ours before a minute is spent on building
        _built(root)
        print(f"{server.address}/  (Ctrl-C ends)", flush=True)
        if not no_open and _has_a_screen():
            webbrowser.open(f"{server.address}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def find_sources(given: Path | None = None) -> Path:
    """Return the folder of the repository: `given`, else the nearest above the working folder or this package.

    `RefusedError` where there is none, as for an installed package outside a clone.
    """
    places = [given] if given else [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[1]]
    for place in places:
        if all((place / part).exists() for part in ("docs/conf.py", "tutorials", "ddtree_numba/__init__.py")):
            return place.resolve()
    if given:
        raise RefusedError("--source", given, "a clone of the repository, with docs/ and tutorials/")
    raise RefusedError("docs", f"no docs/ in or above {Path.cwd()}", "a clone of the repository, or --source DIR")


def build_command(site: Path, *options: str) -> list[str]:
    """Return the command that builds the site into the folder `site`, to be run in the repository's folder.

    Warnings are errors, and every page runs. `options` are further ones of `sphinx-build`.
    """
    return [sys.executable, "-m", "sphinx", "-W", "-n", *options, "-c", "docs", ".", str(site)]


def _built(root: Path) -> Path:
    """Return the folder of the clone's site, built anew where something is newer than it."""
    site = root / ".site"
    stamp = site / _STAMP
    changed = _newer_than(stamp.stat().st_mtime if stamp.exists() else -1.0, root)
    if changed:
        # A page doesn't know which code and which figures its cells use: after a change of those all pages run again.
        fresh = ["-E"] if any(file.suffix in (".py", ".json", ".toml") for file in changed) else []
        stamp.unlink(missing_ok=True)
        site.mkdir(exist_ok=True)
        began = site / ".building"
        began.touch()
        built = subprocess.run(build_command(site, *fresh), cwd=root, stdout=sys.stderr.fileno())
        if built.returncode:
            raise typer.Exit(built.returncode)  # the builder has said why
        began.replace(stamp)
    return site


def _newer_than(time: float, root: Path) -> list[Path]:
    """Return the site's sources that changed after `time`."""
    sources = [root / name for name in TEXTS]
    sources += [file for folder in (*_PAGES, "ddtree_numba") for file in (root / folder).rglob("*")]
    kinds = (".md", ".py", ".json", ".toml", ".html", ".css", ".js", ".svg", ".safetensors")
    return [file for file in sources if file.suffix in kinds and file.stat().st_mtime > time]


def _has_a_screen() -> bool:
    """Tell whether a browser's window would be seen; on a bare terminal a text browser would take it over."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


class LocalServer(http.server.ThreadingHTTPServer):
    """Serves a folder to this machine alone, and says nothing about it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Take the port, 0 for a free one; `OSError` where it can't be had."""
        super().__init__(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))

    @property
    def address(self) -> str:
        """The site's address, without a slash at its end."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """Let a reader go who has gone: the rest of a page that nobody waits for is no error."""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
