"""Two real processes that exchange something in a loop, as training does: one is killed or stopped, the other must not hang."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import processes as P
import pytest

from rlvr_jax.exit_codes import LOST, MEND, STOPPED

# The command line as it is, with a loop of exchanges in place of a command's work.
LOOP = """
import sys, time
from rlvr_jax import cli, cli_commands, distributed
from rlvr_jax.watchdog import Watchdog

def loop(args):
    cli_commands._join(args)
    if "seed=1" in args.overrides:
        distributed.require_equal({"the config": args.process_id})
    with Watchdog(LIMIT) as watchdog:
        for step in range(100000):
            watchdog.feed(f"step {step}")
            stop = distributed.largest(75 if "seed=2" in args.overrides and args.process_id == 1 and step == 3 else 0)
            if distributed.first():
                open(sys.argv[2] + ".step", "w").write(str(step))
            if stop:
                return stop
            time.sleep(0.02)

cli_commands.preflight = loop
cli.console()
"""


def start(tmp_path, *overrides, limit=20):
    port = P.port()
    out = []
    for i in range(2):
        with (tmp_path / f"log{i}").open("w") as log:
            out.append(subprocess.Popen([sys.executable, "-c", LOOP.replace("LIMIT", str(limit)), "preflight", str(tmp_path / "none.yaml"), *overrides, "--coordinator",
                                         f"localhost:{port}", "--num-processes", "2", "--process-id", str(i)], env=P.environment(1, tmp_path), stderr=log, stdout=log))
    return out


def wait_for_steps(tmp_path, pair):
    deadline = time.monotonic() + 900
    while not ((at := tmp_path / "none.yaml.step").exists() and int(at.read_text() or 0) > 3):
        assert time.monotonic() < deadline and all(p.poll() is None for p in pair), [(tmp_path / f"log{i}").read_text()[-2000:] for i in range(2)]
        time.sleep(0.05)


@pytest.fixture
def pair(tmp_path, request):
    both = start(tmp_path, *getattr(request, "param", ()))
    yield both
    for p in both:
        if p.poll() is None:
            p.kill()
        p.wait()


def log(tmp_path, i=0):
    return Path(tmp_path / f"log{i}").read_text()


def test_killed_on_one_side(tmp_path, pair):
    wait_for_steps(tmp_path, pair)
    pair[1].kill()
    assert pair[0].wait(600) == LOST, log(tmp_path)[-3000:]
    assert "rlvr-jax preflight: " in log(tmp_path) or "watchdog: " in log(tmp_path)


def test_stuck_on_one_side(tmp_path, pair):
    """It is alive and closes nothing: only the watchdog sees it."""
    wait_for_steps(tmp_path, pair)
    pair[1].send_signal(signal.SIGSTOP)
    assert pair[0].wait(600) == LOST, log(tmp_path)[-3000:]
    assert "took longer than train.step_limit_seconds=20" in log(tmp_path) and "in gather" in log(tmp_path)


@pytest.mark.parametrize("pair", [["seed=1"]], indirect=True)
def test_a_difference_ends_all_without_waiting(tmp_path, pair):
    """Both see it, neither waits in jax's exit handlers for the other; whoever is second may find the first one gone."""
    codes = sorted(p.wait(600) for p in pair)
    assert MEND in codes and set(codes) <= {MEND, LOST, -signal.SIGABRT}
    assert any("the config of process 1 differs from that of process 0" in log(tmp_path, i) for i in range(2))


@pytest.mark.parametrize("pair", [["seed=2"]], indirect=True)
def test_what_one_decides_all_do(tmp_path, pair):
    assert [p.wait(600) for p in pair] == [STOPPED, STOPPED], log(tmp_path)[-3000:]
