"""The backend in the header, and the rule that a run on a GPU must have run something there."""

from __future__ import annotations

import os

import numpy as np
import pytest

from ddtree_numba.backend import ON_GPU, describe


def pytest_report_header() -> str:
    return f"ddtree_numba backend: {describe()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail when no GPU test has run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: the size is out of the simulator's reach"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and "gpu" in report.keywords:
        _ran[0] += 1


_ran = [0]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--require-gpu") and (not ON_GPU or _ran[0] == 0):
        print(f"\n--require-gpu: {_ran[0]} GPU tests have run on {describe()}: that proves nothing", flush=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random numbers in every run; the seed is printed with a failure, DDTREE_SEED repeats it."""
    seed = int(os.environ.get("DDTREE_SEED", np.random.SeedSequence().entropy % 2**32))
    request.node.add_report_section("setup", "seed", f"DDTREE_SEED={seed}")
    return np.random.default_rng(seed)
