"""A model of random weights, small enough for the simulator, written as a checkpoint; and float64 forward passes of it.

The passes are written from the architecture (DeepSeek-V3's attention with keys and values per head, DFlash's block)
and share no code and no trick with the engine: nothing is merged, nothing absorbed, nothing cached.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 258,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "intermediate_size": 20,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 80,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "rms_norm_eps": 1e-3,  # unlike that of the norms inside attention, 1e-6
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 256,
}
DRAFTER = {
    "vocab_size": 258,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_dim": 8,
    "intermediate_size": 20,
    "block_size": 6,
    "target_layer_ids": [0, 2],
    "mask_token_id": 257,
    "max_position_embeddings": 80,
    "rope_theta": 10000.0,
    "rms_norm_eps": 3e-3,
}


def target_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    hidden, heads, inner = c["hidden_size"], c["num_attention_heads"], c["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
            f"{layer}.self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{layer}.self_attn.q_b_proj.weight": (
                heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]),
                c["q_lora_rank"],
            ),
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden),
            f"{layer}.self_attn.kv_a_layernorm.weight": (c["kv_lora_rank"],),
            f"{layer}.self_attn.kv_b_proj.weight": (
                heads * (c["qk_nope_head_dim"] + c["v_head_dim"]),
                c["kv_lora_rank"],
            ),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * c["v_head_dim"]),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def drafter_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    hidden, width, inner = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["intermediate_size"]
    shapes = {
        "fc.weight": (hidden, len(c["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"layers.{i}.self_attn.{kind}_proj.weight": (width, hidden) for kind in "qkv"}
        shapes |= {f"layers.{i}.self_attn.{kind}_norm.weight": (c["head_dim"],) for kind in "qk"}
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, width),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def random_tensors(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Norm weights around 1, matrices that keep the scale of what they multiply; float16 as in a real checkpoint."""
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = (1 + 0.3 * rng.standard_normal(shape)).astype(np.float16)
        else:
            tensors[name] = (1.5 * rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float16)
    return tensors


def write_model(folder: Path, seed: int = 1) -> Path:
    """Write the checkpoint of a random target and drafter into `folder`; return it."""
    rng = np.random.default_rng(seed)
    for name, config, shapes in (
        ("target", TARGET, target_shapes(TARGET)),
        ("drafter", DRAFTER, drafter_shapes(DRAFTER)),
    ):
        part = folder / name
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(config))
        save_file(random_tensors(rng, shapes), part / "model.safetensors")
    return folder


def target_oracle(c: dict, weights: dict[str, np.ndarray], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [N, V] of a plain causal pass, and the residual stream after every layer [layers, N, hidden]."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    heads, nope, rope, value = (
        c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    count, eps = len(tokens), c["rms_norm_eps"]
    hidden = np.tril(np.ones((count, count))) == 0
    x, streams = w["model.embed_tokens.weight"][tokens], []
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        h = _rms(x, w[f"{p}.input_layernorm.weight"], eps)
        q_latent = _rms(h @ w[f"{p}.self_attn.q_a_proj.weight"].T, w[f"{p}.self_attn.q_a_layernorm.weight"], 1e-6)
        q = (q_latent @ w[f"{p}.self_attn.q_b_proj.weight"].T).reshape(count, heads, nope + rope)
        compressed = h @ w[f"{p}.self_attn.kv_a_proj_with_mqa.weight"].T
        latent = _rms(compressed[:, :-rope], w[f"{p}.self_attn.kv_a_layernorm.weight"], 1e-6)
        kv = (latent @ w[f"{p}.self_attn.kv_b_proj.weight"].T).reshape(count, heads, nope + value)
        attended = np.zeros((count, heads, value))
        for head in range(heads):
            queries, keys = [], []
            for n in range(count):
                queries.append([*q[n, head, :nope], *_turn_neighbours(q[n, head, nope:], n, c["rope_theta"])])
                keys.append([*kv[n, head, :nope], *_turn_neighbours(compressed[n, -rope:], n, c["rope_theta"])])
            scores = np.array(queries) @ np.array(keys).T / np.sqrt(nope + rope)
            attended[:, head] = _softmax(np.where(hidden, -np.inf, scores)) @ kv[:, head, nope:]
        x = x + attended.reshape(count, -1) @ w[f"{p}.self_attn.o_proj.weight"].T
        x = x + _mlp(_rms(x, w[f"{p}.post_attention_layernorm.weight"], eps), w, f"{p}.mlp")
        streams.append(x)
    return _rms(x, w["model.norm.weight"], eps) @ w["model.embed_tokens.weight"].T, np.array(streams)


def drafter_oracle(
    c: dict, weights: dict[str, np.ndarray], embedding: np.ndarray, features: np.ndarray, root: int
) -> np.ndarray:
    """Return the logits [L, V] of the block behind `features` [n, F], the accepted tokens' residual streams."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    heads, dim, eps, block = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"], c["block_size"]
    known = len(features)
    context = _rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embedding.astype(np.float64)[[root] + [c["mask_token_id"]] * (block - 1)]
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}.self_attn"
        h = _rms(x, w[f"layers.{i}.input_layernorm.weight"], eps)
        seen = np.concatenate([context, h])
        q = (h @ w[f"{p}.q_proj.weight"].T).reshape(block, heads, dim)
        k, v = ((seen @ w[f"{p}.{kind}_proj.weight"].T).reshape(known + block, heads, dim) for kind in "kv")
        q, k = _rms(q, w[f"{p}.q_norm.weight"], eps), _rms(k, w[f"{p}.k_norm.weight"], eps)
        attended = np.zeros((block, heads, dim))
        for head in range(heads):
            queries = np.array([_turn_halves(q[n, head], known + n, c["rope_theta"]) for n in range(block)])
            keys = np.array([_turn_halves(k[n, head], n, c["rope_theta"]) for n in range(known + block)])
            attended[:, head] = _softmax(queries @ keys.T / np.sqrt(dim)) @ v[:, head]
        x = x + attended.reshape(block, -1) @ w[f"{p}.o_proj.weight"].T
        x = x + _mlp(_rms(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps), w, f"layers.{i}.mlp")
    return (_rms(x, w["norm.weight"], eps) @ embedding.astype(np.float64).T)[1:]


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _mlp(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    gate = x @ w[f"{name}.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[f"{name}.up_proj.weight"].T)) @ w[f"{name}.down_proj.weight"].T


def _turn_neighbours(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding of neighbouring pairs (0, 1), (2, 3), ..."""
    out = np.empty_like(x)
    for j in range(0, len(x), 2):
        angle = position * theta ** (-j / len(x))
        out[j] = x[j] * np.cos(angle) - x[j + 1] * np.sin(angle)
        out[j + 1] = x[j + 1] * np.cos(angle) + x[j] * np.sin(angle)
    return out


def _turn_halves(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotary embedding of pairs (0, d / 2), (1, d / 2 + 1), ..."""
    half = len(x) // 2
    out = np.empty_like(x)
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        out[j] = x[j] * np.cos(angle) - x[j + half] * np.sin(angle)
        out[j + half] = x[j + half] * np.cos(angle) + x[j] * np.sin(angle)
    return out
