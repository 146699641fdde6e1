"""A `DraftTree` to SGLang's index arrays and mask, and from its links back."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BROKEN_LINK, STATUS_OK, DraftTree, check_tree, empty_tree
from ddtree_numba.interop.launching import check_bridged_tree, for_each, launch
from ddtree_numba.interop.ragged_mask import flat_mask, flat_mask_reference
from ddtree_numba.interop.sglang.packed_rows import pack_rows, pack_rows_reference, row_dtype
from ddtree_numba.interop.visibility import bool_mask, bool_mask_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask, ancestor_bitmask_reference

__all__ = [
    "SGLangTree",
    "TreeMaskMode",
    "from_sglang",
    "from_sglang_kernel",
    "from_sglang_reference",
    "to_sglang",
    "to_sglang_kernel",
    "to_sglang_reference",
]


_MOST_TOKEN = 2**31 - 1  # tokens are int64 there, int32 here


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
        row_dtype(slots)
    return batch, slots


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
    status (B int32): written, `STATUS_BROKEN_LINK` for all that `from_sglang_reference` refuses.

    Launch: grid B, block of any size, no shared memory. A thread claims the children of its slots. Where links are no
    tree two threads claim the same one: of atomic maxima one claim stays, and the loser finds that out when it looks
    again behind the barrier. What counts is who is reached from the root: links of other slots may be anything.
    """
    b, slots = cuda.blockIdx.x, candidates.shape[1]
    if cuda.threadIdx.x == 0:
        tree.node_count[b] = 1
        status[b] = STATUS_OK if next_sibling[b, 0] == -1 else STATUS_BROKEN_LINK
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        tree.parents[b, slot] = -1
    cuda.syncthreads()  # nothing is claimed
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        previous, child = np.int64(slot), next_token[b, slot]
        while previous < child < slots:  # siblings' slots rise: this ends
            cuda.atomic.max(tree.parents, (b, child), slot)
            previous, child = child, next_sibling[b, child]
    cuda.syncthreads()  # all claims are made
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        depth, above = 0, slot
        while above > 0 and tree.parents[b, above] >= 0:  # parents are smaller slots: this ends
            above = tree.parents[b, above]
            depth += 1
        used = above == 0
        tree.depths[b, slot] = depth if used else 0
        fits = 0 <= candidates[b, slot] <= _MOST_TOKEN
        tree.token_ids[b, slot] = candidates[b, slot] if used and fits else 0
        tree.first_child[b, slot] = next_token[b, slot] if used and 0 < next_token[b, slot] < slots else -1
        tree.next_sibling[b, slot] = next_sibling[b, slot] if used and 0 < next_sibling[b, slot] < slots else -1
        tree.log_probs[b, slot] = 0.0 if used else -np.inf
        if used:
            cuda.atomic.max(tree.node_count, b, slot + 1)
        if not fits:
            status[b] = STATUS_BROKEN_LINK  # all that write from here on write this
    cuda.syncthreads()  # all know who is used
    for slot in range(cuda.threadIdx.x, slots, cuda.blockDim.x):
        if slot > 0 and tree.depths[b, slot] == 0:
            if slot < tree.node_count[b]:
                status[b] = STATUS_BROKEN_LINK  # a hole among the used slots
            continue
        previous, child = np.int64(slot), next_token[b, slot]
        while previous < child < slots and tree.parents[b, child] == slot:
            previous, child = child, next_sibling[b, child]
        if child != -1:
            status[b] = STATUS_BROKEN_LINK  # it leads backwards, outside or to another's child
        previous, other = np.int64(slot), next_sibling[b, slot]
        while previous < other < slots:
            if candidates[b, other] == candidates[b, slot]:
                status[b] = STATUS_BROKEN_LINK
            previous, other = other, next_sibling[b, other]
    cuda.syncthreads()  # all have looked at the claims
    for slot in range(1 + cuda.threadIdx.x, slots, cuda.blockDim.x):
        if tree.depths[b, slot] == 0:
            tree.parents[b, slot] = -1  # claimed by a slot that is not used either


def from_sglang(
    candidates: Any, retrive_next_token: Any, retrive_next_sibling: Any, *, stream: Any = None
) -> tuple[DraftTree, Any]:
    """Return ``(tree, status)``, what `from_sglang_reference` defines, from `from_sglang_kernel`.

    candidates, retrive_next_token, retrive_next_sibling (B, N int64): N up to 1025.
    stream: where to run.

    NumPy links that are no tree raise `ValueError`, and so do tokens outside 0 to 2**31 - 1. Device arrays can't be
    looked at: there the request's status says `STATUS_BROKEN_LINK`, and its tree is of no use.
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
