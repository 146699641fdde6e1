"""NumPy standing in for CuPy: a module of the functions that the engine makes arrays with, and their guarded arrays.

CuPy refuses to mix its arrays with NumPy's. So does `DeviceArray`, which is NumPy otherwise: code that runs on it
without a `TypeError` keeps device and host apart.
"""

from __future__ import annotations

import numpy as np


class DeviceArray(np.ndarray):
    """An array that meets its own kind and numbers only."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        _refuse_host_arrays(*inputs, *(out or ()))
        plain = [np.asarray(each) if isinstance(each, DeviceArray) else each for each in inputs]
        if out is not None:
            options["out"] = tuple(np.asarray(each) for each in out)
        result = getattr(ufunc, method)(*plain, **options)
        return out[0] if out is not None else _guarded(result)

    def __array_function__(self, function, types, arguments, options):
        _refuse_host_arrays(
            *(item for each in arguments for item in (each if isinstance(each, (list, tuple)) else [each]))
        )
        return _guarded(super().__array_function__(function, types, arguments, options))

    def __getitem__(self, index):
        _refuse_host_arrays(*(index if isinstance(index, tuple) else (index,)))
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        _refuse_host_arrays(*(index if isinstance(index, tuple) else (index,)), value)
        super().__setitem__(index, value)

    def view(self, *arguments):
        if not self.flags.c_contiguous:
            raise ValueError("To change to a dtype of a different size, the array must be C-contiguous")  # as CuPy does
        return super().view(*arguments)


def _refuse_host_arrays(*values) -> None:
    for value in values:
        if type(value) is np.ndarray and value.ndim > 0:
            raise TypeError("a device array meets one of the host")


def _guarded(array):
    return np.ndarray.view(array, DeviceArray) if isinstance(array, np.ndarray) else array


def asarray(values, dtype=None):
    return _guarded(np.asarray(values, dtype))


def asnumpy(array):
    assert isinstance(array, DeviceArray)
    return np.array(array)


def _maker(name):
    return lambda *arguments, **options: _guarded(getattr(np, name)(*arguments, **options))


arange, empty, full, zeros, ascontiguousarray, concatenate = map(
    _maker, ("arange", "empty", "full", "zeros", "ascontiguousarray", "concatenate")
)
