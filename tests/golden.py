"""The golden vectors of seed 0, written once for all tests that read them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from ddtree_numba.vectors import Case, read_vectors, write_vectors


@functools.cache
def folder() -> Path:
    holder = Path(tempfile.mkdtemp(prefix="ddtree-vectors-"))
    atexit.register(shutil.rmtree, holder, ignore_errors=True)
    write_vectors(holder / "vectors")
    return holder / "vectors"


@functools.cache
def cases() -> dict[str, Case]:
    return {case.name: case for case in read_vectors(folder())}
