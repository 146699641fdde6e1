"""The golden vectors: right, complete, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba import vectors
from ddtree_numba.bfloat16 import from_bfloat16
from ddtree_numba.kdtr import KdtrError, write_kdtr
from ddtree_numba.portable_math import portable_exp, portable_log
from ddtree_numba.stages.top_candidates import top_candidates_reference
from ddtree_numba.stages.tree_attention import tree_attention_reference
from ddtree_numba.vectors import RULES, STAGES, all_cases, read_case, read_vectors, write_vectors
from ddtree_numba.vectors import attention as attention_vectors
from ddtree_numba.vectors import trees as tree_vectors
from tests import golden
from tests.paper_oracle import pop_order, tree_arrays

MANIFEST_DIGEST = (Path(__file__).parent / "data" / "vectors.sha256").read_text().strip()


def of_stage(stage: str) -> list:
    return [case for case in golden.cases().values() if case.stage == stage]


def test_the_bytes_are_those_of_every_other_machine():
    """The manifest has every file's SHA-256. A change of the vectors on purpose changes this number, and says so."""
    manifest = (golden.folder() / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == MANIFEST_DIGEST


def test_the_manifest_tells_every_case():
    manifest = json.loads((golden.folder() / "manifest.json").read_text())
    assert len(manifest["cases"]) == len(golden.cases()) > 140
    assert sum(entry["bytes"] for entry in manifest["cases"]) < 100e6
    files = {str(path.relative_to(golden.folder())) for path in golden.folder().rglob("*.kdtr")}
    assert files == {entry["file"] for entry in manifest["cases"]}
    for entry in manifest["cases"]:
        assert entry["rule"] in RULES and entry["stage"] in STAGES and entry["guards"] and entry["source"]
        content = (golden.folder() / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"] and len(content) == entry["bytes"]


def test_every_known_answer_is_there():
    told = " ".join([*golden.cases(), *vectors.LEFT_OUT])
    for number in range(1, 36):
        assert f"known_{number:02}" in told, f"known answer {number} has no case"
    assert list(vectors.LEFT_OUT) == ["known_27"]


def test_every_stage_and_every_documented_size_is_there():
    assert {case.stage for case in golden.cases().values()} == set(STAGES)
    assert len(tree_vectors.CONFIGURATIONS) == 11 and (64, 15, 64, 64) in tree_vectors.CONFIGURATIONS
    assert {budget for *_, budget in tree_vectors.LARGE_BUDGETS} == {256, 1024}
    sizes = {
        (*case.inputs["log_probs"].shape, case.parameters["budget"])
        for case in of_stage("build_tree")
        if "_l" in case.name
    }
    assert sizes >= {*tree_vectors.CONFIGURATIONS, *tree_vectors.LARGE_BUDGETS}
    assert len(attention_vectors.CONFIGURATIONS) == 6
    assert all(f"tree_attention/{c.name}" in golden.cases() for c in attention_vectors.CONFIGURATIONS)
    every = golden.cases()["accept_walk/every_accept_length"]
    assert every.expected["accept_count"].tolist() == list(range(1, 17))
    assert golden.cases()["decode_step/known_35_seven_rounds"].inputs["logits"].shape[0] == 7


# --- right, by other means than they were made ------------------------------------------------------------------------


def test_trees_are_the_papers():
    for case in of_stage("build_tree"):
        orders = [pop_order(rows, case.parameters["budget"]) for rows in case.inputs["log_probs"]]
        expected = tree_arrays(orders, case.inputs["token_ids"], case.inputs["root_tokens"], case.parameters["budget"])
        for name, array in case.expected.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=f"{case.name} {name}", strict=True)


def test_candidates_are_the_references():
    for case in of_stage("top_candidates"):
        log_probs, token_ids = top_candidates_reference(case.inputs["logits"], case.parameters["k"])
        np.testing.assert_array_equal(case.expected["token_ids"], token_ids, err_msg=case.name, strict=True)
        # Two float64 computations, each rounded to float32 once.
        np.testing.assert_allclose(case.expected["log_probs"], log_probs, rtol=2.0**-22, atol=1e-7, err_msg=case.name)


def test_attention_is_the_references():
    for case in of_stage("tree_attention"):
        out, lse = tree_attention_reference(**case.arguments())
        np.testing.assert_allclose(case.expected["out"], out, rtol=2.0**-23, atol=1e-12, err_msg=case.name)
        np.testing.assert_allclose(case.expected["lse"], lse, rtol=2.0**-23, atol=1e-12, err_msg=case.name)


def test_attention_would_show_a_missing_row():
    """One key fewer must not fit into the tolerance of any configuration."""
    for c in attention_vectors.CONFIGURATIONS:
        case = golden.cases()[f"tree_attention/{c.name}"]
        arguments = case.arguments()
        arguments["ancestor_bits"][:, :, 0] &= ~np.uint32(1)  # nobody sees the root
        out, _ = tree_attention_reference(**arguments)
        beyond = np.abs(out - case.expected["out"]) > case.tolerance["out"]
        assert beyond.any(axis=(1, 2, 3)).any(), c.name


def test_dot_products_of_attention_are_exact():
    """63 / 16 steps of 2**-8 on both sides, 576 of them: their sums fit into 53 bits."""
    assert 2 * math.log2(63 * 16) + math.log2(576) < 53
    for case in of_stage("tree_attention"):
        q = case.inputs["q"]
        wide = (from_bfloat16(q) if q.dtype == np.uint16 else q).astype(np.float64)
        assert np.array_equal(wide[np.isfinite(wide)] * 256, np.rint(wide[np.isfinite(wide)] * 256)), case.name


def test_the_step_leaves_exactly_the_emitted_text_in_the_cache():
    """A toy's KV row is (token, position): the cache behind the first prefix is what was emitted, in order."""
    for case in of_stage("decode_step"):
        pool, table = case.expected["kv_pool"], case.inputs["block_table"]
        size, emitted = pool.shape[2], 0
        for b in range(len(table)):
            tokens = [int(case.inputs["root_tokens"][b])]
            for count, row in zip(
                case.expected["accept_count"][:, b], case.expected["accept_tokens"][:, b], strict=True
            ):
                tokens += row[:count].tolist()
            first, end = int(case.inputs["prefix_lengths"][b]), int(case.expected["prefix_lengths"][b])
            rows = [pool[:, table[b, r // size], r % size].tolist() for r in range(first, end)]
            assert rows == [[[t, first + i]] * 2 for i, t in enumerate(tokens[:-1])], case.name
            emitted += end - first
        assert emitted > 2 * case.expected["accept_count"].size or len(case.inputs["logits"]) == 1, (
            "hardly anything accepted"
        )


def test_commits_move_something():
    for case in of_stage("commit_kv"):
        before, after = case.inputs["kv_pool"], case.expected["kv_pool"]
        still = (case.inputs["accept_slots"] <= np.arange(case.inputs["accept_slots"].shape[1])).all()
        assert (before.tobytes() == after.tobytes()) == (still or "in_place" in case.name), case.name


def test_portable_exp_and_log(rng):
    x = np.concatenate([-rng.exponential(30, 5000), rng.normal(size=5000), [0.0, -745.0, 700.0]])
    np.testing.assert_allclose(portable_exp(x), np.exp(x), rtol=4 * 2.0**-52, atol=1e-323)
    y = np.concatenate([rng.exponential(5, 5000) + 1e-300, 10.0 ** rng.uniform(-300, 300, 5000), [1.0, 0.5, 2.0]])
    np.testing.assert_allclose(portable_log(y), np.log(y), rtol=4 * 2.0**-52, atol=2.0**-53)


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_read():
    for made in all_cases(only="accept_walk/*"):
        read = golden.cases()[made.name]
        assert made._replace(inputs={}, expected={}, tolerance={}) == read._replace(
            inputs={}, expected={}, tolerance={}
        )
        for group in ("inputs", "expected", "tolerance"):
            a, b = getattr(made, group), getattr(read, group)
            assert list(a) == list(b)
            for name in a:
                np.testing.assert_array_equal(a[name], b[name], strict=True)


def test_another_seed_is_another_draw():
    def digest(seed: int) -> dict[str, bytes]:
        return {c.name: b"".join(a.tobytes() for a in c.inputs.values()) for c in all_cases(seed, "ancestor_bitmask/*")}

    first, second = digest(0), digest(1)
    assert first == digest(0) and list(first) == list(second)
    assert first["ancestor_bitmask/random_budget_64"] != second["ancestor_bitmask/random_budget_64"]
    assert first["ancestor_bitmask/known_19_chain_of_34"] == second["ancestor_bitmask/known_19_chain_of_34"]


def test_an_argument_can_be_changed_without_harm():
    case = golden.cases()["positions/random"]
    case.arguments()["depths"][:] = -1
    assert case.inputs["depths"].max() > 0


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        write_vectors(tmp_path)
    with pytest.raises(ValueError, match="which is no folder, needs"):
        write_vectors(tmp_path / "mine")
    assert os.listdir(tmp_path) == ["mine"]


def test_what_is_broken_off_leaves_nothing(tmp_path):
    def stop(name: str) -> None:
        raise KeyboardInterrupt

    (tmp_path / "empty").mkdir()
    for target in ("new", "empty"):
        with pytest.raises(KeyboardInterrupt):
            write_vectors(tmp_path / target, progress=stop)
    assert os.listdir(tmp_path) == ["empty"] and not os.listdir(tmp_path / "empty")


@pytest.fixture
def two_cases(monkeypatch):
    monkeypatch.setattr(vectors, "all_cases", lambda seed: all_cases(seed, "positions/*"))
    return {"positions/known_21_siblings", "positions/random"}


def test_an_empty_folder_stays_the_folder_that_it_was(monkeypatch, tmp_path, two_cases):
    """A shell that stands in it sees the files."""
    monkeypatch.chdir(tmp_path)
    write_vectors(".")
    assert sorted(os.listdir(".")) == ["manifest.json", "positions"]
    assert {case.name for case in read_vectors(".")} == two_cases


def test_the_manifest_comes_last_and_what_fails_is_taken_back(monkeypatch, tmp_path, two_cases):
    moves, move = [], os.replace

    def replace(source, target) -> None:
        if Path(target).parent == tmp_path:
            moves.append(Path(target).name)
            if moves[-1] == "manifest.json":
                raise OSError(28, "No space left on device")
        move(source, target)

    monkeypatch.setattr(vectors.os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        write_vectors(tmp_path)
    assert moves == ["positions", "manifest.json"] and os.listdir(tmp_path) == []


@pytest.mark.parametrize("made_as", ["ddtree-vectors 2", None, "x" * 1000])
def test_another_format_is_refused(tmp_path, made_as):
    content = json.loads((golden.folder() / "manifest.json").read_text()) | {"format": made_as}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest.json: has the format .*, this reader knows 'ddtree-vectors 1'$"):
        read_vectors(tmp_path)


def test_a_damaged_folder_is_refused(tmp_path):
    copy = tmp_path / "copy"
    (copy / "positions").mkdir(parents=True)
    shutil.copy(golden.folder() / "manifest.json", copy)
    shutil.copy(golden.folder() / "positions" / "random.kdtr", copy / "positions")
    assert [case.name for case in read_vectors(copy, "positions/random")] == ["positions/random"]
    file = copy / "positions" / "random.kdtr"
    content = bytearray(file.read_bytes())
    content[70] ^= 1
    file.write_bytes(content)
    with pytest.raises(KdtrError, match="differs from its manifest"):
        list(read_vectors(copy, "positions/random"))
    with pytest.raises(FileNotFoundError):
        list(read_vectors(copy, "positions/known*"))
    for text in ("", "[]", '{"cases": 3}', '{"cases": [{"file": "a"}]}', "[" * 100_000):
        (copy / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"folder: got .*, needs one with a manifest"):
            read_vectors(copy)
    (copy / "manifest.json").write_text(
        '{"format": "ddtree-vectors 1", "cases": [{"case": "x", "file": "../../etc/x.kdtr", "sha256": ""}]}'
    )
    with pytest.raises(ValueError, match="needs one of the folder's own"):
        list(read_vectors(copy))


@pytest.mark.parametrize(
    ("arrays", "metadata"),
    [
        ({}, {}),
        ({"x": np.zeros(2)}, {"stage": "positions"}),
        ({"in/depths": np.zeros((1, 2), np.int32)}, {"stage": "positions", "case": "positions/x"}),
        ({}, {"stage": ["positions"]}),
        ({}, {"stage": "nothing"}),
    ],
)
def test_a_file_that_is_no_vector_is_refused(tmp_path, arrays, metadata):
    write_kdtr(tmp_path / "x.kdtr", arrays, metadata)
    with pytest.raises(KdtrError, match="is no golden vector"):
        read_case(tmp_path / "x.kdtr")


def test_cases_kept_in_a_list_are_what_they_were():
    """Whoever keeps a case while the next ones are made still has its arrays."""
    for case, kept in zip(all_cases(), list(all_cases()), strict=True):
        for name, array in {**case.inputs, **case.expected}.items():
            assert array.tobytes() == {**kept.inputs, **kept.expected}[name].tobytes(), (case.name, name)
