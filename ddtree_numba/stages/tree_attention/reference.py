"""Stage 4, the definition: latent attention of every tree node over its prefix and its own branch, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.arguments import ArrayCheck, check_integer, dtype_of
from ddtree_numba.bfloat16 import from_bfloat16
from ddtree_numba.draft_tree import mask_words

INPUTS = ("q", "kv_pool", "block_table", "prefix_lengths", "ancestor_bits", "node_count")
MAX_GRID = 65535
FLOATS = (np.float32, np.float16, np.uint16)


def tree_attention_reference(
    q: np.ndarray,
    kv_pool: np.ndarray,
    block_table: np.ndarray,
    prefix_lengths: np.ndarray,
    ancestor_bits: np.ndarray,
    node_count: np.ndarray,
    scale: float,
    *,
    latent_width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend from every (node, head) to the rows its node may see.

    ``q`` (B, N, H, D): absorbed queries, the latent part and then the rope part
    ``kv_pool`` (pages, page_size, D): one row per token; all of it is the key, its first D_c numbers the value
    ``block_table`` (B, max_pages) int32: row r of request b lies in page ``block_table[b, r // page_size]``
    ``prefix_lengths`` (B,) int32: rows 0 .. prefix - 1 are seen by every node of the request
    ``ancestor_bits`` (B, N, W) uint32: node i sees row prefix + j when bit j of its row is set and j < node_count;
    bits from ``node_count`` on mean nothing, because no row is there
    ``node_count`` (B,) int32: used slots; slots from there on give 0 and -inf
    ``scale``: multiplies the dot product; ``latent_width``: D_c

    Returns ``out`` (B, N, H, D_c) and ``lse`` (B, N, H), the natural logarithm of the softmax denominator, both
    float64. A node that sees nothing gives 0 and -inf. Every dtype is widened first; uint16 is bfloat16, and float64 is
    taken here though no kernel has it.

    Raises `TypeError` and `ValueError` as `tree_attention` does.

    Source: the absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) under the
    ancestor-only mask of tree verification (DDTree, arXiv 2604.12989).

    >>> q = np.zeros((1, 2, 1, 3), np.float32)                  # zero queries: the plain mean of what is seen
    >>> kv_pool = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    >>> table, prefix, count = np.array([[1, 0]], np.int32), np.array([1], np.int32), np.array([2], np.int32)
    >>> bits = np.array([[[0b01], [0b11]]], np.uint32)          # root, and a child that sees root and itself
    >>> out, lse = tree_attention_reference(q, kv_pool, table, prefix, bits, count, 1.0, latent_width=2)
    >>> out[0, :, 0]                                            # rows of the request: 6 7, 9 10, 0 1
    array([[7.5, 8.5],
           [5. , 6. ]])
    >>> np.exp(lse[0, :, 0]).round(6)
    array([2., 3.])
    """
    arrays = (q, kv_pool, block_table, prefix_lengths, ancestor_bits, node_count)
    check_arguments(dict(zip(INPUTS, arrays, strict=True)), scale, latent_width, (*FLOATS, np.float64))
    check_pages(block_table, prefix_lengths, node_count, kv_pool.shape[0], kv_pool.shape[1], q.shape[1])
    batch, nodes, heads, _ = q.shape
    out = np.zeros((batch, nodes, heads, latent_width))
    lse = np.full((batch, nodes, heads), -np.inf)
    for b in range(batch):
        used, prefix = int(node_count[b]), int(prefix_lengths[b])
        if used > 0:
            keys = _request_rows(kv_pool, block_table[b], prefix + used)
            in_tree = _unpack_bits(ancestor_bits[b, :used], used)
            out[b, :used], lse[b, :used] = _attend(_widen(q[b, :used]), keys, in_tree, scale, latent_width)
    return out, lse


def check_arguments(
    arrays: dict[str, Any], scale: float, latent_width: int, floats: tuple[Any, ...] = FLOATS
) -> tuple[int, int, int, int]:
    """Return B, N, H, D_c when shapes and dtypes fit together."""
    check = ArrayCheck()
    B, N, H, D = check("q", arrays["q"], "B N H D", floats)
    pool = check("kv_pool", arrays["kv_pool"], "* * D", (dtype_of(arrays["q"]),))
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
    if max(B, N) > MAX_GRID:
        raise ValueError(f"q: got {B} requests of {N} slots, needs at most {MAX_GRID} of each")
    if not isinstance(scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"scale: got {type(scale).__name__}, needs a number")
    if not abs(scale) <= float(np.finfo(np.float32).max):
        raise ValueError(f"scale: got {scale}, needs a finite number that float32 holds")
    return B, N, H, check_integer("latent_width", latent_width, 1, D)


def check_pages(
    block_table: np.ndarray,
    prefix_lengths: np.ndarray,
    node_count: np.ndarray,
    pages: int,
    page_size: int,
    nodes: int,
) -> None:
    """Raise ValueError unless every row that a request may read has a page of the pool.

    Entries of ``block_table`` past a request's last row are never looked at and may hold anything.
    """
    capacity = block_table.shape[1] * page_size
    for b in range(len(prefix_lengths)):
        prefix, used = int(prefix_lengths[b]), int(node_count[b])
        if not 0 <= used <= nodes:
            raise ValueError(f"node_count[{b}]: got {used}, needs 0 to {nodes}, the slots of q")
        if prefix < 0 or prefix + used > capacity:
            raise ValueError(
                f"prefix_lengths[{b}]: got {prefix} before {used} nodes, needs a place for each row in block_table, "
                f"which has {block_table.shape[1]} pages of {page_size}"
            )
        needed = block_table[b, : -(-(prefix + used) // page_size)]
        if needed.size and (needed.min() < 0 or needed.max() >= pages):
            bad = int(np.argmax((needed < 0) | (needed >= pages)))
            raise ValueError(
                f"block_table[{b}, {bad}]: got {int(needed[bad])}, needs a page of kv_pool, 0 to {pages - 1}"
            )


def _request_rows(kv_pool: np.ndarray, pages: np.ndarray, count: int) -> np.ndarray:
    """The first `count` rows of one request in float64, collected through its line of the block table."""
    rows = np.arange(count)
    page_size = kv_pool.shape[1]
    return _widen(kv_pool[pages[rows // page_size], rows % page_size])


def _unpack_bits(words: np.ndarray, count: int) -> np.ndarray:
    """Mask words [nodes, W] -> booleans [nodes, count], least significant bit first."""
    little_endian = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    return np.unpackbits(little_endian, axis=1, count=count, bitorder="little").astype(bool)


def _attend(
    q: np.ndarray, keys: np.ndarray, in_tree: np.ndarray, scale: float, latent_width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of one request: q [n, H, D], keys [prefix + n, D], in_tree [n, n]."""
    used, heads, width = q.shape
    prefix = len(keys) - used
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scores = ((scale * q).reshape(-1, width) @ keys.T).reshape(used, heads, len(keys))
        np.copyto(scores[:, :, prefix:], -np.inf, where=~in_tree[:, None, :])

        largest = scores.max(axis=2)
        shift = np.where(largest == -np.inf, 0.0, largest)  # nothing visible: -inf - -inf would be NaN
        scores -= shift[:, :, None]
        weights = np.exp(scores, out=scores)
        total = weights.sum(axis=2)
        out = _weighted_sum(weights, keys[:, :latent_width]) / np.where(total == 0.0, 1.0, total)[:, :, None]
        return out, shift + np.log(total)


def _weighted_sum(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return weights [n, H, rows] times values [rows, D_c], where a weight of 0 takes nothing, not even NaN."""
    finite = np.isfinite(values).all(axis=1)
    used, heads, rows = weights.shape
    flat = weights.reshape(-1, rows)
    if finite.all():
        return (flat @ values).reshape(used, heads, -1)
    out = flat[:, finite] @ values[finite]
    for row in np.flatnonzero(~finite):
        sees = flat[:, row] != 0.0
        out[sees] += flat[sees, row, None] * values[row]
    return out.reshape(used, heads, -1)


def _widen(array: np.ndarray) -> np.ndarray:
    """Any accepted dtype -> float64."""
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)
