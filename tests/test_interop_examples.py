"""The examples that meet other people's code: transformers' own model, and traces of the published one."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.paper_oracle import pop_order

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
WHY_SCIPY = "needs SciPy: traces without candidates are rebuilt by a linear program"

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not here: an installed package")


def run(script, *args):
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)


def test_transformers_decodes_the_same_text():
    pytest.importorskip("torch", reason="needs PyTorch: pip install '.[torch]'")
    pytest.importorskip("transformers", reason="needs transformers")
    done = run("transformers_decode.py", "--prompt", "def quicksort(", "--max-new-tokens", 24, "--budget", 16)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("-- 24 tokens in") and last.endswith("identical to model.generate(do_sample=False)")
    assert int(last.split()[4]) < 15, "no draft was accepted"


def recorded_round(rng, log_probs, budget, with_candidates=False):
    """Return a round as the published code records it, from a builder that is not this package's."""
    depths, k = log_probs.shape
    token_ids = np.array([rng.permutation(1000)[:k] for _ in range(depths)])
    order = [path for path, _ in pop_order(log_probs, budget)]
    slots = {path: slot for slot, path in enumerate([(), *order])}
    accepted = [0]
    for path in order:
        if path[:-1] == (() if len(accepted) == 1 else order[accepted[-1] - 1]) and rng.random() < 0.8:
            accepted.append(slots[path])
    tree = {
        "node_token_ids": [int(token_ids[len(path) - 1][path[-1]]) for path in order],
        "node_depths": [len(path) for path in order],
        "parents": [-1, *(slots[path[:-1]] for path in order)],
    }
    if with_candidates:
        tree |= {"log_probs": log_probs.tolist(), "token_ids": token_ids.tolist()}
    return {"accepted_indices": accepted, "tree": tree}


def candidates(rng, kind, depths, k):
    if kind == "ties":
        values = rng.integers(0, 5, (depths, k)) / 4
    elif kind == "any":
        values = 10.0 ** rng.uniform(-10, 2, (depths, k))
    else:
        values = rng.exponential(size=(depths, k))
    return -np.sort(values).astype(np.float32)


@pytest.fixture
def traces(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import official_traces

    return official_traces


@pytest.mark.parametrize("kind", ["ties", "any", "usual"])
@pytest.mark.parametrize("budget", [1, 7, 64, 256])
@pytest.mark.parametrize("with_candidates", [False, True])
def test_recorded_trees_are_rebuilt(rng, traces, kind, budget, with_candidates):
    if not with_candidates:
        pytest.importorskip("scipy", reason=WHY_SCIPY)
    recorded = recorded_round(rng, candidates(rng, kind, 15, min(budget, 40)), budget, with_candidates)
    (each,) = traces._rounds("", [recorded])
    traces.compare(each, kernels=False)


def test_the_kernels_rebuild_them_too(rng, traces):
    (each,) = traces._rounds("", [recorded_round(rng, candidates(rng, "usual", 4, 6), 9, with_candidates=True)])
    traces.compare(each, kernels=True)


SPOILED = {
    "depth": (lambda round_: round_["tree"]["node_depths"].__setitem__(3, 9), "slot 4: depth 9 must be"),
    "token": (lambda round_: round_["tree"]["node_token_ids"].__setitem__(-1, 5555), "token 5555 is child"),
    "parent": (lambda round_: round_["tree"]["parents"].__setitem__(2, 2), "node 2: parent 2"),
    "length": (lambda round_: round_["tree"]["parents"].pop(), "as many depths as tokens"),
    "path": (lambda round_: round_.update(accepted_indices=[0, 3]), "accepted_indices: recorded [0, 3], rebuilt"),
    "outside": (lambda round_: round_.update(accepted_indices=[0, 99]), "accepted_indices [0, 99]; needs"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_trace_is_reported(traces, name):
    pytest.importorskip("scipy", reason=WHY_SCIPY)
    rng = np.random.default_rng(4)
    spoil, message = SPOILED[name]
    recorded = recorded_round(rng, candidates(rng, "usual", 5, 6), 20)
    spoil(recorded)
    (each,) = traces._rounds("", [recorded])
    with pytest.raises(traces.Difference) as caught:
        traces.compare(each, kernels=False)
    assert message in str(caught.value)


def test_a_tree_that_is_not_best_first_is_reported(traces):
    """A breadth-first tree of three by three that leaves the better half of the third level out."""
    pytest.importorskip("scipy", reason=WHY_SCIPY)
    parents = [-1, 0, 0, 0, 1, 1, 2, 3]
    recorded = {
        "accepted_indices": [0],
        "tree": {"node_token_ids": [1, 2, 3, 4, 5, 4, 4], "node_depths": [1, 1, 1, 2, 2, 2, 2], "parents": parents},
    }
    (each,) = traces._rounds("", [recorded])
    traces.compare(each, kernels=False)  # scores fall that slowly: a tree it can be
    recorded["tree"]["parents"][5:] = [2, 1, 3]  # the second token below 2 before the first below 1 has come
    recorded["tree"]["node_token_ids"][3:] = [4, 4, 5, 4]
    (each,) = traces._rounds("", [recorded])
    traces.compare(each, kernels=False)
    recorded["tree"]["parents"] = [-1, 0, 0, 0, 3, 2, 1, 1]  # the worst of the first level has its child first
    recorded["tree"]["node_token_ids"] = [1, 2, 3, 4, 4, 4, 5]
    (each,) = traces._rounds("", [recorded])
    with pytest.raises(traces.Difference, match="no log-probabilities lead to these nodes"):
        traces.compare(each, kernels=False)


def test_the_command_reads_both_kinds_of_file(rng, tmp_path):
    pytest.importorskip("scipy", reason=WHY_SCIPY)
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install '.[torch]'")
    rounds = [recorded_round(rng, candidates(rng, "usual", 15, 16), 16) for _ in range(5)]
    (tmp_path / "good.json").write_text(json.dumps({"round_trees": rounds}))
    result = types.SimpleNamespace(output_ids=torch.zeros(1, 3), round_trees=rounds, stage_times={"draft": 0.1})
    plain = types.SimpleNamespace(output_ids=torch.zeros(1, 3), round_trees=None)
    run_data = {"responses": [{"baseline": plain, "ddtree_tb16": result}], "block_size": 16, "args": {"dataset": "x"}}
    torch.save(run_data, tmp_path / "good.pt")
    torch.save(result, tmp_path / "call.pt")
    done = run("official_traces.py", tmp_path / "good.json", tmp_path / "good.pt", tmp_path / "call.pt")
    assert (done.returncode, done.stdout) == (0, "15 rounds, 240 nodes: 0 differ\n"), done.stderr
    rounds[3]["tree"]["node_depths"][0] = 2
    (tmp_path / "bad.json").write_text(json.dumps(rounds))
    done = run("official_traces.py", tmp_path / "bad.json")
    assert done.returncode == 1 and "bad.json: round 3: slot 1: depth 2 must be" in done.stdout


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b'[{"tree": {}}]', b"[]", b'[{"accepted_indices": 3}]'])
def test_a_file_that_is_no_trace_is_one_line(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    done = run("official_traces.py", tmp_path / "x.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr.splitlines()[-1]
