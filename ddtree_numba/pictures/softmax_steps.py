"""Online softmax, tile by tile: the running maximum, denominator and output, and what a tile does to them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ddtree_numba.pictures.drawing import Drawing
from ddtree_numba.pictures.slider import Step, StepSlider

__all__ = ["TileStep", "online_softmax", "softmax_steps"]


class TileStep(NamedTuple):
    """The running state after a tile."""

    largest: float
    """m: the largest score so far, -inf before the first visible row."""
    total: float
    """l: sum of exp(score - m) so far."""
    out: np.ndarray
    """[D] float64: sum of exp(score - m) * value so far, not yet divided by l."""
    correction: float
    """exp(old m - new m): what the older sums were multiplied by."""


def online_softmax(scores: np.ndarray, values: np.ndarray, tile: int) -> list[TileStep]:
    """Return the running state after every tile of `tile` rows.

    `scores` [rows] and `values` [rows, D]; a score of -inf is a row that is not visible.

    >>> last = online_softmax(np.log([1.0, 2.0, 1.0]), np.array([[4.0], [8.0], [0.0]]), tile=2)[-1]
    >>> (last.out / last.total).round(6).tolist()
    [5.0]
    """
    largest, total, out = -math.inf, 0.0, np.zeros(values.shape[1])
    steps = []
    for start in range(0, len(scores), tile):
        part = np.asarray(scores[start : start + tile], np.float64)
        new = max(largest, float(part.max()))
        shift = new if math.isfinite(new) else 0.0  # nothing visible yet: -inf - -inf would be NaN
        correction = math.exp(largest - shift)
        weights = np.exp(part - shift)
        total = total * correction + float(weights.sum())
        out = out * correction + weights @ values[start : start + tile]
        largest = new
        steps.append(TileStep(largest, total, out, correction))
    return steps


def softmax_steps(scores: np.ndarray, values: np.ndarray, tile: int) -> StepSlider:
    """Return the slider over the tiles, arguments as in `online_softmax`."""
    states = online_softmax(scores, values, tile)
    finite = [score for score in scores.tolist() if math.isfinite(score)]
    low, high = min([*finite, 0.0]) - 0.5, max([*finite, 0.0]) + 0.5
    steps = []
    for index, state in enumerate(states):
        drawing = Drawing(40 * len(scores) + 250, 210)
        _draw_bars(drawing, scores, low, high, tile, index, state.largest)
        _draw_state(drawing, 40 * len(scores) + 40, state)
        steps.append(Step(drawing, _caption(index, state), _alt(scores, tile, index, state)))
    return StepSlider("Online softmax over tiles", steps)


def _draw_bars(
    drawing: Drawing, scores: np.ndarray, low: float, high: float, tile: int, now: int, largest: float
) -> None:
    def height(score: float) -> float:
        return 22 + 150 * (high - score) / (high - low)

    for row, score in enumerate(scores.tolist()):
        x = 4 + 40 * row
        style = "hot" if row // tile == now else ""
        if math.isfinite(score):
            top = height(score)
            drawing.bar(x, top, 30, 172 - top, style)
            drawing.text(x + 15, top - 4, f"{score:.1f}", "mid small")
        else:
            drawing.text(x + 15, 168, "hidden", "mid small soft")
        drawing.text(x + 15, 188, row, "mid small soft")
        if row % tile == 0 and row:
            drawing.line([(x - 5, 8), (x - 5, 192)], "wait")
    if math.isfinite(largest):
        drawing.line([(0, height(largest)), (40 * len(scores), height(largest))], "good")
    drawing.text(0, 206, "row", "small soft")


def _draw_state(drawing: Drawing, x: float, state: TileStep) -> None:
    mean = state.out / state.total if state.total else state.out
    lines = [
        ("m, largest score", f"{state.largest:.3f}"),
        ("older sums times", f"{state.correction:.4f}"),
        ("l, denominator", f"{state.total:.4f}"),
        ("output so far", " ".join(f"{number:.3f}" for number in mean[:3])),
    ]
    for row, (name, value) in enumerate(lines):
        drawing.text(x, 34 + 44 * row, name, "small soft")
        drawing.text(x, 52 + 44 * row, value, "mono bold")


def _caption(index: int, state: TileStep) -> str:
    if state.total == 0.0:
        return f"Tile {index}: no row is visible. The state stays (m = -inf, l = 0, output 0)."
    if index == 0 or state.correction == 0.0:
        return f"Tile {index}: the first visible scores set m to {state.largest:.3f}."
    if state.correction == 1.0:
        return f"Tile {index}: no larger score, m stays {state.largest:.3f} and the older sums stay as they are."
    return (
        f"Tile {index}: a larger score raises m to {state.largest:.3f}; "
        f"the older sums are multiplied by {state.correction:.4f}, then the tile is added."
    )


def _alt(scores: np.ndarray, tile: int, index: int, state: TileStep) -> str:
    part = ", ".join(f"{score:.2f}" for score in scores[index * tile : (index + 1) * tile])
    return f"Scores of tile {index}: {part}. m {state.largest:.3f}, l {state.total:.4f}."
