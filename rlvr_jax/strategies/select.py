"""``select(score, act)``: weights 0 or 1. Acts that say which rows (tokens) are kept; one function and one table line each."""

from collections.abc import Callable

import jax.numpy as jnp

from rlvr_jax.strategies.base import (
    Act,
    Array,
    Score,
    State,
    Strategy,
    group_ranks,
    live_mask,
    needs,
    needs_of,
    portion,
    ranks,
    require_choice,
    require_rows,
)
from rlvr_jax.types import Signals

# Relative difference below which two float32 variances count as equal, so that ties of 0/1 rewards are ties.
VARIANCE_TOLERANCE = 2e-6


def select(score: Score, act: Act) -> Strategy:
    """A strategy that keeps (weight 1) the live entries where the act is non-zero and drops the rest.

    Args:
      score: signals -> ``[N, G]`` or ``[N, G, T]``.
      act: (score, signals) -> the same shape, bool or numbers.

    Raises:
      ValueError: (when traced) the act does not fit the score's shape.

    Example::

      keep_long = select(length, lambda s, signals: s > 20)
    """

    def apply(state: State, signals: Signals) -> tuple[Array, State]:
        s = score(signals)
        keep = act(s, signals)
        if keep.shape != s.shape:
            raise ValueError(f"act returned shape {keep.shape} for a score of shape {s.shape}; it must keep the shape")
        return ((keep != 0) & live_mask(signals, s.ndim)).astype(jnp.float32), state

    return Strategy(tuple, apply, needs_of(score) | needs_of(act))


def band(score: Array, signals: Signals, *, low: float = 0.2, high: float = 0.8) -> Array:
    """Keep where low < score < high, both strict."""
    if not low < high:
        raise ValueError(f"band: low {low} must be below high {high}")
    return (score > low) & (score < high)


def top_fraction(score: Array, signals: Signals, *, fraction: float = 0.5) -> Array:
    """Keep the max(1, round(fraction * B)) largest of the whole batch, B = live rows (tokens)."""
    live = live_mask(signals, score.ndim).ravel()
    rank = ranks(-score.ravel(), live)
    return (rank < portion(fraction, jnp.sum(live))).reshape(score.shape)


@needs("groups")
def top_k(score: Array, signals: Signals, *, k: int = 3, by: str = "efficiency") -> Array:
    """Keep the k best live rows of each group by score / length (efficiency), by -length (short) or by score.

    The length of an empty response counts as 1. A group with fewer than k live rows keeps them all.
    """
    require_rows(score, "top_k")
    require_choice("top_k: by", by, ("efficiency", "short", "score"))
    if k < 1:
        raise ValueError(f"top_k: k {k} must be at least 1")
    size = jnp.maximum(signals.length, 1).astype(jnp.float32)
    key = {"efficiency": lambda: score / size, "short": lambda: -size, "score": lambda: score}[by]()
    return group_ranks(-key, signals.valid) < k


@needs("groups")
def max_variance(score: Array, signals: Signals, *, fraction: float = 0.5) -> Array:
    """Keep per group the max(1, round(fraction * G)) rows, G = live ones, whose score has the largest variance.

    The best subset of size n is the a lowest and n - a highest rows, so only a = 0..n is scanned; equal variances
    take the smallest a, equal scores the lowest positions.
    """
    require_rows(score, "max_variance")
    G = score.shape[1]
    live = signals.valid
    low = jnp.min(jnp.where(live, score, jnp.inf), 1, keepdims=True)
    span = jnp.max(jnp.where(live, score, -jnp.inf), 1, keepdims=True) - low
    # To [0, 1]: two-valued rewards become exact, and no scale can over- or underflow.
    unit = jnp.where(live & (span > 0), (score - low) / jnp.where(span > 0, span, 1.0), 0.0)
    up, down = group_ranks(unit, live), group_ranks(-unit, live)
    n = portion(fraction, jnp.sum(live, 1))[:, None, None]
    a = jnp.arange(G + 1)[None, :, None]
    kept = ((up[:, None] < a) | (down[:, None] < n - a)) & live[:, None]  # [N, a, G]
    mean = jnp.sum(jnp.where(kept, unit[:, None], 0.0), -1, keepdims=True) / jnp.maximum(n, 1)
    variance = jnp.sum(jnp.where(kept, (unit[:, None] - mean) ** 2, 0.0), -1) / jnp.maximum(n[..., 0], 1)
    # up and down count equal scores from the same end, so a subset that takes them from both sides would be short;
    # it has the variance of one with a smaller a, which comes first.
    possible = (jnp.sum(kept, -1) == n[..., 0]) & (a[..., 0] <= n[..., 0])
    variance = jnp.where(possible, variance, -1.0)
    best = jnp.argmax(variance >= jnp.max(variance, 1, keepdims=True) * (1 - VARIANCE_TOLERANCE), axis=1)
    return jnp.take_along_axis(kept, best[:, None, None], 1)[:, 0]


SELECT_ACTS: dict[str, Callable[..., Array]] = {f.__name__: f for f in (band, top_fraction, top_k, max_variance)}
