"""`ddtree bench`: its cases at sizes for the simulator, its report, what it refuses. Times are a stand-in's."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from ddtree_numba.backend import ON_GPU
from ddtree_numba.benchmark import peers, report, timing
from ddtree_numba.benchmark.attention import AttentionCase
from ddtree_numba.benchmark.candidates import TopCase
from ddtree_numba.benchmark.case import Tools, WrongResultError
from ddtree_numba.benchmark.ceilings import Ceilings
from ddtree_numba.benchmark.command import _chosen, bench
from ddtree_numba.benchmark.inputs import normal_bfloat16, random_candidates, random_rows
from ddtree_numba.benchmark.ladder import LADDERS, PREDICTED_US, Ladder
from ddtree_numba.benchmark.rounds import RoundCase
from ddtree_numba.benchmark.timing import L2_BYTES, sets_past_l2
from ddtree_numba.benchmark.trees import TreeCase
from ddtree_numba.bfloat16 import from_bfloat16
from ddtree_numba.commit_side import launch_commit_side
from ddtree_numba.decode_step import launch_tree
from ddtree_numba.draft_tree import check_tree
from ddtree_numba.stages.best_first_tree import build_tree_reference
from ddtree_numba.stages.top_candidates import top_candidates
from ddtree_numba.stages.tree_attention import VERSIONS as ATTENTION_VERSIONS

RATES = Ceilings(4e12, 5e14, None)


class FakeTimer:
    """Makes every call once, and says 1, 2, 3, ... microseconds."""

    def __init__(self) -> None:
        self._times, self.calls = itertools.count(1), 0

    def device(self, calls, before=None) -> float:
        for call in calls:
            if before is not None:
                before()
            call()
        self.calls += len(calls)
        return float(next(self._times))

    def host(self, call, before=None) -> float:
        return self.device([call], before)

    launch = host

    def flush(self) -> None:
        pass


def torch_on_cpu() -> peers.TorchPeers:
    return peers.TorchPeers(pytest.importorskip("torch", reason="the peers are PyTorch's"), "cpu")


SMALL = (
    TopCase("top_small", 2, depths=2, vocab=70, k=5),
    TreeCase("tree_small", 2, 6, depths=3),
    AttentionCase(1, 3, 2, 5, latent_width=8, rope_width=4, page_size=4),
    RoundCase("round_small", vocab=40, budget=4, depths=3, layers=2, width=6, page_size=8),
)


@pytest.fixture
def few_sets(monkeypatch):
    """The simulator has no L2 to get past."""
    for module in ("attention", "candidates"):
        monkeypatch.setattr(f"ddtree_numba.benchmark.{module}.sets_past_l2", lambda size: 2)
    monkeypatch.setattr("ddtree_numba.benchmark.trees._SETS", 2)


def tools_for(rng, torch=None) -> Tools:
    return Tools(FakeTimer(), rng, torch)


def small_report(monkeypatch, rng, cases=SMALL, ladders=(), costs=(), torch=None, parts=None):
    monkeypatch.setattr(report, "CASES", cases)
    monkeypatch.setattr(report, "LADDERS", ladders)
    monkeypatch.setattr(report, "COSTS", costs)
    steps: list[str] = []
    parts = {case.id for case in cases} | {ladder.id for ladder in ladders} | {"costs"} if parts is None else parts
    made = report.make_report(parts, tools_for(rng, torch), RATES, steps.append)
    assert len(steps) == report.count_steps(parts)
    return made


# ---- the cases ----


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_a_case_is_right_and_is_timed(rng, few_sets, case):
    tools = tools_for(rng)
    work = case.prepare(tools)
    assert 0 <= work.check() < 2**-8
    assert work.time() == 1.0 and tools.timer.calls >= (1 if isinstance(case, RoundCase) else 2)
    assert work.peers() == {} and work.peer_errors() == {}
    assert work.check() < 2**-8, "timing leaves the inputs as they were"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_its_peers_run(rng, few_sets, case):
    tools = tools_for(rng, torch_on_cpu())
    work = case.prepare(tools)
    work.check()
    measured = {name: measure() for name, measure in work.peers().items()}
    assert tuple(measured) == tuple(case.peer_names) and all(us > 0 for us in measured.values())
    for error in work.peer_errors().values():
        assert 1e-4 < error < 0.05, "three operations in bfloat16 round their scores"


def test_rungs_of_attention(rng, few_sets):
    work = SMALL[2].prepare(tools_for(rng))
    assert all(work.check(version) < 1e-5 for version in ATTENTION_VERSIONS)


def test_rungs_of_the_draft_side(rng, few_sets):
    top, tree = TopCase("top", 1, depths=1, vocab=1100, k=3), SMALL[1]
    for case, versions in ((top, ("block_per_row", "fused")), (tree, ("one_thread", "warp", "rounds"))):
        work = case.prepare(tools_for(rng))
        assert all(work.check(version) < 1e-6 for version in versions)


# ---- a wrong result ----


def break_attention(monkeypatch):
    def wrong(*arrays, out, **options):
        out[0][0, 0, 0, 0], out[1][0] = 1.0, 0.0  # the rest keeps its poison
        return out

    monkeypatch.setattr("ddtree_numba.benchmark.attention.tree_attention", wrong)


def break_candidates(monkeypatch):
    def wrong(logits, k, *, out, **options):
        top_candidates(logits, k, out=out)
        ids = out[1].copy_to_host()
        out[1].copy_to_device(np.ascontiguousarray(ids[..., ::-1]))

    monkeypatch.setattr("ddtree_numba.benchmark.candidates.top_candidates", wrong)


def break_trees(monkeypatch):
    def places_wrong(*arrays, **options):
        launch_tree(*arrays, **options)
        positions = arrays[5]
        positions.copy_to_device(positions.copy_to_host() + 1)

    monkeypatch.setattr("ddtree_numba.benchmark.trees.launch_tree", places_wrong)


def break_rounds(monkeypatch):
    def counts_wrong(*arrays):
        launch_commit_side(*arrays)
        lengths = arrays[5]
        lengths.copy_to_device(lengths.copy_to_host() + 1)

    monkeypatch.setattr("ddtree_numba.decode_step.launch_commit_side", counts_wrong)


@pytest.mark.skipif(ON_GPU, reason="breaks what the simulator runs")
@pytest.mark.parametrize(
    "case, fault, what",
    [
        (SMALL[0], break_candidates, "tokens of request"),
        (SMALL[1], break_trees, "positions of the tree"),
        (SMALL[2], break_attention, "a place is left out"),
        (SMALL[3], break_rounds, "prefix length of the round"),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_a_wrong_result_is_no_time(monkeypatch, rng, few_sets, case, fault, what):
    fault(monkeypatch)
    with pytest.raises(WrongResultError, match=what):
        case.prepare(tools_for(rng)).check()
    others = tuple(other for other in SMALL if other is not case)
    made = small_report(monkeypatch, rng, (case, *others))
    assert [row["id"] for row in made["rows"]] == [other.id for other in others if other.id not in made["failed"]]
    assert re.search(what, made["failed"][case.id]) and "WrongResultError" in made["failed"][case.id]


# ---- the report ----


def test_the_report_has_the_form_that_the_pages_read(monkeypatch, rng, few_sets):
    ladder = Ladder("ladder_attn", "tree_attention", ATTENTION_VERSIONS, SMALL[2], lambda rung: 1000)
    costs = (lambda tools: {"launch_python_us": 89.0}, lambda tools: {"graph_replay_us": 5.0})
    made = small_report(monkeypatch, rng, SMALL[1:3], (ladder,), costs)
    assert json.loads(json.dumps(made)) == made
    assert {"machine", "versions", "date", "rows", "ladder", "costs"} <= made.keys() and not made["failed"]
    for row in made["rows"]:
        assert {"id", "work", "ours_us", "floor_us", "peers", "max_rel_error"} <= row.keys()
        assert row["ours_us"] > 0 and row["floor_us"] > 0 and set(row["peers"].values()) == {None}
    assert made["rows"][0]["max_rel_error"] == 0.0
    assert list(made["rows"][1]["peers"]) == ["torch_three_op", "torch_sdpa"]
    assert [row["rung"] for row in made["ladder"]] == list(ATTENTION_VERSIONS)
    for row in made["ladder"]:
        fields = {"id", "stage", "rung", "predicted_us", "ours_us", "floor_us", "bytes_read", "flop", "changed"}
        assert row.keys() == fields and row["id"] == "attn_1x3x2x5" and row["changed"]
    assert made["costs"] == {"launch_python_us": 89.0, "graph_replay_us": 5.0}
    assert "torch" in made["skipped"], "peers that are not installed are named"


def test_what_fails_does_not_take_the_others_along(monkeypatch, rng, few_sets):
    def broken(tools):
        raise OSError("no\nsuch thing")

    ladder = Ladder("ladder_attn", "tree_attention", ("naive", "no_such_rung", "split_kv"), SMALL[2], lambda rung: None)
    made = small_report(monkeypatch, rng, (), (ladder,), (broken, lambda tools: {"b_us": 1.0}))
    assert [row["rung"] for row in made["ladder"]] == ["naive", "split_kv"] and made["costs"] == {"b_us": 1.0}
    assert made["failed"].keys() == {"ladder_attn: no_such_rung", "costs, 1 of 2"}
    assert made["failed"]["costs, 1 of 2"] == "OSError: no such thing"


def test_a_peer_that_cannot_do_it_leaves_a_hole(monkeypatch, rng, few_sets):
    torch = torch_on_cpu()
    monkeypatch.setattr(torch, "heap_tree", lambda *arrays, budget: [][0])
    made = small_report(monkeypatch, rng, SMALL[1:2], torch=torch)
    assert made["rows"][0]["peers"] == {"python_heap": None} and not made["failed"]
    assert "IndexError" in made["skipped"]["python_heap on tree_small"]


def test_parts_are_chosen(monkeypatch, rng, few_sets):
    made = small_report(monkeypatch, rng, SMALL, parts={"tree_small"})
    assert [row["id"] for row in made["rows"]] == ["tree_small"] and not made["ladder"] and not made["costs"]
    assert _chosen("costs, top_b1", report.PARTS) == ("top_b1", "costs")


def test_the_table_shows_it_all(monkeypatch, rng, few_sets):
    ladder = Ladder("ladder_attn", "tree_attention", ("naive",), SMALL[2], lambda rung: None)
    made = small_report(monkeypatch, rng, SMALL[1:3], (ladder,), (lambda tools: {"launch_python_us": 89.0},))
    made["rows"][0]["peers"]["python_heap"] = 3000.0
    made["failed"]["top_b64"] = "WrongResultError: wrong result: tokens"
    console = Console(width=120, record=True, file=SimpleNamespace(write=lambda text: None, flush=lambda: None))
    for part in report.summary(made):
        console.print(part)
    text = console.export_text()
    for piece in (
        "tree_small",
        "python_heap",
        "3,000",
        "3000.00x",
        "torch_sdpa",
        "–",
        "naive",
        "launch_python",
        "89.0",
    ):
        assert piece in text, text
    assert "FAILED: top_b64" in text and "skipped: torch" in text and "copy_tb_s 4" in text


def test_ids_are_those_of_the_published_table():
    rows = "top_b64 top_b1 tree_b1_n64 tree_b64_n64 tree_b1_n1024 round_b1 attn_8x33x64x8192 attn_1x33x64x65536 "
    rows += "attn_1x33x64x8192 attn_16x33x8x8192 attn_1x17x64x2048"
    assert [case.id for case in report.CASES] == rows.split()
    assert report.CASES[6].flop == 302_505_148_416 or abs(report.CASES[6].flop / 302e9 - 1) < 0.01
    known = {(ladder.stage, rung) for ladder in LADDERS for rung in ladder.rungs}
    assert PREDICTED_US.keys() <= known, "a prediction of a rung that is not there"
    for ladder in LADDERS:
        assert all(ladder.changed(rung) for rung in ladder.rungs)


def test_the_floor_is_the_longer_of_bytes_and_operations():
    assert RATES.floor_us(4_000_000, 0) == pytest.approx(1.0)
    assert RATES.floor_us(4_000_000, 1_000_000_000) == pytest.approx(2.0)
    assert Ceilings(4e12, 5e14, 1e15).floor_us(0, 1_000_000_000) == pytest.approx(1.0), "the faster of the two rates"


# ---- inputs ----


def test_inputs(rng):
    numbers = from_bfloat16(normal_bfloat16(rng, (300, 200), 3.0))
    assert numbers.shape == (300, 200) and abs(numbers.mean()) < 0.1 and abs(numbers.std() - 3) < 0.1
    assert len(np.unique(numbers[0])) > 100 and not np.array_equal(numbers[0], numbers[1])
    host = random_candidates(rng, 3, 4, 10)
    check_tree(build_tree_reference(*host, 12), bits=False)
    rows = random_rows(rng, 2, 5, 3, 30, 12, 8)
    assert rows.kv_pool.shape == (10, 8, 12) and sorted(rows.block_table.reshape(-1).tolist()) == list(range(10))
    assert rows.node_count.tolist() == [5, 5]


def test_sets_are_more_than_the_l2():
    for size in (1000, 5_000_000, 10**9):
        assert sets_past_l2(size) >= 2 and sets_past_l2(size) * size > L2_BYTES


# ---- the peers ----


def test_the_peer_s_tree_and_walk_are_ours(rng):
    host = random_candidates(rng, 1, 5, 9)
    tree = build_tree_reference(*host, 20)
    grown = peers.grow_tree(host.log_probs[0].astype(float).tolist(), host.token_ids[0].tolist(), 7, 20)
    assert [node[0] for node in grown[1:]] == tree.token_ids[0, 1:].tolist()
    assert [node[1] for node in grown] == tree.parents[0].tolist()
    assert [node[2] for node in grown] == tree.depths[0].tolist()
    mask = peers.visibility(grown)
    for slot in range(21):
        line, above = {slot}, slot
        while above > 0:
            above = grown[above][1]
            line.add(above)
        assert set(np.flatnonzero(mask[slot])) == line


def test_the_round_s_peer_accepts_what_we_accept(rng):
    torch = torch_on_cpu()
    case = SMALL[3]
    work = case.prepare(tools_for(rng, torch))
    work.check()
    path = work.plan.step.path.accept_slots.copy_to_host()[0]
    call = work._peer_round()
    peer = call.__closure__[0].cell_contents
    before = work._pool.copy()
    call()
    assert peer.accepted == [slot for slot in path.tolist() if slot >= 0]
    moved = peer._pool.view(torch.module.int16).numpy().view(np.uint16)
    rows = before.reshape(case.layers, -1, case.width)
    for place, slot in enumerate(peer.accepted):
        np.testing.assert_array_equal(moved[:, 100 + place], rows[:, 100 + slot])


def test_three_operations_and_fused_attention_agree_with_the_reference(rng, few_sets):
    work = SMALL[2].prepare(tools_for(rng, torch_on_cpu()))
    gathered = work._gathered[0]
    for out in (gathered.three_operations(), gathered.fused()):
        heads = out.float().numpy().reshape(1, 3, 2, 8)[work._request][:, work._heads]
        assert work._error(heads) < 0.02


# ---- the timer ----


class FakeGPU:
    """A GPU that works in order, a microsecond's clock of its own, behind a host whose launches take longer."""

    def __init__(self) -> None:
        self.now, self.log, self.overtakes = 0.0, [], []

    def event(self):
        stamp = SimpleNamespace()
        stamp.record = lambda: setattr(stamp, "at", self.now)
        stamp.query = lambda: bool(self.overtakes) and self.overtakes.pop()
        return stamp

    def event_elapsed_time(self, first, last):
        return (last.at - first.at) / 1e3

    def device_array(self, size, dtype):
        return SimpleNamespace(copy_to_device=lambda source, stream: self.work("copy", 100.0))

    def default_stream(self):
        return "the default stream"

    def synchronize(self):
        self.log.append("wait")

    def work(self, name, us):
        self.log.append(name)
        self.now += us


@pytest.fixture
def fake_gpu(monkeypatch):
    gpu = FakeGPU()
    monkeypatch.setattr("ddtree_numba.benchmark.timing.cuda", gpu)
    return gpu


def test_the_timer_gives_the_median_of_calls_in_turn(fake_gpu):
    timer = timing.Timer()
    slow_once = iter([5000.0])  # an outlier does not move a median

    def call(name, us):
        return lambda: fake_gpu.work(name, us + next(slow_once, 0.0) * (len(fake_gpu.log) > 200))

    fake_gpu.log.clear()
    assert timer.device([call("a", 10.0), call("b", 30.0)], before=lambda: fake_gpu.work("before", 7.0)) in (10, 20, 30)
    timed = [name for name in fake_gpu.log if name in "ab"]
    assert timed[:4] == ["a", "b", "a", "a"] and len(timed) >= 4 + 5
    assert timed[4:8] == ["a", "b", "a", "b"], "inputs are used in turn"
    behind = fake_gpu.log.index("copy")
    assert fake_gpu.log[behind:].count("before") == len(timed) - 4, "each timed call has its own, outside the time"


def test_calls_that_the_gpu_overtook_are_launched_again_behind_a_longer_queue(fake_gpu):
    timer = timing.Timer()
    fake_gpu.overtakes = [True, True]
    us = iter([8.0] * 3 + [900.0] * 120 + [9.0] * 1000)  # warm-up, launch and estimate; two batches overtaken; the rest
    fake_gpu.log.clear()
    assert timer.device([lambda: fake_gpu.work("call", next(us))]) == 9.0
    queues = [len(list(group)) for name, group in itertools.groupby(fake_gpu.log) if name == "copy"]
    assert queues[0] < queues[1] < queues[2] == queues[-1]


def test_the_timer_times_what_is_slow_once(fake_gpu):
    timer = timing.Timer()
    fake_gpu.log.clear()
    assert timer.device([lambda: fake_gpu.work("slow", 1e6)]) == 1e6
    assert fake_gpu.log.count("slow") == 3 and "copy" not in fake_gpu.log


def test_the_host_s_time_leaves_out_what_comes_before(fake_gpu, monkeypatch):
    clock = itertools.count(0.0, 1e-3)
    monkeypatch.setattr("ddtree_numba.benchmark.timing.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer, order = timing.Timer(), []
    got = timer.host(lambda: order.append("call"), before=lambda: order.append("before"))
    assert got == pytest.approx(1000.0) and order[:4] == ["before", "call", "before", "call"]
    assert timer.launch(lambda: None) == pytest.approx(1000.0 / 20)


# ---- the command ----


def ddtree(*arguments, **options):
    command = [sys.executable, "-m", "ddtree_numba.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_without_a_gpu_one_line_and_code_2(tmp_path):
    done = ddtree("bench", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    needs = "a GPU and numba-cuda (see `ddtree info`): simulated times mean nothing"
    assert done.stderr == f"ddtree: bench: got the simulator, needs {needs}\n"


def test_unknown_parts_are_named():
    done = ddtree("bench", "--only", "top_b64,nonsense")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("ddtree: --only: got 'nonsense', needs ids of top_b64, top_b1, tree_b1_n64")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(ON_GPU, reason="times are a stand-in's")
@pytest.mark.parametrize("failing", [False, True])
def test_the_command_writes_its_report(monkeypatch, capsys, tmp_path, failing):
    from ddtree_numba.benchmark import ceilings, command

    made = {"machine": "m", "versions": {}, "date": "2026-01-01", "rows": [], "ladder": [], "costs": {"a_us": 2.0}}
    made |= {"ceilings": RATES.as_json(), "skipped": {}, "failed": {"top_b1": "wrong"} if failing else {}}
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    monkeypatch.setattr(timing, "Timer", FakeTimer)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *arguments: RATES)
    chosen = []

    def fake_report(parts, tools, rates, progress):
        chosen.extend(parts)
        progress("costs")
        return made

    monkeypatch.setattr(report, "make_report", fake_report)
    file = tmp_path / "out.json"
    if failing:
        with pytest.raises(Exception) as stopped:  # typer's Exit is of Click's class or its own, by version
            bench(only="costs", json_file=str(file))
        assert stopped.value.exit_code == 1
    else:
        bench(only="costs", json_file="-")
    out, notes = capsys.readouterr()
    assert chosen == ["costs"] and "costs" in notes
    assert json.loads(file.read_text() if failing else out) == made
    assert ("FAILED: top_b1: wrong" in out) == failing and ("2.0" in (out if failing else notes))
