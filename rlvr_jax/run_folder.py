"""A run folder belongs to one process and one experiment."""

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlvr_jax.config import Config, ConfigError, validate

# Sections that may change between a run and its continuation; any other change would make it another experiment.
MAY_CHANGE = ("pool", "eval.batch_prompts", "run_dir", "train.steps", "train.save_every", "train.eval_every", "train.max_to_keep",
              "train.max_seconds", "train.samples_every")


@contextlib.contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Holds the run folder's lock; the lock goes with the process, however it ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in {run_dir}; wait for it, or choose another run_dir") from None
        yield


def refuse_changes(saved: Mapping[str, Any], config: Config) -> None:
    """A run folder goes on with the config it began with. A field that did not exist then had its default's meaning.

    Raises:
      ConfigError: names the fields that differ and may not.
    """
    with contextlib.suppress(ConfigError):  # a field that exists no longer: it is named below
        saved = validate(saved).model_dump(mode="json")
    old, new = dict(_leaves(saved)), dict(_leaves(config.model_dump(mode="json")))
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k) and not k.startswith((*MAY_CHANGE, "sft.")))
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
