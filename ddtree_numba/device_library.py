"""The library that a caller's device arrays come from: PyTorch, CuPy, or Numba itself.

A launcher answers in kind: tensors in, tensors out. So it needs three things of a library: where its work is queued at
the moment, memory for results, and what an array is (shape, dtype, address). Memory matters most: while a stream is
being captured into a CUDA graph, only the library's own allocator may give some.

No library is imported here. An array that is an instance of `torch.Tensor` proves that PyTorch has been.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU, as_stream, cuda

__all__ = [
    "ArrayFacts",
    "CupyLibrary",
    "NumbaLibrary",
    "TorchLibrary",
    "as_device",
    "as_library_stream",
    "has_library",
    "library_of",
    "reinterpret",
    "scratch",
    "stream_for",
]


class ArrayFacts(NamedTuple):
    """What a device array is, read without touching the device."""

    shape: tuple[int, ...]
    """Its sizes."""
    dtype: np.dtype
    """Its element type; bfloat16 counts as the `uint16` of its bits, see `bfloat16`."""
    strides: tuple[int, ...] | None
    """Bytes between neighbours of every axis; None: C-contiguous."""
    device: int | None
    """The number of its GPU; None: the current one."""


class NumbaLibrary:
    """Numba's own device arrays, and whatever else has ``__cuda_array_interface__``."""

    def current_stream(self) -> Any:
        """Return where launches go that name no stream: 0, Numba's default."""
        return 0

    def empty(self, shape: Any, dtype: Any, stream: Any) -> Any:
        """Return a new array whose contents are undefined, to be used on `stream` (Numba's)."""
        return cuda.device_array(shape, dtype, stream=stream)

    def scratch(self, shape: Any, dtype: Any, stream: Any) -> Any:
        """Return a new array that a single launch on `stream` needs for itself."""
        return self.empty(shape, dtype, stream)

    def facts(self, array: Any) -> ArrayFacts:
        """Return what `array` is; `TypeError` for one that tells no address."""
        if hasattr(array, "copy_to_host"):
            return ArrayFacts(tuple(array.shape), np.dtype(array.dtype), tuple(array.strides), None)
        try:
            interface = array.__cuda_array_interface__
        except RuntimeError as error:
            raise TypeError(f"got a {type(array).__name__} that gives no device pointer ({error})") from None
        return ArrayFacts(tuple(interface["shape"]), np.dtype(interface["typestr"]), interface.get("strides"), None)

    def plain(self, array: Any) -> Any:
        """Return `array` as something whose ``__cuda_array_interface__`` Numba can read."""
        return array


class TorchLibrary(NumbaLibrary):
    """PyTorch: tensors from its caching allocator, work on its current stream."""

    def __init__(self, torch: Any, device: Any) -> None:
        """Take the module and the CUDA device that new tensors belong to."""
        self._torch, self._device = torch, device

    def current_stream(self) -> Any:
        """Return the stream that torch queues its own work on now."""
        return as_library_stream(self, self._torch.cuda.current_stream(self._device))

    def empty(self, shape: Any, dtype: Any, stream: Any) -> Any:
        """Return a new tensor. The allocator ties its memory to `stream`: freed there, reused in that order."""
        torch, handle = self._torch, int(stream) if stream else 0
        here = handle == torch.cuda.current_stream(self._device).cuda_stream
        other = nullcontext() if here else torch.cuda.stream(_torch_stream(torch, handle, self._device))
        with other:
            return torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device=self._device)

    def facts(self, array: Any) -> ArrayFacts:
        """Return what a tensor is; `TypeError` for one that has no plain memory on a GPU."""
        torch = self._torch
        if array.device.type != "cuda":
            raise TypeError(f"got a tensor on {array.device}, needs one on a CUDA device, or a NumPy array")
        if array.layout != torch.strided:
            raise TypeError(f"got a tensor of layout {array.layout}, needs a strided one")
        if array.requires_grad:
            raise TypeError("got a tensor that requires a gradient, needs tensor.detach(): no stage has one")
        name = str(array.dtype).removeprefix("torch.")
        try:
            dtype = np.dtype({"bfloat16": "uint16"}.get(name, name))
        except TypeError:
            raise TypeError(f"got {name}, which NumPy has no type for; view its bits as one that it has") from None
        strides = None if array.is_contiguous() else tuple(step * dtype.itemsize for step in array.stride())
        return ArrayFacts(tuple(array.shape), dtype, strides, array.device.index)

    def plain(self, array: Any) -> Any:
        """Return `array`, a bfloat16 one seen as uint16: the CUDA array interface has no bfloat16."""
        return array.view(self._torch.uint16) if array.dtype == self._torch.bfloat16 else array


class CupyLibrary(NumbaLibrary):
    """CuPy: arrays from its memory pool, work on its current stream."""

    def __init__(self, cupy: Any, device: Any) -> None:
        """Take the module and the device that new arrays belong to."""
        self._cupy, self._device = cupy, device

    def current_stream(self) -> Any:
        """Return the stream that CuPy queues its own work on now."""
        return as_library_stream(self, self._cupy.cuda.get_current_stream())

    def empty(self, shape: Any, dtype: Any, stream: Any) -> Any:
        """Return a new array. The pool ties its memory to `stream`: freed there, reused in that order."""
        cupy, handle = self._cupy, int(stream) if stream else 0
        here = handle == cupy.cuda.get_current_stream().ptr
        with self._device, nullcontext() if here else _cupy_stream(cupy, handle):
            return cupy.empty(shape, dtype)

    def scratch(self, shape: Any, dtype: Any, stream: Any) -> Any:
        """Return a new array that a single launch on `stream` needs for itself.

        A graph that is being captured will use it at every replay, and CuPy, other than torch, has no pool for a graph:
        memory that is let go goes to whoever asks next. So what a capture needs is kept for good.
        """
        array = self.empty(shape, dtype, stream)
        if stream and _cupy_stream(self._cupy, int(stream)).is_capturing():
            _kept_for_graphs.append(array)
        return array

    def facts(self, array: Any) -> ArrayFacts:
        """Return what `array` is."""
        strides = None if array.flags.c_contiguous else tuple(array.strides)
        return ArrayFacts(tuple(array.shape), np.dtype(array.dtype), strides, int(array.device.id))


_NUMBA = NumbaLibrary()
_kept_for_graphs: list[Any] = []


def library_of(*arrays: Any) -> NumbaLibrary:
    """Return the library of the first of `arrays` that is torch's or CuPy's; Numba's when none is."""
    return next((library for array in arrays if (library := _foreign(array)) is not None), _NUMBA)


def _foreign(array: Any) -> NumbaLibrary | None:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return TorchLibrary(torch, array.device)
    if cupy is not None and isinstance(array, cupy.ndarray):
        return CupyLibrary(cupy, array.device)
    return None


def as_library_stream(library: NumbaLibrary, stream: Any) -> Any:
    """Return `stream` as Numba takes it; what `scratch` allocates for it comes from `library`."""
    numba_stream = as_stream(stream)
    if numba_stream and library is not _NUMBA:
        numba_stream.library = library
    return numba_stream


def stream_for(stream: Any, *arrays: Any, library: NumbaLibrary | None = None) -> Any:
    """Return Numba's view of `stream`; of the current stream of the `arrays`' library when it is None."""
    library = library_of(*arrays) if library is None else library
    return library.current_stream() if stream is None else as_library_stream(library, stream)


def scratch(shape: Any, dtype: Any, stream: Any) -> Any:
    """Return device memory (Numba's view of it, contents undefined) that one launch on `stream` needs for itself.

    It comes from the library that the launch's stream was taken from, so that it may be asked for during a capture.
    """
    library = getattr(stream, "library", _NUMBA)
    return as_device(library.scratch(shape, dtype, stream), stream)


def has_library(stream: Any) -> bool:
    """Tell whether `scratch` takes memory for `stream` from torch or CuPy."""
    return hasattr(stream, "library")


def as_device(array: Any, stream: Any = 0) -> Any:
    """Return a device array (Numba, torch, CuPy) as one of Numba's, without copying, for work on `stream`.

    An array whose interface names another stream than `stream` is waited for, as the CUDA array interface asks.
    """
    if not ON_GPU or hasattr(array, "copy_to_host"):
        return array
    array = library_of(array).plain(array)
    producer = array.__cuda_array_interface__.get("stream")
    ours = int(stream) if stream else 0
    return cuda.as_cuda_array(array, sync=producer not in (None, ours, _LEGACY if ours == 0 else ours))


def reinterpret(array: Any, dtype: Any) -> Any:
    """Return a NumPy or device `array` with its bits seen as another type of the same size; nothing is copied."""
    dtype = np.dtype(dtype)
    if isinstance(library_of(array), TorchLibrary):
        return array.view(getattr(sys.modules["torch"], dtype.name))
    if ON_GPU or isinstance(array, np.ndarray):
        return array.view(dtype)
    return type(array)(array._ary.view(dtype), array.stream)  # the simulator's array, around a NumPy one


_LEGACY = 1  # how the CUDA array interface writes the legacy default stream, whose handle is 0


class _Handle(NamedTuple):
    """A raw stream, in the form by which libraries hand streams to each other."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle  # the protocol's version, and the stream


def _cupy_stream(cupy: Any, handle: int) -> Any:
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14; it deprecates the other way
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle)


def _torch_stream(torch: Any, handle: int, device: Any) -> Any:
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)
