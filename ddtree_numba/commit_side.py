"""Stages 5 and 6 as one launch: the walk, the check, the advance and the move.

Launched one after the other they do little work and much waiting: for the memory at every look of the walk, for each
other, for every row before the next. Here each block does all of it for some layers of a request:

- *The tree is loaded at once.* A thread copies a slot into shared memory, all slots together. Then one thread walks,
  and a look at a node is a load from there and not from the L2. Meanwhile the others look up the row of every slot,
  which the check and the move need.
- *Nothing is handed on.* Every block of a request walks for itself: it would have to wait for the path in any case.
- *The old length.* All blocks of a request read it, so the last one to say that it has read it writes the new one.
- *All rows are loaded at once.* A warp moves a row: loads it, waits for the others at a barrier, stores it.

What it buys: measured on an H200, one request of 61 layers whose path has 3 nodes, nothing in the L2: 3.6 us where a
launch for the walk and the lengths and one for the rows took 5.8 and 5.5 and a pause.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BAD_PAGE, STATUS_OK, DraftTree
from ddtree_numba.ptx import fence, inlined, kernel_for
from ddtree_numba.stages.accept_walk import AcceptedPath, walk

__all__ = ["MAX_DRAFT_LENGTH", "commit_side_kernel", "launch_commit_side"]

MAX_DRAFT_LENGTH = 64
"""The largest L."""

THREADS = block_threads(512, simulator=8)
_BLOCKS = 4  # that share a multiprocessor
_LANES = 32 if ON_GPU else 1
_WARPS = THREADS // _LANES
_WORDS = 5  # of a row that a lane has on their way: 8 bytes each, a row of 576 bfloat16 in a warp
_MOST_SLOTS, _MOST_COLUMNS = MAX_BUDGET + 1, MAX_DRAFT_LENGTH + 1
_ACCEPTED, _STATUS = 0, 1  # places in the shared `walked`


@inlined
def _row(b, prefix, slot, page_size, pool_rows, block_table):
    """Return where in each layer of the pool, seen as rows, the row of request `b`'s `slot` is; negative: nowhere."""
    if prefix < 0:
        return np.int64(-1)
    index = np.uint32(np.uint32(prefix) + slot)  # the sum of two int32 fits an unsigned one
    column = np.uint32(index // np.uint32(page_size))
    if column >= block_table.shape[1]:
        return np.int64(-1)
    row = np.int64(block_table[b, column]) * page_size + np.uint32(index - np.uint32(column * np.uint32(page_size)))
    return row if row < pool_rows else np.int64(-1)


@inlined
def _move(kv_pool, part, parts, count, accepted, row_of):
    """Move the rows of the path's `count` slots in every layer that is this block's: a row for each warp at a time.

    No row is lost: row k, which move k overwrites, is read by moves before it alone, see `commit_kv_kernel`, and those
    have read when the barrier is passed. The root is in its place.
    """
    held = cuda.local.array(_WORDS, kv_pool.dtype)
    thread, layers, words = np.uint32(cuda.threadIdx.x), np.uint32(kv_pool.shape[0]), np.uint64(kv_pool.shape[2])
    lane, warp = np.uint64(thread % np.uint32(_LANES)), np.uint32(thread // np.uint32(_LANES))
    moves = np.uint32(count - np.uint32(1))
    rows = np.uint32(moves * np.uint32((layers - part + parts - np.uint32(1)) // parts))
    first = np.uint32(0)
    while first < rows:
        row = np.uint32(first + warp)
        nth = np.uint32(row // moves)
        k, layer = np.uint32(row - nth * moves + np.uint32(1)), np.uint32(part + nth * parts)
        slot = np.uint32(accepted[k])
        source, target = np.uint64(row_of[slot]), np.uint64(row_of[k])
        end = words if row < rows and slot != k else np.uint64(0)
        word = lane
        while word < np.uint64(words + lane):
            for i in range(_WORDS):
                if word + np.uint64(i * _LANES) < end:
                    held[i] = kv_pool[layer, source, word + np.uint64(i * _LANES)]
            cuda.syncthreads()  # all warps have read
            for i in range(_WORDS):
                if word + np.uint64(i * _LANES) < end:
                    kv_pool[layer, target, word + np.uint64(i * _LANES)] = held[i]
            word = np.uint64(word + np.uint64(_WORDS * _LANES))
        first = np.uint32(first + np.uint32(_WARPS))


@kernel_for(THREADS, _BLOCKS)
def commit_side_kernel(
    tree, target_tokens, path, kv_pool, page_size, block_table, prefix_lengths, arrived, commit_status
):
    """Walk the tree of one request and move the accepted rows of some layers in each block.

    tree (DraftTree, N slots), target_tokens (B, N int32), path (AcceptedPath): as in `accept_walk_kernel`.
    kv_pool ([layers, pages * page_size, words], any integers or floats): changed in place.
    page_size (int32): rows of a page.
    block_table (B, max_pages int32).
    prefix_lengths (B int32): advanced, unless the request gets a status.
    arrived (B uint32): 0 before a launch and after it.
    commit_status (B int32): written, as by `advance_lengths_kernel`.

    Launch: grid (B, P), block THREADS, 25 KB of static shared memory. Layers p, p + P, p + 2 P, ... are of block p.
    Needs: N <= 1025, L <= 64.
    """
    tokens = cuda.shared.array(_MOST_SLOTS, np.int32)
    first_child = cuda.shared.array(_MOST_SLOTS, np.int32)
    next_sibling = cuda.shared.array(_MOST_SLOTS, np.int32)
    targets = cuda.shared.array(_MOST_SLOTS, np.int32)
    row_of = cuda.shared.array(_MOST_SLOTS, np.int64)
    accepted = cuda.shared.array(_MOST_COLUMNS, np.int32)
    walked = cuda.shared.array(2, np.int32)

    # Steps are `blockDim.x`, though it is THREADS: a loop whose step is a constant is unrolled, and few turn twice.
    b, thread, threads = cuda.blockIdx.x, np.uint32(cuda.threadIdx.x), np.uint32(cuda.blockDim.x)
    part, parts = np.uint32(cuda.blockIdx.y), np.uint32(cuda.gridDim.y)
    slots, columns = np.uint32(target_tokens.shape[1]), np.uint32(path.accept_slots.shape[1])
    prefix, node_count = prefix_lengths[b], tree.node_count[b]
    slot = thread
    while slot < slots:
        tokens[slot] = tree.token_ids[b, slot]
        first_child[slot] = tree.first_child[b, slot]
        next_sibling[slot] = tree.next_sibling[b, slot]
        targets[slot] = target_tokens[b, slot]
        slot = np.uint32(slot + threads)
    cuda.syncthreads()  # the tree is there, and all threads have read the length

    before = np.uint32(0)
    if thread == 0:
        links = (tokens[:slots], first_child, next_sibling)
        count, status = walk(*links, targets, node_count, accepted[:columns])
        walked[_ACCEPTED], walked[_STATUS] = count, status
    elif thread >= _LANES:  # the walker's warp does nothing else: lanes that part take turns
        if thread == threads - np.uint32(1):
            fence()  # what this block has read comes before its arrival
            before = cuda.atomic.inc(arrived, b, np.uint32(parts - np.uint32(1)))
        slot = np.uint32(thread - np.uint32(_LANES))
        while slot < slots:
            row_of[slot] = _row(b, prefix, slot, page_size, kv_pool.shape[1], block_table)
            slot = np.uint32(slot + np.uint32(threads - np.uint32(_LANES)))
    cuda.syncthreads()  # path and rows are there

    count = np.uint32(walked[_ACCEPTED])
    outside = np.int32(0)
    k = thread
    while k < count:
        outside |= np.int32(row_of[k] < 0 or row_of[np.uint32(accepted[k])] < 0)
        k = np.uint32(k + threads)
    bad = cuda.syncthreads_or(outside)
    if not bad:
        _move(kv_pool, part, parts, count, accepted, row_of)
        if thread == threads - np.uint32(1) and before == parts - np.uint32(1):
            prefix_lengths[b] = np.int32(prefix + np.int32(count))

    if part == 0:
        if thread == 0:
            path.accept_count[b] = np.int32(count)
            path.status[b] = walked[_STATUS]
            commit_status[b] = STATUS_BAD_PAGE if bad else STATUS_OK
        k = thread
        while k < columns:
            slot = accepted[k] if k < count else np.int32(-1)
            path.accept_slots[b, k] = slot
            path.accept_tokens[b, k] = targets[np.uint32(slot)] if slot >= 0 else np.int32(-1)
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
    """Launch the kernel on device arrays: `kv_pool` [layers, pages, page_size, words], the others as it takes them."""
    batch, (layers, pages, page_size, words) = len(prefix_lengths), kv_pool.shape
    multiprocessors = cuda.get_current_device().MULTIPROCESSOR_COUNT if ON_GPU else 1
    parts = min(layers, max(1, _BLOCKS * multiprocessors // batch))  # as many blocks as run at once
    pool = kv_pool.reshape(layers, pages * page_size, words)
    commit_side_kernel[(batch, parts), THREADS, stream](
        tree, target_tokens, path, pool, np.int32(page_size), block_table, prefix_lengths, arrived, commit_status
    )
