"""Stage 1: the drafter's logits -> the K most probable tokens of every depth, best first.

A row is the `V` logits of one depth of one request. Two rules leave no freedom, so that every implementation gives
the same ids:

- A row is sorted by logit, largest first; equal logits (0.0 and -0.0 are equal) by token id, lowest first. -inf is the
  smallest logit, so it comes last, again by token id, and its log-probability is -inf: never a candidate.
- A row that holds NaN or +inf anywhere, also beyond its best K, is no distribution. It counts as V times -inf:
  ids 0, 1, 2, ..., every log-probability -inf.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.bfloat16 import from_bfloat16

__all__ = ["top_candidates_reference"]


def top_candidates_reference(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` best log-probabilities and token ids of every row of `logits`.

    `logits` [B, L, V] float32, float16 or bfloat16 (as its uint16 bits) -> `log_probs` [B, L, K] float32, descending,
    and `token_ids` [B, L, K] int32, with K = min(k, V). Log-softmax and order: DDTree, arXiv 2604.12989, section 4.

    >>> log_probs, token_ids = top_candidates_reference(np.log([[[0.25, 0.5, 0.25]]]).astype(np.float32), k=2)
    >>> token_ids.tolist(), np.exp(log_probs).tolist()
    ([[[1, 0]]], [[[0.5, 0.25]]])
    """
    logits = from_bfloat16(logits) if logits.dtype == np.uint16 else logits.astype(np.float32, copy=False)
    invalid = (np.isnan(logits) | np.isposinf(logits)).any(axis=-1, keepdims=True)
    logits = np.where(invalid, np.float32(-np.inf), logits)
    k = min(k, logits.shape[-1])
    token_ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k].astype(np.int32)

    largest = logits.max(axis=-1, keepdims=True).astype(np.float64)
    largest[np.isneginf(largest)] = 0.0  # nothing to subtract: -inf - -inf would be NaN
    shifted = logits - largest  # <= 0, so exp cannot overflow
    with np.errstate(divide="ignore"):  # log(0) = -inf where no logit is finite
        log_total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    best = np.take_along_axis(shifted, token_ids, axis=-1)
    log_probs = np.subtract(best, log_total, out=best, where=np.isfinite(best))
    with np.errstate(over="ignore"):
        return log_probs.astype(np.float32), token_ids
