"""GPU or simulator: each way to decide, in a fresh process, with a stand-in for the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from ddtree_numba.backend import BACKEND, ON_GPU, as_stream, block_threads, cuda, describe, is_device_array
from tests.helpers import poisoned, thread_after_two_barriers

FAKE_DRIVER = """
import ctypes, sys
class Driver:
    def __init__(self, init=0, devices=1, version=13000): self.init, self.devices, self.version = init, devices, version
    def cuInit(self, flags): return self.init
    def cuDeviceGetCount(self, out): out._obj.value = self.devices; return 0
    def cuDriverGetVersion(self, out): out._obj.value = self.version; return 0
def missing(name): raise OSError(name)
def replace_driver(load):
    real = ctypes.CDLL
    names = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
    ctypes.CDLL = lambda name, *rest, **more: load(name) if name in names else real(name, *rest, **more)
def with_driver(**facts): replace_driver(lambda name: Driver(**facts))
def without_driver(): replace_driver(missing)
def installed(numba_cuda):
    import importlib.util
    find = importlib.util.find_spec
    def once(name):  # the first question is the backend's; whoever asks later gets the truth
        importlib.util.find_spec = find
        return object() if numba_cuda else None
    importlib.util.find_spec = once
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh Python that has decided nothing yet."""
    inherited = {key: value for key, value in os.environ.items() if key != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, "-c", FAKE_DRIVER + code],
        capture_output=True,
        text=True,
        env=inherited | env,
        timeout=120,
        check=False,
    )


PRINT = "import ddtree_numba.backend as b; print(b.BACKEND)"


@pytest.mark.parametrize("driver", ["without_driver()", "with_driver(init=100)", "with_driver(init=34)"])
def test_no_device_means_the_simulator_without_a_word(driver):
    done = run(f"{driver}; {PRINT}")
    assert (done.stdout, done.stderr, done.returncode) == ("simulator\n", "", 0)


def test_a_driver_that_counts_no_device_means_the_simulator():
    assert run(f"with_driver(devices=0); {PRINT}").stdout == "simulator\n"


def test_a_device_and_numba_cuda_mean_the_gpu():
    assert run(f"with_driver(); installed(True); {PRINT}").stdout == "gpu\n"


@pytest.mark.parametrize(("version", "extra"), [(12080, "cu12"), (13000, "cu13")])
def test_a_device_without_numba_cuda_names_the_command(version, extra):
    done = run(f"with_driver(version={version}); installed(False); {PRINT}")
    assert done.stdout == "simulator\n"
    assert f"pip install 'ddtree-numba[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_broken_driver_is_an_error():
    done = run(f"with_driver(init=999); {PRINT}")
    assert done.returncode == 1
    assert "RuntimeError: the CUDA driver is installed but answers error 999" in done.stderr


@pytest.mark.parametrize(("value", "backend"), [("1", "simulator"), ("0", "gpu")])
def test_the_users_variable_wins_even_over_a_broken_driver(value, backend):
    done = run(f"with_driver(init=999); {PRINT}", NUMBA_ENABLE_CUDASIM=value)
    assert (done.stdout, done.returncode) == (f"{backend}\n", 0), done.stderr


def test_numba_imported_earlier_is_one_clear_sentence():
    done = run(f"without_driver(); import numba; {PRINT}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: numba was imported before ddtree_numba")
    assert "import ddtree_numba first, or set NUMBA_ENABLE_CUDASIM=1" in last


def test_numba_imported_earlier_in_the_simulator_is_fine():
    done = run("import os; os.environ['NUMBA_ENABLE_CUDASIM'] = '1'; import numba; without_driver(); " + PRINT)
    assert done.stdout == "simulator\n", done.stderr


def test_what_this_process_says_of_itself(rng):
    assert ("gpu" if ON_GPU else "simulator") == BACKEND
    assert describe().startswith(BACKEND)
    assert block_threads(128) == (128 if ON_GPU else 8)
    assert not is_device_array(rng.random(3))
    assert as_stream(None) == 0


@cuda.jit
def threads_kernel(indices):
    for _ in range(4):
        index = thread_after_two_barriers()
    indices[cuda.threadIdx.x] = index


def test_a_device_function_of_another_module_knows_its_thread():
    for _ in range(10):  # in the simulator, threads that enter and leave it at once used to lose `threadIdx`
        indices = cuda.to_device(poisoned(8, np.int32))
        threads_kernel[1, 8](indices)
        np.testing.assert_array_equal(indices.copy_to_host(), np.arange(8))


@cuda.jit
def meet_in_shared_memory_kernel(neighbours):
    numbers = cuda.shared.array(8, np.int32)
    numbers[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncthreads()
    neighbours[cuda.threadIdx.x] = numbers[cuda.threadIdx.x ^ 1]


def test_a_shared_array_is_one_for_all_threads(monkeypatch):
    # A simulated thread that dawdles while it makes the array meets others that make it too. (No matter on a GPU.)
    real = np.empty
    monkeypatch.setattr(np, "empty", lambda *args, **kwargs: (time.sleep(0.002), real(*args, **kwargs))[1])
    for _ in range(5):
        neighbours = cuda.to_device(poisoned(8, np.int32))
        meet_in_shared_memory_kernel[1, 8](neighbours)
        np.testing.assert_array_equal(neighbours.copy_to_host(), np.arange(8) ^ 1)


def test_a_name_that_cuda_does_not_have_is_still_missing():
    assert not hasattr(cuda, "no_such_name")
