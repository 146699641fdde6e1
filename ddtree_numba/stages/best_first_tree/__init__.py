"""Stage 2: candidates per depth -> the tree of the most probable prefixes, best first, under a node budget.

Every node is a *rank path*: the ranks of the candidates chosen at depths 1, 2, ... Its score is the sum of their
log-probabilities. Two rules make the tree exact to the bit:

- The scores are float64 and are added in the order of the paper's heap algorithm: a first child scores
  ``score + lp[depth + 1][0]``, the next sibling of rank r scores ``(score - lp[depth][r]) + lp[depth][r + 1]``.
- Equal scores: the lexicographically smaller rank path comes first, a prefix before its extensions.

A candidate that is not finite (±inf, NaN) is never a node, and neither are the ranks behind it. Candidates come in
descending order, as stage 1 gives them; should they rise, the algorithm is followed to the letter all the same: ranks
become nodes in order, and a sibling may then be more probable than an earlier one, which `check_tree` refuses.

A ladder of kernels with one signature: `reference` defines the answer, `one_thread` is the algorithm written down,
`warp` spreads the slots over lanes, and `rounds` adds many nodes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtree_numba.arguments import Transfer
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.draft_tree import DraftTree, empty_tree
from ddtree_numba.stages.best_first_tree.one_thread import build_tree_kernel, launch_one_thread
from ddtree_numba.stages.best_first_tree.reference import MAX_DRAFT_LENGTH, build_tree_reference, check_candidates
from ddtree_numba.stages.best_first_tree.rounds import ROUNDS
from ddtree_numba.stages.best_first_tree.warp import WARP

__all__ = [
    "DRAFT_LAUNCHERS",
    "MAX_DRAFT_LENGTH",
    "VERSIONS",
    "best_version",
    "build_tree",
    "build_tree_kernel",
    "build_tree_reference",
]

_WARP_BUDGET = 64  # the most nodes whose offers one warp holds: up to there `warp` needs no barrier, and is faster

_LAUNCHERS: dict[str, Callable[..., None]] = {
    "one_thread": launch_one_thread,
    "warp": WARP.launch,
    "rounds": ROUNDS.launch,
}

VERSIONS: tuple[str, ...] = tuple(_LAUNCHERS)
"""The rungs of the ladder."""

DRAFT_LAUNCHERS: dict[str, Callable[..., None]] = {"warp": WARP.launch_draft, "rounds": ROUNDS.launch_draft}
"""Launchers of the rungs that can do stages 2 and 3 in one launch, on device arrays: `build_tree`'s, then stage 3's."""


def best_version(budget: int) -> str:
    """Return the rung that `version="auto"` takes here for a budget."""
    if not (ON_GPU and cuda.get_current_device().compute_capability >= (8, 0)):
        return "one_thread"
    return "warp" if budget <= _WARP_BUDGET else "rounds"


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
    `VERSIONS`, or "auto": on a GPU that has their instructions (compute capability 8.0) `warp` up to a budget of 64 and
    `rounds` above, else `one_thread`.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout, a number out of range or an unknown version.
    """
    batch, _, _, budget = check_candidates(log_probs, token_ids, root_tokens, budget)
    if version == "auto":
        version = best_version(budget)
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
