"""The small pieces of both models: RMSNorm, SwiGLU and rotary embedding, on rows of numbers, [N, features].

Each treats every row by itself, in the same order whatever N is. Rows are arrays of NumPy or CuPy.
"""

from __future__ import annotations

import numpy as np

__all__ = ["normalise", "rope_table", "rotate", "swiglu"]


def normalise(x: np.ndarray, eps: float) -> np.ndarray:
    """Return RMSNorm along the last axis of `x` without its weight, which belongs to the next matrix.

    >>> normalise(np.array([[3.0, 4.0]], np.float32), 0.0).round(2).astype(str).tolist()
    [['0.85', '1.13']]
    """
    scale = np.square(x).sum(axis=-1, keepdims=True)
    scale *= np.float32(1.0 / x.shape[-1])
    scale += np.float32(eps)
    return x / np.sqrt(scale, out=scale)


def swiglu(half_gate_and_up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up of rows that hold gate / 2 and then up.

    silu(g) = h (1 + tanh h) with h = g / 2: unlike exp(-g) it cannot overflow. The halving sits in the weights.
    """
    size = half_gate_and_up.shape[1] // 2
    half_gate, up = half_gate_and_up[:, :size], half_gate_and_up[:, size:]
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


def rotate(x: np.ndarray, rotation: np.ndarray) -> None:
    """Turn neighbouring pairs along the last axis of `x` in place, by `rotation` (complex, half as wide).

    >>> x = np.array([[1, 0, 3, 2]], np.float32)
    >>> rotate(x, np.array([[1j, -1]], np.complex64))
    >>> x.tolist()
    [[0.0, 1.0, -3.0, -2.0]]
    """
    if type(x) is np.ndarray:
        pairs = x.view(np.complex64)
        pairs *= rotation
        return
    first, second = x[..., 0::2], x[..., 1::2]  # CuPy sees a slice as another type only when it is contiguous
    turned = first * rotation.real - second * rotation.imag
    second[...] = first * rotation.imag + second * rotation.real
    first[...] = turned
