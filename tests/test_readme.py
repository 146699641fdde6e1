"""The README's figures are the stored ones: whoever measures again and forgets it is told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "_data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the stored figures are not here: an installed package")


def row(words: str) -> str:
    """Return the line of the README's table that holds `words`."""
    [line] = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if words in line]
    return line


def stored(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_figures_of_the_cpu() -> None:
    command, prompts = stored(DATA / "cpu.json")["measured"].values()
    assert prompts["output_identical"] is True
    per_round = [prompts[f"{mode}_tokens_per_round"] for mode in ("chain", "tree")]
    assert "{:.2f} / {:.2f}, output identical".format(*per_round) in row("tokens per round, ")
    speeds = [prompts[f"{mode}_speed_over_autoregressive"] for mode in ("chain", "tree")]
    assert "{:.2f}× / {:.2f}×".format(*speeds) in row("wall-clock on ")
    assert f"{command['seconds']:.1f} s, {command['peak_megabytes']:.0f} MB" in row("`ddtree generate` of 200 tokens: ")


def test_figures_of_kdtr():
    """Writing beside a copy, both on the disk at the end; reading beside a plain read, both from the page cache."""
    measured = stored(DATA / "kdtr.json")["measured"]
    for words, ways in (
        ("written with checksums", ("write KDTR", "copy file")),
        ("read and checked", ("read KDTR", "plain read")),
    ):
        speeds = [measured[way]["GB_per_second"] for way in ways]
        assert "{:.2f} / {:.2f} GB/s".format(*speeds) in row(words)


def test_figure_of_the_model() -> None:
    metrics = stored(ROOT / "ddtree_numba" / "engine" / "models" / "tiny_stdlib" / "metrics.json")
    assert f"{metrics['target']['held_out_bits_per_byte']:.2f} bits per byte" in row("held-out modules")


def test_figure_of_attention_on_a_gpu() -> None:
    measured = stored(DATA / "h200_checks.json")["measured"]
    errors = [numbers["relative_frobenius"] for case, numbers in measured.items() if "-float32-" in case]
    power = math.floor(math.log10(max(errors)))
    assert f"at most {math.ceil(max(errors) / 10 ** (power - 1)) / 10}e{power}" in row("tree attention in float32")


def test_figures_of_the_bench() -> None:
    rows = {line["id"]: line for line in stored(DATA / "h200.json")["rows"]}
    for id_, peer, words in (
        ("attn_8x33x64x8192", "torch_three_op", "tree attention in bfloat16 on an H200"),
        ("top_b64", "torch_topk_logsumexp", "64 best of 163,840 logits"),
        ("round_b1", "torch_eager", "a round's draft and commit side"),
    ):
        ours, theirs = rows[id_]["ours_us"], rows[id_]["peers"][peer]
        assert f"| {ours:.0f} / {theirs:.0f} µs |" in row(words)
