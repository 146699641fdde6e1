"""Formulas as MathML, made at build time: the page needs no script, no font and no network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

_FUNCTION = re.compile(r"<mi>(exp|ln|log)</mi>")
_SPACE = '<mspace width="0.17em"/>'


def _mathml(node: nodes.Element, display: str) -> str:
    """Return the formula; a function's name stands apart from what is around it, as in TeX: not BlogB but B log B."""
    return _FUNCTION.sub(rf"<mrow>{_SPACE}\g<0>{_SPACE}</mrow>", convert(node.astext(), display=display))


def _inline(self: Any, node: nodes.Element) -> None:
    self.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.Element) -> None:
    self.body.append(f'<div class="math-block">{_mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Register the renderer under the name that `html_math_renderer` asks for."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
