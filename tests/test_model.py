"""The two models: checkpoints, forward passes against float64 ones and against transformers, the paged cache."""

from __future__ import annotations

import json
import pickle
import types
from functools import lru_cache
from pathlib import Path

import numba
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ddtree_numba.draft_tree import random_tree
from ddtree_numba.engine import packed_matrix
from ddtree_numba.engine.byte_tokenizer import BOS, TextStream, decode_text, encode_text
from ddtree_numba.engine.checkpoint import CheckpointError, read_drafter, read_target
from ddtree_numba.engine.kv_cache import PagedKVCache
from ddtree_numba.engine.latent_attention import LatentAttention
from ddtree_numba.engine.model_pair import DEFAULT_MODEL, ModelPair, load_model
from ddtree_numba.engine.packed_matrix import PackedMatrix, multiply_panels
from ddtree_numba.engine.row_math import normalise, rope_table, rotate, swiglu
from ddtree_numba.engine.stage_backend import chain_bits
from ddtree_numba.stages.tree_attention import tree_attention_reference
from tests import tiny_model

STORED = Path(__file__).parent / "data" / "transformers_logits.npz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny(folder) -> ModelPair:
    return load_model(folder)


@pytest.fixture(scope="module")
def shipped() -> ModelPair:
    return load_model()


def new_cache(pair: ModelPair, rows: int, rng: np.random.Generator | None = None) -> PagedKVCache:
    """A cache full of NaN, its pages handed out in random order: a row read before it is written shows."""
    cache = pair.target.new_cache(rows)
    cache.pool[:] = np.nan
    if rng is not None:
        rng.shuffle(cache._free)
    return cache


def run(pair: ModelPair, cache: PagedKVCache, tokens, positions=None, bits=None):
    """One pass of the target behind the cache's prefix."""
    tokens = np.array(tokens, np.int32)
    positions = cache.prefix + np.arange(len(tokens)) if positions is None else positions
    bits = chain_bits(len(tokens)) if bits is None else bits
    cache.reserve(cache.prefix + len(tokens))
    c = pair.target.config
    attention = LatentAttention(cache, bits, c.attention_scale, c.kv_lora_rank)
    return pair.target.forward(tokens, positions, cache, attention)


def run_in_pieces(pair: ModelPair, cache: PagedKVCache, tokens, sizes):
    """Passes over consecutive stretches of a text: logits [N, V], features [N, F]."""
    logits, features = [], []
    for size in sizes:
        got = run(pair, cache, tokens[:size])
        cache.advance(len(got.logits))
        tokens = tokens[size:]
        logits.append(got.logits)
        features.append(got.features)
    assert not len(tokens)
    return np.concatenate(logits), np.concatenate(features)


# ---- the target ----


@pytest.mark.parametrize("sizes", [(29,), (1,) * 29, (5, 17, 1, 6)])
def test_target_equals_the_plain_causal_pass(folder, tiny, rng, sizes):
    tokens = [BOS, *rng.integers(0, 258, 28).tolist()]
    weights = load_file(folder / "target" / "model.safetensors")
    expected, streams = tiny_model.target_oracle(tiny_model.TARGET, weights, tokens)
    logits, features = run_in_pieces(tiny, new_cache(tiny, 40, rng), tokens, sizes)
    assert logits.dtype == features.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=2e-5 * abs(expected).max())
    chosen = np.concatenate([streams[0], streams[2]], axis=1)  # target_layer_ids 0 and 2
    np.testing.assert_allclose(features, chosen, atol=2e-5 * abs(chosen).max())


def assert_node_equals_its_chain(pair: ModelPair, rng: np.random.Generator, count: int, prefix: int) -> None:
    """Every node of a random tree gets the logits and features, to the last bit, of its path decoded alone."""
    prompt = [BOS, *rng.integers(0, 256, prefix - 1).tolist()]
    cache = new_cache(pair, prefix + count, rng)
    run_in_pieces(pair, cache, prompt, (prefix,))
    tree = random_tree(rng, 1, count - 1, vocab=256, max_depth=9, node_counts=[count])
    got = run(pair, cache, tree.token_ids[0], prefix + tree.depths[0], tree.ancestor_bits)
    for slot in range(0, count, 1 + count // 12):
        path, node = [], slot
        while node >= 0:
            path.insert(0, int(tree.token_ids[0, node]))
            node = int(tree.parents[0, node])
        one_by_one = new_cache(pair, prefix + count)
        run_in_pieces(pair, one_by_one, prompt, (prefix,))
        logits, features = run_in_pieces(pair, one_by_one, path, (1,) * len(path))
        np.testing.assert_array_equal(got.logits[slot], logits[-1], err_msg=f"slot {slot} of {count}")
        np.testing.assert_array_equal(got.features[slot], features[-1], err_msg=f"slot {slot} of {count}")


@pytest.mark.parametrize("count", [2, 3, 7, 8, 17, 34])
def test_node_of_a_tree_equals_the_chain_of_its_ancestors(tiny, rng, count):
    assert_node_equals_its_chain(tiny, rng, count, 18)


@pytest.mark.parametrize("count, prefix", [(33, 40), (16, 301)])
def test_shipped_model_at_a_node_does_not_see_other_branches(shipped, rng, count, prefix):
    assert_node_equals_its_chain(shipped, rng, count, prefix)


def test_prompt_in_pieces_is_the_prompt(tiny, rng):
    tokens = [BOS, *rng.integers(0, 256, 40).tolist()]
    whole = run_in_pieces(tiny, new_cache(tiny, 64), tokens, (41,))
    pieces = run_in_pieces(tiny, new_cache(tiny, 64, rng), tokens, (1, 9, 16, 15))
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_pass_writes_its_own_rows_and_no_others(tiny, rng):
    cache = new_cache(tiny, 64, rng)
    run_in_pieces(tiny, cache, [BOS] * 13, (13,))
    before = cache.pool.copy()
    run(tiny, cache, [1, 2, 3, 4, 5])
    changed = ~np.isclose(before, cache.pool, equal_nan=True).all(axis=(0, 3))
    pages, offsets = np.nonzero(changed)
    got = sorted(zip(pages.tolist(), offsets.tolist(), strict=True))
    assert got == sorted((int(cache.block_table[0, row // 16]), row % 16) for row in range(13, 18))
    assert cache.prefix == 13


# ---- the drafter ----


@pytest.mark.parametrize("pieces", [(0,), (1,), (21,), (4, 1, 9)])
def test_drafter_equals_the_plain_block(folder, tiny, rng, pieces):
    weights = load_file(folder / "drafter" / "model.safetensors")
    features = rng.standard_normal((sum(pieces), 48)).astype(np.float32)
    context = tiny.drafter.new_context(40)
    context.keys[:], context.values[:] = np.nan, np.nan
    rest = features
    for count in pieces:
        tiny.drafter.append(context, rest[:count])
        rest = rest[count:]
    for root in (65, 256):  # a second block behind the same context sees nothing of the first
        expected = tiny_model.drafter_oracle(tiny_model.DRAFTER, weights, tiny.target.embedding, features, root)
        got = tiny.drafter.forward(context, root)
        assert got.shape == (5, 258) and got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=2e-5 * abs(expected).max())


# ---- the model of the package, against transformers ----


@pytest.mark.parametrize("name", ["short", "long"])
def test_target_equals_transformers(shipped, name):
    stored = np.load(STORED)
    tokens, expected = stored[f"{name}_ids"], stored[f"{name}_logits"].astype(np.float32)
    cache = shipped.target.new_cache(1024)
    sizes = [min(37, len(tokens) - first) for first in range(0, len(tokens), 37)]
    logits, features = run_in_pieces(shipped, cache, tokens, sizes)
    # Both are float32 and add in different orders: 1e-5 of the largest logit is a hundred units in its last place.
    np.testing.assert_allclose(logits, expected, atol=1e-5 * abs(expected).max())
    if name == "long":
        at = features.reshape(len(tokens), len(stored["feature_layers"]), -1)[stored["feature_positions"]]
        wanted = stored["features"].transpose(1, 0, 2)
        np.testing.assert_allclose(at, wanted, atol=1e-5 * abs(wanted).max())


def test_drafter_equals_pytorch(shipped):
    stored = np.load(STORED)
    tokens = stored["long_ids"]
    _, features = run_in_pieces(shipped, shipped.target.new_cache(1024), tokens, (len(tokens),))
    context = shipped.drafter.new_context(1024)
    for root, expected in zip(stored["roots"].tolist(), stored["drafter_logits"], strict=True):
        shipped.drafter.append(context, features[context.length : root])
        got = shipped.drafter.forward(context, int(tokens[root]))
        np.testing.assert_allclose(got, expected, atol=1e-5 * abs(expected).max())


def test_shipped_model_is_small_and_says_what_it_is(shipped):
    files = [path for path in DEFAULT_MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    assert (DEFAULT_MODEL / "README.md").is_file()
    assert shipped.context == 1024 and shipped.drafter.draft_length == 15


# ---- attention, cache, tokens ----


@pytest.mark.parametrize("prefix", [0, 1, 16, 77])
def test_latent_attention_equals_the_reference(rng, prefix):
    tree = random_tree(rng, 1, 39, node_counts=[40])
    cache = PagedKVCache(2, 12, 130)
    rng.shuffle(cache._free)
    cache.pool[:] = np.nan
    cache.reserve(prefix + 40)
    cache.advance(prefix)
    for layer in range(2):
        cache.layer(layer)[cache.pool_rows(0, prefix + 40)] = 3 * rng.standard_normal((prefix + 40, 12))
    queries = (3 * rng.standard_normal((40, 5, 12))).astype(np.float32)
    attention = LatentAttention(cache, tree.ancestor_bits, 0.4, 9)
    for layer in range(2):
        expected, _ = tree_attention_reference(
            queries[None],
            cache.pool[layer],
            cache.block_table,
            cache.prefix_lengths,
            tree.ancestor_bits,
            tree.node_count,
            0.4,
            latent_width=9,
        )
        np.testing.assert_allclose(attention(layer, queries), expected[0], atol=5e-5)


def test_latent_attention_of_scores_beyond_exp(rng):
    cache = PagedKVCache(1, 4, 40)
    cache.reserve(30)
    cache.advance(22)
    cache.layer(0)[:] = rng.standard_normal((48, 4))
    bits = chain_bits(8)
    queries = (500 * rng.standard_normal((8, 3, 4))).astype(np.float32)
    arrays = queries[None], cache.pool[0], cache.block_table, cache.prefix_lengths, bits, np.array([8], np.int32)
    expected, lse = tree_attention_reference(*arrays, 0.5, latent_width=3)
    assert abs(lse).max() > 200  # exp(89) is beyond float32
    got = LatentAttention(cache, bits, 0.5, 3)(0, queries)
    np.testing.assert_allclose(got, expected[0], atol=2e-3)


def test_cache_takes_pages_as_it_grows():
    cache = PagedKVCache(layers=2, width=3, max_rows=33, page_size=4)
    assert cache.pool.shape == (2, 9, 4, 3) and cache.capacity == 36 and cache.prefix == 0
    assert cache.block_table.tolist() == [[-1] * 9]
    cache._free = [8, 7, 3, 0, 5, 2, 6, 1, 4]
    cache.reserve(1)
    cache.reserve(4)
    assert cache.block_table[0].tolist() == [4] + [-1] * 8
    cache.reserve(5)
    cache.reserve(2)
    assert cache.block_table[0].tolist() == [4, 1] + [-1] * 7
    assert cache.pool_rows(2, 7).tolist() == [18, 19, 4, 5, 6]
    with pytest.raises(ValueError, match=r"rows: got 9, needs at most 8"):
        cache.pool_rows(0, 9)
    cache.reserve(36)
    assert sorted(cache.block_table[0].tolist()) == list(range(9))
    with pytest.raises(ValueError, match=r"rows: got 37, needs at most 36, the room of the KV cache"):
        cache.reserve(37)


def test_layer_is_a_view():
    cache = PagedKVCache(2, 3, 8, page_size=4)
    cache.layer(1)[5] = 7
    assert cache.pool[1, 1, 1].tolist() == [7, 7, 7] and cache.pool[0].sum() == 0


@pytest.fixture(params=["AVX-512", "fewer registers"])
def registers(request, monkeypatch):
    """The product in its two forms; the one that is not this CPU's is compiled for the test alone."""
    wide = request.param == "AVX-512"
    if wide != packed_matrix._WIDE:
        monkeypatch.setattr(packed_matrix, "_compiled", lambda: other_form(wide))


@lru_cache(maxsize=1)
def other_form(wide: bool):
    """A copy of the module's function whose tiles have the other form's sizes."""
    panels, rows, long = (2, 8, 8) if wide else (1, 4, 4)
    sizes = {"_PANELS": panels, "_ROWS": rows, "_PANELS_OF_ONE_ROW": long}
    names = {
        "_tile": (panels, rows),
        "_tile_and_a_row": (panels, rows + 1),
        "_half_tile": (panels, rows // 2),
        "_long_row": (long, 1),
        "_short_row": (panels, 1),
    }
    tiles = {name: packed_matrix._make_tile(*size) for name, size in names.items()}
    scope = vars(packed_matrix) | sizes | tiles
    return numba.njit(types.FunctionType(packed_matrix._multiply.__code__, scope))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 17, 33])
@pytest.mark.parametrize("outputs, inputs", [(1280, 256), (258, 256), (1, 1), (33, 7), (300, 701)])
def test_packed_product(rng, registers, outputs, inputs, rows):
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    matrix = PackedMatrix(weight)
    got, exact = matrix(x), x.astype(np.float64) @ weight.T
    assert got.shape == exact.shape and got.dtype == np.float32
    # A chain of `inputs` roundings, each of at most half a unit in the last place of the largest partial sum.
    bound = inputs * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weight).T)
    assert np.all(np.abs(got - exact) <= bound)
    for row in range(rows):
        np.testing.assert_array_equal(matrix(x[row : row + 1])[0], got[row], err_msg="depends on the rows beside it")


def test_packed_product_of_strided_rows(rng):
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 30), (11, 70)))
    matrix = PackedMatrix(weight)
    for view in (x[:, 5:35], x[::2, 40:], np.asfortranarray(x[:, :30]), x[::-1, 60::-2][:, :30]):
        np.testing.assert_array_equal(matrix(view), matrix(np.ascontiguousarray(view)))


@pytest.mark.parametrize("fault", [RuntimeError, EOFError, OSError, pickle.UnpicklingError, AttributeError])
def test_compiles_without_its_cache_when_that_cannot_be_used(monkeypatch, fault):
    real = packed_matrix.njit

    def broken(signature, cache=False):
        if cache:
            raise fault("no room, no rights, or a damaged file")
        return real(signature)

    monkeypatch.setattr(packed_matrix, "njit", broken)
    out = np.empty((1, 32), np.float32)
    packed_matrix._compiled.__wrapped__()(np.ones((2, 3, 16), np.float32), np.ones((1, 3), np.float32), out)
    assert out.tolist() == [[3.0] * 32]


def test_panels_may_be_strided(rng):
    values = rng.standard_normal((21, 64)).astype(np.float32)
    weights = rng.standard_normal((21, 5)).astype(np.float32)
    got = multiply_panels(values.reshape(21, 4, 16).swapaxes(0, 1), weights.T)
    np.testing.assert_array_equal(got, PackedMatrix(values.T)(weights.T))


def test_norm_rope_and_swiglu(rng):
    x = (4 * rng.standard_normal((6, 2, 30))).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normalise(x, 1e-6), expected, rtol=1e-5)
    gate, up = np.float32([[-200.0, -3.0, 0.0, 2.0, 300.0]]), np.float32([[1.0, 2.0, 3.0, 4.0, 5.0]])
    with np.errstate(over="ignore"):
        silu = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(swiglu(np.concatenate([gate / 2, up], axis=1)), silu * up, rtol=1e-5, atol=1e-6)
    turned = x[:, :, 4:10].copy()
    rotate(turned, rope_table(50, 6, 1e4)[7:13, None])
    for row in range(6):
        for head in range(2):
            wanted = tiny_model._turn_neighbours(x[row, head, 4:10].astype(np.float64), 7 + row, 1e4)
            np.testing.assert_allclose(turned[row, head], wanted, atol=1e-5)


def test_bytes_and_text():
    assert encode_text(b"\xff\x00a") == [BOS, 255, 0, 97] and encode_text("€")[1:] == [0xE2, 0x82, 0xAC]
    assert decode_text([0xE2, 0x82, 0x41, 0xFF, 256, 257, 0xC3, 0xA9]) == "\ufffdA\ufffdé"
    text = "aß€😀\x00"
    for seed in range(20):  # pieces of any size give the text
        cuts = np.random.default_rng(seed).integers(1, 4, 40)
        stream, rest, out = TextStream(), list(text.encode()), ""
        for cut in cuts:
            out += stream.feed(rest[:cut])
            rest = rest[cut:]
        assert out + stream.feed([], final=True) == text


# ---- checkpoints that can't be used ----


def rewrite(folder: Path, tmp_path: Path, part: str, **changes) -> Path:
    """Copy the model with some keys of a config.json changed; None removes a key."""
    config = json.loads((folder / part / "config.json").read_text()) | changes
    return replace_file(
        folder, tmp_path, f"{part}/config.json", json.dumps({k: v for k, v in config.items() if v != ""})
    )


def replace_file(folder: Path, tmp_path: Path, name: str, content: str | bytes | None) -> Path:
    copy = tmp_path / "copy"
    for path in folder.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return copy


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_model(folder)
    message = str(refused.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "part, changes, words",
    [
        ("target", {"hidden_size": ""}, ("target/config.json", "hidden_size is missing")),
        ("target", {"hidden_size": "24"}, ("hidden_size is '24'", "a whole number from 1 to 1048576")),
        ("target", {"kv_lora_rank": 0}, ("kv_lora_rank is 0", "a whole number from 1")),
        ("target", {"rope_theta": -1.0}, ("rope_theta is -1.0", "a number from 1 to 1e+09")),
        ("target", {"num_hidden_layers": True}, ("num_hidden_layers is True",)),
        ("target", {"model_type": "llama"}, ("model_type is 'llama'", "needs 'deepseek_v3'")),
        ("target", {"rope_scaling": {"type": "yarn"}}, ("rope_scaling is", "needs None")),
        ("target", {"rope_interleave": False}, ("rope_interleave is False", "needs True")),
        ("target", {"tie_word_embeddings": False}, ("tie_word_embeddings is False",)),
        ("target", {"first_k_dense_replace": 1}, ("first_k_dense_replace is 1", "no experts")),
        ("target", {"first_k_dense_replace": "x"}, ("first_k_dense_replace is 'x', needs 3", "no experts")),
        ("target", {"first_k_dense_replace": None}, ("first_k_dense_replace is None, needs 3",)),
        ("target", {"architectures": ["LlamaForCausalLM"]}, ("architectures is ['LlamaForCausalLM']", "needs ['Deep")),
        ("target", {"rope_theta": 10**400}, ("rope_theta is 1000", "a number from 1 to 1e+09")),
        ("target", {"rope_theta": float("inf")}, ("rope_theta is inf",)),
        ("target", {"rope_theta": float("nan")}, ("rope_theta is nan",)),
        ("target", {"rms_norm_eps": float("inf")}, ("rms_norm_eps is inf", "a number from 1e-12 to 0.1")),
        ("target", {"rms_norm_eps": 1e-300}, ("rms_norm_eps is 1e-300",)),
        ("target", {"max_position_embeddings": 10**15}, ("max_position_embeddings is 1000", "from 3 to 262144")),
        ("target", {"num_hidden_layers": 10**9, "first_k_dense_replace": 10**9}, ("num_hidden_layers is 1000000000",)),
        ("target", {"qk_rope_head_dim": 3}, ("qk_rope_head_dim is 3", "an even number from 1")),
        (
            "target",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            ("rope_parameters is {", "'default'"),
        ),
        (
            "target",
            {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}},
            ("rope_parameters is {", "'default' alone"),
        ),
        ("target", {"rope_parameters": [1]}, ("rope_parameters is [1]",)),
        ("drafter", {"block_size": 10**12}, ("block_size is 1000000000000", "a whole number from 2 to 65")),
        ("drafter", {"block_size": 66}, ("block_size is 66", "a whole number from 2 to 65")),
        ("drafter", {"block_size": 1}, ("block_size is 1", "from 2 to 65")),
        ("drafter", {"max_position_embeddings": 10**15}, ("max_position_embeddings is 1000",)),
        ("drafter", {"max_position_embeddings": 2}, ("max_position_embeddings is 2", "from 3 to 262144")),
        ("drafter", {"rope_theta": 10**400}, ("rope_theta is 1000",)),
        ("drafter", {"rope_scaling": {"type": "yarn"}}, ("rope_scaling is {'type': 'yarn'}, needs None",)),
        ("drafter", {"rope_parameters": {"rope_type": "linear", "factor": 2}}, ("rope_parameters is {",)),
        ("drafter", {"attention_bias": True}, ("attention_bias is True, needs False",)),
        ("drafter", {"architectures": ["Eagle"]}, ("architectures is ['Eagle']", "needs ['DFlashDrafter']")),
        ("drafter", {"target_layer_ids": [9] * 5000}, ("target_layer_ids is [9, 9,", "...]")),
        ("target", {"vocab_size": 100}, ("model.embed_tokens.weight has shape (258, 24)", "needs (100, 24)")),
        ("target", {"kv_lora_rank": 8}, ("kv_a_", "has shape", "needs")),
        ("target", {"num_hidden_layers": 4, "first_k_dense_replace": 4}, ("tensor model.layers.3.", "12 in all")),
        ("drafter", {"vocab_size": 300}, ("drafter/config.json", "vocab_size is 300", "needs 258")),
        ("drafter", {"hidden_size": 16}, ("hidden_size is 16", "needs 24")),
        ("drafter", {"target_layer_ids": [0, 3]}, ("target_layer_ids is [0, 3]", "from 0 to 2")),
        ("drafter", {"target_layer_ids": []}, ("target_layer_ids is []",)),
        ("drafter", {"mask_token_id": 258}, ("mask_token_id is 258",)),
        ("drafter", {"head_dim": 4}, ("has shape", "needs")),
    ],
)
def test_config_that_does_not_fit(folder, tmp_path, part, changes, words):
    assert_refused(rewrite(folder, tmp_path, part, **changes), *words)


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_newer_config_with_rope_parameters(folder, tmp_path, tiny, part):
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    loaded = load_model(rewrite(folder, tmp_path, part, rope_theta="", rope_parameters=parameters))
    assert getattr(loaded, part).config == getattr(tiny, part).config


def test_longest_block_that_the_stages_take(folder, tmp_path):
    assert load_model(rewrite(folder, tmp_path, "drafter", block_size=65)).drafter.draft_length == 64


def test_files_that_are_missing_or_damaged(folder, tmp_path):
    weights = (folder / "target" / "model.safetensors").read_bytes()
    cases = {
        ("target/config.json", None): ("target/config.json", "No such file"),
        ("target/config.json", "{"): ("target/config.json", "not JSON"),
        ("target/config.json", "[1]"): ("holds a list", "needs a JSON object"),
        ("target/config.json", "[" * 200_000): ("not JSON",),
        ("drafter/config.json", '{"a":' * 200_000): ("not JSON",),
        ("target/config.json", b"\xff\xfe"): ("not JSON",),
        ("drafter/model.safetensors", None): ("drafter/model.safetensors", "no such file"),
        ("target/model.safetensors", weights[:-5]): ("target/model.safetensors", "damaged"),
        ("target/model.safetensors", weights[:50]): ("damaged",),
        ("target/model.safetensors", b""): ("damaged",),
    }
    for index, ((name, content), words) in enumerate(cases.items()):
        place = tmp_path / str(index)
        assert_refused(replace_file(folder, place, name, content), *words)
    assert_refused(tmp_path / "nowhere", "nowhere", "no such folder")
    assert_refused(tmp_path / ("x" * 300), "no such folder")


def test_tensors_of_the_wrong_kind(folder, tmp_path):
    tensors = load_file(folder / "target" / "model.safetensors")
    name = "model.norm.weight"
    wrong = {
        "holds NaN or infinity": np.full(24, np.nan, np.float16),
        "is int32, needs float16 or float32": np.ones(24, np.int32),
        "has shape (24, 1), needs (24,)": np.ones((24, 1), np.float16),
    }
    for index, (words, tensor) in enumerate(wrong.items()):
        copy = replace_file(folder, tmp_path / str(index), "target/model.safetensors", b"")
        save_file(tensors | {name: tensor}, copy / "target" / "model.safetensors")
        assert_refused(copy, f"tensor {name} {words}")


@pytest.mark.parametrize("dtype, size", [("BF16", 2), ("F8_E4M3", 1)])
def test_weights_of_types_that_numpy_lacks(folder, tmp_path, dtype, size):
    header, end = {}, 0
    for name, tensor in load_file(folder / "target" / "model.safetensors").items():
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.size * size]}
        end += tensor.size * size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    assert_refused(
        replace_file(folder, tmp_path, "target/model.safetensors", content), "bfloat16", "needs float16 or float32"
    )


def test_float32_checkpoint_is_read_as_it_is(folder, tmp_path):
    tensors = {k: v.astype(np.float32) for k, v in load_file(folder / "target" / "model.safetensors").items()}
    copy = replace_file(folder, tmp_path, "target/model.safetensors", b"")
    save_file(tensors, copy / "target" / "model.safetensors")
    config, read = read_target(copy / "target")
    _, expected = read_target(folder / "target")
    assert all(np.array_equal(read[name], expected[name]) for name in expected)
    assert read_drafter(copy / "drafter", config)[0].block_size == 6
