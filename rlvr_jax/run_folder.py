"""A run folder belongs to one process and one experiment."""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlvr_jax import remote
from rlvr_jax.config import Config, ConfigError, validate

log = logging.getLogger(__name__)

# Fields that may change between a run and its continuation; any other change would make it another experiment. The machine's
# (mesh, slots, micro-batch, remat) change rounding only: on the same ones a continued run is the same bit for bit.
MAY_CHANGE = ("pool", "data.root", "eval.batch_prompts", "run_dir", "mesh", "rollout.slots", "train.micro_batch", "model.remat", "train.steps", "train.save_every", "train.eval_every", "train.max_to_keep",
              "train.max_seconds", "train.samples_every", "train.step_limit_seconds", "train.save_seconds", "train.barren_steps", "train.generated_tokens", "train.updated_tokens")


class RunFolder:
    """Where a run writes what people read. A run folder in a bucket has a stand-in on the machine of the first process, because
    buckets know no appending; :meth:`push` brings the bucket up to date.

    Attributes:
      local: to write to.
      uri: of the bucket, or None.
    """

    def __init__(self, run_dir: str):
        self.uri = run_dir if remote.is_remote(run_dir) else None
        self.local = remote.cache("runs", run_dir) if self.uri else Path(run_dir)
        self._pushed: dict[str, tuple[int, int]] = {}

    def pull(self) -> None:
        """The bucket is the truth: what an earlier start left in the stand-in alone is forgotten."""
        if self.uri:
            for path in self.local.iterdir():
                if path.name != ".lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            remote.download(self.uri, self.local, skip=("checkpoints",))

    def push(self) -> None:
        """A bucket that cannot be reached costs people's files, not the run: it is told, and tried again at the next push."""
        if self.uri:
            try:
                remote.upload(self.local, self.uri, self._pushed, skip=("checkpoints",))
            except OSError as e:
                log.warning("%s could not be brought up to date: %s", self.uri, e)


@contextlib.contextmanager
def only_one(run_dir: str, writer: bool = True, doing: str = "trains") -> Iterator[RunFolder]:
    """Holds the run folder; the lock goes with the process, however it ends. What fails before it has written anything leaves no folder.

    Args:
      writer: False in all processes of a run but the first: they hold nothing and write nothing.
      doing: what the holder does there, for the message to another one.
    """
    folder = RunFolder(run_dir)
    if not writer:
        yield folder
        return
    made = [path for path in (folder.local, *folder.local.parents) if not path.exists()]
    lock = folder.local / ".lock"
    with held(lock, f"another process {doing} in {run_dir}; wait for it, or choose another run_dir"):
        try:
            folder.pull()
            yield folder
        except BaseException:
            if folder.local in made and [*folder.local.iterdir()] == [lock]:
                lock.unlink()
                with contextlib.suppress(OSError):  # another one has begun there meanwhile
                    for path in made:
                        path.rmdir()
            raise
        folder.push()


@contextlib.contextmanager
def held(path: Path, message: str, shared: bool = False) -> Iterator[int]:
    """A lock that goes with the process, however it ends: the file stays, what is held is not the file. Gives its descriptor: a
    process that inherits it holds the lock too.

    Args:
      shared: several may hold it so at once, and nobody alone meanwhile.

    Raises:
      ConfigError: ``message``, when another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            same = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino  # else its holder has just failed, and removed it
        except BlockingIOError:
            same = False
        if not same:
            raise ConfigError(message)
        yield file.fileno()


def refuse_changes(saved: Mapping[str, Any], config: Config) -> None:
    """A run folder goes on with the config it began with. A field that did not exist then had its default's meaning.

    ``MAY_CHANGE`` may: machine, cadence, budgets; ``train.steps`` while the learning rate does not follow it. What the config names is
    held to what it was by its content: training data by the fingerprint in the checkpoint, evaluation, reference model and user
    code by :func:`rlvr_jax.pairing.refuse_others`.

    Raises:
      ConfigError: names the fields that differ and may not.
    """
    with contextlib.suppress(ConfigError):  # a field newer than the run has its default in it; one that exists no longer is named below
        saved = validate(saved).model_dump(mode="json")
    old, new = dict(_leaves(saved)), dict(_leaves(config.model_dump(mode="json")))
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and not k.startswith((*MAY_CHANGE, "sft.")))
    if config.optimizer.schedule != "constant" and old.get("train.steps") != config.train.steps:
        raise ConfigError(f"{config.run_dir} was begun with train.steps={old.get('train.steps')}, now {config.train.steps}, and its learning rate follows them"
                          f" (optimizer.schedule: {config.optimizer.schedule}); restore it, or choose another run_dir")
    if changed:
        k = changed[0]
        raise ConfigError(f"{config.run_dir} was begun with {k}={old.get(k)!r}, now {new.get(k)!r}"
                          f"{f' (and {len(changed) - 1} more)' if len(changed) > 1 else ''}; restore it, or choose another run_dir")


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for k, v in tree.items():
            yield from _leaves(v, f"{prefix}.{k}" if prefix else str(k))
    else:
        yield prefix, list(tree) if isinstance(tree, tuple) else tree
