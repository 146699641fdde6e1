"""What one would take otherwise: PyTorch's operations, and the tree and the walk in Python, with their copies.

Written as a user would write them, from the paper's algorithm and PyTorch's documentation.
"""

from __future__ import annotations

import heapq
import importlib
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.benchmark.inputs import PagedRows

__all__ = ["Gathered", "RoundPeer", "TorchPeers", "grow_tree", "visibility", "walk"]


class TorchPeers:
    """PyTorch over the arrays that our kernels read, without copies."""

    def __init__(self, module: Any, device: str = "cuda") -> None:
        """Take the module and where its tensors live ("cpu": in tests)."""
        self.module, self._device = module, device

    @classmethod
    def installed(cls) -> TorchPeers | None:
        """Return PyTorch's peers, None without a PyTorch that sees the GPU."""
        try:
            module = importlib.import_module("torch")
        except ImportError:
            return None
        return cls(module) if module.cuda.is_available() else None

    def tensor(self, array: Any) -> Any:
        """Return a device array of Numba's as a tensor over the same memory."""
        if self._device == "cpu":
            return self.module.from_numpy(array.copy_to_host())
        return self.module.as_tensor(array, device=self._device)

    def bfloat16(self, array: Any) -> Any:
        """Return a device array of bfloat16 bits as a tensor."""
        return self.tensor(array.view(np.int16)).view(self.module.bfloat16)

    def to_device(self, array: np.ndarray) -> Any:
        """Copy a NumPy array to the device."""
        return self.module.from_numpy(array).to(self._device)

    def on_host(self, tensor: Any) -> np.ndarray:
        """Return a tensor as NumPy, bfloat16 widened."""
        return np.asarray(tensor.float().cpu().numpy())

    # ---- the stages ----

    def candidates(self, logits: Any, k: int) -> tuple[Any, Any, Any]:
        """Stage 1: best logits, their tokens, and the log-sum-exp of every row."""
        values, tokens = self.module.topk(logits, k)
        return values, tokens, self.module.logsumexp(logits, -1)

    def heap_tree(self, log_probs: Any, token_ids: Any, roots: Any, prefixes: Any, budget: int) -> list[list[Any]]:
        """Stages 2 and 3: candidates to the host, a heap for each request, tokens, positions and mask back."""
        arrays = (log_probs.tolist(), token_ids.tolist(), roots.tolist())
        trees = [grow_tree(*request, budget) for request in zip(*arrays, strict=True)]
        starts, slots = prefixes.tolist(), budget + 1
        tokens, places = np.zeros((len(trees), slots), np.int32), np.zeros((len(trees), slots), np.int32)
        masks = np.zeros((len(trees), slots, slots), np.bool_)
        for b, tree in enumerate(trees):
            used = len(tree)
            tokens[b, :used] = [node[0] for node in tree]
            places[b, :used] = [starts[b] + node[2] for node in tree]
            masks[b, :used, :used] = visibility(tree)
        self._sent = [self.to_device(array) for array in (tokens, places, masks)]
        return trees

    def gathered(self, host: PagedRows, rows: PagedRows, scale: float, latent_width: int) -> Gathered:
        """Return the work of stage 4 as PyTorch takes it: each request's rows in order, a multiple of 8 of them."""
        torch = self.module
        batch, nodes, heads, width = host.q.shape
        keys_used = int(host.prefix_lengths[0]) + nodes
        places = self.to_device(host.block_table).long()
        in_order = self.bfloat16(rows.kv_pool)[places].reshape(batch, -1, width)[:, :keys_used]
        keys = torch.zeros(batch, -(-keys_used // 8) * 8, width, dtype=torch.bfloat16, device=self._device)
        keys[:, :keys_used] = in_order
        seen = np.zeros((batch, nodes, keys.shape[1]), np.bool_)
        seen[:, :, : keys_used - nodes] = True
        little_endian = np.ascontiguousarray(host.ancestor_bits, "<u4").view(np.uint8)
        bits = np.unpackbits(little_endian, axis=2, count=nodes, bitorder="little")
        seen[:, :, keys_used - nodes : keys_used] = bits
        mask = self.to_device(seen).repeat_interleave(heads, 1)  # heads folded into rows
        bias = torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -torch.inf)
        q = self.bfloat16(rows.q).reshape(batch, nodes * heads, width)
        return Gathered(torch, q, keys, mask, bias, scale, latent_width)


class Gathered(NamedTuple):
    """Stage 4 on contiguous rows: q [B, N * H, D], keys [B, rows, D], mask and bias [B, N * H, rows]."""

    torch: Any
    q: Any
    keys: Any
    mask: Any
    bias: Any
    scale: float
    latent_width: int

    def three_operations(self) -> Any:
        """Scores, softmax, weighted sum: the scores go through memory."""
        scores = self.torch.baddbmm(self.bias, self.q, self.keys.transpose(1, 2), alpha=self.scale)
        return self.torch.bmm(self.torch.softmax(scores, -1), self.keys[..., : self.latent_width])

    def fused(self) -> Any:
        """`scaled_dot_product_attention` with a mask."""
        attend = self.torch.nn.functional.scaled_dot_product_attention
        q, keys = self.q[:, None], self.keys[:, None]
        values = keys[..., : self.latent_width]
        return attend(q, keys, values, attn_mask=self.mask[:, None], scale=self.scale)


class RoundPeer:
    """A whole round in eager PyTorch and Python: draft side and commit side of one request."""

    def __init__(self, peers: TorchPeers, logits: Any, targets: Any, pool: Any, k: int, budget: int) -> None:
        """Take tensors: logits [1, L, V], the target's tokens [1, N], pool [layers, rows, D]."""
        self._peers, self._logits, self._targets, self._pool = peers, logits, targets, pool
        self._k, self._budget, self._root = k, budget, 0
        self.accepted: list[int] = []

    def __call__(self, prefix: int) -> None:
        """Draft, and accept what the target's tokens say."""
        torch, peers = self._peers.module, self._peers
        values, tokens, log_sum = peers.candidates(self._logits, self._k)
        log_probs = values.float() - log_sum.float()[..., None]
        tree = self._draft(log_probs, tokens, prefix)
        self.accepted = walk(tree, self._targets[0].tolist())
        sources = torch.tensor([prefix + slot for slot in self.accepted], device=self._pool.device)
        self._pool[:, prefix : prefix + len(self.accepted)] = self._pool[:, sources]

    def _draft(self, log_probs: Any, tokens: Any, prefix: int) -> list[Any]:
        torch = self._peers.module
        roots, prefixes = torch.tensor([self._root]), torch.tensor([prefix])
        return self._peers.heap_tree(log_probs, tokens, roots, prefixes, self._budget)[0]


Node = tuple[int, int, int]
"""Token, parent's slot, depth."""


def grow_tree(log_probs: list[list[float]], token_ids: list[list[int]], root: int, budget: int) -> list[Node]:
    """Return the most probable prefixes, best first, with Python's heap; nodes are (token, parent's slot, depth).

    >>> grow_tree([[-0.1, -3.0], [-0.2, -0.5]], [[5, 6], [7, 8]], 9, 3)
    [(9, -1, 0), (5, 0, 1), (7, 1, 2), (8, 1, 2)]
    """
    nodes: list[Node] = [(root, -1, 0)]
    heap: list[tuple[float, tuple[int, ...], int]]
    heap = [(-log_probs[0][0], (0,), 0)] if log_probs and log_probs[0] else []
    while heap and len(nodes) <= budget:
        minus_score, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        row = log_probs[depth - 1]
        nodes.append((token_ids[depth - 1][rank], parent, depth))
        if rank + 1 < len(row):
            sibling = minus_score + row[rank] - row[rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(log_probs):
            heapq.heappush(heap, (minus_score - log_probs[depth][0], (*ranks, 0), len(nodes) - 1))
    return nodes


def visibility(tree: list[Node]) -> np.ndarray:
    """Return who sees whom, booleans [n, n]."""
    mask = np.eye(len(tree), dtype=np.bool_)
    for slot, (_, parent, _) in enumerate(tree[1:], 1):
        mask[slot] |= mask[parent]
    return mask


def walk(tree: list[Node], targets: list[int]) -> list[int]:
    """Return the accepted slots, the root's first.

    >>> walk([(9, -1, 0), (5, 0, 1), (7, 1, 2), (8, 1, 2)], [5, 8, 0, 0])
    [0, 1, 3]
    """
    children: dict[tuple[int, int], int] = {}
    for slot, (token, parent, _) in enumerate(tree):
        children.setdefault((parent, token), slot)
    path = [0]
    while (child := children.get((path[-1], targets[path[-1]]))) is not None:
        path.append(child)
    return path
