"""Rung 1: one block for each node and head, written as one would at first.

What it is: the softmax of the reference in its online form, a chunk of keys at a time. Each thread scores one key of
the chunk, the block finds the chunk's maximum, and each thread adds the chunk to the output columns that it owns. The
output array itself holds the running sums.

What it buys: it is short and right, for any sizes, with little memory on the chip.

What it costs: nothing is shared between blocks, so every node and head reads every latent row it sees for itself, and
reads it twice, once as key and once as value: (2 D_c + D_r) * itemsize bytes, 4352 for a float32 row of Kimi K2.5. With
64 heads and 33 nodes that is 2112 times the same row, 9.2 MB of loads to use 2304 bytes. And neighbouring threads score
neighbouring keys, so one load instruction of a warp touches 32 rows, of which it uses 4 bytes each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.bfloat16 import bfloat16_to_float32

__all__ = ["launch_naive", "naive_kernel"]

THREADS = block_threads(128, simulator=8)
"""Threads of a block, and keys of a chunk: one each."""

_NOTHING = np.float32(-np.inf)  # the score of a key that is not seen
_RUN = 32  # numbers that a dot product adds up before it starts a new sum


@cuda.jit
def naive_kernel(
    q,
    kv_pool,
    block_table,
    prefix_lengths,
    ancestor_bits,
    node_count,
    scale,
    is_bfloat16,
    out,
    lse,
):
    """Attend from one node and head to every row that the node sees.

    q (B, N, H, D_c + D_r), float32, float16 or uint16: absorbed queries
    kv_pool (pages, page_size, D_c + D_r), as q: latent rows, key and (the first D_c numbers) value at once
    block_table (B, max_pages) int32: pages of each request, in the order of its rows
    prefix_lengths (B,) int32: rows that every node of the request sees
    ancestor_bits (B, N, W) uint32: rows after the prefix that each node sees; bits from node_count on mean nothing
    node_count (B,) int32: used slots
    scale float32: multiplies the dot product; is_bfloat16 int32: 1 when q and kv_pool hold bfloat16 bits
    out (B, N, H, D_c) float32: weighted mean of the values; 0 in unused slots and where nothing is seen
    lse (B, N, H) float32: natural logarithm of the sum of exp(score); -inf there

    A row whose page lies outside the block table or the pool is not seen: the kernel never reads outside.

    Launch: grid (H, N, B), block THREADS (128), 16 * THREADS bytes of shared memory (2 KB).
    Needs: B at most 65535, N at most 65535 (limits of a grid).
    """
    scores = cuda.shared.array(THREADS, np.float32)
    weights = cuda.shared.array(THREADS, np.float32)
    pages = cuda.shared.array(THREADS, np.int32)
    offsets = cuda.shared.array(THREADS, np.int32)
    thread = cuda.threadIdx.x
    head, node, b = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    width, latent_width = q.shape[3], out.shape[3]
    page_size, max_pages = kv_pool.shape[1], block_table.shape[1]

    for column in range(thread, latent_width, THREADS):
        out[b, node, head, column] = np.float32(0)
    largest, total = _NOTHING, np.float32(0)
    prefix, rows = np.int64(prefix_lengths[b]), np.int64(0)
    if node < node_count[b]:  # the same answer in the whole block: the barriers below are met by all or none
        rows = min(prefix + min(node_count[b], q.shape[1]), np.int64(max_pages) * page_size)

    for first in range(0, rows, THREADS):
        # One key for each thread. Its page and its place in the page are kept for the sums below.
        row = first + thread
        seen = row < rows
        if seen and row >= prefix:
            word = ancestor_bits[b, node, (row - prefix) // 32]
            seen = (word >> np.uint32((row - prefix) % 32)) & np.uint32(1) != 0
        page = -1
        if seen:
            page = block_table[b, row // page_size]
        score = _NOTHING
        if 0 <= page < kv_pool.shape[0]:
            offset = row % page_size
            # A float32 sum of many terms loses digits with its length: short sums are added up instead.
            dot = np.float32(0)
            for start in range(0, width, _RUN):
                part = np.float32(0)
                for d in range(start, min(start + _RUN, width)):
                    x, y = q[b, node, head, d], kv_pool[page, offset, d]
                    if is_bfloat16:
                        part += bfloat16_to_float32(x) * bfloat16_to_float32(y)
                    else:
                        part += np.float32(x) * np.float32(y)
                dot += part
            score = dot * scale
            pages[thread], offsets[thread] = page, offset
        scores[thread] = score
        cuda.syncthreads()  # all scores of the chunk are there

        # Every thread looks through them for itself, and so all agree on the maximum.
        new_largest = largest
        for k in range(THREADS):
            if scores[k] > new_largest:
                new_largest = scores[k]
        # What was added up so far was weighed against the old maximum. Equal ones need no change, and two of
        # -inf (nothing seen yet) must not be subtracted from each other.
        rescale = np.float32(1)
        if new_largest != largest:
            rescale = math.exp(largest - new_largest)
        largest = new_largest
        weight = np.float32(0)
        if score != _NOTHING:
            weight = math.exp(score - largest)
        weights[thread] = weight
        cuda.syncthreads()  # all weights of the chunk are there

        chunk_total = np.float32(0)
        for k in range(THREADS):
            chunk_total += weights[k]
        total = total * rescale + chunk_total
        for column in range(thread, latent_width, THREADS):
            part = np.float32(0)
            for k in range(THREADS):
                # Not only to save work: a row that this node does not see may hold NaN, and 0 * NaN is NaN.
                if weights[k] != np.float32(0):
                    value = kv_pool[pages[k], offsets[k], column]
                    part += weights[k] * (bfloat16_to_float32(value) if is_bfloat16 else np.float32(value))
            out[b, node, head, column] = out[b, node, head, column] * rescale + part
        cuda.syncthreads()  # the next chunk overwrites the shared arrays

    if total != np.float32(0):
        for column in range(thread, latent_width, THREADS):
            out[b, node, head, column] /= total
    if thread == 0:
        lse[b, node, head] = _NOTHING if total == np.float32(0) else largest + math.log(total)


def launch_naive(
    q: Any,
    kv_pool: Any,
    block_table: Any,
    prefix_lengths: Any,
    ancestor_bits: Any,
    node_count: Any,
    scale: np.float32,
    is_bfloat16: np.int32,
    out: Any,
    lse: Any,
    *,
    stream: Any,
) -> None:
    """Start `naive_kernel` on device arrays that `tree_attention` has checked."""
    batch, nodes, heads, _ = q.shape
    naive_kernel[(heads, nodes, batch), THREADS, stream](
        q,
        kv_pool,
        block_table,
        prefix_lengths,
        ancestor_bits,
        node_count,
        scale,
        is_bfloat16,
        out,
        lse,
    )
