"""Stage 5: the target's token at every node -> the accepted path and the bonus token.

The walk starts at the root. Among the children of the node it stands on it looks for the one that holds the target's
token there, along the chain `first_child`, `next_sibling`, `next_sibling`, ...: the first that matches is the next
node. Where none matches the walk ends, and the target's token at that last node is the *bonus token*. The path gives
the emitted tokens: those of its nodes below the root, then the bonus.

A tree that a kernel is handed may be broken, and the walk still ends:

- A link is -1 or a slot that is used and larger than the parent's; siblings may be chained in any order. Anything else
  is a broken link.
- No node is looked at twice in a whole tree. A walk that wants to look at more nodes than the tree has below its root
  goes in a circle.
- A `node_count` outside 1..N is taken for the nearest number inside.

Each of these ends or marks the walk with `STATUS_BROKEN_LINK`. What was accepted until then stays accepted, and the
bonus is the target's token at the last good node. So slots on a path always rise, whatever the tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.draft_tree import STATUS_BROKEN_LINK, STATUS_OK, STATUS_TOO_DEEP, DraftTree

__all__ = ["AcceptedPath", "accept_walk_reference"]


class AcceptedPath(NamedTuple):
    """What a batch of walks accepted, as arrays (B requests, L = the longest path, the root not counted)."""

    accept_slots: Any
    """[B, L + 1] int32: slots of the path, root first; unused -1."""
    accept_tokens: Any
    """[B, L + 1] int32: emitted tokens: the accepted draft tokens, then the bonus token; unused -1."""
    accept_count: Any
    """[B] int32: how many of both are used, 1..L + 1: the bonus counts, so does the root."""
    status: Any
    """[B] int32: `STATUS_OK`, or the bits `STATUS_BROKEN_LINK` and `STATUS_TOO_DEEP`."""


def accept_walk_reference(
    tree: DraftTree, target_tokens: np.ndarray, draft_length: int | None = None
) -> AcceptedPath:
    """Return the accepted path of every request's `tree` under `target_tokens` [B, N] int32.

    `draft_length` is L, N - 1 when None; a path that wants to go deeper stops there with `STATUS_TOO_DEEP`.
    Greedy verification of a draft tree: DDTree, arXiv 2604.12989, section 4.

    >>> tree = DraftTree(*np.zeros((8, 1, 4), np.int32))._replace(node_count=np.array([4], np.int32))
    >>> tree.token_ids[0], tree.first_child[0], tree.next_sibling[0] = [9, 5, 7, 6], [1, -1, 3, -1], [-1, 2, -1, -1]
    >>> path = accept_walk_reference(tree, np.array([[7, 0, 6, 8]], np.int32))
    >>> path.accept_slots.tolist(), path.accept_tokens.tolist(), path.accept_count.tolist()
    ([[0, 2, 3, -1]], [[7, 6, 8, -1]], [3])
    """
    batch, slots = target_tokens.shape
    length = slots - 1 if draft_length is None else draft_length
    path = AcceptedPath(
        np.full((batch, length + 1), -1, np.int32),
        np.full((batch, length + 1), -1, np.int32),
        np.empty(batch, np.int32),
        np.empty(batch, np.int32),
    )
    for b in range(batch):
        # Plain lists: the loop below takes single numbers, and those are slow to take out of an array.
        targets = target_tokens[b].tolist()
        visited, path.status[b] = _walk(
            tree.token_ids[b].tolist(),
            tree.first_child[b].tolist(),
            tree.next_sibling[b].tolist(),
            int(tree.node_count[b]),
            targets,
            length,
        )
        path.accept_slots[b, : len(visited)] = visited
        path.accept_tokens[b, : len(visited)] = [targets[slot] for slot in visited]
        path.accept_count[b] = len(visited)
    return path


def _walk(
    tokens: list[int], first_child: list[int], next_sibling: list[int], count: int, targets: list[int], length: int
) -> tuple[list[int], int]:
    """Return the slots of one request's path and its status."""
    slots = len(tokens)
    status = STATUS_OK if 1 <= count <= slots else STATUS_BROKEN_LINK
    count = min(max(count, 1), slots)
    visited, unseen = [0], count - 1
    while True:
        node = visited[-1]
        child = first_child[node]
        while child != -1:
            if not node < child < count or unseen == 0:
                return visited, status | STATUS_BROKEN_LINK
            unseen -= 1
            if tokens[child] == targets[node]:
                break
            child = next_sibling[child]
        if child == -1:
            return visited, status
        if len(visited) > length:
            return visited, status | STATUS_TOO_DEEP
        visited.append(child)
