"""What a command writes, JSON above all, to a file or standard output, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from ddtree_numba.refusal import RefusedError

__all__ = ["JsonOutput", "TextOutput"]

_Self = TypeVar("_Self", bound="TextOutput")


class TextOutput:
    """Writes a text to a file or standard output, whole or not at all; refuses a path it can't write at once."""

    def __init__(self, path: str | None, option: str) -> None:
        """Take the path that the user gave (``-`` is standard output, None is nowhere) and the option's name."""
        self._path, self._option = path, option
        self._draft: str | None = None

    def __enter__(self: _Self) -> _Self:
        if self._path is None or self._path == "-":
            return self
        with self._refusing():
            if not self._path:
                raise FileNotFoundError(2, "an empty name")
            if self._needs_a_draft(self._path):
                self._path = os.path.realpath(self._path)  # a link stays one
                handle, self._draft = tempfile.mkstemp(dir=os.path.dirname(self._path), prefix=".ddtree.")
                os.close(handle)
        return self

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            got = f"{self._path or repr(self._path)} ({error.strerror})"
            raise RefusedError(self._option, got, "a file that can be written") from None

    @staticmethod
    def _needs_a_draft(path: str) -> bool:
        """Tell whether a finished file will take this one's place; a device or a pipe is written to directly."""
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return True
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, "it is a folder")
        return stat.S_ISREG(mode)

    def write_text(self, text: str) -> None:
        """Write `text`, in UTF-8 to a file."""
        if self._path == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        elif self._path is not None:
            with self._refusing():
                self._write_file(text)

    def _write_file(self, text: str) -> None:
        path = self._draft or self._path or ""
        Path(path).write_text(text, encoding="utf-8")
        if self._draft is not None and self._path is not None:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(self._draft, 0o666 & ~mask)  # mkstemp's files are private, others expect the usual rights
            os.replace(self._draft, self._path)
            self._draft = None

    def __exit__(self, *_: object) -> None:
        if self._draft is not None:
            os.unlink(self._draft)


class JsonOutput(TextOutput):
    """The same for JSON, and the option ``--json``."""

    def __init__(self, path: str | None) -> None:
        super().__init__(path, "--json")

    def write(self, content: dict[str, Any]) -> None:
        """Write `content` as indented JSON."""
        self.write_text(_json_text(content, sys.stdout.encoding if self._path == "-" else "utf-8"))


def _json_text(content: dict[str, Any], encoding: str) -> str:
    """Return `content` as JSON: characters that `encoding` lacks are escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = json.dumps(content, indent=2) + "\n"
    return text
