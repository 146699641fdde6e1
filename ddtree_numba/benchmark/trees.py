"""The lines of stages 2 and 3: tree, bitmask and positions, from the candidates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.benchmark.case import Tools, require
from ddtree_numba.benchmark.inputs import random_candidates
from ddtree_numba.decode_step import launch_tree
from ddtree_numba.draft_tree import DraftTree
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.ancestor_bitmask import ancestor_bitmask_reference, positions_reference
from ddtree_numba.stages.best_first_tree import build_tree_reference

__all__ = ["TreeCase"]

_SETS = 16  # different trees; their candidates are a few KB, in the L2, where stage 1 has just written them
_PREFIX = 77


@dataclass(frozen=True)
class TreeCase:
    """`build_tree`, `ancestor_bitmask` and `positions`, as a decoding step launches them."""

    id: str
    batch: int
    budget: int
    depths: int = 15
    peer_names = ("python_heap",)

    @property
    def work(self) -> str:
        """See `Case.work`."""
        requests = "1 request" if self.batch == 1 else f"{self.batch} requests"
        return f"tree + bitmask, budget {self.budget}, {self.depths} depths, {requests}"

    def prepare(self, tools: Tools) -> _PreparedTree:
        """See `Case.prepare`."""
        return _PreparedTree(self, tools)


class _PreparedTree:
    flop = 0

    def __init__(self, case: TreeCase, tools: Tools) -> None:
        self._case, self._tools = case, tools
        self._hosts = [random_candidates(tools.rng, case.batch, case.depths, max(1, case.budget)) for _ in range(_SETS)]
        self._candidates = [tuple(map(cuda.to_device, host)) for host in self._hosts]
        self._prefixes = np.full(case.batch, _PREFIX, np.int32)
        self._device_prefixes = cuda.to_device(self._prefixes)
        tree = build_tree_reference(*self._hosts[0], case.budget)
        bits, status = ancestor_bitmask_reference(tree.parents, tree.node_count)
        tree = tree._replace(ancestor_bits=bits)
        self._expected = [*tree, positions_reference(tree.depths, self._prefixes), status]
        self._poison = [np.full(a.shape, -7 if a.dtype.kind != "u" else 7).astype(a.dtype) for a in self._expected]
        *fields, self._positions, self._status = map(cuda.to_device, self._poison)
        self._tree = DraftTree(*fields)
        inputs, outputs = [*self._hosts[0], self._prefixes], self._expected
        self.read_and_written = sum(array.nbytes for array in (*inputs, *outputs))

    def check(self, version: str = "auto") -> float:
        """See `Prepared.check`."""
        outputs = [*self._tree, self._positions, self._status]
        for array, poison in zip(outputs, self._poison, strict=True):
            array.copy_to_device(poison)
        self._launch(0, version, None)
        for name, got, expected in zip(
            (*DraftTree._fields, "positions", "status"), outputs, self._expected, strict=True
        ):
            require(got.copy_to_host() == expected, f"{name} of the tree")
        return 0.0

    def time(self, version: str = "auto") -> float:
        """See `Prepared.time`."""
        graphs = [Recorded(partial(self._launch, i, version)) for i in range(_SETS)]
        return self._tools.timer.device([graph.replay for graph in graphs])

    def peers(self) -> dict[str, Callable[[], float]]:
        """See `Prepared.peers`."""
        torch = self._tools.torch
        if torch is None:
            return {}
        tensors = [torch.tensor(array) for array in (*self._candidates[0], self._device_prefixes)]
        return {
            "python_heap": lambda: self._tools.timer.host(lambda: torch.heap_tree(*tensors, budget=self._case.budget))
        }

    def peer_errors(self) -> dict[str, float]:
        """See `Prepared.peer_errors`."""
        return {}

    def _launch(self, index: int, version: str, stream: Any) -> None:
        log_probs, token_ids, roots = self._candidates[index]
        outputs = (self._tree, self._positions, self._status)
        launch_tree(log_probs, token_ids, roots, self._device_prefixes, *outputs, version=version, stream=stream)


def candidate_bytes(case: TreeCase) -> int:
    """Return the bytes of one set of candidates: what every rung reads."""
    return 8 * math.prod((case.batch, case.depths, max(1, case.budget)))
