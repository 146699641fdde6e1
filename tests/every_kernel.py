"""One small launch of every kernel, each compared with its reference: what compute-sanitizer is run over.

``compute-sanitizer --tool memcheck python -m tests.every_kernel``, and the same with ``racecheck`` and ``synccheck``.
The sizes are ragged and cross a mask word, so that a wrong bound shows; they are small because a sanitizer is slow.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.backend import ON_GPU, describe
from ddtree_numba.bfloat16 import to_bfloat16
from ddtree_numba.decode_step import DecodeStep, DecodeStepReference
from ddtree_numba.draft_tree import DraftTree, check_tree, random_tree
from ddtree_numba.interop import flashmla, ragged_mask, sglang, tensorrt_llm, visibility
from ddtree_numba.stages.accept_walk import accept_walk, accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import (
    ancestor_bitmask,
    ancestor_bitmask_reference,
    positions,
    positions_reference,
)
from ddtree_numba.stages.best_first_tree import DRAFT_LAUNCHERS, build_tree, build_tree_reference
from ddtree_numba.stages.best_first_tree import VERSIONS as TREE_VERSIONS
from ddtree_numba.stages.kv_commit import commit_kv, commit_kv_reference
from ddtree_numba.stages.top_candidates import VERSIONS as CANDIDATE_VERSIONS
from ddtree_numba.stages.top_candidates import top_candidates, top_candidates_reference
from ddtree_numba.stages.top_candidates.fused import make_workspace
from ddtree_numba.stages.tree_attention import (
    GPU_VERSIONS,
    VERSIONS,
    hopper,
    tensor_core,
    tree_attention,
    tree_attention_reference,
)
from ddtree_numba.synthetic import random_target_tokens
from tests.helpers import assert_same, on_device, on_host, poisoned_like

RUNGS = (
    (lambda: tensor_core.why_not_here(576, 512), tensor_core.launch_tensor_core),
    (hopper.why_not_here, hopper.launch_hopper),
)


def candidates(rng: np.random.Generator) -> None:
    for vocab in (1, 33, 1000):
        logits = np.round(rng.normal(size=(2, 3, vocab)) * 4).astype(np.float32) / 4
        logits[0, 0, vocab // 2] = np.nan
        for values in (logits, logits.astype(np.float16), to_bfloat16(logits)):
            expected = top_candidates_reference(values, 9)
            for version in CANDIDATE_VERSIONS:
                got = top_candidates(values, 9, version=version)
                np.testing.assert_array_equal(got[1], expected[1])
                np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    ascending = np.arange(20000, dtype=np.float32)[None, None]
    for logits in (ascending, np.zeros_like(ascending)):  # the second fills both lists of the fused rung
        for segments in (1, 3):
            got = top_candidates(logits, 64, version="fused", workspace=make_workspace(1, segments))
            np.testing.assert_array_equal(got[1], top_candidates_reference(logits, 64)[1])


def trees(rng: np.random.Generator) -> None:
    lp = -np.sort(np.round(rng.random((3, 6, 7)) * 8) / 4).astype(np.float32)
    ids = np.argsort(rng.random((3, 6, 50)))[..., :7].astype(np.int32)
    roots = rng.integers(50, size=3).astype(np.int32)
    for budget in (0, 1, 40, 100):
        for version in TREE_VERSIONS:
            tree = build_tree(lp, ids, roots, budget, version=version)
            assert_same(tree, build_tree_reference(lp, ids, roots, budget))
        got = ancestor_bitmask(tree.parents, tree.node_count)
        assert_same(got, ancestor_bitmask_reference(tree.parents, tree.node_count))
        check_tree(tree._replace(ancestor_bits=got[0]))
        prefix = rng.integers(100, size=3).astype(np.int32)
        place = positions(tree.depths, prefix)
        assert_same((place,), (positions_reference(tree.depths, prefix),))
        for launch in DRAFT_LAUNCHERS.values():  # stages 2 and 3 in one launch
            *fields, at, status = on_device(poisoned_like((*tree, place, got[1])))
            launch(*on_device((lp, ids, roots, prefix)), DraftTree(*fields), at, status, 0)
            assert_same(on_host((*fields, at, status)), (*tree._replace(ancestor_bits=got[0]), place, got[1]))


def attention(rng: np.random.Generator) -> None:
    for latent, rope, heads in ((512, 64, 3), (64, 16, 8)):
        tree = random_tree(rng, batch=2, budget=33)
        prefix = np.array([5, 70], np.int32)
        table = rng.permutation(14).reshape(2, 7).astype(np.int32)
        pool = rng.normal(size=(14, 16, latent + rope)).astype(np.float32)
        q = rng.normal(size=(2, 34, heads, latent + rope)).astype(np.float32)
        scale = 1 / np.sqrt(latent + rope)
        for narrow in (lambda x: x, lambda x: x.astype(np.float16), to_bfloat16):
            inputs = (narrow(q), narrow(pool), table, prefix, tree.ancestor_bits, tree.node_count, scale)
            expected = tree_attention_reference(*inputs, latent_width=latent)
            for version in VERSIONS:
                got = tree_attention(*inputs, latent_width=latent, version=version)
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
            if ON_GPU and inputs[0].dtype != np.float32 and (latent, rope) == (512, 64):
                for version in GPU_VERSIONS:
                    got = tree_attention(*inputs, latent_width=latent, version=version)
                    for a, b in zip(got, expected, strict=True):  # weights are rounded to 16 bits
                        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-2)


def long_prefixes(rng: np.random.Generator) -> None:
    """Five tiles of 64 rows, so that every place of a kernel's ring of tiles is used again; whole and in two splits."""
    if not ON_GPU:
        return
    tree = random_tree(rng, batch=1, budget=33)
    pool = to_bfloat16(rng.normal(size=(22, 16, 576)).astype(np.float32))
    q = to_bfloat16(rng.normal(size=(1, 34, 3, 576)).astype(np.float32))
    table, prefix = rng.permutation(22)[None].astype(np.int32), np.array([300], np.int32)
    inputs = (q, pool, table, prefix, tree.ancestor_bits, tree.node_count)
    expected = tree_attention_reference(*inputs, 576**-0.5, latent_width=512)
    launchers = [launch for why_not, launch in RUNGS if not why_not()]
    for launch in launchers:
        for splits in (1, 2):
            got = on_device([np.full(array.shape, np.nan, np.float32) for array in expected])
            launch(*on_device(inputs), np.float32(576**-0.5), np.int32(1), *got, stream=0, splits=splits)
            for a, b in zip(on_host(got), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-2)


def walk_and_commit(rng: np.random.Generator) -> None:
    tree = random_tree(rng, batch=3, budget=40)
    targets = random_target_tokens(rng, tree, 1000)
    path = accept_walk_reference(tree, targets, 20)
    assert_same(accept_walk(tree, targets, 20), path)
    broken = tree._replace(next_sibling=rng.integers(-50, 50, tree.parents.shape).astype(np.int32))
    assert_same(accept_walk(broken, targets, 20), accept_walk_reference(broken, targets, 20))
    for dtype in (np.uint16, np.float32):
        pool = rng.integers(1000, size=(2, 30, 16, 37)).astype(dtype)
        table, prefix = rng.permutation(30).reshape(3, 10).astype(np.int32), np.array([0, 15, 100], np.int32)
        got = (pool.copy(), prefix.copy())
        status = commit_kv(got[0], table, got[1], path.accept_slots, path.accept_count)
        expected = commit_kv_reference(pool, table, prefix, path.accept_slots, path.accept_count)
        assert_same((*got, status), (pool, prefix, expected))


def whole_step(rng: np.random.Generator) -> None:
    step, twin = DecodeStep(2, 5, 60, 36), DecodeStepReference(36)
    logits = rng.normal(size=(2, 5, 60)).astype(np.float32) * 4
    roots, prefix = np.array([3, 4], np.int32), np.array([0, 17], np.int32)
    got, _ = step.draft(*on_device((logits, roots, prefix)))
    twin.draft(logits, roots, prefix)
    expected = build_tree_reference(*on_host((step.log_probs, step.token_ids)), roots, 36)
    bits, _ = ancestor_bitmask_reference(expected.parents, expected.node_count)
    twin.tree = expected = expected._replace(ancestor_bits=bits)
    assert_same(on_host(got), expected)
    targets = random_target_tokens(rng, expected, 60)
    cache = (targets, rng.random((2, 10, 16, 8), np.float32), np.arange(10, dtype=np.int32).reshape(2, 5), prefix)
    on_card = on_device(cache)
    assert_same(on_host(step.commit(*on_card)), twin.commit(*cache))
    assert_same(on_host(on_card), cache)


def bridges(rng: np.random.Generator) -> None:
    for slots in (7, 32, 45):
        tree = random_tree(rng, batch=3, budget=slots - 1)
        prefix, bits = np.array([0, 9, 31], np.int32), tree.ancestor_bits
        modes = [
            mode for mode in sglang.TreeMaskMode if slots <= 32 or mode != sglang.TreeMaskMode.QLEN_ONLY_BITPACKING
        ]
        for mode in modes:
            given = sglang.to_sglang_reference(tree, prefix, mode)
            assert_same(sglang.to_sglang(tree, prefix, mode), given)
        links = (given.draft_token.reshape(3, slots), *given[3:5])
        for got, expected in zip(sglang.from_sglang(*links), sglang.from_sglang_reference(*links), strict=True):
            assert_same(got, expected) if isinstance(got, tuple) else assert_same((got,), (expected,))
        for mask in (visibility.bool_mask_reference(bits), visibility.additive_mask_reference(bits, dtype=np.uint16)):
            assert_same((visibility.bits_from_mask(mask),), (bits,))
        assert_same((visibility.additive_mask(bits, prefix),), (visibility.additive_mask_reference(bits, prefix),))
        assert_same(
            visibility.links_from_bits(bits, tree.node_count),
            visibility.links_from_bits_reference(bits, tree.node_count),
        )
        flat, packed = ragged_mask.flat_mask_reference(bits, prefix), ragged_mask.packed_mask_reference(bits, prefix)
        assert_same(ragged_mask.packed_mask(bits, prefix), packed)
        assert_same((ragged_mask.bits_from_flat_mask(flat, prefix, slots),), (bits,))
        assert_same((ragged_mask.bits_from_packed_mask(*packed, prefix, slots),), (bits,))
        assert_same(tensorrt_llm.to_tensorrt_llm(tree, 3), tensorrt_llm.to_tensorrt_llm_reference(tree, 3))
        table = rng.permutation(75).reshape(3, 25).astype(np.int32)
        lists = (tree, prefix, table, 4, 96)
        assert_same(flashmla.sparse_indices(*lists), flashmla.sparse_indices_reference(*lists))
        selection = (rng.integers(-1, 9, (3, 9)), rng.integers(-2, 40, (3, slots - 1)), 4)
        assert_same(sglang.parents_from_selection(*selection), sglang.parents_from_selection_reference(*selection))
        walk = [rng.integers(-2, slots + 2, (3, slots)) for _ in range(5)]
        filled = [np.full(3 * slots, -1, np.int32), np.full((3, 9), -1, np.int32), np.full(3, -7, np.int32)]
        twin = [array.copy() for array in filled]
        sglang.verify_tree_greedy(*filled, *walk)
        sglang.verify_tree_greedy_reference(*twin, *walk)
        assert_same(tuple(filled), tuple(twin))


def main() -> None:
    """Run all; an assertion that fails ends it."""
    print(describe(), flush=True)
    rng = np.random.default_rng()
    for part in (candidates, trees, attention, long_prefixes, walk_and_commit, whole_step, bridges):
        part(rng)
        print(f"{part.__name__}: equal to the references", flush=True)


if __name__ == "__main__":
    main()
