"""The small pieces of both models: RMSNorm, SwiGLU and rotary embedding.

Activations are *columns*, [features, N]: a weight multiplies from the left as the checkpoint stores it, ``W @ x``.
BLAS does that a third faster for a handful of tokens than ``x @ W.T``, and the halves of a SwiGLU are whole blocks of
memory.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

__all__ = ["normalise", "product", "rope_table", "swiglu"]

_SMALL_PRODUCT = 1_000_000
"""Up to so many multiplications OpenBLAS's AVX-512 kernels read a matrix where it lies; beyond, they copy it first."""


@lru_cache(maxsize=256)
def _blocks(rows: int, inner: int, columns: int) -> int:
    """Return into how many equal blocks of rows a matrix is best cut: small products, but not tiny ones."""
    blocks = 1
    while rows // blocks * inner * columns > _SMALL_PRODUCT and rows % (2 * blocks) == 0 and rows // blocks >= 128:
        blocks *= 2
    return blocks


def product(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return ``weight @ x`` for a weight [rows, inner] and a few columns [inner, N].

    Copying a weight costs more than multiplying it by 8 columns, so BLAS gets it in blocks that it does not copy.
    """
    rows, inner = weight.shape
    blocks = _blocks(rows, inner, x.shape[1])
    if blocks == 1:
        return weight @ x
    return (weight.reshape(blocks, -1, inner) @ x).reshape(rows, -1)


@lru_cache(maxsize=16)
def _averaging_row(size: int) -> np.ndarray:
    return np.full((1, size), 1.0 / size, np.float32)


def normalise(x: np.ndarray, eps: float) -> np.ndarray:
    """Return RMSNorm of the columns of `x` [features, N] without its weight, which belongs to the next matrix.

    >>> normalise(np.array([[3.0], [4.0]], np.float32), 0.0).round(2).ravel().astype(str).tolist()
    ['0.85', '1.13']
    """
    scale = _averaging_row(len(x)) @ np.square(x)  # a product with BLAS beats a sum down the columns
    scale += np.float32(eps)
    return x / np.sqrt(scale, out=scale)


def swiglu(half_gate_and_up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up of rows [gate / 2; up].

    silu(g) = h (1 + tanh h) with h = g / 2: unlike exp(-g) it cannot overflow. The halving sits in the weights.
    """
    rows = len(half_gate_and_up) // 2
    half_gate, up = half_gate_and_up[:rows], half_gate_and_up[rows:]
    out = np.tanh(half_gate)
    out += np.float32(1)
    out *= half_gate
    out *= up
    return out


def rope_table(positions: int, width: int, theta: float) -> np.ndarray:
    """Return the rotation of every pair of a head of `width` at each position: complex64 [positions, width / 2].

    Multiplying a pair (a, b), read as a + bi, by its entry turns it by position * theta ** (-2 j / width).
    """
    angles = np.arange(positions)[:, None] * float(theta) ** (-np.arange(0, width, 2) / width)
    return np.exp(1j * angles).astype(np.complex64)
