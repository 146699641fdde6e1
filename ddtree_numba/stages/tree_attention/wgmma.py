"""Warpgroup matrix instructions of Hopper (compute capability 9.0), as inline PTX; and NumPy models of their layouts.

`wgmma` multiplies for a *warpgroup*, four warps that stand side by side: C (64 x N, float32) += A (64 x 16) B (16 x N).
B always and A if one likes are read from shared memory by the tensor cores themselves: no fragments, no `ldmatrix`, no
registers but the accumulators. In exchange three things must be right.

*Where operands lie.* A matrix in shared memory is made of blocks of 64 x 64 16-bit elements, 8 KB, which begin at
multiples of 1024 bytes. A row of a block is 128 bytes, eight chunks of 16; chunk c of row r lies at place c ^ (r % 8)
(`swizzled`), so that eight rows of one chunk are in eight different groups of banks. A 64-bit *descriptor* tells the
instruction where a block begins and how far it is to the next one (`descriptor`).

*Which way they lie.* K is used both ways. For scores its rows are the columns of B, and the inner dimension runs along
a row: "K-major", as Q is. For values the inner dimension is the keys and runs down the rows: "MN-major", which 16-bit
formats may be, at the price of a bit in the instruction. So a tile that was copied once serves both products.

*When.* The instructions run on by themselves. `fence_scores` or `fence_values` before the first says that registers
are ready, `wgmma_commit` closes a group, and until `wait_for_scores` or `wait_for_values` returns nobody may touch its
accumulators. Shared memory that threads have written becomes visible to the tensor cores by `fence_async`.

Accumulators are those of `mma.sync`, 16 rows for each of the four warps: element e of lane l is row l / 4 + 8 (e / 2 %
2), column 8 (e / 4) + 2 (l % 4) + e % 2 (`accumulator_layout`), and so is A when it comes from registers.

The simulator has none of this: there, and only there, calling an intrinsic raises.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU

__all__ = [
    "BLOCK_BYTES",
    "accumulator_layout",
    "copies_arrive",
    "descriptor",
    "fence_scores",
    "fence_values",
    "fewer_registers",
    "more_registers",
    "operand_model",
    "score_from_registers",
    "score_from_shared",
    "swizzled",
    "value_from_registers",
    "value_from_shared",
    "wait_for_scores",
    "wait_for_values",
    "wgmma_commit",
]

BLOCK_BYTES = 8192
"""Bytes of a block of 64 x 64 16-bit elements."""

_GROUP_BYTES = 1024  # eight rows of a block
_SWIZZLE_128 = 1 << 62  # the descriptor's bits for rows of 128 bytes


def swizzled(row, chunk):
    """Byte at which 16-byte `chunk` (0..7) of `row` (0..63) lies in a block.

    >>> swizzled(0, 3), swizzled(1, 3), swizzled(9, 3)
    (48, 160, 1184)
    """
    return row * 128 + ((chunk ^ (row & 7)) << 4)


def descriptor(address, along_n):
    """The 64-bit description of an operand that begins at shared `address`, a multiple of 16 bytes.

    ``along_n`` 0: the inner dimension runs along the rows (K-major); 1: down the rows, and further columns are in
    further blocks (MN-major). Bits 0-13: address / 16; 16-29: bytes to the next block of columns / 16, which K-major
    operands do not use; 32-45: bytes to the next eight rows / 16; 62-63: the swizzle.
    """
    across = np.uint64(BLOCK_BYTES >> 4) if along_n else np.uint64(1)
    start = np.uint64((address & np.uint32(0x3FFFF)) >> np.uint32(4))
    return start | (across << np.uint64(16)) | np.uint64(((_GROUP_BYTES >> 4) << 32) | _SWIZZLE_128)


def accumulator_layout(columns: int) -> np.ndarray:
    """(row, column) in the 64 x `columns` C of accumulator e of each thread of a warpgroup: [128, columns / 2, 2]."""
    thread, e = np.arange(128)[:, None], np.arange(columns // 2)
    lane = thread % 32
    row = 16 * (thread // 32) + lane // 4 + 8 * (e // 2 % 2)
    return np.stack(np.broadcast_arrays(row, 8 * (e // 4) + 2 * (lane % 4) + e % 2), axis=-1)


def operand_model(memory: np.ndarray, described: int, columns: int, along_n: bool) -> np.ndarray:
    """What `wgmma` reads where a descriptor says: [columns, 16], the inner dimension last.

    ``memory``: shared memory as 16-bit elements; ``described``: a `descriptor`; ``columns``: rows of A or columns of B;
    ``along_n``: as in `descriptor`

    >>> memory = np.zeros(8192, np.uint16)
    >>> memory[swizzled(9, 3) // 2] = 7                                  # row 9, columns 24 .. 31 begin here
    >>> int(operand_model(memory, int(descriptor(np.uint32(32), 0)), 64, False)[9, 8])  # columns 16 .. 31 are asked for
    7
    """
    if described >> 62 != 1:
        raise ValueError(f"descriptor: got {described:#x}, needs a swizzle of 128 bytes")
    start = (described & 0x3FFF) << 4
    to_block, to_rows = ((described >> 16) & 0x3FFF) << 4, ((described >> 32) & 0x3FFF) << 4
    n, k = np.arange(columns)[:, None], np.arange(16)
    if along_n:
        place = start + n // 64 * to_block + n % 64 * 2 + k // 8 * to_rows + k % 8 * 128
    else:
        place = start + n // 8 * to_rows + n % 8 * 128 + k * 2
    return memory[(place ^ ((place >> 7 & 7) << 4)) // 2]


if ON_GPU:
    from llvmlite import ir

    from ddtree_numba.ptx import inline_ptx, intrinsic, types

    _U32, _F32 = ir.IntType(32), ir.FloatType()
    _ptx = functools.partial(inline_ptx, side_effect=True)

    def _through(count: int, statement: str, operands: str = "") -> Any:
        """Return the code generator of a statement that `count` accumulators, a local array, pass through.

        So no use of them is moved over it. They are $0, $1, ... coming out and as many going in; `operands` are the
        register classes of the intrinsic's other arguments, which follow.
        """
        tied = [str(i) for i in range(count)]
        constraints = ",".join(["=f"] * count + tied + ([operands] if operands else []) + ["~{memory}"])

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            places = [builder.gep(data, [ir.Constant(_U32, i)]) for i in range(count)]
            inputs = [builder.load(place) for place in places] + list(arguments[1:])
            result = ir.LiteralStructType([_F32] * count)
            function = ir.FunctionType(result, [value.type for value in inputs])
            value = builder.call(ir.InlineAsm(function, statement, constraints, True), inputs)
            for i, place in enumerate(places):
                builder.store(builder.extract_value(value, i), place)
            return context.get_dummy_value()

        return generate

    def _multiply(columns: int, kind: str, a_registers: bool, b_down: int) -> Any:
        """Return the code generator of one `wgmma` of 64 x `columns` on a local array of accumulators."""
        count = columns // 2
        numbers = ", ".join(f"${i}" for i in range(count))
        first = 2 * count  # the operands after the accumulators, which count twice: going in and coming out
        a = "{{{}, {}, {}, {}}}".format(*(f"${first + i}" for i in range(4))) if a_registers else f"${first}"
        b, add = (f"${first + 4}", f"${first + 5}") if a_registers else (f"${first + 1}", f"${first + 2}")
        transposes = f"{b_down}" if a_registers else f"0, {b_down}"
        template = (
            f"{{ .reg .pred p; setp.ne.u32 p, {add}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
            f"{{{numbers}}}, {a}, {b}, p, 1, 1, {transposes}; }}"
        )
        return _through(count, template, "r,r,r,r,l,r" if a_registers else "l,l,r")

    def _make_score_from_shared(kind: str) -> Any:
        @intrinsic
        def score_from_shared(context, c, a, b, add):
            """C (64 x 64, a local array of 32 float32) += A B, both in shared memory and K-major; `add` 0: C = A B.

            PTX: ``wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {c0..c31}, a, b, add, 1, 1, 0, 0``.
            """
            signature = types.void(c, types.uint64, types.uint64, types.uint32)
            return signature, _multiply(64, kind, a_registers=False, b_down=0)

        return score_from_shared

    def _make_score_from_registers(kind: str) -> Any:
        @intrinsic
        def score_from_registers(context, c, a0, a1, a2, a3, b, add):
            """As `score_from_shared`, with A in registers, laid out as A of `mma.sync`."""
            signature = types.void(c, *[types.uint32] * 4, types.uint64, types.uint32)
            return signature, _multiply(64, kind, a_registers=True, b_down=0)

        return score_from_registers

    def _make_value_from_shared(kind: str) -> Any:
        @intrinsic
        def value_from_shared(context, c, a, b, add):
            """C (64 x 256, a local array of 128 float32) += A B, A K-major and B MN-major in shared memory.

            PTX: ``wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {c0..c127}, a, b, add, 1, 1, 0, 1``.
            """
            signature = types.void(c, types.uint64, types.uint64, types.uint32)
            return signature, _multiply(256, kind, a_registers=False, b_down=1)

        return value_from_shared

    def _make_value_from_registers(kind: str) -> Any:
        @intrinsic
        def value_from_registers(context, c, a0, a1, a2, a3, b, add):
            """As `value_from_shared`, with A in registers, laid out as A of `mma.sync`."""
            signature = types.void(c, *[types.uint32] * 4, types.uint64, types.uint32)
            return signature, _multiply(256, kind, a_registers=True, b_down=1)

        return value_from_registers

    score_from_shared, score_from_registers, value_from_shared, value_from_registers = (
        {kind: make(kind) for kind in ("bf16", "f16")}
        for make in (
            _make_score_from_shared,
            _make_score_from_registers,
            _make_value_from_shared,
            _make_value_from_registers,
        )
    )

    @intrinsic
    def fence_scores(context, c):
        """Let the products that follow see what this warp has put into the 32 accumulators. PTX: ``wgmma.fence``."""
        return types.void(c), _through(32, "wgmma.fence.sync.aligned;")

    @intrinsic
    def fence_values(context, c):
        """As `fence_scores`, for 128 accumulators."""
        return types.void(c), _through(128, "wgmma.fence.sync.aligned;")

    @intrinsic
    def wgmma_commit(context):
        """Close a group of products. PTX: ``wgmma.commit_group``."""
        return types.void(), _ptx("wgmma.commit_group.sync.aligned;", "~{memory}", ir.VoidType())

    @intrinsic
    def wait_for_scores(context, c):
        """Wait until all products that this warp has started are done; `c`: the 32 accumulators.

        PTX: ``wgmma.wait_group 0``. The accumulators pass through the statement, so that no use is moved before it.
        """
        return types.void(c), _through(32, "wgmma.wait_group.sync.aligned 0;")

    @intrinsic
    def wait_for_values(context, c):
        """As `wait_for_scores`, for 128 accumulators."""
        return types.void(c), _through(128, "wgmma.wait_group.sync.aligned 0;")

    @intrinsic
    def copies_arrive(context, barrier):
        """Arrive at an mbarrier once all `cp.async` copies that this thread has started are there.

        PTX: ``cp.async.mbarrier.arrive.noinc``: one of the arrivals that the barrier was made for.
        """
        template = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
        return types.void(types.uint32), _ptx(template, "r,~{memory}", ir.VoidType())

    @intrinsic
    def more_registers(context):
        """Take registers, 232 for each thread of this warpgroup, and wait until others have given them away.

        PTX: ``setmaxnreg.inc``. The kernel starts with as many for all, 168 for 384 threads (``launch_bounds``).
        """
        return types.void(), _ptx("setmaxnreg.inc.sync.aligned.u32 232;", "~{memory}", ir.VoidType())

    @intrinsic
    def fewer_registers(context):
        """Give registers away: 40 are left for each thread of this warpgroup. PTX: ``setmaxnreg.dec``."""
        return types.void(), _ptx("setmaxnreg.dec.sync.aligned.u32 40;", "~{memory}", ir.VoidType())

else:

    def _missing(*arguments: Any) -> Any:
        raise NotImplementedError("warpgroup instructions need a GPU; Numba's simulator has none")

    score_from_shared = score_from_registers = value_from_shared = value_from_registers = dict.fromkeys(
        ("bf16", "f16"), _missing
    )
    fence_scores = fence_values = wgmma_commit = wait_for_scores = wait_for_values = copies_arrive = _missing
    more_registers = fewer_registers = _missing
