"""Faults of a whole run, for real: signals, two processes on one folder, disks, data and clocks that change, steps that teach nothing.

Files and functions that are broken: test_faults_files.py. Killed runs: test_train.py, test_collect.py; hostile verifiers: test_pool.py;
lost processes of several: test_processes.py.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
import yaml

from rlvr_jax import cli
from rlvr_jax import config as C
from rlvr_jax import train as loop
from rlvr_jax.checkpoint import SaveError
from rlvr_jax.compare import command
from rlvr_jax.compare import spec as specs
from rlvr_jax.metrics import read_records
from rlvr_jax.run_folder import held, only_one
from rlvr_jax.stopping import NothingLearned, Stop, nothing_learned
from rlvr_jax.strategies import Strategy
from rlvr_jax.train import train

TESTS = Path(__file__).resolve().parent
PROGRAMS: dict = {}


def odd_length(text: str, answer: str, **fields) -> float:
    """A reward that a model of random weights gets now and then."""
    return float(len(text) % 2)


def small(folder: Path, model: Path, **train_fields) -> dict:
    return {"data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 1], "ops": "+"}}}, "max_prompt_length": 32},
            "model": {"path": str(model)}, "run_dir": str(folder), "rollout": {"samples_per_prompt": 4, "max_new_tokens": 6}, "optimizer": {"learning_rate": 1e-3},
            "rewards": [{"test_faults:odd_length": 1.0}], "pool": {"workers": 1}, "eval": {"prompts_per_domain": 0},
            "train": {"steps": 3, "prompts_per_step": 4, "micro_batch": 8, "save_every": 1, **train_fields}}


def go(tree: dict, **more) -> dict:
    """A run in this process; runs of one config share what is compiled."""
    return train(tree, programs=PROGRAMS, **more)


def steps(folder: Path) -> list[dict]:
    return [r for r in read_records(folder / "metrics.jsonl") if r["step"]]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """Weights of three undisturbed steps."""
    return go(small(tmp_path_factory.mktemp("whole") / "run", tiny_model))["weights_sha256"]


# --- signals and locks ---

@pytest.fixture
def no_nohup():
    """The suite may run under nohup, whose SIGHUP stays ignored, in processes that it starts too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("no_nohup")
def test_the_first_signal_is_remembered_the_second_does_not_wait():
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        told: list[int] = []
        with Stop(told.append) as stop:
            os.kill(os.getpid(), number)
            assert stop.signal == number and told == [number]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_DFL, "the third is the system's"
    assert signal.getsignal(signal.SIGTERM) is before

    def gone(number: int) -> None:
        raise BrokenPipeError

    with Stop(gone) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal == signal.SIGHUP


def test_nohup_is_respected_and_other_threads_are_left_alone():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(Stop().__enter__()._before))
    thread.start()
    thread.join()
    assert seen == [{}]


def environment() -> dict[str, str]:
    search = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": search}


def write(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def start(path: Path, env: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "rlvr_jax.cli", "train", str(path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def begin(path: Path, env: dict[str, str], run: Path) -> subprocess.Popen:
    """A process that has done two steps that nobody had done before it."""
    newest = lambda: max((r["step"] for r in steps(run)), default=0)  # noqa: E731
    process, before = start(path, env), newest()
    while newest() < before + 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.usefixtures("no_nohup")
def test_one_folder_several_processes(tmp_path, tiny_model):
    """The second is refused; Ctrl-C saves and ends with 75; a second Ctrl-C does not wait. (That kill -9 leaves no lock: test_train.)"""
    run, env = tmp_path / "run", environment()
    path = write(tmp_path / "c.yaml", small(run, tiny_model, steps=100_000, save_every=1_000))
    first = begin(path, env, run)
    _, error = start(path, env).communicate(timeout=600)
    assert "another process trains in" in error and len(error.strip().splitlines()) == 1, error
    first.send_signal(signal.SIGINT)
    out, error = first.communicate(timeout=600)
    assert first.returncode == 75 and "SIGINT: finishing this step and saving" in error and "Traceback" not in error, error
    stopped = json.loads(out.splitlines()[-1])
    assert stopped["stopped_by"] == "SIGINT" and stopped["steps"] == steps(run)[-1]["step"]
    second = begin(path, env, run)
    for number in (signal.SIGHUP, signal.SIGINT):  # a terminal that closes, as a first one; two of a kind may arrive as one
        second.send_signal(number)
    _, error = second.communicate(timeout=600)
    assert second.returncode == 130 and "SIGHUP: finishing this step and saving" in error and error.endswith("interrupted\n") and "Traceback" not in error, error
    third = start(path, env)
    time.sleep(1)
    third.send_signal(signal.SIGINT)  # nothing to save yet
    assert third.wait(60) in (-signal.SIGINT, 130)


def test_one_compare_a_folder_but_for_its_shards(tmp_path, capsys):
    tree = {"base": {"train": {"steps": 1}}, "arms": {"baseline": {}, "other": {"strategies": ["ar"]}}, "seeds": 2}
    path, out = write(tmp_path / "cmp.yaml", tree), tmp_path / "out"
    with held(out / ".lock", "taken"):
        assert cli.main(["compare", str(path), "--run-dir", str(out)]) == 2
        assert cli.main(["compare", str(path), "--run-dir", str(out), "--shard", "0/2"]) == 2
        assert capsys.readouterr().err.count("another compare trains in") == 2
    spec = specs.load(path, run_dir=str(out))
    with command._alone(spec, "0/2"), command._alone(spec, "1/2"), pytest.raises(C.ConfigError, match="another compare trains"), command._alone(spec, "1/2"):
        pass


@pytest.mark.parametrize("gone", ["reader", "terminal"])
def test_words_that_nobody_can_read_stop_no_run(gone):
    """stderr is a pipe whose reader has gone, or answers as a terminal does that was closed."""
    code = ("import sys, errno; from rlvr_jax.metrics import Progress\n"
            "class Closed:\n    def write(self, text): raise OSError(errno.EIO, 'Input/output error')\n    def flush(self): pass\n    def isatty(self): return True\n"
            f"if {gone == 'terminal'}: sys.stderr = Closed()\n"
            "else: sys.stdin.read()\n"
            "with Progress(3, seconds=0) as progress:\n    for i in range(4): progress.update(i, {}); progress.log('urgent', urgent=True)\n"
            "print('done')")
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stderr.close()
    process.stdin.close()
    out = process.stdout.read()
    assert out == "done\n" and process.wait(60) == 0


# --- disks ---

def test_a_full_disk_ends_the_run_with_its_last_checkpoint_and_it_goes_on(tmp_path, tiny_model, whole, monkeypatch):
    """No file may grow beyond 20 kB from the second step on: the kernel says so, as it would of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = loop.Checkpoints.save
    monkeypatch.setattr(loop.Checkpoints, "save", lambda self, step, *rest: (
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1])) if step == 2 else None, kept(self, step, *rest)))
    try:
        with pytest.raises(SaveError, match=r"File too large.*the newest checkpoint is of step 1"):
            go(small(tmp_path / "run", tiny_model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    done = go(small(tmp_path / "run", tiny_model))
    assert done["resumed_from_step"] == 1 and done["weights_sha256"] == whole and [r["step"] for r in steps(tmp_path / "run")] == [1, 2, 3]


def mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    return sys.platform == "linux" and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_disk_of_600_kilobytes(tmp_path, tiny_model):
    """The command on a file system that is really full: one line, exit code 2; with room again it goes on."""
    disk = tmp_path / "disk"
    if not mounted(disk, "600k"):
        pytest.skip("only a superuser on Linux can mount a small disk")
    try:
        path, env = write(tmp_path / "c.yaml", small(disk / "run", tiny_model, steps=6)), environment()
        process = start(path, env)
        _, error = process.communicate(timeout=900)
        words = [line for line in error.splitlines() if line.startswith("rlvr-jax")]
        assert process.returncode == 2 and "Traceback" not in error and len(words) == 1 and "No space left on device" in words[0] and "start the same command again" in words[0], error
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        process = start(path, env)
        out, error = process.communicate(timeout=900)
        assert process.returncode == 0 and json.loads(out.splitlines()[-1])["steps"] == 6, error
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_tmp_and_a_full_cache(tmp_path, tiny_model):
    disk = tmp_path / "tmp"
    if not mounted(disk, "64k"):
        pytest.skip("only a superuser on Linux can mount a small disk")
    try:
        with pytest.raises(OSError), (disk / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        env = environment() | {"TMPDIR": str(disk), "XDG_CACHE_HOME": str(disk), "JAX_COMPILATION_CACHE_DIR": str(disk / "xla")}
        process = start(write(tmp_path / "c.yaml", small(tmp_path / "run", tiny_model)), env)
        out, error = process.communicate(timeout=900)
        assert process.returncode == 0 and json.loads(out.splitlines()[-1])["steps"] == 3 and (tmp_path / "run" / "report.html").exists(), error
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- data that changes ---

def rows(path: Path, first: int = 0) -> Path:
    path.write_text("".join(json.dumps({"question": f"{i}+1=?", "answer": str(i + 1)}) + "\n" for i in range(first, first + 40)))
    return path


def test_a_start_that_fails_leaves_only_what_was_there(tmp_path):
    run, lock = tmp_path / "new" / "run", tmp_path / "old" / ".lock"
    with pytest.raises(ZeroDivisionError), only_one(str(run)):
        raise ZeroDivisionError
    assert not run.parent.exists()
    lock.parent.mkdir()
    for folder in (run, lock.parent):
        with pytest.raises(ZeroDivisionError), only_one(str(folder)) as held_folder:
            (held_folder.local / "config.yaml").write_text("")
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), only_one(str(lock.parent)):
        raise ZeroDivisionError
    assert (run / "config.yaml").exists() and lock.exists()
    with only_one(str(run), doing="evaluates"), pytest.raises(C.ConfigError, match="another process evaluates in"), only_one(str(run), doing="evaluates"):
        pass


def test_data_that_vanishes_or_changes(tmp_path, tiny_model, monkeypatch):
    """While a run goes on it needs its files no more; between two starts they must be what they were."""
    path, held_out = rows(tmp_path / "train.jsonl"), rows(tmp_path / "eval.jsonl", 1000)
    tree = small(tmp_path / "run", tiny_model, eval_every=100)
    tree |= {"data": {"domains": {"d": {"path": str(path), "eval_path": str(held_out), "verifier": "math"}}, "max_prompt_length": 32}, "eval": {"prompts_per_domain": 2, "batch_prompts": 4}}
    drawn = loop.Collector.step
    monkeypatch.setattr(loop.Collector, "step", lambda self, *rest: (path.unlink(missing_ok=True), held_out.unlink(missing_ok=True), drawn(self, *rest))[2])
    assert go(tree)["steps"] == 3
    monkeypatch.undo()
    more = tree | {"train": tree["train"] | {"steps": 4}}
    with pytest.raises(C.ConfigError, match=r"train.jsonl' does not exist"):
        go(more)
    rows(path, 7), rows(held_out, 1000)
    with pytest.raises(C.ConfigError, match="domain 'd' is not the data this run was started with"):
        go(more)
    rows(path), rows(held_out, 2000)
    with pytest.raises(C.ConfigError, match="the evaluation rows of domain 'd' are not those this run began with"):
        go(more)
    rows(held_out, 1000)
    assert go(more)["resumed_from_step"] == 3


# --- steps that teach nothing ---

def spoilt_at(*at: int, after: int) -> Strategy:
    """Weights without bound at some steps, and from ``after`` on: the gradient of such a batch is no number."""
    def apply(state, s):
        bad = jnp.isin(s.step, jnp.array(at)) | (s.step >= after)
        return jnp.where(bad, jnp.inf, 1.0) * s.valid.astype(jnp.float32), state

    return Strategy(init=lambda: (), apply=apply)


def test_a_gradient_that_is_no_number_is_passed_over_once_and_not_ten_times(tmp_path, tiny_model, capsys):
    with pytest.raises(NothingLearned, match=r"the last 10 steps, up to 15, taught nothing: the gradient, or a strategy's weight, is not finite; .*the newest checkpoint is of step 1[34]"):
        train(small(tmp_path / "run", tiny_model, steps=40), strategies=[spoilt_at(2, after=5)])
    skipped = [r["update/skipped_nonfinite"] for r in steps(tmp_path / "run")]
    assert skipped == [0, 0, 1, 0, 0, *[1] * 10], "one step is counted, the run goes on; ten end it"
    told = capsys.readouterr().err
    assert "step 3: the gradient, or a strategy's weight, is not finite; nothing was learned from it" in told and told.count("; nothing was learned") == 2
    assert all(r["update/grad_norm"] > 0 for r in steps(tmp_path / "run")[3:5])


def cannot_tell(text: str, answer: str, **fields) -> None:
    return None


def test_a_verifier_that_never_knows_ends_the_run(tmp_path, tiny_model):
    with pytest.raises(NothingLearned, match="the last 4 steps, up to 4, taught nothing: no answer could be judged"):
        go(small(tmp_path / "run", tiny_model, steps=40, barren_steps=4) | {"rewards": [{"test_faults:cannot_tell": 1.0}]})


def test_a_model_that_is_no_number_ends_the_run(tmp_path, tiny_model):
    import shutil

    import numpy as np
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(NothingLearned, match="taught nothing: the model's logits are not finite"):
        go(small(tmp_path / "run", folder, steps=40, barren_steps=2))


def test_a_step_with_nothing_to_learn_is_in_order():
    values = {"verify/unknown_share": 0.5, "rollout/nonfinite": 0.0, "update/skipped_nonfinite": 0.0, "update/skipped_empty": 1.0}
    assert nothing_learned(values, 1) is None and nothing_learned(values | {"update/skipped_nonfinite": 1.0}, 3) is None
    assert nothing_learned(values | {"update/skipped_nonfinite": 1.0}, 2) == "the gradient, or a strategy's weight, is not finite"


# --- clocks ---

def test_a_clock_that_jumps_changes_no_duration(tmp_path, tiny_model, whole, monkeypatch):
    """The wall clock goes back a day, then on two, at every look; durations are those of a clock that cannot be set."""
    real, days = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * (-1) ** next(days))
    began = time.monotonic()
    summary = go(small(tmp_path / "run", tiny_model))
    assert summary["weights_sha256"] == whole and 0 < summary["seconds"] <= time.monotonic() - began
    assert all(0 <= v <= summary["seconds"] for r in steps(tmp_path / "run") for k, v in r.items() if k.startswith("time/"))


def test_a_long_time_without_a_save_is_ended_by_one(tmp_path, tiny_model):
    go(small(tmp_path / "run", tiny_model, save_every=100, save_seconds=1e-6))
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} == {"2", "3"}
