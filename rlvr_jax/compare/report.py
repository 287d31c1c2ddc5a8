"""report.html of a comparison: one self-contained page, readable without script, offline, in light and dark.

Names of arms, pairs and domains are foreign text and are escaped. The same comparison gives the same bytes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax import page
from rlvr_jax.charts import Series, Span, forest_chart, line_chart
from rlvr_jax.compare import statistics as st
from rlvr_jax.compare.result import OVERALL, Comparison, headline, pair_counts
from rlvr_jax.compare.wording import HEAD, chance, decimals, figure, verdict_row

TONES = {"better": "good", "worse": "bad"}
CSS = {"better": "up", "worse": "down"}


def build(comparison: Comparison, title: str, facts: Mapping[str, Any], sections: Sequence[str] = ()) -> bytes:
    """The page; ``facts``: where the table came from, shown as a list at the end; ``sections``: HTML put before the explanations."""
    c = comparison
    parts = [_head(c, title), _verdicts(c), _forest(c), _domains(c), _curves(c), *sections, _method(c), _setup(facts)]
    return page.document(f"{title} · rlvr_jax", parts)


def _head(c: Comparison, title: str) -> str:
    least = max(c.effects[arm, c.overall].smallest_p for arm in c.arms)
    tiles = [("arms", f"{len(c.arms)} against {c.baseline}"), ("pairs", pair_counts(c)), ("domains", str(len(c.table.domains))),
             ("smallest p these pairs can give", chance(least))]
    facts = "".join(f"<div><dt>{page.text(name)}</dt><dd>{page.text(value)}</dd></div>" for name, value in tiles)
    notes = "".join(map(page.notice, c.notes))
    return (f"<header><p class=kind>rlvr_jax comparison</p><h1>{page.text(title)}</h1><p><strong>{page.text(headline(c))}</strong></p>{notes}"
            f"<dl class=tiles>{facts}</dl></header>")


def _verdicts(c: Comparison) -> str:
    measure = f"the mean over {len(c.domains)} domains, which count alike" if c.overall == OVERALL else f"'{c.overall}'"
    words = (f"<p>Scores: {page.text(measure)}. Differences are to {page.text(c.baseline)} in the same pair."
             f" Seeds needed: pairs that would find the observed difference with {st.POWER:.0%} chance, were it the true one.</p>")
    return page.section("Verdicts", words + _table(c, c.overall))


def _table(c: Comparison, measure: str) -> str:
    rows = [verdict_row(c, arm, measure) for arm in (c.baseline, *c.arms)]
    return page.table(HEAD, [[*row[:-1], (row[-1], CSS.get(row[-1], ""))] for row in rows])


def _forest(c: Comparison) -> str:
    figures = [f"<figure><figcaption><h3>{page.text(measure)}</h3></figcaption>{svg}</figure>"
               for measure in (c.overall, *c.areas.values(), *c.domains) if (svg := forest(c, measure))]
    words = "<p>Mean paired difference with its own 95% interval; larger is better. Filled: better or worse after Holm's correction.</p>"
    return page.section("Paired differences", f"{words}<div class=grid>{''.join(figures)}</div>")


def forest(c: Comparison, measure: str) -> str:
    """The ``<svg>`` of the paired differences in a measure; '' where no arm has it."""
    effects = [(arm, c.effects[arm, measure]) for arm in c.arms if (arm, measure) in c.effects]
    spans = [Span(arm, e.difference, e.low, e.high, TONES.get(e.verdict, "")) for arm, e in effects]
    return forest_chart(spans, key=f"forest {measure}", unit=f"difference to {page.visible(c.baseline)[:40]}", title=f"Paired differences: {measure}") if spans else ""


def curves(c: Comparison, unit: str, bands: bool = True) -> tuple[str, list[tuple[str, int]]]:
    """The ``<svg>`` of the arms' mean accuracy over a unit of cost, and (label, colour) of its lines; '' where nothing was measured."""
    series = [s for i, arm in enumerate((c.baseline, *c.arms)) if (s := _mean_curve(c, arm, unit, i)) is not None]
    if not series:
        return "", []
    heights = np.concatenate([s.values for s in series])
    svg = line_chart([s if bands else s._replace(band=None) for s in series], key=f"curve {unit}", percent=bool(heights.min() >= 0 and heights.max() <= 1),
                     smooth=False, across=unit, title=f"Learning curves over {unit}")
    return svg, [(s.label, s.color) for s in series]


def _domains(c: Comparison) -> str:
    measures = (*c.domains, *c.areas.values())
    if not measures:
        return ""
    rows: list[list[Any]] = []
    for arm in c.arms:
        cells: list[Any] = [arm]
        for measure in measures:
            effect = c.effects.get((arm, measure))
            cells.append("–" if effect is None else (figure(effect.difference, decimals(c, measure), sign=True), CSS.get(effect.verdict, "")))
        rows.append(cells)
    words = (f"<p>Paired differences to {page.text(c.baseline)}. Coloured: better or worse. Holm's correction runs over all"
             f" {len(c.arms) * len(c.domains)} cells of arm × domain, for each is one more chance to be fooled.</p>" if c.domains else "")
    full = "".join(f"<details><summary>{page.text(measure)}</summary>{_table(c, measure)}</details>" for measure in measures)
    return page.section("By domain" if c.domains else "Areas", words + page.table(["arm", *measures], rows) + full)


def _curves(c: Comparison) -> str:
    figures, tables = [], []
    for unit in c.areas:
        svg, labels = curves(c, unit)
        if not svg:
            continue
        figures.append(page.figure(f"Accuracy over {unit}", svg, [(label, color, False, "") for label, color in labels]))
        found = [(arm, c.reach[arm, unit]) for arm in (c.baseline, *c.arms)]
        goal = figure(found[0][1].target, decimals(c, c.areas[unit]))
        tables.append(page.table([f"{unit} to reach {goal}", "median", "runs that did"],
                                 [[arm, page.count(r.median), f"{r.reached} of {r.runs}"] for arm, r in found]))
    if not figures:
        return ""
    words = "<p>Mean over runs with its 95% interval. A run that never reached the accuracy counts as later than all that did.</p>"
    return page.section("Learning curves", f"{words}<div class=grid>{''.join(figures)}</div>{''.join(tables)}")


def _mean_curve(c: Comparison, arm: str, unit: str, color: int) -> Series | None:
    """Mean of the arm's curves where all are measured; straight lines between their points."""
    x, y = (side[c.table.arms.index(arm)] for side in c.table.curves[unit])
    known = np.isfinite(x) & np.isfinite(y)
    curves = [(x[i][k], y[i][k]) for i, k in enumerate(known) if k.any()]
    if not curves:
        return None
    low, high = max(cx.min() for cx, _ in curves), min(cx.max() for cx, _ in curves)
    at = np.unique(np.concatenate([cx for cx, _ in curves]))
    at = at[(at >= low) & (at <= high)]
    if len(at) > 200:
        at = np.linspace(low, high, 200)
    if not len(at):
        return None
    heights = np.stack([np.interp(at, cx[order], cy[order]) for cx, cy in curves for order in [np.argsort(cx)]])
    band = st.paired_interval(heights) if len(heights) > 1 else None
    return Series(arm, at, heights.mean(0), color=color, band=band)


def _method(c: Comparison) -> str:
    points = [
        "Every arm is compared with the baseline pair by pair: what a pair shares (seed, initial weights, prompts) drops out of the difference.",
        f"p: a paired permutation test of the mean difference (all sign patterns up to {st.EXACT_PAIRS} pairs, {st.DRAWS:,} random ones beyond). It assumes no"
        " distribution. P pairs have 2 to the power of P patterns, so p cannot be below the smallest p beside it.",
        f"p (Holm): corrected for comparing {len(c.arms)} {'arms' if len(c.arms) > 1 else 'arm'}. Better or worse: p (Holm) is at most {st.ALPHA}."
        " Too few seeds to decide: not even the smallest p would be, so the runs could not have shown any difference, large or small."
        " Not distinguishable: it could have been shown and was not; that is no proof that there is none.",
        "95% interval: Student's t of the paired differences of that arm alone, not corrected for the number of arms; it takes them for about normal,"
        " so it may leave out zero where the verdict, which does not, says that there are too few seeds.",
        "Seeds needed take the observed difference and spread for the true ones. Observed differences that stand out of many are usually too large, so plan for more.",
    ]
    detectable = [f"{arm}: {figure(e.detectable, decimals(c, c.overall))}" for arm in c.arms
                  if math.isfinite((e := c.effects[arm, c.overall]).detectable)]
    if detectable:
        points.append(f"True differences that these runs would find with {st.POWER:.0%} chance: {', '.join(detectable)}.")
    return page.section("How to read this", f"<ul>{''.join(f'<li>{page.text(words)}</li>' for words in points)}</ul>")


def _setup(facts: Mapping[str, Any]) -> str:
    rows: Sequence[str] = [f"<tr><th scope=row>{page.text(name)}</th><td>{page.text(value)}</td></tr>" for name, value in facts.items()]
    return page.section("Set-up", f"<div class=scroll><table class=facts>{''.join(rows)}</table></div>") if rows else ""
