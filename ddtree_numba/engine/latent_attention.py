"""Stage 4 for one request in float32 NumPy: what `tree_attention_reference` defines, fast enough to decode with.

The reference widens everything to float64 and looks every row up by itself; here the pages of the prefix are gathered
once per layer and BLAS does the rest. The tests hold one against the other.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.engine.kv_cache import PagedKVCache

__all__ = ["LatentAttention", "visible_slots"]


class LatentAttention:
    """The attention of one forward pass: made once for its tree, called for every layer."""

    def __init__(self, cache: PagedKVCache, ancestor_bits: np.ndarray, scale: float, latent_width: int) -> None:
        """Take the cache, whose rows from the prefix on are the N nodes', and their `ancestor_bits` [1, N, W]."""
        nodes, prefix = ancestor_bits.shape[1], cache.prefix
        self._cache, self._scale, self._latent_width = cache, np.float32(scale), latent_width
        self._prefix, self._rows = prefix, prefix + nodes
        self._pages = cache.block_table[0, : -(-self._rows // cache.page_size)]
        hidden = ~visible_slots(ancestor_bits[0])
        self._bias = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None] if hidden.any() else None

    def __call__(self, layer: int, queries: np.ndarray) -> np.ndarray:
        """Return the attended latents [N, H, D_c] of `queries` [N, H, D_c + D_r]. Every node sees itself at least."""
        nodes, heads, width = queries.shape
        keys = self._cache.pool[layer].take(self._pages, axis=0).reshape(-1, width)[: self._rows]
        weights = (queries * self._scale).reshape(-1, width) @ keys.T
        by_node = weights.reshape(nodes, heads, -1)
        if self._bias is not None:
            by_node[:, :, self._prefix :] += self._bias
        weights -= weights.max(axis=1, keepdims=True)
        np.exp(weights, out=weights)
        out = weights @ keys[:, : self._latent_width]
        out /= weights.sum(axis=1, keepdims=True)
        return out.reshape(nodes, heads, -1)


def visible_slots(ancestor_bits: np.ndarray) -> np.ndarray:
    """Return booleans [N, N] of the packed rows [N, W]: whether node i sees slot j.

    >>> visible_slots(np.array([[0b01], [0b11]], np.uint32)).tolist()
    [[True, False], [True, True]]
    """
    little_endian = np.ascontiguousarray(ancestor_bits, "<u4").view(np.uint8)
    return np.unpackbits(little_endian, axis=1, count=len(ancestor_bits), bitorder="little").astype(bool)
