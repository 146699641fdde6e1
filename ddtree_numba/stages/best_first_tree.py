"""Stage 2: candidates per depth -> the tree of the most probable prefixes, best first, under a node budget.

Every node is a *rank path*: the ranks of the candidates chosen at depths 1, 2, ... Its score is the sum of their
log-probabilities. Two rules make the tree exact to the bit:

- The scores are float64 and are added in the order of the paper's heap algorithm: a first child scores
  ``score + lp[depth + 1][0]``, the next sibling of rank r scores ``(score - lp[depth][r]) + lp[depth][r + 1]``.
- Equal scores: the lexicographically smaller rank path comes first, a prefix before its extensions.

A candidate that is not finite (±inf, NaN) is never a node, and neither are the ranks behind it. Candidates come in
descending order, as stage 1 gives them; should they rise, the algorithm is followed to the letter all the same: ranks
become nodes in order, and a sibling may then be more probable than an earlier one, which `check_tree` refuses.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree, empty_tree

__all__ = ["MAX_DRAFT_LENGTH", "build_tree", "build_tree_kernel", "build_tree_reference"]

MAX_DRAFT_LENGTH = 64
"""The largest number of depths."""

_MAX_SLOTS = MAX_BUDGET + 1


def build_tree_reference(
    log_probs: np.ndarray, token_ids: np.ndarray, root_tokens: np.ndarray, budget: int
) -> DraftTree:
    """Return the tree of the `budget` best nodes of every request; ancestor bits are left 0 for stage 3.

    `log_probs` [B, L, K] float32 and `token_ids` [B, L, K] int32 are the candidates, `root_tokens` [B] int32 the last
    emitted tokens. DDTree, arXiv 2604.12989, Algorithm 1.

    >>> log_probs = np.log([[[0.5, 0.25], [0.9, 0.1]]]).astype(np.float32)
    >>> token_ids = np.array([[[7, 8], [5, 6]]], np.int32)
    >>> tree = build_tree_reference(log_probs, token_ids, np.array([3], np.int32), budget=3)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([[3, 7, 5, 8]], [[-1, 0, 1, 0]])
    """
    tree = empty_tree(len(root_tokens), budget)
    for b, root_token in enumerate(root_tokens.tolist()):
        nodes = _grow(log_probs[b].tolist(), token_ids[b].tolist(), root_token, budget)
        fields = (tree.token_ids, tree.parents, tree.depths, tree.first_child, tree.next_sibling, tree.log_probs)
        for field, values in zip(fields, zip(*nodes, strict=True), strict=True):
            field[b, : len(nodes)] = values
        tree.node_count[b] = len(nodes)
    return tree


def _grow(lp: list[list[float]], ids: list[list[int]], root_token: int, budget: int) -> list[list]:
    """Return one request's nodes, each [token, parent, depth, first child, next sibling, score]."""
    nodes: list[list] = [[root_token, -1, 0, -1, -1, 0.0]]
    frontier: list[tuple] = []  # a heap of (-score, rank path, slot of parent, slot of previous sibling)

    def offer(score: float, path: tuple[int, ...], parent: int, previous: int) -> None:
        """Push the candidate that ends `path`, worth `score` without it."""
        log_prob = lp[len(path) - 1][path[-1]]
        if math.isfinite(log_prob):
            heapq.heappush(frontier, (-(score + log_prob), path, parent, previous))

    if lp:
        offer(0.0, (0,), 0, -1)
    while frontier and len(nodes) <= budget:
        negative_score, path, parent, previous = heapq.heappop(frontier)
        score, depth, rank, slot = -negative_score, len(path), path[-1], len(nodes)
        nodes.append([ids[depth - 1][rank], parent, depth, -1, -1, score])
        if previous < 0:
            nodes[parent][3] = slot
        else:
            nodes[previous][4] = slot
        if rank + 1 < len(lp[depth - 1]):
            offer(score - lp[depth - 1][rank], (*path[:-1], rank + 1), parent, slot)
        if depth < len(lp):
            offer(score, (*path, 0), slot, -1)
    return nodes


@cuda.jit(device=True)
def _log_prob(log_probs, b, depth, rank):
    """Return a candidate's log-probability in float64; -inf for one that is not finite or not there."""
    if depth > log_probs.shape[1] or rank >= log_probs.shape[2]:
        return -np.inf
    value = np.float64(log_probs[b, depth - 1, rank])
    return value if math.isfinite(value) else -np.inf


# The kernel needs no heap: the children of a slot become nodes in the order of their ranks, so every slot *offers* one
# child at a time, and the frontier is an array with one entry a slot.
#
# Nor does it compare rank paths: `turn` orders the slots so that of two offers, the one with the smaller path has the
# smaller turn. Why the update below keeps this true. Let the offer of `parent`, path X, become `slot`. Then `slot`
# offers X + (0,) and `parent` the next sibling X'. Any other offer Y is no prefix of X (those are nodes) and no
# extension of X (it has none yet), so Y and X differ at some rank, and Y compares with X + (0,) as with X. It compares
# so with X' too: should Y and X differ at the last rank of X, then Y goes through an earlier child of `parent`, as
# later ones are no nodes yet, and comes before both. And X + (0,) comes before X'. So `slot` takes the turn of
# `parent`, and `parent` and all behind it go one back.


@cuda.jit
def build_tree_kernel(log_probs, token_ids, root_tokens, tree):
    """Grow the tree of one request in each block, in thread 0; the others help to clear the outputs.

    log_probs (B, L, K float32), token_ids (B, L, K int32): candidates of each depth, best first.
    root_tokens (B int32): last emitted tokens.
    tree (DraftTree, N slots): all of it is written; ancestor bits 0.

    Launch: grid B, block of any size, 20.5 KB of static shared memory.
    Needs: 1 <= N <= 1025.
    """
    offer_score = cuda.shared.array(_MAX_SLOTS, np.float64)  # path score of the child that a slot offers; -inf: none
    offer_rank = cuda.shared.array(_MAX_SLOTS, np.int32)
    last_child = cuda.shared.array(_MAX_SLOTS, np.int32)
    turn = cuda.shared.array(_MAX_SLOTS, np.int32)
    b = cuda.blockIdx.x
    slots = tree.parents.shape[1]

    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        tree.token_ids[b, slot] = 0
        tree.parents[b, slot] = -1
        tree.depths[b, slot] = 0
        tree.first_child[b, slot] = -1
        tree.next_sibling[b, slot] = -1
        tree.log_probs[b, slot] = -np.inf
        for word in range(tree.ancestor_bits.shape[2]):
            tree.ancestor_bits[b, slot, word] = 0
    cuda.syncthreads()  # all is cleared before nodes are written over it
    if cuda.threadIdx.x != 0:
        return

    tree.token_ids[b, 0] = root_tokens[b]
    tree.log_probs[b, 0] = 0.0
    offer_score[0] = 0.0 + _log_prob(log_probs, b, 1, 0)  # a sum, so that -0.0 becomes 0.0
    offer_rank[0], last_child[0], turn[0] = 0, -1, 0
    count = 1
    while count < slots:
        parent = 0
        for other in range(1, count):
            score = offer_score[other]
            if score > offer_score[parent] or (score == offer_score[parent] and turn[other] < turn[parent]):
                parent = other
        score, rank, depth = offer_score[parent], offer_rank[parent], tree.depths[b, parent] + 1
        if score == -np.inf:
            break

        slot, previous = count, last_child[parent]
        tree.token_ids[b, slot] = token_ids[b, depth - 1, rank]
        tree.parents[b, slot] = parent
        tree.depths[b, slot] = depth
        tree.log_probs[b, slot] = score
        if previous < 0:
            tree.first_child[b, parent] = slot
        else:
            tree.next_sibling[b, previous] = slot
        last_child[parent] = slot

        # The order of these sums is part of the contract: another one rounds differently.
        offer_score[slot] = score + _log_prob(log_probs, b, depth + 1, 0)
        offer_score[parent] = (score - _log_prob(log_probs, b, depth, rank)) + _log_prob(log_probs, b, depth, rank + 1)
        offer_rank[slot], offer_rank[parent] = 0, rank + 1
        last_child[slot] = -1

        turn[slot] = turn[parent]
        for other in range(count):
            if turn[other] >= turn[slot]:
                turn[other] += 1
        count += 1
    tree.node_count[b] = count


def build_tree(
    log_probs: Any, token_ids: Any, root_tokens: Any, budget: int, *, out: DraftTree | None = None, stream: Any = None
) -> DraftTree:
    """Return what `build_tree_reference` defines, computed by `build_tree_kernel`.

    NumPy arrays are copied in and come back as NumPy; device arrays stay on the device. `out` is a `DraftTree` of
    `budget` + 1 slots to write into, `stream` the stream to launch on.
    """
    check = ArrayCheck()
    batch, depths, candidates = check("log_probs", log_probs, "B L K", (np.float32,))
    check("token_ids", token_ids, "B L K", (np.int32,))
    check("root_tokens", root_tokens, "B", (np.int32,))
    check_integer("B of log_probs", batch, 1, 2**31 - 1)
    check_integer("L of log_probs", depths, 0, MAX_DRAFT_LENGTH)
    check_integer("K of log_probs", candidates, 1, 2**31 - 1)
    budget = check_integer("budget", budget, 0, MAX_BUDGET)
    if out is not None and not isinstance(out, DraftTree):
        raise TypeError(f"out: got {type(out).__name__}, needs a DraftTree")

    arrays = {"log_probs": log_probs, "token_ids": token_ids, "root_tokens": root_tokens}
    transfer = Transfer(stream, arrays)
    outputs = [
        transfer.output(name, getattr(out, name, None), (batch, *like.shape[1:]), like.dtype)
        for name, like in empty_tree(1, budget)._asdict().items()
    ]
    inputs = [transfer.input(array) for array in arrays.values()]
    build_tree_kernel[batch, block_threads(32, simulator=1), transfer.stream](*inputs, DraftTree(*outputs))
    return DraftTree(*transfer.finish(*outputs))
