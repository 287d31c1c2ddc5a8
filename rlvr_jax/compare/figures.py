"""What the runs of a comparison did on the way, as sections of its page: cost, data kept, weights, mix."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax import page
from rlvr_jax.charts import Series, line_chart
from rlvr_jax.compare.collect import COSTS, Found, per_step
from rlvr_jax.compare.spec import Spec

BY_ARM = (("Kept rows", "kept/rows", "of the rows generated; what a strategy drops is not learned from"),
          ("Updated tokens", "tokens/updated_share", "share of the response tokens that were really computed"),
          ("Effective sample size", "strategy/ess", "of the weights; 100% when all are equal"),
          ("Groups with a gradient", "effective/groups", "their samples differ in reward"),
          ("Reward in training", "reward/mean", "mean over the rows generated"))


def sections(spec: Spec, found: Found) -> list[str]:
    """The sections, each '' where nothing was recorded."""
    return [_cost(spec, found), _by_arm(spec, found), _mix(spec, found)]


def mean_over_runs(runs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """``(steps, mean)`` of a metric at the steps that every run measured which has it at all."""
    curves = [dict(zip(*per_step(steps, name))) for steps in runs]
    curves = [c for c in curves if c]
    at = sorted(set.intersection(*(set(c) for c in curves))) if curves else []
    return np.array(at, int), np.array([np.mean([c[s] for c in curves]) for s in at])


def _runs(found: Found, arm: str) -> list[list[dict[str, Any]]]:
    return [steps for (a, _), steps in found.records.items() if a == arm]


def _cost(spec: Spec, found: Found) -> str:
    rows = [[arm, *(page.count(found.cost[arm].get(unit)) for unit in COSTS)] for arm in spec.arms if found.cost.get(arm)]
    words = f"<p>Mean over runs. The budget is {page.text(str(spec.budget))}: every run ended at the first step that reached it.</p>"
    return page.section("What the arms cost", words + page.table(["arm", *COSTS], rows)) if rows else ""


def _by_arm(spec: Spec, found: Found) -> str:
    figures = []
    for title, name, note in BY_ARM:
        series = []
        for color, arm in enumerate(spec.arms):
            steps, values = mean_over_runs(_runs(found, arm), name)
            if len(steps):
                series.append(Series(arm, steps, values, color=color))
        figures.append(_figure(title, note, series))
    return page.section("What was learned from", f"<p>Mean over runs, by step.</p><div class=grid>{''.join(figures)}</div>") if any(figures) else ""


def _mix(spec: Spec, found: Found) -> str:
    """A picture for each arm whose mix is not the baseline's: asked for (dashed) and drawn."""
    figures, seen = [], None
    domains = spec.arms[spec.baseline].data.trained
    for arm in spec.arms:
        runs, series = _runs(found, arm), []
        targets = [mean_over_runs(runs, f"mix/target/{d}")[1] for d in domains]
        if not runs or not all(map(len, targets)) or (seen is not None and all(np.array_equal(a, b) for a, b in zip(targets, seen))):
            continue
        seen = targets if seen is None else seen
        for color, domain in enumerate(domains):
            for kind, dashed in (("realised", False), ("target", True)):
                series.append(Series(f"{domain}{' (target)' if dashed else ''}", *mean_over_runs(runs, f"mix/{kind}/{domain}"), color=color, dashed=dashed))
        figures.append(_figure(f"Mix of {arm}", "dashed: target, line: drawn", series))
    same = "Arms that are not shown have the mix of the baseline." if len(figures) < len(spec.arms) else ""
    return page.section("Domain mix", f"<p>Mean over runs, by step. {same}</p><div class=grid>{''.join(figures)}</div>") if figures else ""


def _figure(title: str, note: str, series: Sequence[Series]) -> str:
    if not series:
        return ""
    highest = max(float(np.nanmax(s.values)) for s in series)
    lowest = min(float(np.nanmin(s.values)) for s in series)
    svg = line_chart(series, key=f"runs {title}", percent=lowest >= 0 and highest <= 1, title=title)
    return page.figure(title, svg, [(s.label, s.color, s.dashed, "") for s in series], note)
