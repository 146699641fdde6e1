"""The KV commit: hand-written moves, random ones against a plain list of rows, refused ones, and many rounds."""

import numpy as np
import pytest

from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import STATUS_BAD_PAGE, STATUS_BROKEN_LINK, STATUS_OK, random_tree
from ddtree_numba.stages.accept_walk import accept_walk, accept_walk_reference
from ddtree_numba.stages.kv_commit import (
    advance_lengths_kernel,
    commit_kv,
    commit_kv_kernel,
    commit_kv_reference,
    kv_words,
)
from ddtree_numba.synthetic import random_target_tokens
from tests.helpers import on_device, poisoned


def launch_numpy(*arguments):
    return commit_kv(*arguments, out=poisoned(len(arguments[4]), np.int32))


def launch_device(kv_pool, block_table, prefix_lengths, *path):
    """Launch on device arrays, where nothing is looked at beforehand, and bring back what changed."""
    pool, table, lengths, slots, count = on_device((kv_pool, block_table, prefix_lengths, *path))
    status = cuda.to_device(poisoned(len(prefix_lengths), np.int32))
    assert commit_kv(pool, table, lengths, slots, count, out=status) is status
    pool.copy_to_host(kv_pool)
    lengths.copy_to_host(prefix_lengths)
    return status.copy_to_host()


every_way = pytest.mark.parametrize("commit", [commit_kv_reference, launch_numpy, launch_device])
both = pytest.mark.parametrize("commit", [commit_kv_reference, launch_device])


def paths(*lists, columns=None):
    """`accept_slots` and `accept_count` of these paths; -1 behind them."""
    slots = np.full((len(lists), columns or max(map(len, lists))), -1, np.int32)
    for row, path in zip(slots, lists, strict=True):
        row[: len(path)] = path
    return slots, np.array([len(path) for path in lists], np.int32)


def letters(text, page_size):
    """A pool of one layer and one byte a row that holds `text`."""
    return np.frombuffer(text.encode(), np.uint8).copy().reshape(1, -1, page_size, 1)


def committed(commit, text, path, page_size=1, prefix=0):
    pool, lengths = letters(text, page_size), np.array([prefix], np.int32)
    table = np.arange(pool.shape[1], dtype=np.int32)[None]
    status = commit(pool, table, lengths, *paths(path))
    assert status.tolist() == [STATUS_OK]
    assert status.dtype == np.int32
    assert lengths.tolist() == [prefix + len(path)]
    return pool.tobytes().decode()


@every_way
@pytest.mark.parametrize("page_size", [1, 5])
def test_rows_move_in_ascending_order(commit, page_size):
    """R, A, B, C, D with slots 0, 2, 3 accepted: from the last to the first it would be R, C, C."""
    assert committed(commit, "RABCD", [0, 2, 3], page_size) == "RBCCD"


@every_way
def test_every_row_moves_onto_the_one_before(commit):
    assert committed(commit, "abRABCDE", [0, 2, 3, 4, 5], 4, prefix=2) == "abRBCDEE"
    assert committed(commit, "RABCDE", [1, 2, 3, 4, 5], 2) == "ABCDEE"


@every_way
def test_long_jump(commit):
    assert committed(commit, "..RABCDEFGHIJK..", [0, 5, 11], 4, prefix=2) == "..REKCDEFGHIJK.."


@every_way
def test_path_in_place_leaves_the_bytes_untouched(commit):
    assert committed(commit, "xyRABCDE", [0, 1, 2], 4, prefix=2) == "xyRABCDE"
    assert committed(commit, "RA", [0], 1) == "RA"


@every_way
def test_across_pages_with_shuffled_table(commit):
    """Page size 16, prefix 12, slots 0, 4, 7, 9: rows 16, 19, 21 of the second page go to 13, 14, 15 of the first."""
    pool = np.arange(2 * 5 * 16 * 3, dtype=np.float32).reshape(2, 5, 16, 3)
    before, lengths = pool.copy(), np.array([12], np.int32)
    commit(pool, np.array([[3, 1, 4]], np.int32), lengths, *paths([0, 4, 7, 9]))
    expected = before.copy()
    expected[:, 3, 13] = before[:, 1, 0]
    expected[:, 3, 14] = before[:, 1, 3]
    expected[:, 3, 15] = before[:, 1, 5]
    np.testing.assert_array_equal(pool, expected)
    assert lengths.tolist() == [16]


def random_batch(rng, batch, layers, page_size, width, dtype, columns=6, reach=20, longest_prefix=70):
    """A pool of random bytes (every kind of NaN among them), a shuffled block table, ragged prefixes and paths."""
    max_pages = -(-(longest_prefix + reach) // page_size)
    pages = batch * max_pages + 3
    itemsize = np.dtype(dtype).itemsize
    pool = rng.integers(0, 256, (layers, pages, page_size, width * itemsize), dtype=np.uint8).view(dtype)
    table = rng.permutation(pages)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    prefix = rng.integers(0, longest_prefix + 1, batch).astype(np.int32)
    counts = rng.integers(1, columns + 1, batch)
    lists = [sorted(rng.choice(reach, count, replace=False).tolist()) for count in counts]
    for path in lists[::2]:
        path[0] = 0  # as a walk gives them; the others start anywhere
    return pool, table, prefix, *paths(*lists, columns=columns)


def expected_commit(pool, table, prefix, slots, count):
    """The pool's bytes and the lengths afterwards, by way of each request's rows laid out as one plain list."""
    page_size = pool.shape[2]
    after = pool.view(np.uint8).copy()
    for b in range(len(count)):
        rows = [
            (layer, int(page), place) for layer in range(len(pool)) for page in table[b] for place in range(page_size)
        ]
        per_layer = len(rows) // len(pool)
        for layer in range(len(pool)):
            of_layer = rows[layer * per_layer : (layer + 1) * per_layer]
            for k in range(count[b]):
                after[of_layer[prefix[b] + k]] = pool.view(np.uint8)[of_layer[prefix[b] + slots[b, k]]]
    return after, prefix + count


@every_way
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype, width", [(np.uint8, 5), (np.float16, 4), (np.uint16, 7), (np.float32, 3)])
def test_random_batches_are_moved_to_the_byte(commit, page_size, dtype, width, rng):
    arrays = random_batch(rng, 3, 2, page_size, width, dtype)
    expected_pool, expected_lengths = expected_commit(*arrays)
    assert commit(*arrays).tolist() == [STATUS_OK] * 3
    np.testing.assert_array_equal(arrays[0].view(np.uint8), expected_pool)
    np.testing.assert_array_equal(arrays[2], expected_lengths)


@every_way
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint32, np.int64, np.uint64, np.float64])
def test_every_dtype(commit, dtype, rng):
    arrays = random_batch(rng, 2, 1, 8, 3, dtype, longest_prefix=9)
    expected_pool, expected_lengths = expected_commit(*arrays)
    commit(*arrays)
    np.testing.assert_array_equal(arrays[0].view(np.uint8), expected_pool)
    np.testing.assert_array_equal(arrays[2], expected_lengths)


def test_reference_on_hundreds_of_batches(rng):
    for _ in range(60):
        page_size = int(rng.choice([1, 2, 7, 16, 64]))
        arrays = random_batch(rng, 4, 2, page_size, 2, np.uint16, columns=int(rng.integers(1, 16)))
        expected_pool, expected_lengths = expected_commit(*arrays)
        commit_kv_reference(*arrays)
        np.testing.assert_array_equal(arrays[0].view(np.uint8), expected_pool)
        np.testing.assert_array_equal(arrays[2], expected_lengths)


def test_kernel_equals_reference_on_more_requests_than_a_block_has_threads(rng):
    arrays = random_batch(rng, 11, 1, 4, 1, np.uint16, longest_prefix=10)
    twins = [array.copy() for array in arrays]
    np.testing.assert_array_equal(launch_device(*arrays), commit_kv_reference(*twins))
    for array, twin in zip(arrays, twins, strict=True):
        np.testing.assert_array_equal(array, twin)


# Request 1 of three is faulty: 4 pages of 4 rows in its table, prefix 6, path 0, 2, 5 (rows 6, 8, 11 -> 6, 7, 8).
FAULTS = {
    "source page outside": ({"page": (2, 12)}, STATUS_BAD_PAGE, "block_table: got page 12, needs 0 to 11"),
    "source page negative": ({"page": (2, -1)}, STATUS_BAD_PAGE, "block_table: got page -1"),
    "target page outside": ({"page": (1, 2**31 - 1)}, STATUS_BAD_PAGE, "block_table: got page 2147483647"),
    "target page negative": ({"page": (1, -(2**31))}, STATUS_BAD_PAGE, "block_table: got page -2147483648"),
    "page of a row that stays": ({"page": (1, 99), "path": [0]}, STATUS_BAD_PAGE, "block_table: got page 99"),
    "page of a target alone": ({"page": (0, 99), "path": [7, 8], "prefix": 3}, STATUS_BAD_PAGE, "got page 99"),
    "negative page of a target alone": ({"page": (0, -1), "path": [7, 8], "prefix": 3}, STATUS_BAD_PAGE, "got page -1"),
    "page of the last source alone": ({"page": (3, 12), "path": [0, 1, 9]}, STATUS_BAD_PAGE, "got page 12"),
    "negative page of the last source alone": ({"page": (3, -1), "path": [0, 1, 9]}, STATUS_BAD_PAGE, "got page -1"),
    "row behind the table": ({"path": [0, 2, 10]}, STATUS_BAD_PAGE, "prefix_lengths: got 6 with slot 10"),
    "slot far behind the table": ({"path": [0, 2, 2**31 - 1]}, STATUS_BAD_PAGE, "prefix_lengths: got 6 with slot"),
    "prefix behind the table": ({"prefix": 16}, STATUS_BAD_PAGE, "prefix_lengths: got 16"),
    "prefix far behind the table": ({"prefix": 2**31 - 1}, STATUS_BAD_PAGE, "prefix_lengths: got 2147483647"),
    "prefix negative": ({"prefix": -1}, STATUS_BAD_PAGE, "prefix_lengths: got -1"),
    "slots fall": ({"path": [0, 5, 2]}, STATUS_BROKEN_LINK, "accept_slots: got [0, 5, 2]"),
    "slot twice": ({"path": [0, 2, 2]}, STATUS_BROKEN_LINK, "accept_slots: got [0, 2, 2]"),
    "slot negative": ({"path": [-1, 2, 5]}, STATUS_BROKEN_LINK, "accept_slots: got [-1, 2, 5]"),
    "count negative": ({"count": -1}, STATUS_BROKEN_LINK, "accept_count: got -1, needs 0 to 3"),
    "count most negative": ({"count": -(2**31)}, STATUS_BROKEN_LINK, "accept_count: got -2147483648"),
    "count above the columns": ({"count": 4}, STATUS_BROKEN_LINK, "accept_count: got 4"),
    "count huge": ({"count": 2**31 - 1}, STATUS_BROKEN_LINK, "accept_count: got 2147483647"),
}
faults = pytest.mark.parametrize("change, status, message", FAULTS.values(), ids=FAULTS)


def faulty_batch(page=None, path=(0, 2, 5), prefix=6, count=None):
    pool = np.arange(2 * 12 * 4 * 2, dtype=np.uint16).reshape(2, 12, 4, 2)
    table = np.arange(12, dtype=np.int32)[::-1].reshape(3, 4).copy()
    slots, counts = paths([0, 2, 5], list(path), [0, 1, 4], columns=3)
    if page is not None:
        table[1, page[0]] = page[1]
    if count is not None:
        counts[1] = count
    return pool, table, np.array([1, prefix, 3], np.int32), slots, counts


@both
@faults
def test_faulty_request_keeps_rows_and_length(commit, change, status, message, rng):
    pool, table, lengths, slots, counts = faulty_batch(**change)
    before, prefix = pool.copy(), lengths.copy()
    assert commit(pool, table, lengths, slots, counts).tolist() == [STATUS_OK, status, STATUS_OK]
    healthy = np.array([0, 2])
    expected_pool, expected_lengths = expected_commit(
        before, table[healthy], prefix[healthy], slots[healthy], counts[healthy]
    )
    np.testing.assert_array_equal(pool.view(np.uint8), expected_pool)
    assert lengths.tolist() == [expected_lengths[0], prefix[1], expected_lengths[1]]


@faults
def test_faulty_numpy_request_is_refused_before_anything_changes(change, status, message):
    arrays = faulty_batch(**change)
    before = [array.copy() for array in arrays]
    out = poisoned(3, np.int32)
    with pytest.raises(ValueError) as caught:
        commit_kv(*arrays, out=out)
    assert message in str(caught.value)
    assert "(request 1)" in str(caught.value)
    assert "\n" not in str(caught.value)
    for array, old in zip([*arrays, out], [*before, poisoned(3, np.int32)], strict=True):
        np.testing.assert_array_equal(array, old)


@every_way
def test_pages_that_are_not_needed_may_be_anything(commit):
    """Free ends of a block table hold -1 or rubbish; so may pages of the prefix that are not written."""
    arrays = faulty_batch(path=[0, 1, 2])
    arrays[1][1] = [-1, arrays[1][1, 1], arrays[1][1, 2], 2**31 - 1]
    before = arrays[0].copy()
    assert commit(*arrays)[1] == STATUS_OK
    np.testing.assert_array_equal(arrays[0][:, arrays[1][1, 1:3]], before[:, arrays[1][1, 1:3]])
    assert arrays[2][1] == 9


@every_way
def test_last_row_of_the_table_can_be_reached(commit):
    arrays = faulty_batch(path=[0, 8, 9])
    expected_pool, expected_lengths = expected_commit(*arrays)
    commit(*arrays)
    np.testing.assert_array_equal(arrays[0].view(np.uint8), expected_pool)
    np.testing.assert_array_equal(arrays[2], expected_lengths)


@every_way
def test_request_without_tokens_sits_out(commit):
    """Whatever its prefix, slots and pages say: count 0 asks for nothing."""
    arrays = faulty_batch(page=(1, -9), path=[-5, -5, -5], prefix=-7, count=0)
    keep = np.array([0, 2])
    expected_pool, _ = expected_commit(arrays[0].copy(), *(array[keep] for array in arrays[1:]))
    assert commit(*arrays).tolist() == [STATUS_OK] * 3
    assert arrays[2].tolist() == [4, -7, 6]
    np.testing.assert_array_equal(arrays[0].view(np.uint8), expected_pool)


@every_way
def test_shared_prefix_page_is_not_written(commit):
    """Two requests read one page of a common prefix; they write pages of their own."""
    pool = letters("ABCDabRSTUxyRVWZ", 4)
    table, lengths = np.array([[0, 1], [0, 3]], np.int32), np.array([4, 4], np.int32)
    commit(pool, table, lengths, *paths([0, 2], [1, 3]))
    assert pool.tobytes().decode() == "ABCDaRRSTUxyVZWZ"


@both
def test_rounds_carry_over(commit, rng):
    """Seven rounds on one cache: rows that a round commits must be what later rounds find below their prefix.

    Each round's nodes write rows never used before, so a row that went to a wrong place stays visible.
    """
    batch, budget, page_size, layers = 3, 9, 4, 2
    max_pages = 30
    pool = poisoned((layers, batch * max_pages, page_size, 1), np.int32)
    table = rng.permutation(batch * max_pages).reshape(batch, max_pages).astype(np.int32)
    lengths = rng.integers(1, 7, batch).astype(np.int32)
    history = [list(range(1000 * b, 1000 * b + length)) for b, length in enumerate(lengths)]
    fresh = 10000

    def write(b, index, value):
        for layer in range(layers):
            pool[layer, table[b, index // page_size], index % page_size, 0] = value + 500000 * layer

    for b, rows in enumerate(history):
        for index, value in enumerate(rows):
            write(b, index, value)
    for _ in range(7):
        tree = random_tree(rng, batch, budget)
        path = accept_walk_reference(tree, random_target_tokens(rng, tree, follow=0.9), 6)
        for b in range(batch):
            for slot in range(tree.node_count[b]):
                write(b, lengths[b] + slot, fresh + slot)
            history[b] += [fresh + slot for slot in path.accept_slots[b, : path.accept_count[b]].tolist()]
            fresh += 100
        commit(pool, table, lengths, path.accept_slots, path.accept_count)
        for b, rows in enumerate(history):
            assert lengths[b] == len(rows)
            for layer in range(layers):
                of_request = pool[layer, table[b], :, 0].ravel()[: len(rows)]
                assert (of_request - 500000 * layer).tolist() == rows


def test_walk_feeds_commit_on_the_device(rng):
    tree = random_tree(rng, 3, 12)
    targets = random_target_tokens(rng, tree)
    pool, table, prefix, _, _ = random_batch(rng, 3, 1, 4, 2, np.uint16)
    device_pool, device_table, device_prefix = on_device((pool, table, prefix))
    path = accept_walk(on_device(tree), cuda.to_device(targets), 8)
    commit_kv(device_pool, device_table, device_prefix, path.accept_slots, path.accept_count)
    expected = accept_walk_reference(tree, targets, 8)
    commit_kv_reference(pool, table, prefix, expected.accept_slots, expected.accept_count)
    np.testing.assert_array_equal(device_pool.copy_to_host(), pool)
    np.testing.assert_array_equal(device_prefix.copy_to_host(), prefix)


@pytest.mark.parametrize("place", [list, on_device])
def test_stream(place, rng):
    arrays = random_batch(rng, 2, 1, 4, 3, np.float16, longest_prefix=5)
    expected_pool, expected_lengths = expected_commit(*arrays)
    given = place(arrays)
    stream = cuda.stream()
    status = commit_kv(*given, stream=stream)
    if place is on_device:
        stream.synchronize()
        arrays, status = [array.copy_to_host() for array in given], status.copy_to_host()
    assert status.tolist() == [STATUS_OK] * 2
    np.testing.assert_array_equal(arrays[0].view(np.uint8), expected_pool)
    np.testing.assert_array_equal(arrays[2], expected_lengths)


def test_bad_arguments_are_named():
    pool, table, lengths, slots, count = arrays = faulty_batch()

    def raises(error, words, index, replacement, **kwargs):
        given = [*arrays[:index], replacement, *arrays[index + 1 :]]
        before = pool.copy()
        with pytest.raises(error) as caught:
            commit_kv(*given, **kwargs)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message
        np.testing.assert_array_equal(pool, before)
        assert lengths.tolist() == [1, 6, 3]

    raises(TypeError, ("kv_pool", "complex64"), 0, pool.astype(np.complex64))
    raises(ValueError, ("kv_pool", "(2, 12, 8)"), 0, pool.reshape(2, 12, 8))
    raises(ValueError, ("kv_pool", "strided"), 0, pool[:, :, ::2])
    raises(ValueError, ("page_size", "0"), 0, pool[:, :, :0].copy())
    raises(ValueError, ("layers", "0"), 0, pool[:0].copy())
    raises(ValueError, ("D of kv_pool", "0"), 0, pool[..., :0].copy())
    read_only = pool.copy()
    read_only.flags.writeable = False
    raises(ValueError, ("kv_pool", "read-only"), 0, read_only)
    raises(TypeError, ("block_table", "int64"), 1, table.astype(np.int64))
    raises(ValueError, ("block_table", "(12,)"), 1, table.ravel())
    raises(ValueError, ("prefix_lengths", "(2,)", "B=3"), 2, lengths[:2].copy())
    raises(TypeError, ("prefix_lengths", "int64"), 2, lengths.astype(np.int64))
    raises(ValueError, ("accept_slots", "(2, 3)", "B=3"), 3, slots[:2].copy())
    raises(TypeError, ("accept_slots", "float32"), 3, slots.astype(np.float32))
    raises(ValueError, ("columns", "0"), 3, slots[:, :0].copy())
    raises(ValueError, ("accept_count", "(4,)", "B=3"), 4, np.ones(4, np.int32))
    raises(TypeError, ("accept_count", "list"), 4, count.tolist())
    raises(TypeError, ("accept_count", "device"), 4, cuda.to_device(count))
    raises(ValueError, ("status", "(2,)"), 4, count, out=np.zeros(2, np.int32))
    raises(TypeError, ("status", "int64"), 4, count, out=np.zeros(3, np.int64))
    empty = [pool, table[:0], lengths[:0], slots[:0], count[:0]]
    with pytest.raises(ValueError, match="B of block_table: got 0"):
        commit_kv(*empty)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_gpu_model_size(page_size, rng):
    """61 layers of 576 bfloat16, 64 requests, prefixes to 150: 0.9 GB."""
    arrays = random_batch(rng, 64, 61, page_size, 576, np.uint16, columns=16, reach=65, longest_prefix=100)
    twins = [array.copy() for array in arrays]
    np.testing.assert_array_equal(launch_device(*arrays), commit_kv_reference(*twins))
    assert np.array_equal(arrays[0], twins[0])
    np.testing.assert_array_equal(arrays[2], twins[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, width", [(np.uint16, 575), (np.uint16, 574), (np.uint8, 577), (np.float32, 129)])
def test_gpu_rows_of_odd_widths(dtype, width, rng):
    for commit in (launch_numpy, launch_device):
        arrays = random_batch(rng, 9, 3, 16, width, dtype, columns=16, reach=65)
        twins = [array.copy() for array in arrays]
        np.testing.assert_array_equal(commit(*arrays), commit_kv_reference(*twins))
        np.testing.assert_array_equal(arrays[0].view(np.uint8), twins[0].view(np.uint8))


@pytest.mark.gpu
def test_gpu_rows_are_seen_as_the_widest_words_that_fit():
    def words(width, dtype, shift=0):
        memory = cuda.device_array(shift + 6 * width, dtype)
        return kv_words(memory[shift:].reshape(1, 2, 3, width))

    for width, dtype, shift, word in (
        (576, np.uint16, 0, np.uint64),
        (576, np.uint16, 2, np.uint32),
        (576, np.uint16, 1, np.uint16),
        (574, np.float16, 0, np.uint32),
        (575, np.float16, 0, np.uint16),
        (129, np.float32, 0, np.uint32),
        (577, np.uint8, 0, np.uint8),
        (3, np.float64, 0, np.uint64),
    ):
        seen = words(width, dtype, shift)
        assert seen.dtype == word
        assert seen.shape == (1, 2, 3, width * np.dtype(dtype).itemsize // np.dtype(word).itemsize)


@pytest.mark.gpu
def test_gpu_pool_that_starts_between_words(rng):
    """A pool that is a slice of a bigger allocation need not start at a multiple of 8 bytes."""
    pool, *rest = random_batch(rng, 5, 2, 16, 8, np.uint16)
    memory = cuda.to_device(np.concatenate([np.zeros(1, np.uint16), pool.ravel()]))
    shifted, (table, lengths, slots, count) = memory[1:].reshape(*pool.shape), on_device(rest)
    status = commit_kv(shifted, table, lengths, slots, count)
    np.testing.assert_array_equal(status.copy_to_host(), commit_kv_reference(pool, *rest))
    np.testing.assert_array_equal(memory.copy_to_host()[1:], pool.ravel())
    np.testing.assert_array_equal(lengths.copy_to_host(), rest[1])


@pytest.mark.gpu
def test_gpu_addresses_beyond_32_bits(rng):
    """The last page of 4.3 GB lies behind 2**31 elements; a wrapped address would miss it."""
    pages, page_size, width = 58300, 64, 576
    pool = cuda.device_array((1, pages, page_size, width), np.uint16)
    rows = rng.integers(0, 2**16, (page_size, width), dtype=np.uint16)
    pool[0, pages - 1].copy_to_device(rows)
    table, lengths = np.array([[pages - 1]], np.int32), np.array([50], np.int32)
    arrays = on_device((table, lengths, *paths([0, 2, 7, 13])))
    status = cuda.device_array(1, np.int32)
    advance_lengths_kernel[1, 32](pool, *arrays, status)
    commit_kv_kernel[(1, 1), 128](pool, *arrays, status)  # 2-byte elements, not words: the largest indices
    expected = rows.copy()
    expected[51:54] = rows[[52, 57, 63]]
    np.testing.assert_array_equal(pool[0, pages - 1].copy_to_host(), expected)
    assert arrays[1].copy_to_host().tolist() == [54]
    assert status.copy_to_host().tolist() == [STATUS_OK]
