"""Where the nodes of a tree stand in a picture, and how a node looks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ddtree_numba.pictures.drawing import Drawing

__all__ = ["draw_edge", "draw_node", "label_of", "place"]

NODE_WIDTH, NODE_HEIGHT = 56, 36
_GAP_X, _GAP_Y = 12, 26

Labels = Mapping[int, str] | Sequence[str] | None


def label_of(token: int, labels: Labels) -> str:
    """Return the text of a token: its entry in `labels`, else its number."""
    if labels is None:
        return str(token)
    try:
        return labels[token]
    except (KeyError, IndexError):
        return str(token)


def place(
    parents: Mapping[Any, Any], left: float = 1, top: float = 1
) -> tuple[dict[Any, tuple[float, float]], float, float]:
    """Return the upper left corner of every node, and the picture's right and lower end.

    `parents` names each node's parent (the root's is None), parents first and siblings in order. Leaves stand side by
    side, a parent over the middle of its children.

    >>> corners, right, bottom = place({"root": None, "a": "root", "b": "root"})
    >>> corners["root"][0] == (corners["a"][0] + corners["b"][0]) / 2
    True
    """
    children: dict[Hashable, list[Hashable]] = {node: [] for node in parents}
    depth: dict[Hashable, int] = {}
    for node, parent in parents.items():
        depth[node] = 0 if parent is None else depth[parent] + 1
        if parent is not None:
            children[parent].append(node)
    column: dict[Hashable, float] = {}
    leaves = 0

    def settle(node: Hashable) -> float:
        nonlocal leaves
        if children[node]:
            columns = [settle(child) for child in children[node]]
            column[node] = (columns[0] + columns[-1]) / 2
        else:
            column[node] = float(leaves)
            leaves += 1
        return column[node]

    settle(next(iter(parents)))
    corners = {
        node: (left + column[node] * (NODE_WIDTH + _GAP_X), top + depth[node] * (NODE_HEIGHT + _GAP_Y))
        for node in parents
    }
    right = left + leaves * (NODE_WIDTH + _GAP_X) - _GAP_X + 1
    bottom = top + (max(depth.values()) + 1) * (NODE_HEIGHT + _GAP_Y) - _GAP_Y + 1
    return corners, right, bottom


def draw_edge(drawing: Drawing, parent: tuple[float, float], child: tuple[float, float], style: str = "") -> None:
    """Draw the line between two nodes, given by their corners."""
    drawing.line(
        [
            (parent[0] + NODE_WIDTH / 2, parent[1] + NODE_HEIGHT),
            (child[0] + NODE_WIDTH / 2, child[1]),
        ],
        style,
    )


def draw_node(drawing: Drawing, corner: tuple[float, float], title: str, below: str = "", style: str = "") -> None:
    """Draw a node: its token, and a smaller line below it."""
    x, y = corner
    drawing.box(x, y, NODE_WIDTH, NODE_HEIGHT, style)
    title = title if len(title) <= 7 else title[:6] + "…"
    drawing.text(x + NODE_WIDTH / 2, y + (16 if below else 23), title, "mid bold")
    if below:
        drawing.text(x + NODE_WIDTH / 2, y + 30, below, "mid small soft")
