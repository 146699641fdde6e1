"""Stage 6: the KV rows of the accepted path move to the end of the prefix, and the prefix grows by them.

The target has written the row of slot s at index prefix + s of its request. The path accepted, say, slots 0, 4, 7:
their rows belong at prefix, prefix + 1, prefix + 2. An index is found through the block table, as everywhere: row i of
request b lies in page ``block_table[b, i // page_size]``, at place ``i % page_size`` of it.

A request moves as a whole or not at all. Before anything of it moves:

- `accept_count` must be from 0 to the columns of `accept_slots`, and the slots used must rise, from 0 on:
  else `STATUS_BROKEN_LINK`;
- every row it reads or writes must lie inside the block table and in a page of the pool: else `STATUS_BAD_PAGE`.

A request with a status keeps its rows and its length. `accept_count` 0 is a request that sits this round out.

Two things are the caller's word. Pages that a request writes belong to it alone: no other request of the batch has
them, and it has each once. (Pages of a shared prefix may be shared: rows before the prefix's end are never written.)
And lengths are int32, so a block table of more than 2**31 - 1 rows is of no use; addresses are 64-bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.device_library import as_device
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BAD_PAGE, STATUS_BROKEN_LINK, STATUS_OK

__all__ = [
    "advance_lengths_kernel",
    "check_commit",
    "commit_kv",
    "commit_kv_kernel",
    "commit_kv_reference",
    "kv_words",
]


_POOL_DTYPES = tuple(np.dtype(code) for code in "bBhHiIlLefd")  # whole numbers and floats of 1, 2, 4 and 8 bytes


def commit_kv_reference(
    kv_pool: np.ndarray,
    block_table: np.ndarray,
    prefix_lengths: np.ndarray,
    accept_slots: np.ndarray,
    accept_count: np.ndarray,
) -> np.ndarray:
    """Move the accepted rows and advance `prefix_lengths`, both in place; return `status` [B] int32.

    `kv_pool` [layers, pages, page_size, D] of any dtype, `block_table` [B, max_pages], `prefix_lengths` [B],
    `accept_slots` [B, L + 1] and `accept_count` [B] int32, the last two as stage 5 gives them. The compaction after
    verification of DDTree, arXiv 2604.12989. Raises `TypeError` and `ValueError` as `commit_kv` does.

    >>> pool = np.frombuffer(b"abRxyz--", np.uint8).reshape(1, 4, 2, 1).copy()  # pages of two rows
    >>> lengths = np.array([2], np.int32)
    >>> slots = np.array([[0, 2, 3]], np.int32)
    >>> table = np.array([[0, 1, 2, 3]], np.int32)
    >>> commit_kv_reference(pool, table, lengths, slots, np.array([3], np.int32)).tolist(), lengths.tolist()
    ([0], [5])
    >>> pool.tobytes()
    b'abRyzz--'
    """
    batch, _ = check_commit(kv_pool, block_table, prefix_lengths, accept_slots, accept_count)
    for name, array in (("kv_pool", kv_pool), ("prefix_lengths", prefix_lengths)):
        if not array.flags.writeable:
            raise ValueError(f"{name}: got a read-only array, needs one that can be written")
    status = np.full(batch, STATUS_OK, np.int32)
    page_size = kv_pool.shape[2]
    for b, count in enumerate(accept_count.tolist()):
        slots, prefix = accept_slots[b].tolist(), int(prefix_lengths[b])
        status[b], _ = _fault(kv_pool, block_table[b], prefix, slots, count)
        if status[b] != STATUS_OK:
            continue
        moves = [k for k in range(count) if slots[k] != k]
        if moves:
            from_page, from_place = _places(block_table[b], page_size, [prefix + slots[k] for k in moves])
            to_page, to_place = _places(block_table[b], page_size, [prefix + k for k in moves])
            # The right side is a copy: every row is read before any is written.
            kv_pool[:, to_page, to_place] = kv_pool[:, from_page, from_place]
        prefix_lengths[b] = prefix + count
    return status


def _places(table: np.ndarray, page_size: int, rows: list[int]) -> tuple[list[int], list[int]]:
    return [int(table[row // page_size]) for row in rows], [row % page_size for row in rows]


def _fault(kv_pool: np.ndarray, table: np.ndarray, prefix: int, slots: list[int], count: int) -> tuple[int, str]:
    """Return what forbids one request's commit: a status and words for it, or `STATUS_OK` and none."""
    pages, page_size = kv_pool.shape[1:3]
    if not 0 <= count <= len(slots):
        return STATUS_BROKEN_LINK, f"accept_count: got {count}, needs 0 to {len(slots)}"
    used = slots[:count]
    if not used:
        return STATUS_OK, ""
    if used != sorted(set(used)) or used[0] < 0:
        return STATUS_BROKEN_LINK, f"accept_slots: got {used}, needs slots that rise from 0 or more"
    rows = len(table) * page_size
    if prefix < 0 or prefix + used[-1] >= rows:
        return STATUS_BAD_PAGE, (
            f"prefix_lengths: got {prefix} with slot {used[-1]}, needs rows inside the block table's {rows}"
        )
    for slot in {*used, *range(count)}:
        page = int(table[(prefix + slot) // page_size])
        if not 0 <= page < pages:
            return STATUS_BAD_PAGE, f"block_table: got page {page}, needs 0 to {pages - 1}"
    return STATUS_OK, ""


@cuda.jit
def advance_lengths_kernel(kv_pool, block_table, prefix_lengths, accept_slots, accept_count, status):
    """Check the commit of one request in each thread and, if nothing forbids it, advance the request's length.

    Runs before `commit_kv_kernel`, with the same arguments: thousands of blocks move rows of one request, and all of
    them need the same verdict and the same old length. So one thread decides, once, and the length changes while no
    block reads it; the blocks take the old one to be the new one less `accept_count`.

    kv_pool ([layers, pages, page_size, words]): only its shape is read.
    block_table (B, max_pages int32), accept_slots (B, L + 1 int32), accept_count (B int32).
    prefix_lengths (B int32): advanced.
    status (B int32): written.

    Launch: enough threads for B, in blocks of any size, no shared memory.
    """
    b = cuda.grid(1)
    if b >= status.shape[0]:
        return
    count = accept_count[b]
    if count < 0 or count > accept_slots.shape[1]:
        status[b] = STATUS_BROKEN_LINK
        return
    previous = -1
    for k in range(count):
        if accept_slots[b, k] <= previous:
            status[b] = STATUS_BROKEN_LINK
            return
        previous = accept_slots[b, k]

    pages, page_size = kv_pool.shape[1], kv_pool.shape[2]
    prefix = np.int64(prefix_lengths[b])  # a sum of two int32 may not fit one
    if count > 0 and (prefix < 0 or prefix + previous >= block_table.shape[1] * page_size):
        status[b] = STATUS_BAD_PAGE
        return
    for k in range(count):
        source_page = block_table[b, (prefix + accept_slots[b, k]) // page_size]
        target_page = block_table[b, (prefix + k) // page_size]
        if min(source_page, target_page) < 0 or max(source_page, target_page) >= pages:
            status[b] = STATUS_BAD_PAGE
            return
    status[b] = STATUS_OK
    prefix_lengths[b] = prefix + count


@cuda.jit
def commit_kv_kernel(kv_pool, block_table, prefix_lengths, accept_slots, accept_count, status):
    """Move the accepted rows of one request in one layer in each block.

    No row is lost. Row prefix + k, which move k overwrites, is the source of move j only if accept_slots[j] = k; slots
    rise, so j <= k. Move j < k has been made before, and j = k needs none. That order has to hold only within a
    column, and each column is moved by one thread from k = 0 on: no barrier.

    kv_pool ([layers, pages, page_size, words], any integers or floats): changed in place.
    block_table (B, max_pages int32), accept_slots (B, L + 1 int32), accept_count (B int32).
    prefix_lengths, status (B int32): as `advance_lengths_kernel` left them; a request with a status is not touched.

    Launch: grid (B, layers), block of any size, no shared memory.
    Needs: `advance_lengths_kernel` before it on the same stream; at most 65535 layers.
    """
    b, layer = cuda.blockIdx.x, cuda.blockIdx.y
    if status[b] != STATUS_OK:
        return
    page_size, words = kv_pool.shape[2], kv_pool.shape[3]
    prefix = np.int64(prefix_lengths[b]) - accept_count[b]
    for k in range(accept_count[b]):
        slot = accept_slots[b, k]
        if slot == k:
            continue  # it is there already
        source, target = prefix + slot, prefix + k
        source_page, source_place = block_table[b, source // page_size], source % page_size
        target_page, target_place = block_table[b, target // page_size], target % page_size
        for word in range(cuda.threadIdx.x, words, cuda.blockDim.x):
            kv_pool[layer, target_page, target_place, word] = kv_pool[layer, source_page, source_place, word]


def kv_words(kv_pool: Any) -> Any:
    """Return a device `kv_pool` seen as the widest words that its rows divide into, for `commit_kv_kernel`.

    A row moves the same whatever its numbers are: 576 bfloat16 are 144 words of 8 bytes, a quarter of the loads. And a
    NaN in an integer register keeps all of its bits.
    """
    if not ON_GPU:
        return kv_pool  # the simulator's arrays can't be seen as another type, and its scalars keep their bits
    pool = as_device(kv_pool)
    row_bytes, address = pool.shape[3] * pool.dtype.itemsize, pool.__cuda_array_interface__["data"][0]
    for word in (np.uint64, np.uint32, np.uint16):
        size = np.dtype(word).itemsize
        if row_bytes % size == 0 and address % size == 0:
            return pool.view(word)
    return pool.view(np.uint8)


def commit_kv(
    kv_pool: Any,
    block_table: Any,
    prefix_lengths: Any,
    accept_slots: Any,
    accept_count: Any,
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Do what `commit_kv_reference` defines, with `commit_kv_kernel`: `kv_pool` and `prefix_lengths` change in place.

    kv_pool (layers, pages, page_size, D of any integers or floats): rows are moved; bfloat16 and float8 as uint.
    block_table (B, max_pages int32): pages of each request, in the order of its rows.
    prefix_lengths (B int32): advanced by `accept_count`.
    accept_slots (B, L + 1 int32), accept_count (B int32): as stage 5 gives them.
    out (B int32): the status array to write into; stream: where to run.

    Returns the status. NumPy arrays are copied in and back; device arrays stay on the device.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout. The contents of NumPy arrays are looked at first: what would give a request a status raises
    `ValueError` instead, and nothing changes.
    """
    batch, layers = check_commit(kv_pool, block_table, prefix_lengths, accept_slots, accept_count)
    inputs = {"block_table": block_table, "accept_slots": accept_slots, "accept_count": accept_count}
    transfer = Transfer(stream, {"kv_pool": kv_pool, "prefix_lengths": prefix_lengths, **inputs})
    if transfer.on_host:
        for b, count in enumerate(accept_count.tolist()):
            _, words = _fault(kv_pool, block_table[b], int(prefix_lengths[b]), accept_slots[b].tolist(), count)
            if words:
                raise ValueError(f"{words} (request {b})")
    pool, lengths = transfer.inout("kv_pool", kv_pool), transfer.inout("prefix_lengths", prefix_lengths)
    status = transfer.output("status", out, (batch,), np.int32)
    table, slots, counts = map(transfer.input, inputs.values())

    arguments = (kv_words(pool), table, lengths, slots, counts, status)
    threads = block_threads(32, simulator=8)
    advance_lengths_kernel[-(-batch // threads), threads, transfer.stream](*arguments)
    commit_kv_kernel[(batch, layers), block_threads(128, simulator=4), transfer.stream](*arguments)
    return transfer.finish(status, pool, lengths)[0]


def check_commit(
    kv_pool: Any, block_table: Any, prefix_lengths: Any, accept_slots: Any, accept_count: Any
) -> tuple[int, int]:
    """Return B and the layers of the stage's arguments; raise naming the one that is wrong."""
    check = ArrayCheck()
    layers, pages, page_size, width = check("kv_pool", kv_pool, "layers pages page_size D", _POOL_DTYPES)
    batch, max_pages = check("block_table", block_table, "B max_pages", (np.int32,))
    check("prefix_lengths", prefix_lengths, "B", (np.int32,))
    columns = check("accept_slots", accept_slots, "B columns", (np.int32,))[1]
    check("accept_count", accept_count, "B", (np.int32,))
    check_integer("layers of kv_pool", layers, 1, 65535)
    for size, what in ((pages, "pages"), (page_size, "page_size"), (width, "D")):
        check_integer(f"{what} of kv_pool", size, 1, 2**31 - 1)
    check_integer("B of block_table", batch, 1, 2**31 - 1)
    check_integer("max_pages of block_table", max_pages, 1, 2**31 - 1)
    check_integer("columns of accept_slots", columns, 1, MAX_BUDGET + 1)
    return batch, layers
