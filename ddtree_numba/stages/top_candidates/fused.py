"""Rung 2: every logit read once, for the sum and for the K best alike, by one launch.

What changed: `block_per_row` reads a row three times, once for the maximum, once for the sum, once (and once more for
every 512 candidates) for the best. Here one pass does it all:

- *Eight at a time.* A thread loads 16 bytes at once, four times before it computes; while it waits, the other blocks of
  the multiprocessor compute.
- *The sum without the maximum.* The terms are exp(x - reference), with the largest logit that the warp has seen as the
  reference: it rises a few times in a row, and then the sums are scaled. A term is one multiply-add and one `exp2`; 32
  terms are added in float32, the rest in float64.
- *Keys, not candidates.* The logits that a thread loads at once are a *chunk*: four vectors of eight (or several such
  loads, where one block reads more than 196608 logits). Of each chunk the pass keeps 16 bits, the upper half of its
  largest logit: its *key*. The K chunks with the largest keys hold the K best logits, but for ties: a logit elsewhere
  is at most as large as the largest of each. The 256 chunks that the threads of a block load together are a *group*.
- *Few rows, many blocks.* A row is cut into segments, one for each block. The block that happens to be the last of its
  row goes on alone; where a row has one block, that is the one.

What goes on has three steps. The *floor* is the K-th largest of the best keys that the 256 threads see among all the
row's: K of them are proof enough. The chunks that reach it, some 77 of 5120, are *opened*, once more from memory, and
the logits that reach it, about as many, are *ranked* by counting: each needs only the number of those before it.

Ties may make the chunks too many for their list. Then all that reach the floor are opened, in the order of memory, and
whenever the logits found are too many for their place, the K-th best of those there is the new bound, exact to the
token.

What it buys: measured on an H200, 64 x 15 rows of 163840 bfloat16 take 90 us; at the speed that 16-byte loads reach,
reading them is 83, and `topk` and `logsumexp` of torch took 1917 in that run. One request, 15 rows in 20 segments
each, takes 12 us, of which an empty kernel takes 3. With lists of candidates in every block, the merge of which opened
and ranked again, it was 99 and 19. Little of the 12 is reading: a row's last block takes one dependent step after the
other, a wait for memory or a barrier each.

What it costs: K up to 64; and ties by the thousand. 64 x 15 rows of equal logits take 328 us, those of one request 91;
rows that ascend from -5 to 5, 241 and 54.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import check_integer
from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.block_reduce import SCRATCH_SIZE, block_sum
from ddtree_numba.device_library import scratch
from ddtree_numba.ptx import (
    count_in,
    exp2,
    fused_multiply_add,
    inlined,
    kernel_for,
    larger,
    warp_max,
    warp_min,
    warp_sum,
)
from ddtree_numba.stages.top_candidates.number_formats import VECTOR, number_format

__all__ = [
    "MAX_CANDIDATES",
    "Workspace",
    "check_workspace",
    "fused_kernel",
    "launch_fused",
    "make_workspace",
    "segments_for",
    "workspace_for",
]

MAX_CANDIDATES = 64
"""The largest K."""

THREADS = block_threads(256, simulator=4)
_BLOCKS = 4  # that share a multiprocessor: 64 registers a thread
_BLOCKS_OF_SEGMENTS = 3  # where a row has several: 80 registers, and all blocks of one request at once
_LANES = 32 if ON_GPU else 1
WARPS = THREADS // _LANES
_BESTS_OF_LANE = THREADS // _LANES

# The simulator's are small, so that its short rows have long chunks and fill both lists.
_GROUPS = 24 if ON_GPU else 4  # of chunks that a row is cut into, at least; a thread has their keys on the way at once
_LIST_SIZE = 512 if ON_GPU else 8
_CAPACITY = 1024 if ON_GPU else 96  # logits of the row in shared memory: more than K
_PER_THREAD = _CAPACITY // THREADS
_PADDING = 8
_FOUND_SIZE = _CAPACITY + _PADDING
_SHARE = 2 if ON_GPU else 1  # neighbours that open a chunk together, or rank a logit

_MOST_SEGMENTS = 65535  # a grid's second axis

_HALF = np.uint64(32)
_SIGN = np.uint32(0x80000000)
_COARSE = np.uint32(16)  # bits of a logit that its chunk's key lacks
_ALL_LANES = np.uint32(0xFFFFFFFF)
_NO_FLOOR = np.uint32(1)  # less than any logit's key
_SMALLEST = np.float32(np.finfo(np.float32).min)
_LOG2_E = np.float32(math.log2(math.e))
_LOG2_E_EXACT = math.log2(math.e)
_LOG2_E_REST = math.log2(math.e) - float(_LOG2_E)  # to 2**-53: the float64 and its rounding to float32 are exact here
_LN_2 = math.log(2)
_HUGE = np.float32(2.0**30)  # from here on, logits are equal or 64 and more apart

_VECTORS_OF_THREAD = 4 if ON_GPU else 2
_ROUND = _VECTORS_OF_THREAD * THREADS  # vectors
_GPU_ROUND = 1024
_LISTED, _FOUND, _ARRIVED = 0, 1, 2  # places in the shared `state`


class Workspace(NamedTuple):
    """What the blocks of a row tell the last of them: device arrays, for R rows in S segments."""

    keys: Any
    """[R, S * G * THREADS] uint16: the key of each chunk, see `_chunk_key`; G = `_groups_of_segment(S)` at most."""
    largest: Any
    """[R, S * WARPS] float32: the largest logit that a warp has seen; NaN or +inf: the row is invalid."""
    totals: Any
    """[R, S * WARPS] float64: the warp's sum, in units of `_log2_unit(_usable(largest))`."""
    arrived: Any
    """[R] uint32: blocks of the row that are done; 0 before a launch and after it."""


@cuda.jit
def _clear_kernel(numbers):
    """Set `numbers` (R uint32) to 0. Launch: at least R threads."""
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] = 0


def make_workspace(rows: int, segments: int, stream: Any = 0) -> Workspace:
    """Return buffers for `rows` rows cut into `segments`, for one launch at a time."""
    arrived = scratch(rows, np.uint32, stream)
    _clear_kernel[-(-rows // THREADS), THREADS, stream](arrived)  # a kernel, which a graph can record; not a copy
    return Workspace(
        scratch((rows, segments * _groups_of_segment(segments) * THREADS), np.uint16, stream),
        scratch((rows, segments * WARPS), np.float32, stream),
        scratch((rows, segments * WARPS), np.float64, stream),
        arrived,
    )


def workspace_for(rows: int, vocab: int, stream: Any = 0) -> Workspace:
    """Return buffers for `rows` rows of `vocab` logits, cut into as many segments as suit the current device."""
    multiprocessors = cuda.get_current_device().MULTIPROCESSOR_COUNT if ON_GPU else 1
    return make_workspace(rows, segments_for(rows, vocab, multiprocessors), stream)


def check_workspace(workspace: Any, rows: int) -> None:
    """Raise `TypeError` or `ValueError` naming the array when a caller's `workspace` does not serve `rows` rows."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: got {type(workspace).__name__}, needs a Workspace, from fused.make_workspace")
    shape: tuple[int, ...] = getattr(workspace.totals, "shape", ())
    held, parts = shape if len(shape) == 2 else (rows, WARPS)
    segments = parts // WARPS
    check_integer("segments of workspace", segments, 1, _MOST_SEGMENTS)
    needed = {
        "totals": ((held, segments * WARPS), np.float64),
        "largest": ((held, segments * WARPS), np.float32),
        "keys": ((held, segments * _groups_of_segment(segments) * THREADS), np.uint16),
        "arrived": ((held,), np.uint32),
    }
    # Not by `ArrayCheck`, which takes several times as long: this comes before every launch.
    for name, (shape, dtype) in needed.items():
        array = getattr(workspace, name)
        if not hasattr(array, "copy_to_host"):
            raise TypeError(f"workspace.{name}: got {type(array).__name__}, needs a Numba device array")
        if array.dtype != dtype:
            raise TypeError(f"workspace.{name}: got {array.dtype}, needs {np.dtype(dtype)}")
        if array.shape != shape:
            raise ValueError(f"workspace.{name}: got shape {array.shape}, needs {shape}")
        if not array.is_c_contiguous():  # `count_in` goes by addresses
            raise ValueError(f"workspace.{name}: got a strided view, needs a C-contiguous array")
    if held < rows:
        raise ValueError(f"workspace: got room for {held} rows, needs {rows}, one for each depth of each request")


def segments_for(rows: int, vocab: int, multiprocessors: int) -> int:
    """Return into how many segments to cut each row: as many blocks as run at once, of whole rounds.

    >>> [segments_for(rows, 163840, multiprocessors=132) for rows in (1, 15, 132, 960)]
    [20, 20, 3, 1]
    """
    rounds = -(-_vectors(vocab) // _GPU_ROUND)
    rounds_of_block = -(-rounds * rows // (_BLOCKS_OF_SEGMENTS * multiprocessors))
    return -(-rounds // min(rounds, rounds_of_block))


def _groups_of_segment(segments: int) -> int:
    """Return into how many groups of chunks to cut each of a row's `segments`, at most."""
    return -(-_GROUPS // segments)


def _vectors(vocab: int, aligned: bool = True) -> int:
    """Return the most vectors of a row of `vocab`; `aligned`: the first row begins at the first place of one."""
    return vocab // VECTOR if aligned and vocab % VECTOR == 0 else (vocab + 2 * VECTOR - 2) // VECTOR


# Logits are compared as unsigned numbers, so that a floor can be halved and a logit and its place can be one number.
# Negative numbers are counted down from 0.0, so that clearing the low bits of either sign gives a smaller number, and
# -0.0 equals 0.0. NaN lies outside both infinities.


@inlined
def _ordered(value):
    """Return bits that compare as the float32 `value` does."""
    bits = value.view(np.uint32)
    return np.uint32(~bits + np.uint32(1)) if bits & _SIGN else np.uint32(bits | _SIGN)


@inlined
def _unordered(bits):
    return np.uint32(bits ^ _SIGN if bits & _SIGN else ~bits + np.uint32(1)).view(np.float32)


@inlined
def _key(ordered, index):
    """Return a number that is larger for what comes earlier: the larger logit, then the smaller `index`."""
    return (np.uint64(ordered) << _HALF) | np.uint64(np.uint32(~np.uint32(index)))


@inlined
def _index(key):
    return np.int64(np.uint32(~np.uint32(key & np.uint64(0xFFFFFFFF))))


@inlined
def _value(key):
    return np.uint32(key >> _HALF)


@inlined
def _log2_unit(reference):
    """Return the binary logarithm, in float64, of what the terms of a thread with this `reference` are multiples of.

    A term is 2 ** (x * a - c) with a = log2(e) and c = reference * a, both rounded to float32. So it is exp(x) in units
    of 2 ** (c + x * rest); taking reference * rest for x * rest is off by a quarter of a rounding of x - reference.
    """
    if abs(reference) < _HUGE:
        return np.float64(np.float32(reference * _LOG2_E)) + np.float64(reference) * _LOG2_E_REST
    return np.float64(reference) * _LOG2_E_EXACT


@inlined
def _ratio(reference, other):
    """Return how many units of the larger `other` one of `reference` is."""
    return math.exp((_log2_unit(reference) - _log2_unit(other)) * _LN_2)


@inlined
def _ratio_to_exp(reference, largest):
    """Return how many exp(`largest`) a unit of `reference` is."""
    exponent = np.float64(reference) - np.float64(largest)  # for huge ones: the rounding of a product would be felt
    if abs(reference) < _HUGE:
        exponent = (_log2_unit(reference) - np.float64(largest) * _LOG2_E_EXACT) * _LN_2
    return math.exp(exponent)


@inlined
def _usable(largest):
    """Return a finite reference."""
    return max(largest, _SMALLEST) if largest < np.float32(np.inf) else np.float32(0)


@inlined
def _factor_and_offset(reference):
    """Return a and -c. For huge logits any a gives 1 for the largest and nothing for the others; 1 never overflows."""
    if abs(reference) < _HUGE:
        return _LOG2_E, -np.float32(reference * _LOG2_E)
    return np.float32(1), -reference


@inlined
def _chunk_key(largest):
    """Return the upper half of the ordered `largest` logit of a chunk: all of a bfloat16."""
    return np.uint32(_ordered(largest) >> _COARSE)


# Positions in a block are unsigned: quotient and remainder of what may be negative take several times as many
# instructions.


@inlined
def _warp():
    return np.uint32(cuda.threadIdx.x) // np.uint32(_LANES)


@inlined
def _lane():
    return np.uint32(cuda.threadIdx.x) % np.uint32(_LANES)


@inlined
def _any_of_warp(flag):
    return cuda.any_sync(_ALL_LANES, flag) if ON_GPU else flag


@inlined
def _largest_of_warp(value):
    return _unordered(warp_max(_ordered(value))) if ON_GPU else value


@inlined
def _sum_of_warp(value):
    for i in range(5 if ON_GPU else 0):
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 16 >> i)
    return value


@inlined
def _key_that_reach(k, bests):
    """Return the largest key that at least `k` of the block's `bests` reach; each warp finds it by itself.

    Halves what lies between the smallest and the largest: one count over the warp a step, six to eight for bfloat16.
    """
    mine = cuda.local.array(_BESTS_OF_LANE, np.uint32)
    for i in range(_BESTS_OF_LANE):
        mine[i] = bests[np.uint32(_lane() + np.uint32(i * _LANES))]
    low, high = mine[0], mine[0]
    for i in range(1, _BESTS_OF_LANE):
        low, high = min(low, mine[i]), max(high, mine[i])
    low, high = (warp_min(low), warp_max(high)) if ON_GPU else (low, high)
    if k > THREADS:
        return _NO_FLOOR
    while low < high:
        middle = np.uint32((low + high + np.uint32(1)) >> np.uint32(1))
        reaching = np.uint32(0)
        for i in range(_BESTS_OF_LANE):
            reaching = np.uint32(reaching + np.uint32(mine[i] >= middle))
        reaching = warp_sum(reaching) if ON_GPU else reaching
        if reaching >= k:
            low = middle
        else:
            high = np.uint32(middle - np.uint32(1))
    return low


@inlined
def _take_keys(keys, first, groups, mine):
    """Put the keys of this thread's chunks in groups `first`.. into `mine`, 0 past the last; their loads overlap."""
    place = np.uint64(first * THREADS + cuda.threadIdx.x)  # 64 bits and no sign: what is added goes into the address
    for i in range(_GROUPS):
        mine[i] = np.uint32(keys[place + np.uint64(i * THREADS)]) if i < groups - first else np.uint32(0)


@inlined
def _clear(found):
    """Set all to 0."""
    place = np.uint32(cuda.threadIdx.x)
    while place < _FOUND_SIZE:
        found[place] = np.uint64(0)
        place = np.uint32(place + np.uint32(THREADS))


@cuda.jit(device=True)
def _keep(found, count, smallest, state):
    """Keep of the first `count` keys those of at least `smallest`, in any order; return how many.

    Behind them are zeros. All of the block have read the count when this returns.
    """
    thread = cuda.threadIdx.x
    mine = cuda.local.array(_PER_THREAD, np.uint64)
    for i in range(_PER_THREAD):
        place = i * THREADS + thread
        mine[i] = found[place] if place < count else np.uint64(0)
    cuda.syncthreads()  # all keys are in registers
    if thread == 0:
        state[_FOUND] = 0
    _clear(found)
    cuda.syncthreads()
    for i in range(_PER_THREAD):
        if mine[i] >= smallest:
            found[cuda.atomic.add(state, _FOUND, np.uint32(1))] = mine[i]
    cuda.syncthreads()  # all keys are there
    kept = state[_FOUND]
    cuda.syncthreads()
    return kept


@cuda.jit(device=True)
def _key_of_best(found, k, counts):
    """Return a number that exactly `k` of the keys reach, bit by bit, until it parts them so. No place is free."""
    thread = cuda.threadIdx.x
    mine = cuda.local.array(_PER_THREAD, np.uint64)
    for i in range(_PER_THREAD):
        mine[i] = found[i * THREADS + thread]
    reached, bit = np.uint64(0), np.uint64(1 << 63)
    while bit > 0:
        tried = np.uint64(reached | bit)
        reaching = np.int32(0)
        for i in range(_PER_THREAD):
            reaching = np.int32(reaching + np.int32(mine[i] >= tried))
        reaching = block_sum(reaching, counts)
        if reaching >= k:
            reached = tried
        if reaching == k:
            break
        bit = np.uint64(bit >> np.uint64(1))
    return reached


@inlined
def _best_key(keys, groups, mine):
    """Return the largest of the keys that this thread looks after; `mine` holds the first of them."""
    best, first = np.uint32(0), np.int32(0)
    while first < groups:
        _take_keys(keys, first, groups, mine)
        for i in range(_GROUPS):
            best = max(best, mine[i])
        first = np.int32(first + _GROUPS)
    return best


@inlined
def _list_chunks(keys, groups, floor, mine, listed, state):
    """List the chunks whose keys reach the floor. Those that find no room are counted too."""
    first = np.int32(0)
    while first < groups:
        if groups > _GROUPS:  # else they are there
            _take_keys(keys, first, groups, mine)
        reaching = np.uint32(0)
        for i in range(_GROUPS):
            if mine[i] >= floor:
                reaching = np.uint32(reaching | np.uint32(1 << i))
        while reaching > 0:  # three at most, as a rule
            place = cuda.atomic.add(state, _LISTED, np.uint32(1))
            if place < _LIST_SIZE:
                listed[place] = np.uint32((first + cuda.ffs(reaching) - 1) * THREADS + cuda.threadIdx.x)
            reaching = np.uint32(reaching & (reaching - np.uint32(1)))
        first = np.int32(first + _GROUPS)


@inlined
def _sum_of_parts(largest, totals, parts, most):
    """Return this warp's share of the row's sum, in units of exp(`most`). The last warps first: they open no chunk."""
    total = np.float64(0)
    if np.int32(THREADS - _LANES) - np.int32(_warp()) * _LANES < parts:
        part = np.int32(THREADS - 1 - cuda.threadIdx.x)
        while part < parts:
            total += totals[part] * _ratio_to_exp(_usable(largest[part]), most)
            part = np.int32(part + THREADS)
        total = _sum_of_warp(total)
    return total


@inlined
def _rank(found, count, key):
    """Return how many of the `count` keys are larger; neighbours count in turns. Behind the keys are zeros."""
    rank, first = np.int32(0), np.uint32(_lane() % np.uint32(_SHARE) * np.uint32(_PADDING))
    while first < count:
        for i in range(_PADDING):  # their loads overlap
            rank = np.int32(rank + np.int32(found[np.uint32(first + np.uint32(i))] > key))
        first = np.uint32(first + np.uint32(_SHARE * _PADDING))
    if ON_GPU:
        rank = np.int32(rank + cuda.shfl_xor_sync(_ALL_LANES, rank, 1))
    return rank


@inlined
def _rank_all(found, count, k, ranked):
    """Put the K best of the `count` keys into `ranked`, in order."""
    first = np.uint32(_warp() * np.uint32(_LANES // _SHARE))
    while first < count:
        key = found[min(np.uint32(first + _lane() // np.uint32(_SHARE)), count)]
        rank = _rank(found, count, key)
        if rank < k and _lane() % np.uint32(_SHARE) == 0:
            ranked[rank] = key
        first = np.uint32(first + np.uint32(THREADS // _SHARE))


@functools.cache
def fused_kernel(dtype_name: str, several: bool) -> Any:
    """Return the kernel for logits of this dtype, in one or in `several` segments a row."""
    form = number_format(dtype_name)
    registers, register_type = form.registers, form.register_type
    shift_of, load, load_edge, pair, largest_of = form.shift, form.load, form.load_edge, form.pair, form.largest
    vectors_at_once = 16 // registers if ON_GPU else _VECTORS_OF_THREAD
    round_vectors = vectors_at_once * THREADS
    opened_at_once = _VECTORS_OF_THREAD // _SHARE
    keys_held = 1 if several else _GROUPS * THREADS

    @inlined
    def load_round(logits, start, shift, vocab, base, words):
        """Load this thread's vectors of a round: `base` + its index, and THREADS further each."""
        mine = np.int32(base + cuda.threadIdx.x)
        whole = np.int32(np.uint32(vocab + shift) // np.uint32(VECTOR))  # vectors that end in the row
        if (base > 0 or shift == 0) and np.int32(base + round_vectors) <= whole:  # the same for the whole block
            for u in range(vectors_at_once):
                load(logits, start - shift, mine, u * THREADS, words, u)
        else:
            for u in range(vectors_at_once):
                load_any(logits, start, shift, vocab, np.int32(mine + u * THREADS), words, u)

    @inlined
    def load_any(logits, start, shift, vocab, vector, words, u):
        """Load a vector that may lie outside the row, in part or whole: there all is -inf."""
        first = np.int32(vector * VECTOR - shift)
        if first >= 0 and first <= vocab - VECTOR:
            load(logits, start - shift, vector, 0, words, u)
        else:
            load_edge(logits, start, first, vocab, words, u)

    @inlined
    def two_terms(words, u, p, factor, offset):
        a, b = pair(words, u, p)
        return exp2(fused_multiply_add(a, factor, offset)) + exp2(fused_multiply_add(b, factor, offset))

    @inlined
    def sum_of_terms(words, u, factor, offset):
        """Add exp(logit - reference) over a vector, as a tree: three roundings deep."""
        s = two_terms(words, u, 0, factor, offset) + two_terms(words, u, 1, factor, offset)
        t = two_terms(words, u, 2, factor, offset) + two_terms(words, u, 3, factor, offset)
        return s + t

    @inlined
    def sum_of_round(words, factor, offset):
        """Add the vectors of a round: two more roundings."""
        total = sum_of_terms(words, 0, factor, offset) + sum_of_terms(words, 1, factor, offset)
        if vectors_at_once == 4:
            total += sum_of_terms(words, 2, factor, offset) + sum_of_terms(words, 3, factor, offset)
        return total

    @inlined
    def scan(logits, start, shift, vocab, first_group, groups, group_vectors, keys):
        """Read `groups` groups: write the keys of their chunks; return the warp's largest logit and its sum."""
        words = cuda.local.array((vectors_at_once, registers), register_type)
        end = np.int32(np.uint32(vocab + shift + (VECTOR - 1)) // np.uint32(VECTOR))
        best, total = np.float32(-np.inf), np.float64(0)
        reference, factor, offset = _SMALLEST, np.float32(1), -_SMALLEST
        group, end_group = first_group, np.int32(first_group + groups)
        while group < end_group:
            base = np.int32(group * group_vectors)
            group_end = min(np.int32(base + group_vectors), end)
            largest = np.float32(-np.inf)
            while base < group_end:
                load_round(logits, start, shift, vocab, base, words)
                most = largest_of(words, 0)
                for u in range(1, vectors_at_once):
                    most = larger(most, largest_of(words, u))
                largest = larger(largest, most)
                if _any_of_warp(most > reference):  # no term is above 1
                    new_reference = _usable(_largest_of_warp(most))
                    if total > 0:
                        total *= _ratio(reference, new_reference)
                    reference = new_reference
                    factor, offset = _factor_and_offset(reference)
                total += np.float64(sum_of_round(words, factor, offset))
                base = np.int32(base + round_vectors)
            keys[np.uint32(group * THREADS + cuda.threadIdx.x)] = np.uint16(_chunk_key(largest))
            best = larger(best, largest)
            group = np.int32(group + 1)
        return _largest_of_warp(best), _sum_of_warp(total)

    @inlined
    def append_logits(words, first, vocab, smallest, found, state):
        """Append those of the opened vectors' logits whose keys reach `smallest`; the first has place `first`.

        Those that find no room are counted too.
        """
        largest = largest_of(words, 0)
        for u in range(1, opened_at_once):
            largest = larger(largest, largest_of(words, u))
        if _key(_ordered(largest), max(first, np.int32(0))) < smallest:  # as of nearly all, when all are equal
            return
        floor_logit = _unordered(_value(smallest))
        reaching = np.uint32(0)
        for u in range(opened_at_once):
            for p in range(VECTOR // 2):
                values = pair(words, u, p)
                for i in range(2):
                    if not values[i] < floor_logit:  # all if there is no floor, which is no number
                        reaching = np.uint32(reaching | np.uint32(1 << (u * VECTOR + 2 * p + i)))
        while reaching > 0:  # one or two
            which = np.int32(cuda.ffs(reaching) - 1)
            reaching = np.uint32(reaching & (reaching - np.uint32(1)))
            value = np.float32(0)
            for u in range(opened_at_once):
                for p in range(VECTOR // 2):
                    values = pair(words, u, p)
                    for i in range(2):
                        value = values[i] if which == u * VECTOR + 2 * p + i else value
            token = np.int32(first + which + which // np.int32(VECTOR) * ((THREADS - 1) * VECTOR))
            key = _key(_ordered(value), token)
            if token >= 0 and token < vocab and key >= smallest:  # outside the row there are no logits, only -inf
                place = cuda.atomic.add(state, _FOUND, np.uint32(1))
                if place < _CAPACITY:
                    found[place] = key

    @inlined
    def open_chunks(logits, start, shift, vocab, k, chunks, group_vectors, keys, floor, listed, found, state, counts):
        """Put into `found` the logits that may be among the K best; return how many.

        `chunks`: of the row. They are the listed ones where the list has room, else all that reach the floor.
        """
        words = cuda.local.array((opened_at_once, registers), register_type)
        many = state[_LISTED]
        all_listed = many <= _LIST_SIZE
        chunks = np.uint32(many if all_listed else chunks)
        smallest = np.uint64(floor) << np.uint64(48)
        before, turn = np.uint32(0), np.uint32(0)
        while turn < chunks:  # the same for the whole block
            chunk = np.uint32(turn + np.uint32(cuda.threadIdx.x) // np.uint32(_SHARE))
            reaches = chunk < chunks
            if reaches and all_listed:
                chunk = listed[chunk]
            elif reaches:
                reaches = np.uint64(keys[chunk]) >= smallest >> np.uint64(48)
            vector = np.int32(chunk // np.uint32(THREADS) * np.uint32(group_vectors) + chunk % np.uint32(THREADS))
            vector = np.int32(vector + np.int32(cuda.threadIdx.x % _SHARE * opened_at_once * THREADS))
            opened = np.int32(0)
            while opened < group_vectors:
                if reaches:
                    for u in range(opened_at_once):
                        load_any(logits, start, shift, vocab, np.int32(vector + u * THREADS), words, u)
                while True:
                    if reaches:
                        append_logits(words, np.int32(vector * VECTOR - shift), vocab, smallest, found, state)
                    cuda.syncthreads()  # all that may be among the K best is found
                    count = state[_FOUND]
                    if count <= _CAPACITY:
                        break
                    # Ties. Those that found room tell a better bound; again with that.
                    smallest = _key_of_best(found, k, counts)
                    before = _keep(found, before, smallest, state)
                before = count
                opened, vector = np.int32(opened + _ROUND), np.int32(vector + _ROUND)
                if opened < group_vectors or turn + np.uint32(THREADS // _SHARE) < chunks:
                    cuda.syncthreads()  # all have read the count
            turn = np.uint32(turn + np.uint32(THREADS // _SHARE))
        return before

    @kernel_for(THREADS, _BLOCKS_OF_SEGMENTS if several else _BLOCKS)
    def top_candidates_fused_kernel(logits, vocab, k, groups, group_vectors, workspace, log_probs, token_ids):
        """Sum one segment of a row in each block and find its chunks' keys; the row's last block finds its K best.

        logits (R * V bfloat16 or float16 as uint16, or float32): rows of V = `vocab`, one after the other.
        k (int32): K.
        groups (int32): groups of chunks in a segment, at most `_groups_of_segment(S)`.
        group_vectors (int32): vectors of a group, whole rounds of them.
        workspace (Workspace for R rows, S segments): used if S > 1.
        log_probs (R, K float32), token_ids (R, K int32): written.

        Launch: grid (R, S), block THREADS, 25 KB of static shared memory, half of it where S > 1.
        Needs: 1 <= K <= 64, K <= V < 2**31; `workspace.arrived` 0.
        """
        own_keys = cuda.shared.array(keys_held, np.uint16)
        own_largest = cuda.shared.array(WARPS, np.float32)
        own_totals = cuda.shared.array(WARPS, np.float64)
        listed = cuda.shared.array(_LIST_SIZE, np.uint32)
        found = cuda.shared.array(_FOUND_SIZE, np.uint64)
        ranked = cuda.shared.array(MAX_CANDIDATES, np.uint64)
        state = cuda.shared.array(3, np.uint32)
        bests = cuda.shared.array(THREADS, np.uint32)
        tops = cuda.shared.array(WARPS, np.float32)
        sums = cuda.shared.array(SCRATCH_SIZE, np.float64)
        counts = cuda.shared.array(SCRATCH_SIZE, np.int32)
        mine = cuda.local.array(_GROUPS, np.uint32)

        thread, warp = cuda.threadIdx.x, _warp()
        row, segment, segments = np.uint32(cuda.blockIdx.x), cuda.blockIdx.y, cuda.gridDim.y
        start = np.int64(row) * vocab
        shift = shift_of(logits, start)
        keys, largest, totals = own_keys, own_largest, own_totals
        if several:
            keys, largest, totals = workspace.keys[row], workspace.largest[row], workspace.totals[row]

        if thread < 2:
            state[thread] = 0
        first_group = np.int32(segment * groups)
        most, total = scan(logits, start, shift, vocab, first_group, groups, group_vectors, keys)
        if _lane() == 0:
            part = np.uint32(np.uint32(segment * WARPS) + warp)
            largest[part], totals[part] = most, total
        cuda.syncthreads()  # all of the block is written
        if several:
            if thread == 0:
                # The barrier and this make what the block wrote seen by the row's last block, which takes the count
                # back to 0.
                state[_ARRIVED] = count_in(workspace.arrived, row, np.uint32(segments - 1))
            cuda.syncthreads()
            if np.int32(state[_ARRIVED]) != segments - 1:
                return

        parts, groups = np.int32(segments * WARPS), np.int32(segments * groups)
        most = largest[thread] if thread < parts else np.float32(-np.inf)  # on its way while the keys are asked for
        part = np.int32(thread + THREADS)
        while part < parts:
            most = larger(most, largest[part])
            part = np.int32(part + THREADS)
        bests[thread] = _best_key(keys, groups, mine)
        most = _largest_of_warp(most)
        if _lane() == 0:
            tops[warp] = most
        _clear(found)
        cuda.syncthreads()  # all of the block is written
        for other in range(WARPS):
            most = larger(most, tops[other])
        rank = np.int32(thread)
        if not (most > np.float32(-np.inf) and most < np.float32(np.inf)):
            while rank < k:
                log_probs[row, rank] = -np.inf
                token_ids[row, rank] = rank
                rank = np.int32(rank + THREADS)
            return

        floor = _key_that_reach(k, bests)
        _list_chunks(keys, groups, floor, mine, listed, state)
        cuda.syncthreads()  # the list is complete
        total = _sum_of_parts(largest, totals, parts, most)
        if _lane() == 0:
            sums[warp] = total
        chunks = np.int32(groups * THREADS)
        count = open_chunks(
            logits, start, shift, vocab, k, chunks, group_vectors, keys, floor, listed, found, state, counts
        )

        if warp == WARPS - 1:  # it has no key to rank, as a rule
            total = np.float64(0)
            for other in range(WARPS):
                total += sums[other]
            # The largest logit's own term is 1; what `exp2` is off by must not make a sure token surer than that.
            log_total = math.log(max(total, np.float64(1)))
            if _lane() == 0:
                sums[WARPS] = log_total
        _rank_all(found, count, k, ranked)
        cuda.syncthreads()  # all ranks are there
        while rank < k:
            key = ranked[rank]
            log_probs[row, rank] = (np.float64(_unordered(_value(key))) - np.float64(most)) - sums[WARPS]
            token_ids[row, rank] = np.int32(_index(key))
            rank = np.int32(rank + THREADS)

    return top_candidates_fused_kernel


def launch_fused(logits: Any, log_probs: Any, token_ids: Any, stream: Any, workspace: Workspace | None) -> None:
    """Launch the kernel on device arrays `logits` [B, L, V], `log_probs` and `token_ids` [B, L, K]."""
    batch, depths, vocab = logits.shape
    rows, k = batch * depths, log_probs.shape[2]
    if workspace is None:
        workspace = workspace_for(rows, vocab, stream)
    name = np.dtype(logits.dtype).name
    if name == "float16" and ON_GPU:
        logits = logits.view(np.uint16)
    logits = logits.reshape(rows * vocab)
    aligned = not ON_GPU or logits.__cuda_array_interface__["data"][0] % 16 == 0
    segments = workspace.totals.shape[1] // WARPS
    rounds = -(-_vectors(vocab, aligned) // (_ROUND * segments))  # of a segment
    rounds_of_group = -(-rounds // _groups_of_segment(segments))
    groups = -(-rounds // rounds_of_group)
    results = (log_probs.reshape(rows, k), token_ids.reshape(rows, k))
    sizes = (np.int32(vocab), np.int32(k), np.int32(groups), np.int32(rounds_of_group * _ROUND))
    fused_kernel(name, segments > 1)[(rows, segments), THREADS, stream](logits, *sizes, workspace, *results)
