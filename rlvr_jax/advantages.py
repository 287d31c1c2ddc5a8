"""Advantages from the rewards of a group: ``[N, G] -> [N, G]``.

Rows that are not ``valid`` (verdict unknown, padding) are no part of any mean or deviation and get 0. A group whose
valid rewards are all exactly equal, or that has fewer than two of them, is *ineffective*: its advantages are exactly 0
and never float noise divided by a tiny deviation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


def effective_groups(reward: Array, valid: Array) -> Array:
    """``[N, G], [N, G] bool -> [N] bool``: two valid rewards of the group differ.

    Decided on exact equality over the whole group, so it never depends on rounding or on which peer is looked at.
    """
    _check(reward, valid)
    valid = valid.astype(bool)
    low = jnp.min(jnp.where(valid, reward, jnp.inf), axis=1)
    high = jnp.max(jnp.where(valid, reward, -jnp.inf), axis=1)
    return high > low


def advantages(name: str, reward: Array, valid: Array, eps: float = 1e-6) -> Array:
    """Advantages by the named estimator.

    Args:
      name: a key of :data:`ESTIMATORS`.
      reward: ``[N, G]``.
      valid: ``[N, G] bool``.
      eps: added to a standard deviation before dividing.

    Returns:
      ``[N, G] float32``, 0 on rows that are not valid and in ineffective groups.

    Raises:
      ValueError: unknown name, shapes that are not one ``[N, G]``.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"advantage '{name}' is not known; use one of {', '.join(ESTIMATORS)}")
    _check(reward, valid)
    used = valid.astype(bool) & effective_groups(reward, valid)[:, None]
    reward = jnp.where(used, reward, 0).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(used, axis=1, keepdims=True, dtype=jnp.float32), 1)
    centred = jnp.where(used, reward - jnp.sum(reward, axis=1, keepdims=True) / count, 0)
    return ESTIMATORS[name](centred, used, count, eps)


def _grpo(centred: Array, used: Array, count: Array, eps: float) -> Array:
    """``(R - mean) / (std + eps)``, population deviation (arXiv 2402.03300)."""
    return centred / (jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / count) + eps)


def _dr_grpo(centred: Array, used: Array, count: Array, eps: float) -> Array:
    """``R - mean`` (arXiv 2503.20783)."""
    return centred


def _rloo(centred: Array, used: Array, count: Array, eps: float) -> Array:
    """``R - mean of the others = G/(G-1) (R - mean)``, G the valid rows (arXiv 2402.14740)."""
    return centred * count / jnp.maximum(count - 1, 1)


def _reinforce_pp_baseline(centred: Array, used: Array, count: Array, eps: float) -> Array:
    """``(R - mean_g)`` over its deviation in the batch (arXiv 2501.03262).

    Differs from the paper: the deviation is taken over the rows of effective groups, and no second mean is subtracted,
    so ineffective groups stay exactly 0.
    """
    rows = jnp.maximum(jnp.sum(used, dtype=jnp.float32), 1)
    return centred / (jnp.sqrt(jnp.sum(centred**2) / rows) + eps)


ESTIMATORS: dict[str, Callable[[Array, Array, Array, float], Array]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}


def _check(reward: Array, valid: Array) -> None:
    if reward.ndim != 2 or valid.shape != reward.shape:
        raise ValueError(f"advantages: reward {reward.shape} and valid {valid.shape} must both be [N, G]; reshape rows to groups first")
