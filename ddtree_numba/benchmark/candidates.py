"""The lines of stage 1: the K best of every row and the log-sum-exp, from the drafter's logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.benchmark.case import Tools, require
from ddtree_numba.benchmark.inputs import normal_bfloat16
from ddtree_numba.benchmark.timing import sets_past_l2
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.top_candidates import best_version, top_candidates, top_candidates_reference
from ddtree_numba.stages.top_candidates.fused import workspace_for

__all__ = ["TopCase"]

_SPREAD = 3.0  # of the logits


@dataclass(frozen=True)
class TopCase:
    """`top_candidates` of bfloat16 logits."""

    id: str
    batch: int
    depths: int = 15
    vocab: int = 163840
    k: int = 64
    peer_names = ("torch_topk_logsumexp",)

    @property
    def work(self) -> str:
        """See `Case.work`."""
        rows = f"{self.batch} x {self.depths} x {self.vocab} bfloat16"
        return f"top {self.k} + log-sum-exp of {rows} ({self.bytes_of_logits / 1e6:.3g} MB)"

    @property
    def bytes_of_logits(self) -> int:
        """Bytes of one set of logits."""
        return 2 * self.batch * self.depths * self.vocab

    def prepare(self, tools: Tools) -> _PreparedTop:
        """See `Case.prepare`."""
        return _PreparedTop(self, tools)


class _PreparedTop:
    flop = 0

    def __init__(self, case: TopCase, tools: Tools) -> None:
        self._case, self._tools = case, tools
        c, shape = case, (case.batch, case.depths, min(case.k, case.vocab))
        self.read_and_written = c.bytes_of_logits + 8 * math.prod(shape)
        sets = range(sets_past_l2(c.bytes_of_logits))
        host = normal_bfloat16(tools.rng, (c.batch, c.depths, c.vocab), _SPREAD)
        self._request = int(tools.rng.integers(c.batch))
        self._sample = host[self._request : self._request + 1].copy()
        self._logits = [cuda.to_device(host)]
        for _ in sets[1:]:
            host = host[::-1].copy() if c.batch > 1 else normal_bfloat16(tools.rng, host.shape, _SPREAD)
            self._logits.append(cuda.to_device(host))
        self._poison = np.full(shape, np.nan, np.float32), np.full(shape, -7, np.int32)
        self._out = [tuple(map(cuda.to_device, self._poison)) for _ in sets]
        self._workspace = None
        if best_version(c.k, c.vocab) == "fused":
            self._workspace = workspace_for(c.batch * c.depths, c.vocab)

    def check(self, version: str = "auto") -> float:
        """See `Prepared.check`."""
        c = self._case
        for array, poison in zip(self._out[0], self._poison, strict=True):
            array.copy_to_device(poison)
        self._launch(0, version, None)
        log_probs, token_ids = (array.copy_to_host() for array in self._out[0])
        require(np.isfinite(log_probs) & (token_ids >= 0) & (token_ids < c.vocab), "top_candidates leaves a place out")
        expected, expected_ids = top_candidates_reference(self._sample, c.k)
        require(token_ids[self._request] == expected_ids[0], f"tokens of request {self._request}")
        off = np.abs(log_probs[self._request].astype(np.float64) - expected[0])
        bound = 2.0**-24 * (8 + 2.25 * math.log(c.vocab) + 2 * np.abs(expected[0]))
        require(off <= bound, f"log-probabilities of request {self._request}, off by up to {off.max():.3g}")
        return float((off / np.abs(expected[0])).max())

    def time(self, version: str = "auto") -> float:
        """See `Prepared.time`."""
        self._launch(0, version, None)
        graphs = [Recorded(partial(self._launch, i, version)) for i in range(len(self._logits))]
        return self._tools.timer.device([graph.replay for graph in graphs])

    def peers(self) -> dict[str, Callable[[], float]]:
        """See `Prepared.peers`."""
        torch = self._tools.torch
        if torch is None:
            return {}
        tensors = [torch.bfloat16(logits) for logits in self._logits]
        calls = [partial(torch.candidates, tensor, self._case.k) for tensor in tensors]
        return {self._case.peer_names[0]: lambda: self._tools.timer.device(calls)}

    def peer_errors(self) -> dict[str, float]:
        """See `Prepared.peer_errors`."""
        return {}

    def _launch(self, index: int, version: str, stream: Any) -> None:
        workspace = self._workspace if version in ("auto", "fused") else None
        top_candidates(
            self._logits[index], self._case.k, version=version, out=self._out[index], stream=stream, workspace=workspace
        )
