"""The target: DeepSeek-V3's forward pass (all layers dense), with latent attention in the absorbed form.

A checkpoint's matrices are merged once, when it is loaded: each RMSNorm's weight goes into the matrix after it, W_UK
into the query projection and W_UV into the output projection (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). What is
left of a layer is five products, a softmax over latent rows, and little else.

On the CPU, a token's logits depend on the tokens it sees and on nothing else, to the last bit: however many nodes share
the pass. On a GPU they do but for rounding (see `arithmetic.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.engine.arithmetic import ON_CPU, Arithmetic
from ddtree_numba.engine.checkpoint import TargetConfig
from ddtree_numba.engine.kv_cache import PagedKVCache
from ddtree_numba.engine.row_math import rope_table
from ddtree_numba.stages.best_first_tree.reference import MAX_DRAFT_LENGTH

__all__ = ["Attention", "TargetModel", "TargetPass"]

Attention = Callable[[int, Any], Any]
"""(layer, queries [N, H, D_c + D_r]) -> [N, H, D_c]: the nodes of a pass attend to the rows that each may see."""


class TargetPass(NamedTuple):
    """What one forward pass over N tokens gives, in the model's arrays."""

    logits: Any
    """[N, V] float32: of the token after each one."""
    features: Any
    """[N, F] float32: the residual stream after each of the chosen layers, one behind the other."""


_Product = Callable[[Any], Any]


class _Layer(NamedTuple):
    compress: _Product  # residual stream -> query latent, KV latent, rotary key: q_lora + D_c + D_r
    query: _Product  # query latent -> absorbed queries: H * (D_c + D_r)
    latent_weight: Any  # [D_c]: RMSNorm of the KV latent; not merged, for the cache holds the normed latent
    output: _Product  # attended latents, H * D_c -> residual stream
    gate_up: _Product  # residual stream -> half the gate, then up: 2 * intermediate
    down: _Product  # intermediate -> residual stream


class TargetModel:
    """The target's weights, and its forward pass over the nodes of a tree (or a stretch of a prompt)."""

    def __init__(
        self,
        config: TargetConfig,
        tensors: Mapping[str, np.ndarray],
        feature_layers: Sequence[int] = (),
        arithmetic: Arithmetic = ON_CPU,
    ) -> None:
        """Take a configuration, its tensors (Hugging Face names) and the layers whose output the drafter reads.

        `arithmetic` says what arrays the model computes with.
        """
        self.config = config
        self.arithmetic = arithmetic
        """What the model computes with."""
        embedding = tensors["model.embed_tokens.weight"]
        self.embedding = arithmetic.xp.asarray(embedding)
        """[V, hidden] float32."""
        self._feature_layers = tuple(feature_layers)
        self._head = arithmetic.matrix(embedding * tensors["model.norm.weight"])
        self._layers = [_merge_layer(config, tensors, i, arithmetic) for i in range(config.num_hidden_layers)]
        # A node may lie so far past the context's end; its token is then never emitted.
        positions = config.max_position_embeddings + MAX_DRAFT_LENGTH
        self._rope = arithmetic.xp.asarray(rope_table(positions, config.qk_rope_head_dim, config.rope_theta))

    def new_cache(self, max_rows: int) -> PagedKVCache:
        """Return an empty KV cache for `max_rows` tokens of this model."""
        return PagedKVCache(self.config.num_hidden_layers, self.config.row_width, max_rows, xp=self.arithmetic.xp)

    def forward(self, token_ids: Any, positions: Any, cache: PagedKVCache, attention: Attention) -> TargetPass:
        """Run N tokens at `positions` (both [N]); their KV rows go into `cache` behind its prefix, in this order."""
        c = self.config
        prefix = cache.prefix
        rows = cache.pool_rows(prefix, prefix + len(token_ids))
        rotation = self._rope[positions]
        features = {}
        x = self.embedding[token_ids]
        for index, layer in enumerate(self._layers):
            latents = layer.compress(self.arithmetic.normalise(x, c.rms_norm_eps))
            cache.layer(index)[rows] = self._kv_rows(layer, latents[:, c.q_lora_rank :], rotation)
            queries = self._queries(layer, latents[:, : c.q_lora_rank], rotation)
            x += layer.output(attention(index, queries).reshape(len(x), -1))
            x += layer.down(self.arithmetic.swiglu(layer.gate_up(self.arithmetic.normalise(x, c.rms_norm_eps))))
            if index in self._feature_layers:
                features[index] = x.copy()
        logits = self._head(self.arithmetic.normalise(x, c.rms_norm_eps))
        chosen = [features[index] for index in self._feature_layers]
        return TargetPass(logits, np.concatenate(chosen, axis=1) if chosen else x[:, :0])

    def _kv_rows(self, layer: _Layer, rows: Any, rotation: Any) -> Any:
        """Make of `rows` what the cache keeps of each token: the normed latent and the rotated key, [N, D_c + D_r]."""
        width = self.config.kv_lora_rank
        np.multiply(self.arithmetic.normalise(rows[:, :width], _INNER_EPS), layer.latent_weight, out=rows[:, :width])
        self.arithmetic.rotate(rows[:, width:], rotation)
        return rows

    def _queries(self, layer: _Layer, query_latent: Any, rotation: Any) -> Any:
        """Return the absorbed queries [N, H, D_c + D_r], their last D_r numbers rotated."""
        queries = layer.query(self.arithmetic.normalise(query_latent, _INNER_EPS))
        queries = queries.reshape(len(queries), self.config.num_attention_heads, -1)
        self.arithmetic.rotate(queries[:, :, self.config.kv_lora_rank :], rotation[:, None])
        return queries


_INNER_EPS = 1e-6  # of the norms inside attention, in transformers whatever rms_norm_eps says


def _merge_layer(c: TargetConfig, tensors: Mapping[str, np.ndarray], index: int, arithmetic: Arithmetic) -> _Layer:
    def tensor(name: str) -> np.ndarray:
        return tensors[f"model.layers.{index}.{name}.weight"].astype(np.float64)

    heads, nope = c.num_attention_heads, c.qk_nope_head_dim
    key_value = tensor("self_attn.kv_b_proj").reshape(heads, nope + c.v_head_dim, c.kv_lora_rank)
    to_key, to_value = key_value[:, :nope], key_value[:, nope:]
    query = tensor("self_attn.q_b_proj").reshape(heads, nope + c.qk_rope_head_dim, c.q_lora_rank)
    absorbed = np.concatenate([to_key.transpose(0, 2, 1) @ query[:, :nope], query[:, nope:]], axis=1)
    output = tensor("self_attn.o_proj").reshape(c.hidden_size, heads, c.v_head_dim)
    compress = np.concatenate([tensor("self_attn.q_a_proj"), tensor("self_attn.kv_a_proj_with_mqa")])
    gate_up = np.concatenate([tensor("mlp.gate_proj") / 2, tensor("mlp.up_proj")])
    return _Layer(
        compress=arithmetic.matrix(compress * tensor("input_layernorm")),
        query=arithmetic.matrix(absorbed.reshape(-1, c.q_lora_rank) * tensor("self_attn.q_a_layernorm")),
        latent_weight=arithmetic.xp.asarray(tensor("self_attn.kv_a_layernorm").astype(np.float32)),
        output=arithmetic.matrix(np.concatenate([output[:, h] @ to_value[h] for h in range(heads)], axis=1)),
        gate_up=arithmetic.matrix(gate_up * tensor("post_attention_layernorm")),
        down=arithmetic.matrix(tensor("mlp.down_proj")),
    )
