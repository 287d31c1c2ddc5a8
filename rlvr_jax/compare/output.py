"""A comparison as files: results.csv, results.json, results.md and pictures (for a paper), and report.html."""

import csv
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr_jax.charts import standalone
from rlvr_jax.compare import report
from rlvr_jax.compare.result import Comparison, headline, pair_counts, pairs
from rlvr_jax.compare.statistics import ALPHA, POWER
from rlvr_jax.compare.wording import HEAD, verdict_row
from rlvr_jax.records import write_atomic, write_json


def write(comparison: Comparison, folder: str | os.PathLike[str], title: str, facts: Mapping[str, Any] | None = None, sections: Sequence[str] = ()) -> Path:
    """Writes the files into ``folder``, made if missing, and returns the path of report.html.

    Pictures: forest.svg, and for runs with learning curves curves_rollouts.svg and so on, without their bands when there are many.

    The same comparison gives the same bytes. ``facts``: where the table came from, for the page and results.json. ``sections``: more
    of the page, as HTML, before its explanations.

    Raises:
      OSError: a file could not be written; an earlier one of its name is untouched.
    """
    path, facts = Path(folder), dict(facts or {})
    write_atomic(path / "results.csv", _csv(records(comparison)))
    write_json(path / "results.json", tree(comparison, facts))
    write_atomic(path / "results.md", markdown(comparison).encode("utf-8", "replace"))
    for name, svg in pictures(comparison).items():
        write_atomic(path / name, svg.encode("utf-8", "replace"))
    write_atomic(path / "report.html", report.build(comparison, title, facts, sections))
    return path / "report.html"


def pictures(c: Comparison) -> dict[str, str]:
    """The main pictures of the page as files of their own: name to SVG."""
    found = {"forest.svg": standalone(report.forest(c, c.overall))}
    for unit in c.areas:
        svg, labels = report.curves(c, unit, bands=len(c.arms) < 6)
        if svg:
            found[f"curves_{re.sub('[^a-z0-9]+', '_', unit.lower())}.svg"] = standalone(svg, labels)
    return found


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """One flat row per arm and measure, the baseline's without a difference; results.csv is this."""
    rows = []
    for (arm, measure), score in comparison.scores.items():
        effect = comparison.effects.get((arm, measure))
        row = {"arm": arm, "measure": measure, "runs": score.runs, "mean": score.mean, "sd": score.sd}
        rows.append(row | ({"pairs": effect.pairs, "difference": effect.difference, "difference_sd": effect.sd, "low": effect.low, "high": effect.high,
                            **{name: getattr(effect, name) for name in effect._fields[5:]}} if effect else {}))
    return rows


def tree(comparison: Comparison, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json holds: per arm its figures in the overall measure, then by domain, area and reach."""
    def figures(arm: str, measure: str) -> dict[str, Any]:
        score, effect = comparison.scores[arm, measure], comparison.effects.get((arm, measure))
        tested = {} if effect is None else effect._asdict() | {"interval": [effect.low, effect.high]}
        names = {"sd": "difference_sd"}
        return {**score._asdict(), **{names.get(k, k): v for k, v in tested.items() if k not in ("low", "high")}}

    c = comparison
    return {"headline": headline(c), "baseline": c.baseline, "measure": c.overall, "pairs": list(c.table.pairs), "domains": list(c.table.domains),
            "alpha": ALPHA, "power_wanted": POWER, "notes": list(c.notes), "source": dict(facts),
            "arms": {arm: {**figures(arm, c.overall), "domains": {d: figures(arm, d) for d in c.domains},
                           **({"area_under_curve": {unit: figures(arm, measure) for unit, measure in c.areas.items()},
                               "cost_to_reach": {unit: c.reach[arm, unit]._asdict() for unit in c.areas}} if c.areas else {})}
                     for arm in c.table.arms}}


def markdown(comparison: Comparison) -> str:
    """The overall table for a paper or a README, with a line that says how it was made."""
    def cell(words: str) -> str:
        return " ".join(words.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())

    c = comparison
    rows = [HEAD, ["---"] + ["---:"] * (len(HEAD) - 2) + ["---"], *(verdict_row(c, arm, c.overall) for arm in (c.baseline, *c.arms))]
    table = "\n".join(f"| {' | '.join(words if i == 1 else cell(words) for words in row)} |" for i, row in enumerate(rows))
    made = (f"{cell(c.overall)}; mean ± standard deviation over runs; difference to {cell(c.baseline)} paired by seed ({pairs(pair_counts(c))}), "
            f"Student's t interval; p of a paired permutation test, Holm-corrected over {len(c.arms)} {'arms' if len(c.arms) > 1 else 'arm'}; "
            f"seeds needed: to find the observed difference with {POWER:.0%} chance.")
    return f"{table}\n\n{made}\n\n{cell(headline(c))}\n" + "".join(f"\n{cell(note)}\n" for note in c.notes)


def plain(comparison: Comparison) -> str:
    """The overall table in aligned columns, the verdicts in a sentence, and the notes: what a terminal shows."""
    c = comparison
    rows: Sequence[Sequence[str]] = [HEAD, *(verdict_row(c, arm, c.overall) for arm in (c.baseline, *c.arms))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) if i in (0, len(row) - 1) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in rows]
    return "\n".join([*lines, "", headline(c), *c.notes])


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Every column of any row; what is not finite or not there is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        values = [row.get(name) for name in columns]
        writer.writerow(["" if v is None or (isinstance(v, float) and not math.isfinite(v)) else v for v in values])
    return out.getvalue().encode("utf-8", "replace")
