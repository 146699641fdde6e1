"""Rung 2: one tile of latent rows is loaded once into shared memory and serves many nodes and heads.

What changed against `naive`: a block works for ROWS (node, head) pairs of a request instead of one, and takes the keys
a tile at a time. The tile is both key and value, so it is read from global memory once, not twice, and converted to
float32 once. Scores are a small matrix product: each thread holds 4 x 4 of them for a slice of the width, so that eight
loads feed sixteen multiply-adds. The sums of the output columns stay in registers until the last tile.

What it buys: a request's latents are read once for 16 pairs instead of twice for each. With 64 heads and 33 nodes, a
float32 row of Kimi K2.5 is read 132 times 2304 bytes instead of 2112 times 4352: 0.30 MB, not 9.2 MB. Neighbouring
threads load neighbouring numbers, so all 32 of a warp's load are used.

What it costs: 47 KB of shared memory and 168 registers a thread, so three blocks of 128 threads on a multiprocessor of
an H100 or H200; five barriers for each tile; a kernel compiled for each pair of widths. The ROWS queries have no room
in the block's memory and are read again for each tile, 16 x 2304 bytes = 36.9 KB, as much as the tile itself, from the
L1 cache when they stay there. A request has ceil(N * H / 16) blocks however long its prefix, so a small tree leaves
most of a GPU idle.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.bfloat16 import bfloat16_to_float32

__all__ = ["Tiling", "choose_tiling", "launch_shared_tile", "make_shared_tile_kernel"]

MAX_LATENT_WIDTH = 1024
MAX_WIDTH = 1224

_NOTHING = np.float32(-np.inf)  # the score of a key that is not seen
_SIDE = 4  # a thread scores _SIDE rows against _SIDE keys at once


class Tiling(NamedTuple):
    """How a block cuts its work; every number is a compile-time constant of the kernel."""

    threads: int
    """Threads of a block."""
    rows: int
    """(node, head) pairs of a block, a multiple of 4."""
    keys: int
    """Latent rows of a tile, a multiple of 4."""
    columns: int
    """Output columns of a thread: thread + c * threads for c in range(columns)."""
    slices: int
    """Threads that share one 4 x 4 square of scores: each adds up every slices-th number of the width."""
    filled: int
    """Numbers of a tile row that are written: the width, and zeros up to the last column that a thread may own."""
    stride: int
    """Numbers from one tile row to the next."""
    lanes: int
    """Threads that load one tile row together: a warp, so that each load is 32 numbers in a row."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        scores = self.rows * self.keys
        partial = self.slices * (scores + self.keys // _SIDE)
        return 4 * (self.keys * self.stride + partial + 2 * scores + 2 * self.rows + self.keys)


def choose_tiling(width: int, latent_width: int) -> Tiling:
    """Return the tiling for rows of `width` = D_c + D_r numbers with `latent_width` = D_c output columns.

    >>> choose_tiling(576, 512).shared_bytes <= 48 * 1024
    True
    """
    threads = block_threads(128, simulator=16)
    columns = -(-latent_width // threads)
    filled = max(width, columns * threads)
    # Two sums of rows * columns numbers live in the registers of a thread, and 255 are all it can have.
    rows = block_threads(16 if columns <= 4 else 8, simulator=8)
    for keys in (block_threads(16, simulator=8), 8):
        slices = threads // (rows // _SIDE * (keys // _SIDE))
        # The threads of a warp read `slices` numbers in a row from 32 / slices tile rows: with this remainder they
        # lie in 32 different banks.
        stride = filled + (slices - filled) % 32
        tiling = Tiling(threads, rows, keys, columns, slices, filled, stride, block_threads(32, simulator=8))
        if tiling.shared_bytes <= 48 * 1024:
            break
    return tiling


@functools.cache
def make_shared_tile_kernel(width: int, latent_width: int, is_bfloat16: bool) -> Any:
    """Return `shared_tile_kernel` compiled for one pair of widths: shared and register arrays need constant sizes.

    `is_bfloat16` says that uint16 arrays hold bfloat16 bits.
    """
    THREADS, ROWS, KEYS, COLUMNS, SLICES, FILLED, STRIDE, LANES = choose_tiling(width, latent_width)
    KEY_GROUPS = KEYS // _SIDE
    SCORES = ROWS * KEYS
    SLICE_STRIDE = SCORES + KEY_GROUPS  # the excess puts the numbers that a warp writes at once in different banks
    SCORES_EACH = -(-SCORES // THREADS)  # scores that a thread finishes
    SIDE, SQUARE = _SIDE, _SIDE * _SIDE
    SUMS = ROWS * COLUMNS
    HALF = ROWS // 2
    PART = HALF * COLUMNS
    # Numbers of its slice that a thread takes in one go, so that the loop itself costs little.
    UNROLL = next(u for u in (4, 2, 1) if u == 1 or width % (SLICES * u) == 0)
    LOADS = min(18, -(-width // LANES))  # of a tile row, that a thread has under way at once
    NOTHING = _NOTHING

    @cuda.jit
    def shared_tile_kernel(
        q,
        kv_pool,
        block_table,
        prefix_lengths,
        ancestor_bits,
        node_count,
        scale,
        out,
        lse,
    ):
        """Attend from ROWS (node, head) pairs of one request to every row that their nodes see.

        q (B, N * H, D_c + D_r), float32, float16 or uint16: absorbed queries, pair = node * H + head
        kv_pool (pages, page_size, D_c + D_r), as q: latent rows, key and (the first D_c numbers) value at once
        block_table (B, max_pages) int32: pages of each request, in the order of its rows
        prefix_lengths (B,) int32: rows that every node of the request sees
        ancestor_bits (B, N, W) uint32: rows after the prefix that each node sees; bits from node_count on mean nothing
        node_count (B,) int32: used slots
        scale float32: multiplies the dot product
        out (B, N * H, D_c) float32: weighted mean of the values; 0 in unused slots and where nothing is seen
        lse (B, N * H) float32: natural logarithm of the sum of exp(score); -inf there

        A row whose page lies outside the block table or the pool is not seen: the kernel never reads outside.

        Launch: grid (ceil(N * H / ROWS), B), block THREADS; for D_c 512 and D_r 64 that is 16 pairs, 128 threads and
        47,936 bytes of shared memory.
        Needs: D_c + D_r and D_c as compiled, at most 1224 and 1024; B at most 65535.
        """
        tile = cuda.shared.array((KEYS, STRIDE), np.float32)
        present = cuda.shared.array(KEYS, np.int32)
        partial = cuda.shared.array((SLICES, SLICE_STRIDE), np.float32)
        scores = cuda.shared.array((ROWS, KEYS), np.float32)
        weights = cuda.shared.array((KEYS, ROWS), np.float32)
        row_largest = cuda.shared.array(ROWS, np.float32)
        row_rescale = cuda.shared.array(ROWS, np.float32)
        # Unsigned, here and in the innermost loops: a negative index counts from the end of its axis, and where the
        # compiler knows that there is none it drops the test. That is a quarter of the registers.
        thread, b = np.uint32(cuda.threadIdx.x), cuda.blockIdx.y
        pairs, heads, first_pair = q.shape[1], q.shape[1] // ancestor_bits.shape[1], cuda.blockIdx.x * ROWS
        page_size, max_pages = kv_pool.shape[1], block_table.shape[1]
        nodes = max(0, min(node_count[b], ancestor_bits.shape[1]))
        used_pairs = nodes * heads

        for r in range(ROWS):
            pair = first_pair + r
            if used_pairs <= pair < pairs:
                for column in range(thread, latent_width, THREADS):
                    out[b, pair, column] = np.float32(0)
                if thread == 0:
                    lse[b, pair] = NOTHING
        if first_pair >= used_pairs:  # for the whole block, so no barrier is left waiting
            return

        # Where this thread stands in the scores: keys key_group + i * KEY_GROUPS, rows row_group * SIDE + i.
        slice_, group = thread % SLICES, thread // SLICES
        key_group, row_group = group % KEY_GROUPS, group // KEY_GROUPS
        my_pairs = cuda.local.array(SIDE, np.uint32)
        for i in range(SIDE):
            # Past the last used pair it is repeated: those results are dropped.
            my_pairs[i] = min(first_pair + row_group * SIDE + i, used_pairs - 1)

        products = cuda.local.array(SQUARE, np.float32)
        loaded = cuda.local.array(LOADS, np.float32)
        side = cuda.local.array(SIDE, np.float32)
        largest = cuda.local.array(SCORES_EACH, np.float32)
        sums = cuda.local.array(SUMS, np.float32)
        part = cuda.local.array(PART, np.float32)
        value = cuda.local.array(COLUMNS, np.float32)
        total = np.float32(0)  # of row `thread`, in the first ROWS threads
        for e in range(SCORES_EACH):
            largest[e] = NOTHING
        for r in range(ROWS):
            for c in range(COLUMNS):
                sums[r * COLUMNS + c] = np.float32(0)

        # No tile writes the columns past the width; the last columns of the last threads lie there.
        for k in range(KEYS):
            for d in range(width + thread, FILLED, THREADS):
                tile[k, d] = np.float32(0)

        # Tiles of the prefix, then tiles of the tree: only in those can a row be seen by one node and not by another.
        capacity = np.int64(max_pages) * page_size
        prefix = np.int64(prefix_lengths[b])
        prefix_rows = max(np.int64(0), min(prefix, capacity))
        prefix_tiles = (prefix_rows + KEYS - 1) // KEYS
        for t in range(prefix_tiles + (nodes + KEYS - 1) // KEYS):
            in_tree = t >= prefix_tiles
            first, end, origin = t * KEYS, prefix_rows, np.int64(0)
            if in_tree:
                first, end, origin = (t - prefix_tiles) * KEYS, np.int64(nodes), prefix

            # 1. Load the tile, one row for each LANES threads. A row that is not there becomes 0: its weight will be 0,
            # and 0 * 0 adds nothing, where 0 * (an old NaN) would.
            for k in range(thread // LANES, KEYS, THREADS // LANES):
                key_row = origin + first + k
                page = -1
                if first + k < end and 0 <= key_row < capacity:
                    page = block_table[b, key_row // page_size]
                there = 0 <= page < kv_pool.shape[0]
                if there:
                    u_page, u_offset = np.uint32(page), np.uint32(key_row % page_size)
                    for start in range(thread % LANES, width, LANES * LOADS):
                        # All loads are under way before the first is waited for.
                        for i in range(LOADS):
                            d = np.uint32(start) + np.uint32(i * LANES)
                            if d < width:
                                y = kv_pool[u_page, u_offset, d]
                                loaded[i] = bfloat16_to_float32(y) if is_bfloat16 else np.float32(y)
                        for i in range(LOADS):
                            d = np.uint32(start) + np.uint32(i * LANES)
                            if d < width:
                                tile[np.uint32(k), d] = loaded[i]
                else:
                    for d in range(thread % LANES, width, LANES):
                        tile[np.uint32(k), np.uint32(d)] = np.float32(0)
                if thread % LANES == 0:
                    present[k] = there
            cuda.syncthreads()  # the tile is complete

            # 2. A slice of 4 x 4 dot products. Every load serves four of them.
            for i in range(SQUARE):
                products[i] = np.float32(0)
            for start in range(slice_, width, SLICES * UNROLL):
                for u in range(UNROLL):
                    d = np.uint32(start) + np.uint32(u * SLICES)
                    for i in range(SIDE):
                        side[i] = tile[np.uint32(key_group) + np.uint32(i * KEY_GROUPS), d]
                    for i in range(SIDE):
                        y = q[b, my_pairs[i], d]
                        x = bfloat16_to_float32(y) if is_bfloat16 else np.float32(y)
                        for j in range(SIDE):
                            products[i * SIDE + j] += x * side[j]
            for i in range(SIDE):
                for j in range(SIDE):
                    score_index = (row_group * SIDE + i) * KEYS + key_group + j * KEY_GROUPS
                    partial[slice_, score_index] = products[i * SIDE + j]
            cuda.syncthreads()  # all slices are there

            # 3. Add the slices, scale, mask.
            for e in range(SCORES_EACH):
                index = thread + e * THREADS
                if index < SCORES:
                    r, k = index // KEYS, index % KEYS
                    dot = np.float32(0)
                    for s in range(SLICES):
                        dot += partial[s, index]
                    seen = present[k] != 0
                    if in_tree and seen:
                        node = min(first_pair + r, used_pairs - 1) // heads
                        word = ancestor_bits[b, node, (first + k) // 32]
                        seen = (word >> np.uint32((first + k) % 32)) & np.uint32(1) != 0
                    scores[r, k] = dot * scale if seen else NOTHING
            cuda.syncthreads()  # all scores are there

            # 4. Online softmax. The threads of a row look through its scores each for itself, and so agree.
            for e in range(SCORES_EACH):
                index = thread + e * THREADS
                if index < SCORES:
                    r, k = index // KEYS, index % KEYS
                    new_largest = largest[e]
                    for i in range(KEYS):
                        if scores[r, i] > new_largest:
                            new_largest = scores[r, i]
                    # Two maxima of -inf (nothing seen yet) must not be subtracted from each other.
                    rescale, weight = np.float32(1), np.float32(0)
                    if new_largest != largest[e]:
                        rescale = math.exp(largest[e] - new_largest)
                    if scores[r, k] != NOTHING:
                        weight = math.exp(scores[r, k] - new_largest)
                    largest[e] = new_largest
                    weights[k, r] = weight
                    if k == 0:
                        row_largest[r], row_rescale[r] = new_largest, rescale
            cuda.syncthreads()  # all weights are there

            # 5. Add the tile's values to the columns of this thread, half of the rows at a time. The tile gets a sum of
            # its own first: a float32 sum loses digits with its number of terms.
            for h in range(ROWS // HALF):
                for i in range(HALF):
                    for c in range(COLUMNS):
                        part[i * COLUMNS + c] = np.float32(0)
                if in_tree:
                    for k in range(KEYS):
                        for c in range(COLUMNS):
                            value[c] = tile[np.uint32(k), np.uint32(thread) + np.uint32(c * THREADS)]
                        for i in range(HALF):
                            # A row that this node does not see may hold NaN, and 0 * NaN is NaN.
                            weight = weights[np.uint32(k), h * HALF + i]
                            if weight != np.float32(0):
                                for c in range(COLUMNS):
                                    part[i * COLUMNS + c] += weight * value[c]
                else:
                    for k in range(KEYS):
                        for c in range(COLUMNS):
                            value[c] = tile[np.uint32(k), np.uint32(thread) + np.uint32(c * THREADS)]
                        for i in range(HALF):
                            for c in range(COLUMNS):
                                part[i * COLUMNS + c] += weights[np.uint32(k), h * HALF + i] * value[c]
                for i in range(HALF):
                    for c in range(COLUMNS):
                        sum_index = (h * HALF + i) * COLUMNS + c
                        sums[sum_index] = sums[sum_index] * row_rescale[h * HALF + i] + part[i * COLUMNS + c]
            if thread < ROWS:
                tile_total = np.float32(0)
                for k in range(KEYS):
                    tile_total += weights[k, thread]
                total = total * row_rescale[thread] + tile_total
            cuda.syncthreads()  # the next tile overwrites the shared arrays

        row_total = row_rescale  # free now: every thread needs every row's total
        if thread < ROWS:
            row_total[thread] = total
            pair = first_pair + thread
            if pair < used_pairs:
                lse[b, pair] = NOTHING if total == np.float32(0) else row_largest[thread] + math.log(total)
        cuda.syncthreads()
        for r in range(ROWS):
            pair = first_pair + r
            if pair < used_pairs:
                divisor = row_total[r] if row_total[r] != np.float32(0) else np.float32(1)
                for c in range(COLUMNS):
                    column = thread + c * THREADS
                    if column < latent_width:
                        out[b, pair, column] = sums[r * COLUMNS + c] / divisor

    return shared_tile_kernel


def launch_shared_tile(
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
    """Start `shared_tile_kernel` on device arrays that `tree_attention` has checked."""
    batch, nodes, heads, width = q.shape
    latent_width = out.shape[3]
    if latent_width > MAX_LATENT_WIDTH or width > MAX_WIDTH:
        raise ValueError(
            f"q: got rows of {width} numbers, {latent_width} of them latent; version 'shared_tile' needs at most "
            f"{MAX_WIDTH} and {MAX_LATENT_WIDTH} (version 'naive' takes any)"
        )
    tiling = choose_tiling(width, latent_width)
    kernel = make_shared_tile_kernel(width, latent_width, bool(is_bfloat16))
    kernel[(-(-nodes * heads // tiling.rows), batch), tiling.threads, stream](
        q.reshape(batch, nodes * heads, width),
        kv_pool,
        block_table,
        prefix_lengths,
        ancestor_bits,
        node_count,
        scale,
        out.reshape(batch, nodes * heads, latent_width),
        lse.reshape(batch, nodes * heads),
    )
