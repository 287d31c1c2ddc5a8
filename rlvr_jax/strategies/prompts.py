"""Which prompts are rolled out, decided before the rollout. Host side, NumPy only, pure.

``init() -> state``; ``propose(state, seed, step, candidates, counts) -> proposals``; ``observe(state, prompt_id, solved,
known) -> state``. The mixer gives each domain its number of slots; a chooser picks that many among the domain's
candidates, by index. What it learned is kept by prompt id, so it helps only with prompts that come again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rlvr_jax.config import Config
from rlvr_jax.host_random import generator

State = dict[str, np.ndarray]


class Proposal(NamedTuple):
    """Of one domain: ``indices`` of the chosen candidates, ascending, and how many candidates were looked at.

    The stream goes on behind the last candidate looked at.
    """

    indices: np.ndarray
    seen: int


class Chooser(NamedTuple):
    """Pure functions; the state is a dict of NumPy arrays of fixed shapes that a checkpoint holds, empty where nothing is learned.

    Attributes:
      init: ``() -> state``.
      propose: ``(state, seed, step, candidates, counts, round=0) -> [Proposal]``, one per domain: ``candidates`` are the
        prompt ids ``[C_d] int32`` in the order of the domain's data, ``counts [domains]`` the slots. A domain gets
        ``min(count, C_d)`` different positions, and different prompts as long as there are enough. ``round`` numbers
        several proposals of one step.
      observe: ``(state, prompt_id, solved, known, step) -> state``, ``[n] int`` each: fresh groups only, never replayed ones;
        ``solved`` of ``known`` samples were correct. A group of which nothing is known is passed over.
      candidates: how many are wanted per slot.
    """

    init: Callable[[], State]
    propose: Callable[..., list[Proposal]]
    observe: Callable[[State, np.ndarray, np.ndarray, np.ndarray, int], State]
    candidates: int = 1


def build(config: Config) -> Chooser:
    """The chooser of ``config.data.prompts``."""
    c = config.data.prompts
    if c.kind == "random":
        return random()
    capacity = c.remembered or 65536
    if c.kind == "mopps":
        return mopps(capacity, candidates=c.candidates or 8, decay=0.5 if c.decay is None else c.decay)
    return greso(capacity, candidates=c.candidates or 4, target=0.25 if c.zero_variance_target is None else c.zero_variance_target)


def random() -> Chooser:
    """The candidates in their order: the data are shuffled already."""
    def propose(state: State, seed: int, step: int, candidates: Sequence[np.ndarray], counts: Sequence[int], round: int = 0) -> list[Proposal]:
        return [Proposal(np.arange(min(int(n), len(ids))), min(int(n), len(ids))) for ids, n in zip(candidates, counts, strict=True)]

    return Chooser(dict, propose, lambda state, prompt_id, solved, known, step: state)


def mopps(capacity: int, *, candidates: int = 8, decay: float = 0.5) -> Chooser:
    """Prompts whose success rate is likely near one half (MoPPS, arXiv 2507.04632).

    Per prompt a posterior Beta(a, b), prior (1, 1). Of ``candidates`` times as many, those with the smallest
    ``(draw from the posterior - 0.5)^2``; ties: the first. After the rollout ``a <- decay a + (1 - decay) + solved`` and
    ``b <- decay b + (1 - decay) + known - solved`` for the prompts rolled out. Published: decay 0.5 with 8 candidates
    (Countdown), 1 with 16 (MATH).
    """
    prior = {"alpha": np.float32(1), "beta": np.float32(1)}

    def rank(state: State, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        value = look_up(state, ids, prior)
        return (rng.beta(value["alpha"], value["beta"]) - 0.5) ** 2

    def propose(state: State, seed: int, step: int, candidates: Sequence[np.ndarray], counts: Sequence[int], round: int = 0) -> list[Proposal]:
        out = []
        for d, (ids, n) in enumerate(zip(candidates, counts, strict=True)):
            distance = rank(state, ids, generator(seed, "prompts", step, round, d))
            order = np.lexsort((distance, _repeated(ids)))[: int(n)]
            out.append(Proposal(np.sort(order), len(ids)))
        return out

    def learn(old: dict[str, np.ndarray], solved: np.ndarray, known: np.ndarray) -> dict[str, np.ndarray]:
        keep, new = np.float32(decay), np.float32(1 - decay)
        return {"alpha": keep * old["alpha"] + new + solved.astype(np.float32), "beta": keep * old["beta"] + new + (known - solved).astype(np.float32)}

    return Chooser(lambda: table(capacity, prior), propose, partial(_observe, prior, learn), candidates)


def greso(capacity: int, *, candidates: int = 4, target: float = 0.25, start: int = 50, least: float = 0.01) -> Chooser:
    """Prompts are skipped the likelier, the longer their groups have taught nothing (GRESO, arXiv 2506.02177).

    A prompt is skipped with probability ``1 - max(p^z, least)``, z its trailing run of visits that were all right or all
    wrong; p is one number for prompts last seen all right and one for all wrong. Both start at ``start`` hundredths and
    move by 0.01 a step: down while the share of such groups among those rolled out is at or above its target (a third,
    two thirds of ``target``), else up. Of at most ``candidates`` times as many, the first that are not skipped; where too
    few are left, skipped ones fill up in their order (ours), so the batch is always whole.
    """
    empty = {"run": np.int32(0), "all_right": np.bool_(False)}
    goals = np.array([target / 3, 2 * target / 3])

    def propose(state: State, seed: int, step: int, candidates: Sequence[np.ndarray], counts: Sequence[int], round: int = 0) -> list[Proposal]:
        p_right, p_wrong = state["explore"] / 100
        out = []
        for d, (ids, n) in enumerate(zip(candidates, counts, strict=True)):
            value = look_up(state, ids, empty)
            stay = np.maximum(np.where(value["all_right"], p_right, p_wrong) ** value["run"], least)
            skipped = generator(seed, "prompts", step, round, d).random(len(ids)) >= stay
            order = np.lexsort((skipped, _repeated(ids)))[: int(n)]
            whole = len(order) == int(n) and not np.any(skipped[order]) and not np.any(_repeated(ids)[order])
            out.append(Proposal(np.sort(order), (int(order.max(initial=-1)) + 1) if whole else len(ids)))
        return out

    def learn(old: dict[str, np.ndarray], solved: np.ndarray, known: np.ndarray) -> dict[str, np.ndarray]:
        same = (solved == 0) | (solved == known)
        return {"run": np.where(same, old["run"] + 1, 0).astype(np.int32), "all_right": solved == known}

    def observe(state: State, prompt_id: np.ndarray, solved: np.ndarray, known: np.ndarray, step: int) -> State:
        new = _observe(empty, learn, state, prompt_id, solved, known, step)
        judged = known > 0
        if judged.any():
            share = np.array([np.mean(solved[judged] == known[judged]), np.mean(solved[judged] == 0)])
            new["explore"] = np.clip(state["explore"] + np.where(share >= goals, -1, 1), 0, 100).astype(np.int32)
        return new

    return Chooser(lambda: table(capacity, empty) | {"explore": np.full(2, start, np.int32)}, propose, observe, candidates)


def metrics(state: State) -> dict[str, float]:
    """What a chooser knows: prompts remembered, GRESO's exploration probabilities, the spread of MoPPS's means."""
    if not state:
        return {}
    used = int(state["used"])
    out = {"prompts/remembered": float(used)}
    if "explore" in state:
        out |= {"prompts/explore_right": float(state["explore"][0]) / 100, "prompts/explore_wrong": float(state["explore"][1]) / 100}
    if "alpha" in state and used:
        out["prompts/success_mean"] = float(np.mean(state["alpha"][:used] / (state["alpha"][:used] + state["beta"][:used])))
    return out


# ---- a table of prompts ----

def table(capacity: int, fields: Mapping[str, np.generic]) -> State:
    """An empty table: ``prompt_id``, ``visited [capacity] int32`` (step of the last visit), the given fields, ``used []``.

    The first ``used`` entries are filled, in ascending order of the ids.

    Raises:
      ValueError: capacity < 1.
    """
    if capacity < 1:
        raise ValueError(f"prompts remembered: {capacity} must be at least 1")
    return {"prompt_id": np.zeros(capacity, np.int32), "visited": np.zeros(capacity, np.int32), "used": np.zeros((), np.int32),
            **{name: np.full(capacity, value, value.dtype) for name, value in fields.items()}}


def look_up(state: State, ids: np.ndarray, fields: Mapping[str, np.generic]) -> dict[str, np.ndarray]:
    """The fields of prompts ``[n] int``; a prompt that is not in the table has the default."""
    known = state["prompt_id"][: int(state["used"])]
    ids = np.asarray(ids, np.int32)
    at = np.searchsorted(known, ids)
    there = np.zeros(len(ids), bool)
    inside = at < len(known)
    there[inside] = known[at[inside]] == ids[inside]
    at = np.where(there, at, 0)
    return {name: np.where(there, state[name][at], default) for name, default in fields.items()}


def write(state: State, ids: np.ndarray, values: dict[str, np.ndarray], step: int) -> State:
    """The table with the values of distinct prompts ``ids [n]``; beyond the capacity those visited longest ago are
    forgotten (ties: the lowest id)."""
    used, capacity = int(state["used"]), len(state["prompt_id"])
    old = {name: state[name][:used] for name in ("prompt_id", "visited", *values)}
    rest = ~np.isin(old["prompt_id"], ids)
    new = {"prompt_id": np.asarray(ids, np.int32), "visited": np.full(len(ids), step, np.int32), **values}
    merged = {name: np.concatenate([old[name][rest], new[name].astype(old[name].dtype)]) for name in old}
    order = np.lexsort((-merged["prompt_id"], -merged["visited"]))[:capacity]
    order = order[np.argsort(merged["prompt_id"][order])]
    out = {**state, "used": np.asarray(len(order), np.int32)}
    for name, x in merged.items():
        out[name] = np.zeros_like(state[name])
        out[name][: len(order)] = x[order]
    return out


def _observe(fields: Mapping[str, np.generic], learn: Callable[..., dict[str, np.ndarray]], state: State, prompt_id: np.ndarray, solved: np.ndarray,
             known: np.ndarray, step: int) -> State:
    """``learn`` applied to the prompts of a batch; a prompt that occurs twice is learned from twice, in order."""
    judged = np.flatnonzero(np.asarray(known) > 0)
    turn = _repeated(np.asarray(prompt_id)[judged])
    new = dict(state)
    for t in range(int(turn.max(initial=-1)) + 1):
        rows = judged[turn == t]
        ids = np.asarray(prompt_id)[rows]
        new = write(new, ids, learn(look_up(new, ids, fields), np.asarray(solved)[rows], np.asarray(known)[rows]), step)
    return new


def _repeated(ids: np.ndarray) -> np.ndarray:
    """``[n] int``: how many earlier entries hold the same id."""
    order = np.argsort(ids, kind="stable")
    first = np.searchsorted(ids[order], ids[order])
    out = np.empty(len(ids), np.int64)
    out[order] = np.arange(len(ids)) - first
    return out
