"""Dynamic sampling (DAPO, arXiv 2503.14476): generate batches until N groups are effective, then train on those.

Bounded: after ``max_batches`` batches the step trains on what there is. Effective groups beyond N are not thrown away
(ours): they wait in a pool, oldest first, and open the next step; their policy step stays what it was, so the importance
weight corrects them. The pool is a replay buffer, a dict of NumPy arrays that a checkpoint holds. All functions are pure::

    pool = d.start(pool)
    while d.more(pool):
        batch, prompt_id = ...  # generate and judge N prompts
        pool = d.collect(pool, batch, prompt_id)
    batch, prompt_id, pool, metrics, warning = d.release(pool, batch, prompt_id, step)
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from rlvr_jax.config import Config
from rlvr_jax.replay import buffer
from rlvr_jax.replay.buffer import Metrics, State
from rlvr_jax.types import UpdateBatch


class Released(NamedTuple):
    """N groups to train on; those beyond the effective ones have ``valid`` False. ``warning`` is None unless groups are missing."""

    batch: UpdateBatch
    prompt_id: np.ndarray
    state: State
    metrics: Metrics
    warning: str | None


class DynamicSampling(NamedTuple):
    """The functions of this module for one config."""

    init: Callable[[], State]
    start: Callable[[State], State]
    more: Callable[[State], bool]
    collect: Callable[[State, UpdateBatch, np.ndarray], State]
    release: Callable[[State, UpdateBatch, np.ndarray, int], Released]


def build(config: Config, T: int, *, entropy: bool = False) -> DynamicSampling | None:
    """For ``config.dynamic_sampling``; None where that is null.

    Args:
      T: tokens of the longest row.
      entropy: whether batches carry entropies.
    """
    c, N = config.dynamic_sampling, config.train.prompts_per_step
    if c is None:
        return None
    return DynamicSampling(partial(init, N, config.rollout.samples_per_prompt, T, entropy=entropy), start, partial(more, N=N, max_batches=c.max_batches),
                           partial(collect, N=N, by=c.by), partial(release, N=N))


def init(N: int, G: int, T: int, *, entropy: bool = False) -> State:
    """An empty pool: at most N - 1 groups wait when a batch of at most N is generated."""
    state = buffer.init(max(2 * N - 1, 1), G, T, entropy=entropy)
    return state | {name: np.zeros((), np.int32) for name in ("batches", "generated", "kept")}


def start(state: State) -> State:
    """The pool at the beginning of a step: nothing generated yet."""
    return state | {name: np.zeros((), np.int32) for name in ("batches", "generated", "kept")}


def stored(state: State) -> int:
    """Groups in the pool."""
    return int(np.count_nonzero(state["serial"] >= 0))


def more(state: State, N: int, max_batches: int) -> bool:
    """Whether another batch must be generated: fewer than N groups are there and this step made fewer than ``max_batches``."""
    return stored(state) < N and int(state["batches"]) < max_batches


def collect(state: State, batch: UpdateBatch, prompt_id: np.ndarray, *, N: int, by: str = "reward") -> State:
    """The pool with the effective groups of one generated batch, in their order.

    Args:
      batch: NumPy arrays, at most N groups.
      prompt_id: ``[groups] int32``.

    Raises:
      ValueError: the pool already holds N groups (:func:`more` said so), or a batch that does not fit it.
    """
    if stored(state) >= N or len(batch.domain) > N:
        raise ValueError(f"dynamic sampling: {stored(state)} of {N} groups are there and {len(batch.domain)} more came; generate at most {N}, and only while more() says so")
    which = np.flatnonzero(buffer.effective_of(batch, by))
    new = buffer.insert(state, batch, np.asarray(prompt_id), which)
    for name, count in (("batches", 1), ("generated", len(batch.domain)), ("kept", len(which))):
        new[name] = np.asarray(int(state[name]) + count, np.int32)
    return new


def release(state: State, last: UpdateBatch, last_prompt_id: np.ndarray, step: int, *, N: int) -> Released:
    """The N oldest groups of the pool leave it and are trained on.

    Args:
      last: the batch generated last: the slots that stay empty show groups of it, with ``valid`` False.
      last_prompt_id: ``[groups] int32``.
      step: trainer step, for ages.

    Returns:
      See :class:`Released`. Metrics ``{name: (sum, count)}``: ``dynamic/batches``, ``dynamic/generated_groups``,
      ``dynamic/trained_groups``, ``dynamic/effective_fraction`` (of what was generated), ``dynamic/waiting_groups``,
      ``dynamic/age_mean`` in steps over the groups trained on, ``dynamic/short`` (1 where groups are missing).
    """
    order = np.argsort(state["serial"], kind="stable")[len(state["serial"]) - stored(state):][:N]
    ready = len(order)
    slots = np.resize(np.arange(len(last.domain)), N)
    template = buffer.pick(last, slots)
    choice = np.concatenate([order, np.full(N - ready, -1)]).astype(int)
    batch = buffer.put(state, template, choice, masked=choice < 0)
    prompt_id = np.concatenate([state["prompt_id"][order], np.asarray(last_prompt_id, np.int32)[slots[ready:]]])
    left = state | {"serial": state["serial"].copy()}
    left["serial"][order] = -1
    age, batches, generated = buffer.ages(state, step)[order], int(state["batches"]), int(state["generated"])
    metrics: Metrics = {
        "dynamic/batches": (float(batches), 1.0),
        "dynamic/generated_groups": (float(generated), 1.0),
        "dynamic/trained_groups": (float(ready), 1.0),
        "dynamic/effective_fraction": (float(state["kept"]), float(generated)),
        "dynamic/waiting_groups": (float(stored(left)), 1.0),
        "dynamic/age_mean": (float(age.sum()), float(ready)),
        "dynamic/short": (float(ready < N), 1.0),
    }
    warning = None if ready == N else (f"step {step}: {ready} of {N} groups are effective after {batches} batches of prompts; training on those "
                                       "(easier or harder prompts, more samples per prompt or a larger dynamic_sampling.max_batches would fill the batch)")
    return Released(batch, prompt_id, left, metrics, warning)
