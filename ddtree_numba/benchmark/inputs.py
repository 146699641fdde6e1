"""Random inputs of the sizes that the table names, made on the host."""

from __future__ import annotations

import functools
import math
import statistics
from typing import NamedTuple

import numpy as np

from ddtree_numba.bfloat16 import to_bfloat16
from ddtree_numba.draft_tree import DraftTree, random_tree

__all__ = ["Candidates", "PagedRows", "normal_bfloat16", "random_candidates", "random_rows"]


_CHUNK = 1 << 18


@functools.cache
def _normal_quantiles() -> np.ndarray:
    """65536 equally probable values of the normal distribution."""
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)], np.float32)


def normal_bfloat16(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """Return normal numbers times `scale` as bfloat16 bits, uint16; a table makes hundreds of millions in a second."""
    table = to_bfloat16(scale * _normal_quantiles())
    places = rng.integers(0, len(table), math.prod(shape), dtype=np.uint16)
    numbers = np.empty(len(places), np.uint16)
    for first in range(0, len(places), _CHUNK):  # NumPy widens the indices, which then stay in the cache
        part = slice(first, first + _CHUNK)
        np.take(table, places[part], out=numbers[part], mode="clip")
    return numbers.reshape(shape)


class Candidates(NamedTuple):
    """What stage 1 hands to stage 2."""

    log_probs: np.ndarray
    """[B, L, K] float32, descending."""
    token_ids: np.ndarray
    """[B, L, K] int32, distinct in a row."""
    root_tokens: np.ndarray
    """[B] int32."""


def random_candidates(rng: np.random.Generator, batch: int, depths: int, k: int) -> Candidates:
    """Return candidates with exponentially distributed log-probabilities."""
    log_probs = -np.sort(rng.exponential(2.0, (batch, depths, k))).astype(np.float32)
    token_ids = np.argsort(rng.random((batch, depths, 2 * k)), axis=-1)[..., :k].astype(np.int32)
    return Candidates(log_probs, token_ids, rng.integers(0, 1000, batch).astype(np.int32))


class PagedRows(NamedTuple):
    """The arrays of `tree_attention`, in its order."""

    q: np.ndarray
    kv_pool: np.ndarray
    block_table: np.ndarray
    prefix_lengths: np.ndarray
    ancestor_bits: np.ndarray
    node_count: np.ndarray


def random_rows(
    rng: np.random.Generator, batch: int, nodes: int, heads: int, prefix: int, width: int, page_size: int
) -> PagedRows:
    """Return queries and a cache of bfloat16 rows in pages in random order, and full random trees of `nodes` nodes."""
    pages = -(-(prefix + nodes) // page_size)
    tree: DraftTree = random_tree(rng, batch, nodes - 1, node_counts=[nodes] * batch)
    return PagedRows(
        normal_bfloat16(rng, (batch, nodes, heads, width)),
        normal_bfloat16(rng, (batch * pages, page_size, width)),
        rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32),
        np.full(batch, prefix, np.int32),
        tree.ancestor_bits,
        tree.node_count,
    )
