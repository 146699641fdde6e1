"""Stage 1: the drafter's logits -> the K most probable tokens of every depth, best first.

A row is the `V` logits of one depth of one request. Two rules leave no freedom, so that every implementation gives
the same ids:

- A row is sorted by logit, largest first; equal logits (0.0 and -0.0 are equal) by token id, lowest first. -inf is the
  smallest logit, so it comes last, again by token id, and its log-probability is -inf: never a candidate.
- A row that holds NaN or +inf anywhere, also beyond its best K, is no distribution. It counts as V times -inf:
  ids 0, 1, 2, ..., every log-probability -inf.

A ladder of kernels with one signature: `reference` defines the answer, `block_per_row` is the first kernel one would
write, `fused` reads every logit once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import Transfer, check_integer
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.stages.top_candidates.block_per_row import launch_block_per_row, top_candidates_kernel
from ddtree_numba.stages.top_candidates.fused import MAX_CANDIDATES, Workspace, check_workspace, launch_fused
from ddtree_numba.stages.top_candidates.reference import check_logits, top_candidates_reference

__all__ = [
    "VERSIONS",
    "Workspace",
    "best_version",
    "top_candidates",
    "top_candidates_kernel",
    "top_candidates_reference",
]

VERSIONS: tuple[str, ...] = ("block_per_row", "fused")
"""The rungs of the ladder, slowest first."""


def best_version(k: int, vocab: int) -> str:
    """Return the rung that `version="auto"` takes for `k` candidates of `vocab` tokens, here."""
    able = ON_GPU and cuda.get_current_device().compute_capability >= (8, 0)
    return "fused" if able and k <= MAX_CANDIDATES and vocab >= 1024 else "block_per_row"


def top_candidates(
    logits: Any,
    k: int,
    *,
    version: str = "auto",
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
    workspace: Workspace | None = None,
) -> tuple[Any, Any]:
    """Return ``(log_probs, token_ids)``, what `top_candidates_reference` defines.

    logits (B, L, V float32, float16, or uint16 for bfloat16): the drafter's, a row for each depth of each request.
    k (int): candidates of a depth, 1 or more; K = min(k, V).
    out (a pair of B, L, K float32 and B, L, K int32): arrays to write into; stream: where to run.

    A NumPy array is copied in and the results come back as NumPy; a device array stays on the device.

    `version` is a rung of `VERSIONS`, or "auto": `fused` on a GPU that has its instructions, for k up to 64 of 1024
    tokens or more, else `block_per_row`. `workspace`, from `fused.workspace_for` or `fused.make_workspace`, for B * L
    rows or more, spares `fused` an allocation; the other rung has no use for it.

    Ids equal the reference's. The exponentials are float32: log-probabilities differ by at most
    ``2**-24 * (4 + ln(V) + 2 * |log_prob|)`` with `block_per_row`, ``2**-24 * (10 + 1.25 * ln(V) + 2 * |log_prob|)``
    with `fused`.

    Raises `TypeError` for what is no array or of another dtype, `ValueError` for a wrong shape or layout, a `k` below
    1 (with `fused`: above 64), an unknown version or a workspace that is too small.
    """
    batch, depths, vocab, candidates = check_logits(logits, k)
    if version == "auto":
        version = best_version(candidates, vocab)
    if version not in VERSIONS:
        raise ValueError(f"version: got {version!r}, needs 'auto' or {' or '.join(map(repr, VERSIONS))}")
    if version == "fused":
        check_integer("k (version 'fused')", candidates, 1, MAX_CANDIDATES)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (log_probs, token_ids)")
    if workspace is not None:
        check_workspace(workspace, batch * depths)

    transfer = Transfer(stream, {"logits": logits})
    shape = (batch, depths, candidates)
    given_log_probs, given_token_ids = (None, None) if out is None else out
    log_probs = transfer.output("log_probs", given_log_probs, shape, np.float32)
    token_ids = transfer.output("token_ids", given_token_ids, shape, np.int32)
    if depths > 0:  # a grid of no blocks is an error
        device_logits = transfer.input(logits)
        if version == "fused":
            launch_fused(device_logits, log_probs, token_ids, transfer.stream, workspace)
        else:
            launch_block_per_row(device_logits, log_probs, token_ids, transfer.stream)
    return transfer.finish(log_probs, token_ids)
