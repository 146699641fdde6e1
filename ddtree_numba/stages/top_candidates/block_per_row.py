"""Rung 1: one block for each row, the row read again for each question, written as one would at first.

What it is: the largest logit, then the sum, then the best candidates one after the other, each a pass over the row.

What it buys: it is short and right for any K and any V, and it runs in the simulator.

What it costs: 3 + K / threads passes, each of 2-byte loads and with a barrier at its end, and a block-wide argmax
(two barriers) for each candidate.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.bfloat16 import bfloat16_to_float32
from ddtree_numba.block_reduce import SCRATCH_SIZE, block_argmax, block_max, block_sum

__all__ = ["launch_block_per_row", "top_candidates_kernel"]


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


def launch_block_per_row(logits: Any, log_probs: Any, token_ids: Any, stream: Any) -> None:
    """Launch the kernel on device arrays `logits` [B, L, V], `log_probs` and `token_ids` [B, L, K]."""
    is_bfloat16 = np.int32(logits.dtype == np.uint16)
    rows, threads = logits.shape[0] * logits.shape[1], block_threads(512, simulator=2)
    top_candidates_kernel[rows, threads, stream](logits, is_bfloat16, log_probs, token_ids)
