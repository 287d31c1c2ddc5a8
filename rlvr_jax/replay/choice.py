"""Which buffered groups go into free slots: pure rules ``(state, slots, step, distance) -> places``.

A rule returns at most ``slots`` places of the buffer, in the order in which they are put into slots; never an empty
place and never two places of one group.
"""

from collections.abc import Callable

import numpy as np

from rlvr_jax.host_random import generator
from rlvr_jax.replay.buffer import State, ages

Rule = Callable[[State, int, int, np.ndarray | None], np.ndarray]

LOG_RATIO_BOUND = 20.0


def newest(state: State, step: int, min_age: int = 0, max_age: int | None = None) -> np.ndarray:
    """Places of stored groups within the bounds of age (steps, inclusive), the last inserted first."""
    age = ages(state, step)
    fit = (state["serial"] >= 0) & (age >= min_age) & (age <= (np.inf if max_age is None else max_age))
    order = np.argsort(-state["serial"], kind="stable")
    return order[fit[order]]


def recent(*, min_age: int = 0, max_age: int | None = None) -> Rule:
    """The most recent groups. With ``min_age`` = k the ablation that replays groups at least k steps old."""
    return lambda state, slots, step, distance: newest(state, step, min_age, max_age)[:slots]


def nearest(*, max_age: int | None = None) -> Rule:
    """The groups with the smallest ``distance [places]`` (:func:`group_kl`); ties: the most recent."""
    def choose(state: State, slots: int, step: int, distance: np.ndarray | None) -> np.ndarray:
        if distance is None:
            raise ValueError("replay of the nearest groups needs their distance to the current policy; give score= to apply")
        order = newest(state, step, max_age=max_age)
        return order[np.argsort(distance[order], kind="stable")][:slots]

    return choose


def hybrid(seed: int, fifo: int, *, share: float = 0.2, max_age: int | None = None) -> Rule:
    """A slot is filled from the ring, newest first, and with probability ``share`` from the reservoir (ours).

    The reservoir's groups are drawn uniformly among those within ``max_age`` that the batch does not hold yet; where
    there is none, the slot is filled from the ring. The draw is a function of (seed, step).
    """
    def choose(state: State, slots: int, step: int, distance: np.ndarray | None) -> np.ndarray:
        draw = generator(seed, "hybrid", step).random((slots, 2))
        serial, order = state["serial"], newest(state, step)
        ring = [int(p) for p in order if p < fifo]
        reservoir = [int(p) for p in newest(state, step, max_age=max_age) if p >= fifo]
        out: list[int] = []
        used: set[int] = set()
        for which, where in draw:
            fit = [p for p in (reservoir if which < share else []) if int(serial[p]) not in used]
            place = fit[int(where * len(fit))] if fit else next((p for p in ring if int(serial[p]) not in used), None)
            if place is None:
                break
            out.append(place)
            used.add(int(serial[place]))
        return np.array(out, int)

    return choose


def group_kl(state: State, logprob: np.ndarray) -> np.ndarray:
    """``[places]`` estimated KL(behaviour || current policy) of each buffered group, in nats per token.

    The mean of ``r - 1 - log r``, r = current / behaviour (unbiased and never negative on the behaviour policy's own
    samples), over the response tokens of known rows. Infinite where there are none.

    Args:
      logprob: ``[places, G, T]`` of the stored tokens under the current policy, tempered.
    """
    t = np.arange(state["tokens"].shape[2])
    start, length = state["prompt_length"][..., None], state["response_length"][..., None]
    mask = (t >= start) & (t < start + length) & state["valid"][..., None]
    d = np.clip(np.where(mask, logprob - state["behavior_logprob"], 0).astype(np.float64), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    count = mask.sum((1, 2))
    return np.where(count > 0, (np.expm1(d) - d).sum((1, 2)) / np.maximum(count, 1), np.inf)
