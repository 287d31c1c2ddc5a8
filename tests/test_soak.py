"""Soak: 300 steps with everything on, verifiers that hang and crash, and kills on the way: nothing leaks, nothing compiles anew, and the
weights at the end are those of the run that nobody killed."""

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml
from processes import QUICK

from rlvr_jax.compare.runner import last_record
from rlvr_jax.metrics import read_records

STEPS, WARM, KILL_EVERY = 300, 60, 60
MARK = "RLVR_SOAK"

# Light, so that a worker is there again at once. Which rows it fails at is a function of the row: of its prompt, and of the answer sampled at its step.
VERIFIER = """
import os, zlib

def judge(text, answer):
    fate = zlib.crc32(f"{answer}|{text}".encode()) % 2000
    if fate < 1:
        while True: pass
    if fate < 3:
        os._exit(3)
    if fate < 20:
        raise KeyError(fate)
    return float(len(text) % 8 == 3)
"""


def config(folder: Path, model: Path) -> Path:
    domain = {"task": "arithmetic", "rewards": [{"soak_verifier:judge": 1.0}]}
    tree = {"model": {"path": str(model)}, "pool": {"workers": 2, "cpu_seconds": 0.3}, "optimizer": {"learning_rate": 1e-3},
            "data": {"domains": {"sums": domain | {"task_args": {"digits": [1, 1], "ops": "+"}, "problems": 60},
                                 "more": domain | {"task_args": {"digits": [2, 2], "ops": "-"}}}, "max_prompt_length": 32,
                     "mixer": {"name": "dump_ucb", "warmup_steps": 5, "update_every": 5}, "prompts": {"kind": "mopps", "candidates": 3}},
            "rollout": {"samples_per_prompt": 4, "max_new_tokens": 8}, "strategies": ["maxvar", "softmax"], "replay": {"kind": "popo", "capacity": 4},
            "dynamic_sampling": {"max_batches": 2}, "eval": {"prompts_per_domain": 4, "batch_prompts": 4},
            "train": {"steps": STEPS, "prompts_per_step": 4, "micro_batch": 8, "save_every": 7, "eval_every": 100, "samples_every": 20}}
    (folder / "soak_verifier.py").write_text(VERIFIER)
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(path: Path, run: Path, token: str) -> subprocess.Popen:
    search = os.pathsep.join([str(path.parent), str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"XLA_FLAGS": QUICK, "PYTHONPATH": search, MARK: token,
                        "JAX_COMPILATION_CACHE_DIR": str(path.parent / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with (path.parent / f"{run.name}.txt").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", "rlvr_jax.cli", "train", str(path), f"run_dir={run}"], env=env, stdout=subprocess.PIPE, stderr=log, text=True)


def records(run: Path) -> list[dict]:
    return [r for r in read_records(run / "metrics.jsonl") if r["step"]]


def last(run: Path) -> int:
    return int(last_record(run / "metrics.jsonl").get("step", 0))


def belongings(token: str) -> list[int]:
    """Ids of all live processes that were started, directly or not, with this token."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={token}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


def look(pid: int) -> tuple[int, int]:
    """(resident bytes, open files)."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident, = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return resident, len(os.listdir(f"/proc/{pid}/fd"))


def watch(process: subprocess.Popen, run: Path, token: str, until: int) -> list[tuple[int, int, int, int]]:
    """``(step, resident bytes, open files, processes)`` every second, until step ``until`` or the end."""
    seen = []
    while process.poll() is None and (step := last(run)) < until:
        try:
            seen.append((step, *look(process.pid), len(belongings(token))))
        except OSError:
            break
        time.sleep(1)
    return seen


def undisturbed(path: Path, run: Path) -> tuple[dict, np.ndarray]:
    """The run's summary, and what :func:`watch` saw."""
    process = start(path, run, run.name)
    seen = watch(process, run, run.name, STEPS)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, (path.parent / f"{run.name}.txt").read_text()[-3000:]
    return json.loads(out.splitlines()[-1]), np.array(seen)


def interrupted(path: Path, run: Path) -> tuple[dict, int]:
    """The summary of the same run, killed about every 60 steps, and how often it was."""
    when, kills, at = random.Random(0), 0, 0
    while at + KILL_EVERY < STEPS:
        process = start(path, run, run.name)
        watch(process, run, run.name, at + KILL_EVERY + when.randrange(-8, 8))
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 60
        while belongings(run.name) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not belongings(run.name), "workers outlived the run"
        at, kills = last(run), kills + 1
    return undisturbed(path, run)[0], kills


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_300_steps_with_everything_on(tmp_path, tiny_model):
    path, began = config(tmp_path, tiny_model), time.monotonic()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with ThreadPoolExecutor() as both:
        runs = both.submit(undisturbed, path, whole), both.submit(interrupted, path, killed)
        (want, seen), (got, kills) = (run.result() for run in runs)
    early, late = (seen[(seen[:, 0] >= a) & (seen[:, 0] < b)] for a, b in ((WARM, 2 * WARM), (STEPS - WARM, STEPS)))
    first, then = np.median(early[:, 1:3], 0), np.median(late[:, 1:3], 0)  # of bytes and files
    steps = records(whole)
    verdicts = {k: steps[-1][f"verify/{k}"] for k in ("verified", "unknown", "errors", "timeouts", "crashes", "replaced")}
    replayed = sum(r["replay/replayed_groups"] for r in steps)
    print(f"\n{time.monotonic() - began:.0f} s, {kills} kills; memory {first[0] / 2**20:.0f} -> {then[0] / 2**20:.0f} MiB ({then[0] / first[0] - 1:+.1%}); open files "
          f"{first[1]:.0f} -> {then[1]:.0f} (most {seen[:, 2].max()}, while saving); processes at most {seen[:, 3].max()}; compiles {steps[WARM]['compiles']:.0f} -> "
          f"{steps[-1]['compiles']:.0f}; {replayed:.0f} groups replayed; {verdicts}; weights {got['weights_sha256'][:12]}, expected {want['weights_sha256'][:12]}")
    assert kills >= 4 and got["weights_sha256"] == want["weights_sha256"] and got["eval"] == want["eval"]
    same = lambda run: [{k: v for k, v in r.items() if not k.startswith(("time/", "verify/", "tokens_per_second", "compiles"))} for r in records(run)]  # noqa: E731
    assert same(killed) == same(whole), "every metric that is no clock and no counter of the process"
    assert 0.95 <= then[0] / first[0] <= 1.05
    assert then[1] <= first[1] + 1 and seen[:, 3].max() <= 1 + 2 + 1  # a worker that is replaced may be seen beside the new one
    assert steps[-1]["compiles"] == steps[WARM]["compiles"]
    assert min(verdicts["errors"], verdicts["timeouts"], verdicts["crashes"], replayed) > 0 and len({r["mix/target/sums"] for r in steps}) > 5
    assert not belongings("killed") and not belongings("whole")
