"""The comparison file: what is composed, and how faults are told."""

from pathlib import Path

import pytest
from compare_runs import BASE, load

from rlvr_jax import cli
from rlvr_jax.compare import spec as specs
from rlvr_jax.compare.runner import parse_shard, share
from rlvr_jax.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def test_arms_are_the_base_with_changes(tmp_path):
    spec = load(tmp_path, {"x": {"strategies": ["gfpo"], "data": {"mixer": {"name": "tscl"}}}, "baseline": {}, "y": {"data.mixer.name": "dump_ucb", "algorithm.kl_coef": 0.1}},
                base={**BASE, "strategies": ["per", "ar"]}, overrides=["train.prompts_per_step=8"])
    assert list(spec.arms) == ["baseline", "x", "y"] and spec.seeds == (0, 1, 2) and spec.budget == ("updates", 4)
    base, x, y = spec.arms.values()
    assert base.strategies == y.strategies == ("per", "ar") and x.strategies == ("gfpo",) and x.data.mixer.name == "tscl"
    assert y.data.mixer.name == "dump_ucb" and y.algorithm.kl_coef == 0.1 and list(y.data.domains) == ["sums", "knights"]
    assert {c.train.prompts_per_step for c in spec.arms.values()} == {8}
    run = spec.run_config("x", 2)
    assert run.seed == 2 and run.run_dir == str(tmp_path / "out" / "runs" / "x" / "seed2") and run.model_copy(update={"seed": 0, "run_dir": None}) == x
    assert spec.runs[:4] == [("baseline", 0), ("x", 0), ("y", 0), ("baseline", 1)], "pair by pair"


def test_a_base_file_is_found_beside_the_comparison(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {steps: 7}")
    spec = load(tmp_path, {"baseline": {}, "x": {}}, base="base.yaml", arms=["x"], seeds=5)
    assert spec.budget == ("updates", 7) and len(spec.seeds) == 5


def test_budgets(tmp_path):
    arms = {"baseline": None, "x": {"strategies": ["per"]}}
    train = lambda **asked: load(tmp_path, arms, **asked).arms["x"].train  # noqa: E731
    assert train(budget="updates=9").steps == 9
    got = train(budget="generated=2_000")
    assert got.generated_tokens == 2000 and got.updated_tokens is None and got.steps == 4 * specs.MOST_STEPS
    assert train(keys={"budget": "updated=30"}).updated_tokens == 30
    twice = {**BASE, "train": {**BASE["train"], "updates_per_batch": 2}}
    spec = load(tmp_path, arms, base=twice)
    assert spec.budget == ("updates", 8) and load(tmp_path, arms, base=twice, budget="updates=6").arms["x"].train.steps == 3


@pytest.mark.parametrize("arms, keys, asked, words", [
    ({"x": {"strategys": ["per"]}}, {}, {}, ["arms.x", "strategys", "'strategies'"]),
    ({"x": {"train": {"micro_batches": 3}}}, {}, {}, ["arms.x", "train.micro_batches", "'train.micro_batch'"]),
    ({"x": {"rollout": {"temperature": 0}}}, {}, {}, ["arms.x", "rollout.temperature"]),
    ({"x": {}}, {"armz": {}}, {}, ["'armz'", "'arms'"]), ({"x": {}}, {"seeds": 0}, {}, ["seeds"]), ({"x": []}, {}, {}, ["arms.x"]),
    ({"x": {}}, {"train": {"steps": 3}}, {}, ["'train'", "'base'"]),
    ({"x": {"seed": 3}}, {}, {}, ["arms.x", "seed", "--seeds"]), ({"x": {"train.steps": 9}}, {}, {}, ["arms.x", "train.steps", "--budget"]),
    ({"x": {"run_dir": "z"}}, {}, {}, ["run_dir"]), ({"a/b": {}}, {}, {}, ["'a/b'"]), ({}, {}, {}, ["only the baseline"]),
    ({"x": {}}, {"baseline": "grpo"}, {}, ["'grpo'", "baseline, x"]), ({"difffilter": {}}, {}, {"arms": ["diffilter"]}, ["'diffilter'", "nearest: 'difffilter'"]),
    ({"x": {}}, {}, {"arms": ["baseline"]}, ["only the baseline"]), ({"x": {}}, {}, {"budget": "steps=3"}, ["steps=3", "updates=N"]),
    ({"x": {}}, {}, {"budget": "updates=0"}, ["at least 1"]), ({"x": {"optimizer.schedule": "linear"}}, {}, {"budget": "updated=9"}, ["arms.x", "schedule"]),
    ({"x": {"train.updates_per_batch": 2}}, {}, {"budget": "updates=3"}, ["arms.x", "does not divide"]),
    ({"x": {"data.domains.more": {"task": "countdown"}}}, {}, {}, ["arms.x", "more"]), ({"x": {}}, {}, {"overrides": ["eval.prompts_per_domain=0"]}, ["prompts_per_domain"]),
    ({"x": {}}, {}, {"overrides": ["train.stepz=0"]}, ["base", "train.stepz", "'train.steps'"])])
def test_faults_are_one_line_with_the_nearest_key(tmp_path, arms, keys, asked, words):
    with pytest.raises(ConfigError) as e:
        load(tmp_path, {"baseline": {}, **arms}, keys=keys, **asked)
    assert "\n" not in str(e.value) and all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize("text, words", [("[1, 2]", "mapping"), ("base: {", "not YAML"), ("base: nothing.yaml\narms: {baseline: , x: }", "nothing.yaml")])
def test_files_that_are_none(tmp_path, capsys, text, words):
    path = tmp_path / "cmp.yaml"
    path.write_text(text)
    assert cli.main(["compare", str(path)]) == 2 and words in (error := capsys.readouterr().err) and error.count("\n") == 1


@pytest.mark.parametrize("options, words", [
    ([], "either"), (["c.yaml", "--from", "x.csv"], "either"), (["c.yaml", "--scores", "a"], "--scores goes with --from"), (["--from", "x.csv", "--report-only"], "--report-only goes with a comparison"),
    (["--from", "x.csv", "--arm", "a"], "--pair"), (["c.yaml", "--seeds", "0"], "--seeds"), (["nothing.yaml"], "cannot be read")])
def test_options_that_do_not_go_together(capsys, options, words):
    assert cli.main(["compare", *options]) == 2 and words in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_shards_are_whole_pairs_and_all_of_them(tmp_path):
    spec = load(tmp_path, {"baseline": {}, "x": {}, "y": {}}, seeds=5)
    parts = [share(spec, *parse_shard(f"{i}/2", 5)) for i in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(spec.runs) and not {s for _, s in parts[0]} & {s for _, s in parts[1]}
    for text, words in (("2/2", "i/n"), ("1", "i/n"), ("-1/2", "i/n"), ("0/6", "at most 5")):
        with pytest.raises(ConfigError, match=words):
            parse_shard(text, 5)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("compare*.yaml")), ids=lambda p: p.stem)
def test_every_comparison_loads(path):
    assert specs.load(path).arms


def test_published_comparisons_are_what_they_say():
    full, quick = (specs.load(ROOT / "configs" / "dataflex" / f"{name}.yaml") for name in ("compare", "compare_quick"))
    assert len(full.arms) == 13 and len(full.seeds) == 12 and len(quick.arms) == len(quick.seeds) == 3
    assert [c.strategies for c in full.arms.values()][1:9] == [(p,) for p in ("difffilter", "maxvar", "gfpo", "topk", "softmax", "per", "diffband", "ar")]
    assert [c.data.mixer.name for c in full.arms.values()][9:] == ["static", "reward_gap", "dump_ucb", "tscl"]
    weights = lambda arm: [d.weight for d in full.arms[arm].data.domains.values()]  # noqa: E731
    assert weights("baseline") == [1, 1, 2] and weights("static") == [1, 1, 1]
