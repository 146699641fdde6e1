"""exp and log from additions, multiplications and divisions alone: the same bits on every machine.

NumPy's own `exp` and `log` differ in the last bit between processors and versions, which choose other instructions for
them. Files that must be the same byte for byte everywhere can't be made with those.
"""

from __future__ import annotations

import numpy as np

__all__ = ["portable_exp", "portable_log"]

# ln 2 in two parts; products of the first with whole numbers up to 2**20 are exact.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_EXP_TERMS = 14  # 0.35**14 / 14! is below a rounding
_LOG_TERMS = 12


def portable_exp(values: np.ndarray) -> np.ndarray:
    """Return e to the power of float64 `values` (no NaN, at most 700), within 2 units in the last place.

    >>> portable_exp(np.array([0.0, 1.0, -np.inf])).round(14).tolist()
    [1.0, 2.71828182845905, 0.0]
    """
    values = np.asarray(values, np.float64)
    x = np.maximum(values, -745.0)
    twos = np.rint(x * 1.4426950408889634)
    rest = (x - twos * _LN2_HIGH) - twos * _LN2_LOW
    power = np.ones_like(x)
    for term in range(_EXP_TERMS, 0, -1):
        power = 1.0 + power * rest / term
    return np.where(values < -745.0, 0.0, np.ldexp(power, twos.astype(np.int64)))


def portable_log(values: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of positive, finite float64 `values`, within 2 units in the last place of 1 or it.

    >>> portable_log(np.array([1.0, 2.0, 10.0])).tolist()
    [0.0, 0.6931471805599453, 2.302585092994046]
    """
    fraction, twos = np.frexp(np.asarray(values, np.float64))
    small = fraction < 0.7071067811865476
    fraction, twos = np.where(small, 2 * fraction, fraction), np.where(small, twos - 1, twos)
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    series = np.full_like(square, 1.0 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series = 1.0 / (2 * term + 1) + series * square
    return twos * _LN2_HIGH + (2.0 * ratio * series + twos * _LN2_LOW)
