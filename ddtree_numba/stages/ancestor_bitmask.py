"""Stage 3: parent links -> one packed visibility row per node, and every node's position in the text.

Node i may look at the prefix, at itself and at its ancestors. Row i holds that as bits: bit ``j % 32`` of word
``j // 32`` says whether i sees slot j.

A link is *whole* when it points to a smaller slot, and the root's when it is -1. A node whose chain of links up to the
root is not whole sees nothing (its row is 0), and the request's status says `STATUS_BROKEN_LINK`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.block_reduce import block_any
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BROKEN_LINK, STATUS_OK, mask_words

__all__ = [
    "ancestor_bitmask",
    "ancestor_bitmask_kernel",
    "ancestor_bitmask_reference",
    "positions",
    "positions_kernel",
    "positions_reference",
]


def ancestor_bitmask_reference(parents: np.ndarray, node_count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the visibility rows of every node, and a status per request.

    `parents` [B, N] int32 (root -1) and `node_count` [B] int32 -> `ancestor_bits` [B, N, W] uint32 with
    W = ceil(N / 32), rows from `node_count` on 0, and `status` [B] int32. A `node_count` outside 1..N is a broken
    request as well: all of its rows are 0. The tree mask of SpecInfer, arXiv 2305.09781, packed.

    Raises `TypeError` and `ValueError` as `ancestor_bitmask` does.

    >>> bits, status = ancestor_bitmask_reference(np.array([[-1, 0, 0, 1]], np.int32), np.array([4], np.int32))
    >>> [f"{row:04b}" for row in bits[0, :, 0].tolist()], status.tolist()
    (['0001', '0011', '0101', '1011'], [0])
    """
    batch, slots = _check_links(parents, node_count)
    words = mask_words(slots)
    bits = np.zeros((batch, slots, words), np.uint32)
    status = np.full(batch, STATUS_OK, np.int32)
    for b, count in enumerate(node_count.tolist()):
        if not 1 <= count <= slots:
            status[b], count = STATUS_BROKEN_LINK, 0
        rows: list[int] = []  # a row is one whole number of N bits here
        for slot, parent in enumerate(parents[b, :count].tolist()):
            if slot == 0:
                rows.append(1 if parent == -1 else 0)
            else:
                above = rows[parent] if 0 <= parent < slot else 0
                rows.append(above | 1 << slot if above else 0)
            if rows[slot] == 0:
                status[b] = STATUS_BROKEN_LINK
        packed = b"".join(row.to_bytes(4 * words, "little") for row in rows)
        bits[b, :count] = np.frombuffer(packed, "<u4").reshape(count, words)
    return bits, status


@cuda.jit(device=True)
def _whole_link(parents, b, slot):
    return parents[b, 0] == -1 if slot == 0 else 0 <= parents[b, slot] < slot


@cuda.jit
def ancestor_bitmask_kernel(parents, node_count, ancestor_bits, status):
    """Make one word of every row of one request in each block.

    parents (B, N int32): parent slots, root -1.
    node_count (B int32): used slots.
    ancestor_bits (B, N, W uint32), status (B int32): written.

    Launch: grid (B, W), block of any size, no shared memory. A thread takes a slot, walks up to the root and keeps the
    bits of its word in a register: no word is shared, so nothing is added up between threads.
    Needs: W = ceil(N / 32).
    """
    b, word = cuda.blockIdx.x, cuda.blockIdx.y
    slots = parents.shape[1]
    count = node_count[b]
    broken = count < 1 or count > slots
    if broken:
        count = 0

    for row in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        bits = np.uint32(0)
        if row < count:
            slot = row
            while slot > 0 and _whole_link(parents, b, slot):  # whole links fall, so this ends after `row` steps
                if slot // 32 == word:
                    bits |= np.uint32(1) << np.uint32(slot % 32)
                slot = parents[b, slot]
            if not _whole_link(parents, b, slot):
                bits = np.uint32(0)
                broken = True
            elif word == 0:
                bits |= np.uint32(1)
        ancestor_bits[b, row, word] = bits

    any_broken = block_any(np.int32(broken))
    if cuda.threadIdx.x == 0 and word == 0:  # every block of the request has seen the same links
        status[b] = STATUS_BROKEN_LINK if any_broken else STATUS_OK


def ancestor_bitmask(
    parents: Any, node_count: Any, *, out: tuple[Any, Any] | None = None, stream: Any = None
) -> tuple[Any, Any]:
    """Return ``(ancestor_bits, status)``, what `ancestor_bitmask_reference` defines, from `ancestor_bitmask_kernel`.

    parents (B, N int32): parent slots, root -1; N up to 1025.
    node_count (B int32): used slots.
    out (a pair of B, N, W uint32 and B int32): arrays to write into; stream: where to run.

    NumPy arrays are copied in and the results come back as NumPy; device arrays stay on the device.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout. A broken link is no error but `STATUS_BROKEN_LINK` in the request's status.
    """
    batch, slots = _check_links(parents, node_count)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (ancestor_bits, status)")

    transfer = Transfer(stream, {"parents": parents, "node_count": node_count})
    words = mask_words(slots)
    given_bits, given_status = (None, None) if out is None else out
    bits = transfer.output("ancestor_bits", given_bits, (batch, slots, words), np.uint32)
    status = transfer.output("status", given_status, (batch,), np.int32)
    launch = ancestor_bitmask_kernel[(batch, words), block_threads(128, simulator=2), transfer.stream]
    launch(transfer.input(parents), transfer.input(node_count), bits, status)
    return transfer.finish(bits, status)


def positions_reference(depths: np.ndarray, prefix_lengths: np.ndarray) -> np.ndarray:
    """Return every slot's position in the text: `depths` [B, N] and `prefix_lengths` [B] int32 -> [B, N] int32.

    The root stands at index `prefix_length`; siblings share a position, so it is never prefix length + slot: each is
    where its branch has it (SpecInfer, arXiv 2305.09781). Raises `TypeError` and `ValueError` as `positions` does.

    >>> positions_reference(np.array([[0, 1, 1, 2]], np.int32), np.array([10], np.int32)).tolist()
    [[10, 11, 11, 12]]
    """
    _check_depths(depths, prefix_lengths)
    return (prefix_lengths[:, None] + depths).astype(np.int32)


@cuda.jit
def positions_kernel(depths, prefix_lengths, positions):
    """Write the positions of one request's slots in each block.

    depths (B, N int32), prefix_lengths (B int32).
    positions (B, N int32): written.

    Launch: grid B, block of any size, no shared memory.
    """
    b = cuda.blockIdx.x
    for slot in range(cuda.threadIdx.x, depths.shape[1], cuda.blockDim.x):
        positions[b, slot] = prefix_lengths[b] + depths[b, slot]


def positions(depths: Any, prefix_lengths: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Return positions [B, N] int32, what `positions_reference` defines, from `positions_kernel`.

    depths (B, N int32): edges from the root; N up to 1025.
    prefix_lengths (B int32): rows in the KV cache, the root's not among them.
    out (B, N int32): array to write into; stream: where to run.

    NumPy arrays are copied in and the result comes back as NumPy; device arrays stay on the device.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout.
    """
    batch, slots = _check_depths(depths, prefix_lengths)
    transfer = Transfer(stream, {"depths": depths, "prefix_lengths": prefix_lengths})
    result = transfer.output("positions", out, (batch, slots), np.int32)
    launch = positions_kernel[batch, block_threads(128, simulator=1), transfer.stream]
    launch(transfer.input(depths), transfer.input(prefix_lengths), result)
    return transfer.finish(result)[0]


def _check_links(parents: Any, node_count: Any) -> tuple[int, int]:
    """Return B and N of the bitmask's arguments; raise naming the one that is wrong."""
    check = ArrayCheck()
    batch, slots = check("parents", parents, "B N", (np.int32,))
    check("node_count", node_count, "B", (np.int32,))
    check_integer("B of parents", batch, 1, 2**31 - 1)
    return batch, check_integer("N of parents", slots, 1, MAX_BUDGET + 1)


def _check_depths(depths: Any, prefix_lengths: Any) -> tuple[int, int]:
    """Return B and N of the positions' arguments; raise naming the one that is wrong."""
    check = ArrayCheck()
    batch, slots = check("depths", depths, "B N", (np.int32,))
    check("prefix_lengths", prefix_lengths, "B", (np.int32,))
    check_integer("B of depths", batch, 1, 2**31 - 1)
    return batch, check_integer("N of depths", slots, 1, MAX_BUDGET + 1)
