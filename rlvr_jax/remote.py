"""Paths of buckets (``gs://``, ``s3://``, ...), through ``etils.epath`` and ``fsspec``: what is read often is copied to this machine first.

``gs://`` needs the package gcsfs (``pip install 'rlvr-jax[gcs]'``). Checkpoints do not pass through here: Orbax writes them to
the bucket itself, every process its own part.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

SCHEMES = ("gs", "s3", "az")


def is_remote(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).partition("://")[0] in SCHEMES


def join(root: str, path: str) -> str:
    """``path`` below ``root``, either of which may be in a bucket; an absolute or remote ``path`` stays."""
    if is_remote(path) or not is_remote(root):
        return path if is_remote(path) else str(Path(root) / Path(path).expanduser())
    return path if path.startswith(("/", "~")) else f"{root.rstrip('/')}/{PurePosixPath(path)}"


def cache(kind: str, uri: str) -> Path:
    """The folder below ``$XDG_CACHE_HOME/rlvr_jax`` that stands for a URI."""
    base = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlvr_jax" / kind
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", uri.partition("://")[2]).strip("_")[-80:]
    return base / f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"


def open_path(uri: str) -> Any:
    """An ``epath.Path``.

    Raises:
      OSError: the library for this kind of bucket is missing.
    """
    from etils import epath

    path = epath.Path(uri)
    try:
        path.exists()
    except ImportError as e:
        raise OSError(f"'{uri}' cannot be opened: {e}; pip install 'rlvr-jax[gcs]' (or the fsspec package of this kind of bucket)") from None
    return path


def local_file(uri: str) -> Path:
    """A copy of a file on this machine; made anew when its size or time of change differ.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it cannot be read.
    """
    source = open_path(uri)
    if not source.exists() or source.is_dir():
        raise FileNotFoundError(2, "no such file in the bucket", uri)
    return _copy(source, cache("files", uri))


def local_folder(uri: str, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """A copy on this machine of the files of a folder (not of folders in it) whose names are ``wanted``."""
    source, target = open_path(uri), cache("files", uri)
    for path in _files(source) if source.exists() else ():
        if wanted(path.name):
            _copy(path, target)
    return target


def _files(folder: Any) -> Iterator[Any]:
    yield from sorted((p for p in folder.iterdir() if not p.is_dir()), key=lambda p: p.name)


def _copy(source: Any, folder: Path) -> Path:
    """Written beside its place and renamed, so that several processes may do it at once and a kill leaves no half file."""
    state, target = source.stat(), folder / source.name
    changed = float(state.mtime or 0)
    if target.is_file() and (target.stat().st_size, target.stat().st_mtime) == (state.length, changed):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out, source.open("rb") as file:
            shutil.copyfileobj(file, out, 1 << 24)
        os.utime(temporary, (changed, changed))
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def download(uri: str, target: Path, skip: tuple[str, ...] = ()) -> None:
    """The files below ``uri`` into ``target``, folders included, except for top-level names in ``skip``."""
    source = open_path(uri)
    if not source.exists():
        return
    for path in source.iterdir():
        if path.name in skip:
            continue
        if path.is_dir():
            download(f"{uri.rstrip('/')}/{path.name}", target / path.name)
        else:
            _copy(path, target)


def upload(folder: Path, uri: str, done: dict[str, tuple[int, int]], skip: tuple[str, ...] = ()) -> None:
    """Files below ``folder`` that are not as in ``done`` (relative name -> (size, time)), which is brought up to date.

    Raises:
      OSError: a file could not be written.
    """
    target = open_path(uri)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder)
        if name.parts[0] in skip or path.name.startswith("."):
            continue
        state = path.stat()
        if done.get(str(name)) != (state.st_size, state.st_mtime_ns):
            to = target.joinpath(*name.parts)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
            done[str(name)] = (state.st_size, state.st_mtime_ns)
