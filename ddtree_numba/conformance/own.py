"""The project's own implementations, as engines to check."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, cuda
from ddtree_numba.decode_step import DecodeStep, DecodeStepReference
from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.stages.accept_walk import AcceptedPath, accept_walk, accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import (
    ancestor_bitmask,
    ancestor_bitmask_reference,
    positions,
    positions_reference,
)
from ddtree_numba.stages.best_first_tree import build_tree, build_tree_reference
from ddtree_numba.stages.kv_commit import commit_kv, commit_kv_reference
from ddtree_numba.stages.top_candidates import top_candidates, top_candidates_reference
from ddtree_numba.stages.tree_attention import tree_attention, tree_attention_reference
from ddtree_numba.vectors import Case, write_node_rows

__all__ = ["kernels", "reference"]


def _sampled_targets(target_probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return [T, N] int32 tokens drawn from every node's distribution, by the inverse of its sums."""
    sums = np.cumsum(target_probs, axis=1)
    scaled = uniforms[:, :, 0] * sums[:, -1]
    tokens = [np.searchsorted(sums[node], scaled[:, node], side="right") for node in range(len(sums))]
    return np.stack(tokens, axis=1).astype(np.int32)


class _Reference:
    """The NumPy references, with arrays checked and results in the engine's form."""

    top_candidates = staticmethod(top_candidates_reference)
    build_tree = staticmethod(build_tree_reference)
    ancestor_bitmask = staticmethod(ancestor_bitmask_reference)
    positions = staticmethod(positions_reference)
    commit_kv: Any = staticmethod(commit_kv_reference)
    accept_walk: Any = staticmethod(accept_walk_reference)

    def tree_attention(self, **arguments: Any) -> tuple[Any, Any]:
        out, lse = tree_attention_reference(**arguments)
        return out.astype(np.float32), lse.astype(np.float32)

    def sample_walk(
        self, tree: DraftTree, target_probs: Any, draft_probs: Any, uniforms: Any, draft_length: int
    ) -> AcceptedPath:
        trials = DraftTree(*(np.repeat(field, len(uniforms), axis=0) for field in tree))
        return self.accept_walk(trials, _sampled_targets(target_probs, uniforms), draft_length)

    def decode_step(self, **arguments: Any) -> dict[str, np.ndarray]:
        return _rounds(DecodeStepReference(arguments["budget"], arguments["k"]), lambda arrays: arrays, **arguments)


class _Kernels(_Reference):
    """The launchers, over device arrays: contents are the kernels' own business, as in an engine."""

    positions = staticmethod(positions)

    def supports(self, case: Case) -> bool:
        """Tell whether the case is small enough for where kernels run."""
        return ON_GPU or case.small

    def top_candidates(self, logits: Any, k: int) -> Any:
        return top_candidates(cuda.to_device(logits), k)

    def build_tree(self, log_probs: Any, token_ids: Any, root_tokens: Any, budget: int) -> Any:
        return build_tree(cuda.to_device(log_probs), cuda.to_device(token_ids), cuda.to_device(root_tokens), budget)

    def ancestor_bitmask(self, parents: Any, node_count: Any) -> Any:
        return ancestor_bitmask(cuda.to_device(parents), cuda.to_device(node_count))

    def tree_attention(self, **arguments: Any) -> tuple[Any, Any]:
        placed = {name: cuda.to_device(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
        return tree_attention(**placed)

    def accept_walk(self, tree: DraftTree, target_tokens: Any, draft_length: int) -> Any:
        return accept_walk(DraftTree(*map(cuda.to_device, tree)), cuda.to_device(target_tokens), draft_length)

    def commit_kv(
        self, kv_pool: Any, block_table: Any, prefix_lengths: Any, accept_slots: Any, accept_count: Any
    ) -> dict[str, Any]:
        pool, lengths = cuda.to_device(kv_pool), cuda.to_device(prefix_lengths)
        status = commit_kv(
            pool, cuda.to_device(block_table), lengths, *map(cuda.to_device, (accept_slots, accept_count))
        )
        return {"kv_pool": pool, "prefix_lengths": lengths, "status": status}

    def decode_step(self, **arguments: Any) -> dict[str, np.ndarray]:
        _, batch, depths, vocab = arguments["logits"].shape
        step = DecodeStep(batch, depths, vocab, arguments["budget"], arguments["k"])
        return _rounds(step, lambda arrays: [cuda.to_device(array) for array in arrays], **arguments)


def _rounds(
    step: Any,
    place: Any,
    logits: Any,
    root_tokens: Any,
    prefix_lengths: Any,
    target_tokens: Any,
    node_rows: Any,
    kv_pool: Any,
    block_table: Any,
    **_: Any,
) -> dict[str, np.ndarray]:
    """Run the rounds of the `Engine` protocol with a `DecodeStep` or its twin; `place` puts arrays in place."""
    got: dict[str, list[np.ndarray]] = {}
    for number in range(len(logits)):
        tree, where = step.draft(*place((logits[number], root_tokens, prefix_lengths)))
        drafted = {name: _copy(array) for name, array in {**tree._asdict(), "positions": where}.items()}
        write_node_rows(kv_pool, block_table, prefix_lengths, node_rows[number], drafted["node_count"])
        cache = place((target_tokens[number], kv_pool, block_table, prefix_lengths))
        path = {name: _copy(array) for name, array in step.commit(*cache)._asdict().items()}
        kv_pool[:], prefix_lengths[:] = _copy(cache[1]), _copy(cache[3])
        root_tokens = path["accept_tokens"][np.arange(len(root_tokens)), path["accept_count"] - 1]
        for name, array in {**drafted, **path}.items():
            got.setdefault(name, []).append(array)
    return {name: np.stack(arrays) for name, arrays in got.items()}


def _copy(array: Any) -> np.ndarray:
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array.copy()


reference = _Reference()
"""The NumPy references: the definition, checked against vectors that were made apart from it where floats are."""

kernels = _Kernels()
"""The kernels, on the GPU or, for small cases, in the simulator."""
