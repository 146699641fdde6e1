"""Visibility bits and positions: right across words and requests, and a broken tree ends in a status."""

from __future__ import annotations

import numpy as np
import pytest

import ddtree_numba.stages.ancestor_bitmask as stage
from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import STATUS_BROKEN_LINK, check_tree, mask_words, random_tree
from ddtree_numba.stages.ancestor_bitmask import (
    ancestor_bitmask,
    ancestor_bitmask_reference,
    positions,
    positions_reference,
)
from tests.helpers import assert_same, on_device, on_host, poisoned, poisoned_like

both = pytest.mark.parametrize("function", [ancestor_bitmask_reference, ancestor_bitmask], ids=["reference", "kernel"])


def visible_sets(parents, count):
    """For each slot the set of slots that it sees, by walking up; None where the walk is not a whole chain."""
    slots = len(parents)
    if not 1 <= count <= slots:
        return [set() for _ in range(slots)], True
    seen, broken = [], False
    for slot in range(slots):
        chain, node = [], slot
        while slot < count and node != -1:
            chain.append(node)
            parent = int(parents[node])
            if not ((node == 0 and parent == -1) or (node > 0 and 0 <= parent < node)):
                chain, broken = [], True
                break
            node = parent
        seen.append(set(chain))
    return seen, broken


def unpack(bits):
    """[N, W] words -> for each row the set of its set bits, found by shifting one bit at a time."""
    return [{j for j in range(32 * len(row)) if int(row[j // 32]) >> j % 32 & 1} for row in bits.tolist()]


def assert_right(got, parents, node_count):
    bits, status = got
    assert bits.dtype == np.uint32 and status.dtype == np.int32
    assert bits.shape == (*parents.shape, mask_words(parents.shape[1]))
    for b, count in enumerate(node_count.tolist()):
        expected, broken = visible_sets(parents[b].tolist(), count)
        assert unpack(bits[b]) == expected
        assert status[b] == (STATUS_BROKEN_LINK if broken else 0)


def one_request(function, parents, count=None):
    parents = np.array([parents], np.int32)
    bits, status = function(parents, np.array([parents.shape[1] if count is None else count], np.int32))
    return bits[0].tolist(), int(status[0])


@both
def test_a_chain_crosses_into_the_second_word(function):
    rows, status = one_request(function, range(-1, 33))
    assert rows[30:34] == [[0x7FFFFFFF, 0], [0xFFFFFFFF, 0], [0xFFFFFFFF, 1], [0xFFFFFFFF, 3]]
    assert status == 0


@both
def test_the_root_alone(function):
    assert one_request(function, [-1]) == ([[1]], 0)
    assert one_request(function, [-1, -1, -1], count=1) == ([[1], [0], [0]], 0)


@both
def test_siblings_do_not_see_each_other(function):
    assert one_request(function, [-1, 0, 0, 1, 2]) == ([[0b1], [0b11], [0b101], [0b1011], [0b10101]], 0)


@both
def test_requests_of_different_size_have_rows_of_one_width(rng, function):
    tree = random_tree(rng, 2, 40, node_counts=[40, 20])
    bits, status = function(tree.parents, tree.node_count)
    assert bits.shape == (2, 41, 2)
    assert not bits[0, 40:].any() and not bits[1, 20:].any()
    assert status.tolist() == [0, 0]
    check_tree(tree._replace(ancestor_bits=bits))


@both
def test_parents_of_unused_slots_mean_nothing(function):
    assert one_request(function, [-1, 0, 0, 99, -50], count=3) == ([[1], [3], [5], [0], [0]], 0)


@both
@pytest.mark.parametrize(
    ("parents", "rows"),
    [
        ([-1, 0, 3, 2], [1, 3, 0, 0]),  # a circle
        ([-1, 0, 2, 2], [1, 3, 0, 0]),  # its own parent, and that one's child
        ([-1, 0, 4, 1], [1, 3, 0, 0b1011]),  # past the end
        ([-1, 0, 2**31 - 1, 0], [1, 3, 0, 9]),
        ([-1, -2, 1, -(2**31)], [1, 0, 0, 0]),
        ([-1, -1, 1, 0], [1, 0, 0, 9]),  # a second root
        ([0, 0, 1, 0], [0, 0, 0, 0]),  # no root
        ([1, 0, 1, 0], [0, 0, 0, 0]),
    ],
)
def test_a_broken_link_ends_in_a_status(function, parents, rows):
    assert one_request(function, parents) == ([[row] for row in rows], STATUS_BROKEN_LINK)


@both
@pytest.mark.parametrize("count", [0, -1, 5, 2**31 - 1, -(2**31)])
def test_a_node_count_outside_the_slots_is_broken(function, count):
    assert one_request(function, [-1, 0, 0, 1], count) == ([[0]] * 4, STATUS_BROKEN_LINK)


@both
def test_a_broken_request_leaves_its_neighbours_alone(function):
    parents = np.array([[-1, 0, 1], [-1, 2, 1], [-1, 0, 0]], np.int32)
    bits, status = function(parents, np.array([3, 3, 3], np.int32))
    assert bits[:, :, 0].tolist() == [[1, 3, 7], [1, 0, 0], [1, 3, 5]]
    assert status.tolist() == [0, STATUS_BROKEN_LINK, 0]


@both
@pytest.mark.parametrize("budget", [0, 1, 30, 31, 32, 33, 63, 64, 100])
def test_random_trees(rng, function, budget):
    tree = random_tree(rng, 3, budget)
    got = function(tree.parents, tree.node_count)
    assert_right(got, tree.parents, tree.node_count)
    np.testing.assert_array_equal(got[0], tree.ancestor_bits)


@both
def test_random_damage(rng, function):
    for _ in range(20):
        tree = random_tree(rng, 2, 40)
        hit = rng.random(tree.parents.shape) < 0.05
        parents = np.where(hit, rng.integers(-3, 45, tree.parents.shape), tree.parents).astype(np.int32)
        assert_right(function(parents, tree.node_count), parents, tree.node_count)


@pytest.mark.parametrize("threads", [1, 4, 32])
def test_any_block_size(rng, monkeypatch, threads):
    monkeypatch.setattr(stage, "block_threads", lambda gpu, simulator=8: threads)
    for _ in range(5):
        tree = random_tree(rng, 2, 35)
        tree.parents[rng.integers(2), rng.integers(36)] = 7  # sometimes whole, sometimes broken
        got = ancestor_bitmask(tree.parents, tree.node_count)
        assert_same(got, ancestor_bitmask_reference(tree.parents, tree.node_count))
        assert_same((positions(tree.depths, tree.node_count),), (positions_reference(tree.depths, tree.node_count),))


def test_every_word_is_written_over_an_older_bigger_tree(rng):
    tree = random_tree(rng, 2, 40, node_counts=[40, 20])
    expected = ancestor_bitmask_reference(tree.parents, tree.node_count)
    for out in (poisoned_like(expected), (np.full_like(expected[0], 2**32 - 1), np.full_like(expected[1], 7))):
        got = ancestor_bitmask(tree.parents, tree.node_count, out=out)
        assert got[0] is out[0] and got[1] is out[1]
        assert_same(got, expected)


def test_device_arrays_stay_on_the_device(rng):
    tree = random_tree(rng, 2, 40)
    prefix = np.array([5, 1000], np.int32)
    expected = (*ancestor_bitmask_reference(tree.parents, tree.node_count), positions_reference(tree.depths, prefix))
    parents, depths, count, prefix = on_device((tree.parents, tree.depths, tree.node_count, prefix))
    assert_same(on_host((*ancestor_bitmask(parents, count), positions(depths, prefix))), expected)
    out, stream = on_device(poisoned_like(expected)), cuda.stream()
    bits, status = ancestor_bitmask(parents, count, out=out[:2], stream=stream)
    where = positions(depths, prefix, out=out[2], stream=stream)
    stream.synchronize()
    assert bits is out[0] and status is out[1] and where is out[2]
    assert_same(on_host(out), expected)


def test_numpy_on_a_stream_comes_back_complete(rng):
    tree = random_tree(rng, 2, 40)
    got = ancestor_bitmask(tree.parents, tree.node_count, stream=cuda.stream())
    assert_same(got, ancestor_bitmask_reference(tree.parents, tree.node_count))
    where = positions(tree.depths, tree.node_count, stream=cuda.stream())
    assert_same((where,), (positions_reference(tree.depths, tree.node_count),))


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [positions_reference, positions], ids=["reference", "kernel"])
def test_position_is_prefix_plus_depth(function):
    """Root, a, its sibling b, a child of a: siblings stand at one place, whatever their slots."""
    depths, prefix = np.array([[0, 1, 1, 2], [0, 0, 0, 0]], np.int32), np.array([100, 0], np.int32)
    assert function(depths, prefix).tolist() == [[100, 101, 101, 102], [0, 0, 0, 0]]


@pytest.mark.parametrize("budget", [0, 1, 31, 32, 100])
def test_positions_of_random_trees(rng, budget):
    tree, prefix = random_tree(rng, 5, budget), rng.integers(0, 2**30, 5).astype(np.int32)
    out = poisoned((5, budget + 1), np.int32)
    assert positions(tree.depths, prefix, out=out) is out
    assert out.tolist() == [[p + d for d in row] for p, row in zip(prefix.tolist(), tree.depths.tolist(), strict=True)]


# --- bad input -------------------------------------------------------------------------------------------------------


def ints(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("parents", "node_count", "out", "error", "message"),
    [
        (ints(2), ints(2), None, ValueError, "parents: got shape (2,), needs [B, N]"),
        (ints(2, 3, dtype=np.int64), ints(2), None, TypeError, "parents: got int64, needs int32"),
        (ints(3, 2).T, ints(2), None, ValueError, "parents: got a strided view"),
        (ints(2, 3), ints(3), None, ValueError, "node_count: got shape (3,), needs [B] with B=2"),
        (ints(2, 3), [3, 3], None, TypeError, "node_count: got list, needs a NumPy array"),
        (ints(2, 0), ints(2), None, ValueError, "N of parents: got 0, needs a whole number from 1 to 1025"),
        (ints(2, 1026), ints(2), None, ValueError, "N of parents: got 1026, needs a whole number from 1 to 1025"),
        (ints(0, 3), ints(0), None, ValueError, "B of parents: got 0, needs a whole number from 1"),
        (ints(2, 3), ints(2), ints(2), TypeError, "out: got ndarray, needs a tuple (ancestor_bits, status)"),
        (ints(2, 3), ints(2), (ints(2, 3, 1), ints(2)), TypeError, "out (ancestor_bits): got int32, needs uint32"),
    ],
)
def test_bad_input_is_named(parents, node_count, out, error, message):
    with pytest.raises(error) as caught:
        ancestor_bitmask(parents, node_count, out=out)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("depths", "prefix_lengths", "error", "message"),
    [
        (ints(2), ints(2), ValueError, "depths: got shape (2,), needs [B, N]"),
        (ints(2, 3), ints(3), ValueError, "prefix_lengths: got shape (3,), needs [B] with B=2"),
        (ints(2, 3), ints(2, dtype=np.int64), TypeError, "prefix_lengths: got int64, needs int32"),
        (ints(2, 0), ints(2), ValueError, "N of depths: got 0, needs a whole number from 1 to 1025"),
        (ints(0, 2), ints(0), ValueError, "B of depths: got 0, needs a whole number from 1"),
    ],
)
def test_bad_input_of_positions_is_named(depths, prefix_lengths, error, message):
    with pytest.raises(error) as caught:
        positions(depths, prefix_lengths)
    assert str(caught.value).startswith(message)


# --- sizes for a real GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "budget"), [(64, 64), (64, 0), (17, 255), (8, 256), (8, 1024)])
def test_gpu_sizes(rng, batch, budget):
    tree, prefix = random_tree(rng, batch, budget), rng.integers(0, 2**30, batch).astype(np.int32)
    expected = ancestor_bitmask_reference(tree.parents, tree.node_count)
    np.testing.assert_array_equal(expected[0], tree.ancestor_bits)
    assert_same(ancestor_bitmask(tree.parents, tree.node_count, out=poisoned_like(expected)), expected)
    assert_same((positions(tree.depths, prefix),), (positions_reference(tree.depths, prefix),))


@pytest.mark.gpu
def test_gpu_the_longest_chain_and_random_damage(rng):
    parents = np.broadcast_to(np.arange(-1, 1024, dtype=np.int32), (16, 1025)).copy()
    count = rng.integers(1, 1026, 16).astype(np.int32)
    hit = rng.random(parents.shape) < 0.002
    hit[0] = False
    count[0] = 1025
    parents[hit] = rng.integers(-3, 1100, hit.sum())
    assert_same(ancestor_bitmask(parents, count), ancestor_bitmask_reference(parents, count))
