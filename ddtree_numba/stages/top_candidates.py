"""Stage 1: the drafter's logits -> the K most probable tokens of every depth, best first.

A row is the `V` logits of one depth of one request. Two rules leave no freedom, so that every implementation gives
the same ids:

- A row is sorted by logit, largest first; equal logits (0.0 and -0.0 are equal) by token id, lowest first. -inf is the
  smallest logit, so it comes last, again by token id, and its log-probability is -inf: never a candidate.
- A row that holds NaN or +inf anywhere, also beyond its best K, is no distribution. It counts as V times -inf:
  ids 0, 1, 2, ..., every log-probability -inf.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.bfloat16 import bfloat16_to_float32, from_bfloat16
from ddtree_numba.block_reduce import SCRATCH_SIZE, block_argmax, block_max, block_sum

__all__ = ["top_candidates", "top_candidates_kernel", "top_candidates_reference"]


def top_candidates_reference(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` best log-probabilities and token ids of every row of `logits`.

    `logits` [B, L, V] float32, float16 or bfloat16 (as its uint16 bits) -> `log_probs` [B, L, K] float32, descending,
    and `token_ids` [B, L, K] int32, with K = min(k, V). These are the candidates of DDTree, arXiv 2604.12989.

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


@cuda.jit(device=True)
def _logit(logits, b, depth, token, is_bfloat16):
    stored = logits[b, depth, token]
    return bfloat16_to_float32(stored) if is_bfloat16 else np.float32(stored)


@cuda.jit(device=True)
def _best_behind(logits, b, depth, last_value, last_token, is_bfloat16):
    """Return this thread's first (logit, token), in the order of candidates, behind the last one taken."""
    vocab = logits.shape[2]
    value, token = np.float32(-np.inf), np.int32(vocab)  # `vocab` loses to every token: this thread has none left
    for other in range(cuda.threadIdx.x, vocab, cuda.blockDim.x):
        logit = _logit(logits, b, depth, other, is_bfloat16)
        behind = logit < last_value or (logit == last_value and other > last_token)
        if behind and (logit > value or (logit == value and other < token)):
            value, token = logit, np.int32(other)
    return value, token


@cuda.jit
def top_candidates_kernel(logits, is_bfloat16, log_probs, token_ids):
    """Find the K best tokens of one row in each block, one after the other.

    logits (B, L, V float32, float16, or uint16): the drafter's.
    is_bfloat16 (int32): 1 when the uint16 are the bits of bfloat16, else 0.
    log_probs (B, L, K float32), token_ids (B, L, K int32): written.

    Launch: grid B * L, block a power of two, 512 bytes of static shared memory.
    Needs: 1 <= K <= V < 2**31.

    The candidates have a strict order (logit falling, token rising), so what was taken needs no mark: the next one is
    the first behind the last. Each thread keeps the first of its own tokens, the block takes the first of those, and
    only the thread that it came from looks for another: the row is read 3 + K / threads times, not 2 + K.
    """
    values = cuda.shared.array(SCRATCH_SIZE, np.float32)
    tokens = cuda.shared.array(SCRATCH_SIZE, np.int32)
    totals = cuda.shared.array(SCRATCH_SIZE, np.float64)
    b, depth = cuda.blockIdx.x // logits.shape[1], cuda.blockIdx.x % logits.shape[1]
    vocab, candidates = logits.shape[2], log_probs.shape[2]

    largest = np.float32(-np.inf)
    for token in range(cuda.threadIdx.x, vocab, cuda.blockDim.x):
        logit = _logit(logits, b, depth, token, is_bfloat16)
        if logit > largest or math.isnan(logit):  # nothing is larger than NaN: once there, it stays
            largest = logit
    largest = block_max(largest, values)
    if not math.isfinite(largest):  # NaN or +inf: no distribution; -inf: no candidate. The same for the whole block
        for rank in range(cuda.threadIdx.x, candidates, cuda.blockDim.x):
            log_probs[b, depth, rank] = -np.inf
            token_ids[b, depth, rank] = rank
        return

    # Terms in float32, their sum in float64: V additions in float32 could lose as much as V half units.
    total = np.float64(0)
    for token in range(cuda.threadIdx.x, vocab, cuda.blockDim.x):
        total += np.float64(math.exp(_logit(logits, b, depth, token, is_bfloat16) - largest))
    log_total = math.log(block_sum(total, totals))

    value, token = _best_behind(logits, b, depth, np.float32(np.inf), np.int32(-1), is_bfloat16)
    for rank in range(candidates):
        best_value, best_token = block_argmax(value, token, values, tokens)
        if token == best_token:
            # Not logit - (largest + log_total): with logits near 10000, float32 would keep three digits of that.
            log_probs[b, depth, rank] = (np.float64(best_value) - np.float64(largest)) - log_total
            token_ids[b, depth, rank] = best_token
            value, token = _best_behind(logits, b, depth, best_value, best_token, is_bfloat16)


def top_candidates(logits: Any, k: int, *, out: tuple[Any, Any] | None = None, stream: Any = None) -> tuple[Any, Any]:
    """Return what `top_candidates_reference` defines, computed by `top_candidates_kernel`.

    A NumPy array is copied in and the results come back as NumPy; a device array stays on the device. `out` is
    (log_probs, token_ids) to write into, `stream` the stream to launch on. Ids equal the reference's; log-probabilities
    differ by at most ``2**-24 * (4 + ln(V) + 2 * |log_prob|)``: the exponentials are float32.
    """
    batch, depths, vocab = ArrayCheck()("logits", logits, "B L V", (np.float32, np.float16, np.uint16))
    check_integer("B of logits", batch, 1, 2**31 - 1)
    check_integer("V of logits", vocab, 1, 2**31 - 1)
    candidates = min(check_integer("k", k, 1, 2**31 - 1), vocab)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (log_probs, token_ids)")

    transfer = Transfer(stream, {"logits": logits})
    shape = (batch, depths, candidates)
    given_log_probs, given_token_ids = (None, None) if out is None else out
    log_probs = transfer.output("log_probs", given_log_probs, shape, np.float32)
    token_ids = transfer.output("token_ids", given_token_ids, shape, np.int32)
    if depths > 0:  # a grid of no blocks is an error
        device_logits, is_bfloat16 = transfer.input(logits), np.int32(logits.dtype == np.uint16)
        launch = top_candidates_kernel[batch * depths, block_threads(512, simulator=2), transfer.stream]
        launch(device_logits, is_bfloat16, log_probs, token_ids)
    return transfer.finish(log_probs, token_ids)
