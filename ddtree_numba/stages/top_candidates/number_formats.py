"""How the fused rung reads logits: eight at a time, in the registers of one thread.

A *vector* is eight logits, neighbours in a row and stored from a multiple of 16 bytes on. It stays packed, as it came,
until it is needed: four 32-bit registers of bfloat16 or float16, eight of float32. A row may start anywhere, so its
first vector begins `shift` places before it, and its first and last vector are *edges*: they are loaded one by one,
with -inf for the places outside the row.

In the simulator a vector is eight float32, loaded one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.backend import ON_GPU
from ddtree_numba.bfloat16 import bfloat16_to_float32
from ddtree_numba.ptx import (
    array_address,
    halves_to_float32,
    inlined,
    larger,
    largest_bfloat16_pair,
    largest_float16_pair,
    load_16_bytes,
)

__all__ = ["VECTOR", "NumberFormat", "number_format"]

VECTOR = 8
"""Logits of a vector."""


class NumberFormat(NamedTuple):
    """The device functions that know how a logit is stored; `words` is a local array (vectors, `registers`)."""

    registers: int
    """Registers that a vector takes."""
    register_type: Any
    shift: Any
    """(logits, start) -> places from the vector boundary at or before element `start` to it."""
    load: Any
    """(logits, origin, vector, ahead, words, u): load vector `vector` + `ahead`, all of it in the row, as u.

    Vector 0 begins at `origin`. A constant `ahead` costs nothing: it is part of the load instruction."""
    load_edge: Any
    """(logits, start, first, vocab, words, u): places `first`.. of the row at `start`, -inf outside 0..vocab - 1."""
    pair: Any
    """(words, u, p) -> logits 2 p and 2 p + 1 of vector u, float32."""
    largest: Any
    """(words, u) -> the largest logit of vector u; NaN if one is."""
    logit: Any
    """(logits, index) -> one logit, float32."""


@inlined
def _bfloat16_logit(logits, index):
    return bfloat16_to_float32(logits[index])


@inlined
def _plain_logit(logits, index):
    return np.float32(logits[index])


def _largest_of_pairs(pair: Any) -> Any:
    @inlined
    def largest(words, u):
        a0, a1 = pair(words, u, 0)
        a2, a3 = pair(words, u, 1)
        a4, a5 = pair(words, u, 2)
        a6, a7 = pair(words, u, 3)
        return larger(larger(larger(a0, a1), larger(a2, a3)), larger(larger(a4, a5), larger(a6, a7)))

    return largest


def _on_gpu(item_bytes: int, pair: Any, largest: Any, logit: Any, minus_infinity: int) -> NumberFormat:
    """Return the format for items of 2 or 4 bytes, whose -inf has the bits `minus_infinity`."""
    # Shifts, as the compiler is sure of their sign: a division by a power of two that might be negative is longer.
    log2_bytes = np.int64(1 if item_bytes == 2 else 2)
    low_mask = np.uint64(15)
    nothing = np.uint32(minus_infinity)
    half_word = np.uint32(16)

    @inlined
    def shift(logits, start):
        address = array_address(logits) + np.uint64(start << log2_bytes)
        return np.int32(np.int64(address & low_mask) >> log2_bytes)

    if item_bytes == 2:

        @inlined
        def load(logits, origin, vector, ahead, words, u):
            address = array_address(logits) + np.uint64(origin << log2_bytes)
            address += np.uint64(np.uint32(vector)) << np.uint64(4)
            word = load_16_bytes(address + np.uint64(16 * ahead))
            words[u, 0], words[u, 1], words[u, 2], words[u, 3] = word[0], word[1], word[2], word[3]

        @inlined
        def load_edge(logits, start, first, vocab, words, u):
            for p in range(4):
                low, high = nothing, nothing
                place = first + 2 * p
                if place >= 0 and place < vocab:
                    low = np.uint32(logits[start + place])
                if place + 1 >= 0 and place + 1 < vocab:
                    high = np.uint32(logits[start + place + 1])
                words[u, p] = low | (high << half_word)

    else:

        @inlined
        def load(logits, origin, vector, ahead, words, u):
            address = array_address(logits) + np.uint64(origin << log2_bytes)
            address += np.uint64(np.uint32(vector)) << np.uint64(5)
            address += np.uint64(32 * ahead)
            low, high = load_16_bytes(address), load_16_bytes(address + np.uint64(16))
            words[u, 0], words[u, 1], words[u, 2], words[u, 3] = low[0], low[1], low[2], low[3]
            words[u, 4], words[u, 5], words[u, 6], words[u, 7] = high[0], high[1], high[2], high[3]

        @inlined
        def load_edge(logits, start, first, vocab, words, u):
            for j in range(VECTOR):
                word = nothing
                if first + j >= 0 and first + j < vocab:
                    word = np.float32(logits[start + first + j]).view(np.uint32)
                words[u, j] = word

    registers = VECTOR * item_bytes // 4
    return NumberFormat(registers, np.uint32, shift, load, load_edge, pair, largest, logit)


def _bfloat16() -> NumberFormat:
    high_half, half_word = np.uint32(0xFFFF0000), np.uint32(16)

    @inlined
    def pair(words, u, p):
        word = words[u, p]
        return np.uint32(word << half_word).view(np.float32), np.uint32(word & high_half).view(np.float32)

    @inlined
    def largest(words, u):
        a, b = largest_bfloat16_pair(words[u, 0], words[u, 1]), largest_bfloat16_pair(words[u, 2], words[u, 3])
        word = largest_bfloat16_pair(a, b)
        return larger(np.uint32(word << half_word).view(np.float32), np.uint32(word & high_half).view(np.float32))

    return _on_gpu(2, pair, largest, _bfloat16_logit, 0xFF80)


def _float16() -> NumberFormat:
    @inlined
    def pair(words, u, p):
        return halves_to_float32(words[u, p])

    @inlined
    def largest(words, u):
        a, b = largest_float16_pair(words[u, 0], words[u, 1]), largest_float16_pair(words[u, 2], words[u, 3])
        low, high = halves_to_float32(largest_float16_pair(a, b))
        return larger(low, high)

    @inlined
    def logit(logits, index):
        return halves_to_float32(np.uint32(logits[index]))[0]

    return _on_gpu(2, pair, largest, logit, 0xFC00)


def _float32() -> NumberFormat:
    @inlined
    def pair(words, u, p):
        return words[u, 2 * p].view(np.float32), words[u, 2 * p + 1].view(np.float32)

    return _on_gpu(4, pair, _largest_of_pairs(pair), _plain_logit, 0xFF800000)


def _simulated(logit: Any) -> NumberFormat:
    nothing = np.float32(-np.inf)

    @inlined
    def shift(logits, start):
        return start % VECTOR

    @inlined
    def load_edge(logits, start, first, vocab, words, u):
        for j in range(VECTOR):
            words[u, j] = logit(logits, start + first + j) if 0 <= first + j < vocab else nothing

    @inlined
    def load(logits, origin, vector, ahead, words, u):
        for j in range(VECTOR):
            words[u, j] = logit(logits, origin + (vector + ahead) * VECTOR + j)

    @inlined
    def pair(words, u, p):
        return words[u, 2 * p], words[u, 2 * p + 1]

    return NumberFormat(VECTOR, np.float32, shift, load, load_edge, pair, _largest_of_pairs(pair), logit)


def number_format(dtype: Any) -> NumberFormat:
    """Return the format of logits of `dtype`: float32, float16 or uint16, the bits of bfloat16.

    On a GPU the kernels take float16 as its uint16 bits.
    """
    dtype = np.dtype(dtype)
    if not ON_GPU:
        return _simulated(_bfloat16_logit if dtype == np.uint16 else _plain_logit)
    return {"uint16": _bfloat16, "float16": _float16, "float32": _float32}[dtype.name]()
