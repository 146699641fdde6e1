"""The NumPy models of the warpgroup instructions: against plain matrix products, and against a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.stages.tree_attention import mma, wgmma
from tests.helpers import on_device, on_host

START = 3 * wgmma.BLOCK_BYTES  # of an operand, in the tests' shared memory


def stored(matrix, memory, start=START):
    """Put a matrix of 16-bit elements into `memory` as blocks of 64 x 64, element by element."""
    rows, columns = matrix.shape
    for row in range(rows):
        for chunk in range(columns // 8):
            block = row // 64 * (columns // 64) + chunk // 8
            place = start + block * wgmma.BLOCK_BYTES + wgmma.swizzled(row % 64, chunk % 8)
            memory[place // 2 : place // 2 + 8] = matrix[row, 8 * chunk : 8 * chunk + 8]


# -------------------------------------------------------------------------------------------------- layouts, anywhere


def test_a_block_holds_every_chunk_once():
    row, chunk = np.arange(64)[:, None], np.arange(8)
    places = wgmma.swizzled(row, chunk)
    assert sorted(places.ravel()) == list(range(0, wgmma.BLOCK_BYTES, 16))
    for first in range(0, 64, 8):  # eight rows of one chunk are in eight groups of banks
        assert all(len(set(places[first : first + 8, c] // 16 % 8)) == 8 for c in range(8))


@pytest.mark.parametrize("columns", [64, 256])
def test_accumulators_deal_out_every_element_once(columns):
    layout = wgmma.accumulator_layout(columns)
    dealt = np.zeros((64, columns), int)
    np.add.at(dealt, (layout[..., 0], layout[..., 1]), 1)
    assert (dealt == 1).all()


def test_accumulators_by_hand():
    """Thread 77 is warp 2, lane 13: rows 32 + 3 and 8 more, columns 2 and 3 of every eight."""
    assert wgmma.accumulator_layout(64)[77, :6].tolist() == [[35, 2], [35, 3], [43, 2], [43, 3], [35, 10], [35, 11]]


def test_operands_along_the_rows(rng):
    """Scores: step s reads columns 16 s to 16 s + 15 of all 64 rows."""
    memory = rng.integers(0, 2**16, 8 * wgmma.BLOCK_BYTES // 2).astype(np.uint16)
    matrix = rng.integers(0, 2**16, (64, 128)).astype(np.uint16)
    stored(matrix, memory)
    for step in range(8):
        offset = step // 4 * wgmma.BLOCK_BYTES + step % 4 * 32
        described = int(wgmma.descriptor(np.uint32(START + offset), 0))
        got = wgmma.operand_model(memory, described, 64, along_n=False)
        np.testing.assert_array_equal(got, matrix[:, 16 * step : 16 * step + 16])


def test_operands_down_the_rows(rng):
    """Values: step s reads rows 16 s to 16 s + 15, and all columns of four blocks."""
    memory = rng.integers(0, 2**16, 8 * wgmma.BLOCK_BYTES // 2).astype(np.uint16)
    matrix = rng.integers(0, 2**16, (64, 256)).astype(np.uint16)
    stored(matrix, memory)
    for step in range(4):
        described = int(wgmma.descriptor(np.uint32(START + 2048 * step), 1))
        got = wgmma.operand_model(memory, described, 256, along_n=True)
        np.testing.assert_array_equal(got, matrix[16 * step : 16 * step + 16].T)


def test_the_model_refuses_another_swizzle():
    with pytest.raises(ValueError, match="swizzle of 128 bytes"):
        wgmma.operand_model(np.zeros(64, np.uint16), 1 << 61, 8, along_n=False)


# --------------------------------------------------------------------------------------------------------- on a GPU

if ON_GPU:
    inline = cuda.jit(device=True, forceinline=True)
    swizzled, descriptor = inline(wgmma.swizzled), inline(wgmma.descriptor)

    def make_multiply(kind):
        """Return a kernel: scores = A B^T twice over, half from registers, and values = A C, likewise."""
        score_from_shared, score_from_registers = wgmma.score_from_shared[kind], wgmma.score_from_registers[kind]
        value_from_shared, value_from_registers = wgmma.value_from_shared[kind], wgmma.value_from_registers[kind]

        @cuda.jit(lto=False)
        def multiply(a, b, c, fragments, scores, values):
            space = cuda.shared.array(24064, np.uint16)  # 6 blocks: less than 48 KB, with what aligning takes
            t = np.int32(cuda.threadIdx.x)
            start = mma.shared_address(space)
            base = (start + np.uint32(1023)) & np.uint32(0xFFFFFC00)
            first = np.int32((base - start) // 2)
            for place in range(t, 64 * 64, 128):
                row, column = place // 64, place % 64
                where = first + swizzled(row, column // 8) // 2 + column % 8
                space[where] = a[row, column]
                for block in range(4):
                    space[where + 4096 * (1 + block)] = c[row, 64 * block + column]
            cuda.syncthreads()
            mma.fence_async()
            cuda.syncthreads()
            score = cuda.local.array(32, np.float32)
            value = cuda.local.array(128, np.float32)
            for i in range(4):
                for n in range(8):
                    score[8 * i + n] = np.float32(np.nan)
                for n in range(32):
                    value[32 * i + n] = np.float32(i + n)
            left, down = descriptor(base, 0), descriptor(base + np.uint32(8192), 1)
            wgmma.fence_values(value)
            for step in range(2):
                value_from_shared(value, left + np.uint64(2 * step), down + np.uint64(128 * step), np.uint32(1))
            for step in range(2, 4):
                f = fragments[t]
                r = 4 * step
                value_from_registers(
                    value, f[r], f[r + 1], f[r + 2], f[r + 3], down + np.uint64(128 * step), np.uint32(1)
                )
            wgmma.wgmma_commit()
            wgmma.wait_for_values(value)
            cuda.syncthreads()
            for place in range(t, 64 * 64, 128):
                row, column = place // 64, place % 64
                space[first + 4096 + swizzled(row, column // 8) // 2 + column % 8] = b[row, column]
            cuda.syncthreads()
            mma.fence_async()
            cuda.syncthreads()
            right = descriptor(base + np.uint32(8192), 0)
            wgmma.fence_scores(score)
            for step in range(2):
                score_from_shared(score, left + np.uint64(2 * step), right + np.uint64(2 * step), np.uint32(step > 0))
            for step in range(2, 4):
                f = fragments[t]
                r = 4 * step
                score_from_registers(
                    score, f[r], f[r + 1], f[r + 2], f[r + 3], right + np.uint64(2 * step), np.uint32(1)
                )
            wgmma.wgmma_commit()
            wgmma.wait_for_scores(score)
            for i in range(4):
                for n in range(8):
                    scores[t, 8 * i + n] = score[8 * i + n]
                for n in range(32):
                    values[t, 32 * i + n] = value[32 * i + n]

        return multiply


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_products_on_the_gpu(rng, kind):
    """From shared memory and from registers, along and down the rows; the first product of scores clears NaN."""
    capability = tuple(cuda.get_current_device().compute_capability[:2])
    if capability != (9, 0):
        pytest.skip(f"wgmma needs compute capability 9.0, this GPU has {capability}")

    def narrow(values):
        return to_bfloat16(values) if kind == "bf16" else values.astype(np.float16).view(np.uint16)

    def widen(bits):
        wide = from_bfloat16(bits) if kind == "bf16" else bits.view(np.float16)
        return wide.astype(np.float64)

    a, b, c = (narrow(rng.normal(size=(64, n)).astype(np.float32)) for n in (64, 64, 256))
    place = np.tile(mma.A_LAYOUT, (4, 1, 1)) + np.stack([16 * (np.arange(128) // 32), np.zeros(128, int)], 1)[:, None]
    dealt = np.concatenate([a[:, 16 * s : 16 * s + 16][place[..., 0], place[..., 1]] for s in range(4)], axis=1)
    fragments = np.ascontiguousarray(dealt).view(np.uint32)
    scores, values = np.full((128, 32), np.nan, np.float32), np.full((128, 128), np.nan, np.float32)
    arrays = on_device((a, b, c, fragments, scores, values))
    make_multiply(kind)[1, 128](*arrays)
    scores, values = on_host(arrays[4:])
    left = widen(a)
    for got, right, columns in ((scores, widen(b).T, 64), (values, widen(c), 256)):
        layout = wgmma.accumulator_layout(columns)
        begun = 0 if columns == 64 else np.add.outer(np.arange(4), np.arange(32)).ravel()
        expected = (left @ right)[layout[..., 0], layout[..., 1]] + begun
        size = (np.abs(left) @ np.abs(right))[layout[..., 0], layout[..., 1]] + begun
        assert (np.abs(got - expected) <= 65 * 2.0**-23 * size).all()
