"""What starting work costs: a launch from Python, one prepared, a graph; and the two graphs of a round."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.backend import cuda
from ddtree_numba.benchmark.case import Tools
from ddtree_numba.benchmark.rounds import RoundCase
from ddtree_numba.launch_graph import Recorded

__all__ = ["COSTS"]


@cuda.jit
def _touch_kernel(a, b, c, d, e, f, g, h):
    """Eight arrays and hardly any work: the launch is what takes time."""
    if cuda.threadIdx.x == 0:
        a[0] = b[0] + c[0] + d[0] + e[0] + f[0] + g[0] + h[0]


def _eight_arrays() -> list[Any]:
    return [cuda.to_device(np.zeros(32, np.float32)) for _ in range(8)]


def _from_python(tools: Tools) -> float:
    arrays = _eight_arrays()
    return tools.timer.launch(lambda: _touch_kernel[1, 32](*arrays))


def _prepared(tools: Tools) -> float:
    """Launch through the driver with arguments laid out once, as Numba lays them out: 7 words for each array."""
    from cuda.bindings import driver

    arrays = _eight_arrays()
    _touch_kernel[1, 32](*arrays)
    (compiled,) = _touch_kernel.overloads.values()
    function = driver.CUfunction(int(compiled._codelibrary.get_cufunc().kernel.handle))
    addresses = [array.__cuda_array_interface__["data"][0] for array in arrays]
    # Owner, parent, elements, bytes of one, address, shape, stride.
    words = [ctypes.c_uint64(word) for address in addresses for word in (0, 0, 32, 4, address, 32, 4)]
    pointers = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
    parameters = ctypes.addressof(pointers)

    def launch() -> None:
        (error,) = driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, parameters, 0)
        if error:
            raise RuntimeError(f"cuLaunchKernel answers {error.name}")

    arrays[0].copy_to_device(np.full(32, np.nan, np.float32))
    launch()
    if arrays[0].copy_to_host()[0] != 0:
        raise RuntimeError("the prepared launch did not write its result")
    return tools.timer.launch(launch)


def _graph_of_six(tools: Tools) -> float:
    arrays = _eight_arrays()

    def six(stream: Any) -> None:
        for _ in range(6):
            _touch_kernel[1, 32, stream](*arrays)

    six(0)
    return tools.timer.launch(Recorded(six).replay)


def _round_costs(tools: Tools) -> dict[str, float]:
    work = RoundCase("round_b1").prepare(tools)
    work.check()
    return {
        "draft_graph_us": tools.timer.device([work.plan.draft]),
        "commit_graph_us": tools.timer.device([work.plan.commit], before=work.restart),
        "round_wall_us": work.time(),
    }


COSTS: tuple[Callable[[Tools], dict[str, float]], ...] = (
    lambda tools: {"launch_python_us": _from_python(tools)},
    lambda tools: {"launch_prepared_us": _prepared(tools)},
    lambda tools: {"graph_replay_us": _graph_of_six(tools)},
    _round_costs,
)
"""What each gives, by name, in microseconds.

``launch_python_us``: the host's time to launch a kernel with eight arrays; ``launch_prepared_us``: the same with its
arguments laid out beforehand; ``graph_replay_us``: six such kernels as one graph; ``draft_graph_us`` and
``commit_graph_us``: the GPU's time for the two sides of `round_b1`; ``round_wall_us``: both, from Python's call to the
end.
"""
