"""Pictures of the stages for the documentation and for notebooks: inline SVG, made from what the references do."""

from ddtree_numba.pictures.bitmask_steps import bitmask_steps
from ddtree_numba.pictures.chart import bar_chart, line_chart
from ddtree_numba.pictures.commit_steps import commit_steps
from ddtree_numba.pictures.heap_steps import heap_steps, heap_trace
from ddtree_numba.pictures.softmax_steps import online_softmax, softmax_steps
from ddtree_numba.pictures.stride_steps import stride_steps
from ddtree_numba.pictures.tree_picture import draw_tree
from ddtree_numba.pictures.walk_steps import walk_steps, walk_trace

__all__ = [
    "bar_chart",
    "bitmask_steps",
    "commit_steps",
    "draw_tree",
    "heap_steps",
    "heap_trace",
    "line_chart",
    "online_softmax",
    "softmax_steps",
    "stride_steps",
    "walk_steps",
    "walk_trace",
]
