"""What the bridges share: how their kernels are started, how trees are checked, and copying words between widths."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck
from ddtree_numba.backend import block_threads, cuda
from ddtree_numba.draft_tree import DraftTree, check_tree, check_tree_arrays

__all__ = ["check_bridged_tree", "copy_words_kernel", "for_each", "launch"]

_THREADS = 256
_MOST_BLOCKS = 4096  # threads take further elements in turns beyond that


def launch(kernel: Any, blocks: Any, threads: int, stream: Any) -> Any:
    """Return `kernel` set to `blocks` blocks of `threads` (a GPU's; fewer in the simulator) on `stream`."""
    return kernel[blocks, block_threads(threads, simulator=4), stream]


def for_each(kernel: Any, elements: int, stream: Any, batch: int | None = None) -> Any:
    """Return `kernel`, whose threads take elements in turns, set to enough threads for `elements`.

    With `batch` the grid has a second axis, one line of blocks for each request's `elements`.
    """
    threads = block_threads(_THREADS, simulator=4)
    blocks = max(1, min(-(-elements // threads), block_threads(_MOST_BLOCKS, simulator=2)))
    return kernel[blocks if batch is None else (blocks, batch), threads, stream]


def check_bridged_tree(tree: Any, check: ArrayCheck | None = None) -> tuple[int, int]:
    """Return (B, N) of a tree that goes into another format; raise naming the field that is wrong.

    The contents of NumPy trees are looked at: one that `check_tree` refuses is a `ValueError`. Those of device trees
    are not: nothing is copied to the host.
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree: got {type(tree).__name__}, needs a DraftTree")
    shape = check_tree_arrays(tree, check)
    if all(isinstance(field, np.ndarray) for field in tree):
        try:
            check_tree(tree)
        except ValueError as error:
            raise ValueError(f"tree: {error}") from None
    return shape


@cuda.jit
def copy_words_kernel(source, limit, target):
    """Copy rows of words into rows of another number or width of words, one target word a turn.

    source (B, N, S, unsigned): words beyond S count as 0.
    limit (uint32): the bits that a target word can hold.
    target (B, N, T, unsigned): written.

    Launch: any grid and block, no shared memory.
    """
    slots, words = target.shape[1], target.shape[2]
    for index in range(cuda.grid(1), target.shape[0] * slots * words, cuda.gridsize(1)):
        row, word = index // words, index % words
        b, node = row // slots, row % slots
        target[b, node, word] = np.uint32(source[b, node, word]) & limit if word < source.shape[2] else np.uint32(0)
