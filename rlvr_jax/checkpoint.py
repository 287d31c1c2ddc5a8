"""One Orbax checkpoint holds all that a run needs to go on exactly where it stopped.

Items: ``state`` (parameters, optimizer, strategy state, step: device arrays, written sharded), ``host`` (numpy
buffers: replay), ``record`` (JSON: data position, counters, evaluations, resolved config). Writes go to a temporary
folder that is renamed when whole, so a run that is killed while saving finds its previous checkpoint. One that was whole
and has lost a part since (a disk's fault, a half copy) is passed over, said so, and set aside.
"""

import contextlib
import dataclasses
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

from rlvr_jax import strategies as strategy_room
from rlvr_jax.config import ConfigError
from rlvr_jax.critic import make_critic
from rlvr_jax.remote import is_remote
from rlvr_jax.state import abstract_state, policy_optimizer

if TYPE_CHECKING:
    from rlvr_jax.parts import Parts

log = logging.getLogger(__name__)
ALONE_SECONDS = 10 * 365 * 86_400
# What fails in orbax is raised here, and told in one line; its own words are traces and advice for each save.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname or record.levelno >= logging.CRITICAL)
_SYSTEM = re.compile("No space left on device|Disk quota exceeded|Read-only file system|Permission denied|Input/output error|File too large")


class SaveError(OSError):
    """A checkpoint could not be written; the message is one line."""


class Checkpoints:
    """Checkpoints of one run folder: the newest ``max_to_keep`` and, beside them, the best by evaluation."""

    def __init__(self, run_dir: str | Path, max_to_keep: int, read_only: bool = False):
        self.folder = epath.Path(run_dir if is_remote(run_dir) else Path(run_dir).absolute()) / "checkpoints"
        best = keep.BestN(get_metric_fn=_accuracy, n=1, keep_checkpoints_without_metrics=False)
        # Its limits look at the wall clock, which a time server or a resumed machine may set forward by hours in the middle of a save.
        # Of several processes they are the way out when one is lost; alone, train.step_limit_seconds is.
        limits = {"async_options": ocp.AsyncOptions(timeout_secs=ALONE_SECONDS, create_directories_asynchronously=False)} if jax.process_count() == 1 else {}
        options = ocp.CheckpointManagerOptions(
            **limits,
            best_fn=_accuracy,  # without it metrics are not written, and the best is forgotten at the next start
            preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(max_to_keep), best]),
            cleanup_tmp_directories=not read_only, enable_async_checkpointing=not read_only, read_only=read_only, create=not read_only)
        self.manager = ocp.CheckpointManager(self.folder, options=options)
        self._unreadable: list[int] = []

    def save(self, step: int, state: Any, host: Mapping[str, Any], record: Mapping[str, Any], accuracy: float | None) -> None:
        """Starts an asynchronous save. An error of the previous one is raised here, if :meth:`check` did not.

        ``accuracy`` (mean over domains, or None when this step was not evaluated) decides which checkpoint is best.

        Raises:
          SaveError: it cannot be written: no space, no permission.
        """
        if step in self.manager.all_steps():
            return
        items = {"state": ocp.args.StandardSave(_parts(state)), "record": ocp.args.JsonSave(dict(record))}
        if host:
            items["host"] = ocp.args.StandardSave(dict(host))
        with self._told():
            self.manager.save(step, args=ocp.args.Composite(**items), metrics=None if accuracy is None else {"accuracy": accuracy})

    def restore(self, abstract_state: Any, host: Mapping[str, Any], step: int | None = None) -> tuple[Any, dict[str, Any], dict[str, Any]] | None:
        """``(state, host, record)`` of the newest whole checkpoint (or of ``step``), or None when there is none.

        ``abstract_state`` gives shapes and shardings, so a checkpoint restores onto another mesh. A checkpoint that
        cannot be read is reported and the one before it is taken; whoever goes on from that calls :meth:`set_aside`.

        Raises:
          RuntimeError: there are checkpoints and none can be read.
        """
        steps = sorted(self.manager.all_steps(), reverse=True) if step is None else [step]
        self._unreadable = []
        for s in steps:
            try:
                items = {"state": ocp.args.StandardRestore(_parts(abstract_state)), "record": ocp.args.JsonRestore()}
                if host:
                    items["host"] = ocp.args.StandardRestore({k: _like(v) for k, v in host.items()})
                got = self.manager.restore(s, args=ocp.args.Composite(**items))
                return type(abstract_state)(**got["state"]), dict(got["host"]) if host else {}, got["record"]
            except Exception as e:
                self._unreadable.append(s)
                log.warning("checkpoint %s cannot be read (%s); trying the one before it", self.folder / str(s), _line(e))
        if steps:
            raise RuntimeError(self._none(steps))
        return None

    def set_aside(self) -> None:
        """Renames what :meth:`restore` could not read to ``STEP.unreadable`` (in a bucket: removes it): nothing is saved at a step up to
        the newest one in the folder, so steps that are trained again would go unsaved. All processes call it.
        """
        for s in self._unreadable:
            here = self.folder / str(s)
            if is_remote(here):
                self.manager.delete(s)
            elif jax.process_index() == 0:
                aside = Path(here).with_name(f"{s}.unreadable")
                shutil.rmtree(aside, ignore_errors=True)
                Path(here).rename(aside)
            log.warning("checkpoint %s is set aside; its step will be saved anew", here)
        if self._unreadable:
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("unreadable checkpoints are set aside")
            self.manager.reload()

    def record(self) -> dict[str, Any] | None:
        """The JSON record of the newest checkpoint that has a readable one, without reading any array; None where there is no checkpoint.

        Raises:
          RuntimeError: there are checkpoints and none has a readable record: this is no fresh start.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        for s in steps:
            with contextlib.suppress(Exception):  # restore says what is wrong with it
                return dict(self.manager.restore(s, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"])
        if steps:
            raise RuntimeError(self._none(steps))
        return None

    def _none(self, steps: list[int]) -> str:
        return f"none of the checkpoints {steps} in {self.folder} can be read; bring one back from a copy, or move the folder away to start afresh"

    def best_step(self) -> int | None:
        """Step of the checkpoint with the highest evaluated accuracy; the newest one if none was evaluated."""
        scored = [(m["accuracy"], s) for s in self.manager.all_steps() if (m := self._metrics(s))]
        return max(scored)[1] if scored else self.manager.latest_step()

    def _metrics(self, step: int) -> dict[str, float] | None:
        try:
            return self.manager.metrics(step)
        except (FileNotFoundError, KeyError, ValueError):
            return None

    def check(self) -> None:
        """Raises what went wrong with a save in the background, without waiting for it.

        Raises:
          SaveError: it could not be written.
        """
        with self._told():
            self.manager.check_for_errors()

    def wait(self) -> None:
        """Until the last save is on disk.

        Raises:
          SaveError: it could not be written.
        """
        with self._told():
            self.manager.wait_until_finished()
            self.manager.check_for_errors()

    def newest(self) -> str:
        """In words, for messages."""
        steps = [int(p.name) for p in self.folder.iterdir() if p.name.isdigit()] if self.folder.is_dir() else []
        return f"the newest checkpoint is of step {max(steps)}" if steps else "there is no checkpoint yet"

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A disk's errors in one line, whatever orbax and tensorstore wrap them in; others, such as a lost process, pass."""
        try:
            yield
        except Exception as e:
            disk = isinstance(e, OSError) and not isinstance(e, TimeoutError | ConnectionError)
            if not disk and not _SYSTEM.search(str(e)):
                raise
            raise SaveError(f"a checkpoint in {self.folder} could not be written ({_line(e)}); {self.newest()}: mend the disk and start the same command again") from e

    def close(self) -> None:
        self.manager.close()


def restore_params(parts: "Parts", which: str) -> Any:
    """Parameters of a checkpoint of the config's run.

    Args:
      which: 'best' by evaluation, 'last', or a step.

    Raises:
      ConfigError: there is no such checkpoint.
    """
    config = parts.config
    folder = config.run_dir or "runs/default"
    checkpoints = Checkpoints(folder, config.train.max_to_keep, read_only=True)
    steps = checkpoints.manager.all_steps()
    step = {"best": checkpoints.best_step, "last": checkpoints.manager.latest_step}.get(which, lambda: int(which) if which.isdigit() else None)()
    if step is None or step not in steps:
        raise ConfigError(f"no checkpoint '{which}' in {folder}; there are {sorted(steps) or 'none'} (best, last or a step)")
    strategy = strategy_room.build(list(config.strategies))
    abstract = abstract_state(parts.model, policy_optimizer(config), strategy, parts.mesh, make_critic(config, parts.model), offload=config.mesh.offload_optimizer)
    got = checkpoints.restore(abstract, {}, step)
    checkpoints.close()
    assert got is not None
    return got[0].params


def _parts(state: Any) -> dict[str, Any]:
    """The fields that are there: a run without a critic is saved, and found again, as if there were no such field."""
    return {f.name: x for f in dataclasses.fields(state) if (x := getattr(state, f.name)) is not None}


def _line(e: Exception) -> str:
    """The system's reason if there is one, else the first line; tensorstore's are long."""
    found = _SYSTEM.search(str(e))
    return found[0] if found else f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def _accuracy(metrics: Any) -> float:
    return metrics["accuracy"]


def _like(x: Any) -> Any:
    return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype) if isinstance(a, np.ndarray) else a, x)
