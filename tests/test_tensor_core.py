"""The tensor-core versions of the attention: emulated lane by lane anywhere, compiled where NVVM is, run on a GPU."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import ddtree_numba.ptx
from ddtree_numba.backend import ON_GPU
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.stages.tree_attention import (
    GPU_VERSIONS,
    VERSIONS,
    hopper,
    tensor_core,
    tree_attention,
)
from ddtree_numba.stages.tree_attention.hopper import HopperTiling, launch_hopper, make_hopper_kernel
from ddtree_numba.stages.tree_attention.split_kv import split_buffers
from ddtree_numba.stages.tree_attention.tensor_core import (
    Tiling,
    choose_splits,
    choose_tiling,
    launch_tensor_core,
    make_tensor_core_kernel,
)
from tests.helpers import on_device, on_host, poisoned
from tests.ptx_emulator import Emulator
from tests.test_tree_attention import NOBODY, arguments, random_batch, reference, rounding_bounds, widened

# Of the weights, which are rounded to 16 bits: half a unit in the last place, and below the normal numbers of float16.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"bfloat16": 0.0, "float16": 2.0**-25}

# Small ones for the emulator. `WIDE` has two row groups, as on an H200, but takes seconds a tile, and so does `HOPPER`.
ONE_GROUP = Tiling(128, 64, row_groups=1, keys=32, held=2)
WIDE = Tiling(320, 256, row_groups=2, keys=64, held=4)
HOPPER = HopperTiling()


def each(*tilings):
    return pytest.mark.parametrize("tiling", tilings, ids=lambda t: f"{type(t).__name__}-{t.rows}x{t.latent_width}")


every_tiling = each(ONE_GROUP, HOPPER)
both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def batch_for(rng, tiling, prefixes, counts, **options):
    options = {"heads": 3, "dtype": "bfloat16", "page_size": 16, "scale": 0.2, **options}
    rope = 64 if isinstance(tiling, HopperTiling) else tiling.width - tiling.latent_width
    return random_batch(rng, prefixes, counts, latent=tiling.latent_width, rope=rope, **options)


def merged(parts, part_lse):
    """Merge parts [splits, ...] in float64."""
    part_lse = part_lse.astype(np.float64)
    largest = part_lse.max(axis=0)
    shares = np.exp(part_lse - np.where(largest == -np.inf, 0, largest))
    total = shares.sum(axis=0)
    parts = np.where(shares[..., None] == 0, 0, parts)
    out = (shares[..., None] * parts).sum(axis=0) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return out.astype(np.float32), (largest + np.log(total)).astype(np.float32)


def emulated(monkeypatch, rng, tiling, batch, splits=1, may_be_nan=False):
    """Run the kernel's source over poisoned outputs; return (out, lse) as `tree_attention` does."""
    emulator = Emulator(rng)
    for module in (tensor_core, hopper):
        monkeypatch.setattr(module, "cuda", emulator.cuda)
        monkeypatch.setattr(module, "ptx", emulator.ptx)
        for name in set(ddtree_numba.ptx.__all__) & set(vars(module)):  # on a GPU they can't be called from Python
            monkeypatch.setattr(module, name, getattr(emulator.ptx, name))
    monkeypatch.setattr(hopper, "wgmma", emulator.wgmma)
    is_bfloat16 = batch.q.dtype == np.uint16
    if isinstance(tiling, HopperTiling):
        kernel = make_hopper_kernel.__wrapped__(is_bfloat16)  # past the cache of compiled kernels
    else:
        kernel = make_tensor_core_kernel.__wrapped__(tiling, is_bfloat16)
    B, N, H, D = batch.q.shape
    rows = splits * B * N * H
    parts, part_lse = poisoned(rows * batch.latent_width, np.float32), poisoned(rows, np.float32)
    inputs = (batch.q.reshape(B, N * H, D), *batch[1:6], np.float32(batch.scale))
    grid = -(-N * H // tiling.rows), splits, B
    with np.errstate(over="ignore", invalid="ignore"):
        emulator.run(kernel, grid, tiling.threads, tiling.shared_bytes, *inputs, parts, part_lse)
    parts, part_lse = parts.reshape(splits, B, N, H, batch.latent_width), part_lse.reshape(splits, B, N, H)
    assert may_be_nan or not np.isnan(part_lse).any()
    return (parts[0], part_lse[0]) if splits == 1 else merged(parts, part_lse)


def launched(launch, batch, splits=None, tiling=None):
    """Run a launcher on a GPU over poisoned outputs and poisoned parts."""
    shape = (*batch.q.shape[:3], batch.latent_width)
    for parts in split_buffers(splits or 8, math.prod(shape[:3]), batch.latent_width, 0):
        parts.copy_to_device(poisoned(parts.shape, np.float32))
    out, lse = on_device((poisoned(shape, np.float32), poisoned(shape[:3], np.float32)))
    is_bfloat16 = np.int32(batch.q.dtype == np.uint16)
    keywords = {"stream": 0, "splits": splits, **({} if tiling is None else {"tiling": tiling})}
    launch(*on_device(batch[:6]), np.float32(batch.scale), is_bfloat16, out, lse, **keywords)
    return on_host((out, lse))


def assert_close(batch, got, expected=None):
    """Within what rounding the weights to 16 bits and all else to float32 can do; unused slots exact.

    A weight errs by `ROUNDING` of itself, so `out` by that share of the weighted mean of |value|; the denominator adds
    the weights before they are rounded, and is at least 1, because the largest score so far has weight 1 once.
    """
    out, lse = got
    expected_out, expected_lse = reference(batch) if expected is None else expected
    dtype = "bfloat16" if batch.q.dtype == np.uint16 else "float16"
    out_bound, lse_bound = rounding_bounds(batch)
    largest = np.nanmax(np.abs(np.nan_to_num(widened(batch.kv_pool), posinf=0, neginf=0)))
    rows = int(batch.prefix_lengths.max()) + batch.q.shape[1]
    bound = 2 * out_bound + (ROUNDING[dtype] + rows * SMALLEST[dtype]) * largest
    assert (np.abs(out - expected_out) <= bound[..., None]).all(), "out is off, or NaN"
    seen = np.isfinite(expected_lse)
    assert (lse[~seen] == -np.inf).all() and (out[~seen] == 0).all()
    assert (np.abs(lse[seen] - expected_lse[seen]) <= 2 * lse_bound[seen]).all(), "lse is off, or NaN"
    # Errors of single weights point this way and that: the whole errs by far less than the worst element.
    assert np.linalg.norm(out - expected_out) <= ROUNDING[dtype] * np.linalg.norm(expected_out)


# ------------------------------------------------------------------------------------------- emulated, anywhere


@pytest.mark.parametrize(
    ("tiling", "dtype"), [(ONE_GROUP, "bfloat16"), (ONE_GROUP, "float16"), (HOPPER, "float16")], ids=str
)
def test_emulated_kernel_equals_reference(monkeypatch, rng, tiling, dtype):
    """Two mask words, a prefix and a tree that end inside a tile, shuffled pages, NaN everywhere else."""
    batch = batch_for(rng, tiling, [50], [34], slots=36, heads=1, dtype=dtype)
    assert_close(batch, emulated(monkeypatch, rng, tiling, batch))


@each(WIDE)
def test_emulated_other_number_of_row_groups(monkeypatch, rng, tiling):
    batch = batch_for(rng, tiling, [50], [17], slots=20)
    assert_close(batch, emulated(monkeypatch, rng, tiling, batch))


@each(ONE_GROUP)
def test_emulated_splits(monkeypatch, rng, tiling):
    """Four are more than there are tiles."""
    batch = batch_for(rng, tiling, [80], [5], page_size=1)
    assert_close(batch, emulated(monkeypatch, rng, tiling, batch, splits=4))


@every_tiling
def test_emulated_requests_of_different_lengths(monkeypatch, rng, tiling):
    batch = batch_for(rng, tiling, [0, 33], [1, 12], page_size=64)
    assert_close(batch, emulated(monkeypatch, rng, tiling, batch))


@every_tiling
def test_emulated_spikes_move_the_maximum(monkeypatch, rng, tiling):
    """Scores grow by more than 2^8 from tile to tile, so that sums are rescaled, in some rows and not in others."""
    batch = batch_for(rng, tiling, [160], [3], heads=1)
    pool = from_bfloat16(batch.kv_pool)
    for row in range(163):
        pool[batch.block_table[0, row // 16], row % 16] *= 1 + row // 32
    batch = batch._replace(kv_pool=to_bfloat16(pool))
    assert_close(batch, emulated(monkeypatch, rng, tiling, batch))


@each(ONE_GROUP)
def test_emulated_node_that_sees_nothing(monkeypatch, rng, tiling):
    batch = batch_for(rng, tiling, [0], [9], heads=1)
    bits = batch.ancestor_bits.copy()
    bits[0, 4:] = 0
    batch = batch._replace(ancestor_bits=bits)
    out, lse = emulated(monkeypatch, rng, tiling, batch)
    assert (out[0, 4:] == 0).all() and (lse[0, 4:] == -np.inf).all()
    assert_close(batch, (out, lse))


@every_tiling
def test_emulated_page_outside_the_pool_is_not_seen(monkeypatch, rng, tiling):
    batch = batch_for(rng, tiling, [130], [3], heads=1)
    table = batch.block_table.copy()
    table[0, 3] = -1
    out, lse = emulated(monkeypatch, rng, tiling, batch._replace(block_table=table))
    # The reference: the same rows with 48..63 left out, as a shorter prefix.
    kept = np.delete(batch.block_table, 3, axis=1)
    shorter = batch._replace(block_table=kept, prefix_lengths=batch.prefix_lengths - 16)
    assert_close(shorter, (out, lse))


def cut_short(batch, pages):
    """The same batch with so few pages in its table that the prefix does not fit; and the reference of what is left."""
    table = np.ascontiguousarray(batch.block_table[:, :pages])
    rows = np.full_like(batch.prefix_lengths, pages * batch.kv_pool.shape[1])
    nothing = np.zeros_like(batch.ancestor_bits)
    whole = np.pad(table, ((0, 0), (0, 1)))  # room for the tree, of which nobody sees anything
    kept = batch._replace(block_table=whole, prefix_lengths=rows, ancestor_bits=nothing)
    return batch._replace(block_table=table), reference(kept)


def assert_near(got, expected):
    """A row that is seen and should not be has as much weight as others here, so these bounds need not be sharp."""
    assert np.linalg.norm(got[0] - expected[0]) <= ROUNDING["bfloat16"] * np.linalg.norm(expected[0])
    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)


@each(ONE_GROUP, HOPPER)
def test_emulated_rows_past_a_short_table_are_not_seen(monkeypatch, rng, tiling):
    """The table ends inside a tile, and the prefix behind it."""
    batch, expected = cut_short(batch_for(rng, tiling, [200], [3], heads=1, slots=3, scale=0.01), 5)
    assert_near(emulated(monkeypatch, rng, tiling, batch), expected)


def with_a_broken_row(batch, rng, value):
    """Five nodes, a root and four siblings, and a `value` in the latent row of the third."""
    bits = np.zeros_like(batch.ancestor_bits)
    bits[0, :5, 0] = [1, 3, 5, 9, 17]
    pool, row, page_size = batch.kv_pool.copy(), int(batch.prefix_lengths[0]) + 3, batch.kv_pool.shape[1]
    element = (batch.block_table[0, row // page_size], row % page_size, int(rng.integers(batch.latent_width)))
    pool[element] = to_bfloat16(np.float32([value]))[0]
    return batch._replace(ancestor_bits=bits), batch._replace(kv_pool=pool, ancestor_bits=bits)


def assert_others_near(got, expected):
    """All but node 3 are as if nothing was broken."""
    assert_near(*([np.delete(array, 3, axis=1) for array in pair] for pair in (got, expected)))


@each(ONE_GROUP, HOPPER)
def test_emulated_a_broken_row_reaches_only_who_sees_it(monkeypatch, rng, tiling):
    sound, broken = with_a_broken_row(batch_for(rng, tiling, [70], [5], heads=1, slots=5), rng, np.nan)
    got = emulated(monkeypatch, rng, tiling, broken, may_be_nan=True)
    assert not np.isfinite(got[0][0, 3]).any()
    assert_others_near(got, reference(sound))


# --------------------------------------------------------------------------------------------- choices and errors


def test_every_tiling_fits_its_machine():
    for latent_width, rope in tensor_core.SHAPES:
        width = latent_width + rope
        for shared in (227 * 1024, 163 * 1024, 99 * 1024):
            tiling = choose_tiling(width, latent_width, shared)
            assert tiling is not None and tiling.shared_bytes <= shared
    assert choose_tiling(576, 512, 48 * 1024) is None
    assert choose_tiling(576, 512, 227 * 1024).rows == 64
    assert HopperTiling().shared_bytes <= 227 * 1024


def test_splits_fill_the_machine_without_a_needless_wave():
    assert choose_splits(264, 129, 132) == 1  # two full waves
    assert choose_splits(33, 129, 132) == 4  # one full wave
    assert choose_splits(1, 1, 132) == 1
    assert all(1 <= choose_splits(blocks, 40, 132) <= 20 for blocks in range(1, 300, 7))


def test_the_simulator_says_what_the_version_needs(rng):
    if ON_GPU:
        pytest.skip("on a GPU the version runs")
    batch = random_batch(rng, [6], [3], latent=64, rope=64, dtype="bfloat16")
    args, keywords = arguments(batch)
    for version in GPU_VERSIONS:
        with pytest.raises(ValueError, match=f"version: got '{version}', needs a GPU with tensor cores"):
            tree_attention(*args, **keywords, version=version)


def test_auto_takes_what_runs(rng):
    """In the simulator, and for float32 on a GPU, the fastest version that runs anywhere."""
    batch = random_batch(rng, [6], [3])
    args, keywords = arguments(batch)
    got = tree_attention(*args, **keywords, version="auto")
    expected = tree_attention(*args, **keywords, version=VERSIONS[-1])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unknown_version_lists_all(rng):
    args, keywords = arguments(random_batch(rng, [6], [3]))
    with pytest.raises(ValueError, match=r"'shared_tile' or 'split_kv' or 'tensor_core'.* or 'auto'"):
        tree_attention(*args, **keywords, version="fastest")


COMPILE = """
import re, sys
from types import SimpleNamespace
import numba.cuda.dispatcher
numba.cuda.dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
from numba.cuda import types
from ddtree_numba.backend import cuda
from ddtree_numba.stages.tree_attention.hopper import make_hopper_kernel
from ddtree_numba.stages.tree_attention.tensor_core import Tiling, make_tensor_core_kernel

def array(dtype, dimensions):
    return types.Array(dtype, dimensions, "C")

for bfloat16, dtype in ((True, types.uint16), (False, types.float16)):
    kind = "bf16" if bfloat16 else "f16"
    tensor_core = make_tensor_core_kernel(Tiling(576, 512, 2, 64, 4), bfloat16), (9, 0), "mma.sync.aligned.m16n8k16"
    hopper = make_hopper_kernel(bfloat16), (9, 0, "a"), "wgmma.mma_async.sync.aligned.m64n(?:64|256)k16"
    for kernel, capability, product in (tensor_core, hopper):
        rows = array(dtype, 3), array(dtype, 3)
        lengths = array(types.int32, 2), array(types.int32, 1), array(types.uint32, 3), array(types.int32, 1)
        results = array(types.float32, 1), array(types.float32, 1)
        ptx, _ = cuda.compile_ptx(kernel.py_func, (*rows, *lengths, types.float32, *results), cc=capability)
        products = len(re.findall(rf"{product}[.a-z]*.f32.{kind}", ptx))
        local = len(re.findall(r"\\b(?:ld|st)\\.local", ptx))
        print(kernel.py_func.__name__, kind, products, local)
"""


def test_kernels_compile_to_registers_without_a_gpu():
    """All loops unrolled, and no array in local memory.

    `mma.sync`: 144 products of scores and 128 of values; `wgmma`: 36, and 4 of values each from registers and from
    memory.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("needs numba-cuda (the extra cu12 or cu13), whose compiler runs without a GPU")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 4
    expected = {"tensor_core_kernel": ["272", "0"], "hopper_kernel": ["44", "0"]}
    assert all(line[2:] == expected[line[0]] for line in lines), run.stdout


# --------------------------------------------------------------------------------------------------- on a GPU

every_launcher = pytest.mark.parametrize("launch", [launch_tensor_core, launch_hopper])


def skip_without(launch, width=576, latent_width=512):
    fault = tensor_core.why_not_here(width, latent_width) if launch is launch_tensor_core else hopper.why_not_here()
    if fault:
        pytest.skip(fault)


KIMI = Tiling(576, 512, row_groups=2, keys=64, held=4)


@pytest.mark.gpu
@every_launcher
@both_dtypes
@pytest.mark.parametrize(("page_size", "splits"), [(1, 1), (16, 2), (64, 3), (16, 17)])
def test_kimi_sizes(rng, launch, dtype, page_size, splits):
    skip_without(launch)
    options = {"heads": 5, "dtype": dtype, "page_size": page_size, "scale": 0.1}
    batch = batch_for(rng, KIMI, [0, 17, 64, 700], [3, 5, 1, 33], **options)
    assert_close(batch, launched(launch, batch, splits))


@pytest.mark.gpu
@every_launcher
def test_a_prefix_of_8191_and_splits_of_its_own_choice(rng, launch):
    skip_without(launch)
    batch = batch_for(rng, KIMI, [8191, 100], [5, 66], heads=2, page_size=64, scale=0.14467963)
    assert_close(batch, launched(launch, batch))


@pytest.mark.gpu
@every_launcher
def test_64_heads(rng, launch):
    skip_without(launch)
    batch = batch_for(rng, KIMI, [130], [33], heads=64, scale=0.14467963)
    assert_close(batch, launched(launch, batch))


@pytest.mark.gpu
@pytest.mark.parametrize("latent_width", [64, 256])
def test_other_widths(rng, latent_width):
    skip_without(launch_tensor_core, latent_width + 64, latent_width)
    tiling = Tiling(latent_width + 64, latent_width, 1, 32, 2)
    batch = batch_for(rng, tiling, [100, 70], [33, 12], heads=8)
    assert_close(batch, launched(launch_tensor_core, batch))


@pytest.mark.gpu
def test_the_variant_for_a_small_shared_memory(rng):
    skip_without(launch_tensor_core)
    batch = batch_for(rng, KIMI, [100, 700], [33, 12], heads=8, scale=0.1)
    assert_close(batch, launched(launch_tensor_core, batch, 2, Tiling(576, 512, 1, 32, 8)))


@pytest.mark.gpu
@every_launcher
def test_spikes_move_the_maximum(rng, launch):
    """Rows grow along the prefix, so that the maxima of the two warpgroups move in turn; 1, 2, 3 and 40 tiles."""
    skip_without(launch)
    for prefix in (50, 100, 170, 2500):
        batch = batch_for(rng, KIMI, [prefix], [9], heads=7, scale=0.1)
        pool = from_bfloat16(batch.kv_pool)
        for row in range(prefix + 9):
            pool[batch.block_table[0, row // 16], row % 16] *= 1 + row // 32 % 9
        batch = batch._replace(kv_pool=to_bfloat16(pool))
        assert_close(batch, launched(launch, batch, 1))


@pytest.mark.gpu
@every_launcher
def test_a_node_that_sees_nothing(rng, launch):
    skip_without(launch)
    batch = batch_for(rng, KIMI, [0], [70], heads=2)
    bits = batch.ancestor_bits.copy()
    bits[0, 4:] = 0
    out, lse = launched(launch, batch._replace(ancestor_bits=bits), 1)
    assert (out[0, 4:] == 0).all() and (lse[0, 4:] == -np.inf).all()
    assert_close(batch._replace(ancestor_bits=bits), (out, lse))


@pytest.mark.gpu
@every_launcher
def test_the_same_inputs_give_the_same_bits(rng, launch):
    """An answer that moves from run to run would be a race."""
    skip_without(launch)
    batch = batch_for(rng, KIMI, [2000, 1000], [33, 20], heads=16, scale=0.14467963)
    first = launched(launch, batch, 3)
    for _ in range(20):
        for a, b in zip(launched(launch, batch, 3), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@every_launcher
@pytest.mark.parametrize("bad", [-1, 10**6, NOBODY])
def test_a_page_outside_the_pool_is_not_seen(rng, launch, bad):
    skip_without(launch)
    batch = batch_for(rng, KIMI, [160], [3], heads=3, scale=0.1)
    table = batch.block_table.copy()
    table[0, 3] = bad
    got = launched(launch, batch._replace(block_table=table), 1)
    kept = np.delete(batch.block_table, 3, axis=1)
    assert_close(batch._replace(block_table=kept, prefix_lengths=batch.prefix_lengths - 16), got)


@pytest.mark.gpu
@pytest.mark.parametrize("version", GPU_VERSIONS)
def test_rejects_what_it_cannot_take(rng, version):
    batch = random_batch(rng, [6], [3], latent=512, rope=64)
    args, keywords = arguments(batch)
    with pytest.raises(ValueError, match=f"q: got float32, version '{version}' needs float16 or uint16"):
        tree_attention(*args, **keywords, version=version)
    wide = batch_for(rng, KIMI, [6], [3], heads=1)
    moved = on_device((np.concatenate([wide.kv_pool.reshape(-1), wide.kv_pool[0, 0]]),))[0]
    pool = moved[1 : 1 + wide.kv_pool.size].reshape(wide.kv_pool.shape)  # two bytes further
    arrays = on_device((wide.q, *wide[2:6]))
    with pytest.raises(ValueError, match=f"kv_pool: got address 0x.*, version '{version}' needs a multiple of 16"):
        tree_attention(arrays[0], pool, *arrays[1:], wide.scale, latent_width=512, version=version)
    batch = random_batch(rng, [6], [3], latent=100, rope=28, dtype="float16")
    args, keywords = arguments(batch)
    with pytest.raises(ValueError, match=rf"q: got rows of 100 \+ 28, version '{version}' needs 512 \+ 64"):
        tree_attention(*args, **keywords, version=version)


@pytest.mark.gpu
def test_auto_uses_the_tensor_cores(rng):
    skip_without(launch_tensor_core)
    batch = batch_for(rng, KIMI, [300], [20], heads=4, scale=0.1)
    args, keywords = arguments(batch)
    out, lse = tree_attention(*args, **keywords, version="auto")
    assert_close(batch, (out, lse))
    exact = tree_attention(*args, **keywords, version="split_kv")[0]
    assert not np.array_equal(out, exact)


@pytest.mark.gpu
@every_launcher
def test_rows_past_a_short_table_are_not_seen(rng, launch):
    skip_without(launch)
    batch, expected = cut_short(batch_for(rng, KIMI, [200], [3], heads=2, slots=3, scale=0.01), 5)
    assert_near(launched(launch, batch, 1), expected)


@pytest.mark.gpu
@every_launcher
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_row_reaches_only_who_sees_it(rng, launch, value):
    skip_without(launch)
    for prefix in (0, 62, 70, 1000):
        sound, broken = with_a_broken_row(batch_for(rng, KIMI, [prefix], [5], heads=3, slots=5), rng, value)
        assert_others_near(launched(launch, broken, 1), reference(sound))
