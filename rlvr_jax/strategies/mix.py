"""Mixers: how many prompts of a batch each domain gets. Host side, numpy only, pure.

``init() -> state``, ``observe(state, domain, values) -> state``, ``proportions(state, step) -> p[domains]``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

State = Any


class Mixer(NamedTuple):
    """Pure functions; the state is a JSON-able dict that a checkpoint holds.

    ``observe`` is called once a step and domain with ``values``: named arrays over the fresh prompts of that domain
    (``reward``, ``advantage``: ``[n, G]``; ``step``: int). ``proportions`` returns ``[domains] float64``, sum 1.
    """

    init: Callable[[], State]
    observe: Callable[[State, int, Any], State]
    proportions: Callable[[State, int], np.ndarray]


def static(weights: Sequence[float] | np.ndarray) -> Mixer:
    """The given ratio, always. Has no floor: a ratio that the user states is what the user gets."""
    p = np.asarray(weights, np.float64)
    if p.ndim != 1 or p.size == 0 or not np.all(np.isfinite(p)) or np.any(p < 0) or p.sum() <= 0:
        raise ValueError(f"static mixer: expected finite weights >= 0 with a positive sum, found {list(weights)}")
    p = p / p.sum()
    return Mixer(init=dict, observe=lambda state, domain, values: state, proportions=lambda state, step: p.copy())


def build_mixer(name: str, weights: Sequence[float] | np.ndarray) -> Mixer:
    """The mixer of ``data.mixer.name`` over domains with these prior weights.

    Raises:
      ValueError: unknown name.
    """
    table = {"static": static}
    if name not in table:
        raise ValueError(f"data.mixer.name: unknown mixer '{name}'; there are {', '.join(table)}")
    return table[name](weights)


def largest_remainder(p: Sequence[float] | np.ndarray, n: int, carry: Sequence[float] | np.ndarray | None = None
                      ) -> tuple[np.ndarray, np.ndarray]:
    """Splits n prompts over domains by largest remainder; what was rounded away is carried to the next batch.

    ``ideal = n p + carry``; each domain gets ``floor(ideal)``, the rest goes to the largest fractions (ties: lowest
    index), and ``carry' = ideal - counts``. Summed over batches, target - realised = carry, and |carry| < 1

    - for any sequence of p while every domain is due at least one prompt a batch (n p >= 1), and
    - for a constant p at any n. There, with domains due less than one prompt a batch, the largest fraction is not
      enough (a rare domain can be overtaken until it is two behind), so the rest goes to the earliest deadline, the
      domain that would first be a whole prompt behind: Tijdeman's rule for the chairman assignment problem (ours).

    If p changes while some n p < 1 no online rule keeps the bound; counts still sum to n and the debt is carried.

    Args:
      p: ``[domains]`` proportions, sum 1.
      n: prompts in the batch.
      carry: ``[domains]`` of the batch before; None at the start.

    Returns:
      (counts ``[domains] int64`` with sum n, carry ``[domains] float64`` with sum 0).

    Raises:
      ValueError: p is no distribution, or n is negative.
    """
    p = np.asarray(p, np.float64)
    if p.ndim != 1 or not np.all(np.isfinite(p)) or np.any(p < 0) or abs(p.sum() - 1) > 1e-6 or n < 0:
        raise ValueError(f"largest_remainder: expected proportions that sum to 1 and n >= 0, found {p.tolist()} and {n}")
    carry = np.zeros_like(p) if carry is None else np.asarray(carry, np.float64)
    ideal = p / p.sum() * n + carry
    ideal = np.where(np.abs(ideal - np.rint(ideal)) < 1e-9, np.rint(ideal), ideal)  # 3 * 0.1 * 10 is a hair below 3
    counts = np.maximum(np.floor(ideal), 0).astype(np.int64)
    fraction = np.where(ideal > 0, ideal - counts, 0.0)
    rare = bool(np.any((p > 0) & (p * n < 1)))
    with np.errstate(divide="ignore"):
        priority = -(1 - fraction) / p if rare else fraction
    order = np.lexsort((np.arange(p.size), -priority, fraction <= 0))
    left = n - int(counts.sum())
    counts[order[:max(left, 0)]] += 1
    for _ in range(-left):  # only after a change of p: more whole prompts are owed than the batch has
        counts[np.argmin(np.where(counts > 0, ideal - counts, np.inf))] -= 1
    return counts, ideal - counts
