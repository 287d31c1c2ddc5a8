"""The loop for real: learns, is killed and goes on bit for bit, refuses what would mix two experiments."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import QUICK

import rlvr_jax
from rlvr_jax import cli
from rlvr_jax import config as C
from rlvr_jax.metrics import read_records
from rlvr_jax.train import train

TINY = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "+"}},
                         "knights": {"task": "knights", "task_args": {"people": [2, 2]}}}, "max_prompt_length": 32,
             "mixer": {"name": "dump_ucb", "warmup_steps": 1, "update_every": 1}},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 40},
    "optimizer": {"learning_rate": 3e-4},
    "train": {"steps": 6, "prompts_per_step": 6, "micro_batch": 12, "save_every": 2, "eval_every": 3, "samples_every": 2},
    "eval": {"prompts_per_domain": 12, "batch_prompts": 12},
}


def write(folder, **changes):
    path = folder / "tiny.yaml"
    import yaml
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


def command(config, run_dir, *more):
    return [sys.executable, "-m", "rlvr_jax.cli", "train", str(config), f"run_dir={run_dir}", *more]


def environment():
    return os.environ | {"XLA_FLAGS": QUICK, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # of one device


def prompts(run_dir):
    return [(r["step"], r["prompt_ids"]) for r in read_records(Path(run_dir) / "prompts.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with replay, two strategies and a checkpoint every second step."""
    folder = tmp_path_factory.mktemp("whole")
    config = write(folder, strategies=["difffilter", "softmax"], replay={"capacity": 3})
    done = subprocess.run(command(config, folder / "run"), env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return config, folder / "run", json.loads(done.stdout.splitlines()[-1])


def test_the_run_folder_holds_everything(whole):
    _, run, printed = whole
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] == printed["weights_sha256"] and summary["steps"] == 6 and summary["resumed_from_step"] == 0
    assert set(summary["eval"]["before"]) == set(summary["eval"]["after"]) == {"sums", "knights"}
    for key in ("seconds", "generated_tokens", "updated_tokens", "compiles"):
        assert summary[key] > 0
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "prompts.jsonl", "report.html", "tensorboard", "checkpoints", "tokenizer"):
        assert (run / name).exists(), name
    records = read_records(run / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(v) for r in records for v in r.values() if v is not None) and not any(v is None for r in records for v in r.values())
    for name in ("reward/mean", "kept/rows", "policy/ratio", "update/grad_norm", "logprob_gap/max", "time/rollout", "replay/effective_fraction", "mix/target/sums"):
        assert name in records[-1], name
    assert records[-1]["logprob_gap/max"] < 1e-4
    for kind in ("generated", "updated"):  # steps are written late; totals are of their own step all the same
        assert [r[f"tokens/{kind}_total"] for r in records[1:]] == np.cumsum([r[f"tokens/{kind}"] for r in records[1:]]).tolist()
    C.load(run / "config.yaml")


def test_prompts_follow_the_mix(whole):
    _, run, _ = whole
    assert len(prompts(run)) == 6 and all(len(ids) == 6 for _, ids in prompts(run))
    steps = [r for r in read_records(run / "metrics.jsonl") if "mix/target/sums" in r]
    target, realised = ([r[f"mix/{kind}/sums"] for r in steps] for kind in ("target", "realised"))
    assert target[0] == pytest.approx(0.5) and target[-1] != pytest.approx(0.5)  # uniform at first, then as the mixer says
    owed = 6 * np.cumsum(np.subtract(target, realised))
    assert np.abs(owed).max() < 1, (target, realised)  # within one prompt over every prefix


def checkpoints(run):
    """(finished ones, whether one is being written)."""
    names = [p.name for p in (run / "checkpoints").glob("*")] if (run / "checkpoints").is_dir() else []
    return sum(n.isdigit() for n in names), any("tmp" in n for n in names)


def steps_logged(run):
    return max((r["step"] for r in read_records(run / "metrics.jsonl")), default=-1)


@pytest.mark.parametrize("moment", [pytest.param("early", marks=pytest.mark.slow), "saving", pytest.param("late", marks=pytest.mark.slow)])
def test_killed_and_started_again_is_the_same_run(whole, tmp_path, moment):
    config, run, printed = whole
    mine = tmp_path / "run"
    process = subprocess.Popen(command(config, mine), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready = {"early": lambda: checkpoints(mine)[0] >= 1, "saving": lambda: checkpoints(mine)[0] >= 1 and checkpoints(mine)[1],
             "late": lambda: checkpoints(mine)[0] >= 1 and steps_logged(mine) >= 5}[moment]
    deadline = time.monotonic() + 600
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    again = subprocess.run(command(config, mine), env=environment(), capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout.splitlines()[-1])
    assert 0 < summary["resumed_from_step"] < 6
    assert summary["weights_sha256"] == printed["weights_sha256"]
    assert prompts(mine) == prompts(run)
    assert [r["step"] for r in read_records(mine / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]
    assert summary["eval"] == printed["eval"]


def test_sigterm_saves_and_the_same_command_goes_on(whole, tmp_path):
    config, _, printed = whole
    mine = tmp_path / "run"
    process = subprocess.Popen(command(config, mine, "train.save_every=100", "train.eval_every=3"), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while steps_logged(mine) < 1 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 75 and "SIGTERM" in error
    again = subprocess.run(command(config, mine), env=environment(), capture_output=True, text=True, timeout=900)
    summary = json.loads(again.stdout.splitlines()[-1])
    assert summary["resumed_from_step"] > 0 and summary["weights_sha256"] == printed["weights_sha256"]


def test_another_experiment_in_the_same_folder_is_refused(whole, capsys):
    config, run, _ = whole
    assert cli.main(["train", str(config), f"run_dir={run}", "seed=1"]) == 2
    error = capsys.readouterr().err
    assert "seed" in error and "run_dir" in error and len(error.strip().splitlines()) == 1


def test_a_finished_run_is_left_as_it_is(whole, capsys):
    config, run, printed = whole
    assert cli.main(["train", str(config), f"run_dir={run}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["weights_sha256"] == printed["weights_sha256"]


def shortest(answer_text: str, answer: str, **fields) -> float:
    return 1.0 / (1 + len(answer_text))


def test_the_python_api_takes_functions_and_strategies(tmp_path):
    tree = {**TINY, "run_dir": str(tmp_path / "run"), "eval": {"prompts_per_domain": 0}, "train": {**TINY["train"], "steps": 2}}
    summary = rlvr_jax.train(tree, rewards=[shortest], strategies=["maxvar", "per"])  # beside the mixer: all three at once
    assert summary["steps"] == 2 and summary["eval"] == {"before": {}, "after": {}}
    last = read_records(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 < last["reward/mean"] < 0.5 and last["kept/rows"] == pytest.approx(0.5)
    assert last["kept/rows/sums"] == pytest.approx(0.5) and last["strategy/weight_std"] > 0  # weights of rows have mean 1 over rows, not over tokens
    assert last["mix/target/sums"] + last["mix/target/knights"] == pytest.approx(1) and last["mixer_signal/sums"] > 0


@pytest.mark.slow
def test_max_seconds_stops_and_saves(tmp_path):
    tree = {**TINY, "run_dir": str(tmp_path / "run"), "eval": {"prompts_per_domain": 0}, "train": {**TINY["train"], "max_seconds": 0.001}}
    first = train(tree)
    assert first["steps"] == 1 and not first["finished"]
    second = train({**tree, "train": {**TINY["train"], "steps": 2}})
    assert second["resumed_from_step"] == 1 and second["finished"]


def test_two_processes_on_one_folder_are_refused(tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(C.ConfigError, match="another process"):
            train({**TINY, "run_dir": str(tmp_path / "run")})
