"""From a table to a verdict per arm: :func:`compare`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlvr_jax.compare import statistics as st
from rlvr_jax.compare.curves import area_under_curve, common_range, cost_to_reach
from rlvr_jax.compare.table import Table

OVERALL = "mean over domains"


class Score(NamedTuple):
    """What the runs of an arm scored: mean and standard deviation (NaN for one run) over runs."""

    runs: int
    mean: float
    sd: float


class Effect(NamedTuple):
    """An arm against the baseline in one measure, over ``pairs`` that both have.

    ``low, high``: 95% interval of ``difference`` alone. ``p_holm``: corrected over the ``tests`` of its family.
    ``smallest_p`` and ``smallest_p_holm``: what these numbers of pairs could give at best. ``pairs_needed``: to find this difference
    with 80% chance at this spread and family, None if over 1000 or no difference. ``power``: that chance with ``pairs``.
    ``detectable``: the difference that ``pairs`` find with 80% chance, inf if none.
    """

    pairs: int
    difference: float
    sd: float
    low: float
    high: float
    p: float
    smallest_p: float
    p_holm: float
    smallest_p_holm: float
    tests: int
    power: float
    pairs_needed: int | None
    detectable: float
    verdict: st.Verdict


class Reach(NamedTuple):
    """What it cost the runs of an arm to reach ``target``: how many did, and the median over all (inf if most did not)."""

    target: float
    reached: int
    runs: int
    median: float


class Comparison(NamedTuple):
    """Everything a report tells. ``scores[arm, measure]``; ``effects`` likewise, without the baseline; ``reach[arm, unit]``.

    Measures are ``overall`` (the primary one: a family of its own), ``domains`` (one family of arms x domains; empty when
    there is one domain, which then is ``overall``) and ``areas`` by unit of the curves (a family each).
    """

    table: Table
    baseline: str
    overall: str
    domains: tuple[str, ...]
    areas: Mapping[str, str]
    scores: Mapping[tuple[str, str], Score]
    effects: Mapping[tuple[str, str], Effect]
    reach: Mapping[tuple[str, str], Reach]
    notes: tuple[str, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms but the baseline."""
        return tuple(arm for arm in self.table.arms if arm != self.baseline)


def compare(table: Table, baseline: str | None = None, target: float | None = None) -> Comparison:
    """Every arm of a table against one of them, paired.

    Domain scores count alike in the mean over domains. Holm's correction runs over the arms in the overall measure and over
    all arms x domains among the domains: looking at twelve benchmarks is looking twelve times.

    Args:
      table: from :func:`rlvr_jax.compare.table.tabulate` or ``read_csv``.
      baseline: an arm of it; by default the one called 'baseline'.
      target: accuracy whose cost is looked for in the curves; by default what the baseline ends at on average.

    Raises:
      ValueError: no such arm, an arm that shares no pair with the baseline, or a domain called like the overall measure.
    """
    name = "baseline" if baseline is None else baseline
    if name not in table.arms:
        raise ValueError(f"no arm is called '{name}'; name the baseline (--baseline), one of {', '.join(table.arms)}")
    if OVERALL in table.domains:
        raise ValueError(f"a domain is called '{OVERALL}', like the mean of all; rename it")
    single = len(table.domains) == 1
    overall, domains = (table.domains[0], ()) if single else (OVERALL, table.domains)
    families = [({overall: table.scores.mean(-1)}), {d: table.scores[..., i] for i, d in enumerate(domains)}]
    areas = {}
    for unit, (x, y) in table.curves.items():
        areas[unit] = f"area under the curve over {unit}"
        families.append({areas[unit]: area_under_curve(x, y, *common_range(x, y))})
    scores, effects = {}, {}
    for family in families:
        for measure, values in family.items():
            scores.update({(arm, measure): _score(values[a]) for a, arm in enumerate(table.arms)})
        effects.update(_effects(family, table.arms, name))
    for arm in table.arms:
        if arm != name and (arm, overall) not in effects:
            raise ValueError(f"arm '{arm}' shares no pair with the baseline '{name}'; give both the same seeds, or leave the arm out")
    comparison = Comparison(table, name, overall, domains, areas, scores, effects, _reach(table, name, target), ())
    return comparison._replace(notes=tuple(_notes(comparison)))


def headline(comparison: Comparison) -> str:
    """The verdicts in one sentence."""
    called: dict[str, list[str]] = {}
    for arm in comparison.arms:
        called.setdefault(comparison.effects[arm, comparison.overall].verdict, []).append(arm)
    clear = [f"{', '.join(called[v])} {'is' if len(called[v]) == 1 else 'are'} {v} than {comparison.baseline}" for v in ("better", "worse") if v in called]
    alike, few = called.get("not distinguishable", []), called.get("too few seeds to decide", [])
    if alike:
        clear.append(f"{_arms(alike, comparison)} cannot be told from {comparison.baseline}")
    if few:
        clear.append(f"there are too few seeds to decide about {_arms(few, comparison)}")
    words = "; ".join(clear)
    return f"{words[0].upper() if not (called.keys() & {'better', 'worse'}) else words[0]}{words[1:]}."


def pair_counts(comparison: Comparison) -> str:
    """How many pairs the arms share with the baseline: '5', '3 to 5'."""
    counts = [comparison.effects[arm, comparison.overall].pairs for arm in comparison.arms]
    return f"{max(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def pairs(n: int | str) -> str:
    """A count, or what :func:`pair_counts` says, in words."""
    return f"{n} pair{'s' if str(n) != '1' else ''}"


def _arms(arms: Sequence[str], comparison: Comparison) -> str:
    n, of = len(arms), len(comparison.arms)
    return f"'{arms[0]}'" if n == 1 else f"any of the {n} arms" if n == of else f"{n} of {of} arms"


def _score(values_P: np.ndarray) -> Score:
    known = values_P[np.isfinite(values_P)]
    return Score(len(known), float(known.mean()) if len(known) else np.nan, float(known.std(ddof=1)) if len(known) > 1 else np.nan)


def _effects(family: Mapping[str, np.ndarray], arms: Sequence[str], baseline: str) -> dict[tuple[str, str], Effect]:
    """One family of comparisons, corrected together; ``family[measure][A, P]``. An arm without a common pair is left out."""
    base = arms.index(baseline)
    cases = {}
    for measure, values in family.items():
        for a, arm in enumerate(arms):
            d = values[a] - values[base]
            d = d[np.isfinite(d)]
            # Two sums of the same numbers may differ in their last bit: that is no difference.
            d[np.abs(d) <= 1e-12 * np.nanmax(np.abs(values), initial=0.0)] = 0.0
            if a != base and len(d):
                cases[arm, measure] = d
    p = {key: float(st.sign_flip_p(d[:, None])[0]) for key, d in cases.items()}
    least = {key: float(st.smallest_p(len(d))) for key, d in cases.items()}
    p_holm, least_holm = (dict(zip(cases, st.holm(np.array([of[key] for key in cases])).tolist(), strict=True)) for of in (p, least))
    level = st.ALPHA / max(len(cases), 1)
    effects = {}
    for key, d in cases.items():
        n, mean, sd = len(d), float(d.mean()), float(d.std(ddof=1)) if len(d) > 1 else np.nan
        low, high = (float(side[0]) for side in st.paired_interval(d[:, None]))
        size = abs(mean) / sd if sd > 0 else np.inf if mean and n > 1 else 0.0
        effects[key] = Effect(
            n, mean, sd, low, high, p[key], least[key], p_holm[key], least_holm[key], len(cases),
            float(st.power(size, n, level)) if n > 1 and mean else np.nan, st.pairs_needed(size, level),
            sd * st.detectable_effect(n, level) if sd > 0 else np.nan, st.verdict(mean, p_holm[key], least_holm[key]))
    return effects


def _reach(table: Table, baseline: str, target: float | None) -> dict[tuple[str, str], Reach]:
    found = {}
    for unit, (x, y) in table.curves.items():
        goal = target
        if goal is None:
            ends = [curve[np.isfinite(curve)][-1] for curve in y[table.arms.index(baseline)] if np.isfinite(curve).any()]
            goal = float(np.mean(ends)) if ends else np.nan
        for a, arm in enumerate(table.arms):
            cost = cost_to_reach(x[a], y[a], goal)[np.isfinite(y[a]).any(-1)]
            median = float(np.median(np.where(np.isnan(cost), np.inf, cost))) if len(cost) else np.nan
            found[arm, unit] = Reach(goal, int(np.isfinite(cost).sum()), len(cost), median)
    return found


def _notes(c: Comparison) -> list[str]:
    """What a reader must know before believing a figure."""
    notes = []
    effects = [c.effects[arm, c.overall] for arm in c.arms]
    few = [e for e in effects if e.verdict == "too few seeds to decide"]
    if few:
        e, least = few[0], st.fewest_pairs(len(effects))
        notes.append(f"With {pairs(e.pairs)} and {len(effects)} {'arms' if len(effects) > 1 else 'arm'} no p can be below {e.smallest_p:.2g}"
                     f" ({e.smallest_p_holm:.2g} after Holm's correction), so no difference, however large, can be called one"
                     + (f"; that takes at least {least} pairs." if least else "."))
    fewest = min(e.pairs for e in effects)
    low, high = st.spread_known_within(fewest)
    if fewest < 10 and np.isfinite(low):
        notes.append(f"From {pairs(fewest)} a standard deviation is known only to within a factor of {low:.2g} to {high:.2g}: seeds needed are a rough figure.")
    same = [arm for arm in c.arms if np.array_equal(c.table.scores[c.table.arms.index(arm)], c.table.scores[c.table.arms.index(c.baseline)])]
    if same:
        notes.append(f"{', '.join(same)}: every score equals that of {c.baseline}. Was the setting that should differ in force?")
    missing = [f"{arm} (pair {c.table.pairs[p]})" for a, arm in enumerate(c.table.arms) for p in range(len(c.table.pairs)) if np.isnan(c.table.scores[a, p]).all()]
    if missing:
        notes.append(f"Missing runs: {', '.join(missing[:8])}{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}. An arm is compared on the pairs it shares with {c.baseline}.")
    most = dict(zip(c.table.domains, np.nanmax(np.abs(c.table.scores), axis=(0, 1)), strict=True))
    small = [d for d, m in most.items() if 0 < m <= 1]
    if small and max(most.values()) > 1.5:
        notes.append(f"{', '.join(small)}: never above 1 while other domains are. If that is a fraction among percentages, the mean over domains hardly counts it.")
    return notes
