"""Vectors of stage 2: candidates -> tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddtree_numba.portable_math import portable_log
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.stages.best_first_tree.reference import build_tree_reference
from ddtree_numba.vectors.case import CONTRACT, PAPER, Case, int32, known

CONFIGURATIONS: tuple[tuple[int, int, int, int], ...] = (
    (1, 15, 64, 64),
    (1, 7, 32, 32),
    (2, 15, 16, 15),
    (4, 15, 64, 31),
    (8, 1, 64, 33),
    (16, 15, 1, 64),
    (17, 15, 64, 64),
    (32, 4, 8, 63),
    (33, 0, 8, 16),
    (64, 15, 64, 0),
    (64, 15, 64, 64),
)
"""The builder's eleven configurations: B, L, K, budget."""

LARGE_BUDGETS: tuple[tuple[int, int, int, int], ...] = (
    (3, 15, 256, 256),
    (2, 15, 100, 1024),
    (1, 64, 1024, 1024),
)
"""Budgets far beyond a mask word: B, L, K, budget."""


def random_candidates(rng: StableRandom, batch: int, depths: int, k: int, ties: bool) -> tuple[np.ndarray, ...]:
    """Return descending `log_probs` [B, L, K], `token_ids` [B, L, K] and `root_tokens` [B].

    Rows of 1e-9 (a drafter that is sure) make float64 sums round; `ties` quantises to 1/4. A third of the rows ends
    early, in -inf, NaN or +inf.
    """
    scale = np.array([1e-9, 0.125, 1.0, 5.0])[rng.integers(4, size=(batch, depths, 1))]
    values = rng.exponential((batch, depths, k)) * scale
    if ties:
        values = np.rint(values * 4) / 4
    log_probs = np.float32(0) - np.sort(values.astype(np.float32), axis=-1)
    for row in log_probs.reshape(-1, k):
        if rng.integers(3) == 0:
            row[rng.integers(k + 1) :] = rng.choice(np.array([-np.inf, np.nan, np.inf], np.float32))
    token_ids = np.argsort(rng.raw(batch * depths * 2 * k).reshape(batch, depths, 2 * k), axis=-1, kind="stable")
    return log_probs, token_ids[..., :k].astype(np.int32), rng.integers(1000, size=batch, dtype=np.int32)


def _case(name: str, rule: str, guards: str, source: str, inputs: Any, budget: int, small: bool = True) -> Case:
    log_probs, token_ids, root_tokens = inputs
    tree = build_tree_reference(log_probs, token_ids, root_tokens, budget)._asdict()
    del tree["ancestor_bits"]
    arrays = {"log_probs": log_probs, "token_ids": token_ids, "root_tokens": root_tokens}
    return Case(f"build_tree/{name}", rule, guards, source, arrays, {"budget": budget}, tree, small=small)


def _plain(probabilities: Any, ids: Any = None, root: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One request from probabilities [L][K]; rank r at depth d has the token 10 d + r."""
    values = np.array([probabilities], np.float64)
    log_probs = np.full(values.shape, -np.inf)
    log_probs[values > 0] = portable_log(values[values > 0])
    _, depths, k = values.shape
    ids = [[10 * d + r for r in range(k)] for d in range(1, depths + 1)] if ids is None else ids
    return log_probs.astype(np.float32), int32([ids]), int32([root])


def tree_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of stage 2."""
    yield from _known_answers()
    yield from _traps()
    rng = StableRandom(seed, "trees")
    for budgets in (CONFIGURATIONS, LARGE_BUDGETS):
        for batch, depths, k, budget in budgets:
            for ties in (False, True):
                name = f"b{batch}_l{depths}_k{k}_budget{budget}_{'ties' if ties else 'continuous'}"
                inputs = random_candidates(rng, batch, depths, k, ties)
                rule = "ties_by_rank_path" if ties else "best_first"
                guards = (
                    "order, links and scores at this size, with equal scores" if ties else "order, links and scores"
                )
                yield _case(name, rule, guards, CONTRACT, inputs, budget, small=batch <= 2 and budget <= 64)


def _known_answers() -> Iterator[Case]:
    ties, first = "ties_by_rank_path", "best_first"
    thirds = [[0.5, 0.25, 0.25]] * 2
    holes = _plain([[0.7, 0.3, 0, 0, 0, 0], [0.6, 0.4, 0, 0, 0, 0]])
    yield _case("known_09_two_finite_tokens", "finite_only", "nodes at -inf and NaN are added", known(9), holes, 10)
    yield _case(
        "known_10_child_ties_with_sibling_2", ties, "the sibling before the child", known(10), _plain(thirds), 2
    )
    yield _case("known_10_child_ties_with_sibling_4", ties, "ties by order of insertion", known(10), _plain(thirds), 4)
    yield _case("known_11_equal_halves", ties, "ties by depth or by insertion", known(11), _plain([[0.5, 0.5]] * 2), 4)
    sure = np.array([[[0.0, -70.0]] * 3], np.float32), int32([[[1, 2]] * 3]), int32([7])
    yield _case("known_12_probability_one", ties, "a child added before its parent", known(12), sure, 3)
    confident = _plain([[0.9, 0.05, 0.03]] * 3)
    yield _case("known_13_confident_drafter", first, "not the best three prefixes", known(13), confident, 3)
    unsure = _plain([[0.4, 0.35], [0.1, 0.1], [0.1, 0.1]])
    yield _case(
        "known_14_unsure_drafter", first, "the chain first: worth 0.444, the best three 0.790", known(14), unsure, 3
    )
    yield _case("known_15_no_budget", "root_alone", "a node without a budget", known(15), _plain(thirds), 0)
    nothing = np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 3), np.int32), int32([7, 0])
    yield _case("known_15_no_depth", "root_alone", "a read before the first depth", known(15), nothing, 3)
    for word, value in (("minus_infinity", -np.inf), ("nan", np.nan), ("infinity", np.inf)):
        blank = np.full((2, 2, 3), value, np.float32), np.ones((2, 2, 3), np.int32), int32([7, 0])
        yield _case(f"known_15_only_{word}", "root_alone", f"a node of {value}", known(15), blank, 3)
    yield _case(
        "known_16_one_candidate_a_depth", first, "a sibling that is not there", known(16), _plain([[0.5]] * 7), 15
    )
    zero = np.full((1, 3, 1), -0.5, np.float32), int32([[[5], [0], [7]]]), int32([0])
    yield _case("known_17_token_zero", "count_by_node_count", "nodes counted by their token", known(17), zero, 6)
    rounding = np.array([[[-9e-10, -30.0], [-9.4, -16.9]]], np.float32), int32([[[1, 2], [3, 4]]]), int32([7])
    yield _case("known_18_rounding", "score_order", "a sum along the path, or float32 scores", known(18), rounding, 3)


def _traps() -> Iterator[Case]:
    """Small cases of one rule each, that the known answers leave to chance."""
    exact = np.array([[[-1, -2, -3], [-1, -2, -3]]], np.float32), int32([[[1, 2, 3], [4, 5, 6]]]), int32([7])
    yield _case("budget_of_five", "budget_without_root", "the root counted as one of the five", PAPER, exact, 5)
    wide = np.array([[[-1, -1.5], [-0.5, -8]]], np.float32), int32([[[1, 2], [3, 4]]]), int32([7])
    yield _case(
        "no_child_before_its_turn", "one_rank_at_a_time", "a node brings all its children along", PAPER, wide, 3
    )
    same = np.full((1, 4, 3), -0.5, np.float32), np.arange(12, dtype=np.int32).reshape(1, 4, 3), int32([0])
    yield _case("nothing_but_ties", "ties_by_rank_path", "the order is the tie rule alone", PAPER, same, 64)
    hole = np.array([[[-1, np.nan, -2], [-1, -np.inf, -1]]], np.float32), int32([[[1, 2, 3], [4, 5, 6]]]), int32([7])
    yield _case("ranks_behind_a_hole", "finite_only", "a rank behind a hole is never reached", PAPER, hole, 6)
    minus = np.array([[[-0.0, -0.0], [-0.0, 0.0]]], np.float32), int32([[[1, 2], [3, 4]]]), int32([7])
    yield _case("minus_zero", "ties_by_rank_path", "-0.0 sorts before 0.0 when bits are compared", CONTRACT, minus, 6)
