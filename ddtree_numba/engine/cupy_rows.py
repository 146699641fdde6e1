"""`row_math` for CuPy, in one or two launches where NumPy's functions would be six: they cost more than these rows do.

Needs CuPy, which is imported here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

__all__ = ["normalise", "rotate", "swiglu"]

_sum_of_squares = cupy.ReductionKernel(
    "float32 x", "float32 total", "x * x", "a + b", "total = a", "0", "ddtree_sum_of_squares"
)
_divide_by_root = cupy.ElementwiseKernel(
    "float32 x, float32 total, float32 scale, float32 eps",
    "float32 y",
    "y = x / sqrtf(total * scale + eps)",
    "ddtree_divide_by_root",
)
_swiglu = cupy.ElementwiseKernel(
    "float32 half_gate, float32 up", "float32 y", "y = (tanhf(half_gate) + 1.0f) * half_gate * up", "ddtree_swiglu"
)
_rotate = cupy.ElementwiseKernel(
    "complex64 rotation",
    "float32 first, float32 second",
    """
    const float a = first, b = second;
    first = a * rotation.real() - b * rotation.imag();
    second = a * rotation.imag() + b * rotation.real();
    """,
    "ddtree_rotate",
)


def normalise(x: Any, eps: float) -> Any:
    """See `row_math.normalise`."""
    total = _sum_of_squares(x, axis=x.ndim - 1, keepdims=True)
    return _divide_by_root(x, total, np.float32(1.0 / x.shape[-1]), np.float32(eps))


def swiglu(half_gate_and_up: Any) -> Any:
    """See `row_math.swiglu`."""
    size = half_gate_and_up.shape[1] // 2
    return _swiglu(half_gate_and_up[:, :size], half_gate_and_up[:, size:])


def rotate(x: Any, rotation: Any) -> None:
    """See `row_math.rotate`."""
    _rotate(rotation, x[..., 0::2], x[..., 1::2])
