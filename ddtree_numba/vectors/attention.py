"""Vectors of stage 4: attention whose answer is computed here, apart from the package's reference.

All numbers are small multiples of a power of two, so that every dot product is exact in float64, in any order; `exp` is
the portable one and sums run in a fixed order. So the files are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.draft_tree import DraftTree, random_tree
from ddtree_numba.portable_math import portable_exp, portable_log
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.vectors.case import CONTRACT, Case, int32, known


class Configuration(NamedTuple):
    """The sizes of one attention case."""

    name: str
    prefixes: tuple[int, ...]
    counts: tuple[int, ...]
    page_size: int
    heads: int
    latent: int
    rope: int
    dtype: str
    scale: float
    small: bool


KIMI_SCALE = 0.14467963  # of Kimi K2.5: (128 + 64) ** -0.5 and YaRN's factor

CONFIGURATIONS = (
    Configuration("known_26_page_1_float32", (0, 17, 64, 8191), (3, 5, 3, 5), 1, 2, 12, 4, "float32", 0.25, False),
    Configuration("known_26_page_16_float16", (0, 17, 64, 8191), (3, 5, 3, 5), 16, 2, 12, 4, "float16", 0.25, False),
    Configuration("known_26_page_64_bfloat16", (0, 17, 64, 8191), (3, 5, 3, 5), 64, 2, 12, 4, "bfloat16", 0.25, False),
    Configuration("kimi_heads_float32", (17,), (33,), 16, 64, 512, 64, "float32", KIMI_SCALE, False),
    Configuration("kimi_heads_bfloat16", (0, 300), (33, 20), 64, 64, 512, 64, "bfloat16", KIMI_SCALE, False),
    Configuration("many_slots_float32", (40, 3), (257, 224), 16, 1, 32, 8, "float32", 0.25, False),
)
"""The six documented configurations."""

_SMALL = Configuration("small", (0, 7), (3, 4), 4, 2, 8, 4, "float32", 0.25, True)


def exact_attention(inputs: dict[str, np.ndarray], scale: float, latent_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse), float64: every node sees its prefix and the slots of its bits that are used."""
    q, pool = _wide(inputs["q"]), _wide(inputs["kv_pool"])
    batch, nodes, heads, _ = q.shape
    out = np.zeros((batch, nodes, heads, latent_width))
    lse = np.full((batch, nodes, heads), -np.inf)
    for b in range(batch):
        used = int(inputs["node_count"][b])
        if used == 0:
            continue
        rows, visible = _rows_and_visible(inputs, pool, b)
        scores = np.where(visible[:, None], scale * np.einsum("nhd,rd->nhr", q[b, :used], rows), -np.inf)
        largest = scores.max(axis=2)
        shift = np.where(np.isfinite(largest), largest, 0.0)
        weights = portable_exp(scores - shift[..., None])
        total = np.add.accumulate(weights, axis=2)[..., -1]  # one order, unlike sum
        mixed = np.zeros((used, heads, latent_width))
        for row in range(len(rows)):
            mixed = mixed + weights[:, :, row, None] * rows[row, :latent_width]
        seen = total > 0
        out[b, :used][seen] = mixed[seen] / total[seen][:, None]
        lse[b, :used][seen] = shift[seen] + portable_log(total[seen])
    return out, lse


def _rows_and_visible(inputs: dict[str, np.ndarray], pool: np.ndarray, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a request's rows [prefix + used, D] and which its nodes see [used, prefix + used]."""
    prefix, used = int(inputs["prefix_lengths"][b]), int(inputs["node_count"][b])
    numbers = np.arange(prefix + used)
    rows = pool[inputs["block_table"][b, numbers // pool.shape[1]], numbers % pool.shape[1]]
    visible = np.zeros((used, prefix + used), bool)
    visible[:, :prefix] = True
    for node in range(used):
        for slot in range(used):
            visible[node, prefix + slot] = int(inputs["ancestor_bits"][b, node, slot // 32]) >> slot % 32 & 1
    return rows, visible


def _bounds(inputs: dict[str, np.ndarray], scale: float, latent_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest errors of `out` [B, N, H, 1] and `lse` [B, N, H] that float32 arithmetic can make.

    With u = 2**-24, of n visible rows: a dot product of D terms errs by (D + 2) u * sum |q| |k| in any order, scaling
    by u |score|; subtracting the maximum by u * spread, once in a weight and once in all rescalings; exp and each
    rescaling by 4 u; a sum by n u. The result is a quotient of two such sums, each value at most the largest visible.
    16-bit inputs may have their weights and their result rounded to the same 16 bits: three roundings more.
    """
    q, pool = _wide(inputs["q"]), _wide(inputs["kv_pool"])
    batch, nodes, heads, width = q.shape
    unit = 2.0**-24
    half = {np.dtype(np.uint16): 2.0**-9, np.dtype(np.float16): 2.0**-12}.get(inputs["q"].dtype, 0.0)
    out_bound, lse_bound = np.zeros((batch, nodes, heads, 1)), np.zeros((batch, nodes, heads))
    for b in range(batch):
        used = int(inputs["node_count"][b])
        if used == 0:
            continue
        rows, visible = _rows_and_visible(inputs, pool, b)
        scores = scale * np.einsum("nhd,rd->nhr", q[b, :used], rows)
        sizes = scale * np.einsum("nhd,rd->nhr", np.abs(q[b, :used]), np.abs(rows))
        inside = np.broadcast_to(visible[:, None], scores.shape)
        magnitude = np.where(inside, np.abs(scores), 0).max(axis=2)
        score_error = np.where(inside, (width + 2) * sizes, 0).max(axis=2) + magnitude
        count = visible.sum(axis=1)[:, None]
        relative = (score_error + 4 * magnitude + 4 + 6 * count) * unit
        value = np.where(visible[:, :, None], np.abs(rows[:, :latent_width]), 0).max(axis=(1, 2))[:, None]
        rounded = 3 * half + (count * 2.0**-25 if half else 0)
        out_bound[b, :used, :, 0] = (2 * relative + rounded) * value
        lse_bound[b, :used] = score_error * unit + relative + rounded + (8 + 2 * magnitude) * unit
    return out_bound, lse_bound


def _wide(array: np.ndarray) -> np.ndarray:
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def _narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    values = values.astype(np.float32)
    return to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def _grid(rng: StableRandom, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, rounded to what is exact in `dtype` and keeps dot products exact in float64."""
    step = 16 if dtype == "bfloat16" else 256
    return np.clip(np.rint(rng.normal(shape) * step), -63 * step // 16, 63 * step // 16) / step


def _inputs(rng: StableRandom, c: Configuration, tree: DraftTree) -> dict[str, np.ndarray]:
    """Lay the rows out in shuffled pages; whatever belongs to nobody is NaN."""
    width = c.latent + c.rope
    needed = [-(-(prefix + used) // c.page_size) for prefix, used in zip(c.prefixes, c.counts, strict=True)]
    pages = rng.permutation(sum(needed) + 3)
    pool = np.full((len(pages), c.page_size, width), np.nan)
    table = np.full((len(needed), max(needed) + 1), 2**31 - 1, np.int32)
    for b, (prefix, used) in enumerate(zip(c.prefixes, c.counts, strict=True)):
        mine, pages = pages[: needed[b]], pages[needed[b] :]
        table[b, : needed[b]] = mine
        rows = np.arange(prefix + used)
        pool[mine[rows // c.page_size], rows % c.page_size] = _grid(rng, (prefix + used, width), c.dtype)
    q = _grid(rng, (*tree.parents.shape, c.heads, width), c.dtype)
    for b, used in enumerate(c.counts):
        q[b, used:] = np.nan
    return {
        "q": _narrow(q, c.dtype),
        "kv_pool": _narrow(pool, c.dtype),
        "block_table": table,
        "prefix_lengths": int32(c.prefixes),
        "ancestor_bits": tree.ancestor_bits,
        "node_count": tree.node_count,
    }


def _case(name: str, rule: str, guards: str, source: str, inputs: Any, c: Configuration) -> Case:
    out, lse = exact_attention(inputs, c.scale, c.latent)
    bounds = _bounds(inputs, c.scale, c.latent)
    expected = {"out": out.astype(np.float32), "lse": lse.astype(np.float32)}
    tolerance = {"out": bounds[0].astype(np.float32), "lse": bounds[1].astype(np.float32)}
    parameters: dict[str, int | float] = {"scale": c.scale, "latent_width": c.latent}
    bfloat16 = ("q", "kv_pool") if c.dtype == "bfloat16" else ()
    where = f"tree_attention/{name}"
    return Case(where, rule, guards, source, inputs, parameters, expected, tolerance, bfloat16, c.small)


def attention_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of stage 4."""
    rng = StableRandom(seed, "attention")
    yield from _known_answers(rng)
    for c in CONFIGURATIONS:
        tree = random_tree(rng, len(c.counts), max(c.counts) - 1, node_counts=c.counts)
        ragged = c.name.startswith("known_26")
        rule, source = ("paged_rows", known(26)) if ragged else ("branch_isolation", CONTRACT)
        guards = (
            "requests of one length, one prefix or one page order" if ragged else "a mask, a head or a width cut off"
        )
        yield _case(c.name, rule, guards, source, _inputs(rng, c, tree), c)


def _known_answers(rng: StableRandom) -> Iterator[Case]:
    c = _SMALL._replace(prefixes=(5,), counts=(7,))
    tree = random_tree(rng, 1, 6, node_counts=[7])
    inputs = _inputs(rng, c, tree)
    rule, guards = "branch_isolation", "a node sees its sibling's branch"
    yield _case("known_23_tree", rule, guards, known(23), inputs, c)
    yield _case("known_23_branch_as_a_chain", rule, guards, known(23), *_branch(inputs, tree, c))

    tree = random_tree(rng, 2, 3, node_counts=[3, 4])
    inputs = _inputs(rng, _SMALL, tree)
    blind = {**inputs, "ancestor_bits": inputs["ancestor_bits"].copy()}
    blind["ancestor_bits"][0] = 0
    yield _case("known_24_nothing_visible", "nothing_visible", "0 / 0", known(24), blind, _SMALL)
    guards = "unused rows hold anything, and their bits too"
    dirty = {**inputs, "ancestor_bits": inputs["ancestor_bits"].copy()}
    dirty["ancestor_bits"][0, 3:] = 0xFFFFFFFF
    yield _case("known_25_unused_query", "unused_query", guards, known(25), dirty, _SMALL)
    alone = {**inputs, "node_count": int32([0, 4])}
    yield _case("an_empty_request", "unused_query", "a request that sits the round out", CONTRACT, alone, _SMALL)

    spiked = {**inputs, "q": np.zeros_like(inputs["q"]), "kv_pool": inputs["kv_pool"].copy()}
    spiked["q"][..., -1] = 16
    spiked["kv_pool"][..., -1] = rng.integers(-20, 21, spiked["kv_pool"].shape[:2])
    guards = "sums without the maximum subtracted overflow; scores from -80 to 80"
    yield _case("scores_from_minus_80_to_80", "log_softmax", guards, CONTRACT, spiked, _SMALL)
    for page_size in (1, 3, 16):
        d = _SMALL._replace(page_size=page_size, prefixes=(15, 0), counts=(2, 5))
        tree = random_tree(rng, 2, 4, node_counts=d.counts)
        guards = "a page border inside the prefix or the tree"
        yield _case(f"small_page_{page_size}", "paged_rows", guards, known(26), _inputs(rng, d, tree), d)
    chain = random_tree(rng, 1, 33, vocab=1, node_counts=[34])
    d = _SMALL._replace(prefixes=(2,), counts=(34,), heads=1)
    yield _case("chain_of_34", "bits_little_endian", "the second mask word", known(19), _inputs(rng, d, chain), d)


def _branch(
    inputs: dict[str, np.ndarray], tree: DraftTree, c: Configuration
) -> tuple[dict[str, np.ndarray], Configuration]:
    """Return the same queries and rows with the deepest node's ancestors alone, as a chain."""
    prefix, node = c.prefixes[0], int(np.argmax(tree.depths[0]))
    chain: list[int] = []
    while node >= 0:
        chain.insert(0, node)
        node = int(tree.parents[0, node])
    count = len(chain)
    pool = inputs["kv_pool"].copy()
    table, size = inputs["block_table"][0], c.page_size
    source, target = prefix + np.array(chain), prefix + np.arange(count)
    pool[table[target // size], target % size] = inputs["kv_pool"][table[source // size], source % size]
    bits = np.array([[[(1 << i + 1) - 1] for i in range(count)]], np.uint32)
    q = np.ascontiguousarray(inputs["q"][:, chain])
    changed = {"q": q, "kv_pool": pool, "ancestor_bits": bits, "node_count": int32([count])}
    return {**inputs, **changed}, c._replace(counts=(count,))
