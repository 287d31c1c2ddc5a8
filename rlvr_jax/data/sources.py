"""Files to records: JSONL, JSON lists, parquet and the ``datasets`` library.

A record is (line, mapping) or (line, fault): a row that cannot be read is named, never silently lost. ``line`` counts
from 1: lines of a JSONL file, rows of the others.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_jax import remote
from rlvr_jax.data.rows import DataError


class Record(NamedTuple):
    """Exactly one of ``value`` and ``fault`` is set."""

    line: int
    value: dict[str, Any] | None
    fault: str = ""


def resolve(path: str, root: str | None) -> str:
    """Below ``root``, else ``$RLVR_DATA``, else the working directory, each of which may be in a bucket; absolute and 'hf:' paths stay."""
    if path.startswith("hf:"):
        return path
    return remote.join(root or os.environ.get("RLVR_DATA") or ".", path)


def read(path: str, split: str = "train") -> list[Record]:
    """All records of a file, a folder-free path, or 'hf:NAME[:CONFIG][@SPLIT]'.

    Raises:
      DataError: missing, empty or unreadable file, unknown kind, or no readable row in it.
    """
    if path.startswith("hf:"):
        records = list(_hugging_face(path, split))
    else:
        try:
            file = remote.local_file(path) if remote.is_remote(path) else Path(path)
        except FileNotFoundError:
            raise DataError(f"data file '{path}' does not exist in the bucket") from None
        except OSError as e:
            raise DataError(f"data file '{path}' cannot be read: {e}") from None
        _check_local(path, file)
        kind = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}[file.suffix.lower()]
        try:
            records = list(kind(file))
        except OSError as e:
            raise DataError(f"data file '{path}' cannot be read: {e.strerror or e}") from None
    if not records:
        raise DataError(f"data file '{path}' is empty; expected at least one row")
    if all(r.value is None for r in records):
        raise DataError(f"data file '{path}': all {len(records)} rows are broken, the first at line {records[0].line}: {records[0].fault}")
    return records


def check(path: str) -> None:
    """What can be said of a file on this machine without reading it.

    Raises:
      DataError: it is missing, or of an unknown kind.
    """
    if not path.startswith("hf:") and not remote.is_remote(path):
        _check_local(path, Path(path))


def _check_local(path: str, file: Path) -> None:
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise DataError(f"data file '{path}' {what}; give a .jsonl, .json or .parquet file (relative paths start at data.root, $RLVR_DATA or the working directory)")
    if file.suffix.lower() not in (".jsonl", ".json", ".parquet"):
        raise DataError(f"data file '{path}': unknown kind '{file.suffix}'; expected .jsonl, .json or .parquet")


def _jsonl(path: Path) -> Iterator[Record]:
    # Read as bytes: only \n ends a line (str.splitlines also breaks at U+2028), and a bad byte spoils one row only.
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield _parse(line, raw)


def _parse(line: int, raw: bytes) -> Record:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        return Record(line, None, f"not UTF-8 at byte {e.start}")
    except json.JSONDecodeError as e:
        return Record(line, None, f"not JSON: {e.msg} at column {e.colno}")
    except (ValueError, RecursionError) as e:  # an integer of thousands of digits, nesting without end
        return Record(line, None, f"not JSON: {e}")
    return _mapping(line, value)


def _mapping(line: int, value: Any) -> Record:
    if isinstance(value, dict):
        return Record(line, value)
    return Record(line, None, f"expected an object with named fields, found {type(value).__name__}")


def _json(path: Path) -> Iterator[Record]:
    """A list of objects, or an object that holds exactly one such list; JSONL under a .json name is read as JSONL."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        records = list(_jsonl(path))
        if sum(r.value is not None for r in records) * 2 > len(records):
            yield from records
            return
        raise DataError(f"data file '{path}' is not JSON: {' '.join(str(e).split())}") from None
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        value = lists[0] if len(lists) == 1 else [value]
    if not isinstance(value, list):
        raise DataError(f"data file '{path}': expected a list of objects, found {type(value).__name__}")
    for line, item in enumerate(value, 1):
        yield _mapping(line, item)


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            line = 0
            for batch in file.iter_batches(batch_size=4096):
                for item in batch.to_pylist():
                    line += 1
                    yield _mapping(line, item)
    except pa.ArrowException as e:
        raise DataError(f"data file '{path}' is not readable parquet: {' '.join(str(e).split())}") from None


def _hugging_face(path: str, split: str) -> Iterator[Record]:
    name, _, part = path.removeprefix("hf:").partition("@")
    name, _, config = name.partition(":")
    try:
        import datasets
    except ImportError:
        raise DataError(f"'{path}' needs the datasets library: pip install 'rlvr-jax[hf]'") from None
    try:
        rows = datasets.load_dataset(name, config or None, split=part or split)
    except Exception as e:  # the library raises dozens of kinds; all of them mean "not readable"
        raise DataError(f"'{path}' cannot be loaded: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from None
    for line, item in enumerate(rows, 1):
        yield _mapping(line, dict(item))
