"""ARPO (arXiv 2505.16282): one stored success in a group that failed throughout.

Successes are remembered per prompt, at most ``per_prompt`` of each, the newest; the first row of an all-failed group is
replaced by one of its prompt's, drawn at random. The row keeps its behaviour log-probabilities and its policy step, so
the importance weight corrects it. Decisions (ours): successes are remembered after the replacement; a stored row is used
at most once per batch, and only if its prompt is the group's token by token; the store has a fixed number of rows, and
when it is full the oldest of all gives way.

A prompt must come again to be helped: on data that never repeats (a generated task) this does nothing.
"""

import numpy as np

from rlvr_jax.host_random import generator
from rlvr_jax.replay.buffer import FIELDS, Metrics, State, check_fit, effective_of, groups, width
from rlvr_jax.replay.fill import counts
from rlvr_jax.types import UpdateBatch

ROW_FIELDS = {name: (axes, dtype) for name, (axes, dtype) in FIELDS.items() if axes}


def init(capacity: int, T: int, *, entropy: bool = False) -> State:
    """An empty store of ``capacity`` rows: the fields of UpdateBatch per row ``[capacity]`` or ``[capacity, T]``,
    ``prompt_id``, ``serial [capacity] int32`` (order of insertion, -1 = empty) and ``inserted []``.

    Raises:
      ValueError: a size below 1.
    """
    if min(capacity, T) < 1:
        raise ValueError(f"store of successes: capacity {capacity} and length {T} must be at least 1")
    state = {name: np.zeros((capacity, T) if axes == "GT" else capacity, dtype)
             for name, (axes, dtype) in ROW_FIELDS.items() if entropy or name != "entropy"}
    return state | {"prompt_id": np.zeros(capacity, np.int32), "serial": np.full(capacity, -1, np.int32), "inserted": np.zeros((), np.int32)}


def all_failed(reward: np.ndarray, valid: np.ndarray, mean: float = 0.2, std: float = 0.05) -> np.ndarray:
    """``[N, G], [N, G] -> [N] bool``: mean and population deviation of the known rewards are below the bounds."""
    known = np.maximum(valid.sum(1), 1)
    x = np.where(valid, reward, 0).astype(np.float64)
    m = x.sum(1) / known
    s = np.sqrt((np.where(valid, x - m[:, None], 0) ** 2).sum(1) / known)
    return (m < mean) & (s < std) & valid.any(1)


def apply(state: State, batch: UpdateBatch, *, prompt_id: np.ndarray, step: int, seed: int, per_prompt: int = 8) -> tuple[UpdateBatch, State, Metrics]:
    """One step: replace first rows of all-failed groups, then remember the fresh successes.

    Args:
      batch: NumPy arrays, N fresh groups of G rows. Not changed.
      prompt_id: ``[N] int32``.
      step, seed: decide the draws.

    Returns:
      batch: its T is the batch's, or the store's when an old row needs it.
      state: with the rows that are ``correct`` (and known).
      metrics: ``replay/injected_rows``, ``replay/all_failed`` (of the fresh groups), ``replay/effective_fraction``,
        ``replay/fresh_effective_fraction``, ``replay/age_mean`` in steps over injected rows and the histogram.

    Raises:
      ValueError: a success that does not fit the store.
    """
    N, prompt_id = len(batch.domain), np.asarray(prompt_id)
    failed = all_failed(groups(batch, "reward", N), groups(batch, "valid", N))
    choice = _choose(state, batch, prompt_id, failed, generator(seed, "arpo", step).random(N))
    slots = np.flatnonzero(choice >= 0)
    out = _replace(state, batch, choice)
    fresh, now = effective_of(batch, "reward"), effective_of(out, "reward")
    # Replaced are single rows, so no group counts as replayed; the ages are those of the rows.
    metrics = counts(fresh, step - state["policy_step"][choice[slots]], np.ones(N, bool)) | {
        "replay/replayed_groups": (0.0, 1.0),
        "replay/injected_rows": (float(len(slots)), 1.0),
        "replay/replayed_tokens": (float(state["response_length"][choice[slots]].sum()), 1.0),
        "replay/all_failed": (float(failed.sum()), float(N)),
        "replay/effective_fraction": (float(now.sum()), float(N)),
    }
    return out, _remember(state, batch, prompt_id, per_prompt), metrics


def _choose(state: State, batch: UpdateBatch, prompt_id: np.ndarray, failed: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """``[N] int``: the stored row for each all-failed group, -1 = none."""
    N = len(batch.domain)
    choice, used = np.full(N, -1), np.zeros(len(state["serial"]), bool)
    length = groups(batch, "prompt_length", N)[:, 0]
    tokens = groups(batch, "tokens", N)[:, 0]
    for n in np.flatnonzero(failed):
        P = int(length[n])
        fit = np.flatnonzero((state["serial"] >= 0) & (state["prompt_id"] == prompt_id[n]) & (state["prompt_length"] == P) & ~used)
        fit = fit[(state["tokens"][fit, :P] == tokens[n, :P]).all(1)]  # an id is a hash: two prompts may share it
        if len(fit):
            fit = fit[np.argsort(state["serial"][fit])]
            choice[n] = fit[int(draw[n] * len(fit))]
            used[choice[n]] = True
    return choice


def _replace(state: State, batch: UpdateBatch, choice: np.ndarray) -> UpdateBatch:
    """The batch with the chosen rows as the first of their groups."""
    N, slots = len(batch.domain), np.flatnonzero(choice >= 0)
    source, T = choice[slots], batch.tokens.shape[1]
    longest = (state["prompt_length"][source] + state["response_length"][source]).max(initial=0)
    T = T if longest <= T else state["tokens"].shape[1]
    out = {}
    for name, (axes, _) in ROW_FIELDS.items():
        if getattr(batch, name) is None:
            continue
        x = groups(batch, name, N)
        x = width(x, T) if axes == "GT" else x.copy()
        if len(slots):
            x[slots, 0] = width(state[name][source], T) if axes == "GT" else state[name][source]
        out[name] = x.reshape(-1, *x.shape[2:])
    return batch.replace(**out)


def _remember(state: State, batch: UpdateBatch, prompt_id: np.ndarray, per_prompt: int) -> State:
    """The state with the batch's successes appended, in the order of the rows."""
    N = len(batch.domain)
    rows = np.flatnonzero(np.asarray(batch.correct) & np.asarray(batch.valid))
    G = len(batch.correct) // N
    check_fit(state, batch, np.unique(rows // G))
    new = {name: x.copy() for name, x in state.items()}
    ids, serial, first = new["prompt_id"], new["serial"], int(state["inserted"])
    target: dict[int, int] = {}  # place -> row
    for k, row in enumerate(rows):
        mine = np.flatnonzero((serial >= 0) & (ids == prompt_id[row // G]))
        oldest = mine if len(mine) >= per_prompt else np.arange(len(serial))  # an empty place is older than any row
        place = int(oldest[np.argmin(serial[oldest])])
        ids[place], serial[place], target[place] = prompt_id[row // G], first + k, int(row)
    at, source = np.array(list(target), int), np.array(list(target.values()), int)
    for name in ROW_FIELDS.keys() & state.keys():
        values = np.asarray(getattr(batch, name))[source]
        new[name][at] = width(values, state["tokens"].shape[1]) if ROW_FIELDS[name][0] == "GT" else values
    new["inserted"] = np.asarray(first + len(rows), np.int32)
    return new
