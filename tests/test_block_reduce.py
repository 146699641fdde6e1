"""Block-wide reductions: every thread gets the right number, for any block size, ties, NaN and repetition."""

import time

import numpy as np
import pytest

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.block_reduce import SCRATCH_SIZE, block_any, block_argmax, block_max, block_sum
from tests.helpers import on_device, on_host, poisoned

BLOCK_SIZES = (1, 2, 8, 32, 64, 256, 1024) if ON_GPU else (1, 2, 8, 32)
NAN = float("nan")


@cuda.jit
def reduce_rows_kernel(values, indices, maxima, best_values, best_indices, sums, flags):
    """Reduce row after row of `values` with one scratch array; every thread writes what it was given."""
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
    index_scratch = cuda.shared.array(SCRATCH_SIZE, np.int32)
    thread = cuda.threadIdx.x
    for row in range(values.shape[0]):
        value = values[row, thread]
        maxima[row, thread] = block_max(value, scratch)
        best, index = block_argmax(value, indices[row, thread], scratch, index_scratch)
        best_values[row, thread] = best
        best_indices[row, thread] = index
        sums[row, thread] = block_sum(value, scratch)
        flags[row, thread] = block_any(np.int32(value > np.float32(2)))


@cuda.jit
def reduce_int_kernel(values, maxima, sums):
    scratch = cuda.shared.array(SCRATCH_SIZE, np.int32)
    thread = cuda.threadIdx.x
    maxima[thread] = block_max(values[thread], scratch)
    sums[thread] = block_sum(values[thread], scratch)


@cuda.jit
def reduce_double_kernel(values, maxima, sums):
    scratch = cuda.shared.array(SCRATCH_SIZE, np.float64)
    thread = cuda.threadIdx.x
    maxima[thread] = block_max(values[thread], scratch)
    sums[thread] = block_sum(values[thread], scratch)


def reduce_rows(values, indices=None):
    threads = values.shape[1]
    if indices is None:
        indices = np.broadcast_to(np.arange(threads, dtype=np.int32), values.shape).copy()
    dtypes = (np.float32, np.float32, np.int32, np.float32, np.int32)
    results = on_device([poisoned(values.shape, dtype) for dtype in dtypes])
    reduce_rows_kernel[1, threads](*on_device((values, indices)), *results)
    return on_host(results)


def first_largest(values, indices):
    """(value, index) of the largest, lowest index on ties, NaN first: by sorting, unlike the kernel."""
    keys = [
        (0 if np.isnan(value) else 1, 0.0 if np.isnan(value) else -float(value), int(index))
        for value, index in zip(values, indices, strict=True)
    ]
    place = keys.index(min(keys))
    return values[place], indices[place]


@pytest.mark.parametrize("threads", BLOCK_SIZES)
def test_every_thread_gets_every_result(threads):
    rng = np.random.default_rng(threads)
    values = rng.normal(size=(4, threads)).astype(np.float32)
    values[1] = np.round(values[1])  # many ties
    values[2] -= 100  # an all-negative row: a reduction that starts from 0 fails
    values[3] = -np.inf
    indices = np.stack([rng.permutation(threads) * 3 for _ in range(4)]).astype(np.int32)
    maxima, best_values, best_indices, sums, flags = reduce_rows(values, indices)
    for row in range(4):
        value, index = first_largest(values[row], indices[row])
        assert (maxima[row] == value).all()
        assert (best_values[row] == value).all()
        assert (best_indices[row] == index).all()
        assert (flags[row] == (values[row] > 2).any()).all()
        bits = sums[row].view(np.uint32)
        assert (bits == bits[0]).all(), "threads disagree on the sum"
    exact = values[:3].astype(np.float64)
    # n - 1 roundings of at most half a unit in the last place each, of partial sums no larger than the sum of
    # |x|.
    bound = np.abs(exact).sum(axis=1) * threads * 2.0**-24
    assert (np.abs(sums[:3, 0] - exact.sum(axis=1)) <= bound).all()
    assert (sums[3] == -np.inf).all()


@pytest.mark.parametrize("threads", BLOCK_SIZES[1:])
def test_largest_value_in_each_thread_in_turn(threads):
    """A reduction that misses a lane or a warp fails for one of these rows."""
    places = sorted({0, 1, threads // 2 - 1, threads // 2, threads - 2, threads - 1} & set(range(threads)))
    values = np.zeros((len(places), threads), np.float32)
    values[np.arange(len(places)), places] = 1
    maxima, _, best_indices, sums, _ = reduce_rows(values)
    assert (maxima == 1).all()
    assert (sums == 1).all()
    assert (best_indices == np.array(places)[:, None]).all()


def test_nan_reaches_every_thread():
    values = np.ones((4, 8), np.float32)
    values[0, 0], values[1, 7], values[2, 3:5] = NAN, NAN, NAN
    maxima, best_values, best_indices, sums, _ = reduce_rows(values)
    for result in (maxima, best_values, sums):
        assert np.isnan(result[:3]).all()
        assert not np.isnan(result[3]).any()
    assert best_indices[:, 0].tolist() == [0, 7, 3, 0]
    assert (best_indices == best_indices[:, :1]).all()


def test_nan_beats_infinity():
    values = np.array([[np.inf, NAN, -np.inf, np.inf]], np.float32)
    maxima, _, best_indices, _, _ = reduce_rows(values)
    assert np.isnan(maxima).all()
    assert (best_indices == 1).all()


def test_nan_ties_give_lowest_index_in_any_thread_order():
    values = np.array([[1, NAN, NAN, 2], [NAN, 3, NAN, NAN]], np.float32)
    indices = np.array([[0, 8, 5, 1], [3, 0, 7, 2]], np.int32)
    assert (reduce_rows(values, indices)[2] == [[5] * 4, [2] * 4]).all()


def test_any_is_one_however_many_flags_are_set():
    values = np.array([[0, 0, 0, 0], [0, 0, 9, 0], [9, 9, 9, 9]], np.float32)
    assert (reduce_rows(values)[4] == [[0] * 4, [1] * 4, [1] * 4]).all()


def test_equal_values_give_lowest_index_in_any_thread_order():
    values = np.array([[3, 5, 5, 5], [-0.0, 0.0, -1, 0.0], [-np.inf] * 4], np.float32)
    indices = np.array([[9, 8, 2, 7], [6, 4, 1, 5], [4, 3, 2, 9]], np.int32)
    best_indices = reduce_rows(values, indices)[2]
    assert best_indices[:, 0].tolist() == [2, 4, 2]
    assert (best_indices == best_indices[:, :1]).all()


def test_back_to_back_calls_share_scratch():
    """Forty reductions in a row on the same scratch; a slow thread must not see the next call's numbers."""
    rng = np.random.default_rng(0)
    values = rng.integers(-50, 50, size=(10, 4)).astype(np.float32)
    maxima, _, best_indices, sums, _ = reduce_rows(values)
    assert (maxima == values.max(axis=1, keepdims=True)).all()
    assert (best_indices == values.argmax(axis=1)[:, None]).all()
    assert (sums == values.sum(axis=1, keepdims=True)).all()


class SlowScratch:
    """Shared memory that thread 3 writes late and thread 0 reads late: without a barrier the wrong number is met."""

    def __init__(self, array):
        self.array = array

    def __setitem__(self, place, value):
        time.sleep(0.002 if cuda.threadIdx.x == 3 else 0)
        self.array[place] = value

    def __getitem__(self, place):
        time.sleep(0.001 if cuda.threadIdx.x == 0 else 0)
        return self.array[place]


@cuda.jit
def reduce_slowly_kernel(values, results):
    scratch = SlowScratch(cuda.shared.array(SCRATCH_SIZE, np.float32))
    index_scratch = SlowScratch(cuda.shared.array(SCRATCH_SIZE, np.int32))
    thread = cuda.threadIdx.x
    for row in range(values.shape[0]):
        results[row, 0, thread] = block_max(values[row, thread], scratch)
        results[row, 1, thread] = block_max(-values[row, thread], scratch)
        results[row, 2, thread] = block_sum(values[row, thread], scratch)
        results[row, 3, thread] = block_sum(np.float32(1), scratch)
        results[row, 4, thread] = block_argmax(values[row, thread], thread, scratch, index_scratch)[1]
        results[row, 5, thread] = block_argmax(-values[row, thread], thread, scratch, index_scratch)[1]


@pytest.mark.skipif(ON_GPU, reason="delays threads in Python; compute-sanitizer's racecheck looks for this on a GPU")
def test_no_thread_reads_too_early_or_writes_too_early():
    values = np.array([[1, 2, 4, 8], [8, 4, 2, 1], [-5, -9, -7, -6]], np.float32)
    results = np.full((3, 6, 4), -7, np.float32)
    reduce_slowly_kernel[1, 4](values, results)
    expected = [[8, -1, 15, 4, 3, 0], [8, -1, 15, 4, 0, 3], [-5, 9, -27, 4, 0, 1]]
    np.testing.assert_array_equal(results, np.repeat(expected, 4).reshape(3, 6, 4))


def test_integers_and_doubles():
    ints = np.array([2**31 - 5, -3, 7, -(2**30)], np.int32)
    results = on_device((poisoned(4, np.int32), poisoned(4, np.int32)))
    reduce_int_kernel[1, 4](*on_device((ints,)), *results)
    maxima, sums = on_host(results)
    assert (maxima == 2**31 - 5).all()
    assert (sums == ints.sum()).all()
    doubles = np.array([1.0, 1.0 + 2.0**-40, 2.0**-50, 0.5])
    results = on_device((poisoned(4, np.float64), poisoned(4, np.float64)))
    reduce_double_kernel[1, 4](*on_device((doubles,)), *results)
    maxima, sums = on_host(results)
    assert (maxima == 1.0 + 2.0**-40).all(), "the value went through float32"
    assert (sums == doubles.sum()).all()


@pytest.mark.gpu
def test_gpu_hundreds_of_rows_at_full_block():
    rng = np.random.default_rng(1)
    for threads in (16, 64, 128, 512, 1024):
        values = np.round(rng.normal(size=(300, threads)) * 4).astype(np.float32)
        maxima, best_values, best_indices, sums, flags = reduce_rows(values)
        assert (maxima == values.max(axis=1, keepdims=True)).all()
        assert (best_values == maxima).all()
        assert (best_indices == values.argmax(axis=1)[:, None]).all()
        assert (sums == values.sum(axis=1, keepdims=True)).all(), "small integers add exactly in any order"
        assert (flags == (values > 2).any(axis=1, keepdims=True)).all()
