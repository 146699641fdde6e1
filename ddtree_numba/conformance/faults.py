"""Mistakes that reviews of draft-tree code find again and again, each written out, so that answers are told by them.

An answer that is wrong and equal to what one of these mistakes gives has that mistake, whatever its code looks like.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.conformance.comparison import chi_square, token_frequencies
from ddtree_numba.draft_tree import DraftTree, mask_words
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.best_first_tree.reference import build_tree_reference
from ddtree_numba.stages.kv_commit import commit_kv_reference
from ddtree_numba.vectors import Case

__all__ = ["FAULTS", "Fault"]

_Path = tuple[int, ...]
_Order = list[tuple[_Path, float]]


class Fault(NamedTuple):
    """One mistake."""

    stage: str
    """The stage that makes it."""
    rule: str
    """The rule it breaks, a key of `RULES`."""
    answers: tuple[Callable[[dict[str, Any]], dict[str, np.ndarray]], ...]
    """What implementations with the mistake return for a case's arguments, one for each way to make it."""


# ---- the tree ----


def _usable(row: list[float]) -> int:
    finite = [math.isfinite(value) for value in row]
    return finite.index(False) if False in finite else len(finite)


def _heap_order(lp: list[list[float]], budget: int, by_insertion: str = "") -> _Order:
    """Return the rank paths in the order of the heap; equal scores by insertion, "sibling" or "child" put in first."""
    usable = [_usable(row) for row in lp]
    order: _Order = []
    heap: list[Any] = []
    pushed = itertools.count()

    def offer(score: float, path: _Path) -> None:
        if len(path) <= len(lp) and path[-1] < usable[len(path) - 1]:
            value = score + lp[len(path) - 1][path[-1]]
            heapq.heappush(heap, (-value, next(pushed) if by_insertion else path, path))

    if lp:
        offer(0.0, (0,))
    while heap and len(order) < budget:
        negative, _, path = heapq.heappop(heap)
        order.append((path, -negative))
        sibling = -negative - lp[len(path) - 1][path[-1]], (*path[:-1], path[-1] + 1)
        child = -negative, (*path, 0)
        for offered in (child, sibling) if by_insertion == "child" else (sibling, child):
            offer(*offered)
    return order


def _chain_first(lp: list[list[float]], budget: int) -> _Order:
    """The most probable chain to its end, then the best of the rest."""
    chain: _Order = []
    score = 0.0
    for depth, row in enumerate(lp[:budget]):
        if not _usable(row):
            break
        score += row[0]
        chain.append(((0,) * (depth + 1), score))
    held = {path for path, _ in chain}
    rest = [node for node in _heap_order(lp, budget + len(chain)) if node[0] not in held]
    return [*chain, *rest][:budget]


def _all_children(lp: list[list[float]], budget: int) -> _Order:
    """The best node brings all its children along."""
    order: _Order = []
    heap: list[tuple[float, _Path]] = [(0.0, ())]
    while heap and len(order) < budget:
        negative, path = heapq.heappop(heap)
        if len(path) == len(lp):
            continue
        for rank, value in enumerate(lp[len(path)][: _usable(lp[len(path)])]):
            if len(order) < budget:
                order.append(((*path, rank), -negative + value))
                heapq.heappush(heap, (negative - value, (*path, rank)))
    return order


def _tree(arguments: dict[str, Any], order_of: Callable[[list[list[float]], int], _Order]) -> dict[str, np.ndarray]:
    """Spell an order of rank paths out as arrays."""
    budget, roots = arguments["budget"], arguments["root_tokens"]
    shape = (len(roots), budget + 1)
    tree = {
        "token_ids": np.zeros(shape, np.int32),
        "parents": np.full(shape, -1, np.int32),
        "depths": np.zeros(shape, np.int32),
        "first_child": np.full(shape, -1, np.int32),
        "next_sibling": np.full(shape, -1, np.int32),
        "log_probs": np.full(shape, -np.inf),
        "node_count": np.zeros(len(roots), np.int32),
    }
    for b, lp in enumerate(arguments["log_probs"].tolist()):
        order = order_of(lp, budget)
        slot_of = {path: slot for slot, (path, _) in enumerate(order, start=1)} | {(): 0}
        tree["token_ids"][b, 0], tree["log_probs"][b, 0], tree["node_count"][b] = roots[b], 0.0, len(order) + 1
        tree["first_child"][b, 0] = slot_of.get((0,), -1)
        for path, score in order:
            slot, depth = slot_of[path], len(path)
            tree["token_ids"][b, slot] = arguments["token_ids"][b, depth - 1, path[-1]]
            tree["parents"][b, slot] = slot_of[path[:-1]]
            tree["depths"][b, slot], tree["log_probs"][b, slot] = depth, score
            tree["first_child"][b, slot] = slot_of.get((*path, 0), -1)
            tree["next_sibling"][b, slot] = slot_of.get((*path[:-1], path[-1] + 1), -1)
    return tree


def _counted_by_token(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    tree = build_tree_reference(**arguments)._asdict()
    tree["node_count"] = (1 + np.count_nonzero(tree["token_ids"][:, 1:], axis=1)).astype(np.int32)
    return tree


# ---- bits and positions ----


def _big_endian_bits(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    parents = arguments["parents"]
    bits = np.zeros((*parents.shape, mask_words(parents.shape[1])), np.uint32)
    for b, used in enumerate(arguments["node_count"].tolist()):
        for node in range(used if 1 <= used <= parents.shape[1] else 0):
            slot = node
            while 0 <= slot <= node:
                bits[b, node, slot // 32] |= np.uint32(1 << 31 - slot % 32)
                slot = parents[b, slot] if parents[b, slot] < slot else -1
    return {"ancestor_bits": bits}


def _big_endian_bytes(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """The bits of each byte turned round: `numpy.packbits` without `bitorder`."""
    words = _big_endian_bits(arguments)["ancestor_bits"]
    return {"ancestor_bits": words.byteswap()}


def _position_by_slot(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    slots = np.arange(arguments["depths"].shape[1], dtype=np.int32)
    return {"positions": (arguments["prefix_lengths"][:, None] + slots).astype(np.int32)}


# ---- walk and commit ----


def _walk(arguments: dict[str, Any], tree: DraftTree) -> dict[str, np.ndarray]:
    return accept_walk_reference(tree, arguments["target_tokens"], arguments["draft_length"])._asdict()


def _argument_tree(arguments: dict[str, Any]) -> DraftTree:
    return DraftTree(*(arguments[name] for name in DraftTree._fields))


def _last_sibling(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """Turn every whole chain of siblings round, so that its last match is found first."""
    tree = _argument_tree(arguments)
    first, following = tree.first_child.copy(), tree.next_sibling.copy()
    slots = first.shape[1]
    for b, node in np.ndindex(first.shape):
        chain: list[int] = []
        child = int(tree.first_child[b, node])
        while 0 <= child < slots and child not in chain:
            chain.append(child)
            child = int(tree.next_sibling[b, child])
        if child == -1 and chain:
            first[b, node] = chain[-1]
            following[b, chain] = [-1, *chain[:-1]]
    return _walk(arguments, tree._replace(first_child=first, next_sibling=following))


def _zero_is_nothing(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    tree = _argument_tree(arguments)
    return _walk(arguments, tree._replace(token_ids=np.where(tree.token_ids == 0, -1, tree.token_ids).astype(np.int32)))


def _descending(arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    pool, table = arguments["kv_pool"].copy(), arguments["block_table"]
    lengths, size = arguments["prefix_lengths"].copy(), pool.shape[2]
    status = commit_kv_reference(**{name: array.copy() for name, array in arguments.items()})
    for b, count in enumerate(np.where(status == 0, arguments["accept_count"], 0).tolist()):
        prefix, slots = int(lengths[b]), arguments["accept_slots"][b].tolist()
        for k in range(count - 1, -1, -1):
            source, target = prefix + slots[k], prefix + k
            pool[:, table[b, target // size], target % size] = pool[:, table[b, source // size], source % size]
        lengths[b] += count
    return {"kv_pool": pool, "prefix_lengths": lengths}


FAULTS: dict[str, Fault] = {
    "budget counts the root": Fault(
        "build_tree", "budget_without_root", (lambda a: _tree(a, lambda lp, n: _heap_order(lp, n - 1)),)
    ),
    "ties by insertion": Fault(
        "build_tree",
        "ties_by_rank_path",
        (
            lambda a: _tree(a, lambda lp, n: _heap_order(lp, n, by_insertion="sibling")),
            lambda a: _tree(a, lambda lp, n: _heap_order(lp, n, by_insertion="child")),
        ),
    ),
    "chain first": Fault("build_tree", "best_first", (lambda a: _tree(a, _chain_first),)),
    "adds all children": Fault("build_tree", "one_rank_at_a_time", (lambda a: _tree(a, _all_children),)),
    "count by token": Fault("build_tree", "count_by_node_count", (_counted_by_token,)),
    "bits big-endian": Fault("ancestor_bitmask", "bits_little_endian", (_big_endian_bits, _big_endian_bytes)),
    "positions by slot": Fault("positions", "position_by_depth", (_position_by_slot,)),
    "last sibling wins": Fault("accept_walk", "first_match_wins", (_last_sibling,)),
    "token 0 is nothing": Fault("accept_walk", "count_by_node_count", (_zero_is_nothing,)),
    "descending commit": Fault("commit_kv", "read_before_write", (_descending,)),
}
"""The mistakes whose answer is an array: name -> `Fault`. That of sampling, "min(1, p/q)", is told by frequencies."""


def faults_of(case: Case, got: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Return (name, rule) of every mistake that gives exactly the wrong answer `got`."""
    if case.stage == "sample_walk":
        return [("min(1, p/q)", "lossless_sampling")] if _accepts_by_ratio(case, got) else []
    found = []
    for name, fault in FAULTS.items():
        if fault.stage == case.stage and any(_made(answer, case, got) for answer in fault.answers):
            found.append((name, fault.rule))
    return found


def _made(answer: Callable[[dict[str, Any]], dict[str, np.ndarray]], case: Case, got: dict[str, np.ndarray]) -> bool:
    try:
        wrong = answer(case.arguments())
    except (IndexError, ValueError):  # a mistake that can't even be made here
        return False
    both = [output for output in wrong if output in got]
    return bool(both) and all(_equal(got[output], wrong[output]) for output in both)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())


def _accepts_by_ratio(case: Case, got: dict[str, np.ndarray]) -> bool:
    """Tell whether the first tokens come as from accepting child after child with min(1, p/q)."""
    target, draft = case.inputs["target_probs"][0], case.inputs["draft_probs"][0]
    left, fixed = 1.0, np.zeros_like(target)
    child = int(case.inputs["first_child"][0, 0])
    while child != -1:
        token = int(case.inputs["token_ids"][0, child])
        accepted = left * min(1.0, float(target[token] / draft[token]))
        fixed[token] += accepted
        left -= accepted
        child = int(case.inputs["next_sibling"][0, child])
    residual = np.maximum(target - draft, 0)
    try:
        first, _ = token_frequencies(got, len(target))
    except (IndexError, ValueError):
        return False
    # Where nothing is accepted the bonus is drawn from the target, or from what is left of it.
    return any(chi_square(first, fixed + left * rest) < 5 for rest in (target, residual / residual.sum()))
