"""What one line of the table is made of: prepared work, its check, its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ddtree_numba.benchmark.timing import Timer

__all__ = ["Case", "Prepared", "Tools", "WrongResultError", "require"]


class WrongResultError(Exception):
    """A kernel's result is not what its reference says; its time would mean nothing."""


def require(right: Any, what: str) -> None:
    """Raise `WrongResultError` naming `what` is wrong unless all of `right` is true."""
    if not np.all(right):
        raise WrongResultError(f"wrong result: {what}")


class Tools(NamedTuple):
    """What a case works with."""

    timer: Timer
    rng: np.random.Generator
    torch: Any
    """A `TorchPeers`, or None where torch is not installed."""


class Prepared(Protocol):
    """A case with its inputs on the device."""

    @property
    def read_and_written(self) -> int:
        """Bytes that any implementation must move."""

    @property
    def flop(self) -> int:
        """Operations of the matrix products, 0 where there are none."""

    def check(self, version: str = "auto") -> float:
        """Compare one launch, outputs poisoned, with the reference; return the largest relative error."""

    def time(self, version: str = "auto") -> float:
        """Return the microseconds of ours."""

    def peers(self) -> Mapping[str, Callable[[], float]]:
        """Return what gives the microseconds of each peer; empty without torch."""

    def peer_errors(self) -> Mapping[str, float]:
        """Return the relative errors of peers that differ from ours in accuracy."""


class Case(Protocol):
    """One line of the table."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The peers that stand beside it, also where they are not installed."""

    @property
    def work(self) -> str:
        """What is done, in words."""

    def prepare(self, tools: Tools) -> Prepared:
        """Make the inputs and compile."""
