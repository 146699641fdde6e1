"""The decoding loop: three modes, any drafter, any backend, any page order, one text."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_numba.backend import BACKEND, ON_GPU
from ddtree_numba.draft_tree import check_tree
from ddtree_numba.engine import row_math
from ddtree_numba.engine.arithmetic import Arithmetic, LibraryMatrix, MissingCuPyError, arithmetic_of
from ddtree_numba.engine.byte_tokenizer import BOS, EOS, encode_text
from ddtree_numba.engine.decoding import MODES, Decoder, Round, _Sequence, greedy
from ddtree_numba.engine.model_pair import ModelPair, load_model, read_model
from ddtree_numba.engine.stage_backend import NumpyStages, chain_bits
from tests import guarded_arrays, tiny_model

PROMPTS = Path(__file__).parent / "data" / "held_out_prompts.json"
TINY_PROMPT = encode_text("def f(x):")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder) -> ModelPair:
    return load_model(folder)


@pytest.fixture
def on_kernels(folder) -> ModelPair:
    """The same model, its stages run by the kernels of this process: in the simulator, or on the GPU with CuPy."""
    if ON_GPU:
        pytest.importorskip("cupy", reason="the engine's arrays on a GPU are CuPy's")
    return load_model(folder, BACKEND)


def decode(pair: ModelPair, mode: str, prompt, count: int, budget: int = 12, **options) -> list[Round]:
    return list(Decoder(pair, mode, budget, **options).decode(prompt, count))


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for each in rounds for token in each.tokens]


class Knowing:
    """A drafter that knows the text: at each depth the right token is its choice of rank `ranks[depth]`.

    With all ranks 0 it is always right; a higher one makes the chain miss and the tree hit.
    """

    def __init__(self, pair: ModelPair, text: list[int], ranks: list[int]) -> None:
        self.draft_length, self.config = len(ranks), pair.drafter.config
        self._real, self._text, self._ranks = pair.drafter, text, ranks
        self.contexts = []

    def new_context(self, max_rows):
        self.contexts.append(self._real.new_context(max_rows))
        return self.contexts[-1]

    def append(self, context, features):
        assert features.shape == (len(features), 48) and np.isfinite(features).all()
        self._real.append(context, features)

    def forward(self, context, root_token):
        assert root_token == self._text[context.length], "the context is not the text before the root"
        logits = np.full((self.draft_length, 258), -20.0, np.float32)
        for depth, rank in enumerate(self._ranks):
            place = context.length + 1 + depth
            right = self._text[place] if place < len(self._text) else 0
            order = [token for token in range(100, 106) if token != right]
            order.insert(rank, right)
            logits[depth, order] = -np.arange(len(order), dtype=np.float32)
        return logits


def with_knowing(pair: ModelPair, ranks: list[int], count: int = 40) -> ModelPair:
    prompt = TINY_PROMPT
    text = prompt + tokens_of(decode(pair, "autoregressive", prompt, count))
    return pair._replace(drafter=Knowing(pair, text, ranks))


# ---- one text ----


def test_autoregressive_is_the_argmax_of_a_plain_pass(folder, tiny):
    weights = load_file(folder / "target" / "model.safetensors")
    text = list(TINY_PROMPT)
    for _ in range(12):
        logits, _ = tiny_model.target_oracle(tiny_model.TARGET, weights, text)
        best = np.sort(logits[-1])[-2:]
        assert best[1] - best[0] > 1e-3, "a near tie: choose another seed for the random model"
        text.append(int(logits[-1].argmax()))
    rounds = decode(tiny, "autoregressive", TINY_PROMPT, 12)
    assert tokens_of(rounds) == text[len(TINY_PROMPT) :]
    assert [len(each.tokens) for each in rounds] == [1] * 12 and not any(each.accepted for each in rounds)


def test_shipped_model_gives_one_text_on_held_out_prompts():
    pair, prompts = load_model(), json.loads(PROMPTS.read_text())
    lengths = []
    for text in (prompt["text"] for prompt in prompts):
        prompt_tokens = encode_text(text)
        runs = {mode: decode(pair, mode, prompt_tokens, 100, 32) for mode in MODES}
        expected = tokens_of(runs["autoregressive"])
        for name, rounds in runs.items():
            assert tokens_of(rounds) == expected, f"{name}: {text[-40:]!r}"
        lengths.append(min(len(rounds) for rounds in runs.values()))
    assert sum(length >= 5 for length in lengths) >= 20, f"rounds of the shortest run on each prompt: {lengths}"


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["random", "constant", "nothing finite", "NaN", "infinity", "overconfident"])
def test_no_drafter_can_change_the_text(tiny, rng, mode, kind):
    expected = tokens_of(decode(tiny, "autoregressive", TINY_PROMPT, 30))
    bad = {
        "random": lambda: rng.standard_normal((5, 258)),
        "constant": lambda: np.zeros((5, 258)),
        "nothing finite": lambda: np.full((5, 258), -np.inf),
        "NaN": lambda: np.where(rng.random((5, 258)) < 0.01, np.nan, 1.0),
        "infinity": lambda: np.where(rng.random((5, 258)) < 0.01, np.inf, 1.0),
        "overconfident": lambda: 1e4 * rng.standard_normal((5, 258)),
    }[kind]
    tiny.drafter.forward = lambda context, root: bad().astype(np.float32)
    rounds = decode(tiny, mode, TINY_PROMPT, 30)
    assert tokens_of(rounds) == expected
    assert all(1 <= len(each.tokens) <= each.path.accept_count[0] for each in rounds)


@pytest.mark.parametrize(
    "ranks, chain_accepts", [([0] * 5, 5), ([0, 0, 2, 0, 0], 2), ([1, 0, 0, 0, 0], 0), ([0, 1, 0, 1, 0], 1)]
)
def test_long_paths_of_every_shape(tiny, ranks, chain_accepts):
    pair = with_knowing(tiny, ranks)
    expected = tokens_of(decode(tiny, "autoregressive", TINY_PROMPT, 40))
    chain, tree = decode(pair, "chain", TINY_PROMPT, 40), decode(pair, "tree", TINY_PROMPT, 40, 60)
    assert tokens_of(chain) == tokens_of(tree) == expected
    assert [each.accepted for each in chain[:-1]] == [chain_accepts] * (len(chain) - 1)
    assert [each.accepted for each in tree[:-1]] == [5] * (len(tree) - 1), "the tree holds the right path"
    slots = [each.path.accept_slots[0, : each.path.accept_count[0]].tolist() for each in tree]
    assert ranks == [0] * 5 or any(path != list(range(len(path))) for path in slots), "rows had to move"


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_what_is_kept_of_accepted_tokens_is_what_the_text_alone_gives(tiny, mode):
    """The drafter's context and the KV rows, gathered round by round, to the last bit: a wrong row costs only speed."""
    pair = with_knowing(tiny, [0, 1, 0, 2, 0])
    decoder = Decoder(pair, mode, 40)
    states = [_Sequence(pair, decoder.budget, 1 if mode == "chain" else None, greedy)]
    text, root = TINY_PROMPT[:-1], TINY_PROMPT[-1]
    states[0].prefill(text)
    for _ in range(6):
        path = states[0].round(root).path
        emitted = path.accept_tokens[0, : path.accept_count[0]].tolist()
        text, root = [*text, root, *emitted[:-1]], emitted[-1]
    states.append(_Sequence(pair, 5, None, greedy))
    states[1].prefill(text)
    grown, plain = pair.drafter.contexts
    assert grown.length == plain.length == len(text) > len(TINY_PROMPT) + 5
    np.testing.assert_array_equal(grown.keys[:, :, : len(text)], plain.keys[:, :, : len(text)])
    np.testing.assert_array_equal(grown.values[:, :, : len(text)], plain.values[:, :, : len(text)])
    rows = [state._cache.pool.reshape(3, -1, 11)[:, state._cache.pool_rows(0, len(text))] for state in states]
    np.testing.assert_array_equal(*rows)


def test_rounds_say_what_happened(tiny):
    pair = with_knowing(tiny, [0, 1, 0, 0, 0])
    rounds = decode(pair, "tree", TINY_PROMPT, 40, 20)
    place = len(TINY_PROMPT) - 1
    for each in rounds:
        check_tree(each.tree)
        count = int(each.path.accept_count[0])
        assert each.seconds > 0
        assert each.positions[0].tolist() == (place + each.tree.depths[0]).tolist()
        slots = each.path.accept_slots[0, :count]
        assert each.path.accept_tokens[0, :count].tolist() == each.target_tokens[0, slots].tolist()
        if not each.finish:
            assert each.tokens == each.path.accept_tokens[0, :count].tolist() and each.accepted == count - 1
        place += len(each.tokens)
    assert [each.finish for each in rounds] == [""] * (len(rounds) - 1) + ["length"]


def test_any_choice_of_tokens_gives_one_text(tiny):
    """Sampling will choose otherwise than greedily; the loop must not care."""

    def second_best(logits):
        return np.argsort(-logits, axis=-1, kind="stable")[:, 1].astype(np.int32)

    runs = [tokens_of(decode(tiny, mode, TINY_PROMPT, 30, choose=second_best)) for mode in MODES]
    assert runs[0] == runs[1] == runs[2] != tokens_of(decode(tiny, "tree", TINY_PROMPT, 30))


def test_greedy_takes_the_lowest_of_equals():
    got = greedy(np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, 2.0]], np.float32))
    assert got.tolist() == [1, 0, 2] and got.dtype == np.int32


# ---- where a text ends ----


@pytest.mark.parametrize("mode", MODES)
def test_length_cuts_inside_an_accepted_path(tiny, mode):
    pair = with_knowing(tiny, [0] * 5)
    whole = tokens_of(decode(pair, mode, TINY_PROMPT, 25))
    for count in range(1, 14):
        rounds = decode(pair, mode, TINY_PROMPT, count)
        assert tokens_of(rounds) == whole[:count]
        assert rounds[-1].finish == "length" and len(rounds) == (count if mode == "autoregressive" else -(-count // 6))
        # The bonus is the last of six tokens: a shorter last round is all draft.
        assert rounds[-1].accepted == (0 if mode == "autoregressive" else (count - 1) % 6 + 1 - (count % 6 == 0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", range(12))
def test_stop_token_cuts_inside_an_accepted_path(tiny, mode, place):
    pair = with_knowing(tiny, [0] * 5)
    whole = tokens_of(decode(pair, "autoregressive", TINY_PROMPT, 25))
    stop = whole[place]
    config = dataclasses.replace(pair.target.config, eos_token_id=stop)
    pair.target.config = config
    rounds = decode(pair, mode, TINY_PROMPT, 25)
    first = whole.index(stop)
    assert tokens_of(rounds) == whole[:first] and rounds[-1].finish == "stop"
    assert all(not each.finish for each in rounds[:-1])


def test_stop_token_behind_the_length_limit_is_not_reached(tiny):
    pair = with_knowing(tiny, [0] * 5)
    whole = tokens_of(decode(pair, "tree", TINY_PROMPT, 25))
    place = next(i for i, token in enumerate(whole) if i > 1 and token not in whole[:i])
    pair.target.config = dataclasses.replace(pair.target.config, eos_token_id=whole[place])
    assert decode(pair, "tree", TINY_PROMPT, place)[-1].finish == "length"
    assert decode(pair, "tree", TINY_PROMPT, place + 1)[-1].finish == "stop"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 40, 74, 75, 78, 79])
def test_full_context_ends_the_text(tiny, rng, mode, length):
    prompt = [BOS, *rng.integers(0, 256, length - 1).tolist()]
    rounds = decode(tiny, mode, prompt, 1000)
    tokens = tokens_of(rounds)
    assert tokens == tokens_of(decode(tiny, "autoregressive", prompt, 1000))
    if rounds[-1].finish != "stop":
        assert rounds[-1].finish == "context" and length + len(tokens) == 80


def test_long_prompt_is_read_in_stretches(tiny, rng, monkeypatch):
    prompt = [BOS, *rng.integers(0, 256, 60).tolist()]
    expected = tokens_of(decode(tiny, "tree", prompt, 15))
    for rows in (1, 7, 60, 61):
        monkeypatch.setattr("ddtree_numba.engine.decoding._PREFILL_ROWS", rows)
        assert tokens_of(decode(tiny, "tree", prompt, 15)) == expected


def test_decodes_of_one_decoder_do_not_mix(tiny):
    decoder = Decoder(tiny, "tree", 9)
    prompts = TINY_PROMPT, encode_text("class")
    alone = [tokens_of(decoder.decode(prompt, 12)) for prompt in prompts]
    one, other = (decoder.decode(prompt, 12) for prompt in prompts)
    got = tokens_of([next(one)]), tokens_of([next(other)])
    assert [got[0] + tokens_of(list(one)), got[1] + tokens_of(list(other))] == alone


# ---- budgets and trees ----


@pytest.mark.parametrize("budget", [0, 1, 2, 31, 32, 63, 300, 1024])
def test_any_budget_gives_one_text(tiny, budget):
    count = 6 if budget > 100 else 20
    expected = tokens_of(decode(tiny, "autoregressive", TINY_PROMPT, count))
    for mode in MODES:
        rounds = decode(tiny, mode, TINY_PROMPT, count, budget)
        assert tokens_of(rounds) == expected
        most = {"autoregressive": 0, "chain": min(budget, 5), "tree": budget}[mode]
        assert {int(each.tree.node_count[0]) for each in rounds} == {most + 1}
        assert Decoder(tiny, mode, budget).budget == most


def test_chain_is_the_drafters_first_choices(tiny):
    pair = with_knowing(tiny, [0, 2, 1, 0, 0])
    for each in decode(pair, "chain", TINY_PROMPT, 10):
        assert each.tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4]
        assert each.tree.next_sibling[0].tolist() == [-1] * 6


def test_chain_bits():
    for count in (1, 31, 32, 33, 65):
        bits = chain_bits(count)
        assert bits.shape == (1, count, -(-count // 32)) and bits.dtype == np.uint32
        rows = [sum(int(word) << 32 * i for i, word in enumerate(row)) for row in bits[0]]
        assert rows == [(1 << i + 1) - 1 for i in range(count)]


# ---- backends ----


@pytest.mark.parametrize("mode, budget", [("autoregressive", 0), ("chain", 5), ("tree", 4)])
def test_kernels_give_what_numpy_gives(tiny, on_kernels, mode, budget):
    ranks = [0] * 5 if mode == "chain" else [1, 0, 0, 0, 0]  # in the tree rows have to move
    pair = with_knowing(tiny, ranks, 10)
    text = pair.drafter._text
    expected = decode(pair, mode, TINY_PROMPT, 7, budget)
    got = decode(on_kernels._replace(drafter=Knowing(on_kernels, text, ranks)), mode, TINY_PROMPT, 7, budget)
    assert tokens_of(got) == tokens_of(expected)
    assert mode != "tree" or any(each.path.accept_slots[0, 1] > 1 for each in expected[:-1])
    for a, b in zip(got, expected, strict=True):
        # A path's score is a sum of float32 log-probabilities, whose last bit a GPU may round otherwise.
        np.testing.assert_allclose(a.tree.log_probs, b.tree.log_probs, rtol=1e-6)
        for name, array in b.tree._replace(log_probs=a.tree.log_probs)._asdict().items():
            np.testing.assert_array_equal(getattr(a.tree, name), array, err_msg=name)
        for name, array in b.path._asdict().items():
            np.testing.assert_array_equal(getattr(a.path, name), array, err_msg=name)
        np.testing.assert_array_equal(a.positions, b.positions)


def test_kernels_decode_with_a_drafter_that_gives_nothing(tiny, on_kernels):
    on_kernels.drafter.forward = lambda context, root: np.full((5, 258), -np.inf, np.float32)
    expected = tokens_of(decode(tiny, "autoregressive", TINY_PROMPT, 3))
    rounds = decode(on_kernels, "tree", TINY_PROMPT, 3, 3)
    assert tokens_of(rounds) == expected
    assert all(each.tree.node_count[0] == 1 and not each.target_tokens[0, 1:].any() for each in rounds)


def test_kernels_with_the_model_s_own_drafter(tiny, on_kernels):
    expected = tokens_of(decode(tiny, "autoregressive", TINY_PROMPT, 6))
    assert tokens_of(decode(on_kernels, "tree", TINY_PROMPT, 6, 3)) == expected


@pytest.mark.skipif(ON_GPU, reason="NumPy's arrays stand in for the device's; a GPU has CuPy's")
@pytest.mark.parametrize("mode, budget", [("autoregressive", 0), ("chain", 5), ("tree", 4)])
def test_the_gpu_s_way_with_numpy_standing_in(folder, tiny, mode, budget):
    """All of `--backend gpu` but CuPy itself: library products, and no array of the model meets one of the host."""
    xp = guarded_arrays
    pair = read_model(folder, BACKEND, Arithmetic(xp, lambda weight: LibraryMatrix(xp, weight)))
    ranks = [0] * 5 if mode == "chain" else [1, 0, 0, 0, 0]
    text = with_knowing(tiny, ranks, 10).drafter._text
    expected = tokens_of(decode(tiny, "autoregressive", TINY_PROMPT, 7))
    knowing = pair._replace(drafter=Knowing(pair, text, ranks))
    assert tokens_of(decode(knowing, mode, TINY_PROMPT, 7, budget)) == expected
    assert tokens_of(decode(pair, mode, TINY_PROMPT, 3, budget)) == expected[:3], "with the model's own drafter"
    assert type(pair.target.embedding) is xp.DeviceArray


def test_the_guard_of_the_stand_in_works():
    xp = guarded_arrays
    there, here = xp.asarray(np.ones(3, np.float32)), np.ones(3, np.float32)
    for mixed in (lambda: there + here, lambda: np.add(there, here, out=here), lambda: there[np.array([0, 1])]):
        with pytest.raises(TypeError, match="a device array meets"):
            mixed()
    with pytest.raises(TypeError, match="a device array meets"):
        there[0:2] = here[0:2]
    assert (there * np.float32(2)).tolist() == [2, 2, 2] and type(xp.asnumpy(there)) is np.ndarray


@pytest.mark.gpu
def test_text_on_the_gpu_is_the_cpu_s(record_property):
    """Five held-out prompts, three modes, a hundred tokens. Two logits nearer than rounding could differ: none are."""
    pytest.importorskip("cupy", reason="the engine's arrays on a GPU are CuPy's")
    on_cpu, on_gpu = load_model(), load_model(backend="gpu")
    seconds, counts = dict.fromkeys(MODES, 0.0), dict.fromkeys(MODES, 0)
    off, closest = 0.0, np.inf
    for prompt in json.loads(PROMPTS.read_text())[:5]:
        tokens = encode_text(prompt["text"])
        expected, logits = decode_with_logits(on_cpu, "tree", tokens)
        best = np.sort(logits, axis=1)[:, -2:]
        closest = min(closest, float((best[:, 1] - best[:, 0]).min()))
        for mode in MODES:
            rounds = decode(on_gpu, mode, tokens, 100, 32)
            assert tokens_of(rounds) == tokens_of(expected), f"{mode}: {prompt['text'][-40:]!r}"
            for each in rounds[1:]:  # the first one reads the prompt
                seconds[mode] += each.seconds
                counts[mode] += len(each.tokens)
            got = decode_with_logits(on_gpu, mode, tokens)[1]
            rows = min(len(got), len(logits))  # the last round may go further than the text
            off = max(off, float(np.abs(got[:rows] - logits[:rows]).max()))
    record_property("largest_logit_difference", off)
    record_property("smallest_gap_of_the_two_best_logits", closest)
    for mode in MODES:
        record_property(f"{mode}_tokens_per_second", round(counts[mode] / seconds[mode]))
    assert off < closest / 2, "the two best logits of a token could change places"


def decode_with_logits(pair: ModelPair, mode: str, tokens: list[int]) -> tuple[list[Round], np.ndarray]:
    """Decode a hundred tokens; return the rounds, and the target's logits [tokens, V] before each emitted token."""
    seen: list[np.ndarray] = []

    def choose(logits):
        seen.append(pair.target.arithmetic.on_host(logits))
        return greedy(logits)

    rounds = decode(pair, mode, tokens, 100, 32, choose=choose)
    paths = [each.path.accept_slots[0, : each.path.accept_count[0]] for each in rounds]
    return rounds, np.concatenate([logits[path] for logits, path in zip(seen, paths, strict=True)])


def test_logits_along_the_path_are_one_row_a_token():
    pair, tokens = load_model(), encode_text("def main(")
    (one, alone), (tree, along) = (decode_with_logits(pair, mode, tokens) for mode in ("autoregressive", "tree"))
    assert len(alone) == 100 == len(tokens_of(one)) and len(along) >= 100 == len(tokens_of(tree))
    np.testing.assert_array_equal(along[:100], alone)


@pytest.mark.gpu
def test_rows_on_the_gpu_are_the_cpu_s(rng):
    cupy = pytest.importorskip("cupy", reason="the engine's arrays on a GPU are CuPy's")
    on_gpu = arithmetic_of("gpu")
    x = rng.standard_normal((7, 3, 26)).astype(np.float32)
    rotation = np.exp(1j * rng.standard_normal((7, 1, 4))).astype(np.complex64)
    there = cupy.asarray(x)
    for rows, theirs in ((x, there), (x[:, 1:, 3:20], there[:, 1:, 3:20])):  # slices too, as the models pass them
        got = cupy.asnumpy(on_gpu.normalise(theirs, 1e-3))
        np.testing.assert_allclose(got, row_math.normalise(rows, 1e-3), rtol=1e-6)
    got = cupy.asnumpy(on_gpu.swiglu(there[:, 0]))
    np.testing.assert_allclose(got, row_math.swiglu(x[:, 0]), rtol=1e-5, atol=1e-6)
    expected = x.copy()
    row_math.rotate(expected[:, :, 18:], rotation)
    on_gpu.rotate(there[:, :, 18:], cupy.asarray(rotation))
    np.testing.assert_allclose(cupy.asnumpy(there), expected, rtol=1e-5, atol=1e-6)
    weight = rng.standard_normal((5, 26))
    got = cupy.asnumpy(on_gpu.matrix(weight)(there[:, 0]))
    np.testing.assert_allclose(got, expected[:, 0] @ weight.T, rtol=1e-4, atol=1e-4)


def test_rows_of_other_arrays_turn_like_numpy_s(rng):
    x = rng.standard_normal((5, 2, 12)).astype(np.float32)
    rotation = np.exp(1j * rng.standard_normal((5, 1, 3))).astype(np.complex64)
    there = guarded_arrays.asarray(x.copy())
    row_math.rotate(x[:, :, 6:], rotation)
    row_math.rotate(there[:, :, 6:], guarded_arrays.asarray(rotation))
    np.testing.assert_allclose(guarded_arrays.asnumpy(there), x, rtol=1e-6, atol=1e-6)


def test_without_cupy_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingCuPyError, match=re.escape("CuPy is not installed; pip install 'ddtree-numba[gpu13]'")):
        arithmetic_of("gpu")


def test_a_status_of_the_engines_own_trees_is_a_fault(tiny):
    cache = tiny.target.new_cache(20)
    cache.reserve(10)
    stages = NumpyStages(cache, 2)
    stages.draft(np.zeros((2, 258), np.float32), 5)
    stages._step.tree.first_child[0, 0] = 99
    with pytest.raises(RuntimeError, match="a stage reports status"):
        stages.commit(np.zeros(3, np.int32))


# ---- arguments ----


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fast"}, "mode: got 'fast', needs autoregressive, chain, tree"),
        ({"budget": -1}, "budget: got -1, needs a whole number from 0 to 1024"),
        ({"budget": 1025}, "budget: got 1025, needs"),
    ],
)
def test_decoder_refuses(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        Decoder(tiny, **options)


def test_other_backends_are_refused(folder):
    other = "gpu" if BACKEND == "simulator" else "simulator"
    with pytest.raises(ValueError, match=f"backend: got '{other}', but kernels run on the {BACKEND} in this process"):
        load_model(folder, other)
    with pytest.raises(ValueError, match="backend: got 'tpu', needs numpy, simulator, gpu"):
        load_model(folder, "tpu")


@pytest.mark.parametrize(
    "prompt, count, message",
    [
        ([], 5, "prompt: got 0 tokens, needs 1 to 79 tokens"),
        ([1] * 80, 5, "prompt: got 80 tokens, needs 1 to 79 tokens"),
        ([1, 258], 5, "prompt[1]: got 258, needs a whole number from 0 to 257"),
        ([1, -1], 5, "prompt[1]: got -1, needs a whole number from 0 to 257"),
        ([1.5], 5, "prompt[0]: got 1.5, needs a whole number from 0 to 257"),
        ([2, True], 5, "prompt[1]: got True, needs a whole number from 0 to 257"),
        ([None], 5, "prompt[0]: got None, needs a whole number from 0 to 257"),
        ("abc", 5, "prompt: got str, needs a sequence of token ids (encode_text gives one)"),
        (None, 5, "prompt: got NoneType, needs a sequence of token ids"),
        (7, 5, "prompt: got int, needs a sequence of token ids"),
        (np.zeros((2, 3), np.int32), 5, "prompt: got ndarray, needs a sequence of token ids"),
        ([1], 0, "max_new_tokens: got 0, needs a whole number from 1"),
        ([1], 2**31, "max_new_tokens: got 2147483648, needs a whole number from 1 to 2147483647"),
    ],
)
def test_decode_refuses_before_it_starts(tiny, prompt, count, message):
    decoder = Decoder(tiny)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        decoder.decode(prompt, count)


def test_prompt_may_be_an_array(tiny):
    rounds = Decoder(tiny).decode(np.array(TINY_PROMPT, np.int64), 8)
    assert tokens_of(rounds) == tokens_of(decode(tiny, "tree", TINY_PROMPT, 8))


def test_stop_token_is_the_document_token():
    assert EOS == BOS == tiny_model.TARGET["eos_token_id"]
