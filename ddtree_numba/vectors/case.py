"""One golden vector: a stage's inputs, what must come out, and the rule that this case is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["RULES", "STAGES", "Case", "Stage"]


class Stage(NamedTuple):
    """What a stage is given and gives, by name. All arrays are those of the contract, without `tree.`."""

    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    """What every implementation returns."""
    optional: tuple[str, ...]
    """What an implementation may leave out."""


_TREE = ("token_ids", "parents", "depths", "first_child", "next_sibling", "log_probs", "ancestor_bits", "node_count")

STAGES: dict[str, Stage] = {
    "top_candidates": Stage(("logits",), ("k",), ("log_probs", "token_ids"), ()),
    "build_tree": Stage(
        ("log_probs", "token_ids", "root_tokens"),
        ("budget",),
        ("node_count", "token_ids", "parents"),
        ("depths", "first_child", "next_sibling", "log_probs"),
    ),
    "ancestor_bitmask": Stage(("parents", "node_count"), (), ("ancestor_bits",), ("status",)),
    "positions": Stage(("depths", "prefix_lengths"), (), ("positions",), ()),
    "tree_attention": Stage(
        ("q", "kv_pool", "block_table", "prefix_lengths", "ancestor_bits", "node_count"),
        ("scale", "latent_width"),
        ("out",),
        ("lse",),
    ),
    "accept_walk": Stage(
        (*_TREE, "target_tokens"), ("draft_length",), ("accept_count", "accept_slots", "accept_tokens"), ("status",)
    ),
    "sample_walk": Stage(
        (*_TREE, "target_probs", "draft_probs", "uniforms"), ("draft_length",), ("accept_count", "accept_tokens"), ()
    ),
    "commit_kv": Stage(
        ("kv_pool", "block_table", "prefix_lengths", "accept_slots", "accept_count"),
        (),
        ("prefix_lengths", "kv_pool"),
        ("status",),
    ),
    "decode_step": Stage(
        ("logits", "root_tokens", "prefix_lengths", "target_tokens", "node_rows", "kv_pool", "block_table"),
        ("budget", "k"),
        (
            "node_count",
            "token_ids",
            "parents",
            "positions",
            "accept_count",
            "accept_tokens",
            "prefix_lengths",
            "kv_pool",
        ),
        (),
    ),
}
"""The stages that have vectors, in the order of a round."""

RULES: dict[str, str] = {
    "log_softmax": "log-probabilities are logits minus their log-sum-exp, in float32 or better, maximum first",
    "ties_by_token_id": "equal logits: the lower token id first",
    "invalid_row": "a row with NaN or +inf is invalid: every log-probability -inf, ids distinct and in range",
    "minus_infinity_is_no_candidate": "a logit of -inf is never a candidate: its log-probability is -inf",
    "k_is_cut": "K = min(k, V), and every id comes once",
    "any_vocabulary": "any vocabulary size is right, also one that no vector width divides",
    "budget_without_root": "the budget counts drafted nodes; the root is not one of them",
    "ties_by_rank_path": "equal scores: the lexicographically smaller rank path first, a prefix before its extensions",
    "best_first": "the node added next has the largest path score, wherever it is",
    "one_rank_at_a_time": "a node that is added offers its next sibling and its first child, no other",
    "finite_only": "a candidate at -inf or NaN is never a node: the tree stops early",
    "score_order": "scores are float64: child = score + lp[d+1][0], sibling = (score - lp[d][r]) + lp[d][r+1]",
    "count_by_node_count": "nodes are counted by node_count: token 0 is a token",
    "root_alone": "without budget, depth or finite candidate the tree is the root alone",
    "bits_little_endian": "bit j % 32 of word j // 32 stands for slot j, least significant bit first",
    "own_rows_only": "rows from node_count on are 0, whatever the buffer held",
    "broken_links_end": "a broken link ends in a status; nothing hangs, nothing outside is read",
    "position_by_depth": "position = prefix length + depth, never prefix length + slot",
    "branch_isolation": "a node sees its prefix, itself and its ancestors, and nothing else",
    "nothing_visible": "a row that sees nothing gives 0 and -inf, not NaN",
    "unused_query": "slots from node_count on give 0 and -inf and change no neighbour",
    "paged_rows": "row r lies in page block_table[b, r // page_size], at place r % page_size",
    "first_match_wins": "children are looked at along the sibling chain, and the first that matches is taken",
    "bonus_token": "the path ends with the target's token at its last node; accept_count counts it",
    "walk_to_the_end": "the walk goes on as long as a child holds the target's token",
    "draft_length": "a path deeper than the draft length stops there, with a status",
    "lossless_sampling": "emitted tokens have the target's distribution, whatever the draft: min(1, p/q) has not",
    "read_before_write": "row prefix + accept_slots[k] moves to prefix + k, in ascending order: read before written",
    "untouched_when_in_place": "rows that are in their place already keep every byte",
    "lengths_advance": "prefix_lengths grow by accept_count; a request with a status keeps rows and length",
    "rounds_carry_over": "many rounds emit what plain greedy decoding emits, and the cache holds exactly that text",
}
"""The rules that cases are about: name -> sentence."""


class Case(NamedTuple):
    """One golden vector."""

    name: str
    """``stage/what``."""
    rule: str
    """A key of `RULES`."""
    guards: str
    """The mistake that this case catches."""
    source: str
    """Where the case comes from: a link, or a page of this project."""
    inputs: dict[str, np.ndarray]
    parameters: dict[str, int | float]
    expected: dict[str, np.ndarray]
    """Every output of the stage; what a statistical case needs instead is told by its stage."""
    tolerance: dict[str, np.ndarray] = {}  # noqa: RUF012  (never changed)
    """Output -> largest absolute difference, broadcast to the output; others are equal to the bit."""
    bfloat16: tuple[str, ...] = ()
    """Inputs that are bfloat16, as uint16 bits."""
    small: bool = True
    """Whether the simulator takes seconds at most over it."""

    @property
    def stage(self) -> str:
        """The stage's name, a key of `STAGES`."""
        return self.name.partition("/")[0]

    def arguments(self) -> dict[str, Any]:
        """Return inputs (copies, writable) and parameters by name."""
        return {name: array.copy() for name, array in self.inputs.items()} | self.parameters


PAPER = "https://arxiv.org/abs/2604.12989"
CONTRACT = "docs/contract.md"
KNOWN = "docs/reference/known_answers.md"
SGLANG = "https://github.com/sgl-project/sglang/tree/main/sgl-kernel/tests/speculative"


def known(number: int) -> str:
    """Return the link to a known answer."""
    return f"{KNOWN}#case-{number}"


def int32(values: Any) -> np.ndarray:
    """Return `values` as an int32 array."""
    return np.array(values, np.int32)


def check_names(case: Case) -> Case:
    """Return `case`; raise when its arrays are not those of its stage."""
    stage = STAGES[case.stage]
    names = [
        (set(case.inputs), set(stage.inputs)),
        (set(case.parameters), set(stage.parameters)),
        (set(case.tolerance) - set(case.expected), set()),
    ]
    if case.stage != "sample_walk":
        names.append((set(case.expected), {*stage.outputs, *stage.optional}))
    for got, needs in names:
        if got != needs:
            raise ValueError(f"{case.name}: got {sorted(got)}, needs {sorted(needs)}")
    if case.rule not in RULES:
        raise ValueError(f"{case.name}: got rule {case.rule!r}, needs one of RULES")
    return case


def checked(cases: Iterable[Case]) -> Iterable[Case]:
    """Yield the cases, each checked."""
    return map(check_names, cases)
