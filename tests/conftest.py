"""The backend in the header, and the rule that a run on a GPU must have run something there."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.backend import ON_GPU, describe


def pytest_report_header() -> str:
    return f"ddtree_numba backend: {describe()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail when no GPU test has run")
    parser.addoption("--report", metavar="FILE", help="write machine, versions, counts and measured errors as JSON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: the size is out of the simulator's reach"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _counts[report.outcome] += 1
    if report.when == "call" and report.passed:
        _gpu_tests[0] += "gpu" in report.keywords
        if report.user_properties:
            _measured[report.nodeid] = dict(report.user_properties)


_counts: Counter[str] = Counter()
_gpu_tests = [0]
_measured: dict[str, dict[str, object]] = {}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--require-gpu") and (not ON_GPU or _gpu_tests[0] == 0):
        print(f"\n--require-gpu: {_gpu_tests[0]} GPU tests have run on {describe()}: that proves nothing", flush=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if path := session.config.getoption("--report"):
        Path(path).write_text(json.dumps(_report(), indent=1) + "\n", encoding="utf-8")


def _report() -> dict[str, object]:
    packages = ("ddtree-numba", "numba", "numba-cuda", "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch")
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "machine": describe(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "tests": dict(_counts),
        "gpu_tests": _gpu_tests[0],
        "measured": _measured,
    }


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random numbers in every run; the seed is printed with a failure, DDTREE_SEED repeats it."""
    seed = int(os.environ.get("DDTREE_SEED", np.random.SeedSequence().entropy % 2**32))
    request.node.add_report_section("setup", "seed", f"DDTREE_SEED={seed}")
    return np.random.default_rng(seed)
