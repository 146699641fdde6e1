"""Attention over splits of the keys: every cut gives the same answer, and so does the merge of any parts."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest

from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.tree_attention import split_kv
from ddtree_numba.stages.tree_attention.split_kv import (
    MAX_SPLITS,
    choose_splits,
    launch_split_kv,
    merge_splits_kernel,
    split_buffers,
)
from tests.helpers import on_device, on_host, poisoned
from tests.test_tree_attention import Batch, assert_close, random_batch


def attend_in_splits(batch: Batch, splits: int):
    """Run the launcher with a given number of splits, over poisoned outputs and poisoned parts."""
    shape = (*batch.q.shape[:3], batch.latent_width)
    parts, part_lse = split_buffers(splits, math.prod(shape[:3]), batch.latent_width, 0)
    parts.copy_to_device(poisoned(parts.shape, np.float32))
    part_lse.copy_to_device(poisoned(part_lse.shape, np.float32))
    out, lse = on_device((poisoned(shape, np.float32), poisoned(shape[:3], np.float32)))
    is_bfloat16 = np.int32(batch.q.dtype == np.uint16)
    launch_split_kv(*on_device(batch[:6]), np.float32(batch.scale), is_bfloat16, out, lse, stream=0, splits=splits)
    return on_host((out, lse))


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_splits(rng, splits, dtype):
    """Also more splits than a request has tiles: the empty ones have no part in the sum."""
    batch = random_batch(rng, [30, 0, 5], [3, 5, 1], heads=1, latent=4, rope=1, page_size=4, dtype=dtype)
    assert_close(batch, attend_in_splits(batch, splits))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_page_size(rng, page_size):
    batch = random_batch(rng, [17, 64], [4, 2], heads=1, latent=4, rope=1, page_size=page_size)
    assert_close(batch, attend_in_splits(batch, 3))


def test_a_node_that_sees_nothing_in_any_split(rng):
    batch = random_batch(rng, [0], [12], heads=1, latent=4, rope=1)
    bits = batch.ancestor_bits.copy()
    bits[0, 3:] = 0
    out, lse = attend_in_splits(batch._replace(ancestor_bits=bits), 2)
    assert (out[0, 3:] == 0).all() and (lse[0, 3:] == -np.inf).all()
    assert np.isfinite(out[0, :3]).all() and np.isfinite(lse[0, :3]).all()


def merge(parts, part_lse):
    out = poisoned(parts.shape[1:], np.float32)
    arrays = on_device((parts, part_lse, out, poisoned(part_lse.shape[1:], np.float32)))
    merge_splits_kernel[parts.shape[1], block_threads(64, simulator=2)](*arrays)
    return on_host(arrays[2:])


def test_merge_by_hand():
    """Shares 1 : 3 : nothing of one row; a row that nobody saw."""
    parts = np.array([[[2.0, 10.0], [9, 9]], [[4.0, 20.0], [9, 9]], [[np.nan, np.nan], [9, 9]]], np.float32)
    part_lse = np.array([[0.0, -np.inf], [math.log(3), -np.inf], [-np.inf, -np.inf]], np.float32)
    out, lse = merge(parts, part_lse)
    np.testing.assert_allclose(out, [[3.5, 17.5], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(lse, [math.log(4), -np.inf], rtol=1e-6)


def test_merge_is_exact_for_parts_of_any_size(rng):
    """lse far apart, beyond what exp can hold in float32."""
    splits, rows = 5, 3
    parts = rng.standard_normal((splits, rows, 4)).astype(np.float32)
    part_lse = (rng.standard_normal((splits, rows)) * [[1], [100], [1], [-100], [1]] + 500).astype(np.float32)
    out, lse = merge(parts, part_lse)
    wide = part_lse.astype(np.float64)
    shares = np.exp(wide - wide.max(axis=0))
    np.testing.assert_allclose(out, np.einsum("sr,src->rc", shares / shares.sum(axis=0), parts), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, wide.max(axis=0) + np.log(shares.sum(axis=0)), rtol=1e-6)


def test_choose_splits_fills_the_machine_and_keeps_splits_long():
    assert choose_splits(blocks=10**6, tiles=1000) == 1
    assert choose_splits(blocks=1, tiles=10**6) <= MAX_SPLITS
    for tiles in (0, 1, 7, 8, 100):
        assert 1 <= choose_splits(1, tiles) <= max(1, tiles // 8)


@pytest.mark.parametrize("stream_of", [lambda: 0, cuda.stream], ids=["default", "own"])
def test_buffers_are_kept_and_grow(stream_of):
    stream = stream_of()
    small = split_buffers(2, 3, 4, stream)
    assert small[0].shape == (24,) and small[1].shape == (6,)
    large = split_buffers(50, 300, 4, stream)
    assert large[0].shape == (60000,) and large[1].shape == (15000,)
    again = split_buffers(2, 3, 4, stream)
    again[0].copy_to_device(np.full(24, 3, np.float32))
    assert (large[0][:24].copy_to_host() == 3).all()


def test_buffers_of_a_stream_stay_while_it_lives_and_go_with_it(monkeypatch):
    made = []

    def device_array(shape, dtype):
        array = cuda.to_device(np.zeros(shape, dtype))
        made.append((weakref.ref(array), shape))
        return array

    monkeypatch.setattr(split_kv.cuda, "device_array", device_array)
    stream, other = cuda.stream(), cuda.stream()
    for rows in (3, 4, 5, 6, 7, 100, 101, 3):
        split_buffers(2, rows, 4, stream)
    split_buffers(2, 3, 4, other)
    sizes = [shape for _, shape in made]
    assert sizes == [30, 60, 120, 1000, 2000, 30]  # each at least twice the one before; the other stream has its own
    gc.collect()
    assert all(array() is not None for array, _ in made)  # a recorded graph may use any of them
    recorded = Recorded(lambda _: None, stream)
    del stream
    gc.collect()
    assert all(array() is not None for array, _ in made)  # and a graph keeps its stream
    del recorded
    gc.collect()
    assert [array() is None for array, _ in made] == [True] * 5 + [False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("splits", [1, 2, 3, 17, MAX_SPLITS])
def test_kimi_sizes_in_splits(rng, dtype, splits):
    batch = random_batch(
        rng, [700, 63, 0], [33, 20, 5], heads=4, latent=512, rope=64, page_size=16, dtype=dtype, scale=0.1
    )
    assert_close(batch, attend_in_splits(batch, splits))


@pytest.mark.gpu
def test_streams_do_not_share_parts(rng):
    """Two launches on two streams at once: each has its own buffers."""
    batches = [random_batch(rng, [3000], [9], heads=4, latent=64, rope=16, page_size=16) for _ in range(2)]
    streams = [cuda.stream(), cuda.stream()]
    results = []
    for batch, stream in zip(batches, streams, strict=True):
        shape = (*batch.q.shape[:3], batch.latent_width)
        out, lse = on_device((poisoned(shape, np.float32), poisoned(shape[:3], np.float32)))
        arrays = on_device(batch[:6])
        cuda.synchronize()
        launch_split_kv(*arrays, np.float32(batch.scale), np.int32(0), out, lse, stream=stream, splits=8)
        results.append((out, lse, arrays))
    for batch, stream, (out, lse, _) in zip(batches, streams, results, strict=True):
        stream.synchronize()
        assert_close(batch, on_host((out, lse)))
