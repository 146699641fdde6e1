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

import numpy as np

from ddtree_numba.draft_tree import STATUS_BAD_PAGE, STATUS_BROKEN_LINK, STATUS_OK

__all__ = ["commit_kv_reference"]


def commit_kv_reference(
    kv_pool: np.ndarray,
    block_table: np.ndarray,
    prefix_lengths: np.ndarray,
    accept_slots: np.ndarray,
    accept_count: np.ndarray,
) -> np.ndarray:
    """Move the accepted rows and advance `prefix_lengths`, both in place; return `status` [B] int32.

    `kv_pool` [layers, pages, page_size, D] of any dtype, `block_table` [B, max_pages], `prefix_lengths` [B],
    `accept_slots` [B, L + 1] and `accept_count` [B] int32, the last two as stage 5 gives them.

    >>> pool = np.array([b"a", b"b", b"R", b"x", b"y", b"z", b"-", b"-"]).reshape(1, 4, 2, 1)  # pages of two rows
    >>> lengths = np.array([2], np.int32)
    >>> slots = np.array([[0, 2, 3]], np.int32)
    >>> table = np.array([[0, 1, 2, 3]], np.int32)
    >>> commit_kv_reference(pool, table, lengths, slots, np.array([3], np.int32)).tolist(), lengths.tolist()
    ([0], [5])
    >>> b"".join(pool.ravel().tolist())
    b'abRyzz--'
    """
    status = np.full(len(accept_count), STATUS_OK, np.int32)
    page_size = kv_pool.shape[2]
    for b, count in enumerate(accept_count.tolist()):
        slots, prefix = accept_slots[b].tolist(), int(prefix_lengths[b])
        status[b], _ = _fault(kv_pool, block_table[b], prefix, slots, count)
        if status[b] != STATUS_OK:
            continue
        moves = [k for k in range(count) if slots[k] != k]
        if moves:
            source = _places(block_table[b], page_size, [prefix + slots[k] for k in moves])
            target = _places(block_table[b], page_size, [prefix + k for k in moves])
            kv_pool[(slice(None), *target)] = kv_pool[(slice(None), *source)]  # the right side is a copy: all is read first
        prefix_lengths[b] = prefix + count
    return status


def _places(table: np.ndarray, page_size: int, rows: list[int]) -> tuple[list[int], list[int]]:
    return [int(table[row // page_size]) for row in rows], [row % page_size for row in rows]


def _fault(
    kv_pool: np.ndarray, table: np.ndarray, prefix: int, slots: list[int], count: int
) -> tuple[int, str]:
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
