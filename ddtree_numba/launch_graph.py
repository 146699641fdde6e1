"""Launches recorded once and replayed as one: a CUDA graph.

A launch from Python costs tens of microseconds, mostly for turning arrays into kernel arguments, and a decoding step
has three to five, of kernels that may run for less. A graph holds the launches with their arguments: replaying it
is one call to the driver, which starts each kernel as soon as the one before has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ddtree_numba.backend import ON_GPU, as_stream, cuda

__all__ = ["Recorded"]


class Recorded:
    """What `launches(stream)` puts on a stream, as one replayable graph.

    `launches` must have run once before, so that everything is compiled and loaded, and must only launch kernels. The
    pointers and sizes of its arrays are fixed in the recording; their contents are read at each replay. In the
    simulator, which has no graphs, and on a stream that is being captured, it is simply called.
    """

    def __init__(self, launches: Callable[[Any], None], stream: Any = None) -> None:
        """Record `launches`, on a stream of its own unless one of Numba's is given; nothing runs.

        Give one to launches whose memory belongs to a stream. It lives as long as the recording.
        """
        self._launches, self._stream = launches, stream
        self._graph = self._executable = None
        if ON_GPU:
            from cuda.bindings import driver

            self._driver = driver
            stream = self._stream = cuda.stream() if stream is None else stream
            handle, modes = int(stream), driver.CUstreamCaptureMode
            # Relaxed, and no clean-up: memory that Python frees meanwhile must not end the capture.
            with cuda.defer_cleanup():
                _check(driver.cuStreamBeginCapture(handle, modes.CU_STREAM_CAPTURE_MODE_RELAXED))
                try:
                    launches(stream)
                finally:
                    self._graph = self._own(_check(driver.cuStreamEndCapture(handle)), driver.cuGraphDestroy)
            self._executable = self._own(_check(driver.cuGraphInstantiate(self._graph, 0)), driver.cuGraphExecDestroy)

    def _own(self, handle: Any, destroy: Callable[[Any], Any]) -> Any:
        """Return the driver's `handle`, which is destroyed together with this recording.

        Not when Python exits: the driver's functions may be gone before a recording that a module keeps.
        """
        weakref.finalize(self, destroy, handle).atexit = False
        return handle

    def replay(self, stream: Any = None) -> None:
        """Put the launches on `stream` (Numba, torch, CuPy or a raw handle; None: the default stream)."""
        if self._executable is None:
            self._launches(as_stream(stream))
            return
        handle = int(as_stream(stream)) if stream else 0
        if handle and self._is_capturing(handle):
            self._launches(as_stream(stream))
            return
        error = self._driver.cuGraphLaunch(self._executable, handle)[0]
        if error:
            _check((error,))

    def _is_capturing(self, handle: int) -> bool:
        status = _check(self._driver.cuStreamIsCapturing(handle))
        return bool(status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def _check(answer: tuple[Any, ...]) -> Any:
    """Return what a call to the driver gave besides its error code; raise on an error."""
    error, *values = answer
    if error:
        raise RuntimeError(f"CUDA graph: the driver answers {error.name}")
    return values[0] if values else None
