"""The file that says what is compared: a base config, and arms as named changes to it."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from rlvr_jax import config as configs
from rlvr_jax.config import Config, ConfigError, Strict
from rlvr_jax.config_errors import explain

UNITS = ("updates", "generated", "updated")
MOST_STEPS = 10
"""A budget of tokens ends a run at the latest after so many times the base's train.steps: an arm may drop nearly everything."""
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]*")
_OURS = {"seed": "pairs are made of equal seeds; use --seeds", "run_dir": "every run has a folder of its own; use --run-dir",
         "train.steps": "arms have one budget; use --budget", "train.generated_tokens": "arms have one budget; use --budget",
         "train.updated_tokens": "arms have one budget; use --budget", "train.max_seconds": "a run that stops early cannot be compared; leave it out"}


class Budget(NamedTuple):
    """What every run may use: optimizer updates, generated tokens, or updated tokens (those learned from)."""

    unit: str
    amount: int

    def __str__(self) -> str:
        return f"{self.unit}={self.amount}"


class File(Strict):
    """A comparison as it is written down."""

    base: str | dict[str, Any]
    """A config file, its path relative to this file, or a config written out."""
    arms: dict[str, dict[str, Any] | None]
    """Name -> what differs from the base: sections as in a config, or dotted keys (data.mixer.name: tscl)."""
    baseline: str = "baseline"
    """The arm that the others are compared with."""
    seeds: int = pydantic.Field(12, ge=1)
    """Pairs: every arm is trained once with each of the seeds 0, 1, ..."""
    budget: str | None = None
    """updates=300, generated=2_000_000 or updated=1_000_000 (tokens); default: the updates of the base's train.steps."""
    score: str = "eval"
    """What is compared by domain: eval (accuracy); with several samples a prompt also pass_at_K and majority_of_K."""
    workers: int | None = pydantic.Field(None, ge=1)
    """Processes that train at once; default: with the embedded model on CPU one a core, else one."""


class Spec(NamedTuple):
    """A comparison, resolved: ``arms`` by name, the baseline first, each a config of seed 0 that holds the budget."""

    name: str
    folder: Path
    baseline: str
    arms: Mapping[str, Config]
    seeds: tuple[int, ...]
    budget: Budget
    score: str
    workers: int | None

    def run_config(self, arm: str, seed: int) -> Config:
        return self.arms[arm].model_copy(update={"seed": seed, "run_dir": str(self.run_dir(arm, seed))})

    def run_dir(self, arm: str, seed: int) -> Path:
        return self.folder / "runs" / arm / f"seed{seed}"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """All runs, pair by pair: however early one stops, what is finished can be compared."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]


def load(path: str | Path, *, arms: Sequence[str] | None = None, seeds: int | None = None, budget: str | None = None, run_dir: str | None = None,
         overrides: Iterable[str] = ()) -> Spec:
    """Reads a comparison; what is given replaces what the file says.

    Args:
      arms: only these (and the baseline).
      seeds: how many.
      run_dir: default ``runs/<file name>``.
      overrides: ``a.b=value`` for the base, so for every arm.

    Raises:
      ConfigError: one line: an unreadable file, an unknown key with the nearest valid one, an arm that does not fit its
        config or changes what a pair must share, no arm beside the baseline, a budget that is none.
    """
    path = Path(path)
    file = _file(path)
    base = _base(file, path.parent, overrides)
    names = _chosen(file, arms)
    asked = budget or file.budget
    found = parse_budget(asked) if asked else None
    made = {name: _arm(name, base, file.arms[name] or {}, found) for name in names}
    first = made[names[0]]
    if found is None:
        found = Budget("updates", first.train.steps * first.train.updates_per_batch)
    if len(set(domains := [tuple(c.data.domains) for c in made.values()])) > 1:
        odd = next(n for n, d in zip(names, domains) if d != domains[0])
        raise ConfigError(f"arms.{odd}: its domains are {', '.join(made[odd].data.domains)}, those of {names[0]} are {', '.join(domains[0])}; score every arm on the same domains")
    if not first.eval.prompts_per_domain:
        raise ConfigError("eval.prompts_per_domain is 0 in the base: there would be nothing to compare; set at least 100")
    return Spec(path.stem, Path(run_dir or f"runs/{path.stem}"), names[0], made, tuple(range(seeds or file.seeds)), found, file.score, file.workers)


def parse_budget(text: str) -> Budget:
    """``updates=300``, ``generated=2_000_000`` or ``updated=1_000_000``.

    Raises:
      ConfigError: another unit, or no whole number above 0.
    """
    unit, _, amount = text.partition("=")
    try:
        number = int(amount)
    except ValueError:
        number = 0
    if unit.strip() not in UNITS or number < 1:
        raise ConfigError(f"budget '{text}': expected updates=N (optimizer steps), generated=N or updated=N (tokens), with N at least 1")
    return Budget(unit.strip(), number)


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` laid over ``tree``: mappings go into each other, everything else (lists too) is replaced."""
    out = dict(tree)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _file(path: Path) -> File:
    try:
        tree = configs.read_yaml(path.read_text())
    except OSError as e:
        raise ConfigError(f"comparison '{path}' cannot be read: {e.strerror}") from None
    except (configs.yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"comparison '{path}' is not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"comparison '{path}' must be a mapping with 'base' and 'arms', found a {type(tree).__name__}")
    if stray := [k for k in tree if k in Config.model_fields]:
        raise ConfigError(f"comparison '{path}': '{stray[0]}' is a section of a config; put it under 'base' (for all arms) or under an arm")
    try:
        return File.model_validate_json(json.dumps(tree))
    except pydantic.ValidationError as e:
        raise ConfigError(f"comparison '{path}': {explain(e, File)}") from None
    except TypeError as e:
        raise ConfigError(f"comparison '{path}' holds something that is no plain YAML value: {e}") from None


def _base(file: File, folder: Path, overrides: Iterable[str]) -> dict[str, Any]:
    tree: Any = file.base
    if isinstance(tree, str):
        try:
            tree = configs.read_yaml((folder / tree).read_text()) or {}
        except OSError as e:
            raise ConfigError(f"base: '{folder / str(file.base)}' cannot be read: {e.strerror}; paths start at the comparison's folder") from None
        except (configs.yaml.YAMLError, UnicodeDecodeError) as e:
            raise ConfigError(f"base: '{folder / str(file.base)}' is not YAML: {' '.join(str(e).split())}") from None
    tree = configs.apply_overrides(tree, overrides)
    try:
        configs.validate(tree)
    except ConfigError as e:
        raise ConfigError(f"base: {e}") from None
    return tree


def _chosen(file: File, wanted: Sequence[str] | None) -> list[str]:
    """Names of the arms to run, the baseline first."""
    def known(name: str, where: str) -> str:
        if name not in file.arms:
            near = difflib.get_close_matches(name, file.arms, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: no arm is called '{name}'{f'; nearest: {near[0]!r}' if near else ''} (there are {', '.join(file.arms)})")
        return name

    for name in file.arms:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"arms: '{name}' cannot name a folder; use letters, digits and _ . + = -")
    known(file.baseline, "baseline")
    names = [known(name, "--arms") for name in wanted] if wanted is not None else list(file.arms)
    others = [name for name in dict.fromkeys(names) if name != file.baseline]
    if not others:
        raise ConfigError(f"only the baseline '{file.baseline}' is left; a comparison needs at least one more arm")
    return [file.baseline, *others]


def _arm(name: str, base: Mapping[str, Any], changes: Mapping[str, Any], budget: Budget | None) -> Config:
    try:
        tree = dict(base)
        for key, value in changes.items():
            for part in reversed(key.split(".")[1:]):
                value = {part: value}
            tree = merge(tree, {key.split(".")[0]: value})
        for path, why in _OURS.items():
            if _at(tree, path) != _at(base, path):
                raise ConfigError(f"{path} is not an arm's to choose: {why}")
        config = configs.validate(tree if budget is None else _with_budget(tree, configs.validate(tree), budget))
        configs.check_for_training(config)
    except ConfigError as e:
        raise ConfigError(f"arms.{name}: {e}") from None
    return config


def _with_budget(tree: Mapping[str, Any], config: Config, budget: Budget) -> dict[str, Any]:
    train = config.train
    if budget.unit != "updates":
        if config.optimizer.schedule != "constant":
            raise ConfigError(f"optimizer.schedule '{config.optimizer.schedule}' ends at train.steps, which a budget of tokens does not know; use constant, or --budget updates=N")
        return merge(tree, {"train": {"steps": MOST_STEPS * train.steps, f"{budget.unit}_tokens": budget.amount}})
    if budget.amount % train.updates_per_batch:
        raise ConfigError(f"budget {budget}: train.updates_per_batch {train.updates_per_batch} does not divide it")
    return merge(tree, {"train": {"steps": budget.amount // train.updates_per_batch}})


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
