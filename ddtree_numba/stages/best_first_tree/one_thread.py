"""Rung 1: one thread for each request, and no heap.

What it is: an array of offers, one for each slot, that is searched from end to end for every node.

What it buys: every step of the algorithm stands here once, in order, for any candidates; it runs in the simulator.

What it costs: a node takes two loops over all slots before it, in one thread: 2 N operations one after the other, N^2
in all, while 31 lanes of the warp and nearly all of the GPU look on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree

__all__ = ["build_tree_kernel", "launch_one_thread"]

_MAX_SLOTS = MAX_BUDGET + 1


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


def launch_one_thread(log_probs: Any, token_ids: Any, root_tokens: Any, tree: DraftTree, stream: Any) -> None:
    """Launch the kernel on device arrays."""
    threads = block_threads(32, simulator=1)
    build_tree_kernel[len(root_tokens), threads, stream](log_probs, token_ids, root_tokens, tree)
