"""The lines of stage 4: tree attention over bfloat16 latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.benchmark.case import Tools, require
from ddtree_numba.benchmark.inputs import PagedRows, random_rows
from ddtree_numba.benchmark.timing import sets_past_l2
from ddtree_numba.launch_graph import Recorded
from ddtree_numba.stages.tree_attention import tree_attention, tree_attention_reference

__all__ = ["AttentionCase"]

_SCALE = 0.14467963  # Kimi K2.5's
_HEADS_CHECKED = 2  # of one request: all its nodes, in float64
_LARGEST_ERROR = 2.0**-8  # weights are rounded to bfloat16, by 2**-9 at most
_LARGEST_LSE_ERROR = 1e-3


@dataclass(frozen=True)
class AttentionCase:
    """`tree_attention` of `nodes` nodes for each request, all with the same prefix length."""

    batch: int
    nodes: int
    heads: int
    prefix: int
    latent_width: int = 512
    rope_width: int = 64
    page_size: int = 64
    peer_names = ("torch_three_op", "torch_sdpa")

    @property
    def id(self) -> str:
        """The line's name."""
        return f"attn_{self.batch}x{self.nodes}x{self.heads}x{self.prefix}"

    @property
    def work(self) -> str:
        """See `Case.work`."""
        sizes = f"{self.batch} x {self.nodes} nodes x {self.heads} heads, prefix {self.prefix}"
        return f"tree attention bfloat16, {sizes} ({self.flop / 1e9:.3g} GFLOP)"

    @property
    def flop(self) -> int:
        """Two operations for each number of a score and of a sum."""
        pairs = self.batch * self.nodes * self.heads
        return 2 * pairs * (self.prefix + self.nodes) * (2 * self.latent_width + self.rope_width)

    def prepare(self, tools: Tools) -> _PreparedAttention:
        """See `Case.prepare`."""
        return _PreparedAttention(self, tools)


class _PreparedAttention:
    def __init__(self, case: AttentionCase, tools: Tools) -> None:
        self._case, self._tools, self.flop = case, tools, case.flop
        c, width = case, case.latent_width + case.rope_width
        rows = c.batch * (c.prefix + c.nodes)
        outputs = c.batch * c.nodes * c.heads
        inputs_bytes = 2 * width * (rows + outputs)
        self.read_and_written = inputs_bytes + 4 * outputs * (c.latent_width + 1)
        sizes = c.batch, c.nodes, c.heads, c.prefix, width, c.page_size
        self._hosts = [random_rows(tools.rng, *sizes) for _ in range(sets_past_l2(inputs_bytes))]
        self._sets = [PagedRows(*map(cuda.to_device, host)) for host in self._hosts]
        shape = c.batch, c.nodes, c.heads
        self._poison = np.full((*shape, c.latent_width), np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self._out = tuple(map(cuda.to_device, self._poison))
        self._stream = cuda.stream()
        self._request = int(tools.rng.integers(c.batch))
        self._heads = np.sort(tools.rng.permutation(c.heads)[:_HEADS_CHECKED])

    def check(self, version: str = "auto") -> float:
        """See `Prepared.check`: every output finite, and those of a few heads of one request against float64."""
        for array, poison in zip(self._out, self._poison, strict=True):
            array.copy_to_device(poison)
        self._launch(self._sets[0], version, None)
        out, lse = (array.copy_to_host() for array in self._out)
        require(np.isfinite(out).all() and np.isfinite(lse).all(), f"{version}: a place is left out")
        error = self._error(out[self._request][:, self._heads])
        require(error <= _LARGEST_ERROR, f"{version}: relative error {error:.3g}, more than {_LARGEST_ERROR:.3g}")
        off = np.abs(lse[self._request][:, self._heads] - self._expected[1]).max()
        require(off <= _LARGEST_LSE_ERROR, f"{version}: log-sum-exp off by {off:.3g}")
        return error

    def time(self, version: str = "auto") -> float:
        """See `Prepared.time`."""
        self._launch(self._sets[0], version, self._stream)  # the parts of a split belong to a stream
        cuda.synchronize()
        graphs = [Recorded(partial(self._launch, rows, version), self._stream) for rows in self._sets]
        return self._tools.timer.device([graph.replay for graph in graphs])

    def peers(self) -> dict[str, Callable[[], float]]:
        """See `Prepared.peers`. The rows are gathered for them beforehand, outside the time."""
        if self._tools.torch is None:
            return {}
        timer, three_op, sdpa = self._tools.timer, *self.peer_names
        return {
            three_op: lambda: timer.device([g.three_operations for g in self._gathered]),
            sdpa: lambda: timer.device([g.fused for g in self._gathered]),
        }

    def peer_errors(self) -> dict[str, float]:
        """See `Prepared.peer_errors`."""
        if self._tools.torch is None:
            return {}
        c, out = self._case, self._gathered[0].three_operations()
        nodes_and_heads = self._tools.torch.on_host(out).reshape(c.batch, c.nodes, c.heads, c.latent_width)
        return {self.peer_names[0]: self._error(nodes_and_heads[self._request][:, self._heads])}

    @property
    def peer_names(self) -> tuple[str, str]:
        return self._case.peer_names

    @cached_property
    def _gathered(self) -> list[Any]:
        pairs = zip(self._hosts[:2], self._sets[:2], strict=True)
        return [self._tools.torch.gathered(host, rows, _SCALE, self._case.latent_width) for host, rows in pairs]

    @cached_property
    def _expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [nodes, heads, D_c] and log-sum-exps [nodes, heads] of the checked heads, in float64."""
        host, one = self._hosts[0], slice(self._request, self._request + 1)
        q = np.ascontiguousarray(host.q[one][:, :, self._heads])
        rest = host.block_table[one], host.prefix_lengths[one], host.ancestor_bits[one], host.node_count[one]
        out, lse = tree_attention_reference(q, host.kv_pool, *rest, _SCALE, latent_width=self._case.latent_width)
        return out[0], lse[0]

    def _error(self, got: np.ndarray) -> float:
        """Return the relative Frobenius error of the checked heads."""
        expected = self._expected[0]
        return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))

    def _launch(self, rows: PagedRows, version: str, stream: Any) -> None:
        width = self._case.latent_width
        tree_attention(*rows, _SCALE, latent_width=width, version=version, out=self._out, stream=stream)
