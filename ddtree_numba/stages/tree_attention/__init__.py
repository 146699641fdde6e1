"""Stage 4: every tree node attends to its prefix and to its own branch, in the absorbed form of latent attention.

A ladder of kernels with one signature: `reference` defines the answer, `naive` is the first kernel one would write,
`shared_tile` loads every latent row once for many nodes and heads, `split_kv` cuts the keys over more blocks,
`tensor_core` multiplies with the tensor cores of a GPU, and `hopper` lets those of a Hopper fetch their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.arguments import Transfer, dtype_of
from ddtree_numba.stages.tree_attention.hopper import launch_hopper
from ddtree_numba.stages.tree_attention.hopper import why_not as why_not_hopper
from ddtree_numba.stages.tree_attention.naive import launch_naive
from ddtree_numba.stages.tree_attention.reference import check_arguments, check_pages, tree_attention_reference
from ddtree_numba.stages.tree_attention.shared_tile import launch_shared_tile
from ddtree_numba.stages.tree_attention.split_kv import launch_split_kv
from ddtree_numba.stages.tree_attention.tensor_core import launch_tensor_core
from ddtree_numba.stages.tree_attention.tensor_core import why_not as why_not_tensor_core

__all__ = ["GPU_VERSIONS", "VERSIONS", "tree_attention", "tree_attention_reference"]

_LAUNCHERS: dict[str, Callable[..., None]] = {
    "naive": launch_naive,
    "shared_tile": launch_shared_tile,
    "split_kv": launch_split_kv,
    "tensor_core": launch_tensor_core,
    "hopper": launch_hopper,
}

GPU_VERSIONS: tuple[str, ...] = ("tensor_core", "hopper")
"""The rungs that need a GPU, 16-bit numbers and certain widths; elsewhere they raise `ValueError`."""

VERSIONS: tuple[str, ...] = tuple(version for version in _LAUNCHERS if version not in GPU_VERSIONS)
"""The rungs of the ladder that run anywhere, slowest first."""

_INPUTS = ("q", "kv_pool", "block_table", "prefix_lengths", "ancestor_bits", "node_count")


def tree_attention(
    q: Any,
    kv_pool: Any,
    block_table: Any,
    prefix_lengths: Any,
    ancestor_bits: Any,
    node_count: Any,
    scale: float,
    *,
    latent_width: int,
    version: str = "auto",
    out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Return ``(out, lse)``, what `tree_attention_reference` defines, in float32.

    ``q`` (B, N, H, D) and ``kv_pool`` (pages, page_size, D) share a dtype: float32, float16, or uint16 for bfloat16
    ``block_table`` (B, max_pages), ``prefix_lengths`` (B,) and ``node_count`` (B,) int32; ``ancestor_bits`` (B, N, W)
    uint32, see `tree_attention_reference`
    ``scale``: multiplies the dot product; ``latent_width``: D_c, 1..D; ``version``: one of `VERSIONS` or
    `GPU_VERSIONS`, never replaced by another; or "auto", the fastest for these arrays on this machine
    ``out``: a pair of float32 arrays (B, N, H, D_c) and (B, N, H) to write into; ``stream``: where to run

    NumPy inputs are copied in and NumPy arrays come back; device arrays stay where they are and the result is in
    flight. The contents of NumPy inputs are checked: a row without a page raises `ValueError`. Those of device arrays
    can't be: there such a row is not seen, and nothing outside the arrays is read.

    Raises `TypeError` for what is no array, of another dtype or a mix of NumPy and device, `ValueError` for a wrong
    shape or layout, a number out of range, and a `version` that is unknown or can't run here.
    """
    given = dict(zip(_INPUTS, (q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count), strict=True))
    B, N, H, D_c = check_arguments(given, scale, latent_width)
    if version != "auto" and version not in (*VERSIONS, *GPU_VERSIONS):
        raise ValueError(f"version: got {version!r}, needs {' or '.join(map(repr, [*_LAUNCHERS, 'auto']))}")
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        raise TypeError(f"out: got {type(out).__name__}, needs a pair of arrays (out, lse)")
    transfer = Transfer(stream, given)
    if transfer.on_host:
        pages, page_size, _ = kv_pool.shape
        check_pages(block_table, prefix_lengths, node_count, pages, page_size, N)
    out_given, lse_given = out if out is not None else (None, None)
    on_device = [transfer.input(array) for array in given.values()]
    result = transfer.output("out", out_given, (B, N, H, D_c), np.float32)
    lse = transfer.output("lse", lse_given, (B, N, H), np.float32)
    is_bfloat16 = np.int32(dtype_of(q) == np.uint16)
    if B * N * H > 0:
        if version == "auto":
            version = _fastest(on_device[0], on_device[1], D_c)
        launch = _LAUNCHERS[version]
        launch(*on_device, np.float32(scale), is_bfloat16, result, lse, stream=transfer.stream)
    attended, log_sum_exp = transfer.finish(result, lse)
    return attended, log_sum_exp


def _fastest(q: Any, kv_pool: Any, latent_width: int) -> str:
    """Return the highest rung that can take these device arrays on this machine."""
    if not why_not_hopper(q, kv_pool, latent_width):
        return "hopper"
    return "split_kv" if why_not_tensor_core(q, kv_pool, latent_width) else "tensor_core"
