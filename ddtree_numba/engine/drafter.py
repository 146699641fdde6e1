"""The drafter: DFlash block diffusion in NumPy. One pass guesses the tokens of a whole block behind the root.

A block is the root and a row of masks. Every position of it sees the whole block and the *context*: one vector per
accepted token, made of the target's residual stream at a few layers. Keys and values of the context are computed once
per accepted token and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ddtree_numba.engine.checkpoint import DrafterConfig
from ddtree_numba.engine.column_math import normalise, product, rope_table, swiglu

__all__ = ["Drafter", "DrafterContext"]


class _Layer(NamedTuple):
    query_key_value: np.ndarray  # [3 * H * d, hidden]
    query_key_weight: np.ndarray  # [2 * H, d, 1]: RMSNorm of each query head, then of each key head
    output: np.ndarray  # [hidden, H * d]
    gate_up: np.ndarray  # [2 * intermediate, hidden]: half the gate, then up
    down: np.ndarray  # [hidden, intermediate]


class DrafterContext:
    """Keys and values of one sequence's accepted tokens, with room for a block behind them."""

    def __init__(self, layers: int, heads: int, head_dim: int, max_rows: int) -> None:
        self.keys = np.zeros((layers, heads, max_rows, head_dim), np.float32)
        """[layers, H, rows, d] float32, rotated."""
        self.values = np.zeros((layers, heads, head_dim, max_rows), np.float32)
        """[layers, H, d, rows] float32."""
        self.length = 0
        """Accepted tokens in it."""


class Drafter:
    """The drafter's weights, what it keeps of accepted tokens, and its forward pass over one block."""

    def __init__(self, config: DrafterConfig, tensors: Mapping[str, np.ndarray], embedding: np.ndarray) -> None:
        """Take a configuration, its tensors, and the target's `embedding` [V, hidden], which the drafter shares."""
        self.config = config
        self.draft_length = config.block_size - 1
        """L: positions that one block guesses."""
        self._embedding = embedding
        self._head = np.ascontiguousarray(embedding * tensors["norm.weight"])
        self._layers = [_merge_layer(config, tensors, i) for i in range(config.num_hidden_layers)]
        self._features = tensors["fc.weight"]
        # The context goes through the keys and values of all layers at once: it is the same for each.
        names = [f"layers.{i}.self_attn.{kind}_proj.weight" for kind in "kv" for i in range(config.num_hidden_layers)]
        self._context = np.concatenate([tensors[name] for name in names]) * tensors["hidden_norm.weight"]
        self._context_key_weight = np.stack([layer.query_key_weight[-1:] for layer in self._layers])
        positions = config.max_position_embeddings + config.block_size
        rope = rope_table(positions, config.head_dim, config.rope_theta).T
        self._cos, self._sin = np.ascontiguousarray(rope.real), np.ascontiguousarray(rope.imag)  # [d / 2, positions]

    def new_context(self, max_rows: int) -> DrafterContext:
        """Return an empty context for a sequence of `max_rows` tokens."""
        c = self.config
        return DrafterContext(c.num_hidden_layers, c.num_attention_heads, c.head_dim, max_rows + c.block_size)

    def append(self, context: DrafterContext, features: np.ndarray) -> None:
        """Add accepted tokens, in order: `features` [F, n] float32 from the target's pass over them."""
        c = self.config
        first, last = context.length, context.length + features.shape[1]
        x = normalise(product(self._features, features), c.rms_norm_eps)
        shape = (2, c.num_hidden_layers, c.num_attention_heads, c.head_dim, last - first)
        keys, values = product(self._context, x).reshape(shape)
        keys = _normalise_heads(keys, self._context_key_weight, c.rms_norm_eps)
        self._rotate(keys, first)
        context.keys[:, :, first:last] = keys.swapaxes(2, 3)
        context.values[:, :, :, first:last] = values
        context.length = last

    def forward(self, context: DrafterContext, root_token: int) -> np.ndarray:
        """Return the logits [L, V] of the L tokens behind `root_token`, which stands right after the context."""
        c = self.config
        block = np.full(c.block_size, c.mask_token_id)
        block[0] = root_token
        x = np.ascontiguousarray(self._embedding[block].T)
        for index, layer in enumerate(self._layers):
            x += product(layer.output, self._attend(index, layer, normalise(x, c.rms_norm_eps), context))
            x += product(layer.down, swiglu(product(layer.gate_up, normalise(x, c.rms_norm_eps))))
        return normalise(x[:, 1:], c.rms_norm_eps).T @ self._head.T

    def _attend(self, index: int, layer: _Layer, x: np.ndarray, context: DrafterContext) -> np.ndarray:
        """Return the attended values [H * d, block] of a block `x` [hidden, block] over the context and itself."""
        heads, head_dim = self.config.num_attention_heads, self.config.head_dim
        first, last = context.length, context.length + x.shape[1]
        heads_of_all = product(layer.query_key_value, x).reshape(3 * heads, head_dim, -1)
        query_key = _normalise_heads(heads_of_all[: 2 * heads], layer.query_key_weight, self.config.rms_norm_eps)
        self._rotate(query_key, first)
        queries, keys = np.split(query_key, 2)
        # The block's own rows lie behind the context's for the time of this pass; the next one overwrites them.
        context.keys[index, :, first:last] = keys.swapaxes(1, 2)
        context.values[index, :, :, first:last] = heads_of_all[2 * heads :]
        weights = context.keys[index, :, :last] @ queries  # [H, rows, block]
        weights *= np.float32(head_dim**-0.5)
        weights -= weights.max(axis=1, keepdims=True)
        np.exp(weights, out=weights)
        out = context.values[index, :, :, :last] @ weights
        out /= weights.sum(axis=1, keepdims=True)
        return out.reshape(heads * head_dim, -1)

    def _rotate(self, heads: np.ndarray, first_position: int) -> None:
        """Turn `heads` [..., d, n] in place: number j of a head and number j + d / 2 are a pair."""
        positions = slice(first_position, first_position + heads.shape[-1])
        cos, sin = self._cos[:, positions], self._sin[:, positions]
        half = heads.shape[-2] // 2
        a, b = heads[..., :half, :], heads[..., half:, :]
        turned = a * cos - b * sin
        np.add(b * cos, a * sin, out=b)
        a[...] = turned


def _normalise_heads(heads: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return RMSNorm of `heads` [..., d, n] along d, times `weight` [..., d, 1]."""
    scale = np.square(heads).mean(axis=-2, keepdims=True)
    scale += np.float32(eps)
    return heads / np.sqrt(scale, out=scale) * weight


def _merge_layer(c: DrafterConfig, tensors: Mapping[str, np.ndarray], index: int) -> _Layer:
    def tensor(name: str) -> np.ndarray:
        return tensors[f"layers.{index}.{name}.weight"]

    attention = np.concatenate([tensor(f"self_attn.{kind}_proj") for kind in "qkv"])
    gate_up = np.concatenate([tensor("mlp.gate_proj") / 2, tensor("mlp.up_proj")])
    per_head = [np.tile(tensor(f"self_attn.{kind}_norm"), (c.num_attention_heads, 1)) for kind in "qk"]
    return _Layer(
        query_key_value=attention * tensor("input_layernorm"),
        query_key_weight=np.concatenate(per_head)[:, :, None],
        output=tensor("self_attn.o_proj"),
        gate_up=gate_up * tensor("post_attention_layernorm"),
        down=tensor("mlp.down_proj"),
    )
