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

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.draft_tree import (
    MAX_BUDGET,
    STATUS_BROKEN_LINK,
    STATUS_OK,
    STATUS_TOO_DEEP,
    DraftTree,
    check_tree_arrays,
)
from ddtree_numba.ptx import inlined

__all__ = ["AcceptedPath", "accept_walk", "accept_walk_kernel", "accept_walk_reference", "check_walk", "walk"]


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


def accept_walk_reference(tree: DraftTree, target_tokens: np.ndarray, draft_length: int | None = None) -> AcceptedPath:
    """Return the accepted path of every request's `tree` under `target_tokens` [B, N] int32.

    `draft_length` is L, N - 1 when None; a path that wants to go deeper stops there with `STATUS_TOO_DEEP`.
    Verification of a draft tree as in DDTree, arXiv 2604.12989, by child and sibling links as in SGLang.

    Raises `TypeError` and `ValueError` as `accept_walk` does.

    >>> from ddtree_numba.draft_tree import empty_tree
    >>> tree = empty_tree(batch=1, budget=3)._replace(node_count=np.array([4], np.int32))
    >>> tree.token_ids[0], tree.first_child[0], tree.next_sibling[0] = [9, 5, 7, 6], [1, -1, 3, -1], [-1, 2, -1, -1]
    >>> path = accept_walk_reference(tree, np.array([[7, 0, 6, 8]], np.int32))
    >>> path.accept_slots.tolist(), path.accept_tokens.tolist(), path.accept_count.tolist()
    ([[0, 2, 3, -1]], [[7, 6, 8, -1]], [3])
    """
    batch, length = check_walk(tree, target_tokens, draft_length)
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


@inlined
def walk(tokens, first_child, next_sibling, targets, slots, count, path_slots, path_tokens, columns):
    """Walk one request's tree in this thread; return how many slots were accepted, and the status.

    tokens, first_child, next_sibling, targets (int32 each, in any memory): of the request, see `accept_walk_kernel`.
    slots, count, columns (int32): N, the request's `node_count`, L + 1.
    path_slots, path_tokens (int32 each): the accepted slots and what is emitted, from 0 on; the rest is left alone.
    """
    status = np.int32(STATUS_OK)
    if count < 1 or count > slots:
        count, status = min(max(count, np.int32(1)), slots), np.int32(STATUS_BROKEN_LINK)
    node, accepted, looks_left = np.int32(0), np.int32(1), np.int32(count - 1)
    child, target = first_child[0], targets[0]
    # A child that matches holds the target's token, and without one that token is the bonus: it is emitted in any case.
    path_slots[0], path_tokens[0] = node, target
    while child != -1:
        # Every turn looks at one more node, and each below the root is allowed one look: whatever the links are, the
        # walk ends.
        if child <= node or child >= count or looks_left == 0:
            status |= np.int32(STATUS_BROKEN_LINK)
            break
        looks_left = np.int32(looks_left - 1)
        # All that may be asked about this node, before it is known what will be: one wait for memory, not two.
        at = np.uint32(child)
        matches = tokens[at] == target
        wanted, below, beside = targets[at], first_child[at], next_sibling[at]
        if matches:
            if accepted == columns:
                status |= np.int32(STATUS_TOO_DEEP)
                break
            path_slots[np.uint32(accepted)], path_tokens[np.uint32(accepted)] = child, wanted
            accepted = np.int32(accepted + 1)
        node, target, child = (child, wanted, below) if matches else (node, target, beside)
    return accepted, status


@cuda.jit
def accept_walk_kernel(tree, target_tokens, path):
    """Walk the tree of one request in each thread.

    tree (DraftTree, N slots): token_ids, first_child, next_sibling and node_count are read.
    target_tokens (B, N int32): the target's token at every slot.
    path (AcceptedPath, L + 1 columns): all of it is written.

    Launch: enough threads for B, in blocks of any size, no shared memory. A walk is a chain of dependent loads that
    only other requests' walks can hide, so there is nothing for a second thread of a request to do.
    Needs: L >= 0.
    """
    b = cuda.grid(1)
    if b < target_tokens.shape[0]:
        tree_links = (tree.token_ids[b], tree.first_child[b], tree.next_sibling[b])
        targets, columns = target_tokens[b], np.int32(path.accept_slots.shape[1])
        sizes = (np.int32(len(targets)), tree.node_count[b])
        emitted = (path.accept_slots[b], path.accept_tokens[b])
        accepted, status = walk(*tree_links, targets, *sizes, *emitted, columns)
        path.accept_count[b] = accepted
        path.status[b] = status
        for column in range(accepted, columns):
            path.accept_slots[b, column] = -1
            path.accept_tokens[b, column] = -1


def accept_walk(
    tree: DraftTree,
    target_tokens: Any,
    draft_length: int | None = None,
    *,
    out: AcceptedPath | None = None,
    stream: Any = None,
) -> AcceptedPath:
    """Return the `AcceptedPath` that `accept_walk_reference` defines, from `accept_walk_kernel`.

    tree (a DraftTree of N slots): the drafts.
    target_tokens (B, N int32): the target's token after every slot.
    draft_length (int or None): L, the longest path without the root, 0..1024; None: N - 1.
    out (an AcceptedPath of L + 1 columns): arrays to write into; stream: where to run.

    NumPy arrays are copied in and come back as NumPy; device arrays stay on the device.

    Raises `TypeError` for what is no `DraftTree`, no array, of another dtype or a mix of NumPy and device,
    `ValueError` for a wrong shape or layout. A broken tree is no error but a bit in the request's status.
    """
    batch, length = check_walk(tree, target_tokens, draft_length)
    if out is not None and not isinstance(out, AcceptedPath):
        raise TypeError(f"out: got {type(out).__name__}, needs an AcceptedPath")
    inputs = {f"tree.{name}": array for name, array in tree._asdict().items()}
    transfer = Transfer(stream, {**inputs, "target_tokens": target_tokens})
    shapes = {"accept_slots": (batch, length + 1), "accept_tokens": (batch, length + 1)}
    path = AcceptedPath(
        *(
            transfer.output(name, getattr(out, name, None), shapes.get(name, (batch,)), np.int32)
            for name in AcceptedPath._fields
        )
    )
    threads = block_threads(32, simulator=8)
    launch = accept_walk_kernel[-(-batch // threads), threads, transfer.stream]
    launch(DraftTree(*map(transfer.input, tree)), transfer.input(target_tokens), path)
    return AcceptedPath(*transfer.finish(*path))


def check_walk(tree: Any, target_tokens: Any, draft_length: Any) -> tuple[int, int]:
    """Return B and L of the walk's arguments; raise naming the one that is wrong."""
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree: got {type(tree).__name__}, needs a DraftTree")
    check = ArrayCheck()
    batch, slots = check_tree_arrays(tree, check)
    check("target_tokens", target_tokens, "B N", (np.int32,))
    check_integer("B of tree", batch, 1, 2**31 - 1)
    return batch, slots - 1 if draft_length is None else check_integer("draft_length", draft_length, 0, MAX_BUDGET)
