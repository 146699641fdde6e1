"""Rung 2: every logit read once, for the sum and for the K best alike.

What changed: `block_per_row` reads a row three times, once for the maximum, once for the sum, once (and once more for
every 512 candidates) for the best. Here one pass does it all:

- *Eight at a time.* A thread loads 16 bytes at once and has the next loads on their way while it computes.
- *The sum without the maximum.* The terms are exp(x - reference), with the largest logit of the first few thousand as
  the reference; a thread that meets a larger one takes that, and scales its sum. Few ever do. `exp2` is one
  instruction; eight terms are added in float32, the eights in float64.
- *A floor.* Only a vector whose largest logit is above the floor can hold one of the K best. Those are put into a list
  in shared memory, the vector, not the logits: one comparison, one branch and one atomic for eight logits. The floor
  is the K-th largest of the largest logits that each of the 128 threads has seen, K of them being proof enough. It
  rises whenever the list has grown by K, so that about K ln(V / 4096) + 2 K vectors of the V / 8 are ever listed.
- *Few rows, many blocks.* A row is cut into segments, one for each block; `finish_kernel` merges them.

The K best vectors hold the K best logits. A vector's place in the order is that of its best logit (the larger first,
then the one further left); a logit in a vector that K others beat is beaten by the best logit of each. So
`finish_kernel` opens K vectors, not more, and ranks what is above the floor.

What it buys: the bytes are read once. Measured on an H200, 960 rows of 163840 bfloat16: 271 us, where `topk` and
`logsumexp` of torch took 1946 in the same run. Memory alone would take 83, so it is not yet memory that it waits for.

What it costs: a second launch; K up to 64; and rows made to be hard, where the list fills again and again, take several
times as long. They are right all the same: a full list is sorted and cut to K.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU, block_threads, cuda
from ddtree_numba.block_reduce import SCRATCH_SIZE, block_max, block_sum
from ddtree_numba.device_library import scratch
from ddtree_numba.ptx import exp2, inlined, kernel_for
from ddtree_numba.stages.top_candidates.number_formats import VECTOR, number_format

__all__ = ["MAX_CANDIDATES", "Workspace", "fused_kernels", "launch_fused", "make_workspace", "segments_for"]

MAX_CANDIDATES = 64
"""The largest K."""

THREADS = block_threads(128, simulator=4)
_BLOCKS = 8  # that share a multiprocessor: 64 registers a thread

PUBLISHED = 128
"""Vectors that a segment hands on, at most."""

_CAPACITY = 1024 if ON_GPU else 128  # of a segment's list, a power of two: room for one round and K more
_BATCH = 8  # keys that a thread of `finish_kernel` loads at once
_MERGED = 2048 if ON_GPU else 128  # of a row's list: room for one batch and K more
_OPENED = 1024  # logits of at most this many / 8 vectors
_FLOOR_BITS = np.uint64(32)
_SIGN = np.uint32(0x80000000)
_LOG2_E = np.float32(math.log2(math.e))
_SMALLEST = np.float32(np.finfo(np.float32).min)

_ROUND = 512  # vectors that a block of the GPU has in its registers at once
_COUNT, _KTH = 0, 1  # places in the shared `state`


class Workspace(NamedTuple):
    """What `scan_kernel` hands to `finish_kernel`: device arrays, for R rows in S segments."""

    keys: Any
    """[R, S, PUBLISHED] uint64: vectors that may hold candidates, see `_key`."""
    counts: Any
    """[R, S] int32: how many."""
    references: Any
    """[R, S] float32: what was subtracted from the logits of a segment; NaN: a logit is NaN or +inf."""
    totals: Any
    """[R, S] float64: the sum of exp(logit - reference)."""


def make_workspace(rows: int, segments: int, stream: Any = 0) -> Workspace:
    """Return buffers for `rows` rows cut into `segments`; a launch overwrites them."""
    return Workspace(
        scratch((rows, segments, PUBLISHED), np.uint64, stream),
        scratch((rows, segments), np.int32, stream),
        scratch((rows, segments), np.float32, stream),
        scratch((rows, segments), np.float64, stream),
    )


def segments_for(rows: int, vocab: int, multiprocessors: int) -> int:
    """Return into how many segments to cut each row: four blocks for each multiprocessor, of whole rounds.

    >>> [segments_for(rows, 163840, multiprocessors=132) for rows in (1, 15, 132, 960)]
    [41, 21, 4, 1]
    """
    rounds = -(-_most_vectors(vocab) // _ROUND)
    rounds_of_block = -(-rounds * rows // (4 * multiprocessors))
    return -(-rounds // min(rounds, rounds_of_block))


def _most_vectors(vocab: int) -> int:
    """Return the vectors of a row that begins at the last place of one."""
    return (vocab + 2 * VECTOR - 2) // VECTOR


@inlined
def _ordered(value):
    """Return bits that compare as the float32 `value` does: with 0.0 = -0.0, and NaN outside both infinities."""
    bits = np.float32(value + np.float32(0)).view(np.uint32)  # -0.0 + 0.0 is 0.0
    return np.uint32(~bits) if bits & _SIGN else np.uint32(bits | _SIGN)


@inlined
def _unordered(bits):
    return np.uint32(bits ^ _SIGN if bits & _SIGN else ~bits).view(np.float32)


@inlined
def _key(ordered, index):
    """Return a number that is larger for what comes earlier: the larger logit, then the smaller `index`."""
    return (np.uint64(ordered) << _FLOOR_BITS) | np.uint64(np.uint32(~np.uint32(index)))


@inlined
def _index(key):
    return np.int64(np.uint32(~np.uint32(key & np.uint64(0xFFFFFFFF))))


@inlined
def _value(key):
    return np.uint32(key >> _FLOOR_BITS)


@cuda.jit(device=True)
def _kth_largest(mine, k, values, state):
    """Return the `k`-th largest of all threads' uint32 `mine`, 0 if there are fewer threads; two barriers.

    Each thread counts the larger ones. Those with fewer than `k` of them are the `k` largest and what equals the last:
    the smallest of them is the answer.
    """
    thread = cuda.threadIdx.x
    values[thread] = mine
    if thread == 0:
        state[_KTH] = np.uint32(0xFFFFFFFF)
    cuda.syncthreads()  # all values are there
    larger_ones = np.int32(0)
    for other in range(THREADS):
        larger_ones += np.int32(values[other] > mine)
    if larger_ones < k:
        cuda.atomic.min(state, _KTH, mine)
    cuda.syncthreads()  # all have had their say
    return state[_KTH] if k <= THREADS else np.uint32(0)


@cuda.jit(device=True)
def _sort(keys, count):
    """Sort the first `count` shared `keys`, largest first: a bitonic network, a barrier before and after each step."""
    thread = cuda.threadIdx.x
    size = 1
    while size < count:
        size *= 2
    for place in range(count + thread, size, THREADS):
        keys[place] = np.uint64(0)  # less than any key
    cuda.syncthreads()
    width = 2
    while width <= size:
        distance = width >> 1
        while distance > 0:
            for pair in range(thread, size >> 1, THREADS):
                left = 2 * pair - (pair & (distance - 1))
                right = left + distance
                a, b = keys[left], keys[right]
                if (a < b) == ((left & width) == 0):
                    keys[left], keys[right] = b, a
            cuda.syncthreads()
            distance >>= 1
        width <<= 1


@functools.cache
def fused_kernels(dtype_name: str) -> tuple[Any, Any]:
    """Return `scan_kernel` and `finish_kernel` for logits of this dtype."""
    form = number_format(dtype_name)
    registers, register_type = form.registers, form.register_type
    shift_of, load, load_edge, pair, largest_of, logit_of = form.shift, form.load, form.load_edge, *form[5:]
    vectors_at_once = (4 if registers == 4 else 2) if ON_GPU else 2
    round_vectors = vectors_at_once * THREADS
    most_listed = _CAPACITY - round_vectors  # one more round fits

    @inlined
    def load_round(logits, start, shift, vocab, base, end, words):
        """Load this thread's vectors of a round: `base` + its index, and THREADS further each."""
        mine = np.int32(base + cuda.threadIdx.x)
        whole = (vocab + shift) // VECTOR  # vectors that end in the row
        if base * VECTOR >= shift and base + round_vectors <= min(end, whole):  # the same for the whole block
            for u in range(vectors_at_once):
                load(logits, start - shift, mine + u * THREADS, words, u)
        else:
            for u in range(vectors_at_once):
                vector = mine + u * THREADS
                if vector * VECTOR >= shift and vector < min(end, whole):
                    load(logits, start - shift, vector, words, u)
                else:  # behind the end all is -inf
                    load_edge(logits, start, vector * VECTOR - shift, vocab if vector < end else 0, words, u)

    @inlined
    def sum_of_terms(words, u, reference):
        """Add exp(logit - reference) over a vector, as a tree: three roundings deep."""
        a, b = pair(words, u, 0)
        c, d = pair(words, u, 1)
        s = (exp2((a - reference) * _LOG2_E) + exp2((b - reference) * _LOG2_E)) + (
            exp2((c - reference) * _LOG2_E) + exp2((d - reference) * _LOG2_E)
        )
        a, b = pair(words, u, 2)
        c, d = pair(words, u, 3)
        t = (exp2((a - reference) * _LOG2_E) + exp2((b - reference) * _LOG2_E)) + (
            exp2((c - reference) * _LOG2_E) + exp2((d - reference) * _LOG2_E)
        )
        return s + t

    @kernel_for(THREADS, _BLOCKS)
    def scan_kernel(logits, vocab, k, segment_vectors, workspace):
        """Sum one segment of a row in each block, and list the vectors that may hold one of its K best.

        logits (R * V bfloat16 or float16 as uint16, or float32): rows of V = `vocab`, one after the other.
        k (int32): K.
        segment_vectors (int32): vectors of a segment.
        workspace (Workspace for R rows, S segments): counts, references and totals are written, and `counts` keys.

        Launch: grid (R, S), block THREADS, 9 KB of static shared memory.
        Needs: 1 <= K <= 64, K <= V < 2**31.
        """
        values = cuda.shared.array(THREADS, np.uint32)
        listed = cuda.shared.array(_CAPACITY, np.uint64)
        state = cuda.shared.array(2, np.uint32)
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        sums = cuda.shared.array(SCRATCH_SIZE, np.float64)
        words = cuda.local.array((vectors_at_once, registers), register_type)
        coming = cuda.local.array((vectors_at_once, registers), register_type)

        thread = cuda.threadIdx.x
        row, segment = cuda.blockIdx.x, cuda.blockIdx.y
        start = np.int64(row) * vocab
        shift = shift_of(logits, start)
        vectors = (np.int64(vocab) + shift + VECTOR - 1) // VECTOR
        begin = np.int32(min(segment * np.int64(segment_vectors), vectors))
        end = np.int32(min(np.int64(begin) + segment_vectors, vectors))

        if thread == 0:
            state[_COUNT] = 0
        load_round(logits, start, shift, vocab, begin, end, words)
        best = largest_of(words, 0)
        for u in range(1, vectors_at_once):
            best = max(best, largest_of(words, u))
        largest = block_max(best, scratch)
        invalid = not largest < np.float32(np.inf)
        reference = max(largest, _SMALLEST) if largest < np.float32(np.inf) else np.float32(0)
        total = np.float64(0)
        # Below it, as the first round may hold the K-th best itself. (Later vectors lose against an equal one.) Less
        # two, not one: the number before 0.0 would be -0.0, which is no smaller.
        floor = _kth_largest(_ordered(best), k, values, state)
        floor = np.uint32(floor - np.uint32(2)) if floor > 0 else floor
        floor_logit = _unordered(floor)
        limit = np.int32(min(2 * k, most_listed))

        for base in range(begin, end, np.int32(round_vectors)):
            if base + round_vectors < end:
                load_round(logits, start, shift, vocab, base + round_vectors, end, coming)
            for u in range(vectors_at_once):
                largest = largest_of(words, u)
                if not largest <= floor_logit:  # NaN too, and all if the floor is below -inf, which is no number
                    if not largest < np.float32(np.inf):
                        invalid = True
                    elif largest > reference:
                        total *= math.exp(np.float64(reference) - np.float64(largest))
                        reference = largest
                    best = max(best, largest)
                    vector = base + u * THREADS + thread
                    if vector < end:
                        place = cuda.atomic.add(state, _COUNT, np.uint32(1))
                        listed[place] = _key(_ordered(largest), vector)
                total += np.float64(sum_of_terms(words, u, reference))

            # One barrier, and the same answer for all: whoever added the last has seen the full count.
            if cuda.syncthreads_or(np.int32(state[_COUNT] > limit)):
                count = np.int32(state[_COUNT])
                floor = max(floor, _kth_largest(_ordered(best), k, values, state))
                if count > most_listed:
                    _sort(listed, count)
                    floor = max(floor, _value(listed[k - 1]))
                    count = k
                    if thread == 0:
                        state[_COUNT] = np.uint32(count)
                floor_logit = _unordered(floor)
                limit = np.int32(min(count + k, most_listed))
                cuda.syncthreads()  # the count is set, and all have read it
            for u in range(vectors_at_once):
                for r in range(registers):
                    words[u, r] = coming[u, r]

        count = np.int32(state[_COUNT])
        if count > PUBLISHED:
            floor = max(floor, _kth_largest(_ordered(best), k, values, state))
        cuda.syncthreads()  # all have read the count
        if thread == 0:
            state[_COUNT] = 0
        cuda.syncthreads()
        for place in range(thread, count, THREADS):
            if _value(listed[place]) >= floor:
                target = cuda.atomic.add(state, _COUNT, np.uint32(1))
                if target < PUBLISHED:
                    workspace.keys[row, segment, target] = listed[place]
        cuda.syncthreads()
        published = np.int32(state[_COUNT])
        if published > PUBLISHED:
            _sort(listed, count)
            for place in range(thread, k, THREADS):
                workspace.keys[row, segment, place] = listed[place]
            published = k

        common = block_max(reference, scratch)
        if reference != common:
            total *= math.exp(np.float64(reference) - np.float64(common))
        total = block_sum(total, sums)
        invalid = cuda.syncthreads_or(np.int32(invalid))
        if thread == 0:
            workspace.counts[row, segment] = published
            workspace.references[row, segment] = np.float32(np.nan) if invalid else common
            workspace.totals[row, segment] = total

    @cuda.jit
    def finish_kernel(logits, vocab, k, workspace, log_probs, token_ids):
        """Merge the segments of one row in each block, and open the K best vectors.

        logits, vocab, k, workspace: as `scan_kernel` had and left them.
        log_probs (R, K float32), token_ids (R, K int32): written.

        Launch: grid R, block THREADS, 26 KB of static shared memory.
        Needs: `scan_kernel` before it on the same stream.
        """
        values = cuda.shared.array(THREADS, np.uint32)
        listed = cuda.shared.array(_MERGED, np.uint64)
        found = cuda.shared.array(_OPENED, np.uint64)
        state = cuda.shared.array(2, np.uint32)
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        sums = cuda.shared.array(SCRATCH_SIZE, np.float64)

        thread, row = cuda.threadIdx.x, cuda.blockIdx.x
        segments = workspace.counts.shape[1]
        if thread == 0:
            state[_COUNT] = 0

        reference, total = _SMALLEST, np.float64(0)
        for segment in range(thread, segments, THREADS):
            reference = _larger_reference(reference, workspace.references[row, segment])
        best = np.uint32(0)  # loads that are not needed yet come before the barriers, which nothing passes
        for first in range(thread, segments * PUBLISHED, _BATCH * THREADS):
            for i in range(_BATCH):
                best = max(best, _value(_published_key(workspace, row, first + i * THREADS)))
        common = block_max(reference, scratch)
        for segment in range(thread, segments, THREADS):
            distance = np.float64(workspace.references[row, segment]) - np.float64(common)
            total += workspace.totals[row, segment] * math.exp(distance)
        total = block_sum(total, sums)
        if not total > 0:  # NaN or +inf: no distribution; 0: no candidate. The same for the whole block
            for rank in range(thread, k, THREADS):
                log_probs[row, rank] = -np.inf
                token_ids[row, rank] = rank
            return
        log_total = math.log(total)

        floor = _kth_largest(best, k, values, state)
        for first in range(0, segments * PUBLISHED, _BATCH * THREADS):
            for i in range(_BATCH):
                key = _published_key(workspace, row, first + i * THREADS + thread)
                if key > 0 and _value(key) >= floor:
                    listed[cuda.atomic.add(state, _COUNT, np.uint32(1))] = key
            if cuda.syncthreads_or(np.int32(state[_COUNT] > _MERGED - _BATCH * THREADS)):
                _sort(listed, np.int32(state[_COUNT]))
                floor = max(floor, _value(listed[k - 1]))
                if thread == 0:
                    state[_COUNT] = np.uint32(k)
                cuda.syncthreads()  # the count is set
        count = np.int32(state[_COUNT])
        if count * VECTOR > _OPENED:
            _sort(listed, count)
            floor = max(floor, _value(listed[k - 1]))
            count = k
        cuda.syncthreads()  # all have read the count
        if thread == 0:
            state[_COUNT] = 0
        cuda.syncthreads()

        start = np.int64(row) * vocab
        shift = shift_of(logits, start)
        for place in range(thread, count * VECTOR, THREADS):
            token = _index(listed[place // VECTOR]) * VECTOR - shift + place % VECTOR
            if token >= 0 and token < vocab:
                value = _ordered(logit_of(logits, start + token))
                if value >= floor:
                    found[cuda.atomic.add(state, _COUNT, np.uint32(1))] = _key(value, token)
        cuda.syncthreads()  # all that may be among the K best is found
        count = np.int32(state[_COUNT])
        for place in range(thread, count, THREADS):
            # The rank of a logit is the number of those before it. For some 70 of them that is faster than a network:
            # no barrier, and each knows at once where to go.
            key, rank = found[place], np.int32(0)
            for other in range(count):
                rank += np.int32(found[other] > key)
            if rank < k:
                logit = _unordered(_value(key))
                log_probs[row, rank] = (np.float64(logit) - np.float64(common)) - log_total
                token_ids[row, rank] = np.int32(_index(key))

    return scan_kernel, finish_kernel


@inlined
def _larger_reference(a, b):
    """Return the larger, NaN if `b` is: an invalid segment makes the row invalid."""
    return b if b > a or b != b else a


@inlined
def _published_key(workspace, row, slot):
    """Return key `slot` of the row's S * PUBLISHED places, 0 for an unused one. No branch: the loads overlap."""
    segments = workspace.counts.shape[1]
    segment, place = min(slot // PUBLISHED, segments - 1), slot % PUBLISHED
    key, count = workspace.keys[row, segment, place], workspace.counts[row, segment]
    return key if slot < segments * PUBLISHED and place < count else np.uint64(0)


def launch_fused(logits: Any, log_probs: Any, token_ids: Any, stream: Any, workspace: Workspace | None) -> None:
    """Launch both kernels on device arrays `logits` [B, L, V], `log_probs` and `token_ids` [B, L, K]."""
    batch, depths, vocab = logits.shape
    rows, k = batch * depths, log_probs.shape[2]
    if workspace is None:
        multiprocessors = cuda.get_current_device().MULTIPROCESSOR_COUNT if ON_GPU else 1
        workspace = make_workspace(rows, segments_for(rows, vocab, multiprocessors), stream)
    name = np.dtype(logits.dtype).name
    if name == "float16" and ON_GPU:
        logits = logits.view(np.uint16)
    logits = logits.reshape(rows * vocab)
    scan_kernel, finish_kernel = fused_kernels(name)
    segments = workspace.counts.shape[1]
    vectors = -(-_most_vectors(vocab) // segments)
    sizes = (np.int32(vocab), np.int32(k))
    scan_kernel[(rows, segments), THREADS, stream](logits, *sizes, np.int32(vectors), workspace)
    results = (log_probs.reshape(rows, k), token_ids.reshape(rows, k))
    finish_kernel[rows, THREADS, stream](logits, *sizes, workspace, *results)
