"""Test data: what its arguments promise, and the same for everyone."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.draft_tree import check_tree
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.synthetic import LINK_FAULTS, break_links, random_target_tokens, synthetic_batch


def test_the_stream_is_splitmix64():
    """The first numbers of the published generator, seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert StableRandom(1234567).raw(4).tolist() == expected
    split = StableRandom(1234567)
    assert [*split.raw(1).tolist(), *split.raw(3).tolist()] == expected


def test_distributions_are_what_they_say(rng):
    stable = StableRandom(int(rng.integers(2**63)))
    count = 200_000
    uniform, normal, exponential = stable.random(count), stable.normal(count), stable.exponential(count)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.005
    assert abs(normal.mean()) < 0.015 and abs(normal.std() - 1) < 0.01
    assert abs(exponential.mean() - 1) < 0.015 and exponential.min() >= 0
    counts = np.bincount(stable.integers(-3, 4, count) + 3, minlength=7)
    assert len(counts) == 7 and abs(counts / count - 1 / 7).max() < 0.005
    assert sorted(stable.permutation(50).tolist()) == list(range(50))
    assert stable.integers(5, 6, (2, 3), dtype=np.int32).tolist() == [[5] * 3] * 2
    for low, high in ((0, 0), (3, 2), (0, 2**33)):
        with pytest.raises(ValueError, match="high - low"):
            stable.integers(low, high)


def test_one_seed_is_one_batch():
    tree, targets = synthetic_batch(5, 3, 20, vocab=50)
    again, same = synthetic_batch(5, 3, 20, vocab=50)
    assert all(np.array_equal(a, b) for a, b in zip((*tree, targets), (*again, same), strict=True))
    assert not np.array_equal(targets, synthetic_batch(6, 3, 20, vocab=50).target_tokens)
    check_tree(tree)


def test_degree_depth_and_sizes_hold(rng):
    for degree in (1, 2, 3):
        tree, _ = synthetic_batch(int(rng.integers(2**32)), 6, 40, degree=degree, max_depth=50)
        check_tree(tree)
        for b, used in enumerate(tree.node_count):
            children = np.bincount(tree.parents[b, 1:used], minlength=1)
            assert children.max(initial=0) <= degree
    tree, _ = synthetic_batch(1, 2, 30, max_depth=4, node_counts=[31, 7])
    assert tree.node_count.tolist() == [31, 7] and tree.depths.max() <= 4
    with pytest.raises(ValueError, match=r"no tree of .* degree=1"):
        synthetic_batch(1, 1, 30, degree=1, max_depth=4, node_counts=[31])


def test_ties_make_equal_scores():
    none, all_of_them = (synthetic_batch(2, 5, 60, ties=p).tree for p in (0.0, 1.0))
    for b, used in enumerate(none.node_count):
        assert len(set(none.log_probs[b, :used].tolist())) == used
        assert set(all_of_them.log_probs[b, : all_of_them.node_count[b]].tolist()) == {0.0}
    check_tree(all_of_them)


def mean_accepted(follow: float) -> float:
    tree, targets = synthetic_batch(3, 80, 40, follow=follow)
    return float(accept_walk_reference(tree, targets).accept_count.mean())


def test_following_more_accepts_more():
    lengths = [mean_accepted(follow) for follow in (0.0, 0.5, 0.7, 1.0)]
    assert lengths == sorted(lengths) and lengths[0] < 1.1 and lengths[3] > 4


def test_accept_weights_are_the_distribution():
    weights = [1, 0, 3, 2]
    tree, targets = synthetic_batch(4, 300, 20, node_counts=[21] * 300, accept_weights=weights)
    accepted = accept_walk_reference(tree, targets).accept_count - 1
    deep = tree.depths.max(axis=1) >= 3
    shares = np.bincount(accepted[deep], minlength=4) / deep.sum()
    np.testing.assert_allclose(shares, np.array(weights) / 6, atol=0.1)
    assert shares[1] == 0


def test_exact_accept_counts(rng):
    tree, _ = synthetic_batch(7, 40, 30)
    wanted = [int(rng.integers(1, tree.depths[b].max() + 2)) for b in range(40)]
    targets = random_target_tokens(rng, tree, accept_counts=wanted)
    assert accept_walk_reference(tree, targets).accept_count.tolist() == wanted


@pytest.mark.parametrize("fault", LINK_FAULTS)
def test_broken_links_are_broken_and_walks_end(rng, fault):
    tree, targets = synthetic_batch(int(rng.integers(2**32)), 20, 30, vocab=5)
    broken = break_links(StableRandom(1), tree, fault)
    assert any(not np.array_equal(a, b) for a, b in zip(tree, broken, strict=True))
    check_tree(tree)  # a copy was broken
    with pytest.raises(ValueError, match="request"):
        check_tree(broken)
    path = accept_walk_reference(broken, targets)
    assert (path.accept_count >= 1).all()
    if fault in ("duplicates", "reversed"):
        assert not path.status.any()
    else:
        assert path.status.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"follow": 1.5}, "follow: got 1.5, needs a probability"),
        ({"ties": -1}, "ties: got -1, needs a probability"),
        ({"degree": 0}, "degree: got 0"),
        ({"links": "knot"}, "links: got 'knot', needs one of duplicates, reversed"),
        ({"accept_weights": []}, "accept_weights: got"),
        ({"accept_weights": [0, 1]}, "accept_weights: got"),
        ({"accept_weights": [1, -1]}, "accept_weights: got"),
        ({"accept_weights": [1, float("nan")]}, "accept_weights: got"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError) as caught:
        synthetic_batch(**({"seed": 0, "batch": 2, "budget": 5} | options))
    assert str(caught.value).startswith(message)


def test_a_length_that_no_walk_has_is_refused(rng):
    tree, _ = synthetic_batch(0, 1, 5, node_counts=[3])
    for count in (0, 9):
        with pytest.raises(ValueError, match=r"accept_counts\[0\]: got"):
            random_target_tokens(rng, tree, accept_counts=[count])
    full = synthetic_batch(0, 1, 2, vocab=2, node_counts=[3], max_depth=1).tree
    with pytest.raises(ValueError, match="every token is a child"):
        random_target_tokens(rng, full, 2, accept_counts=[1])
