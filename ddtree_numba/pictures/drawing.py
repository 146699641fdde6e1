"""Inline SVG: shapes by class name, colours by CSS variables, so that a picture follows the page's light or dark theme.

A picture is one string of HTML that needs nothing around it: the few style rules travel with it, its text is text, and
its alternative text is made from the same data as its shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["Drawing", "Figure", "Picture", "figure"]

_LIGHT = (
    "--ddt-ink:#1f2328;--ddt-soft:#59636e;--ddt-line:#8c959f;--ddt-face:#f6f8fa;--ddt-page:#fff;"
    "--ddt-hot:#0550ae;--ddt-hot-face:#ddf4ff;--ddt-good:#116329;--ddt-good-face:#dafbe1;"
    "--ddt-bad:#a40e26;--ddt-bad-face:#ffebe9"
)
_DARK = (
    "--ddt-ink:#e6edf3;--ddt-soft:#9ba6b2;--ddt-line:#6e7681;--ddt-face:#21262d;--ddt-page:#131416;"
    "--ddt-hot:#79c0ff;--ddt-hot-face:#10294a;--ddt-good:#7ee787;--ddt-good-face:#12331d;"
    "--ddt-bad:#ffa198;--ddt-bad-face:#4b1113"
)
# The theme switches of furo and of Jupyter both sit on `body`; without either, the reader's system decides.
_STYLE = f"""<style>
.ddt{{{_LIGHT};margin:1.2em 0;color:var(--ddt-ink);text-align:left}}
@media(prefers-color-scheme:dark){{body:not([data-theme=light],[data-jp-theme-light=true]) .ddt{{{_DARK}}}}}
body[data-theme=dark] .ddt,body[data-jp-theme-light=false] .ddt{{{_DARK}}}
@media print{{body .ddt.ddt{{{_LIGHT}}}}}
.ddt-scroll{{overflow-x:auto}}
.ddt svg{{display:block;height:auto;max-width:100%;font:13px system-ui,sans-serif}}
.ddt text{{fill:var(--ddt-ink)}} .ddt .soft{{fill:var(--ddt-soft)}} .ddt .small{{font-size:11px}}
.ddt .mono{{font-family:ui-monospace,monospace;font-size:12px}} .ddt .bold{{font-weight:600}}
.ddt .mid{{text-anchor:middle}} .ddt .end{{text-anchor:end}}
.ddt text.hot{{fill:var(--ddt-hot)}} .ddt text.good{{fill:var(--ddt-good)}} .ddt text.bad{{fill:var(--ddt-bad)}}
.ddt .shape{{fill:var(--ddt-face);stroke:var(--ddt-line)}} .ddt .shape.wait{{fill:none;stroke-dasharray:4 3}}
.ddt .shape.hot{{fill:var(--ddt-hot-face);stroke:var(--ddt-hot);stroke-width:2}}
.ddt .shape.good{{fill:var(--ddt-good-face);stroke:var(--ddt-good);stroke-width:2}}
.ddt .shape.bad{{fill:var(--ddt-bad-face);stroke:var(--ddt-bad);stroke-width:2}}
.ddt .edge{{fill:none;stroke:var(--ddt-line)}} .ddt .edge.wait{{stroke-dasharray:4 3}}
.ddt .edge.hot{{stroke:var(--ddt-hot);stroke-width:2}} .ddt .edge.good{{stroke:var(--ddt-good);stroke-width:2}}
.ddt .edge.bad{{stroke:var(--ddt-bad);stroke-width:2}} .ddt .fill{{fill:var(--ddt-line)}}
.ddt .fill.hot{{fill:var(--ddt-hot)}} .ddt .fill.good{{fill:var(--ddt-good)}} .ddt .fill.bad{{fill:var(--ddt-bad)}}
.ddt .grid{{stroke:var(--ddt-line);stroke-opacity:.35}}
.ddt figcaption,.ddt .ddt-caption{{color:var(--ddt-ink);font-size:.9rem;margin:.5em 0 0;text-align:left}}
</style>"""


class Drawing:
    """An SVG under construction, in pixels from the upper left corner.

    >>> drawing = Drawing(40, 20)
    >>> drawing.text(4, 12, "a < b", "soft")
    >>> "a &lt; b" in drawing.svg("one comparison")
    True
    """

    def __init__(self, width: float, height: float) -> None:
        """Take the size in pixels; a narrower page scales the picture down."""
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, style: str = "", radius: float = 5) -> None:
        """Add a box whose upper left corner is (x, y)."""
        self._parts.append(
            f'<rect class="shape {style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, style: str = "") -> None:
        """Add a filled bar without an outline."""
        self._parts.append(
            f'<rect class="fill {style}" x="{x:g}" y="{y:g}" width="{max(width, 0):g}" height="{max(height, 0):g}"/>'
        )

    def dot(self, x: float, y: float, radius: float, style: str = "") -> None:
        """Add a filled dot."""
        self._parts.append(f'<circle class="fill {style}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def line(self, points: Sequence[tuple[float, float]], style: str = "") -> None:
        """Add a line through `points`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="edge {style}" points="{path}"/>')

    def curve(self, start: tuple[float, float], end: tuple[float, float], lift: float, style: str = "") -> None:
        """Add an arc from `start` to `end` whose middle lies `lift` above them, with a head at its end."""
        (x0, y0), (x1, y1) = start, end
        top = min(y0, y1) - lift
        self._parts.append(
            f'<path class="edge {style}" d="M{x0:g} {y0:g}C{x0:g} {top:g} {x1:g} {top:g} {x1:g} {y1:g}'
            f'M{x1 - 4:g} {y1 - 7:g}L{x1:g} {y1:g}L{x1 + 4:g} {y1 - 7:g}"/>'
        )

    def text(self, x: float, y: float, content: object, style: str = "") -> None:
        """Add one line of text whose baseline starts at (x, y)."""
        self._parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(str(content))}</text>')

    def svg(self, alt: str) -> str:
        """Return the element; `alt` is what a reader who does not see it hears."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" width="{self.width:g}" '
            f'height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'style="min-width:{0.75 * self.width:g}px">{"".join(self._parts)}</svg>'
        )


class Picture:
    """One finished picture: shown by Jupyter and by the documentation, `str` is its HTML."""

    def __init__(self, drawing: Drawing, alt: str, caption: str = "") -> None:
        """Take the drawing, its alternative text and a line to stand below it."""
        self.alt, self.caption = alt, caption
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._html = figure("", f'<div class="ddt-scroll">{drawing.svg(alt)}</div>{below}')

    def __str__(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return f"Picture({self.alt!r})"

    def _repr_html_(self) -> str:
        return self._html


class Figure(str):
    """HTML that shows itself in Jupyter."""

    def _repr_html_(self) -> str:
        return str(self)


def figure(style: str, body: str, label: str = "") -> Figure:
    """Return `body` in a figure that brings the pictures' style rules."""
    name = f' role="group" aria-label="{escape(label)}"' if label else ""
    return Figure(f'<figure class="ddt {style}"{name}>{_STYLE}{body}</figure>')
