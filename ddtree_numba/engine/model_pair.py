"""A target and its drafter, read from one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ddtree_numba.backend import BACKEND
from ddtree_numba.engine.arithmetic import Arithmetic, arithmetic_of
from ddtree_numba.engine.byte_tokenizer import VOCAB_SIZE
from ddtree_numba.engine.checkpoint import CheckpointError, read_drafter, read_target
from ddtree_numba.engine.drafter import Drafter
from ddtree_numba.engine.target_model import TargetModel

__all__ = ["BACKENDS", "DEFAULT_MODEL", "ModelPair", "load_model", "read_model"]

BACKENDS = ("numpy", "simulator", "gpu")
"""What runs the stages: the references, or the kernels where this process has them."""

DEFAULT_MODEL = Path(__file__).parent / "models" / "tiny_stdlib"
"""The model that comes with the package: it writes Python in the manner of the standard library."""


class ModelPair(NamedTuple):
    """What a decode needs of a model."""

    name: str
    """Name of its folder."""
    target: TargetModel
    """The model whose text is decoded: it decides every token."""
    drafter: Drafter
    """The small model that guesses the next tokens."""
    backend: str = "numpy"
    """Which of `BACKENDS` runs its stages; both models compute with arrays that these take."""

    @property
    def context(self) -> int:
        """How many tokens a sequence may have."""
        return min(self.target.config.max_position_embeddings, self.drafter.config.max_position_embeddings)


def load_model(folder: str | Path = DEFAULT_MODEL, backend: str = "numpy") -> ModelPair:
    """Return the model in `folder` (its `target` and `drafter` folders), to be decoded by one of `BACKENDS`.

    With "gpu", its weights and all that they are multiplied by are CuPy arrays. Raises `CheckpointError` when the
    folder can't be used, `ValueError` for a backend that is unknown or not this process's, `MissingCuPyError` when
    "gpu" is asked for without CuPy.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, needs {', '.join(BACKENDS)}")
    if backend not in ("numpy", BACKEND):
        raise ValueError(f"backend: got {backend!r}, but kernels run on the {BACKEND} in this process")
    return read_model(folder, backend, arithmetic_of(backend))


def read_model(folder: str | Path, backend: str, arithmetic: Arithmetic) -> ModelPair:
    """Return the model in `folder` with the arrays and products of `arithmetic`, see `load_model`."""
    folder = Path(folder)
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        raise CheckpointError(f"{folder}: no such folder, needs one that holds target/ and drafter/")
    config, tensors = read_target(folder / "target")
    if config.vocab_size < VOCAB_SIZE:
        raise CheckpointError(
            f"{folder / 'target' / 'config.json'}: vocab_size is {config.vocab_size}, "
            f"needs {VOCAB_SIZE}: the bytes, the document's end, the mask"
        )
    drafter_config, drafter_tensors = read_drafter(folder / "drafter", config)
    target = TargetModel(config, tensors, drafter_config.target_layer_ids, arithmetic)
    drafter = Drafter(drafter_config, drafter_tensors, target.embedding, arithmetic)
    return ModelPair(folder.resolve().name, target, drafter, backend)
