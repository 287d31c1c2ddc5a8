"""Strategies of strategies: ``chain`` and ``scheduled``."""

import jax
import jax.numpy as jnp

from rlvr_jax.strategies.base import Array, State, Strategy, drop, live_mask, mean_one
from rlvr_jax.types import Signals


def chain(*strategies: Strategy, renormalise: bool = True) -> Strategy:
    """Applies strategies in order and multiplies their weights.

    A later stage sees ``valid`` and ``mask`` without the rows (tokens) that earlier ones dropped. The product is brought
    back to mean 1 over what is still live (ours: the papers do not compose; softmax times power alone has mean 1.23).
    Weights per row and per token multiply to weights per token ``[N, G, T]``. An empty chain keeps every live row.

    Args:
      renormalise: False leaves the bare product.
    """

    def init() -> State:
        return tuple(s.init() for s in strategies)

    def apply(state: State, signals: Signals) -> tuple[Array, State]:
        product = signals.valid.astype(jnp.float32)
        after = []
        for strategy, old in zip(strategies, state, strict=True):
            weights, new = strategy.apply(old, signals)
            weights = jnp.where(live_mask(signals, weights.ndim), weights, 0.0).astype(jnp.float32)
            product = _multiply(product, weights)
            signals = drop(signals, weights)
            after.append(new)
        if renormalise:
            product = mean_one(product, live_mask(signals, product.ndim) & (product != 0))
        return product, tuple(after)

    return Strategy(init, apply, frozenset().union(*(s.needs for s in strategies)))


def _multiply(a: Array, b: Array) -> Array:
    if a.ndim == b.ndim:
        return a * b
    return a[..., None] * b if a.ndim < b.ndim else a * b[..., None]


def scheduled(strategy: Strategy, *, warmup_steps: int = 0, every: int = 1) -> Strategy:
    """The strategy on the steps ``warmup_steps, warmup_steps + every, ...``; on all others every live row counts 1.

    Its state does not move on a step without it.

    Raises:
      ValueError: warmup_steps < 0 or every < 1.
    """
    if warmup_steps < 0 or every < 1:
        raise ValueError(f"warmup_steps {warmup_steps} must be at least 0 and every {every} at least 1")
    if warmup_steps == 0 and every == 1:
        return strategy

    def apply(state: State, signals: Signals) -> tuple[Array, State]:
        weights, new = strategy.apply(state, signals)
        since = signals.step - warmup_steps
        on = (since >= 0) & (since % every == 0)
        neutral = live_mask(signals, weights.ndim).astype(jnp.float32)
        return jnp.where(on, weights, neutral), jax.tree.map(lambda x, y: jnp.where(on, x, y), new, state)

    return Strategy(strategy.init, apply, strategy.needs)
