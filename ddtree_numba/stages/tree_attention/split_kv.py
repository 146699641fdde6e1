"""Rung 3: the keys of a request are cut into splits, and each split is another block's work.

What changed against `shared_tile`: a third grid axis. Block (x, b, s) works on the x-th ROWS pairs of request b as
before, but on the s-th part of its tiles alone, and writes that part's softmax average with its log-sum-exp. A second
kernel merges the parts: with weights exp(lse_s - lse) their sum is exact, whatever the cut.

What it buys: a request has splits times as many blocks, so that one long request fills the GPU. At a prefix of 65536,
33 nodes and 64 heads `shared_tile` has 132 blocks of 4099 tiles, all of a small model's one head only 3.

What it costs: the parts are written and read again, splits * (D_c + 1) * 8 bytes for each pair (4 splits, Kimi K2.5:
16.4 KB a pair, against 4.6 KB of queries and output), and a second launch. A split in which a request has no tile
costs a block that ends at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.bfloat16 import bfloat16_to_float32
from ddtree_numba.device_library import has_library, scratch
from ddtree_numba.stages.tree_attention.shared_tile import MAX_LATENT_WIDTH, MAX_WIDTH, choose_tiling

__all__ = [
    "MAX_SPLITS",
    "launch_merge",
    "launch_split_kv",
    "make_split_kv_kernel",
    "merge_splits_kernel",
    "split_buffers",
]

MAX_SPLITS = 64
"""More parts than this cost more to merge than they save."""

_NOTHING = np.float32(-np.inf)  # the score of a key that is not seen
_SIDE = 4  # a thread scores _SIDE rows against _SIDE keys at once


@functools.cache
def make_split_kv_kernel(width: int, latent_width: int, is_bfloat16: bool) -> Any:
    """Return `split_kv_kernel` compiled for one pair of widths: shared and register arrays need constant sizes.

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
    def split_kv_kernel(
        q,
        kv_pool,
        block_table,
        prefix_lengths,
        ancestor_bits,
        node_count,
        scale,
        parts,
        part_lse,
    ):
        """Attend from ROWS (node, head) pairs of one request to one split of the rows that their nodes see.

        q (B, N * H, D_c + D_r), float32, float16 or uint16: absorbed queries, pair = node * H + head
        kv_pool (pages, page_size, D_c + D_r), as q: latent rows, key and (the first D_c numbers) value at once
        block_table (B, max_pages) int32: pages of each request, in the order of its rows
        prefix_lengths (B,) int32: rows that every node of the request sees
        ancestor_bits (B, N, W) uint32: rows after the prefix that each node sees; bits from node_count on mean nothing
        node_count (B,) int32: used slots
        scale float32: multiplies the dot product
        parts (splits, B, N * H, D_c) float32: weighted mean of the split's values; not written where lse is -inf
        part_lse (splits, B, N * H) float32: natural logarithm of the split's sum of exp(score); -inf in unused slots
        and where nothing is seen

        A row whose page lies outside the block table or the pool is not seen: the kernel never reads outside.

        Launch: grid (ceil(N * H / ROWS), B, splits), block THREADS; for D_c 512 and D_r 64 that is 16 pairs, 128
        threads and 47,936 bytes of shared memory.
        Needs: D_c + D_r and D_c as compiled, at most 1224 and 1024; B at most 65535; splits at most MAX_SPLITS.
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
        thread, b, split = np.uint32(cuda.threadIdx.x), cuda.blockIdx.y, cuda.blockIdx.z
        pairs, heads, first_pair = q.shape[1], q.shape[1] // ancestor_bits.shape[1], cuda.blockIdx.x * ROWS
        page_size, max_pages = kv_pool.shape[1], block_table.shape[1]
        nodes = max(0, min(node_count[b], ancestor_bits.shape[1]))
        used_pairs = nodes * heads

        # Tiles of the prefix, then tiles of the tree: only in those can a row be seen by one node and not by another.
        capacity = np.int64(max_pages) * page_size
        prefix = np.int64(prefix_lengths[b])
        prefix_rows = max(np.int64(0), min(prefix, capacity))
        prefix_tiles = (prefix_rows + KEYS - 1) // KEYS
        tiles = prefix_tiles + (nodes + KEYS - 1) // KEYS
        first_tile = tiles * split // cuda.gridDim.z
        last_tile = tiles * (split + 1) // cuda.gridDim.z

        for r in range(thread, ROWS, THREADS):
            pair = first_pair + r
            if pair < pairs and (pair >= used_pairs or first_tile >= last_tile):
                part_lse[split, b, pair] = NOTHING
        if first_pair >= used_pairs or first_tile >= last_tile:  # the whole block, so no barrier is left waiting
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

        for t in range(first_tile, last_tile):
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
                part_lse[split, b, pair] = NOTHING if total == np.float32(0) else row_largest[thread] + math.log(total)
        cuda.syncthreads()
        for r in range(ROWS):
            pair = first_pair + r
            if pair < used_pairs:
                divisor = row_total[r] if row_total[r] != np.float32(0) else np.float32(1)
                for c in range(COLUMNS):
                    column = thread + c * THREADS
                    if column < latent_width:
                        parts[split, b, pair, column] = sums[r * COLUMNS + c] / divisor

    return split_kv_kernel


@cuda.jit
def merge_splits_kernel(parts, part_lse, out, lse):
    """Merge the splits of one row: the mean of their means, each with its share of the softmax denominator.

    parts (splits, rows, D_c) float32, part_lse (splits, rows) float32: what each split found
    out (rows, D_c) float32, lse (rows,) float32: what all of them are together; 0 and -inf where no split saw anything

    A part whose lse is -inf is not read: nobody has written it.

    Launch: grid (rows), block of any size, no shared memory.
    """
    row = cuda.blockIdx.x
    splits = parts.shape[0]
    largest = _NOTHING
    for s in range(splits):
        largest = max(largest, part_lse[s, row])
    total = np.float32(0)
    for s in range(splits):
        if part_lse[s, row] != _NOTHING:  # then `largest` is not -inf either, and the difference is a number
            total += math.exp(part_lse[s, row] - largest)
    for column in range(cuda.threadIdx.x, parts.shape[2], cuda.blockDim.x):
        merged = np.float32(0)
        for s in range(splits):
            if part_lse[s, row] != _NOTHING:
                merged += math.exp(part_lse[s, row] - largest) * parts[s, row, column]
        out[row, column] = merged / total if total != np.float32(0) else np.float32(0)
    if cuda.threadIdx.x == 0:
        lse[row] = largest + math.log(total) if total != np.float32(0) else _NOTHING


_of_handles: dict[tuple[int, int], list[Any]] = {}
_LAST_DEFAULT_HANDLE = 2  # handles 0, 1 and 2 are the default streams


def split_buffers(splits: int, rows: int, latent_width: int, stream: Any) -> tuple[Any, Any]:
    """Return device memory (splits * rows * D_c,) and (splits * rows,) float32 for the parts of one launch.

    It is kept for the next launch on the same stream, where it is free again: work on a stream runs in order. A stream
    of Numba's holds it and lets it go when it goes itself; so keep the stream as long as a graph recorded on it. For a
    stream of torch or CuPy it comes from their pool instead, which does the same and also during a capture.
    """
    numbers = splits * rows * (latent_width + 1)
    if has_library(stream):
        buffer = scratch(numbers, np.float32, stream)
    else:
        kept = _kept_for(stream)
        if not kept or kept[-1].shape[0] < numbers:
            # A graph recorded on this stream goes on using the one outgrown, so that stays. Each is twice as large as
            # the one before: all of those are no more than the last.
            kept.append(cuda.device_array(max(numbers, 2 * kept[-1].shape[0] if kept else 0), np.float32))
        buffer = kept[-1]
    return buffer[: splits * rows * latent_width], buffer[splits * rows * latent_width : numbers]


def _kept_for(stream: Any) -> list[Any]:
    """Return the buffers that launches on `stream` have had, the largest last."""
    handle = int(stream.handle) if ON_GPU and stream else 0
    own = handle > _LAST_DEFAULT_HANDLE and not stream.external if ON_GPU else bool(stream)
    if own:
        return stream.__dict__.setdefault("split_buffers", [])
    # A default stream lives as long as the process. Of another library's we know the handle alone, in an object made
    # for one launch, and neither when the stream ends nor which graphs were captured on it: those stay for good. They
    # are as many as the handles of such streams given with Numba's arrays, and a handle used anew finds its buffers.
    return _of_handles.setdefault((cuda.get_current_device().id if ON_GPU else 0, handle), [])


def launch_merge(parts: Any, part_lse: Any, splits: int, out: Any, lse: Any, stream: Any) -> None:
    """Start `merge_splits_kernel` on flat `parts` and `part_lse`; `out` (..., D_c) and `lse` (...) are the result's."""
    latent_width = out.shape[len(out.shape) - 1]
    rows = out.size // latent_width
    merge_splits_kernel[rows, block_threads(128, simulator=4), stream](
        parts.reshape(splits, rows, latent_width),
        part_lse.reshape(splits, rows),
        out.reshape(rows, latent_width),
        lse.reshape(rows),
    )


def choose_splits(blocks: int, tiles: int) -> int:
    """Return how many splits make enough of `blocks` blocks when a request has at most `tiles` tiles.

    Enough is four for each multiprocessor, as many as fit at once; a split has at least eight tiles.
    """
    wanted = 4 * cuda.get_current_device().MULTIPROCESSOR_COUNT if ON_GPU else 4
    return max(1, min(-(-wanted // blocks), tiles // 8, MAX_SPLITS))


def launch_split_kv(
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
    splits: int | None = None,
) -> None:
    """Start `split_kv_kernel` and the merge on device arrays that `tree_attention` has checked.

    `splits` None leaves their number to `choose_splits`. The lengths are on the device, so it goes by the most rows
    that the block table has room for.
    """
    batch, nodes, heads, width = q.shape
    latent_width = out.shape[3]
    if latent_width > MAX_LATENT_WIDTH or width > MAX_WIDTH:
        raise ValueError(
            f"q: got rows of {width} numbers, {latent_width} of them latent; version 'split_kv' needs at most "
            f"{MAX_WIDTH} and {MAX_LATENT_WIDTH} (version 'naive' takes any)"
        )
    tiling = choose_tiling(width, latent_width)
    pairs, blocks = nodes * heads, -(-nodes * heads // tiling.rows) * batch
    if splits is None:
        splits = choose_splits(blocks, block_table.shape[1] * kv_pool.shape[1] // tiling.keys)
    parts, part_lse = split_buffers(splits, batch * pairs, latent_width, stream)
    kernel = make_split_kv_kernel(width, latent_width, bool(is_bfloat16))
    kernel[(-(-pairs // tiling.rows), batch, splits), tiling.threads, stream](
        q.reshape(batch, pairs, width),
        kv_pool,
        block_table,
        prefix_lengths,
        ancestor_bits,
        node_count,
        scale,
        parts.reshape(splits, batch, pairs, latent_width),
        part_lse.reshape(splits, batch, pairs),
    )
    launch_merge(parts, part_lse, splits, out, lse, stream)
