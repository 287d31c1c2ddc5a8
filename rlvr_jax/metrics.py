"""Everything a run writes for people: metrics, prompts and samples as JSONL, TensorBoard events, summary, progress.

One step axis for all of them, the trainer step. A full disk costs plots, never the run: a failed write warns once, is
counted in ``metrics/write_errors``, and leaves no torn line behind. No jax in here: values are anything ``float()`` takes.
"""

import contextlib
import importlib.metadata
import math
import os
import platform
import shlex
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rlvr_jax.records import Appender, finite, keep_until, line, read_records, scalars_event, start_event, write_json
from rlvr_jax.records import write_atomic as write_atomic

Fields = tuple[tuple[str, str, str], ...]

# (label, metric name, format) of what the progress display shows beside step and ETA.
TRAIN_FIELDS: Fields = (
    ("reward", "reward/mean", ".3f"),
    ("trained", "update/live_rows", ".0%"),  # rows that were in the update: not those of zero advantage, nor those that a strategy dropped
    ("length", "response/length_mean", ".0f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
)

# Packages whose version may change a result.
PACKAGES = ("rlvr-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "tokenizers",
            "math-verify", "numpy")


def means(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """``{name: (sum, count)} -> {name: sum / count}``; names with a zero count are left out (nothing was measured)."""
    return {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count) != 0}


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Writes ``summary.json`` atomically; numbers that are not finite become null.

    Raises:
      OSError: it could not be written: unlike a curve, the result of a run may not vanish silently.
    """
    path = Path(run_dir) / "summary.json"
    write_json(path, summary)
    return path


def write_environment(run_dir: str | os.PathLike[str], command: Sequence[str], **facts: Any) -> Path:
    """Writes ``environment.json``: the command, versions of Python and of what results depend on, and ``facts``
    only the caller knows (devices, mesh). The report shows it.
    """
    path = Path(run_dir) / "environment.json"
    write_json(path, {"command": shlex.join(command), "versions": versions(), "machine": platform.machine(), **facts})
    return path


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[name] = importlib.metadata.version(name)
    return out


class Writer:
    """Appends the records of a run to ``metrics.jsonl``, ``samples.jsonl``, ``prompts.jsonl`` and ``tensorboard/`` in its folder.

    Each :meth:`write` is one line ``{"step": int, name: number | null, ...}``, on disk when the call returns, so a kill
    loses nothing that was written. A value that is not finite is null there, is left out of TensorBoard, and is counted
    in ``metrics/nonfinite`` (total over the run, present once there was one).

    Args:
      run_dir: folder of the run; made if missing.
      resume_step: trainer step of the restored checkpoint: records of later steps, which the killed run left and this
        one will write again, are removed. None starts afresh: all earlier records are removed.
      enabled: False writes nothing; for every process but the first of a multi-host run.
    """

    def __init__(self, run_dir: str | os.PathLike[str], resume_step: int | None = None, enabled: bool = True):
        self.run_dir, self.enabled = Path(run_dir), enabled
        self.nonfinite = self.write_errors = 0
        self._files: dict[str, Appender] = {}
        if not enabled:
            return
        last = -1 if resume_step is None else resume_step
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl", "prompts.jsonl"):
            self._guard(keep_until, self.run_dir / name, last)
            self._files[name] = Appender(self.run_dir / name)
        for record in read_records(self.run_dir / "metrics.jsonl"):
            self.nonfinite = record.get("metrics/nonfinite", self.nonfinite)
            self.write_errors = record.get("metrics/write_errors", self.write_errors)
        self._start_events(last)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One record of scalars at trainer step ``step``; call once a step, evaluation results included."""
        if not self.enabled:
            return
        record, bad = finite({name: _number(value) for name, value in values.items()})
        self.nonfinite += bad
        counters = {"metrics/nonfinite": self.nonfinite, "metrics/write_errors": self.write_errors}
        record.update({name: count for name, count in counters.items() if count})
        self._append("metrics.jsonl", line({"step": int(step), **record}))
        self._append("events", scalars_event(int(step), {name: value for name, value in record.items() if value is not None}))

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Sample texts, one line a row: ``step`` and the row's fields (domain, prompt, response, answer, reward, ...)."""
        if self.enabled:
            lines = [line({"step": int(step), **finite(row)[0]}) for row in rows]
            self._append("samples.jsonl", b"".join(lines))

    def write_prompts(self, step: int, prompt_ids: Iterable[int], domains: Iterable[str]) -> None:
        """The prompts of a step in order, and the domain of each: what a resumed or a paired run must repeat exactly."""
        if self.enabled:
            self._append("prompts.jsonl", line({"step": int(step), "prompt_ids": [int(i) for i in prompt_ids], "domains": list(domains)}))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_events(self, last: int) -> None:
        """A new event file; the session start tells TensorBoard to forget the steps that are written again."""
        folder = self.run_dir / "tensorboard"
        self._guard(folder.mkdir, parents=True, exist_ok=True)
        # TensorBoard reads files in order of their names: the running number orders two starts within one second.
        number = len(list(folder.glob("*.tfevents.*")))
        self._files["events"] = Appender(folder / f"events.out.tfevents.{int(time.time()):010d}.{number:05d}.rlvr_jax")
        self._append("events", start_event(last + 1))

    def _append(self, name: str, content: bytes) -> None:
        self._guard(self._files[name].append, content)

    def _guard(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            act(*args, **kwargs)
        except OSError as e:
            self.write_errors += 1
            if self.write_errors == 1:
                warnings.warn(f"metrics in {self.run_dir} could not be written ({e.strerror or e}); training goes on, "
                              "further failures are counted in metrics/write_errors", stacklevel=3)


class Progress:
    """Step, metrics, rate and ETA: a live bar on a terminal, else a plain line at most every ``seconds``.

    Written to stderr, so stdout stays for results. ``with Progress(total) as p: p.update(step, values)``.

    Args:
      total: last step.
      start: step resumed from.
      description: word in front.
      fields: what to show out of the values, see :data:`TRAIN_FIELDS`; () for jobs without metrics.
      seconds: least time between two plain lines; the first and the last step always get one.
      console: a ``rich.console.Console``; default stderr.
      enabled: False shows nothing but what is logged as ``urgent``; for every process but the first of a multi-host run.
    """

    def __init__(self, total: int, start: int = 0, description: str = "train", fields: Fields = TRAIN_FIELDS,
                 seconds: float = 10.0, console: Any = None, enabled: bool = True):
        self.total, self.step, self.description, self.fields, self.seconds = total, start, description, fields, seconds
        self.console = console or _console()
        self.enabled = enabled
        self._bar: Any = None
        self._values: dict[str, Any] = {}
        self._last_line, self._last_step = -math.inf, -1
        self._times: deque[tuple[float, int]] = deque(maxlen=32)

    def __enter__(self) -> Self:
        if self.console.is_terminal and self.enabled:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24), progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[shown]}"), progress.TimeElapsedColumn(),
                progress.TextColumn("ETA {task.fields[eta]}"), console=self.console)
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.step, shown="", eta="-")
            with contextlib.suppress(OSError):
                self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def update(self, step: int, values: Mapping[str, Any] | None = None, news: bool = False) -> None:
        """Shows that ``step`` is done. Values absent now (metrics come a step late) keep their last display. ``news``: a line, whenever the
        last one was."""
        moved, self.step = step > self.step, step
        self._values.update({name: value for name, value in (values or {}).items() if value is not None})
        now = time.monotonic()
        if moved:  # the time before the first step holds the compilation, and is in no rate
            self._times.append((now, step))
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(self._task, completed=step, shown=self.shown(), eta=self.eta())
        elif news or step >= self.total > self._last_step or now - self._last_line >= self.seconds:
            self._last_line, self._last_step = now, step
            self.log("  ".join(filter(None, (f"{self.description} {step}/{self.total}", self.shown(), f"ETA {self.eta()}"))))

    def log(self, text: str, urgent: bool = False) -> None:
        """A line of text above the bar."""
        if self.enabled or urgent:
            with contextlib.suppress(OSError):  # a terminal or pipe that has gone costs words, not the run
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def shown(self) -> str:
        numbers = {name: float(self._values.get(name, math.nan)) for _, name, _ in self.fields}
        return "  ".join(f"{label} {format(numbers[name], form) if math.isfinite(numbers[name]) else '-'}"
                         for label, name, form in self.fields)

    def eta(self) -> str:
        """Time left at the rate of the last steps, ``h:mm:ss``; '-' before there is a rate: two steps, or one where it is the last."""
        if self.step >= self.total:
            return "0:00:00"
        if len(self._times) < 2:
            return "-"
        (t0, step0), (t1, step1) = self._times[0], self._times[-1]
        left = round((self.total - step1) * (t1 - t0) / (step1 - step0))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"


def count(n: float) -> str:
    """A large number in three digits: 512, 4.7K, 135M, 7.62B."""
    power = 0
    while n >= 999.5 and power < 4:
        n, power = n / 1000, power + 1
    return f"{n:.3g}{' KMBT'[power].strip()}"


def say(text: str) -> None:
    """A line of text where the progress is shown, before or without it."""
    Progress(0).log(text)


def _console() -> Any:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends the process: a reader that has gone (``| head``) would take the run along
            self.quiet = True

    return Quiet(stderr=True)


def _number(value: Any) -> int | float:
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)
