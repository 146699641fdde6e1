"""Products of a matrix with a handful of rows, compiled by Numba for the CPU.

A draft tree is 8 to 64 rows. BLAS is not made for so few: it copies the matrix into its own order in every call, which
costs more than the arithmetic, and takes another path for a single row. Two things are different here:

- A matrix is packed once: 16 outputs side by side for each input, so that a row's number multiplies 16 weights at once.
  The running sums of a tile (some outputs, some rows) stay in registers; each weight that is read serves all of them.
- Every output is the same chain of fused multiply-adds over the inputs, first to last, whatever the tile and however
  many rows there are. So a row's result does not depend on the rows beside it, to the last bit: a node in a tree and
  the same token decoded alone get equal logits, not just nearly equal ones.

Numba's loops alone would keep the sums in memory, so a tile is written as LLVM vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "PackedMatrix", "multiply_panels", "padded"]

LANES = 16
"""Outputs of a panel: numbers in one AVX-512 register (two of AVX2, four of NEON)."""


class PackedMatrix:
    """A weight [outputs, inputs], packed to be multiplied by a few rows.

    >>> double = PackedMatrix(2 * np.eye(3, dtype=np.float32))
    >>> double(np.array([[1, 2, 3]], np.float32)).tolist()
    [[2.0, 4.0, 6.0]]
    """

    def __init__(self, weight: np.ndarray) -> None:
        """Pack `weight` [outputs, inputs], of any float type, as float32; it may be dropped afterwards."""
        self.outputs, inputs = weight.shape
        panels = np.zeros((padded(self.outputs), inputs), np.float32)
        panels[: self.outputs] = weight
        self._panels = np.ascontiguousarray(panels.reshape(-1, LANES, inputs).transpose(0, 2, 1))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return ``x @ weight.T`` of rows `x` [N, inputs] float32: a view of a wider array if outputs were padded."""
        return multiply_panels(self._panels, x)[:, : self.outputs]


def padded(outputs: int) -> int:
    """Return `outputs` rounded up to a whole number of pairs of panels.

    >>> [padded(outputs) for outputs in (1, 32, 33)]
    [32, 32, 64]
    """
    return -(-outputs // (2 * LANES)) * 2 * LANES


def multiply_panels(panels: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return [rows, panels * LANES] float32 from `panels` [panels, inputs, LANES] and `x` [rows, inputs].

    An even number of panels; any strides, but the LANES of a panel side by side. Inputs at least 1.
    """
    out = np.empty((len(x), len(panels) * LANES), np.float32)
    _compiled()(panels, x, out)
    return out


def _make_tile(panel_count: int, row_count: int) -> Callable[..., None]:
    """Return the product of `panel_count` panels with `row_count` rows, for Numba code.

    Its arguments are addresses and steps in bytes: of the panels (from panel to panel, from input to input), of the
    rows (from row to row, from input to input), of the outputs (from row to row), then the number of inputs.
    """

    @intrinsic
    def tile(typing_context, panel, panel_step, panel_inner, row, row_step, row_inner, out, out_step, inputs):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile(builder, panel_count, row_count, *arguments)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 9), emit

    return tile


def _emit_tile(
    builder: ir.IRBuilder,
    panel_count: int,
    row_count: int,
    panel: Any,
    panel_step: Any,
    panel_inner: Any,
    row: Any,
    row_step: Any,
    row_inner: Any,
    out: Any,
    out_step: Any,
    inputs: Any,
) -> None:
    number, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(number, LANES)
    no_vector = ir.Constant(vector, ir.Undefined)
    first_lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    # Fused where the CPU can, and then everywhere: one rounding for each product and sum.
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{LANES}f32"
    )

    def address(base: Any, step: Any, count: Any) -> Any:
        return builder.add(base, builder.mul(step, count))

    def constant(value: int) -> Any:
        return ir.Constant(index, value)

    before, loop, after = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("done")
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(index)
    k.add_incoming(constant(0), before)
    tile = [(p, n) for p in range(panel_count) for n in range(row_count)]
    sums = {each: builder.phi(vector) for each in tile}
    weights = []
    for p in range(panel_count):
        at = address(address(panel, panel_step, constant(p)), panel_inner, k)
        weights.append(builder.load(builder.inttoptr(at, vector.as_pointer()), align=4))
    values = []
    for n in range(row_count):
        at = address(address(row, row_step, constant(n)), row_inner, k)
        value = builder.load(builder.inttoptr(at, number.as_pointer()), align=4)
        lane = builder.insert_element(no_vector, value, ir.Constant(ir.IntType(32), 0))
        values.append(builder.shuffle_vector(lane, no_vector, first_lane))
    results = {(p, n): builder.call(fma, [weights[p], values[n], sums[p, n]]) for p, n in tile}
    for each in tile:
        sums[each].add_incoming(ir.Constant(vector, [0.0] * LANES), before)
        sums[each].add_incoming(results[each], loop)
    next_k = builder.add(k, constant(1))
    k.add_incoming(next_k, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, inputs), loop, after)

    builder.position_at_end(after)
    for p, n in tile:
        at = builder.add(address(out, out_step, constant(n)), constant(4 * LANES * p))
        builder.store(results[p, n], builder.inttoptr(at, vector.as_pointer()), align=4)


# A multiply-add takes four cycles and two can start in each, so a tile needs eight registers of sums or more to keep a
# CPU busy. It must fit into the 32 registers of AVX-512 (one a panel and row), or the 16 of AVX2 (two a panel and row).
_WIDE = bool(get_host_cpu_features().get("avx512f"))
_PANELS, _ROWS, _PANELS_OF_ONE_ROW = (2, 8, 8) if _WIDE else (1, 4, 4)
_tile = _make_tile(_PANELS, _ROWS)
_tile_and_a_row = _make_tile(_PANELS, _ROWS + 1)  # a root and 2^n nodes leave one row over, which shares the last tile
_half_tile = _make_tile(_PANELS, _ROWS // 2)
_long_row = _make_tile(_PANELS_OF_ONE_ROW, 1)
_short_row = _make_tile(_PANELS, 1)


def _multiply(panels: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` [rows, panels * 16]; compiled by Numba."""
    count, inputs = panels.shape[0], panels.shape[1]
    rows = x.shape[0]
    p, ps, pk = panels.ctypes.data, panels.strides[0], panels.strides[1]
    r, rs, rk = x.ctypes.data, x.strides[0], x.strides[1]
    o, os, ol = out.ctypes.data, out.strides[0], 64  # 64: bytes of a panel's outputs
    tiles, rest = rows // _ROWS, rows % _ROWS
    if tiles > 0 and rest == 1:
        tiles, rest = tiles - 1, _ROWS + 1
    first = tiles * _ROWS
    for i in range(0, count, _PANELS):  # these panels stay in the first cache while all rows pass
        for n in range(0, first, _ROWS):
            _tile(p + i * ps, ps, pk, r + n * rs, rs, rk, o + n * os + i * ol, os, inputs)
        if rest > _ROWS:
            _tile_and_a_row(p + i * ps, ps, pk, r + first * rs, rs, rk, o + first * os + i * ol, os, inputs)
        elif rest >= _ROWS // 2:
            _half_tile(p + i * ps, ps, pk, r + first * rs, rs, rk, o + first * os + i * ol, os, inputs)
    if rest > _ROWS:
        first = rows
    elif rest >= _ROWS // 2:
        first += _ROWS // 2
    long = count // _PANELS_OF_ONE_ROW * _PANELS_OF_ONE_ROW
    for n in range(first, rows):
        for i in range(0, long, _PANELS_OF_ONE_ROW):
            _long_row(p + i * ps, ps, pk, r + n * rs, rs, rk, o + n * os + i * ol, os, inputs)
        for i in range(long, count, _PANELS):
            _short_row(p + i * ps, ps, pk, r + n * rs, rs, rk, o + n * os + i * ol, os, inputs)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Compile at the first product (a second or so); keep the result on disk for the next process if possible."""
    if getattr(
        config, "DISABLE_JIT", False
    ):  # for a debugger: tiles can't run as Python, and BLAS gives the same but for rounding
        return lambda panels, x, out: np.matmul(x, panels.swapaxes(1, 2).reshape(-1, x.shape[1]).T, out=out)
    signature = types.void(types.float32[:, :, :], types.float32[:, :], types.float32[:, ::1])
    try:
        return njit(signature, cache=True)(_multiply)
    except Exception:  # no folder or no room to write to, or a damaged file: unpickling that raises anything
        return njit(signature)(_multiply)
