"""Stage 2: candidates per depth -> the tree of the most probable prefixes, best first, under a node budget.

Every node is a *rank path*: the ranks of the candidates chosen at depths 1, 2, ... Its score is the sum of their
log-probabilities. Two rules make the tree exact to the bit:

- The scores are float64 and are added in the order of the paper's heap algorithm: a first child scores
  ``score + lp[depth + 1][0]``, the next sibling of rank r scores ``(score - lp[depth][r]) + lp[depth][r + 1]``.
- Equal scores: the lexicographically smaller rank path comes first, a prefix before its extensions.

A candidate that is not finite (±inf, NaN) is never a node, and neither are the ranks behind it. Candidates come in
descending order, as stage 1 gives them; should they rise, the algorithm is followed to the letter all the same: ranks
become nodes in order, and a sibling may then be more probable than an earlier one, which `check_tree` refuses.

A ladder of kernels with one signature: `reference` defines the answer, `one_thread` is the algorithm written down, and
`warp` spreads the slots over lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtree_numba.arguments import Transfer
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.draft_tree import DraftTree, empty_tree
from ddtree_numba.stages.best_first_tree.one_thread import build_tree_kernel, launch_one_thread
from ddtree_numba.stages.best_first_tree.reference import MAX_DRAFT_LENGTH, build_tree_reference, check_candidates
from ddtree_numba.stages.best_first_tree.warp import launch_warp

__all__ = ["MAX_DRAFT_LENGTH", "VERSIONS", "best_version", "build_tree", "build_tree_kernel", "build_tree_reference"]

_LAUNCHERS: dict[str, Callable[..., None]] = {"one_thread": launch_one_thread, "warp": launch_warp}

VERSIONS: tuple[str, ...] = tuple(_LAUNCHERS)
"""The rungs of the ladder, slowest first."""


def best_version() -> str:
    """Return the rung that `version="auto"` takes here."""
    able = ON_GPU and cuda.get_current_device().compute_capability >= (8, 0)
    return "warp" if able else "one_thread"


def build_tree(
    log_probs: Any,
    token_ids: Any,
    root_tokens: Any,
    budget: int,
    *,
    version: str = "auto",
    out: DraftTree | None = None,
    stream: Any = None,
) -> DraftTree:
    """Return the `DraftTree` that `build_tree_reference` defines, bit for bit; its ancestor bits are 0.

    log_probs (B, L, K float32), token_ids (B, L, K int32): candidates of each depth, best first; L up to 64.
    root_tokens (B int32): last emitted tokens.
    budget (int): most nodes below the root, 0..1024; N = budget + 1.
    out (a DraftTree of N slots): arrays to write into; stream: where to run.

    NumPy arrays are copied in and come back as NumPy; device arrays stay on the device. `version` is a rung of
    `VERSIONS`, or "auto": `warp` on a GPU that has its instructions (compute capability 8.0), else `one_thread`.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout, a number out of range or an unknown version.
    """
    batch, _, _, budget = check_candidates(log_probs, token_ids, root_tokens, budget)
    if version == "auto":
        version = best_version()
    if version not in VERSIONS:
        raise ValueError(f"version: got {version!r}, needs 'auto' or {' or '.join(map(repr, VERSIONS))}")
    if out is not None and not isinstance(out, DraftTree):
        raise TypeError(f"out: got {type(out).__name__}, needs a DraftTree")

    arrays = {"log_probs": log_probs, "token_ids": token_ids, "root_tokens": root_tokens}
    transfer = Transfer(stream, arrays)
    outputs = [
        transfer.output(name, getattr(out, name, None), (batch, *like.shape[1:]), like.dtype)
        for name, like in empty_tree(1, budget)._asdict().items()
    ]
    inputs = [transfer.input(array) for array in arrays.values()]
    _LAUNCHERS[version](*inputs, DraftTree(*outputs), transfer.stream)
    return DraftTree(*transfer.finish(*outputs))
