"""Run folders without training: what a run leaves behind, written by hand."""

import json
import types
from pathlib import Path

import yaml

from rlvr_jax import config as configs
from rlvr_jax import pairing
from rlvr_jax.compare import spec as specs
from rlvr_jax.records import line, write_json

BASE = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 1], "ops": "+"}}, "knights": {"task": "knights"}}, "max_prompt_length": 32},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-3}, "pool": {"workers": 1},
    "train": {"steps": 4, "prompts_per_step": 4, "micro_batch": 4, "eval_every": 2, "save_every": 1},
    "eval": {"prompts_per_domain": 8, "samples_per_prompt": 2, "temperature": 1.0, "batch_prompts": 8}}


def parity(text: str, answer: object) -> float:
    """A reward that a model of random weights gets now and then, so that it learns something."""
    return float(len(text) % 2)


def write_spec(folder: Path, arms: dict, base: dict | None = None, **more) -> Path:
    path = folder / "cmp.yaml"
    path.write_text(yaml.safe_dump({"base": base or BASE, "arms": arms, "seeds": 3, **more}, sort_keys=False))
    return path


def load(folder: Path, named: dict, base: dict | None = None, keys: dict | None = None, **asked) -> specs.Spec:
    return specs.load(write_spec(folder, named, base, **(keys or {})), run_dir=str(folder / "out"), **asked)


def rows(prompts=(1, 2, 3)):
    return [types.SimpleNamespace(prompt_id=p, messages=[], token_ids=(p,), answer=p, fields={}, verifier="math") for p in prompts]


def write_run(spec: specs.Spec, arm: str, seed: int, *, score: float = 0.5, steps: int | None = None, weights: str = "w" * 64, evaluation=None,
              order: dict | None = None, tokens: int = 100, updated: int = 50) -> Path:
    """A finished run of ``steps`` steps that ends at ``score``; ``tokens`` and ``updated`` a step."""
    config, folder = spec.run_config(arm, seed), spec.run_dir(arm, seed)
    steps = config.train.steps if steps is None else steps
    folder.mkdir(parents=True, exist_ok=True)
    domains = list(config.data.domains)
    (folder / "config.yaml").write_text(configs.dump(config))
    write_json(folder / pairing.FILE, pairing.identity(config, weights, evaluation or {d: rows() for d in domains}))
    of = order or {d: [1000 * i + n for n in range(100)] for i, d in enumerate(domains)}
    metrics, prompts = [], []
    for step in range(steps + 1):
        height = {f"eval/{d}": 0.2 + (score - 0.2) * step / steps + 0.01 * seed + 0.1 * i for i, d in enumerate(domains)}
        record = {"step": step, "kept/rows": 0.75, "mix/target/sums": 0.5, "mix/target/knights": 0.5, "mix/realised/sums": 0.5, "mix/realised/knights": 0.5}
        record |= height | {"eval/mean": sum(height.values()) / 2}
        if step:
            record |= {"tokens/generated_total": tokens * step, "tokens/updated_total": updated * step, "time/step": 2.0}
            ids = [of[d].pop(0) for d in domains for _ in range(config.train.prompts_per_step // len(domains))]
            prompts.append({"step": step, "prompt_ids": ids, "domains": [d for d in domains for _ in range(config.train.prompts_per_step // len(domains))]})
        metrics.append(record)
    (folder / "metrics.jsonl").write_bytes(b"".join(map(line, metrics)))
    (folder / "prompts.jsonl").write_bytes(b"".join(map(line, prompts)))
    write_json(folder / "summary.json", {"finished": True, "steps": steps, "generated_tokens": tokens * steps, "updated_tokens": updated * steps, "seconds": 2.0 * steps,
                                         "eval": {"after": {d: metrics[-1][f"eval/{d}"] for d in domains}}})
    return folder


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
