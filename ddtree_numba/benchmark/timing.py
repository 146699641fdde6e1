"""Microseconds of work on the GPU, by its own events; and of the host's clock where the host takes part."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddtree_numba.backend import cuda

__all__ = ["L2_BYTES", "Timer", "sets_past_l2"]

Call = Callable[[], Any]

L2_BYTES = 60 << 20
"""L2 of an H200, the largest of the GPUs this is for."""

_QUEUED_BYTES = 1 << 29
_SECONDS = 0.15  # of work, for one median
_FEWEST, _MOST = 5, 60  # calls in a median
_SINGLE_US = 500_000.0  # a call this long is timed once
_LONGEST_QUEUE_US = 40_000.0
_SHORTEST_LAUNCH_US = 30.0  # of a call and its two events


def sets_past_l2(bytes_of_a_set: int) -> int:
    """Return how many sets of inputs, used in turn, are together more than the L2 holds, and at least two.

    >>> sets_past_l2(5_000_000), sets_past_l2(300_000_000)
    (19, 2)
    """
    return max(2, math.ceil(1.5 * L2_BYTES / bytes_of_a_set))


class Timer:
    """Times calls on the default stream.

    A launch from Python takes longer than many kernels, so the calls are put behind a queue of copies: when the GPU
    comes to them, all have been launched, and what lies between two events is the GPU's work alone. Where it came
    sooner, they are launched once more behind a longer queue.
    """

    def __init__(self) -> None:
        """Make the buffers that the queue copies, and time one copy."""
        self._source, self._target = (cuda.device_array(_QUEUED_BYTES, np.uint8) for _ in range(2))
        self._copy_us = 1.0
        self._queue(3)
        self._copy_us = _microseconds(self._launch([lambda: self._queue(1)] * 4))[-1]

    def device(self, calls: Sequence[Call], before: Call | None = None) -> float:
        """Return the median time of a call on the GPU; `calls`, alike but for their data, are made in turn.

        `before` is launched before each call, outside the time.
        """
        for call in calls:
            call()
        cuda.synchronize()
        start = time.perf_counter()
        calls[0]()
        launch_us = max(_SHORTEST_LAUNCH_US, 1e6 * (time.perf_counter() - start))
        once = _microseconds(self._launch(calls[:1], before))[0]
        if once >= _SINGLE_US:
            return once
        count = round(min(_MOST, max(_FEWEST, _SECONDS * 1e6 / once)))
        batch = max(1, min(count, int(_LONGEST_QUEUE_US / launch_us)))
        times: list[float] = []
        while len(times) < count:
            self._queue(math.ceil((1.5 * batch * launch_us + 200.0) / self._copy_us))
            gate = cuda.event()
            gate.record()
            events = self._launch([calls[(len(times) + i) % len(calls)] for i in range(batch)], before)
            overtaken = gate.query()  # the GPU was through with the copies before all calls were launched
            if overtaken and batch > 1:
                launch_us *= 2
                batch = max(1, min(batch, int(_LONGEST_QUEUE_US / launch_us)))
                cuda.synchronize()
                continue
            times += _microseconds(events)
        return statistics.median(times)

    def host(self, call: Call, before: Call | None = None) -> float:
        """Return the median time of `call` on the host's clock, until the GPU has finished it.

        `before` is run before each call, outside the time.
        """
        times: list[float] = []
        while len(times) < 3 + _FEWEST or (sum(times) < 2e6 * _SECONDS and len(times) < 4 * _MOST):
            if before is not None:
                before()
            cuda.synchronize()
            start = time.perf_counter()
            call()
            cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times[3:])

    def launch(self, call: Call) -> float:
        """Return the time that the host needs to start `call`, which does not wait for the GPU."""
        times = []
        for _ in range(20):
            cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            times.append(1e6 * (time.perf_counter() - start) / 20)
        cuda.synchronize()
        return statistics.median(times[2:])

    def flush(self) -> None:
        """Fill the L2 with other data."""
        self._queue(1)

    def _queue(self, copies: int) -> None:
        stream = cuda.default_stream()  # named, so that Numba does not wait
        for _ in range(copies):
            self._target.copy_to_device(self._source, stream=stream)

    def _launch(self, calls: Sequence[Call], before: Call | None = None) -> list[tuple[Any, Any]]:
        """Launch `calls`, each between two events."""
        events = [(cuda.event(), cuda.event()) for _ in calls]
        for (first, last), call in zip(events, calls, strict=True):
            if before is not None:
                before()
            first.record()
            call()
            last.record()
        return events


def _microseconds(events: Sequence[tuple[Any, Any]]) -> list[float]:
    cuda.synchronize()
    return [1e3 * cuda.event_elapsed_time(first, last) for first, last in events]
