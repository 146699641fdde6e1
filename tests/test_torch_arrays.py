"""Tensors of PyTorch and arrays of CuPy in every launcher and bridge: used where they are, on their library's stream.

A capture into a CUDA graph forbids copies through the host, synchronisation and allocations that are not the library's
own: what can be captured does none of them.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import ddtree_numba as d
from ddtree_numba.arguments import ArrayCheck, dtype_of
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.decode_step import DecodeStep, DecodeStepReference
from ddtree_numba.draft_tree import random_tree
from ddtree_numba.interop import flashinfer, flashmla, ragged_mask, sglang, tensorrt_llm, visibility, vllm
from ddtree_numba.synthetic import random_target_tokens
from tests.test_interop import VECTORS, verify_arguments

pytestmark = pytest.mark.gpu

B, L, V, BUDGET, K = 3, 5, 2000, 40, 24
N = BUDGET + 1
BRIDGED = 29  # slots of the bridges' trees: QLEN_ONLY_BITPACKING holds 32


class Torch:
    """How the tests make, read and capture tensors."""

    name = "torch"

    def __init__(self):
        self.lib = pytest.importorskip("torch")

    def array(self, array):
        return self.lib.from_numpy(np.ascontiguousarray(array)).cuda()

    def numpy(self, tensor):
        assert isinstance(tensor, self.lib.Tensor) and tensor.is_cuda, type(tensor)
        return (tensor.view(self.lib.uint16) if tensor.dtype == self.lib.bfloat16 else tensor).cpu().numpy()

    def copy(self, target, source):
        target.copy_(source)

    def address(self, tensor):
        return tensor.data_ptr()

    def stream(self):
        return self.lib.cuda.Stream()

    def on(self, stream):
        return self.lib.cuda.stream(stream)

    def delay(self):
        self.lib.cuda._sleep(100_000_000)  # clocks: some 50 ms

    def captured(self, work):
        """Return ``(results, replay)`` of `work`, captured; it has run before."""
        graph = self.lib.cuda.CUDAGraph()
        with self.lib.cuda.graph(graph):
            results = work()
        return results, graph.replay


class Cupy(Torch):
    """The same for CuPy."""

    name = "cupy"

    def __init__(self):
        self.lib = pytest.importorskip("cupy")
        self._spin = self.lib.RawKernel(
            r'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }',
            "spin",
        )

    def array(self, array):
        return self.lib.asarray(array)

    def numpy(self, array):
        assert isinstance(array, self.lib.ndarray), type(array)
        return array.get()

    def copy(self, target, source):
        target[...] = source

    def address(self, array):
        return array.data.ptr

    def stream(self):
        return self.lib.cuda.Stream(non_blocking=True)

    def on(self, stream):
        return stream

    def delay(self):
        self._spin((1,), (1,), (np.int64(100_000_000),))

    def captured(self, work):
        stream = self.stream()
        with stream:
            stream.begin_capture()
            results = work()
            graph = stream.end_capture()
        return results, lambda: graph.launch(stream) or stream.synchronize()


@pytest.fixture(params=[Torch, Cupy], ids=["torch", "cupy"])
def lib(request):
    assert ON_GPU
    return request.param()


class Step:
    """Inputs of one decoding step and every stage's reference answer."""

    def __init__(self, rng, float_dtype=np.float32):
        narrow = {np.uint16: to_bfloat16}.get(float_dtype, lambda values: values.astype(float_dtype))
        self.logits = narrow(rng.normal(scale=3, size=(B, L, V)).astype(np.float32))
        self.roots = rng.integers(V, size=B).astype(np.int32)
        self.prefix = rng.integers(0, 90, B).astype(np.int32)
        self.table = rng.permutation(30).reshape(B, 10).astype(np.int32)
        self.pool = narrow(rng.normal(size=(2, 30, 16, 576)).astype(np.float32))
        self.q = narrow(rng.normal(size=(B, N, 8, 576)).astype(np.float32) / 5)
        self.candidates = d.top_candidates_reference(self.logits, K)
        tree = d.build_tree_reference(*self.candidates, self.roots, BUDGET)
        bits, self.tree_status = d.ancestor_bitmask_reference(tree.parents, tree.node_count)
        self.tree = tree._replace(ancestor_bits=bits)
        self.positions = d.positions_reference(tree.depths, self.prefix)
        self.attention = d.tree_attention_reference(
            self.q, self.pool[0], self.table, self.prefix, bits, tree.node_count, 0.05, latent_width=512
        )
        self.targets = random_target_tokens(rng, self.tree, V)
        self.path = d.accept_walk_reference(self.tree, self.targets, L)
        self.committed = self.pool.copy(), self.prefix.copy()
        self.commit_status = d.commit_kv_reference(
            self.committed[0], self.table, self.committed[1], self.path.accept_slots, self.path.accept_count
        )

    INPUTS = ("logits", "roots", "prefix", "table", "pool", "q", "targets")

    def moved(self, lib):
        return {name: lib.array(getattr(self, name)) for name in self.INPUTS}


def run_stages(given, tree_of):
    """Every launcher on foreign arrays, each after what `tree_of` makes of the tree (the references' candidates)."""
    log_probs, token_ids = d.top_candidates(given["logits"], K)
    tree = d.build_tree(*tree_of(log_probs, token_ids), given["roots"], BUDGET)
    bits, tree_status = d.ancestor_bitmask(tree.parents, tree.node_count)
    tree = tree._replace(ancestor_bits=bits)
    where = d.positions(tree.depths, given["prefix"])
    out, lse = d.tree_attention(
        given["q"],
        given["pool"][0],
        given["table"],
        given["prefix"],
        tree.ancestor_bits,
        tree.node_count,
        0.05,
        latent_width=512,
    )
    path = d.accept_walk(tree, given["targets"], L)
    status = d.commit_kv(given["pool"], given["table"], given["prefix"], path.accept_slots, path.accept_count)
    return {
        "candidates": (log_probs, token_ids),
        "tree": tree,
        "tree_status": (tree_status,),
        "positions": (where,),
        "attention": (out, lse),
        "path": path,
        "committed": (given["pool"], given["prefix"]),
        "commit_status": (status,),
    }


def assert_stages(lib, got, step, narrow):
    for name, arrays in got.items():
        expected = getattr(step, name)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for index, (array, right) in enumerate(zip(arrays, expected, strict=True)):
            value = lib.numpy(array)
            label = f"{name}[{index}]"
            if name == "attention":
                close = {"rtol": 2e-2, "atol": 2e-2} if narrow else {"rtol": 1e-5, "atol": 1e-5}
                np.testing.assert_allclose(value, right, err_msg=label, **close)
            elif name == "candidates" and index == 0:
                np.testing.assert_allclose(value, right, err_msg=label, rtol=1e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(value, right, err_msg=label, strict=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
def test_every_launcher_on_foreign_arrays_and_again_captured(lib, rng, dtype):
    step, other = Step(rng, dtype), Step(rng, dtype)
    given = step.moved(lib)
    if lib.name == "torch" and dtype == np.uint16:
        given |= {name: given[name].view(lib.lib.bfloat16) for name in ("logits", "pool", "q")}
    fixed = [lib.array(array) for array in step.candidates]  # bit-equal trees need bit-equal candidates
    addresses = {name: lib.address(array) for name, array in given.items()}
    assert_stages(lib, run_stages(given, lambda *_: fixed), step, dtype != np.float32)
    assert addresses == {name: lib.address(array) for name, array in given.items()}

    def refill(source):
        for name in Step.INPUTS:
            fresh = lib.array(getattr(source, name))
            target = given[name]
            lib.copy(target.view(lib.lib.uint16) if "bfloat16" in str(target.dtype) else target, fresh)
        for target, array in zip(fixed, source.candidates, strict=True):
            lib.copy(target, lib.array(array))
        cuda.synchronize()

    got, replay = lib.captured(lambda: run_stages(given, lambda *_: fixed))
    for source in (other, step):
        refill(source)
        replay()
        cuda.synchronize()
        assert_stages(lib, got, source, dtype != np.float32)


def test_launches_go_behind_what_the_library_has_queued(lib, rng):
    """The data come late, on a stream of their own: whoever launches elsewhere computes with what was there before."""
    step = Step(rng)
    given = {name: lib.array(np.zeros_like(getattr(step, name))) for name in Step.INPUTS}
    fresh, fixed = step.moved(lib), [lib.array(array) for array in step.candidates]
    run_stages({**given, "table": fresh["table"]}, lambda *_: fixed)  # compiled before the race begins
    cuda.synchronize()
    stream = lib.stream()
    with lib.on(stream):
        lib.delay()
        for name in Step.INPUTS:
            lib.copy(given[name], fresh[name])
        got = run_stages(given, lambda *_: fixed)
    stream.synchronize()
    assert_stages(lib, got, step, narrow=False)


def test_a_named_stream_is_used_and_its_memory_is_its_own(lib, rng):
    step = Step(rng)
    stream, given = lib.stream(), step.moved(lib)
    cuda.synchronize()
    log_probs, token_ids = d.top_candidates(given["logits"], K, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(lib.numpy(token_ids), step.candidates[1])
    np.testing.assert_allclose(lib.numpy(log_probs), step.candidates[0], rtol=1e-5, atol=1e-5)


def test_outputs_of_the_caller_are_written_where_they_are(lib, rng):
    step = Step(rng)
    given = step.moved(lib)
    out = lib.array(np.full((B, L, K), np.nan, np.float32)), lib.array(np.full((B, L, K), -7, np.int32))
    addresses = [lib.address(array) for array in out]
    got = d.top_candidates(given["logits"], K, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert addresses == [lib.address(array) for array in out]
    np.testing.assert_array_equal(lib.numpy(out[1]), step.candidates[1])


def test_a_step_and_its_plan_take_foreign_arrays(lib, rng):
    """Behind late data on a stream of the library's, and captured."""
    step = Step(rng)
    engine, twin = DecodeStep(B, L, V, BUDGET, K), DecodeStepReference(BUDGET, K)
    given = step.moved(lib)
    arrays = [given[name] for name in ("logits", "roots", "prefix", "targets", "pool", "table")]
    plan = engine.prepare(*arrays)
    cache = given["targets"], given["pool"], given["table"], given["prefix"]

    def by_launches():
        return engine.draft(*arrays[:3])[0], engine.commit(*cache)

    def by_plan():
        return plan.draft()[0], plan.commit()

    def late(run):
        stream = lib.stream()
        with lib.on(stream):
            lib.delay()
            lib.copy(given["logits"], fresh)
            results = run()
        stream.synchronize()
        return results

    def captured(run):
        results, replay = lib.captured(run)
        lib.copy(given["logits"], fresh)
        cuda.synchronize()
        replay()
        cuda.synchronize()
        return results

    fresh, empty = lib.array(step.logits), lib.array(np.zeros_like(step.logits))
    for how in (late, captured):
        for run in (by_launches, by_plan):
            for name in ("pool", "prefix"):
                lib.copy(given[name], lib.array(getattr(step, name)))
            lib.copy(given["logits"], empty)
            cuda.synchronize()
            tree, path = how(run)
            found = engine.log_probs.copy_to_host(), engine.token_ids.copy_to_host()
            np.testing.assert_array_equal(found[1], step.candidates[1])
            twin.tree = d.build_tree_reference(*found, step.roots, BUDGET)
            np.testing.assert_array_equal(tree.parents.copy_to_host(), twin.tree.parents)
            expected = d.accept_walk_reference(twin.tree, step.targets, L)
            np.testing.assert_array_equal(path.accept_slots.copy_to_host(), expected.accept_slots)
            prefix = step.prefix.copy()
            pool = step.pool.copy()
            d.commit_kv_reference(pool, step.table, prefix, expected.accept_slots, expected.accept_count)
            np.testing.assert_array_equal(lib.numpy(given["prefix"]), prefix)
            np.testing.assert_array_equal(lib.numpy(given["pool"]), pool)


# Bridges.


def bridge_calls(tree, prefix, table, total):
    """Every bridge on the given arrays; and back, where there is a way back."""
    results = {}
    for mode in sglang.TreeMaskMode:
        results[f"sglang {mode.name}"] = given = sglang.to_sglang(tree, prefix, mode, prefix_sum=total)
    again, status = sglang.from_sglang(given.draft_token.reshape(B, BRIDGED), *given[3:5])
    results["from_sglang"] = (*again, status)
    results["rows"] = (sglang.unpack_rows(given.tree_mask, BRIDGED),)
    flat = ragged_mask.flat_mask(tree.ancestor_bits, prefix, total)
    results["flat"] = (ragged_mask.bits_from_flat_mask(flat, prefix, BRIDGED),)
    packed = flashinfer.packed_custom_mask(tree, prefix, total)
    results["flashinfer"] = packed
    results["packed"] = (ragged_mask.bits_from_packed_mask(*packed, prefix, BRIDGED),)
    results["tensorrt_llm"] = tensorrt_llm.to_tensorrt_llm(tree, 3)
    results["same stride"] = tensorrt_llm.to_tensorrt_llm(tree)
    results["packed rows"] = (tensorrt_llm.bits_from_packed_rows(results["tensorrt_llm"].packed_mask, BRIDGED),)
    bias = vllm.qq_bias(tree)
    results["vllm"] = (bias, vllm.bits_from_qq_bias(bias))
    results["dense"] = (visibility.bool_mask(tree.ancestor_bits, prefix, 100),)
    results["half"] = (visibility.additive_mask(tree.ancestor_bits, dtype=np.float16),)
    results["bfloat16"] = (visibility.additive_mask(tree.ancestor_bits, dtype=np.uint16),)
    results["bits of half"] = (visibility.bits_from_mask(results["half"][0]),)
    results["links"] = visibility.links_from_bits(tree.ancestor_bits, tree.node_count)
    results["flashmla"] = flashmla.sparse_indices(tree, prefix, table, 4, topk=128)
    return results


def right_answers(tree, prefix, table):
    answers = {f"sglang {mode.name}": sglang.to_sglang_reference(tree, prefix, mode) for mode in sglang.TreeMaskMode}
    last = answers["sglang QLEN_ONLY_BITPACKING"]
    again, status = sglang.from_sglang_reference(last.draft_token.reshape(B, BRIDGED), *last[3:5])
    bits = (tree.ancestor_bits,)
    return answers | {
        "from_sglang": (*again, status),
        "rows": bits,
        "flat": bits,
        "packed": bits,
        "packed rows": bits,
        "bits of half": bits,
        "flashinfer": flashinfer.packed_custom_mask_reference(tree, prefix),
        "tensorrt_llm": tensorrt_llm.to_tensorrt_llm_reference(tree, 3),
        "same stride": tensorrt_llm.to_tensorrt_llm_reference(tree),
        "vllm": (vllm.qq_bias_reference(tree), *bits),
        "dense": (visibility.bool_mask_reference(tree.ancestor_bits, prefix, 100),),
        "half": (visibility.additive_mask_reference(tree.ancestor_bits, dtype=np.float16),),
        "bfloat16": (visibility.additive_mask_reference(tree.ancestor_bits, dtype=np.uint16),),
        "links": visibility.links_from_bits_reference(tree.ancestor_bits, tree.node_count),
        "flashmla": flashmla.sparse_indices_reference(tree, prefix, table, 4, topk=128),
    }


def assert_bridges(lib, got, tree, prefix, table):
    answers = right_answers(tree, prefix, table)
    assert answers.keys() == got.keys()
    for name, arrays in got.items():
        for index, (array, right) in enumerate(zip(arrays, answers[name], strict=True)):
            value = lib.numpy(array)
            assert value.dtype == right.dtype, f"{name}[{index}]"
            np.testing.assert_array_equal(value[: len(right)], right, err_msg=f"{name}[{index}]")


def test_every_bridge_on_foreign_arrays_and_again_captured(lib, rng):
    def case():
        counts = [BRIDGED, *rng.integers(1, BRIDGED + 1, B - 1)]
        tree = random_tree(rng, B, BRIDGED - 1, node_counts=counts)
        prefix = rng.permutation([3, 0, 60]).astype(np.int32)
        return tree, prefix, rng.permutation(90).reshape(B, 30).astype(np.int32)

    tree, prefix, table = first = case()
    moved = d.DraftTree(*map(lib.array, tree)), lib.array(prefix), lib.array(table)
    assert_bridges(lib, bridge_calls(*moved, 63), *first)
    got, replay = lib.captured(lambda: bridge_calls(*moved, 63))
    for source in (case(), first):
        for target, array in zip((*moved[0], *moved[1:]), (*source[0], *source[1:]), strict=True):
            lib.copy(target, lib.array(array))
        cuda.synchronize()
        replay()
        cuda.synchronize()
        assert_bridges(lib, got, *source)


@pytest.mark.parametrize("case", VECTORS["verify_tree_greedy"], ids=lambda case: case["name"])
def test_sglangs_own_walk_test_on_foreign_arrays(lib, case):
    outputs, inputs = verify_arguments(case)
    moved, given = [lib.array(array) for array in outputs], [lib.array(array) for array in inputs]
    addresses = [lib.address(array) for array in moved]
    expected = case.get("expected_asserted") or case["expected_derived"]

    def assert_right():
        cuda.synchronize()
        for name, array in zip(("predicts", "accept_index", "accept_token_num"), moved, strict=True):
            assert lib.numpy(array).tolist() == expected[name], name

    assert sglang.verify_tree_greedy(*moved, *given) is None
    assert_right()
    _, replay = lib.captured(lambda: sglang.verify_tree_greedy(*moved, *given))
    for target, array in zip(moved, outputs, strict=True):
        lib.copy(target, lib.array(array))
    cuda.synchronize()
    replay()
    assert_right()
    assert addresses == [lib.address(array) for array in moved]


def test_torch_makes_no_copy_to_the_host(rng):
    """Torch's own guard: any synchronisation that torch would make is an error."""
    lib = Torch()
    tree, prefix = random_tree(rng, B, BRIDGED - 1), np.array([3, 0, 60], np.int32)
    moved = (
        d.DraftTree(*map(lib.array, tree)),
        lib.array(prefix),
        lib.array(np.arange(90, dtype=np.int32).reshape(B, 30)),
    )
    step = Step(rng)
    given, fixed = step.moved(lib), [lib.array(array) for array in step.candidates]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            lib.lib.cuda.set_sync_debug_mode("error")
        bridge_calls(*moved, 63)
        got = run_stages(given, lambda *_: fixed)
    finally:
        lib.lib.cuda.set_sync_debug_mode("default")
    assert_stages(lib, got, step, narrow=False)


def test_a_graph_does_not_write_where_others_have_moved_in(lib, rng):
    """What a captured launch needs for itself stays its own: later arrays of every size keep what they hold."""
    step = Step(rng)
    given = step.moved(lib)
    out = [lib.array(np.zeros((B, L, K), dtype)) for dtype in (np.float32, np.int32)]
    attended = [lib.array(np.zeros(array.shape, np.float32)) for array in step.attention]
    bits, count = lib.array(step.tree.ancestor_bits), lib.array(step.tree.node_count)

    def work():
        d.top_candidates(given["logits"], K, out=tuple(out), version="fused")
        rows = given["q"], given["pool"][0], given["table"], given["prefix"], bits, count
        d.tree_attention(*rows, 0.05, latent_width=512, version="split_kv", out=tuple(attended))

    work()
    _, replay = lib.captured(work)
    newcomers = [lib.array(np.full(1 << size, 7, np.uint8)) for size in range(9, 25) for _ in range(3)]
    cuda.synchronize()
    replay()
    cuda.synchronize()
    for array in newcomers:
        assert (lib.numpy(array) == 7).all()
    np.testing.assert_array_equal(lib.numpy(out[1]), step.candidates[1])
    np.testing.assert_allclose(lib.numpy(attended[0]), step.attention[0], rtol=1e-5, atol=1e-5)


# What is refused.


def test_what_torch_can_hold_and_a_kernel_can_not(rng):
    torch = Torch().lib
    logits = torch.randn(2, 3, 50, device="cuda")
    for tensor, message in (
        (logits.requires_grad_(), "logits: got a tensor that requires a gradient, needs tensor.detach"),
        (logits.detach().cpu(), "logits: got a tensor on cpu, needs one on a CUDA device"),
        (logits.detach().to_sparse(), "logits: got a tensor of layout torch.sparse_coo"),
        # JAX, where it is installed, teaches NumPy the type.
        (logits.detach().to(torch.float8_e4m3fn), "logits: got float8_e4m3fn, (which NumPy has no type for|needs)"),
        (logits.detach().double(), "logits: got float64, needs float32"),
    ):
        with pytest.raises(TypeError, match=message):
            d.top_candidates(tensor, 4)
    with pytest.raises(ValueError, match="logits: got a strided view"):
        d.top_candidates(logits.detach().transpose(1, 2), 4)
    lp, ids = d.top_candidates(logits.detach(), 4)
    with pytest.raises(TypeError, match="root_tokens: got a tensor on cpu"):
        d.build_tree(lp, ids, torch.zeros(2, dtype=torch.int32), 4)
    with pytest.raises(TypeError, match="got NumPy beside device arrays"):
        d.build_tree(lp, ids, np.zeros(2, np.int32), 4)
    with pytest.raises(TypeError, match=r"out \(log_probs\): got ndarray"):
        d.top_candidates(logits.detach(), 4, out=(np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.int32)))
    assert dtype_of(logits.detach().bfloat16()) == np.uint16
    assert ArrayCheck()("x", logits.detach().bfloat16(), "B L V", (np.uint16,)) == (2, 3, 50)


def test_an_array_of_another_gpu_is_named(rng):
    torch = Torch().lib
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.raises(ValueError, match="logits: got an array on device 1, needs one on Numba's current device, 0"):
        d.top_candidates(torch.zeros(1, 2, 9, device="cuda:1"), 3)


def test_torch_and_cupy_share_a_launch(rng):
    """The first foreign array decides which library the results are of."""
    torch, cupy = Torch(), Cupy()
    step = Step(rng)
    lp, ids = map(torch.array, step.candidates)
    tree = d.build_tree(lp, cupy.array(step.candidates[1]), cuda.to_device(step.roots), BUDGET)
    np.testing.assert_array_equal(torch.numpy(tree.parents), step.tree.parents)
    tree = d.build_tree(
        cuda.to_device(step.candidates[0]), cupy.array(step.candidates[1]), ids[:, 0, 0].contiguous(), BUDGET
    )
    np.testing.assert_array_equal(cupy.numpy(tree.parents), step.tree.parents)


def test_bfloat16_bias_into_a_bfloat16_tensor(rng):
    lib = Torch()
    tree = random_tree(rng, B, BRIDGED - 1)
    out = lib.lib.empty(B, BRIDGED, BRIDGED, dtype=lib.lib.bfloat16, device="cuda")
    bits = lib.array(tree.ancestor_bits)
    assert visibility.additive_mask(bits, out=out) is out
    expected = visibility.additive_mask_reference(tree.ancestor_bits)
    np.testing.assert_array_equal(from_bfloat16(lib.numpy(out)), expected)
    np.testing.assert_array_equal(lib.numpy(visibility.bits_from_mask(out)), tree.ancestor_bits)
