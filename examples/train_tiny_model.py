"""Train the small model that ships with ddtree_numba: a byte-level target and its block-diffusion drafter.

    python examples/train_tiny_model.py --out tiny_stdlib --state state

The target is a DeepSeek-V3 decoder (multi-head latent attention, every layer dense) that reads and writes bytes; it
learns the Python standard library's own source. The drafter is a DFlash block-diffusion model: from hidden states of
three target layers it guesses the next 15 bytes in one pass. It learns to imitate the target, on real source and on
text that the target wrote itself, because that is the text it will see when the two decode together.

On one GPU, `--target-seconds 185 --write-seconds 25 --drafter-seconds 110` made the shipped weights; `--smoke` runs
every phase with a handful of steps. An interrupted run continues from the files in `--state`. A time limit scales the
phase's learning-rate schedule to it, so two machines then give two different (equally usable) models; with step counts
alone, `--seed` fixes what is drawn.

Sources of the ideas: DeepSeek-V2/V3 (latent attention), DFlash (arXiv 2602.06036, block-diffusion drafting),
DDTree (arXiv 2604.12989, the draft tree that the evaluation replays), Muon by Keller Jordan (orthogonalised momentum).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import platform
import random
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Report = dict[str, Any]  # figures by name, as they go into metrics.json

console = Console(width=118)

BOS = 256  # starts every document, and so ends the one before it: the stop token too
MASK = 257
VOCABULARY = 258

# Modules that neither model ever sees, each with the tests that quote it. HELD_OUT is only for the final figures;
# VALIDATION decides when to stop, so that the figures are not chosen by the text they are measured on.
HELD_OUT = {
    "asyncio/locks.py": ["test/test_asyncio/test_locks.py"],
    "calendar.py": ["test/test_calendar.py"],
    "concurrent/futures/thread.py": ["test/test_concurrent_futures.py"],
    "configparser.py": ["test/test_configparser.py"],
    "contextlib.py": ["test/test_contextlib.py", "test/test_contextlib_async.py"],
    "csv.py": ["test/test_csv.py"],
    "dataclasses.py": ["test/test_dataclasses/*", "test/test_dataclasses.py", "test/dataclass_*.py"],
    "fractions.py": ["test/test_fractions.py"],
    "ftplib.py": ["test/test_ftplib.py"],
    "graphlib.py": ["test/test_graphlib.py"],
    "heapq.py": ["test/test_heapq.py"],
    "html/parser.py": ["test/test_htmlparser.py"],
    "http/cookies.py": ["test/test_http_cookies.py"],
    "json/encoder.py": ["test/test_json/*"],
    "mailbox.py": ["test/test_mailbox.py"],
    "pathlib.py": ["test/test_pathlib.py", "test/test_pathlib/*"],
    "queue.py": ["test/test_queue.py"],
    "random.py": ["test/test_random.py"],
    "shlex.py": ["test/test_shlex.py"],
    "textwrap.py": ["test/test_textwrap.py"],
    "urllib/robotparser.py": ["test/test_robotparser.py"],
    "wsgiref/headers.py": ["test/test_wsgiref.py"],
}
VALIDATION = {
    "asyncio/queues.py": ["test/test_asyncio/test_queues.py"],
    "email/headerregistry.py": ["test/test_email/test_headerregistry.py"],
    "gettext.py": ["test/test_gettext.py"],
    "plistlib.py": ["test/test_plistlib.py"],
    "selectors.py": ["test/test_selectors.py"],
    "shelve.py": ["test/test_shelve.py"],
    "tempfile.py": ["test/test_tempfile.py"],
    "unittest/loader.py": ["unittest/test/test_loader.py", "test/test_unittest/test_loader.py"],
    "xml/sax/saxutils.py": ["test/test_sax.py"],
}
# Generated tables and files in odd encodings teach nothing about Python.
SKIPPED = [
    "*site-packages/*", "*__pycache__/*", "encodings/*", "pydoc_data/*", "html/entities.py", "_sysconfigdata*",
    "lib2to3/tests/data/*", "test/encoded_modules/*", "config-*", "lib-dynload/*",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------- target model


@dataclass(frozen=True)
class TargetConfig:
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    intermediate: int = 640
    context: int = 1024
    theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-6).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotary_table(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [..., width / 2]: one angle per rotated pair."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """DeepSeek's rotation: pairs are neighbours (0,1), (2,3), ...; the result holds the evens, then the odds."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The usual rotation: pairs are (0, width / 2), (1, width / 2 + 1), ..."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are read from one small row per token."""

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = c = config
        self.q_a_proj = linear(c.hidden, c.q_rank)
        self.q_a_layernorm = RMSNorm(c.q_rank)
        self.q_b_proj = linear(c.q_rank, c.heads * (c.nope + c.rope))
        self.kv_a_proj_with_mqa = linear(c.hidden, c.kv_rank + c.rope)
        self.kv_a_layernorm = RMSNorm(c.kv_rank)
        self.kv_b_proj = linear(c.kv_rank, c.heads * (c.nope + c.value))
        self.o_proj = linear(c.heads * c.value, c.hidden)

    def queries_and_row(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, hidden] -> q_nope [B, T, H, nope], q_rope [B, T, H, rope], latent [B, T, rank], k_rope [B, T, rope]

        (queries of every head; one latent and one rotated key for all heads)."""
        c = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.heads, c.nope + c.rope))
        q_nope, q_rope = q.split([c.nope, c.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_rank, c.rope], dim=-1)
        q_rope = rotate_interleaved(q_rope, cos[..., None, :], sin[..., None, :])
        return q_nope, q_rope, self.kv_a_layernorm(latent), rotate_interleaved(k_rope, cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        q_nope, q_rope, latent, k_rope = self.queries_and_row(x, cos, sin)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (c.heads, c.nope + c.value)).split([c.nope, c.value], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope[:, :, None, :].expand(-1, -1, c.heads, -1)], dim=-1).transpose(1, 2)
        # Values padded to the keys' width: the fused attention kernels want both equal.
        v = F.pad(v, (0, c.nope + c.rope - c.value)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.value]
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, position: int) -> Tensor:
        """One token per sequence, x [B, 1, hidden], against cache [B, T, rank + rope], in the absorbed form."""
        c = self.config
        q_nope, q_rope, latent, k_rope = self.queries_and_row(x, cos, sin)
        cache[:, position] = torch.cat([latent, k_rope], dim=-1)[:, 0].to(cache.dtype)
        rows = cache[:, : position + 1]
        up = self.kv_b_proj.weight.view(c.heads, c.nope + c.value, c.kv_rank)
        q = torch.einsum("bhn,hnr->bhr", q_nope[:, 0], up[:, : c.nope].to(q_nope.dtype))
        q = torch.cat([q, q_rope[:, 0].to(q.dtype)], dim=-1).to(cache.dtype)
        scores = (q @ rows.transpose(1, 2)).float() * (c.nope + c.rope) ** -0.5
        mixed = scores.softmax(-1).to(cache.dtype) @ rows[..., : c.kv_rank]
        values = torch.einsum("bhr,hvr->bhv", mixed, up[:, c.nope :].to(mixed.dtype))
        return self.o_proj(values.flatten(1))[:, None]


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TargetLayer(nn.Module):
    def __init__(self, config: TargetConfig, dropout: float):
        super().__init__()
        self.self_attn = LatentAttention(config)
        self.mlp = GatedMLP(config.hidden, config.intermediate)
        self.input_layernorm = RMSNorm(config.hidden)
        self.post_attention_layernorm = RMSNorm(config.hidden)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, position: int) -> Tensor:
        x = x + self.self_attn.step(self.input_layernorm(x), cos, sin, cache, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Parameter names are Hugging Face's, without the leading `model.`."""

    def __init__(self, config: TargetConfig, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(VOCABULARY, config.hidden)
        self.layers = nn.ModuleList(TargetLayer(config, dropout) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        initialise(self)

    def forward(self, ids: Tensor, feature_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """ids [B, T] at positions 0..T-1 -> logits [B, T, V] and the residual stream after the named layers."""
        cos, sin = rotary_table(torch.arange(ids.shape[1], device=ids.device), self.config.rope, self.config.theta)
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        features = []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if index in feature_layers:
                features.append(x)
        return self.head(x), torch.cat(features, dim=-1) if features else None

    def head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def step(self, ids: Tensor, caches: Tensor, position: int) -> Tensor:
        """ids [B] at `position` -> logits [B, V]; caches [layers, B, T, rank + rope] gets this token's rows."""
        where = torch.full((1,), position, device=ids.device)
        cos, sin = rotary_table(where, self.config.rope, self.config.theta)
        x = self.embed_tokens(ids[:, None])
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.step(x, cos, sin, cache, position)
        return self.head(x)[:, 0]


def initialise(model: nn.Module) -> None:
    """Small embeddings, unit-gain matrices, and branches that start at zero: a fresh layer is the identity."""
    for name, parameter in model.named_parameters():
        if "embed" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim == 2:
            branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.0 if branch_end else parameter.shape[1] ** -0.5)


# ---------------------------------------------------------------------------------------------------------- drafter


@dataclass(frozen=True)
class DrafterConfig:
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    intermediate: int = 640
    block: int = 16  # the root and 15 masks
    feature_layers: tuple[int, ...] = (0, 3, 5)
    theta: float = 10000.0


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attention under a mask, by flex attention (skips the masked tiles; GPU only) or PyTorch's dense one."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]


class BlockAttention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        width = config.hidden // config.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, linear(config.hidden, config.hidden))
        self.q_norm, self.k_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, context: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | BlockMask) -> Tensor:
        q_cos, q_sin, k_cos, k_sin = rotary
        rows = torch.cat([context, x], dim=1)
        shape = (self.config.heads, -1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(rows).unflatten(-1, shape)).transpose(1, 2)
        v = self.v_proj(rows).unflatten(-1, shape).transpose(1, 2)
        attended = attend(rotate_half(q, q_cos, q_sin), rotate_half(k, k_cos, k_sin), v, mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config.hidden, config.intermediate)
        self.input_layernorm = RMSNorm(config.hidden)
        self.post_attention_layernorm = RMSNorm(config.hidden)

    def forward(self, x: Tensor, context: Tensor, rotary: tuple[Tensor, ...], mask: Tensor | BlockMask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Guesses the 15 bytes after a root from the target's hidden states of everything before the root.

    Many roots of one sequence go through at once: their blocks lie one after the other in the query axis, and the mask
    lets each block see its own 16 rows and the context rows before its root.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.fc = linear(config.hidden * len(config.feature_layers), config.hidden)
        self.hidden_norm = RMSNorm(config.hidden)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        initialise(self)

    def forward(
        self, ids: Tensor, features: Tensor, roots: Tensor, mask: Tensor | BlockMask, embedding: Tensor
    ) -> Tensor:
        """ids [B, T], features [B, T, 3 * hidden], roots [R] positions -> logits [B, R, 15, V]."""
        c = self.config
        batch, length = ids.shape
        positions = (roots[:, None] + torch.arange(c.block, device=ids.device)).flatten()
        context_positions = torch.arange(length, device=ids.device)
        width = c.hidden // c.heads
        q_table = rotary_table(positions, width, c.theta)
        k_table = rotary_table(torch.cat([context_positions, positions]), width, c.theta)
        blocks = torch.full((batch, len(roots), c.block), MASK, device=ids.device, dtype=torch.long)
        blocks[:, :, 0] = ids[:, roots]
        x = F.embedding(blocks.flatten(1), embedding).to(features.dtype)
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, context, (*q_table, *k_table), mask)
        x = x.unflatten(1, (len(roots), c.block))[:, :, 1:]
        return F.linear(self.norm(x), embedding.to(x.dtype))


def visible(roots: Tensor, block: int, length: int) -> Callable[..., Tensor]:
    """The rule of the mask, in flex attention's form: (batch, head, query row, key row) -> may see."""

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own_block = (key >= length) & ((key - length) // block == query // block)
        before_root = (key < length) & (key < roots[query // block])
        return before_root | own_block

    return rule


def dense_mask(roots: Tensor, block: int, length: int) -> Tensor:
    rows = torch.arange(len(roots) * block, device=roots.device)
    keys = torch.arange(length + len(roots) * block, device=roots.device)
    zero = torch.zeros((), dtype=torch.long, device=roots.device)
    return visible(roots, block, length)(zero, zero, rows[:, None], keys[None, :])


def flex_mask(roots: Tensor, block: int, length: int) -> BlockMask:
    rows = len(roots) * block
    return create_block_mask(visible(roots, block, length), None, None, rows, length + rows, device=str(roots.device))


# ------------------------------------------------------------------------------------------------------------- data


@dataclass
class Corpus:
    """Token streams: `BOS document BOS document ...`; the modules kept apart, each under its name."""

    train: np.ndarray
    validation: dict[str, bytes]
    held_out: dict[str, bytes]
    files: int


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def python_sources(root: Path) -> Iterator[tuple[str, bytes]]:
    """Every UTF-8 Python file under root as (name relative to root, bytes), in name order."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = b"" if matches(name, SKIPPED) else path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 100:
            yield name, text


def stream(documents: Iterable[bytes]) -> np.ndarray:
    parts = [np.concatenate([[BOS], np.frombuffer(text, np.uint8)]) for text in documents]
    return np.concatenate([*parts, [BOS]]).astype(np.int16)


def load_corpus(root: Path) -> Corpus:
    hidden_tests = [pattern for tests in [*HELD_OUT.values(), *VALIDATION.values()] for pattern in tests]
    train: list[bytes] = []
    validation: dict[str, bytes] = {}
    held_out: dict[str, bytes] = {}
    for name, text in python_sources(root):
        if name in HELD_OUT:
            held_out[name] = text
        elif name in VALIDATION:
            validation[name] = text
        elif not matches(name, hidden_tests):
            train.append(text)
    missing = (HELD_OUT.keys() - held_out.keys()) | (VALIDATION.keys() - validation.keys())
    if missing or not train:
        raise SystemExit(f"--source {root}: not a standard library, it lacks {sorted(missing)}")
    random.Random(0).shuffle(train)  # neighbours in a window should not always be neighbours in the library
    return Corpus(stream(train), validation, held_out, len(train))


class Windows:
    """Random training windows as inference will see them: BOS at position 0, then text from the start of a line."""

    def __init__(self, tokens: np.ndarray, device: torch.device):
        is_start = np.zeros(len(tokens), bool)
        is_start[1:] = (tokens[:-1] == ord("\n")) | (tokens[:-1] == BOS)
        is_start[0] = False
        starts = np.maximum.accumulate(np.where(is_start, np.arange(len(tokens)), 1))
        self.line_start = torch.from_numpy(starts).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        self.generator = torch.Generator(device).manual_seed(0)

    def draw(self, batch: int, length: int) -> Tensor:
        """[batch, length + 1] int64, of which the first `length` are inputs and the last `length` are targets."""
        device = self.tokens.device
        high = len(self.tokens) - length - 1
        anywhere = torch.randint(1, high, (batch,), device=device, generator=self.generator)
        # One window in eight starts inside a line, so that a cut-off prompt is not a surprise.
        mid_line = torch.rand(batch, device=device, generator=self.generator) < 0.125
        starts = torch.where(mid_line, anywhere, self.line_start[anywhere])
        text = self.tokens[starts[:, None] + torch.arange(length, device=device)].long()
        return F.pad(text, (1, 0), value=BOS)


def prompts_of(held_out: dict[str, bytes], per_module: int = 2, seed: int = 5) -> list[dict[str, str]]:
    """Prompts of 40-400 bytes that begin at a function or class and stop anywhere after its first line."""
    rng = random.Random(seed)
    prompts = []
    for module, text in held_out.items():
        lines = text.decode("utf-8").splitlines(keepends=True)
        openings = [i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class ", "async def "))]
        for index in sorted(rng.sample(openings, min(per_module, len(openings)))):
            body = "".join(lines[index : index + 40])
            prompt = body[: max(len(lines[index]), rng.randint(40, 400))]
            if prompt.isascii() and 40 <= len(prompt) <= 400:
                prompts.append({"module": module, "text": prompt})
    return prompts


# --------------------------------------------------------------------------------------------------------- training


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix to each of [n, rows, columns], by Newton-Schulz iteration in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


class Optimiser:
    """Muon for the matrices, Adam for the embedding and the norms; matrices of one shape are updated together."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, decay: float):
        self.muon_rate, self.decay = muon_rate, decay
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        others = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                shapes.setdefault(parameter.shape, []).append(parameter)
            else:
                others.append(parameter)
        self.groups = list(shapes.values())
        self.momentum = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.adam = torch.optim.Adam(others, lr=adam_rate, betas=(0.9, 0.95), eps=1e-10)
        self.adam_rate = adam_rate

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the base learning rates; gradients are cleared."""
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            gradient = torch.stack([p.grad for p in group])
            momentum.lerp_(gradient, 0.05)
            update = orthogonalise(gradient.lerp(momentum, 0.95))
            rate = self.muon_rate * scale
            shape_factor = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * shape_factor)
        self.adam.param_groups[0]["lr"] = self.adam_rate * scale
        self.adam.step()
        for parameter in [p for g in self.groups for p in g] + self.adam.param_groups[0]["params"]:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        for mine, saved in zip(self.momentum, state["momentum"], strict=True):  # type: ignore[call-overload]
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]


@dataclass
class Phase:
    """How far a phase of training is: by steps or by seconds, whichever is further. Survives a restart."""

    steps: int
    seconds: float
    step: int = 0
    spent: float = 0.0
    started: float = 0.0

    def begin(self) -> None:
        self.started = time.monotonic() - self.spent

    def fraction(self) -> float:
        self.spent = time.monotonic() - self.started
        return max(self.step / self.steps, self.spent / self.seconds)

    def rate(self) -> float:
        """Warm-up over 100 steps, flat, then straight down to 0 over the last 60 %."""
        return min(1.0, (self.step + 1) / 100) * min(1.0, (1 - self.fraction()) / 0.6)


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def rounded_to_float16(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().half().float() for name, value in model.state_dict().items()}


@torch.no_grad()
def bits_per_byte(target: Target, tokens: np.ndarray, context: int) -> float:
    """Mean loss in bits over windows of `context` positions that don't overlap: BOS, then text cut anywhere."""
    device = target.embed_tokens.weight.device
    text = torch.from_numpy(tokens[1:].astype(np.int64))
    windows = text[: len(text) // context * context].view(-1, context).to(device)
    total = 0.0
    for batch in windows.split(64):
        logits, _ = target(F.pad(batch[:, :-1], (1, 0), value=BOS))
        total += F.cross_entropy(logits.float().flatten(0, 1), batch.flatten(), reduction="sum").item()
    return total / windows.numel() / math.log(2)


def save_state(path: Path, **content: object) -> None:
    """Written beside and renamed, so that an interruption never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def train_target(corpus: Corpus, args: argparse.Namespace, device: torch.device) -> tuple[Target, Report]:
    """Next-byte training with dropout; the weights with the best validation loss (as float16) are kept."""
    model = Target(TargetConfig(), args.dropout).to(device)
    optimiser = Optimiser(model, args.muon_rate, args.adam_rate, args.decay)
    phase = Phase(args.target_steps, args.target_seconds)
    best: Report = {"bits": math.inf}
    path = args.state / "target.pt"
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimiser.load(saved["optimiser"])
        phase, best = Phase(**saved["phase"]), saved["best"]
        phase.steps, phase.seconds = args.target_steps, args.target_seconds
    for layer in model.layers if args.compile else ():
        layer.compile(dynamic=False)
    windows = Windows(corpus.train, device)
    windows.generator.manual_seed(args.seed * 1_000_003 + phase.step)
    running, last_check = torch.zeros((), device=device), phase.fraction() if phase.step else 0.0
    steps_since = 0
    phase.begin()
    with progress_bar() as bar:
        task = bar.add_task("target", total=100)
        while phase.fraction() < 1:
            batch = windows.draw(args.batch, args.window)
            model.train()
            with autocast(device):
                logits, _ = model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimiser.step(phase.rate())
            running += loss.detach()
            phase.step += 1
            steps_since += 1
            if phase.step % 20 == 0 and device.type == "cuda":
                torch.cuda.synchronize()  # so that the clock, and with it the schedule, is not ahead of the work
            bar.update(task, completed=int(100 * min(1, phase.fraction())))
            if phase.fraction() - last_check >= 1 / args.checks or phase.fraction() >= 1:
                train_bits = running.item() / steps_since / math.log(2)
                check_target(model, corpus, phase, best, train_bits, args.eval_bytes)
                running.zero_()
                steps_since, last_check = 0, phase.fraction()
                save_state(path, model=model.state_dict(), optimiser=optimiser.state(), phase=asdict(phase), best=best)
    final = Target(TargetConfig()).to(device).eval()
    final.load_state_dict(best["weights"])
    report = {"steps": phase.step, "best_step": best["step"], "seconds": round(phase.spent, 1)}
    report |= {"training_bits_per_byte_with_dropout": best["train_bits"], "validation_bits_per_byte": best["bits"]}
    return final, {**report, "machine": machine(device), "settings": settings(args)}


def check_target(model: Target, corpus: Corpus, phase: Phase, best: Report, train_bits: float, eval_bytes: int) -> None:
    """Measure the float16 weights on the validation modules; keep them if they are the best so far."""
    rounded = rounded_to_float16(model)
    judge = Target(model.config).to(model.embed_tokens.weight.device).eval()
    judge.load_state_dict(rounded)
    bits = bits_per_byte(judge, stream(corpus.validation.values())[:eval_bytes], model.config.context)
    if bits < best["bits"]:
        best |= {"bits": bits, "weights": rounded, "step": phase.step, "train_bits": train_bits}
    console.print(
        f"target step {phase.step:6d}  {phase.spent:5.0f} s  bits per byte: training {train_bits:.3f}  "
        f"validation {bits:.3f}"
    )


def load_target(folder: Path, device: torch.device) -> tuple[Target, Report]:
    """The target that an earlier run exported to `folder`, and how it was trained."""
    weights = load_file(folder / "target" / "model.safetensors")
    target = Target(TargetConfig()).to(device).eval()
    target.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return target, json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["target"]


def load_drafter(folder: Path, device: torch.device) -> tuple[Drafter, Report]:
    weights = load_file(folder / "drafter" / "model.safetensors")
    drafter = Drafter(DrafterConfig()).to(device).eval()
    drafter.load_state_dict({name: value.float() for name, value in weights.items()})
    return drafter, json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["drafter"]


def plain(target: Target) -> Target:
    """The same model without compiled layers: the figures are taken in ordinary float32 arithmetic."""
    copy = Target(target.config).to(target.embed_tokens.weight.device).eval()
    copy.load_state_dict(target.state_dict())
    return copy


@torch.no_grad()
def continue_text(
    target: Target, tokens: Tensor, known: Tensor, temperature: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Fill tokens [B, T] from position known[b] on with the target's own choices (temperature 0: greedy).

    Prompts of different lengths run together: every sequence advances one position at a time, and as long as it is
    inside its prompt the prediction is overruled by the prompt.
    """
    c, device = target.config, tokens.device
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cuda") else torch.float32
    caches = torch.zeros(c.layers, *tokens.shape, c.kv_rank + c.rope, device=device, dtype=dtype)
    tokens = tokens.clone()
    for position in range(tokens.shape[1] - 1):
        logits = target.step(tokens[:, position], caches, position)
        if temperature > 0:
            noise = torch.rand(logits.shape, device=device, generator=generator).clamp_min(1e-20)
            logits = logits.float() / temperature - (-noise.log()).log()  # Gumbel-max: argmax is then a sample
        inside = position + 1 < known
        tokens[:, position + 1] = torch.where(inside, tokens[:, position + 1], logits.argmax(-1))
    return tokens


@dataclass
class Pool:
    """Texts [n, T] whose first `prompt` tokens are real and whose rest the target wrote."""

    tokens: Tensor
    prompt: int


@torch.no_grad()
def write_pool(target: Target, windows: Windows, count: int, length: int, prompt: int, temperature: float) -> Pool:
    device = windows.tokens.device
    tokens = windows.draw(count, length - 1)
    known = torch.full((count,), prompt, device=device)
    with autocast(device):
        tokens = continue_text(target, tokens, known, temperature, windows.generator)
    return Pool(tokens.to(torch.int16), prompt)


def write_texts(target: Target, corpus: Corpus, args: argparse.Namespace, device: torch.device) -> list[Pool]:
    """Let the target write: greedy and sampled continuations of training prompts of many lengths."""
    windows = Windows(corpus.train, device)
    windows.generator.manual_seed(args.seed + 1)
    rng = random.Random(args.seed + 2)
    pools: list[Pool] = []
    started = time.monotonic()
    with progress_bar() as bar:
        for index in bar.track(range(args.pools), description="writing"):
            prompt = rng.randint(args.pool_length // 20, args.pool_length * 6 // 10)
            temperature = 0.0 if index % 4 else 0.7
            pools.append(write_pool(target, windows, args.pool_size, args.pool_length, prompt, temperature))
            if len(pools) >= 2 and time.monotonic() - started > args.write_seconds:
                break
    console.print(f"the target wrote {len(pools)} batches of text in {time.monotonic() - started:.0f} s")
    return pools


def draft_loss(drafter_logits: Tensor, target_logits: Tensor, argmax_share: float) -> Tensor:
    """How far the drafter is from the target at each depth, the near depths weighted most: exp(-j / 7).

    Two parts: the KL divergence to the target's distribution, and the cross-entropy of the target's first choice, which
    is what greedy decoding will ask for.
    """
    log_q = drafter_logits.float().log_softmax(-1)
    log_p = target_logits.float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    choice = -log_q.gather(-1, log_p.argmax(-1, keepdim=True))[..., 0]
    weights = torch.exp(-torch.arange(kl.shape[-1], device=kl.device) / 7)
    per_depth = ((1 - argmax_share) * kl + argmax_share * choice).mean((0, 1))
    return (per_depth * weights).sum() / weights.sum()


def draw_roots(count: int, low: int, high: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`count` distinct sorted positions in [low, high). Sorted, so that neighbouring blocks see alike contexts."""
    return (torch.randperm(high - low, device=device, generator=generator)[:count] + low).sort().values


def train_drafter(
    target: Target, corpus: Corpus, args: argparse.Namespace, device: torch.device
) -> tuple[Drafter, Report]:
    """Distil the target into the drafter at random roots of real and of self-written text."""
    config = DrafterConfig()
    drafter = Drafter(config).to(device)
    optimiser = Optimiser(drafter, args.drafter_muon_rate, args.adam_rate, args.decay)
    phase = Phase(args.drafter_steps, args.drafter_seconds)
    path = args.state / "drafter.pt"
    if path.exists():
        saved = torch.load(path, map_location=device)
        drafter.load_state_dict(saved["model"])
        optimiser.load(saved["optimiser"])
        phase = Phase(**saved["phase"])
        phase.steps, phase.seconds = args.drafter_steps, args.drafter_seconds
    make_mask = flex_mask if args.attention == "flex" else dense_mask
    run_drafter = torch.compile(drafter, dynamic=False) if args.compile else drafter
    run_loss = torch.compile(draft_loss) if args.compile else draft_loss
    for layer in target.layers if args.compile else ():
        layer.compile(dynamic=False)
    windows = Windows(corpus.train, device)
    windows.generator.manual_seed(args.seed * 1_000_003 + phase.step)
    rng = random.Random(args.seed + phase.step)
    last_check, running, steps_since = -1.0, torch.zeros((), device=device), 0
    pools = write_texts(target, corpus, args, device)
    phase.begin()
    with progress_bar() as bar:
        task = bar.add_task("drafter", total=100)
        while phase.fraction() < 1:
            if rng.random() < args.real_text:
                ids, low = windows.draw(args.draft_batch, args.window - 1), 1
            else:
                pool = rng.choice(pools)
                picked = torch.randint(
                    len(pool.tokens), (args.draft_batch,), device=device, generator=windows.generator
                )
                ids, low = pool.tokens[picked].long(), pool.prompt - 1
            roots = draw_roots(args.roots, low, ids.shape[1] - config.block, windows.generator, device)
            predicting = roots[:, None] + torch.arange(config.block - 1, device=device)
            with autocast(device):
                with torch.no_grad():
                    logits, features = target(ids, config.feature_layers)
                mask = make_mask(roots, config.block, ids.shape[1])
                drafted = run_drafter(ids, features, roots, mask, target.embed_tokens.weight.detach())
            loss = run_loss(drafted, logits[:, predicting], args.argmax_share)
            loss.backward()
            optimiser.step(phase.rate())
            running += loss.detach()
            phase.step += 1
            steps_since += 1
            if phase.step % 20 == 0 and device.type == "cuda":
                torch.cuda.synchronize()
            bar.update(task, completed=int(100 * min(1, phase.fraction())))
            if phase.fraction() - last_check >= 1 / args.checks or phase.fraction() >= 1:
                console.print(
                    f"drafter step {phase.step:6d}  {phase.spent:5.0f} s  loss {running.item() / steps_since:.4f}"
                )
                running.zero_()
                steps_since, last_check = 0, phase.fraction()
                save_state(path, model=drafter.state_dict(), optimiser=optimiser.state(), phase=asdict(phase))
    final = Drafter(config).to(device).eval()
    final.load_state_dict(rounded_to_float16(drafter))
    report = {"steps": phase.step, "seconds": round(phase.spent, 1)}
    return final, {**report, "machine": machine(device), "settings": settings(args)}


# ------------------------------------------------------------------------------------------------------- evaluation


@dataclass
class Rehearsal:
    """What the target writes after one prompt, and what the drafter would have said at each of its positions."""

    text: list[int]
    log_probs: np.ndarray  # [len(text), 15, V] float32, best first
    token_ids: np.ndarray  # [len(text), 15, V]


@torch.no_grad()
def rehearse(
    target: Target, drafter: Drafter, prompts: list[dict[str, str]], new_tokens: int, temperature: float
) -> list[Rehearsal]:
    """Speculative decoding reproduces the target's own text, so the text is made once and rounds are replayed on it."""
    device = target.embed_tokens.weight.device
    encoded = [[BOS, *prompt["text"].encode()] for prompt in prompts]
    known = torch.tensor([len(ids) for ids in encoded], device=device)
    tokens = torch.zeros(len(encoded), int(known.max()) + new_tokens, dtype=torch.long, device=device)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    tokens = continue_text(target, tokens, known, temperature, torch.Generator(device).manual_seed(0))
    rehearsals = []
    for row, start in zip(tokens, known.tolist(), strict=True):
        row = row[None, : start + new_tokens]
        text = row[0, start:].tolist()
        text = text[: text.index(BOS) + 1] if BOS in text else text
        _, features = target(row, drafter.config.feature_layers)
        found = []
        for roots in torch.arange(start - 1, start - 1 + len(text), device=device).split(32):
            mask = dense_mask(roots, drafter.config.block, row.shape[1])
            logits = drafter(row, features, roots, mask, target.embed_tokens.weight)[0]
            found.append(logits.log_softmax(-1).sort(descending=True, stable=True))
        log_probs = torch.cat([part.values for part in found]).cpu().numpy()
        rehearsals.append(Rehearsal(text, log_probs, torch.cat([part.indices for part in found]).cpu().numpy()))
    return rehearsals


def chain_length(token_ids: np.ndarray, truth: list[int]) -> int:
    """How many of the drafter's first choices agree with the text, before the first that doesn't."""
    count = 0
    while count < min(len(token_ids), len(truth)) and token_ids[count, 0] == truth[count]:
        count += 1
    return count


def tree_length(log_probs: np.ndarray, token_ids: np.ndarray, truth: list[int], budget: int) -> int:
    """How deep the text runs inside the tree of the `budget` most probable prefixes (DDTree, Algorithm 1)."""
    depths, k = log_probs.shape
    queue = [(-float(log_probs[0, 0]), (0,))]
    tree = set()
    while queue and len(tree) < budget:
        cost, ranks = heapq.heappop(queue)
        tree.add(tuple(int(token_ids[d, r]) for d, r in enumerate(ranks)))
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < k:
            step = float(log_probs[depth, rank]) - float(log_probs[depth, rank + 1])
            heapq.heappush(queue, (cost + step, (*ranks[:-1], rank + 1)))
        if depth + 1 < depths:
            heapq.heappush(queue, (cost - float(log_probs[depth + 1, 0]), (*ranks, 0)))
    count = 0
    while count < len(truth) and tuple(truth[: count + 1]) in tree:
        count += 1
    return count


def chain(log_probs: np.ndarray, token_ids: np.ndarray, truth: list[int]) -> int:
    return chain_length(token_ids, truth)


def tree(budget: int) -> Callable[[np.ndarray, np.ndarray, list[int]], int]:
    return lambda log_probs, token_ids, truth: tree_length(log_probs, token_ids, truth, budget)


def tokens_per_round(
    rehearsals: list[Rehearsal], accepted: Callable[[np.ndarray, np.ndarray, list[int]], int], temperature: float = 1.0
) -> float:
    """Replay the rounds: each emits the accepted tokens and one more, the target's own."""
    emitted = rounds = 0
    for rehearsal in rehearsals:
        done = 0
        while done < len(rehearsal.text):
            log_probs = rehearsal.log_probs[done] / temperature
            log_probs = log_probs - np.log(np.exp(log_probs).sum(-1, keepdims=True))
            done += accepted(log_probs, rehearsal.token_ids[done], rehearsal.text[done:]) + 1
            rounds += 1
        emitted += len(rehearsal.text)
    return emitted / rounds


def calibrate(target: Target, drafter: Drafter, corpus: Corpus, args: argparse.Namespace) -> float:
    """Sharpen the drafter by the temperature whose trees are accepted furthest on the validation modules.

    The first choices, and so the chain, stay the same. A tree spends its budget by the probabilities, and those of a
    drafter that also learned the target's second thoughts are too flat for greedy decoding. The temperature is
    multiplied into the last norm's weight, so the checkpoint's format knows nothing of it.
    """
    rehearsals = rehearse(target, drafter, prompts_of(corpus.validation, 4), args.new_tokens, 0.0)
    temperatures = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
    lengths = {t: tokens_per_round(rehearsals, tree(32), t) for t in temperatures}
    best = max(temperatures, key=lambda t: lengths[t])
    console.print("tree of 32, tokens per round by temperature:", {t: round(n, 3) for t, n in lengths.items()})
    with torch.no_grad():
        drafter.norm.weight.copy_((drafter.norm.weight / best).half().float())
    return best


def repetition(text: list[int], span: int = 32) -> float:
    """Share of the text at which the last `span` tokens have stood twice before: what a loop looks like."""
    seen: dict[tuple[int, ...], int] = {}
    count = 0
    for end in range(span, len(text) + 1):
        key = tuple(text[end - span : end])
        count += seen.get(key, 0) >= 2
        seen[key] = seen.get(key, 0) + 1
    return count / len(text)


def first_tokens(rehearsals: list[Rehearsal], count: int) -> list[Rehearsal]:
    return [Rehearsal(r.text[:count], r.log_probs[:count], r.token_ids[:count]) for r in rehearsals]


def acceptance(
    target: Target, drafter: Drafter, corpus: Corpus, args: argparse.Namespace, temperature: float
) -> Report:
    """Tokens per round on the target's continuations of the held-out prompts, in full and for their beginnings."""
    rehearsals = rehearse(target, drafter, prompts_of(corpus.held_out), args.new_tokens, temperature)
    report: Report = {"prompts": len(rehearsals), "temperature": temperature, "tokens_per_round": []}
    for count in sorted({n for n in (50, 100) if n < args.new_tokens} | {args.new_tokens}):
        part = first_tokens(rehearsals, count)
        row: Report = {"new_tokens": count, "chain": round(tokens_per_round(part, chain), 4)}
        row |= {f"tree_{budget}": round(tokens_per_round(part, tree(budget)), 4) for budget in (8, 16, 32, 64)}
        row["tree_32_over_chain"] = round(row["tree_32"] / row["chain"], 4)
        report["tokens_per_round"].append(row)
    report["repetition"] = round(sum(repetition(r.text) for r in rehearsals) / len(rehearsals), 4)
    return report


def losses(target: Target, corpus: Corpus, args: argparse.Namespace) -> Report:
    """Bits per byte, in float32 from the float16 weights."""

    def bits(tokens: np.ndarray) -> float:
        return round(bits_per_byte(target, tokens[: args.eval_bytes], args.window), 4)

    return {
        "held_out_bits_per_byte": bits(stream(corpus.held_out.values())),
        "held_out_bits_per_byte_by_module": {name: bits(stream([text])) for name, text in corpus.held_out.items()},
        "training_bits_per_byte": bits(corpus.train[:1_000_000]),
    }


# ----------------------------------------------------------------------------------------------------------- export


def target_config_json(config: TargetConfig) -> dict[str, object]:
    """Hugging Face's names for the target's shape: what `DeepseekV3ForCausalLM.from_pretrained` reads."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCABULARY,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "q_lora_rank": config.q_rank,
        "kv_lora_rank": config.kv_rank,
        "qk_nope_head_dim": config.nope,
        "qk_rope_head_dim": config.rope,
        "v_head_dim": config.value,
        "first_k_dense_replace": config.layers,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": config.context,
        "rope_theta": config.theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": BOS,
        "torch_dtype": "float16",
    }


def drafter_config_json(config: DrafterConfig, context: int) -> dict[str, object]:
    return {
        "architectures": ["DFlashDrafter"],
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "head_dim": config.hidden // config.heads,
        "intermediate_size": config.intermediate,
        "block_size": config.block,
        "target_layer_ids": list(config.feature_layers),
        "mask_token_id": MASK,
        "rope_theta": config.theta,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "torch_dtype": "float16",
    }


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(target: Target, drafter: Drafter, out: Path) -> None:
    """Both models as Hugging Face folders with float16 safetensors; the tied output head is not stored."""
    for name, model, prefix in (("target", target, "model."), ("drafter", drafter, "")):
        (out / name).mkdir(parents=True, exist_ok=True)
        tensors = {prefix + key: value.half().cpu().contiguous() for key, value in model.state_dict().items()}
        save_file(tensors, out / name / "model.safetensors", metadata={"format": "pt"})
        (out / name / "model.safetensors").chmod(0o644)
    write_json(out / "target" / "config.json", target_config_json(target.config))
    write_json(out / "drafter" / "config.json", drafter_config_json(drafter.config, target.config.context))


def model_card(metrics: Report) -> str:
    """README.md of the exported folder, every figure taken from metrics.json."""
    target, drafter = metrics["target"], metrics["drafter"]
    rows = []
    for name, report in (("greedy", metrics["acceptance"]), ("sampled, temperature 1", metrics["acceptance_sampled"])):
        for row in report["tokens_per_round"]:
            figures = [row["chain"], *(row[f"tree_{budget}"] for budget in (8, 16, 32, 64))]
            cells = " | ".join(f"{figure:.2f}" for figure in [*figures, row["tree_32_over_chain"]])
            rows.append(f"| {name} | {row['new_tokens']} | {cells} |")
    modules = [f"| {name} | {bits:.2f} |" for name, bits in target["held_out_bits_per_byte_by_module"].items()]
    return CARD.format(
        metrics=metrics,
        target=target,
        drafter=drafter,
        megabytes=metrics["training_bytes"] / 1e6,
        greedy=metrics["acceptance"],
        dropout=target["settings"]["dropout"],
        texts=drafter["settings"]["draft_batch"],
        roots=drafter["settings"]["roots"],
        target_tokens=target["steps"] * target["settings"]["batch"] * target["settings"]["window"] / 1e6,
        acceptance="\n".join(rows),
        modules="\n".join(modules),
        validation=textwrap.fill(", ".join(VALIDATION), 118),
    )


CARD = """# tiny_stdlib: a small target and its drafter

Written by `examples/train_tiny_model.py`; the figures are those of `metrics.json` beside this file.

**What it is for.** To show and test speculative decoding with a draft tree on real text, in seconds, on a laptop. It is
no coding assistant: it writes text that looks like the Python standard library and means nothing.

| | target | drafter |
|---|---|---|
| architecture | DeepSeek-V3 (multi-head latent attention, SwiGLU, all layers dense), Hugging Face layout | DFlash \
block diffusion, Qwen3-style layers |
| size | 4.2 M parameters: 6 layers, width 256, 8 heads, latent 64 + rope 16 | 1.7 M: 2 layers, width 256, 8 heads |
| reads | bytes, BOS = end of text (256), MASK (257); 1024 positions | hidden states after target layers 0, 3, 5 |
| gives | the next byte | the 15 bytes after the root, in one pass; embedding and head are the target's |
| stored | `target/`, float16; `transformers.DeepseekV3ForCausalLM` loads it | `drafter/`, float16 |

## Data
The source of the {metrics[source]}: {metrics[training_files]} UTF-8 files, {megabytes:.1f} MB, tests included;
generated tables (encodings, entities, topics) left out. The held-out modules below and their tests were fixed before
training and seen by neither model. Nine more modules, left out of the training with their tests, decided when to stop
and the drafter's temperature:
{validation}.

## Training
One {target[machine][device]}, PyTorch {target[machine][torch]}, {target[machine][date]}.
* Target: {target[steps]} steps ({target_tokens:.0f} M bytes) in {target[seconds]:.0f} s, Muon for the matrices and Adam
  for the rest, dropout {dropout}; a window is `BOS` and then text, mostly from the start of a line. The weights with
  the best validation loss were kept.
* Drafter: {drafter[steps]} steps in {drafter[seconds]:.0f} s, each of {texts} texts with {roots} roots: a quarter real
  source, the rest text that the target wrote (three quarters greedily, one quarter sampled). The loss at depth j has
  weight exp(-j / 7); it is half KL divergence to the target's distribution, half cross-entropy of the target's first
  choice. Afterwards the drafter's logits were divided by {drafter[temperature]} (inside `norm.weight`), which made
  trees on the validation modules longest.

## Losses
Bits per byte of the float16 weights in windows of 1024 positions: held-out {target[held_out_bits_per_byte]:.3f},
validation {target[validation_bits_per_byte]:.3f}, training text {target[training_bits_per_byte]:.3f}.

## Acceptance
Tokens per round (accepted and bonus) on the target's own continuations of {greedy[prompts]} prompts cut from the
held-out modules (`held_out_prompts.json`). Budgets count drafted nodes.

| decoding | new tokens | chain | tree 8 | tree 16 | tree 32 | tree 64 | tree 32 / chain |
|---|---|---|---|---|---|---|---|
{acceptance}

## Limits
* Greedy text soon repeats itself: at {greedy[repetition]:.0%} of its bytes the last 32 had stood there twice before,
  and more often the longer it gets. Repetition is easy to draft: tokens per round grow with the length, and a larger
  model's more varied text would give fewer. The sampled rows have no such repetition.
* The tree's gain over the chain is smaller where the chain is long already.
* Bytes only, 1024 positions, Python only.

## Held-out bits per byte by module

| module | bits per byte |
|---|---|
{modules}

## Licence
The weights: MIT, as the package. The data: CPython's standard library, (c) Python Software Foundation, PSF License
Version 2; none of it is in this folder. `held_out_prompts.json`, which the script writes and the package's tests carry,
is cut from it and stays under that licence.
"""


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"device": name, **versions, "date": date.today().isoformat()}


# ---------------------------------------------------------------------------------------------------------- command


def settings(args: argparse.Namespace) -> Report:
    return {key: value for key, value in vars(args).items() if not isinstance(value, Path)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add = parser.add_argument
    add("--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a Python standard library")
    add("--source-version", default=None, help="its version, for the model card (default: this Python's)")
    add("--out", type=Path, required=True, help="folder for the two checkpoints, metrics.json and held_out.json")
    add("--state", type=Path, default=Path("train_state"), help="folder of the files an interrupted run continues from")
    add("--target-from", type=Path, help="take the target of this earlier --out folder instead of training one")
    add("--drafter-from", type=Path, help="likewise the drafter")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a few steps of every phase, to see that everything runs")
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    add("--attention", choices=("flex", "dense"), default="flex" if torch.cuda.is_available() else "dense")
    add("--window", type=int, default=1024, help="tokens in a training window")
    add("--batch", type=int, default=64, help="windows in a target step")
    add("--target-steps", type=int, default=20000)
    add("--target-seconds", type=float, default=1e9, help="end the target's schedule early")
    add("--dropout", type=float, default=0.1)
    add("--muon-rate", type=float, default=0.02)
    add("--adam-rate", type=float, default=0.003)
    add("--decay", type=float, default=0.1)
    add("--pools", type=int, default=12, help="batches of text that the target writes (one in four sampled)")
    add("--write-seconds", type=float, default=1e9, help="stop writing early; two batches are always written")
    add("--pool-size", type=int, default=4096)
    add("--pool-length", type=int, default=640)
    add("--draft-batch", type=int, default=64)
    add("--roots", type=int, default=64, help="drafted blocks in each text of a step")
    add("--real-text", type=float, default=0.25, help="share of drafter steps on real source")
    add("--argmax-share", type=float, default=0.5, help="weight of the target's first choice in the drafter's loss")
    add("--drafter-steps", type=int, default=15000)
    add("--drafter-seconds", type=float, default=1e9, help="end the drafter's schedule early")
    add("--drafter-muon-rate", type=float, default=0.02)
    add("--new-tokens", type=int, default=200, help="length of the continuations that acceptance is measured on")
    add("--eval-bytes", type=int, default=1 << 40, help="bytes of each text that losses are measured on")
    add("--checks", type=int, default=20, help="validations and saved states in each phase")
    args = parser.parse_args(argv)
    if args.smoke:
        args.target_steps, args.drafter_steps, args.checks = 12, 12, 2
        args.pools, args.new_tokens, args.eval_bytes = 2, 20, 4096
        args.pool_size = min(args.pool_size, 64)
    return args


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch._dynamo.config.recompile_limit = 32  # one compiled layer serves several shapes, in training and after it
    corpus = load_corpus(args.source)
    console.print(
        f"{corpus.files} files, {len(corpus.train) / 1e6:.1f} MB to learn from, on {machine(device)['device']}"
    )
    if args.target_from:
        target, target_report = load_target(args.target_from, device)
    else:
        target, target_report = train_target(corpus, args, device)
        target_report |= losses(plain(target), corpus, args)
    if args.drafter_from:
        drafter, drafter_report = load_drafter(args.drafter_from, device)
    else:
        drafter, drafter_report = train_drafter(target, corpus, args, device)
        drafter_report["temperature"] = calibrate(plain(target), drafter, corpus, args)
    export(target, drafter, args.out)
    metrics = {
        "source": f"CPython {args.source_version or platform.python_version()} standard library",
        "training_files": corpus.files,
        "training_bytes": len(corpus.train),
        "target": target_report,
        "drafter": drafter_report,
        "acceptance": acceptance(plain(target), drafter, corpus, args, 0.0),
        "acceptance_sampled": acceptance(plain(target), drafter, corpus, args, 1.0),
        "acceptance_measured_on": machine(device),
    }
    write_json(args.out / "metrics.json", metrics)
    write_json(args.out / "held_out.json", {"held_out": list(HELD_OUT), "validation": list(VALIDATION)})
    write_json(args.out / "held_out_prompts.json", prompts_of(corpus.held_out))
    (args.out / "README.md").write_text(model_card(metrics), encoding="utf-8")
    console.print(json.dumps(metrics["acceptance"], indent=2))


if __name__ == "__main__":
    sys.exit(main())
