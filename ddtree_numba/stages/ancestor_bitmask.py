"""Stage 3: parent links -> one packed visibility row per node, and every node's position in the text.

Node i may look at the prefix, at itself and at its ancestors. Row i holds that as bits: bit ``j % 32`` of word
``j // 32`` says whether i sees slot j.

A link is *whole* when it points to a smaller slot, and the root's when it is -1. A node whose chain of links up to the
root is not whole sees nothing (its row is 0), and the request's status says `STATUS_BROKEN_LINK`.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.draft_tree import STATUS_BROKEN_LINK, STATUS_OK, mask_words

__all__ = ["ancestor_bitmask_reference", "positions_reference"]


def ancestor_bitmask_reference(parents: np.ndarray, node_count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the visibility rows of every node, and a status per request.

    `parents` [B, N] int32 (root -1) and `node_count` [B] int32 -> `ancestor_bits` [B, N, W] uint32 with
    W = ceil(N / 32), rows from `node_count` on 0, and `status` [B] int32. A `node_count` outside 1..N is a broken
    request as well: all of its rows are 0.

    >>> bits, status = ancestor_bitmask_reference(np.array([[-1, 0, 0, 1]], np.int32), np.array([4], np.int32))
    >>> [f"{row:04b}" for row in bits[0, :, 0].tolist()], status.tolist()
    (['0001', '0011', '0101', '1011'], [0])
    """
    batch, slots = parents.shape
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


def positions_reference(depths: np.ndarray, prefix_lengths: np.ndarray) -> np.ndarray:
    """Return every slot's position in the text: `depths` [B, N] and `prefix_lengths` [B] int32 -> [B, N] int32.

    The root stands at index `prefix_length`; siblings share a position, so it is never prefix length + slot.

    >>> positions_reference(np.array([[0, 1, 1, 2]], np.int32), np.array([10], np.int32)).tolist()
    [[10, 11, 11, 12]]
    """
    return (prefix_lengths[:, None] + depths).astype(np.int32)
