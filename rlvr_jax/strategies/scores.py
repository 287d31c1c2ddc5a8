"""Scores: what a strategy looks at. Each reads signals that the step already has; add one function and one table line."""

import jax.numpy as jnp
import numpy as np

from rlvr_jax.strategies.base import Array, Score, live_mask, needs, require_choice
from rlvr_jax.types import Signals


def reward(signals: Signals) -> Array:
    """Reward of the row. ``[N, G]``."""
    return signals.reward


@needs("groups")
def solve_rate(signals: Signals, *, threshold: float | None = None) -> Array:
    """Share of the group's live rows that are correct, the same for all rows of a group. ``[N, G]``.

    ``threshold``: count rows with reward > threshold instead of ``signals.correct``.

    The rate is looked up by the two integer counts in a table made on the host, so it is the correctly rounded
    quotient on every backend, and comparing it with a threshold compares the counts: 3 of 15 is not above 0.2, while a
    float32 mean gives 0.20000002.
    """
    G = signals.reward.shape[1]
    correct = signals.correct if threshold is None else signals.reward > threshold
    solved = jnp.sum(correct & signals.valid, 1)
    count = jnp.sum(signals.valid, 1)
    rate = np.arange(G + 1)[None, :] / np.maximum(np.arange(G + 1), 1)[:, None]
    return jnp.broadcast_to(jnp.asarray(rate, jnp.float32)[count, solved][:, None], (len(solved), G))


def advantage_magnitude(signals: Signals, *, reduce: str = "mean") -> Array:
    """Mean (or sum, max) over the row's response tokens of the absolute advantage. ``[N, G]``."""
    require_choice("advantage_magnitude: reduce", reduce, ("mean", "sum", "max"))
    size = jnp.abs(signals.advantage)
    mask = live_mask(signals, 3)
    if size.ndim == 2:  # the same for every token: a mean over tokens would only add rounding
        tokens = jnp.sum(mask, -1)
        return size * (tokens if reduce == "sum" else tokens > 0)
    size = jnp.where(mask, size, 0.0)
    if reduce == "max":
        return jnp.max(size, -1)
    total = jnp.sum(size, -1)
    return total if reduce == "sum" else total / jnp.maximum(jnp.sum(mask, -1), 1)


def token_prob(signals: Signals) -> Array:
    """Probability of each sampled token, from the sampler's tempered full softmax. ``[N, G, T]``."""
    return jnp.exp(signals.logprob)


@needs("groups")
def reward_std(signals: Signals) -> Array:
    """Population standard deviation of the reward over the group's live rows. ``[N, G]``; exactly 0 for equal rewards."""
    live = signals.valid
    count = jnp.maximum(jnp.sum(live, 1, keepdims=True), 1)
    mean = jnp.sum(jnp.where(live, signals.reward, 0.0), 1, keepdims=True) / count
    variance = jnp.sum(jnp.where(live, (signals.reward - mean) ** 2, 0.0), 1, keepdims=True) / count
    low = jnp.min(jnp.where(live, signals.reward, jnp.inf), 1, keepdims=True)
    high = jnp.max(jnp.where(live, signals.reward, -jnp.inf), 1, keepdims=True)
    return jnp.broadcast_to(jnp.where(high > low, jnp.sqrt(variance), 0.0), live.shape)


def length(signals: Signals) -> Array:
    """Response length in tokens. ``[N, G]``."""
    return signals.length.astype(jnp.float32)


@needs("entropy")
def entropy(signals: Signals) -> Array:
    """Entropy of the tempered softmax at each token, in nats; the sampler is asked to record it. ``[N, G, T]``.

    Raises:
      ValueError: the signals hold no entropy.
    """
    if signals.entropy is None:
        raise ValueError("score 'entropy': the rollout recorded no entropy; set rollout.record_entropy: true")
    return signals.entropy


SCORES: dict[str, Score] = {
    f.__name__: f for f in (reward, solve_rate, advantage_magnitude, token_prob, reward_std, length, entropy)
}
