"""Which library answers a launch, where its memory comes from and which stream it takes: with a stand-in for PyTorch.

The stand-in's tensors lie in the simulator's memory and tell of themselves what CUDA tensors do. The real libraries are
in `test_torch_arrays.py`, on a GPU.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import ddtree_numba as d
from ddtree_numba import arguments, device_library
from ddtree_numba.arguments import Transfer, dtype_of
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.bfloat16 import to_bfloat16
from ddtree_numba.device_library import as_device, has_library, library_of, scratch, stream_for
from ddtree_numba.interop import sglang, tensorrt_llm
from tests.test_interop import VECTORS, trees, verify_arguments

pytestmark = pytest.mark.skipif(ON_GPU, reason="the real libraries are there: test_torch_arrays.py")


class Dtype:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"torch.{self.name}"


class Tensor:
    """What a launcher may ask of a CUDA tensor."""

    layout = "strided"

    def __init__(self, array, dtype=None, **changed):
        self.array, self.dtype = array, dtype or TORCH[array.dtype.name]
        self.device, self.requires_grad = SimpleNamespace(type="cuda", index=0), False
        vars(self).update(changed)

    @property
    def shape(self):
        return self.array.shape

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def view(self, dtype):
        return Tensor(self.array.view(np.dtype(dtype.name)), dtype)

    def reshape(self, *shape):
        return Tensor(self.array.reshape(*shape), self.dtype)

    @property
    def __cuda_array_interface__(self):
        assert self.dtype is not TORCH["bfloat16"], "the interface has none"
        return {"shape": self.shape, "typestr": self.array.dtype.str, "data": (0, False), "version": 2}


NAMES = ("float32", "float64", "float16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "bfloat16")
TORCH = {name: Dtype(name) for name in NAMES}


class Stream:
    """Numba's view of a stream."""

    def __init__(self, handle):
        self.handle = handle

    def __int__(self):
        return self.handle


@pytest.fixture
def torch(monkeypatch):
    """Put the stand-in where PyTorch would be; return it, with the list of what it has allocated and where."""
    module = ModuleType("torch")
    vars(module).update(TORCH, Tensor=Tensor, strided="strided")
    module.now, module.made = 7, []

    @contextmanager
    def on(stream):
        before, module.now = module.now, stream.cuda_stream
        yield
        module.now = before

    def empty(shape, dtype, device):
        tensor = Tensor(np.full(shape, 1, np.dtype(dtype.name)))
        module.made.append((module.now, tensor))
        return tensor

    module.empty = empty
    module.cuda = SimpleNamespace(
        current_stream=lambda device: SimpleNamespace(cuda_stream=module.now),
        ExternalStream=lambda handle, device: SimpleNamespace(cuda_stream=handle),
        default_stream=lambda device: SimpleNamespace(cuda_stream=0),
        stream=on,
    )
    fake_array = cuda.cudadrv.devicearray.FakeCUDAArray
    door = SimpleNamespace(
        as_cuda_array=lambda tensor, sync: fake_array(tensor.array),
        device_array=cuda.device_array,
        get_current_device=lambda: SimpleNamespace(id=0),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(device_library, "ON_GPU", True)
    monkeypatch.setattr(device_library, "cuda", door)
    monkeypatch.setattr(device_library, "as_stream", lambda stream: Stream(stream.cuda_stream) if stream else 0)
    is_device_array = arguments.is_device_array
    monkeypatch.setattr(arguments, "is_device_array", lambda array: isinstance(array, Tensor) or is_device_array(array))
    monkeypatch.setattr(arguments.cuda, "get_current_device", door.get_current_device, raising=False)
    return module


def test_tensors_are_answered_with_tensors_on_the_current_stream(torch, rng):
    logits = rng.normal(size=(1, 2, 9)).astype(np.float32)
    log_probs, token_ids = d.top_candidates(Tensor(logits), 3)
    expected = d.top_candidates_reference(logits, 3)
    assert isinstance(log_probs, Tensor) and isinstance(token_ids, Tensor)
    np.testing.assert_array_equal(token_ids.array, expected[1])
    np.testing.assert_allclose(log_probs.array, expected[0], rtol=1e-5)
    assert [stream for stream, _ in torch.made] == [7, 7]
    assert [tensor for _, tensor in torch.made] == [log_probs, token_ids]


def test_bfloat16_is_taken_as_it_is(torch, rng):
    logits = to_bfloat16(rng.normal(size=(1, 2, 9)).astype(np.float32))
    tensor = Tensor(logits, TORCH["bfloat16"])
    assert dtype_of(tensor) == np.uint16
    _, token_ids = d.top_candidates(tensor, 9)
    np.testing.assert_array_equal(token_ids.array, d.top_candidates_reference(logits, 9)[1])


def test_outputs_of_the_caller_are_filled_and_come_back(torch, rng):
    logits = rng.normal(size=(1, 2, 9)).astype(np.float32)
    out = Tensor(np.zeros((1, 2, 3), np.float32)), Tensor(np.zeros((1, 2, 3), np.int32))
    got = d.top_candidates(Tensor(logits), 3, out=out)
    assert got[0] is out[0] and got[1] is out[1] and not torch.made
    np.testing.assert_array_equal(out[1].array, d.top_candidates_reference(logits, 3)[1])


def test_memory_for_a_named_stream_is_made_on_it(torch, rng):
    logits = Tensor(rng.normal(size=(1, 2, 9)).astype(np.float32))
    d.top_candidates(logits, 3, stream=SimpleNamespace(cuda_stream=99))
    assert [stream for stream, _ in torch.made] == [99, 99] and torch.now == 7


def test_scratch_comes_from_the_streams_library(torch):
    tensor = Tensor(np.zeros(3, np.float32))
    ours, theirs = stream_for(None), stream_for(None, tensor)
    assert ours == 0 and int(theirs) == 7 and has_library(theirs) and not has_library(ours)
    assert scratch(5, np.uint64, theirs).shape == (5,)
    ((stream, made),) = torch.made
    assert stream == 7 and made.dtype is TORCH["uint64"]
    scratch(5, np.uint64, ours)
    assert len(torch.made) == 1
    transfer = Transfer(None, {"x": tensor})
    transfer.scratch((2, 2), np.int64)
    assert torch.made[1][1].shape == (2, 2)


def test_the_first_foreign_array_decides(torch):
    tensor, mine = Tensor(np.zeros(3, np.float32)), cuda.to_device(np.zeros(3, np.float32))
    assert type(library_of(mine)) is device_library.NumbaLibrary
    assert type(library_of(mine, tensor)) is device_library.TorchLibrary
    assert as_device(mine) is mine


def test_numbas_own_arrays_are_answered_with_numbas_own(torch, rng):
    logits = rng.normal(size=(1, 2, 9)).astype(np.float32)
    _, token_ids = d.top_candidates(cuda.to_device(logits), 3)
    np.testing.assert_array_equal(token_ids.copy_to_host(), d.top_candidates_reference(logits, 3)[1])
    assert not torch.made


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"requires_grad": True}, TypeError, "logits: got a tensor that requires a gradient, needs tensor.detach"),
        ({"layout": "sparse"}, TypeError, "logits: got a tensor of layout sparse, needs a strided one"),
        (
            {"device": SimpleNamespace(type="mps", index=0)},
            TypeError,
            "logits: got a tensor on .*mps.*, needs one on a CUDA",
        ),
        (
            {"device": SimpleNamespace(type="cuda", index=1)},
            ValueError,
            "logits: got an array on device 1, needs one on .* 0",
        ),
        ({"dtype": Dtype("float8_e4m3fn")}, TypeError, "logits: got float8_e4m3fn, which NumPy has no type for"),
        ({"dtype": TORCH["float64"]}, TypeError, "logits: got float64, needs float32"),
    ],
)
def test_what_a_kernel_can_not_use_is_named(torch, changed, error, message):
    with pytest.raises(error, match=message):
        d.top_candidates(Tensor(np.zeros((1, 2, 9), np.float32), **changed), 3)


def test_strided_and_mixed_tensors_are_named(torch):
    logits = np.zeros((1, 2, 9), np.float32)
    with pytest.raises(ValueError, match="logits: got a strided view"):
        d.top_candidates(Tensor(logits[:, :, ::2]), 3)
    candidates = Tensor(np.zeros((1, 2, 3), np.float32)), Tensor(np.zeros((1, 2, 3), np.int32))
    with pytest.raises(TypeError, match="root_tokens: got NumPy beside device arrays"):
        d.build_tree(*candidates, np.zeros(1, np.int32), 3)


def test_bridges_answer_in_kind(torch, rng):
    tree, prefix, _ = trees(rng, 7)
    moved, lengths = d.DraftTree(*map(Tensor, tree)), Tensor(prefix)
    for mode in sglang.TreeMaskMode:
        given = sglang.to_sglang(moved, lengths, mode, prefix_sum=int(prefix.sum()))
        for tensor, expected in zip(given, sglang.to_sglang_reference(tree, prefix, mode), strict=True):
            assert isinstance(tensor, Tensor) and tensor.dtype is TORCH[expected.dtype.name]
            np.testing.assert_array_equal(tensor.array, expected)
    given = tensorrt_llm.to_tensorrt_llm(moved)
    assert given.position_offsets is moved.depths and np.shares_memory(given.packed_mask.array, tree.ancestor_bits)


def test_sglangs_call_fills_tensors_in_place(torch):
    case = VECTORS["verify_tree_greedy"][0]
    outputs, inputs = verify_arguments(case)
    sglang.verify_tree_greedy(*map(Tensor, outputs), *map(Tensor, inputs))
    for name, array in zip(("predicts", "accept_index", "accept_token_num"), outputs, strict=True):
        assert array.tolist() == case["expected_asserted"][name]


def test_a_stream_for_cupy_old_and_new() -> None:
    """CuPy 14 takes a stream by protocol and warns of the older way, which is the only one that CuPy 13 has."""
    new = SimpleNamespace(cuda=SimpleNamespace(Stream=SimpleNamespace(from_external=lambda s: s.__cuda_stream__())))
    assert device_library._cupy_stream(new, 77) == (0, 77)
    old = SimpleNamespace(cuda=SimpleNamespace(Stream=object, ExternalStream=lambda handle: ("old", handle)))
    assert device_library._cupy_stream(old, 77) == ("old", 77)
