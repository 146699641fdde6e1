"""Which thread of a block took which element, pass by pass of a block-stride loop."""

from __future__ import annotations

import numpy as np

from ddtree_numba.pictures.drawing import Drawing
from ddtree_numba.pictures.slider import Step, StepSlider

__all__ = ["stride_steps"]

_CELL, _HEIGHT, _COLUMNS = 44, 40, 14


def stride_steps(threads: np.ndarray, passes: np.ndarray) -> StepSlider:
    """Return the slider over the passes of one block.

    `threads` [elements] and `passes` [elements]: which thread wrote the element, and in which pass of its loop.

    >>> stride_steps(np.array([0, 1, 0]), np.array([0, 0, 1])).steps[1].alt
    'Pass 1: element 2 by thread 0.'
    """
    steps = []
    rows = -(-len(threads) // _COLUMNS)
    for now in range(int(passes.max()) + 1):
        drawing = Drawing(_CELL * min(len(threads), _COLUMNS) + 2, rows * (_HEIGHT + 22) + 2)
        for element, (thread, turn) in enumerate(zip(threads.tolist(), passes.tolist(), strict=True)):
            x, y = 1 + _CELL * (element % _COLUMNS), 16 + (element // _COLUMNS) * (_HEIGHT + 22)
            style = "hot" if turn == now else "" if turn < now else "wait"
            drawing.text(x + (_CELL - 4) / 2, y - 4, element, "mid small soft")
            drawing.box(x, y, _CELL - 4, _HEIGHT, style, 3)
            if turn <= now:
                drawing.text(x + (_CELL - 4) / 2, y + 25, f"t{thread}", "mid bold" if turn == now else "mid soft")
        taken = np.flatnonzero(passes == now).tolist()
        steps.append(
            Step(
                drawing,
                f"Pass {now}: threads {threads[taken[0]]} to {threads[taken[-1]]} take elements "
                f"{taken[0]} to {taken[-1]}, side by side in memory.",
                f"Pass {now}: " + ", ".join(f"element {e} by thread {threads[e]}" for e in taken) + ".",
            )
        )
    return StepSlider("A block-stride loop", steps)
