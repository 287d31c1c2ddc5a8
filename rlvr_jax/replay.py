"""Group replay on the host: slots of groups that teach nothing are filled with effective groups of earlier steps.

POPO (arXiv 2606.01281): roll out the batch; a group whose rewards differ is *effective* and stays; the slot of every
other group is filled with the most recent effective group from a small first-in-first-out buffer. Nothing is rolled
out again. Decisions where the paper is silent (ours): fresh groups enter the buffer after retrieval, so a group never
meets its own copy; a group is used at most once per batch; its age is never reset; with the buffer too short a slot
keeps its ineffective group with ``valid`` False.

The state is a dict of NumPy arrays of fixed shapes, so a checkpoint restores a half-full buffer exactly. All functions
are pure: they return a new state. Every process that sees the same ``effective`` makes the same choice.
"""

from typing import Any

import numpy as np

from rlvr_jax.types import UpdateBatch

State = dict[str, np.ndarray]
Metrics = dict[str, tuple[float, float]]

# How one group of each field of UpdateBatch is stored: its axes and dtype.
FIELDS: dict[str, tuple[str, Any]] = {
    "tokens": ("GT", np.int32), "prompt_length": ("G", np.int32), "response_length": ("G", np.int32),
    "logprob": ("GT", np.float32), "behavior_logprob": ("GT", np.float32), "entropy": ("GT", np.float32),
    "reward": ("G", np.float32), "valid": ("G", np.bool_), "correct": ("G", np.bool_), "truncated": ("G", np.bool_),
    "policy_step": ("G", np.int32), "domain": ("", np.int32),
}


def init(capacity: int, G: int, T: int, *, entropy: bool = False) -> State:
    """An empty buffer for ``capacity`` groups of ``G`` rows of at most ``T`` tokens.

    Args:
      entropy: whether batches carry entropies.

    Returns:
      The fields of UpdateBatch with a leading axis ``[capacity]``, ``prompt_id [capacity] int32``,
      ``serial [capacity] int32`` (order of insertion, -1 = empty) and ``inserted [] int32`` (groups ever inserted).

    Raises:
      ValueError: a size below 1.
    """
    if min(capacity, G, T) < 1:
        raise ValueError(f"replay buffer: capacity {capacity}, group size {G} and length {T} must all be at least 1")
    size = {"G": G, "T": T}
    state = {name: np.zeros((capacity, *(size[a] for a in axes)), dtype)
             for name, (axes, dtype) in FIELDS.items() if entropy or name != "entropy"}
    return state | {"prompt_id": np.zeros(capacity, np.int32), "serial": np.full(capacity, -1, np.int32),
                    "inserted": np.zeros((), np.int32)}


def effective_groups(reward: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[N, G], [N, G] -> [N] bool``: at least two known rewards of the group are not exactly equal."""
    low = np.min(np.where(valid, reward, np.inf), 1)
    high = np.max(np.where(valid, reward, -np.inf), 1)
    return high > low


def fill(state: State, effective: np.ndarray) -> np.ndarray:
    """Which buffered group goes into which slot.

    Args:
      effective: ``[N] bool`` of the fresh groups.

    Returns:
      ``[N] int``: row of the buffer for the slot, -1 = the slot keeps its fresh group. The most recent group goes into
      the first free slot; no group is used twice.
    """
    newest = np.argsort(-state["serial"], kind="stable")[: np.count_nonzero(state["serial"] >= 0)]
    slots = np.flatnonzero(~effective)[: len(newest)]
    choice = np.full(len(effective), -1)
    choice[slots] = newest[: len(slots)]
    return choice


def insert(state: State, batch: UpdateBatch, prompt_id: np.ndarray, which: np.ndarray) -> State:
    """The state with groups ``which`` (``[K] int``, in this order) appended; the oldest give way.

    Raises:
      ValueError: a row is longer than the buffer's rows, or the batch carries entropies and the buffer does not (or
        the other way round).
    """
    capacity, T = len(state["serial"]), state["tokens"].shape[2]
    N = len(batch.domain)
    total = _groups(batch, "prompt_length", N)[which] + _groups(batch, "response_length", N)[which]
    if total.size and total.max() > T:
        raise ValueError(f"replay buffer holds rows of at most {T} tokens, got one of {total.max()}; init it with the longest row")
    if (batch.entropy is None) == ("entropy" in state):
        raise ValueError(f"replay buffer {'expects' if 'entropy' in state else 'has no room for'} entropies; init(entropy=) must match the rollout")
    first = int(state["inserted"])
    serial = np.arange(first, first + len(which), dtype=np.int32)
    kept = slice(max(0, len(which) - capacity), None)  # the rest would be overwritten within this very call
    which, serial, places = which[kept], serial[kept], serial[kept] % capacity
    new = {name: x.copy() for name, x in state.items()}
    for name in FIELDS.keys() & state.keys():
        values = _groups(batch, name, N)[which]
        new[name][places] = _width(values, T) if FIELDS[name][0] == "GT" else values
    new["prompt_id"][places] = prompt_id[which]
    new["serial"][places] = serial
    new["inserted"] = np.asarray(first + len(total), np.int32)
    return new


def apply(state: State, batch: UpdateBatch, *, prompt_id: np.ndarray, step: int,
          by: str = "reward") -> tuple[UpdateBatch, State, Metrics]:
    """One POPO step: fill the slots of ineffective groups, then remember the fresh effective ones.

    Args:
      batch: NumPy arrays, N fresh groups of G rows. Not changed.
      prompt_id: ``[N] int32``.
      step: trainer step, for ages.
      by: "reward": effective means the training rewards differ (before any KL); "accuracy": ``correct`` differs.

    Returns:
      batch: N groups; slots that could not be filled have ``valid`` False. Its T is the batch's, or the buffer's when
        a replayed row needs it.
      state: with the fresh effective groups.
      metrics: ``{name: (sum, count)}``; ``replay/effective_fraction`` of the batch to train on,
        ``replay/fresh_effective_fraction`` of the rollout, ``replay/age_mean`` in steps over replayed groups,
        ``replay/replayed_groups``, ``replay/same_prompt`` (replayed groups whose prompt also stays fresh).

    Raises:
      ValueError: unknown ``by``, or a batch that does not fit the buffer.
    """
    if by not in ("reward", "accuracy"):
        raise ValueError(f"replay by '{by}': expected 'reward' or 'accuracy'")
    N, prompt_id = len(batch.domain), np.asarray(prompt_id)
    if len(batch.reward) != N * state["reward"].shape[1]:
        raise ValueError(f"replay buffer holds groups of {state['reward'].shape[1]} rows, got {len(batch.reward)} rows in {N} groups")
    judged = _groups(batch, "reward" if by == "reward" else "correct", N).astype(np.float32)
    effective = effective_groups(judged, _groups(batch, "valid", N))
    choice = fill(state, effective)
    slots = np.flatnonzero(choice >= 0)
    filled = _replace(state, batch, choice, masked=~effective & (choice < 0))
    ages = step - state["policy_step"][choice[slots]].max(1)
    metrics: Metrics = {
        "replay/effective_fraction": (float(effective.sum() + len(slots)), float(N)),
        "replay/fresh_effective_fraction": (float(effective.sum()), float(N)),
        "replay/age_mean": (float(ages.sum()), float(len(slots))),
        "replay/replayed_groups": (float(len(slots)), 1.0),
        "replay/same_prompt": (float(np.isin(state["prompt_id"][choice[slots]], prompt_id[effective]).sum()), 1.0),
    }
    return filled, insert(state, batch, prompt_id, np.flatnonzero(effective)), metrics


def _replace(state: State, batch: UpdateBatch, choice: np.ndarray, masked: np.ndarray) -> UpdateBatch:
    """The batch with buffered groups in their slots and ``valid`` False in the masked ones."""
    N, slots = len(batch.domain), np.flatnonzero(choice >= 0)
    source = choice[slots]
    longest = (state["prompt_length"][source] + state["response_length"][source]).max(initial=0)
    T = batch.tokens.shape[1]
    T = T if longest <= T else state["tokens"].shape[2]
    out: dict[str, np.ndarray] = {}
    for name, (axes, _) in FIELDS.items():
        if getattr(batch, name) is None:
            continue
        x = _groups(batch, name, N)
        x = _width(x, T) if axes == "GT" else x.copy()
        if len(slots):
            x[slots] = _width(state[name][source], T) if axes == "GT" else state[name][source]
        if name == "valid":
            x[masked] = False
        out[name] = x.reshape(-1, *x.shape[2:]) if axes else x
    return batch.replace(**out)


def _groups(batch: UpdateBatch, name: str, N: int) -> np.ndarray:
    """A field as ``[N, G, ...]`` (``[N]`` for a field per group)."""
    x = np.asarray(getattr(batch, name))
    return x.reshape(N, -1, *x.shape[1:]) if FIELDS[name][0] else x


def _width(x: np.ndarray, T: int) -> np.ndarray:
    """A copy whose last axis has T entries; only padding is ever cut or added."""
    out = np.zeros((*x.shape[:-1], T), x.dtype)
    keep = min(T, x.shape[-1])
    out[..., :keep] = x[..., :keep]
    return out
