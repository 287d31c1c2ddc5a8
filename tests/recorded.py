"""A short run that keeps its rollouts, and the same run on kept rollouts instead of its own: on any mesh, in any number of processes.

An engine that answers from what was kept stands in for the sampler; all else is the real loop, verifiers and checkpoints included.
As a program: ``recorded.py CONFIG RUN_DIR DATAxFSDPxTENSOR KEPT --coordinator HOST:PORT --num-processes N --process-id I``.
"""

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import yaml

import rlvr_jax
from rlvr_jax import config as C
from rlvr_jax import distributed, strategies
from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.config import Sft
from rlvr_jax.models import hf, scratch
from rlvr_jax.models.decoder import init_params
from rlvr_jax.parts import Parts
from rlvr_jax.rollout.book import Finished
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.sharding import make_mesh
from rlvr_jax.state import abstract_state, policy_optimizer
from rlvr_jax.strategies import Strategy
from rlvr_jax.types import Rollout

STEPS, N, G, NEW = 20, 4, 4, 24
CONFIG: dict[str, Any] = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "+"}},
                         "differences": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "-"}}}, "max_prompt_length": 32,
             "mixer": {"name": "dump_ucb", "warmup_steps": 2, "update_every": 1}},
    # A model of random weights hardly ever says its end token: letters end its answers, so that they are ragged.
    "rollout": {"samples_per_prompt": G, "max_new_tokens": NEW, "slots": 16, "stop": list("aeiou0123456789")},
    "rewards": [{"processes:third": 1.0}], "strategies": ["maxvar", "softmax", "recorded:witness"], "replay": {"capacity": 3},
    "optimizer": {"learning_rate": 3e-4}, "pool": {"workers": 1}, "eval": {"prompts_per_domain": 0},
    "train": {"steps": STEPS, "prompts_per_step": N, "micro_batch": 8, "save_every": 100}}
Kept = list[tuple[list[list[int]], Rollout]]


def witness() -> Strategy:
    """Weighs nothing; remembers, step by step, which rows those before it have left."""
    def apply(state, s):
        n, g = s.valid.shape  # strategies are tried on batches of other sizes before the first step
        return s.valid.astype(jnp.float32), state.at[s.step, :n, :g].set(s.valid)

    return Strategy(init=lambda: jnp.zeros((STEPS, N, G), bool), apply=apply)


def write(folder: Path) -> Path:
    """The config, and a model of random weights that divides over eight devices in every way."""
    shape = Sft(vocab_size=300, layers=2, width=64, ffn=128, heads=8, kv_heads=8)
    scratch.write_folder(folder / "shape", shape, ["12+34=46", "27+45=72"])
    cfg = hf.load_config(folder / "shape")
    hf.export(folder / "model", init_params(cfg, jax.random.key(0)), cfg, source_folder=folder / "shape")
    path = folder / "recorded.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "model": {"path": str(folder / "model")}}))
    return path


class Recorder:
    """An engine that keeps what it answers."""

    def __init__(self, engine: Any, kept: Kept):
        self.engine, self.kept = engine, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompts: Sequence[Sequence[int]], *args: Any, **more: Any) -> Rollout:
        rollout = self.engine.generate(prompts, *args, **more)
        self.kept.append(([list(p) for p in prompts], rollout))
        return rollout


class Player:
    """An engine that answers what was kept, if it is asked the same."""

    def __init__(self, sampling: SamplingParams, kept: Kept):
        self.sampling, self.kept, self.version, self.nonfinite_rows = sampling, kept, -1, 0

    def update_weights(self, params: Any, version: int) -> None:
        self.version = version

    def release(self) -> None:
        pass

    def generate(self, prompts, prompt_id, domain, G, seed, step, occurrence=None, *, max_new_tokens=None, on_rows=None) -> Rollout:
        asked, rollout = self.kept[step]
        assert [list(p) for p in prompts] == asked, f"step {step + 1}: other prompts than in the run whose rollouts were kept"
        rows = zip(rollout.tokens, rollout.prompt_length, rollout.response_length, rollout.truncated, rollout.logprob)
        on_rows([Finished(i, tokens[p:p + r].tolist(), bool(cut), float(logprob.sum())) for i, (tokens, p, r, cut, logprob) in enumerate(rows)])
        return rollout


def run(path: Path, run_dir: Path, mesh: Sequence[int], play: Kept | None = None, programs: dict[Any, Any] | None = None, changes: Sequence[str] = ()) -> Kept:
    """Trains on ``mesh (data, fsdp, tensor)``, on kept rollouts where they are given; returns the run's own rollouts."""
    own: Kept = []
    real = Parts.engine

    def engine(self: Parts, **more: Any) -> Any:
        sampler = real(self, **more)
        return Recorder(sampler, own) if play is None else Player(sampler.sampling, play)

    sizes = [f"mesh.{axis}={n}" for axis, n in zip(("data", "fsdp", "tensor"), mesh)]
    with mock.patch.object(Parts, "engine", engine):
        rlvr_jax.train(path, overrides=[f"run_dir={run_dir}", *sizes, *changes], programs=programs)
    return own


def final(path: Path, run_dir: Path) -> tuple[Any, np.ndarray]:
    """Parameters at the end of a run, on one device, and which rows were learned from: ``[STEPS, N, G]``."""
    config = C.load(path)
    strategy = strategies.build(list(config.strategies))
    abstract = abstract_state(hf.load_config(Path(config.model.path)), policy_optimizer(config), strategy, make_mesh())
    checkpoints = Checkpoints(run_dir, 2, read_only=True)
    found = checkpoints.restore(abstract, {})
    checkpoints.close()
    assert found is not None
    state = found[0]
    kept, = (x for x in jax.tree.leaves(state.strategy_state) if x.dtype == bool)
    return jax.tree.map(np.asarray, state.params), np.asarray(kept)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("config", "run_dir", "mesh", "kept"):
        parser.add_argument(name)
    parser.add_argument("--coordinator")
    for name in ("--num-processes", "--process-id"):
        parser.add_argument(name, type=int)
    a = parser.parse_args()
    distributed.start(a.coordinator, a.num_processes, a.process_id)
    run(Path(a.config), Path(a.run_dir), [int(n) for n in a.mesh.split("x")], pickle.loads(Path(a.kept).read_bytes()))


if __name__ == "__main__":
    main()
