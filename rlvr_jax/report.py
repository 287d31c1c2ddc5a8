"""report.html of a run: one self-contained page, readable without script, offline, in light and dark.

Built only from the files in the run folder (metrics.jsonl, summary.json, samples.jsonl, config.yaml,
environment.json); a file that is missing or a run that is not finished is said in the page. Everything in them may be
hostile (model text, names out of data files) and is escaped. The same files give the same bytes.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from rlvr_jax import page
from rlvr_jax.charts import MAX_POINTS, Series, line_chart, smoothing
from rlvr_jax.records import read_records, write_atomic

SHOWN_CHARACTERS = 3000
"""A sample text longer than this is cut in the page; samples.jsonl has it whole."""


class Chart(NamedTuple):
    """What one picture shows: metric names, or prefixes ending in '/'."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    percent: bool = False
    log: bool = False
    markers: bool = False
    smooth: bool = True
    robust: bool = False
    note: str = ""


LEARNING = (
    Chart("Accuracy on held-out prompts", ("eval/",), percent=True, markers=True),
    Chart("Right at least once", ("pass_at_",), percent=True, markers=True, note="of k samples of a held-out prompt, unbiased"),
    Chart("Majority right", ("majority_of_",), percent=True, markers=True, note="the most frequent answer of a held-out prompt"),
    Chart("Reward", ("reward/",), note="of the samples trained on, before any are dropped"),
    Chart("Accuracy on training prompts", ("accuracy/",), percent=True, note="share of samples that are right"),
    Chart("Response length", ("response/length_mean",), "tokens"),
    Chart("Truncated responses", ("response/truncated",), percent=True, note="ran into rollout.max_new_tokens"),
    Chart("Entropy of the policy", ("entropy", "policy/entropy"), "nat"),
)
DATA = (
    Chart("Kept rows by domain", ("kept/rows/",), percent=True),
    Chart("Kept by the data strategies", ("kept/",), percent=True),
    Chart("Groups with a gradient by domain", ("effective/groups/",), percent=True),
    Chart("Groups with a gradient", ("effective/groups", "replay/effective_fraction", "replay/fresh_effective_fraction"), percent=True,
          note="their samples differ in reward"),
    Chart("Computed in the update", ("update/live_rows", "tokens/updated_share"), percent=True, note="what teaches nothing is skipped"),
    Chart("Updated tokens by domain", ("tokens/updated_share/",), percent=True, note="of the domain's response tokens"),
    Chart("Domain mix", ("mix/",), percent=True, note="dashed: target, line: realised"),
    Chart("What the mixer follows", ("mixer_signal/",)),
    Chart("Weights of the strategies", ("strategy/weight_",)),
    Chart("Effective sample size", ("strategy/ess", "policy/is_ess"), percent=True, note="of the weights; 100% when all are equal"),
    Chart("Replay", ("replay/",)),
    Chart("Rows without a verdict", ("verify/unknown_share",), percent=True, note="they do not train"),
    Chart("Verifier, counts so far", ("verify/",), "rows", smooth=False),
)
HEALTH = (
    Chart("Gradient norm", ("update/grad_norm",), log=True, note="before clipping"),
    Chart("Loss", ("update/loss",), note="near 0 by design: the gradient is what learns"),
    Chart("Updates skipped", ("update/skipped_",), smooth=False, note="nothing to learn from, or a gradient that was not finite"),
    Chart("Distance to the reference model", ("policy/kl",), "nat", note="Kullback-Leibler estimate per token"),
    Chart("Ratio to the old policy", ("policy/ratio", "ratio/max"), log=True),
    Chart("Clipped tokens", ("policy/clip_",), percent=True),
    Chart("Sampler against trainer", ("logprob_gap/",), "nat", log=True, note="difference of log-probabilities"),
    Chart("Lost metrics so far", ("metrics/",), smooth=False, note="values that were not finite, writes that failed"),
)
SPEED = (
    Chart("Time of a step", ("time/",), "seconds", smooth=False, robust=True, note="steps that compile may leave the axis"),
    Chart("Generated tokens per second", ("tokens_per_second",)),
    Chart("Tokens so far", ("tokens/generated_total", "tokens/updated_total")),
    Chart("Tokens of a step", ("tokens/",), note="dropped rows are generated but not updated"),
    Chart("Compilations so far", ("compiles",), smooth=False),
)
# Kept by domain too, in metrics.jsonl and TensorBoard: a page with all of them would not be read.
NOT_DRAWN_BY_DOMAIN = ("kept/groups/", "kept/tokens/", "update/live_rows/", "tokens/updated/", "strategy/", "entropy_estimate/", "advantage/")
SECTIONS = (("Learning", LEARNING), ("Data", DATA), ("Health", HEALTH), ("Speed", SPEED))


def build(run_dir: str | os.PathLike[str]) -> Path:
    """Writes ``report.html`` into the run folder and returns its path.

    Raises:
      FileNotFoundError: there is no such folder.
      OSError: the page could not be written.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise FileNotFoundError(f"no run folder '{run_dir}'; give the run_dir of a training run, e.g. runs/quickstart")
    curves = _curves(read_records(run / "metrics.jsonl"))
    summary, environment = page.read_json(run / "summary.json"), page.read_json(run / "environment.json")
    before, after = _evaluations(summary, curves)
    domains = sorted({*before, *after, *(name.split("/", 1)[1] for name in curves if name.startswith(("accuracy/", "eval/")))} - {"mean"})
    parts = [_head(run, summary, environment, curves), _results(before, after, summary, page.read_text(run / "config.yaml"))]
    parts += _charts(curves, domains)
    parts += [_samples(read_records(run / "samples.jsonl")), _setup(run, environment)]
    write_atomic(run / "report.html", page.document(f"{run.resolve().name} · rlvr_jax", parts))
    return run / "report.html"


def _head(run: Path, summary: dict[str, Any], environment: dict[str, Any], curves: dict[str, Any]) -> str:
    last = max((int(steps[-1]) for steps, _ in curves.values()), default=None)
    state = "" if summary else page.notice(
        "Nothing recorded yet: metrics.jsonl has no records and there is no summary.json." if last is None else
        f"Not finished: there is no summary.json; the last record is of step {last}. This page shows what there is.")
    if summary.get("finished") is False:
        state = page.notice(f"Stopped at step {page.count(summary.get('steps'))} before its last step; the same command goes on from there.")
    if summary and last is None:
        state = page.notice("metrics.jsonl has no records: there are no curves to draw.")
    generated, updated = page.number(summary.get("generated_tokens")), page.number(summary.get("updated_tokens"))
    share = f" ({updated / generated:.0%} of generated)" if generated and updated is not None else ""
    tiles = [("steps", page.count(summary.get("steps", last))), ("wall time", page.duration(summary.get("seconds"))),
             ("tokens generated", page.count(generated)), ("tokens updated on", page.count(updated) + share),
             ("compilations", page.count(summary.get("compiles")))]
    if summary.get("resumed_from_step"):
        tiles.append(("resumed from step", page.count(summary["resumed_from_step"])))
    facts = "".join(f"<div><dt>{label}</dt><dd>{page.text(value)}</dd></div>" for label, value in tiles if value != "–")
    command = f"<p class=command><code>{page.text(environment['command'])}</code></p>" if environment.get("command") else ""
    return f"<header><p class=kind>rlvr_jax run</p><h1>{page.text(run.resolve().name)}</h1>{command}{state}<dl class=tiles>{facts}</dl></header>"


def _results(before: dict[str, float], after: dict[str, float], summary: dict[str, Any], config: str) -> str:
    if not before and not after:
        return page.section("Result", "<p>No evaluation was recorded (eval.prompts_per_domain: 0, or the run ended before the first one).</p>")
    rows = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        kind = "" if old is None or new is None or old == new else "up" if new > old else "down"
        bar = "".join(f'<i class={css} style="width:{100 * min(max(value, 0), 1):.1f}%"></i>'
                      for css, value in (("old", old), ("new", new)) if value is not None)
        rows.append(f"<tr><th scope=row>{page.text(name)}</th><td>{page.percent(old)}</td><td>{page.percent(new)}</td>"
                    f'<td class="{kind}">{page.points(old, new)}</td><td class=bar aria-hidden=true>{bar}</td></tr>')
    if len(rows) > 1 and before.keys() == after.keys():
        old, new = (sum(side.values()) / len(side) for side in (before, after))
        rows.append(f"<tr class=total><th scope=row>mean</th><td>{page.percent(old)}</td><td>{page.percent(new)}</td><td>{page.points(old, new)}</td><td></td></tr>")
    latest = "after" if summary else "latest"
    table = ("<div class=scroll><table><thead><tr><th scope=col>domain</th><th scope=col>before</th>"
             f"<th scope=col>{latest}</th><th scope=col>change, points</th><th scope=col></th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>")
    return page.section("Result", f"<p>Accuracy on held-out prompts.{_resolution(config)}</p>{table}")


def _resolution(config: str) -> str:
    """What a change must exceed before it means anything, for two independent samples of the configured size."""
    try:
        prompts = yaml.safe_load(config)["eval"]["prompts_per_domain"]
    except (yaml.YAMLError, KeyError, TypeError):
        return ""
    if not isinstance(prompts, int) or prompts < 1:
        return ""
    chance = 100 * 1.96 * (2 * 0.25 / prompts) ** 0.5
    return f" With up to {prompts} prompts a domain, a change of less than about {chance:.0f} points can be chance (95%, near 50% accuracy)."


def _charts(curves: dict[str, tuple[np.ndarray, np.ndarray]], domains: Sequence[str]) -> list[str]:
    left = {n: c for n, c in curves.items() if not (n.startswith(NOT_DRAWN_BY_DOMAIN) and n.rpartition("/")[2] in domains)}
    sections = []
    for heading, charts in SECTIONS:
        figures = []
        for chart in charts:
            names = [n for n in left if any(n == key or (key[-1] in "/_" and n.startswith(key)) for key in chart.names)]
            figures.append(_figure(chart, {name: left.pop(name) for name in names}, domains))
        if any(figures):
            sections.append(page.section(heading, f"<div class=grid>{''.join(figures)}</div>"))
    groups = sorted({name.partition("/")[0] for name in left})
    figures = [_figure(Chart(group, ()), {n: c for n, c in left.items() if n.partition("/")[0] == group}, domains) for group in groups]
    return sections + ([page.section("Other", f"<div class=grid>{''.join(figures)}</div>")] if any(figures) else [])


def _figure(chart: Chart, curves: dict[str, tuple[np.ndarray, np.ndarray]], domains: Sequence[str]) -> str:
    """A card with picture and legend; '' when nothing finite was measured."""
    series: list[Series] = []
    free = len(domains) if any(name.rsplit("/", 1)[-1] in domains for name in curves) else 0
    for name in sorted(curves, key=lambda n: (not n.endswith("/mean"), n)):
        label = name.split("/", 1)[-1]
        domain = label.rsplit("/", 1)[-1]
        color = domains.index(domain) if domain in domains else free
        free += color == free
        if np.isfinite(curves[name][1]).any():
            series.append(Series(label, *curves[name], color=color, dashed=name.startswith("mix/target/")))
    if not series:
        return ""
    svg = line_chart(series, key=chart.title, unit=chart.unit, percent=chart.percent, log=chart.log, markers=chart.markers,
                     smooth=chart.smooth, robust=chart.robust, title=chart.title)
    window = 1 if chart.markers or not chart.smooth else max(smoothing(min(len(s.steps), MAX_POINTS)) for s in series)
    smooth = f"bold: mean over {window} points" if window > 1 else ""
    note = "; ".join(filter(None, (chart.note, smooth)))
    lines = [(s.label, s.color, s.dashed, page.short(s.values[np.isfinite(s.values)][-1], chart.percent)) for s in series]
    return page.figure(chart.title, svg, lines, note)


def _samples(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return page.section("Samples", "<p>No sample texts were recorded.</p>")
    steps = sorted({row["step"] for row in rows})
    chosen = steps if len(steps) <= 4 else [steps[round(i * (len(steps) - 1) / 3)] for i in range(4)]
    blocks = []
    for step in chosen:
        cards = "".join(_sample(row) for row in [r for r in rows if r["step"] == step][:6])
        is_open = " open" if step == chosen[-1] else ""
        blocks.append(f"<details{is_open}><summary>Step {step}</summary>{cards}</details>")
    return page.section("Samples", f"<p>Texts of {len(chosen)} of {len(steps)} recorded steps; all are in samples.jsonl.</p>{''.join(blocks)}")


def _sample(row: dict[str, Any]) -> str:
    status = row.get("status") or ("unknown" if row.get("known") is False else "ok" if (page.number(row.get("reward")) or 0) > 0 else "wrong")
    css = status if status in ("ok", "wrong", "unknown") else "unknown"
    badge = f'<span class="tag {css}">{page.text(status)}</span>'
    known = ("prompt", "response", "answer")
    facts = " · ".join(f"{page.text(key)} {page.text(value, SHOWN_CHARACTERS)}" for key, value in row.items() if key not in (*known, "step", "status", "known") and value not in (None, ""))
    texts = "".join(f"<dt>{key}</dt><dd><pre>{page.text(row[key], SHOWN_CHARACTERS)}</pre></dd>" for key in known if row.get(key) is not None)
    return f"<article><p>{badge} {facts}</p><dl class=texts>{texts}</dl></article>"


def _setup(run: Path, environment: dict[str, Any]) -> str:
    versions = environment.get("versions")
    pairs = {k: v for k, v in environment.items() if k not in ("command", "versions")} | (versions if isinstance(versions, dict) else {})
    facts = "".join(f"<tr><th scope=row>{page.text(k)}</th><td>{page.text(v)}</td></tr>" for k, v in pairs.items())
    table = f"<div class=scroll><table class=facts>{facts}</table></div>" if facts else "<p>No environment.json: versions and command were not recorded.</p>"
    config = page.read_text(run / "config.yaml")
    shown = f"<details><summary>config.yaml, resolved</summary><pre>{page.text(config)}</pre></details>" if config else "<p>config.yaml is missing.</p>"
    return page.section("Set-up", shown + table)


def _curves(records: Iterable[dict[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """``{name: (steps, values)}``, NaN for null, sorted by step; of two records of a step the later one counts."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            point = np.nan if value is None else page.number(value)
            if name != "step" and point is not None:
                found.setdefault(name, {})[record["step"]] = point
    return {name: (np.array(sorted(points)), np.array([points[s] for s in sorted(points)], float)) for name, points in found.items()}


def _evaluations(summary: dict[str, Any], curves: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Accuracy by domain, before and after; of an unfinished run its first and its latest evaluation."""
    sides: list[dict[str, float]] = [{}, {}]
    recorded = summary.get("eval") if isinstance(summary.get("eval"), dict) else {}
    for side, key, at in zip(sides, ("before", "after"), (0, -1), strict=True):
        given = (recorded or {}).get(key)
        if isinstance(given, dict):
            side.update({str(k): float(v) for k, v in given.items() if page.number(v) is not None})
        elif not summary:
            for name, (_, values) in curves.items():
                if name.startswith("eval/") and name != "eval/mean" and np.isfinite(values).any() and (at == 0 or len(values) > 1):
                    side[name.removeprefix("eval/")] = float(values[np.isfinite(values)][at])
    return sides[0], sides[1]
