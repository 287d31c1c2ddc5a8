"""Real processes that are really stuck: they end within the limit, with their stacks and the code a launcher knows."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlvr_jax.exit_codes import LOST
from rlvr_jax.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[1]
STUCK = """
import ctypes, faulthandler, sys, threading, time
from rlvr_jax import watchdog
watchdog.GRACE_SECONDS = 1.0
def hold_a_lock():
    lock = threading.Lock(); lock.acquire(); lock.acquire()
def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(600)
with watchdog.Watchdog(1.0) as dog:
    for step in range(3):
        dog.feed(f"step {step}")
        time.sleep(0.5)
    HOW()
"""


def run(how: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", STUCK.replace("HOW", how)], capture_output=True, text=True, timeout=120, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


def test_a_stuck_process_ends_with_its_stacks():
    done = run("hold_a_lock")
    assert done.returncode == LOST == 69
    assert "watchdog: 'step 2' took longer than train.step_limit_seconds=1" in done.stderr
    assert "in hold_a_lock" in done.stderr and "in _watch" in done.stderr  # all threads


def test_even_where_python_stands_still():
    """A library that holds the interpreter's lock stops every thread of Python's, the watchdog too."""
    done = run("hold_the_interpreter")
    assert done.returncode == 1 and "in hold_the_interpreter" in done.stderr


def test_a_process_that_moves_on_is_left_alone():
    done = run("print")
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("seconds", [None, 1000.0])
def test_off_or_closed_it_leaves_nothing_behind(seconds):
    import threading

    with Watchdog(seconds) as dog:
        dog.feed("step 1")
        assert any(t.name == "watchdog" for t in threading.enumerate()) == (seconds is not None)
    for t in threading.enumerate():
        if t.name == "watchdog":
            t.join(10)
    assert not any(t.name == "watchdog" for t in threading.enumerate())
