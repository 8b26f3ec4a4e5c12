"""How far sums in narrow numbers are off, as formulas: n terms, M mantissa bits, chunks of c terms.

Noise is the variance of the error over the variance of the sum, for terms of mean zero. One rounding to nearest of
s = 2^e x, 1 <= x < 2, has the variance step^2 / 12 = s^2 / (12 x^2 4^M). After i terms the variance of s is i, and the
logarithm of x is spread evenly, so that E[1 / x^2] = 3 / (8 ln 2) and E[1 / x] = 1 / (2 ln 2):

    nearest, n terms            n E[1/x^2] / 24 / 4^M = 0.0225 n / 4^M
    stochastic                  twice that, but right on average
    chunks                      c + n / c in place of n; least at c = sqrt(n)
    nearest, all terms equal    the sum stays at 2^(M + 1) terms: half a step is then as large as a term

A unit that aligns terms and cuts each of them (F fraction bits, terms of P bits) loses nothing before the step exceeds
the last bit of a term, which sums of equal terms reach after n0 = 2^(F - P) / E[1/x] of them; with k = n - n0,

    coherent      relative bias (k / n) ((1 - exp(-y)) / y - 1),   y = E[1/x] k / 2 / 2^F
    mean zero     cut toward zero, at most 4 times the noise of rounding to nearest

The variance retention ratio, VRR, is that of Sakr et al. (Accumulation Bit-Width Scaling, ICLR 2019, arXiv 1901.06588):
Var(computed) / Var(exact) where products of P bits lose their low bits while the sum is large, and are lost as a whole
beyond 2^M. A width is enough where exp(n (1 - VRR)) < 50. The equations follow the paper's model, not its text:
the stages of partial loss have the weight 1, because that agrees with the published widths.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from math import ceil, erfc, expm1, inf, log, log2, prod, sqrt

INVERSE, INVERSE_SQUARE = 1 / (2 * log(2)), 3 / (8 * log(2))  # E[1/x], E[1/x^2]
NOISE = {"nearest": INVERSE_SQUARE / 24, "stochastic": INVERSE_SQUARE / 12, "zero": INVERSE_SQUARE / 6}
ENOUGH = log(50)  # of n (1 - VRR)


def noise(n: float, mantissa: int, chunk: int = 0, rounding: str = "nearest") -> float:
    """The variance of the error over that of a sum of mean-zero terms; zero: of a unit that cuts each aligned term."""
    return NOISE[rounding] * (chunk + n / chunk if 0 < chunk < n else n) / 4.0**mantissa


def cut_bias(n: float, fraction: int, product: float = inf) -> float:
    """The relative bias of a coherent sum whose aligned terms of `product` bits are cut."""
    k = n - 2.0 ** (fraction - product) / INVERSE
    y = INVERSE * k / 2 / 2.0**fraction
    return k / n * (-expm1(-y) / y - 1) if k > 0 else 0.0


def stall(mantissa: int) -> int:
    """The number of equal terms at which a sum rounded to nearest stops growing."""
    return int(2 ** (mantissa + 1))


def _beyond(level: float, n: float) -> float:
    """The probability that the magnitude of a sum of n terms of variance 1 is above the level."""
    return erfc(level / sqrt(2 * n)) if n > 0 else 0.0


@cache
def _swamped(n: int, mantissa: int, after: float) -> tuple[float, float]:
    """Sums q_i, the probability that term i is the first to be lost, and (i - after) q_i, over after < i < n."""
    level, total, moment = 2.0**mantissa, 0.0, 0.0
    first = max(2, int(4.0**mantissa / 100), int(max(after, 0)) + 1)  # earlier ones: less than 2e-23 each
    before = _beyond(level, first - 1)
    for i in range(first, n):
        now = _beyond(level, i)
        q = now * (1 - before)
        total, moment, before = total + q, moment + (i - after) * q, now
    return total, moment


def _retain(n: int, mantissa: int, product: int) -> float:
    """VRR of one level: `losses[r]` is what terms lose until stage r of partial loss is over, in terms."""
    product, losses = min(product, mantissa), [0.0]
    for j in range(1, product + 1):
        losses.append(losses[-1] + 2.0 ** (mantissa - 3 * product + j) / 3 * (2**j - 1) * (2 ** (j + 1) - 1))
    weight, kept = _swamped(n, mantissa, losses[product])
    for r in range(1, product + 1):  # the sum ends in stage r - 1; in stage 0, nothing was lost
        level = 2.0 ** (mantissa - product + r)
        share = (1 if r == 1 else _beyond(level / 2, n)) * (1 - _beyond(level, n)) * (n > losses[r - 1])
        weight, kept = weight + share, kept + (n - losses[r - 1]) * share
    return kept / (weight * n)


def _levels(n: int, product: int, chunk: int, density: float) -> list[tuple[int, int]]:
    """Number and bits of the terms of each level. Sums of chunks have as many more bits as their length has."""
    if not 0 < chunk < n:
        return [(max(ceil(density * n), 1), product)]
    inner = max(ceil(density * chunk), 1)
    return [(inner, product), (ceil(n / chunk), round(product + log2(inner)))]


def retention(n: int, mantissa: int, product: int = 5, chunk: int = 0, density: float = 1.0) -> float:
    """VRR of a sum of n products, of which the share `density` is not zero, in one level or in chunks."""
    return prod(_retain(terms, mantissa, bits) for terms, bits in _levels(n, product, chunk, density))


@cache
def required_mantissa(n: int, product: int = 5, chunk: int = 0) -> int:
    """The least number of mantissa bits by VRR, where chunks have to satisfy it in both levels."""

    def suffices(width: int) -> bool:
        levels = _levels(n, product, chunk, 1.0)
        return all(terms * (1 - _retain(terms, width, bits)) < ENOUGH for terms, bits in levels)

    return bisect_left(range(1, 53), True, key=suffices) + 1
