"""What the tests of all stages share."""

from __future__ import annotations

import numpy as np

from ddtree_numba.backend import cuda, is_device_array


def poisoned(shape, dtype) -> np.ndarray:
    """Return an array that no right answer looks like: NaN, -7, or 0xDEADBEEF, so that an unwritten element shows."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return np.full(shape, np.nan, dtype)
    return np.full(shape, -7 if dtype.kind == "i" else 0xDEADBEEF & np.iinfo(dtype).max, dtype)


def poisoned_like(arrays):
    """Return a poisoned twin of every array of a tuple (a NamedTuple stays one)."""
    twins = [poisoned(array.shape, array.dtype) for array in arrays]
    return type(arrays)(*twins) if hasattr(arrays, "_fields") else tuple(twins)


def on_device(arrays):
    """Copy every array of a tuple to the device (a NamedTuple stays one)."""
    copies = [cuda.to_device(np.ascontiguousarray(array)) for array in arrays]
    return type(arrays)(*copies) if hasattr(arrays, "_fields") else tuple(copies)


def on_host(arrays):
    """Copy every device array of a tuple back (a NamedTuple stays one)."""
    assert all(is_device_array(array) for array in arrays), [type(array) for array in arrays]
    copies = [array.copy_to_host() for array in arrays]
    return type(arrays)(*copies) if hasattr(arrays, "_fields") else tuple(copies)


def assert_same(got, expected) -> None:
    """Assert that two tuples of arrays are equal bit for bit, shapes and dtypes included."""
    names = getattr(expected, "_fields", range(len(expected)))
    for name, a, b in zip(names, got, expected, strict=True):
        assert a.dtype == b.dtype, f"{name}: {a.dtype} is not {b.dtype}"
        np.testing.assert_array_equal(a, b, err_msg=str(name), strict=True)


@cuda.jit(device=True)
def thread_after_two_barriers():
    """Return the thread's index; a device function in another module than the kernel that calls it."""
    cuda.syncthreads()
    index = cuda.threadIdx.x
    cuda.syncthreads()
    return index
