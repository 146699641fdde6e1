"""The ladder's table: every rung of a stage at one size, what it reads, what was predicted of it, what it takes."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ddtree_numba.benchmark.attention import AttentionCase
from ddtree_numba.benchmark.candidates import TopCase
from ddtree_numba.benchmark.case import Case
from ddtree_numba.benchmark.trees import TreeCase, candidate_bytes
from ddtree_numba.stages import best_first_tree, top_candidates, tree_attention

__all__ = ["LADDERS", "PREDICTED_US", "Ladder", "what_changed"]

PREDICTED_US: dict[tuple[str, str], float] = {
    # Written down before a rung's present form first ran at this size, from counted operations, bytes and clocks of an
    # H200; where an earlier form had run, from its profile.
    #
    # 960 rows of 163840: four passes of 2-byte loads at 1 TB/s, and 64 block-wide argmaxes of 3 us in two waves.
    ("top_candidates", "block_per_row"): 1600.0,
    # One pass at 3.8 TB/s is 83 us, at half of the issue slots. (Predicted of an earlier form, which kept lists.)
    ("top_candidates", "fused"): 98.0,
    # 1024 nodes x two loops over up to 1024 slots x 30 clocks of one thread.
    ("best_first_tree", "one_thread"): 16_500.0,
    # 55 rounds of 720 clocks and 16 more for each node: 45 us, and 15 for loading candidates and writing the tree.
    ("best_first_tree", "rounds"): 60.0,
    # 80 G multiply-adds of scores, 32 lanes in 32 lines: 32 clocks for each load of a warp on 132 multiprocessors.
    ("tree_attention", "naive"): 350_000.0,
    # 151 G float32 multiply-adds at a third of 30 T a second.
    ("tree_attention", "shared_tile"): 15_000.0,
    # The same operations; with 8 requests there were blocks enough already.
    ("tree_attention", "split_kv"): 15_000.0,
    # 129 tiles of 64 keys at 2.7 to 3.0 us, two waves: 690 to 780.
    ("tree_attention", "tensor_core"): 735.0,
    # From the profile of a version whose two warpgroups copied for themselves, which took 570.
    ("tree_attention", "hopper"): 483.0,
}
"""Microseconds by (stage, rung), written down before the rung's present form ran at the size of its ladder."""


class Ladder(NamedTuple):
    """The rungs of one stage at one size."""

    id: str
    stage: str
    rungs: tuple[str, ...]
    case: Case
    bytes_read: Callable[[str], int | None]
    """Bytes that a rung asks global memory for, by its design, re-reads included; None: not counted for this rung."""

    def changed(self, rung: str) -> str:
        """Say what a rung does otherwise than the one before, in its own words."""
        return what_changed(f"ddtree_numba.stages.{self.stage}.{rung}")


def what_changed(module: str) -> str:
    """Return the first sentence of a rung's docstring without its number.

    >>> what_changed("ddtree_numba.stages.tree_attention.naive")
    'one block for each node and head, written as one would at first'
    """
    first = (importlib.import_module(module).__doc__ or "").partition("\n\n")[0]
    return re.sub(r"^Rung \d+: ", "", " ".join(first.split())).rstrip(".")


_TOP = TopCase("top_b64", 64)
_TREE = TreeCase("tree_b1_n1024", 1, 1024)
_ATTENTION = AttentionCase(8, 33, 64, 8192)

_PASSES = {"block_per_row": 4, "fused": 1}
_PAIRS_OF_A_TILE = {"naive": 1, "shared_tile": 16, "split_kv": 16, "tensor_core": 64, "hopper": 64}


def _logits_read(rung: str) -> int | None:
    return _PASSES[rung] * _TOP.bytes_of_logits if rung in _PASSES else None


def _latents_read(rung: str) -> int | None:
    if rung not in _PAIRS_OF_A_TILE:
        return None
    c = _ATTENTION
    times = c.batch * math.ceil(c.nodes * c.heads / _PAIRS_OF_A_TILE[rung])
    numbers = 2 * c.latent_width + c.rope_width if rung == "naive" else c.latent_width + c.rope_width
    return 2 * times * (c.prefix + c.nodes) * numbers


LADDERS: tuple[Ladder, ...] = (
    Ladder("ladder_top", "top_candidates", top_candidates.VERSIONS, _TOP, _logits_read),
    Ladder("ladder_tree", "best_first_tree", best_first_tree.VERSIONS, _TREE, lambda _: candidate_bytes(_TREE)),
    Ladder(
        "ladder_attn",
        "tree_attention",
        (*tree_attention.VERSIONS, *tree_attention.GPU_VERSIONS),
        _ATTENTION,
        _latents_read,
    ),
)
"""Every stage that has more than one rung."""
