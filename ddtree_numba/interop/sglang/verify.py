"""`verify_tree_greedy`: stage 5's walk with SGLang's argument list, its index arrays and its outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.draft_tree import STATUS_BROKEN_LINK, STATUS_OK

__all__ = ["INPUTS", "OUTPUTS", "verify_tree_greedy", "verify_tree_greedy_kernel", "verify_tree_greedy_reference"]

OUTPUTS = ("predicts", "accept_index", "accept_token_num")
"""The arguments that are filled in place, in their order."""
INPUTS = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
"""The arguments in their order, behind `OUTPUTS`."""


def _either_spelling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function` take its `retrive_` arguments as `retrieve_` too, the spelling of SGLang's newer tests."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        spelled: dict[str, Any] = {}
        for name, value in named.items():
            ours = name.replace("retrieve_", "retrive_")
            if ours in spelled:
                newer = ours.replace("retrive_", "retrieve_")
                raise TypeError(f"{ours}: got {ours}= and {newer}= at once, needs one of them")
            spelled[ours] = value
        return function(*args, **spelled)

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
    what they held: SGLang fills them with -1, -1 and 0 before.

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
    for name, array in zip(OUTPUTS, (predicts, accept_index, accept_token_num), strict=True):
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
    outputs = dict(zip(OUTPUTS, (predicts, accept_index, accept_token_num), strict=True))
    batch, _, _ = _check_verify(tuple(outputs.values()), given)
    transfer = Transfer(stream, {**outputs, **dict(zip(INPUTS, given, strict=True))})
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
    for name, array in zip(INPUTS, inputs, strict=True):
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
