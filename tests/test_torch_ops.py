"""The PyTorch operators: shapes and dtypes as their fake kernels say, values as the references', one compiled graph.

On a machine with a GPU every test runs there too, on the kernels.
"""

from __future__ import annotations

import numpy as np
import pytest

import ddtree_numba as d
from ddtree_numba.backend import ON_GPU
from ddtree_numba.bfloat16 import to_bfloat16
from ddtree_numba.interop import sglang

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install '.[torch]'")
from ddtree_numba.interop import torch_ops  # noqa: E402  (it needs PyTorch)

OPS = torch.ops.ddtree_numba
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, L, V, BUDGET, K, PAGE = 2, 3, 40, 8, 5, 4
N = BUDGET + 1

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Problem:
    """One decoding step's arrays, as NumPy and as tensors."""

    def __init__(self, rng, device):
        self.device = device
        self.logits = rng.normal(scale=3, size=(B, L, V)).astype(np.float32)
        self.roots = rng.integers(V, size=B).astype(np.int32)
        self.prefix = np.array([5, 0], np.int32)
        self.table = rng.permutation(8).reshape(B, 4).astype(np.int32)
        self.pool = rng.normal(size=(3, 8, PAGE, 12)).astype(np.float32)
        self.q = rng.normal(size=(B, N, 2, 12)).astype(np.float32)
        log_probs, token_ids = d.top_candidates_reference(self.logits, K)
        tree = d.build_tree_reference(log_probs, token_ids, self.roots, BUDGET)
        bits, _ = d.ancestor_bitmask_reference(tree.parents, tree.node_count)
        self.candidates, self.tree = (log_probs, token_ids), tree._replace(ancestor_bits=bits)
        self.targets = rng.integers(V, size=(B, N)).astype(np.int32)
        self.targets[:, 0], self.targets[:, 1] = tree.token_ids[:, 1], tree.token_ids[:, 2]

    def tensor(self, array):
        array = array.view(np.int32) if array.dtype == np.uint32 else array
        return torch.tensor(array, device=self.device)

    def tensors(self, *arrays):
        return [self.tensor(array) for array in arrays]

    def tree_tensors(self):
        return d.DraftTree(*self.tensors(*self.tree))


@pytest.fixture(params=DEVICES)
def problem(request, rng):
    return Problem(rng, request.param)


def assert_tensors(got, expected, device):
    for tensor, array in zip(got, expected, strict=True):
        array = array.view(np.int32) if array.dtype == np.uint32 else array
        assert tensor.device.type == device and tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_operators_give_what_the_references_give(problem):
    p = problem
    log_probs, token_ids = torch_ops.top_candidates(p.tensor(p.logits), K)
    np.testing.assert_array_equal(token_ids.cpu(), p.candidates[1], strict=True)
    np.testing.assert_allclose(log_probs.cpu(), p.candidates[0], rtol=1e-5, atol=1e-5)
    tree = torch_ops.build_tree(*p.tensors(*p.candidates, p.roots), BUDGET)
    assert_tensors(tree, p.tree, p.device)
    bits = torch_ops.ancestor_bitmask(tree.parents, tree.node_count)
    assert_tensors(bits, (p.tree.ancestor_bits, np.zeros(B, np.int32)), p.device)
    where = torch_ops.positions(tree.depths, p.tensor(p.prefix))
    assert_tensors([where], [d.positions_reference(p.tree.depths, p.prefix)], p.device)
    path = torch_ops.accept_walk(tree, p.tensor(p.targets), L)
    expected = d.accept_walk_reference(p.tree, p.targets, L)
    assert_tensors(path, expected, p.device)
    assert torch_ops.accept_walk(tree, p.tensor(p.targets)).accept_slots.shape == (B, N)
    pool, prefix, table = p.tensors(p.pool, p.prefix, p.table)
    before = pool.data_ptr(), prefix.data_ptr()
    status = torch_ops.commit_kv(pool, table, prefix, path.accept_slots, path.accept_count)
    numpy_pool, numpy_prefix = p.pool.copy(), p.prefix.copy()
    expected = d.commit_kv_reference(numpy_pool, p.table, numpy_prefix, expected.accept_slots, expected.accept_count)
    assert_tensors([pool, prefix, status], [numpy_pool, numpy_prefix, expected], p.device)
    assert before == (pool.data_ptr(), prefix.data_ptr())
    assert (numpy_prefix > p.prefix).all(), "the case must move something"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_of_every_float(problem, dtype):
    p = problem
    q, pool = p.tensor(p.q).to(dtype), p.tensor(p.pool[0]).to(dtype)
    rest = p.tensors(p.table, p.prefix, p.tree.ancestor_bits, p.tree.node_count)
    out, lse = torch_ops.tree_attention(q, pool, *rest, 0.3, 8)
    numpy_q, numpy_pool = (
        to_bfloat16(array) if dtype == torch.bfloat16 else array.astype(str(dtype).split(".")[1])
        for array in (p.q, p.pool[0])
    )
    expected = d.tree_attention_reference(
        numpy_q, numpy_pool, p.table, p.prefix, p.tree.ancestor_bits, p.tree.node_count, 0.3, latent_width=8
    )
    for tensor, array in zip((out, lse), expected, strict=True):
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.cpu().numpy(), array, rtol=2e-6, atol=2e-6)
    words = rest[2].view(torch.uint32)
    again, _ = torch_ops.tree_attention(q, pool, *rest[:2], words, rest[3], 0.3, 8)
    assert torch.equal(again, out)


def test_bfloat16_logits_need_no_view(problem):
    logits = problem.tensor(problem.logits).bfloat16()
    got = torch_ops.top_candidates(logits, 100)
    expected = d.top_candidates_reference(to_bfloat16(problem.logits), 100)
    np.testing.assert_array_equal(got[1].cpu(), expected[1], strict=True)
    np.testing.assert_allclose(got[0].cpu(), expected[0], rtol=1e-5, atol=1e-5)


def arguments(p):
    """Every operator with arguments for it."""
    tree = p.tree_tensors()
    path = p.tensors(*d.accept_walk_reference(p.tree, p.targets, L))
    attention = p.tensors(p.q, p.pool[0], p.table, p.prefix, p.tree.ancestor_bits, p.tree.node_count)
    walk = [torch.full((B * N,), -1, dtype=torch.int32, device=p.device)]
    walk += [torch.full((B, L + 1), -1, dtype=torch.int32, device=p.device), torch.zeros_like(walk[0][:B])]
    given = sglang.to_sglang_reference(p.tree, p.prefix, sglang.TreeMaskMode.QLEN_ONLY)
    walk += p.tensors(given.draft_token.reshape(B, N), *given[2:5], p.targets.astype(np.int64))
    return {
        "top_candidates": (p.tensor(p.logits), K),
        "build_tree": (*p.tensors(*p.candidates, p.roots), BUDGET),
        "ancestor_bitmask": (tree.parents, tree.node_count),
        "positions": (tree.depths, p.tensor(p.prefix)),
        "tree_attention": (*attention, 0.3, 8, "auto"),
        "accept_walk": (list(tree), p.tensor(p.targets), L),
        "commit_kv": (*p.tensors(p.pool, p.table, p.prefix), path[0], path[2]),
        "verify_tree_greedy": tuple(walk),
    }


NAMES = list(arguments(Problem(np.random.default_rng(0), "cpu")))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(problem, name):
    """Torch's own examination: schema, mutation, fake kernel against the real one, dispatch with dynamic shapes."""
    torch.library.opcheck(getattr(OPS, name), arguments(problem)[name])


def test_every_operator_is_examined():
    mine = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "ddtree_numba::" in name
    }
    assert mine == set(NAMES)


def step(logits, roots, prefix, targets, pool, table):
    """One decoding step between two calculations of the caller's."""
    log_probs, token_ids = torch_ops.top_candidates(logits * 0.5, K)
    tree = torch_ops.build_tree(log_probs, token_ids, roots, BUDGET)
    where = torch_ops.positions(tree.depths, prefix)
    path = torch_ops.accept_walk(tree, targets, L)
    status = torch_ops.commit_kv(pool, table, prefix, path.accept_slots, path.accept_count)
    return tree.parents + 1, where, path, status


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_compiles_into_one_graph(problem, rng, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for vocab in (V, V + 7):
        logits = problem.tensor(rng.normal(size=(B, L, vocab)).astype(np.float32))
        results = []
        for run in (step, compiled):
            rest = problem.tensors(problem.roots, problem.prefix, problem.targets, problem.pool, problem.table)
            results.append(torch.utils._pytree.tree_leaves((run(logits, *rest), rest)))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)


@pytest.mark.gpu
def test_a_step_compiles_with_inductor(rng):
    """The compiler that users get: its own kernels around ours, and again inside a CUDA graph."""
    assert ON_GPU
    p = Problem(rng, "cuda")
    rest = (p.roots, p.prefix, p.targets, p.pool, p.table)
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(3):
            logits = p.tensor(rng.normal(size=(B, L, V)).astype(np.float32))
            results = [
                [leaf.clone() for leaf in torch.utils._pytree.tree_leaves((run(logits, *given), given))]
                for run, given in ((step, p.tensors(*rest)), (compiled, p.tensors(*rest)))
            ]
            for eager, graph in zip(*results, strict=True):
                assert torch.equal(eager, graph)


def test_a_wrong_tensor_is_named(problem):
    p = problem
    with pytest.raises(TypeError, match="logits: got float64, needs"):
        torch_ops.top_candidates(p.tensor(p.logits.astype(np.float64)), K)
    with pytest.raises(ValueError, match="logits: got a strided view"):
        torch_ops.top_candidates(p.tensor(p.logits).transpose(1, 2), K)
    with pytest.raises(ValueError, match=r"root_tokens: got shape \(3,\), needs"):
        torch_ops.build_tree(*p.tensors(*p.candidates), torch.zeros(3, dtype=torch.int32, device=p.device), BUDGET)
    rest = p.tensors(p.table, p.prefix, p.tree.ancestor_bits, p.tree.node_count)
    with pytest.raises(TypeError, match="kv_pool: got float16, needs float32"):
        torch_ops.tree_attention(p.tensor(p.q), p.tensor(p.pool[0]).half(), *rest, 0.3, 8)


def test_launchers_refuse_what_is_on_the_cpu(rng):
    p = Problem(rng, "cpu")
    with pytest.raises(TypeError, match="logits: got a tensor on cpu, needs one on a CUDA device, or a NumPy array"):
        d.top_candidates(p.tensor(p.logits), K)


def test_a_gradient_is_not_asked_for_nor_given(problem):
    logits = problem.tensor(problem.logits).requires_grad_()
    log_probs, _ = torch_ops.top_candidates(logits, K)
    np.testing.assert_allclose(log_probs.detach().cpu(), problem.candidates[0], rtol=1e-5, atol=1e-5)


def test_sglangs_call_as_an_operator(problem):
    p = problem
    walk = arguments(p)["verify_tree_greedy"]
    torch_ops.verify_tree_greedy(*walk)
    path = d.accept_walk_reference(p.tree, p.targets, L)
    np.testing.assert_array_equal(walk[2].cpu(), path.accept_count - 1)
    for b in range(B):
        used = path.accept_count[b]
        np.testing.assert_array_equal(walk[1][b, :used].cpu(), b * N + path.accept_slots[b, :used])
        np.testing.assert_array_equal(walk[0][walk[1][b, :used].long()].cpu(), path.accept_tokens[b, :used])
