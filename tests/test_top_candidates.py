"""Candidates: the same ids whatever the block and the number format, and log-probabilities within a derived bound."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

import ddtree_numba.stages.top_candidates.block_per_row as first_rung
import ddtree_numba.stages.top_candidates.fused as fused
from ddtree_numba.backend import cuda
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.stages.top_candidates import VERSIONS, best_version, top_candidates, top_candidates_reference
from ddtree_numba.stages.top_candidates.fused import (
    THREADS,
    WARPS,
    make_workspace,
    segments_for,
    workspace_for,
)
from tests.helpers import on_device, on_host, poisoned, poisoned_like

INF, NAN = float("inf"), float("nan")
UNIT = 2.0**-24  # a float32 operation is off by at most this part of its result


def sorted_by_hand(row, k):
    """One row's (log-probabilities in float64, ids), with Python's sort and an exactly rounded sum."""
    row, k = [float(x) for x in row], min(k, len(row))
    if any(math.isnan(x) or x == INF for x in row) or max(row) == -INF:
        return [-INF] * k, list(range(k))
    ids = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
    largest = max(row)
    log_total = math.log(math.fsum(math.exp(x - largest) for x in row))
    return [(row[token] - largest) - log_total for token in ids], ids


def error_bound(log_probs, vocab, version="block_per_row"):
    """How far a float32 log-softmax may be off.

    A term exp(x - m) carries the rounding of x - m, |x - m| units, and of the exponential, 2 places = 4 units. Weighted
    by the terms' share of the total, |x - m| averages at most ln V (else the entropy would be larger than ln V), so the
    logarithm of the total is off by 4 + ln V units. Rounding to float32 adds one unit of the result on both sides.

    The fused kernel multiplies by log2(e), which is itself off by a quarter of a unit: 1.25 ln V. It adds 32 terms in
    float32, five roundings deep, and more in float64: one unit is left for that.
    """
    finite = np.where(np.isfinite(log_probs), np.abs(log_probs), 0)
    of_sum = 10 + 1.25 * math.log(vocab) if version == "fused" else 4 + math.log(vocab)
    return UNIT * (of_sum + 2 * finite.astype(np.float64))


def assert_equals_reference(got, logits, k, version="block_per_row"):
    log_probs, token_ids = got
    expected, expected_ids = top_candidates_reference(logits, k)
    assert log_probs.dtype == np.float32 and token_ids.dtype == np.int32
    np.testing.assert_array_equal(token_ids, expected_ids, strict=True)
    np.testing.assert_array_equal(np.isneginf(log_probs), np.isneginf(expected), strict=True)
    finite = np.isfinite(expected)
    error = np.abs(log_probs[finite].astype(np.float64) - expected[finite])
    assert (error <= error_bound(expected, logits.shape[-1], version)[finite]).all(), f"off by {error.max()}"


def assert_well_formed(log_probs, token_ids, vocab):
    """What the contract promises for every row, valid or not."""
    assert not np.isnan(log_probs).any()
    falling = np.diff(np.where(np.isneginf(log_probs), np.finfo(np.float32).min, log_probs), axis=-1) <= 0
    assert falling.all()
    assert ((token_ids >= 0) & (token_ids < vocab)).all()
    for row in token_ids.reshape(-1, token_ids.shape[-1]):
        assert len(set(row.tolist())) == len(row)


def random_logits(rng, shape, step=None):
    """Rows of every kind: sharp and flat, with ties (`step`), spikes, -inf, and a few that are no distribution."""
    logits = rng.normal(size=shape) * rng.choice([0.1, 1.0, 10.0], (*shape[:-1], 1)) + rng.choice([0, 50, -300])
    if step is not None:
        logits = np.round(logits / step) * step
    logits = logits.astype(np.float32)
    for row in logits.reshape(-1, shape[-1]):
        kind = rng.integers(6)
        somewhere = rng.integers(shape[-1], size=1 + shape[-1] // 3)
        if kind == 0:
            row[somewhere] = -INF
        elif kind == 1:
            row[somewhere[0]] = rng.choice([NAN, INF, -INF])
        elif kind == 2:
            row[somewhere[0]] += 40
        elif kind == 3 and rng.random() < 0.3:
            row[:] = -INF
    return logits


FORMATS = {
    "float32": lambda logits: logits,
    "float16": lambda logits: logits.astype(np.float16),
    "bfloat16": to_bfloat16,
}
formats = pytest.mark.parametrize("encode", FORMATS.values(), ids=FORMATS.keys())
versions = pytest.mark.parametrize("version", VERSIONS)
both = pytest.mark.parametrize(
    "function",
    [top_candidates_reference, *(functools.partial(top_candidates, version=version) for version in VERSIONS)],
    ids=["reference", *VERSIONS],
)


def one_row(function, row, k, encode=np.asarray):
    log_probs, token_ids = function(encode(np.array([[row]], np.float32)), k)
    return log_probs[0, 0].tolist(), token_ids[0, 0].tolist()


# --- known answers, for both -----------------------------------------------------------------------------------------


@both
def test_minus_infinity_is_never_a_candidate(function):
    log_probs, ids = one_row(function, [-INF, 2, -INF, -INF, 1, -INF], 3)
    assert ids == [1, 4, 0]
    assert log_probs == [pytest.approx(-0.3133, abs=5e-5), pytest.approx(-1.3133, abs=5e-5), -INF]


@both
def test_a_row_of_minus_infinity_leaves_its_neighbours_alone(function):
    logits = np.zeros((1, 3, 8), np.float32)
    logits[0, 1] = -INF
    log_probs, ids = function(logits, 4)
    assert log_probs[0, 1].tolist() == [-INF] * 4
    assert ids[0].tolist() == [[0, 1, 2, 3]] * 3
    np.testing.assert_allclose(log_probs[0, [0, 2]], math.log(1 / 8), rtol=1e-6)


@both
def test_equal_logits_in_the_order_of_ids(function):
    log_probs, ids = one_row(function, [3.5] * 8, 4)
    assert ids == [0, 1, 2, 3]
    assert log_probs == pytest.approx([math.log(1 / 8)] * 4, rel=1e-6)
    assert one_row(function, [0.0, -0.0, -1.0, 0.0], 4)[1] == [0, 1, 3, 2]


@both
@pytest.mark.parametrize("k", [8, 20, 2**31 - 1])
def test_k_is_cut_to_the_vocabulary(function, k):
    log_probs, ids = one_row(function, [1, 2, 3, 4, 8, 7, 6, 5], k)
    assert ids == [4, 5, 6, 7, 3, 2, 1, 0]
    assert sum(math.exp(x) for x in log_probs) == pytest.approx(1, abs=1e-6)


@both
def test_large_logits_keep_their_digits(function):
    assert one_row(function, [10000, 9999, 9998], 3)[0] == pytest.approx([-0.40761, -1.40761, -2.40761], abs=5e-6)


@both
def test_bfloat16_is_summed_in_more_than_bfloat16(function):
    log_probs, ids = one_row(function, [20, 19.875, 19.75, 3, 1], 5, to_bfloat16)
    assert ids == [0, 1, 2, 3, 4]
    assert sum(math.exp(x) for x in log_probs) == pytest.approx(1, abs=1e-6)


@both
@pytest.mark.parametrize("bad", [NAN, INF, -NAN])
@pytest.mark.parametrize("where", [0, 3, 7])
def test_nan_or_infinity_anywhere_makes_the_row_invalid(function, bad, where):
    row = [7.0, 6, 5, 4, 3, 2, 1, 0]
    row[where] = bad
    assert one_row(function, row, 3) == ([-INF] * 3, [0, 1, 2])


@both
def test_the_largest_logit_at_each_place(function):
    logits = np.full((1, 37, 37), -1, np.float32)
    logits[0, np.arange(37), np.arange(37)] = 1
    assert function(logits, 2)[1][0].tolist() == [[token, 0 if token else 1] for token in range(37)]


@both
@pytest.mark.filterwarnings("ignore:.*overflow encountered")  # NumPy tells what a GPU does in silence
def test_the_widest_possible_spread(function):
    largest = float(np.finfo(np.float32).max)
    log_probs, ids = one_row(function, [-largest, largest, 0.0], 3)
    assert ids == [1, 2, 0]
    assert log_probs == [0.0, -largest, -INF], "its log-probability is below what float32 holds"


@both
@pytest.mark.parametrize("encode", [np.asarray, to_bfloat16], ids=["float32", "bfloat16"])
def test_logits_of_any_size_keep_their_distances(function, encode):
    """Logits around a power of two, ties among them: no product with log2(e) may round what their differences tell."""
    for power in (-100, -20, 0, 3, 9, 20, 28, 29, 30, 31, 60, 99, 101, 126):
        for sign in (1.0, -1.0):
            steps = np.array([1, 1.0078125, 1, 1.015625, 1.0078125, 1.015625, 1.015625, 0.99609375], np.float32)
            row = np.ldexp(steps, power).astype(np.float32) * np.float32(sign)
            expected, ids = sorted_by_hand(row, 5)
            got, got_ids = one_row(function, row, 5, encode)
            assert got_ids == ids
            bound = error_bound(np.array(expected), 8, "fused")
            assert (np.abs(np.array(got) - np.array(expected)) <= bound).all(), (power, sign, got, expected)


# --- the reference against sorting by hand ---------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("step", [None, 0.5], ids=["continuous", "ties"])
def test_reference_equals_sorting_by_hand(rng, encode, step):
    for vocab in (1, 2, 7, 31, 33, 258):
        logits = encode(random_logits(rng, (3, 5, vocab), step))
        k = int(rng.integers(1, 40))
        log_probs, token_ids = top_candidates_reference(logits, k)
        assert_well_formed(log_probs, token_ids, vocab)
        values = from_bfloat16(logits) if logits.dtype == np.uint16 else logits
        for b, depth in np.ndindex(3, 5):
            expected, ids = sorted_by_hand(values[b, depth], k)
            assert token_ids[b, depth].tolist() == ids
            np.testing.assert_allclose(log_probs[b, depth], expected, rtol=2 * UNIT, atol=1e-15 * vocab)


# --- the kernel ------------------------------------------------------------------------------------------------------


@formats
@versions
@pytest.mark.parametrize("step", [None, 0.5], ids=["continuous", "ties"])
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (2, 5), (31, 4), (33, 33), (258, 3)])
def test_kernel_equals_the_reference(rng, encode, version, step, vocab, k):
    logits = encode(random_logits(rng, (2, 3, vocab), step))
    shape = (2, 3, min(k, vocab))
    out = poisoned(shape, np.float32), poisoned(shape, np.int32)
    got = top_candidates(logits, k, version=version, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    assert_equals_reference(got, logits, k, version)
    assert_well_formed(*got, vocab)


@versions
def test_a_vocabulary_that_no_vector_width_divides(rng, version):
    logits = random_logits(rng, (1, 2, 1023), step=0.25)
    assert_equals_reference(top_candidates(logits, 3, version=version), logits, 3, version)


@pytest.mark.parametrize("threads", [1, 2, 8, 32])
def test_any_block_size(rng, monkeypatch, threads):
    monkeypatch.setattr(first_rung, "block_threads", lambda gpu, simulator=8: threads)
    for vocab in (1, 5, 41):  # fewer tokens than threads, and a ragged end
        logits = random_logits(rng, (1, 2, vocab), step=0.5)
        assert_equals_reference(top_candidates(logits, 6, version="block_per_row"), logits, 6)


HARD_ROWS = {
    "ascending": lambda rng, n: np.linspace(-5, 5, n),
    "descending": lambda rng, n: np.linspace(5, -5, n),
    "equal": lambda rng, n: np.full(n, 0.5),
    "sawtooth": lambda rng, n: np.arange(n) % 64 + np.arange(n) / n,
    # Up to 1000, so that float16 holds it too: the best tokens all lie in the same few columns, the last ones first.
    "few columns": lambda rng, n: np.where(np.arange(n) % 64 < 8, 1, -1) * np.arange(n) * (1000 / n),
    "late spike": lambda rng, n: np.where(np.arange(n) < n - 3, -300.0, 90.0),
    "leading -inf": lambda rng, n: np.where(np.arange(n) < n * 3 // 4, -INF, -rng.random(n)),
    "two values": lambda rng, n: rng.integers(0, 2, n),
    # Half of the threads lift the floor to 1000; the others then meet 900, below it and far above all they have seen.
    "two plateaus": lambda rng, n: (
        np.where(np.arange(n) // 8 % THREADS < THREADS // 2, np.arange(n) > n // 4, 0.9 * (np.arange(n) > n // 2))
        * 1000
    ),
}
hard_rows = pytest.mark.parametrize("row", HARD_ROWS.values(), ids=HARD_ROWS.keys())


@hard_rows
@pytest.mark.parametrize(("k", "segments"), [(2, 1), (40, 1), (3, 3), (64, 2)])
def test_rows_made_to_be_hard(rng, row, k, segments):
    """The list fills again and again, or every logit ties with the floor."""
    logits = np.stack([row(rng, 1111), row(rng, 1111)[::-1]])[None].astype(np.float32)
    got = top_candidates(logits, k, version="fused", workspace=make_workspace(2, segments))
    assert_equals_reference(got, logits, k, "fused")


@pytest.mark.parametrize("segments", [1, 3])
def test_the_last_logit_of_rows_that_start_anywhere(segments):
    """A row that one round of vectors just holds, if it starts where one does, needs another if it starts later."""
    vocab = fused._ROUND * 8 - 1
    logits = np.zeros((1, 8, vocab), np.float32)
    logits[..., -1] = 1
    got = top_candidates(logits, 2, version="fused", workspace=make_workspace(8, segments))
    assert_equals_reference(got, logits, 2, "fused")


def test_the_best_logit_is_the_bound_that_ties_are_cut_at():
    """97 logits reach the floor in the simulator, one too many; the best, just before the next, starts a vector."""
    row = np.full(1111, 0.5, np.float32)
    row[:89], row[96:104], row[64:66] = 1, 1, 1 + 2.0**-23  # the same key; what is read second holds the best
    got = top_candidates(row[None, None], 1, version="fused", workspace=make_workspace(1, 1))
    assert_equals_reference(got, row[None, None], 1, "fused")


@pytest.mark.parametrize("segments", [1, 2, 7])
def test_an_invalid_segment_makes_the_row_invalid(segments):
    for place, bad in itertools.product((0, 300, 599), (NAN, INF)):
        logits = np.zeros((1, 2, 600), np.float32)
        logits[0, 0, place] = bad
        got = top_candidates(logits, 3, version="fused", workspace=make_workspace(2, segments))
        assert_equals_reference(got, logits, 3, "fused")


def test_one_workspace_serves_one_launch_after_the_other(rng):
    workspace = make_workspace(2, 3)
    for _ in range(3):
        logits = random_logits(rng, (1, 2, 500), step=0.5)
        got = top_candidates(logits, 4, version="fused", workspace=workspace)
        assert_equals_reference(got, logits, 4, "fused")
        assert workspace.arrived.copy_to_host().tolist() == [0, 0]


def test_a_workspace_may_have_more_rows_than_needed(rng):
    logits = random_logits(rng, (1, 2, 500), step=0.5)
    for workspace in (make_workspace(5, 3), workspace_for(2, 500)):
        got = top_candidates(logits, 4, version="fused", workspace=workspace)
        assert_equals_reference(got, logits, 4, "fused")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda good: "x", TypeError, "workspace: got str, needs a Workspace"),
        (tuple, TypeError, "workspace: got tuple, needs a Workspace"),
        (lambda good: make_workspace(5, 2), ValueError, "workspace: got room for 5 rows, needs 6"),
        (
            lambda good: good._replace(keys=np.zeros((6, 256), np.uint64)),
            TypeError,
            "workspace.keys: got ndarray, needs a Numba device array",
        ),
        (
            lambda good: good._replace(arrived=None),
            TypeError,
            "workspace.arrived: got NoneType, needs a Numba device array",
        ),
        (
            lambda good: good._replace(keys=make_workspace(5, 2).keys),
            ValueError,
            "workspace.keys: got shape (5, ",
        ),
        (
            lambda good: good._replace(largest=make_workspace(6, 1).largest),
            ValueError,
            f"workspace.largest: got shape (6, {WARPS}), needs (6, {2 * WARPS})",
        ),
        (
            lambda good: good._replace(arrived=make_workspace(5, 2).arrived),
            ValueError,
            "workspace.arrived: got shape (5,), needs (6,)",
        ),
        (
            lambda good: good._replace(arrived=cuda.device_array(6, np.int64)),
            TypeError,
            "workspace.arrived: got int64, needs uint32",
        ),
        (
            lambda good: good._replace(arrived=cuda.device_array(12, np.uint32)[::2]),
            ValueError,
            "workspace.arrived: got a strided view, needs a C-contiguous array",
        ),
        (lambda good: good._replace(totals=good.arrived), TypeError, "workspace.totals: got uint32"),
        (
            lambda good: good._replace(totals=None),
            TypeError,
            "workspace.totals: got NoneType, needs a Numba device array",
        ),
        (
            lambda good: good._replace(totals=good.totals.reshape(12 * WARPS)),
            ValueError,
            f"workspace.totals: got shape ({12 * WARPS},)",
        ),
        (
            lambda good: good._replace(totals=good.largest),
            TypeError,
            "workspace.totals: got float32, needs float64",
        ),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_workspace_that_does_not_serve_is_named(version, change, error, message):
    """Of either rung: which one `auto` takes depends on the machine."""
    with pytest.raises(error) as caught:
        top_candidates(zeros(2, 3, 9), 2, version=version, workspace=change(make_workspace(6, 2)))
    assert message in str(caught.value)


def test_there_is_always_a_segment():
    for rows, vocab, multiprocessors in [(1, 1, 1), (1, 10**6, 132), (10**6, 7, 132), (15, 163840, 132)]:
        assert segments_for(rows, vocab, multiprocessors) >= 1


def test_the_version_is_named_or_chosen():
    with pytest.raises(ValueError, match="version: got 'best', needs 'auto' or 'block_per_row' or 'fused'"):
        top_candidates(zeros(1, 1, 4), 1, version="best")
    with pytest.raises(ValueError, match=r"k \(version 'fused'\): got 65, needs a whole number from 1 to 64"):
        top_candidates(zeros(1, 1, 100), 65, version="fused")
    assert best_version(65, 163840) == best_version(3, 100) == "block_per_row"


def test_no_depths():
    log_probs, token_ids = top_candidates(np.zeros((2, 0, 9), np.float32), 4)
    assert log_probs.shape == token_ids.shape == (2, 0, 4)
    assert top_candidates_reference(np.zeros((2, 0, 9), np.float32), 4)[1].shape == (2, 0, 4)


def test_the_input_is_only_read(rng):
    logits = random_logits(rng, (2, 2, 20))
    before = logits.copy()
    top_candidates(logits, 5)
    top_candidates_reference(logits, 5)
    np.testing.assert_array_equal(logits, before)


@formats
def test_device_arrays_stay_on_the_device(rng, encode):
    logits = encode(random_logits(rng, (2, 2, 30), step=0.5))
    (device,), stream = on_device((logits,)), cuda.stream()
    assert_equals_reference(on_host(top_candidates(device, 4)), logits, 4)
    out = on_device(poisoned_like(top_candidates_reference(logits, 4)))
    got = top_candidates(device, 4, out=out, stream=stream)
    stream.synchronize()
    assert got[0] is out[0] and got[1] is out[1]
    assert_equals_reference(on_host(out), logits, 4)


def test_numpy_on_a_stream_comes_back_complete(rng):
    logits = random_logits(rng, (2, 2, 30))
    assert_equals_reference(top_candidates(logits, 4, stream=cuda.stream()), logits, 4)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("logits", "k", "out", "error", "message"),
    [
        (zeros(2, 3, 4), 0, None, ValueError, "k: got 0, needs a whole number from 1"),
        (zeros(2, 3, 4), -5, None, ValueError, "k: got -5, needs a whole number from 1"),
        (zeros(2, 3, 4), 1.5, None, TypeError, "k: got 1.5, needs a whole number from 1"),
        (zeros(2, 3, 4), True, None, TypeError, "k: got True, needs a whole number from 1"),
        (zeros(2, 3, 0), 1, None, ValueError, "V of logits: got 0, needs a whole number from 1"),
        (zeros(0, 3, 4), 1, None, ValueError, "B of logits: got 0, needs a whole number from 1"),
        (zeros(3, 4), 1, None, ValueError, "logits: got shape (3, 4), needs [B, L, V]"),
        (
            zeros(2, 3, 4, dtype=np.float64),
            1,
            None,
            TypeError,
            "logits: got float64, needs float32 or float16",
        ),
        (zeros(2, 3, 8)[..., ::2], 1, None, ValueError, "logits: got a strided view, needs a C-contiguous array"),
        ([[[1.0]]], 1, None, TypeError, "logits: got list, needs a NumPy array or a device array"),
        (zeros(2, 3, 4), 2, zeros(2, 3, 2), TypeError, "out: got ndarray, needs a tuple (log_probs, token_ids)"),
        (zeros(2, 3, 4), 2, (zeros(2, 3, 2), zeros(2, 3, 2)), TypeError, "out (token_ids): got float32, needs int32"),
        (
            zeros(2, 3, 4),
            2,
            (zeros(2, 3, 3), zeros(2, 3, 2)),
            ValueError,
            "out (log_probs): got shape (2, 3, 3)",
        ),
    ],
)
def test_bad_input_is_named(logits, k, out, error, message):
    with pytest.raises(error) as caught:
        top_candidates(logits, k, out=out)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# --- sizes for a real GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("step", [None, 0.5], ids=["continuous", "ties"])
@pytest.mark.parametrize(
    ("batch", "depths", "vocab", "k"),
    [(1, 3, 163841, 64), (2, 2, 163840, 1), (64, 15, 2047, 33), (3, 7, 1023, 2000), (1, 1, 65537, 1024)],
)
def test_gpu_equals_the_reference(rng, encode, step, batch, depths, vocab, k):
    logits = encode(random_logits(rng, (batch, depths, vocab), step))
    shape = (batch, depths, min(k, vocab))
    for version in VERSIONS if k <= 64 else ["block_per_row"]:
        out = (poisoned(shape, np.float32), poisoned(shape, np.int32))
        got = top_candidates(logits, k, version=version, out=out)
        assert_equals_reference(got, logits, k, version)
        assert_well_formed(*got, vocab)


@pytest.mark.gpu
@formats
@hard_rows
def test_gpu_rows_made_to_be_hard(rng, row, encode):
    for vocab, k, segments in [(163840, 64, 1), (163835, 64, 40), (400001, 64, 1), (20001, 1, 3), (9000, 33, 2)]:
        logits = encode(np.stack([row(rng, vocab), row(rng, vocab)[::-1]])[None].astype(np.float32))
        got = top_candidates(logits, k, version="fused", workspace=make_workspace(2, segments))
        assert_equals_reference(got, logits, k, "fused")


@pytest.mark.gpu
@formats
def test_gpu_logits_from_any_address(rng, encode):
    """Views that begin 0..9 items after a multiple of 16 bytes, with NaN before and behind."""
    for before in range(10):
        row = encode(np.full(70030, NAN, np.float32))
        logits = encode(random_logits(rng, (2, 3, 10007), step=0.25))
        row[before : before + logits.size] = logits.ravel()
        (device,) = on_device((row,))
        view = device[before : before + logits.size].reshape(logits.shape)
        got = on_host(top_candidates(view, 20, version="fused"))
        assert_equals_reference(got, logits, 20, "fused")


@pytest.mark.gpu
def test_gpu_a_total_of_many_small_terms():
    """163840 equal terms: added in float32 one by one they would be off by more than the bound."""
    logits = np.zeros((1, 1, 163840), np.float32)
    log_probs, token_ids = top_candidates(logits, 4)
    assert token_ids.tolist() == [[[0, 1, 2, 3]]]
    assert (np.abs(log_probs + math.log(163840)) <= error_bound(log_probs, 163840)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 64, 1024])
def test_gpu_any_block_size(rng, monkeypatch, threads):
    monkeypatch.setattr(first_rung, "block_threads", lambda gpu, simulator=8: threads)
    logits = random_logits(rng, (2, 5, 3001), step=0.25)
    assert_equals_reference(top_candidates(logits, 50, version="block_per_row"), logits, 50)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_probability_above_one(version):
    """A sure drafter: beside the largest logit's 1 the rest of the sum is lost, and rounding must not take from it."""
    for gap in range(5, 70, 3):
        for top in (-17.375, 40.0, 3.0):
            logits = np.full((1, 1, 1100), top - gap, np.float32)
            logits[0, 0, 7] = top
            log_probs, _ = top_candidates(logits, 2, version=version)
            assert log_probs[0, 0, 0] <= 0, (top, gap, log_probs)
