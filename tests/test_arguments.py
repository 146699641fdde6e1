"""Checks name the argument, what it got and what it needs; transfers keep host and device apart."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.arguments import ArrayCheck, Transfer, check_dtype, check_integer
from ddtree_numba.backend import ON_GPU, cuda, is_device_array
from ddtree_numba.bfloat16 import bfloat16_to_float32, from_bfloat16, to_bfloat16
from tests.helpers import poisoned

F32 = (np.float32,)


@cuda.jit
def double_evens_kernel(values, doubled):
    i = cuda.grid(1)
    if i < values.shape[0] and i % 2 == 0:
        doubled[i] = values[i] * 2


def double_evens(values, out=None, stream=None):
    transfer = Transfer(stream, {"values": values})
    doubled = transfer.output("doubled", out, values.shape, np.float32)
    double_evens_kernel[1, 8, transfer.stream](transfer.input(values), doubled)
    return transfer.finish(doubled)[0]


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        ([1.0], TypeError, "x: got list, needs a NumPy array or a device array"),
        (np.zeros((2, 3)), TypeError, "x: got float64, needs float32 or float16"),
        (np.zeros(2, np.float32), ValueError, "x: got shape (2,), needs [B, 3]"),
        (np.zeros((2, 4), np.float32), ValueError, "x: got shape (2, 4), needs [B, 3]"),
        (np.zeros((3, 2), np.float32).T, ValueError, "x: got a strided view, needs a C-contiguous array"),
    ],
)
def test_a_wrong_array_is_named(array, error, message):
    with pytest.raises(error) as caught:
        ArrayCheck()("x", array, "B 3", (np.float32, np.float16))
    assert str(caught.value) == message


@pytest.mark.parametrize("value", ["foo", None, 3.5, {"a": 1}, "(2)f", np.int64, "f8"])
def test_a_wrong_dtype_is_named(value):
    with pytest.raises(TypeError, match=r"dtype: got .*, needs uint8 or float32 here") as caught:
        check_dtype("dtype", value, (np.uint8, np.float32), " here")
    assert "\n" not in str(caught.value)
    assert check_dtype("dtype", "uint8", (np.uint8, np.float32)) == np.uint8


def test_the_first_array_fixes_a_dimension_for_the_rest():
    check = ArrayCheck(K=2)
    assert check("x", np.zeros((4, 2), np.float32), "B K", F32) == (4, 2)
    with pytest.raises(ValueError, match=r"y: got shape \(5, 7\), needs \[B, \*\] with B=4"):
        check("y", np.zeros((5, 7), np.float32), "B *", F32)
    with pytest.raises(ValueError, match=r"z: got shape \(3,\), needs \[K\] with K=2"):
        check("z", np.zeros(3, np.float32), "K", F32)


def test_a_device_array_is_checked_like_a_numpy_one():
    array = cuda.to_device(np.zeros((2, 3), np.float32))
    assert ArrayCheck()("x", array, "B L", F32) == (2, 3)
    with pytest.raises(TypeError, match="x: got float32, needs int32"):
        ArrayCheck()("x", array, "B L", (np.int32,))


@pytest.mark.parametrize("move", [lambda array: array, cuda.to_device], ids=["numpy", "device"])
def test_odd_strides_of_length_1_axes_do_not_reach_the_kernel(rng, move):
    values = rng.random((3, 5), np.float32)[:1, :4]
    array = move(values)
    device = Transfer(None, {"x": array}).input(array)
    assert tuple(device.strides) == (16, 4) or not ON_GPU
    np.testing.assert_array_equal(device.reshape(4).copy_to_host(), values[0])


@pytest.mark.parametrize(("value", "error"), [(1.5, TypeError), (True, TypeError), ("3", TypeError), (9, ValueError)])
def test_a_wrong_whole_number_is_named(value, error):
    with pytest.raises(error) as caught:
        check_integer("k", value, 1, 8)
    assert str(caught.value) == f"k: got {value!r}, needs a whole number from 1 to 8"


def test_numpy_scalars_are_whole_numbers():
    assert check_integer("k", np.int64(3), 1, 8) == 3


def test_numpy_in_numpy_out(rng):
    values = rng.random(4, np.float32)
    got = double_evens(values)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got[::2], values[::2] * 2)


def test_out_is_filled_and_keeps_what_the_kernel_left_alone(rng):
    values, out = rng.random(4, np.float32), poisoned(4, np.float32)
    assert double_evens(values, out=out) is out
    np.testing.assert_array_equal(out[::2], values[::2] * 2)
    assert np.isnan(out[1::2]).all()


def test_device_in_device_out_on_a_stream(rng):
    values = rng.random(4, np.float32)
    out = cuda.to_device(poisoned(4, np.float32))
    stream = cuda.stream()
    got = double_evens(cuda.to_device(values), out=out, stream=stream)
    stream.synchronize()
    assert got is out
    np.testing.assert_array_equal(out.copy_to_host()[::2], values[::2] * 2)
    assert is_device_array(double_evens(cuda.to_device(values)))


def test_host_and_device_do_not_mix(rng):
    values = rng.random(4, np.float32)
    device = cuda.to_device(values)
    with pytest.raises(TypeError, match=r"a: got NumPy beside device arrays \(b\), needs all of one kind"):
        Transfer(None, {"a": values, "b": device})
    with pytest.raises(TypeError, match=r"out \(doubled\): got ndarray, needs a device array like the inputs"):
        double_evens(device, out=values)
    with pytest.raises(TypeError, match=r"out \(doubled\): got .*, needs a NumPy array like the inputs"):
        double_evens(values, out=device)


@pytest.mark.parametrize("out", [np.zeros(5, np.float32), np.zeros(4)])
def test_a_wrong_out_is_named(rng, out):
    with pytest.raises((TypeError, ValueError), match=r"out \(doubled\): got"):
        double_evens(rng.random(4, np.float32), out=out)


def test_a_read_only_out_is_refused(rng):
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out \(doubled\): got a read-only array"):
        double_evens(rng.random(4, np.float32), out=out)


@pytest.mark.gpu
def test_foreign_arrays_and_streams_are_used_where_they_are(rng):
    assert ON_GPU
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(rng.random(4, np.float32)).cuda()
    out = torch.full((4,), float("nan"), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    assert double_evens(values, out=out, stream=stream) is out
    stream.synchronize()
    assert torch.equal(out[::2], values[::2] * 2)
    assert ArrayCheck()("x", values.bfloat16(), "B", (np.uint16,)) == (4,)
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    from_cupy = double_evens(cupy.asarray(values), stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(from_cupy.get()[::2], values[::2].cpu().numpy() * 2)


# bfloat16 travels as its bits.


@cuda.jit
def widen_kernel(bits, values):
    i = cuda.grid(1)
    if i < bits.shape[0]:
        values[i] = bfloat16_to_float32(bits[i])


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, 3.4e38, np.inf], np.float32)
    bits = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F80, 0x7F80]
    assert to_bfloat16(values).tolist() == bits
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(nan))).all()


def test_every_bfloat16_survives_the_way_there_and_back():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = from_bfloat16(bits)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(to_bfloat16(values)[numbers], bits[numbers])


def test_the_device_widens_like_the_host(rng):
    bits = rng.integers(0, 1 << 16, 8).astype(np.uint16)
    values = cuda.to_device(poisoned(8, np.float32))
    widen_kernel[1, 8](cuda.to_device(bits), values)
    np.testing.assert_array_equal(values.copy_to_host().view(np.uint32), bits.astype(np.uint32) << 16)
