"""Rung 2: every logit read once, for the sum and for the K best alike, by one launch.

What changed: `block_per_row` reads a row three times, once for the maximum, once for the sum, once (and once more for
every 512 candidates) for the best. Here one pass does it all:

- *Eight at a time.* A thread loads 16 bytes at once, four times before it computes; while it waits, the other blocks of
  the multiprocessor compute.
- *The sum without the maximum.* The terms are exp(x - reference), with the largest of the block's first round as the
  reference; a thread that meets a larger one takes that, and scales its sum. Few ever do. A term is one multiply-add
  and one `exp2`; 32 terms are added in float32, the rest in float64.
- *A floor.* Only a vector whose largest logit is above the floor can hold one of the K best. Those are put into a list
  in shared memory, the vector, not the logits: one comparison and one branch for 32 logits, as a rule. The floor
  is the K-th largest of the largest logits that each of the 128 threads has seen, K of them being proof enough. It
  rises whenever the list has grown by K, so that about 1.4 K (ln(V / 4096) + 1) vectors of the V / 8 are ever listed.
- *Few rows, many blocks.* A row is cut into segments, one for each block. Each publishes its K best; the block that
  happens to be the last of its row merges them.

At its end a block opens the vectors that reach the floor, once more from memory, and ranks the logits that do by
counting: some 90 of them, and each needs only the number of those before it.
Should the vectors be many, K are enough: the K best vectors hold the K best logits. A vector's place in the order is
that of its best logit (the larger first, then the one further left); a logit in a vector that K others beat is beaten
by the best logit of each.

What it buys: measured on an H200, 64 x 15 rows of 163840 bfloat16 take 99 us; `topk` and `logsumexp` of torch took
1917 in the same run. At the speed that 16-byte loads reach, reading them is 83. One request, 15 rows in 14 segments
each: 19 us, in which a block waits for its own instructions, 2300 a warp in the scan and 1900 in the merge, most of
them 4 to 6 cycles after the one before.

What it costs: K up to 64; and rows made to be hard, where the list fills again and again, take several times as long.
They are right all the same: a full list is cut to its K best.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import check_integer
from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.block_reduce import SCRATCH_SIZE, block_max, block_sum
from ddtree_numba.device_library import scratch
from ddtree_numba.ptx import exp2, fence, fused_multiply_add, inlined, kernel_for, larger, warp_max, warp_min
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

THREADS = block_threads(128, simulator=4)
_BLOCKS = 8  # that share a multiprocessor: 64 registers a thread
_LANES = 32 if ON_GPU else 1
_WARPS = THREADS // _LANES

_CAPACITY = 1024 if ON_GPU else 512  # of the shared lists: the logits of K vectors, or K keys and a batch
_PER_THREAD = _CAPACITY // THREADS
_LIST_SIZE = _CAPACITY if ON_GPU else 128  # less in the simulator, so that its short rows fill it: K, a round and more
_PADDING = 8
_FOUND_SIZE = _CAPACITY + _PADDING

PUBLISHED = 128
"""Logits that a segment hands on, at most."""

_MOST_SEGMENTS = 65535  # a grid's second axis
_AT_ONCE = 16  # segments whose keys a block has on their way at once
_AHEAD = _AT_ONCE * PUBLISHED // THREADS

_HALF = np.uint64(32)
_SIGN = np.uint32(0x80000000)
_COARSE = np.uint32(16)  # bits of a floor that are left 0
_NO_FLOOR = np.uint32(1)  # less than any logit
_SMALLEST = np.float32(np.finfo(np.float32).min)
_LOG2_E = np.float32(math.log2(math.e))
_LOG2_E_EXACT = math.log2(math.e)
_LOG2_E_REST = math.log2(math.e) - float(_LOG2_E)  # to 2**-53: the float64 and its rounding to float32 are exact here
_LN_2 = math.log(2)
_HUGE = np.float32(2.0**30)  # from here on, logits are equal or 64 and more apart

_GPU_ROUND = 512  # vectors that a block has in its registers at once, at most
_ROUND = _GPU_ROUND if ON_GPU else 8
_LISTED, _FOUND, _ARRIVED = 0, 1, 2  # places in the shared `state`


class Workspace(NamedTuple):
    """What the blocks of a row tell the last of them: device arrays, for R rows in S segments."""

    keys: Any
    """[R, S * PUBLISHED] uint64: logits of each segment, its K best among them, in any order; see `_key`; 0: none."""
    largest: Any
    """[R, S] float32: the largest logit; NaN or +inf: the row is invalid."""
    totals: Any
    """[R, S] float64: the sum of exp(logit - largest)."""
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
        scratch((rows, segments * PUBLISHED), np.uint64, stream),
        scratch((rows, segments), np.float32, stream),
        scratch((rows, segments), np.float64, stream),
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
    held, segments = shape if len(shape) == 2 else (rows, 1)
    needed = {
        "totals": ((held, segments), np.float64),
        "largest": ((held, segments), np.float32),
        "keys": ((held, segments * PUBLISHED), np.uint64),
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
    if held < rows:
        raise ValueError(f"workspace: got room for {held} rows, needs {rows}, one for each depth of each request")
    check_integer("segments of workspace", segments, 1, _MOST_SEGMENTS)


def segments_for(rows: int, vocab: int, multiprocessors: int) -> int:
    """Return into how many segments to cut each row: four blocks for each multiprocessor, of whole rounds.

    At most 16, so that the last block has all that they published on its way at once.

    >>> [segments_for(rows, 163840, multiprocessors=132) for rows in (1, 15, 132, 960)]
    [14, 14, 4, 1]
    """
    rounds = -(-_vectors(vocab) // _GPU_ROUND)
    rounds_of_block = max(-(-rounds * rows // (4 * multiprocessors)), -(-rounds // _AT_ONCE))
    return -(-rounds // min(rounds, rounds_of_block))


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
def _smallest_and_largest(mine, extremes):
    """Return both of the block's uint32 `mine`; one barrier."""
    warp = cuda.threadIdx.x // _LANES
    smallest, largest = (warp_min(mine), warp_max(mine)) if ON_GPU else (mine, mine)
    if cuda.threadIdx.x % _LANES == 0:
        extremes[0, warp], extremes[1, warp] = smallest, largest
    cuda.syncthreads()  # all warps have written
    for other in range(_WARPS):
        smallest, largest = min(smallest, extremes[0, other]), max(largest, extremes[1, other])
    return smallest, largest


@cuda.jit(device=True)
def _raise_floor(floor, best, k, extremes):
    """Return the highest floor that the ordered `best` of `k` threads reach, coarse, or `floor` if that is higher.

    Halves what lies between the smallest and the largest: one count over the block a step, six to eight for bfloat16.
    Returns the largest too, as coarse.
    """
    mine = np.uint32(best >> _COARSE)
    low, highest = _smallest_and_largest(mine, extremes)
    if k > THREADS:
        return floor, np.uint32(highest << _COARSE)
    low, high = max(low, np.uint32(floor >> _COARSE)), highest
    while low < high:
        middle = np.uint32((low + high + np.uint32(1)) >> np.uint32(1))
        if cuda.syncthreads_count(np.int32(mine >= middle)) >= k:
            low = middle
        else:
            high = np.uint32(middle - np.uint32(1))
    return max(floor, np.uint32(low << _COARSE)), np.uint32(highest << _COARSE)


@inlined
def _append(mine, many, smallest, keys, state, which):
    """Append those of a thread's `many` numbers that reach `smallest` to `keys`; one atomic for all of them.

    Those that find no room are counted too.
    """
    wanted = np.uint32(0)
    for i in range(many):
        wanted = np.uint32(wanted + np.uint32(mine[i] >= smallest))
    if wanted > 0:
        place = np.uint32(cuda.atomic.add(state, which, wanted))
        for i in range(many):
            if mine[i] >= smallest:
                if place < _CAPACITY:
                    keys[place] = mine[i]
                place = np.uint32(place + np.uint32(1))


@cuda.jit(device=True)
def _keep(keys, count, smallest, state, which):
    """Keep of the first `count` keys those of at least `smallest`, in any order; return how many. Three barriers."""
    thread = cuda.threadIdx.x
    mine = cuda.local.array(_PER_THREAD, np.uint64)
    for i in range(_PER_THREAD):
        place = i * THREADS + thread
        mine[i] = keys[place] if place < count else np.uint64(0)
    cuda.syncthreads()  # all keys are in registers
    if thread == 0:
        state[which] = 0
    cuda.syncthreads()
    _append(mine, _PER_THREAD, smallest, keys, state, which)
    cuda.syncthreads()
    return np.int32(state[which])


@cuda.jit(device=True)
def _key_of_best(keys, count, k, counts):
    """Return a number that exactly `k` of the first `count` > `k` keys reach: bit by bit, until it parts them so."""
    thread = cuda.threadIdx.x
    mine = cuda.local.array(_PER_THREAD, np.uint64)
    for i in range(_PER_THREAD):
        place = i * THREADS + thread
        mine[i] = keys[place] if place < count else np.uint64(0)
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
def _rank(keys, count, key):
    """Return how many of the first `count` keys are larger. Behind them are zeros, up to a multiple of `_PADDING`."""
    rank, first = np.int32(0), np.uint32(0)  # unsigned: an index that may be negative costs two instructions
    while first < count:
        for i in range(_PADDING):  # their loads overlap
            rank = np.int32(rank + np.int32(keys[np.uint32(first + np.uint32(i))] > key))
        first = np.uint32(first + np.uint32(_PADDING))
    return rank


@inlined
def _published(workspace, row, place):
    """Return key `place` of the row's S * PUBLISHED, 0 past the end. No branch, so that the loads overlap."""
    places = np.uint32(workspace.keys.shape[1])
    key = workspace.keys[row, min(place, np.uint32(places - np.uint32(1)))]
    return key if place < places else np.uint64(0)


@inlined
def _merge(workspace, row, k, found, state, extremes, scratch, sums, counts):
    """Collect in `found` what may be among the K best of all segments; return (how many, largest logit, total)."""
    thread, segments = cuda.threadIdx.x, workspace.totals.shape[1]
    places = np.uint32(segments * PUBLISHED)
    # Loads first: what they are needed for begins with a barrier.
    keys = cuda.local.array(_AHEAD, np.uint64)
    for i in range(_AHEAD):
        keys[i] = _published(workspace, row, np.uint32(thread + i * THREADS))
    best, total = np.float32(-np.inf), np.float64(0)
    other = np.uint32(thread)
    while other < segments:
        best = larger(best, workspace.largest[row, other])
        other = np.uint32(other + np.uint32(THREADS))
    other = np.uint32(thread)
    while other < segments:
        largest_there, total_there = workspace.largest[row, other], workspace.totals[row, other]
        if largest_there == best:  # as a rule it is the thread's only one
            total += total_there
        elif total_there > 0:
            total += total_there * math.exp(np.float64(largest_there) - np.float64(best))
        other = np.uint32(other + np.uint32(THREADS))
    common = block_max(best, scratch)
    valid = common > np.float32(-np.inf) and common < np.float32(np.inf)
    if valid and total > 0:
        total *= math.exp(np.float64(best) - np.float64(common))
    total = block_sum(total if valid else np.float64(0), sums)

    value, floor, smallest, before = np.uint32(0), _NO_FLOOR, np.uint64(0), np.int32(0)
    first = np.uint32(thread)
    while first < places + thread:  # the same for the whole block
        for i in range(_AHEAD):
            value = max(value, _value(keys[i]))
        floor, _ = _raise_floor(floor, value, k, extremes)
        smallest = max(smallest, np.uint64(floor) << _HALF)
        while True:
            _append(keys, _AHEAD, smallest, found, state, _FOUND)
            cuda.syncthreads()  # all keys of the batch are there
            opened = np.int32(state[_FOUND])
            if opened <= _CAPACITY:
                break
            # Ties. Those that found room tell a better bound; again with that.
            smallest = _key_of_best(found, _CAPACITY, k, counts)
            before = _keep(found, before, smallest, state, _FOUND)
            cuda.syncthreads()  # all have read the count
        before = opened
        first = np.uint32(first + np.uint32(_AHEAD * THREADS))
        if first < places + thread:
            for i in range(_AHEAD):
                keys[i] = _published(workspace, row, np.uint32(first + np.uint32(i * THREADS)))
            cuda.syncthreads()  # all have read the count
    return before, common, total


@functools.cache
def fused_kernel(dtype_name: str, several: bool) -> Any:
    """Return the kernel for logits of this dtype, in one or in `several` segments a row."""
    form = number_format(dtype_name)
    registers, register_type = form.registers, form.register_type
    shift_of, load, load_edge, pair, largest_of = form.shift, form.load, form.load_edge, form.pair, form.largest
    vectors_at_once = (4 if registers == 4 else 2) if ON_GPU else 2
    round_vectors = vectors_at_once * THREADS
    most_listed = _LIST_SIZE - round_vectors  # one more round fits

    @inlined
    def load_round(logits, start, shift, vocab, base, words):
        """Load this thread's vectors of a round: `base` + its index, and THREADS further each."""
        mine = np.int32(base + cuda.threadIdx.x)
        whole = (vocab + shift) // VECTOR  # vectors that end in the row
        if base * VECTOR >= shift and base + round_vectors <= whole:  # the same for the whole block
            for u in range(vectors_at_once):
                load(logits, start - shift, mine, u * THREADS, words, u)
        else:
            for u in range(vectors_at_once):
                vector = mine + u * THREADS
                if vector * VECTOR >= shift and vector < whole:
                    load(logits, start - shift, vector, 0, words, u)
                else:  # behind the end all is -inf
                    load_edge(logits, start, vector * VECTOR - shift, vocab, words, u)

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
    def open_vectors(logits, start, shift, vocab, k, floor, listed, count, found, state, counts, words):
        """Put the logits of the `listed` vectors that reach the floor into `found`; return how many."""
        mine = cuda.local.array(VECTOR, np.uint64)
        while True:
            place = np.uint32(cuda.threadIdx.x)
            while place < count:
                vector = np.int32(_index(listed[place]))
                first = np.int32(vector * VECTOR - shift)
                if first >= 0 and first <= vocab - VECTOR:
                    load(logits, start - shift, vector, 0, words, 0)
                else:
                    load_edge(logits, start, first, vocab, words, 0)
                for p in range(VECTOR // 2):
                    values = pair(words, 0, p)
                    for i in range(2):
                        token = np.int32(first + np.int32(2 * p + i))
                        there = token >= 0 and token < vocab  # outside the row there are no logits, only -inf
                        mine[2 * p + i] = _key(_ordered(values[i]), token) if there else np.uint64(0)
                _append(mine, VECTOR, np.uint64(floor) << _HALF, found, state, _FOUND)
                place = np.uint32(place + np.uint32(THREADS))
            cuda.syncthreads()  # all that may be among the K best is found
            opened = np.int32(state[_FOUND])
            if opened <= _CAPACITY:
                return opened
            count = _keep(listed, count, _key_of_best(listed, count, k, counts), state, _LISTED)
            if cuda.threadIdx.x == 0:
                state[_FOUND] = 0
            cuda.syncthreads()  # the count is 0

    # One segment: the more threads, the more loads on their way. Several: few blocks, and registers for the merge.
    @kernel_for(THREADS, _BLOCKS // 2 if several else _BLOCKS)
    def top_candidates_fused_kernel(logits, vocab, k, segment_vectors, workspace, log_probs, token_ids):
        """Sum one segment of a row in each block and find its K best; the row's last block merges them.

        logits (R * V bfloat16 or float16 as uint16, or float32): rows of V = `vocab`, one after the other.
        k (int32): K.
        segment_vectors (int32): vectors of a segment, whole rounds of them.
        workspace (Workspace for R rows, S segments): used if S > 1.
        log_probs (R, K float32), token_ids (R, K int32): written.

        Launch: grid (R, S), block THREADS, 17 KB of static shared memory.
        Needs: 1 <= K <= 64, K <= V < 2**31; `workspace.arrived` 0.
        """
        listed = cuda.shared.array(_CAPACITY, np.uint64)
        found = cuda.shared.array(_FOUND_SIZE, np.uint64)
        state = cuda.shared.array(3, np.uint32)
        extremes = cuda.shared.array((2, _WARPS), np.uint32)
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        sums = cuda.shared.array(SCRATCH_SIZE, np.float64)
        counts = cuda.shared.array(SCRATCH_SIZE, np.int32)
        words = cuda.local.array((vectors_at_once, registers), register_type)
        largest = cuda.local.array(vectors_at_once, np.float32)

        thread = cuda.threadIdx.x
        row, segment, segments = cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        start = np.int64(row) * vocab
        shift = shift_of(logits, start)
        vectors = (np.int64(vocab) + shift + VECTOR - 1) // VECTOR
        begin = np.int32(min(segment * np.int64(segment_vectors), vectors))
        end = np.int32(min(np.int64(begin) + segment_vectors, vectors))

        if thread < 2:
            state[thread] = 0
        cuda.syncthreads()  # the counts are 0
        best, floor = np.float32(-np.inf), _NO_FLOOR
        floor_logit = _unordered(floor)
        reference, factor, offset = _SMALLEST, np.float32(1), -_SMALLEST
        total = np.float64(0)
        patience = np.int32(k if segment_vectors > 4 * round_vectors else most_listed)  # a short one ends too soon
        limit = np.uint32(min(k + patience, most_listed))

        base = begin
        while base < end:
            load_round(logits, start, shift, vocab, base, words)
            for u in range(vectors_at_once):
                largest[u] = largest_of(words, u)
            most = largest[0]
            for u in range(1, vectors_at_once):
                most = larger(most, largest[u])
            best = larger(best, most)
            if base == begin:
                # One below the floor, as the first round may hold the K-th best itself. Later vectors lose against an
                # equal one.
                floor, highest = _raise_floor(floor, _ordered(best), k, extremes)
                floor = np.uint32(floor - np.uint32(1)) if floor > _NO_FLOOR else floor
                floor_logit = _unordered(floor)
                reference = _usable(_unordered(highest))
                factor, offset = _factor_and_offset(reference)

            crowded = False
            if not most <= floor_logit:  # NaN too, and all if there is no floor, which is no number
                if most > reference and most < np.float32(np.inf):
                    total *= _ratio(reference, most)
                    reference = most
                    factor, offset = _factor_and_offset(reference)
                for u in range(vectors_at_once):
                    if not largest[u] <= floor_logit:
                        place = cuda.atomic.add(state, _LISTED, np.uint32(1))
                        listed[place] = _key(_ordered(largest[u]), np.int32(base + u * THREADS) + thread)
                        crowded = crowded or place >= limit
            total += np.float64(sum_of_round(words, factor, offset))

            if cuda.syncthreads_or(np.int32(crowded)):  # all entries of the round are there
                count = np.int32(state[_LISTED])
                floor, highest = _raise_floor(floor, _ordered(best), k, extremes)
                if count > most_listed:
                    count = _keep(listed, count, np.uint64(floor) << _HALF, state, _LISTED)
                    if count > most_listed // 2:  # ties, or few threads that see large logits
                        smallest = _key_of_best(listed, count, k, counts)
                        count = _keep(listed, count, smallest, state, _LISTED)
                        floor = max(floor, _value(smallest))
                floor_logit = _unordered(floor)
                # The reference must not stay below the floor: what lies between goes unseen, and its terms overflow.
                new_reference = _usable(_unordered(max(highest, floor)))
                if new_reference > reference:
                    total *= _ratio(reference, new_reference)
                    reference = new_reference
                    factor, offset = _factor_and_offset(reference)
                limit = np.uint32(min(count + patience, most_listed))
                cuda.syncthreads()  # all have read the count
            base = np.int32(base + round_vectors)

        count = np.int32(state[_LISTED])
        if count > THREADS:
            floor, _ = _raise_floor(floor, _ordered(best), k, extremes)
            count = _keep(listed, count, np.uint64(floor) << _HALF, state, _LISTED)
        opened = open_vectors(logits, start, shift, vocab, k, floor, listed, count, found, state, counts, words)

        common = block_max(best, scratch)
        valid = common > np.float32(-np.inf) and common < np.float32(np.inf)
        if valid:
            total *= _ratio_to_exp(reference, common)
        total = block_sum(total if valid else np.float64(0), sums)

        if several:
            if opened > PUBLISHED:
                opened = _keep(found, opened, _key_of_best(found, opened, k, counts), state, _FOUND)
            for place in range(thread, PUBLISHED, THREADS):
                workspace.keys[row, segment * PUBLISHED + place] = found[place] if place < opened else np.uint64(0)
            if thread == 0:
                workspace.largest[row, segment] = common
                workspace.totals[row, segment] = total
            cuda.syncthreads()  # all of the block is written
            if thread == 0:
                # The fences make the barrier's promise hold for the whole GPU: what was written before the addition
                # is seen by whoever has seen the addition. The last block's addition takes the count back to 0.
                fence()
                state[_ARRIVED] = cuda.atomic.inc(workspace.arrived, row, np.uint32(segments - 1))
                fence()
                state[_FOUND] = 0
            cuda.syncthreads()
            if np.int32(state[_ARRIVED]) != segments - 1:
                return

            opened, common, total = _merge(workspace, row, k, found, state, extremes, scratch, sums, counts)

        if not (common > np.float32(-np.inf) and common < np.float32(np.inf)):
            for rank in range(thread, k, THREADS):
                log_probs[row, rank] = -np.inf
                token_ids[row, rank] = rank
            return
        # The largest logit's own term is 1; what `exp2` is off by must not make a sure token surer than that.
        log_total = math.log(max(total, np.float64(1)))
        for place in range(thread, _PADDING, THREADS):
            found[opened + place] = np.uint64(0)
        cuda.syncthreads()  # the padding is there
        place = np.uint32(thread)
        while place < opened:
            key = found[place]
            rank = _rank(found, opened, key)
            if rank < k:
                log_probs[row, rank] = (np.float64(_unordered(_value(key))) - np.float64(common)) - log_total
                token_ids[row, rank] = np.int32(_index(key))
            place = np.uint32(place + np.uint32(THREADS))

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
    segments = workspace.totals.shape[1]
    rounds = -(-_vectors(vocab, aligned) // (_ROUND * segments))
    results = (log_probs.reshape(rows, k), token_ids.reshape(rows, k))
    sizes = (np.int32(vocab), np.int32(k), np.int32(rounds * _ROUND))
    fused_kernel(name, segments > 1)[(rows, segments), THREADS, stream](logits, *sizes, workspace, *results)
