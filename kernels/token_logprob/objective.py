"""The policy objective, per token: a function of a token's log-probabilities, its advantage and its weight.

Everything is pure and float32. Values outside ``mask`` are never read, statistics come as ``(sum, count)``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Stats = dict[str, tuple[Array, Array]]

LOG_RATIO_BOUND = 20.0
"""exp(20) = 4.9e8: far beyond any ratio that means something, far below float32's limit even when squared."""


def bounded_log_ratio(numerator: Array, denominator: Array, mask: Array) -> Array:
    """``log(numerator / denominator)`` of log-probabilities, within +-20, and 0 outside ``mask``.

    Bounded before any exp, so that value and gradient stay finite; beyond the bound the gradient is 0.
    """
    difference = jnp.where(mask, numerator - denominator, 0)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class Rows(NamedTuple):
    """Which row each entry of an array belongs to, where rows are not an axis: ``row`` ids of the array's shape, in
    ``[0, number)``; anything else belongs to no row."""

    row: Array
    number: int


def row_sum(x: Array, mask: Array, rows: Rows | None = None) -> Array:
    """Sum over the row's masked tokens, given to each of them. Rows are the last axis, unless ``rows`` says otherwise."""
    x = jnp.where(mask, x, 0)
    if rows is None:
        return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)
    total = jax.ops.segment_sum(x.reshape(-1), rows.row.reshape(-1), rows.number)
    return jnp.take(total, rows.row, mode="fill", fill_value=0)


def row_mean(x: Array, mask: Array, rows: Rows | None = None) -> Array:
    """Mean over the row's masked tokens, given to each of them; 0 for a row without any."""
    return row_sum(x, mask, rows) / jnp.maximum(row_sum(mask.astype(x.dtype), mask, rows), 1)


def _spread(x: Array, like: Array) -> Array:
    """A value per row as a value per token."""
    return x[:, None] if x.ndim < like.ndim else x


def importance_weight(old_logprob: Array, behavior_logprob: Array, mask: Array, *, level: str = "token",
                      cap: float | None = None, fresh: Array | None = None, rows: Rows | None = None) -> tuple[Array, Array]:
    """``w = stop_grad(exp(old - behaviour))``, the correction for rows another policy sampled (arXiv 2110.00641).

    Args:
      old_logprob, behavior_logprob, mask: ``[B, T]``.
      level: 'token', or one weight per row: 'sequence_mean' (geometric mean of the ratios), 'sequence_sum' (product).
      cap: upper bound of w, or None.
      fresh: ``[B]`` or ``[B, T] bool`` where w is set to exactly 1, or None.
      rows: where rows are not the last axis.

    Returns:
      ``(w [B, T], capped [B, T] bool)``; outside ``mask`` 1 and False.

    Raises:
      ValueError: unknown level.
    """
    log_ratio = bounded_log_ratio(old_logprob, behavior_logprob, mask)
    if level == "sequence_mean":
        log_ratio = row_mean(log_ratio, mask, rows)
    elif level == "sequence_sum":
        # From the raw differences: bounding each token first would hide how far apart the policies are.
        log_ratio = jnp.clip(row_sum(old_logprob - behavior_logprob, mask, rows), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    elif level != "token":
        raise ValueError(f"importance weight level '{level}' is not known; use token, sequence_mean or sequence_sum")
    needed = mask if fresh is None else mask & ~_spread(fresh, mask)
    w = jnp.where(needed, jnp.exp(log_ratio), 1)
    capped = jnp.zeros(w.shape, bool) if cap is None else w > cap
    return jax.lax.stop_gradient(w if cap is None else jnp.where(needed, jnp.minimum(w, cap), 1)), capped & needed


def clipped_surrogate(ratio: Array, advantage: Array, low: float, high: float, dual_clip: float | None = None) -> Array:
    """``min(r A, clip(r, 1 - low, 1 + high) A)``; with ``dual_clip`` c, at least ``c A`` where A < 0 (arXiv 1912.09729).

    Raises:
      ValueError: dual_clip <= 1, which would bound the loss of an unchanged policy.
    """
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
    if dual_clip is None:
        return surrogate
    if dual_clip <= 1:
        raise ValueError(f"dual_clip {dual_clip} must be > 1 (10 is usual), or null for none")
    return jnp.where(advantage < 0, jnp.maximum(surrogate, dual_clip * advantage), surrogate)


def kl_estimate(name: str, logprob: Array, ref_logprob: Array, mask: Array) -> Array:
    """Per-token estimate of KL(policy || reference) on bounded log ratios, 0 outside ``mask``.

    ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d`` with ``d = log(reference / policy)``. k1 is for rewards only: as
    a loss its expected gradient is zero.

    Raises:
      ValueError: unknown name.
    """
    d = bounded_log_ratio(ref_logprob, logprob, mask)
    if name == "k1":
        return -d
    if name == "k2":
        return d**2 / 2
    if name == "k3":
        return jnp.expm1(d) - d
    raise ValueError(f"KL estimator '{name}' is not known; use k1 (in the reward), k2 or k3")


class Objective(NamedTuple):
    """What is maximised; the names are those of the configuration's ``algorithm``.

    Attributes:
      objective: 'clip' (PPO's clipped ratio), 'gspo' (the row's ratio, arXiv 2507.18071) or 'cispo' (the clipped ratio
        is a constant, arXiv 2506.13585).
      clip_low, clip_high: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]``.
      dual_clip: see :func:`clipped_surrogate`.
      is_level, is_cap: see :func:`importance_weight`.
      kl_coef, kl_estimator: see :func:`kl_estimate`; with ``kl_in_reward`` the KL is only measured here.
      entropy_coef: of the entropy bonus.
    """

    objective: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    is_level: str = "token"
    is_cap: float | None = 2.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    entropy_coef: float = 0.0


def needs_whole_rows(cfg: Objective) -> bool:
    """Whether a token's loss depends on the log-probabilities of the other tokens of its row."""
    return cfg.objective == "gspo" or cfg.is_level != "token"


def policy_objective(cfg: Objective, *, logprob: Array, behavior_logprob: Array | None, advantage: Array, weight: Array,
                     mask: Array, old_logprob: Array | None = None, ref_logprob: Array | None = None,
                     entropy: Array | None = None, on_policy: Array | None = None, fresh: Array | None = None,
                     sampler_logprob: Array | None = None, rows: Rows | None = None) -> tuple[Array, Stats]:
    """Loss of each token: ``-weight * w * surrogate + kl_coef * KL - entropy_coef * entropy``.

    Args:
      cfg: objective, clip bounds, KL, entropy and importance-weight fields are read.
      logprob: ``[B, T]`` of the policy being differentiated.
      behavior_logprob: ``[B, T]`` of what sampled the tokens; None sets every importance weight to 1.
      advantage: ``[B]`` or ``[B, T]``.
      weight: ``[B, T]``; a token of weight 0 is dropped: no policy, KL or entropy term, and no part of a statistic.
      mask: ``[B, T] bool`` response tokens whose ``logprob`` was computed.
      old_logprob: ``[B, T]`` of the proximal policy; None means the policy itself (one update per batch, ratio 1).
      ref_logprob: ``[B, T]``, needed if ``kl_coef > 0`` and the KL is in the loss.
      entropy: ``[B, T]``, needed if ``entropy_coef > 0``.
      on_policy: ``[B]`` or ``[B, T] bool``: the importance weight is exactly 1 (fresh, and sampled without truncation).
      fresh: ``[B]`` or ``[B, T] bool``: sampled by the current weights; ``logprob_gap`` is measured there. Default: all.
      sampler_logprob: ``[B, T]`` full-softmax logprob the sampler stored, for ``logprob_gap``; default
        ``behavior_logprob``.
      rows: where rows are not the last axis (packed rows); the arrays may then have any shape, all the same.

    Returns:
      ``(per_token_loss [B, T], statistics)``; the loss is 0 outside ``mask`` and on dropped tokens. Statistics are
      ``name -> (sum, count)``, see :func:`fold_stats`.

    Raises:
      ValueError: an input that the configuration needs is missing.
    """
    live = mask.astype(bool) & (weight != 0)
    fixed = jax.lax.stop_gradient(logprob)
    old = fixed if old_logprob is None else jax.lax.stop_gradient(old_logprob)
    advantage = jnp.where(live, _spread(advantage, live), 0)
    w, capped = jnp.ones(logprob.shape, jnp.float32), jnp.zeros(logprob.shape, bool)
    if behavior_logprob is not None:
        w, capped = importance_weight(old, behavior_logprob, live, level=cfg.is_level, cap=cfg.is_cap, fresh=on_policy, rows=rows)
    surrogate, ratio = _surrogate(cfg, logprob, fixed, old, advantage, live, rows)
    loss = -jnp.where(live, weight, 0) * w * surrogate
    stats = _ratio_stats(cfg, jax.lax.stop_gradient(ratio), advantage, live)
    stats |= {"is_weight": _total(w, live), "is_weight_sq": _total(w**2, live), "is_capped": _total(capped, live)}
    stored = behavior_logprob if sampler_logprob is None else sampler_logprob
    if stored is not None:
        stats |= _gap_stats(old, stored, live if fresh is None else live & _spread(fresh, live))
    if ref_logprob is not None:
        kl = kl_estimate(cfg.kl_estimator, logprob, jax.lax.stop_gradient(ref_logprob), live)
        stats["kl"] = _total(kl, live)
        loss = loss if cfg.kl_in_reward else loss + cfg.kl_coef * kl
    elif cfg.kl_coef > 0 and not cfg.kl_in_reward:
        raise ValueError(f"algorithm.kl_coef is {cfg.kl_coef} but no reference log-probabilities were given; compute them or set it to 0")
    if entropy is not None:
        stats["entropy"] = _total(entropy, live)
        loss = loss - cfg.entropy_coef * jnp.where(live, entropy, 0)
    elif cfg.entropy_coef > 0:
        raise ValueError(f"algorithm.entropy_coef is {cfg.entropy_coef} but no entropy was given; ask token_logprob for it or set it to 0")
    return loss, stats


def _surrogate(cfg: Objective, logprob: Array, fixed: Array, old: Array, advantage: Array, live: Array, rows: Rows | None) -> tuple[Array, Array]:
    """(what is maximised, ratio), both ``[B, T]``."""
    if cfg.objective == "cispo":
        ratio = jnp.exp(bounded_log_ratio(fixed, old, live))
        kept = jnp.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
        return kept * advantage * jnp.where(live, logprob, 0), ratio
    log_ratio = bounded_log_ratio(logprob, old, live)
    if cfg.objective == "gspo":
        # The row's ratio as the value, each token's own log-probability as the gradient: with one advantage per row this
        # is the sequence objective of arXiv 2507.18071, and token weights keep their meaning.
        sequence = row_mean(jax.lax.stop_gradient(log_ratio), live, rows)
        log_ratio = jnp.where(live, sequence + logprob - fixed, 0)
    ratio = jnp.exp(log_ratio)
    return clipped_surrogate(ratio, advantage, cfg.clip_low, cfg.clip_high, cfg.dual_clip), ratio


def _total(x: Array, mask: Array) -> tuple[Array, Array]:
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.sum(jnp.where(mask, x, 0)), jnp.sum(mask, dtype=jnp.float32)


def _largest(x: Array, mask: Array) -> tuple[Array, Array]:
    """The maximum of a non-negative ``x``; 0 where nothing is masked in. The count only says whether there was any."""
    return jnp.max(jnp.where(mask, jax.lax.stop_gradient(x), 0), initial=0), jnp.sum(mask, dtype=jnp.float32)


def _ratio_stats(cfg: Objective, ratio: Array, advantage: Array, live: Array) -> Stats:
    log_ratio = jnp.log(ratio)
    return {
        "ratio": _total(ratio, live),
        "ratio_max": _largest(ratio, live),
        "approx_kl": _total(jnp.expm1(log_ratio) - log_ratio, live),
        "clip_low_fraction": _total((ratio < 1 - cfg.clip_low) & (advantage < 0), live),
        "clip_high_fraction": _total((ratio > 1 + cfg.clip_high) & (advantage > 0), live),
    }


def _gap_stats(logprob: Array, stored: Array, mask: Array) -> Stats:
    gap = jnp.abs(jnp.where(mask, logprob - stored, 0))
    return {"logprob_gap": _total(gap, mask), "logprob_gap_max": _largest(gap, mask)}


def fold_stats(stacked: Stats) -> Stats:
    """Statistics of disjoint sets of tokens, stacked on axis 0, as one: sums and counts add, names that end in '_max' take the largest."""
    return {k: ((jnp.max if k.endswith("_max") else jnp.sum)(total, axis=0), jnp.sum(count, axis=0)) for k, (total, count) in stacked.items()}
