"""GPU instructions that Numba has no name for, as inline PTX, each with a stand-in for the simulator where one exists.

An intrinsic is a function whose body is one PTX statement: the compiler puts it where the call stands. The
draft side needs:

- a load of 16 bytes by one thread: a quarter of the load instructions, and more bytes on their way at once
- `exp2` as the one instruction that the special-function unit has
- a multiply-add that rounds once, and a maximum that keeps NaN
- the maximum of two pairs of 16-bit numbers in one instruction, and float16 as float32
- a reduction over the 32 lanes of a warp in one instruction, `redux.sync`
- a count that blocks hand in, and with it what they wrote before

Needs: compute capability 8.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda

__all__ = [
    "array_address",
    "count_in",
    "exp2",
    "fused_multiply_add",
    "halves_to_float32",
    "inlined",
    "kernel_for",
    "larger",
    "largest_bfloat16_pair",
    "largest_float16_pair",
    "load_16_bytes",
    "warp_max",
    "warp_min",
    "warp_sum",
]

inlined: Any = cuda.jit(device=True, forceinline=True) if ON_GPU else cuda.jit(device=True)
"""Decorator of a device function that must not stay a call: its local arrays are then registers of the caller."""


def kernel_for(threads: int, blocks: int) -> Any:
    """Return the decorator of a kernel of `threads` a block, `blocks` of which share a multiprocessor's registers."""
    return cuda.jit(launch_bounds=(threads, blocks)) if ON_GPU else cuda.jit


if ON_GPU:
    from llvmlite import ir
    from numba.cuda import extending as _extending
    from numba.cuda import types as _types

    intrinsic: Any = _extending.intrinsic
    types: Any = _types

    _U32, _U64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

    def inline_ptx(template: str, constraints: str, result: Any, side_effect: bool = False) -> Any:
        """Return the code generator of an intrinsic that is one inline-PTX statement.

        `template` names results and then operands $0, $1, ...; `constraints` gives each a register class (r: 32
        bits, l: 64 bits, f: float32, n: a constant); `result` is an LLVM type, or a list of them for several results.
        Statements with `side_effect` keep their order among themselves and are never dropped.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            several = isinstance(result, list)
            returned = ir.LiteralStructType(result) if several else result
            function = ir.FunctionType(returned, [a.type for a in arguments])
            value = builder.call(ir.InlineAsm(function, template, constraints, side_effect), arguments)
            if several:
                parts = [builder.extract_value(value, i) for i in range(len(result))]
                return context.make_tuple(builder, signature.return_type, parts)
            return context.get_dummy_value() if isinstance(result, ir.VoidType) else value

        return generate

    def first_element(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Generate the 64-bit address of an array's first element; the array is the intrinsic's first argument."""
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _U64)

    @intrinsic
    def array_address(context, array):
        """The 64-bit address of a global array's first element."""
        return types.uint64(array), first_element

    @intrinsic
    def load_16_bytes(context, address):
        """Four 32-bit words at `address`, a multiple of 16, of memory that nobody writes meanwhile.

        PTX: ``ld.global.nc.L1::no_allocate.v4.u32``. ``nc`` is the read-only path; what is read once needs no place
        in L1. A side effect, so that the load stays where it is written: early.
        """
        template = "ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
        signature = types.UniTuple(types.uint32, 4)(types.uint64)
        return signature, inline_ptx(template, "=r,=r,=r,=r,l", [_U32] * 4, side_effect=True)

    @intrinsic
    def exp2(context, x):
        """2 to the power x, float32, off by at most 2**-22 of the result; -inf gives 0. PTX: ``ex2.approx.ftz.f32``."""
        return types.float32(types.float32), inline_ptx("ex2.approx.ftz.f32 $0, $1;", "=f,f", _F32)

    @intrinsic
    def count_in(context, array, index, last):
        """Count ``array[index]`` (uint32) up by one, from `last` to 0; return what it was.

        What this thread wrote before is seen, anywhere on the GPU, by whoever counts later, and so is what its block
        wrote before a barrier. PTX: ``atom.acq_rel.gpu.global.inc.u32``. One fence, where ``cuda.threadfence`` before
        and after would be two, dearer ones, that also put the fences of all threads in one order.
        """
        template = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
        count = inline_ptx(template, "=r,l,r,~{memory}", _U32, side_effect=True)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            offset = builder.mul(arguments[1], ir.Constant(_U64, 4))
            address = builder.add(first_element(context, builder, signature, arguments), offset)
            return count(context, builder, signature, [address, arguments[2]])

        return types.uint32(array, types.uint64, types.uint32), generate

    @intrinsic
    def fused_multiply_add(context, a, b, c):
        """A * b + c in float32, rounded once. PTX: ``fma.rn.f32``."""
        signature = types.float32(types.float32, types.float32, types.float32)
        return signature, inline_ptx("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", _F32)

    @intrinsic
    def larger(context, a, b):
        """The larger of two float32, NaN if one is NaN. PTX: ``max.NaN.f32``."""
        return types.float32(types.float32, types.float32), inline_ptx("max.NaN.f32 $0, $1, $2;", "=f,f,f", _F32)

    def _larger_pair(kind: str) -> Any:
        return types.uint32(types.uint32, types.uint32), inline_ptx(f"max.NaN.{kind}x2 $0, $1, $2;", "=r,r,r", _U32)

    @intrinsic
    def largest_bfloat16_pair(context, a, b):
        """The larger low halves and the larger high halves of two words, NaN if one is. PTX: ``max.NaN.bf16x2``."""
        return _larger_pair("bf16")

    @intrinsic
    def largest_float16_pair(context, a, b):
        """The same for float16. PTX: ``max.NaN.f16x2``."""
        return _larger_pair("f16")

    @intrinsic
    def halves_to_float32(context, word):
        """The two float16 of a word as float32, the low half first. PTX: ``cvt.f32.f16``, twice."""
        template = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
        return types.UniTuple(types.float32, 2)(types.uint32), inline_ptx(template, "=f,=f,r", [_F32] * 2)

    def _redux(operation: str) -> Any:
        template = f"redux.sync.{operation}.u32 $0, $1, 0xffffffff;"
        return types.uint32(types.uint32), inline_ptx(template, "=r,r", _U32, side_effect=True)

    @intrinsic
    def warp_max(context, value):
        """The largest uint32 of the warp, to all of its 32 lanes. PTX: ``redux.sync.max.u32``."""
        return _redux("max")

    @intrinsic
    def warp_min(context, value):
        """The smallest uint32 of the warp, to all of its 32 lanes. PTX: ``redux.sync.min.u32``."""
        return _redux("min")

    @intrinsic
    def warp_sum(context, value):
        """The sum of the warp's uint32, to all of its 32 lanes. PTX: ``redux.sync.add.u32``."""
        return _redux("add")

else:

    def count_in(array: Any, index: Any, last: Any) -> Any:
        """Count ``array[index]`` up by one, from `last` to 0; simulated threads see each other's writes at once."""
        return cuda.atomic.inc(array, index, last)

    def exp2(x: Any) -> Any:
        """2 to the power x, float32; NumPy stands in for the instruction."""
        with np.errstate(all="ignore"):
            return np.float32(np.exp2(np.float32(x)))

    def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
        """A * b + c in float32; the product is exact in float64, so that the last rounding is the one that counts."""
        with np.errstate(all="ignore"):
            return np.float32(np.float64(a) * np.float64(b) + np.float64(c))

    def larger(a: Any, b: Any) -> Any:
        """The larger of two float32, the positive NaN if one is NaN."""
        return np.float32(np.nan) if np.isnan(a) or np.isnan(b) else max(a, b)

    def _missing(*arguments: Any) -> Any:
        raise NotImplementedError("this instruction needs a GPU; Numba's simulator has no warps and no PTX")

    array_address = load_16_bytes = largest_bfloat16_pair = largest_float16_pair = halves_to_float32 = _missing
    warp_max = warp_min = warp_sum = _missing
