"""The KV commit row by row: every step is what the reference leaves when it commits one slot more."""

from __future__ import annotations

import numpy as np

from ddtree_numba.pictures.drawing import Drawing
from ddtree_numba.pictures.slider import Step, StepSlider
from ddtree_numba.stages.kv_commit import commit_kv_reference

__all__ = ["commit_steps", "commit_trace"]

_CELL, _HEIGHT = 44, 28


def commit_trace(
    rows: list[str], page_size: int, block_table: list[int], prefix: int, accept_slots: list[int]
) -> list[list[list[str]]]:
    """Return the pool, as pages of row names, before the commit and after each accepted slot.

    `rows` names the rows of one request in their order; row i lies in page ``block_table[i // page_size]``.

    >>> commit_trace(["p", "R", "A", "B"], 2, [1, 0], prefix=1, accept_slots=[0, 2])[-1]
    [['B', 'B'], ['p', 'R']]
    """
    table = np.array([block_table], np.int32)
    before = np.full((1, max(block_table) + 1, page_size, 1), -1, np.int32)
    for row in range(len(rows)):
        before[0, block_table[row // page_size], row % page_size] = row
    slots = np.array([accept_slots], np.int32)
    states = []
    for count in range(len(accept_slots) + 1):
        pool, length = before.copy(), np.array([prefix], np.int32)
        status = commit_kv_reference(pool, table, length, slots, np.array([count], np.int32))
        if status[0]:
            raise ValueError(f"accept_slots: got {accept_slots}, which the commit refuses with status {status[0]}")
        states.append([["" if row < 0 else rows[row] for row in page] for page in pool[0, :, :, 0].tolist()])
    return states


def commit_steps(
    rows: list[str], page_size: int, block_table: list[int], prefix: int, accept_slots: list[int]
) -> StepSlider:
    """Return the slider of one request's commit, arguments as in `commit_trace`.

    Above stand the request's rows in their order, below the pages of the pool as they lie in memory.
    """
    states = commit_trace(rows, page_size, block_table, prefix, accept_slots)
    pages = len(block_table)
    width = max(_CELL * page_size * pages, (_CELL * page_size + 14) * len(states[0])) + 2
    steps = []
    for count, pool in enumerate(states):
        logical = [name for page in block_table for name in pool[page]]
        drawing = Drawing(width, 190)
        _draw_rows(drawing, logical, page_size, prefix, count, accept_slots)
        _draw_pool(drawing, pool, page_size)
        order = ", ".join(name or "free" for name in logical)
        steps.append(Step(drawing, _caption(count, rows, prefix, accept_slots), f"Rows in order: {order}."))
    return StepSlider("KV commit", steps)


def _draw_rows(
    drawing: Drawing, logical: list[str], page_size: int, prefix: int, count: int, accept_slots: list[int]
) -> None:
    top = 56
    for row, name in enumerate(logical):
        kept = row < prefix + count
        style = "" if row < prefix else "good" if kept else "wait"
        x = 1 + _CELL * row
        drawing.box(x, top, _CELL - 3, _HEIGHT, style)
        drawing.text(x + (_CELL - 3) / 2, top + 19, name, "mid bold")
        drawing.text(x + (_CELL - 3) / 2, top + _HEIGHT + 14, row, "mid small soft")
        if row % page_size == 0 and row:
            drawing.line([(x - 2, top - 6), (x - 2, top + _HEIGHT + 18)], "wait")
    if count:
        source, target = prefix + accept_slots[count - 1], prefix + count - 1
        if source != target:
            drawing.curve((1 + _CELL * source + 20, top - 2), (1 + _CELL * target + 20, top - 2), 46, "good")
    drawing.text(1, 12, "the request's rows", "small soft")


def _draw_pool(drawing: Drawing, pool: list[list[str]], page_size: int) -> None:
    top = 140
    drawing.text(1, top - 8, "the pool's pages, as they lie in memory", "small soft")
    for page, names in enumerate(pool):
        left = 1 + page * (_CELL * page_size + 14)
        for place, name in enumerate(names):
            drawing.box(left + _CELL * place, top, _CELL - 3, _HEIGHT)
            drawing.text(left + _CELL * place + (_CELL - 3) / 2, top + 19, name, "mid")
        drawing.text(left, top + _HEIGHT + 14, f"page {page}", "small soft")


def _caption(count: int, rows: list[str], prefix: int, accept_slots: list[int]) -> str:
    if count == 0:
        return f"The prefix holds {prefix} rows; the tree's rows stand behind it, slot s at row {prefix} + s."
    slot = accept_slots[count - 1]
    source, target = prefix + slot, prefix + count - 1
    name = rows[source]
    if source == target:
        return f"Slot {slot}, {name}, is already at row {target}: nothing moves. Prefix length {prefix + count}."
    return f"Slot {slot}, {name}: row {source} to row {target}. Prefix length {prefix + count}."
