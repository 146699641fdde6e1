"""The builder: the paper's order to the bit, on ties, ragged ends and every size."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import ddtree_numba.stages.best_first_tree.one_thread as first_rung
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.draft_tree import DraftTree, check_tree, empty_tree
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference, positions_reference
from ddtree_numba.stages.best_first_tree import (
    DRAFT_LAUNCHERS,
    VERSIONS,
    best_version,
    build_tree,
    build_tree_reference,
)
from ddtree_numba.vectors.trees import CONFIGURATIONS
from tests.helpers import assert_same, on_device, on_host, poisoned, poisoned_like
from tests.paper_oracle import best_prefixes, pop_order, tree_arrays


def random_candidates(rng, batch, depths, candidates, step=None):
    """Descending log-probabilities of every kind, ids with 0 among them, roots.

    Rows of 1e-9 (a drafter that is sure) make the float64 sums round. `step` quantises: many exact ties, and sums
    without rounding. A third of the rows ends early, in -inf, NaN or +inf.
    """
    lp = -rng.exponential(1.0, (batch, depths, candidates)) * rng.choice([1e-9, 0.1, 1.0, 5.0], (batch, depths, 1))
    if step is not None:
        lp = np.round(lp / step) * step
    lp = -np.sort(-lp, axis=-1).astype(np.float32) + np.float32(0)
    for row in lp.reshape(-1, candidates):
        if rng.random() < 1 / 3:
            row[rng.integers(candidates + 1) :] = rng.choice([-np.inf, np.nan, np.inf])
    ids = np.argsort(rng.random((batch, depths, 2 * candidates)), axis=-1)[..., :candidates].astype(np.int32)
    return lp, ids, rng.integers(1000, size=batch).astype(np.int32)


def assert_same_bits(got, expected):
    """Equal, and the scores equal as 64-bit patterns: 0.0 is not -0.0."""
    assert_same(got, expected)
    np.testing.assert_array_equal(got.log_probs.view(np.int64), expected.log_probs.view(np.int64))


def oracle(lp, ids, roots, budget) -> DraftTree:
    return DraftTree(**tree_arrays([pop_order(rows, budget) for rows in lp], ids, roots, budget))


def paths(tree, request=0):
    """Rank paths of the drafted nodes, from the links alone: rank = place in the sibling chain."""
    parents, nexts = tree.parents[request].tolist(), tree.next_sibling[request].tolist()
    previous = {following: slot for slot, following in enumerate(nexts) if following >= 0}
    found = [()]
    for slot in range(1, tree.node_count[request]):
        rank = 0
        older = slot
        while older in previous:
            rank, older = rank + 1, previous[older]
        found.append((*found[parents[slot]], rank))
    return found[1:]


def one_request(probabilities, budget, function=build_tree):
    """A tree from plain probabilities [L][K]; the id of rank r at depth d is 10 d + r."""
    with np.errstate(divide="ignore"):
        lp = np.log(np.array([probabilities])).astype(np.float32)
    ids = np.array([[[10 * d + r for r in range(lp.shape[2])] for d in range(1, lp.shape[1] + 1)]], np.int32)
    return function(lp, ids, np.array([7], np.int32), budget)


# --- the reference against two independent ones ---------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 0.5, 0.125])
def test_reference_equals_the_papers_heap(rng, step):
    for _ in range(150):
        sizes = rng.integers(1, 4), rng.integers(0, 9), rng.integers(1, 9)
        lp, ids, roots = random_candidates(rng, *sizes, step)
        budget = int(rng.integers(0, 60))
        tree = build_tree_reference(lp, ids, roots, budget)
        assert_same_bits(tree, oracle(lp, ids, roots, budget))
        check_tree(tree, bits=False)


def test_reference_finds_the_best_of_all_prefixes(rng):
    ties = 0
    for _ in range(200):
        lp, ids, roots = random_candidates(rng, 1, rng.integers(1, 5), rng.integers(1, 5), step=0.25)
        budget = int(rng.integers(1, 50))
        tree = build_tree_reference(lp, ids, roots, budget)
        assert paths(tree) == best_prefixes(lp[0], budget)
        scores = tree.log_probs[0, 1 : tree.node_count[0]]
        ties += int((np.diff(scores) == 0).sum())
    assert ties > 200, "too few equal scores to say anything"


# --- known answers, for both -----------------------------------------------------------------------------------------

versions = pytest.mark.parametrize("version", VERSIONS)
both = pytest.mark.parametrize(
    "function",
    [build_tree_reference, *(functools.partial(build_tree, version=version) for version in VERSIONS)],
    ids=["reference", *VERSIONS],
)


@both
def test_two_finite_tokens_at_each_of_two_depths_make_six_nodes(function):
    tree = one_request([[0.7, 0.3, 0, 0, 0, 0], [0.6, 0.4, 0, 0, 0, 0]], 10, function)
    assert tree.node_count.tolist() == [7]
    assert sorted(paths(tree)) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert tree.log_probs[0, 7:].tolist() == [-np.inf] * 4


@both
def test_child_before_sibling_on_equal_scores(function):
    assert paths(one_request([[0.5, 0.25, 0.25]] * 2, 2, function)) == [(0,), (0, 0)]
    assert paths(one_request([[0.5, 0.25, 0.25]] * 2, 4, function)) == [(0,), (0, 0), (1,), (2,)]


@both
def test_equal_halves_go_level_by_level(function):
    tree = one_request([[0.5, 0.5]] * 2, 4, function)
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1)]
    assert tree.token_ids.tolist() == [[7, 10, 11, 20, 21]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.first_child.tolist() == [[1, 3, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, 4, -1]]
    half = float(np.log(np.float64(0.5)).astype(np.float32))
    assert tree.log_probs.tolist() == [[0.0, half, half, 2 * half, 2 * half]]
    assert not tree.ancestor_bits.any()


@both
def test_probability_one_at_every_depth_is_a_chain(function):
    lp = np.array([[[0.0, -70.0]] * 3], np.float32)
    tree = function(lp, np.array([[[1, 2]] * 3], np.int32), np.array([7], np.int32), 3)
    assert paths(tree) == [(0,), (0, 0), (0, 0, 0)]
    assert tree.log_probs.tolist() == [[0.0] * 4]
    assert not np.signbit(tree.log_probs).any()


@both
def test_minus_zero_scores_as_zero(function):
    lp = np.array([[[-0.0, -0.0], [-0.0, 0.0]]], np.float32)
    tree = function(lp, np.array([[[1, 2], [3, 4]]], np.int32), np.array([7], np.int32), 6)
    assert paths(tree) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert not np.signbit(tree.log_probs).any()


@both
def test_confident_drafter_gives_the_chain(function):
    tree = one_request([[0.9, 0.05, 0.03]] * 3, 3, function)
    assert paths(tree) == [(0,), (0, 0), (0, 0, 0)]
    assert np.exp(tree.log_probs[0, 1:]).sum() == pytest.approx(0.9 + 0.81 + 0.729, rel=1e-6)


@both
def test_unsure_drafter_goes_wide_first(function):
    tree = one_request([[0.4, 0.35], [0.1, 0.1], [0.1, 0.1]], 3, function)
    assert paths(tree)[:2] == [(0,), (1,)]
    assert np.exp(tree.log_probs[0, 1:]).sum() == pytest.approx(0.790, rel=1e-6)


@both
@pytest.mark.parametrize(
    ("depths", "budget", "value"),
    [(2, 0, -1.0), (0, 3, -1.0), (0, 0, -1.0), (2, 3, -np.inf), (2, 3, np.nan), (2, 3, np.inf)],
)
def test_the_root_alone(function, depths, budget, value):
    lp, ids = np.full((2, depths, 3), value, np.float32), np.ones((2, depths, 3), np.int32)
    tree = function(lp, ids, np.array([7, 0], np.int32), budget)
    assert tree.node_count.tolist() == [1, 1]
    assert tree.token_ids[:, 0].tolist() == [7, 0]
    check_tree(tree, bits=False)


@both
def test_one_candidate_a_depth_makes_a_chain(function):
    tree = one_request([[0.5]] * 7, 15, function)
    assert paths(tree) == [(0,) * n for n in range(1, 8)]
    assert tree.node_count.tolist() == [8]
    check_tree(tree, bits=False)


@both
def test_token_zero_is_a_token(function):
    lp, ids = np.full((1, 3, 1), -0.5, np.float32), np.array([[[5], [0], [7]]], np.int32)
    tree = function(lp, ids, np.array([0], np.int32), 6)
    assert tree.node_count.tolist() == [4]
    assert tree.token_ids.tolist() == [[0, 5, 0, 7, 0, 0, 0]]


@both
def test_scores_are_rounded_in_the_contracts_order(function):
    """A sibling is (score - lp) + lp', which is not always the sum along its path."""
    lp = np.array([[[-9e-10, -30.0], [-9.4, -16.9]]], np.float32)
    a, b, c = (float(x) for x in (lp[0, 0, 0], lp[0, 1, 0], lp[0, 1, 1]))
    tree = function(lp, np.array([[[1, 2], [3, 4]]], np.int32), np.array([7], np.int32), 3)
    assert paths(tree) == [(0,), (0, 0), (0, 1)]
    assert tree.log_probs[0].tolist() == [0.0, a, a + b, ((a + b) - b) + c]
    assert ((a + b) - b) + c != a + c, "the example no longer rounds"


@both
def test_ranks_behind_a_hole_are_never_nodes(function):
    """Algorithm 1 pushes a sibling when the one before is popped; a hole is never popped."""
    lp = np.array([[[-1.0, np.nan, -2.0], [-1.0, -np.inf, -1.0]]], np.float32)
    tree = function(lp, np.array([[[1, 2, 3], [4, 5, 6]]], np.int32), np.array([7], np.int32), 6)
    assert tree.token_ids[0, :3].tolist() == [7, 1, 4]
    assert tree.node_count.tolist() == [3]


@both
def test_rising_rows_follow_the_algorithm_to_the_letter(rng, function):
    """Not what stage 1 gives, but defined: the order of the ranks stays, and a later sibling may score more."""
    lp = np.array([[[-3.0, -1.0, -2.0]]], np.float32)
    tree = function(lp, np.array([[[1, 2, 3]]], np.int32), np.array([7], np.int32), 3)
    assert tree.log_probs.tolist() == [[0.0, -3.0, -1.0, -2.0]]
    for _ in range(10):
        lp, ids, roots = random_candidates(rng, 2, 4, 5, step=0.5)
        lp = rng.permuted(lp, axis=-1)
        assert_same_bits(function(lp, ids, roots, 20), oracle(lp, ids, roots, 20))


# --- the kernel ------------------------------------------------------------------------------------------------------


@versions
@pytest.mark.parametrize("budget", [0, 1, 2, 15, 31, 32, 33, 64])
@pytest.mark.parametrize("step", [None, 0.5], ids=["continuous", "ties"])
def test_kernel_equals_the_reference(rng, version, budget, step):
    for depths, candidates in itertools.product((0, 1, 5, 15), (1, 3, 40)):
        lp, ids, roots = random_candidates(rng, 2, depths, candidates, step)
        out = poisoned_like(empty_tree(2, budget))
        got = build_tree(lp, ids, roots, budget, version=version, out=out)
        assert all(a is b for a, b in zip(got, out, strict=True))
        assert_same_bits(got, build_tree_reference(lp, ids, roots, budget))
        check_tree(got, bits=False)


@versions
def test_the_largest_budget(rng, version):
    """1024 nodes with ties, where nothing ends early; turns move hundreds of slots."""
    lp = -np.sort(np.round(rng.exponential(2, (1, 15, 100)) * 4), axis=-1).astype(np.float32) / np.float32(4)
    ids = np.argsort(rng.random((1, 15, 100)), axis=-1).astype(np.int32)
    got = build_tree(lp, ids, np.array([5], np.int32), 1024, version=version)
    assert got.node_count.tolist() == [1025]
    assert_same_bits(got, oracle(lp, ids, [5], 1024))


@versions
def test_kernel_on_nothing_but_ties(version):
    """All candidates equal: the order is the tie rule alone."""
    for value in (0.0, -0.5):
        lp = np.full((1, 4, 3), value, np.float32)
        ids = np.arange(12, dtype=np.int32).reshape(1, 4, 3)
        got = build_tree(lp, ids, np.array([0], np.int32), 100, version=version)
        assert paths(got) == best_prefixes(lp[0], 100)


@versions
def test_ties_of_offers_whose_turns_have_moved_by_several(version):
    """Rounds of several nodes, then offers of one owner whose limits tie: their new turns decide, not the old ones."""
    lp = np.array([[[-1, -1], [0, -2], [0, 0], [-2, -2]]], np.float32)
    ids, roots = np.arange(8, dtype=np.int32).reshape(1, 4, 2), np.zeros(1, np.int32)
    got = build_tree(lp, ids, roots, 16, version=version)
    assert_same_bits(got, build_tree_reference(lp, ids, roots, 16))


@versions
def test_ties_down_to_the_last_depth(version):
    """64 depths, all equal: each node is the first child of the one before, then the tree fills from the bottom."""
    budget = 1024 if ON_GPU else 100
    lp, ids, roots = (
        np.zeros((1, 64, 2), np.float32),
        np.arange(128, dtype=np.int32).reshape(1, 64, 2),
        np.zeros(1, np.int32),
    )
    got = build_tree(lp, ids, roots, budget, version=version)
    assert got.depths.max() == 64
    assert_same_bits(got, build_tree_reference(lp, ids, roots, budget))


@versions
@pytest.mark.parametrize(("depths", "candidates"), [(55, 49), (63, 31)])
def test_a_chain_to_the_last_depth_of_a_table_that_is_full(version, depths, candidates):
    """Offers behind the last depth are looked at like all others, though nothing of them is in the table."""
    lp = np.full((1, depths, candidates), -np.inf, np.float32)
    lp[..., 0] = -0.5
    ids, roots = np.arange(lp.size, dtype=np.int32).reshape(lp.shape), np.zeros(1, np.int32)
    got = build_tree(lp, ids, roots, 64, version=version)
    assert got.node_count.tolist() == [1 + depths]
    assert_same_bits(got, build_tree_reference(lp, ids, roots, 64))


@pytest.mark.parametrize("threads", [1, 4, 32])
def test_any_block_size(rng, monkeypatch, threads):
    monkeypatch.setattr(first_rung, "block_threads", lambda gpu, simulator=8: threads)
    lp, ids, roots = random_candidates(rng, 2, 6, 8, step=0.5)
    got = build_tree(lp, ids, roots, 40, version="one_thread", out=poisoned_like(empty_tree(2, 40)))
    assert_same_bits(got, build_tree_reference(lp, ids, roots, 40))


@versions
def test_requests_do_not_see_each_other(rng, version):
    lp, ids, roots = random_candidates(rng, 4, 6, 8, step=0.5)
    together = build_tree(lp, ids, roots, 20, version=version)
    for b in range(4):
        alone = build_tree(lp[b : b + 1], ids[b : b + 1], roots[b : b + 1], 20, version=version)
        assert_same(tuple(field[b : b + 1] for field in together), tuple(alone))


@versions
def test_an_older_bigger_tree_in_the_buffers_is_forgotten(rng, version):
    lp, ids, roots = random_candidates(rng, 1, 8, 8)
    out = build_tree(np.zeros_like(lp) - 1, ids, roots, 40, version=version)
    assert out.node_count[0] == 41
    lp[0, 1:] = -np.inf
    lp[0, 0, 3:] = -np.inf
    build_tree(lp, ids, roots, 40, version=version, out=out)
    assert_same_bits(out, build_tree_reference(lp, ids, roots, 40))


def assert_drafts(version, lp, ids, roots, prefix, budget):
    """The kernel of stages 2 and 3 in one gives what the references of both give."""
    expected = build_tree_reference(lp, ids, roots, budget)
    bits, status = ancestor_bitmask_reference(expected.parents, expected.node_count)
    outputs = (*poisoned_like(expected), poisoned(expected.parents.shape, np.int32), poisoned(len(roots), np.int32))
    *tree, positions, got_status = on_device(outputs)
    DRAFT_LAUNCHERS[version](*on_device((lp, ids, roots, prefix)), DraftTree(*tree), positions, got_status, 0)
    assert_same_bits(on_host(DraftTree(*tree)), expected._replace(ancestor_bits=bits))
    assert_same(on_host((positions, got_status)), (positions_reference(expected.depths, prefix), status))


drafting = pytest.mark.parametrize("version", DRAFT_LAUNCHERS)


@drafting
@pytest.mark.parametrize("budget", [0, 1, 31, 32, 70])
def test_bits_and_positions_in_the_same_launch(rng, version, budget):
    lp, ids, roots = random_candidates(rng, 2, 6, 30, step=0.5)
    assert_drafts(version, lp, ids, roots, np.array([0, 1000], np.int32), budget)


@drafting
def test_more_ranks_than_the_table_holds(version):
    """Ranks that find no room in shared memory are read where they lie."""
    lp, ids = np.full((2, 64, 200), -1000, np.float32), np.arange(2 * 64 * 200, dtype=np.int32).reshape(2, 64, 200)
    lp[0, 0], lp[0, 1] = -(np.arange(200) ** 2) / 512, -500 - np.arange(200)  # uneven: a rank off by one shows
    lp[1] = lp[0] * 1.25  # another request's candidate shows, too
    arguments = (lp, ids, np.array([3, 4], np.int32), 199)
    assert_same_bits(build_tree(*arguments, version=version), build_tree_reference(*arguments))


@pytest.mark.parametrize("budget", [400, 650])
def test_hundreds_of_nodes_in_one_round(budget):
    """300 children of the root, then the first children of all of them: more than there are makers and writers."""
    lp = np.full((1, 2, 300), -1000, np.float32)
    lp[0, 0], lp[0, 1, :2] = -np.arange(300) / 1024, (-10, -30)
    ids = np.arange(600, dtype=np.int32).reshape(1, 2, 300)
    got = build_tree(lp, ids, np.array([3], np.int32), budget, version="rounds")
    assert_same_bits(got, build_tree_reference(lp, ids, np.array([3], np.int32), budget))


def test_auto_takes_the_rung_for_the_size():
    assert [best_version(budget) for budget in (1, 64, 65, 1024)] == (
        ["warp", "warp", "rounds", "rounds"] if ON_GPU else ["one_thread"] * 4
    )


def test_the_version_is_named():
    with pytest.raises(ValueError, match="version: got 'heap', needs 'auto' or 'one_thread' or 'warp' or 'rounds'"):
        build_tree(**good(), version="heap")


def test_device_arrays_stay_on_the_device(rng):
    lp, ids, roots = random_candidates(rng, 2, 4, 4, step=0.5)
    expected = build_tree_reference(lp, ids, roots, 10)
    inputs, stream = on_device((lp, ids, roots)), cuda.stream()
    assert_same_bits(on_host(build_tree(*inputs, 10)), expected)
    out = on_device(poisoned_like(expected))
    got = build_tree(*inputs, 10, out=out, stream=stream)
    stream.synchronize()
    assert got is not None and all(a is b for a, b in zip(got, out, strict=True))
    assert_same_bits(on_host(out), expected)


def test_numpy_on_a_stream_comes_back_complete(rng):
    lp, ids, roots = random_candidates(rng, 2, 4, 4)
    assert_same_bits(build_tree(lp, ids, roots, 10, stream=cuda.stream()), build_tree_reference(lp, ids, roots, 10))


def good():
    return {
        "log_probs": np.full((2, 3, 4), -1, np.float32),
        "token_ids": np.zeros((2, 3, 4), np.int32),
        "root_tokens": np.zeros(2, np.int32),
        "budget": 5,
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": -1}, ValueError, "budget: got -1, needs a whole number from 0 to 1024"),
        ({"budget": 1025}, ValueError, "budget: got 1025, needs a whole number from 0 to 1024"),
        ({"budget": 2.0}, TypeError, "budget: got 2.0, needs a whole number"),
        ({"log_probs": np.zeros((2, 3), np.float32)}, ValueError, r"log_probs: got shape (2, 3), needs [B, L, K]"),
        ({"log_probs": np.zeros((2, 3, 4))}, TypeError, "log_probs: got float64, needs float32"),
        ({"log_probs": [[[0.0]]]}, TypeError, "log_probs: got list, needs a NumPy array or a device array"),
        ({"log_probs": np.zeros((4, 3, 2), np.float32).T}, ValueError, "log_probs: got a strided view"),
        ({"token_ids": np.zeros((2, 3, 4), np.int64)}, TypeError, "token_ids: got int64, needs int32"),
        ({"token_ids": np.zeros((2, 3, 5), np.int32)}, ValueError, "token_ids: got shape (2, 3, 5), needs [B, L, K]"),
        ({"root_tokens": np.zeros(3, np.int32)}, ValueError, "root_tokens: got shape (3,), needs [B] with B=2"),
        ({"out": (1, 2)}, TypeError, "out: got tuple, needs a DraftTree"),
        ({"out": empty_tree(2, 6)}, ValueError, "out (token_ids): got shape (2, 7), needs [2, 6]"),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = good() | change
    with pytest.raises(error) as caught:
        build_tree(**arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 3, 4), "B of log_probs: got 0, needs a whole number from 1"),
        ((2, 65, 4), "L of log_probs: got 65, needs a whole number from 0 to 64"),
        ((2, 3, 0), "K of log_probs: got 0, needs a whole number from 1"),
    ],
)
def test_bad_sizes_are_named(shape, message):
    with pytest.raises(ValueError) as caught:
        build_tree(np.zeros(shape, np.float32), np.zeros(shape, np.int32), np.zeros(shape[0], np.int32), 5)
    assert str(caught.value).startswith(message)


def test_mixed_host_and_device_is_named():
    arguments = good()
    arguments["token_ids"] = cuda.to_device(arguments["token_ids"])
    with pytest.raises(TypeError, match="got NumPy beside device arrays"):
        build_tree(**arguments)


# --- sizes for a real GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("step", [None, 0.25], ids=["continuous", "ties"])
@pytest.mark.parametrize(
    ("batch", "depths", "candidates", "budget"),
    [
        *CONFIGURATIONS,
        (3, 15, 256, 256),
        (2, 64, 1024, 1024),
        (2, 15, 100, 1024),
        (1, 64, 2, 1000),
    ],
)
def test_gpu_bit_exact(rng, batch, depths, candidates, budget, step):
    lp, ids, roots = random_candidates(rng, batch, depths, candidates, step)
    for version in VERSIONS:
        got = build_tree(lp, ids, roots, budget, version=version, out=poisoned_like(empty_tree(batch, budget)))
        assert_same_bits(got, build_tree_reference(lp, ids, roots, budget))
        check_tree(got, bits=False)
    for version in DRAFT_LAUNCHERS:
        assert_drafts(version, lp, ids, roots, rng.integers(0, 10000, batch).astype(np.int32), budget)


@pytest.mark.gpu
def test_gpu_equals_the_papers_heap_hundreds_of_times(rng):
    for _ in range(60):
        sizes = rng.integers(1, 9), rng.integers(0, 16), rng.integers(1, 40)
        lp, ids, roots = random_candidates(rng, *sizes, step=rng.choice([0.0625, 0.5]))
        budget = int(rng.integers(0, 130))
        for version in VERSIONS:
            assert_same_bits(build_tree(lp, ids, roots, budget, version=version), oracle(lp, ids, roots, budget))
