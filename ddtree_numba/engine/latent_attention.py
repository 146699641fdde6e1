"""Stage 4 for one request in float32 on the CPU: what `tree_attention_reference` defines, fast enough to decode with.

The reference widens everything to float64. Here the rows are gathered once per layer, and the two products go through
`multiply_panels`: a node's output depends on the rows that it sees and on nothing else, to the last bit. A row that it
does not see has weight 0, and adding 0 changes no sum. The tests hold one against the other.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.engine.kv_cache import PagedKVCache
from ddtree_numba.engine.packed_matrix import LANES, multiply_panels, padded

__all__ = ["LatentAttention", "visible_slots"]


class LatentAttention:
    """The attention of one forward pass: made once for its tree, called for every layer."""

    def __init__(self, cache: PagedKVCache, ancestor_bits: np.ndarray, scale: float, latent_width: int) -> None:
        """Take the cache, whose rows from the prefix on are the N nodes', and their `ancestor_bits` [1, N, W]."""
        self._cache, self._scale, self._latent_width = cache, np.float32(scale), latent_width
        self._prefix, nodes = cache.prefix, ancestor_bits.shape[1]
        self._rows = cache.pool_rows(0, self._prefix + nodes)
        hidden = ~visible_slots(ancestor_bits[0]).T
        self._bias = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, :, None] if hidden.any() else None
        # A row of the cache, and behind it a 1, whose weighted sum is the sum of the weights.
        width = cache.pool.shape[-1]
        self._row_and_one = np.zeros((len(self._rows), padded(width + 1)), np.float32)
        self._row_and_one[:, width] = 1

    def __call__(self, layer: int, queries: np.ndarray) -> np.ndarray:
        """Return the attended latents [N, H, D_c] of `queries` [N, H, D_c + D_r]. Every node sees itself at least."""
        nodes, heads, width = queries.shape
        keys = self._row_and_one
        keys[:, :width] = self._cache.layer(layer)[self._rows]
        scores = multiply_panels(_query_panels(queries, self._scale), keys[:, :width])[:, : nodes * heads]
        if self._bias is not None:
            in_tree = scores[self._prefix :].reshape(nodes, nodes, heads)  # splitting an axis: still a view
            in_tree += self._bias
        scores -= scores.max(axis=0)
        np.exp(scores, out=scores)
        out = multiply_panels(keys.reshape(len(keys), -1, LANES).swapaxes(0, 1), scores.T)
        out /= out[:, width, None]
        return out[:, : self._latent_width].reshape(nodes, heads, -1)


def _query_panels(queries: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return scaled queries as panels: [N * H / LANES, width, LANES], the last ones padded with zeros."""
    flat = queries.reshape(-1, queries.shape[-1])
    panels = np.zeros((padded(len(flat)), flat.shape[1]), np.float32)
    np.multiply(flat, scale, out=panels[: len(flat)])
    return np.ascontiguousarray(panels.reshape(-1, LANES, flat.shape[1]).swapaxes(1, 2))


def visible_slots(ancestor_bits: np.ndarray) -> np.ndarray:
    """Return booleans [N, N] of the packed rows [N, W]: whether node i sees slot j.

    >>> visible_slots(np.array([[0b01], [0b11]], np.uint32)).tolist()
    [[True, False], [True, True]]
    """
    little_endian = np.ascontiguousarray(ancestor_bits, "<u4").view(np.uint8)
    return np.unpackbits(little_endian, axis=1, count=len(ancestor_bits), bitorder="little").astype(bool)
