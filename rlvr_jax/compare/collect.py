"""Run folders to a table: which runs are finished, at their budget and truly paired, and what each of them cost."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax import page, pairing
from rlvr_jax.compare.runner import FAILURE, Run, finished
from rlvr_jax.compare.spec import Spec
from rlvr_jax.compare.table import Curve, Table, tabulate
from rlvr_jax.compare.table import Run as Row
from rlvr_jax.records import read_records

COSTS = ("updates", "rollouts", "generated tokens", "updated tokens", "seconds")
CURVES = ("rollouts", "generated tokens", "seconds")


class Found(NamedTuple):
    """``table`` of the finished pairs (None if no arm shares one with the baseline), and what else is to be told.

    ``cost[arm][unit]``: mean over its runs. ``refused``: runs that are left out though finished, with the reason;
    ``failed``: runs that ended in an error; ``missing``: runs that are not finished.
    """

    table: Table | None
    records: Mapping[Run, list[dict[str, Any]]]
    cost: Mapping[str, Mapping[str, float]]
    refused: Mapping[Run, str]
    failed: Mapping[Run, str]
    missing: tuple[Run, ...]
    notes: tuple[str, ...]


def collect(spec: Spec) -> Found:
    """Reads all run folders of a comparison; trains nothing."""
    records: dict[Run, list[dict[str, Any]]] = {}
    refused: dict[Run, str] = {}
    failed: dict[Run, str] = {}
    missing = []
    for run in spec.runs:
        folder = spec.run_dir(*run)
        try:
            if finished(spec.run_config(*run)):
                steps = read_records(folder / "metrics.jsonl")
                _check_budget(spec, run, steps)
                records[run] = steps
            elif reason := page.read_json(folder / FAILURE).get("reason"):
                failed[run] = str(reason)
            else:
                missing.append(run)
        except ValueError as e:  # ConfigError is one
            refused[run] = str(e)
    for seed in spec.seeds:
        _check_pairs(spec, seed, records, refused)
    rows = []
    for run in list(records):
        try:
            rows.append(_row(spec, run, records[run]))
        except ValueError as e:
            refused[run] = str(e)
            del records[run]
    arms = [arm for arm in spec.arms if any((arm, s) in records and (spec.baseline, s) in records for s in spec.seeds)]
    table = tabulate((row for row in rows if row.arm in arms), incomplete=True) if len(arms) > 1 else None
    cost = {arm: _cost(spec, {run: steps for run, steps in records.items() if run[0] == arm}) for arm in spec.arms}
    return Found(_in_order(table, arms), records, cost, refused, failed, tuple(missing), tuple(_notes(spec, cost)))


def per_step(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """``(steps, values)`` of a metric, where it was measured."""
    points = [(r["step"], float(r[name])) for r in records if page.number(r.get(name)) is not None]
    return np.array([s for s, _ in points], int), np.array([v for _, v in points], float)


def _check_budget(spec: Spec, run: Run, steps: Sequence[Mapping[str, Any]]) -> None:
    """
    Raises:
      ValueError: the run ended elsewhere than at the first step that reaches the budget.
    """
    config, (unit, amount) = spec.arms[run[0]], spec.budget
    trained = [r for r in steps if r["step"] > 0]
    last = trained[-1]["step"] if trained else 0
    if unit == "updates":
        if last * config.train.updates_per_batch != amount:
            raise ValueError(f"its budget differs: {last * config.train.updates_per_batch} updates, expected {amount}; choose another --run-dir")
        return
    total = [r.get(f"tokens/{unit}_total") or 0 for r in trained]
    if not total or total[-1] < amount:
        raise ValueError(f"its budget differs: {total[-1] if total else 0:.0f} {unit} tokens when it ended at step {last}, expected {amount}; raise train.steps of the base")
    if len(total) > 1 and total[-2] >= amount:
        raise ValueError(f"its budget differs: it went on to {total[-1]:.0f} {unit} tokens, expected the first step from {amount}; choose another --run-dir")


def _check_pairs(spec: Spec, seed: int, records: dict[Run, list[dict[str, Any]]], refused: dict[Run, str]) -> None:
    """Moves runs that are no pair of the baseline's from ``records`` to ``refused``."""
    base: Run = (spec.baseline, seed)
    if base not in records:
        return
    try:
        known, order = _identity(spec, base), pairing.prompt_order(spec.run_dir(*base))
    except ValueError as e:
        refused[base] = str(e)
        del records[base]
        return
    for arm in spec.arms:
        run = (arm, seed)
        if run in records and run != base:
            try:
                _same(spec, _identity(spec, run), known)
                if not pairing.reorders_prompts(spec.arms[arm]) and not pairing.reorders_prompts(spec.arms[spec.baseline]):
                    _same_order(pairing.prompt_order(spec.run_dir(*run)), order, spec.baseline)
            except ValueError as e:
                refused[run] = str(e)
                del records[run]


def _identity(spec: Spec, run: Run) -> dict[str, Any]:
    found = page.read_json(spec.run_dir(*run) / pairing.FILE)
    if found.get("seed") != run[1] or not isinstance(found.get("evaluation"), dict) or not found.get("weights_sha256"):
        raise ValueError(f"not known to be a pair: {pairing.FILE} of the run is missing or of another seed")
    return found


def _same(spec: Spec, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if mine["weights_sha256"] != theirs["weights_sha256"]:
        raise ValueError(f"no pair of {spec.baseline}'s: other initial weights ({mine['weights_sha256'][:8]}, expected {theirs['weights_sha256'][:8]})")
    for domain, sha in theirs["evaluation"].items():
        if mine["evaluation"].get(domain) != sha:
            raise ValueError(f"no pair of {spec.baseline}'s: domain '{domain}' is evaluated differently (other prompts, samples, temperature, answer limit, or first reward)")


def _same_order(mine: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]], baseline: str) -> None:
    """One may have drawn more of a domain than the other: as far as both go, the order is the same."""
    for domain in mine.keys() & theirs.keys():
        for i, (a, b) in enumerate(zip(mine[domain], theirs[domain])):
            if a != b:
                raise ValueError(f"no pair of {baseline}'s: another order of prompts in domain '{domain}', from its prompt {i} on; equal data and seed give an equal order")


def _row(spec: Spec, run: Run, steps: Sequence[Mapping[str, Any]]) -> Row:
    last: Mapping[str, Any] = next((r for r in reversed(steps) if f"{spec.score}/mean" in r), {})
    end = max((r["step"] for r in steps), default=0)
    domains = spec.arms[run[0]].data.domains
    if last.get("step") != end or any(page.number(last.get(f"{spec.score}/{d}")) is None for d in domains):
        kinds = sorted({n.removesuffix("/mean") for r in steps for n in r if n.endswith("/mean") and n.startswith(("eval", "pass_at", "majority"))})
        raise ValueError(f"no '{spec.score}' was recorded at its last step, {end}; there is {', '.join(kinds) or 'no evaluation'}")
    scores = {d: float(last[f"{spec.score}/{d}"]) for d in domains}
    total = _totals(spec, run, steps)
    at, heights = per_step(steps, f"{spec.score}/mean")
    curves = {unit: Curve([total[unit](int(s)) for s in at], heights.tolist()) for unit in CURVES}
    return Row(run[0], str(run[1]), scores, curves)


def _totals(spec: Spec, run: Run, steps: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[int], float]]:
    """What a run had used by a step, by unit; a step that was not recorded had cost nothing."""
    config = spec.arms[run[0]]
    known = lambda name: dict(zip(*(side.tolist() for side in per_step(steps, name))))  # noqa: E731
    summed = lambda of: dict(zip(of, itertools.accumulate(of.values())))  # noqa: E731
    drawn = {r["step"]: len(r["prompt_ids"]) * config.rollout.samples_per_prompt for r in read_records(spec.run_dir(*run) / "prompts.jsonl")}
    of = {"rollouts": summed(drawn), "generated tokens": known("tokens/generated_total"), "updated tokens": known("tokens/updated_total"),
          "seconds": summed(known("time/step"))}
    return {"updates": lambda s: float(s * config.train.updates_per_batch)} | {unit: functools.partial(_or_zero, values) for unit, values in of.items()}


def _or_zero(values: Mapping[int, float], step: int) -> float:
    return float(values.get(step, 0.0))


def _cost(spec: Spec, runs: Mapping[Run, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    ends = [(_totals(spec, run, steps), max(r["step"] for r in steps)) for run, steps in runs.items()]
    return {unit: float(np.mean([total[unit](end) for total, end in ends])) for unit in COSTS} if ends else {}


def _notes(spec: Spec, cost: Mapping[str, Mapping[str, float]]) -> list[str]:
    """An equal budget in one unit may be an unequal one in another: that is said where it is more than a tenth."""
    base, notes = cost.get(spec.baseline, {}), []
    for unit in ("updates", "rollouts", "generated tokens"):
        if base.get(unit):
            odd = {arm: c[unit] / base[unit] for arm, c in cost.items() if unit in c and abs(c[unit] / base[unit] - 1) > 0.1}
            if odd:
                notes.append(f"Equal in {spec.budget.unit}, not in {unit}: " + ", ".join(f"{arm} used {ratio:.2f} times those of {spec.baseline}" for arm, ratio in odd.items()) + ".")
    choosing = [arm for arm, config in spec.arms.items() if pairing.chooses_prompts(config)]
    if choosing:
        notes.append(f"{', '.join(choosing)}: {'choose' if len(choosing) > 1 else 'chooses'} which prompts to train on, so "
                     f"{'their runs share' if len(choosing) > 1 else 'its runs share'} the seed, the start and the budget with their pairs, not every prompt.")
    return notes


def _in_order(table: Table | None, arms: Sequence[str]) -> Table | None:
    """Arms as the comparison lists them, whichever finished first."""
    if table is None:
        return None
    at = [table.arms.index(arm) for arm in arms]
    return table._replace(arms=tuple(arms), scores=table.scores[at], curves={unit: (x[at], y[at]) for unit, (x, y) in table.curves.items()})


