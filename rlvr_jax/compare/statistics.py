"""What paired differences say, as pure functions of arrays (P pairs, M comparisons). The same input gives the same figures.

The test is the sign-flip permutation test: were the arm no different from the baseline, each pair's difference would have
had either sign with equal chance, whatever its distribution. It is exact, but P pairs have only 2**P sign patterns, so no
p can lie below 2 / 2**P: :func:`smallest_p` belongs beside every p. Ties, which accuracies of few prompts have, make p
larger: the level is kept, and not quite used up. The interval is Student's t of the paired differences
(a percentile bootstrap of 5 pairs covers 0.85 where it promises 0.95).
"""

import bisect
import functools
import math
from typing import Literal

import numpy as np
from scipy import optimize, special  # special, not stats: the same distributions, loaded and evaluated ten times faster

Verdict = Literal["better", "worse", "not distinguishable", "too few seeds to decide"]

ALPHA = 0.05
"""A difference is called one when its Holm-corrected p is at most this; intervals cover 1 - ALPHA."""
POWER = 0.8
"""The chance of finding a true difference that "seeds needed" and "found in 80%" ask for."""
EXACT_PAIRS = 17
"""Up to here all sign patterns are counted; beyond, DRAWS of them."""
DRAWS = 2**16 - 1
MOST_PAIRS = 1000
"""The search for the number of pairs needed ends here."""


def sign_flip_p(differences: np.ndarray) -> np.ndarray:
    """Two-sided p of the paired permutation test on the mean difference, ``[P, M] -> [M]``.

    The share of sign patterns whose mean is at least as far from 0 as the observed one; above EXACT_PAIRS pairs,
    (1 + hits) / (1 + DRAWS) over random patterns of a fixed seed.
    """
    d = np.asarray(differences, float)
    patterns, exact = _sign_patterns(len(d)), len(d) <= EXACT_PAIRS
    p = np.empty(d.shape[1])
    for m in range(0, len(p), 16):  # 2**16 patterns x 16 columns: 8 MiB
        block = d[:, m:m + 16]
        # Accuracies are fractions of small numbers: ties are common, and rounding must not break them.
        least = np.abs(block.sum(0)) - 1e-9 * np.abs(block).sum(0)
        hits = (np.abs(patterns @ block) >= least).sum(0)
        p[m:m + 16] = hits / len(patterns) if exact else (1 + hits) / (1 + DRAWS)
    return p


def smallest_p(pairs: int | np.ndarray) -> np.ndarray:
    """The smallest p that :func:`sign_flip_p` can give: 2 / 2**P, or 1 / (1 + DRAWS) where it draws."""
    return np.maximum(2.0 ** (1 - np.asarray(pairs, float)), 1 / (1 + DRAWS))


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down correction, ``[M] -> [M]``: with it, the chance of any false call among M is at most alpha."""
    p = np.asarray(p, float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted


def paired_interval(differences: np.ndarray, alpha: float = ALPHA) -> tuple[np.ndarray, np.ndarray]:
    """Student's t interval of the mean difference, ``[P, M] -> low[M], high[M]``; NaN for a single pair."""
    d = np.asarray(differences, float)
    if len(d) < 2:
        return np.full(d.shape[1], np.nan), np.full(d.shape[1], np.nan)
    half = -special.stdtrit(len(d) - 1, alpha / 2) * d.std(0, ddof=1) / math.sqrt(len(d))
    return d.mean(0) - half, d.mean(0) + half


def fewest_pairs(tests: int, alpha: float = ALPHA) -> int | None:
    """Pairs below which none of ``tests`` Holm-corrected comparisons can reach ``alpha``, however large the difference."""
    return next((n for n in range(2, MOST_PAIRS) if tests * smallest_p(n) <= alpha), None)


def power(effect: float | np.ndarray, pairs: int | np.ndarray, level: float = ALPHA) -> np.ndarray:
    """The chance that the permutation test finds a true difference and gets its sign right; arguments broadcast.

    For normal differences. Where only the smallest p reaches ``level`` all signs must agree: Phi(effect)**P, exactly.
    Elsewhere noncentral t at the level in reach, less half a step for the steps of p. Against simulation: within 0.04.

    Args:
      effect: mean over standard deviation of the paired differences, >= 0.
      pairs: number of pairs P, >= 2.
      level: p that counts as found; ALPHA / M for M comparisons (Holm's first, so a little pessimistic).
    """
    n, effect = np.asarray(pairs, float), np.minimum(effect, 100.0)
    step = smallest_p(n)
    steps = np.floor(level / step + 1e-9)
    critical = -special.stdtrit(n - 1, np.maximum(steps - 0.5, 0.5) * step / 2)
    # Far out, where the chance to miss is 0, scipy's noncentral t is NaN here and there.
    found = 1 - np.nan_to_num(special.nctdtr(n - 1, effect * np.sqrt(n), critical), nan=0.0)
    agree = special.ndtr(effect) ** n
    return np.where(steps == 0, 0.0, np.where((steps == 1) & (n <= EXACT_PAIRS), agree, found))


def pairs_needed(effect: float, level: float = ALPHA) -> int | None:
    """The smallest number of pairs with POWER to find ``effect`` (see :func:`power`); None above MOST_PAIRS, or for no effect."""
    if not effect > 0:
        return None
    # The level in reach and with it the power only grow with the pairs.
    candidates = range(2, MOST_PAIRS + 1)
    at = bisect.bisect_left(candidates, True, key=lambda n: bool(power(effect, n, level) >= POWER))
    return candidates[at] if at < len(candidates) else None


@functools.cache
def detectable_effect(pairs: int, level: float = ALPHA) -> float:
    """The effect that ``pairs`` find with POWER, in standard deviations of the paired difference; inf if none can be found."""
    most = 100.0
    if pairs < 2 or power(most, pairs, level) < POWER:
        return math.inf
    return float(optimize.brentq(lambda effect: float(power(effect, pairs, level)) - POWER, 0.0, most))


def spread_known_within(pairs: int, alpha: float = ALPHA) -> tuple[float, float]:
    """Factors (low, high) around a standard deviation of ``pairs`` normal values that hold the true one; NaN for one value."""
    if pairs < 2:
        return math.nan, math.nan
    return math.sqrt((pairs - 1) / special.chdtri(pairs - 1, alpha / 2)), math.sqrt((pairs - 1) / special.chdtri(pairs - 1, 1 - alpha / 2))


def verdict(difference: float, p_holm: float, smallest_p_holm: float, alpha: float = ALPHA) -> Verdict:
    """In words; ``smallest_p_holm`` is Holm's correction of the smallest p that these numbers of pairs can give."""
    if p_holm <= alpha:
        return "better" if difference > 0 else "worse"
    return "too few seeds to decide" if smallest_p_holm > alpha else "not distinguishable"


@functools.lru_cache(4)
def _sign_patterns(pairs: int) -> np.ndarray:
    """Rows of +1 and -1, ``[patterns, P]``: all that begin with +1 (a pattern and its opposite count alike), or DRAWS."""
    if pairs > EXACT_PAIRS:
        return np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, pairs))
    bits = np.arange(2 ** (pairs - 1))[:, None] >> np.arange(pairs - 1)
    return np.concatenate([np.ones((len(bits), 1)), 1.0 - 2.0 * (bits & 1)], axis=1)
