"""Stages 5 and 6 as one launch: the walk, the check, the advance and the move.

What must come out is defined by `accept_walk_reference`, and by `commit_kv_reference` of the path that it gives.

Launched one after the other they do little work and much waiting: for the memory at every look of the walk, for each
other, for every row before the next. Here each block does all of it for some layers of a request:

- *The tree is loaded at once.* A thread copies a slot into shared memory, all slots together. Then one thread walks,
  and a look at a node is a load from there and not from the L2. Meanwhile the others look up the row of every slot,
  which the check and the move need.
- *Nothing is handed on.* Every block of a request walks for itself: it would have to wait for the path in any case.
- *The old length.* All blocks of a request read it, so the last one to say that it has read it writes the new one.
- *All rows are loaded at once.* A warp moves a row: loads it, waits for the others at a barrier, stores it.
- *Little code.* Most instructions run once, and are fetched for that as data is. So arrays come flat, which makes an
  address one multiply-add, and no loop is unrolled but the one over a lane's words. *No fence* either: one took 1400
  cycles, more than the walk.

What it buys: measured on an H200, as a graph, 61 layers of 576 bfloat16. One request, nothing in the L2: 6.7 us for a
path of 3 nodes, 8.9 for one of 15 whose rows all move; 64 requests with random trees: 14.2. A launch for the walk and
the lengths and one for the rows took 15.9, 41.2 and 53.7 in the same run.

What it costs: the walk of a request is repeated by up to as many blocks as there are layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BAD_PAGE, STATUS_OK, DraftTree
from ddtree_numba.ptx import inlined, kernel_for
from ddtree_numba.stages.accept_walk import AcceptedPath, walk
from ddtree_numba.stages.best_first_tree import MAX_DRAFT_LENGTH

__all__ = ["Sizes", "commit_side_kernel", "launch_commit_side"]

THREADS = block_threads(256, simulator=8)
_BLOCKS = 6  # that share a multiprocessor
_LANES = np.uint32(32 if ON_GPU else 1)
_WARPS = np.uint32(THREADS // int(_LANES))
_WORDS = 5  # of a row that a lane has on their way: 8 bytes each, a row of 576 bfloat16 in a warp
_MOST_SLOTS, _MOST_COLUMNS = MAX_BUDGET + 1, MAX_DRAFT_LENGTH + 1
_ACCEPTED, _STATUS = 0, 1  # places in the shared `walked`
_WARP_BITS = np.uint32(int(_WARPS).bit_length() - 1)
_STEP = np.uint32(_WORDS * int(_LANES))
_ONE = np.uint32(1)


class Sizes(NamedTuple):
    """What the shapes of the kernel's arrays would say."""

    slots: Any
    """Int32: N."""
    columns: Any
    """Int32: L + 1."""
    max_pages: Any
    """Int32: columns of the block table."""
    page_size: Any
    """Int32: rows of a page."""
    words: Any
    """Int32: of a row."""
    layers: Any
    """Int32: of the pool."""
    layer_words: Any
    """Int64: words of a layer, pages * page_size * words."""


@inlined
def _start_of_row(prefix, slot, b, sizes, block_table):
    """Return the word of a layer with which the row of request `b`'s `slot` starts; negative: there is no such row."""
    if prefix < 0:
        return np.int64(-1)
    index = np.uint32(np.uint32(prefix) + slot)  # the sum of two int32 fits an unsigned one
    page_size = np.uint32(sizes.page_size)
    column = np.uint32(index // page_size)
    if column >= np.uint32(sizes.max_pages):
        return np.int64(-1)
    page = block_table[np.uint64(np.uint64(b) * np.uint64(sizes.max_pages) + np.uint64(column))]
    place = np.uint32(index - np.uint32(column * page_size))
    start = np.int64((np.int64(page) * sizes.page_size + np.int64(place)) * sizes.words)
    return start if start < sizes.layer_words else np.int64(-1)


@inlined
def _move(kv_pool, sizes, part, parts, count, accepted, starts):
    """Move the rows of the path's `count` slots in the layers of this block; a warp moves a row of a layer at a time.

    No row is lost: row k, which move k overwrites, is read by moves up to k alone, see `commit_kv_kernel`, and those
    have read when the barrier is passed. The root is in its place.
    """
    held = cuda.local.array(_WORDS, kv_pool.dtype)
    thread, layers, words = np.uint32(cuda.threadIdx.x), np.uint32(sizes.layers), np.uint32(sizes.words)
    lane, warp = np.uint32(thread % _LANES), np.uint32(thread // _LANES)
    bits = np.uint32(0)  # 2 ** bits rows of a layer at a time, and as many layers as there are warps for
    while bits < _WARP_BITS and np.uint32(_ONE << bits) < np.uint32(count - _ONE):
        bits = np.uint32(bits + _ONE)
    rows, ahead = np.uint32(_ONE << bits), np.uint32(parts << np.uint32(_WARP_BITS - bits))
    layer, first_layer = np.uint32(part + np.uint32(warp >> bits) * parts), part
    while first_layer < layers:
        k = np.uint32(_ONE + np.uint32(warp & np.uint32(rows - _ONE)))
        first = _ONE
        while first < count:
            slot = np.uint32(accepted[k]) if k < count and layer < layers else k
            end, source, target = np.uint32(0), np.uint64(0), np.uint64(0)
            if slot != k:
                shift = np.int64(np.int64(layer) * sizes.layer_words + np.int64(lane))
                end, source, target = words, np.uint64(shift + starts[slot]), np.uint64(shift + starts[k])
            word = lane
            while word < np.uint32(words + lane):
                for i in range(_WORDS):
                    if np.uint32(word + np.uint32(i) * _LANES) < end:
                        held[i] = kv_pool[source + np.uint64(i * _LANES)]
                cuda.syncthreads()  # all warps have read
                for i in range(_WORDS):
                    if np.uint32(word + np.uint32(i) * _LANES) < end:
                        kv_pool[target + np.uint64(i * _LANES)] = held[i]
                word = np.uint32(word + _STEP)
                source, target = np.uint64(source + np.uint64(_STEP)), np.uint64(target + np.uint64(_STEP))
            first, k = np.uint32(first + rows), np.uint32(k + rows)
        first_layer, layer = np.uint32(first_layer + ahead), np.uint32(layer + ahead)


@kernel_for(THREADS, _BLOCKS)
def commit_side_kernel(
    token_ids,
    first_child,
    next_sibling,
    node_count,
    target_tokens,
    path,
    kv_pool,
    block_table,
    prefix_lengths,
    arrived,
    commit_status,
    sizes,
):
    """Walk the tree of one request and move the accepted rows of some layers in each block.

    All arrays but those of B numbers are handed in flat.

    token_ids, first_child, next_sibling (B * N int32), node_count (B int32): of the `DraftTree`.
    target_tokens (B * N int32), path (AcceptedPath of B * (L + 1)): as in `accept_walk_kernel`.
    kv_pool (layers * pages * page_size * words, any integers or floats): changed in place.
    block_table (B * max_pages int32): pages of each request, in the order of its rows.
    prefix_lengths (B int32): advanced, unless the request gets a status.
    arrived (B uint32): 0 before a launch and after it.
    commit_status (B int32): written, as by `advance_lengths_kernel`.
    sizes (Sizes): what the arrays' shapes would say.

    Launch: grid (B, P), block THREADS, 25 KB of static shared memory. Layers p, p + P, p + 2 P, ... are of block p.
    Needs: N <= 1025, L <= 64.
    """
    tokens = cuda.shared.array(_MOST_SLOTS, np.int32)
    children = cuda.shared.array(_MOST_SLOTS, np.int32)
    siblings = cuda.shared.array(_MOST_SLOTS, np.int32)
    targets = cuda.shared.array(_MOST_SLOTS, np.int32)
    starts = cuda.shared.array(_MOST_SLOTS, np.int64)
    accepted = cuda.shared.array(_MOST_COLUMNS, np.int32)
    emitted = cuda.shared.array(_MOST_COLUMNS, np.int32)
    walked = cuda.shared.array(2, np.int32)
    length = cuda.shared.array(1, np.int32)

    # Steps are `blockDim.x`, though it is THREADS: a loop whose step is a constant is unrolled, and few turn twice.
    b, thread, threads = np.uint32(cuda.blockIdx.x), np.uint32(cuda.threadIdx.x), np.uint32(cuda.blockDim.x)
    part, parts, slots = np.uint32(cuda.blockIdx.y), np.uint32(cuda.gridDim.y), np.uint32(sizes.slots)
    last = np.uint32(threads - _ONE)
    if thread == last:
        length[0] = prefix_lengths[b]
    nodes = node_count[b]
    slot = thread
    while slot < slots:
        at = np.uint64(np.uint64(b) * np.uint64(slots) + np.uint64(slot))
        tokens[slot], children[slot] = token_ids[at], first_child[at]
        siblings[slot], targets[slot] = next_sibling[at], target_tokens[at]
        slot = np.uint32(slot + threads)
    cuda.syncthreads()  # tree and length are there

    prefix, before = length[0], np.uint32(0)
    if thread == 0:
        links = (tokens, children, siblings)
        count, status = walk(*links, targets, sizes.slots, nodes, accepted, emitted, sizes.columns)
        walked[_ACCEPTED], walked[_STATUS] = count, status
    elif thread >= _LANES:  # the walker's warp does nothing else: lanes that part take turns
        # Arriving needs no fence: it waits for the length, on which it depends, and the new one depends on it.
        if thread == last and prefix >= 0:
            before = cuda.atomic.inc(arrived, b, np.uint32(parts - _ONE))
        slot = np.uint32(thread - _LANES)
        while slot < slots:
            starts[slot] = _start_of_row(prefix, slot, b, sizes, block_table)
            slot = np.uint32(slot + np.uint32(threads - _LANES))
    cuda.syncthreads()  # path and rows are there

    count = np.uint32(walked[_ACCEPTED])
    outside = np.int32(0)
    k = thread
    while k < count:
        outside |= np.int32(starts[k] < 0 or starts[np.uint32(accepted[k])] < 0)
        k = np.uint32(k + threads)
    bad = cuda.syncthreads_or(outside)
    if not bad:
        _move(kv_pool, sizes, part, parts, count, accepted, starts)
        if thread == last and before == np.uint32(parts - _ONE):
            prefix_lengths[b] = np.int32(prefix + np.int32(count))

    if part == 0:
        if thread == 0:
            path.accept_count[b] = np.int32(count)
            path.status[b] = walked[_STATUS]
            commit_status[b] = STATUS_BAD_PAGE if bad else STATUS_OK
        k = thread
        while k < np.uint32(sizes.columns):
            at = np.uint64(np.uint64(b) * np.uint64(sizes.columns) + np.uint64(k))
            path.accept_slots[at] = accepted[k] if k < count else np.int32(-1)
            path.accept_tokens[at] = emitted[k] if k < count else np.int32(-1)
            k = np.uint32(k + threads)


def launch_commit_side(
    tree: DraftTree,
    target_tokens: Any,
    path: AcceptedPath,
    kv_pool: Any,
    block_table: Any,
    prefix_lengths: Any,
    arrived: Any,
    commit_status: Any,
    stream: Any,
) -> None:
    """Launch the kernel on device arrays: `kv_pool` [layers, pages, page_size, words], the others as the stages do."""
    layers, pages, page_size, words = kv_pool.shape
    batch, max_pages = block_table.shape
    multiprocessors = cuda.get_current_device().MULTIPROCESSOR_COUNT if ON_GPU else 1
    parts = min(layers, max(1, _BLOCKS * multiprocessors // batch))  # as many blocks as run at once
    shapes = (target_tokens.shape[1], path.accept_slots.shape[1], max_pages, page_size, words, layers)
    sizes = Sizes._make([*map(np.int32, shapes), np.int64(pages * page_size * words)])
    commit_side_kernel[(batch, parts), THREADS, stream](
        *map(_flat, (tree.token_ids, tree.first_child, tree.next_sibling, tree.node_count, target_tokens)),
        AcceptedPath(*map(_flat, path)),
        *map(_flat, (kv_pool, block_table, prefix_lengths, arrived, commit_status)),
        sizes,
    )


def _flat(array: Any) -> Any:
    return array.reshape(array.size)
