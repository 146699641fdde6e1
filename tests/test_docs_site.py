"""`ddtree docs`, on a clone of one page: built once, built again after a change, served, refused in one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from ddtree_numba import docs_site
from ddtree_numba.refusal import RefusedError
from tests.site import ROOT, needs_sphinx

COMMAND = [sys.executable, "-m", "ddtree_numba.cli", "docs"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    for folder in ("docs", "tutorials", "ddtree_numba"):
        (root / folder).mkdir(parents=True)
    (root / "ddtree_numba" / "__init__.py").touch()
    settings = ['root_doc = "index"', 'extensions = ["myst_parser"]', 'include_patterns = ["index.md", "docs/**"]']
    (root / "docs" / "conf.py").write_text("\n".join(settings))
    (root / "index.md").write_text("# The title\n\nfirst words\n")
    for name in docs_site.TEXTS:
        (root / name).touch()
    (root / ".site").mkdir()
    return root


def run(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)


@needs_sphinx
def test_it_builds_what_has_changed(clone: Path) -> None:
    page, stamp = clone / ".site" / "index.html", clone / ".site" / ".built"
    done = run("--source", clone, "--build-only")
    assert done.returncode == 0 and done.stdout == f"{page}\n", done.stderr
    assert "first words" in page.read_text()

    built = stamp.stat().st_mtime_ns
    assert "building" not in run("--source", clone, "--build-only").stderr and stamp.stat().st_mtime_ns == built

    (clone / "docs" / "more.md").write_text("# More\n")
    done = run("--source", clone, "--build-only")
    assert done.returncode != 0 and done.stdout == "" and "more.md" in done.stderr, "a page in no table of contents"
    assert not stamp.exists(), "a site that failed must not pass for a built one"

    (clone / "docs" / "more.md").unlink()
    (clone / "index.md").write_text("# The title\n\nsecond words\n")
    done = run("--build-only", cwd=clone / "docs")
    assert done.returncode == 0 and "second words" in page.read_text(), done.stderr


@needs_sphinx
def test_it_serves_until_it_is_interrupted(clone: Path) -> None:
    command = [*COMMAND, "--source", str(clone), "--no-open"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert line.startswith("http://127.0.0.1:") and line.endswith("(Ctrl-C ends)\n"), server.stderr.read()
        with urllib.request.urlopen(line.split()[0], timeout=20) as answer:
            assert "first words" in answer.read().decode()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=20)
        assert server.returncode == 0 and "Traceback" not in errors
    finally:
        server.kill()
        server.communicate()


def test_a_browser_opens_only_where_it_is_seen(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Server(docs_site.LocalServer):
        def serve_forever(self, *_: float) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(docs_site, "LocalServer", Server)
    monkeypatch.setattr(docs_site, "find_spec", lambda name: name)
    monkeypatch.setattr(docs_site, "_built", lambda root: root / ".site")
    monkeypatch.setattr(docs_site.webbrowser, "open", opened.append)
    monkeypatch.setattr(docs_site.sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    docs_site.docs(source=clone)
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    docs_site.docs(source=clone, no_open=True)
    assert opened == []
    docs_site.docs(source=clone)
    assert len(opened) == 1 and opened[0].startswith("http://127.0.0.1:")


def test_refusals_are_one_line(clone: Path, tmp_path: Path) -> None:
    for arguments, message in [
        (("--port", "70000"), "--port: got 70000, needs a whole number from 0 to 65535"),
        (
            ("--source", tmp_path),
            f"--source: got {tmp_path}, needs a clone of the repository, with docs/ and tutorials/",
        ),
        (("--source", tmp_path / "no"), "needs a clone of the repository"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2 and done.stdout == "", done.stderr
        assert done.stderr.startswith("ddtree: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert not list((clone / ".site").iterdir())


def test_without_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(docs_site, "__file__", str(tmp_path / "site-packages" / "ddtree_numba" / "docs_site.py"))
    with pytest.raises(RefusedError, match=r"^docs: got no docs/ in or above .*, needs a clone"):
        docs_site.find_sources()


def test_without_the_builder(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "find_spec", lambda name: None if name in ("furo", "myst_nb") else name)
    with pytest.raises(RefusedError) as refused:
        docs_site.docs(source=clone)
    assert str(refused.value) == f"docs: got no myst_nb, furo, needs pip install '.[docs]' in {clone}"


def test_a_port_that_is_taken(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "find_spec", lambda name: name)
    monkeypatch.setattr(docs_site, "_built", lambda root: pytest.fail("built before the port was tried"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(RefusedError, match=rf"--port: got {number} \(.*\), needs a free one, or 0"):
            docs_site.docs(source=clone, port=number)


def test_what_is_newer_than_the_site_counts(clone: Path) -> None:
    now = time.time()
    assert docs_site._newer_than(now + 5, clone) == []
    for name in ("docs/page.md", "docs/_data/numbers.json", "ddtree_numba/stage.py", "README.md"):
        file = clone / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (now + 10, now + 10))
        assert docs_site._newer_than(now + 5, clone) == [file], name
        os.utime(file, (now, now))
