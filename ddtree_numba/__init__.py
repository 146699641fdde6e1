"""The DDTree decoding step in Numba CUDA: every stage a kernel beside its NumPy reference."""

from ddtree_numba.backend import BACKEND
from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.decode_step import DecodeStep, DecodeStepReference
from ddtree_numba.draft_tree import DraftTree, check_tree, empty_tree, random_tree
from ddtree_numba.stages.accept_walk import AcceptedPath, accept_walk, accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import (
    ancestor_bitmask,
    ancestor_bitmask_reference,
    positions,
    positions_reference,
)
from ddtree_numba.stages.best_first_tree import build_tree, build_tree_reference
from ddtree_numba.stages.kv_commit import commit_kv, commit_kv_reference
from ddtree_numba.stages.top_candidates import top_candidates, top_candidates_reference
from ddtree_numba.stages.tree_attention import tree_attention, tree_attention_reference

__version__ = "0.1.0"
"""This package's version, as a string."""

__all__ = [
    "BACKEND",
    "AcceptedPath",
    "DecodeStep",
    "DecodeStepReference",
    "DraftTree",
    "__version__",
    "accept_walk",
    "accept_walk_reference",
    "ancestor_bitmask",
    "ancestor_bitmask_reference",
    "build_tree",
    "build_tree_reference",
    "check_tree",
    "commit_kv",
    "commit_kv_reference",
    "empty_tree",
    "from_bfloat16",
    "positions",
    "positions_reference",
    "random_tree",
    "to_bfloat16",
    "top_candidates",
    "top_candidates_reference",
    "tree_attention",
    "tree_attention_reference",
]
