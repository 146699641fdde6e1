"""The data contract: the checker refuses every broken tree, the generator only makes whole ones."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.draft_tree import DraftTree, check_tree, empty_tree, mask_words, random_tree


def small_tree() -> DraftTree:
    """Root 9 with children 5 and 0; 5 has a child 7; slot 4 unused."""
    tree = empty_tree(1, 4)
    tree.token_ids[0, :4] = [9, 5, 0, 7]
    tree.parents[0, :4] = [-1, 0, 0, 1]
    tree.depths[0, :4] = [0, 1, 1, 2]
    tree.first_child[0, :4] = [1, 3, -1, -1]
    tree.next_sibling[0, :4] = [-1, 2, -1, -1]
    tree.log_probs[0, :4] = [0.0, -0.5, -1.0, -1.5]
    tree.ancestor_bits[0, :4, 0] = [0b0001, 0b0011, 0b0101, 0b1011]
    tree.node_count[0] = 4
    return tree


def test_a_hand_written_tree_passes():
    check_tree(small_tree())


def test_dtypes_and_shapes_are_those_of_the_contract():
    tree = empty_tree(3, 32)
    shapes = {name: (array.shape, array.dtype.name) for name, array in tree._asdict().items()}
    assert shapes == {
        "token_ids": ((3, 33), "int32"),
        "parents": ((3, 33), "int32"),
        "depths": ((3, 33), "int32"),
        "first_child": ((3, 33), "int32"),
        "next_sibling": ((3, 33), "int32"),
        "log_probs": ((3, 33), "float64"),
        "ancestor_bits": ((3, 33, 2), "uint32"),
        "node_count": ((3,), "int32"),
    }


@pytest.mark.parametrize(
    ("field", "slot", "value", "message"),
    [
        ("parents", 0, 0, "request 0, slot 0: the root's parent is 0, must be -1"),
        ("depths", 0, 1, "request 0, slot 0: the root's depth is 1"),
        ("next_sibling", 0, 1, "request 0, slot 0: the root's next sibling is 1"),
        ("log_probs", 0, -0.1, "request 0, slot 0: the root's log-probability is -0.1"),
        ("parents", 1, -1, "request 0, slot 1: parent -1 must be a slot"),
        ("parents", 2, 3, "request 0, slot 2: parent 3 must be a smaller slot"),
        ("parents", 3, 99, "request 0, slot 3: parent 99 must be a smaller slot"),
        ("depths", 3, 3, "request 0, slot 3: depth 3 must be its parent's plus one, 2"),
        ("log_probs", 3, -np.inf, "request 0, slot 3: log-probability -inf must be finite"),
        ("log_probs", 2, -0.1, "request 0, slot 2: must not be more probable than its earlier sibling"),
        ("token_ids", 2, 5, "request 0, slot 2: token 5 stands already among its siblings"),
        ("first_child", 0, 2, "request 0, slot 0: first child 2 must be slot 1"),
        ("first_child", 0, -1, "request 0, slot 0: first child -1 must be slot 1"),
        ("first_child", 2, 3, "request 0, slot 2: first child 3 must be -1"),
        ("next_sibling", 1, -1, "request 0, slot 1: next sibling -1 must be slot 2"),
        ("next_sibling", 2, 1, "request 0, slot 2: next sibling 1 must be -1"),
        ("next_sibling", 3, 4, "request 0, slot 3: next sibling 4 must be -1"),
        ("token_ids", 4, 1, "request 0, slot 4: token_ids is 1, must be 0 in an unused slot"),
        ("parents", 4, 0, "request 0, slot 4: parents is 0, must be -1 in an unused slot"),
        ("log_probs", 4, 0.0, "request 0, slot 4: log_probs is 0.0, must be -inf in an unused slot"),
        ("ancestor_bits", 4, 1, "request 0, slot 4: ancestor bits must be 0"),
        ("ancestor_bits", 3, 0b1111, "request 0, slot 3: ancestor bits 0xf must be 0xb"),
    ],
)
def test_each_broken_rule_is_named(field, slot, value, message):
    tree = small_tree()
    getattr(tree, field)[0, slot] = value
    with pytest.raises(ValueError) as error:
        check_tree(tree)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("count", [0, 6, -1])
def test_node_count_outside_the_slots(count):
    tree = small_tree()
    tree.node_count[0] = count
    with pytest.raises(ValueError, match=f"request 0: node_count {count} must be from 1 to 5"):
        check_tree(tree)


def test_the_second_request_is_named():
    tree = DraftTree(*(np.concatenate([a, a]) for a in small_tree()))
    tree.depths[1, 1] = 0
    with pytest.raises(ValueError, match="request 1, slot 1"):
        check_tree(tree)


def test_wrong_arrays_are_named():
    with pytest.raises(TypeError, match=r"tree\.parents: got int64, needs int32"):
        check_tree(small_tree()._replace(parents=np.zeros((1, 5), np.int64)))
    with pytest.raises(ValueError, match=r"tree\.depths: got shape \(1, 4\), needs \[B, N\] with B=1, N=5"):
        check_tree(small_tree()._replace(depths=np.zeros((1, 4), np.int32)))
    with pytest.raises(ValueError, match=r"tree\.ancestor_bits: got 2 words a row, needs 1 for 5 slots"):
        check_tree(small_tree()._replace(ancestor_bits=np.zeros((1, 5, 2), np.uint32)))


@pytest.mark.parametrize("budget", [0, 1, 31, 32, 64, 200])
def test_random_trees_are_whole_and_ragged(rng, budget):
    tree = random_tree(rng, batch=6, budget=budget)
    check_tree(tree)
    assert tree.ancestor_bits.shape[2] == mask_words(budget + 1)
    if budget >= 32:
        assert len(set(tree.node_count.tolist())) > 1


def test_random_trees_differ_in_shape(rng):
    deepest = [random_tree(rng, 1, 40, node_counts=[41]).depths.max() for _ in range(120)]
    assert min(deepest) < 10 and max(deepest) > 20


def test_random_tree_obeys_its_limits(rng):
    tree = random_tree(rng, 4, 60, vocab=3, max_depth=5, node_counts=[61, 1, 2, 40])
    check_tree(tree)
    assert tree.node_count.tolist() == [61, 1, 2, 40]
    assert tree.depths.max() <= 5 and tree.token_ids.max() < 3
    with pytest.raises(ValueError, match="no tree of 4 nodes has vocab=1 and max_depth=2"):
        random_tree(rng, 1, 10, vocab=1, max_depth=2, node_counts=[11])


@pytest.mark.parametrize("budget", [-1, 1025])
def test_a_budget_out_of_range_is_refused(budget):
    with pytest.raises(ValueError, match=f"budget: got {budget}, needs a whole number from 0 to 1024"):
        empty_tree(1, budget)
