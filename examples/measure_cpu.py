"""Measure decoding on this machine's CPU: tokens per round and wall-clock of the three modes over held-out prompts.

Run it from the repository root, on an otherwise idle machine, with the package installed::

    python examples/measure_cpu.py docs/_data/cpu.json

Each prompt is decoded in all three modes, one after the other, and the modes take turns at going first, so that a slow
moment of the machine meets them alike. The command's own start, memory and time are measured in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from rich.progress import track

from ddtree_numba.engine.byte_tokenizer import encode_text
from ddtree_numba.engine.decoding import MODES, Decoder
from ddtree_numba.engine.model_pair import load_model

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "held_out_prompts.json"


def decode(decoder: Decoder, prompt: list[int], new_tokens: int) -> tuple[list[int], int, float]:
    """Return the new tokens, the rounds and the seconds."""
    start, tokens, rounds = time.perf_counter(), [], 0
    for each in decoder.decode(prompt, new_tokens):
        tokens += each.tokens
        rounds += 1
    return tokens, rounds, time.perf_counter() - start


def over_prompts(budget: int, new_tokens: int) -> tuple[str, dict[str, object]]:
    """Return what was decoded, and the figures of each mode over all prompts together."""
    model = load_model()
    decoders = {mode: Decoder(model, mode, budget) for mode in MODES}
    prompts = [encode_text(entry["text"].encode()) for entry in json.loads(PROMPTS.read_text(encoding="utf-8"))]
    sums = {mode: {"tokens": 0, "rounds": 0, "seconds": 0.0} for mode in MODES}
    identical = True
    for mode in MODES:
        decode(decoders[mode], prompts[0], 20)  # compile, and touch all memory once
    for index, prompt in enumerate(track(prompts, description="decoding")):
        texts = {}
        for mode in MODES[index % 3 :] + MODES[: index % 3]:
            texts[mode], rounds, seconds = decode(decoders[mode], prompt, new_tokens)
            sums[mode]["tokens"] += len(texts[mode])
            sums[mode]["rounds"] += rounds
            sums[mode]["seconds"] += seconds
        identical &= all(text == texts["autoregressive"] for text in texts.values())
    rate = {mode: each["tokens"] / each["seconds"] for mode, each in sums.items()}
    length = {mode: each["tokens"] / each["rounds"] for mode, each in sums.items()}
    figures: dict[str, object] = {"output_identical": identical}
    for mode in MODES:
        figures[f"{mode}_tokens_per_round"] = length[mode]
        figures[f"{mode}_tokens_per_second"] = rate[mode]
        figures[f"{mode}_speed_over_autoregressive"] = rate[mode] / rate["autoregressive"]
    figures["tree_over_chain_tokens_per_round"] = length["tree"] / length["chain"]
    return f"{len(prompts)} held-out prompts, {new_tokens} new tokens each, budget {budget}", figures


def command() -> tuple[str, dict[str, object]]:
    """Return one command, its time and its peak memory, start and model load included."""
    start = time.perf_counter()
    words = [sys.executable, "-m", "ddtree_numba.cli", "generate", "def quicksort(", "--max-new-tokens", "200"]
    subprocess.run(words, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    kilobytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return "ddtree generate, 200 new tokens", {"seconds": seconds, "peak_megabytes": kilobytes / 1000}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=200)
    options = parser.parse_args()
    result = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "numpy": version("numpy"), "numba": version("numba")},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "measured": dict([command(), over_prompts(options.budget, options.new_tokens)]),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
