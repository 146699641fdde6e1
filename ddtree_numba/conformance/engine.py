"""What an implementation looks like to the runner, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.vectors import STAGES, Case

__all__ = ["Engine"]


class Engine(Protocol):
    """An implementation of the decoding step: an object, or a module, with any of these functions.

    Arguments are fresh NumPy arrays with the shapes and dtypes of the data contract, which may be changed; bfloat16
    comes as uint16. Several results are a tuple in the order given here, a mapping, or anything with `_asdict`; arrays
    may be of NumPy, torch or on the device. Results marked *may be left out* are not looked at when they are not there.

    A stage that is not there, one that is None, and a case for which it raises `NotImplementedError` are not supported.
    """

    def top_candidates(self, logits: Any, k: int) -> Any:
        """Return ``log_probs`` [B, L, K] float32 and ``token_ids`` [B, L, K] int32 of `logits` [B, L, V]."""

    def build_tree(self, log_probs: Any, token_ids: Any, root_tokens: Any, budget: int) -> Any:
        """Return a `DraftTree`, or a mapping with ``node_count``, ``token_ids`` and ``parents``.

        ``depths``, ``first_child``, ``next_sibling`` and ``log_probs`` may be left out; ``ancestor_bits`` is not read.
        """

    def ancestor_bitmask(self, parents: Any, node_count: Any) -> Any:
        """Return ``ancestor_bits`` [B, N, W] uint32 and ``status`` [B] int32; the status may be left out."""

    def positions(self, depths: Any, prefix_lengths: Any) -> Any:
        """Return ``positions`` [B, N] int32."""

    def tree_attention(
        self,
        q: Any,
        kv_pool: Any,
        block_table: Any,
        prefix_lengths: Any,
        ancestor_bits: Any,
        node_count: Any,
        scale: float,
        *,
        latent_width: int,
    ) -> Any:
        """Return ``out`` [B, N, H, D_c] and ``lse`` [B, N, H], float32; ``lse`` may be left out."""

    def accept_walk(self, tree: DraftTree, target_tokens: Any, draft_length: int) -> Any:
        """Return ``accept_slots``, ``accept_tokens``, ``accept_count`` and ``status``; the status may be left out."""

    def sample_walk(
        self, tree: DraftTree, target_probs: Any, draft_probs: Any, uniforms: Any, draft_length: int
    ) -> Any:
        """Return ``accept_tokens`` [T, L + 1] int32 and ``accept_count`` [T] int32 of T independent walks of one tree.

        `target_probs` and `draft_probs` [N, V] float64 are the distributions behind every slot. `uniforms` [T, N, 2]
        are numbers from 0 to 1 to draw with; an engine may have random numbers of its own instead.
        """

    def commit_kv(
        self, kv_pool: Any, block_table: Any, prefix_lengths: Any, accept_slots: Any, accept_count: Any
    ) -> Any:
        """Change `kv_pool` and `prefix_lengths` in place; return ``status`` [B] int32 or None.

        Or return a mapping with ``kv_pool`` and ``prefix_lengths``, when that can't be done in place.
        """

    def decode_step(
        self,
        logits: Any,
        root_tokens: Any,
        prefix_lengths: Any,
        target_tokens: Any,
        node_rows: Any,
        kv_pool: Any,
        block_table: Any,
        budget: int,
        k: int,
    ) -> Any:
        """Run R rounds. Round r drafts from ``logits[r]``, puts ``node_rows[r]`` behind the prefix as the target would
        (`write_node_rows`), walks with ``target_tokens[r]`` and commits; the next round's root is the bonus token.

        Return a mapping of ``token_ids``, ``parents``, ``positions`` [R, B, N], ``node_count``, ``accept_count`` [R, B]
        and ``accept_tokens`` [R, B, L + 1]; `kv_pool` and `prefix_lengths` are changed in place, or in the mapping.
        """


_ORDER = {
    "top_candidates": ("log_probs", "token_ids"),
    "ancestor_bitmask": ("ancestor_bits", "status"),
    "positions": ("positions",),
    "tree_attention": ("out", "lse"),
    "accept_walk": ("accept_slots", "accept_tokens", "accept_count", "status"),
    "sample_walk": ("accept_tokens", "accept_count"),
    "commit_kv": ("status",),
}

_IN_PLACE = {"commit_kv": ("kv_pool", "prefix_lengths"), "decode_step": ("kv_pool", "prefix_lengths")}


def supported_stages(engine: Any) -> list[str]:
    """Return the stages that `engine` has."""
    return [stage for stage in STAGES if callable(getattr(engine, stage, None))]


def answer(engine: Any, case: Case) -> dict[str, np.ndarray]:
    """Run one case; return what came out by name. Raises `NotImplementedError` for what the engine does not do."""
    function = getattr(engine, case.stage, None)
    supports = getattr(engine, "supports", None)
    if function is None or (supports is not None and not supports(case)):
        raise NotImplementedError
    arguments = case.arguments()
    in_place = {name: arguments[name] for name in _IN_PLACE.get(case.stage, ())}
    if case.stage in ("accept_walk", "sample_walk"):
        arguments = {"tree": DraftTree(*(arguments.pop(name) for name in DraftTree._fields)), **arguments}
    returned = _named(function(**arguments), case.stage)
    wanted = (*STAGES[case.stage].outputs, *STAGES[case.stage].optional)
    return {name: _host(array) for name, array in {**in_place, **returned}.items() if name in wanted}


def _named(returned: Any, stage: str) -> dict[str, Any]:
    if hasattr(returned, "_asdict"):
        returned = returned._asdict()
    if isinstance(returned, Mapping):
        return {str(name): array for name, array in returned.items() if array is not None}
    if stage not in _ORDER:
        raise TypeError(f"{stage}: got {type(returned).__name__}, needs a mapping or something with _asdict")
    if returned is None:
        return {}
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    if len(parts) > len(_ORDER[stage]):
        raise TypeError(f"{stage}: got {len(parts)} results, needs {', '.join(_ORDER[stage])}")
    return {name: array for name, array in zip(_ORDER[stage], parts, strict=False) if array is not None}


def _host(array: Any) -> np.ndarray:
    """Return an array of NumPy, wherever it was."""
    if hasattr(array, "copy_to_host"):  # of Numba
        return array.copy_to_host()
    if hasattr(array, "detach"):  # of torch
        return array.detach().cpu().numpy()
    if hasattr(array, "get") and hasattr(array, "device"):  # of CuPy
        return array.get()
    return np.asarray(array)
