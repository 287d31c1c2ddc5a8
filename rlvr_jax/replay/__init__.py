"""Replay on the host: what fills the slots of groups that teach nothing. Every kind behind one interface.

``replay.build(config, T)`` gives a :class:`Replay`; ``batch, state, metrics = r.apply(r.init(), batch, prompt_id=..., step=...)``.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rlvr_jax.config import Config
from rlvr_jax.replay import arpo, choice
from rlvr_jax.replay.buffer import FIELDS, Metrics, State, effective_groups, init
from rlvr_jax.replay.fill import Score, apply, drop
from rlvr_jax.types import UpdateBatch

__all__ = ["FIELDS", "Metrics", "Replay", "Score", "State", "apply", "build", "effective_groups", "init"]


class Replay(NamedTuple):
    """Pure functions.

    Attributes:
      init: ``() -> state``, a dict of NumPy arrays for the checkpoint; empty for a kind that remembers nothing.
      apply: ``(state, batch, *, prompt_id, step) -> (batch, state, metrics)``; N fresh groups in, N groups to train on out.
      needs_score: whether ``apply`` also wants ``score`` (see :func:`rlvr_jax.replay.fill.apply`).
    """

    init: Callable[[], State]
    apply: Callable[..., tuple[UpdateBatch, State, Metrics]]
    needs_score: bool = False


def build(config: Config, T: int, *, entropy: bool = False) -> Replay | None:
    """The replay of ``config.replay``; None where that is null.

    Args:
      T: tokens of the longest row.
      entropy: whether batches carry entropies.
    """
    c, G, N = config.replay, config.rollout.samples_per_prompt, config.train.prompts_per_step
    if c is None:
        return None
    if c.kind == "filter":
        return Replay(dict, partial(drop, by=c.by))
    if c.kind == "arpo":
        return Replay(partial(arpo.init, c.capacity or 8 * N * G, T, entropy=entropy),
                      partial(arpo.apply, seed=config.seed, per_prompt=c.successes_per_prompt or 8))
    min_age = (c.min_age or 8) if c.kind == "stale" else 0
    capacity = c.capacity or N * max(min_age, 1)
    reservoir, fifo = 0, None
    rule = choice.recent(min_age=min_age, max_age=c.max_age)
    if c.kind == "kl":
        rule = choice.nearest(max_age=c.max_age)
    if c.kind == "hybrid":
        reservoir, fifo = c.reservoir or 4 * capacity, capacity
        share = 0.2 if c.reservoir_share is None else c.reservoir_share
        rule = choice.hybrid(config.seed, capacity, share=share, max_age=c.max_age or 16)
    step = partial(apply, by=c.by, rule=rule, every_group=c.kind == "ineffective", fifo=fifo, seed=config.seed)
    return Replay(partial(init, capacity, G, T, entropy=entropy, reservoir=reservoir), step, c.kind == "kl")
