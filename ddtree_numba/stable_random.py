"""Random numbers that stay the same: in every NumPy version, on every machine, and in a C++ program of ten lines.

`numpy.random.Generator` may change what its distributions return with any release (NEP 19). Here number i of a stream
is SplitMix64's: ``z = seed + (i + 1) * 0x9E3779B97F4A7C15``, then ``z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9``,
``z = (z ^ z >> 27) * 0x94D049BB133111EB``, ``z ^ z >> 31``, all modulo 2**64 (Steele, Lea and Flood, 2014, in the
public-domain form of Sebastiano Vigna). What follows uses whole numbers and exact arithmetic only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree_numba.arguments import check_integer
from ddtree_numba.portable_math import portable_log

__all__ = ["StableRandom"]

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class StableRandom:
    """A stream of random numbers, with the few methods of `numpy.random.Generator` that test data needs.

    >>> StableRandom(0).raw(2).tolist()
    [16294208416658607535, 7960286522194355700]
    >>> StableRandom(0, "walks").integers(10, size=5).tolist() == StableRandom(0, "walks").integers(10, size=5).tolist()
    True
    """

    def __init__(self, seed: int, *labels: object) -> None:
        """Take a `seed`, 0..2**64 - 1; `labels` name one of many streams of that seed."""
        self._state = check_integer("seed", seed, 0, _MASK)
        for label in labels:
            digest = hashlib.sha256(f"{self._state}/{label}".encode()).digest()
            self._state = int.from_bytes(digest[:8], "little")

    def raw(self, count: int) -> np.ndarray:
        """Return the next `count` numbers of the stream, uint64."""
        with np.errstate(over="ignore"):
            z = np.uint64(self._state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
            z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        self._state = (self._state + count * _STEP) & _MASK
        return z ^ z >> np.uint64(31)

    def integers(self, low: int, high: int | None = None, size: Any = None, dtype: Any = np.int64) -> Any:
        """Return whole numbers from `low` to below `high` (from 0 to below `low`), at most 2**32 of them apart."""
        low, high = (0, low) if high is None else (low, high)
        span = check_integer("high - low", int(high) - int(low), 1, 1 << 32)
        drawn = (self._take(size) >> np.uint64(32)) * np.uint64(span) >> np.uint64(32)
        return self._shaped(drawn.astype(np.int64) + int(low), size, dtype)

    def random(self, size: Any = None) -> Any:
        """Return float64 numbers from 0 to below 1, multiples of 2**-53."""
        return self._shaped((self._take(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53, size)

    def normal(self, size: Any = None) -> Any:
        """Return float64 numbers of mean 0 and variance 1: sums of twelve uniform ones, so never beyond 6."""
        total = np.zeros(self._count(size))
        for _ in range(12):
            total = total + (self._take(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return self._shaped(total - 6.0, size)

    def exponential(self, size: Any = None) -> Any:
        """Return float64 numbers of the exponential distribution of mean 1."""
        above_zero = ((self._take(size) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
        return self._shaped(np.abs(portable_log(above_zero)), size)

    def choice(self, items: Sequence[Any] | np.ndarray) -> Any:
        """Return one of `items`."""
        return items[self.integers(len(items))]

    def permutation(self, count: int) -> np.ndarray:
        """Return 0..count - 1 in random order, int64."""
        return np.argsort(self.raw(count), kind="stable").astype(np.int64)

    @staticmethod
    def _count(size: Any) -> int:
        return 1 if size is None else int(np.prod(size, dtype=np.int64))

    def _take(self, size: Any) -> np.ndarray:
        return self.raw(self._count(size))

    @staticmethod
    def _shaped(drawn: np.ndarray, size: Any, dtype: Any = None) -> Any:
        if size is None:
            return drawn[0].item()
        return drawn.reshape(size).astype(drawn.dtype if dtype is None else dtype)
