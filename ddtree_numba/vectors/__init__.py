"""Golden vectors: for every stage and the whole step, inputs and what must come out, in files that any language reads.

``ddtree vectors write DIR`` writes one KDTR file per case and a manifest. The same seed gives the same bytes on every
machine and NumPy version: inputs come from `StableRandom`, and what is expected from whole numbers, exact sums and the
portable `exp` and `log`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba.arguments import check_integer
from ddtree_numba.kdtr import KdtrError, KdtrFile, write_kdtr
from ddtree_numba.vectors.attention import attention_cases
from ddtree_numba.vectors.candidates import candidate_cases
from ddtree_numba.vectors.case import RULES, STAGES, Case, Stage, checked
from ddtree_numba.vectors.commits import commit_cases
from ddtree_numba.vectors.masks import mask_cases, position_cases
from ddtree_numba.vectors.steps import step_cases, write_node_rows
from ddtree_numba.vectors.trees import tree_cases
from ddtree_numba.vectors.walks import sampling_cases, walk_cases

__all__ = [
    "MANIFEST",
    "RULES",
    "STAGES",
    "Case",
    "Stage",
    "all_cases",
    "read_case",
    "read_vectors",
    "write_node_rows",
    "write_vectors",
]

MANIFEST = "manifest.json"
"""The file that lists all others."""

_FORMAT = "ddtree-vectors 1"

_MAKERS: dict[str, Callable[[int], Iterator[Case]]] = {
    "top_candidates": candidate_cases,
    "build_tree": tree_cases,
    "ancestor_bitmask": mask_cases,
    "positions": position_cases,
    "tree_attention": attention_cases,
    "accept_walk": walk_cases,
    "sample_walk": sampling_cases,
    "commit_kv": commit_cases,
    "decode_step": step_cases,
}

LEFT_OUT = {
    "known_27": "a row address beyond 2**31 needs a pool of 4.3 GB: tests/test_tree_attention.py makes it on the device"
}


def all_cases(seed: int = 0, only: str = "*") -> Iterator[Case]:
    """Yield every case whose name matches `only`, in the order of the stages.

    `seed` (0..2**64 - 1) draws the random ones; `only` is a pattern such as ``accept_walk/known_*``.

    >>> [case.name for case in all_cases(only="positions/*")]
    ['positions/known_21_siblings', 'positions/random']
    """
    check_integer("seed", seed, 0, 2**64 - 1)
    stages = only.partition("/")[0] if "/" in only else "*"
    makers = (maker for stage, maker in _MAKERS.items() if fnmatchcase(stage, stages))
    cases = checked(chain.from_iterable(maker(seed) for maker in makers))
    return (case for case in cases if fnmatchcase(case.name, only))


def write_vectors(
    folder: str | os.PathLike[str], seed: int = 0, progress: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Write every case to `folder`, which must be new or empty, and return the manifest.

    A new folder appears when it is complete. An empty one is filled, the manifest last, and stays the folder that a
    shell may be in; what is broken off leaves it empty. `progress` is told the name of every case that is written.
    """
    check_integer("seed", seed, 0, 2**64 - 1)
    target = Path(os.path.abspath(folder))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        what = "not empty" if target.is_dir() else "no folder"
        raise ValueError(f"folder: got {folder}, which is {what}, needs a new or an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    is_there = target.exists()
    # Inside a folder that is there: it may be another file system's, and its parent not ours to write to.
    draft = (target if is_there else target.parent) / f".vectors-{secrets.token_hex(8)}.part"
    try:
        draft.mkdir()
        entries = []
        for case in all_cases(seed):
            entries.append(_write_case(draft, case))
            progress(case.name)
        manifest = {"format": _FORMAT, "seed": seed, "left_out": LEFT_OUT, "rules": RULES, "cases": entries}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8", newline="\n")
        if is_there:
            _move_children(draft, target)
        else:
            os.replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def _move_children(draft: Path, target: Path) -> None:
    """Move all of `draft` to `target`, the manifest last: without one it is no folder of vectors."""
    children = sorted(draft.iterdir(), key=lambda child: child.name == MANIFEST)
    moved = []
    try:
        for child in children:
            os.replace(child, target / child.name)
            moved.append(child)
        draft.rmdir()
    except BaseException:
        for child in reversed(moved):
            os.replace(target / child.name, child)
        raise


def _write_case(folder: Path, case: Case) -> dict[str, Any]:
    file = folder / f"{case.name}.kdtr"
    file.parent.mkdir(exist_ok=True)
    about = {
        "case": case.name,
        "stage": case.stage,
        "rule": case.rule,
        "guards": case.guards,
        "source": case.source,
        "small": case.small,
    }
    arrays = {f"in/{name}": array for name, array in case.inputs.items()}
    for name, value in case.parameters.items():
        arrays[f"in/{name}"] = np.array(value, np.float64 if isinstance(value, float) else np.int64)
    arrays |= {f"expected/{name}": array for name, array in case.expected.items()}
    arrays |= {f"tolerance/{name}": array for name, array in case.tolerance.items()}
    write_kdtr(file, arrays, about, bfloat16=[f"in/{name}" for name in case.bfloat16])
    content = file.read_bytes()
    return about | {
        "file": f"{case.name}.kdtr",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def read_case(path: str | os.PathLike[str]) -> Case:
    """Return the case in one file. Raises `KdtrError` when it is damaged or no vector."""
    with KdtrFile(path) as file:
        about = file.metadata
        groups: dict[str, dict[str, np.ndarray]] = {"in": {}, "expected": {}, "tolerance": {}}
        try:
            for name in file:
                group, _, short = name.partition("/")
                groups[group][short] = file[name]
            stage = STAGES[about["stage"]]
            values = {name: groups["in"].pop(name).item() for name in stage.parameters}
            marks = tuple(n for n in groups["in"] if file.entries[f"in/{n}"].dtype == "bfloat16")
            texts = (about["case"], about["rule"], about["guards"], about["source"])
            case = Case(*texts, groups["in"], values, groups["expected"], groups["tolerance"], marks, about["small"])
            return next(iter(checked([case])))
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            if isinstance(error, KdtrError):
                raise
            raise KdtrError(f"{os.fspath(path)}: is no golden vector ({error})") from None


def read_vectors(folder: str | os.PathLike[str], only: str = "*") -> Iterable[Case]:
    """Return the cases of a folder that `write_vectors` made whose name matches `only`, read one at a time.

    Raises `ValueError` when its manifest is not there, not whole, of another format, or names a file that differs.
    """
    manifest = Path(folder) / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        made_as = content["format"]
        listed = [entry for entry in content["cases"] if fnmatchcase(entry["case"], only)]
        entries = [(str(entry["file"]), str(entry["sha256"])) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"folder: got {folder} ({error}), needs one with a {MANIFEST}") from None
    if made_as != _FORMAT:
        raise ValueError(f"{manifest}: has the format {str(made_as)[:40]!r}, this reader knows {_FORMAT!r}")
    return (_read_entry(Path(folder), file, digest) for file, digest in entries)


def _read_entry(folder: Path, file: str, digest: str) -> Case:
    path = folder / file
    if path.resolve().parent.parent != folder.resolve():
        raise ValueError(f"{MANIFEST}: got the file {file!r}, needs one of the folder's own")
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise KdtrError(f"{path}: differs from its manifest")
    return read_case(path)
