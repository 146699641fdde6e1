"""Decode the shipped checkpoint with Hugging Face transformers' own model, its attention and cache replaced by ours.

    pip install '.[examples]'
    python examples/transformers_decode.py --prompt "def quicksort("

The target is `transformers.DeepseekV3ForCausalLM`, unchanged. Two doors that transformers leaves open are used:

- `AttentionInterface.register` names an attention function. Ours turns the queries into latent ones with the layer's
  own `kv_b_proj` (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) and calls `tree_attention` over the paged latent cache.
- `past_key_values` may be any object with `update`. The model hands it the normed latent and the rotated key of each
  new token, which are the row that `tree_attention` and `commit_kv` work on.

The tree is built, walked and committed by the operators of `ddtree_numba.interop.torch_ops`: on a GPU by the kernels,
on torch's stream, on a CPU by the references. The drafter, which transformers doesn't have, is ours, in NumPy.

At the end the text is compared with that of `model.generate(do_sample=False)`, and the exit code is 1 when it differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_numba.backend import ON_GPU, describe
from ddtree_numba.draft_tree import MAX_BUDGET
from ddtree_numba.engine import DEFAULT_MODEL, CheckpointError, ModelPair, decode_text, encode_text, load_model
from ddtree_numba.engine.stage_backend import chain_bits

try:
    import torch
    from transformers import AttentionInterface, DeepseekV3ForCausalLM
    from transformers.utils import logging

    from ddtree_numba.interop import torch_ops
except ImportError as error:
    raise SystemExit(f"transformers_decode.py: {error}; pip install '.[examples]'") from None

PREFILL = 128  # tokens of the prompt in one pass


class PagedLatentCache:
    """The KV cache: one row, latent and rotated key, per layer and token, in pages that a block table names."""

    def __init__(self, layers: int, width: int, max_rows: int, device: torch.device, page_size: int = 16) -> None:
        pages = -(-max_rows // page_size)
        self.pool = torch.zeros(layers, pages, page_size, width, device=device)
        # In any order: whoever reads rows without asking the table gets the wrong ones.
        order = np.random.default_rng(0).permutation(pages).astype(np.int32)
        self.block_table = torch.from_numpy(order[None]).to(device)
        self.prefix_lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows: torch.Tensor | None = None

    def expect(self, tokens: int) -> None:
        """Prepare for a pass over `tokens` tokens, whose rows go behind the prefix in this order."""
        page_size = self.pool.shape[2]
        row = self.prefix_lengths + torch.arange(tokens, device=self.pool.device)
        self._rows = self.block_table[0, row // page_size] * page_size + row % page_size

    def update(
        self, latent: torch.Tensor, key: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new rows [1, 1, S, D_c] and [1, 1, S, D_r]; transformers calls this."""
        if latent.shape[1] != 1 or latent.shape[3] + key.shape[3] != self.pool.shape[3]:
            raise SystemExit("transformers_decode.py: this transformers caches expanded keys; needs 5.17 or newer")
        rows = self.pool[layer].view(-1, self.pool.shape[3])
        rows[self._rows] = torch.cat([latent, key], dim=-1)[0, 0]
        return latent, key


def latent_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cache: PagedLatentCache,
    ancestor_bits: torch.Tensor,
    node_count: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the cache: transformers' signature. Expanded keys, values and mask are not looked at."""
    nope, width = module.qk_nope_head_dim, module.kv_lora_rank
    to_key, to_value = module.kv_b_proj.weight.view(query.shape[1], -1, width).split([nope, module.v_head_dim], dim=1)
    latent_query = torch.einsum("bhsn,hnc->bshc", query[..., :nope], to_key)
    q = torch.cat([latent_query, query[..., nope:].transpose(1, 2)], dim=-1)
    pool = cache.pool[module.layer_idx]
    out, _lse = torch_ops.tree_attention(
        q, pool, cache.block_table, cache.prefix_lengths, ancestor_bits, node_count, scaling, width
    )
    return torch.einsum("bshc,hvc->bshv", out, to_value), None


class TreeDecoder:
    """Decodes one prompt with transformers' target and this project's drafter."""

    def __init__(self, target: DeepseekV3ForCausalLM, pair: ModelPair, budget: int) -> None:
        config = target.config
        self._target, self._drafter, self._budget, self._device = target, pair.drafter, budget, target.device
        rows = config.max_position_embeddings + budget + PREFILL
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self._cache = PagedLatentCache(config.num_hidden_layers, width, rows, target.device)
        self._context = pair.drafter.new_context(rows)
        self._features: dict[int, torch.Tensor] = {}
        self._layers = pair.drafter.config.target_layer_ids
        for index in self._layers:
            target.model.layers[index].register_forward_hook(
                lambda _module, _given, out, index=index: self._features.update({index: out})
            )

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, bits: torch.Tensor, count: torch.Tensor) -> Any:
        """Run the target over nodes [1, S]; their logits [1, S, V]."""
        self._cache.expect(tokens.shape[1])
        return self._target(
            input_ids=tokens.long(),
            position_ids=positions.long(),
            past_key_values=self._cache,
            cache=self._cache,
            ancestor_bits=bits,
            node_count=count,
        ).logits

    def _remember(self, slots: torch.Tensor) -> None:
        """Hand the accepted nodes' features to the drafter."""
        features = torch.cat([self._features[index][0] for index in self._layers], dim=-1)
        self._drafter.append(self._context, features[slots].cpu().numpy())

    def prefill(self, tokens: list[int]) -> None:
        """Compute the rows of the tokens before the first root."""
        for first in range(0, len(tokens), PREFILL):
            stretch = torch.tensor([tokens[first : first + PREFILL]], dtype=torch.int32, device=self._device)
            size = stretch.shape[1]
            count = torch.full((1,), size, dtype=torch.int32, device=self._device)
            positions = torch.arange(first, first + size, device=self._device)[None]
            bits = torch.from_numpy(chain_bits(size).view(np.int32)).to(self._device)
            self._forward(stretch, positions, bits, count)
            self._cache.prefix_lengths += size
            self._remember(torch.arange(size, device=self._device))

    def rounds(self, root: int) -> Iterator[list[int]]:
        """Yield the tokens of one round after the other, without an end."""
        cache = self._cache
        while True:
            drafted = np.ascontiguousarray(self._drafter.forward(self._context, root)[None])
            logits = torch.from_numpy(drafted).to(self._device)
            root_tokens = torch.tensor([root], dtype=torch.int32, device=self._device)
            log_probs, token_ids = torch_ops.top_candidates(logits, max(1, self._budget))
            tree = torch_ops.build_tree(log_probs, token_ids, root_tokens, self._budget)
            positions = torch_ops.positions(tree.depths, cache.prefix_lengths)
            target_logits = self._forward(tree.token_ids, positions, tree.ancestor_bits, tree.node_count)
            targets = target_logits.argmax(dim=-1).to(torch.int32)
            path = torch_ops.accept_walk(tree, targets, logits.shape[1])
            status = torch_ops.commit_kv(
                cache.pool, cache.block_table, cache.prefix_lengths, path.accept_slots, path.accept_count
            )
            count = int(path.accept_count[0])
            if int(status[0]) or int(path.status[0]):
                raise RuntimeError(f"walk and commit report {path.status.tolist()}, {status.tolist()}")
            self._remember(path.accept_slots[0, :count].long())
            emitted = path.accept_tokens[0, :count].tolist()
            root = emitted[-1]
            yield emitted


def decode(decoder: TreeDecoder, prompt: list[int], new_tokens: int, stop: int) -> tuple[list[int], int]:
    """Return the new tokens, cut at `stop`, and how many rounds they took."""
    decoder.prefill(prompt[:-1])
    tokens: list[int] = []
    rounds = 0
    for emitted in decoder.rounds(prompt[-1]):
        rounds += 1
        tokens += emitted
        if len(tokens) >= new_tokens or stop in emitted:
            break
    tokens = tokens[:new_tokens]
    return tokens[: tokens.index(stop)] if stop in tokens else tokens, rounds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a folder with target/ and drafter/")
    parser.add_argument("--prompt", default="def quicksort(")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--budget", type=int, default=32, help="drafted nodes of a round, the root not counted")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if ON_GPU else "cpu")
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens: got {args.max_new_tokens}, needs 1 or more")
    if not 0 <= args.budget <= MAX_BUDGET:
        parser.error(f"--budget: got {args.budget}, needs 0 to {MAX_BUDGET}")
    if args.device == "cuda" and not (ON_GPU and torch.cuda.is_available()):
        parser.error(f"--device: got cuda, but kernels run on the {describe()} and torch's CUDA is not to be had")
    try:
        args.pair = load_model(args.model)
    except CheckpointError as error:
        parser.error(f"--model: {error}")
    args.tokens = encode_text(args.prompt)
    room = args.pair.context - len(args.tokens)
    if room < 1:
        parser.error(f"--prompt: got {len(args.tokens)} tokens, needs fewer than {args.pair.context}, the context")
    args.max_new_tokens = min(args.max_new_tokens, room)
    return args


@torch.inference_mode()
def main() -> int:
    args = arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False  # text is compared with text: both models multiply in float32
    AttentionInterface.register("ddtree_latent", latent_attention)

    def load(attention: str) -> DeepseekV3ForCausalLM:
        model = DeepseekV3ForCausalLM.from_pretrained(
            args.model / "target", dtype=torch.float32, attn_implementation=attention
        )
        return model.to(args.device).eval()

    stop = args.pair.target.config.eos_token_id
    started = time.perf_counter()
    tokens, rounds = decode(
        TreeDecoder(load("ddtree_latent"), args.pair, args.budget), args.tokens, args.max_new_tokens, stop
    )
    seconds = time.perf_counter() - started
    prompt = torch.tensor([args.tokens], device=args.device)
    expected = (
        load("sdpa")
        .generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=stop,
            pad_token_id=stop,
        )[0, len(args.tokens) :]
        .tolist()
    )
    expected = expected[: expected.index(stop)] if stop in expected else expected

    print(args.prompt + decode_text(tokens))
    print(
        f"-- {len(tokens)} tokens in {rounds} rounds, {seconds:.1f} s with loading, stages on {args.device}", end=": "
    )
    if tokens == expected:
        print("identical to model.generate(do_sample=False)")
        return 0
    first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(tokens))
    print(f"DIFFERENT from model.generate from token {first} on: {decode_text(expected[first : first + 40])!r}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
