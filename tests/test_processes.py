"""Training in two real processes: the same run as in one; killed, stuck or stopped on one side it ends everywhere, and goes on."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import processes as P
import pytest

from rlvr_jax.exit_codes import LOST, STOPPED
from rlvr_jax.metrics import read_records

pytestmark = pytest.mark.slow
MESH = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
STEPS = P.SMALL["train"]["steps"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def config(cache):
    return P.write(cache)


@pytest.fixture(scope="module")
def two(config, cache):
    """An uninterrupted run in two processes of four devices each."""
    return cache / "two", P.finish(P.start(train(config, cache / "two"), P.environment(4, cache), 2))


def train(config, run, *more):
    return ["train", str(config), f"run_dir={run}", *MESH, *more]


def records(run):
    return read_records(Path(run) / "metrics.jsonl")


def prompts(run):
    return [(r["step"], r["prompt_ids"]) for r in read_records(Path(run) / "prompts.jsonl")]


def until(processes, ready, seconds=900):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), [p.poll() for p in processes]
        time.sleep(0.01)


def end(processes):
    for p in processes:
        if p.poll() is None:
            p.kill()
        p.wait()


def test_two_processes_train_as_one_does(two, config, cache):
    """Step 1 is the same to rounding, kept rows and losses too; later steps as long as no sampled token differs."""
    run, summary = two
    alone = P.finish(P.start(train(config, cache / "one"), P.environment(8, cache)))
    assert summary["steps"] == alone["steps"] == STEPS
    assert prompts(run)[0] == prompts(cache / "one")[0]
    same = 0
    for a, b in zip(records(run), records(cache / "one")):
        if a["step"] and a["tokens/generated"] != b["tokens/generated"]:
            break
        same = a["step"]
        assert set(a) == set(b)
        for name in a:
            if not name.startswith(("time/", "tokens_per", "compiles")):
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-4), (a["step"], name)
    assert same >= 1
    print("steps alike:", same)
    assert sum(r["verify/verified"] for r in records(run)[-1:]) == sum(r["verify/verified"] for r in records(cache / "one")[-1:])  # of both pools together


def test_one_side_killed_the_other_ends_and_the_run_goes_on(two, config, cache):
    run, summary = two
    mine = cache / "killed"
    pair = P.start(train(config, mine, "train.step_limit_seconds=300"), P.environment(4, cache), 2, log=cache / "killed_log")
    try:
        until(pair, (mine / "checkpoints" / "2").is_dir)
        pair[1].kill()
        began = time.monotonic()
        pair[0].wait(400)
        message = Path(f"{cache}/killed_log0").read_text()
        assert pair[0].returncode == LOST, message[-3000:]
        assert "rlvr-jax train: " in message or "watchdog: " in message
        print("ended after", round(time.monotonic() - began), "s:", message.strip().splitlines()[-2:])
    finally:
        end(pair)
    again = P.finish(P.start(train(config, mine), P.environment(4, cache), 2))
    assert again["weights_sha256"] == summary["weights_sha256"] and prompts(mine) == prompts(run)
    assert [r["step"] for r in records(mine)] == list(range(STEPS + 1))


def test_one_side_stuck_the_other_ends_within_its_limit(two, config, cache):
    """A host that is alive and does nothing closes nothing: the watchdog sees it long before its heartbeats are missed."""
    run, _ = two
    mine = cache / "stuck"
    shutil.copytree(run, mine)  # goes on from the last step but one: its programs are compiled, so the limit can be short
    for newer in (mine / "checkpoints").glob(str(STEPS)):
        shutil.rmtree(newer)
    limit = 60
    pair = P.start(train(config, mine, f"train.step_limit_seconds={limit}", "train.steps=40", "train.eval_every=100"), P.environment(4, cache), 2, log=cache / "stuck_log")
    try:
        until(pair, lambda: len(records(mine)) > STEPS + 1)
        pair[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        pair[0].wait(limit + 60)
        took, message = time.monotonic() - began, Path(f"{cache}/stuck_log0").read_text()
        assert pair[0].returncode == LOST and took < limit + 30, (took, message[-3000:])
        assert f"longer than train.step_limit_seconds={limit}" in message and "train.py" in message  # where it was
    finally:
        end(pair)


@pytest.mark.parametrize("moment", ["generation", "update"])
def test_sigterm_to_one_process_stops_both_and_the_run_goes_on(two, config, cache, moment):
    run, summary = two
    mine = cache / moment
    # Processes that say where they are: a hook of the tests, in an environment of its own.
    hooks = cache / f"hooks_{moment}"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK.replace("WHERE", moment).replace("FLAG", str(hooks / "now")))
    env = P.environment(4, cache)
    env["PYTHONPATH"] += f":{hooks}"
    pair = P.start(train(config, mine, "train.save_every=100"), env, 2)
    until(pair, lambda: (hooks / "now").exists())
    pair[1].send_signal(signal.SIGTERM)
    stopped = P.finish(pair, STOPPED)
    assert 0 < stopped["steps"] < STEPS and stopped["stopped_by"] == "SIGTERM"
    again = P.finish(P.start(train(config, mine), P.environment(4, cache), 2))
    assert again["resumed_from_step"] == stopped["steps"] and again["weights_sha256"] == summary["weights_sha256"]
    assert prompts(mine) == prompts(run)


HOOK = """
import importlib.abc, sys, time

class Finder(importlib.abc.MetaPathFinder):
    # In process 1, in the second step: says that it is in the middle of WHERE, and stays there long enough to be hit.
    def find_spec(self, name, path, target=None):
        if name == "rlvr_jax.train" and "1" in sys.argv[-1:]:
            sys.meta_path.remove(self)
            import rlvr_jax.rollout.engine as engine, rlvr_jax.update as update
            def linger():
                open("FLAG", "w").close()
                time.sleep(3)
            rows, make, calls = engine.LocalEngine._rows, update.make_update, []
            def slow_rows(self, book):
                if self.version == 1 and not calls:  # the first burst of the second step
                    calls.append(linger())
                return rows(self, book)
            def slow_make(*a):
                inner = make(*a)
                def f(*b):
                    out = inner(*b)
                    calls.append(0)
                    if len(calls) == 2:
                        linger()
                    return out
                return f
            if "WHERE" == "generation":
                engine.LocalEngine._rows = slow_rows
            else:
                update.make_update = slow_make
        return None

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("devices, mesh", [(2, (1, 2, 1)), (1, (1, 1, 1))])
def test_a_run_of_eight_devices_goes_on_with_fewer(two, config, cache, devices, mesh):
    """Two processes of four, then one process of two devices, or of one: weights, optimizer, replay and data position."""
    run, summary = two
    mine = cache / f"on_{devices}"
    shutil.copytree(run, mine)
    arguments = ["train", str(config), f"run_dir={mine}", *(f"mesh.{a}={n}" for a, n in zip(("data", "fsdp", "tensor"), mesh))]
    same = P.finish(P.start(arguments, P.environment(devices, cache)))  # nothing to do: the weights are read and hashed
    assert same["weights_sha256"] == summary["weights_sha256"] and same["resumed_from_step"] == STEPS
    shutil.rmtree(mine / "checkpoints" / str(STEPS))
    rest = P.finish(P.start(arguments, P.environment(devices, cache)))
    assert rest["resumed_from_step"] == 2 and prompts(mine)[:3] == prompts(run)[:3]
    a, b = ({r["step"]: r for r in records(x)}[3] for x in (mine, run))
    if a["tokens/generated"] == b["tokens/generated"]:  # else a token fell the other way by rounding
        assert a["kept/rows"] == b["kept/rows"] and a["update/loss"] == pytest.approx(b["update/loss"], abs=1e-4)


def test_another_number_of_processes_or_config_is_refused(config, cache):
    env = P.environment(4, cache)
    pair = P.start(["preflight", str(config), f"run_dir={cache}/pre", *MESH], env, 2)
    assert P.finish(pair)["processes"] == 2
    port = P.port()
    other = [P.start(["preflight", str(config), f"run_dir={cache}/pre", *MESH, f"seed={i}", "--coordinator", f"localhost:{port}", "--num-processes", "2",
                      "--process-id", str(i)], env)[0] for i in range(2)]
    for p in other:
        _, error = p.communicate(timeout=600)
        assert p.returncode != 0 and ("the config of process 1 differs" in error or p.returncode < 0), error[-2000:]
    assert {p.returncode for p in other} & {2}


def test_preflight_says_what_is_wrong(config, cache):
    def refused(*arguments):
        done = P.start(["preflight", str(config), *arguments], P.environment(8, cache))[0]
        _, error = done.communicate(timeout=600)
        assert done.returncode == 2 and error.count("\n") == 1, error
        return error

    assert "mesh 1x2x1 has 2 devices, the 1 processes have 8" in refused("mesh.fsdp=2", f"run_dir={cache}/pre")
    (cache / "file").write_text("")
    assert "cannot be written by process 0" in refused(*MESH, f"run_dir={cache}/file/run")


def test_runs_of_the_embedded_model_have_everything(two):
    run, _ = two
    for name in ("config.yaml", "summary.json", "report.html", "samples.jsonl", "environment.json", "tokenizer", "checkpoints"):
        assert (run / name).exists(), name
    assert "8 x cpu" in json.loads((run / "environment.json").read_text())["devices"]
    last = records(run)[-1]
    assert last["logprob_gap/max"] < 1e-4 and np.isfinite(last["update/grad_norm"])
    assert subprocess.run(["find", str(run), "-name", "*.tmp*"], capture_output=True, text=True).stdout == ""
