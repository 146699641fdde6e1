"""QLEN_ONLY_BITPACKING: one word a row, of 8, 16 or 32 bits, the narrowest that holds N."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_dtype, check_integer
from ddtree_numba.interop.launching import copy_words_kernel, for_each
from ddtree_numba.interop.visibility import check_rows

__all__ = ["pack_rows", "pack_rows_reference", "row_dtype", "unpack_rows", "unpack_rows_reference"]

_ROWS = (np.uint8, np.uint16, np.uint32)


def row_dtype(slots: int) -> np.dtype:
    """Return the narrowest word that holds a row; `ValueError` when none does.

    >>> [str(row_dtype(slots)) for slots in (8, 9, 16, 17, 32)]
    ['uint8', 'uint16', 'uint16', 'uint32', 'uint32']
    """
    for dtype in map(np.dtype, _ROWS):
        if slots <= 8 * dtype.itemsize:
            return dtype
    raise ValueError(f"N of ancestor_bits: got {slots} slots, needs at most 32 for QLEN_ONLY_BITPACKING")


def pack_rows_reference(ancestor_bits: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Return one word a row, [B * N]: uint8, uint16 or uint32, by default the narrowest that holds N.

    >>> pack_rows_reference(np.array([[[1], [3], [5]]], np.uint32))
    array([1, 3, 5], dtype=uint8)
    """
    batch, slots, dtype = _check_pack(ancestor_bits, dtype)
    return ancestor_bits.reshape(batch * slots).astype(dtype)


def pack_rows(ancestor_bits: Any, dtype: Any = None, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `pack_rows_reference` defines, from `copy_words_kernel`.

    ancestor_bits (B, N, 1 uint32): N up to 32.
    dtype (uint8, uint16 or uint32): a wider one than needed will do. `ValueError` when N is over its bits.
    out (B * N of that dtype): array to write into; stream: where to run.
    """
    batch, slots, dtype = _check_pack(ancestor_bits, dtype)
    transfer = Transfer(stream, {"ancestor_bits": ancestor_bits})
    rows = transfer.output("tree_mask", out, (batch * slots,), dtype)
    limit = np.uint32(np.iinfo(dtype).max)
    for_each(copy_words_kernel, batch * slots, transfer.stream)(
        transfer.input(ancestor_bits), limit, rows.reshape(batch, slots, 1)
    )
    return transfer.finish(rows)[0]


def _check_pack(bits: Any, dtype: Any) -> tuple[int, int, np.dtype]:
    batch, slots = check_rows(ArrayCheck(), bits)
    narrowest = row_dtype(slots)
    dtype = narrowest if dtype is None else check_dtype("dtype", dtype, _ROWS)
    if slots > 8 * dtype.itemsize:
        raise ValueError(f"N of ancestor_bits: got {slots} slots, needs at most {8 * dtype.itemsize} for {dtype}")
    return batch, slots, dtype


def unpack_rows_reference(rows: np.ndarray, slots: int) -> np.ndarray:
    """Return `ancestor_bits` [B, N, 1] uint32 of packed rows [B * N], uint8, uint16 or uint32; N = `slots`."""
    batch = _check_unpack(rows, slots)
    return rows.astype(np.uint32).reshape(batch, slots, 1)


def unpack_rows(rows: Any, slots: int, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `unpack_rows_reference` defines, from `copy_words_kernel`; `out` (B, N, 1 uint32)."""
    batch = _check_unpack(rows, slots)
    transfer = Transfer(stream, {"rows": rows})
    bits = transfer.output("ancestor_bits", out, (batch, slots, 1), np.uint32)
    for_each(copy_words_kernel, batch * slots, transfer.stream)(
        transfer.input(rows).reshape(batch, slots, 1), np.uint32(0xFFFFFFFF), bits
    )
    return transfer.finish(bits)[0]


def _check_unpack(rows: Any, slots: int) -> int:
    length = ArrayCheck()("rows", rows, "*", _ROWS)[0]
    check_integer("slots", slots, 1, 32)
    if length == 0 or length % slots:
        raise ValueError(f"rows: got {length} rows, needs a multiple of slots={slots}")
    return length // slots
