"""Store what Hugging Face transformers computes from the shipped checkpoint, for the NumPy engine to be tested against.

    python examples/make_transformers_logits.py --model ddtree_numba/engine/models/tiny_stdlib

The target's logits and hidden states come from `transformers.DeepseekV3ForCausalLM` in float32 on the CPU; the drafter,
which transformers doesn't have, from the PyTorch model of `train_tiny_model.py`, fed with those hidden states.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from train_tiny_model import BOS, Drafter, DrafterConfig, Target, TargetConfig, dense_mask
from transformers import DeepseekV3ForCausalLM

LONG_LENGTH = 200
SHORT_TEXT = b"def area(width, height):\n"
FEATURE_POSITIONS = (0, 1, 77, 199)
ROOTS = (1, 60, 180)


def load_with_transformers(folder: Path) -> DeepseekV3ForCausalLM:
    """The target, refusing a checkpoint of which transformers would leave out or invent a tensor."""
    model, report = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    faults = {key: value for key, value in report.items() if value}
    if faults:
        raise SystemExit(f"transformers does not take the checkpoint as it is: {faults}")
    return model.eval()


def hidden_states(model: DeepseekV3ForCausalLM, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """The residual stream after the named decoder layers, before the final norm: [layers, T, hidden]."""
    kept: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.layers[index].register_forward_hook(lambda _m, _i, out, index=index: kept.update({index: out}))
        for index in layers
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack([kept[index][0] for index in layers])


def load_own(folder: Path) -> tuple[Target, Drafter]:
    target, drafter = Target(TargetConfig()).eval(), Drafter(DrafterConfig()).eval()
    weights = load_file(folder / "target" / "model.safetensors")
    target.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    weights = load_file(folder / "drafter" / "model.safetensors")
    drafter.load_state_dict({name: value.float() for name, value in weights.items()})
    return target, drafter


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", type=Path, default=Path("ddtree_numba/engine/models/tiny_stdlib"))
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, default=Path("tests/data/transformers_logits.npz"))
    args = parser.parse_args()

    reference = load_with_transformers(args.model / "target")
    target, drafter = load_own(args.model)
    long_text = (args.source / "textwrap.py").read_bytes()
    long_ids = torch.tensor([[BOS, *long_text[: LONG_LENGTH - 1]]])
    short_ids = torch.tensor([[BOS, *SHORT_TEXT]])
    long_logits, short_logits = reference(long_ids).logits, reference(short_ids).logits
    difference = (target(long_ids)[0] - long_logits).abs().max().item()
    if difference > 1e-4:
        raise SystemExit(f"the training script's model and transformers differ by {difference}")

    config = drafter.config
    features = hidden_states(reference, long_ids, config.feature_layers)
    roots = torch.tensor(ROOTS)
    rows = torch.cat(list(features), dim=-1)[None]
    mask = dense_mask(roots, config.block, long_ids.shape[1])
    drafted = drafter(long_ids, rows, roots, mask, reference.model.embed_tokens.weight)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        args.out,
        long_ids=long_ids[0].numpy().astype(np.int32),
        long_logits=long_logits[0].numpy(),
        short_ids=short_ids[0].numpy().astype(np.int32),
        short_logits=short_logits[0].numpy(),
        feature_layers=np.array(config.feature_layers, np.int32),
        feature_positions=np.array(FEATURE_POSITIONS, np.int32),
        features=features[:, list(FEATURE_POSITIONS)].numpy(),  # [layer, position, hidden]
        roots=np.array(ROOTS, np.int32),
        drafter_logits=drafted[0].numpy(),  # [root, 15, vocabulary]
    )
    print(f"{args.out}: {args.out.stat().st_size} bytes; own model against transformers: {difference:.1e}")


if __name__ == "__main__":
    main()
