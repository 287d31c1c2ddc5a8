"""From losses of tokens to one loss.

    loss = sum over tokens of  per_token_loss * token_scale

The scale carries the global counts, which are known before the forward pass, so the loss and its gradient are plain
sums: any split into micro-batches or devices gives the same result. The loss of a token is
:mod:`rlvr_jax.kernels.token_logprob.objective`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.config import Algorithm
from rlvr_jax.kernels.token_logprob.objective import Objective

Array = jax.Array


def objective_of(a: Algorithm) -> Objective:
    """The part of the configuration that a token's loss depends on."""
    return Objective(objective=a.objective, clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip, is_level=a.is_level, is_cap=a.is_cap,
                     kl_coef=a.kl_coef, kl_estimator=a.kl_estimator, kl_in_reward=a.kl_in_reward, entropy_coef=a.entropy_coef)


class Counts(NamedTuple):
    """Global counts of the denominator: response tokens, and rows that have any; scalars, float32."""

    tokens: Array
    rows: Array


def denominator_counts(mask: Array) -> Counts:
    """Counts of a ``[B, T] bool`` mask over the *whole* batch: taken once, before any micro-batching."""
    return Counts(jnp.sum(mask, dtype=jnp.float32), jnp.sum(jnp.any(mask, axis=1), dtype=jnp.float32))


def token_scale(aggregation: str, mask: Array, counts: Counts, max_length: int) -> Array:
    """``[B, T]`` factors such that ``sum(per_token_loss * scale)`` is the aggregated loss.

    Args:
      aggregation: 'token_mean' (sum over tokens / all tokens), 'sequence_mean' (mean over rows of the row's token mean),
        'sequence_sum_const' (sum / (rows * max_length), Dr.GRPO, arXiv 2503.20783).
      mask: ``[B, T] bool`` tokens that count in the denominator, of these rows (a micro-batch's rows, whole). Kept rows
        only, or all: the caller decides, and makes ``counts`` from the same mask of the whole batch.
      counts: of the whole batch.
      max_length: the constant of 'sequence_sum_const', in tokens: the longest response allowed.

    Raises:
      ValueError: unknown aggregation.
    """
    m = mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return m / jnp.maximum(counts.tokens, 1)
    if aggregation == "sequence_mean":
        return m / jnp.maximum(jnp.sum(m, axis=1, keepdims=True), 1) / jnp.maximum(counts.rows, 1)
    if aggregation == "sequence_sum_const":
        return m / (jnp.maximum(counts.rows, 1) * max_length)
    raise ValueError(f"aggregation '{aggregation}' is not known; use token_mean, sequence_mean or sequence_sum_const")
