"""Tensor-core, copy and barrier instructions that Numba has no name for, as inline PTX; and NumPy models of them.

A *fragment* is a small matrix spread over the 32 lanes of a warp, a few registers in each; the tensor cores take
their operands in this form alone. Which lane holds which element is fixed by the instruction, and is the whole
difficulty of using it. So each layout stands here twice: in the docstring of the intrinsic, and as a function of
NumPy arrays (``*_model``, and `A_LAYOUT`, `B_LAYOUT`, `C_LAYOUT`) that runs anywhere and that the tests multiply
matrices with.

`mma.sync` m16n8k16 computes C (16 x 8, float32) += A (16 x 16) B (16 x 8), A and B bfloat16 or float16. With
``group = lane // 4`` and ``member = lane % 4``::

    A  register 0: row group      columns 2 member, 2 member + 1        (low half of the register first)
                1: row group + 8  the same columns
                2: row group      columns 2 member + 8, 2 member + 9
                3: row group + 8  those
    B  register 0: rows 2 member, 2 member + 1       column group
                1: rows 2 member + 8, 2 member + 9   column group
    C  register 0, 1: row group      columns 2 member, 2 member + 1
                2, 3: row group + 8  the same columns

`ldmatrix` fills such registers from shared memory: lane l names the address of 16 bytes, which are row l % 8 of
matrix l // 8, and register m of lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l // 4 of matrix m. With
``.trans`` it receives rows 2 (l % 4) and 2 (l % 4) + 1 of column l // 4. Eight rows that lie in different groups of
four banks are read in one go, which is why tiles are *swizzled*: see `tensor_core.py`.

The simulator has none of this: there, and only there, calling an intrinsic raises.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU

__all__ = [
    "A_LAYOUT",
    "B_LAYOUT",
    "C_LAYOUT",
    "cp_async_16",
    "cp_async_commit",
    "cp_async_wait",
    "fence_async",
    "ldmatrix_model",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "load_shared_4",
    "load_shared_float",
    "mbarrier_arrive",
    "mbarrier_done",
    "mbarrier_init",
    "mma_bf16",
    "mma_f16",
    "mma_model",
    "named_barrier",
    "pack_bf16",
    "pack_f16",
    "shared_address",
    "store_global_2",
    "store_shared",
    "store_shared_4",
]

_LANE = np.arange(32)


def _layout(rows: list[Any], columns: list[Any]) -> np.ndarray:
    """Stack per-element (row, column) of every lane -> [32, elements, 2]."""
    pairs = [np.stack(np.broadcast_arrays(r, c), -1) for r, c in zip(rows, columns, strict=True)]
    return np.stack(pairs, axis=1)


_GROUP, _MEMBER = _LANE // 4, _LANE % 4

A_LAYOUT = _layout(
    [_GROUP + 8 * (r % 2) for r in range(4) for _ in range(2)],
    [2 * _MEMBER + 8 * (r // 2) + half for r in range(4) for half in range(2)],
)
"""[32, 8, 2]: (row, column) in the 16 x 16 A of element e of each lane, half e % 2 of register e // 2."""

B_LAYOUT = _layout(
    [2 * _MEMBER + 8 * r + half for r in range(2) for half in range(2)],
    [_GROUP for _ in range(4)],
)
"""[32, 4, 2]: (row, column) in the 16 x 8 B of element e of each lane, half e % 2 of register e // 2."""

C_LAYOUT = _layout([_GROUP + 8 * (r // 2) for r in range(4)], [2 * _MEMBER + r % 2 for r in range(4)])
"""[32, 4, 2]: (row, column) in the 16 x 8 C of register e of each lane."""


def mma_model(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What `mma_bf16` and `mma_f16` do, for a whole warp.

    ``a`` [32, 8], ``b`` [32, 4]: the elements that each lane holds, register by register; ``c`` [32, 4]
    Returns the new ``c`` [32, 4], in the precision of the inputs.

    >>> ones = np.ones((32, 8))
    >>> mma_model(ones, ones[:, :4], np.zeros((32, 4)))[5]
    array([16., 16., 16., 16.])
    """
    matrix_a, matrix_b = np.zeros((16, 16)), np.zeros((16, 8))
    matrix_a[A_LAYOUT[..., 0], A_LAYOUT[..., 1]] = a
    matrix_b[B_LAYOUT[..., 0], B_LAYOUT[..., 1]] = b
    return c + (matrix_a @ matrix_b)[C_LAYOUT[..., 0], C_LAYOUT[..., 1]]


def ldmatrix_model(memory: np.ndarray, addresses: np.ndarray, *, trans: bool = False) -> np.ndarray:
    """What `ldmatrix_x4` and `ldmatrix_x4_trans` load, for a whole warp.

    ``memory``: shared memory as 16-bit elements; ``addresses`` [32]: the byte address that each lane hands in
    Returns [32, 8]: half e % 2 of register e // 2 of each lane.

    >>> memory = np.arange(4 * 64)                     # four 8 x 8 matrices, one after the other
    >>> ldmatrix_model(memory, 16 * np.arange(32))[5]  # row 1, columns 2 and 3 of each
    array([ 10,  11,  74,  75, 138, 139, 202, 203])
    >>> ldmatrix_model(memory, 16 * np.arange(32), trans=True)[5]
    array([ 17,  25,  81,  89, 145, 153, 209, 217])
    """
    if (addresses % 16).any():
        raise ValueError("addresses: ldmatrix needs multiples of 16 bytes")
    matrices = memory[addresses[:, None] // 2 + np.arange(8)].reshape(4, 8, 8)
    if trans:
        matrices = matrices.swapaxes(1, 2)
    pairs = [matrices[m, _GROUP, 2 * _MEMBER + half] for m in range(4) for half in range(2)]
    return np.stack(pairs, axis=1)


if ON_GPU:
    from llvmlite import ir

    from ddtree_numba.ptx import first_element, inline_ptx, intrinsic, types

    _U32, _F32 = ir.IntType(32), ir.FloatType()
    _ptx = functools.partial(inline_ptx, side_effect=True)  # most statements here are for what they do

    def _mma(kind: str) -> Any:
        template = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        signature = types.UniTuple(types.float32, 4)(*[types.uint32] * 6, *[types.float32] * 4)
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"  # C is read and written in the same registers
        return signature, _ptx(template, constraints, [_F32] * 4, side_effect=False)

    @intrinsic
    def mma_bf16(context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """C += A B of bfloat16 in float32: returns the four new C registers of this lane.

        PTX: ``mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0..d3}, {a0..a3}, {b0, b1}, {c0..c3}``. ``row.col``
        means that a register holds two neighbours of a row of A, and two neighbours of a column of B.
        """
        return _mma("bf16")

    @intrinsic
    def mma_f16(context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """C += A B of float16 in float32; else as `mma_bf16`."""
        return _mma("f16")

    def _ldmatrix(trans: str) -> Any:
        template = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        signature = types.UniTuple(types.uint32, 4)(types.uint32)
        return signature, _ptx(template, "=r,=r,=r,=r,r,~{memory}", [_U32] * 4)

    @intrinsic
    def ldmatrix_x4(context, address):
        """Load four 8 x 8 matrices of 16-bit elements: returns one register of each. `address`: this lane's row.

        PTX: ``ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r0..r3}, [address]``; layout: see the head of the file.
        """
        return _ldmatrix("")

    @intrinsic
    def ldmatrix_x4_trans(context, address):
        """Load four 8 x 8 matrices and transpose each: V, stored row by row, becomes a B operand.

        PTX: ``ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {r0..r3}, [address]``.
        """
        return _ldmatrix(".trans")

    @intrinsic
    def cp_async_16(context, shared, source, size):
        """Start copying 16 bytes from global memory to shared memory, past the registers; `size` 0 writes zeros.

        PTX: ``cp.async.cg.shared.global [shared], [source], 16, size``. ``.cg`` leaves the L1 cache out: the tile is
        read once by this multiprocessor. Bytes from `size` on become 0, and with 0 `source` is not read.
        """
        signature = types.void(types.uint32, types.uint64, types.uint32)
        template = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;"
        return signature, _ptx(template, "r,l,r,~{memory}", ir.VoidType())

    @intrinsic
    def cp_async_commit(context):
        """Close a group of copies. PTX: ``cp.async.commit_group``."""
        return types.void(), _ptx("cp.async.commit_group;", "~{memory}", ir.VoidType())

    @intrinsic
    def cp_async_wait(context):
        """Wait until every copy that this thread has started is there. PTX: ``cp.async.wait_all``.

        Other threads' copies are there after a barrier that follows.
        """
        return types.void(), _ptx("cp.async.wait_all;", "~{memory}", ir.VoidType())

    @intrinsic
    def named_barrier(context, name, threads):
        """Let `threads` threads (a multiple of 32) meet at barrier `name` (1..15; 0 is `syncthreads`).

        PTX: ``bar.sync name, threads``. A part of the block meets without the rest.
        """
        signature = types.void(types.uint32, types.uint32)
        return signature, _ptx("bar.sync $0, $1;", "r,r,~{memory}", ir.VoidType())

    @intrinsic
    def mbarrier_init(context, address, arrivals):
        """Make 8 bytes of shared memory a barrier whose phases each end after so many arrivals. PTX: ``mbarrier.init``.

        Unlike `named_barrier` nobody has to wait who arrives, and copies can arrive too.
        """
        template = "mbarrier.init.shared::cta.b64 [$0], $1;"
        return types.void(types.uint32, types.uint32), _ptx(template, "r,r,~{memory}", ir.VoidType())

    @intrinsic
    def mbarrier_arrive(context, address):
        """Arrive; what this thread has written is visible to who waits. PTX: ``mbarrier.arrive``."""
        template = "mbarrier.arrive.shared::cta.b64 _, [$0];"
        return types.void(types.uint32), _ptx(template, "r,~{memory}", ir.VoidType())

    @intrinsic
    def mbarrier_done(context, address, parity):
        """Wait a while for the phase of `parity` (0, 1, 0, ...) to end; returns 1 when it has, so that one asks again.

        PTX: ``mbarrier.try_wait.parity``, compute capability 9.0. What was copied and what others wrote before arriving
        is visible then.
        """
        signature = types.uint32(types.uint32, types.uint32)
        template = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }"
        return signature, _ptx(template, "=r,r,r,~{memory}", _U32)

    @intrinsic
    def fence_async(context):
        """Put what this thread has seen and written of shared memory before what the tensor cores read of it later.

        PTX: ``fence.proxy.async``: `wgmma` reads past the path of ordinary loads and stores.
        """
        return types.void(), _ptx("fence.proxy.async.shared::cta;", "~{memory}", ir.VoidType())

    def _pack(kind: str) -> Any:
        signature = types.uint32(types.float32, types.float32)
        return signature, _ptx(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "=r,f,f", _U32, side_effect=False)

    @intrinsic
    def pack_bf16(context, low, high):
        """Round two float32 to bfloat16 (ties to even) in one register. PTX: ``cvt.rn.bf16x2.f32 d, high, low``."""
        return _pack("bf16")

    @intrinsic
    def pack_f16(context, low, high):
        """Round two float32 to float16 in one register. PTX: ``cvt.rn.f16x2.f32 d, high, low``."""
        return _pack("f16")

    @intrinsic
    def load_shared_4(context, address):
        """Four float32 from shared memory at a multiple of 16 bytes. PTX: ``ld.shared.v4.f32``."""
        signature = types.UniTuple(types.float32, 4)(types.uint32)
        template = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
        return signature, _ptx(template, "=f,=f,=f,=f,r,~{memory}", [_F32] * 4)

    @intrinsic
    def store_shared_4(context, address, v0, v1, v2, v3):
        """Four float32 to shared memory at a multiple of 16 bytes. PTX: ``st.shared.v4.f32``."""
        signature = types.void(types.uint32, *[types.float32] * 4)
        return signature, _ptx("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f,~{memory}", ir.VoidType())

    @intrinsic
    def load_shared_float(context, address):
        """One float32 from shared memory. PTX: ``ld.shared.f32``."""
        return types.float32(types.uint32), _ptx("ld.shared.f32 $0, [$1];", "=f,r,~{memory}", _F32)

    @intrinsic
    def store_shared(context, address, value):
        """One 32-bit value (float32, or two packed halves) to shared memory. PTX: ``st.shared.b32``."""
        kind, register = (types.float32, "f") if isinstance(value, types.Float) else (types.uint32, "r")
        signature = types.void(types.uint32, kind)
        width = "f32" if register == "f" else "b32"
        return signature, _ptx(f"st.shared.{width} [$0], $1;", f"r,{register},~{{memory}}", ir.VoidType())

    @intrinsic
    def store_global_2(context, address, v0, v1):
        """Two float32 to global memory at a multiple of 8 bytes. PTX: ``st.global.v2.f32``."""
        signature = types.void(types.uint64, types.float32, types.float32)
        return signature, _ptx("st.global.v2.f32 [$0], {$1, $2};", "l,f,f,~{memory}", ir.VoidType())

    @intrinsic
    def shared_address(context, array):
        """The 32-bit address of a shared array's first element, counted from the start of shared memory.

        PTX: ``cvta.to.shared``. All addresses of a block fit 32 bits, and arithmetic on 64 costs twice.
        """
        convert = _ptx("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", "=r,l", _U32, side_effect=False)

        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return convert(target, builder, signature, [first_element(target, builder, signature, arguments)])

        return types.uint32(array), generate

else:

    def _missing(*arguments: Any) -> Any:
        raise NotImplementedError("tensor-core instructions need a GPU; Numba's simulator has none")

    mma_bf16 = mma_f16 = ldmatrix_x4 = ldmatrix_x4_trans = _missing
    mbarrier_init = mbarrier_arrive = mbarrier_done = fence_async = _missing
    cp_async_16 = cp_async_commit = cp_async_wait = named_barrier = _missing
    pack_bf16 = pack_f16 = load_shared_4 = store_shared_4 = load_shared_float = store_shared = _missing
    shared_address = store_global_2 = _missing
