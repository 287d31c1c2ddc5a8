"""The config: strict, one-line errors that name the field, overrides, and no field that nobody reads."""

import ast
from pathlib import Path

import pytest
import yaml

from rlvr_jax import config as C
from rlvr_jax import config_errors
from rlvr_jax.compare.spec import load as load_comparison

ROOT = Path(C.__file__).parent
CONFIGS = sorted(p for p in (ROOT.parent / "configs").rglob("*.yaml") if not p.name.startswith("compare"))  # those are of another form


@pytest.mark.parametrize(("override", "words"), [
    ("train.stepz=5", ["train.stepz", "'train.steps'"]),
    ("rollot.top_p=1", ["rollot", "'rollout'"]),
    ("data.domains.a.taks=x", ["data.domains.a.taks", "'data.domains.a.task'"]),
    ("data.mixer.nmae=static", ["data.mixer.nmae", "'data.mixer.name'"]),
    ("eval.every=5", ["eval.every", "'train.eval_every'"]),
    ("train.lr=1", ["train.lr", "'optimizer.learning_rate'"]),
    ("train.steps=many", ["train.steps", "integer", "'many'"]),
    ("train.steps=true", ["train.steps"]),
    ("seed=1.5", ["seed"]),
    ("rollout.top_p=1.5", ["rollout.top_p", "1.5"]),
    ("model.remat=all", ["model.remat", "'none'", "'all'"]),
    ("data.mixer=3", ["data.mixer"]),
    ("data.domains={}", ["data.domains", "at least one"]),
    ("data.domains.a.path=x.jsonl", ["data.domains.a", "exactly one of 'task' and 'path'"]),
    ("data.domains.b={path: x.jsonl}", ["data.domains.b", "verifier"]),
    ("train.updates_per_batch=3", ["train.updates_per_batch", "3", "16"]),
    ("train.micro_batch=3 mesh.data=2", ["train.micro_batch", "mesh"]),
    ("algorithm.kl_in_reward=true", ["kl_in_reward", "kl_coef"]),
    ("algorithm.kl_estimator=k1", ["algorithm.kl_estimator"]),
    ("rewards=[{math: 1.0, format: 0.1}]", ["rewards"]),
    ("nonsense", ["nonsense", "a.b=value"]),
    ("seed.x=1", ["seed"]),
])
def test_a_wrong_value_is_one_line_that_names_the_field(override, words):
    with pytest.raises(C.ConfigError) as e:
        C.load(None, ["data.domains.a.task=arithmetic", *override.split(" ")] if " mesh" in override else ["data.domains.a.task=arithmetic", override])
    assert "\n" not in str(e.value)
    for word in words:
        assert word in str(e.value)


def test_other_trainers_names_lead_to_fields_that_exist():
    known = set(config_errors.paths(C.Config))
    assert set(config_errors.ELSEWHERE.values()) <= known and not set(config_errors.ELSEWHERE) & known


def test_unreadable_files(tmp_path):
    with pytest.raises(C.ConfigError, match="cannot be read"):
        C.load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    with pytest.raises(C.ConfigError, match="is not YAML"):
        C.load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(C.ConfigError, match="mapping"):
        C.load(tmp_path / "list.yaml")


def test_run_dir_follows_the_file_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    assert C.load(tmp_path / "mine.yaml").run_dir == "runs/mine"
    assert C.load(tmp_path / "mine.yaml", ["run_dir=elsewhere", "seed=4"]) == C.validate({"seed": 4, "run_dir": "elsewhere"})


def test_numbers_in_scientific_notation_are_numbers():
    config = C.load(None, ["optimizer.learning_rate=1e-5", "train.max_seconds=2E3"])
    assert config.optimizer.learning_rate == 1e-5 and config.train.max_seconds == 2000


def test_dump_and_validate_round_trip():
    config = C.load(None, ["strategies=[difffilter, {select: band, score: solve_rate, low: 0.1}]", "replay.capacity=4", "rewards=[{math: 1.0}, {format: 0.1}]"])
    assert C.validate(C.read_yaml(C.dump(config))) == config


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        C.Config().seed = 1


def test_training_refuses_greedy_and_single_samples():
    for override, word in [("rollout.temperature=0", "temperature"), ("rollout.samples_per_prompt=1", "samples_per_prompt")]:
        config = C.load(None, [override])
        with pytest.raises(C.ConfigError, match=word):
            C.check_for_training(config)


@pytest.mark.parametrize("path", CONFIGS, ids=[p.stem for p in CONFIGS])
def test_every_recipe_loads(path):
    if "arms" in yaml.safe_load(path.read_text()):
        assert len(load_comparison(path).arms) > 1
    else:
        C.load(path)


def test_there_are_recipes():
    assert CONFIGS


def _models(model, seen=None):
    seen = {} if seen is None else seen
    if model not in seen:
        seen[model] = list(model.model_fields)
        for f in model.model_fields.values():
            for m in config_errors._models_in(f.annotation):
                _models(m, seen)
    return seen


def test_every_field_is_read_somewhere():
    """A field counts as read where the package, outside this file's model definitions, takes an attribute of its name."""
    read = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add((node.attr, path.name))
    names = {attr for attr, file in read if file != "config.py"}
    # Mixer.settings() hands its fields on as a whole; tests/test_mixers.py shows that each has a taker.
    unread = [f"{m.__name__}.{f}" for m, fields in _models(C.Config).items() for f in fields if f not in names and m is not C.Mixer]
    assert not unread, f"config fields that nobody reads: {unread}"
