"""A second opinion on the tree builder: Algorithm 1 of DDTree (arXiv 2604.12989) written again from its text.

Nothing is shared with the package. `pop_order` is the paper's heap over rank paths, `best_prefixes` looks at every
prefix instead, and `tree_arrays` spells a list of paths out as arrays.
"""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np


def finite_ranks(row) -> int:
    """How many ranks of a depth can be nodes: those before the first that is not finite."""
    finite = [math.isfinite(value) for value in row]
    return finite.index(False) if False in finite else len(finite)


def pop_order(log_probs, budget: int) -> list[tuple[tuple[int, ...], float]]:
    """[(rank path, score)] of one request (`log_probs` [L, K]) in the order in which the heap gives them."""
    lp = [[np.float64(value) for value in row] for row in log_probs]
    usable = [finite_ranks(row) for row in lp]
    heap: list[tuple[float, tuple[int, ...]]] = []
    if lp and usable[0]:
        heap.append((-(np.float64(0) + lp[0][0]), (0,)))
    popped = []
    while heap and len(popped) < budget:
        key, path = heapq.heappop(heap)
        popped.append((path, -key))
        depth, rank = len(path), path[-1]
        if rank + 1 < usable[depth - 1]:
            without = -key - lp[depth - 1][rank]
            heapq.heappush(heap, (-(without + lp[depth - 1][rank + 1]), (*path[:-1], rank + 1)))
        if depth < len(lp) and usable[depth]:
            heapq.heappush(heap, (-(-key + lp[depth][0]), (*path, 0)))
    return popped


def best_prefixes(log_probs, budget: int) -> list[tuple[int, ...]]:
    """The `budget` most probable rank paths of one request, best first, from the list of all of them.

    Only for descending rows whose sums are exact in float64 (multiples of a power of two), or rounding decides.
    """
    rows = [[float(value) for value in row[: finite_ranks(row)]] for row in log_probs]
    paths = []
    for depth in range(1, len(rows) + 1):
        for path in itertools.product(*(range(len(row)) for row in rows[:depth])):
            score = math.fsum(row[rank] for row, rank in zip(rows, path, strict=False))
            paths.append((-score, path))
    return [path for _, path in sorted(paths)[:budget]]


def tree_arrays(orders, token_ids, root_tokens, budget: int) -> dict[str, np.ndarray]:
    """The contract's arrays for `orders`, one list [(rank path, score)] a request."""
    batch, slots = len(orders), budget + 1
    arrays = {
        "token_ids": np.zeros((batch, slots), np.int32),
        "parents": np.full((batch, slots), -1, np.int32),
        "depths": np.zeros((batch, slots), np.int32),
        "first_child": np.full((batch, slots), -1, np.int32),
        "next_sibling": np.full((batch, slots), -1, np.int32),
        "log_probs": np.full((batch, slots), -np.inf),
        "ancestor_bits": np.zeros((batch, slots, (slots + 31) // 32), np.uint32),
        "node_count": np.array([len(order) + 1 for order in orders], np.int32),
    }
    for b, order in enumerate(orders):
        slot_of = {(): 0} | {path: slot for slot, (path, _) in enumerate(order, start=1)}
        arrays["token_ids"][b, 0], arrays["log_probs"][b, 0] = root_tokens[b], 0.0
        for path, slot in slot_of.items():
            arrays["first_child"][b, slot] = slot_of.get((*path, 0), -1)
            if path:
                arrays["token_ids"][b, slot] = token_ids[b][len(path) - 1][path[-1]]
                arrays["parents"][b, slot] = slot_of[path[:-1]]
                arrays["depths"][b, slot] = len(path)
                arrays["next_sibling"][b, slot] = slot_of.get((*path[:-1], path[-1] + 1), -1)
        for path, score in order:
            arrays["log_probs"][b, slot_of[path]] = score
    return arrays
