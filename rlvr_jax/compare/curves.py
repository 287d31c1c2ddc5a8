"""What a learning curve says beside its end: the area under it, and what it cost to reach an accuracy.

``x[..., X]`` is a cost that grows (updates, generated tokens, seconds), ``y[..., X]`` the accuracy there; NaN in either is
a point that was not measured. Between two evaluations a curve is a straight line.
"""

from collections.abc import Callable

import numpy as np


def area_under_curve(x: np.ndarray, y: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """Mean height of the curve between costs ``low`` and ``high`` (its own ends by default), ``[..., X] -> [...]``.

    In the unit of ``y``, so areas of runs of different length compare; NaN where the curve does not cover the range.
    """
    def area(x: np.ndarray, y: np.ndarray) -> float:
        start, end = (x[0] if low is None else low), (x[-1] if high is None else high)
        if not x[0] <= start < end <= x[-1]:
            return np.nan
        inside = x[(x > start) & (x < end)]
        at = np.concatenate([[start], inside, [end]])
        return float(np.trapezoid(np.interp(at, x, y), at) / (end - start))

    return _each(area, x, y)


def cost_to_reach(x: np.ndarray, y: np.ndarray, target: float) -> np.ndarray:
    """The cost at which the curve first reaches ``target``, ``[..., X] -> [...]``; NaN if it never does."""
    def cost(x: np.ndarray, y: np.ndarray) -> float:
        over = np.flatnonzero(y >= target)
        if not len(over):
            return np.nan
        i = over[0]
        if i == 0:
            return float(x[0])
        return float(x[i - 1] + (x[i] - x[i - 1]) * (target - y[i - 1]) / (y[i] - y[i - 1]))

    return _each(cost, x, y)


def common_range(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The costs that every measured curve covers, (low, high); low >= high if there are none."""
    known = np.isfinite(x) & np.isfinite(y)
    measured = known.any(-1)
    low, high = np.where(known, x, np.inf).min(-1)[measured], np.where(known, x, -np.inf).max(-1)[measured]
    return float(low.max(initial=-np.inf)), float(high.min(initial=np.inf))


def _each(measure: Callable[[np.ndarray, np.ndarray], float], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``measure`` of every curve's known points in the order of their cost; NaN for a curve that has none."""
    x, y = np.broadcast_arrays(np.asarray(x, float), np.asarray(y, float))
    result = np.full(x.shape[:-1], np.nan)
    for at in np.ndindex(result.shape):
        known = np.isfinite(x[at]) & np.isfinite(y[at])
        order = np.argsort(x[at][known], kind="stable")
        if known.any():
            result[at] = measure(x[at][known][order], y[at][known][order])
    return result
