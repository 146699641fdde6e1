"""FlashInfer: the packed custom mask of its batch prefill wrappers.

Facts: FlashInfer's documentation, "Mask Layout (2D Ragged Tensor)" in `docs/tutorials/kv_layout.rst`, and
`segment_packbits` (Apache-2.0). A request's mask is [qo_len, kv_len], row by row, as bits, least significant first, and
begins at a whole byte; `mask_indptr` [B + 1] int32 has the byte offsets that go with the packed mask. Here a request
has qo_len = N queries and kv_len = P + N keys: with ``qo_indptr = N * arange(B + 1)``, pages for P + N keys, and the
two arrays below as `packed_custom_mask` and its offsets, its attention is stage 4's of ordinary heads. FlashInfer's
`lse` is in base 2, ours natural.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.interop.launching import check_bridged_tree
from ddtree_numba.interop.ragged_mask import packed_mask, packed_mask_reference

__all__ = ["packed_custom_mask", "packed_custom_mask_reference"]


def packed_custom_mask_reference(tree: DraftTree, prefix_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(packed_custom_mask, mask_indptr)``, uint8 and int32 [B + 1], of `tree` behind its prefixes [B] int32.

    `ragged_mask.bits_from_packed_mask` leads back. Rows of unused slots see the prefix alone.

    >>> from ddtree_numba.draft_tree import random_tree
    >>> tree = random_tree(np.random.default_rng(0), batch=1, budget=2, node_counts=[3], max_depth=1)
    >>> mask, indptr = packed_custom_mask_reference(tree, np.array([1], np.int32))
    >>> [f"{byte:08b}" for byte in mask], indptr.tolist()
    (['01110011', '00001011'], [0, 2])
    """
    check_bridged_tree(tree)
    return packed_mask_reference(tree.ancestor_bits, prefix_lengths)


def packed_custom_mask(
    tree: DraftTree,
    prefix_lengths: Any,
    prefix_sum: int | None = None,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Return what `packed_custom_mask_reference` defines; see `ragged_mask.packed_mask` for the arguments."""
    check_bridged_tree(tree)
    return packed_mask(tree.ancestor_bits, prefix_lengths, prefix_sum, out=out, stream=stream)
