"""Checkpoints on disk (config.json and model.safetensors) -> configurations and float32 arrays.

The target is a Hugging Face checkpoint of `DeepseekV3ForCausalLM`, the drafter a DFlash block-diffusion drafter in the
same two files. Whatever is missing, damaged or of another shape is one `CheckpointError` that names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from reprlib import repr as shown  # what a damaged file holds may be long
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from ddtree_numba.stages.best_first_tree.reference import MAX_DRAFT_LENGTH

__all__ = ["CheckpointError", "DrafterConfig", "TargetConfig", "read_drafter", "read_target"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, what it holds, and what is needed."""


@dataclass(frozen=True)
class TargetConfig:
    """What the target's forward pass needs of a DeepSeek-V3 config.json, under its names there."""

    vocab_size: int
    """Token ids run from 0 to this less one."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Decoder layers, all dense."""
    num_attention_heads: int
    """H, the heads of every layer."""
    q_lora_rank: int
    """Width of the query latent."""
    kv_lora_rank: int
    """D_c, width of the KV latent."""
    qk_nope_head_dim: int
    """Width of a head's query and key without position, before absorption."""
    qk_rope_head_dim: int
    """D_r, width of the rotated part of a query, and of the key that all heads share."""
    v_head_dim: int
    """Width of a head's value, before absorption."""
    intermediate_size: int
    """Width inside the MLP."""
    max_position_embeddings: int
    """Most tokens of a sequence."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rms_norm_eps: float
    """What RMSNorm adds to the mean square."""
    eos_token_id: int
    """The token that ends a document."""

    @property
    def row_width(self) -> int:
        """Numbers in one KV row: latent and rotated key, D_c + D_r."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """What multiplies every attention score."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)


@dataclass(frozen=True)
class DrafterConfig:
    """What the drafter's forward pass needs of its config.json, under its names there."""

    vocab_size: int
    """Token ids run from 0 to this less one."""
    hidden_size: int
    """Width of the residual stream, as the target's."""
    num_hidden_layers: int
    """Layers."""
    num_attention_heads: int
    """H, the heads of every layer."""
    head_dim: int
    """Width of a head's query, key and value."""
    intermediate_size: int
    """Width inside the MLP."""
    block_size: int
    """Places of a block: the last token and the masks behind it."""
    target_layer_ids: tuple[int, ...]
    """The target's layers, from 0, whose output the drafter reads, in this order."""
    mask_token_id: int
    """The token that stands at a place to be guessed."""
    max_position_embeddings: int
    """Most tokens of a sequence."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rms_norm_eps: float
    """What RMSNorm adds to the mean square."""


# Variants of the architectures that the forward passes leave out: each key, when present, must have this value.
_TARGET_ONLY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rope_scaling": None,
    "rope_interleave": True,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
_DRAFTER_ONLY: dict[str, Any] = {
    "architectures": ["DFlashDrafter"],
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}

# Least and most of a number. Widths are bounded by the weights' file, which must hold them; what only the
# configuration says must not make us ask for more memory than there is.
_RANGES: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 1024),
    "max_position_embeddings": (1, 2**18),
    "block_size": (2, MAX_DRAFT_LENGTH + 1),
    "eos_token_id": (0, 2**20),
    "mask_token_id": (0, 2**20),
    "rope_theta": (1, 1e9),
    "rms_norm_eps": (1e-12, 0.1),
}
_ANY_SIZE = (1, 2**20)
_EVEN = ("qk_rope_head_dim", "head_dim")  # rotary embedding turns pairs

Config = TypeVar("Config", TargetConfig, DrafterConfig)


def read_target(folder: Path) -> tuple[TargetConfig, dict[str, np.ndarray]]:
    """Return the configuration and the tensors (Hugging Face names, float32) of the target in `folder`."""
    path = folder / "config.json"
    raw = _read_config(path, _TARGET_ONLY)
    config = _config(path, raw, TargetConfig)
    dense = raw.get("first_k_dense_replace", 0)
    if type(dense) is not int or dense < config.num_hidden_layers:
        needs = f"needs {config.num_hidden_layers}: every layer dense, no experts"
        raise CheckpointError(f"{path}: first_k_dense_replace is {shown(dense)}, {needs}")
    return config, _read_tensors(folder / "model.safetensors", _target_shapes(config))


def read_drafter(folder: Path, target: TargetConfig) -> tuple[DrafterConfig, dict[str, np.ndarray]]:
    """Return the configuration and the tensors (float32) of the drafter in `folder`, which must fit its `target`."""
    path = folder / "config.json"
    config = _config(path, _read_config(path, _DRAFTER_ONLY), DrafterConfig)
    for key in ("vocab_size", "hidden_size"):  # it shares the target's embedding
        got, needed = getattr(config, key), getattr(target, key)
        if got != needed:
            raise CheckpointError(f"{path}: {key} is {got}, needs {needed} like the target's")
    if not all(0 <= layer < target.num_hidden_layers for layer in config.target_layer_ids):
        raise CheckpointError(
            f"{path}: target_layer_ids is {shown(list(config.target_layer_ids))}, "
            f"needs layers from 0 to {target.num_hidden_layers - 1}"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(f"{path}: mask_token_id is {config.mask_token_id}, needs a token below vocab_size")
    return config, _read_tensors(folder / "model.safetensors", _drafter_shapes(config))


def _read_config(path: Path, only: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `path` holds, its rope_theta at the top: newer transformers write it inside rope_parameters."""
    raw = _read_json(path)
    for key, needed in only.items():
        if raw.get(key, needed) != needed:
            raise CheckpointError(f"{path}: {key} is {shown(raw[key])}, needs {needed!r}")
    rope = raw.get("rope_parameters")
    if rope is None:
        return raw
    plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default"
    if not plain or rope.keys() - {"rope_type", "rope_theta"}:
        needs = "needs rope_theta and rope_type 'default' alone"
        raise CheckpointError(f"{path}: rope_parameters is {shown(rope)}, {needs}")
    return {**raw, **rope}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}, needs a checkpoint's config.json") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: holds a {type(raw).__name__}, needs a JSON object")
    return raw


def _config(path: Path, raw: Mapping[str, Any], kind: type[Config]) -> Config:
    """Return the `kind` of configuration that `raw` describes; every number must be in its range."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name not in raw:
            raise CheckpointError(f"{path}: {field.name} is missing")
        value = raw[field.name]
        if not _is_valid(field.name, str(field.type), value):
            needs = _needs(field.name, str(field.type))
            raise CheckpointError(f"{path}: {field.name} is {shown(value)}, needs {needs}")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _is_valid(name: str, kind: str, value: Any) -> bool:
    if kind.startswith("tuple"):
        return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    low, high = _RANGES.get(name, _ANY_SIZE)
    if type(value) not in ((int, float) if kind == "float" else (int,)) or not low <= value <= high:
        return False
    return name not in _EVEN or value % 2 == 0


def _needs(name: str, kind: str) -> str:
    if kind.startswith("tuple"):
        return "a list of layers"
    low, high = _RANGES.get(name, _ANY_SIZE)
    number = "an even number" if name in _EVEN else "a whole number" if kind == "int" else "a number"
    return f"{number} from {low:g} to {high:g}" if kind == "float" else f"{number} from {low} to {high}"


def _target_shapes(c: TargetConfig) -> dict[str, tuple[int, ...]]:
    heads, hidden = c.num_attention_heads, c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (c.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (c.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (c.row_width, hidden),
        "self_attn.kv_a_layernorm.weight": (c.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * c.v_head_dim),
        "mlp.gate_proj.weight": (c.intermediate_size, hidden),
        "mlp.up_proj.weight": (c.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, c.intermediate_size),
    }
    for i in range(c.num_hidden_layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _drafter_shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads_width = c.hidden_size, c.num_attention_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(c.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads_width, hidden),
        "self_attn.k_proj.weight": (heads_width, hidden),
        "self_attn.v_proj.weight": (heads_width, hidden),
        "self_attn.o_proj.weight": (hidden, heads_width),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
        "mlp.gate_proj.weight": (c.intermediate_size, hidden),
        "mlp.up_proj.weight": (c.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, c.intermediate_size),
    }
    for i in range(c.num_hidden_layers):
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _read_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the tensors named in `shapes` as float32, each checked; others in the file are left alone."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such file, needs a checkpoint's weights")
    try:
        with safe_open(path, framework="numpy") as file:
            present = set(file.keys())
            missing = sorted(shapes.keys() - present)
            if missing:
                raise CheckpointError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
            return {name: _checked(path, name, file.get_tensor(name), shape) for name, shape in shapes.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged, not a whole safetensors file ({error})") from None
    except (TypeError, AttributeError):  # safetensors has no NumPy type for bfloat16, float8 and others
        raise CheckpointError(f"{path}: holds bfloat16 or float8, needs float16 or float32") from None


def _checked(path: Path, name: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if tensor.dtype not in (np.float16, np.float32):
        raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, needs float16 or float32")
    if tensor.shape != shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {tensor.shape}, needs {shape}")
    wide = tensor.astype(np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"{path}: tensor {name} holds NaN or infinity")
    return wide
