"""One request's draft tree as a picture."""

from __future__ import annotations

import math
from collections.abc import Collection

from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.pictures.drawing import Drawing, Picture
from ddtree_numba.pictures.layout import Labels, draw_edge, draw_node, label_of, place

__all__ = ["draw_tree", "parents_of"]


def parents_of(tree: DraftTree, request: int = 0) -> dict[int, int | None]:
    """Return every used slot's parent slot, the root's None, siblings in the order of their chain."""
    parents: dict[int, int | None] = {}

    def add(slot: int, parent: int | None) -> None:
        parents[slot] = parent
        child = int(tree.first_child[request, slot])
        while child >= 0:
            add(child, slot)
            child = int(tree.next_sibling[request, child])

    add(0, None)
    return parents


def draw_tree(
    tree: DraftTree, request: int = 0, *, labels: Labels = None, marked: Collection[int] = (), caption: str = ""
) -> Picture:
    """Return a picture of one request's `tree` (NumPy arrays, see `DraftTree`): tokens and path probabilities.

    `labels` gives tokens their text, `marked` slots are drawn as accepted.

    >>> import numpy as np
    >>> from ddtree_numba.draft_tree import random_tree
    >>> print(draw_tree(random_tree(np.random.default_rng(0), 1, 2, node_counts=[1])).alt)
    Draft tree of 0 drafted nodes. 511 is the root.
    """
    parents = parents_of(tree, request)
    corners, right, bottom = place(parents)
    drawing = Drawing(right, bottom)
    sentences = [f"Draft tree of {len(parents) - 1} drafted nodes."]
    for slot, parent in parents.items():
        if parent is not None:
            draw_edge(drawing, corners[parent], corners[slot], "good" if slot in marked and parent in marked else "")
    for slot, parent in parents.items():
        name = label_of(int(tree.token_ids[request, slot]), labels)
        probability = math.exp(tree.log_probs[request, slot])
        below = "root" if slot == 0 else f"{probability:.3f}"
        draw_node(drawing, corners[slot], name, below, "good" if slot in marked else "")
        if parent is None:
            sentences.append(f"{name} is the root.")
        else:
            above = label_of(int(tree.token_ids[request, parent]), labels)
            sentences.append(f"{name} below {above}, slot {slot}, probability {probability:.3f}.")
    return Picture(drawing, " ".join(sentences), caption)
