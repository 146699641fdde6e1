"""The NumPy models of the tensor-core instructions: against plain matrix products, and against a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba import ptx
from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.stages.tree_attention import mma, wgmma
from ddtree_numba.stages.tree_attention.tensor_core import place_a, place_b, place_b_trans, place_weight
from tests.helpers import on_device, on_host

LANE = np.arange(32)


def fragment(matrix, layout):
    """Deal a matrix out to the lanes."""
    return matrix[layout[..., 0], layout[..., 1]]


def swizzled(tile):
    """A tile [rows, columns] of 16-bit elements as it lies in shared memory: chunk c of row r at place c ^ (r % 8)."""
    rows, columns = tile.shape
    memory = np.zeros_like(tile).reshape(rows, columns // 8, 8)
    for row in range(rows):
        memory[row, np.arange(columns // 8) ^ (row % 8)] = tile[row].reshape(-1, 8)
    return memory.reshape(-1)


# -------------------------------------------------------------------------------------------------- layouts, anywhere


@pytest.mark.parametrize(
    ("layout", "shape"), [(mma.A_LAYOUT, (16, 16)), (mma.B_LAYOUT, (16, 8)), (mma.C_LAYOUT, (16, 8))]
)
def test_a_layout_deals_out_every_element_once(layout, shape):
    dealt = np.zeros(shape, int)
    np.add.at(dealt, (layout[..., 0], layout[..., 1]), 1)
    assert (dealt == 1).all()


def test_layouts_by_hand():
    """Lane 13 is group 3, member 1."""
    assert mma.A_LAYOUT[13].tolist() == [[3, 2], [3, 3], [11, 2], [11, 3], [3, 10], [3, 11], [11, 10], [11, 11]]
    assert mma.B_LAYOUT[13].tolist() == [[2, 3], [3, 3], [10, 3], [11, 3]]
    assert mma.C_LAYOUT[13].tolist() == [[3, 2], [3, 3], [11, 2], [11, 3]]


def test_mma_model_is_a_matrix_product(rng):
    a, b, c = rng.normal(size=(16, 16)), rng.normal(size=(16, 8)), rng.normal(size=(16, 8))
    got = mma.mma_model(fragment(a, mma.A_LAYOUT), fragment(b, mma.B_LAYOUT), fragment(c, mma.C_LAYOUT))
    np.testing.assert_allclose(got, fragment(c + a @ b, mma.C_LAYOUT), rtol=1e-13)


def test_ldmatrix_refuses_addresses_that_the_hardware_refuses():
    with pytest.raises(ValueError, match="multiples of 16"):
        mma.ldmatrix_model(np.zeros(512, np.uint16), LANE * 16 + 8)


# -------------------------------------------------------------- the addresses of `tensor_core`, in its swizzled tiles


@pytest.mark.parametrize("width", [64, 128, 576])
def test_ldmatrix_at_place_a_gives_the_a_operand(rng, width):
    tile = rng.integers(0, 2**16, (16, width)).astype(np.uint16)
    for step in range(width // 16):
        # Two steps further are in the same 128 bytes by exclusive or, four by addition.
        address = (place_a(LANE, 2 * width) ^ (32 * (step % 4))) + 128 * (step // 4)
        got = mma.ldmatrix_model(swizzled(tile), address)
        np.testing.assert_array_equal(got, fragment(tile[:, 16 * step :], mma.A_LAYOUT))


@pytest.mark.parametrize("width", [64, 128, 576])
def test_ldmatrix_at_place_b_gives_two_b_operands_of_the_keys(rng, width):
    keys = rng.integers(0, 2**16, (16, width)).astype(np.uint16)
    for step in range(width // 16):
        address = (place_b(LANE, 2 * width) ^ (32 * (step % 4))) + 128 * (step // 4)
        got = mma.ldmatrix_model(swizzled(keys), address)
        for n in range(2):  # B is columns x keys: the transposed tile
            b = keys[8 * n : 8 * n + 8, 16 * step : 16 * step + 16].T
            np.testing.assert_array_equal(got[:, 4 * n : 4 * n + 4], fragment(b, mma.B_LAYOUT))


@pytest.mark.parametrize("width", [64, 128, 576])
def test_ldmatrix_trans_at_place_b_trans_gives_two_b_operands_of_the_values(rng, width):
    values = rng.integers(0, 2**16, (16, width)).astype(np.uint16)
    for pair in range(width // 16):
        address = (place_b_trans(LANE, 2 * width) ^ (32 * (pair % 4))) + 128 * (pair // 4)
        got = mma.ldmatrix_model(swizzled(values), address, trans=True)
        for n in range(2):
            b = values[:, 16 * pair + 8 * n :]
            np.testing.assert_array_equal(got[:, 4 * n : 4 * n + 4], fragment(b, mma.B_LAYOUT))


@pytest.mark.parametrize("place", [place_a, place_b, place_b_trans])
@pytest.mark.parametrize("stride", [128, 384, 1152])
def test_eight_rows_lie_in_eight_groups_of_banks(place, stride):
    for matrix in place(LANE, stride).reshape(4, 8):
        assert sorted(matrix // 16 % 8) == list(range(8))


def test_weights_are_stored_where_place_a_reads_them(rng):
    """Eight rows of 64 weights, stored two at a time by the lanes, are the first eight rows of an A operand."""
    weights = rng.integers(0, 2**16, (8, 64)).astype(np.uint16)
    memory = np.zeros(16 * 64, np.uint16)
    for chunk in range(8):
        address = place_weight(LANE, chunk)
        assert sorted(address // 4 % 32) == list(range(32)), "bank conflict"
        for half in range(2):
            memory[address // 2 + half] = weights[LANE // 4, 8 * chunk + 2 * (LANE % 4) + half]
    for step in range(4):
        got = mma.ldmatrix_model(memory, place_a(LANE, 128) ^ (32 * step))
        expected = fragment(np.vstack([weights, np.zeros_like(weights)])[:, 16 * step :], mma.A_LAYOUT)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the instructions are there")
def test_the_simulator_says_that_it_has_none():
    with pytest.raises(NotImplementedError, match="need a GPU"):
        mma.mma_bf16(*range(10))


# ------------------------------------------------------------------------------------------- the models, on a GPU

if ON_GPU:

    @cuda.jit
    def load_and_multiply(memory, addresses, trans, is_bfloat16, a, b, c, loaded, product):
        shared = cuda.shared.array(2048, np.uint16)
        lane = cuda.threadIdx.x
        for i in range(lane, 2048, 32):
            shared[i] = memory[i]
        cuda.syncthreads()
        address = mma.shared_address(shared) + np.uint32(addresses[lane])
        if trans:
            r0, r1, r2, r3 = mma.ldmatrix_x4_trans(address)
        else:
            r0, r1, r2, r3 = mma.ldmatrix_x4(address)
        loaded[lane, 0], loaded[lane, 1], loaded[lane, 2], loaded[lane, 3] = r0, r1, r2, r3
        a0, a1, a2, a3, b0, b1 = a[lane, 0], a[lane, 1], a[lane, 2], a[lane, 3], b[lane, 0], b[lane, 1]
        c0, c1, c2, c3 = c[lane, 0], c[lane, 1], c[lane, 2], c[lane, 3]
        if is_bfloat16:
            d0, d1, d2, d3 = mma.mma_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
        else:
            d0, d1, d2, d3 = mma.mma_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)
        product[lane, 0], product[lane, 1], product[lane, 2], product[lane, 3] = d0, d1, d2, d3

    @cuda.jit
    def small_instructions(x, packed, powers, copied, arrived):
        shared = cuda.shared.array(1024, np.float32)
        barrier = cuda.shared.array(2, np.uint64)
        t = cuda.threadIdx.x
        packed[t, 0] = mma.pack_bf16(x[t], x[t + 64])
        packed[t, 1] = mma.pack_f16(x[t], x[t + 64])
        powers[t] = ptx.exp2(x[t])
        start, where = mma.shared_address(shared), mma.shared_address(barrier)
        if t == 0:
            mma.mbarrier_init(where, 128)
        mma.cp_async_16(start + np.uint32(16 * t), ptx.array_address(x), 16 if t % 2 == 0 else 0)
        mma.cp_async_commit()
        mma.cp_async_wait()
        mma.store_shared_4(start + np.uint32(1024 + 16 * t), x[t], x[t], x[t + 1], np.float32(t))
        cuda.syncthreads()
        for i in range(4):
            copied[t, i] = shared[4 * t + i]
            copied[t, 4 + i] = mma.load_shared_float(start + np.uint32(1024 + 16 * t + 4 * i))
        cuda.syncthreads()
        # Each thread arrives twice: itself, and when its copy is there.
        mma.cp_async_16(start + np.uint32(16 * t), ptx.array_address(x) + np.uint64(16 * (t % 32)), 16)
        wgmma.copies_arrive(where)
        mma.mbarrier_arrive(where)
        while mma.mbarrier_done(where, 0) == 0:
            pass
        arrived[t] = shared[4 * (63 - t) + 1]


def halves(registers):
    """[32, n] registers -> [32, 2 n] halves, low first."""
    return np.ascontiguousarray(registers).view(np.uint16)


@pytest.mark.gpu
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_agree_with_the_gpu(rng, trans, dtype):
    def narrow(values):
        return to_bfloat16(values) if dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)

    def widen(bits):
        return from_bfloat16(bits) if dtype == "bfloat16" else bits.view(np.float16).astype(np.float32)

    memory = rng.integers(0, 2**16, 2048).astype(np.uint16)
    addresses = (16 * rng.permutation(256)[:32]).astype(np.int32)
    a = narrow(rng.normal(size=(32, 8)).astype(np.float32))
    b = narrow(rng.normal(size=(32, 4)).astype(np.float32))
    c = rng.normal(size=(32, 4)).astype(np.float32)
    loaded, product = np.zeros((32, 4), np.uint32), np.full((32, 4), np.nan, np.float32)
    is_bfloat16 = dtype == "bfloat16"
    inputs = on_device((memory, addresses))
    operands = on_device((a.view(np.uint32), b.view(np.uint32), c, loaded, product))
    load_and_multiply[1, 32](*inputs, trans, is_bfloat16, *operands)
    loaded, product = on_host(operands[3:])
    np.testing.assert_array_equal(halves(loaded), mma.ldmatrix_model(memory, addresses, trans=trans))
    expected = mma.mma_model(widen(a).astype(np.float64), widen(b).astype(np.float64), c)
    # 17 terms in float32, of sizes that add up to `size`
    size = mma.mma_model(np.abs(widen(a)).astype(np.float64), np.abs(widen(b)).astype(np.float64), np.abs(c))
    assert (np.abs(product - expected) <= 17 * 2.0**-23 * size).all()


@pytest.mark.gpu
def test_small_instructions_on_the_gpu(rng):
    capability = tuple(cuda.get_current_device().compute_capability)
    if capability < (9, 0):
        pytest.skip(f"waiting at an mbarrier needs compute capability 9.0, this GPU has {capability}")
    x = rng.normal(size=128).astype(np.float32) * 4
    packed, powers = np.zeros((64, 2), np.uint32), np.full(64, np.nan, np.float32)
    copied, arrived = np.full((64, 8), np.nan, np.float32), np.full(64, np.nan, np.float32)
    arrays = on_device((x, packed, powers, copied, arrived))
    small_instructions[1, 64](*arrays)
    packed, powers, copied, arrived = on_host(arrays[1:])
    pairs = np.stack([x[:64], x[64:]], axis=1)
    np.testing.assert_array_equal(halves(packed[:, :1]), to_bfloat16(pairs))
    np.testing.assert_array_equal(halves(packed[:, 1:]), pairs.astype(np.float16).view(np.uint16))
    np.testing.assert_allclose(powers, np.exp2(x[:64].astype(np.float64)), rtol=2.0**-21)
    t = np.arange(64)
    np.testing.assert_array_equal(copied[:, :4], np.where(t[:, None] % 2 == 0, x[:4], 0))
    np.testing.assert_array_equal(copied[:, 4:], np.stack([x[t], x[t], x[t + 1], t.astype(np.float32)], axis=1))
    np.testing.assert_array_equal(arrived, x[4 * ((63 - t) % 32) + 1])
