"""The definition of stage 2: the paper's heap, in plain Python."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, check_integer
from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree, empty_tree

__all__ = ["MAX_DRAFT_LENGTH", "build_tree_reference", "check_candidates"]

MAX_DRAFT_LENGTH = 64
"""The largest number of depths."""


def build_tree_reference(
    log_probs: np.ndarray, token_ids: np.ndarray, root_tokens: np.ndarray, budget: int
) -> DraftTree:
    """Return the tree of the `budget` best nodes of every request; ancestor bits are left 0 for stage 3.

    `log_probs` [B, L, K] float32 and `token_ids` [B, L, K] int32 are the candidates, `root_tokens` [B] int32 the last
    emitted tokens. DDTree, arXiv 2604.12989, Algorithm 1. Raises `TypeError` and `ValueError` as `build_tree` does.

    >>> log_probs = np.log([[[0.5, 0.25], [0.9, 0.1]]]).astype(np.float32)
    >>> token_ids = np.array([[[7, 8], [5, 6]]], np.int32)
    >>> tree = build_tree_reference(log_probs, token_ids, np.array([3], np.int32), budget=3)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([[3, 7, 5, 8]], [[-1, 0, 1, 0]])
    """
    batch, _, _, budget = check_candidates(log_probs, token_ids, root_tokens, budget)
    tree = empty_tree(batch, budget)
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


def check_candidates(log_probs: Any, token_ids: Any, root_tokens: Any, budget: Any) -> tuple[int, int, int, int]:
    """Return B, L, K and the budget of the stage's arguments; raise naming the one that is wrong."""
    check = ArrayCheck()
    batch, depths, candidates = check("log_probs", log_probs, "B L K", (np.float32,))
    check("token_ids", token_ids, "B L K", (np.int32,))
    check("root_tokens", root_tokens, "B", (np.int32,))
    check_integer("B of log_probs", batch, 1, 2**31 - 1)
    check_integer("L of log_probs", depths, 0, MAX_DRAFT_LENGTH)
    check_integer("K of log_probs", candidates, 1, 2**31 - 1)
    return batch, depths, candidates, check_integer("budget", budget, 0, MAX_BUDGET)
