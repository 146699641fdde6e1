"""What SGLang's builder starts from, `parent_list` and `selected_index`, as parents."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import cuda
from ddtree_numba.draft_tree import MAX_BUDGET, STATUS_BROKEN_LINK, STATUS_OK
from ddtree_numba.interop.launching import launch

__all__ = ["parents_from_selection", "parents_from_selection_kernel", "parents_from_selection_reference"]


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
