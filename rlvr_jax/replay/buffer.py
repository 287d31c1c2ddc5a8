"""A buffer of whole groups on the host.

The state is a dict of NumPy arrays of fixed shapes, so a checkpoint restores a half-full buffer exactly. All functions
are pure: they return a new state. Every process that sees the same batch holds the same buffer.

The first ``fifo`` places are a ring in order of insertion; the others, if there are any, are a reservoir: a uniform
sample of all groups ever inserted. A group may lie in both; its ``serial`` says so.
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


def init(capacity: int, G: int, T: int, *, entropy: bool = False, reservoir: int = 0) -> State:
    """An empty buffer for ``capacity`` groups of ``G`` rows of at most ``T`` tokens, and a reservoir beside it.

    Args:
      entropy: whether batches carry entropies.
      reservoir: groups of the reservoir.

    Returns:
      The fields of UpdateBatch with a leading axis ``[capacity + reservoir]``, ``prompt_id`` and ``serial`` of that
      length (order of insertion, -1 = empty) and ``inserted [] int32`` (groups ever inserted).

    Raises:
      ValueError: a size below 1.
    """
    if min(capacity, G, T) < 1 or reservoir < 0:
        raise ValueError(f"replay buffer: capacity {capacity}, group size {G} and length {T} must all be at least 1, reservoir {reservoir} at least 0")
    size, places = {"G": G, "T": T}, capacity + reservoir
    state = {name: np.zeros((places, *(size[a] for a in axes)), dtype)
             for name, (axes, dtype) in FIELDS.items() if entropy or name != "entropy"}
    return state | {"prompt_id": np.zeros(places, np.int32), "serial": np.full(places, -1, np.int32), "inserted": np.zeros((), np.int32)}


def effective_groups(reward: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """``[N, G], [N, G] -> [N] bool``: at least two known rewards of the group are not exactly equal."""
    low = np.min(np.where(valid, reward, np.inf), 1)
    high = np.max(np.where(valid, reward, -np.inf), 1)
    return high > low


def effective_by(by: str, reward: np.ndarray, correct: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """:func:`effective_groups` by the training reward (before any KL) or by accuracy; all ``[N, G]``.

    Raises:
      ValueError: unknown ``by``.
    """
    if by not in ("reward", "accuracy"):
        raise ValueError(f"effective by '{by}': expected 'reward' or 'accuracy'")
    return effective_groups(reward if by == "reward" else correct.astype(np.float32), valid)


def effective_of(batch: UpdateBatch, by: str) -> np.ndarray:
    """``[N] bool`` of a batch."""
    N = len(batch.domain)
    return effective_by(by, groups(batch, "reward", N), groups(batch, "correct", N), groups(batch, "valid", N))


def ages(state: State, step: int) -> np.ndarray:
    """``[places] int``: steps since the group's newest row was sampled; meaningless where a place is empty."""
    return step - state["policy_step"].max(1)


def insert(state: State, batch: UpdateBatch, prompt_id: np.ndarray, which: np.ndarray, *, fifo: int | None = None,
           draws: np.ndarray | None = None) -> State:
    """The state with groups ``which`` (``[K] int``, in this order) appended; the oldest of the ring give way.

    Args:
      fifo: places of the ring; None = all of them, no reservoir.
      draws: ``[K]`` uniform in [0, 1), needed with a reservoir: group number s (from 0) takes place ``floor(draw (s + 1))``
        of it once it is full, if there is such a place (Vitter's algorithm R).

    Raises:
      ValueError: groups of another size, a row longer than the buffer's rows, or the batch carries entropies and the
        buffer does not (or the other way round).
    """
    check_fit(state, batch, which)
    places, first = len(state["serial"]), int(state["inserted"])
    fifo = places if fifo is None else fifo
    target: dict[int, int] = {}  # place -> index into which; within one call the later group wins
    for k in range(len(which)):
        target[(first + k) % fifo] = k
        if fifo < places:
            assert draws is not None
            seen = first + k
            slot = seen if seen < places - fifo else int(draws[k] * (seen + 1))
            if slot < places - fifo:
                target[fifo + slot] = k
    at, source = np.array(list(target), int), np.array(list(target.values()), int)
    new, N = {name: x.copy() for name, x in state.items()}, len(batch.domain)
    for name in FIELDS.keys() & state.keys():
        values = groups(batch, name, N)[which[source]]
        new[name][at] = width(values, state["tokens"].shape[-1]) if FIELDS[name][0] == "GT" else values
    new["prompt_id"][at] = prompt_id[which[source]]
    new["serial"][at] = first + source
    new["inserted"] = np.asarray(first + len(which), np.int32)
    return new


def check_fit(state: State, batch: UpdateBatch, which: np.ndarray) -> None:
    """Raises ValueError where groups ``which`` of the batch cannot be stored."""
    N, T = len(batch.domain), state["tokens"].shape[-1]
    if state["reward"].ndim == 2 and len(batch.reward) != N * state["reward"].shape[1]:
        raise ValueError(f"replay buffer holds groups of {state['reward'].shape[1]} rows, got {len(batch.reward)} rows in {N} groups")
    total = (groups(batch, "prompt_length", N) + groups(batch, "response_length", N))[which]
    if total.size and total.max() > T:
        raise ValueError(f"replay buffer holds rows of at most {T} tokens, got one of {total.max()}; init it with the longest row")
    if (batch.entropy is None) == ("entropy" in state):
        raise ValueError(f"replay buffer {'expects' if 'entropy' in state else 'has no room for'} entropies; init(entropy=) must match the rollout")


def put(state: State, batch: UpdateBatch, choice: np.ndarray, masked: np.ndarray) -> UpdateBatch:
    """The batch with buffered groups in their slots and ``valid`` False in the masked ones.

    Args:
      choice: ``[N] int`` place of the buffer for the slot, -1 = the slot keeps its group.
      masked: ``[N] bool``.

    Returns:
      N groups. T is the batch's, or the buffer's when a buffered row needs it.
    """
    N, slots = len(batch.domain), np.flatnonzero(choice >= 0)
    source, T = choice[slots], batch.tokens.shape[1]
    longest = (state["prompt_length"][source] + state["response_length"][source]).max(initial=0)
    T = T if longest <= T else state["tokens"].shape[2]
    out: dict[str, np.ndarray] = {}
    for name, (axes, _) in FIELDS.items():
        if getattr(batch, name) is None:
            continue
        x = groups(batch, name, N)
        x = width(x, T) if axes == "GT" else x.copy()
        if len(slots):
            x[slots] = width(state[name][source], T) if axes == "GT" else state[name][source]
        if name == "valid":
            x[masked] = False
        out[name] = x.reshape(-1, *x.shape[2:]) if axes else x
    return batch.replace(**out)


def pick(batch: UpdateBatch, which: np.ndarray) -> UpdateBatch:
    """The batch made of groups ``which [M] int`` of it."""
    N = len(batch.domain)
    out = {}
    for name, (axes, _) in FIELDS.items():
        if getattr(batch, name) is not None:
            x = groups(batch, name, N)[which]
            out[name] = x.reshape(-1, *x.shape[2:]) if axes else x
    return batch.replace(**out)


def groups(batch: UpdateBatch, name: str, N: int) -> np.ndarray:
    """A field as ``[N, G, ...]`` (``[N]`` for a field per group)."""
    x = np.asarray(getattr(batch, name))
    return x.reshape(N, -1, *x.shape[1:]) if FIELDS[name][0] else x


def width(x: np.ndarray, T: int) -> np.ndarray:
    """A copy whose last axis has T entries; only padding is ever cut or added."""
    out = np.zeros((*x.shape[:-1], T), x.dtype)
    keep = min(T, x.shape[-1])
    out[..., :keep] = x[..., :keep]
    return out
