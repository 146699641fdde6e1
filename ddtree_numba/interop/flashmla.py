"""FlashMLA: index lists for its sparse attention, which then is tree attention.

Facts: README of `deepseek-ai/FlashMLA` (MIT). `indices` [B, N, topk] int32 lists the cache rows that a query attends
to, as ``page * page_size + place``; -1 stands for none. Each query has its own list, so a tree needs no mask: a node's
list is its prefix's rows and its ancestors'. The kernels want topk in whole tiles (64 for sparse decoding); the `lse`
of the prefill kernel is in base 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import STATUS_BAD_PAGE, STATUS_OK, STATUS_TOO_SMALL, DraftTree
from ddtree_numba.interop.launching import check_bridged_tree, for_each, launch
from ddtree_numba.interop.visibility import check_prefixes, visible

__all__ = ["sparse_indices", "sparse_indices_kernel", "sparse_indices_reference"]

_TILE = 64
_MOST_ROWS = 2**31 - 1


def sparse_indices_reference(
    tree: DraftTree,
    prefix_lengths: np.ndarray,
    block_table: np.ndarray,
    page_size: int,
    topk: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(indices, status)``: the rows that every node attends to, [B, N, topk] int32, and [B] int32.

    `tree` (bits filled), `prefix_lengths` [B], `block_table` [B, max_pages] int32: row r of request b lies in page
    ``block_table[b, r // page_size]`` at place ``r % page_size``, slot j's at r = prefix length + j. First the prefix,
    then the node's ancestors and itself, rising; then -1. An unused slot's list is -1 all along. `topk` is by default
    the longest list in whole tiles of 64.

    Raises `ValueError` for a list longer than `topk` and for a row without a page.

    >>> from ddtree_numba.draft_tree import random_tree
    >>> tree = random_tree(np.random.default_rng(0), batch=1, budget=2, node_counts=[3], max_depth=1)
    >>> lists, _ = sparse_indices_reference(tree, np.array([3], np.int32), np.array([[7, 2, 5]], np.int32), 2, topk=6)
    >>> lists[0].tolist()
    [[14, 15, 4, 5, -1, -1], [14, 15, 4, 5, 10, -1], [14, 15, 4, 5, 11, -1]]
    """
    batch, slots, topk = _check(tree, prefix_lengths, block_table, page_size, topk)
    _check_contents(tree, prefix_lengths, block_table, page_size, topk)
    indices = np.full((batch, slots, topk), -1, np.int32)
    sees = visible(tree.ancestor_bits)
    for b, prefix in enumerate(prefix_lengths.tolist()):
        for node in range(int(tree.node_count[b])):
            rows = np.concatenate([np.arange(prefix), prefix + np.flatnonzero(sees[b, node])])
            pages = block_table[b, rows // page_size].astype(np.int64)
            indices[b, node, : len(rows)] = pages * page_size + rows % page_size
    return indices, np.full(batch, STATUS_OK, np.int32)


@cuda.jit(device=True)
def _cache_row(block_table, b, row, page_size):
    """Return where row `row` of request b lies, -1 without a place."""
    page = row // page_size
    if row < 0 or page >= block_table.shape[1] or block_table[b, page] < 0:
        return np.int64(-1)
    place = np.int64(block_table[b, page]) * page_size + row % page_size
    return place if place <= _MOST_ROWS else np.int64(-1)


@cuda.jit
def sparse_indices_kernel(ancestor_bits, node_count, prefix_lengths, block_table, page_size, indices, status):
    """Write the list of one node in each block.

    ancestor_bits (B, N, W uint32), node_count (B int32): the tree.
    prefix_lengths (B int32), block_table (B, max_pages int32), page_size (int): where rows lie.
    indices (B, N, topk int32): written.
    status (B int32): set to `STATUS_OK` beforehand; bits are added here.

    Launch: grid (N, B), block of any size, no shared memory. A visible slot's place in the list is the prefix and the
    number of visible slots before it, which are bits to count: no thread waits for another.
    """
    node, b = cuda.blockIdx.x, cuda.blockIdx.y
    topk, slots = indices.shape[2], ancestor_bits.shape[1]
    prefix = np.int64(prefix_lengths[b])
    used = node < node_count[b] and prefix >= 0
    length = prefix if used else np.int64(0)
    if used:
        for word in range(ancestor_bits.shape[2]):
            length += cuda.popc(ancestor_bits[b, node, word])
    fault = 0
    if prefix < 0:
        fault |= STATUS_BAD_PAGE
    if length > topk:
        fault |= STATUS_TOO_SMALL
    for place in range(cuda.threadIdx.x, topk, cuda.blockDim.x):
        if place < prefix and used:
            row = _cache_row(block_table, b, np.int64(place), page_size)
            indices[b, node, place] = row
            if row < 0:
                fault |= STATUS_BAD_PAGE
        elif place >= length:
            indices[b, node, place] = -1
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        bits = ancestor_bits[b, node, slot // 32]
        if used and (bits >> np.uint32(slot % 32)) & np.uint32(1) != 0:
            place = prefix + cuda.popc(
                np.uint32(bits & np.uint32((np.uint32(1) << np.uint32(slot % 32)) - np.uint32(1)))
            )
            for word in range(slot // 32):
                place += cuda.popc(ancestor_bits[b, node, word])
            if place < topk:
                row = _cache_row(block_table, b, prefix + slot, page_size)
                indices[b, node, place] = row
                if row < 0:
                    fault |= STATUS_BAD_PAGE
    if fault != 0:
        cuda.atomic.or_(status, b, fault)


@cuda.jit
def clear_status_kernel(status):
    """Set `status` (B int32) to `STATUS_OK`. Launch: any grid and block."""
    for b in range(cuda.grid(1), status.shape[0], cuda.gridsize(1)):
        status[b] = STATUS_OK


def sparse_indices(
    tree: DraftTree,
    prefix_lengths: Any,
    block_table: Any,
    page_size: int,
    topk: int | None = None,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Return ``(indices, status)``, what `sparse_indices_reference` defines, from `sparse_indices_kernel`.

    tree (DraftTree, bits filled), prefix_lengths (B int32), block_table (B, max_pages int32), page_size (int).
    topk (int): length of each list; needed for device arrays, whose lengths are not looked at on the host.
    out (a pair of B, N, topk int32 and B int32): arrays to write into; stream: where to run.

    On device arrays a list that is too long is cut and a row without a page is -1; the status says `STATUS_TOO_SMALL`
    or `STATUS_BAD_PAGE`. With NumPy arrays both are `ValueError`.
    """
    batch, slots, topk = _check(tree, prefix_lengths, block_table, page_size, topk)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (indices, status)")
    fields = {f"tree.{name}": array for name, array in tree._asdict().items()}
    transfer = Transfer(stream, {**fields, "prefix_lengths": prefix_lengths, "block_table": block_table})
    if transfer.on_host:
        _check_contents(tree, prefix_lengths, block_table, page_size, topk)
    given_indices, given_status = (None, None) if out is None else out
    indices = transfer.output("indices", given_indices, (batch, slots, topk), np.int32)
    status = transfer.output("status", given_status, (batch,), np.int32)
    for_each(clear_status_kernel, batch, transfer.stream)(status)
    launch(sparse_indices_kernel, (slots, batch), 128, transfer.stream)(
        *map(transfer.input, (tree.ancestor_bits, tree.node_count, prefix_lengths, block_table)),
        page_size,
        indices,
        status,
    )
    return transfer.finish(indices, status)


def _check(tree: Any, prefix_lengths: Any, block_table: Any, page_size: int, topk: int | None) -> tuple[int, int, int]:
    """Return B, N and topk."""
    check = ArrayCheck()
    batch, slots = check_bridged_tree(tree, check)
    check_integer("B of tree", batch, 1, 65535)
    check("prefix_lengths", prefix_lengths, "B", (np.int32,))
    pages = check("block_table", block_table, "B max_pages", (np.int32,))[1]
    check_integer("max_pages of block_table", pages, 1, 2**31 - 1)
    check_integer("page_size", page_size, 1, 2**31 - 1)
    if topk is None:
        if not isinstance(prefix_lengths, np.ndarray):
            raise TypeError("topk: got None, needs the length of a list: lengths on the device are not looked at here")
        longest = check_prefixes(prefix_lengths) + int(tree.depths.max()) + 1
        topk = -(-longest // _TILE) * _TILE
    return batch, slots, check_integer("topk", topk, 1, 2**31 - 1)


def _check_contents(
    tree: DraftTree, prefix_lengths: np.ndarray, block_table: np.ndarray, page_size: int, topk: int
) -> None:
    """Raise `ValueError` when NumPy arrays ask for a longer list or for a row without a page."""
    check_prefixes(prefix_lengths)
    for b, prefix in enumerate(prefix_lengths.tolist()):
        longest = prefix + int(tree.depths[b].max()) + 1
        if longest > topk:
            raise ValueError(f"topk: got {topk}, needs {longest} for the prefix and the deepest path of request {b}")
        rows = prefix + int(tree.node_count[b])
        needed = -(-rows // page_size)
        if needed > block_table.shape[1]:
            raise ValueError(f"block_table: got {block_table.shape[1]} pages, needs {needed} for request {b}")
        pages = block_table[b, :needed].astype(np.int64)
        if pages.min() < 0 or (pages.max() + 1) * page_size - 1 > _MOST_ROWS:
            raise ValueError(
                f"block_table[{b}]: got pages {pages.min()} to {pages.max()}, needs rows that int32 counts"
            )
