"""The drafter: DFlash block diffusion. One pass guesses the tokens of a whole block behind the root.

A block is the root and a row of masks. Every position of it sees the whole block and the *context*: one vector per
accepted token, made of the target's residual stream at a few layers. Keys and values of the context are computed once
per accepted token and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.engine.arithmetic import ON_CPU, Arithmetic
from ddtree_numba.engine.checkpoint import DrafterConfig
from ddtree_numba.engine.row_math import rope_table

__all__ = ["Drafter", "DrafterContext"]


_Product = Callable[[Any], Any]


class _Layer(NamedTuple):
    query_key_value: _Product  # residual stream -> queries, keys, values of every head: 3 * H * d
    query_key_weight: Any  # [2 * H, d]: RMSNorm of each query head, then of each key head
    output: _Product  # attended values, H * d -> residual stream
    gate_up: _Product  # residual stream -> half the gate, then up
    down: _Product  # intermediate -> residual stream


class DrafterContext:
    """Keys and values of one sequence's accepted tokens, with room for a block behind them."""

    def __init__(self, layers: int, heads: int, head_dim: int, max_rows: int, xp: Any = np) -> None:
        """Make room for `max_rows` tokens, the block's included, in `layers` layers of H = `heads`, d = `head_dim`.

        Its arrays are made by the module `xp`.
        """
        self.keys = xp.zeros((layers, heads, max_rows, head_dim), np.float32)
        """[layers, H, rows, d] float32, rotated."""
        self.values = xp.zeros((layers, heads, max_rows, head_dim), np.float32)
        """[layers, H, rows, d] float32."""
        self.length = 0
        """Accepted tokens in it."""


class Drafter:
    """The drafter's weights, what it keeps of accepted tokens, and its forward pass over one block."""

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, np.ndarray],
        embedding: Any,
        arithmetic: Arithmetic = ON_CPU,
    ) -> None:
        """Take a configuration, its tensors, and the target's `embedding` [V, hidden], which the drafter shares.

        `arithmetic` says what arrays it computes with, the embedding among them.
        """
        self.config = config
        self._arithmetic = arithmetic
        xp, matrix = arithmetic.xp, arithmetic.matrix
        self.draft_length = config.block_size - 1
        """L: positions that one block guesses."""
        self._embedding = embedding
        self._head = matrix(arithmetic.on_host(embedding) * tensors["norm.weight"])
        layers = [_with_neighbouring_pairs(config, tensors, index) for index in range(config.num_hidden_layers)]
        self._layers = [_merge_layer(config, layer, arithmetic) for layer in layers]
        self._features = matrix(tensors["fc.weight"])
        # The context goes through the keys and values of all layers at once: it is the same for each.
        key_value = [layer[f"self_attn.{kind}_proj"] for kind in "kv" for layer in layers]
        self._context = matrix(np.concatenate(key_value) * tensors["hidden_norm.weight"])
        key_weights = np.stack([layer["self_attn.k_norm"] for layer in layers])
        self._context_key_weight = xp.asarray(key_weights)[:, None]  # [layers, 1, d]
        positions = config.max_position_embeddings + config.block_size
        self._rope = xp.asarray(rope_table(positions, config.head_dim, config.rope_theta))

    def new_context(self, max_rows: int) -> DrafterContext:
        """Return an empty context for a sequence of `max_rows` tokens."""
        c = self.config
        return DrafterContext(
            c.num_hidden_layers, c.num_attention_heads, c.head_dim, max_rows + c.block_size, self._arithmetic.xp
        )

    def append(self, context: DrafterContext, features: Any) -> None:
        """Add accepted tokens, in order: `features` [n, F] float32 from the target's pass over them."""
        c = self.config
        first, last = context.length, context.length + len(features)
        x = self._arithmetic.normalise(self._features(features), c.rms_norm_eps)
        heads = self._context(x).reshape(len(features), 2, c.num_hidden_layers, c.num_attention_heads, c.head_dim)
        keys = self._arithmetic.normalise(heads[:, 0], c.rms_norm_eps)
        keys *= self._context_key_weight
        self._arithmetic.rotate(keys, self._rope[first:last, None, None])
        context.keys[:, :, first:last] = keys.transpose(1, 2, 0, 3)
        context.values[:, :, first:last] = heads[:, 1].transpose(1, 2, 0, 3)
        context.length = last

    def forward(self, context: DrafterContext, root_token: int) -> Any:
        """Return the logits [L, V] of the L tokens behind `root_token`, which stands right after the context."""
        c = self.config
        block = np.full(c.block_size, c.mask_token_id)
        block[0] = root_token
        x = self._embedding[self._arithmetic.xp.asarray(block)]
        for index, layer in enumerate(self._layers):
            x += layer.output(self._attend(index, layer, self._arithmetic.normalise(x, c.rms_norm_eps), context))
            x += layer.down(self._arithmetic.swiglu(layer.gate_up(self._arithmetic.normalise(x, c.rms_norm_eps))))
        return self._head(self._arithmetic.normalise(x[1:], c.rms_norm_eps))

    def _attend(self, index: int, layer: _Layer, x: Any, context: DrafterContext) -> Any:
        """Return the attended values [block, H * d] of a block `x` [block, hidden] over the context and itself."""
        heads, head_dim = self.config.num_attention_heads, self.config.head_dim
        first, last = context.length, context.length + len(x)
        all_heads = layer.query_key_value(x).reshape(len(x), 3 * heads, head_dim)
        query_key = self._arithmetic.normalise(all_heads[:, : 2 * heads], self.config.rms_norm_eps)
        query_key *= layer.query_key_weight
        self._arithmetic.rotate(query_key, self._rope[first:last, None])
        queries, keys = query_key[:, :heads].swapaxes(0, 1), query_key[:, heads:].swapaxes(0, 1)
        # The block's own rows lie behind the context's for the time of this pass; the next one overwrites them.
        context.keys[index, :, first:last] = keys
        context.values[index, :, first:last] = all_heads[:, 2 * heads :].swapaxes(0, 1)
        weights = queries @ context.keys[index, :, :last].swapaxes(1, 2)  # [H, block, rows]
        weights *= np.float32(head_dim**-0.5)
        weights -= weights.max(axis=2, keepdims=True)
        np.exp(weights, out=weights)
        out = weights @ context.values[index, :, :last]
        out /= weights.sum(axis=2, keepdims=True)
        return out.swapaxes(0, 1).reshape(len(x), heads * head_dim)


def _with_neighbouring_pairs(c: DrafterConfig, tensors: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """Return a layer's tensors with the numbers of a query and key head in another order.

    The checkpoint turns number j of a head together with number j + d / 2. With the two side by side, as here, a pair
    is one complex number; scores are the same, since queries and keys change alike.
    """
    prefix = f"layers.{index}."
    layer = {name[len(prefix) : -len(".weight")]: w for name, w in tensors.items() if name.startswith(prefix)}
    order = np.arange(c.head_dim).reshape(2, -1).T.reshape(-1)  # 0, d / 2, 1, d / 2 + 1, ...
    for kind in "qk":
        projection = layer[f"self_attn.{kind}_proj"].reshape(c.num_attention_heads, c.head_dim, -1)
        layer[f"self_attn.{kind}_proj"] = projection[:, order].reshape(-1, c.hidden_size)
        layer[f"self_attn.{kind}_norm"] = layer[f"self_attn.{kind}_norm"][order]
    return layer


def _merge_layer(c: DrafterConfig, layer: Mapping[str, np.ndarray], arithmetic: Arithmetic) -> _Layer:
    attention = np.concatenate([layer[f"self_attn.{kind}_proj"] for kind in "qkv"])
    gate_up = np.concatenate([layer["mlp.gate_proj"] / 2, layer["mlp.up_proj"]])
    per_head = [np.tile(layer[f"self_attn.{kind}_norm"], (c.num_attention_heads, 1)) for kind in "qk"]
    return _Layer(
        query_key_value=arithmetic.matrix(attention * layer["input_layernorm"]),
        query_key_weight=arithmetic.xp.asarray(np.concatenate(per_head)),
        output=arithmetic.matrix(layer["self_attn.o_proj"]),
        gate_up=arithmetic.matrix(gate_up * layer["post_attention_layernorm"]),
        down=arithmetic.matrix(layer["mlp.down_proj"]),
    )
