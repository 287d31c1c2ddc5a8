"""PPO in real runs of the embedded model: killed and continued exactly, exported without its critic, and it learns."""

import os
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_train import checkpoints, command, environment

from rlvr_jax import config as C
from rlvr_jax import parts as part
from rlvr_jax import strategies
from rlvr_jax.checkpoint import Checkpoints, restore_params
from rlvr_jax.critic import make_critic
from rlvr_jax.metrics import read_records
from rlvr_jax.models import hf
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.state import abstract_state, policy_optimizer
from rlvr_jax.train import train

PPO = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "+"}}}, "max_prompt_length": 24},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 24},
    "algorithm": {"advantage": "gae", "critic": {"warmup_steps": 2, "lam": 0.98}},
    "strategies": ["topk"], "replay": {"kind": "popo", "capacity": 3},
    "optimizer": {"learning_rate": 3e-4},
    "train": {"steps": 6, "prompts_per_step": 6, "micro_batch": 12, "updates_per_batch": 2, "save_every": 2, "eval_every": 3},
    "eval": {"prompts_per_domain": 12, "batch_prompts": 12},
}


def last_state(config):
    """The whole device state of a run's last checkpoint, as NumPy arrays; and the parts it was read with."""
    with part.build(config) as parts:
        store = Checkpoints(config.run_dir, 2, read_only=True)
        strategy = strategies.build(list(config.strategies))
        state, _, _ = store.restore(abstract_state(parts.model, policy_optimizer(config), strategy, parts.mesh, make_critic(config, parts.model)), {})
        store.close()
        return jax.tree.map(np.asarray, state), parts


@pytest.mark.slow
def test_killed_and_started_again_is_the_same_run(tmp_path, tmp_path_factory):
    import yaml

    config = tmp_path / "ppo.yaml"
    config.write_text(yaml.safe_dump(PPO))
    whole, mine = tmp_path / "whole", tmp_path / "mine"
    done = subprocess.run(command(config, whole), env=environment(tmp_path_factory), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen(command(config, mine), env=environment(tmp_path_factory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while checkpoints(mine)[0] < 2 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    again = subprocess.run(command(config, mine), env=environment(tmp_path_factory), capture_output=True, text=True)
    assert again.returncode == 0 and '"resumed_from_step": 0' not in again.stdout, again.stderr
    (a, parts), (b, _) = (last_state(C.load(config, [f"run_dir={run}"])) for run in (whole, mine))
    assert a.step == b.step == 6 and a.critic["head"]["weight"].any()
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    records = read_records(whole / "metrics.jsonl")
    assert {"value/loss", "value/mean", "value/clip_fraction", "replay/effective_fraction"} <= records[-1].keys()
    assert all(np.isfinite(v) for r in records for v in r.values())

    params = restore_params(parts, "last")
    assert jax.tree.structure(params) == jax.tree.structure(abstract_params(parts.model))
    hf.export(tmp_path / "model", params, parts.model, source_folder=parts.folder)
    back = hf.load_params(tmp_path / "model", parts.model, parts.mesh)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(a.params), strict=True))


@pytest.mark.slow
def test_it_learns(tmp_path):
    """Sums of the quickstart: accuracy at T = 1 rises by 8 points or more, and the critic explains something of what is to come.

    Little of it: whether a sum will come out right shows late in a response (3% of the variance, 3 to 5% with a head four times as quick)."""
    tree = {**PPO, "run_dir": str(tmp_path / "run"), "rollout": {"samples_per_prompt": 8, "max_new_tokens": 28}, "strategies": [], "replay": None,
            "algorithm": {"advantage": "gae", "critic": {"warmup_steps": 5}}, "optimizer": {"learning_rate": 3e-4, "warmup_steps": 5},
            "train": {"steps": 80, "prompts_per_step": 16, "micro_batch": 64, "save_every": 100, "eval_every": 100},
            "eval": {"prompts_per_domain": 200, "batch_prompts": 200, "temperature": 1.0}}
    summary = train(tree)
    before, after = summary["eval"]["before"]["sums"], summary["eval"]["after"]["sums"]
    records = read_records(Path(tree["run_dir"]) / "metrics.jsonl")
    explained = np.mean([r["value/explained_variance"] for r in records[-20:]])
    print(f"\naccuracy {before:.1%} -> {after:.1%}, explained variance of the last 20 steps {explained:.2f}, {summary['seconds']:.0f} s on {os.cpu_count()} cores")
    assert after > before + 0.08 and explained > 0.005
