"""Recording against a stand-in driver, which keeps account of what it has made; on a GPU the plans' tests record."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ddtree_numba import launch_graph
from ddtree_numba.launch_graph import Recorded

STREAM = 7


class Driver(SimpleNamespace):
    """Hands out one graph and one executable, and notes what is launched and destroyed."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self) -> None:
        super().__init__(calls=[], answer=0)

    def note(self, name, *values):
        self.calls.append(name)
        return (0, *values)

    def cuStreamBeginCapture(self, handle, mode):  # noqa: N802  (the driver's names)
        return self.note("begin")

    def cuStreamEndCapture(self, handle):  # noqa: N802
        return self.note("end", 5)

    def cuGraphInstantiate(self, graph, flags):  # noqa: N802
        return (self.answer, 0) if self.answer else self.note("instantiate", 6)

    def cuGraphLaunch(self, executable, handle):  # noqa: N802
        return self.note(f"launch {executable}")

    def cuGraphDestroy(self, graph):  # noqa: N802
        return self.note(f"destroy graph {graph}")

    def cuGraphExecDestroy(self, executable):  # noqa: N802
        return self.note(f"destroy executable {executable}")


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(launch_graph, "ON_GPU", True)
    device = SimpleNamespace(stream=lambda: STREAM, defer_cleanup=contextlib.nullcontext)
    monkeypatch.setattr(launch_graph, "cuda", device)
    return driver


def test_recorded_once_replayed_often_destroyed_once(driver):
    streams = []
    recorded = Recorded(streams.append)
    recorded.replay()
    recorded.replay()
    assert streams == [STREAM] and driver.calls == ["begin", "end", "instantiate", *["launch 6"] * 2]
    del recorded
    gc.collect()
    assert sorted(driver.calls[5:]) == ["destroy executable 6", "destroy graph 5"]


def test_launches_that_fail_end_the_capture_and_leave_no_graph(driver):
    def fail(stream):
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        Recorded(fail)
    gc.collect()
    assert driver.calls == ["begin", "end", "destroy graph 5"]


def test_a_graph_that_cannot_be_instantiated_is_destroyed(driver):
    driver.answer = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="CUDA graph: the driver answers CUDA_ERROR_OUT_OF_MEMORY"):
        Recorded(lambda stream: None)
    gc.collect()
    assert driver.calls == ["begin", "end", "destroy graph 5"]


KEPT = """
from ddtree_numba.launch_graph import Recorded

def destroy(handle):
    print("destroyed", handle)

kept = Recorded(lambda stream: None)
kept._own("graph", destroy)
"""


def test_a_recording_that_a_module_keeps_ends_in_silence_with_python():
    run = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True)
    assert run.stdout == run.stderr == ""
