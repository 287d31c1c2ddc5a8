"""``reweight(score, act)``: positive weights of mean 1. An act gives them up to a factor; one function and one table line each."""

from collections.abc import Callable

import jax.numpy as jnp

from rlvr_jax.strategies.base import (
    TINY,
    Act,
    Array,
    Score,
    State,
    Strategy,
    live_mask,
    mean_one,
    needs_of,
    scaled,
)
from rlvr_jax.types import Signals


def reweight(score: Score, act: Act) -> Strategy:
    """A strategy whose weights are the act's, brought to mean 1 over the live rows (response tokens).

    An entry for which the act is exactly 0 is dropped and is no part of the mean.

    Args:
      score: signals -> ``[N, G]`` or ``[N, G, T]``.
      act: (score, signals) -> the same shape, >= 0.

    Raises:
      ValueError: (when traced) the act does not fit the score's shape.
    """

    def apply(state: State, signals: Signals) -> tuple[Array, State]:
        s = score(signals)
        weights = act(s, signals)
        if weights.shape != s.shape:
            raise ValueError(f"act returned shape {weights.shape} for a score of shape {s.shape}; it must keep the shape")
        weights = weights.astype(jnp.float32)
        return mean_one(weights, live_mask(signals, s.ndim) & (weights != 0)), state

    return Strategy(tuple, apply, needs_of(score) | needs_of(act))


def softmax(score: Array, signals: Signals, *, tau: float = 1.0) -> Array:
    """exp(score / tau) over the batch."""
    if not tau > 0:
        raise ValueError(f"softmax: tau {tau} must be positive")
    live = live_mask(signals, score.ndim)
    z = jnp.where(live, score, -jnp.inf)
    top = jnp.max(z)
    return jnp.where(live, jnp.maximum(jnp.exp(jnp.where(live, z - top, 0.0) / tau), TINY), 0.0)


def power(score: Array, signals: Signals, *, alpha: float = 0.5, eps: float = 1e-8) -> Array:
    """(score + eps) ** alpha; a negative score counts as 0."""
    if not (alpha >= 0 and eps > 0):
        raise ValueError(f"power: alpha {alpha} must be at least 0 and eps {eps} positive")
    live = live_mask(signals, score.ndim)
    base = jnp.where(live, jnp.maximum(score, 0.0) + eps, eps)
    # Relative to the largest: the same weights after scaling to mean 1, and no power can overflow.
    return jnp.where(live, jnp.maximum((base / jnp.max(base)) ** alpha, TINY), 0.0)


def quantile_band(score: Array, signals: Signals, *, low_q: float = 0.25, high_q: float = 0.75,
                  focus_weight: float = 2.0) -> Array:
    """focus_weight within the batch quantiles [low_q, high_q] (linear interpolation, inclusive), 1 outside."""
    if not 0 <= low_q <= high_q <= 1:
        raise ValueError(f"quantile_band: need 0 <= low_q <= high_q <= 1, got {low_q} and {high_q}")
    if not focus_weight > 0:
        raise ValueError(f"quantile_band: focus_weight {focus_weight} must be positive")
    live = live_mask(signals, score.ndim)
    ordered = jnp.sort(jnp.where(live, score, jnp.inf).ravel())
    count = jnp.sum(live)
    inside = (score >= _quantile(ordered, count, low_q)) & (score <= _quantile(ordered, count, high_q))
    return jnp.where(inside, jnp.float32(focus_weight), 1.0)


def _quantile(ordered: Array, count: Array, q: float) -> Array:
    """The q-quantile of the first ``count`` entries of a sorted vector; 0 when there are none."""
    whole, rest, d = scaled(q, jnp.maximum(count - 1, 0))
    below = ordered[whole]
    above = ordered[jnp.minimum(whole + 1, jnp.maximum(count - 1, 0))]
    exact = rest == 0
    return jnp.where(count > 0, jnp.where(exact, below, below + jnp.where(exact | (above == below), 0.0, above - below) * (rest / d)), 0.0)


def damp(score: Array, signals: Signals, *, alpha: float = 0.5) -> Array:
    """alpha * score + (1 - alpha), so that entries of low score count less; the score is clipped to [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"damp: alpha {alpha} is outside [0, 1]")
    return jnp.maximum(alpha * jnp.clip(score, 0.0, 1.0) + (1 - alpha), TINY)


REWEIGHT_ACTS: dict[str, Callable[..., Array]] = {f.__name__: f for f in (softmax, power, quantile_band, damp)}
