"""vLLM: the `qq_bias` of its tree attention.

Facts: `vllm/v1/attention/backends/tree_attn.py` and the kernel behind it, `unified_attention` (Apache-2.0). The bias is
float32 [N, N], query rows and query columns, added to the scores of the keys that are the tree's own: 0 where a node
sees another, -inf where not. The prefix needs none. The kernel takes one matrix for a whole call; trees that differ,
as DDTree's do, need one a request: ``qq_bias(tree)[b]`` is that of request b, contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck
from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.interop.launching import check_bridged_tree
from ddtree_numba.interop.visibility import (
    additive_mask,
    additive_mask_reference,
    bits_from_mask,
    bits_from_mask_reference,
)

__all__ = ["bits_from_qq_bias", "bits_from_qq_bias_reference", "qq_bias", "qq_bias_reference"]


def qq_bias_reference(tree: DraftTree) -> np.ndarray:
    """Return the biases [B, N, N] float32 of `tree` (bits filled). Rows of unused slots are -inf all along.

    >>> from ddtree_numba.draft_tree import random_tree
    >>> tree = random_tree(np.random.default_rng(0), batch=1, budget=2, node_counts=[3], max_depth=1)
    >>> qq_bias_reference(tree)[0].tolist()
    [[0.0, -inf, -inf], [0.0, 0.0, -inf], [0.0, -inf, 0.0]]
    """
    check_bridged_tree(tree)
    return additive_mask_reference(tree.ancestor_bits)


def qq_bias(tree: DraftTree, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `qq_bias_reference` defines; `out` (B, N, N float32) and `stream` as everywhere."""
    check_bridged_tree(tree)
    if out is not None:
        ArrayCheck()("out (qq_bias)", out, "* * *", (np.float32,))
    return additive_mask(tree.ancestor_bits, out=out, stream=stream)


def bits_from_qq_bias_reference(bias: np.ndarray) -> np.ndarray:
    """Return `ancestor_bits` [B, N, W] uint32 of biases [B, N, N] float32; `ValueError` for other values than both."""
    ArrayCheck()("bias", bias, "B N N", (np.float32,))
    return bits_from_mask_reference(bias)


def bits_from_qq_bias(bias: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Return what `bits_from_qq_bias_reference` defines; `out` (B, N, W uint32) and `stream` as everywhere."""
    ArrayCheck()("bias", bias, "B N N", (np.float32,))
    return bits_from_mask(bias, out=out, stream=stream)
