"""Group replay: slots of groups that teach nothing are filled with groups of earlier steps.

POPO (arXiv 2606.01281): roll out the batch; a group whose rewards differ is *effective* and stays; the slot of every
other group is filled with the most recent effective group from a small first-in-first-out buffer. Nothing is rolled
out again. Decisions where the paper is silent (ours): fresh groups enter the buffer after retrieval, so a group never
meets its own copy; a group is used at most once per batch; its age is never reset; with the buffer too short a slot
keeps its ineffective group with ``valid`` False.
"""

from collections.abc import Callable

import numpy as np

from rlvr_jax.host_random import generator
from rlvr_jax.replay.buffer import Metrics, State, ages, effective_by, effective_of, insert, put
from rlvr_jax.replay.choice import Rule, group_kl, recent
from rlvr_jax.types import UpdateBatch

Score = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

AGES = (1, 2, 4, 8, 16, 32, 64)
"""Upper ends of the histogram's bins, in steps; what is older is counted as 'older'."""


def fill(effective: np.ndarray, places: np.ndarray) -> np.ndarray:
    """``[N] int``: the place of the buffer for each slot, -1 = the slot keeps its group. The first place goes into the
    first slot whose group is not ``effective [N] bool``."""
    slots = np.flatnonzero(~effective)[: len(places)]
    choice = np.full(len(effective), -1)
    choice[slots] = places[: len(slots)]
    return choice


def apply(state: State, batch: UpdateBatch, *, prompt_id: np.ndarray, step: int, by: str = "reward", rule: Rule | None = None,
          every_group: bool = False, fifo: int | None = None, seed: int = 0, score: Score | None = None) -> tuple[UpdateBatch, State, Metrics]:
    """One step: fill the slots of ineffective groups, then remember the fresh effective ones.

    Args:
      batch: NumPy arrays, N fresh groups of G rows. Not changed.
      prompt_id: ``[N] int32``.
      step: trainer step, for ages and draws.
      by: "reward": effective means the training rewards differ (before any KL); "accuracy": ``correct`` differs.
      rule: which buffered groups are used; default: the most recent.
      every_group: remember every fresh group, whether it teaches anything or not.
      fifo: places of the ring, where the buffer has a reservoir too.
      seed: of the reservoir's draws.
      score: ``(tokens [B, T], prompt_length [B], response_length [B]) -> logprob [B, T]`` of all buffered rows under the
        current policy (places x G rows, empty ones of length 0), for rules that need it; called only when a slot is free
        and a group is stored.

    Returns:
      batch: N groups; slots that could not be filled have ``valid`` False.
      state: with the fresh groups.
      metrics: ``{name: (sum, count)}``, see :func:`_metrics`.

    Raises:
      ValueError: unknown ``by``, or a batch that does not fit the buffer.
    """
    N, prompt_id = len(batch.domain), np.asarray(prompt_id)
    effective = effective_of(batch, by)
    which = np.arange(N) if every_group else np.flatnonzero(effective)
    draws = None if fifo is None else generator(seed, "reservoir", step).random(len(which))
    after = insert(state, batch, prompt_id, which, fifo=fifo, draws=draws)
    free, distance = int(N - effective.sum()), None
    if score is not None and free and np.any(state["serial"] >= 0):
        distance = group_kl(state, _scored(state, score))
    nothing = score is not None and distance is None
    places = np.zeros(0, int) if nothing else (rule or recent())(state, free, step, distance)
    choice = fill(effective, places)
    out = put(state, batch, choice, masked=~effective & (choice < 0))
    return out, after, _metrics(state, choice, effective, prompt_id, step, by)


def drop(state: State, batch: UpdateBatch, *, prompt_id: np.ndarray, step: int, by: str = "reward") -> tuple[UpdateBatch, State, Metrics]:
    """The ablation without a buffer: ineffective groups get ``valid`` False and nothing takes their place."""
    effective = effective_of(batch, by)
    out = batch.replace(valid=np.asarray(batch.valid) & np.repeat(effective, len(batch.valid) // len(effective)))
    metrics = counts(effective, np.zeros(0, int), effective)
    return out, state, metrics | {"replay/effective_fraction": (float(effective.sum()), float(len(effective)))}


def counts(fresh: np.ndarray, age: np.ndarray, trained: np.ndarray) -> Metrics:
    """What was generated and what is trained on.

    Args:
      fresh: ``[N] bool`` effective groups of the rollout.
      age: ``[replayed] int`` in steps.
      trained: ``[N] bool`` groups of the batch that are not masked.
    """
    N = float(len(fresh))
    bins = np.searchsorted(np.array(AGES), age)
    histogram = {f"replay/age/{name}": (float((bins == k).sum()), 1.0) for k, name in enumerate((*AGES, "older"))}
    return {
        "replay/fresh_effective_fraction": (float(fresh.sum()), N),
        "replay/generated_groups": (N, 1.0),
        "replay/trained_groups": (float(trained.sum()), 1.0),
        "replay/replayed_groups": (float(len(age)), 1.0),
        "replay/age_mean": (float(age.sum()), float(len(age))),
    } | histogram


def _metrics(state: State, choice: np.ndarray, effective: np.ndarray, prompt_id: np.ndarray, step: int, by: str) -> Metrics:
    """``replay/effective_fraction`` of the batch to train on, ``replay/fresh_effective_fraction`` of the rollout,
    ``replay/replayed_tokens``, ``replay/same_prompt`` (replayed groups whose prompt also stays fresh) and :func:`counts`."""
    N, slots = len(effective), np.flatnonzero(choice >= 0)
    source = choice[slots]
    teaching = effective_by(by, state["reward"][source], state["correct"][source], state["valid"][source])
    metrics = counts(effective, ages(state, step)[source], effective | (choice >= 0))
    return metrics | {
        "replay/effective_fraction": (float(effective.sum() + teaching.sum()), float(N)),
        "replay/replayed_tokens": (float(state["response_length"][source][state["valid"][source]].sum()), 1.0),
        "replay/same_prompt": (float(np.isin(state["prompt_id"][source], prompt_id[effective]).sum()), 1.0),
    }


def _scored(state: State, score: Score) -> np.ndarray:
    """``[places, G, T]`` log-probabilities of the stored rows; empty places have rows of length 0."""
    places, G, T = state["tokens"].shape
    stored = (state["serial"] >= 0)[:, None]
    prompt, response = np.where(stored, state["prompt_length"], 0), np.where(stored, state["response_length"], 0)
    return np.asarray(score(state["tokens"].reshape(-1, T), prompt.reshape(-1), response.reshape(-1))).reshape(places, G, T)
