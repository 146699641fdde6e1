"""Vectors of stage 1: logits -> candidates. What is expected is computed here, apart from the package's reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ddtree_numba.bfloat16 import from_bfloat16, to_bfloat16
from ddtree_numba.portable_math import portable_exp, portable_log
from ddtree_numba.stable_random import StableRandom
from ddtree_numba.vectors.case import CONTRACT, Case, known

INF, NAN = math.inf, math.nan


def expected_candidates(logits: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """Return `log_probs` [B, L, K] float32 and `token_ids` [B, L, K] int32 by sorting (-logit, id)."""
    wide = (from_bfloat16(logits) if logits.dtype == np.uint16 else logits).astype(np.float64)
    batch, depths, vocab = wide.shape
    k = min(k, vocab)
    log_probs = np.full((batch, depths, k), -np.inf, np.float32)
    token_ids = np.empty((batch, depths, k), np.int32)
    for b, depth in np.ndindex(batch, depths):
        row = wide[b, depth]
        if np.isnan(row).any() or (row == np.inf).any():
            row = np.full(vocab, -np.inf)
        order = np.lexsort((np.arange(vocab), -row))[:k]
        token_ids[b, depth] = order
        if np.isfinite(row[order[0]]):
            shifted = row - row[order[0]]
            total = math.fsum(portable_exp(shifted).tolist())
            best = shifted[order] - float(portable_log(np.array(total)))
            with np.errstate(over="ignore"):  # beyond float32 is -inf
                log_probs[b, depth] = np.where(np.isfinite(row[order]), best, -np.inf)
    return {"log_probs": log_probs, "token_ids": token_ids}


def _case(name: str, rule: str, guards: str, source: str, logits: np.ndarray, k: int, small: bool = True) -> Case:
    expected = expected_candidates(logits, k)
    finite = np.nan_to_num(expected["log_probs"], neginf=0.0).astype(np.float64)
    # float32 arithmetic: an exponential, a sum and a logarithm of V terms, and the roundings of the result.
    bound = 2.0**-24 * (8 + 2.25 * math.log(logits.shape[2]) + 2 * np.abs(finite))
    bfloat16 = ("logits",) if logits.dtype == np.uint16 else ()
    tolerance = {"log_probs": bound.astype(np.float32)}
    where = f"top_candidates/{name}"
    return Case(where, rule, guards, source, {"logits": logits}, {"k": k}, expected, tolerance, bfloat16, small)


def _row(*values: float) -> np.ndarray:
    return np.array([[values]], np.float32)


def candidate_cases(seed: int) -> Iterator[Case]:
    """Yield the cases of stage 1."""
    yield from _known_answers(seed)
    yield from _random(seed)


def _known_answers(seed: int) -> Iterator[Case]:
    rng = StableRandom(seed, "candidates, known answers")
    no = "minus_infinity_is_no_candidate"
    yield _case(
        "known_01_online_sum_from_minus_infinity",
        no,
        "a running log-sum-exp that starts on -inf gives NaN everywhere",
        known(1),
        _row(-INF, 2, -INF, -INF, 1, -INF),
        3,
    )
    rows = np.array([[[-INF] * 8, [0, 1, 2, 3, 4, 5, 6, 7]]], np.float32)
    yield _case("known_02_no_finite_logit", no, "one empty depth spoils the others", known(2), rows, 3)
    yield _case(
        "known_03_all_equal", "ties_by_token_id", "ties in any order", known(3), np.zeros((1, 1, 8), np.float32), 4
    )
    for k in (8, 20):
        values = rng.permutation(8).astype(np.float32)[None, None] / np.float32(2)
        yield _case(f"known_04_k_{k}_of_8", "k_is_cut", "K beyond V reads outside or repeats ids", known(4), values, k)
    for vocab in (1, 2, 31, 33, 1023, 163841):
        values = (np.rint(rng.normal((1, 1, vocab)) * 512) / 256).astype(np.float32)
        guards = "a tail that a vector load leaves out"
        yield _case(f"known_05_vocabulary_{vocab}", "any_vocabulary", guards, known(5), values, 16, vocab < 2000)
    yield _case(
        "known_06_large_logits",
        "log_softmax",
        "an absolute normaliser of 10000 has no digits left for the difference",
        known(6),
        _row(10000, 9999, 9998),
        3,
    )
    values = to_bfloat16(_row(20, 19.875, 19.75, 3, 1))
    yield _case(
        "known_07_bfloat16", "log_softmax", "a log-sum-exp in bfloat16: probabilities sum to 0.979", known(7), values, 5
    )
    values = (np.rint(rng.normal((1, 2, 8)) * 64) / 32).astype(np.float32)
    for name, bad in (("nan", NAN), ("infinity", INF)):
        spoilt = values.copy()
        spoilt[0, 0, 5] = bad
        guards = "an invalid row gives ids outside [0, V) or one twice"
        yield _case(f"known_08_one_{name}", "invalid_row", guards, known(8), spoilt, 4)


def _random(seed: int) -> Iterator[Case]:
    rng = StableRandom(seed, "candidates, random")
    shapes = {"small": (2, 3, 67, 9), "batch_4": (4, 15, 1000, 64), "wide": (1, 2, 32000, 64)}
    for name, (batch, depths, vocab, k) in shapes.items():
        logits = np.rint(rng.normal((batch, depths, vocab)) * 1000) / 256
        for dtype in ("float32", "float16", "bfloat16"):
            rule, guards = "ties_by_token_id", f"ties among random {dtype} logits, and the sum of V terms"
            values = logits.astype(np.float32)
            values = to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
            yield _case(f"random_{name}_{dtype}", rule, guards, CONTRACT, values, k, name == "small")
    few = (rng.integers(-2, 3, (2, 4, 100)) / 2).astype(np.float32)
    yield _case("ties_at_every_rank", "ties_by_token_id", "hundreds of equal logits", CONTRACT, few, 40)
    few = few.copy()  # the case above has been handed out
    few[0, 1, 3], few[1, 0, 99], few[1, 2] = NAN, INF, -INF
    few[0, 2, ::2], few[0, 3, 7] = -INF, -NAN
    yield _case("invalid_rows_among_good_ones", "invalid_row", "one bad row spoils its batch", CONTRACT, few, 60)
    rising = np.arange(3000, dtype=np.float32)[None, None] / np.float32(64)
    guards = "a list of the best so far that is replaced at every element"
    yield _case(
        "rising", "ties_by_token_id", guards, CONTRACT, np.concatenate([rising, rising[..., ::-1]], 1), 32, False
    )
    zeros = np.zeros((1, 1, 6), np.float32)
    zeros[..., ::2] = -0.0
    yield _case("signed_zeros", "ties_by_token_id", "-0.0 sorts below 0.0 when bits are compared", CONTRACT, zeros, 6)
    spread = np.array([[[0.0, -3e38, 3e38, -1e-45, 1e-45]]], np.float32)
    yield _case("widest_spread", "log_softmax", "a difference of logits beyond float32", CONTRACT, spread, 5)
