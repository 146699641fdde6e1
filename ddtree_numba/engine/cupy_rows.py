"""`row_math` for CuPy, in one or two launches where NumPy's functions would be six: they cost more than these rows do.

CuPy is imported at the first call.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

__all__ = ["normalise", "rotate", "swiglu"]


class _Kernels(NamedTuple):
    sum_of_squares: Any
    divide_by_root: Any
    swiglu: Any
    rotate: Any


@functools.cache
def _kernels() -> _Kernels:
    cupy = importlib.import_module("cupy")
    return _Kernels(
        cupy.ReductionKernel("float32 x", "float32 total", "x * x", "a + b", "total = a", "0", "ddtree_sum_of_squares"),
        cupy.ElementwiseKernel(
            "float32 x, float32 total, float32 scale, float32 eps",
            "float32 y",
            "y = x / sqrtf(total * scale + eps)",
            "ddtree_divide_by_root",
        ),
        cupy.ElementwiseKernel(
            "float32 half_gate, float32 up",
            "float32 y",
            "y = (tanhf(half_gate) + 1.0f) * half_gate * up",
            "ddtree_swiglu",
        ),
        cupy.ElementwiseKernel(
            "complex64 rotation",
            "float32 first, float32 second",
            """
            const float a = first, b = second;
            first = a * rotation.real() - b * rotation.imag();
            second = a * rotation.imag() + b * rotation.real();
            """,
            "ddtree_rotate",
        ),
    )


def normalise(x: Any, eps: float) -> Any:
    """See `row_math.normalise`."""
    kernels = _kernels()
    total = kernels.sum_of_squares(x, axis=x.ndim - 1, keepdims=True)
    return kernels.divide_by_root(x, total, np.float32(1.0 / x.shape[-1]), np.float32(eps))


def swiglu(half_gate_and_up: Any) -> Any:
    """See `row_math.swiglu`."""
    size = half_gate_and_up.shape[1] // 2
    return _kernels().swiglu(half_gate_and_up[:, :size], half_gate_and_up[:, size:])


def rotate(x: Any, rotation: Any) -> None:
    """See `row_math.rotate`."""
    _kernels().rotate(rotation, x[..., 0::2], x[..., 1::2])
