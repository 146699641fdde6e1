"""GPU or simulator, decided before Numba loads; the only door to `numba.cuda`.

The choice, in this order:

1. The user's ``NUMBA_ENABLE_CUDASIM`` wins: ``1`` means the simulator, ``0`` means the GPU.
2. A CUDA driver with a device, and numba-cuda installed: the GPU.
3. Everything else: Numba's CUDA simulator, which runs each GPU thread as a Python thread. It is slow, it needs
   nothing, and it is enough to learn from and to test against.

A driver that is there but broken is an error, never a silent fall-back: whoever has a GPU wants to hear of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from typing import Any

import numpy as np

__all__ = [
    "BACKEND",
    "ON_GPU",
    "as_stream",
    "block_threads",
    "cuda",
    "describe",
    "is_device_array",
]

_DRIVER_LIBRARIES = {"win32": ("nvcuda.dll",), "darwin": ()}.get(sys.platform, ("libcuda.so.1", "libcuda.so"))
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: the driver works and has nothing to drive
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY: a toolkit's link-time stand-in, not a driver


def _load_driver() -> Any | None:
    for name in _DRIVER_LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _driver_version() -> int | None:
    """Return the CUDA version that the driver speaks (13000 for 13.0), None without a device.

    Raises `RuntimeError` when a driver is there but does not work.
    """
    driver = _load_driver()
    if driver is None:
        return None
    error = driver.cuInit(0)
    if error in (_NO_DEVICE, _STUB_LIBRARY):
        return None
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    error = error or driver.cuDeviceGetCount(ctypes.byref(count)) or driver.cuDriverGetVersion(ctypes.byref(version))
    if error:
        raise RuntimeError(
            f"the CUDA driver is installed but answers error {error}; repair it (does nvidia-smi work?), "
            "or set NUMBA_ENABLE_CUDASIM=1 to use the simulator"
        )
    return version.value if count.value else None


def _choose() -> str:
    asked = os.environ.get("NUMBA_ENABLE_CUDASIM", "").strip()
    if asked:
        return "gpu" if asked == "0" else "simulator"
    version = _driver_version()
    if version is None:
        return "simulator"
    if importlib.util.find_spec("numba_cuda") is None:
        extra = "cu12" if version < 13000 else "cu13"
        print(
            f"ddtree_numba: a GPU is here but numba-cuda is not, so kernels run in the simulator; "
            f"pip install 'ddtree-numba[{extra}]' uses the GPU",
            file=sys.stderr,
        )
        return "simulator"
    return "gpu"


def _enter_simulator() -> None:
    """Tell Numba to simulate; it reads the variable once, when it is first imported."""
    numba = sys.modules.get("numba")
    if numba is not None and not numba.config.ENABLE_CUDASIM:
        raise ImportError(
            "numba was imported before ddtree_numba and there is no usable GPU: "
            "import ddtree_numba first, or set NUMBA_ENABLE_CUDASIM=1"
        )
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    # Simulated threads hand the interpreter to each other at every barrier: the default interval of 5 ms
    # makes a barrier of 8 to 64 threads cost 11-22 ms, this one 2-6 ms.
    sys.setswitchinterval(1e-4)


BACKEND: str = _choose()
"""``"gpu"`` or ``"simulator"``: where kernels run in this process."""

ON_GPU: bool = BACKEND == "gpu"
"""Whether kernels run on a GPU in this process."""

if ON_GPU:
    # Small launches are what this project is about; Numba would warn at every one of them.
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
else:
    _enter_simulator()

import numba.cuda as _numba_cuda  # noqa: E402  (the decision above must come first)

cuda: Any = _numba_cuda
"""`numba.cuda`, on the GPU or simulated. (Typed as Any: inside a kernel its names mean the device's, not Python's.)"""

if not ON_GPU:
    from numba.cuda.simulator.kernel import _get_kernel_context
    from numba.cuda.simulator.kernelapi import FakeCUDAShared, numpy_support, types

    _array_of_numba = FakeCUDAShared.array

    def _one_array_for_all_threads(self: Any, shape: Any, dtype: Any, **options: Any) -> Any:
        """Numba looks a shared array up by its source line and makes it if it is not there.

        Two threads that do so at the same moment each got one of their own, and the kernel computed with what lay
        there: 2 of 32000 arrays on a busy machine. `setdefault` is one step for all threads.
        """
        if shape == 0 or options:  # dynamic shared memory, which exists before the threads do
            return _array_of_numba(self, shape, dtype, **options)
        line = sys._getframe(1)
        new = np.empty(shape, numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
        return self._allocations.setdefault((line.f_code.co_filename, line.f_lineno), new)

    FakeCUDAShared.array = _one_array_for_all_threads  # type: ignore[method-assign]

    def _of_running_kernel(name: str) -> Any:
        kernel = _get_kernel_context()
        if kernel is None:
            raise AttributeError(f"module 'numba.cuda' has no attribute {name!r}")
        return getattr(kernel, name)

    # The simulator gives a device function its threadIdx, barriers and so on by replacing the name `cuda` in that
    # function's module while a thread is inside. All threads of a block share the module, and one on its way out
    # takes the replacement from one that has just come in: "module 'numba.cuda' has no attribute 'threadIdx'", now
    # and then. With this, the module that they fall back on knows those names too.
    cuda.__getattr__ = _of_running_kernel


def block_threads(gpu: int, simulator: int = 8) -> int:
    """Return the threads of a block: `gpu` on a GPU, `simulator` where each thread is a Python thread.

    Kernels use block-stride loops, so any power of two is right and only the speed differs.
    """
    return gpu if ON_GPU else simulator


def is_device_array(array: object) -> bool:
    """Tell whether `array` lives on the device: Numba's own arrays and all with ``__cuda_array_interface__``."""
    if not ON_GPU:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return isinstance(array, FakeCUDAArray)
    try:
        return hasattr(array, "__cuda_array_interface__")
    except (
        TypeError,
        RuntimeError,
    ):  # torch raises for what the interface can't carry: bfloat16, tensors with gradients
        return True


def as_stream(stream: Any) -> Any:
    """Return `stream` as Numba takes it.

    It may be a Numba stream, one of torch, CuPy or ``cuda.core``, a raw handle, or None for the default stream.
    """
    if stream is None or hasattr(stream, "auto_synchronize"):  # one of Numba's own
        return stream or 0
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if hasattr(handle, "__cuda_stream__"):
        handle = handle.__cuda_stream__()[1]
    if not isinstance(handle, int):
        raise TypeError(f"stream: got {type(stream).__name__}, needs a stream (Numba, torch, CuPy, cuda.core)")
    if not handle or not ON_GPU:
        return 0
    external = cuda.external_stream(int(handle))
    # Result arrays are bound to the stream: a caller's stream object that is let go must not take it from them.
    external.owner = stream
    return external


def describe() -> str:
    """Return one line that says where kernels run, for the CLI, the test header and the tutorials."""
    if not ON_GPU:
        return "simulator (Numba's CUDA simulator: needs no GPU; its timings mean nothing)"
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    major, minor = device.compute_capability
    return f"gpu ({name}, compute capability {major}.{minor})"
