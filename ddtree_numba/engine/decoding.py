"""The decoding loop: draft, verify, commit, once per round, in one of three modes.

- autoregressive: nothing is drafted; the target is asked for one token at a time.
- chain: the drafter's first choice at every position, one behind the other.
- tree: the most probable prefixes, as many as the budget has nodes.

The three share everything but the draft, and give the same tokens: the target decides each one. A round runs the
target once, over the root (the last token, whose KV row is still missing) and the drafted nodes behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_numba.arguments import check_integer
from ddtree_numba.draft_tree import MAX_BUDGET, DraftTree
from ddtree_numba.engine.drafter import DrafterContext
from ddtree_numba.engine.kv_cache import PagedKVCache
from ddtree_numba.engine.model_pair import ModelPair
from ddtree_numba.engine.stage_backend import Committed, KernelStages, Nodes, NumpyStages, Stages, chain_bits
from ddtree_numba.engine.target_model import TargetPass
from ddtree_numba.stages.accept_walk import AcceptedPath

__all__ = ["MAX_NEW_TOKENS", "MODES", "Chooser", "Decoder", "Round", "greedy"]

MODES = ("autoregressive", "chain", "tree")
"""What a round drafts: nothing, the first choices one behind the other, or the most probable prefixes."""
MAX_NEW_TOKENS = 2**31 - 1
"""The most that a decode can be asked for; the model's context ends it long before."""

Chooser = Callable[[Any], Any]
"""The target's logits at every node [N, V] -> its token at every node [N] int32. Sampling would be another one.

The logits are an array of the model's, NumPy or CuPy; the tokens may be either.
"""

_PREFILL_ROWS = 128  # tokens of a prompt in one pass: more would only make the attention's scores larger


def greedy(logits: Any) -> Any:
    """Return the most probable token of every row, the lowest id among equals.

    >>> greedy(np.array([[0.0, 2.0, 2.0]], np.float32)).tolist()
    [1]
    """
    return logits.argmax(axis=-1).astype(np.int32)


@dataclass(frozen=True)
class Round:
    """One pass of the target and what came of it."""

    tokens: list[int]
    """The tokens emitted, in order; the stop token is not among them."""
    accepted: int
    """How many of them were drafted; the one after them, if any, is the target's own (the bonus)."""
    tree: DraftTree
    """The round's draft, a batch of one."""
    positions: np.ndarray
    """[1, N] int32: the place of every node in the sequence."""
    target_tokens: np.ndarray
    """[1, N] int32: the target's token after every node."""
    path: AcceptedPath
    """The walk through the tree, uncut."""
    seconds: float
    """Time of the round; the first one's includes the prompt."""
    finish: str
    """Why this round is the last: "stop" (end of document), "length", "context" (no room); "" when it is not."""


class Decoder:
    """Decodes one sequence after another with one model and mode, where the model was loaded for."""

    def __init__(self, model: ModelPair, mode: str = "tree", budget: int = 32, *, choose: Chooser = greedy) -> None:
        """Take a model, one of `MODES` and the node budget of a draft.

        `choose` picks the target's token at every node from its logits: greedy decoding unless told otherwise.
        """
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}, needs {', '.join(MODES)}")
        budget = check_integer("budget", budget, 0, MAX_BUDGET)
        self.model, self.mode = model, mode
        if mode == "autoregressive":
            budget = 0
        elif mode == "chain":
            budget = min(budget, model.drafter.draft_length)
        self.budget = budget
        """Most nodes that a round drafts in this mode."""
        self._choose = choose
        self._k = 1 if mode == "chain" else None

    def decode(self, prompt: Sequence[int], max_new_tokens: int) -> Iterator[Round]:
        """Yield the rounds that continue `prompt` (token ids, the document's first included) by new tokens."""
        max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
        return self._rounds(_checked_prompt(prompt, self.model), max_new_tokens)

    def _rounds(self, sequence: list[int], max_new_tokens: int) -> Iterator[Round]:
        start = time.perf_counter()
        state = _Sequence(self.model, self.budget, self._k, self._choose)
        state.prefill(sequence[:-1])
        room = {"length": max_new_tokens, "context": self.model.context - len(sequence)}
        root, stop = sequence[-1], self.model.target.config.eos_token_id
        while True:
            tree, positions, targets, path = state.round(root)
            emitted = path.accept_tokens[0, : path.accept_count[0]].tolist()
            tokens, finish = _cut(emitted, stop, room)
            accepted = min(len(tokens), len(emitted) - 1)
            yield Round(tokens, accepted, tree, positions, targets, path, time.perf_counter() - start, finish)
            if finish:
                return
            start = time.perf_counter()
            room = {limit: left - len(tokens) for limit, left in room.items()}
            root = tokens[-1]


def _checked_prompt(prompt: Sequence[int], model: ModelPair) -> list[int]:
    row = prompt.ndim == 1 if isinstance(prompt, np.ndarray) else isinstance(prompt, Sequence)
    if not row or isinstance(prompt, str):
        raise TypeError(f"prompt: got {type(prompt).__name__}, needs a sequence of token ids (encode_text gives one)")
    if not 1 <= len(prompt) < model.context:
        needs = f"1 to {model.context - 1} tokens, so that one more fits in the model's context"
        raise ValueError(f"prompt: got {len(prompt)} tokens, needs {needs}")
    last = model.target.config.vocab_size - 1
    return [check_integer(f"prompt[{index}]", token, 0, last) for index, token in enumerate(prompt)]


def _cut(emitted: list[int], stop: int, room: dict[str, int]) -> tuple[list[int], str]:
    """Return the tokens before the stop token and within every limit, and what cut them ("" when nothing did).

    A limit that is reached exactly ends the decode as well. `room` is what each limit leaves.

    >>> _cut([5, 6, 256, 7], 256, {"length": 9, "context": 99})
    ([5, 6], 'stop')
    >>> _cut([5, 6, 256, 7], 256, {"length": 2, "context": 99})
    ([5, 6], 'length')
    """
    limit = min(room, key=lambda name: room[name])
    within = emitted[: room[limit]]
    if stop in within:
        return within[: within.index(stop)], "stop"
    return within, limit if len(within) == room[limit] else ""


class _Sequence:
    """What belongs to one sequence while it is decoded: the KV cache, the drafter's context, the stages."""

    def __init__(self, model: ModelPair, budget: int, k: int | None, choose: Chooser) -> None:
        self._target, self._drafter, self._choose = model.target, model.drafter, choose
        self._xp = model.target.arithmetic.xp
        rows = model.context + max(budget + 1, _PREFILL_ROWS)
        self._cache: PagedKVCache = model.target.new_cache(rows)
        self._context: DrafterContext | None = model.drafter.new_context(rows) if budget else None
        self._stages: Stages = NumpyStages(self._cache, budget, k)
        if model.backend != "numpy":
            length, vocab = model.drafter.draft_length if budget else 0, model.target.config.vocab_size
            self._stages = KernelStages(self._cache, model.target.arithmetic, length, vocab, budget, k)

    def prefill(self, tokens: list[int]) -> None:
        """Compute the KV rows and the drafter's context of the tokens before the first root."""
        for first in range(0, len(tokens), _PREFILL_ROWS):
            stretch = np.array(tokens[first : first + _PREFILL_ROWS], np.int32)
            positions = np.arange(first, first + len(stretch), dtype=np.int32)
            arrays = stretch, positions, chain_bits(len(stretch))
            _, features = self._verify(Nodes(*map(self._xp.asarray, arrays)))
            self._cache.advance(len(stretch))
            if self._context is not None:
                self._drafter.append(self._context, features)

    def round(self, root: int) -> Committed:
        """Draft behind `root`, verify, commit."""
        if self._context is None:
            logits = self._xp.empty((0, self._target.config.vocab_size), np.float32)  # L = 0: the root alone
        else:
            logits = self._drafter.forward(self._context, root)
        nodes = self._stages.draft(logits, root)
        node_logits, features = self._verify(nodes)
        done = self._stages.commit(self._choose(node_logits))
        if self._context is not None:
            slots = done.path.accept_slots[0, : done.path.accept_count[0]]
            self._drafter.append(self._context, features[self._xp.asarray(slots)])
        return done

    def _verify(self, nodes: Nodes) -> TargetPass:
        """Run the target over nodes behind the prefix: their logits [n, V] and features [n, F]."""
        cache, config = self._cache, self._target.config
        cache.reserve(cache.prefix + len(nodes.token_ids))
        attention = self._stages.attention(nodes, config.attention_scale, config.kv_lora_rank)
        return self._target.forward(nodes.token_ids, nodes.positions, cache, attention)
