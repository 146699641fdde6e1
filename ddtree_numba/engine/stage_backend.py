"""What the decoding loop needs of the stages, from NumPy or from the kernels (GPU or simulator).

Both have the same three calls: `draft` (stages 1-3), `attention` (stage 4) and `commit` (stages 5-6). What goes in and
out of them while the target runs are arrays of the model, NumPy's or CuPy's; what a round leaves is NumPy's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.decode_step import DecodePlan, DecodeStep, DecodeStepReference
from ddtree_numba.device_library import as_device
from ddtree_numba.draft_tree import DraftTree, mask_words
from ddtree_numba.engine.arithmetic import Arithmetic
from ddtree_numba.engine.kv_cache import PagedKVCache
from ddtree_numba.engine.latent_attention import LatentAttention
from ddtree_numba.engine.target_model import Attention
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.accept_walk import AcceptedPath
from ddtree_numba.stages.tree_attention import tree_attention

__all__ = ["Committed", "KernelStages", "Nodes", "NumpyStages", "Stages", "chain_bits"]


class Nodes(NamedTuple):
    """What one pass of the target runs over, n nodes behind the prefix, in the model's arrays."""

    token_ids: Any
    """[n] int32."""
    positions: Any
    """[n] int32: the place of each in the sequence."""
    ancestor_bits: Any
    """[1, n, W] uint32: who sees whom."""


class Committed(NamedTuple):
    """What a round came to, a batch of one, in NumPy arrays."""

    tree: DraftTree
    """The draft."""
    positions: np.ndarray
    """[1, N] int32: the place of every node in the sequence."""
    target_tokens: np.ndarray
    """[1, N] int32: the target's token after every node, 0 in unused slots."""
    path: AcceptedPath
    """The walk through the tree."""


class Stages(Protocol):
    """The stages of one sequence, bound to its KV cache."""

    def draft(self, logits: Any, root_token: int) -> Nodes:
        """Draft the round's tree from the drafter's `logits` [L, V]; return the nodes to verify."""

    def attention(self, nodes: Nodes, scale: float, width: int) -> Attention:
        """Return the attention of one pass: a node sees the prefix and the nodes in its `ancestor_bits`."""

    def commit(self, target_tokens: Any) -> Committed:
        """Walk the round's tree with the target's tokens [n]; move accepted KV rows behind the prefix, advance it."""


class NumpyStages:
    """The stages' references; attention in float32, see `LatentAttention`."""

    def __init__(self, cache: PagedKVCache, budget: int, k: int | None = None) -> None:
        """Take the sequence's cache, the tree's node `budget` and K candidates a depth."""
        self._cache, self._step = cache, DecodeStepReference(budget, k)
        self._positions = np.zeros((1, 0), np.int32)

    def draft(self, logits: np.ndarray, root_token: int) -> Nodes:
        """See `Stages.draft`."""
        root = np.array([root_token], np.int32)
        tree, self._positions = self._step.draft(np.ascontiguousarray(logits[None]), root, self._cache.prefix_lengths)
        used = int(tree.node_count[0])
        bits = tree.ancestor_bits[:, :used, : mask_words(used)]
        return Nodes(tree.token_ids[0, :used], self._positions[0, :used], bits)

    def attention(self, nodes: Nodes, scale: float, width: int) -> Attention:
        """See `Stages.attention`."""
        return LatentAttention(self._cache, nodes.ancestor_bits, scale, width)

    def commit(self, target_tokens: np.ndarray) -> Committed:
        """See `Stages.commit`."""
        tree, cache = self._step.tree, self._cache
        assert tree is not None, "commit before draft"
        targets = np.zeros_like(tree.token_ids)
        targets[0, : len(target_tokens)] = target_tokens
        path = self._step.commit(targets, cache.pool, cache.block_table, cache.prefix_lengths)
        _require_whole(path.status, self._step.tree_status, self._step.commit_status)
        cache.prefix += int(path.accept_count[0])
        return Committed(tree, self._positions, targets, path)


class KernelStages:
    """The stages' kernels, on the GPU or in the simulator, as one `DecodePlan` over the model's own arrays.

    Logits, tree, KV rows and the target's tokens stay on the device. A round copies what it leaves, some kilobytes, to
    the host at its end, and waits for the device there and nowhere else. All N slots go through the target, whether
    used or not: how many are is known on the device alone.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        arithmetic: Arithmetic,
        draft_length: int,
        vocab: int,
        budget: int,
        k: int | None = None,
    ) -> None:
        """Take the sequence's cache, the module of the model's arrays, L, V, node `budget`, K candidates a depth."""
        xp = arithmetic.xp
        self._cache, self._arithmetic = cache, arithmetic
        self._step = DecodeStep(1, draft_length, vocab, budget, k)
        self._logits = xp.zeros((1, draft_length, vocab), np.float32)
        self._root, self._targets = xp.zeros(1, np.int32), xp.zeros((1, budget + 1), np.int32)
        # Numba's view of each array of the model, made once: making them takes longer than a launch.
        self._pool, self._table = _as_numba(cache.pool), _as_numba(cache.block_table)
        self._prefixes = _as_numba(cache.prefix_lengths)
        self._layers = [self._pool[layer] for layer in range(len(cache.pool))]
        self._plan: DecodePlan | None = None
        tokens, positions, bits = self._step.tree.token_ids, self._step.positions, self._step.tree.ancestor_bits
        self._nodes = Nodes(self._as_model(tokens)[0], self._as_model(positions)[0], self._as_model(bits))
        self._attention: _KernelAttention | None = None

    def draft(self, logits: Any, root_token: int) -> Nodes:
        """See `Stages.draft`."""
        if self._logits.size:
            self._logits[0] = self._arithmetic.xp.asarray(logits)
        self._root.fill(root_token)
        if self._plan is None:
            arrays = _as_numba(self._logits), _as_numba(self._root), self._prefixes, _as_numba(self._targets)
            self._plan = self._step.prepare(*arrays, self._pool, self._table)
        self._plan.draft()
        return self._nodes

    def attention(self, nodes: Nodes, scale: float, width: int) -> Attention:
        """See `Stages.attention`."""
        if nodes is self._nodes and self._attention is not None:
            return self._attention
        bits = _as_numba(self._arithmetic.xp.ascontiguousarray(nodes.ancestor_bits))
        cache = self._layers, self._table, self._prefixes
        attention = _KernelAttention(self._arithmetic.xp, cache, bits, scale, width, recorded=nodes is self._nodes)
        if nodes is self._nodes:
            self._attention = attention
        return attention

    def commit(self, target_tokens: Any) -> Committed:
        """See `Stages.commit`."""
        assert self._plan is not None, "commit before draft"
        self._targets[0] = self._arithmetic.xp.asarray(target_tokens)
        step, path = self._step, AcceptedPath(*(field.copy_to_host() for field in self._plan.commit()))
        _require_whole(path.status, step.tree_status.copy_to_host(), step.commit_status.copy_to_host())
        tree = DraftTree(*(field.copy_to_host() for field in step.tree))
        targets = self._arithmetic.on_host(self._targets).copy()
        targets[0, tree.node_count[0] :] = 0
        self._cache.prefix += int(path.accept_count[0])
        return Committed(tree, step.positions.copy_to_host(), targets, path)

    def _as_model(self, array: Any) -> Any:
        """Return an array of the step as one of the model's, over the same memory."""
        return self._arithmetic.xp.asarray(array if ON_GPU else array._ary)


class _KernelAttention:
    """`tree_attention` over one set of nodes, called for every layer.

    All layers share one buffer for the queries and one for what comes out: a stream runs in order. When the nodes are
    those of every round, each layer's launches are recorded once and replayed.
    """

    def __init__(
        self, xp: Any, cache: tuple[list[Any], Any, Any], bits: Any, scale: float, width: int, *, recorded: bool
    ) -> None:
        """Take the KV rows of each layer, block table and prefix lengths, and `bits` [1, n, W], all Numba's."""
        self._xp, self._scale, self._width, self._recorded = xp, scale, width, recorded
        self._layers, *self._rows = cache
        self._bits, self._count = bits, cuda.to_device(np.array([bits.shape[1]], np.int32))
        self._queries: Any = None
        self._graphs: list[Recorded] = []

    def __call__(self, layer: int, queries: Any) -> Any:
        """Return the attended latents [n, H, D_c] of `queries` [n, H, D_c + D_r]; the next call overwrites them."""
        if self._queries is None:
            self._prepare(queries)
        self._queries[0] = queries
        if self._graphs:
            self._graphs[layer].replay()
        else:
            self._launch(layer, None)
        return self._out[0]

    def _prepare(self, queries: Any) -> None:
        nodes, heads, _ = queries.shape
        self._queries = self._xp.zeros((1, *queries.shape), np.float32)
        self._out = self._xp.empty((1, nodes, heads, self._width), np.float32)
        self._inputs = _as_numba(self._queries)
        self._outputs = _as_numba(self._out), cuda.device_array((1, nodes, heads), np.float32)
        if self._recorded and ON_GPU:
            self._stream = cuda.stream()
            self._launch(0, self._stream)  # compiles, and makes the buffers that belong to this stream
            cuda.synchronize()
            layers = range(len(self._layers))
            self._graphs = [Recorded(partial(self._launch, layer), self._stream) for layer in layers]

    def _launch(self, layer: int, stream: Any) -> None:
        arguments = self._inputs, self._layers[layer], *self._rows, self._bits, self._count, self._scale
        tree_attention(*arguments, latent_width=self._width, out=self._outputs, stream=stream)


def _as_numba(array: Any) -> Any:
    """Return an array of the model as a device array of Numba's, over the same memory."""
    if ON_GPU:
        return as_device(array) if array.size else cuda.device_array(array.shape, array.dtype)
    # In the simulator the host's memory is the device's.
    return cuda.cudadrv.devicearray.FakeCUDAArray(np.asarray(array))


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
