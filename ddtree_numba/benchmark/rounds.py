"""The line of a whole round: draft side and commit side of one request, the host's time included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.benchmark.case import Tools, require
from ddtree_numba.benchmark.inputs import normal_bfloat16
from ddtree_numba.benchmark.peers import RoundPeer
from ddtree_numba.decode_step import DecodeStep
from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.stages.accept_walk import accept_walk_reference
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference, positions_reference
from ddtree_numba.stages.best_first_tree import build_tree_reference
from ddtree_numba.stages.kv_commit import commit_kv_reference
from ddtree_numba.stages.top_candidates import top_candidates_reference

__all__ = ["PreparedRound", "RoundCase"]

_PREFIX = 100
_SPREAD = 8.0  # of the logits: a few tokens share most of a row's probability, so that the tree grows deep


@dataclass(frozen=True)
class RoundCase:
    """A `DecodePlan`: `draft` and then `commit`, of one request."""

    id: str
    vocab: int = 163840
    budget: int = 64
    depths: int = 15
    layers: int = 61
    width: int = 576
    page_size: int = 64
    peer_names = ("torch_eager",)

    @property
    def work(self) -> str:
        """See `Case.work`."""
        sizes = f"V {self.vocab}, budget {self.budget}, {self.depths} depths, {self.layers} layers"
        return f"draft side + commit side, 1 request, {sizes}, host time included"

    def prepare(self, tools: Tools) -> PreparedRound:
        """See `Case.prepare`."""
        return PreparedRound(self, tools)


class PreparedRound:
    """See `Prepared`."""

    flop = 0

    def __init__(self, case: RoundCase, tools: Tools) -> None:
        """Make inputs, the plan, and targets that accept the path to the deepest node."""
        self._case, self._tools = case, tools
        c, slots = case, case.budget + 1
        pages = -(-(_PREFIX + slots) // c.page_size)
        self._logits = normal_bfloat16(tools.rng, (1, c.depths, c.vocab), _SPREAD)
        self._pool = normal_bfloat16(tools.rng, (c.layers, pages, c.page_size, c.width))
        self._table = np.arange(pages, dtype=np.int32)[None]  # in order: the peer's rows are plain indices
        self._prefix = np.full(1, _PREFIX, np.int32)
        root, targets = np.zeros(1, np.int32), np.full((1, slots), -5, np.int32)
        self._step = DecodeStep(1, c.depths, c.vocab, c.budget)
        arrays = self._logits, root, self._prefix, targets, self._pool, self._table
        self._device = tuple(map(cuda.to_device, arrays))
        self._first_prefix = cuda.to_device(self._prefix)
        self.plan = self._step.prepare(*self._device)
        self._deepest = self._choose_targets(targets)
        self._device[3].copy_to_device(targets)
        self._targets = targets
        moved = 2 * 2 * c.layers * c.width * self._deepest  # bytes read and written of the rows behind the root's
        self.read_and_written = self._logits.nbytes + moved + 2 * 8 * c.depths * self._step.k

    def _choose_targets(self, targets: np.ndarray) -> int:
        """Fill `targets` so that the path to the tree's deepest node is accepted; return its depth."""
        tree = DraftTree(*(field.copy_to_host()[0] for field in self.plan.draft()[0]))
        slot = int(np.argmax(tree.depths))
        while slot > 0:
            parent = int(tree.parents[slot])
            targets[0, parent] = tree.token_ids[slot]
            slot = parent
        return int(tree.depths.max())

    def check(self, version: str = "auto") -> float:
        """See `Prepared.check`: each stage against its reference on what the stage before really gave."""
        c, step = self._case, self._step
        self.reset()
        tree, positions = self.plan.draft()
        got = DraftTree(*(field.copy_to_host() for field in tree))
        log_probs, token_ids = step.log_probs.copy_to_host(), step.token_ids.copy_to_host()
        expected, expected_ids = top_candidates_reference(self._logits, step.k)
        require(token_ids == expected_ids, "candidates of the round")
        error = float((np.abs(log_probs - expected.astype(np.float64)) / np.abs(expected)).max())
        require(error < 1e-5, f"log-probabilities of the round, off by {error:.3g}")
        wanted = build_tree_reference(log_probs, token_ids, np.zeros(1, np.int32), c.budget)
        wanted = wanted._replace(ancestor_bits=ancestor_bitmask_reference(wanted.parents, wanted.node_count)[0])
        for name, field in wanted._asdict().items():
            require(getattr(got, name) == field, f"{name} of the round's tree")
        require(positions.copy_to_host() == positions_reference(wanted.depths, self._prefix), "positions of the round")
        path = accept_walk_reference(wanted, self._targets, c.depths)
        require(path.accept_count[0] == self._deepest + 1, "the round's own targets")
        pool, lengths = self._pool.copy(), self._prefix.copy()
        commit_kv_reference(pool, self._table, lengths, path.accept_slots, path.accept_count)
        for name, field in self.plan.commit()._asdict().items():
            require(field.copy_to_host() == getattr(path, name), f"{name} of the round")
        require(self._device[4].copy_to_host() == pool, "KV rows of the round")
        require(self._device[2].copy_to_host() == lengths, "prefix length of the round")
        return error

    def reset(self) -> None:
        """Put the KV rows and the prefix length back."""
        self._device[4].copy_to_device(self._pool)
        self.restart()

    def restart(self) -> None:
        """Put the prefix length back, on the device: the next round has the same rows."""
        self._device[2].copy_to_device(self._first_prefix)

    def time(self, version: str = "auto") -> float:
        """See `Prepared.time`: from Python's call to the end on the GPU, the logits not in the L2."""
        return self._tools.timer.host(self._round, self._before)

    def _round(self) -> None:
        self.plan.draft()
        self.plan.commit()

    def _before(self) -> None:
        self.restart()
        self._tools.timer.flush()

    def peers(self) -> dict[str, Callable[[], float]]:
        """See `Prepared.peers`."""
        torch = self._tools.torch
        if torch is None:
            return {}
        return {"torch_eager": lambda: self._tools.timer.host(self._peer_round(), self._tools.timer.flush)}

    def _peer_round(self) -> Callable[[], None]:
        torch = self._tools.torch
        self.reset()
        logits, targets = torch.bfloat16(self._device[0]), torch.tensor(self._device[3])
        pool = torch.bfloat16(self._device[4]).reshape(self._case.layers, -1, self._case.width)
        peer = RoundPeer(torch, logits, targets, pool, self._step.k, self._case.budget)
        return lambda: peer(_PREFIX)

    def peer_errors(self) -> dict[str, float]:
        """See `Prepared.peer_errors`."""
        return {}
