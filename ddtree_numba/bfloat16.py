"""bfloat16 as its bits.

NumPy has no bfloat16, so an array of them travels as `uint16`: a bfloat16 is the upper half of the float32 with
the same value.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.backend import cuda

__all__ = ["bfloat16_to_float32", "from_bfloat16", "to_bfloat16"]


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 `values` (any shape) to the nearest bfloat16, ties to even; return their bits as uint16.

    NaN stays NaN. Other numbers are made float32 first; what is no number raises `ValueError` or `TypeError`.

    >>> [hex(bits) for bits in to_bfloat16(np.array([1.0, -2.0, 1.00390625], np.float32)).tolist()]
    ['0x3f80', '0xc000', '0x3f80']
    """
    bits = np.asarray(values, dtype=np.float32, order="C").view(np.uint32)
    # Half of the dropped range, less one when the kept part is even: a tie then rounds to even.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # The addition would carry a NaN's payload into its sign; a quiet NaN keeps it one.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values (same shape) of bfloat16 `bits` (uint16), exactly: they are a float32's upper half.

    Raises `TypeError` for another dtype.

    >>> from_bfloat16(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    bits = np.asarray(bits)
    if bits.dtype != np.uint16:
        raise TypeError(f"bits: got {bits.dtype}, needs uint16")
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@cuda.jit(device=True)
def bfloat16_to_float32(bits):
    """Return the float32 value of one bfloat16, given as its uint16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
