"""The bridges: what an engine's arrays hold, there and back, against hand-written values and SGLang's own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import (
    STATUS_BAD_PAGE,
    STATUS_BROKEN_LINK,
    STATUS_OK,
    STATUS_TOO_SMALL,
    DraftTree,
    check_tree,
    empty_tree,
    random_tree,
)
from ddtree_numba.interop import flashinfer, flashmla, ragged_mask, sglang, tensorrt_llm, visibility, vllm
from ddtree_numba.interop.sglang import TreeMaskMode
from ddtree_numba.interop.sglang.verify import INPUTS, OUTPUTS
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference
from ddtree_numba.stages.tree_attention import tree_attention_reference
from ddtree_numba.synthetic import random_target_tokens
from tests.helpers import assert_same, on_device, on_host, poisoned

VECTORS = json.loads((Path(__file__).parent / "data" / "sglang_vectors.json").read_text())
NAN = float("nan")


def trees(rng, slots, batch=3, full=False):
    """Return ragged trees of `slots` slots (the first one full), prefixes and a shuffled block table of pages of 4."""
    counts = [slots] * batch if full else [slots, *rng.integers(1, slots + 1, batch - 1)]
    tree = random_tree(rng, batch, slots - 1, node_counts=counts)
    prefix = rng.integers(0, 20, batch).astype(np.int32)
    prefix[-1] = 0
    pages = -(-(20 + slots) // 4)
    table = rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    return tree, prefix, table


def both(launcher, reference, *args, **named):
    """Run a launcher on NumPy and on device arrays and its reference; all must agree. Return the reference's answer."""
    expected = reference(*args, **named)
    several = expected if isinstance(expected, tuple) else (expected,)
    got = launcher(*args, **named)
    assert_same(got if isinstance(got, tuple) else (got,), several)
    moved = [
        on_device(arg) if isinstance(arg, tuple) else on_device((arg,))[0] if isinstance(arg, np.ndarray) else arg
        for arg in args
    ]
    got = launcher(*moved, **named)
    got = on_host(got if isinstance(got, tuple) else (got,))
    for a, b in zip(got, several, strict=True):  # a device array may be longer than needed
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a[: len(b)], b)
    return expected


SLOTS = [1, 8, 33, 70]


# Dense masks.


@pytest.mark.parametrize("slots", SLOTS)
def test_a_dense_mask_is_what_ancestors_say(rng, slots):
    tree, prefix, _ = trees(rng, slots)
    keys = int(prefix.max()) + slots + 3
    mask = both(visibility.bool_mask, visibility.bool_mask_reference, tree.ancestor_bits, prefix, keys=keys)
    for b in range(3):
        for node in range(slots):
            seen, above = set(range(prefix[b])), node if node < tree.node_count[b] else -1
            while above >= 0:
                seen.add(prefix[b] + above)
                above = tree.parents[b, above]
            assert set(np.flatnonzero(mask[b, node])) == seen
    alone = both(visibility.bool_mask, visibility.bool_mask_reference, tree.ancestor_bits)
    np.testing.assert_array_equal(
        both(visibility.bits_from_mask, visibility.bits_from_mask_reference, alone), tree.ancestor_bits
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_an_additive_mask_adds_nothing_or_everything(rng, dtype):
    tree, _, _ = trees(rng, 33)
    mask = both(visibility.additive_mask, visibility.additive_mask_reference, tree.ancestor_bits, dtype=dtype)
    sees = visibility.bool_mask_reference(tree.ancestor_bits)
    hidden = np.uint16(0xFF80) if dtype == np.uint16 else dtype(-np.inf)
    assert (mask[sees] == 0).all() and (mask[~sees] == hidden).all() and mask.dtype == dtype
    lowest = np.uint16(0xFF7F) if dtype == np.uint16 else np.finfo(dtype).min
    minus_zero = np.uint16(0x8000) if dtype == np.uint16 else dtype(-0.0)
    as_transformers_has_it = np.where(sees, minus_zero, lowest).astype(dtype)
    for given in (mask, as_transformers_has_it):
        bits = both(visibility.bits_from_mask, visibility.bits_from_mask_reference, given)
        np.testing.assert_array_equal(bits, tree.ancestor_bits)


def test_an_output_with_an_older_bigger_mask_is_overwritten(rng):
    tree, prefix, _ = trees(rng, 9)
    out = np.ones((3, 9, 40), bool)
    assert visibility.bool_mask(tree.ancestor_bits, prefix, 40, out=out) is out
    np.testing.assert_array_equal(out, visibility.bool_mask_reference(tree.ancestor_bits, prefix, 40))
    bits = np.full_like(tree.ancestor_bits, 0xDEADBEEF)
    visibility.bits_from_mask(visibility.bool_mask_reference(tree.ancestor_bits), out=bits)
    np.testing.assert_array_equal(bits, tree.ancestor_bits)


@pytest.mark.parametrize("slots", SLOTS)
def test_bits_lead_back_to_the_links(rng, slots):
    tree, _, _ = trees(rng, slots)
    links = both(visibility.links_from_bits, visibility.links_from_bits_reference, tree.ancestor_bits, tree.node_count)
    assert_same(links[:4], (tree.parents, tree.depths, tree.first_child, tree.next_sibling))
    assert links.status.tolist() == [STATUS_OK] * 3


def test_bits_of_no_tree_are_reported(rng):
    bits = np.array([[[1], [3], [5]]] * 8, np.uint32)
    bits[1, 1, 0] = 2  # does not see the root
    bits[2, 1, 0] = 1  # does not see itself
    bits[3, 1, 0] = 7  # sees a later slot
    bits[4, 2, 0] = 6  # sees 1, but not what 1 sees
    bits[5, 0, 0] = 3  # a root that sees its child
    bits[6, 2, 0] = 5 | 1 << 31  # a bit beyond the slots
    counts = np.array([3, 3, 3, 3, 3, 3, 3, 4], np.int32)
    links = both(visibility.links_from_bits, visibility.links_from_bits_reference, bits, counts)
    assert links.status.tolist() == [STATUS_OK] + [STATUS_BROKEN_LINK] * 7
    for odd in (1 << 3, 1 << 31):  # a parent and its child agree on a slot that neither may see
        family = np.array([[[1], [3 | odd], [7 | odd], [9]]], np.uint32)
        both(visibility.links_from_bits, visibility.links_from_bits_reference, family, np.array([4], np.int32))
        links = visibility.links_from_bits(family, np.array([4], np.int32))
        assert links.parents.tolist() == [[-1, -1, -1, 0]] and links.status.tolist() == [STATUS_BROKEN_LINK]
    noise = rng.integers(0, 2**32, (4, 40, 2), dtype=np.uint32)
    both(visibility.links_from_bits, visibility.links_from_bits_reference, noise, np.array([40, 1, 0, -1], np.int32))


# Masks over prefix and tree, request after request.


@pytest.mark.parametrize("slots", SLOTS)
def test_flat_and_packed_masks_there_and_back(rng, slots):
    tree, prefix, _ = trees(rng, slots)
    total = int(prefix.sum())
    flat = both(ragged_mask.flat_mask, flat_reference, tree.ancestor_bits, prefix, prefix_sum=total)
    packed = both(ragged_mask.packed_mask, packed_reference, tree.ancestor_bits, prefix, prefix_sum=total)
    dense = visibility.bool_mask_reference(tree.ancestor_bits, prefix)
    rows = [dense[b, :, : p + slots].ravel() for b, p in enumerate(prefix)]
    np.testing.assert_array_equal(flat, np.concatenate(rows))
    for b, row in enumerate(rows):
        mine = packed[0][packed[1][b] : packed[1][b + 1]]
        np.testing.assert_array_equal(mine, np.packbits(row, bitorder="little"))
    back = (ragged_mask.bits_from_flat_mask, ragged_mask.bits_from_flat_mask_reference)
    np.testing.assert_array_equal(both(*back, flat, prefix, slots), tree.ancestor_bits)
    back = (ragged_mask.bits_from_packed_mask, ragged_mask.bits_from_packed_mask_reference)
    np.testing.assert_array_equal(both(*back, *packed, prefix, slots), tree.ancestor_bits)


def flat_reference(bits, prefix, prefix_sum):
    return ragged_mask.flat_mask_reference(bits, prefix)


def packed_reference(bits, prefix, prefix_sum):
    return ragged_mask.packed_mask_reference(bits, prefix)


def test_device_masks_are_never_written_beyond_their_end(rng):
    """A sum that is too small cuts the last requests; memory behind the array stays as it is."""
    tree, prefix, _ = trees(rng, 9)
    prefix[:] = 16
    expected = ragged_mask.flat_mask_reference(tree.ancestor_bits, prefix)
    mask = rng.random(len(expected)) < 0.5
    on_card = cuda.to_device(mask)
    short = on_card[: len(expected) - 50]
    ragged_mask.flat_mask(*on_device((tree.ancestor_bits, prefix)), 3, out=short)
    got = on_card.copy_to_host()
    np.testing.assert_array_equal(got[:-50], expected[:-50])
    np.testing.assert_array_equal(got[-50:], mask[-50:])


# SGLang.


def sglang_case():
    case = VECTORS["build_tree_kernel_efficient"][0]
    between = case["intermediate_derived"]
    parents = np.array(between["parents"], np.int32)
    batch, slots = parents.shape
    bits, status = ancestor_bitmask_reference(parents, np.full(batch, slots, np.int32))
    links = visibility.links_from_bits_reference(bits, np.full(batch, slots, np.int32))
    assert not status.any() and not links.status.any()
    tree = empty_tree(batch, slots - 1)._replace(
        token_ids=np.array(case["expected_asserted"]["draft_tokens"], np.int32).reshape(batch, slots),
        parents=parents,
        depths=links.depths,
        first_child=links.first_child,
        next_sibling=links.next_sibling,
        log_probs=np.zeros((batch, slots)),
        ancestor_bits=bits,
        node_count=np.full(batch, slots, np.int32),
    )
    check_tree(tree)
    return case, tree, np.array(case["inputs"]["seq_lens"]["data"], np.int32)


def test_sglangs_builder_selects_these_parents():
    """From the scores and candidates of its own test to our parents."""
    case = VECTORS["build_tree_kernel_efficient"][0]
    given, between = case["inputs"], case["intermediate_derived"]
    scores = np.concatenate([np.array(part, np.float32).reshape(2, -1) for part in given["score_list"]["data"]], axis=1)
    best = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, : case["draft_token_num"] - 1], axis=1)
    np.testing.assert_array_equal(best, between["top_scores_index"]["data"])
    parent_list = np.concatenate([np.array(part, np.int64) for part in given["parents_list"]["data"][:-1]], axis=1)
    select = (sglang.parents_from_selection, sglang.parents_from_selection_reference)
    parents, status = both(*select, parent_list, best.astype(np.int64), case["topk"])
    assert parents.tolist() == between["parents"] and status.tolist() == [STATUS_OK, STATUS_OK]
    tokens = np.concatenate([np.array(part) for part in given["token_list"]["data"]], axis=1)
    drafted = np.take_along_axis(tokens, best, axis=1)
    expected = np.array(case["expected_asserted"]["draft_tokens"]).reshape(2, -1)
    np.testing.assert_array_equal(np.column_stack([given["bonus_tokens"]["data"], drafted]), expected)


def test_a_selection_without_its_parent_is_reported(rng):
    parent_list = np.array([[-1, 0, 1, 7]], np.int64)
    cases = (([[0, 3]], 1), ([[0, 99]], 2), ([[-5, 1]], 2), ([[0, -5]], 2), ([[0, 6]], 2), ([[2, 0]], 2))
    for selected, topk in cases:  # the last one's parent comes after it
        both(
            sglang.parents_from_selection,
            sglang.parents_from_selection_reference,
            parent_list,
            np.array(selected, np.int64),
            topk,
        )
        _, status = sglang.parents_from_selection_reference(parent_list, np.array(selected, np.int64), topk)
        assert status.tolist() == [STATUS_BROKEN_LINK]


@pytest.mark.parametrize("mode", TreeMaskMode)
def test_sglangs_own_build_test(mode):
    case, tree, lengths = sglang_case()
    asserted, derived = case["expected_asserted"], case["expected_derived"]
    named = {"prefix_sum": int(lengths.sum())}
    given = both(sglang.to_sglang, to_sglang_reference, tree, lengths, mode, **named)
    assert given.draft_token.tolist() == asserted["draft_tokens"]
    assert given.positions.tolist() == asserted["positions"]
    assert given.retrive_index.tolist() == asserted["retrieve_index"]
    assert given.retrive_next_token.tolist() == asserted["retrieve_next_token"]
    assert given.retrive_next_sibling.tolist() == asserted["retrieve_next_sibling"]
    assert given.tree_mask.astype(int).tolist() == derived[f"tree_mask_{mode.name}"]["data"]
    tree_again, status = sglang.from_sglang(given.draft_token.reshape(2, 8), *given[3:5])
    assert_same(tree_again, tree)
    assert status.tolist() == [STATUS_OK, STATUS_OK]


def to_sglang_reference(tree, lengths, mode, prefix_sum):
    return sglang.to_sglang_reference(tree, lengths, mode)


def test_sglangs_own_reconstruction_test():
    case = VECTORS["reconstruct_indices_from_tree_mask"][0]
    slots, expected = case["draft_token_num"], case["expected_asserted"]
    mask = np.array(case["inputs"]["tree_mask"]["data"], bool).reshape(1, slots, slots)
    bits = visibility.bits_from_mask(mask)
    links = visibility.links_from_bits(bits, np.array([slots], np.int32))
    assert links.first_child.tolist() == expected["retrive_next_token"]
    assert links.next_sibling.tolist() == expected["retrive_next_sibling"]
    assert (links.depths + case["inputs"]["verified_seq_len"]["data"][0]).ravel().tolist() == expected["positions"]


def verify_arguments(case, batch=2, slots=6):
    given = VECTORS["verify_tree_greedy"][0]["inputs"]
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
    outputs = (
        np.full(batch * slots, -1, np.int32),
        np.full((batch, case["num_spec_step"]), -1, np.int32),
        np.zeros(batch, np.int32),
    )
    return outputs, tuple(np.array(given[name]["data"], np.int64) for name in names)


@pytest.mark.parametrize("case", VECTORS["verify_tree_greedy"], ids=lambda case: case["name"])
@pytest.mark.parametrize("how", ["reference", "numpy", "device"])
def test_sglangs_own_walk_test(case, how):
    outputs, inputs = verify_arguments(case)
    if how == "reference":
        assert sglang.verify_tree_greedy_reference(*outputs, *inputs).tolist() == [STATUS_OK, STATUS_OK]
    elif how == "numpy":
        assert sglang.verify_tree_greedy(*outputs, *inputs) is None
    else:
        on_card = on_device(outputs)
        sglang.verify_tree_greedy(*on_card, *on_device(inputs))
        outputs = on_host(on_card)
    expected = case.get("expected_asserted") or case["expected_derived"]
    for name, got in zip(("predicts", "accept_index", "accept_token_num"), outputs, strict=True):
        assert got.tolist() == expected[name], name


def test_sglangs_newer_spelling_is_taken_too():
    case = VECTORS["verify_tree_greedy"][0]
    (predicts, accept_index, count), inputs = verify_arguments(case)
    names = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "target_predict")
    named = {"predicts": predicts, "accept_index": accept_index, "accept_token_num": count}
    sglang.verify_tree_greedy(**named, **dict(zip(names, inputs, strict=True)))
    assert count.tolist() == case["expected_asserted"]["accept_token_num"]


@pytest.mark.parametrize("name", ["retrive_index", "retrive_next_token", "retrive_next_sibling"])
def test_both_spellings_at_once_are_refused(name):
    outputs, inputs = verify_arguments(VECTORS["verify_tree_greedy"][0])
    named = {**dict(zip(OUTPUTS, outputs, strict=True)), **dict(zip(INPUTS, inputs, strict=True))}
    newer = name.replace("retrive", "retrieve")
    for call in (sglang.verify_tree_greedy, sglang.verify_tree_greedy_reference):
        for both_spellings in ({**named, newer: named[name]}, {newer: named[name], **named}):
            with pytest.raises(TypeError, match=f"{name}: got {name}= and {newer}= at once, needs one of them"):
                call(**both_spellings)


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_the_walk_is_stage_5s(rng, columns):
    """On whole trees it accepts what `accept_walk` accepts, at flat indices that need not be b * N + slot."""
    tree, prefix, _ = trees(rng, 12, batch=4, full=True)
    targets = random_target_tokens(rng, tree, 1000)
    path = accept_walk_reference(tree, targets, columns - 1)
    given = sglang.to_sglang_reference(tree, prefix, TreeMaskMode.QLEN_ONLY)
    where = rng.permutation(4 * 12).reshape(4, 12).astype(np.int64)  # node (b, slot) stands at this flat index
    by_index = np.empty(4 * 12, np.int64)
    by_index[where] = targets
    outputs = (poisoned(50, np.int32), poisoned((4, columns), np.int32), poisoned(4, np.int32))
    untouched = [array.copy() for array in outputs]
    inputs = (given.draft_token.reshape(4, 12), where, *given[3:5], by_index.reshape(4, 12))
    twin = [array.copy() for array in outputs]
    status = np.full(4, -7, np.int32)
    sglang.verify_tree_greedy(*outputs, *inputs, status=status)
    assert_same((*outputs, status), (*twin, sglang.verify_tree_greedy_reference(*twin, *inputs)))
    assert not status.any()
    predicts, index, count = outputs
    np.testing.assert_array_equal(count, path.accept_count - 1)
    for b in range(4):
        used = path.accept_count[b]
        flat = where[b, path.accept_slots[b, :used]]
        np.testing.assert_array_equal(index[b, :used], flat)
        np.testing.assert_array_equal(index[b, used:], untouched[1][b, used:])
        np.testing.assert_array_equal(predicts[flat], path.accept_tokens[b, :used])
    written = np.concatenate([index[b, : path.accept_count[b]] for b in range(4)])
    others = np.setdiff1d(np.arange(50), written)
    np.testing.assert_array_equal(predicts[others], untouched[0][others])


def test_broken_links_end_the_walk(rng):
    for _ in range(30):
        inputs = [rng.integers(-3, 9, (5, 7)) for _ in range(4)] + [rng.integers(0, 3, (5, 7))]
        inputs[0] = rng.integers(0, 3, (5, 7))
        inputs[1] = np.where(rng.random((5, 7)) < 0.9, np.arange(35).reshape(5, 7), rng.integers(-40, 80, (5, 7)))
        outputs = (np.full(40, -1, np.int32), np.full((5, 6), -1, np.int32), np.full(5, -7, np.int32))
        twin = [array.copy() for array in outputs]
        status = np.full(5, -7, np.int32)
        sglang.verify_tree_greedy(*outputs, *inputs, status=status)
        assert_same((*outputs, status), (*twin, sglang.verify_tree_greedy_reference(*twin, *inputs)))
        assert (outputs[0][35:] == -1).all()


@pytest.mark.parametrize(
    ("where", "first", "expected"),
    [
        ([0, 1], [1, 1], ([5, 5], [[0, 1, -1, -1]], [1])),  # a node below itself: one look, then a circle
        ([0, 2], [1, -1], ([5, -1], [[0, -1, -1, -1]], [0])),  # a flat index beyond all nodes
        ([0, -1], [1, -1], ([5, -1], [[0, -1, -1, -1]], [0])),
        ([2, 1], [1, -1], ([-1, -1], [[-1, -1, -1, -1]], [0])),  # the root's own
        ([-1, 1], [1, -1], ([-1, -1], [[-1, -1, -1, -1]], [0])),
    ],
)
def test_broken_links_by_hand(where, first, expected):
    row = [np.array([values], np.int64) for values in ([0, 5], where, first, [-1, -1], [5, 5])]
    for call in (sglang.verify_tree_greedy, sglang.verify_tree_greedy_reference):
        predicts, index, count, status = (np.full(shape, -1, np.int32) for shape in (2, (1, 4), 1, 1))
        if call is sglang.verify_tree_greedy:
            call(predicts, index, count, *row, status=status)
        else:
            status = call(predicts, index, count, *row)
        assert (predicts.tolist(), index.tolist(), count.tolist()) == expected
        assert status.tolist() == [STATUS_BROKEN_LINK]


@pytest.mark.parametrize("slots", [1, 7, 8, 9, 16, 17, 32])
def test_packed_rows_take_the_narrowest_word(rng, slots):
    tree, _, _ = trees(rng, slots)
    rows = both(sglang.pack_rows, sglang.pack_rows_reference, tree.ancestor_bits)
    assert rows.dtype == (np.uint8 if slots <= 8 else np.uint16 if slots <= 16 else np.uint32)
    np.testing.assert_array_equal(
        both(sglang.unpack_rows, sglang.unpack_rows_reference, rows, slots), tree.ancestor_bits
    )
    wide = sglang.pack_rows(tree.ancestor_bits, np.uint32)
    assert wide.dtype == np.uint32 and wide.tolist() == rows.tolist()


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY])
def test_trees_with_unused_slots_go_to_sglang_and_back(rng, slots, mode):
    tree, prefix, _ = trees(rng, slots)
    named = {"prefix_sum": int(prefix.sum())}
    given = both(sglang.to_sglang, to_sglang_reference, tree, prefix, mode, **named)
    links = (given.draft_token.reshape(3, slots), *given[3:5])
    *again, status = both(from_sglang, from_sglang_reference, *links)
    expected = tree._replace(log_probs=np.where(np.isfinite(tree.log_probs), 0.0, tree.log_probs))
    assert_same(again, tuple(expected))
    assert not status.any()


def from_sglang(*links):
    tree, status = sglang.from_sglang(*links)
    return (*tree, status)


def from_sglang_reference(*links):
    tree, status = sglang.from_sglang_reference(*links)
    return (*tree, status)


def test_outputs_of_the_callers_are_filled(rng):
    tree, prefix, _ = trees(rng, 8)
    for mode in TreeMaskMode:
        expected = sglang.to_sglang_reference(tree, prefix, mode)
        out = sglang.SGLangTree(*(wrong(field) for field in expected))
        got = sglang.to_sglang(tree, prefix, mode, out=out)
        assert all(a is b for a, b in zip(got, out, strict=True))
        assert_same(out, expected)
        on_card = on_device(sglang.SGLangTree(*(wrong(field) for field in expected)))
        got = sglang.to_sglang(*on_device_tree(tree, prefix), mode, out=on_card, prefix_sum=int(prefix.sum()))
        assert all(a is b for a, b in zip(got, on_card, strict=True))
        assert_same(on_host(on_card), expected)


def wrong(field):
    """Return an array of the same kind that holds nothing right."""
    return ~field if field.dtype == bool else poisoned(field.shape, field.dtype)


def on_device_tree(tree, *others):
    return (on_device(tree), *on_device(others))


NO_TREES = {  # tokens, first children, next siblings
    "siblings in a circle": ([7, 8, 9], [1, -1, -1], [-1, 2, 1]),
    "its own sibling": ([7, 8, 9], [1, -1, -1], [-1, 2, 2]),
    "a child that is the root": ([7, 8, 9], [1, 0, -1], [-1, -1, -1]),
    "a node below itself": ([7, 8, 9], [1, 1, -1], [-1, -1, -1]),
    "a child outside": ([7, 8, 9], [3, -1, -1], [-1, -1, -1]),
    "a sibling outside": ([7, 8, 9], [1, -1, -1], [-1, 3, -1]),
    "a link beyond int32": ([7, 8, 9], [1, -1, 2**40], [-1, 2, -1]),
    "a link below -1": ([7, 8, 9], [1, -1, -2], [-1, 2, -1]),
    "a smaller slot chained behind a larger one": ([7, 8, 9], [2, -1, -1], [-1, -1, 1]),
    "two parents": ([7, 8, 9], [1, 2, -1], [-1, 2, -1]),
    "a shared child": ([9, 5, 7, 6], [1, 3, 3, -1], [-1, 2, -1, -1]),
    "a shared end of two chains": ([9, 5, 7, 6, 4], [1, 3, 4, -1, -1], [-1, 2, -1, 4, -1]),
    "a child that a hole claims too": ([9, 5, 7, 6], [1, -1, 3, -1], [-1, 3, -1, -1]),
    "a hole": ([7, 8, 9], [2, -1, -1], [-1, -1, -1]),
    "a sibling of the root": ([9, 5, 6], [1, -1, -1], [2, -1, -1]),
    "a sibling of the root beside a tree": ([9, 5, 6], [1, -1, -1], [2, 2, -1]),
    "siblings of one token": ([9, 5, 5], [1, -1, -1], [-1, 2, -1]),
    "siblings of one token, apart": ([9, 5, 6, 7, 5], [1, -1, -1, -1, -1], [-1, 2, 3, 4, -1]),
    "a negative token": ([9, -5, 5], [1, -1, -1], [-1, 2, -1]),
    "a token beyond int32": ([9, 5, 2**31], [1, -1, -1], [-1, 2, -1]),
    "a token far beyond int32": ([9, 5, 2**32 + 6], [1, -1, -1], [-1, 2, -1]),
    "a root token beyond int32": ([2**40, 5, 6], [1, -1, -1], [-1, 2, -1]),
    "an unused slot's token beyond int32": ([9, 5, 2**40], [1, -1, -1], [-1, -1, -1]),
}


def links_of(*rows):
    return tuple(np.array([row], np.int64) for row in rows)


@pytest.mark.parametrize("rows", NO_TREES.values(), ids=NO_TREES.keys())
def test_links_that_are_no_tree_of_the_contract_are_refused(rows):
    named = (
        r"retrive_next_token, retrive_next_sibling: request 0, slot|candidates: got tokens .*, needs 0 to 2\*\*31 - 1"
    )
    for call in (sglang.from_sglang, sglang.from_sglang_reference):
        with pytest.raises(ValueError, match=named):
            call(*links_of(*rows))


@pytest.mark.parametrize("rows", NO_TREES.values(), ids=NO_TREES.keys())
def test_device_links_that_are_no_tree_have_a_status_and_their_neighbours_none(rows):
    whole = list(range(len(rows[0]))), [*range(1, len(rows[0])), -1], [-1] * len(rows[0])
    links = on_device(tuple(np.array([good, bad, good], np.int64) for good, bad in zip(whole, rows, strict=True)))
    tree, status = sglang.from_sglang(*links)
    assert status.copy_to_host().tolist() == [STATUS_OK, STATUS_BROKEN_LINK, STATUS_OK]
    check_tree(DraftTree(*(field[::2].copy() for field in on_host(tree))))


def test_links_and_their_refusals_are_the_same_on_host_and_device(rng):
    """Random links, most of them no tree: the device's status says what the reference raises."""
    seen = {STATUS_OK: 0, STATUS_BROKEN_LINK: 0}
    for slots in (1, 2, 3, 4, 6):
        for _ in range(60):
            tree = random_tree(rng, 1, slots - 1, node_counts=[int(rng.integers(1, slots + 1))])
            links = [tree.token_ids, tree.first_child, tree.next_sibling]
            links = [field.astype(np.int64) for field in links]
            for _ in range(rng.integers(0, 3)):
                field = links[rng.integers(3)]
                field[0, rng.integers(slots)] = rng.integers(-1, slots + 1)
            try:
                expected, expected_status = sglang.from_sglang_reference(*links)[0], STATUS_OK
            except ValueError:
                expected, expected_status = None, STATUS_BROKEN_LINK
            got, status = sglang.from_sglang(*on_device(tuple(links)))
            assert status.copy_to_host().tolist() == [expected_status], links
            if expected is not None:
                assert_same(on_host(got), expected)
            seen[expected_status] += 1
    assert min(seen.values()) > 50


def test_links_of_unused_slots_may_be_anything():
    links = links_of([9, 5, 6, 7, 8], [1, -1, 4, 4, 99], [-1, -1, 3, -7, -1])
    both(from_sglang, from_sglang_reference, *links)


# TensorRT-LLM, vLLM, FlashInfer, FlashMLA.


@pytest.mark.parametrize("slots", SLOTS)
def test_tensorrt_llm_there_and_back(rng, slots):
    tree, _, _ = trees(rng, slots)
    words = -(-slots // 32)
    for stride in (None, words, words + 2):
        given = both(tensorrt_llm.to_tensorrt_llm, tensorrt_llm.to_tensorrt_llm_reference, tree, stride=stride)
        assert given.packed_mask.shape == (3, slots, stride or words) and given.packed_mask.dtype == np.int32
        back = (tensorrt_llm.bits_from_packed_rows, tensorrt_llm.bits_from_packed_rows_reference)
        np.testing.assert_array_equal(both(*back, given.packed_mask, slots), tree.ancestor_bits)
    assert given.position_offsets is tree.depths and given.generation_lengths is tree.node_count
    assert given.retrieve_index.tolist() == [list(range(slots))] * 3


def test_tensorrt_llm_mask_of_the_same_stride_is_no_copy(rng):
    tree, _, _ = trees(rng, 40)
    mask = tensorrt_llm.to_tensorrt_llm(tree).packed_mask
    assert np.shares_memory(mask, tree.ancestor_bits)
    case, tree, _ = sglang_case()
    assert (
        tensorrt_llm.to_tensorrt_llm(tree).packed_mask.tolist()
        == case["expected_derived"]["TRTLLM_packed_int32"]["data"]
    )


def test_vllm_bias_is_one_matrix_a_request(rng):
    tree, _, _ = trees(rng, 9)
    bias = both(vllm.qq_bias, vllm.qq_bias_reference, tree)
    assert bias.dtype == np.float32 and bias[1].flags.c_contiguous
    for b, node in np.ndindex(3, 9):
        seen, above = set(), node if node < tree.node_count[b] else -1
        while above >= 0:
            seen.add(above)
            above = tree.parents[b, above]
        assert [value == 0 for value in bias[b, node]] == [slot in seen for slot in range(9)]
        assert all(value in (0, -math.inf) for value in bias[b, node])
    back = (vllm.bits_from_qq_bias, vllm.bits_from_qq_bias_reference)
    np.testing.assert_array_equal(both(*back, bias), tree.ancestor_bits)


def test_flashinfer_bytes_by_hand():
    """Root, a, b below the root at prefix 2 and 3: rows of 5 and 6 bits, each request from a whole byte on."""
    tree = random_tree(np.random.default_rng(0), batch=2, budget=2, node_counts=[3, 3], max_depth=1)
    mask, indptr = flashinfer.packed_custom_mask(tree, np.array([2, 3], np.int32))
    rows = ["111001111011101", "111100111110111101"]
    expected = [int(row[at : at + 8].ljust(8, "0")[::-1], 2) for row in rows for at in range(0, len(row), 8)]
    assert mask.tolist() == expected and indptr.tolist() == [0, 2, 5]


@pytest.mark.parametrize("slots", [9, 70])
def test_flashmla_lists_make_the_same_attention(rng, slots):
    tree, prefix, table = trees(rng, slots)
    width, latent = 12, 8
    pool = rng.normal(size=(table.size, 4, width)).astype(np.float32)
    q = rng.normal(size=(3, slots, 2, width)).astype(np.float32)
    out, lse = tree_attention_reference(
        q, pool, table, prefix, tree.ancestor_bits, tree.node_count, 0.3, latent_width=latent
    )
    lists, status = both(flashmla.sparse_indices, flashmla.sparse_indices_reference, tree, prefix, table, 4, topk=96)
    assert not status.any()
    rows = pool.reshape(-1, width).astype(np.float64)
    for b, node in np.ndindex(3, slots):
        mine = lists[b, node][lists[b, node] >= 0]
        if node >= tree.node_count[b]:
            assert mine.size == 0
            continue
        assert (lists[b, node, len(mine) :] == -1).all(), "the list is a prefix"
        scores = 0.3 * q[b, node].astype(np.float64) @ rows[mine].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(weights / total @ rows[mine, :latent], out[b, node], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(np.log(total[:, 0]) + scores.max(axis=1), lse[b, node], rtol=1e-12)
    default, _ = flashmla.sparse_indices(tree, prefix, table, 4)
    assert default.shape[2] == (64 if prefix.max() + tree.depths.max() < 64 else 128)


def test_flashmla_faults_on_the_device_are_reported(rng):
    tree, prefix, table = trees(rng, 9)
    prefix[:] = 10
    short, status = flashmla.sparse_indices(*on_device_tree(tree, prefix, table), 4, topk=8)
    assert status.copy_to_host().tolist() == [STATUS_TOO_SMALL] * 3
    full, _ = flashmla.sparse_indices_reference(tree, prefix, table, 4)
    np.testing.assert_array_equal(short.copy_to_host(), full[:, :, :8])
    table[1, 1] = -1
    lists, status = flashmla.sparse_indices(*on_device_tree(tree, prefix, table), 4, topk=64)
    assert status.copy_to_host().tolist() == [STATUS_OK, STATUS_BAD_PAGE, STATUS_OK]
    assert lists.copy_to_host()[1, 0, :11].tolist()[4:8] == [-1] * 4
    _, status = flashmla.sparse_indices(*on_device_tree(tree, prefix, table[:, :2].copy()), 4, topk=64)
    assert status.copy_to_host().tolist() == [STATUS_BAD_PAGE] * 3


# Bad input.


def numbers(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


BITS = np.ones((2, 3, 1), np.uint32)
I64 = np.int64


def broken_tree():
    tree = random_tree(np.random.default_rng(0), batch=2, budget=4, node_counts=[5, 5])
    tree.parents[1, 2] = 3
    return tree


def whole_tree(slots=5):
    return random_tree(np.random.default_rng(0), batch=2, budget=slots - 1, node_counts=[slots, slots])


PREFIX = np.array([3, 4], np.int32)
WALK = [numbers(6), numbers(2, 3), numbers(2), *(numbers(2, 3, dtype=I64) for _ in range(5))]


def walk_with(**changed):
    names = [*OUTPUTS, *INPUTS]
    return [changed.get(name, array.copy()) for name, array in zip(names, WALK, strict=True)]


WRONG = [
    (visibility.bool_mask, (BITS.astype(np.int32),), TypeError, "ancestor_bits: got int32, needs uint32"),
    (
        visibility.bool_mask,
        (np.ones((2, 3, 2), np.uint32),),
        ValueError,
        "ancestor_bits: got 2 words a row, needs 1 for 3 slots",
    ),
    (visibility.bool_mask, (BITS[::2][:, ::2],), ValueError, "ancestor_bits: got a strided view"),
    (visibility.bool_mask, (BITS, PREFIX, 6), ValueError, "keys: got 6, needs a whole number from 7"),
    (visibility.bool_mask, (BITS, numbers(3)), ValueError, "prefix_lengths: got shape (3,), needs [B] with B=2"),
    (visibility.bool_mask, (BITS, -PREFIX), ValueError, "prefix_lengths: got -4, needs 0 or more"),
    (visibility.bool_mask, (BITS, None, 9), TypeError, "keys: got a number without prefix_lengths"),
    (visibility.additive_mask, (BITS, None, None, np.float64), TypeError, "dtype: got float64, needs float32"),
    (
        visibility.bits_from_mask,
        (numbers(2, 3, 4, dtype=bool),),
        ValueError,
        "mask: got shape (2, 3, 4), needs [B, N, N]",
    ),
    (visibility.bits_from_mask, (numbers(2, 3, 3),), TypeError, "mask: got int32, needs bool or float32"),
    (
        visibility.bits_from_mask,
        (np.full((1, 2, 2), -1e9, np.float32),),
        ValueError,
        "mask[0, 0, 0]: got -1000000000.0",
    ),
    (visibility.bits_from_mask, (np.full((1, 2, 2), NAN, np.float32),), ValueError, "mask[0, 0, 0]: got nan, needs 0"),
    (visibility.links_from_bits, (BITS, numbers(3)), ValueError, "node_count: got shape (3,), needs [B] with B=2"),
    (ragged_mask.flat_mask, (BITS, PREFIX, 6), ValueError, "prefix_sum: got 6, needs a whole number from 7"),
    (ragged_mask.flat_mask, (BITS, PREFIX.astype(I64)), TypeError, "prefix_lengths: got int64, needs int32"),
    (
        ragged_mask.bits_from_flat_mask,
        (numbers(38, dtype=bool), PREFIX, 3),
        ValueError,
        "mask: got 38 elements, needs 39",
    ),
    (
        ragged_mask.bits_from_flat_mask,
        (numbers(39, dtype=np.uint8), PREFIX, 3),
        TypeError,
        "mask: got uint8, needs bool",
    ),
    (
        ragged_mask.bits_from_packed_mask,
        (numbers(5, dtype=np.uint8), np.array([0, 3, 6], np.int32), PREFIX, 3),
        ValueError,
        "mask: got 5 bytes, needs 6: request 1 begins at 3",
    ),
    (sglang.to_sglang, (broken_tree(), PREFIX), ValueError, "tree: request 1, slot 2: parent 3 must be a smaller slot"),
    (sglang.to_sglang, (whole_tree(), PREFIX, 1), TypeError, "mode: got 1, needs a TreeMaskMode"),
    (sglang.to_sglang, (tuple(whole_tree()), PREFIX), TypeError, "tree: got tuple, needs a DraftTree"),
    (
        sglang.to_sglang,
        (whole_tree(33), PREFIX, TreeMaskMode.QLEN_ONLY_BITPACKING),
        ValueError,
        "N of ancestor_bits: got 33 slots, needs at most 32",
    ),
    (
        sglang.pack_rows,
        (numbers(1, 9, 1, dtype=np.uint32), np.uint8),
        ValueError,
        "got 9 slots, needs at most 8 for uint8",
    ),
    (sglang.pack_rows, (numbers(1, 17, 1, dtype=np.uint32), np.uint16), ValueError, "got 17 slots, needs at most 16"),
    (sglang.pack_rows, (numbers(1, 33, 2, dtype=np.uint32), np.uint32), ValueError, "got 33 slots, needs at most 32"),
    (sglang.pack_rows, (BITS, np.int64), TypeError, "dtype: got int64, needs uint8 or uint16 or uint32"),
    (sglang.pack_rows, (BITS, "foo"), TypeError, "dtype: got 'foo', needs uint8 or uint16 or uint32"),
    (visibility.additive_mask, (BITS, None, None, "foo"), TypeError, "dtype: got 'foo', needs float32 or float16 or"),
    (visibility.additive_mask, (BITS, None, None, None), TypeError, "dtype: got None, needs float32 or float16 or"),
    (visibility.additive_mask, (BITS, None, None, {"a": 1}), TypeError, "dtype: got {'a': 1}, needs float32 or"),
    (sglang.unpack_rows, (numbers(7, dtype=np.uint8), 3), ValueError, "rows: got 7 rows, needs a multiple of slots=3"),
    (
        sglang.from_sglang,
        ([[1]], numbers(1, 1, dtype=I64), numbers(1, 1, dtype=I64)),
        TypeError,
        "candidates: got list",
    ),
    (
        sglang.from_sglang,
        (np.array([[2**32 + 5]]), numbers(1, 1, dtype=I64) - 1, numbers(1, 1, dtype=I64) - 1),
        ValueError,
        "candidates: got tokens 4294967301 to 4294967301, needs 0 to 2**31 - 1",
    ),
    (sglang.from_sglang, (*(numbers(1, 2) for _ in range(3)),), TypeError, "candidates: got int32, needs int64"),
    (
        sglang.verify_tree_greedy,
        walk_with(predicts=numbers(5)),
        ValueError,
        "predicts: got 5 elements, needs B * N = 6",
    ),
    (
        sglang.verify_tree_greedy,
        walk_with(predicts=numbers(6, dtype=I64)),
        TypeError,
        "predicts: got int64, needs int32",
    ),
    (sglang.verify_tree_greedy, walk_with(accept_index=numbers(2, 0)), ValueError, "columns of accept_index: got 0"),
    (sglang.verify_tree_greedy, walk_with(candidates=numbers(2, 3)), TypeError, "candidates: got int32, needs int64"),
    (
        sglang.verify_tree_greedy,
        walk_with(target_predict=numbers(2, 4, dtype=I64)),
        ValueError,
        "target_predict: got shape (2, 4), needs [B, N] with B=2, N=3",
    ),
    (tensorrt_llm.to_tensorrt_llm, (whole_tree(40), 1), ValueError, "stride: got 1, needs a whole number from 2"),
    (tensorrt_llm.to_tensorrt_llm, (broken_tree(),), ValueError, "tree: request 1, slot 2"),
    (
        tensorrt_llm.bits_from_packed_rows,
        (numbers(1, 40, 1), 40),
        ValueError,
        "packed_mask: got rows of 1 words, needs 2",
    ),
    (tensorrt_llm.bits_from_packed_rows, (BITS, 3), TypeError, "packed_mask: got uint32, needs int32"),
    (vllm.qq_bias, (broken_tree(),), ValueError, "tree: request 1, slot 2"),
    (vllm.bits_from_qq_bias, (numbers(1, 2, 2, dtype=np.float16),), TypeError, "bias: got float16, needs float32"),
    (flashinfer.packed_custom_mask, (broken_tree(), PREFIX), ValueError, "tree: request 1, slot 2"),
    (flashmla.sparse_indices, (broken_tree(), PREFIX, numbers(2, 3), 4), ValueError, "tree: request 1, slot 2"),
    (flashmla.sparse_indices, (whole_tree(), PREFIX, numbers(2, 3), 4, 6), ValueError, "topk: got 6, needs"),
    (
        flashmla.sparse_indices,
        (whole_tree(), PREFIX, numbers(2, 1), 4),
        ValueError,
        "block_table: got 1 pages, needs 2",
    ),
    (flashmla.sparse_indices, (whole_tree(), PREFIX, numbers(2, 3) - 1, 4), ValueError, "block_table[0]: got pages -1"),
    (flashmla.sparse_indices, (whole_tree(), PREFIX, numbers(2, 3), 0), ValueError, "page_size: got 0, needs"),
]


@pytest.mark.parametrize(("call", "args", "error", "message"), WRONG, ids=[message[:50] for *_, message in WRONG])
def test_bad_input_is_named_by_launcher_and_reference(call, args, error, message):
    reference = getattr(__import__(call.__module__, fromlist=["x"]), f"{call.__name__}_reference")
    for function in (call, reference):
        if function is reference and message.startswith("prefix_sum"):
            continue  # the reference needs no sum
        with pytest.raises(error) as caught:
            function(*args)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_host_and_device_do_not_mix_in_bridges(rng):
    tree, prefix, table = trees(rng, 5)
    with pytest.raises(TypeError, match="got NumPy beside device arrays"):
        sglang.to_sglang(tree, cuda.to_device(prefix), prefix_sum=99)
    with pytest.raises(TypeError, match="got NumPy beside device arrays"):
        flashmla.sparse_indices(on_device(tree), *on_device((prefix,)), table, 4, 64)
    outputs, inputs = verify_arguments(VECTORS["verify_tree_greedy"][0])
    with pytest.raises(TypeError, match=r"predicts.*got NumPy beside device arrays"):
        sglang.verify_tree_greedy(*outputs, *on_device(inputs))


def test_device_bridges_say_what_they_need_to_know(rng):
    tree, prefix, table = trees(rng, 5)
    moved, lengths, pages = on_device(tree), *on_device((prefix, table))
    for call, message in (
        (lambda: sglang.to_sglang(moved, lengths), "prefix_sum: got None, needs"),
        (lambda: flashinfer.packed_custom_mask(moved, lengths), "prefix_sum: got None, needs"),
        (lambda: visibility.bool_mask(moved.ancestor_bits, lengths), "keys: got None, needs"),
        (lambda: flashmla.sparse_indices(moved, lengths, pages, 4), "topk: got None, needs"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize("size", [0, 1, 99])
def test_a_mask_too_small_is_named(rng, size):
    tree, prefix, _ = trees(rng, 5)
    for mode in TreeMaskMode:
        full = sglang.to_sglang_reference(tree, prefix, mode)
        out = full._replace(tree_mask=numbers(size, dtype=full.tree_mask.dtype))
        with pytest.raises(ValueError, match=r"out \(\w+\): got"):
            sglang.to_sglang(tree, prefix, mode, out=out)
    with pytest.raises(ValueError, match=r"out \(mask\): got 0 elements, needs"):
        ragged_mask.packed_mask(tree.ancestor_bits, prefix, out=(numbers(0, dtype=np.uint8), numbers(4)))


def test_a_read_only_output_is_refused():
    outputs, inputs = verify_arguments(VECTORS["verify_tree_greedy"][0])
    outputs[0].flags.writeable = False
    for call in (sglang.verify_tree_greedy, sglang.verify_tree_greedy_reference):
        with pytest.raises(ValueError, match="predicts: got a read-only array"):
            call(*outputs, *inputs)


def test_a_draft_tree_is_what_comes_back(rng):
    tree, prefix, _ = trees(rng, 5)
    given = sglang.to_sglang(tree, prefix)
    again, _ = sglang.from_sglang(given.draft_token.reshape(3, 5), *given[3:5])
    assert isinstance(again, DraftTree)
    check_tree(again)
