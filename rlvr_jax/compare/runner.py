"""Makes the runs of a comparison: several worker processes, finished runs skipped, failing ones told and left behind.

Everything is in the run folders: killed anywhere, the next start skips what is finished and goes on with the rest.
"""

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_jax import config as configs
from rlvr_jax import page, pairing
from rlvr_jax.compare.spec import Spec
from rlvr_jax.compare.worker import Worker
from rlvr_jax.config import Config, ConfigError
from rlvr_jax.metrics import Progress
from rlvr_jax.records import write_json
from rlvr_jax.run_folder import refuse_changes
from rlvr_jax.stopping import Stop

Run = tuple[str, int]
FAILURE = "failure.json"
TICK_SECONDS = 1.0
LINE_SECONDS = 300.0
"""Least time between two lines where there is no terminal, and no run has ended."""


class Outcome(NamedTuple):
    """Runs that failed, with the reason in one line, and whether a signal stopped the rest."""

    failures: dict[Run, str]
    stopped: bool


def parse_shard(text: str, seeds: int) -> tuple[int, int]:
    """``0/2`` to (0, 2).

    Raises:
      ConfigError: no such form, or more shards than seeds.
    """
    first, _, second = text.partition("/")
    i, n = (int(first), int(second)) if first.isdecimal() and second.isdecimal() else (0, 0)
    if not 0 <= i < n:
        raise ConfigError(f"--shard '{text}': expected i/n with 0 <= i < n, e.g. 0/2 and 1/2")
    if n > seeds:
        raise ConfigError(f"--shard {text}: there are {seeds} seeds, and the runs of a pair stay on one machine; use at most {seeds} shards")
    return i, n


def share(spec: Spec, i: int, n: int) -> list[Run]:
    """The runs of shard i: whole pairs, so that both sides of a difference come from the same machine."""
    return [(arm, seed) for arm, seed in spec.runs if spec.seeds.index(seed) % n == i]


def finished(config: Config) -> bool:
    """Whether a run is at the end of its budget.

    Raises:
      ConfigError: its folder holds another experiment: other settings, or user code that has been edited since.
    """
    assert config.run_dir is not None
    folder = Path(config.run_dir)
    if text := page.read_text(folder / "config.yaml"):
        refuse_changes(configs.read_yaml(text), config)
    began = page.read_json(folder / pairing.FILE).get("code", {})
    if changed := [module for module, sha in pairing.code(config).items() if began.get(module, sha) != sha]:
        raise ConfigError(f"the file of '{changed[0]}' has changed since {folder} was begun; remove that folder, or choose another --run-dir")
    summary, limit = page.read_json(folder / "summary.json"), config.train
    return bool(summary.get("finished")) and (
        summary["steps"] >= limit.steps or summary["generated_tokens"] >= (limit.generated_tokens or float("inf"))
        or summary["updated_tokens"] >= (limit.updated_tokens or float("inf")))


def make(spec: Spec, runs: Sequence[Run], workers: int | None = None, locks: Sequence[int] = ()) -> Outcome:
    """Trains ``runs``, in their order, as far as they are not finished.

    Args:
      workers: processes at once; default: what the comparison says.
      locks: held by the workers too: while one still saves, its command is not over.
    """
    return _Runner(spec, runs, workers or spec.workers, locks).run()


class _Runner:
    def __init__(self, spec: Spec, runs: Sequence[Run], workers: int | None, locks: Sequence[int]):
        self.spec, self.runs, self.locks = spec, list(runs), locks
        self.waiting: list[Run] = []
        self.done: set[Run] = set()
        self.failures: dict[Run, str] = {}
        self.workers: list[Worker] = []
        self.stopping = False
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        embedded = all(config.model.path == "embedded" for config in spec.arms.values())
        # One run of a tiny model cannot keep two cores busy; a larger one can, and takes its memory once.
        self.most = workers or (len(cores) if embedded else 1)
        self.wanted = workers or 1  # until it is known that this is a CPU, where processes may share the machine
        self.cores = [cores[i % len(cores)::self.most] if self.most > 1 else [] for i in range(self.most)]

    def run(self) -> Outcome:
        for run in self.runs:
            try:
                if finished(self.spec.run_config(*run)):
                    self.done.add(run)
                else:
                    self.waiting.append(run)
            except ConfigError as e:
                self.failures[run] = str(e)
        total = len(self.runs) * self.spec.budget.amount
        fields = (("finished runs", "finished", ".0f"), ("of", "of", ".0f"), ("failed", "failed", ".0f"))
        with Progress(total, self._used(), f"compare: {self.spec.budget.unit}", fields, LINE_SECONDS) as progress, self._signals(progress), selectors.DefaultSelector() as ready:
            try:
                for run, reason in self.failures.items():
                    self._tell(progress, run, f"refused: {reason}")
                self._loop(progress, ready)
            finally:
                for worker in self.workers:
                    worker.end(0.0 if worker.task is not None else 10.0)
        return Outcome(self.failures, self.stopping)

    def _loop(self, progress: Progress, ready: selectors.BaseSelector) -> None:
        shown, ended = 0.0, -1
        while self.waiting or any(w.task is not None for w in self.workers):
            if not self.stopping:
                self._hand_out(ready)
            elif all(w.task is None for w in self.workers):
                break
            for key, _ in ready.select(TICK_SECONDS):
                worker: Any = key.fileobj
                messages = worker.receive()
                for message in messages or ():
                    self._hear(progress, worker, message)
                if messages is None:
                    ready.unregister(worker)
                    self._lost(progress, worker)
            if time.monotonic() - shown >= TICK_SECONDS:
                shown, news = time.monotonic(), len(self.done) + len(self.failures) > ended
                ended = len(self.done) + len(self.failures)
                self._show(progress, news)
        self._show(progress, len(self.done) + len(self.failures) > ended)

    def _show(self, progress: Progress, news: bool) -> None:
        progress.update(self._used(), {"finished": len(self.done), "of": len(self.runs), "failed": len(self.failures)}, news)

    def _hand_out(self, ready: selectors.BaseSelector) -> None:
        """Gives waiting runs to idle workers, and starts workers while there are runs for them."""
        for worker in self.workers:
            if worker.task is None and worker.backend and self.waiting:
                run = self.waiting.pop(0)
                config = self.spec.run_config(*run)
                (Path(str(config.run_dir)) / FAILURE).unlink(missing_ok=True)
                worker.start(run, config.model_dump(mode="json"))
        starting = sum(w.backend is None for w in self.workers)
        while len(self.workers) < self.wanted and starting < len(self.waiting):
            number = min(set(range(self.most)) - {w.number for w in self.workers})
            worker = Worker(number, self.cores[number], self.spec.folder / "log" / f"worker{number}.txt", self.locks)
            self.workers.append(worker)
            ready.register(worker, selectors.EVENT_READ)
            starting += 1

    def _hear(self, progress: Progress, worker: Worker, message: dict[str, Any]) -> None:
        if "backend" in message:
            worker.backend = message["backend"]
            self.wanted = self.most if worker.backend == "cpu" else self.wanted
            return
        run, worker.task = worker.task, None
        if "reason" in message:
            self._fail(progress, run, message["reason"])
        elif message["finished"]:
            self.done.add(run)
            summary = page.read_json(self.spec.run_dir(*run) / "summary.json")
            after = summary.get("eval", {}).get("after") or {"": 0.0}
            self._tell(progress, run, f"accuracy {sum(after.values()) / len(after):.1%} after {page.duration(summary.get('seconds'))}")
        elif not self.stopping:
            self._fail(progress, run, "it was stopped from outside; the same command goes on from there")

    def _lost(self, progress: Progress, worker: Worker) -> None:
        """A worker has ended by itself; its run failed, unless it was asked to stop."""
        how = worker.end()
        self.workers.remove(worker)
        if self.stopping:
            return
        if worker.task is None and worker.backend is None:
            last = page.read_text(worker.log).strip().splitlines()
            raise RuntimeError(f"a training process cannot start, it {how}: {last[-1] if last else 'no message'}; all of it is in {worker.log}")
        if worker.task is not None:
            self._fail(progress, worker.task, f"its process was lost: {how}; see {worker.log}")

    def _fail(self, progress: Progress, run: Run, reason: str) -> None:
        self.failures[run] = reason
        folder = self.spec.run_dir(*run)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FAILURE, {"reason": reason})
        self._tell(progress, run, f"failed: {reason}")

    @staticmethod
    def _tell(progress: Progress, run: Run, words: str) -> None:
        progress.log(f"{run[0]} seed {run[1]}: {words}")

    def _used(self) -> int:
        """What all runs have used of their budgets; a failed run counts as over."""
        whole = self.spec.budget.amount
        over = self.done | self.failures.keys()
        return sum(whole if run in over else min(used(self.spec, run), whole) for run in self.runs)

    def _signals(self, progress: Progress) -> Stop:
        """The first signal lets running steps end and be saved; the second does not wait."""
        def on_signal(number: int) -> None:
            self.stopping = True
            progress.log(f"{signal.Signals(number).name}: finishing the running steps and saving; the same command goes on from there")
            for worker in self.workers:
                worker.stop()

        return Stop(on_signal)


def used(spec: Spec, run: Run) -> int:
    """What a run has used of its budget so far, by the last line of its metrics."""
    record = last_record(spec.run_dir(*run) / "metrics.jsonl")
    if spec.budget.unit == "updates":
        return int(record.get("step", 0)) * spec.arms[run[0]].train.updates_per_batch
    return int(record.get(f"tokens/{spec.budget.unit}_total", 0))


def last_record(path: Path, tail: int = 1 << 14) -> dict[str, Any]:
    """The last whole line of a JSONL file; {} where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - tail, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for text in reversed(lines):
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict):
                return record
    return {}
