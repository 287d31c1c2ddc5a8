"""What a batch teaches, decided before the forward pass: advantages, strategies, and which rows need computing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from rlvr_jax.advantages import advantages, effective_groups
from rlvr_jax.config import Algorithm
from rlvr_jax.critic import gae, start_metrics, token_rewards, whiten
from rlvr_jax.types import Array, Signals, UpdateBatch, response_mask

Metrics = dict[str, tuple[Array, Array]]


class Coefficients(NamedTuple):
    """Per-row and per-token coefficients, all known before the forward pass.

    advantage ``[B]``, of a critic ``[B, T]``; weight ``[B, T]`` (0 = dropped); mask ``[B, T] bool`` response tokens of valid rows;
    live ``[B] bool`` rows that must be computed; on_policy ``[B] bool`` rows whose importance weight is 1 by
    definition; fresh ``[B] bool`` rows sampled by the current weights; with a critic value and returns ``[B, T]``: values
    at the start of the step, and what they should have been.
    """

    advantage: Array
    weight: Array
    mask: Array
    live: Array
    on_policy: Array
    fresh: Array
    value: Array | None = None
    returns: Array | None = None


def make_coefficients(batch: UpdateBatch, step: Array, strategy_state: Any, algo: Algorithm, strategy: Any, G: int, truncates: bool,
              domains: Sequence[str] = (), ref_logprob: Array | None = None, value: Array | None = None) -> tuple[Coefficients, Any, Metrics]:
    """Advantages and strategies: everything that is decided before the forward pass.

    Args:
      ref_logprob: ``[B, T]``, for a KL in the reward.
      value: ``[B, T]`` the critic's values, exactly with advantage 'gae': then advantages are per token, whitened over the
        response tokens of all answered rows, ineffective groups teach too, and every answered row is live.
    """
    B, T = batch.tokens.shape
    group = lambda x: x.reshape(B // G, G, *x.shape[1:])  # noqa: E731
    mask = response_mask(batch.prompt_length, batch.response_length, T) & batch.valid[:, None]
    kl = None if ref_logprob is None else algo.kl_coef * (batch.logprob - ref_logprob) * mask  # k1 in the reward
    effective = effective_groups(group(batch.reward), group(batch.valid))  # decided on the reward alone
    returns = None
    if value is None:
        reward = batch.reward if kl is None else batch.reward - jnp.sum(kl, 1)
        standardise = lambda valid: advantages(algo.advantage, group(reward), valid) * effective[:, None]  # noqa: E731
    else:
        assert algo.value is not None
        raw, returns = gae(token_rewards(batch, mask, kl), value, mask, algo.value.gamma, algo.value.lam)
        standardise = lambda valid: group(whiten(raw, mask & valid.reshape(B, 1)))  # noqa: E731
    advantage = standardise(group(batch.valid))

    # Overlong filtering: such rows stay in the group's mean and std, and take no part in the rest.
    usable = batch.valid & ~batch.truncated if algo.mask_truncated else batch.valid
    signals = Signals.create(
        group(batch.reward), advantage, group(batch.logprob), group(mask & usable[:, None]), group(batch.response_length), batch.domain,
        step, valid=group(usable), correct=group(batch.correct), truncated=group(batch.truncated), age=group(step - batch.policy_step),
        entropy=None if batch.entropy is None else group(batch.entropy))
    weight, strategy_state = strategy.apply(strategy_state, signals)
    weight = weight[..., None] if weight.ndim == 2 else weight
    weight = (jnp.broadcast_to(weight, signals.mask.shape) * signals.mask).reshape(B, T)
    kept = jnp.any(weight > 0, 1)
    if algo.restandardise:
        advantage = standardise(group(kept))
    advantage = advantage.reshape(B, *advantage.shape[2:])

    fresh = batch.policy_step == step
    on_policy = jnp.zeros(B, bool) if truncates else fresh
    if value is not None and returns is not None:  # the critic learns from dropped rows too
        plan = Coefficients(advantage, weight, mask, jnp.any(mask, 1), on_policy, fresh, value, returns)
        return plan, strategy_state, _metrics(plan, effective, batch, G, domains) | start_metrics(value, returns, mask)
    has_loss = (advantage != 0) if not _regularised(algo) else jnp.ones(B, bool)
    plan = Coefficients(advantage, weight, mask, kept & has_loss, on_policy, fresh)
    return plan, strategy_state, _metrics(plan, effective, batch, G, domains)


def _regularised(algo: Algorithm) -> bool:
    return (algo.kl_coef > 0 and not algo.kl_in_reward) or algo.entropy_coef > 0


def _metrics(plan: Coefficients, effective: Array, batch: UpdateBatch, G: int, domains: Sequence[str]) -> Metrics:
    """Of the whole batch, and of each domain under ``<name>/<domain>`` where there are several."""
    out = _statistics(plan, effective, batch, G, jnp.ones(effective.shape, bool))
    for d, name in enumerate(domains if len(domains) > 1 else ()):
        out |= {f"{k}/{name}": v for k, v in _statistics(plan, effective, batch, G, batch.domain == d).items()}
    return out


def _statistics(plan: Coefficients, effective: Array, batch: UpdateBatch, G: int, groups: Array) -> Metrics:
    """Name -> (sum, count) over the selected groups ``[N] bool``. A pair whose count is 0 has no value."""
    f = jnp.float32
    rows = jnp.repeat(groups, G)
    kept_T = (plan.weight > 0) & rows[:, None]
    kept_row = jnp.any(kept_T, 1)
    valid, tokens = f(jnp.sum(batch.valid & rows)), f(jnp.sum(plan.mask & rows[:, None]))
    w = jnp.where(kept_T, plan.weight, 0.0)
    n_kept, w_sum, w_sq, any_group = f(jnp.sum(kept_T)), jnp.sum(w), jnp.sum(w * w), f(jnp.any(groups))
    updated = f(jnp.sum(kept_T & plan.live[:, None]))
    n = jnp.maximum(n_kept, 1)
    counted = batch.valid & rows if plan.advantage.ndim == 1 else plan.mask & rows[:, None]
    return {
        "kept/rows": (f(jnp.sum(kept_row)), valid),
        "kept/groups": (f(jnp.sum(jnp.any(kept_row.reshape(-1, G), 1))), f(jnp.sum(groups))),
        "kept/tokens": (n_kept, tokens),
        "update/live_rows": (f(jnp.sum(plan.live & rows)), f(jnp.sum(rows))),
        "tokens/updated_share": (updated, tokens),
        "tokens/updated": (updated, any_group),
        "effective/groups": (f(jnp.sum(effective & groups)), f(jnp.sum(groups))),
        "strategy/weight_mean": (w_sum, n_kept),
        "strategy/weight_std": (jnp.sqrt(jnp.maximum(w_sq / n - (w_sum / n) ** 2, 0)), f(n_kept > 0)),
        "strategy/ess": (w_sum**2 / jnp.maximum(w_sq, 1e-30), n_kept),
        "entropy_estimate": (-jnp.sum(batch.logprob * (plan.mask & rows[:, None])), tokens),
        "advantage/abs_mean": (jnp.sum(jnp.abs(plan.advantage) * counted), f(jnp.sum(counted))),
    }
