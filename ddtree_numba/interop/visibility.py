"""Who sees whom in a tree as a dense mask, boolean or additive, and back; and a tree's links from its bits.

Rows are queries, columns keys. A mask of the tree part alone has N columns, one for each slot. With `prefix_lengths` it
has a column for every key: P keys of the prefix, which every row sees, then the N slots, then columns that no row sees,
up to the most that any request needs. Padding of scaled_dot_product_attention and of Hugging Face transformers is that.

An additive mask is added to the scores before the softmax: 0 where a key is seen, -inf where not. A row of an unused
slot sees the prefix and nothing else. Without a prefix it is -inf all along, and a softmax over it gives NaN: let such
rows see the root, or drop them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_dtype, check_integer, describe_array, dtype_of
from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BROKEN_LINK, STATUS_OK, mask_words
from ddtree_numba.interop.launching import for_each, launch

__all__ = [
    "TreeLinks",
    "additive_mask",
    "additive_mask_reference",
    "bits_from_mask",
    "bits_from_mask_kernel",
    "bits_from_mask_reference",
    "bool_mask",
    "bool_mask_reference",
    "expand_bits_kernel",
    "links_from_bits",
    "links_from_bits_kernel",
    "links_from_bits_reference",
]

_FLOATS = (np.float32, np.float16, np.uint16)
_BFLOAT16_MINUS_INFINITY = 0xFF80


def visible(ancestor_bits: np.ndarray) -> np.ndarray:
    """Return booleans [..., N, N] of packed rows [..., N, W]."""
    slots = np.arange(ancestor_bits.shape[-2])
    return (ancestor_bits[..., slots // 32] >> (slots % 32).astype(np.uint32) & 1).astype(bool)


def bool_mask_reference(
    ancestor_bits: np.ndarray, prefix_lengths: np.ndarray | None = None, keys: int | None = None
) -> np.ndarray:
    """Return booleans: True where a node sees a key.

    `ancestor_bits` [B, N, W] uint32 -> [B, N, N]; with `prefix_lengths` [B] int32 -> [B, N, keys], where `keys` is the
    longest prefix plus N unless it is given.

    >>> bool_mask_reference(np.array([[[1], [3], [5]]], np.uint32)).astype(int).tolist()
    [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    >>> bits, prefix = np.array([[[1], [3]], [[1], [3]]], np.uint32), np.array([2, 0], np.int32)
    >>> bool_mask_reference(bits, prefix).astype(int).tolist()
    [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    """
    batch, slots, columns = _check_bits(ancestor_bits, prefix_lengths, keys)
    sees = visible(ancestor_bits)
    mask = np.zeros((batch, slots, columns), bool)
    for b in range(batch):
        prefix = 0 if prefix_lengths is None else int(prefix_lengths[b])
        mask[b, :, :prefix] = True
        mask[b, :, prefix : prefix + slots] = sees[b]
    return mask


def additive_mask_reference(
    ancestor_bits: np.ndarray,
    prefix_lengths: np.ndarray | None = None,
    keys: int | None = None,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Return 0 where `bool_mask_reference` is True and -inf elsewhere; `dtype` uint16 is bfloat16.

    >>> additive_mask_reference(np.array([[[1], [3]]], np.uint32)).tolist()
    [[[0.0, -inf], [0.0, 0.0]]]
    """
    hidden = _minus_infinity(dtype)
    return np.where(bool_mask_reference(ancestor_bits, prefix_lengths, keys), hidden.dtype.type(0), hidden)


@cuda.jit
def expand_bits_kernel(ancestor_bits, prefix_lengths, has_prefix, seen, hidden, mask):
    """Write one element of a dense mask in each turn of a thread.

    ancestor_bits (B, N, W uint32): who sees whom.
    prefix_lengths (B int32): read where `has_prefix` is not 0.
    seen, hidden: what stands for both in `mask`.
    mask (B, N, keys, any dtype): written.

    Launch: any grid and block, no shared memory.
    """
    slots, keys = mask.shape[1], mask.shape[2]
    for index in range(cuda.grid(1), mask.shape[0] * slots * keys, cuda.gridsize(1)):
        row, key = index // keys, index % keys
        b, node = row // slots, row % slots
        slot = key - np.int64(prefix_lengths[b]) if has_prefix else key
        sees = slot < 0
        if 0 <= slot < slots:
            sees = (ancestor_bits[b, node, slot // 32] >> np.uint32(slot % 32)) & np.uint32(1) != 0
        mask[b, node, key] = seen if sees else hidden


def bool_mask(
    ancestor_bits: Any,
    prefix_lengths: Any = None,
    keys: int | None = None,
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Return what `bool_mask_reference` defines, from `expand_bits_kernel`.

    ancestor_bits (B, N, W uint32): who sees whom.
    prefix_lengths (B int32) and keys (int): for a mask over prefix and tree. Device arrays need `keys`: the lengths are
    not looked at on the host, and a request that needs more columns is cut.
    out (B, N, N bool, or B, N, keys): array to write into; stream: where to run.

    Raises `TypeError` or `ValueError` naming the argument, also for `keys` below what the longest prefix needs.
    """
    return _expand(ancestor_bits, prefix_lengths, keys, out, stream, np.dtype(bool))


def additive_mask(
    ancestor_bits: Any,
    prefix_lengths: Any = None,
    keys: int | None = None,
    dtype: Any = np.float32,
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Return what `additive_mask_reference` defines, from `expand_bits_kernel`; see `bool_mask`.

    `dtype` is that of the result, or of `out` where one is given: float32, float16, or uint16 for bfloat16 (a bfloat16
    tensor will do).
    """
    dtype = _check_float("dtype", dtype)
    if out is not None:
        dtype = _check_float("out (mask)", describe_array("out (mask)", out)[1])
    return _expand(ancestor_bits, prefix_lengths, keys, out, stream, dtype)


def _expand(bits: Any, prefix_lengths: Any, keys: int | None, out: Any, stream: Any, dtype: np.dtype) -> Any:
    batch, slots, columns = _check_bits(bits, prefix_lengths, keys)
    given = {"ancestor_bits": bits}
    if prefix_lengths is not None:
        given["prefix_lengths"] = prefix_lengths
    transfer = Transfer(stream, given)
    mask = transfer.output("mask", out, (batch, slots, columns), dtype)
    hidden = np.bool_(False) if dtype == np.bool_ else _minus_infinity(dtype)
    inputs = [transfer.input(array) for array in given.values()]
    lengths = inputs[-1].reshape(inputs[-1].size)  # not read without a prefix
    has_prefix = np.int32(prefix_lengths is not None)
    for_each(expand_bits_kernel, batch * slots * columns, transfer.stream)(
        inputs[0], lengths, has_prefix, np.bool_(True) if dtype == np.bool_ else dtype.type(0), hidden, mask
    )
    return transfer.finish(mask)[0]


def bits_from_mask_reference(mask: np.ndarray) -> np.ndarray:
    """Return `ancestor_bits` [B, N, W] uint32 of a dense mask of the tree part, [B, N, N].

    `mask` is bool, or additive: float32, float16, or bfloat16 as uint16, with 0 where a key is seen. Of an additive
    mask, what is not 0 must be -inf or the lowest number of its type, as transformers has it; else `ValueError`.

    >>> bits_from_mask_reference(np.array([[[0, -np.inf], [0, 0]]], np.float32)).tolist()
    [[[1], [3]]]
    """
    batch, slots = _check_mask(mask)
    _check_two_values("mask", mask)
    sees = mask if mask.dtype == np.bool_ else mask & 0x7FFF == 0 if mask.dtype == np.uint16 else mask == 0
    rows = np.zeros((batch, slots, 4 * mask_words(slots)), np.uint8)
    packed = np.packbits(sees, axis=2, bitorder="little")
    rows[:, :, : packed.shape[2]] = packed
    return rows.view("<u4").astype(np.uint32, copy=False)


@cuda.jit
def bits_from_mask_kernel(mask, seen, also_seen, ancestor_bits):
    """Make one word of a row in each turn of a thread.

    mask (B, N, N, any dtype): dense.
    seen, also_seen: the values that mean "sees" (0.0 and -0.0 differ where bfloat16 comes as uint16).
    ancestor_bits (B, N, W uint32): written.

    Launch: any grid and block, no shared memory.
    """
    slots, words = ancestor_bits.shape[1], ancestor_bits.shape[2]
    for index in range(cuda.grid(1), ancestor_bits.shape[0] * slots * words, cuda.gridsize(1)):
        row, word = index // words, index % words
        b, node = row // slots, row % slots
        bits = np.uint32(0)
        for bit in range(min(32, slots - 32 * word)):
            value = mask[b, node, 32 * word + bit]
            if value == seen or value == also_seen:  # noqa: SIM109 (a kernel has no tuple of two types to look in)
                bits |= np.uint32(1) << np.uint32(bit)
        ancestor_bits[b, node, word] = bits


def bits_from_mask(mask: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `bits_from_mask_reference` defines, from `bits_from_mask_kernel`.

    mask (B, N, N bool, float32, float16, or bfloat16 as uint16): dense.
    out (B, N, W uint32): array to write into; stream: where to run.

    The values of a device mask are not looked at on the host: there, what is not 0 is not seen.
    """
    batch, slots = _check_mask(mask)
    transfer = Transfer(stream, {"mask": mask})
    if transfer.on_host:
        _check_two_values("mask", mask)
    bits = transfer.output("ancestor_bits", out, (batch, slots, mask_words(slots)), np.uint32)
    dtype = dtype_of(mask)
    seen = np.bool_(True) if dtype == np.bool_ else dtype.type(0)
    also_seen = np.uint16(0x8000) if dtype == np.uint16 else seen
    for_each(bits_from_mask_kernel, batch * slots * mask_words(slots), transfer.stream)(
        transfer.input(mask), seen, also_seen, bits
    )
    return transfer.finish(bits)[0]


class TreeLinks(NamedTuple):
    """The links of a batch of trees, as `DraftTree` has them, with a status."""

    parents: Any
    """[B, N] int32: parent slot, root -1; unused -1."""
    depths: Any
    """[B, N] int32: edges from the root; unused 0."""
    first_child: Any
    """[B, N] int32: the child with the smallest slot, or -1."""
    next_sibling: Any
    """[B, N] int32: the sibling with the next larger slot, or -1."""
    status: Any
    """[B] int32: `STATUS_OK`, or `STATUS_BROKEN_LINK` where the bits are no tree's."""


def links_from_bits_reference(ancestor_bits: np.ndarray, node_count: np.ndarray) -> TreeLinks:
    """Return the tree that has these visibility rows: a node's parent is the last other slot that it sees.

    `ancestor_bits` [B, N, W] uint32, `node_count` [B] int32. A row that sees a later slot, not itself or not what its
    parent sees is no tree's: the node is left out (parent -1, depth 0), and the request's status says so. What SGLang's
    kernel `reconstruct_indices_from_tree_mask` does with a dense mask.

    >>> links = links_from_bits_reference(np.array([[[1], [3], [5], [13]]], np.uint32), np.array([4], np.int32))
    >>> [field.tolist() for field in links]
    [[[-1, 0, 0, 2]], [[0, 1, 1, 2]], [[1, -1, 3, -1]], [[-1, 2, -1, -1]], [0]]
    """
    batch, slots = _check_rows(ancestor_bits, node_count)
    links = TreeLinks(
        np.full((batch, slots), -1, np.int32),
        np.zeros((batch, slots), np.int32),
        np.full((batch, slots), -1, np.int32),
        np.full((batch, slots), -1, np.int32),
        np.full(batch, STATUS_OK, np.int32),
    )
    for b in range(batch):
        count = int(node_count[b])
        if not 1 <= count <= slots:
            links.status[b], count = STATUS_BROKEN_LINK, 0
        rows = [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in ancestor_bits[b, :count]]
        last_child: dict[int, int] = {}
        for slot, row in enumerate(rows):
            others = row & ~(1 << slot)
            parent = others.bit_length() - 1
            whole = row != others and parent < slot
            if not whole or (parent < 0) != (slot == 0) or (parent >= 0 and rows[parent] != others):
                links.status[b] = STATUS_BROKEN_LINK
                continue
            links.parents[b, slot], links.depths[b, slot] = parent, others.bit_count()
            if parent >= 0:
                if parent in last_child:
                    links.next_sibling[b, last_child[parent]] = slot
                else:
                    links.first_child[b, parent] = slot
                last_child[parent] = slot
    return links


@cuda.jit(device=True)
def _parent_of(ancestor_bits, b, slot):
    """Return the parent that row `slot` names, -1 for a whole root, -2 for a row that is no tree's."""
    parent = -1
    for other in range(32 * ancestor_bits.shape[2]):
        sees = (ancestor_bits[b, slot, other // 32] >> np.uint32(other % 32)) & np.uint32(1) != 0
        if sees and other < slot:
            parent = other
        if sees != (other == slot) and other >= slot:
            return -2
    for word in range(ancestor_bits.shape[2]):
        others = ancestor_bits[b, slot, word]
        if slot // 32 == word:
            others ^= np.uint32(1) << np.uint32(slot % 32)
        if others != (ancestor_bits[b, parent, word] if parent >= 0 else np.uint32(0)):
            return -2
    return parent if (parent < 0) == (slot == 0) else -2


@cuda.jit
def links_from_bits_kernel(ancestor_bits, node_count, links):
    """Find the links of one request in each block.

    ancestor_bits (B, N, W uint32), node_count (B int32).
    links (TreeLinks): written.

    Launch: grid B, block of any size, no shared memory. First every thread finds the parents of its slots, then, behind
    a barrier, a slot's first child and next sibling are the first later slots with a fitting parent: N looks each, of
    which neighbours' threads share the cache lines.
    """
    b, slots = cuda.blockIdx.x, ancestor_bits.shape[1]
    count = node_count[b]
    if cuda.threadIdx.x == 0:
        links.status[b] = STATUS_OK if 1 <= count <= slots else STATUS_BROKEN_LINK
    cuda.syncthreads()
    if count < 1 or count > slots:
        count = 0
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        parent = _parent_of(ancestor_bits, b, slot) if slot < count else -1
        if parent == -2:
            links.status[b] = STATUS_BROKEN_LINK  # all that write here write this
        depth = 0
        if parent >= 0:
            for other in range(slot):
                depth += np.int32((ancestor_bits[b, slot, other // 32] >> np.uint32(other % 32)) & np.uint32(1))
        links.parents[b, slot] = max(parent, -1)
        links.depths[b, slot] = depth
    cuda.syncthreads()
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        child, sibling = -1, -1
        for other in range(count - 1, slot, -1):
            if links.parents[b, other] == slot:
                child = other
            if links.parents[b, other] == links.parents[b, slot]:
                sibling = other
        links.first_child[b, slot] = child
        links.next_sibling[b, slot] = sibling if links.parents[b, slot] >= 0 else -1


def links_from_bits(ancestor_bits: Any, node_count: Any, *, out: TreeLinks | None = None, stream: Any = None) -> Any:
    """Return the `TreeLinks` that `links_from_bits_reference` defines, from `links_from_bits_kernel`.

    ancestor_bits (B, N, W uint32), node_count (B int32).
    out (TreeLinks): arrays to write into; stream: where to run.
    """
    batch, slots = _check_rows(ancestor_bits, node_count)
    if out is not None and not isinstance(out, TreeLinks):
        raise TypeError(f"out: got {type(out).__name__}, needs a TreeLinks")
    transfer = Transfer(stream, {"ancestor_bits": ancestor_bits, "node_count": node_count})
    shapes = {name: (batch,) if name == "status" else (batch, slots) for name in TreeLinks._fields}
    links = TreeLinks(
        *(transfer.output(name, getattr(out, name, None), shape, np.int32) for name, shape in shapes.items())
    )
    launch(links_from_bits_kernel, batch, 128, transfer.stream)(
        transfer.input(ancestor_bits), transfer.input(node_count), links
    )
    return TreeLinks(*transfer.finish(*links))


def _check_float(name: str, dtype: Any) -> np.dtype:
    return check_dtype(name, dtype, _FLOATS, " (bfloat16)")


def _minus_infinity(dtype: Any) -> Any:
    """Return -inf of an additive mask's dtype; `TypeError` for another."""
    dtype = _check_float("dtype", dtype)
    return np.uint16(_BFLOAT16_MINUS_INFINITY) if dtype == np.uint16 else dtype.type(-np.inf)


def _check_bits(bits: Any, prefix_lengths: Any, keys: int | None) -> tuple[int, int, int]:
    """Return B, N and the columns of a dense mask."""
    check = ArrayCheck()
    batch, slots = check_rows(check, bits)
    if prefix_lengths is None:
        if keys is not None:
            raise TypeError("keys: got a number without prefix_lengths, needs both or none")
        return batch, slots, slots
    check("prefix_lengths", prefix_lengths, "B", (np.int32,))
    if isinstance(prefix_lengths, np.ndarray):
        least = check_prefixes(prefix_lengths) + slots
        keys = least if keys is None else check_integer("keys", keys, least, 2**31 - 1)
    elif keys is None:
        raise TypeError("keys: got None, needs the mask's columns: lengths on the device are not looked at here")
    return batch, slots, check_integer("keys", keys, slots, 2**31 - 1)


def check_rows(check: ArrayCheck, bits: Any) -> tuple[int, int]:
    """Return B and N of `ancestor_bits`."""
    batch, slots, words = check("ancestor_bits", bits, "B N W", (np.uint32,))
    check_integer("B of ancestor_bits", batch, 1, 2**31 - 1)
    check_integer("N of ancestor_bits", slots, 1, MAX_BUDGET + 1)
    if words != mask_words(slots):
        raise ValueError(f"ancestor_bits: got {words} words a row, needs {mask_words(slots)} for {slots} slots")
    return batch, slots


def check_prefixes(prefix_lengths: np.ndarray) -> int:
    """Return the longest of NumPy's `prefix_lengths`; `ValueError` for a negative one."""
    if prefix_lengths.min() < 0:
        raise ValueError(f"prefix_lengths: got {int(prefix_lengths.min())}, needs 0 or more")
    return int(prefix_lengths.max())


def _check_rows(bits: Any, node_count: Any) -> tuple[int, int]:
    check = ArrayCheck()
    batch, slots = check_rows(check, bits)
    check("node_count", node_count, "B", (np.int32,))
    return batch, slots


def _check_mask(mask: Any) -> tuple[int, int]:
    batch, slots, columns = ArrayCheck()("mask", mask, "B N *", (bool, *_FLOATS))
    if columns != slots:
        raise ValueError(f"mask: got shape ({batch}, {slots}, {columns}), needs [B, N, N], the tree part alone")
    check_integer("B of mask", batch, 1, 2**31 - 1)
    return batch, check_integer("N of mask", slots, 1, MAX_BUDGET + 1)


def _check_two_values(name: str, mask: np.ndarray) -> None:
    """Raise `ValueError` unless an additive NumPy mask holds nothing but 0 and -inf or its type's lowest number."""
    if mask.dtype == np.bool_:
        return
    if mask.dtype == np.uint16:
        odd = (mask & 0x7FFF != 0) & (mask != _BFLOAT16_MINUS_INFINITY) & (mask != 0xFF7F)
    else:
        odd = (mask != 0) & (mask > np.finfo(mask.dtype).min) | np.isnan(mask)
    if odd.any():
        where = tuple(int(index) for index in np.argwhere(odd)[0])
        raise ValueError(f"{name}{list(where)}: got {mask[where]}, needs 0 (seen) or -inf (hidden)")
