"""Masks over prefix and tree, one request after the other in one flat array: booleans (SGLang) and bits (FlashInfer).

Request b has P_b + N keys, so its mask has N * (P_b + N) elements, row by row: P_b times True, then the N slots. There
is no padding between rows, and the requests' sizes differ, hence the offsets. As bits, least significant first, every
request begins at a whole byte; its last byte ends with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import MAX_BUDGET, mask_words
from ddtree_numba.interop.launching import for_each
from ddtree_numba.interop.visibility import check_prefixes, check_rows, visible

__all__ = [
    "bits_from_flat_mask",
    "bits_from_flat_mask_kernel",
    "bits_from_flat_mask_reference",
    "bits_from_packed_mask",
    "bits_from_packed_mask_kernel",
    "bits_from_packed_mask_reference",
    "flat_mask",
    "flat_mask_kernel",
    "flat_mask_reference",
    "offsets_kernel",
    "packed_mask",
    "packed_mask_kernel",
    "packed_mask_reference",
]


def flat_mask_reference(ancestor_bits: np.ndarray, prefix_lengths: np.ndarray) -> np.ndarray:
    """Return the masks of all requests, one after the other: booleans [sum(N * (P_b + N))].

    `ancestor_bits` [B, N, W] uint32, `prefix_lengths` [B] int32. Rows of unused slots see the prefix alone.

    >>> bits, prefix = np.array([[[1], [3]], [[1], [3]]], np.uint32), np.array([1, 0], np.int32)
    >>> flat_mask_reference(bits, prefix).astype(int).tolist()
    [1, 1, 0, 1, 1, 1, 1, 0, 1, 1]
    """
    _, slots, _ = _check(ancestor_bits, prefix_lengths, None)
    rows = [
        np.concatenate([np.ones((slots, int(prefix)), bool), sees], axis=1).ravel()
        for prefix, sees in zip(prefix_lengths, visible(ancestor_bits), strict=True)
    ]
    return np.concatenate(rows)


def packed_mask_reference(ancestor_bits: np.ndarray, prefix_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks as bits and where each request's begin: uint8 [bytes], int32 [B + 1] of byte offsets.

    >>> bits, prefix = np.array([[[1], [3]], [[1], [3]]], np.uint32), np.array([3, 0], np.int32)
    >>> mask, offsets = packed_mask_reference(bits, prefix)
    >>> [f"{byte:08b}" for byte in mask], offsets.tolist()
    (['11101111', '00000011', '00001101'], [0, 2, 3])
    """
    _check(ancestor_bits, prefix_lengths, None)
    one_by_one = [
        np.packbits(flat_mask_reference(ancestor_bits[b : b + 1], prefix_lengths[b : b + 1]), bitorder="little")
        for b in range(len(prefix_lengths))
    ]
    offsets = np.cumsum([0, *map(len, one_by_one)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"prefix_lengths: got masks of {offsets[-1]} bytes, needs at most 2**31 - 1: offsets are int32"
        )
    return np.concatenate(one_by_one), offsets.astype(np.int32)


@cuda.jit
def offsets_kernel(prefix_lengths, slots, unit, offsets):
    """Add up where each request begins.

    prefix_lengths (B int32); slots (int): N; unit (int): mask elements that one place of the output holds, 1 or 8.
    offsets (B + 1, int32 or int64): written.

    Launch: one thread. The sum is a chain of B additions; B is the requests of a batch, and this is one launch of many.
    """
    begin = np.int64(0)
    for b in range(prefix_lengths.shape[0]):
        offsets[b] = begin
        begin += (slots * (max(np.int64(prefix_lengths[b]), np.int64(0)) + slots) + unit - 1) // unit
    offsets[prefix_lengths.shape[0]] = begin


@cuda.jit(device=True)
def _sees(ancestor_bits, b, element, keys):
    """Tell what element number `element` of request b's mask is."""
    slots = ancestor_bits.shape[1]
    node, slot = element // keys, element % keys - (keys - slots)
    if node >= slots:
        return False
    if slot < 0:
        return True
    return (ancestor_bits[b, node, slot // 32] >> np.uint32(slot % 32)) & np.uint32(1) != 0


@cuda.jit
def flat_mask_kernel(ancestor_bits, offsets, mask):
    """Write the mask of request ``blockIdx.y`` one element a turn.

    ancestor_bits (B, N, W uint32), offsets (B + 1 int64): see `offsets_kernel`, unit 1.
    mask (any length, bool): written where a request's elements lie inside it.

    Launch: grid (any, B), block of any size, no shared memory.
    """
    b = cuda.blockIdx.y
    begin, end = offsets[b], min(offsets[b + 1], np.int64(mask.shape[0]))
    keys = max((offsets[b + 1] - begin) // ancestor_bits.shape[1], np.int64(1))
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for place in range(begin + first, end, cuda.gridDim.x * cuda.blockDim.x):
        mask[place] = _sees(ancestor_bits, b, place - begin, keys)


@cuda.jit
def packed_mask_kernel(ancestor_bits, prefix_lengths, offsets, mask):
    """Write the mask of request ``blockIdx.y`` one byte a turn: a byte belongs to one thread, so bits are not shared.

    ancestor_bits (B, N, W uint32), prefix_lengths (B int32), offsets (B + 1 int32): see `offsets_kernel`, unit 8.
    mask (any length, uint8): written where a request's bytes lie inside it.

    Launch: grid (any, B), block of any size, no shared memory.
    """
    b = cuda.blockIdx.y
    begin, end = np.int64(offsets[b]), min(np.int64(offsets[b + 1]), np.int64(mask.shape[0]))
    keys = max(np.int64(prefix_lengths[b]), np.int64(0)) + ancestor_bits.shape[1]
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for place in range(begin + first, end, cuda.gridDim.x * cuda.blockDim.x):
        byte = np.uint32(0)
        for bit in range(8):
            if _sees(ancestor_bits, b, 8 * (place - begin) + bit, keys):
                byte |= np.uint32(1) << np.uint32(bit)
        mask[place] = byte


def flat_mask(
    ancestor_bits: Any,
    prefix_lengths: Any,
    prefix_sum: int | None = None,
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Return what `flat_mask_reference` defines, from `flat_mask_kernel`.

    ancestor_bits (B, N, W uint32), prefix_lengths (B int32).
    prefix_sum (int): the sum of the prefix lengths, an upper bound will do. Device arrays need it (SGLang's
    `seq_lens_sum`): lengths on the device are not looked at on the host. Elements beyond the last request's are not
    written; should the sum be too small, the last requests' masks are cut.
    out (bool, as long or longer): array to write into; stream: where to run.

    Raises `TypeError` or `ValueError` naming the argument, also for a mask too small.
    """
    batch, slots, prefix_sum = _check(ancestor_bits, prefix_lengths, prefix_sum)
    length = slots * (prefix_sum + batch * slots)
    transfer = Transfer(stream, {"ancestor_bits": ancestor_bits, "prefix_lengths": prefix_lengths})
    mask = transfer.output("mask", out, _long_enough(out, np.bool_, length), np.bool_)
    bits, lengths = transfer.input(ancestor_bits), transfer.input(prefix_lengths)
    offsets = transfer.scratch(batch + 1, np.int64)
    offsets_kernel[1, 1, transfer.stream](lengths, slots, 1, offsets)
    for_each(flat_mask_kernel, -(-length // batch), transfer.stream, batch)(bits, offsets, mask)
    return transfer.finish(mask)[0]


def packed_mask(
    ancestor_bits: Any,
    prefix_lengths: Any,
    prefix_sum: int | None = None,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Return ``(mask, offsets)``, what `packed_mask_reference` defines, from `packed_mask_kernel`.

    See `flat_mask` for the arguments; `out` is a pair (uint8, as long or longer; B + 1 int32). A new device mask has a
    byte more for each request than the sum of the lengths alone would need, since each begins at a whole byte.
    """
    batch, slots, total = _check(ancestor_bits, prefix_lengths, prefix_sum)
    length = slots * (total + batch * slots) // 8 + batch
    if isinstance(prefix_lengths, np.ndarray):
        length = int(sum((slots * (int(prefix) + slots) + 7) // 8 for prefix in prefix_lengths))
    check_integer("bytes of the mask", length, 1, 2**31 - 1)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (mask, offsets)")
    transfer = Transfer(stream, {"ancestor_bits": ancestor_bits, "prefix_lengths": prefix_lengths})
    given_mask, given_offsets = (None, None) if out is None else out
    mask = transfer.output("mask", given_mask, _long_enough(given_mask, np.uint8, length), np.uint8)
    offsets = transfer.output("offsets", given_offsets, (batch + 1,), np.int32)
    bits, lengths = transfer.input(ancestor_bits), transfer.input(prefix_lengths)
    offsets_kernel[1, 1, transfer.stream](lengths, slots, 8, offsets)
    for_each(packed_mask_kernel, -(-length // batch), transfer.stream, batch)(bits, lengths, offsets, mask)
    return transfer.finish(mask, offsets)


def bits_from_flat_mask_reference(mask: np.ndarray, prefix_lengths: np.ndarray, slots: int) -> np.ndarray:
    """Return `ancestor_bits` [B, N, W] uint32 of what `flat_mask_reference` made; N = `slots`.

    The prefix part is not looked at. `ValueError` when `mask` is shorter than the lengths ask for.
    """
    batch = _check_flat(mask, np.bool_, prefix_lengths, slots)
    bits = np.zeros((batch, slots, 4 * mask_words(slots)), np.uint8)
    begin = 0
    for b, prefix in enumerate(prefix_lengths.tolist()):
        rows = mask[begin : begin + slots * (prefix + slots)].reshape(slots, prefix + slots)
        packed = np.packbits(rows[:, prefix:], axis=1, bitorder="little")
        bits[b, :, : packed.shape[1]] = packed
        begin += rows.size
    return bits.view("<u4").astype(np.uint32, copy=False)


def bits_from_packed_mask_reference(
    mask: np.ndarray, offsets: np.ndarray, prefix_lengths: np.ndarray, slots: int
) -> np.ndarray:
    """Return `ancestor_bits` [B, N, W] uint32 of what `packed_mask_reference` made; N = `slots`.

    `ValueError` when a request's bytes lie outside `mask`.
    """
    batch = _check_packed(mask, offsets, prefix_lengths, slots)
    bits = np.zeros((batch, slots, mask_words(slots)), np.uint32)
    for b, prefix in enumerate(prefix_lengths.tolist()):
        elements = slots * (prefix + slots)
        flat = np.unpackbits(mask[offsets[b] : offsets[b] + (elements + 7) // 8], count=elements, bitorder="little")
        lengths = np.array([prefix], np.int32)
        bits[b] = bits_from_flat_mask_reference(flat.astype(bool), lengths, slots)[0]
    return bits


@cuda.jit
def bits_from_flat_mask_kernel(mask, prefix_lengths, offsets, ancestor_bits):
    """Make one word of a row of request ``blockIdx.y`` in each turn of a thread.

    mask (flat, bool), prefix_lengths (B int32), offsets (B + 1 int64): see `offsets_kernel`, unit 1.
    ancestor_bits (B, N, W uint32): written; bits whose element lies outside `mask` are 0.

    Launch: grid (any, B), block of any size, no shared memory.
    """
    b, slots, words = cuda.blockIdx.y, ancestor_bits.shape[1], ancestor_bits.shape[2]
    prefix = max(np.int64(prefix_lengths[b]), np.int64(0))
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for index in range(first, slots * words, cuda.gridDim.x * cuda.blockDim.x):
        node, word = index // words, index % words
        place = offsets[b] + node * (prefix + slots) + prefix + 32 * word
        bits = np.uint32(0)
        for bit in range(min(32, slots - 32 * word)):
            if place + bit < mask.shape[0] and mask[place + bit]:
                bits |= np.uint32(1) << np.uint32(bit)
        ancestor_bits[b, node, word] = bits


@cuda.jit
def bits_from_packed_mask_kernel(mask, prefix_lengths, offsets, ancestor_bits):
    """Make one word of a row of request ``blockIdx.y`` in each turn of a thread.

    mask (uint8), prefix_lengths (B int32), offsets (B + 1 int32): where each request's bytes begin.
    ancestor_bits (B, N, W uint32): written; bits whose byte lies outside `mask` are 0.

    Launch: grid (any, B), block of any size, no shared memory.
    """
    b, slots, words = cuda.blockIdx.y, ancestor_bits.shape[1], ancestor_bits.shape[2]
    prefix = max(np.int64(prefix_lengths[b]), np.int64(0))
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for index in range(first, slots * words, cuda.gridDim.x * cuda.blockDim.x):
        node, word = index // words, index % words
        element = node * (prefix + slots) + prefix + 32 * word
        bits = np.uint32(0)
        for bit in range(min(32, slots - 32 * word)):
            byte = np.int64(offsets[b]) + (element + bit) // 8
            if 0 <= byte < mask.shape[0] and (mask[byte] >> ((element + bit) % 8)) & 1:
                bits |= np.uint32(1) << np.uint32(bit)
        ancestor_bits[b, node, word] = bits


def bits_from_flat_mask(mask: Any, prefix_lengths: Any, slots: int, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `bits_from_flat_mask_reference` defines, from `bits_from_flat_mask_kernel`.

    mask (flat, bool), prefix_lengths (B int32), slots (int): N, up to 1025.
    out (B, N, W uint32): array to write into; stream: where to run.
    """
    batch = _check_flat(mask, np.bool_, prefix_lengths, slots)
    transfer = Transfer(stream, {"mask": mask, "prefix_lengths": prefix_lengths})
    bits = transfer.output("ancestor_bits", out, (batch, slots, mask_words(slots)), np.uint32)
    lengths, offsets = transfer.input(prefix_lengths), transfer.scratch(batch + 1, np.int64)
    offsets_kernel[1, 1, transfer.stream](lengths, slots, 1, offsets)
    for_each(bits_from_flat_mask_kernel, slots * mask_words(slots), transfer.stream, batch)(
        transfer.input(mask), lengths, offsets, bits
    )
    return transfer.finish(bits)[0]


def bits_from_packed_mask(
    mask: Any, offsets: Any, prefix_lengths: Any, slots: int, *, out: Any = None, stream: Any = None
) -> Any:
    """Return what `bits_from_packed_mask_reference` defines, from `bits_from_packed_mask_kernel`.

    mask (flat, uint8), offsets (B + 1 int32): in bytes; prefix_lengths (B int32); slots (int): N, up to 1025.
    out (B, N, W uint32): array to write into; stream: where to run.
    """
    batch = _check_packed(mask, offsets, prefix_lengths, slots)
    transfer = Transfer(stream, {"mask": mask, "offsets": offsets, "prefix_lengths": prefix_lengths})
    bits = transfer.output("ancestor_bits", out, (batch, slots, mask_words(slots)), np.uint32)
    for_each(bits_from_packed_mask_kernel, slots * mask_words(slots), transfer.stream, batch)(
        transfer.input(mask), transfer.input(prefix_lengths), transfer.input(offsets), bits
    )
    return transfer.finish(bits)[0]


def _check(bits: Any, prefix_lengths: Any, prefix_sum: int | None) -> tuple[int, int, int]:
    """Return B, N and the sum of the prefix lengths."""
    check = ArrayCheck()
    batch, slots = check_rows(check, bits)
    check_integer("B of ancestor_bits", batch, 1, 65535)  # a grid's second axis
    check("prefix_lengths", prefix_lengths, "B", (np.int32,))
    most = 2**62 // MAX_BUDGET // 2
    if isinstance(prefix_lengths, np.ndarray):
        check_prefixes(prefix_lengths)
        least = int(prefix_lengths.sum(dtype=np.int64))
        return batch, slots, least if prefix_sum is None else check_integer("prefix_sum", prefix_sum, least, most)
    if prefix_sum is None:
        raise TypeError("prefix_sum: got None, needs the sum of the prefix lengths: on the device it is not looked at")
    return batch, slots, check_integer("prefix_sum", prefix_sum, 0, most)


def _long_enough(out: Any, dtype: Any, length: int) -> tuple[int]:
    """Return the shape of a flat output: that of `out`, which may be longer than needed."""
    if out is None:
        return (length,)
    got = ArrayCheck()("out (mask)", out, "*", (dtype,))[0]
    if got < length:
        raise ValueError(f"out (mask): got {got} elements, needs {length}")
    return (got,)


def _check_flat(mask: Any, dtype: Any, prefix_lengths: Any, slots: int) -> int:
    """Return B."""
    check = ArrayCheck()
    length = check("mask", mask, "*", (dtype,))[0]
    batch = check("prefix_lengths", prefix_lengths, "B", (np.int32,))[0]
    check_integer("slots", slots, 1, MAX_BUDGET + 1)
    check_integer("B of prefix_lengths", batch, 1, 65535)
    if isinstance(prefix_lengths, np.ndarray):
        check_prefixes(prefix_lengths)
    if dtype is np.bool_:
        prefix_sum = int(prefix_lengths.sum(dtype=np.int64)) if isinstance(prefix_lengths, np.ndarray) else 0
        if length < slots * (prefix_sum + batch * slots):
            raise ValueError(f"mask: got {length} elements, needs {slots * (prefix_sum + batch * slots)}")
    return batch


def _check_packed(mask: Any, offsets: Any, prefix_lengths: Any, slots: int) -> int:
    """Return B."""
    batch = _check_flat(mask, np.uint8, prefix_lengths, slots)
    ArrayCheck()("offsets", offsets, str(batch + 1), (np.int32,))
    if isinstance(mask, np.ndarray) and isinstance(offsets, np.ndarray) and isinstance(prefix_lengths, np.ndarray):
        for b, prefix in enumerate(prefix_lengths.tolist()):
            end = int(offsets[b]) + (slots * (prefix + slots) + 7) // 8
            if offsets[b] < 0 or end > mask.shape[0]:
                raise ValueError(f"mask: got {mask.shape[0]} bytes, needs {end}: request {b} begins at {offsets[b]}")
    return batch
