"""The C++ reader and writer against this one: vectors read there, files read back here, its engine in the runner."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.conformance import CommandEngine, check_engine
from ddtree_numba.kdtr import KdtrFile
from tests import golden

SOURCE = Path(__file__).resolve().parents[1] / "examples" / "kdtr_cpp"

pytestmark = [
    pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler"),
    pytest.mark.skipif(not SOURCE.is_dir(), reason="the examples are not here: an installed package"),
]


@functools.cache
def build() -> Path:
    """Build without optimisation, which takes seconds; `.ci/run` builds with it, and with sanitizers."""
    folder = Path(tempfile.mkdtemp(prefix="ddtree-cpp-"))
    configure = ["cmake", "-S", SOURCE, "-B", folder, "-DCMAKE_BUILD_TYPE=Debug", f"-DKDTR_VECTORS={golden.folder()}"]
    for command in (configure, ["cmake", "--build", folder, "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_its_own_tests_pass_and_python_reads_what_it_wrote():
    done = subprocess.run(["ctest", "--output-on-failure"], cwd=build(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 tests passed" not in done.stdout, done.stdout
    assert "100% tests passed" in done.stdout and "Skipped" not in done.stdout
    with KdtrFile(build() / "from_cpp.kdtr") as file:
        assert file.metadata == {"written_by": "examples/kdtr_cpp"}
        outputs = {"build_tree": "parents", "accept_walk": "accept_slots", "ancestor_bitmask": "ancestor_bits"}
        cases = [case for case in golden.cases().values() if case.stage in outputs]
        assert set(file) == {case.name for case in cases}
        for case in cases:
            np.testing.assert_array_equal(file[case.name], case.expected[outputs[case.stage]], strict=True)


def test_its_engine_passes_the_cases_it_supports():
    command = CommandEngine(f"{build() / 'kdtr_engine'} --in {{in}} --out {{out}}")
    supported = {"build_tree", "ancestor_bitmask", "positions", "accept_walk", "commit_kv"}
    cases = [case for case in golden.cases().values() if case.small]
    results = list(check_engine(command, cases))
    assert [r for r in results if r.status == "failed"] == []
    assert {r.stage for r in results if r.status == "passed"} == supported
    assert len([r for r in results if r.status == "passed"]) > 70


def test_a_damaged_input_is_an_error_and_no_crash(tmp_path):
    whole = (golden.folder() / "positions" / "random.kdtr").read_bytes()
    for damaged in (whole[:200], b"", whole[:60] + bytes(4) + whole[64:], bytes(1000)):
        (tmp_path / "in.kdtr").write_bytes(damaged)
        command = [build() / "kdtr_engine", "--in", tmp_path / "in.kdtr", "--out", tmp_path / "out.kdtr"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stderr.startswith(f"{tmp_path}/in.kdtr: "), done.stderr
        assert done.stderr.count("\n") == 1 and os.listdir(tmp_path) == ["in.kdtr"]
