"""The accept walk comparison by comparison; where it ends is the reference's word."""

from __future__ import annotations

import numpy as np

from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.pictures.drawing import Drawing
from ddtree_numba.pictures.layout import Labels, draw_edge, draw_node, label_of, place
from ddtree_numba.pictures.slider import Step, StepSlider
from ddtree_numba.pictures.tree_picture import parents_of
from ddtree_numba.stages.accept_walk import accept_walk_reference

__all__ = ["walk_steps", "walk_trace"]


def walk_trace(tree: DraftTree, target_tokens: np.ndarray, request: int = 0) -> list[tuple[int, int, bool]]:
    """Return the comparisons of one request's walk: (slot stood on, child looked at, whether it matched).

    `tree` holds NumPy arrays, `target_tokens` [B, N] int32. The path is `accept_walk_reference`'s; between two of its
    slots lie the siblings that the chain passes.

    >>> from ddtree_numba.stages.best_first_tree import build_tree_reference
    >>> log_probs = np.log(np.array([[[0.6, 0.4]]], np.float32))
    >>> tree = build_tree_reference(log_probs, np.array([[[7, 8]]], np.int32), np.array([3], np.int32), 2)
    >>> walk_trace(tree, np.array([[8, 0, 0]], np.int32))
    [(0, 1, False), (0, 2, True)]
    """
    path = accept_walk_reference(tree, target_tokens)
    slots = path.accept_slots[request, : path.accept_count[request]].tolist()
    looked = []
    for index, node in enumerate(slots):
        following = slots[index + 1] if index + 1 < len(slots) else None
        child = int(tree.first_child[request, node])
        while child >= 0:
            looked.append((node, child, child == following))
            if child == following:
                break
            child = int(tree.next_sibling[request, child])
    return looked


def walk_steps(tree: DraftTree, target_tokens: np.ndarray, request: int = 0, *, labels: Labels = None) -> StepSlider:
    """Return the slider of one request's accept walk: every comparison is a step, the last one is the bonus token."""
    path = accept_walk_reference(tree, target_tokens)
    emitted = path.accept_tokens[request, : path.accept_count[request]].tolist()
    parents = parents_of(tree, request)
    corners, right, bottom = place(parents)
    names = {slot: label_of(int(tree.token_ids[request, slot]), labels) for slot in parents}
    wants = {slot: label_of(int(target_tokens[request, slot]), labels) for slot in parents}

    def draw(accepted: list[int], looked_at: int | None, done: list[int]) -> Drawing:
        drawing = Drawing(max(right, 420), bottom + 34)
        for slot, parent in parents.items():
            if parent is not None:
                style = "good" if slot in accepted else "bad" if slot == looked_at else ""
                draw_edge(drawing, corners[parent], corners[slot], style)
        for slot in parents:
            style = "good" if slot in accepted else "bad" if slot == looked_at else ""
            draw_node(drawing, corners[slot], names[slot], f"slot {slot}", style)
        drawing.text(1, bottom + 24, "emitted: " + (" ".join(label_of(t, labels) for t in done) or "nothing yet"))
        return drawing

    accepted = [0]
    steps = [
        Step(
            draw(accepted, None, []),
            f"The walk stands on the root, {names[0]}. After it the target wants {wants[0]}.",
            _alt(names, parents, accepted),
        )
    ]
    for node, child, match in walk_trace(tree, target_tokens, request):
        if match:
            accepted = [*accepted, child]
            caption = f"Slot {child} holds {names[child]}: the same. Move there; the target now wants {wants[child]}."
        else:
            caption = f"The target wants {wants[node]}; slot {child} holds {names[child]}: not the same. Next sibling."
        done = emitted[: len(accepted) - 1]
        steps.append(Step(draw(accepted, None if match else child, done), caption, _alt(names, parents, accepted)))
    bonus = label_of(emitted[-1], labels)
    caption = (
        f"No child of slot {accepted[-1]} is left: the target's {bonus} is the bonus token. Emitted: {len(emitted)}."
    )
    steps.append(Step(draw(accepted, None, emitted), caption, _alt(names, parents, accepted) + f" Bonus: {bonus}."))
    return StepSlider("Accept walk", steps)


def _alt(names: dict[int, str], parents: dict[int, int | None], accepted: list[int]) -> str:
    tree = ", ".join(
        f"slot {slot} {names[slot]}" + ("" if parent is None else f" below slot {parent}")
        for slot, parent in parents.items()
    )
    return f"Tree: {tree}. Accepted slots: {', '.join(map(str, accepted))}."
