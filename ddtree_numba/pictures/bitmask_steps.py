"""The visibility rows step by step, from the reference's own rows."""

from __future__ import annotations

import numpy as np

from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.pictures.drawing import Drawing
from ddtree_numba.pictures.layout import Labels, draw_edge, draw_node, label_of, place
from ddtree_numba.pictures.slider import Step, StepSlider
from ddtree_numba.pictures.tree_picture import parents_of
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference

__all__ = ["bitmask_steps"]

_CELL = 22


def bitmask_steps(tree: DraftTree, request: int = 0, *, labels: Labels = None) -> StepSlider:
    """Return the slider that fills the visibility rows of one request's `tree` (at most 32 nodes), row by row."""
    count = int(tree.node_count[request])
    if count > 32:
        raise ValueError(f"tree: got {count} nodes, needs at most 32 for a picture")
    rows, _ = ancestor_bitmask_reference(tree.parents[request : request + 1], tree.node_count[request : request + 1])
    words = rows[0, :count, 0].tolist()
    parents = parents_of(tree, request)
    corners, right, bottom = place(parents)
    names = [label_of(int(token), labels) for token in tree.token_ids[request, :count]]
    left = right + 60
    size = (left + _CELL * count + 96, max(bottom, 26 + _CELL * count))

    steps = []
    for now in range(count):
        drawing = Drawing(*size)
        seen = [slot for slot in range(count) if words[now] >> slot & 1]
        for slot, parent in parents.items():
            if parent is not None:
                draw_edge(drawing, corners[parent], corners[slot], "hot" if slot in seen else "")
        for slot in parents:
            draw_node(drawing, corners[slot], names[slot], f"slot {slot}", "hot" if slot in seen else "")
        _draw_rows(drawing, left, names, words, now)
        steps.append(Step(drawing, _caption(now, parents[now], names, words), _alt(now, names, words)))
    return StepSlider(f"Visibility bits of {count} nodes", steps)


def _draw_rows(drawing: Drawing, left: float, names: list[str], words: list[int], now: int) -> None:
    count = len(words)
    for slot in range(count):
        drawing.text(left + _CELL * (slot + 0.5), 14, slot, "mid small soft")
    for row in range(now + 1):
        y = 20 + _CELL * row
        drawing.text(left - 8, y + 15, names[row][:6], "end small" + (" hot" if row == now else ""))
        for slot in range(count):
            bit = words[row] >> slot & 1
            style = "hot" if bit and row == now else ""
            drawing.box(left + _CELL * slot, y, _CELL - 2, _CELL - 2, style or ("" if bit else "wait"), 2)
            drawing.text(left + _CELL * slot + (_CELL - 2) / 2, y + 15, bit, "mid small" + ("" if bit else " soft"))
        drawing.text(left + _CELL * count + 8, y + 15, f"0x{words[row]:0{-(-count // 4)}X}", "mono")


def _caption(now: int, parent: int | None, names: list[str], words: list[int]) -> str:
    if parent is None:
        return f"Row 0 is the root, {names[0]}: it sees itself. Bit 0, value 0x{words[0]:X}."
    return (
        f"Row {now}, {names[now]}: the row of its parent (slot {parent}, {names[parent]}) with bit {now} added, "
        f"0x{words[parent]:X} | 0x{1 << now:X} = 0x{words[now]:X}."
    )


def _alt(now: int, names: list[str], words: list[int]) -> str:
    rows = []
    for row in range(now + 1):
        seen = np.flatnonzero([words[row] >> slot & 1 for slot in range(len(words))]).tolist()
        rows.append(f"slot {row}, {names[row]}, sees {', '.join(map(str, seen))}")
    return "; ".join(rows) + "."
