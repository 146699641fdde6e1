"""The arrays that a model computes with, and how it multiplies: NumPy on the CPU, CuPy on a GPU.

The models are written once. NumPy's functions hand themselves over to CuPy when they meet its arrays (NEP 13 and
NEP 18), so little has to be told: where new arrays are made, what multiplies by a weight, and the functions of a row,
which are one kernel each on a GPU and not one for every operation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.engine import cupy_rows, row_math
from ddtree_numba.engine.packed_matrix import PackedMatrix

__all__ = ["ON_CPU", "Arithmetic", "LibraryMatrix", "MissingCuPyError", "arithmetic_of"]


class MissingCuPyError(ImportError):
    """CuPy is not installed; the message is the command that installs it."""


class LibraryMatrix:
    """A weight [outputs, inputs] that the array module's own product multiplies by: cuBLAS with CuPy.

    The order of a sum depends on how many rows there are, as the library pleases. So the logits of one token may
    differ in their last bits between passes of different sizes, which those of `PackedMatrix` never do.

    >>> double = LibraryMatrix(np, 2 * np.eye(3))
    >>> double(np.array([[1, 2, 3]], np.float32)).tolist()
    [[2.0, 4.0, 6.0]]
    """

    def __init__(self, xp: Any, weight: np.ndarray) -> None:
        """Take the array module `xp` and a NumPy `weight`, of any float type; it is kept there as float32."""
        self._transposed = xp.asarray(np.asarray(weight, np.float32)).T

    def __call__(self, x: Any) -> Any:
        """Return ``x @ weight.T`` of rows `x` [N, inputs] float32."""
        return x @ self._transposed


class Arithmetic(NamedTuple):
    """What a model needs to be told of the arrays it computes with."""

    xp: Any
    """Where its arrays are made: the module numpy or cupy."""
    matrix: Callable[[np.ndarray], Callable[[Any], Any]]
    """A NumPy weight [outputs, inputs] -> what multiplies rows [N, inputs] of `xp` by it."""
    normalise: Callable[[Any, float], Any] = row_math.normalise
    """RMSNorm, see `row_math.normalise`."""
    swiglu: Callable[[Any], Any] = row_math.swiglu
    """See `row_math.swiglu`."""
    rotate: Callable[[Any, Any], None] = row_math.rotate
    """See `row_math.rotate`."""

    def on_host(self, array: Any) -> np.ndarray:
        """Return an array of `xp` as NumPy's."""
        return array if type(array) is np.ndarray else np.asarray(self.xp.asnumpy(array))


ON_CPU = Arithmetic(np, PackedMatrix)
"""NumPy, with products that give a row the same result whatever rows stand beside it."""


def arithmetic_of(backend: str) -> Arithmetic:
    """Return what a model computes with where `backend` runs the stages; `MissingCuPyError` when that needs CuPy.

    In the simulator the kernels work on NumPy's arrays.
    """
    if backend != "gpu":
        return ON_CPU
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        reason = "CuPy is not installed" if error.name == "cupy" else f"CuPy can't be imported: {error}"
        extra = "pip install 'ddtree-numba[gpu13]' (gpu12 where the driver knows CUDA 12 alone)"
        raise MissingCuPyError(f"{reason}; {extra}") from None
    matrix = partial(LibraryMatrix, cupy)
    return Arithmetic(cupy, matrix, cupy_rows.normalise, cupy_rows.swiglu, cupy_rows.rotate)
