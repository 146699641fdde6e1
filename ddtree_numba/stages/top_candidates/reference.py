"""The definition of stage 1, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, check_integer
from ddtree_numba.bfloat16 import from_bfloat16

__all__ = ["check_logits", "top_candidates_reference"]


def top_candidates_reference(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` best log-probabilities and token ids of every row of `logits`.

    `logits` [B, L, V] float32, float16 or bfloat16 (as its uint16 bits) -> `log_probs` [B, L, K] float32, descending,
    and `token_ids` [B, L, K] int32, with K = min(k, V). These are the candidates of DDTree, arXiv 2604.12989.

    Raises `TypeError` and `ValueError` as `top_candidates` does.

    >>> log_probs, token_ids = top_candidates_reference(np.log([[[0.25, 0.5, 0.25]]]).astype(np.float32), k=2)
    >>> token_ids.tolist(), np.exp(log_probs).tolist()
    ([[[1, 0]]], [[[0.5, 0.25]]])
    """
    k = check_logits(logits, k)[3]
    logits = from_bfloat16(logits) if logits.dtype == np.uint16 else logits.astype(np.float32, copy=False)
    invalid = (np.isnan(logits) | np.isposinf(logits)).any(axis=-1, keepdims=True)
    logits = np.where(invalid, np.float32(-np.inf), logits)
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


def check_logits(logits: Any, k: Any) -> tuple[int, int, int, int]:
    """Return B, L, V and K of the stage's arguments; raise naming the one that is wrong."""
    batch, depths, vocab = ArrayCheck()("logits", logits, "B L V", (np.float32, np.float16, np.uint16))
    check_integer("B of logits", batch, 1, 2**31 - 1)
    check_integer("V of logits", vocab, 1, 2**31 - 1)
    return batch, depths, vocab, min(check_integer("k", k, 1, 2**31 - 1), vocab)
