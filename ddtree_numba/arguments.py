"""What every launcher does around its kernel: check the arguments, bring them to the device, bring results back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda, is_device_array
from ddtree_numba.device_library import NumbaLibrary, as_device, library_of, scratch, stream_for

__all__ = ["ArrayCheck", "Transfer", "check_dtype", "check_integer", "describe_array", "dtype_of"]


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int when it is a whole number from `low` to `high`; else raise naming it.

    >>> check_integer("budget", -1, 0, 1024)
    Traceback (most recent call last):
    ValueError: budget: got -1, needs a whole number from 0 to 1024
    """
    needs = f"needs a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {value!r}, {needs}")
    if not low <= value <= high:
        raise ValueError(f"{name}: got {int(value)}, {needs}")
    return int(value)


def check_dtype(name: str, value: Any, dtypes: tuple[Any, ...], note: str = "") -> np.dtype:
    """Return `value` as a NumPy dtype when it is one of `dtypes`; else raise `TypeError` naming it.

    >>> check_dtype("dtype", "foo", (np.uint8, np.uint16))
    Traceback (most recent call last):
    TypeError: dtype: got 'foo', needs uint8 or uint16
    """
    needs = f"needs {' or '.join(str(np.dtype(d)) for d in dtypes)}{note}"
    try:
        dtype = None if value is None else np.dtype(value)  # NumPy takes None for float64
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype not in [np.dtype(d) for d in dtypes]:
        raise TypeError(f"{name}: got {repr(value) if dtype is None else dtype}, {needs}")
    return dtype


class ArrayCheck:
    """Checks arrays against named dimensions, which the first array that has them fixes for the rest.

    >>> check = ArrayCheck()
    >>> check("logits", np.zeros((2, 3, 5), np.float32), "B L V", (np.float32,))
    (2, 3, 5)
    >>> check("root_tokens", np.zeros(4, np.int32), "B", (np.int32,))
    Traceback (most recent call last):
    ValueError: root_tokens: got shape (4,), needs [B] with B=2
    """

    def __init__(self, **sizes: int) -> None:
        """Take the `sizes` of dimensions that are known beforehand: ``ArrayCheck(B=2)``."""
        self._sizes = dict(sizes)

    def __call__(self, name: str, array: Any, shape: str, dtypes: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the shape of `array`, a C-contiguous NumPy or device array.

        `shape` names its axes, separated by spaces: a name, a number, or ``*`` for anything. Raises `TypeError` for
        what is no array or has another dtype than `dtypes`, `ValueError` for a wrong shape or layout.
        """
        got, dtype, contiguous = describe_array(name, array)
        allowed = [np.dtype(d) for d in dtypes]
        if dtype not in allowed:
            raise TypeError(f"{name}: got {dtype}, needs {' or '.join(str(d) for d in allowed)}")
        axes = shape.split()
        if len(got) != len(axes) or not all(self._fits(axis, size) for axis, size in zip(axes, got, strict=True)):
            raise ValueError(f"{name}: got shape {got}, needs {self._needs(axes)}")
        if not contiguous:
            raise ValueError(f"{name}: got a strided view, needs a C-contiguous array")
        for axis, size in zip(axes, got, strict=True):
            if axis != "*" and not axis.isdigit():
                self._sizes[axis] = size
        return got

    def _fits(self, axis: str, size: int) -> bool:
        if axis.isdigit():
            return size == int(axis)
        return axis == "*" or self._sizes.get(axis, size) == size

    def _needs(self, axes: list[str]) -> str:
        known = [f"{axis}={self._sizes[axis]}" for axis in dict.fromkeys(axes) if axis in self._sizes]
        return f"[{', '.join(axes)}]" + (f" with {', '.join(known)}" if known else "")


def dtype_of(array: Any) -> np.dtype:
    """Return the NumPy dtype of a NumPy or device array; uint16 for torch's bfloat16."""
    return np.dtype(array.dtype) if isinstance(array, np.ndarray) else library_of(array).facts(array).dtype


def describe_array(name: str, array: Any) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Return shape, dtype and whether C-contiguous; raise naming what no kernel can use here."""
    if isinstance(array, np.ndarray):
        return array.shape, array.dtype, array.flags.c_contiguous
    library = library_of(array)
    if type(library) is NumbaLibrary and not is_device_array(array):
        raise TypeError(f"{name}: got {type(array).__name__}, needs a NumPy array or a device array")
    try:
        shape, dtype, strides, device = library.facts(array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if device is not None and device != cuda.get_current_device().id:
        raise ValueError(
            f"{name}: got an array on device {device}, needs one on Numba's current device, "
            f"{cuda.get_current_device().id} (numba.cuda.select_device({device}) changes it)"
        )
    return shape, dtype, strides is None or _is_c_contiguous(shape, strides, dtype.itemsize)


def _is_c_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Tell it as NumPy does: the stride of an axis of length 1 says nothing, an empty array is contiguous."""
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _plain_strides(array: Any) -> Any:
    """Return a C-contiguous device array with the strides of a new one.

    An axis of length 1 may come with any stride. NumPy does not mind; Numba would compile the kernel once more, for
    strided arrays, and refuses to reshape.
    """
    strides = tuple(math.prod(array.shape[axis + 1 :]) * array.dtype.itemsize for axis in range(len(array.shape)))
    if not ON_GPU or array.size == 0 or tuple(array.strides) == strides:
        return array
    return cuda.cudadrv.devicearray.DeviceNDArray(
        array.shape, strides, array.dtype, stream=array.stream, gpu_data=array.gpu_data
    )


class Transfer:
    """Brings a launch's arrays to the device and its results back.

    NumPy inputs are copied in and the results come back as NumPy arrays. Device inputs are used where they are and the
    results stay there: torch tensors give torch tensors, CuPy arrays CuPy's, everything else Numba's. A launch that
    names no stream goes on the current stream of that library.
    """

    def __init__(self, stream: Any, inputs: Mapping[str, Any]) -> None:
        """Take a `stream` (None for the default) and the named `inputs`; `TypeError` when host and device mix."""
        kinds = {name: is_device_array(array) for name, array in inputs.items()}
        if len(set(kinds.values())) > 1:
            names = [", ".join(name for name, device in kinds.items() if device is kind) for kind in (True, False)]
            raise TypeError(f"{names[1]}: got NumPy beside device arrays ({names[0]}), needs all of one kind")
        self.on_host = not any(kinds.values())
        """Whether the inputs are NumPy arrays, so that their contents can be looked at."""
        self._library = library_of(*inputs.values())
        self.stream = stream_for(stream, library=self._library)
        self._returned: dict[int, Any] = {}

    def input(self, array: Any) -> Any:
        """Return `array` on the device, laid out like a new one."""
        if self.on_host:
            return cuda.to_device(array.reshape(-1).reshape(array.shape), stream=self.stream)
        return _plain_strides(as_device(array, self.stream))

    def output(self, name: str, given: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a device array for the result `name`: the caller's `given` one if not None, else a new one."""
        if given is None and self.on_host:
            return cuda.device_array(shape, dtype, stream=self.stream)
        if given is None:
            return self.inout(f"out ({name})", self._library.empty(shape, dtype, self.stream))
        ArrayCheck()(f"out ({name})", given, " ".join(str(size) for size in shape), (dtype,))
        return self.inout(f"out ({name})", given)

    def inout(self, name: str, array: Any) -> Any:
        """Return `array` on the device, to be changed there; a NumPy array gets the changes in `finish`."""
        if is_device_array(array) == self.on_host:
            kind = "a NumPy array" if self.on_host else "a device array"
            raise TypeError(f"{name}: got {type(array).__name__}, needs {kind} like the inputs")
        if self.on_host and not array.flags.writeable:
            raise ValueError(f"{name}: got a read-only array, needs one that can be written")
        # A NumPy array is uploaded with what it holds: elements that a kernel does not write keep their values.
        device = self.input(array)
        self._returned[id(device)] = array
        return device

    def scratch(self, shape: Any, dtype: Any) -> Any:
        """Return device memory, contents undefined, that this launch needs for itself."""
        return scratch(shape, dtype, self.stream)

    def finish(self, *results: Any) -> tuple[Any, ...]:
        """Return the results the way the inputs came: NumPy arrays, complete, or device arrays, still in flight."""
        if not self.on_host:
            return tuple(self._returned.get(id(result), result) for result in results)
        host = tuple(result.copy_to_host(self._returned.get(id(result)), stream=self.stream) for result in results)
        if self.stream:
            self.stream.synchronize()
        return host
