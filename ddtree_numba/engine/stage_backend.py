"""What the decoding loop needs of the stages, from NumPy or from the kernels (GPU or simulator).

Both have the same three calls: `draft` (stages 1-3), `attention` (stage 4) and `commit` (stages 5-6).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ddtree_numba.backend import BACKEND, cuda
from ddtree_numba.decode_step import DecodeStep, DecodeStepReference
from ddtree_numba.draft_tree import DraftTree, mask_words
from ddtree_numba.engine.kv_cache import PagedKVCache
from ddtree_numba.engine.latent_attention import LatentAttention
from ddtree_numba.engine.target_model import Attention
from ddtree_numba.stages.accept_walk import AcceptedPath
from ddtree_numba.stages.tree_attention import tree_attention

__all__ = ["KernelStages", "NumpyStages", "Stages", "chain_bits"]


class Stages(Protocol):
    """One sequence's stages: every array has a batch axis of 1."""

    name: str
    """What runs them: "numpy", "simulator" or "gpu"."""

    def draft(self, logits: np.ndarray, root_token: int, prefix: int) -> tuple[DraftTree, np.ndarray]:
        """Return the round's tree (bits filled) and its positions [1, N] from the drafter's `logits` [1, L, V]."""

    def attention(self, cache: PagedKVCache, ancestor_bits: np.ndarray, scale: float, width: int) -> Attention:
        """Return the attention of one pass: node i sees the prefix and the rows in its `ancestor_bits` [1, N, W]."""

    def commit(self, target_tokens: np.ndarray, cache: PagedKVCache) -> AcceptedPath:
        """Walk the round's tree with `target_tokens` [1, N]; move accepted KV rows behind the prefix, advance it."""


class NumpyStages:
    """The stages' references; attention in float32, see `LatentAttention`."""

    name = "numpy"

    def __init__(self, budget: int, k: int | None = None) -> None:
        """Take the tree's node `budget` and K candidates a depth."""
        self._step = DecodeStepReference(budget, k)

    def draft(self, logits: np.ndarray, root_token: int, prefix: int) -> tuple[DraftTree, np.ndarray]:
        """See `Stages.draft`."""
        root_tokens, prefixes = np.array([root_token], np.int32), np.array([prefix], np.int32)
        return self._step.draft(np.ascontiguousarray(logits), root_tokens, prefixes)

    def attention(self, cache: PagedKVCache, ancestor_bits: np.ndarray, scale: float, width: int) -> Attention:
        """See `Stages.attention`."""
        return LatentAttention(cache, ancestor_bits, scale, width)

    def commit(self, target_tokens: np.ndarray, cache: PagedKVCache) -> AcceptedPath:
        """See `Stages.commit`."""
        path = self._step.commit(target_tokens, cache.pool, cache.block_table, cache.prefix_lengths)
        _require_whole(path.status, self._step.tree_status, self._step.commit_status)
        return path


class KernelStages:
    """The stages' kernels, on the GPU or in the simulator; the KV cache stays on the host and travels."""

    name = BACKEND

    def __init__(self, draft_length: int, vocab: int, budget: int, k: int | None = None) -> None:
        """Take L, V, the tree's node `budget` and K candidates a depth."""
        self._step = DecodeStep(1, draft_length, vocab, budget, k)

    def draft(self, logits: np.ndarray, root_token: int, prefix: int) -> tuple[DraftTree, np.ndarray]:
        """See `Stages.draft`."""
        arguments = np.ascontiguousarray(logits), np.array([root_token], np.int32), np.array([prefix], np.int32)
        tree, positions = self._step.draft(*(cuda.to_device(array) for array in arguments))
        _require_whole(self._step.tree_status.copy_to_host())
        return DraftTree(*(field.copy_to_host() for field in tree)), positions.copy_to_host()

    def attention(self, cache: PagedKVCache, ancestor_bits: np.ndarray, scale: float, width: int) -> Attention:
        """See `Stages.attention`."""
        count = np.array([ancestor_bits.shape[1]], np.int32)
        bits = np.ascontiguousarray(ancestor_bits)

        def attend(layer: int, queries: np.ndarray) -> np.ndarray:
            pool, table, prefixes = cache.pool[layer], cache.block_table, cache.prefix_lengths
            queries = np.ascontiguousarray(queries[None])
            out, _ = tree_attention(queries, pool, table, prefixes, bits, count, scale, latent_width=width)
            return np.asarray(out[0])

        return attend

    def commit(self, target_tokens: np.ndarray, cache: PagedKVCache) -> AcceptedPath:
        """See `Stages.commit`."""
        pool, prefixes = cuda.to_device(cache.pool), cuda.to_device(cache.prefix_lengths)
        tokens, table = cuda.to_device(np.ascontiguousarray(target_tokens)), cuda.to_device(cache.block_table)
        path = AcceptedPath(*(field.copy_to_host() for field in self._step.commit(tokens, pool, table, prefixes)))
        _require_whole(path.status, self._step.commit_status.copy_to_host())
        pool.copy_to_host(cache.pool)
        prefixes.copy_to_host(cache.prefix_lengths)
        return path


def _require_whole(*statuses: np.ndarray) -> None:
    """The engine's own trees and pages are whole: a status here is a fault of the program."""
    for status in statuses:
        if np.any(status):
            raise RuntimeError(f"a stage reports status {status.tolist()} on the engine's own arrays")


def chain_bits(count: int) -> np.ndarray:
    """Return the visibility rows [1, N, W] of `count` tokens in a row: each sees itself and all before it.

    >>> [f"{row:03b}" for row in chain_bits(3)[0, :, 0].tolist()]
    ['001', '011', '111']
    """
    rows = np.zeros((count, 4 * mask_words(count)), np.uint8)
    packed = np.packbits(np.tri(count, dtype=bool), axis=1, bitorder="little")
    rows[:, : packed.shape[1]] = packed
    return rows.view("<u4").astype(np.uint32, copy=False)[None]
