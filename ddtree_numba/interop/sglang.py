"""SGLang: its tree arrays and masks to and from a `DraftTree`, and a `verify_tree_greedy` with its argument list.

Facts: `sgl-kernel/csrc/speculative/eagle_utils.cu` (Apache-2.0) and the tests beside it, in `sgl-project/sglang`. All
index arrays are int64. N, there `draft_token_num`, counts the root; every slot is used.

- `retrive_index` [B, N]: ``b * N + slot``, an index into all requests' nodes. (Newer Python code there spells it
  `retrieve_index`; the kernel's arguments do not.)
- `retrive_next_token`, `retrive_next_sibling` [B, N]: first child and next sibling inside the request, -1 for none.
- `positions` [B * N]: prefix length + depth.
- `tree_mask`, one of three: FULL_MASK, booleans over prefix and tree, requests one after the other; QLEN_ONLY,
  booleans [B * N * N] of the tree; QLEN_ONLY_BITPACKING, one word a row, bit j for slot j, of 8, 16 or 32 bits, the
  narrowest that holds N.

SGLang's trees have N nodes each. A `DraftTree` with fewer keeps its unused slots: no link leads there, their position
is the root's, and in the mask they see the prefix alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.draft_tree import (
    MAX_BUDGET,
    STATUS_BROKEN_LINK,
    STATUS_OK,
    DraftTree,
    check_tree,
    empty_tree,
)
from ddtree_numba.interop.launching import check_bridged_tree, copy_words_kernel, for_each, launch
from ddtree_numba.interop.ragged_mask import flat_mask, flat_mask_reference
from ddtree_numba.interop.visibility import bool_mask, bool_mask_reference, check_rows
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask, ancestor_bitmask_reference

__all__ = [
    "SGLangTree",
    "TreeMaskMode",
    "from_sglang",
    "from_sglang_kernel",
    "from_sglang_reference",
    "pack_rows",
    "pack_rows_reference",
    "parents_from_selection",
    "parents_from_selection_kernel",
    "parents_from_selection_reference",
    "to_sglang",
    "to_sglang_kernel",
    "to_sglang_reference",
    "unpack_rows",
    "unpack_rows_reference",
    "verify_tree_greedy",
    "verify_tree_greedy_kernel",
    "verify_tree_greedy_reference",
]

_ROWS = (np.uint8, np.uint16, np.uint32)


class TreeMaskMode(IntEnum):
    """Which `tree_mask` SGLang's attention backend wants; the numbers are its own."""

    FULL_MASK = 0
    """Booleans over prefix and tree: sum(N * (P_b + N)) of them."""
    QLEN_ONLY = 1
    """Booleans of the tree: B * N * N."""
    QLEN_ONLY_BITPACKING = 2
    """A word of 8, 16 or 32 bits for each row: B * N."""


class SGLangTree(NamedTuple):
    """A batch of trees as SGLang's verification takes them."""

    draft_token: Any
    """[B * N] int64: tokens, the root's first (there also `candidates`, as [B, N])."""
    positions: Any
    """[B * N] int64."""
    retrive_index: Any
    """[B, N] int64."""
    retrive_next_token: Any
    """[B, N] int64."""
    retrive_next_sibling: Any
    """[B, N] int64."""
    tree_mask: Any
    """Flat: bool, or uint8, uint16 or uint32 for QLEN_ONLY_BITPACKING."""


def to_sglang_reference(
    tree: DraftTree, prefix_lengths: np.ndarray, mode: TreeMaskMode = TreeMaskMode.FULL_MASK
) -> SGLangTree:
    """Return `tree` (bits filled) behind prefixes of `prefix_lengths` [B] int32 as SGLang's arrays.

    Raises `ValueError` for a tree that `check_tree` refuses and for more than 32 slots with QLEN_ONLY_BITPACKING.

    >>> from ddtree_numba.draft_tree import random_tree
    >>> tree = random_tree(np.random.default_rng(0), batch=2, budget=2, node_counts=[3, 3], max_depth=1)
    >>> given = to_sglang_reference(tree, np.array([5, 10], np.int32), TreeMaskMode.QLEN_ONLY_BITPACKING)
    >>> given.positions.tolist(), given.retrive_index.tolist()
    ([5, 6, 6, 10, 11, 11], [[0, 1, 2], [3, 4, 5]])
    >>> given.retrive_next_token[0].tolist(), given.retrive_next_sibling[0].tolist(), given.tree_mask.tolist()
    ([1, -1, -1], [-1, 2, -1], [1, 3, 5, 1, 3, 5])
    """
    batch, slots = _check_to(tree, prefix_lengths, mode)
    if mode == TreeMaskMode.FULL_MASK:
        mask = flat_mask_reference(tree.ancestor_bits, prefix_lengths)
    elif mode == TreeMaskMode.QLEN_ONLY:
        mask = bool_mask_reference(tree.ancestor_bits).ravel()
    else:
        mask = pack_rows_reference(tree.ancestor_bits)
    return SGLangTree(
        draft_token=tree.token_ids.astype(np.int64).ravel(),
        positions=(prefix_lengths[:, None].astype(np.int64) + tree.depths).ravel(),
        retrive_index=np.arange(batch * slots, dtype=np.int64).reshape(batch, slots),
        retrive_next_token=tree.first_child.astype(np.int64),
        retrive_next_sibling=tree.next_sibling.astype(np.int64),
        tree_mask=mask,
    )


@cuda.jit
def to_sglang_kernel(tree, prefix_lengths, draft_token, positions, index, next_token, next_sibling):
    """Write the five index arrays, one slot a turn.

    tree (DraftTree): token_ids, depths and links are read.
    prefix_lengths (B int32).
    draft_token, positions (B * N int64), index, next_token, next_sibling (B, N int64): written.

    Launch: any grid and block, no shared memory.
    """
    slots = index.shape[1]
    for flat in range(cuda.grid(1), index.shape[0] * slots, cuda.gridsize(1)):
        b, slot = flat // slots, flat % slots
        draft_token[flat] = tree.token_ids[b, slot]
        positions[flat] = np.int64(prefix_lengths[b]) + tree.depths[b, slot]
        index[b, slot] = flat
        next_token[b, slot] = tree.first_child[b, slot]
        next_sibling[b, slot] = tree.next_sibling[b, slot]


def to_sglang(
    tree: DraftTree,
    prefix_lengths: Any,
    mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
    *,
    prefix_sum: int | None = None,
    out: SGLangTree | None = None,
    stream: Any = None,
) -> SGLangTree:
    """Return the `SGLangTree` that `to_sglang_reference` defines, from `to_sglang_kernel` and the masks' kernels.

    tree (DraftTree, bits filled), prefix_lengths (B int32), mode (TreeMaskMode).
    prefix_sum (int): for FULL_MASK on device arrays, the sum of the prefix lengths or more: see `flat_mask`.
    out (SGLangTree): arrays to write into; a FULL_MASK may be longer than needed. stream: where to run.

    Raises as the reference does; the contents of device arrays are not looked at.
    """
    batch, slots = _check_to(tree, prefix_lengths, mode)
    if out is not None and not isinstance(out, SGLangTree):
        raise TypeError(f"out: got {type(out).__name__}, needs an SGLangTree")
    given = SGLangTree(None, None, None, None, None, None) if out is None else out
    fields = {f"tree.{name}": array for name, array in tree._asdict().items()}
    transfer = Transfer(stream, {**fields, "prefix_lengths": prefix_lengths})
    shapes = {"draft_token": (batch * slots,), "positions": (batch * slots,)}
    indices = [
        transfer.output(name, getattr(given, name), shapes.get(name, (batch, slots)), np.int64)
        for name in SGLangTree._fields[:-1]
    ]
    for_each(to_sglang_kernel, batch * slots, transfer.stream)(
        DraftTree(*map(transfer.input, tree)), transfer.input(prefix_lengths), *indices
    )
    if mode == TreeMaskMode.FULL_MASK:
        mask = flat_mask(tree.ancestor_bits, prefix_lengths, prefix_sum, out=given.tree_mask, stream=stream)
    elif mode == TreeMaskMode.QLEN_ONLY:
        dense = (
            None if given.tree_mask is None else _reshaped("out (tree_mask)", given.tree_mask, (batch, slots, slots))
        )
        mask = bool_mask(tree.ancestor_bits, out=dense, stream=stream).reshape(batch * slots * slots)
        mask = mask if given.tree_mask is None else given.tree_mask
    else:
        mask = pack_rows(tree.ancestor_bits, out=given.tree_mask, stream=stream)
    return SGLangTree(*(*transfer.finish(*indices), mask))


def _reshaped(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    ArrayCheck()(name, array, str(int(np.prod(shape))), (np.bool_,))
    return array.reshape(shape)


def _check_to(tree: Any, prefix_lengths: Any, mode: Any) -> tuple[int, int]:
    if not isinstance(mode, TreeMaskMode):
        raise TypeError(f"mode: got {mode!r}, needs a TreeMaskMode")
    check = ArrayCheck()
    batch, slots = check_bridged_tree(tree, check)
    check("prefix_lengths", prefix_lengths, "B", (np.int32,))
    check_integer("B of tree", batch, 1, 65535)
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        _row_dtype(slots)
    return batch, slots


def _row_dtype(slots: int) -> np.dtype:
    """Return the narrowest word that holds a row; `ValueError` when none does.

    >>> [str(_row_dtype(slots)) for slots in (8, 9, 16, 17, 32)]
    ['uint8', 'uint16', 'uint16', 'uint32', 'uint32']
    """
    for dtype in map(np.dtype, _ROWS):
        if slots <= 8 * dtype.itemsize:
            return dtype
    raise ValueError(f"N of ancestor_bits: got {slots} slots, needs at most 32 for QLEN_ONLY_BITPACKING")


def pack_rows_reference(ancestor_bits: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Return one word a row, [B * N]: uint8, uint16 or uint32, by default the narrowest that holds N.

    >>> pack_rows_reference(np.array([[[1], [3], [5]]], np.uint32))
    array([1, 3, 5], dtype=uint8)
    """
    batch, slots, dtype = _check_pack(ancestor_bits, dtype)
    return ancestor_bits.reshape(batch * slots).astype(dtype)


def pack_rows(ancestor_bits: Any, dtype: Any = None, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `pack_rows_reference` defines, from `copy_words_kernel`.

    ancestor_bits (B, N, 1 uint32): N up to 32.
    dtype (uint8, uint16 or uint32): a wider one than needed will do. `ValueError` when N is over its bits.
    out (B * N of that dtype): array to write into; stream: where to run.
    """
    batch, slots, dtype = _check_pack(ancestor_bits, dtype)
    transfer = Transfer(stream, {"ancestor_bits": ancestor_bits})
    rows = transfer.output("tree_mask", out, (batch * slots,), dtype)
    limit = np.uint32(np.iinfo(dtype).max)
    for_each(copy_words_kernel, batch * slots, transfer.stream)(
        transfer.input(ancestor_bits), limit, rows.reshape(batch, slots, 1)
    )
    return transfer.finish(rows)[0]


def _check_pack(bits: Any, dtype: Any) -> tuple[int, int, np.dtype]:
    batch, slots = check_rows(ArrayCheck(), bits)
    narrowest = _row_dtype(slots)
    dtype = narrowest if dtype is None else np.dtype(dtype)
    if dtype not in [np.dtype(kind) for kind in _ROWS]:
        raise TypeError(f"dtype: got {dtype}, needs uint8 or uint16 or uint32")
    if slots > 8 * dtype.itemsize:
        raise ValueError(f"N of ancestor_bits: got {slots} slots, needs at most {8 * dtype.itemsize} for {dtype}")
    return batch, slots, dtype


def unpack_rows_reference(rows: np.ndarray, slots: int) -> np.ndarray:
    """Return `ancestor_bits` [B, N, 1] uint32 of packed rows [B * N], uint8, uint16 or uint32; N = `slots`."""
    batch = _check_unpack(rows, slots)
    return rows.astype(np.uint32).reshape(batch, slots, 1)


def unpack_rows(rows: Any, slots: int, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `unpack_rows_reference` defines, from `copy_words_kernel`; `out` (B, N, 1 uint32)."""
    batch = _check_unpack(rows, slots)
    transfer = Transfer(stream, {"rows": rows})
    bits = transfer.output("ancestor_bits", out, (batch, slots, 1), np.uint32)
    for_each(copy_words_kernel, batch * slots, transfer.stream)(
        transfer.input(rows).reshape(batch, slots, 1), np.uint32(0xFFFFFFFF), bits
    )
    return transfer.finish(bits)[0]


def _check_unpack(rows: Any, slots: int) -> int:
    length = ArrayCheck()("rows", rows, "*", _ROWS)[0]
    check_integer("slots", slots, 1, 32)
    if length == 0 or length % slots:
        raise ValueError(f"rows: got {length} rows, needs a multiple of slots={slots}")
    return length // slots


def from_sglang_reference(
    candidates: np.ndarray, retrive_next_token: np.ndarray, retrive_next_sibling: np.ndarray
) -> tuple[DraftTree, np.ndarray]:
    """Return the `DraftTree` of SGLang's links, bits filled, and a status [B] int32.

    All three are [B, N] int64. The log-probabilities of its nodes are 0.0: the format has none. Slots that no link
    reaches are unused when they stand at the end. Raises `ValueError` naming the request for links that are no tree of
    the contract (`check_tree`): there a child's slot is larger than its parent's, and siblings' slots rise.

    >>> links = [np.array([row], np.int64) for row in ([9, 5, 7, 6], [1, -1, 3, -1], [-1, 2, -1, -1])]
    >>> tree, status = from_sglang_reference(*links)
    >>> tree.parents.tolist(), tree.depths.tolist(), tree.ancestor_bits[0, :, 0].tolist()
    ([[-1, 0, 0, 2]], [[0, 1, 1, 2]], [1, 3, 5, 13])
    """
    batch, slots = _check_from(candidates, retrive_next_token, retrive_next_sibling)
    tree = empty_tree(batch, slots - 1)
    for b in range(batch):
        child_of, sibling_of = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        reached = [0]
        for slot in reached:  # grows while it is walked over
            child = child_of[slot]
            while child != -1 and slot < child < slots and tree.parents[b, child] == -1:
                tree.parents[b, child], tree.depths[b, child] = slot, tree.depths[b, slot] + 1
                reached.append(child)
                child = sibling_of[child]
            if child != -1:
                where = f"request {b}, slot {slot}"
                raise ValueError(f"retrive_next_token, retrive_next_sibling: {where}: its children end in slot {child}")
        count = max(reached) + 1
        tree.node_count[b], tree.log_probs[b, :count] = count, 0.0
        for field, values in (
            (tree.token_ids, candidates),
            (tree.first_child, retrive_next_token),
            (tree.next_sibling, retrive_next_sibling),
        ):
            field[b, :count] = values[b, :count]
    bits, status = ancestor_bitmask_reference(tree.parents, tree.node_count)
    tree = tree._replace(ancestor_bits=bits)
    _refuse_broken(tree)
    return tree, status


@cuda.jit
def from_sglang_kernel(candidates, next_token, next_sibling, tree, status):
    """Make the tree of one request in each block, but for its bits.

    candidates, next_token, next_sibling (B, N int64).
    tree (DraftTree): all but ancestor_bits is written.
    status (B int32): written, `STATUS_BROKEN_LINK` for a link that leads backwards, outside, or in a circle.

    Launch: grid B, block of any size, no shared memory. A thread follows the children of its slots: in a tree every
    node has one parent, so no two threads write the same place. A thread then counts the steps up to the root.
    """
    b, slots = cuda.blockIdx.x, candidates.shape[1]
    if cuda.threadIdx.x == 0:
        tree.node_count[b], status[b] = 1, STATUS_OK
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        tree.parents[b, slot] = -1
    cuda.syncthreads()
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        child, steps = next_token[b, slot], 0
        while child != -1:
            if child <= slot or child >= slots or steps == slots:
                status[b] = STATUS_BROKEN_LINK
                break
            tree.parents[b, child] = slot
            child = next_sibling[b, child]
            steps += 1
    cuda.syncthreads()
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        depth, above = 0, slot
        while above > 0 and tree.parents[b, above] >= 0:  # parents are smaller slots: this ends
            above = tree.parents[b, above]
            depth += 1
        used = above == 0
        tree.depths[b, slot] = depth if used else 0
        tree.token_ids[b, slot] = candidates[b, slot] if used else 0
        tree.first_child[b, slot] = next_token[b, slot] if used else -1
        tree.next_sibling[b, slot] = next_sibling[b, slot] if used else -1
        tree.log_probs[b, slot] = 0.0 if used else -np.inf
        if used:
            cuda.atomic.max(tree.node_count, b, slot + 1)
    cuda.syncthreads()
    for slot in range(1 + cuda.threadIdx.x, tree.node_count[b], cuda.blockDim.x):
        if tree.parents[b, slot] < 0:
            status[b] = STATUS_BROKEN_LINK  # a hole among the used slots


def from_sglang(
    candidates: Any, retrive_next_token: Any, retrive_next_sibling: Any, *, stream: Any = None
) -> tuple[DraftTree, Any]:
    """Return ``(tree, status)``, what `from_sglang_reference` defines, from `from_sglang_kernel`.

    candidates, retrive_next_token, retrive_next_sibling (B, N int64): N up to 1025.
    stream: where to run.

    NumPy links that are no tree raise `ValueError`. Device links can't be looked at: there the request's status says
    so, and its tree is of no use.
    """
    batch, slots = _check_from(candidates, retrive_next_token, retrive_next_sibling)
    names = ("candidates", "retrive_next_token", "retrive_next_sibling")
    given = dict(zip(names, (candidates, retrive_next_token, retrive_next_sibling), strict=True))
    transfer = Transfer(stream, given)
    if transfer.on_host:
        from_sglang_reference(candidates, retrive_next_token, retrive_next_sibling)
    tree = DraftTree(
        *(
            transfer.output(name, None, (batch, *like.shape[1:]), like.dtype)
            for name, like in empty_tree(1, slots - 1)._asdict().items()
        )
    )
    status = transfer.output("status", None, (batch,), np.int32)
    launch(from_sglang_kernel, batch, 128, transfer.stream)(*map(transfer.input, given.values()), tree, status)
    *fields, links_status = transfer.finish(*tree, status)
    tree = DraftTree(*fields)
    bits, _ = ancestor_bitmask(tree.parents, tree.node_count, stream=stream)
    return tree._replace(ancestor_bits=bits), links_status


def _refuse_broken(tree: DraftTree) -> None:
    try:
        check_tree(tree)
    except ValueError as error:
        raise ValueError(f"retrive_next_token, retrive_next_sibling: {error}") from None


def _check_from(candidates: Any, retrive_next_token: Any, retrive_next_sibling: Any) -> tuple[int, int]:
    check = ArrayCheck()
    batch, slots = check("candidates", candidates, "B N", (np.int64,))
    check("retrive_next_token", retrive_next_token, "B N", (np.int64,))
    check("retrive_next_sibling", retrive_next_sibling, "B N", (np.int64,))
    check_integer("B of candidates", batch, 1, 2**31 - 1)
    check_integer("N of candidates", slots, 1, MAX_BUDGET + 1)
    if isinstance(candidates, np.ndarray) and not 0 <= candidates.min() <= candidates.max() < 2**31:
        raise ValueError(f"candidates: got tokens {candidates.min()} to {candidates.max()}, needs 0 to 2**31 - 1")
    return batch, slots


def parents_from_selection_reference(
    parent_list: np.ndarray, selected_index: np.ndarray, topk: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `parents` [B, N] int32 and a status [B] int32 of the two arrays that SGLang's builder starts from.

    EAGLE drafts `topk` candidates below each of `topk` nodes a step and numbers them all through. `selected_index`
    [B, N - 1] int64 are the numbers of those that became nodes, rising; candidate number c hangs below entry
    ``c // topk`` of `parent_list` [B, M] int64: entry 0 is the root, any other holds the number of a candidate. A node
    whose parent was not selected has parent -1, and the status says `STATUS_BROKEN_LINK`.

    >>> parents, status = parents_from_selection_reference(
    ...     np.array([[-1, 0, 1]], np.int64), np.array([[0, 1, 2, 4]], np.int64), topk=2
    ... )
    >>> parents.tolist(), status.tolist()
    ([[-1, 0, 0, 1, 2]], [0])
    """
    batch, slots = _check_selection(parent_list, selected_index, topk)
    parents = np.full((batch, slots), -1, np.int32)
    status = np.full(batch, STATUS_OK, np.int32)
    for b in range(batch):
        slot_of = {number: slot for slot, number in reversed(list(enumerate(selected_index[b].tolist(), start=1)))}
        for slot, number in enumerate(selected_index[b].tolist(), start=1):
            entry = number // topk
            if entry == 0:
                parents[b, slot] = 0
            elif 0 < entry < parent_list.shape[1]:
                parents[b, slot] = slot_of.get(int(parent_list[b, entry]), -1)
            if not 0 <= parents[b, slot] < slot:
                parents[b, slot], status[b] = -1, STATUS_BROKEN_LINK
    return parents, status


@cuda.jit
def parents_from_selection_kernel(parent_list, selected_index, topk, parents, status):
    """Find the parents of one request's nodes in each block, one node a turn.

    parent_list (B, M int64), selected_index (B, N - 1 int64), topk (int).
    parents (B, N int32), status (B int32): written.

    Launch: grid B, block of any size, no shared memory.
    """
    b, slots = cuda.blockIdx.x, parents.shape[1]
    if cuda.threadIdx.x == 0:
        status[b] = STATUS_OK
    cuda.syncthreads()
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        parent = -1
        if slot > 0:
            entry = selected_index[b, slot - 1] // topk
            if entry == 0:
                parent = 0
            elif 0 < entry < parent_list.shape[1]:
                for other in range(slot - 1, 0, -1):
                    if selected_index[b, other - 1] == parent_list[b, entry]:
                        parent = other
            if parent < 0:
                status[b] = STATUS_BROKEN_LINK
        parents[b, slot] = parent


def parents_from_selection(
    parent_list: Any, selected_index: Any, topk: int, *, out: tuple[Any, Any] | None = None, stream: Any = None
) -> tuple[Any, Any]:
    """Return ``(parents, status)``, what `parents_from_selection_reference` defines, from its kernel.

    parent_list (B, M int64), selected_index (B, N - 1 int64), topk (int).
    out (a pair of B, N int32 and B int32): arrays to write into; stream: where to run.
    """
    batch, slots = _check_selection(parent_list, selected_index, topk)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (parents, status)")
    transfer = Transfer(stream, {"parent_list": parent_list, "selected_index": selected_index})
    given_parents, given_status = (None, None) if out is None else out
    parents = transfer.output("parents", given_parents, (batch, slots), np.int32)
    status = transfer.output("status", given_status, (batch,), np.int32)
    launch(parents_from_selection_kernel, batch, 128, transfer.stream)(
        transfer.input(parent_list), transfer.input(selected_index), topk, parents, status
    )
    return transfer.finish(parents, status)


def _check_selection(parent_list: Any, selected_index: Any, topk: int) -> tuple[int, int]:
    check = ArrayCheck()
    batch, entries = check("parent_list", parent_list, "B M", (np.int64,))
    nodes = check("selected_index", selected_index, "B *", (np.int64,))[1]
    check_integer("B of parent_list", batch, 1, 2**31 - 1)
    check_integer("M of parent_list", entries, 1, 2**31 - 1)
    check_integer("topk", topk, 1, 2**31 - 1)
    return batch, check_integer("nodes of selected_index", nodes, 1, MAX_BUDGET) + 1


_OUTPUTS = ("predicts", "accept_index", "accept_token_num")
_INPUTS = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")


def _either_spelling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function` take its `retrive_` arguments as `retrieve_` too, the spelling of SGLang's newer tests."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **{name.replace("retrieve_", "retrive_"): value for name, value in named.items()})

    return call


@_either_spelling
def verify_tree_greedy_reference(
    predicts: np.ndarray,
    accept_index: np.ndarray,
    accept_token_num: np.ndarray,
    candidates: np.ndarray,
    retrive_index: np.ndarray,
    retrive_next_token: np.ndarray,
    retrive_next_sibling: np.ndarray,
    target_predict: np.ndarray,
) -> np.ndarray:
    """Walk the trees and fill the first three arguments in place, as SGLang's kernel does; return a status.

    `predicts` [B * N or more] int32, `accept_index` [B, S] int32, `accept_token_num` [B] int32: at the flat index of
    each accepted node stands the target's token, which is the next one's or the bonus; the flat indices of the path,
    the root first; the accepted nodes without the root, at most S - 1. Elements that no accepted node belongs to keep
    what they held: SGLang fills the first two with -1 and 0 before.

    The rest are [B, N] int64: tokens, the flat index of each node, both links, and the target's token at each flat
    index. Siblings may be chained in any order, and a child may have a smaller slot than its parent.

    The status [B] int32 is `STATUS_BROKEN_LINK` where a link or a flat index leads outside or the walk wants to look at
    more nodes than there are: it ends there.

    >>> tokens, first, sibling, target = (
    ...     np.array([row], np.int64) for row in ([9, 5, 7, 6], [1, -1, 3, -1], [-1, 2, -1, -1], [7, 0, 6, 8])
    ... )
    >>> predicts, index, count = np.full(4, -1, np.int32), np.full((1, 4), -1, np.int32), np.zeros(1, np.int32)
    >>> verify_tree_greedy_reference(predicts, index, count, tokens, np.arange(4)[None], first, sibling, target)
    array([0], dtype=int32)
    >>> predicts.tolist(), index.tolist(), count.tolist()
    ([7, -1, 6, 8], [[0, 2, 3, -1]], [2])
    """
    given = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    batch, slots, columns = _check_verify((predicts, accept_index, accept_token_num), given)
    for name, array in zip(_OUTPUTS, (predicts, accept_index, accept_token_num), strict=True):
        if not array.flags.writeable:
            raise ValueError(f"{name}: got a read-only array, needs one that can be written")
    targets = target_predict.reshape(-1)
    status = np.full(batch, STATUS_OK, np.int32)
    for b in range(batch):
        path, unseen = [0], slots - 1
        inside = [0 <= int(index) < batch * slots for index in retrive_index[b]]
        if not inside[0]:
            status[b], accept_token_num[b] = STATUS_BROKEN_LINK, 0
            continue
        while len(path) < columns:
            target = targets[retrive_index[b, path[-1]]]
            child = int(retrive_next_token[b, path[-1]])
            while child != -1:
                if not 0 < child < slots or unseen == 0 or (candidates[b, child] == target and not inside[child]):
                    status[b] = STATUS_BROKEN_LINK
                    child = -1
                    break
                unseen -= 1
                if candidates[b, child] == target:
                    break
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            path.append(child)
        flat = retrive_index[b, path]
        predicts[flat] = targets[flat]
        accept_index[b, : len(path)] = flat
        accept_token_num[b] = len(path) - 1
    return status


@cuda.jit
def verify_tree_greedy_kernel(
    candidates, index, next_token, next_sibling, target_predict, predicts, accept_index, accept_token_num, status
):
    """Walk the tree of one request in each thread.

    candidates, index, next_token, next_sibling, target_predict (B, N int64).
    predicts (B * N or more int32), accept_index (B, S int32), accept_token_num, status (B int32): written, the first
    two where an accepted node belongs.

    Launch: enough threads for B, in blocks of any size, no shared memory.
    Needs: S >= 1.
    """
    b = cuda.grid(1)
    batch, slots, columns = candidates.shape[0], candidates.shape[1], accept_index.shape[1]
    if b >= batch:
        return
    flat = index[b, 0]
    if flat < 0 or flat >= batch * slots:
        accept_token_num[b], status[b] = 0, STATUS_BROKEN_LINK
        return
    verdict, accepted, looked_at, node = STATUS_OK, 0, 0, np.int64(0)
    walking = True
    while walking:
        # Where a child matches this is its token, and where none does it is the bonus.
        target = target_predict[flat // slots, flat % slots]
        predicts[flat] = target
        accept_index[b, accepted] = flat
        walking = False
        child = next_token[b, node] if accepted + 1 < columns else np.int64(-1)
        while child != -1:
            # Each turn looks at one more node, and the whole tree has slots - 1 below its root: a circle ends too.
            if child < 1 or child >= slots or looked_at == slots - 1:
                verdict = STATUS_BROKEN_LINK
                break
            looked_at += 1
            if candidates[b, child] == target:
                if index[b, child] < 0 or index[b, child] >= batch * slots:
                    verdict = STATUS_BROKEN_LINK
                else:
                    node, flat, walking = child, index[b, child], True
                    accepted += 1
                break
            child = next_sibling[b, child]
    accept_token_num[b] = accepted
    status[b] = verdict


@_either_spelling
def verify_tree_greedy(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
    *,
    status: Any = None,
    stream: Any = None,
) -> None:
    """Do what `verify_tree_greedy_reference` defines, with `verify_tree_greedy_kernel`: SGLang's call, its arrays.

    predicts (B * N or more int32), accept_index (B, S int32), accept_token_num (B int32): filled in place.
    candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict (B, N int64).
    status (B int32): for the status, if it is wanted; stream: where to run, for torch tensors its current stream.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout. Broken links are no error but a bit in `status`.
    """
    given = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    outputs = dict(zip(_OUTPUTS, (predicts, accept_index, accept_token_num), strict=True))
    batch, _, _ = _check_verify(tuple(outputs.values()), given)
    transfer = Transfer(stream, {**outputs, **dict(zip(_INPUTS, given, strict=True))})
    if status is not None:
        ArrayCheck()("status", status, str(batch), (np.int32,))
        outputs["status"] = status
    results = [transfer.inout(name, array) for name, array in outputs.items()]
    threads = block_threads(32, simulator=4)
    launched = results if status is not None else [*results, transfer.scratch(batch, np.int32)]
    verify_tree_greedy_kernel[-(-batch // threads), threads, transfer.stream](*map(transfer.input, given), *launched)
    transfer.finish(*results)


def _check_verify(outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[int, int, int]:
    """Return B, N and S."""
    check = ArrayCheck()
    for name, array in zip(_INPUTS, inputs, strict=True):
        batch, slots = check(name, array, "B N", (np.int64,))
    check_integer("B of candidates", batch, 1, 2**31 - 1)
    check_integer("N of candidates", slots, 1, 2**31 - 1)
    predicts, accept_index, accept_token_num = outputs
    places = check("predicts", predicts, "*", (np.int32,))[0]
    if places < batch * slots:
        raise ValueError(f"predicts: got {places} elements, needs B * N = {batch * slots}")
    columns = check("accept_index", accept_index, "B *", (np.int32,))[1]
    check("accept_token_num", accept_token_num, "B", (np.int32,))
    return batch, slots, check_integer("columns of accept_index", columns, 1, 2**31 - 1)
