"""``rlvr-jax compare CONFIG``: makes the runs, reads them back, and tells what they say."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlvr_jax.compare import figures, output, runner
from rlvr_jax.compare.collect import Found, collect
from rlvr_jax.compare.result import Comparison, compare
from rlvr_jax.compare.spec import Spec
from rlvr_jax.run_folder import held

MISSING = 3
"""So many names of runs in a line, then a count."""


class Told(NamedTuple):
    """``comparison`` and the path of its page are None while no arm shares a finished pair with the baseline."""

    comparison: Comparison | None
    report: Path | None
    found: Found
    stopped: bool


def run(spec: Spec, *, shard: str | None = None, train: bool = True, workers: int | None = None) -> Told:
    """Trains what is not finished (or only this shard's part of it) and reports on all that is in the folders.

    Args:
      shard: 'i/n'.
      train: False only reads and reports.
      workers: processes at once.

    Raises:
      ConfigError: the shard is none, or another command trains the same runs in this folder.
      OSError: a result could not be written.
    """
    outcome = runner.Outcome({}, False)
    if train:
        mine = runner.share(spec, *runner.parse_shard(shard, len(spec.seeds))) if shard else spec.runs
        with _alone(spec, shard) as locks:
            outcome = runner.make(spec, mine, workers, locks)
    found = collect(spec)
    found = found._replace(failed={**found.failed, **{r: why for r, why in outcome.failures.items() if r not in found.refused}})
    if found.table is None:
        return Told(None, None, found, outcome.stopped)
    comparison = compare(found.table, spec.baseline)
    comparison = comparison._replace(notes=(*comparison.notes, *found.notes, *_left_out(spec, found)))
    facts = {"budget": str(spec.budget), "score": spec.score, "seeds": len(spec.seeds), "cost": found.cost,
             "left out": {f"{arm} seed {seed}": why for (arm, seed), why in [*found.refused.items(), *found.failed.items()]}}
    path = output.write(comparison, spec.folder, spec.name, facts, figures.sections(spec, found))
    return Told(comparison, path, found, outcome.stopped)


@contextlib.contextmanager
def _alone(spec: Spec, shard: str | None) -> Iterator[list[int]]:
    """Two commands would start each other's runs, and report as failed what the other one trains. Shards may share a folder."""
    message = f"another compare trains in {spec.folder}, or its runs are still being saved; wait for it, or choose another --run-dir (--report-only may read it)"
    with contextlib.ExitStack() as stack:
        locks = [stack.enter_context(held(spec.folder / ".lock", message, shared=shard is not None))]
        if shard:
            locks.append(stack.enter_context(held(spec.folder / f".lock-{shard.replace('/', '-of-')}", message)))
        yield locks


def problems(found: Found) -> list[str]:
    """One line a reason: what failed or was refused."""
    return [f"{what}: {why} ({_names(runs)})" for what, of in (("failed", found.failed), ("refused", found.refused))
            for why in dict.fromkeys(of.values()) for runs in [[run for run, w in of.items() if w == why]]]


def unfinished(found: Found) -> str:
    n = len(found.missing)
    return f"{n} {'runs are' if n > 1 else 'run is'} not finished yet ({_names(found.missing)})" if n else ""


def _left_out(spec: Spec, found: Found) -> list[str]:
    lines = [f"Left out, {line}." for line in problems(found)]
    assert found.table is not None
    gone = [arm for arm in spec.arms if arm not in found.table.arms]
    if gone:
        lines.append(f"{', '.join(gone)}: no finished run that is a pair of {spec.baseline}'s.")
    return lines


def _names(runs: Sequence[runner.Run]) -> str:
    names = [f"{arm} seed {seed}" for arm, seed in runs]
    return ", ".join(names[:MISSING]) + (f" and {len(names) - MISSING} more" if len(names) > MISSING else "")
