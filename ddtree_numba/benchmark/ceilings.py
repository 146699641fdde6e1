"""What this GPU can do at most, measured in the same run: bytes copied, tensor-core operations, a library's product.

A kernel's floor is the time that its bytes or its operations take at these rates, whichever is longer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.benchmark.timing import Timer
from ddtree_numba.stages.tree_attention import mma

__all__ = ["Ceilings", "measure_ceilings"]

_TILES = 8  # sums of a warp, each a chain of its own: with 8 warps on a multiprocessor, enough to hide a product's time
_FRAGMENTS, _SUMS = 2 * _TILES, 4 * _TILES
_THREADS = 256
_MMA_FLOP = 2 * 16 * 8 * 16  # of one mma.sync m16n8k16


class Ceilings(NamedTuple):
    """Rates of this GPU; None: not measured, for want of the library."""

    bytes_per_second: float
    """Read plus written by a copy from device memory to device memory."""
    mma_flop_per_second: float
    """bfloat16 `mma.sync` on registers alone: what a kernel in Numba can reach."""
    library_flop_per_second: float | None
    """A bfloat16 matrix product of torch, 8192 x 8192 x 8192."""

    def floor_us(self, read_and_written: int, flop: int = 0) -> float:
        """Return the time in microseconds that neither the bytes nor the operations can go below."""
        fastest = max(self.mma_flop_per_second, self.library_flop_per_second or 0.0)
        return 1e6 * max(read_and_written / self.bytes_per_second, flop / fastest)

    def as_json(self) -> dict[str, float | None]:
        """Return the rates in TB/s and TFLOP/s."""
        library = self.library_flop_per_second
        return {
            "copy_tb_s": self.bytes_per_second / 1e12,
            "mma_sync_tflop_s": self.mma_flop_per_second / 1e12,
            "library_tflop_s": None if library is None else library / 1e12,
        }


@cuda.jit
def _mma_kernel(words, rounds, sums):
    """Multiply fragments that stay in registers, over and over.

    words (20 * 256 uint32): pairs of bfloat16, 20 for each thread.
    sums (blocks * 256 float32): written, so that nothing is left out as useless.
    """
    thread = cuda.threadIdx.x
    a0, a1, a2, a3 = words[thread], words[256 + thread], words[512 + thread], words[768 + thread]
    b = cuda.local.array(_FRAGMENTS, np.uint32)
    c = cuda.local.array(_SUMS, np.float32)
    for i in range(_FRAGMENTS):
        b[i] = words[(4 + i) * 256 + thread]
    for i in range(_SUMS):
        c[i] = np.float32(0)
    for _ in range(rounds):
        for t in range(_TILES):
            c[4 * t], c[4 * t + 1], c[4 * t + 2], c[4 * t + 3] = mma.mma_bf16(
                a0, a1, a2, a3, b[2 * t], b[2 * t + 1], c[4 * t], c[4 * t + 1], c[4 * t + 2], c[4 * t + 3]
            )
    total = np.float32(0)
    for i in range(_SUMS):
        total += c[i]
    sums[cuda.blockIdx.x * 256 + thread] = total


def _mma_rate(timer: Timer, rng: np.random.Generator) -> float:
    blocks, rounds = 4 * cuda.get_current_device().MULTIPROCESSOR_COUNT, 2000
    halves = rng.standard_normal(2 * 20 * _THREADS).astype(np.float32).view(np.uint32) >> np.uint32(16)
    words = cuda.to_device((halves[0::2] | halves[1::2] << np.uint32(16)).astype(np.uint32))
    sums = cuda.device_array(blocks * _THREADS, np.float32)
    us = timer.device([lambda: _mma_kernel[blocks, _THREADS](words, rounds, sums)])
    if not np.isfinite(sums.copy_to_host()).all():
        raise RuntimeError("the products of the mma.sync ceiling are not finite")
    return blocks * (_THREADS // 32) * rounds * _TILES * _MMA_FLOP / us * 1e6


def _copy_rate(timer: Timer, size: int) -> float:
    source, target = cuda.device_array(size, np.uint8), cuda.device_array(size, np.uint8)
    return 2 * size / timer.device([lambda: target.copy_to_device(source)]) * 1e6


def _library_rate(timer: Timer, torch: Any, size: int) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timer.device([lambda: torch.mm(a, b)]) * 1e6


def measure_ceilings(timer: Timer, rng: np.random.Generator, torch: Any | None) -> Ceilings:
    """Measure this GPU's rates; the library's is left out where `torch` is None."""
    if not ON_GPU:
        raise RuntimeError("the simulator has no rates to measure")
    library = None if torch is None else _library_rate(timer, torch, 8192)
    return Ceilings(_copy_rate(timer, 1 << 30), _mma_rate(timer, rng), library)
