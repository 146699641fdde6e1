"""A picture in steps, moved by one range input; without a script, and on paper, all steps stand below each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from ddtree_numba.pictures.drawing import Drawing, figure

__all__ = ["Step", "StepSlider"]

_STYLE = """<style>
.ddt-bar{display:flex;align-items:center;gap:.8em;margin:0 0 .6em}
.ddt-bar[hidden]{display:none}
.ddt-bar input{flex:1;min-width:0;max-width:26em;accent-color:var(--ddt-hot)}
.ddt-bar output{color:var(--ddt-soft);font-size:.85rem;white-space:nowrap}
.ddt ol.ddt-frames{list-style:none;margin:0;padding:0}
.ddt ol.ddt-frames>li{margin:0 0 1.5em;padding:0;break-inside:avoid}
@media screen{.ddt-live ol.ddt-frames>li{margin:0}.ddt-live ol.ddt-frames>li:not(.ddt-now){display:none}
.ddt-live .ddt-caption{min-height:3.2em}}
@media print{.ddt-bar{display:none}.ddt .ddt-scroll{overflow:visible}}
</style>"""

# Every figure brings the script; each one that is not alive yet is brought to life once.
_SCRIPT = """<script>
document.querySelectorAll("figure.ddt-steps:not(.ddt-live)").forEach(function (figure) {
  var bar = figure.querySelector(".ddt-bar"), input = bar.querySelector("input"), output = bar.querySelector("output");
  var frames = figure.querySelectorAll(".ddt-frames>li");
  function show() {
    frames.forEach(function (frame, index) { frame.classList.toggle("ddt-now", index === +input.value); });
    output.textContent = "step " + (+input.value + 1) + " of " + frames.length;
    input.setAttribute("aria-valuetext", frames[+input.value].querySelector(".ddt-caption").textContent);
  }
  input.addEventListener("input", show);
  bar.hidden = false;
  figure.classList.add("ddt-live");
  show();
});
</script>"""


class Step(NamedTuple):
    """One position of the slider."""

    drawing: Drawing
    """What is seen."""
    caption: str
    """What happens in this step; also what a screen reader says when the slider gets here."""
    alt: str
    """The state after it, in words."""


class StepSlider:
    """A sequence of `Step`, shown by Jupyter and by the documentation; `str` is its HTML."""

    def __init__(self, label: str, steps: Sequence[Step]) -> None:
        """Take a name for the whole and at least one step."""
        if not steps:
            raise ValueError("steps: got none, needs at least one")
        self.label, self.steps, self._first = label, list(steps), 0

    def opened_at(self, step: int) -> StepSlider:
        """Return the same slider, standing on `step` at first (0 the first, -1 the last)."""
        slider = StepSlider(self.label, self.steps)
        slider._first = range(len(self.steps))[step]
        return slider

    def __str__(self) -> str:
        frames = "".join(
            f'<li><div class="ddt-scroll">{step.drawing.svg(step.alt)}</div>'
            f'<p class="ddt-caption">{escape(step.caption)}</p></li>'
            for step in self.steps
        )
        bar = (
            f'<div class="ddt-bar" hidden><input type="range" min="0" max="{len(self.steps) - 1}" '
            f'value="{self._first}" step="1" '
            f'aria-label="{escape(self.label)}: step"><output></output></div>'
        )
        return figure("ddt-steps", f'{_STYLE}{bar}<ol class="ddt-frames">{frames}</ol>{_SCRIPT}', self.label)

    def __repr__(self) -> str:
        return f"StepSlider({self.label!r}, {len(self.steps)} steps)"

    def _repr_html_(self) -> str:
        return str(self)
