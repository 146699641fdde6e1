"""The best-first construction step by step, from the heap of the reference itself."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ddtree_numba.pictures.drawing import Drawing
from ddtree_numba.pictures.layout import Labels, draw_edge, draw_node, label_of, place
from ddtree_numba.pictures.slider import Step, StepSlider
from ddtree_numba.stages.best_first_tree import reference

__all__ = ["HeapEntry", "HeapStep", "heap_steps", "heap_trace"]


class HeapEntry(NamedTuple):
    """A candidate on the heap."""

    score: float
    """Sum of natural log-probabilities along its path."""
    path: tuple[int, ...]
    """Ranks of the candidates chosen at depths 1, 2, ..."""


class HeapStep(NamedTuple):
    """One round of the loop: pop the best, push its next sibling and its first child."""

    popped: HeapEntry | None
    """What became a node; None for the step before the first."""
    pushed: list[HeapEntry]
    """What it put on the heap."""
    heap: list[HeapEntry]
    """The heap afterwards, in the order in which it would be popped."""


_recording = threading.Lock()


@contextmanager
def _recorded(steps: list[HeapStep]) -> Iterator[None]:
    """Let the reference run on a heap that writes down what is done to it."""

    def entry(item: tuple) -> HeapEntry:
        return HeapEntry(-item[0], item[1])

    def push(heap: list, item: tuple) -> None:
        heapq.heappush(heap, item)
        steps[-1].pushed.append(entry(item))
        steps[-1].heap[:] = [entry(other) for other in sorted(heap)]

    def pop(heap: list) -> tuple:
        item = heapq.heappop(heap)
        steps.append(HeapStep(entry(item), [], [entry(other) for other in sorted(heap)]))
        return item

    with _recording:
        steps.append(HeapStep(None, [], []))
        reference.heapq = SimpleNamespace(heappush=push, heappop=pop)  # type: ignore[assignment]
        try:
            yield
        finally:
            reference.heapq = heapq


def heap_trace(log_probs: np.ndarray, budget: int) -> list[HeapStep]:
    """Return what `build_tree_reference` does to its heap, for one request's candidates.

    `log_probs` [L, K] float32, best first. Step 0 is the first push; step i pops node i.

    >>> steps = heap_trace(np.log(np.array([[0.6, 0.4], [0.7, 0.3]], np.float32)), budget=2)
    >>> [step.popped.path for step in steps[1:]], [entry.path for entry in steps[-1].heap]
    ([(0,), (0, 0)], [(1,), (0, 1)])
    """
    steps: list[HeapStep] = []
    log_probs = np.ascontiguousarray(log_probs, np.float32)[None]
    with _recorded(steps):
        reference.build_tree_reference(log_probs, np.zeros(log_probs.shape, np.int32), np.zeros(1, np.int32), budget)
    return steps


def heap_steps(
    log_probs: np.ndarray, token_ids: np.ndarray, budget: int, *, root: str = "root", labels: Labels = None
) -> StepSlider:
    """Return the slider of one request's construction: the tree on the left, the heap on the right.

    `log_probs` [L, K] float32 and `token_ids` [L, K] int32 are its candidates; `labels` gives tokens their text.
    """
    trace = heap_trace(log_probs, budget)
    seen = {entry.path for step in trace for entry in step.pushed}
    parents: dict[tuple[int, ...], tuple[int, ...] | None] = {(): None}
    parents.update({path: path[:-1] for path in sorted(seen)})  # a prefix sorts before its extensions
    corners, right, bottom = place(parents)
    rows = max(len(step.heap) for step in trace)
    size = (right + 210, max(bottom, 44 + 22 * rows))

    def name(path: tuple[int, ...]) -> str:
        return label_of(int(token_ids[len(path) - 1, path[-1]]), labels) if path else root

    nodes: dict[tuple[int, ...], float] = {(): 0.0}
    steps = []
    for index, step in enumerate(trace):
        if step.popped is not None:
            nodes[step.popped.path] = step.popped.score
        drawing = Drawing(*size)
        _draw_frontier_and_nodes(drawing, corners, nodes, step, name)
        _draw_heap(drawing, right + 24, step, name)
        steps.append(Step(drawing, _caption(index, step, name), _alt(nodes, step, name)))
    return StepSlider(f"Best-first construction of {len(nodes) - 1} nodes", steps)


def _words(path: tuple[int, ...], name) -> str:
    return " ".join(name(path[: depth + 1]) for depth in range(len(path)))


def _draw_frontier_and_nodes(drawing: Drawing, corners: dict, nodes: dict, step: HeapStep, name) -> None:
    waiting = {entry.path: entry.score for entry in step.heap}
    for path in waiting:
        draw_edge(drawing, corners[path[:-1]], corners[path], "wait")
    for path in nodes:
        if path:
            draw_edge(drawing, corners[path[:-1]], corners[path])
    for path, score in waiting.items():
        draw_node(drawing, corners[path], name(path), f"{math.exp(score):.3f}", "wait")
    for path, score in nodes.items():
        new = step.popped is not None and path == step.popped.path
        draw_node(drawing, corners[path], name(path), f"{math.exp(score):.3f}" if path else "", "hot" if new else "")


def _draw_heap(drawing: Drawing, x: float, step: HeapStep, name) -> None:
    drawing.text(x, 16, "heap, best first", "soft small")
    if not step.heap:
        drawing.text(x, 40, "empty", "soft")
    for row, entry in enumerate(step.heap):
        y = 40 + 22 * row
        style = "hot" if entry in step.pushed else ""
        drawing.text(x, y, f"{math.exp(entry.score):.3f}", f"mono {style}")
        words = _words(entry.path, name)
        drawing.text(x + 52, y, words if len(words) <= 20 else "…" + words[-19:], style)


def _caption(index: int, step: HeapStep, name) -> str:
    if step.popped is None:
        return f"The heap starts with the best first token, {_words((0,), name)}." if step.pushed else "No candidate."
    pushed = " and ".join(f"“{_words(entry.path, name)}” ({math.exp(entry.score):.3f})" for entry in step.pushed)
    return f"Pop “{_words(step.popped.path, name)}”, {math.exp(step.popped.score):.3f}: it becomes node {index}. " + (
        f"Push {pushed}." if pushed else "Nothing to push."
    )


def _alt(nodes: dict, step: HeapStep, name) -> str:
    inside = ", ".join(f"{_words(path, name)} {math.exp(score):.3f}" for path, score in nodes.items() if path)
    heap = ", ".join(f"{_words(entry.path, name)} {math.exp(entry.score):.3f}" for entry in step.heap)
    return f"Nodes: {inside or 'none'}. Heap, best first: {heap or 'empty'}."
