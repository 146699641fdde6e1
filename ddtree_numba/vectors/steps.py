"""Vectors of the whole step, over one round and over many: what is emitted is what plain greedy decoding emits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddtree_numba.decode_step import DecodeStepReference
from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.vectors.candidates import expected_candidates
from ddtree_numba.vectors.case import PAPER, Case, int32, known

_CLEAR = 2.0**-15  # least difference of two path scores: those of float32 log-probabilities err by less


def write_node_rows(kv_pool: Any, block_table: Any, prefix_lengths: Any, node_rows: Any, node_count: Any) -> None:
    """Do what a target's forward pass does to the cache: slot s of request b gets row ``prefix_lengths[b] + s``.

    `node_rows` [B, N, layers, D]; `kv_pool` [layers, pages, page_size, D] is changed in place.
    """
    size = kv_pool.shape[2]
    for b, used in enumerate(node_count):
        rows = int(prefix_lengths[b]) + np.arange(int(used))
        kv_pool[:, block_table[b, rows // size], rows % size] = node_rows[b, :used].swapaxes(0, 1)


class _Toy:
    """A language model without weights: the next token is a table of the last two. A KV row is (token, position)."""

    def __init__(self, rng: StableRandom, batch: int, vocab: int, length: int, page_size: int, layers: int) -> None:
        self.rng, self.vocab, self.layers = rng, vocab, layers
        self.rule = rng.integers(vocab, size=(vocab, vocab))
        pages = -(-length // page_size)
        self.block_table = rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
        self.kv_pool = np.full((layers, batch * pages, page_size, 2), -7, np.float32)
        self.prefix_lengths = rng.integers(1, page_size + 2, size=batch, dtype=np.int32)
        self.texts = [rng.integers(vocab, size=int(n) + 1).tolist() for n in self.prefix_lengths]
        for b, text in enumerate(self.texts):
            rows = np.array([[self.row(token, at) for at, token in enumerate(text[:-1])]])
            one = slice(b, b + 1)
            write_node_rows(self.kv_pool, self.block_table[one], int32([0]), rows, [rows.shape[1]])

    def row(self, token: int, position: int) -> list[list[int]]:
        return [[token, position]] * self.layers

    def following(self, text: list[int]) -> int:
        return int(self.rule[text[-1], text[-2]])

    def logits(self, depths: int) -> np.ndarray:
        """A drafter that knows the target, and is often wrong."""
        logits = self.rng.normal((len(self.texts), depths, self.vocab))
        for b, text in enumerate(self.texts):
            ahead = list(text)
            for depth in range(depths):
                ahead.append(self.following(ahead))
                logits[b, depth, ahead[-1]] += 3.0
        return logits.astype(np.float32)

    def verify(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's tokens [B, N] and the nodes' KV rows [B, N, layers, 2]."""
        targets = self.rng.integers(self.vocab, size=tree.token_ids.shape, dtype=np.int32)
        rows = np.zeros((*targets.shape, self.layers, 2), np.float32)
        for b, text in enumerate(self.texts):
            paths: list[list[int]] = [text]
            for slot in range(int(tree.node_count[b])):
                if slot > 0:
                    paths.append([*paths[tree.parents[b, slot]], int(tree.token_ids[b, slot])])
                targets[b, slot] = self.following(paths[slot])
                rows[b, slot] = self.row(paths[slot][-1], len(paths[slot]) - 1)
        return targets, rows


def _is_clear(logits: np.ndarray, k: int, tree: DraftTree) -> bool:
    """Tell whether no two scores that the builder compares are so near that float32 rounding could swap them."""
    lp = expected_candidates(logits, k)["log_probs"].astype(np.float64)
    for b, used in enumerate(tree.node_count.tolist()):
        offered = []
        children = np.bincount(tree.parents[b, 1:used], minlength=used)
        for slot in range(used):
            depth, base = int(tree.depths[b, slot]), tree.log_probs[b, slot]
            if depth < lp.shape[1]:
                offered += [base + lp[b, depth, rank] for rank in range(min(children[slot] + 1, lp.shape[2]))]
        if np.diff(np.sort(offered)).min(initial=1.0) < _CLEAR:
            return False
    return True


def _case(
    seed: int,
    name: str,
    rounds: int,
    batch: int,
    depths: int,
    vocab: int,
    budget: int,
    k: int,
    source: str,
    small: bool,
) -> Case:
    toy = _Toy(StableRandom(seed, "steps", name), batch, vocab, 12 + rounds * (depths + 1) + budget, 8, 2)
    start = {
        "root_tokens": int32([text[-1] for text in toy.texts]),
        "prefix_lengths": toy.prefix_lengths.copy(),
        "kv_pool": toy.kv_pool.copy(),
        "block_table": toy.block_table,
    }
    step = DecodeStepReference(budget, k)
    given: dict[str, list[np.ndarray]] = {"logits": [], "target_tokens": [], "node_rows": []}
    got: dict[str, list[np.ndarray]] = {
        key: [] for key in ("token_ids", "parents", "node_count", "positions", "accept_tokens", "accept_count")
    }
    for _ in range(rounds):
        roots = int32([text[-1] for text in toy.texts])
        while True:
            logits = toy.logits(depths)
            tree, positions = step.draft(logits, roots, toy.prefix_lengths)
            if _is_clear(logits, k, tree):
                break
        targets, rows = toy.verify(tree)
        write_node_rows(toy.kv_pool, toy.block_table, toy.prefix_lengths, rows, tree.node_count)
        path = step.commit(targets, toy.kv_pool, toy.block_table, toy.prefix_lengths)
        for key, array in (("logits", logits), ("target_tokens", targets), ("node_rows", rows)):
            given[key].append(array)
        outputs = {**tree._asdict(), "positions": positions, **path._asdict()}
        for key, arrays in got.items():
            arrays.append(outputs[key])
        for b, text in enumerate(toy.texts):
            text += path.accept_tokens[b, : path.accept_count[b]].tolist()
    inputs = {**start, **{key: np.stack(arrays) for key, arrays in given.items()}}
    expected = {key: np.stack(arrays) for key, arrays in got.items()}
    expected |= {"prefix_lengths": toy.prefix_lengths, "kv_pool": toy.kv_pool}
    rule, guards = "rounds_carry_over", "a fault that one round hides: rows, lengths or roots carried over wrongly"
    if rounds == 1:
        rule, guards = "walk_to_the_end", "stages that are right alone and wrong together"
    parameters: dict[str, int | float] = {"budget": budget, "k": k}
    return Case(f"decode_step/{name}", rule, guards, source, inputs, parameters, expected, small=small)


def step_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of the whole step."""
    yield _case(seed, "known_35_seven_rounds", 7, 2, 4, 11, 9, 9, known(35), True)
    yield _case(seed, "one_round_of_budget_64", 1, 4, 15, 300, 64, 64, PAPER, False)
    yield _case(seed, "twelve_rounds_of_budget_32", 12, 3, 7, 50, 32, 32, PAPER, False)
