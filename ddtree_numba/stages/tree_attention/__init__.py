"""Stage 4: every tree node attends to its prefix and to its own branch, in the absorbed form of latent attention.

A ladder of kernels with one signature: `reference` defines the answer, `naive` is the first kernel one would write,
`shared_tile` loads every latent row once for many nodes and heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, Transfer, check_integer
from ddtree_numba.draft_tree import mask_words
from ddtree_numba.stages.tree_attention.naive import launch_naive
from ddtree_numba.stages.tree_attention.reference import check_pages, tree_attention_reference
from ddtree_numba.stages.tree_attention.shared_tile import launch_shared_tile

__all__ = ["VERSIONS", "tree_attention", "tree_attention_reference"]

_LAUNCHERS: dict[str, Callable[..., None]] = {"naive": launch_naive, "shared_tile": launch_shared_tile}

VERSIONS: tuple[str, ...] = tuple(_LAUNCHERS)
"""The rungs of the ladder, slowest first."""

_INPUTS = ("q", "kv_pool", "block_table", "prefix_lengths", "ancestor_bits", "node_count")
_MAX_GRID = 65535


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
    version: str = "shared_tile",
    out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Return ``(out, lse)``, what `tree_attention_reference` defines, in float32.

    ``q`` (B, N, H, D) and ``kv_pool`` (pages, page_size, D) share a dtype: float32, float16, or uint16 for bfloat16
    ``block_table`` (B, max_pages), ``prefix_lengths`` (B,) and ``node_count`` (B,) int32; ``ancestor_bits`` (B, N, W)
    uint32, see `tree_attention_reference`
    ``scale``: multiplies the dot product; ``latent_width``: D_c, 1..D; ``version``: one of `VERSIONS`
    ``out``: a pair of float32 arrays (B, N, H, D_c) and (B, N, H) to write into; ``stream``: where to run

    NumPy inputs are copied in and NumPy arrays come back; device arrays stay where they are and the result is in
    flight. The contents of NumPy inputs are checked: a row without a page raises `ValueError`. Those of device arrays
    can't be: there such a row is not seen, and nothing outside the arrays is read.
    """
    given = dict(zip(_INPUTS, (q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count), strict=True))
    B, N, H, D_c = _check_arguments(given, scale, latent_width)
    if version not in _LAUNCHERS:
        raise ValueError(f"version: got {version!r}, needs {' or '.join(map(repr, VERSIONS))}")
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
    is_bfloat16 = np.int32(np.dtype(q.dtype) == np.uint16)
    if B * N * H > 0:
        launch = _LAUNCHERS[version]
        launch(*on_device, np.float32(scale), is_bfloat16, result, lse, stream=transfer.stream)
    attended, log_sum_exp = transfer.finish(result, lse)
    return attended, log_sum_exp


def _check_arguments(arrays: dict[str, Any], scale: float, latent_width: int) -> tuple[int, int, int, int]:
    """Return B, N, H, D_c when shapes and dtypes fit together."""
    check = ArrayCheck()
    floats = (np.float32, np.float16, np.uint16)
    B, N, H, D = check("q", arrays["q"], "B N H D", floats)
    pool = check("kv_pool", arrays["kv_pool"], "* * D", (np.dtype(arrays["q"].dtype),))
    table = check("block_table", arrays["block_table"], "B *", (np.int32,))
    check("prefix_lengths", arrays["prefix_lengths"], "B", (np.int32,))
    words = check("ancestor_bits", arrays["ancestor_bits"], "B N *", (np.uint32,))[2]
    check("node_count", arrays["node_count"], "B", (np.int32,))
    if words != mask_words(N):
        raise ValueError(f"ancestor_bits: got {words} words a row, needs {mask_words(N)} for {N} slots")
    if min(pool) == 0:
        raise ValueError(f"kv_pool: got shape {pool}, needs at least one page of one row")
    if table[1] == 0:
        raise ValueError(f"block_table: got shape {table}, needs at least one page a request")
    if max(B, N) > _MAX_GRID:
        raise ValueError(f"q: got {B} requests of {N} slots, needs at most {_MAX_GRID} of each")
    if not isinstance(scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"scale: got {type(scale).__name__}, needs a number")
    if not np.isfinite(scale):
        raise ValueError(f"scale: got {scale}, needs a finite number")
    return B, N, H, check_integer("latent_width", latent_width, 1, D)
