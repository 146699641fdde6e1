"""The stages as PyTorch operators, ``torch.ops.ddtree_numba.*``, which `torch.compile` takes into a graph whole.

Importing this module registers them; it needs PyTorch. On CUDA tensors an operator runs the stage's kernels, on torch's
current stream, in memory from torch's allocator; on CPU tensors it runs the stage's NumPy reference on the tensors'
memory. Each has a *fake* kernel, from which the compiler learns shapes and dtypes without running anything.

Differences to the launchers, for torch's sake:

- bfloat16 tensors are bfloat16: no view is needed.
- `ancestor_bits` is int32, the same bits: torch knows few operations on uint32.
- Tensors may require a gradient; results have none.

The functions here call the operators and put trees and paths into their named tuples. `torch.compile` looks through
them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree_numba.draft_tree import DraftTree, mask_words
from ddtree_numba.interop import sglang
from ddtree_numba.stages import accept_walk as walk
from ddtree_numba.stages import ancestor_bitmask as bitmask
from ddtree_numba.stages import kv_commit as commit
from ddtree_numba.stages.accept_walk import AcceptedPath
from ddtree_numba.stages.best_first_tree import build_tree as launch_build_tree
from ddtree_numba.stages.best_first_tree import build_tree_reference
from ddtree_numba.stages.top_candidates import top_candidates as launch_top_candidates
from ddtree_numba.stages.top_candidates import top_candidates_reference
from ddtree_numba.stages.tree_attention import tree_attention as launch_tree_attention
from ddtree_numba.stages.tree_attention import tree_attention_reference

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError("ddtree_numba.interop.torch_ops needs PyTorch: pip install 'ddtree-numba[torch]'") from error

__all__ = [
    "accept_walk",
    "ancestor_bitmask",
    "build_tree",
    "commit_kv",
    "positions",
    "top_candidates",
    "tree_attention",
    "verify_tree_greedy",
]

_TREE_DTYPES = [torch.float64 if name == "log_probs" else torch.int32 for name in DraftTree._fields]


def top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ``(log_probs, token_ids)``, [B, L, K] float32 and int32, of `logits` [B, L, V] (float32 or 16-bit).

    Stage 1, see `ddtree_numba.top_candidates`; K = min(k, V).
    """
    return _top_candidates(logits, k)


def build_tree(log_probs: Tensor, token_ids: Tensor, root_tokens: Tensor, budget: int) -> DraftTree:
    """Return the `DraftTree` of candidates [B, L, K], bits filled (int32), of up to `budget` nodes below the root.

    Stages 2 and 3, see `ddtree_numba.build_tree` and `ddtree_numba.ancestor_bitmask`.
    """
    return DraftTree(*_build_tree(log_probs, token_ids, root_tokens, budget))


def ancestor_bitmask(parents: Tensor, node_count: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(ancestor_bits, status)``, [B, N, W] and [B] int32, of `parents` [B, N] and `node_count` [B] int32.

    Stage 3, see `ddtree_numba.ancestor_bitmask`.
    """
    return _ancestor_bitmask(parents, node_count)


def positions(depths: Tensor, prefix_lengths: Tensor) -> Tensor:
    """Return positions [B, N] int32 of `depths` [B, N] and `prefix_lengths` [B] int32; stage 3's other half."""
    return _positions(depths, prefix_lengths)


def tree_attention(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    ancestor_bits: Tensor,
    node_count: Tensor,
    scale: float,
    latent_width: int,
    version: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)``, [B, N, H, D_c] and [B, N, H] float32; stage 4, see `ddtree_numba.tree_attention`.

    `q` [B, N, H, D] and `kv_pool` [pages, page_size, D] of one dtype (float32 or 16-bit); `ancestor_bits` int32 or
    uint32; the rest int32. `version` picks a kernel; a CPU has the reference alone.
    """
    bits = ancestor_bits.view(torch.int32) if ancestor_bits.dtype == torch.uint32 else ancestor_bits
    return _tree_attention(
        q, kv_pool, block_table, prefix_lengths, bits, node_count, float(scale), latent_width, version
    )


def accept_walk(tree: DraftTree, target_tokens: Tensor, draft_length: int | None = None) -> AcceptedPath:
    """Return the `AcceptedPath` of `tree` under `target_tokens` [B, N] int32; stage 5, see `ddtree_numba.accept_walk`.

    `draft_length` is L, by default N - 1.
    """
    length = target_tokens.shape[1] - 1 if draft_length is None else draft_length
    return AcceptedPath(*_accept_walk(list(tree), target_tokens, length))


def commit_kv(
    kv_pool: Tensor, block_table: Tensor, prefix_lengths: Tensor, accept_slots: Tensor, accept_count: Tensor
) -> Tensor:
    """Move accepted rows of `kv_pool` [layers, pages, page_size, D] and advance `prefix_lengths` [B], both in place.

    Stage 6, see `ddtree_numba.commit_kv`; returns the status [B] int32. A request that a CPU run refuses keeps its rows
    and has a status too.
    """
    return _commit_kv(kv_pool, block_table, prefix_lengths, accept_slots, accept_count)


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Fill the first three tensors in place, as SGLang's operator of this name; see `interop.sglang`."""
    _verify_tree_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
    )


# Operators. Torch reads their schema off the annotations, which must therefore be types and not strings' promises.


def _operator(name: str, mutates: Sequence[str] = ()) -> Any:
    return torch.library.custom_op(f"ddtree_numba::{name}", mutates_args=tuple(mutates))


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _numpy(tensor: Tensor) -> np.ndarray:
    """Return a CPU tensor's memory as NumPy sees it, bfloat16 as uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(array: np.ndarray) -> Tensor:
    """Return NumPy's memory as a tensor; words of 32 bits as int32."""
    return torch.from_numpy(np.ascontiguousarray(array.view(np.int32) if array.dtype == np.uint32 else array))


def _several(tensors: Any) -> Any:
    """Return any number of `tensors` as the tuple that an operator's schema counts."""
    return tuple(tensors)


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint32)


@_operator("top_candidates")
def _top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if _on_cpu(logits):
        return _several(map(_tensor, top_candidates_reference(_numpy(logits), k)))
    return launch_top_candidates(logits.detach(), k)


@_top_candidates.register_fake
def _(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    batch, depths, vocab = logits.shape
    shape = (batch, depths, torch.sym_min(k, vocab))
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


_EightTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@_operator("build_tree")
def _build_tree(log_probs: Tensor, token_ids: Tensor, root_tokens: Tensor, budget: int) -> _EightTensors:
    if _on_cpu(log_probs):
        tree = build_tree_reference(_numpy(log_probs), _numpy(token_ids), _numpy(root_tokens), budget)
        bits, _ = bitmask.ancestor_bitmask_reference(tree.parents, tree.node_count)
        return _several(map(_tensor, tree._replace(ancestor_bits=bits)))
    tree = launch_build_tree(log_probs.detach(), token_ids, root_tokens, budget)
    bits, _ = bitmask.ancestor_bitmask(tree.parents, tree.node_count)
    return _several(tree._replace(ancestor_bits=bits.view(torch.int32)))


@_build_tree.register_fake
def _(log_probs: Tensor, token_ids: Tensor, root_tokens: Tensor, budget: int) -> _EightTensors:
    batch, slots = log_probs.shape[0], budget + 1  # both may be symbols
    nodes = {"node_count": (batch,), "ancestor_bits": (batch, slots, mask_words(slots))}
    return _several(
        log_probs.new_empty(nodes.get(name, (batch, slots)), dtype=dtype)
        for name, dtype in zip(DraftTree._fields, _TREE_DTYPES, strict=True)
    )


@_operator("ancestor_bitmask")
def _ancestor_bitmask(parents: Tensor, node_count: Tensor) -> tuple[Tensor, Tensor]:
    if _on_cpu(parents):
        return _several(map(_tensor, bitmask.ancestor_bitmask_reference(_numpy(parents), _numpy(node_count))))
    bits, status = bitmask.ancestor_bitmask(parents, node_count)
    return bits.view(torch.int32), status


@_ancestor_bitmask.register_fake
def _(parents: Tensor, node_count: Tensor) -> tuple[Tensor, Tensor]:
    batch, slots = parents.shape
    return parents.new_empty((batch, slots, mask_words(slots))), parents.new_empty((batch,))


@_operator("positions")
def _positions(depths: Tensor, prefix_lengths: Tensor) -> Tensor:
    if _on_cpu(depths):
        return _tensor(bitmask.positions_reference(_numpy(depths), _numpy(prefix_lengths)))
    return bitmask.positions(depths, prefix_lengths)


@_positions.register_fake
def _(depths: Tensor, prefix_lengths: Tensor) -> Tensor:
    return depths.new_empty(depths.shape)


@_operator("tree_attention")
def _tree_attention(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    ancestor_bits: Tensor,
    node_count: Tensor,
    scale: float,
    latent_width: int,
    version: str,
) -> tuple[Tensor, Tensor]:
    rows = (q.detach(), kv_pool.detach(), block_table, prefix_lengths, _words(ancestor_bits), node_count)
    if _on_cpu(q):
        run: Any = tree_attention_reference
        out, lse = run(*map(_numpy, rows), scale, latent_width=latent_width)
        return _tensor(out.astype(np.float32)), _tensor(lse.astype(np.float32))
    return launch_tree_attention(*rows, scale, latent_width=latent_width, version=version)


@_tree_attention.register_fake
def _(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    ancestor_bits: Tensor,
    node_count: Tensor,
    scale: float,
    latent_width: int,
    version: str,
) -> tuple[Tensor, Tensor]:
    batch, slots, heads, _ = q.shape
    out = q.new_empty((batch, slots, heads, latent_width), dtype=torch.float32)
    return out, q.new_empty((batch, slots, heads), dtype=torch.float32)


@_operator("accept_walk")
def _accept_walk(
    tree: Sequence[Tensor], target_tokens: Tensor, draft_length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fields = DraftTree(*tree)
    fields = fields._replace(ancestor_bits=_words(fields.ancestor_bits))
    if _on_cpu(target_tokens):
        path = walk.accept_walk_reference(DraftTree(*map(_numpy, fields)), _numpy(target_tokens), draft_length)
        return _several(map(_tensor, path))
    return _several(walk.accept_walk(fields, target_tokens, draft_length))


@_accept_walk.register_fake
def _(tree: Sequence[Tensor], target_tokens: Tensor, draft_length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = target_tokens.shape[0]
    slots, tokens = (target_tokens.new_empty((batch, draft_length + 1)) for _ in range(2))
    count, status = (target_tokens.new_empty((batch,)) for _ in range(2))
    return slots, tokens, count, status


@_operator("commit_kv", mutates=("kv_pool", "prefix_lengths"))
def _commit_kv(
    kv_pool: Tensor, block_table: Tensor, prefix_lengths: Tensor, accept_slots: Tensor, accept_count: Tensor
) -> Tensor:
    arguments = (kv_pool.detach(), block_table, prefix_lengths, accept_slots, accept_count)
    if _on_cpu(kv_pool):
        return _tensor(commit.commit_kv_reference(*map(_numpy, arguments)))
    return commit.commit_kv(*arguments)


@_commit_kv.register_fake
def _(
    kv_pool: Tensor, block_table: Tensor, prefix_lengths: Tensor, accept_slots: Tensor, accept_count: Tensor
) -> Tensor:
    return prefix_lengths.new_empty(prefix_lengths.shape)


@_operator("verify_tree_greedy", mutates=("predicts", "accept_index", "accept_token_num"))
def _verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    arguments = (
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
    )
    if _on_cpu(predicts):
        sglang.verify_tree_greedy_reference(*map(_numpy, arguments))
    else:
        sglang.verify_tree_greedy(*arguments)


@_verify_tree_greedy.register_fake
def _(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    return None
