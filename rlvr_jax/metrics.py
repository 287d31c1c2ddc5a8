"""Everything a run writes for people: metrics.jsonl, TensorBoard events, samples.jsonl, summary.json, progress.

One step axis for all of them, the trainer step. A full disk costs plots, never the run: a failed write warns once, is
counted in ``metrics/write_errors``, and leaves no torn line behind. No jax in here: values are anything ``float()`` takes.
"""

import io
import json
import math
import os
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

Fields = tuple[tuple[str, str, str], ...]

# (label, metric name, format) of what the progress display shows beside step and ETA.
TRAIN_FIELDS: Fields = (
    ("reward", "reward/mean", ".3f"),
    ("kept", "kept/rows", ".0%"),
    ("length", "response/length_mean", ".0f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
)


def means(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """``{name: (sum, count)} -> {name: sum / count}``; names with a zero count are left out (nothing was measured)."""
    return {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count) != 0}


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a JSONL file; [] if it is missing. Lines that are no JSON object (a kill in mid-write) are passed over."""
    return list(_records(Path(path)))


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Writes ``summary.json`` atomically: readers see the old file or the new one. Non-finite numbers become null.

    Raises:
      OSError: the file could not be written; unlike a curve, the result of a run may not vanish silently.
    """
    path = Path(run_dir) / "summary.json"
    write_atomic(path, (json.dumps(_finite(summary)[0], indent=2) + "\n").encode())
    return path


def write_atomic(path: Path, content: bytes) -> None:
    """Temporary file in the same folder, fsync, rename; the temporary file is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Writer:
    """Appends the records of a run to ``metrics.jsonl``, ``samples.jsonl`` and ``tensorboard/`` in its folder.

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
        self._files: dict[str, _Appender] = {}
        if not enabled:
            return
        last = -1 if resume_step is None else resume_step
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "samples.jsonl"):
            self._guard(_keep_until, self.run_dir / name, last)
            self._files[name] = _Appender(self.run_dir / name)
        for record in _records(self.run_dir / "metrics.jsonl"):
            self.nonfinite = record.get("metrics/nonfinite", self.nonfinite)
            self.write_errors = record.get("metrics/write_errors", self.write_errors)
        self._start_events(last)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One record of scalars at trainer step ``step``; call once a step, evaluation results included."""
        if not self.enabled:
            return
        record, bad = _finite({name: _number(value) for name, value in values.items()})
        self.nonfinite += bad
        counters = {"metrics/nonfinite": self.nonfinite, "metrics/write_errors": self.write_errors}
        record.update({name: count for name, count in counters.items() if count})
        self._append("metrics.jsonl", _line({"step": int(step), **record}))
        self._append("events", _event(step, {name: value for name, value in record.items() if value is not None}))

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Sample texts, one line a row: ``step`` and the row's fields (domain, prompt, response, answer, reward, ...)."""
        if self.enabled:
            lines = [_line({"step": int(step), **_finite(row)[0]}) for row in rows]
            self._append("samples.jsonl", b"".join(lines))

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
        self._files["events"] = _Appender(folder / f"events.out.tfevents.{int(time.time()):010d}.{number:05d}.rlvr_jax")
        self._append("events", _event_start(last + 1))

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
    """
    def __init__(self, total: int, start: int = 0, description: str = "train", fields: Fields = TRAIN_FIELDS,
                 seconds: float = 10.0, console: Any = None):
        from rich.console import Console

        self.total, self.step, self.description, self.fields, self.seconds = total, start, description, fields, seconds
        self.console = console or Console(stderr=True)
        self._bar: Any = None
        self._values: dict[str, Any] = {}
        self._last_line = -math.inf
        self._times: deque[tuple[float, int]] = deque([(time.monotonic(), start)], maxlen=32)
        self._warm = False

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24), progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[shown]}"), progress.TimeElapsedColumn(),
                progress.TextColumn("ETA {task.fields[eta]}"), console=self.console)
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.step, shown="", eta="-")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Shows that ``step`` is done. Values absent now (metrics come a step late) keep their last display."""
        self.step = step
        self._values.update({name: value for name, value in (values or {}).items() if value is not None})
        now = time.monotonic()
        self._times.append((now, step))
        if len(self._times) == 3 and not self._warm:
            self._times.popleft()  # the first interval holds the compilation
            self._warm = True
        if self._bar is not None:
            self._bar.update(self._task, completed=step, shown=self.shown(), eta=self.eta())
        elif step >= self.total or now - self._last_line >= self.seconds:
            self._last_line = now
            self.log("  ".join(filter(None, (f"{self.description} {step}/{self.total}", self.shown(), f"ETA {self.eta()}"))))

    def log(self, text: str) -> None:
        """A line of text above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def shown(self) -> str:
        numbers = {name: float(self._values.get(name, math.nan)) for _, name, _ in self.fields}
        return "  ".join(f"{label} {format(numbers[name], form) if math.isfinite(numbers[name]) else '-'}"
                         for label, name, form in self.fields)

    def eta(self) -> str:
        """Time left at the rate of the last steps, ``h:mm:ss``; '-' before there is a rate."""
        (t0, step0), (t1, step1) = self._times[0], self._times[-1]
        if step1 <= step0:
            return "-"
        left = round((self.total - step1) * (t1 - t0) / (step1 - step0))
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"


class _Appender:
    """Appends whole blocks of bytes to a file; a block that fails is cut off again, so no torn record stays."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None

    def append(self, content: bytes) -> None:
        if self._file is None:  # opened here, so that a disk that is full at the start may recover
            self._file = self.path.open("ab", buffering=0)
        file = self._file
        size = os.fstat(file.fileno()).st_size
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest):]
        except OSError:
            file.truncate(size)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def _keep_until(path: Path, last: int) -> None:
    """Rewrites a JSONL file without records of steps after ``last`` and without torn lines; no file, no work."""
    if path.exists():
        write_atomic(path, b"".join(_line(record) for record in _records(path) if record["step"] <= last))


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False, default=str).encode() + b"\n"


def _number(value: Any) -> int | float:
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)


def _finite(value: Any) -> tuple[Any, int]:
    """A plain copy with None for every non-finite float at any depth, and how many there were."""
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and jax
        value = value.tolist()
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if isinstance(value, Mapping):
        pairs = {str(key): _finite(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, list | tuple):
        items = [_finite(item) for item in value]
        return [item for item, _ in items], sum(n for _, n in items)
    return value, 0


def _framed(event: Any) -> bytes:
    # TensorBoard's own EventFileWriter hides write errors in a thread and imports TensorFlow where it is installed.
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _event(step: int, values: Mapping[str, float]) -> bytes:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    scalars = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return _framed(event_pb2.Event(wall_time=time.time(), step=int(step), summary=summary_pb2.Summary(value=scalars)))


def _event_start(first_step: int) -> bytes:
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return (_framed(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
            + _framed(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start)))
