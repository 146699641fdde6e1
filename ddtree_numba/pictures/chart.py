"""A line chart and a bar chart, for the few numbers that a lesson measures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ddtree_numba.pictures.drawing import Drawing, Picture

__all__ = ["bar_chart", "line_chart"]

_STYLES = ("hot", "good", "bad", "")


def line_chart(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    caption: str = "",
    log_x: bool = False,
) -> Picture:
    """Return a chart of one to four `lines` (name -> one number for each `x`), the vertical axis from 0.

    With `log_x` the horizontal axis is logarithmic.

    >>> print(line_chart([1, 2], {"chain": [1.0, 1.5]}, x_label="budget", y_label="tokens").alt)
    Line chart of tokens against budget. chain: 1 at 1, 1.5 at 2.
    """
    width, height, left, top, bottom = 560, 280, 54, 34, 236
    highest = max(max(values) for values in lines.values()) or 1.0
    step = _tick(highest / 4)
    ceiling = step * -(-highest // step)
    places = [math.log(value) for value in x] if log_x else list(x)
    low, high = min(places), max(places)

    def at(value_x: float, value_y: float) -> tuple[float, float]:
        share = (value_x - low) / (high - low) if high > low else 0.5
        return left + share * (width - left - 24), bottom - (bottom - top) * value_y / ceiling

    drawing = Drawing(width, height)
    level = 0.0
    while level <= ceiling + step / 2:
        y = at(low, level)[1]
        drawing.line([(left, y), (width - 16, y)], "grid")
        drawing.text(left - 8, y + 4, f"{level:g}", "end small soft")
        level += step
    for place, value in zip(places, x, strict=True):
        drawing.text(at(place, 0)[0], bottom + 18, f"{value:g}", "mid small soft")
    drawing.text((left + width) / 2, height - 8, x_label, "mid small")
    drawing.text(2, 14, y_label, "small")
    for index, (name, values) in enumerate(lines.items()):
        style = _STYLES[index % len(_STYLES)]
        points = [at(a, b) for a, b in zip(places, values, strict=True)]
        drawing.line(points, style)
        for point in points:
            drawing.dot(*point, 3.5, style)
        drawing.text(points[-1][0] - 6, points[-1][1] + (-10 if index == 0 else 18), name, f"end small bold {style}")
    described = " ".join(
        f"{name}: " + ", ".join(f"{b:.4g} at {a:g}" for a, b in zip(x, values, strict=True)) + "."
        for name, values in lines.items()
    )
    return Picture(drawing, f"Line chart of {y_label} against {x_label}. {described}", caption)


def bar_chart(
    values: Sequence[float], names: Sequence[object], *, marked: Collection[int] = (), y_label: str, caption: str = ""
) -> Picture:
    """Return a chart of one bar for each of `values` (0 or more), those at the indices `marked` in colour.

    >>> bar_chart([0.5, 0.25], ["a", "b"], marked=[0], y_label="probability").alt
    'Bar chart of probability. a: 0.5, marked; b: 0.25.'
    """
    width, height, bottom = 34, 150, 180
    highest = max(values) or 1.0
    drawing = Drawing(width * len(values) + 8, bottom + 24)
    drawing.text(2, 12, y_label, "small soft")
    words = []
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        left, tall, style = 4 + width * index, (height - 14) * value / highest, "hot" if index in marked else ""
        drawing.bar(left, bottom - tall, width - 8, max(tall, 1), style)
        drawing.text(left + (width - 8) / 2, bottom - tall - 4, f"{value:.2g}", f"mid small {style}")
        drawing.text(left + (width - 8) / 2, bottom + 16, name, f"mid small {style}")
        words.append(f"{name}: {value:.3g}" + (", marked" if index in marked else ""))
    return Picture(drawing, f"Bar chart of {y_label}. {'; '.join(words)}.", caption)


def _tick(rough: float) -> float:
    """Return the round number, 1, 2 or 5 times a power of ten, at or above `rough`."""
    power = 10.0 ** (len(f"{int(rough)}") - 1) if rough >= 1 else 10.0 ** -len(f"{1 / rough:.0f}")
    return next(power * factor for factor in (1, 2, 5, 10, 20, 50) if power * factor >= rough)
