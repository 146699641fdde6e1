"""The documentation site, built once a session and served on this machine, and a Chromium to look at it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddtree_numba.docs_site import LocalServer, build_command

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_sphinx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("sphinx", "myst_nb", "furo", "latex2mathml")),
    reason="needs the site's builder: pip install '.[docs]'",
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None,
    reason="needs a browser: Debian's chromium, and pip install '.[browser]'",
)


@functools.cache
def built() -> tuple[Path, str]:
    """Build the site as the README says; return its folder and what the builder printed."""
    folder = Path(tempfile.mkdtemp(prefix="ddtree-site-"))
    command = build_command(folder, "-q")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout + done.stderr


@functools.cache
def served() -> str:
    """Serve the site on a free port of this machine; return its address."""
    server = LocalServer(built()[0])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.address


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start a Chromium without anything of its own on the network."""
    from playwright.sync_api import sync_playwright

    switches = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    switches += ["--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=switches)
        yield browser
        browser.close()


def open_page(browser: Any, path: str, **context: Any) -> tuple[Any, list[str]]:
    """Open a page of the site; return it and a list that fills with whatever goes wrong in it."""
    page = browser.new_context(**context).new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.on("response", lambda got: complaints.append(f"{got.status}: {got.url}") if got.status >= 400 else None)
    page.on(
        "request", lambda asked: None if asked.url.startswith((served(), "data:")) else complaints.append(asked.url)
    )
    page.goto(f"{served()}/{path}")
    return page, complaints
