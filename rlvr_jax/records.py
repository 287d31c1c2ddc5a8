"""Files of records that survive kills and full disks: JSON lines, TensorBoard events, atomic rewrites. No jax in here."""

import io
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a JSONL file that carry an integer ``step``; [] if the file is missing.

    Other lines (one that a kill cut off, or garbage after a crash of the file system) are passed over.
    """
    return list(_records(Path(path)))


def keep_until(path: Path, last: int) -> None:
    """Rewrites a JSONL file, atomically, without its torn lines and the records of steps after ``last``."""
    if path.exists():
        write_atomic(path, b"".join(line(record) for record in _records(path) if record["step"] <= last))


def write_atomic(path: Path, content: bytes) -> None:
    """Temporary file in the same folder, fsync, rename: readers see the old file or the new one.

    Raises:
      OSError: it could not be written; the old file is untouched and no temporary file stays.
    """
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


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """:func:`write_atomic` of indented JSON; numbers that are not finite become null."""
    write_atomic(path, (json.dumps(finite(tree)[0], indent=2, allow_nan=False, default=str) + "\n").encode())


class Appender:
    """Appends whole blocks of bytes to a file; a block that fails is cut off again, so no torn record stays."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None

    def append(self, block: bytes) -> None:
        """On disk (of this machine, not through a power cut) when it returns.

        Raises:
          OSError: nothing of the block was kept; the next call tries afresh.
        """
        if self._file is None:  # opened here, so that a disk that is full at the start may recover
            self._file = self.path.open("ab", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(block)
        try:
            while rest:
                rest = rest[self._file.write(rest):]
        except OSError:
            self._file.truncate(size)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def line(record: Mapping[str, Any]) -> bytes:
    """One line of ASCII JSON (lone surrogates of model text are escaped); ``record`` comes from :func:`finite`."""
    return json.dumps(record, allow_nan=False, default=str).encode() + b"\n"


def finite(value: Any) -> tuple[Any, int]:
    """A plain copy with None for every non-finite float at any depth, and how many there were."""
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and jax
        value = value.tolist()
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if isinstance(value, Mapping):
        pairs = {str(key): finite(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, list | tuple):
        items = [finite(item) for item in value]
        return [item for item, _ in items], sum(n for _, n in items)
    return value, 0


def scalars_event(step: int, values: Mapping[str, float]) -> bytes:
    """A TensorBoard event with one scalar per name."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    scalars = [summary_pb2.Summary.Value(tag=name.encode("utf-8", "replace").decode(), simple_value=value) for name, value in values.items()]
    return _framed(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=scalars)))


def start_event(first_step: int) -> bytes:
    """Head of an event file; TensorBoard then forgets earlier files' events from ``first_step`` on."""
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return (_framed(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
            + _framed(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start)))


def _framed(event: Any) -> bytes:
    # TensorBoard's own EventFileWriter hides write errors in a thread and imports TensorFlow where it is installed.
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for text in file:
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield record
