"""Vectors of stage 5: the walk by the target's tokens, and the walk that samples them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddtree_numba.draft_tree import DraftTree, random_tree
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference
from ddtree_numba.synthetic import LINK_FAULTS, break_links, random_target_tokens
from ddtree_numba.vectors.case import CONTRACT, SGLANG, Case, int32, known


def tree_from_parents(parents: list[int], tokens: list[int], slots: int) -> DraftTree:
    """Return one request's valid tree of `slots` slots, its nodes' log-probabilities 1 apart."""
    count = len(parents)
    depths, first, following, scores = [0], [-1] * slots, [-1] * slots, [0.0]
    last: dict[int, int] = {}
    for node in range(1, count):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        scores.append(float(-node))
        if parent in last:
            following[last[parent]] = node
        else:
            first[parent] = node
        last[parent] = node
    unused = slots - count
    links = int32([parents + [-1] * unused])
    counts = int32([count])
    return DraftTree(
        token_ids=int32([tokens + [0] * unused]),
        parents=links,
        depths=int32([depths + [0] * unused]),
        first_child=int32([first]),
        next_sibling=int32([following]),
        log_probs=np.array([scores + [-np.inf] * unused]),
        ancestor_bits=ancestor_bitmask_reference(links, counts)[0],
        node_count=counts,
    )


def _case(
    name: str, rule: str, guards: str, source: str, tree: DraftTree, targets: Any, length: int, small: bool = True
) -> Case:
    targets = int32(targets)
    expected = accept_walk_reference(tree, targets, length)._asdict()
    inputs = {**tree._asdict(), "target_tokens": targets}
    return Case(f"accept_walk/{name}", rule, guards, source, inputs, {"draft_length": length}, expected, small=small)


def walk_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of the walk."""
    yield from _known_answers()
    rng = StableRandom(seed, "walks")
    deep = [_deep_tree(rng, 64, 15) for _ in range(16)]
    every = DraftTree(*(np.concatenate(fields) for fields in zip(*deep, strict=True)))
    targets = random_target_tokens(rng, every, accept_counts=range(1, 17))
    guards = "a walk one node short or long, at every accepted length from 0 to 15"
    yield _case("every_accept_length", "walk_to_the_end", guards, CONTRACT, every, targets, 15)
    for batch, budget, vocab in ((3, 8, 4), (64, 64, 1000), (4, 256, 60), (2, 1024, 1000)):
        tree = random_tree(rng, batch, budget, vocab=vocab, max_depth=15)
        targets = random_target_tokens(rng, tree, vocab)
        guards = "a request's tree or targets mixed up with a neighbour's"
        yield _case(f"random_b{batch}_budget{budget}", "walk_to_the_end", guards, SGLANG, tree, targets, 15, batch < 64)
    tree = random_tree(rng, 6, 20, vocab=4)
    guards = "a path beyond the columns of the result"
    yield _case(
        "deeper_than_the_draft", "draft_length", guards, CONTRACT, tree, random_target_tokens(rng, tree, 4, follow=1), 2
    )
    for fault in LINK_FAULTS:
        tree = random_tree(rng, 12, 30, vocab=6)
        targets = random_target_tokens(rng, tree, 6)
        rule = "first_match_wins" if fault in ("duplicates", "reversed") else "broken_links_end"
        guards = {
            "duplicates": "the last of equal siblings wins",
            "reversed": "siblings taken by slot, not by chain",
        }.get(fault, "a walk that hangs or reads outside")
        yield _case(f"links_{fault}", rule, guards, CONTRACT, break_links(rng, tree, fault), targets, 30)


def _deep_tree(rng: StableRandom, budget: int, depth: int) -> DraftTree:
    """Return one request's random tree that is `depth` deep."""
    while True:
        tree = random_tree(rng, 1, budget, max_depth=depth, node_counts=[budget + 1])
        if int(tree.depths.max()) == depth:
            return tree


def _known_answers() -> Iterator[Case]:
    first, bonus = "first_match_wins", "bonus_token"
    twins = tree_from_parents([-1, 0, 0, 1, 2], [3, 7, 7, 8, 9], 6)
    guards = "the last of equal siblings wins"
    yield _case("known_28_equal_siblings", first, guards, known(28), twins, [[7, 9, 9, 0, 0, 0]], 4)
    family = tree_from_parents([-1, 0, 0, 1, 3], [3, 4, 5, 6, 2], 6)
    yield _case("known_29_none_accepted", bonus, "no bonus token", known(29), family, [[9, 1, 1, 1, 1, 1]], 4)
    yield _case("known_29_all_accepted", bonus, "the bonus of a node above", known(29), family, [[4, 6, 1, 2, 8, 1]], 4)
    backwards = family._replace(first_child=family.first_child.copy(), next_sibling=family.next_sibling.copy())
    backwards.first_child[0, 0], backwards.next_sibling[0, 1], backwards.next_sibling[0, 2] = 2, -1, 1
    for target in (4, 5):
        guards = "siblings taken by slot, not by chain"
        name = f"known_30_chain_reversed_target_{target}"
        yield _case(name, first, guards, known(30), backwards, [[target, 6, 1, 1, 1, 1]], 4)
    alone = tree_from_parents([-1], [3], 5)
    yield _case(
        "known_31_unused_slots", "count_by_node_count", "an unused slot's 0 accepted", known(31), alone, [[0] * 5], 3
    )
    zero = tree_from_parents([-1, 0, 1, 2], [3, 5, 0, 7], 6)
    guards = "a node with token 0 taken for an unused slot"
    yield _case(
        "known_31_a_child_of_token_zero", "count_by_node_count", guards, known(31), zero, [[5, 0, 7, 8, 0, 0]], 5
    )


SAMPLING_TRIALS = 20_000


def sampling_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of sampling: one tree, many trials with uniform numbers of their own."""
    tree = tree_from_parents([-1, 0, 0, 1, 1], [0, 1, 2, 3, 4], 5)
    # The draft is sure of what the target is not: accepting with min(1, p/q) shows at once.
    target = (
        np.array([[1, 5, 4, 2, 1, 1, 1, 1], [2, 2, 1, 6, 1, 1, 2, 1], [2] * 8, [2] * 8, [1, 1, 2, 2, 2, 2, 3, 3]]) / 16
    )
    draft = np.array([[1, 10, 3, 1, 1, 0, 0, 0], [1, 1, 1, 3, 8, 1, 1, 0], [2] * 8, [2] * 8, [2] * 8]) / 16
    uniforms = StableRandom(seed, "sampling").random((SAMPLING_TRIALS, 5, 2))
    inputs = {**tree._asdict(), "target_probs": target, "draft_probs": draft, "uniforms": uniforms}
    # Every trial's first token has the root's distribution; a second one, that of the node that the first one is.
    expected = {"first_token": target[0], "second_token": target[1:3], "second_after": int32([1, 2])}
    rule, guards = "lossless_sampling", "children accepted with min(1, p/q) on a deterministic tree"
    parameters: dict[str, int | float] = {"draft_length": 2}
    yield Case("sample_walk/temperature", rule, guards, "docs/contract.md", inputs, parameters, expected, small=False)
