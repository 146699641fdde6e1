"""Vectors of stage 3: parents -> visibility bits, depths -> positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddtree_numba.draft_tree import random_tree
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference, positions_reference
from ddtree_numba.vectors.case import CONTRACT, Case, int32, known


def _case(name: str, rule: str, guards: str, source: str, parents: Any, counts: Any, small: bool = True) -> Case:
    inputs = {"parents": int32(parents), "node_count": int32(counts)}
    bits, status = ancestor_bitmask_reference(**inputs)
    expected = {"ancestor_bits": bits, "status": status}
    return Case(f"ancestor_bitmask/{name}", rule, guards, source, inputs, {}, expected, small=small)


def mask_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of the bitmask."""
    order, own, broken = "bits_little_endian", "own_rows_only", "broken_links_end"
    chain = [list(range(-1, 33))]
    yield _case("known_15_the_root_alone", order, "the root's own bit", known(15), [[-1]], [1])
    yield _case(
        "known_19_chain_of_34", order, "bits in another order; the second word forgotten", known(19), chain, [34]
    )
    rng = StableRandom(seed, "masks")
    tree = random_tree(rng, 2, 39, node_counts=[40, 20])
    yield _case("known_20_40_and_20_nodes", own, "an older, bigger tree left in the rows", known(20), tree[1], tree[7])
    family = [[-1, 0, 0, 1]]
    yield _case("known_21_siblings", "branch_isolation", "siblings see each other", known(21), family, [4])
    for word, parents in (("cycle", [-1, 0, 3, 2]), ("outside", [-1, 0, 9, 1]), ("negative", [-1, -5, 1, 2])):
        yield _case(f"known_22_{word}", broken, "a hang or a read outside", known(22), [parents, [-1, 0, 0, 1]], [4, 4])
    yield _case("node_count_outside", broken, "a count beyond the slots", CONTRACT, [[-1, 0, 0, 1]] * 4, [0, 5, -1, 4])
    yield _case("unused_parents", own, "parents of unused slots are read", CONTRACT, [[-1, 0, 7, 7]], [2])
    for budget in (31, 32, 33, 64, 256, 1024):
        tree = random_tree(rng, 3, budget, node_counts=[budget + 1, budget // 2 + 1, 1])
        name, guards = f"random_budget_{budget}", "a word or a row forgotten"
        yield _case(name, order, guards, CONTRACT, tree.parents, tree.node_count, budget <= 64)


def position_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of the positions."""
    rng, rule = StableRandom(seed, "positions"), "position_by_depth"
    for name, guards, source, depths, prefix in (
        ("known_21_siblings", "siblings at different positions", known(21), int32([[0, 1, 1, 2]]), int32([10])),
        ("random", "a prefix of another request", CONTRACT, random_tree(rng, 4, 40).depths, int32([0, 1, 8191, 10**9])),
    ):
        inputs = {"depths": depths, "prefix_lengths": prefix}
        expected = {"positions": positions_reference(**inputs)}
        yield Case(f"positions/{name}", rule, guards, source, inputs, {}, expected)
