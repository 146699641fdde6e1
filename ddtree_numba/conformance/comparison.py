"""Whether an answer is right, and if not, the first element that differs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.vectors import STAGES, Case

_SURPRISE = 5.0  # standard deviations: one run in three million of a right sampler goes beyond


class Difference(NamedTuple):
    """The first thing that is wrong with an answer."""

    element: str
    """``name[index]``, or the name alone when shape, dtype or the whole is wrong."""
    got: str
    """What was there."""
    needs: str
    """What belongs there."""

    def __str__(self) -> str:
        return f"{self.element}: got {self.got}, needs {self.needs}"


def first_difference(case: Case, got: dict[str, np.ndarray]) -> Difference | None:
    """Return the first difference between an answer and what is expected, None when it is right."""
    stage = STAGES[case.stage]
    for name in stage.outputs:
        if name not in got:
            return Difference(name, "nothing", "an array")
    if case.stage == "sample_walk":
        return _unlikely(case, got)
    for name in (*stage.outputs, *stage.optional):
        if name in got and (difference := _differs(name, got[name], case.expected[name], case.tolerance.get(name))):
            return difference
    return None


def _differs(name: str, got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray | None) -> Difference | None:
    if got.dtype != expected.dtype:
        return Difference(name, str(got.dtype), str(expected.dtype))
    if got.shape != expected.shape:
        return Difference(name, f"shape {list(got.shape)}", f"{list(expected.shape)}")
    if tolerance is None:
        wrong = _bits(got) != _bits(expected)
        wrong &= ~(_is_nan(got) & _is_nan(expected))
        slack = ""
    else:
        with np.errstate(invalid="ignore"):
            near = np.abs(got.astype(np.float64) - expected) <= tolerance
        wrong = ~(near | (got == expected))
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
    if tolerance is not None:
        slack = f" within {float(np.broadcast_to(tolerance, got.shape)[index]):.2g}"
    element = f"{name}[{', '.join(map(str, index))}]" if index else name
    return Difference(element, _number(got[index], expected), _number(expected[index], expected) + slack)


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bit patterns: 0.0 is not -0.0."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") if array.dtype.kind == "f" else array


def _is_nan(array: np.ndarray) -> np.ndarray:
    return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)


def _number(value: Any, like: np.ndarray) -> str:
    return f"{int(value):#010x}" if like.dtype == np.uint32 else str(value)


def token_frequencies(got: dict[str, np.ndarray], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each token came first [V], and second after each first one [V, V]."""
    tokens, counts = got["accept_tokens"], got["accept_count"]
    first = np.bincount(tokens[:, 0], minlength=vocab)
    after = np.zeros((vocab, vocab), np.int64)
    longer = counts > 1
    np.add.at(after, (tokens[longer, 0], tokens[longer, 1]), 1)
    return first, after


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return how many standard deviations `counts` are from `probabilities` (Wilson and Hilferty's approximation)."""
    total = counts.sum()
    likely = probabilities > 0
    if counts[~likely].any():
        return math.inf
    expected = total * probabilities[likely]
    if len(expected) < 2 or total == 0:
        return 0.0
    statistic = float(((counts[likely] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    cube = (statistic / freedom) ** (1 / 3)
    return float((cube - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def _unlikely(case: Case, got: dict[str, np.ndarray]) -> Difference | None:
    """Compare the emitted tokens' frequencies with the target's distribution."""
    tokens, counts = got["accept_tokens"], got["accept_count"]
    trials, vocab = len(case.inputs["uniforms"]), case.inputs["target_probs"].shape[1]
    columns = int(case.parameters["draft_length"]) + 1
    for name, array, shape in (("accept_tokens", tokens, (trials, columns)), ("accept_count", counts, (trials,))):
        if array.shape != shape or array.dtype != np.int32:
            return Difference(name, f"{array.dtype} {list(array.shape)}", f"int32 {list(shape)}")
    if counts.min() < 1 or counts.max() > columns:
        return Difference("accept_count", f"from {counts.min()} to {counts.max()}", f"from 1 to {columns}")
    used = np.arange(columns) < counts[:, None]
    if ((tokens < 0) | (tokens >= vocab))[used].any():
        return Difference("accept_tokens", "a token outside the vocabulary", f"0 to {vocab - 1}")
    first, after = token_frequencies(got, vocab)
    firsts = case.expected["second_after"].tolist()
    rows = [("first token", first, case.expected["first_token"])]
    rows += [
        (f"token after {token}", after[token], probabilities)
        for token, probabilities in zip(firsts, case.expected["second_token"], strict=True)
    ]
    for what, seen, wanted in rows:
        if chi_square(seen, wanted) > _SURPRISE:
            shares = seen / max(seen.sum(), 1)
            worst = int(np.argmax(np.abs(shares - wanted)))
            return Difference(f"share of {worst} as {what}", f"{shares[worst]:.3f}", f"{wanted[worst]:.3f}")
    return None
