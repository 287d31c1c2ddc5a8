"""Runs of the command line in one process or two, on fake CPU devices; what tests of multi-host training share."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Most of a test's time is compilation: the tests ask for programs that are made in a third of the time and run slower.
# (Without the optimiser, the fusion emitters cost the most: the update of the test model takes 6.5 CPU seconds with
# them and 2.2 without. With the optimiser it is the other way round, so this is nothing for a real run.)
# Later versions have no such flag, and end a process that asks for one they do not know.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):
    QUICK += " --xla_cpu_use_fusion_emitters=false"

# The embedded model is too small to fill eight devices with work, and that is the point: every collective is there.
SMALL: dict[str, Any] = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "+"}},
                         "knights": {"task": "knights", "task_args": {"people": [2, 2]}}}, "max_prompt_length": 32,
             "mixer": {"name": "dump_ucb", "warmup_steps": 1, "update_every": 1}},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 24, "slots": 16}, "strategies": ["maxvar"], "replay": {"capacity": 3},
    "optimizer": {"learning_rate": 3e-4}, "pool": {"workers": 1},
    "train": {"steps": 4, "prompts_per_step": 4, "micro_batch": 8, "save_every": 2, "eval_every": 4, "samples_every": 2},
    "eval": {"prompts_per_domain": 3, "batch_prompts": 3}}


def third(text: str, answer: object, **fields: object) -> float:
    """A reward that random answers get now and then, and that whole groups often miss: then replay has something to fill."""
    return float(len(text) % 3 == 0)


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def environment(devices: int, cache: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_", "TPU_", "MEGASCALE_"))}
    return env | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}", "PYTHONPATH": str(ROOT),
                  "JAX_COMPILATION_CACHE_DIR": str(cache / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                  "RLVR_HEARTBEAT_SECONDS": "900"}  # a busy machine may stop a test for minutes


def start(arguments: Sequence[str], env: dict[str, str], processes: int = 1, log: Path | None = None,
          program: Sequence[str] = ("-m", "rlvr_jax.cli")) -> list[subprocess.Popen[str]]:
    """The command (or another ``program`` of Python's) in each process; stderr goes to ``log`` + number where it is given."""
    address, out = f"localhost:{port()}", []
    for i in range(processes):
        more = ["--coordinator", address, "--num-processes", str(processes), "--process-id", str(i)] if processes > 1 else []
        with Path(os.devnull if log is None else f"{log}{i}").open("w") as file:
            out.append(subprocess.Popen([sys.executable, *program, *arguments, *more], env=env, cwd=ROOT, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE if log is None else file, text=True))
    return out


def finish(processes: Sequence[subprocess.Popen[str]], code: int = 0, seconds: float = 1200) -> dict[str, Any] | None:
    """Waits for all; the JSON line of the first, None when it printed nothing."""
    said = [p.communicate(timeout=seconds) for p in processes]
    assert [p.returncode for p in processes] == [code] * len(processes), [(p.returncode, (error or "")[-2500:]) for p, (_, error) in zip(processes, said)]
    results = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in said]  # gloo greets on stdout
    assert not any(results[1:]), "only the first process prints a result"
    return json.loads(results[0][-1]) if results[0] else None


def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
