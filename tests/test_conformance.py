"""The conformance runner: right engines pass, wrong ones are told by name, and nothing an engine does stops a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from ddtree_numba import cli, conformance
from ddtree_numba.backend import ON_GPU
from ddtree_numba.conformance import CommandEngine, as_json, as_junit, as_table, check_engine, exit_code, load_engine
from ddtree_numba.conformance.faults import FAULTS
from ddtree_numba.vectors import RULES, STAGES
from tests import golden
from tests.wrong_engines import WRONG, Right

ROOT = Path(__file__).resolve().parents[1]


def check(engine, pattern: str = "") -> list:
    return list(check_engine(engine, [case for name, case in golden.cases().items() if name.startswith(pattern)]))


def statuses(results) -> set[str]:
    return {result.status for result in results}


# --- right engines ---------------------------------------------------------------------------------------------------


def test_the_references_pass_every_case():
    results = check(conformance.reference)
    assert len(results) == len(golden.cases()) and statuses(results) == {"passed"}
    assert not any(result.left_out for result in results) and exit_code(results) == 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # differences beyond float32, on purpose
def test_the_kernels_pass_every_case_that_they_can_run():
    results = check(conformance.kernels)
    assert statuses(results) <= {"passed", "not supported"}
    supported = [result for result in results if result.status == "passed"]
    assert len(supported) > (len(golden.cases()) - 1 if ON_GPU else 100)
    assert {result.stage for result in supported} >= set(STAGES) - {"sample_walk"}


def test_the_package_s_own_functions_are_an_engine():
    import ddtree_numba

    results = check(ddtree_numba, "positions/") + check(ddtree_numba, "accept_walk/known")
    assert statuses(results) == {"passed"}


# --- wrong engines ---------------------------------------------------------------------------------------------------

BROKEN_RULES = {name: fault.rule for name, fault in FAULTS.items()} | {"min(1, p/q)": "lossless_sampling"}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_told_by_name(mistake):
    for engine in WRONG[mistake]:
        results = check(engine())
        told = [result.mistakes for result in results if result.status == "failed"]
        assert (mistake,) in told, engine.__name__
        alone = {mistakes[0] for mistakes in told if len(mistakes) == 1}
        assert alone == {mistake}, f"{engine.__name__}: also taken for {alone}"
        named = [result for result in results if result.mistakes == (mistake,)]
        assert {result.rule for result in named} == {BROKEN_RULES[mistake]}
        assert all(result.detail == RULES[result.rule] and result.difference for result in named)
        stages = {result.stage for result in results if result.status == "failed"}
        assert len(stages) == 1, f"{engine.__name__}: also wrong in {stages}"
        assert exit_code(results) == 1


def test_without_a_mistake_nothing_is_told():
    assert statuses(check(Right())) == {"passed", "not supported"}


def test_every_known_mistake_has_a_wrong_engine():
    assert {*FAULTS, "min(1, p/q)"} - set(WRONG) == {"token 0 is nothing"}


def test_the_first_differing_element_is_named():
    class Wrong(Right):
        def positions(self, depths, prefix_lengths):
            where = super().positions(depths, prefix_lengths)
            where[1:, 5] += 1
            return where

    (result,) = check(Wrong(), "positions/random")
    expected = golden.cases()["positions/random"].expected["positions"][1, 5]
    assert result.difference == f"positions[1, 5]: got {expected + 1}, needs {expected}"
    assert result.mistakes == () and result.rule == "position_by_depth"


def test_a_broken_invariant_is_told():
    class Wrong(Right):
        def build_tree(self, *arguments, **named):
            tree = super().build_tree(*arguments, **named)
            tree.depths[0, 1:2] += 7
            return tree

    results = check(Wrong(), "build_tree/known_13")
    assert results[0].detail == "request 0, slot 1: depth 8 must be its parent's plus one, 1"


# --- answers of every kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "difference"),
    [
        (lambda right: right.astype(np.int64), "positions: got int64, needs int32"),
        (lambda right: right[:1], "positions: got shape [1, 41], needs [4, 41]"),
        (lambda right: None, "positions: got nothing, needs an array"),
        (lambda right: {}, "positions: got nothing, needs an array"),
        (lambda right: {"where": right}, "positions: got nothing, needs an array"),
        (lambda right: (right, right), "TypeError: positions: got 2 results, needs positions"),
        (lambda right: "four", "positions: got <U4, needs int32"),
        (lambda right: [[1], [2, 3]], None),
        (lambda right: object(), "positions: got object, needs int32"),
        (lambda right: right.astype(float) * np.nan, "positions: got float64, needs int32"),
    ],
)
def test_a_strange_answer_is_a_failure_and_no_more(returned, difference):
    class Strange(Right):
        def positions(self, depths, prefix_lengths):
            return returned(super().positions(depths, prefix_lengths))

    (result,) = check(Strange(), "positions/random")
    assert result.status == "failed" and result.difference
    assert difference is None or result.difference == difference


@pytest.mark.parametrize("error", [RuntimeError("no\n  luck"), SystemExit(3), MemoryError(), RecursionError()])
def test_an_engine_that_raises_fails_that_case_alone(error):
    class Raises(Right):
        def positions(self, depths, prefix_lengths):
            if len(depths) == 1:
                raise error
            return super().positions(depths, prefix_lengths)

    first, second = check(Raises(), "positions/")
    assert first.status == "failed" and first.difference.startswith(type(error).__name__)
    assert "\n" not in first.difference and second.status == "passed"


def test_an_interrupt_is_no_failure():
    class Stops(Right):
        def positions(self, depths, prefix_lengths):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(Stops(), "positions/")


def test_nan_is_never_close_enough():
    class Blank(Right):
        def tree_attention(self, q, kv_pool, **named):
            return np.full((*q.shape[:3], named["latent_width"]), np.nan, np.float32)

    results = check(Blank(), "tree_attention/")
    assert statuses(results) == {"failed"}
    assert all("got nan, needs" in result.difference for result in results)


def test_minus_zero_is_not_zero():
    class Signed(Right):
        def build_tree(self, *arguments, **named):
            tree = super().build_tree(*arguments, **named)
            tree.log_probs[tree.log_probs == 0] = -0.0
            return tree

    (result,) = check(Signed(), "build_tree/known_12")
    assert result.difference == "log_probs[0, 0]: got -0.0, needs 0.0"


def test_outputs_that_may_be_left_out_are_told():
    class Lean(Right):
        def build_tree(self, *arguments, **named):
            tree = super().build_tree(*arguments, **named)
            return {"node_count": tree.node_count, "token_ids": tree.token_ids, "parents": tree.parents}

    results = check(Lean(), "build_tree/known")
    assert statuses(results) == {"passed"}
    assert results[0].left_out == ("depths", "first_child", "next_sibling", "log_probs")


def test_an_engine_of_one_stage_is_enough():
    lean = SimpleNamespace(positions=Right.positions)
    results = check(lean)
    assert {r.stage for r in results if r.status == "passed"} == {"positions"}
    assert statuses(results) == {"passed", "not supported"} and exit_code(results) == 0
    assert exit_code([r for r in results if r.status != "passed"]) == 1, "a run that checked nothing is no success"


def test_an_engine_that_hangs_in_python_is_stopped():
    class Hangs(Right):
        def positions(self, depths, prefix_lengths):
            while len(depths) == 1:
                pass
            return super().positions(depths, prefix_lengths)

    cases = [case for case in golden.cases().values() if case.stage == "positions"]
    first, second = check_engine(Hangs(), cases, timeout=0.3)
    assert first.difference == "TimeoutError: ran for more than 0.3 seconds" and second.status == "passed"


def test_a_helper_called_answer_makes_no_program():
    class Helped(Right):
        def answer(self, question: str) -> int:
            return 42

    assert statuses(check(Helped(), "positions/")) == {"passed"}


def test_an_engine_that_changes_its_inputs_harms_nobody():
    class Careless(Right):
        def positions(self, depths, prefix_lengths):
            where = super().positions(depths, prefix_lengths)
            depths[:] = prefix_lengths[:] = -1
            return where

    assert statuses(check(Careless(), "positions/") + check(Right(), "positions/")) == {"passed"}


# --- programs --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, numpy as np
from ddtree_numba.kdtr import KdtrFile, write_kdtr
where = sys.argv[sys.argv.index("--in") + 1]
with KdtrFile(where) as file:
    assert not [name for name in file if "expected" in name], "the answer is given away"
    if file.metadata["stage"] != "positions":
        sys.exit(77)
    answer = file["prefix_lengths"][:, None] + file["depths"]
    write_kdtr(sys.argv[sys.argv.index("--out") + 1], {"positions": answer, "more": np.zeros(2)})
"""


def run_program(command: str, pattern: str = "positions/known", timeout: float = 30.0) -> list:
    return check(CommandEngine(command, timeout), pattern)


def test_a_program_is_an_engine(tmp_path):
    (tmp_path / "an engine.py").write_text(SCRIPT)
    command = f"{sys.executable} '{tmp_path}/an engine.py' --in {{in}} --out {{out}}"
    assert [r.status for r in run_program(command, "positions/")] == ["passed", "passed"]
    assert [r.status for r in run_program(command, "ancestor_bitmask/known_15")] == ["not supported"]


@pytest.mark.parametrize(
    ("script", "difference"),
    [
        ("exit 3", "the program ended with exit code 3"),
        ("echo first; echo 'bad   luck' >&2; exit 1", "the program ended with exit code 1: bad luck"),
        ("kill -SEGV $$", "the program was ended by SIGSEGV"),
        ("true", "the program ended well and wrote no {out}"),
        ("echo nonsense > $2", "the program's {out} can't be read: 9 bytes are fewer than a header has"),
        ("head -c 100 $1 > $2", "the program's {out} can't be read: has 100 bytes, its header says"),
        ("cp $1 $2", "positions: got nothing, needs an array"),
        ("mkfifo $2", "the program's {out} can't be read: not a regular file"),
        ("mkdir $2", "the program's {out} can't be read"),
        ("yes | head -c 5000000; exit 9", "the program ended with exit code 9: y"),
        ("printf '\\033[31m\\377\\n'; exit 4", "the program ended with exit code 4: \ufffd[31m\ufffd"),
    ],
)
def test_a_program_that_breaks_down_is_a_failure(script, difference):
    (result,) = run_program(f'sh -c "{script}" sh {{in}} {{out}}')
    assert result.status == "failed" and result.difference.startswith(difference)


def test_a_program_that_can_t_be_started_is_a_failure(tmp_path):
    engine = tmp_path / "engine"
    engine.write_text("#!/nowhere/interpreter\n")
    engine.chmod(0o755)
    (result,) = run_program(f"{engine} {{in}} {{out}}")
    assert result.difference.startswith("the program can't be started")


def test_a_program_that_hangs_is_stopped_with_all_it_started(tmp_path):
    """It ignores what can be ignored, and has a child that does, too."""
    script = f"trap '' TERM INT HUP; (trap '' TERM INT HUP; sleep 300) & echo $! > {tmp_path}/child; wait; sleep 300"
    start = time.perf_counter()
    results = run_program(f'sh -c "{script}" sh {{in}} {{out}}', "positions/", timeout=0.5)
    assert time.perf_counter() - start < 10
    assert [r.difference for r in results] == ["the program was stopped: it ran for more than 0.5 seconds"] * 2
    assert_gone(int((tmp_path / "child").read_text()))


def test_what_a_program_leaves_behind_is_ended(tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path}/child; exit 77"
    start = time.perf_counter()
    (result,) = run_program(f'sh -c "{script}" sh {{in}} {{out}}')
    assert result.status == "not supported" and time.perf_counter() - start < 10
    assert_gone(int((tmp_path / "child").read_text()))


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system can't tell without reaping")
@pytest.mark.parametrize(("script", "timeout"), [("exit 77", 20), ("sleep 300", 0.3)])
def test_the_group_is_ended_before_its_number_is_free(monkeypatch, script, timeout):
    """Once the program is reaped, another process may have its number, and be the one that is ended."""
    ended, kill = [], os.killpg

    def look(group: int, number: int) -> None:
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises when it is not our child any more
        ended.append(group)
        kill(group, number)

    monkeypatch.setattr(os, "killpg", look)
    (result,) = run_program(f"sh -c '{script}' {{in}} {{out}}", timeout=timeout)
    assert len(ended) == 1 and result.difference == (
        "" if timeout == 20 else "the program was stopped: it ran for more than 0.3 seconds"
    )


def assert_gone(process: int) -> None:
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
        if state.stdout.strip()[:1] in ("", "Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {process} still runs")


@pytest.mark.parametrize(
    ("command", "timeout", "message"),
    [
        ("engine --in {in}", 1, "command: got 'engine --in {in}', needs {out} in it"),
        ("", 1, "command: got '', needs {in} in it"),
        ("engine '{in} {out}", 1, "command: got"),
        ("sh {in} {out}", 0, "timeout: got 0, needs seconds above 0"),
        ("sh {in} {out}", float("nan"), "timeout: got nan"),
        ("no-such-engine {in} {out}", 1, "command: got 'no-such-engine {in} {out}', needs a program that is there"),
    ],
)
def test_a_bad_command_is_refused(command, timeout, message):
    with pytest.raises(ValueError) as caught:
        CommandEngine(command, timeout)
    assert str(caught.value).startswith(message)


# --- finding engines and telling the outcome -------------------------------------------------------------------------


def test_engines_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "their_engine.py").write_text(
        "class E:\n def positions(self, depths, prefix_lengths): 1\nclass M:\n e = E()\n"
    )
    assert load_engine("ddtree_numba").__name__ == "ddtree_numba"
    assert hasattr(load_engine("their_engine:E"), "positions") and hasattr(load_engine("their_engine:M.e"), "positions")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit('no\\nmore')")
    for where, words in (
        ("their_engine:F", "AttributeError"),
        ("their_engine:M", "which has none of"),
        ("no_such_module", "ModuleNotFoundError"),
        ("leaves", "SystemExit: no more"),
        ("", "ValueError"),
        (".relative", "TypeError"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            load_engine(where)
        assert "\n" not in str(caught.value)


def outcome() -> list:
    class Half(Right):
        positions = WRONG["positions by slot"][0]().positions

    return check(Half(), "positions/") + check(Half(), "accept_walk/known") + check(Half(), "tree_attention/known")


def test_the_outcome_as_json():
    content = json.loads(json.dumps(as_json(outcome(), "mine")))
    assert (content["engine"], content["failed"], content["passed"], content["not_supported"]) == ("mine", 2, 7, 7)
    assert content["cases"][0]["mistakes"] == ["positions by slot"]
    assert content["cases"][0]["difference"] == "positions[0, 2]: got 12, needs 11"


def test_the_outcome_as_junit():
    results = outcome()
    results.append(results[0]._replace(difference="\x00\x1b[31m ]]> <&\ud800", case="positions/odd"))
    text = as_junit(results, "mine")
    suites = ElementTree.fromstring(text.encode())
    by_name = {suite.get("name"): suite for suite in suites}
    assert {name: (s.get("tests"), s.get("failures"), s.get("skipped")) for name, s in by_name.items()} == {
        "positions": ("3", "3", "0"),
        "accept_walk": ("7", "0", "0"),
        "tree_attention": ("7", "0", "7"),
    }
    failure = by_name["positions"][0].find("failure")
    assert failure.get("type") == "position_by_depth" and "as: positions by slot" in failure.text
    assert "]]> <&" in by_name["positions"][2].find("failure").text


def test_the_outcome_as_a_table():
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(as_table(outcome()))
    said = " ".join(console.export_text().split())
    assert "positions/known_21_siblings" in said and "positions[0, 2]: got 12, needs 11" in said
    assert "2 failed" in said and "7 not supported" in said
    assert "answers are exactly those of: positions by slot (2 cases)" in said
    console.file.close()


# --- the commands ----------------------------------------------------------------------------------------------------


def ddtree(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ddtree_numba.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False, **options)


def test_the_command_and_its_exit_codes(tmp_path):
    options = ("conformance", "--vectors", golden.folder(), "--only", "positions/*")
    done = ddtree(*options, "--impl", "ddtree_numba", "--json", "-", "--junit", tmp_path / "out.xml")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] == 2
    assert ElementTree.parse(tmp_path / "out.xml").getroot()[0].get("failures") == "0"
    assert os.listdir(tmp_path) == ["out.xml"]
    done = ddtree(*options, "--impl", "tests.wrong_engines:PositionsBySlot", "--all")
    assert done.returncode == 1 and "positions by slot" in done.stdout and "Traceback" not in done.stderr
    done = ddtree(*options, "--command", "sh -c 'exit 77' {in} {out}")
    assert done.returncode == 1 and "2 not supported" in done.stdout


def test_junit_on_standard_output_stands_there_alone():
    done = ddtree("conformance", "--impl", "ddtree_numba", "--only", "positions/*", "--junit", "-")
    assert done.returncode == 0 and ElementTree.fromstring(done.stdout)[0].get("tests") == "2"
    assert "2 passed" in done.stderr


def test_vectors_are_made_when_none_are_given():
    done = ddtree("conformance", "--impl", "ddtree_numba", "--only", "positions/*", "--seed", 7)
    assert done.returncode == 0 and "2 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("conformance",), "--impl, --command: got neither, needs one of them"),
        (
            ("conformance", "--command", "no-such-engine {in} {out}"),
            "--command: got 'no-such-engine {in} {out}', needs a program",
        ),
        (("conformance", "--impl", "ddtree_numba", "--vectors", "x", "--seed", 3), "--seed: got 3 beside --vectors"),
        (("conformance", "--impl", "ddtree_numba", "--command", "x"), "--impl, --command: got both"),
        (("conformance", "--impl", "nowhere:at_all"), "--impl: got 'nowhere:at_all' (ModuleNotFoundError"),
        (("conformance", "--command", "engine"), "--command: got 'engine', needs {in} in it"),
        (("conformance", "--impl", "ddtree_numba", "--vectors", "/nowhere"), "--vectors: got /nowhere"),
        (
            ("conformance", "--impl", "ddtree_numba", "--only", "positions/x"),
            "--only: got 'positions/x', needs a pattern",
        ),
        (("conformance", "--impl", "ddtree_numba", "--json", "/nowhere/x"), "--json: got /nowhere/x (No such file"),
        (
            ("conformance", "--impl", "ddtree_numba", "--json", "/nowhere/x", "--junit", "/nowhere/./x"),
            "--json, --junit: got /nowhere/./x for both, needs two places",
        ),
        (
            ("conformance", "--impl", "ddtree_numba", "--only", "positions/*", "--json", "-", "--junit", "-"),
            "--json, --junit: got - for both, needs two places",
        ),
        (("vectors", "write", "/dev/null"), "DIR: got /dev/null, which is no folder"),
        (("vectors", "write", "/dev/null/x"), "DIR: got /dev/null/x (File exists), needs a folder"),
        (("vectors", "write", "x", "--seed", "-1"), "--seed: got -1, needs a whole number"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["ddtree", *arguments])
    assert cli._outcome() == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith(f"ddtree: {message}") and errors.count("\n") == 1, errors


def test_vectors_without_a_command_says_which_there_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddtree", "vectors"])
    assert cli._outcome() == 2
    lines = capsys.readouterr().out.splitlines()
    assert "ddtree vectors" in lines[0] and any(line.startswith("  write ") for line in lines)
