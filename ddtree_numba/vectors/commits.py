"""Vectors of stage 6: accepted rows move to the end of the prefix. Expected by reading all before writing any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddtree_numba.draft_tree import STATUS_BAD_PAGE, STATUS_BROKEN_LINK
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.vectors.case import CONTRACT, Case, int32, known


def _moved(inputs: dict[str, np.ndarray], status: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a commit leaves, with every request read whole before any row of it is written."""
    pool, table = inputs["kv_pool"].copy(), inputs["block_table"]
    lengths, size = inputs["prefix_lengths"].copy(), pool.shape[2]
    for b, count in enumerate(inputs["accept_count"].tolist()):
        if status[b]:
            continue
        prefix = int(lengths[b])
        rows = [prefix + int(slot) for slot in inputs["accept_slots"][b, :count]]
        kept = [inputs["kv_pool"][:, table[b, row // size], row % size] for row in rows]
        for k, row in enumerate(kept):
            pool[:, table[b, (prefix + k) // size], (prefix + k) % size] = row
        lengths[b] += count
    return {"kv_pool": pool, "prefix_lengths": lengths, "status": status}


def _case(name: str, rule: str, guards: str, source: str, inputs: Any, status: Any = None, small: bool = True) -> Case:
    status = int32([0] * len(inputs["accept_count"]) if status is None else status)
    where, expected = f"commit_kv/{name}", _moved(inputs, status)
    return Case(where, rule, guards, source, inputs, {}, expected, small=small)


def _inputs(rng: StableRandom, paths: list[list[int]], prefixes: Any, size: int, **shape: Any) -> dict[str, np.ndarray]:
    """Return a pool whose rows all differ, and requests with the accepted slots `paths`, in shuffled pages."""
    layers, width, dtype = shape.get("layers", 2), shape.get("width", 3), shape.get("dtype", np.float32)
    columns = max(map(len, paths)) + 1
    furthest = max(p + (path[-1] if path else 0) for p, path in zip(prefixes, paths, strict=True))
    pages = furthest // size + 2
    slots = int32([path + [-1] * (columns - len(path)) for path in paths])
    count = layers * len(paths) * pages * size * width
    # Rows that differ, in numbers that every float holds.
    numbers = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(7)) % np.uint64(2039)
    return {
        "kv_pool": numbers.astype(dtype).reshape(layers, len(paths) * pages, size, width),
        "block_table": rng.permutation(len(paths) * pages).reshape(len(paths), pages).astype(np.int32),
        "prefix_lengths": int32(prefixes),
        "accept_slots": slots,
        "accept_count": int32([len(path) for path in paths]),
    }


def commit_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of stage 6."""
    rng = StableRandom(seed, "commits")
    order, grow = "read_before_write", "lengths_advance"
    named = _inputs(rng, [[0, 2, 3]], [0], 8, layers=1, width=1, dtype=np.uint8)
    named["kv_pool"][0, named["block_table"][0, 0], :5, 0] = np.frombuffer(b"RABCD", np.uint8)
    yield _case("known_32_overlap", order, "copied in descending order: R, C, C", known(32), named)
    border = _inputs(rng, [[0, 4, 7, 9]], [12], 16)
    yield _case("known_33_page_border", "paged_rows", "rows moved as if pages were in order", known(33), border)
    still = _inputs(rng, [[0, 1, 2]], [5], 4)
    yield _case("known_34_in_place", "untouched_when_in_place", "rows written that need no move", known(34), still)
    for size in (1, 4, 16, 64):
        paths, prefixes = _paths(rng, 6), rng.integers(0, 4 * size + 1, size=6)
        guards = "a page border between source and target, with neighbours of other lengths"
        yield _case(f"page_size_{size}", order, guards, CONTRACT, _inputs(rng, paths, prefixes.tolist(), size))
    for prefix in range(13, 17):
        guards = "the prefix ends at, before or behind a page border"
        inputs = _inputs(rng, [[0, 1, 3, 4, 9, 20]], [prefix], 16)
        yield _case(f"prefix_{prefix}_of_pages_of_16", "paged_rows", guards, CONTRACT, inputs)
    for dtype in (np.uint8, np.uint16, np.float16, np.float64):
        inputs = _inputs(rng, _paths(rng, 3), [3, 0, 30], 8, width=5, dtype=dtype)
        guards = "rows copied in words that do not divide them"
        yield _case(f"rows_of_5_{np.dtype(dtype).name}", order, guards, CONTRACT, inputs)
    resting = _inputs(rng, [[0, 2], [], [0]], [3, 5, 7], 4)
    yield _case("a_request_that_rests", grow, "a count of 0 taken for 1", CONTRACT, resting)
    broken = _inputs(rng, [[0, 3, 2], [0, 1, 3], [1, 3], [0, 2]], [1, 2, 3, 4], 4)
    broken["block_table"][3] = 10_000
    status = [STATUS_BROKEN_LINK, 0, 0, STATUS_BAD_PAGE]
    yield _case("a_request_with_a_fault", grow, "a broken request moves in part", CONTRACT, broken, status)
    many = _inputs(rng, _paths(rng, 64), rng.integers(0, 200, size=64).tolist(), 16, layers=3, width=16)
    yield _case("batch_of_64", order, "a request's rows in a neighbour's pages", CONTRACT, many, small=False)


def _paths(rng: StableRandom, count: int) -> list[list[int]]:
    """Return accepted slots of `count` requests, each rising from 0, gaps from 1 to 4."""
    paths = []
    for _ in range(count):
        gaps = rng.integers(1, 5, size=int(rng.integers(1, 9)))
        paths.append([0, *np.cumsum(gaps)[:-1].tolist()])
    return paths
