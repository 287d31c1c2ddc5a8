"""The strategy interface, in optax's shape, and the few array helpers that every score and act shares.

A *score* reads :class:`~rlvr_jax.types.Signals` and returns ``[N, G]`` or ``[N, G, T]``. An *act* turns a score into a
weight of the same shape; 0 = dropped. ``select`` makes 0/1 weights of an act, ``reweight`` positive ones of mean 1.
A row (token) is *live* when it is known, not padding and not dropped by an earlier stage; nothing else may enter a
mean, quantile, ranking or variance.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.types import Signals

Array = jax.Array
State = Any
Score = Callable[[Signals], Array]
Act = Callable[[Array, Signals], Array]

# Smallest weight a reweighting act returns: 0 means dropped, and an underflow must not drop a row.
TINY = 1e-30
# Denominators above this would overflow int32 in :func:`scaled`; it keeps fractions of four decimals exact.
MAX_DENOMINATOR = 30_000


class Strategy(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: ``() -> state``, a pytree of fixed shapes; ``()`` when there is nothing to remember.
      apply: ``(state, signals) -> (weights, state)`` with weights ``[N, G]`` or ``[N, G, T] float32``, 0 = dropped.
      needs: what it must be given beyond the defaults: "entropy" (the sampler records it), "groups" (several samples
        of one prompt are compared with each other).
    """

    init: Callable[[], State]
    apply: Callable[[State, Signals], tuple[Array, State]]
    needs: frozenset[str] = frozenset()

    @property
    def needs_entropy(self) -> bool:
        return "entropy" in self.needs

    @property
    def needs_groups(self) -> bool:
        return "groups" in self.needs


def needs(*what: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Marks a score or act with what it needs; ``select`` and ``reweight`` collect the marks."""

    def mark(f: Callable[..., Array]) -> Callable[..., Array]:
        f.needs = frozenset(what)  # type: ignore[attr-defined]
        return f

    return mark


def needs_of(f: Callable[..., Any]) -> frozenset[str]:
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "needs", frozenset())


def live_mask(signals: Signals, ndim: int) -> Array:
    """``[N, G]`` live rows for ndim 2, ``[N, G, T]`` response tokens of live rows for ndim 3."""
    return signals.valid if ndim == 2 else signals.mask & signals.valid[..., None]


def drop(signals: Signals, weights: Array) -> Signals:
    """The signals a later stage sees: rows (tokens) of weight 0 leave ``valid`` (``mask``).

    A row whose tokens are all dropped is no longer valid.
    """
    kept = live_mask(signals, weights.ndim) & (weights != 0)
    valid = kept if weights.ndim == 2 else jnp.any(kept, -1)
    mask = signals.mask & (kept[..., None] if weights.ndim == 2 else kept)
    return signals.replace(valid=valid, mask=mask)


def mean_one(weights: Array, live: Array) -> Array:
    """Weights scaled to mean 1 over the live entries, 0 elsewhere; all 0 when nothing is live."""
    weights = jnp.where(live, weights, 0.0)
    total = jnp.sum(weights)
    scale = jnp.where(total > 0, jnp.sum(live, dtype=jnp.float32) / jnp.where(total > 0, total, 1.0), 0.0)
    return weights * scale


def ranks(key: Array, live: Array) -> Array:
    """``[B] -> [B]`` ascending rank, equal keys by position, entries that are not live last."""
    order = jnp.argsort(jnp.where(live, key, jnp.inf), stable=True)
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))


def group_ranks(key: Array, live: Array) -> Array:
    """``[N, G] -> [N, G]`` as :func:`ranks`, within each group. By comparing all pairs: groups are small, sorts are slow."""
    key = jnp.where(live, key, jnp.inf)
    mine, other = key[:, :, None], key[:, None, :]
    position = jnp.arange(key.shape[1])
    return jnp.sum((other < mine) | ((other == mine) & (position < position[:, None])), -1)


def scaled(fraction: float, count: Array) -> tuple[Array, Array, int]:
    """``fraction * count`` exactly, as (whole part, remainder, denominator of the remainder).

    Integers, since float32 gives 0.7 * 10 = 6.9999998 on one backend and 7 on another.

    Raises:
      ValueError: the fraction is outside [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction {fraction} is outside [0, 1]")
    exact = Fraction(str(float(fraction))).limit_denominator(MAX_DENOMINATOR)
    p, d = exact.numerator, exact.denominator
    high, low = count // d, count % d  # p * count may not fit into int32; p * low does
    return p * high + (p * low) // d, (p * low) % d, d


def portion(fraction: float, count: Array) -> Array:
    """``max(1, round(fraction * count))``, half to even, but never more than ``count``."""
    whole, rest, d = scaled(fraction, count)
    up = (2 * rest > d) | ((2 * rest == d) & (whole % 2 == 1))
    return jnp.minimum(jnp.maximum(whole + up, 1), count)


def require_rows(score: Array, act: str) -> None:
    """Raises ValueError when a score per token reaches an act that compares whole rows."""
    if score.ndim != 2:
        raise ValueError(f"act '{act}' compares rows and needs a score [N, G], but this score is per token [N, G, T]; "
                         "use a row score (reward, solve_rate, advantage_magnitude, reward_std, length)")


def require_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{what}: '{value}' is not one of {', '.join(choices)}")
