"""Stage 4: every version of the attention against the float64 definition, and the definition against plain sums."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from ddtree_numba.backend import cuda
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.draft_tree import DraftTree, mask_words, random_tree
from ddtree_numba.stages.tree_attention import (
    GPU_VERSIONS,
    VERSIONS,
    hopper,
    shared_tile,
    tree_attention,
    tree_attention_reference,
)
from tests.helpers import on_device, on_host, poisoned

UNIT = 2.0**-24  # the largest relative error of one float32 rounding
NOBODY = np.iinfo(np.int32).max  # stands in the block table where no row is

every_version = pytest.mark.parametrize("version", VERSIONS)
# An infinity times 0 on purpose; NumPy warns, which the settings turn into an error.
breeds_nan = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


class Batch(NamedTuple):
    """The arguments of `tree_attention`, and the links that the bits were made from."""

    q: np.ndarray
    kv_pool: np.ndarray
    block_table: np.ndarray
    prefix_lengths: np.ndarray
    ancestor_bits: np.ndarray
    node_count: np.ndarray
    scale: float
    latent_width: int
    parents: np.ndarray


def widened(array):
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def narrowed(values, dtype):
    values = np.asarray(values, np.float32)
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def lay_out(rng, rows, page_size, dtype="float32", spare=3):
    """Put each request's rows into shuffled pages of one pool that holds NaN everywhere else."""
    needed = [-(-len(request) // page_size) for request in rows]
    pages = rng.permutation(sum(needed) + spare)
    pool = np.full((len(pages), page_size, rows[0].shape[1]), np.nan, np.float32)
    table = np.full((len(rows), max(needed) + 1), NOBODY, np.int32)
    for b, request in enumerate(rows):
        mine, pages = pages[: needed[b]], pages[needed[b] :]
        table[b, : needed[b]] = mine
        for r, row in enumerate(request):
            pool[mine[r // page_size], r % page_size] = row
    return narrowed(pool, dtype), table


def batch_of(rng, rows, q, tree: DraftTree, prefixes, *, latent, page_size, dtype="float32", scale=0.3):
    q = np.asarray(q, np.float32).copy()
    for b, used in enumerate(tree.node_count):
        q[b, used:] = np.nan  # unused slots hold anything
    pool, table = lay_out(rng, rows, page_size, dtype)
    prefixes = np.array(prefixes, np.int32)
    q = narrowed(q, dtype)
    return Batch(q, pool, table, prefixes, tree.ancestor_bits, tree.node_count, scale, latent, tree.parents)


def random_batch(
    rng, prefixes, counts, *, slots=None, heads=2, latent=12, rope=5, page_size=4, dtype="float32", scale=0.3
):
    tree = random_tree(rng, len(counts), (slots or max(counts)) - 1, node_counts=counts)
    rows = [rng.standard_normal((p + n, latent + rope)) for p, n in zip(prefixes, counts, strict=True)]
    q = rng.standard_normal((*tree.parents.shape, heads, latent + rope))
    return batch_of(rng, rows, q, tree, prefixes, latent=latent, page_size=page_size, dtype=dtype, scale=scale)


def arguments(batch):
    return batch[:7], {"latent_width": batch.latent_width}


def reference(batch):
    args, keywords = arguments(batch)
    return tree_attention_reference(*args, **keywords)


def attend(batch, version, **changed):
    """Run a version over poisoned outputs."""
    batch = batch._replace(**changed)
    args, keywords = arguments(batch)
    shape = (*batch.q.shape[:3], batch.latent_width)
    out = poisoned(shape, np.float32), poisoned(shape[:3], np.float32)
    return tree_attention(*args, **keywords, version=version, out=out)


def seen_rows(batch, b, node):
    """Row numbers that a node sees, by walking its links: no bit is looked at."""
    prefix = int(batch.prefix_lengths[b])
    rows, slot = list(range(prefix)), node
    while slot >= 0:
        rows.append(prefix + slot)
        slot = int(batch.parents[b, slot])
    return rows


def row_of(batch, b, row):
    page_size = batch.kv_pool.shape[1]
    return widened(batch.kv_pool[batch.block_table[b, row // page_size], row % page_size])


def plain_attention(q, rows, scale, latent):
    """One query against its rows, with exact sums."""
    scores = [scale * math.fsum(float(x) * float(y) for x, y in zip(q, row, strict=True)) for row in rows]
    if not scores:
        return [0.0] * latent, -math.inf
    shift = max(scores)
    weights = [math.exp(score - shift) for score in scores]
    total = math.fsum(weights)
    out = [math.fsum(w * float(row[d]) for w, row in zip(weights, rows, strict=True)) / total for d in range(latent)]
    return out, shift + math.log(total)


def rounding_bounds(batch):
    """Return the largest errors of `out` [B, N, H] (any column) and `lse` that float32 arithmetic can make.

    With u = 2**-24, per (node, head) of n visible rows. A dot product of D terms errs by at most
    (D + 2) u * sum |q| |k| whatever the order of its sum; scaling adds u |score|. Subtracting the maximum adds
    u * (range of the scores), once for the weight and, summed over all its steps, once for the rescaling of earlier
    sums; exp and each rescaling add 4 u, at most one rescaling a row. A sum of n terms adds n u. The result is a
    quotient of two such sums, each value at most the largest visible one.
    """
    B, N, H, D = batch.q.shape
    out_bound, lse_bound = np.zeros((B, N, H)), np.zeros((B, N, H))
    q = widened(batch.q)
    for b in range(B):
        for node in range(int(batch.node_count[b])):
            keys = np.array([row_of(batch, b, row) for row in seen_rows(batch, b, node)])
            scores = batch.scale * q[b, node] @ keys.T
            sizes = abs(batch.scale) * np.abs(q[b, node]) @ np.abs(keys).T
            score_error = ((D + 2) * sizes + np.abs(scores)).max(axis=1)
            spread = scores.max(axis=1) - scores.min(axis=1)
            n = len(keys)
            relative = score_error + 2 * spread + 4 + 6 * n
            out_bound[b, node] = 2 * relative * UNIT * np.abs(keys[:, : batch.latent_width]).max()
            largest = np.abs(scores).max(axis=1) + math.log(n)
            lse_bound[b, node] = (score_error + relative + 4 + 2 * largest) * UNIT
    return out_bound, lse_bound


def assert_close(batch, got, expected=None):
    """Every element within the bound of float32 arithmetic, unused slots exact, relative Frobenius error <= 1e-6."""
    out, lse = got
    expected_out, expected_lse = reference(batch) if expected is None else expected
    assert out.dtype == lse.dtype == np.float32
    out_bound, lse_bound = rounding_bounds(batch)
    assert (np.abs(out - expected_out) <= out_bound[..., None]).all(), "out is off, or NaN"
    seen = np.isfinite(expected_lse)
    assert (lse[~seen] == -np.inf).all() and (out[~seen] == 0).all()
    assert (np.abs(lse[seen] - expected_lse[seen]) <= lse_bound[seen]).all(), "lse is off, or NaN"
    assert np.linalg.norm(out - expected_out) <= 1e-6 * np.linalg.norm(expected_out)


def assert_identical(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


# ---------------------------------------------------------------------------------------------------- the definition


def test_reference_by_hand():
    """One query of (ln 3, 0): it weighs the key (1, _) three times as much as (0, _). Root and two of its children."""
    rows = np.array([[0.0, 10.0], [1.0, 20.0], [0.0, 30.0], [1.0, 40.0]])  # prefix, root, child, child
    q = np.full((1, 3, 1, 2), [math.log(3), 0.0])
    bits = np.array([[[0b001], [0b011], [0b101]]], np.uint32)
    table, prefix, counts = (np.array(numbers, np.int32) for numbers in ([[1, 3, 0, 2]], [1], [3]))
    pool = rows[[2, 0, 3, 1]].reshape(4, 1, 2)
    out, lse = tree_attention_reference(q, pool, table, prefix, bits, counts, 1.0, latent_width=2)
    # root: weights 1, 3; first child: 1, 3, 1; second child: 1, 3, 3
    np.testing.assert_allclose(out[0, :, 0, 0], [3 / 4, 3 / 5, 6 / 7], rtol=1e-14)
    np.testing.assert_allclose(out[0, :, 0, 1], [70 / 4, 100 / 5, 190 / 7], rtol=1e-14)
    np.testing.assert_allclose(np.exp(lse[0, :, 0]), [4, 5, 7], rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_reference_is_the_plain_softmax_over_the_visible_rows(rng, dtype):
    batch = random_batch(rng, [0, 17, 64], [3, 5, 1], page_size=16, dtype=dtype)
    out, lse = reference(batch)
    for b, node, head in np.ndindex(batch.q.shape[:3]):
        if node >= batch.node_count[b]:
            assert (out[b, node, head] == 0).all() and lse[b, node, head] == -np.inf
            continue
        rows = [row_of(batch, b, row) for row in seen_rows(batch, b, node)]
        exact, exact_lse = plain_attention(widened(batch.q)[b, node, head], rows, batch.scale, batch.latent_width)
        np.testing.assert_allclose(out[b, node, head], exact, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse[b, node, head], exact_lse, rtol=1e-12, atol=1e-12)


def test_reference_with_a_long_prefix(rng):
    """Prefixes 0, 17, 64 and 8191 in one batch; the last against plain sums."""
    batch = random_batch(rng, [0, 17, 64, 8191], [3, 5, 5, 3], heads=1, latent=3, rope=1, page_size=64)
    out, lse = reference(batch)
    rows = [row_of(batch, 3, row) for row in seen_rows(batch, 3, 2)]
    exact, exact_lse = plain_attention(batch.q[3, 2, 0], rows, batch.scale, batch.latent_width)
    np.testing.assert_allclose(out[3, 2, 0], exact, rtol=1e-11)
    np.testing.assert_allclose(lse[3, 2, 0], exact_lse, rtol=1e-12)


@breeds_nan
def test_reference_keeps_a_bad_row_to_the_nodes_that_see_it(rng):
    batch = random_batch(rng, [3], [6])
    before = reference(batch)
    after, sees = with_bad_row(batch, 2, np.nan)
    assert_bad_row_stays(before, reference(after), sees)


# ------------------------------------------------------------------------------------------- kernels, against it


@every_version
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kernel_equals_reference(rng, version, page_size, dtype):
    batch = random_batch(rng, [0, 17], [3, 5], slots=6, page_size=page_size, dtype=dtype)
    assert_close(batch, attend(batch, version))


@every_version
@pytest.mark.parametrize(
    ("latent", "rope", "heads"),
    [(1, 0, 1), (1, 1, 3), (7, 3, 1), (16, 0, 2), (17, 16, 2), (33, 1, 1), (64, 16, 1)],
)
def test_any_width_and_heads(rng, version, latent, rope, heads):
    batch = random_batch(rng, [5, 2], [4, 2], heads=heads, latent=latent, rope=rope, page_size=3)
    assert_close(batch, attend(batch, version))


@every_version
def test_one_batch_of_different_prefixes_and_trees(rng, version):
    batch = random_batch(rng, [64, 0, 17, 8], [3, 5, 1, 4], heads=1, latent=4, rope=1, page_size=16)
    assert_close(batch, attend(batch, version))


@every_version
@pytest.mark.parametrize("prefix", [0, 1, 6, 7, 8, 9, 15, 16])
def test_prefix_around_the_edge_of_a_tile(rng, version, prefix):
    """The tree begins right after the prefix, wherever a tile, a chunk of keys or a page ends."""
    batch = random_batch(rng, [prefix], [3], heads=1, latent=4, rope=1, page_size=8)
    assert_close(batch, attend(batch, version))


@every_version
@pytest.mark.parametrize("count", [31, 32, 33])
def test_trees_around_the_end_of_a_mask_word(rng, version, count):
    batch = random_batch(rng, [2], [count], slots=34, heads=1, latent=4, rope=1)
    assert_close(batch, attend(batch, version))


def test_a_tree_of_three_mask_words(rng):
    batch = random_batch(rng, [1], [66], heads=1, latent=4, rope=1)
    assert_close(batch, attend(batch, "shared_tile"))


@every_version
def test_a_chain_of_34(rng, version):
    """Row 31 is one full word, row 32 is one full word and one bit."""
    tree = random_tree(rng, 1, 33, vocab=1, node_counts=[34])
    assert tree.ancestor_bits[0, 31].tolist() == [0xFFFFFFFF, 0]
    assert tree.ancestor_bits[0, 32].tolist() == [0xFFFFFFFF, 1]
    rows = rng.standard_normal((36, 5))
    q = rng.standard_normal((1, 34, 1, 5))
    batch = batch_of(rng, [rows], q, tree, [2], latent=4, page_size=5)
    assert_close(batch, attend(batch, version))


# ------------------------------------------------------------------------------------- what a node may see


@every_version
def test_a_node_in_its_tree_is_a_node_in_its_chain(rng, version):
    """Branch isolation: the same answer when only a node's ancestors are there, in a row."""
    latent, prefix = 12, 5
    batch = random_batch(rng, [prefix], [7])
    out, lse = attend(batch, version)
    out_bound, lse_bound = rounding_bounds(batch)
    chains = [seen_rows(batch, 0, node)[prefix:][::-1] for node in (3, 5, 6)]
    for chain in chains:
        tree = random_tree(rng, 1, len(chain) - 1, vocab=1, node_counts=[len(chain)])
        rows = np.array([row_of(batch, 0, row) for row in [*range(prefix), *chain]])
        nodes = [row - prefix for row in chain]
        alone = batch_of(rng, [rows], batch.q[:, nodes], tree, [prefix], latent=latent, page_size=4)
        chain_out, chain_lse = attend(alone, version)
        # Two orders of the same sum, each within its bound.
        assert (np.abs(chain_out[0, -1] - out[0, nodes[-1]]) <= 2 * out_bound[0, nodes[-1], :, None]).all()
        assert (np.abs(chain_lse[0, -1] - lse[0, nodes[-1]]) <= 2 * lse_bound[0, nodes[-1]]).all()


@every_version
def test_nothing_visible_gives_zero_and_minus_infinity(rng, version):
    batch = random_batch(rng, [0, 0], [3, 2])
    bits = batch.ancestor_bits.copy()
    bits[0] = 0
    bits[1, 1] = 0
    out, lse = attend(batch, version, ancestor_bits=bits)
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all()
    assert (out[1, 1] == 0).all() and (lse[1, 1] == -np.inf).all()
    full_out, full_lse = attend(batch, version)
    assert_identical((out[1, 0], lse[1, 0]), (full_out[1, 0], full_lse[1, 0]))
    expected = reference(batch._replace(ancestor_bits=bits))
    np.testing.assert_array_equal(expected[1] == -np.inf, lse == -np.inf)


@every_version
def test_unused_slots_are_empty_and_change_nothing(rng, version):
    """Three slots more, their queries NaN and their bits set: zeros and -inf there, the same bits elsewhere."""
    batch = random_batch(rng, [6], [4], slots=4)
    wider = random_batch(rng, [6], [4], slots=7)
    q = wider.q.copy()
    q[:, :4] = batch.q
    bits = np.full_like(wider.ancestor_bits, 0xFFFFFFFF)
    bits[:, :4] = batch.ancestor_bits
    out, lse = attend(batch._replace(q=q, ancestor_bits=bits), version)
    assert (out[:, 4:] == 0).all() and (lse[:, 4:] == -np.inf).all()
    assert_identical((out[:, :4], lse[:, :4]), attend(batch, version))


@every_version
def test_an_empty_request_beside_a_full_one(rng, version):
    batch = random_batch(rng, [4, 3], [3, 2])
    out, lse = attend(batch, version, node_count=np.array([0, 2], np.int32))
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all()
    assert_identical((out[1], lse[1]), [a[1] for a in attend(batch, version)])


@every_version
def test_bits_from_node_count_on_mean_nothing(rng, version):
    batch = random_batch(rng, [5], [5], slots=40, heads=1)
    bits = batch.ancestor_bits.copy()
    bits[0, :5, 0] |= np.uint32(0xFFFFFFE0)
    bits[0, :5, 1] = 0xFFFFFFFF
    assert_identical(attend(batch, version, ancestor_bits=bits), attend(batch, version))
    assert_identical(reference(batch._replace(ancestor_bits=bits)), reference(batch))


@every_version
def test_where_the_pages_lie_changes_nothing(rng, version):
    batch = random_batch(rng, [9, 2], [4, 3], page_size=4)
    order = rng.permutation(len(batch.kv_pool))
    moved = np.empty_like(batch.kv_pool)
    moved[order] = batch.kv_pool
    used = batch.block_table != NOBODY
    table = batch.block_table.copy()
    table[used] = order[batch.block_table[used]]
    assert_identical(attend(batch, version, kv_pool=moved, block_table=table), attend(batch, version))


@every_version
def test_what_nobody_sees_changes_nothing(rng, version):
    """Everything outside the requests' rows is NaN in `random_batch`; with zeros there, the same bits come out."""
    batch = random_batch(rng, [7, 2], [3, 4], page_size=16)
    clean = np.nan_to_num(batch.kv_pool, nan=0.0)
    got = attend(batch, version)
    assert not np.isnan(got[0]).any()
    assert_identical(attend(batch, version, kv_pool=clean), got)


def with_bad_row(batch, slot, value):
    """Put `value` into the KV row of one node; return the batch and which nodes see it."""
    pool = batch.kv_pool.copy()
    row, page_size = int(batch.prefix_lengths[0]) + slot, pool.shape[1]
    pool[batch.block_table[0, row // page_size], row % page_size] = value
    used = int(batch.node_count[0])
    sees = np.array([row in seen_rows(batch, 0, node) for node in range(used)])
    assert sees.any() and not sees.all()
    return batch._replace(kv_pool=pool), sees


def assert_bad_row_stays(before, after, sees):
    assert np.isnan(after[0][0, : len(sees)][sees]).all()
    blind = np.flatnonzero(~sees)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[0, blind], b[0, blind])
        np.testing.assert_array_equal(a[1:], b[1:])


@every_version
@breeds_nan
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_row_reaches_only_the_nodes_that_see_it(rng, version, value):
    batch = random_batch(rng, [3, 4], [6, 2], heads=2)
    before = attend(batch, version)
    after, sees = with_bad_row(batch, 2, value)
    assert_bad_row_stays(before, attend(after, version), sees)


@every_version
@breeds_nan
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_query_reaches_only_its_own_node_and_head(rng, version, value):
    batch = random_batch(rng, [9, 4], [4, 2], heads=2)
    before = attend(batch, version)
    q = batch.q.copy()
    q[0, 2, 1, 3] = value
    after = attend(batch, version, q=q)
    assert np.isnan(after[0][0, 2, 1]).all()
    for a, b in zip(before, after, strict=True):
        a, b = a.copy(), b.copy()
        a[0, 2, 1] = b[0, 2, 1] = 0
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------ hard numbers


@every_version
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_scores_from_minus_80_to_80(rng, version, order):
    """Sums without the maximum subtracted overflow; a maximum that rises in every tile rescales every sum."""
    prefix = 21
    batch = random_batch(rng, [prefix], [3], heads=1, latent=4, rope=1, scale=1.0)
    scores = np.linspace(-80, 80, prefix + 3)
    scores = {"rising": scores, "falling": scores[::-1], "shuffled": rng.permutation(scores)}[order]
    rows = rng.standard_normal((prefix + 3, 5))
    rows[:, 4] = scores
    q = np.zeros((1, 3, 1, 5))
    q[..., 4] = 1.0
    tree = random_tree(rng, 1, 2, node_counts=[3])
    batch = batch_of(rng, [rows], q, tree, [prefix], latent=4, page_size=4, scale=1.0)
    assert_close(batch, attend(batch, version))


@every_version
@pytest.mark.parametrize("place", [0, 12, 19, 20])
def test_one_key_outweighs_all_others(rng, version, place):
    """A spike of 80 over scores of -80: the answer is that key's value, to the last bit."""
    rows = rng.standard_normal((21, 5)).astype(np.float32)
    rows[:, 4] = -80
    rows[place, 4] = 80
    q = np.zeros((1, 1, 1, 5))
    q[..., 4] = 1.0
    tree = random_tree(rng, 1, 0, node_counts=[1])
    batch = batch_of(rng, [rows], q, tree, [20], latent=4, page_size=4, scale=1.0)
    out, lse = attend(batch, version)
    np.testing.assert_array_equal(out[0, 0, 0], rows[place, :4])
    assert lse[0, 0, 0] == 80


@every_version
def test_the_sum_of_weights_is_one(rng, version):
    """With all values equal the mean is that value, whatever the scores."""
    batch = random_batch(rng, [13], [4], latent=4, rope=1)
    pool = batch.kv_pool.copy()
    pool[..., :4] = 0.75
    out, _ = attend(batch, version, kv_pool=pool)
    np.testing.assert_allclose(out, 0.75, rtol=2 * (13 + 4) * UNIT)


@pytest.mark.parametrize("version", [*VERSIONS, *(pytest.param(v, marks=pytest.mark.gpu) for v in GPU_VERSIONS)])
def test_a_row_past_two_to_the_31_numbers(rng, version):
    """Row 3,728,271 of 576 numbers begins past 2**31: the address is 64-bit.

    The pool is allocated and, but for three pages, never touched: 4.3 GB on a GPU, address space in the simulator.
    """
    width, latent, last = 576, 512, 3_728_271
    assert last * width > 2**31
    try:
        pool = cuda.device_array((last + 1, 1, width), np.uint16)
    except MemoryError:
        pytest.skip("no 4.3 GB of address space")
    rows = to_bfloat16(rng.standard_normal((3, width)).astype(np.float32))
    pages = np.array([[last - 1, 5, last]], np.int32)
    for page, row in zip(pages[0], rows, strict=True):
        pool[int(page)].copy_to_device(row[None])
    q = to_bfloat16(rng.standard_normal((1, 1, 1, width)).astype(np.float32))
    prefix, bits, count = np.array([2], np.int32), np.ones((1, 1, 1), np.uint32), np.array([1], np.int32)
    q_, table, prefix_, bits_, count_ = on_device((q, pages, prefix, bits, count))
    if version == "hopper" and (fault := hopper.why_not_here()):
        pytest.skip(fault)
    got = tree_attention(q_, pool, table, prefix_, bits_, count_, 0.04, latent_width=latent, version=version)
    if version in GPU_VERSIONS:  # weights are rounded to 16 bits
        seen = from_bfloat16(rows).astype(np.float64)
        weights = np.exp(0.04 * (from_bfloat16(q[0, 0]).astype(np.float64) @ seen.T))
        expected = weights @ seen[:, :latent] / weights.sum()
        assert np.linalg.norm(on_host(got)[0][0, 0] - expected) <= 2.0**-8 * np.linalg.norm(expected)
        return
    table, parents = np.arange(3, dtype=np.int32)[None], np.array([[-1]])
    assert_close(Batch(q, rows[:, None], table, prefix, bits, count, 0.04, latent, parents), on_host(got))


# ---------------------------------------------------------------------------------------- the launcher


@every_version
def test_device_arrays_stay_on_the_device(rng, version):
    batch = random_batch(rng, [6, 2], [3, 2])
    arrays, scale = on_device(batch[:6]), batch.scale
    expected = attend(batch, version)
    got = tree_attention(*arrays, scale, latent_width=batch.latent_width, version=version)
    assert_identical(on_host(got), expected)
    out = on_device([poisoned(a.shape, a.dtype) for a in expected])
    stream = cuda.stream()
    got = tree_attention(*arrays, scale, latent_width=batch.latent_width, version=version, out=out, stream=stream)
    assert got[0] is out[0] and got[1] is out[1]
    stream.synchronize()
    assert_identical(on_host(got), expected)


@every_version
def test_numpy_results_land_in_out(rng, version):
    batch = random_batch(rng, [6], [3])
    args, keywords = arguments(batch)
    expected = tree_attention(*args, **keywords, version=version)
    out = tuple(poisoned(a.shape, a.dtype) for a in expected)
    got = tree_attention(*args, **keywords, version=version, out=out, stream=cuda.stream())
    assert got[0] is out[0] and got[1] is out[1]
    assert_identical(out, expected)


def test_the_default_is_the_fastest_version(rng):
    batch = random_batch(rng, [6], [3])
    args, keywords = arguments(batch)
    assert_identical(tree_attention(*args, **keywords), attend(batch, VERSIONS[-1]))


@every_version
@pytest.mark.parametrize("bad", [-1, -(2**31), "one past the pool", NOBODY])
def test_a_page_outside_the_pool_is_not_seen(rng, version, bad):
    """Device contents can't be checked: the kernel passes over such rows, and its neighbours' are right."""
    batch = random_batch(rng, [8, 5], [3, 2], page_size=4)
    table = batch.block_table.copy()
    table[0, 0] = len(batch.kv_pool) if bad == "one past the pool" else bad
    arrays = on_device((batch.q, batch.kv_pool, table, *batch[3:6]))
    got = on_host(tree_attention(*arrays, batch.scale, latent_width=batch.latent_width, version=version))
    # The same without the first page: four prefix rows fewer.
    table[0, :-1] = batch.block_table[0, 1:]
    expected = batch._replace(block_table=table, prefix_lengths=batch.prefix_lengths - np.array([4, 0], np.int32))
    assert_close(expected, got)


@every_version
def test_a_bad_page_under_the_tree_is_not_seen(rng, version):
    batch = random_batch(rng, [4], [4], page_size=4)
    table = batch.block_table.copy()
    table[0, 1] = -1
    arrays = on_device((batch.q, batch.kv_pool, table, *batch[3:6]))
    got = on_host(tree_attention(*arrays, batch.scale, latent_width=batch.latent_width, version=version))
    expected = attend(batch, version, ancestor_bits=np.zeros_like(batch.ancestor_bits))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)  # the prefix alone, perhaps in another order


@every_version
@pytest.mark.parametrize(
    ("prefix", "count", "rows"),
    [
        (10, 4, 12),  # two nodes past the block table
        (NOBODY, 4, 12),
        (12, 4, 12),
        (-2, 4, 2),  # rows -2 and -1 are not there
        (-(2**31), 4, 0),
    ],
)
def test_rows_outside_the_block_table_are_not_seen(rng, version, prefix, count, rows):
    """A block table of three pages of four. All queries are zero: exp(lse) is the number of rows seen."""
    tree = random_tree(rng, 1, 3, vocab=1, node_counts=[count])  # a chain: its last node sees every row
    pool = rng.standard_normal((3, 4, 5)).astype(np.float32)
    table = np.arange(3, dtype=np.int32)[None]
    q = np.zeros((1, 4, 2, 5), np.float32)
    arrays = on_device((q, pool, table, np.array([prefix], np.int32), tree.ancestor_bits, tree.node_count))
    out, lse = on_host(tree_attention(*arrays, 1.0, latent_width=4, version=version))
    np.testing.assert_allclose(np.exp(lse[0, -1]), rows, rtol=1e-6)
    if rows:
        expected = pool.reshape(12, 5)[:rows, :4].mean(axis=0)
        np.testing.assert_allclose(out[0, -1], np.broadcast_to(expected, (2, 4)), atol=1e-6)


@every_version
@pytest.mark.parametrize(("count", "used"), [(99, 4), (NOBODY, 4), (-1, 0), (-(2**31), 0)])
def test_a_node_count_outside_the_slots_is_cut(rng, version, count, used):
    """Bits past the slots are set, the block table has room: rows 10 and 11 hold NaN, words past W don't exist."""
    batch = random_batch(rng, [6], [4], slots=4)
    table = np.full((1, 14), batch.block_table[0, 2], np.int32)
    table[0, :3] = batch.block_table[0, :3]
    bits = batch.ancestor_bits | np.uint32(0xFFFFFFF0)
    arrays = on_device((batch.q, batch.kv_pool, table, batch.prefix_lengths, bits, np.array([count], np.int32)))
    got = on_host(tree_attention(*arrays, batch.scale, latent_width=batch.latent_width, version=version))
    assert_identical(got, attend(batch, version, node_count=np.array([used], np.int32)))


BAD_INPUTS = [
    ("q", lambda b: b.q.astype(np.float64), TypeError, "q: got float64, needs float32 or float16 or uint16"),
    ("q", lambda b: b.q[0], ValueError, r"q: got shape \(3, 2, 17\), needs \[B, N, H, D\]"),
    ("q", lambda b: b.q.tolist(), TypeError, "q: got list, needs a NumPy array or a device array"),
    ("q", lambda b: np.moveaxis(b.q.copy(), 1, 2), ValueError, "q: got a strided view, needs a C-contiguous array"),
    ("kv_pool", lambda b: b.kv_pool.astype(np.float16), TypeError, "kv_pool: got float16, needs float32"),
    ("kv_pool", lambda b: b.kv_pool[..., :9].copy(), ValueError, "kv_pool: got shape .*, needs .*D=17"),
    ("kv_pool", lambda b: b.kv_pool[:0], ValueError, "kv_pool: got shape .*, needs at least one page of one row"),
    ("kv_pool", lambda b: b.kv_pool[:, :0], ValueError, "kv_pool: got shape .*, needs at least one page of one row"),
    ("block_table", lambda b: b.block_table.astype(np.int64), TypeError, "block_table: got int64, needs int32"),
    ("block_table", lambda b: b.block_table[:1], ValueError, r"block_table: got shape \(1, 4\), needs .*B=2"),
    ("block_table", lambda b: b.block_table[:, :0].copy(), ValueError, "block_table: got shape .*, needs at least one"),
    ("prefix_lengths", lambda b: b.prefix_lengths[:1], ValueError, r"prefix_lengths: got shape \(1,\), needs .*B=2"),
    ("ancestor_bits", lambda b: b.ancestor_bits.view(np.int32), TypeError, "ancestor_bits: got int32, needs uint32"),
    (
        "ancestor_bits",
        lambda b: np.repeat(b.ancestor_bits, 2, axis=2),
        ValueError,
        "ancestor_bits: got 2 words a row, needs 1 for 3 slots",
    ),
    ("node_count", lambda b: b.node_count[:1], ValueError, r"node_count: got shape \(1,\), needs .*B=2"),
    ("node_count", lambda b: b.node_count + np.int32(1), ValueError, r"node_count\[0\]: got 4, needs 0 to 3"),
    ("node_count", lambda b: b.node_count - np.int32(4), ValueError, r"node_count\[0\]: got -1, needs 0 to 3"),
    (
        "prefix_lengths",
        lambda b: np.array([6, 15], np.int32),
        ValueError,
        r"prefix_lengths\[1\]: got 15 before 2 nodes, needs a place for each row in block_table, .* 4 pages of 4",
    ),
    (
        "prefix_lengths",
        lambda b: np.array([6, -1], np.int32),
        ValueError,
        r"prefix_lengths\[1\]: got -1 before 2 nodes",
    ),
    (
        "block_table",
        lambda b: np.where(b.block_table == b.block_table[0, 1], -1, b.block_table).astype(np.int32),
        ValueError,
        r"block_table\[0, 1\]: got -1, needs a page of kv_pool, 0 to 6",
    ),
    (
        "block_table",
        lambda b: np.where(b.block_table == b.block_table[1, 0], 7, b.block_table).astype(np.int32),
        ValueError,
        r"block_table\[1, 0\]: got 7, needs a page of kv_pool, 0 to 6",
    ),
    ("scale", lambda b: math.nan, ValueError, "scale: got nan, needs a finite number"),
    ("scale", lambda b: "0.1", TypeError, "scale: got str, needs a number"),
    ("latent_width", lambda b: 0, ValueError, "latent_width: got 0, needs a whole number from 1 to 17"),
    ("latent_width", lambda b: 18, ValueError, "latent_width: got 18, needs a whole number from 1 to 17"),
    ("version", lambda b: "fastest", ValueError, "version: got 'fastest', needs 'naive' or 'shared_tile'"),
    ("out", lambda b: np.zeros(3), TypeError, r"out: got ndarray, needs a pair of arrays \(out, lse\)"),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), BAD_INPUTS)
def test_bad_input_is_named_in_one_line(rng, name, change, error, message):
    batch = random_batch(rng, [6, 1], [3, 2])
    assert len(batch.kv_pool) == 7
    values = dict(zip(Batch._fields[:8], batch[:8], strict=True))
    values[name] = change(batch)
    out = values.pop("out", tuple(poisoned(a.shape, np.float32) for a in reference(batch)))
    before = [np.copy(array) for array in out] if isinstance(out, tuple) else []
    with pytest.raises(error, match=message) as raised:
        tree_attention(**values, out=out)
    assert "\n" not in str(raised.value)
    assert_identical(out if before else [], before)  # nothing was written


def test_a_bad_pair_of_outputs(rng):
    batch = random_batch(rng, [6], [3])
    args, keywords = arguments(batch)
    out, lse = reference(batch)
    with pytest.raises(TypeError, match=r"out \(out\): got float64, needs float32"):
        tree_attention(*args, **keywords, out=(out, lse.astype(np.float32)))
    with pytest.raises(ValueError, match=r"out \(lse\): got shape \(1, 3\), needs \[1, 3, 2\]"):
        tree_attention(*args, **keywords, out=(out.astype(np.float32), np.zeros((1, 3), np.float32)))


def test_host_and_device_do_not_mix(rng):
    batch = random_batch(rng, [6], [3])
    args, keywords = arguments(batch)
    with pytest.raises(TypeError, match="got NumPy beside device arrays"):
        tree_attention(cuda.to_device(args[0]), *args[1:], **keywords)


def test_the_reference_refuses_rows_without_a_page(rng):
    batch = random_batch(rng, [6], [3])
    with pytest.raises(ValueError, match=r"block_table\[0, 0\]: got -1"):
        reference(batch._replace(block_table=batch.block_table * 0 - 1))


@pytest.mark.parametrize(("width", "latent"), [(1225, 512), (1100, 1025)])
def test_the_shared_tile_names_its_limit(rng, width, latent):
    q, pool = np.zeros((1, 1, 1, width), np.float32), np.zeros((1, 1, width), np.float32)
    table, one = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    bits = np.ones((1, 1, 1), np.uint32)
    with pytest.raises(ValueError, match=f"q: got rows of {width} numbers, {latent} of them latent; .* needs at most"):
        tree_attention(q, pool, table, one * 0, bits, one, 1.0, latent_width=latent)


@pytest.mark.parametrize("backend", ["gpu", "simulator"])
def test_every_tiling_fits(monkeypatch, backend):
    """Every pair of widths within the limits: 48 KB of shared memory, 64 sums a thread, nothing left over."""
    monkeypatch.setattr(shared_tile, "block_threads", lambda gpu, simulator: gpu if backend == "gpu" else simulator)
    for width in {*range(1, 1225, 7), 64, 80, 128, 192, 576, 1024, 1088, 1224}:
        for latent in {1, width // 2, min(width, 512), min(width, 1024)} - {0}:
            t = shared_tile.choose_tiling(width, latent)
            assert t.shared_bytes <= 48 * 1024
            assert t.threads == t.slices * (t.rows // 4) * (t.keys // 4)
            assert t.rows % 8 == 0 and t.keys % 4 == 0 and t.threads % t.lanes == 0 and t.rows <= t.threads
            assert t.stride >= t.filled >= max(width, t.columns * t.threads) and t.columns * t.threads >= latent
            if backend == "gpu":
                assert t.rows * t.columns <= 64


# ----------------------------------------------------------------------------- sizes for a GPU only


def big_batch(rng, prefixes, counts, dtype, *, spread=1.0, page_size=64):
    """Rows of Kimi K2.5: 64 heads, D_c 512, D_r 64, its scale; `spread` is the standard deviation of the scores."""
    scale = 0.14467963
    batch = random_batch(
        rng, prefixes, counts, heads=64, latent=512, rope=64, page_size=page_size, dtype="float32", scale=scale
    )
    q = batch.q * np.float32(spread / (scale * math.sqrt(576)))
    return batch._replace(q=narrowed(q, dtype), kv_pool=narrowed(batch.kv_pool, dtype))


def report_errors(record_property, name, got, expected):
    """Return the relative Frobenius error of `out`; print it with the largest absolute errors."""
    out_error = np.abs(got[0] - expected[0])
    seen = np.isfinite(expected[1])
    frobenius = float(np.linalg.norm(out_error) / np.linalg.norm(expected[0]))
    largest, lse_largest = float(out_error.max()), float(np.abs(got[1][seen] - expected[1][seen]).max())
    record_property("relative_frobenius", frobenius)
    record_property("largest_absolute", largest)
    record_property("largest_absolute_lse", lse_largest)
    print(f"{name}: relative Frobenius {frobenius:.2e}, largest absolute {largest:.2e}, in lse {lse_largest:.2e}")
    return frobenius


@pytest.mark.gpu
@every_version
@pytest.mark.parametrize("spread", [1.0, 3.5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("prefix", [0, 17, 512, 2048])
def test_gpu_full_size(rng, record_property, version, prefix, dtype, spread):
    """2 requests of 33 nodes. Half precision is exact in float32, so its bound is the same.

    The bound is what the project asks of float32. Summing in the kernels' order in NumPy (36 pairs, with expf one unit
    off) predicts 3e-7 at a spread of 1 and 5e-7 to 9e-7 at 3.5 (queries of unit variance), where a score of 12 is
    itself only known to 5e-7. A single running sum of each kind would miss it there, at 3e-6.
    """
    batch = big_batch(rng, [prefix, max(prefix - 5, 0)], [33, 33], dtype, spread=spread)
    got, expected = attend(batch, version), reference(batch)
    name = f"{version} {dtype} prefix {prefix} spread {spread}"
    assert report_errors(record_property, name, got, expected) <= 1e-6
    assert not np.isnan(got[0]).any()


@pytest.mark.gpu
@every_version
def test_gpu_ragged_batch_with_a_long_prefix(rng, record_property, version):
    """Trees of 3 and 5 nodes at prefixes 0, 17, 64 and 8191, and a full one, in pages of 16."""
    batch = big_batch(rng, [0, 17, 64, 8191, 300], [3, 5, 3, 5, 40], "float32", page_size=16)
    assert report_errors(record_property, version, attend(batch, version), reference(batch)) <= 1e-6


@pytest.mark.gpu
@every_version
@pytest.mark.parametrize("slots", [65, 257, 1025])
def test_gpu_many_slots(rng, version, slots):
    batch = random_batch(rng, [100, 3], [slots, slots - 33], heads=2, latent=64, rope=16, page_size=16)
    assert_close(batch, attend(batch, version))


@pytest.mark.gpu
@every_version
@pytest.mark.parametrize(("latent", "rope"), [(1, 0), (64, 16), (100, 28), (511, 65), (768, 64), (1024, 200)])
def test_gpu_widths(rng, version, latent, rope):
    batch = random_batch(rng, [70, 9], [33, 9], heads=3, latent=latent, rope=rope, page_size=16, scale=0.05)
    assert_close(batch, attend(batch, version))


@pytest.mark.gpu
@every_version
def test_gpu_batch_of_64(rng, version):
    prefixes, counts = rng.integers(0, 200, 64), rng.integers(1, 34, 64)
    batch = random_batch(rng, prefixes.tolist(), counts.tolist(), slots=33, heads=8, latent=64, rope=16, page_size=16)
    assert mask_words(33) == batch.ancestor_bits.shape[2]
    assert_close(batch, attend(batch, version))


@pytest.mark.gpu
@every_version
def test_gpu_the_same_bits_every_time(rng, version):
    """A race would show as a difference between runs."""
    batch = big_batch(rng, [700, 40], [33, 20], "float32")
    arrays, keywords = on_device(batch[:6]), {"latent_width": batch.latent_width, "version": version}
    first = on_host(tree_attention(*arrays, batch.scale, **keywords))
    for _ in range(20):
        assert_identical(on_host(tree_attention(*arrays, batch.scale, **keywords)), first)
