"""The accept walk: hand-written trees, SGLang's own, broken ones, and random ones against a walk by parents."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import STATUS_BROKEN_LINK, STATUS_OK, STATUS_TOO_DEEP, check_tree, empty_tree, random_tree
from ddtree_numba.stages.accept_walk import AcceptedPath, accept_walk, accept_walk_reference
from ddtree_numba.synthetic import random_target_tokens
from tests.helpers import assert_same, on_device, on_host, poisoned_like

SGLANG = json.loads((Path(__file__).parent / "data" / "sglang_walks.json").read_text())


def poisoned_launch(tree, targets, draft_length=None):
    """Launch over outputs that hold poison, so that an element the kernel leaves out shows."""
    shape = accept_walk_reference(tree, targets, draft_length)
    return accept_walk(tree, targets, draft_length, out=poisoned_like(shape))


both = pytest.mark.parametrize("walk", [accept_walk_reference, poisoned_launch])


def linked_tree(token_ids, first_child, next_sibling, node_count=None):
    """A batch of trees by their links, valid or not; the fields that a walk must not need stay unused."""
    tree = empty_tree(len(token_ids), len(token_ids[0]) - 1)
    tree.token_ids[:], tree.first_child[:], tree.next_sibling[:] = token_ids, first_child, next_sibling
    tree.node_count[:] = len(token_ids[0]) if node_count is None else node_count
    return tree


# root 9 -> 5, 7, 6;  7 -> 6, 8;  8 -> 4
TOKENS = [9, 5, 7, 6, 6, 8, 4]
FIRST_CHILD = [1, -1, 4, -1, -1, 6, -1]
NEXT_SIBLING = [-1, 2, 3, -1, 5, -1, -1]


def walked(walk, targets, draft_length=None, node_count=None, **links):
    """Walk one tree (the one above, unless `links` say otherwise) -> slots, tokens (unused cut off), status."""
    fields = {"token_ids": TOKENS, "first_child": FIRST_CHILD, "next_sibling": NEXT_SIBLING, **links}
    tree = linked_tree(*([field] for field in fields.values()), node_count)
    path = walk(tree, np.array([targets], np.int32), draft_length)
    count = int(path.accept_count[0])
    columns = (len(targets) - 1 if draft_length is None else draft_length) + 1
    assert path.accept_slots.shape == path.accept_tokens.shape == (1, columns)
    assert all(array.dtype == np.int32 for array in path)
    assert (path.accept_slots[0, count:] == -1).all()
    assert (path.accept_tokens[0, count:] == -1).all()
    return path.accept_slots[0, :count].tolist(), path.accept_tokens[0, :count].tolist(), int(path.status[0])


@both
def test_path_through_middle_siblings(walk):
    targets = [7, 99, 8, 99, 99, 4, 3]
    assert walked(walk, targets) == ([0, 2, 5, 6], [7, 8, 4, 3], STATUS_OK)


@both
def test_nothing_accepted_gives_the_roots_target(walk):
    assert walked(walk, [1, 5, 8, 6, 6, 4, 4]) == ([0], [1], STATUS_OK)


@both
def test_all_accepted_gives_the_leafs_target(walk):
    chain = {"token_ids": [9, 0, 0, 0], "first_child": [1, 2, 3, -1], "next_sibling": [-1] * 4}
    assert walked(walk, [0, 0, 0, 17], **chain) == ([0, 1, 2, 3], [0, 0, 0, 17], STATUS_OK)


@both
def test_walk_ends_below_a_match(walk):
    assert walked(walk, [7, 99, 5, 99, 99, 99, 99]) == ([0, 2], [7, 5], STATUS_OK)


@both
def test_first_of_two_siblings_with_one_token_wins(walk):
    """Both children of the root hold 7; the second has a child that the target would accept."""
    links = {"token_ids": [9, 7, 7, 5], "first_child": [1, -1, 3, -1], "next_sibling": [-1, 2, -1, -1]}
    assert walked(walk, [7, 5, 5, 5], **links) == ([0, 1], [7, 5], STATUS_OK)


@both
def test_token_zero_of_unused_slots_is_no_child(walk):
    assert walked(walk, [0, 0, 0, 0], node_count=1, **unused(4)) == ([0], [0], STATUS_OK)
    child_holds_zero = {"token_ids": [9, 0, 0, 0], "first_child": [1, -1, -1, -1], "next_sibling": [-1] * 4}
    assert walked(walk, [0, 0, 0, 0], node_count=2, **child_holds_zero) == ([0, 1], [0, 0], STATUS_OK)


def unused(slots):
    return {"token_ids": [9] + [0] * (slots - 1), "first_child": [-1] * slots, "next_sibling": [-1] * slots}


@both
def test_root_alone(walk):
    assert walked(walk, [4], **unused(1)) == ([0], [4], STATUS_OK)


@both
def test_sibling_chain_reversed_gives_the_same_path(walk, rng):
    tree = random_tree(rng, 6, 20, vocab=25)
    targets = random_target_tokens(rng, tree, 25)
    reversed_tree = tree._replace(first_child=tree.first_child.copy(), next_sibling=tree.next_sibling.copy())
    for b in range(6):
        for parent in range(tree.node_count[b]):
            children = np.flatnonzero(tree.parents[b] == parent)[::-1].tolist()
            for child, following in pairwise([*children, -1]):
                reversed_tree.next_sibling[b, child] = following
            if children:
                reversed_tree.first_child[b, parent] = children[0]
    assert_same(walk(reversed_tree, targets, None), accept_walk_reference(tree, targets))


@both
def test_path_longer_than_draft_length_stops_there(walk):
    targets = [7, 99, 8, 99, 99, 4, 3]
    assert walked(walk, targets, draft_length=3) == ([0, 2, 5, 6], [7, 8, 4, 3], STATUS_OK)
    assert walked(walk, targets, draft_length=2) == ([0, 2, 5], [7, 8, 4], STATUS_TOO_DEEP)
    assert walked(walk, targets, draft_length=0) == ([0], [7], STATUS_TOO_DEEP)
    assert walked(walk, targets, draft_length=11) == ([0, 2, 5, 6], [7, 8, 4, 3], STATUS_OK)
    assert walked(walk, [1, 99, 8, 99, 99, 4, 3], draft_length=0) == ([0], [1], STATUS_OK)


BROKEN = {
    "first child outside": ({"first_child": [1, -1, 7, -1, -1, 6, -1]}, [0, 2]),
    "first child far outside": ({"first_child": [1, -1, 2**31 - 1, -1, -1, 6, -1]}, [0, 2]),
    "first child negative": ({"first_child": [1, -1, -2, -1, -1, 6, -1]}, [0, 2]),
    "first child most negative": ({"first_child": [1, -1, -(2**31), -1, -1, 6, -1]}, [0, 2]),
    "first child is the node": ({"first_child": [1, -1, 2, -1, -1, 6, -1]}, [0, 2]),
    "first child is the root": ({"first_child": [1, -1, 0, -1, -1, 6, -1]}, [0, 2]),
    "root's first child is the root": ({"first_child": [0, -1, 4, -1, -1, 6, -1]}, [0]),
    "sibling outside": ({"next_sibling": [-1, 7, 3, -1, 5, -1, -1]}, [0]),
    "sibling negative": ({"next_sibling": [-1, -3, 3, -1, 5, -1, -1]}, [0]),
    "sibling is itself": ({"next_sibling": [-1, 2, 3, -1, 4, -1, -1]}, [0, 2]),
    "sibling is the parent": ({"next_sibling": [-1, 2, 3, -1, 2, -1, -1]}, [0, 2]),
    "sibling is the root": ({"next_sibling": [-1, 0, 3, -1, 5, -1, -1]}, [0]),
    "siblings in a circle": ({"next_sibling": [-1, 3, 3, 1, 5, -1, -1]}, [0]),
    "slot beyond node_count": ({"node_count": 5}, [0, 2]),
}


@both
@pytest.mark.parametrize("links, slots", BROKEN.values(), ids=BROKEN)
def test_broken_link_ends_the_walk_with_what_was_accepted(walk, links, slots):
    targets = [7, 99, 8, 99, 99, 4, 3]
    assert walked(walk, targets, **links) == (slots, [targets[slot] for slot in slots], STATUS_BROKEN_LINK)


@both
def test_no_node_is_looked_at_twice(walk):
    """The root's chain 3, 2, 1 ends on 1, whose first child is 2 once more; slots behind node_count don't count."""
    links = {
        "token_ids": [9, 7, 5, 6, 0, 0, 0],
        "first_child": [3, 2, -1, -1, -1, -1, -1],
        "next_sibling": [-1, -1, 1, 2, -1, -1, -1],
    }
    targets = [7, 5, 8, 8, 8, 8, 8]
    assert walked(walk, targets, node_count=4, **links) == ([0, 1], [7, 5], STATUS_BROKEN_LINK)


@both
def test_broken_link_that_is_not_met_is_not_reported(walk):
    targets = [5, 99, 8, 99, 99, 4, 3]
    assert walked(walk, targets, next_sibling=[-1, 99, 99, 99, 99, 99, 99]) == ([0, 1], [5, 99], STATUS_OK)


@both
@pytest.mark.parametrize("node_count", [0, -1, -(2**31)])
def test_node_count_below_one_leaves_the_root(walk, node_count):
    assert walked(walk, [7, 1, 8, 1, 1, 4, 3], node_count=node_count) == ([0], [7], STATUS_BROKEN_LINK)


@both
@pytest.mark.parametrize("node_count", [8, 2**31 - 1])
def test_node_count_above_the_slots_walks_what_is_there(walk, node_count):
    targets = [7, 99, 8, 99, 99, 4, 3]
    assert walked(walk, targets, node_count=node_count) == ([0, 2, 5, 6], [7, 8, 4, 3], STATUS_BROKEN_LINK)
    broken_as_well = {"first_child": [1, -1, 7, -1, -1, 6, -1], "node_count": node_count}
    assert walked(walk, targets, **broken_as_well) == ([0, 2], [7, 8], STATUS_BROKEN_LINK)


@both
def test_broken_requests_leave_their_neighbours_alone(walk, rng):
    tree = random_tree(rng, 5, 12)
    targets = random_target_tokens(rng, tree)
    whole = accept_walk_reference(tree, targets)
    tree.first_child[1], tree.next_sibling[3], tree.node_count[4] = 0, 77, 0
    path = walk(tree, targets, None)
    for b in (0, 2):
        assert_same([field[b : b + 1] for field in path], [field[b : b + 1] for field in whole])
    assert path.status[1] == path.status[4] == STATUS_BROKEN_LINK


def test_kernel_equals_reference_on_arbitrary_links(rng):
    """Links of pure noise: no hang, no read outside, and both stop at the same place."""
    for _ in range(12):
        slots = int(rng.integers(1, 12))
        links = rng.integers(-2, slots + 1, (2, 7, slots))
        token_ids = rng.integers(0, 2, (7, slots))  # two tokens: most looks match, most siblings repeat
        tree = linked_tree(token_ids, *links, node_count=rng.integers(-1, slots + 2, 7))
        targets = rng.integers(0, 2, (7, slots)).astype(np.int32)
        for draft_length in (None, 1):
            path = poisoned_launch(tree, targets, draft_length)
            assert_same(path, accept_walk_reference(tree, targets, draft_length))
            for slots_of_path, count in zip(path.accept_slots, path.accept_count, strict=True):
                assert (np.diff(slots_of_path[:count]) > 0).all(), "the commit stage needs slots that rise"
                assert slots_of_path[0] == 0


def walk_by_parents(tree, targets, b):
    """The path without any link: the child is looked up by (parent, token)."""
    child_of = {
        (int(tree.parents[b, slot]), int(tree.token_ids[b, slot])): slot for slot in range(1, tree.node_count[b])
    }
    path = [0]
    while (path[-1], int(targets[b, path[-1]])) in child_of:
        path.append(child_of[path[-1], int(targets[b, path[-1]])])
    emitted = [int(tree.token_ids[b, slot]) for slot in path[1:]]
    return path, [*emitted, int(targets[b, path[-1]])]


def assert_walks_match(tree, targets, path):
    for b, count in enumerate(path.accept_count):
        slots, tokens = walk_by_parents(tree, targets, b)
        assert path.accept_slots[b, :count].tolist() == slots
        assert path.accept_tokens[b, :count].tolist() == tokens
    assert (path.status == STATUS_OK).all()


def test_reference_on_hundreds_of_long_walks(rng):
    counts = []
    for budget, vocab in ((64, 8), (64, 1000), (200, 3), (33, 40)):
        tree = random_tree(rng, 64, budget, vocab=vocab)
        targets = random_target_tokens(rng, tree, vocab)
        path = accept_walk_reference(tree, targets)
        assert_walks_match(tree, targets, path)
        counts += path.accept_count.tolist()
    assert max(counts) >= 6, "no walk was long"
    assert counts.count(1) >= 10, "no walk stopped at once"


def test_kernel_equals_reference_on_random_trees(rng):
    for batch, budget, vocab in ((1, 0, 5), (9, 8, 3), (17, 64, 1000), (8, 33, 8), (4, 130, 10)):
        tree = random_tree(rng, batch, budget, vocab=vocab)
        targets = random_target_tokens(rng, tree, vocab)
        for draft_length in (None, 2, budget + 3):
            path = poisoned_launch(tree, targets, draft_length)
            assert_same(path, accept_walk_reference(tree, targets, draft_length))
        assert_walks_match(tree, targets, accept_walk(tree, targets))


@both
@pytest.mark.parametrize("case", SGLANG["walks"], ids=lambda case: case["name"])
def test_sglang_walks(walk, case):
    """Its accepted counts exclude the bonus token, ours include it."""
    tree = linked_tree(case["token_ids"], case["first_child"], case["next_sibling"])
    path = walk(tree, np.array(case["target_tokens"], np.int32), case["draft_length"])
    assert path.accept_slots.tolist() == case["accept_slots"]
    assert path.accept_tokens.tolist() == case["accept_tokens"]
    assert (path.accept_count - 1).tolist() == case["correct_count"]
    assert path.status.tolist() == [STATUS_OK if case["draft_length"] else STATUS_TOO_DEEP] * 2


@pytest.mark.parametrize("case", SGLANG["trees"], ids=lambda case: case["name"])
def test_sglang_trees_lead_to_every_node(case):
    """For every node, targets that spell the path its mask row shows lead along SGLang's links to it."""
    for b, rows in enumerate(case["visible"]):
        slots = len(rows)
        token_ids = case["token_ids"][b] if "token_ids" in case else list(range(10, 10 + slots))
        paths = [[slot for slot in range(slots) if row[slot] == "1"] for row in rows]
        tree = linked_tree(*([field] * slots for field in (token_ids, case["first_child"][b], case["next_sibling"][b])))
        targets = np.full((slots, slots), -5, np.int32)
        for node, path in enumerate(paths):
            for parent, child in pairwise(path):
                targets[node, parent] = token_ids[child]
        got = poisoned_launch(tree, targets)
        for node, path in enumerate(paths):
            assert got.accept_slots[node, : got.accept_count[node]].tolist() == path
            assert case["positions"][b][node] == case["prefix_lengths"][b] + len(path) - 1
        assert_same(got, accept_walk_reference(tree, targets))


def test_sglang_trees_keep_the_contract():
    case = SGLANG["trees"][1]
    tree = linked_tree(case["token_ids"], case["first_child"], case["next_sibling"])
    for b, rows in enumerate(case["visible"]):
        for slot, row in enumerate(rows):
            above = [j for j in range(slot) if row[j] == "1"]
            tree.parents[b, slot], tree.depths[b, slot] = max(above, default=-1), len(above)
            tree.log_probs[b, slot] = -slot
            tree.ancestor_bits[b, slot, 0] = int(row[::-1], 2)
    check_tree(tree)


def test_device_arrays_stay_on_the_device(rng):
    tree = random_tree(rng, 3, 9)
    targets = random_target_tokens(rng, tree)
    expected = accept_walk_reference(tree, targets, 4)
    device_tree, device_targets = on_device(tree), cuda.to_device(targets)
    assert_same(on_host(accept_walk(device_tree, device_targets, 4)), expected)
    out = on_device(poisoned_like(expected))
    got = accept_walk(device_tree, device_targets, 4, out=out, stream=cuda.stream())
    assert all(a is b for a, b in zip(got, out, strict=True))
    cuda.synchronize()
    assert_same(on_host(out), expected)
    assert_same(on_host(device_tree), tree)


def test_out_and_stream_with_numpy(rng):
    tree = random_tree(rng, 2, 5)
    targets = random_target_tokens(rng, tree)
    expected = accept_walk_reference(tree, targets)
    out = poisoned_like(expected)
    got = accept_walk(tree, targets, out=out, stream=cuda.stream())
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(out, expected)


def test_bad_arguments_are_named():
    tree = empty_tree(2, 3)
    targets = np.zeros((2, 4), np.int32)

    def raises(error, words, *args, **kwargs):
        with pytest.raises(error) as caught:
            accept_walk(*args, **kwargs)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message

    raises(TypeError, ("tree", "tuple", "DraftTree"), tuple(tree), targets)
    raises(TypeError, ("target_tokens", "int64", "int32"), tree, targets.astype(np.int64))
    raises(ValueError, ("target_tokens", "(2, 5)", "N=4"), tree, np.zeros((2, 5), np.int32))
    raises(ValueError, ("target_tokens", "(3, 4)", "B=2"), tree, np.zeros((3, 4), np.int32))
    raises(ValueError, ("target_tokens", "strided"), tree, np.zeros((4, 2), np.int32).T)
    raises(TypeError, ("target_tokens", "list"), tree, targets.tolist())
    raises(ValueError, ("tree.next_sibling", "(2, 3)"), tree._replace(next_sibling=targets[:, :3].copy()), targets)
    raises(TypeError, ("tree.node_count", "int64"), tree._replace(node_count=np.ones(2, np.int64)), targets)
    raises(ValueError, ("draft_length", "-1"), tree, targets, -1)
    raises(TypeError, ("draft_length", "2.0"), tree, targets, 2.0)
    raises(ValueError, ("B", "0"), empty_tree(0, 3), np.zeros((0, 4), np.int32))
    out = AcceptedPath(*poisoned_like(accept_walk_reference(tree, targets)))
    raises(TypeError, ("out", "tuple", "AcceptedPath"), tree, targets, out=tuple(out))
    raises(ValueError, ("accept_slots", "(2, 4)"), tree, targets, 1, out=out)
    raises(TypeError, ("status", "int64"), tree, targets, out=out._replace(status=np.zeros(2, np.int64)))
    raises(TypeError, ("target_tokens", "device"), tree, cuda.to_device(targets))
    assert (out.accept_slots == -7).all(), "a refused call wrote something"


@pytest.mark.gpu
def test_gpu_hundreds_of_batches(rng):
    for _ in range(300):
        vocab = int(rng.choice([3, 50, 100000]))
        tree = random_tree(rng, 64, 64, vocab=vocab)
        targets = random_target_tokens(rng, tree, vocab)
        assert_same(poisoned_launch(tree, targets, 15), accept_walk_reference(tree, targets, 15))


@pytest.mark.gpu
def test_gpu_largest_budget_and_batch(rng):
    for batch, budget, max_depth in ((16, 1024, 64), (16, 1024, 1024), (3000, 12, 12)):
        tree = random_tree(rng, batch, budget, vocab=60, max_depth=max_depth)
        targets = random_target_tokens(rng, tree, 60, follow=0.98)
        assert_same(poisoned_launch(tree, targets), accept_walk_reference(tree, targets))


@pytest.mark.gpu
def test_gpu_arbitrary_links(rng):
    for _ in range(100):
        slots = int(rng.integers(1, 70))
        links = rng.integers(-2, slots + 1, (2, 200, slots))
        tree = linked_tree(rng.integers(0, 2, (200, slots)), *links, node_count=rng.integers(-1, slots + 2, 200))
        targets = rng.integers(0, 2, (200, slots)).astype(np.int32)
        assert_same(poisoned_launch(tree, targets), accept_walk_reference(tree, targets))
