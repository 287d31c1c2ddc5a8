"""Mixers: how many prompts of a batch each domain gets. Host side, numpy only, pure.

``init() -> state``, ``observe(state, domain, values) -> state``, ``proportions(state, step) -> p[domains]``.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

State = Any


class Mixer(NamedTuple):
    """Pure functions; the state is a JSON-able dict that a checkpoint holds.

    ``observe`` is called once a step and domain with ``values`` over the fresh prompts of that domain: ``reward`` and
    ``advantage`` ``[n, G]``, ``valid [n, G] bool`` (default: all) and ``step``. ``proportions`` returns
    ``[domains] float64``, sum 1. ``signal`` returns what each domain's share follows, ``[domains]``, NaN where nothing
    is known; None for a mixer that follows nothing.
    """

    init: Callable[[], State]
    observe: Callable[[State, int, Any], State]
    proportions: Callable[[State, int], np.ndarray]
    signal: Callable[[State, int], np.ndarray] | None = None


def static(weights: Sequence[float] | np.ndarray) -> Mixer:
    """The given ratio, always. Has no floor: a ratio that the user states is what the user gets."""
    p = np.asarray(weights, np.float64)
    if p.ndim != 1 or p.size == 0 or not np.all(np.isfinite(p)) or np.any(p < 0) or p.sum() <= 0:
        raise ValueError(f"static mixer: expected finite weights >= 0 with a positive sum, found {list(weights)}")
    p = p / p.sum()
    return Mixer(init=dict, observe=lambda state, domain, values: state, proportions=lambda state, step: p.copy())


class Window(NamedTuple):
    """One domain's last steps: ``step``, ``sum`` and ``rows`` of the known values ``[entries]``, and all prompts so far."""

    step: np.ndarray
    sum: np.ndarray
    rows: np.ndarray
    prompts: int

    def mean(self) -> float:
        return float(self.sum.sum() / self.rows.sum()) if self.rows.sum() else np.nan

    def slope(self) -> float:
        """Least-squares slope of the steps' means against the step; 0 for a single step."""
        known = self.rows > 0
        if not known.any():
            return np.nan
        x, y = self.step[known], self.sum[known] / self.rows[known]
        x = x - x.mean()
        return float(x @ y / (x @ x)) if x.any() else 0.0


def reward_gap(domains: int, *, temperature: float = 1.0, **schedule: Any) -> Mixer:
    """More prompts where the mean reward is lower: ``softmax((max - mean) / temperature)`` (arXiv 2609.06107)."""
    def preference(windows: list[Window]) -> tuple[np.ndarray, np.ndarray]:
        mean = np.array([w.mean() for w in windows])
        return mean, -mean / temperature  # the maximum is the same for all and cancels in the softmax

    return _dynamic(domains, "reward", preference, **schedule)


def dump_ucb(domains: int, *, temperature: float = 1.0, exploration: float = 1.0, **schedule: Any) -> Mixer:
    """More prompts where advantages are large, with a bonus for domains seen seldom (arXiv 2504.09710).

    ``softmax((mean |A| + exploration sqrt(2 ln(n + 1) / (n_d + 1))) / temperature)``, n_d prompts of the domain so far, n of all.
    """
    def preference(windows: list[Window]) -> tuple[np.ndarray, np.ndarray]:
        value, n = np.array([w.mean() for w in windows]), np.array([w.prompts for w in windows], np.float64)
        return value, (value + exploration * np.sqrt(2 * np.log(n.sum() + 1) / (n + 1))) / temperature

    return _dynamic(domains, "advantage", preference, **schedule)


def tscl(domains: int, *, temperature: float = 0.1, published_slope: bool = False, window: int = 50, **schedule: Any) -> Mixer:
    """More prompts where the mean reward moves fastest, up or down: ``softmax(|slope| window / temperature)`` (arXiv 1707.00183).

    Differs from the paper: the slope is taken per window and the temperature is 0.1; a slope of 1e-3 a step at 1 never
    moves a prompt. ``published_slope`` takes the slope per step.
    """
    def preference(windows: list[Window]) -> tuple[np.ndarray, np.ndarray]:
        slope = np.array([w.slope() for w in windows])
        return slope, np.abs(slope) * (1 if published_slope else window) / temperature

    return _dynamic(domains, "reward", preference, window=window, **schedule)


def _dynamic(domains: int, observed: str, preference: Callable[[list[Window]], tuple[np.ndarray, np.ndarray]], *, window: int = 50,
             warmup_steps: int = 10, update_every: int = 5, floor: float = 0.05) -> Mixer:
    """Proportions ``floor + (1 - domains * floor) softmax(preference)``: no domain ever ends below the floor.

    Uniform during ``warmup_steps``, then changed every ``update_every`` steps from the ``window`` steps before. A domain
    of which nothing is known in the window takes the mean preference of the others.
    """
    if not 0 <= floor * domains <= 1:
        raise ValueError(f"data.mixer.floor: {floor:g} for each of {domains} domains is more than everything; use at most {1 / domains:g}")
    kept = window + update_every

    def observe(state: State, domain: int, values: Any) -> State:
        x = np.asarray(values[observed], np.float64)
        x = np.abs(x) if observed == "advantage" else x
        valid = np.asarray(values["valid"], bool) if "valid" in values else np.ones(x.shape, bool)
        entry = [int(values["step"]), float(x[valid].sum()), int(valid.sum()), len(x)]
        entries = [*state["entries"][domain], entry]
        gone = [e for e in entries if e[0] <= entry[0] - kept]
        older = state["older"][domain] + sum(e[3] for e in gone)
        put = lambda old, new: [new if d == domain else v for d, v in enumerate(old)]  # noqa: E731
        return {"entries": put(state["entries"], entries[len(gone):]), "older": put(state["older"], older)}

    def windows(state: State, step: int) -> list[Window]:
        now = step - step % update_every
        out = []
        for entries, older in zip(state["entries"], state["older"]):
            seen = [e for e in entries if e[0] < now]
            e = np.array([e for e in seen if e[0] >= now - window], np.float64).reshape(-1, 4)
            out.append(Window(e[:, 0], e[:, 1], e[:, 2], older + sum(e[3] for e in seen)))
        return out

    def proportions(state: State, step: int) -> np.ndarray:
        z = np.zeros(domains)
        if step >= warmup_steps:
            z = preference(windows(state, step))[1]
            z = np.where(np.isnan(z), np.nanmean(z) if not np.isnan(z).all() else 0.0, z)
        share = np.exp(z - z.max())
        return floor + (1 - domains * floor) * share / share.sum()

    return Mixer(init=lambda: {"entries": [[] for _ in range(domains)], "older": [0] * domains}, observe=observe, proportions=proportions,
                 signal=lambda state, step: preference(windows(state, step))[0])


DYNAMIC: dict[str, Callable[..., Mixer]] = {"reward_gap": reward_gap, "dump_ucb": dump_ucb, "tscl": tscl}


def settings_of(name: str) -> dict[str, Any]:
    """The settings a mixer has, with their defaults."""
    if name == "static":
        return {}
    of = lambda f: {n: p.default for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}  # noqa: E731
    return of(_dynamic) | of(DYNAMIC[name])


def build_mixer(name: str, weights: Sequence[float] | np.ndarray, **settings: Any) -> Mixer:
    """The mixer of ``data.mixer.name`` over domains with these weights (the dynamic ones start uniform and only count them).

    Raises:
      ValueError: unknown name, a setting that the mixer does not have, a floor that leaves nothing.
    """
    if name not in ("static", *DYNAMIC):
        raise ValueError(f"data.mixer.name: unknown mixer '{name}'; there are static, {', '.join(DYNAMIC)}")
    taken = settings_of(name)
    if extra := sorted(set(settings) - set(taken)):
        raise ValueError(f"data.mixer.{extra[0]}: the mixer '{name}' has no such setting; it takes {', '.join(taken) or 'none'}")
    return static(weights) if name == "static" else DYNAMIC[name](len(weights), **settings)


def largest_remainder(p: Sequence[float] | np.ndarray, n: int, carry: Sequence[float] | np.ndarray | None = None
                      ) -> tuple[np.ndarray, np.ndarray]:
    """Splits n prompts over domains by largest remainder; what was rounded away is carried to the next batch.

    ``ideal = n p + carry``; each domain gets ``floor(ideal)``, the rest goes to the largest fractions (ties: lowest
    index), and ``carry' = ideal - counts``. Summed over batches, target - realised = carry, and |carry| < 1

    - for any sequence of p while every domain is due at least one prompt a batch (n p >= 1), and
    - for a constant p at any n. There, with domains due less than one prompt a batch, the largest fraction is not
      enough (a rare domain can be overtaken until it is two behind), so the rest goes to the earliest deadline, the
      domain that would first be a whole prompt behind: Tijdeman's rule for the chairman assignment problem (ours).

    If p changes while some n p < 1 no online rule keeps the bound; counts still sum to n and the debt is carried.

    Args:
      p: ``[domains]`` proportions, sum 1.
      n: prompts in the batch.
      carry: ``[domains]`` of the batch before; None at the start.

    Returns:
      (counts ``[domains] int64`` with sum n, carry ``[domains] float64`` with sum 0).

    Raises:
      ValueError: p is no distribution, or n is negative.
    """
    p = np.asarray(p, np.float64)
    if p.ndim != 1 or not np.all(np.isfinite(p)) or np.any(p < 0) or abs(p.sum() - 1) > 1e-6 or n < 0:
        raise ValueError(f"largest_remainder: expected proportions that sum to 1 and n >= 0, found {p.tolist()} and {n}")
    carry = np.zeros_like(p) if carry is None else np.asarray(carry, np.float64)
    ideal = p / p.sum() * n + carry
    ideal = np.where(np.abs(ideal - np.rint(ideal)) < 1e-9, np.rint(ideal), ideal)  # 3 * 0.1 * 10 is a hair below 3
    counts = np.maximum(np.floor(ideal), 0).astype(np.int64)
    fraction = np.where(ideal > 0, ideal - counts, 0.0)
    rare = bool(np.any((p > 0) & (p * n < 1)))
    with np.errstate(divide="ignore"):
        priority = -(1 - fraction) / p if rare else fraction
    order = np.lexsort((np.arange(p.size), -priority, fraction <= 0))
    left = n - int(counts.sum())
    counts[order[:max(left, 0)]] += 1
    for _ in range(-left):  # only after a change of p: more whole prompts are owed than the batch has
        counts[np.argmin(np.where(counts > 0, ideal - counts, np.inf))] -= 1
    return counts, ideal - counts
