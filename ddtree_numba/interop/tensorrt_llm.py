"""TensorRT-LLM: the arrays of its speculative-decoding attention and of its dynamic trees, to and from ours.

Facts: `tensorrt_llm/_torch/speculative/` (`spec_tree_manager.py`, `dynamic_tree_ops.py`) and the attention plugins of
`NVIDIA/TensorRT-LLM` (Apache-2.0). All arrays are int32.

- `spec_decoding_packed_mask` [B, N, stride]: a row's visible slots, least significant bit first; stride at least
  ceil(N / 32), more where buffers are made for the longest tree.
- `spec_decoding_position_offsets` [B, N]: depths; the prefix length is added there.
- `spec_decoding_generation_lengths` [B]: used slots, the root counted.
- `retrieve_index` [B, N]: the slot itself, local to the request (SGLang's is global); `retrieve_next_token` and
  `retrieve_next_sibling` [B, N]: first child and next sibling, -1 for none.

Four of the six are our own arrays, and the mask is where the stride is ours: nothing is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.backend import cuda
from ddtree_numba.device_library import reinterpret
from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree, mask_words
from ddtree_numba.interop.launching import check_bridged_tree, copy_words_kernel, for_each

__all__ = [
    "TensorRTLLMTree",
    "bits_from_packed_rows",
    "bits_from_packed_rows_reference",
    "local_index_kernel",
    "to_tensorrt_llm",
    "to_tensorrt_llm_reference",
]


class TensorRTLLMTree(NamedTuple):
    """A batch of trees as TensorRT-LLM takes them."""

    packed_mask: Any
    """[B, N, stride] int32."""
    position_offsets: Any
    """[B, N] int32."""
    generation_lengths: Any
    """[B] int32."""
    retrieve_index: Any
    """[B, N] int32."""
    retrieve_next_token: Any
    """[B, N] int32."""
    retrieve_next_sibling: Any
    """[B, N] int32."""


def to_tensorrt_llm_reference(tree: DraftTree, stride: int | None = None) -> TensorRTLLMTree:
    """Return `tree` (bits filled) as TensorRT-LLM's arrays, mask rows of `stride` words, by default ceil(N / 32).

    >>> from ddtree_numba.draft_tree import random_tree
    >>> tree = random_tree(np.random.default_rng(0), batch=1, budget=2, node_counts=[3], max_depth=1)
    >>> given = to_tensorrt_llm_reference(tree, stride=2)
    >>> given.packed_mask.tolist(), given.position_offsets.tolist(), given.retrieve_index.tolist()
    ([[[1, 0], [3, 0], [5, 0]]], [[0, 1, 1]], [[0, 1, 2]])
    """
    batch, slots, stride = _check_to(tree, stride)
    mask = np.zeros((batch, slots, stride), np.int32)
    mask[:, :, : mask_words(slots)] = tree.ancestor_bits.view(np.int32)
    index = np.broadcast_to(np.arange(slots, dtype=np.int32), (batch, slots)).copy()
    return TensorRTLLMTree(mask, tree.depths, tree.node_count, index, tree.first_child, tree.next_sibling)


@cuda.jit
def local_index_kernel(index):
    """Write each slot's own number. `index` (B, N int32). Launch: any grid and block, no shared memory."""
    slots = index.shape[1]
    for flat in range(cuda.grid(1), index.shape[0] * slots, cuda.gridsize(1)):
        index[flat // slots, flat % slots] = flat % slots


def to_tensorrt_llm(
    tree: DraftTree, stride: int | None = None, *, out: tuple[Any, Any] | None = None, stream: Any = None
) -> TensorRTLLMTree:
    """Return the `TensorRTLLMTree` that `to_tensorrt_llm_reference` defines.

    tree (DraftTree, bits filled): its own arrays are handed on, and its bits too, unless `stride` or `out` is given.
    stride (int): words of a mask row, ceil(N / 32) or more.
    out (a pair of B, N, stride int32 and B, N int32): mask and retrieve_index to write into; stream: where to run.
    """
    batch, slots, words = _check_to(tree, stride)
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a tuple (packed_mask, retrieve_index)")
    transfer = Transfer(stream, {f"tree.{name}": array for name, array in tree._asdict().items()})
    given_mask, given_index = (None, None) if out is None else out
    index = transfer.output("retrieve_index", given_index, (batch, slots), np.int32)
    for_each(local_index_kernel, batch * slots, transfer.stream)(index)
    results = [index]
    if stride is not None or out is not None:
        results.append(transfer.output("packed_mask", given_mask, (batch, slots, words), np.int32))
        for_each(copy_words_kernel, batch * slots * words, transfer.stream)(
            transfer.input(tree.ancestor_bits), np.uint32(0xFFFFFFFF), reinterpret(results[1], np.uint32)
        )
    index, *copied = transfer.finish(*results)
    mask = copied[0] if copied else reinterpret(tree.ancestor_bits, np.int32)
    return TensorRTLLMTree(mask, tree.depths, tree.node_count, index, tree.first_child, tree.next_sibling)


def _check_to(tree: Any, stride: int | None) -> tuple[int, int, int]:
    batch, slots = check_bridged_tree(tree)
    check_integer("B of tree", batch, 1, 2**31 - 1)
    words = mask_words(slots)
    return batch, slots, words if stride is None else check_integer("stride", stride, words, 2**31 - 1)


def bits_from_packed_rows_reference(packed_mask: np.ndarray, slots: int) -> np.ndarray:
    """Return `ancestor_bits` [B, N, W] uint32 of rows [B, N, stride] int32; N = `slots`.

    With `generation_lengths` as `node_count`, `links_from_bits` makes a tree's links of them.

    >>> bits_from_packed_rows_reference(np.array([[[1, 7], [3, 7]]], np.int32), 2).tolist()
    [[[1], [3]]]
    """
    _check_rows(packed_mask, slots)
    return packed_mask[:, :, : mask_words(slots)].view(np.uint32).copy()


def bits_from_packed_rows(packed_mask: Any, slots: int, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `bits_from_packed_rows_reference` defines, from `copy_words_kernel`.

    packed_mask (B, N, stride int32); slots (int): N; out (B, N, W uint32): array to write into; stream: where to run.
    """
    batch = _check_rows(packed_mask, slots)
    transfer = Transfer(stream, {"packed_mask": packed_mask})
    bits = transfer.output("ancestor_bits", out, (batch, slots, mask_words(slots)), np.uint32)
    for_each(copy_words_kernel, batch * slots * mask_words(slots), transfer.stream)(
        reinterpret(transfer.input(packed_mask), np.uint32), np.uint32(0xFFFFFFFF), bits
    )
    return transfer.finish(bits)[0]


def _check_rows(packed_mask: Any, slots: int) -> int:
    check_integer("slots", slots, 1, MAX_BUDGET + 1)
    batch, _, stride = ArrayCheck(N=slots)("packed_mask", packed_mask, "B N stride", (np.int32,))
    check_integer("B of packed_mask", batch, 1, 2**31 - 1)
    if stride < mask_words(slots):
        raise ValueError(f"packed_mask: got rows of {stride} words, needs {mask_words(slots)} for {slots} slots")
    return batch
