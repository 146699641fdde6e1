"""Block-wide maximum, argmax, sum and any: shared memory everywhere, warp shuffles on a GPU.

Every thread of a one-dimensional block hands in one value and every thread gets the block's result::

    scratch = cuda.shared.array(SCRATCH_SIZE, dtype=np.float32)
    largest = block_max(value, scratch)

All of them work in the same two steps. First each warp reduces its own values with shuffles, register to
register, with no barrier. Then the first lane of each warp writes one number to `scratch`, the block meets at
a barrier, and each thread combines the few numbers there by itself. Simulated threads have no warps, so there
a warp is one thread: the same code runs with the first step left out.

Rules for the caller:

- The kernel allocates `scratch`, of `SCRATCH_SIZE` elements and of the type of the value: float32, float64,
  int32 or int64. (No helper allocates: the simulator tells shared arrays apart by their source line.)
- All threads of the block call, or none: there are two barriers inside.
- Calls may follow each other on the same `scratch`: the second barrier keeps the next call's writes away from
  threads that still read. Whatever else the kernel kept in `scratch` is overwritten, with no barrier before it.
- The block is one-dimensional and its size a power of two up to 1024. Any other size may give a wrong result
  on a GPU (a shuffle would read a lane that is not there); the simulator would not notice.

All lanes combine the same pairs in the same order, so every thread gets the same bits, run after run.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda

__all__ = ["SCRATCH_SIZE", "block_any", "block_argmax", "block_max", "block_sum"]

SCRATCH_SIZE = 32 if ON_GPU else 1024
"""Elements of shared memory a reduction needs: one for each warp that the largest block can have."""

_WARP_LANES = 32 if ON_GPU else 1
_ALL_LANES = np.uint32(0xFFFFFFFF)


@cuda.jit(device=True)
def _larger(a, b):
    # NaN wins: `b > a` is false when either is NaN, `b != b` is true only for NaN.
    return b if b > a or b != b else a


@cuda.jit(device=True)
def _comes_first(a, a_index, b, b_index):
    """Tell whether (a, a_index) beats (b, b_index): NaN, then the larger value, then the lower index."""
    a_is_nan, b_is_nan = a != a, b != b
    if a_is_nan != b_is_nan:
        return a_is_nan
    if a_is_nan or a == b:
        return a_index < b_index
    return a > b


if ON_GPU:
    # Butterflies: at distance 16, 8, 4, 2, 1 each lane combines with the lane whose number differs in that
    # one bit, so after five steps every lane holds the result of all 32. A block smaller than a warp starts
    # at a shorter distance: the lanes beyond it do not exist.

    @cuda.jit(device=True)
    def _warp_max(value):
        distance = min(cuda.blockDim.x, _WARP_LANES) >> 1
        while distance > 0:
            value = _larger(value, cuda.shfl_xor_sync(_ALL_LANES, value, distance))
            distance >>= 1
        return value

    @cuda.jit(device=True)
    def _warp_argmax(value, index):
        distance = min(cuda.blockDim.x, _WARP_LANES) >> 1
        while distance > 0:
            other = cuda.shfl_xor_sync(_ALL_LANES, value, distance)
            other_index = cuda.shfl_xor_sync(_ALL_LANES, index, distance)
            if _comes_first(other, other_index, value, index):
                value, index = other, other_index
            distance >>= 1
        return value, index

    @cuda.jit(device=True)
    def _warp_sum(value):
        distance = min(cuda.blockDim.x, _WARP_LANES) >> 1
        while distance > 0:
            value += cuda.shfl_xor_sync(_ALL_LANES, value, distance)
            distance >>= 1
        return value

else:

    @cuda.jit(device=True)
    def _warp_max(value):
        return value

    @cuda.jit(device=True)
    def _warp_argmax(value, index):
        return value, index

    @cuda.jit(device=True)
    def _warp_sum(value):
        return value


@cuda.jit(device=True)
def _warps_in_block():
    return (cuda.blockDim.x + _WARP_LANES - 1) // _WARP_LANES


@cuda.jit(device=True)
def block_max(value, scratch):
    """Return the largest `value` of the block to every thread; NaN if any is NaN."""
    value = _warp_max(value)
    if cuda.threadIdx.x % _WARP_LANES == 0:
        scratch[cuda.threadIdx.x // _WARP_LANES] = value
    cuda.syncthreads()  # every warp's number is there
    value = scratch[0]
    for warp in range(1, _warps_in_block()):
        value = _larger(value, scratch[warp])
    cuda.syncthreads()  # every thread has read: the next call may write
    return value


@cuda.jit(device=True)
def block_argmax(value, index, value_scratch, index_scratch):
    """Return (largest value, its index) of the block to every thread; equal values: the lowest index.

    `index` (int32 or int64) is whatever the thread's value belongs to, in any order over the threads. NaN
    counts as larger than every number, as in `numpy.argmax`. 0.0 and -0.0 are equal. Needs one scratch array
    of each type.
    """
    value, index = _warp_argmax(value, index)
    if cuda.threadIdx.x % _WARP_LANES == 0:
        value_scratch[cuda.threadIdx.x // _WARP_LANES] = value
        index_scratch[cuda.threadIdx.x // _WARP_LANES] = index
    cuda.syncthreads()  # every warp's pair is there
    value, index = value_scratch[0], index_scratch[0]
    for warp in range(1, _warps_in_block()):
        if _comes_first(value_scratch[warp], index_scratch[warp], value, index):
            value, index = value_scratch[warp], index_scratch[warp]
    cuda.syncthreads()  # every thread has read: the next call may write
    return value, index


@cuda.jit(device=True)
def block_sum(value, scratch):
    """Return the sum of the block's values to every thread, in the type of `scratch`; NaN if any is NaN."""
    value = _warp_sum(value)
    if cuda.threadIdx.x % _WARP_LANES == 0:
        scratch[cuda.threadIdx.x // _WARP_LANES] = value
    cuda.syncthreads()  # every warp's sum is there
    value = scratch[0]
    for warp in range(1, _warps_in_block()):
        value += scratch[warp]
    cuda.syncthreads()  # every thread has read: the next call may write
    return value


@cuda.jit(device=True)
def block_any(flag):
    """Return 1 to every thread if the integer `flag` is nonzero in any of the block, else 0; no scratch."""
    return cuda.syncthreads_or(flag)
