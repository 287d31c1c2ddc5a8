"""One worker process as its parent sees it: start, send, receive, CPU clock, kill."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rlvr_jax.rewards.worker import HEADER

START_SECONDS = 120.0
"""Bound for importing a verifier's module; generous, since it says nothing about a row."""
_TICK_CAP = 0.5
_MAX_MESSAGE = 1 << 20
_RUN = "import sys, json; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); from rlvr_jax.rewards.worker import main; main(**a)"


class Process:
    """A worker and the job it is on (None = idle).

    Clocks of the current job: ``cpu`` seconds used by the process, and ``idle`` seconds in which it neither computed nor
    waited for a core. A worker that is starved by a busy machine uses up neither, so load changes no verdict.
    """

    def __init__(self, memory_mb: int, cpu_seconds: float, preload: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        # One thread of arithmetic per worker; a verifier that imports jax must not grab the trainer's accelerator.
        env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                            "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        arguments = json.dumps({"path": sys.path, "fd": theirs.fileno(), "parent": os.getpid(),
                                "memory_mb": memory_mb, "cpu_seconds": cpu_seconds, "preload": list(preload)})
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _RUN, arguments], pass_fds=[theirs.fileno()], env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors)
        theirs.close()
        self.socket = ours
        self.ready = False
        self.job: int | None = None
        self.started = False
        self._buffer = b""
        self._reset_clocks()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, job: int, payload: bytes) -> None:
        """Hands over a job; raises OSError when the worker is gone or does not read."""
        self.job, self.started = job, False
        self._reset_clocks()
        self.socket.settimeout(START_SECONDS)
        self.socket.sendall(HEADER.pack(len(payload)) + payload)

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None when the worker is gone or sends something else than messages."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if not data or len(self._buffer) > _MAX_MESSAGE:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(m, dict) for m in messages) else None

    def start_clocks(self) -> None:
        self.started = True
        self._reset_clocks()

    def _reset_clocks(self) -> None:
        self._cpu_base = cpu_seconds(self.pid)[0]
        self._last_tick = time.monotonic()
        self.cpu = self.idle = 0.0

    def tick(self) -> None:
        """Brings the clocks up to date."""
        now = time.monotonic()
        # A stopped parent or a sleeping laptop shows up as one long gap, which is nobody's fault.
        passed, self._last_tick = min(now - self._last_tick, _TICK_CAP), now
        total, state = cpu_seconds(self.pid)
        self.cpu = total - self._cpu_base
        if state != "R":
            self.idle += passed

    def exit_reason(self) -> str:
        """Why it ended, after :meth:`kill`: signal or exit code, and the last line of its start-up errors."""
        code = self._popen.returncode
        reason = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{reason}: {lines[-1]}" if lines else reason

    def kill(self, grace: float = 0.0) -> None:
        """Ends the worker and everything it started; within ``grace`` seconds it may exit with its own code."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


def pack(number: int, verifier: str, text: str, answer: Any, fields: dict[str, Any]) -> bytes:
    return pickle.dumps((number, verifier, text, answer, fields), protocol=pickle.HIGHEST_PROTOCOL)


def cpu_seconds(pid: int) -> tuple[float, str]:
    """CPU seconds of a process so far, and R if any of its threads runs or waits for a core, else S.

    (0, S) where /proc is missing (macOS; there the worker's own RLIMIT_CPU holds) or the process is gone.
    """
    try:
        used = _stat(f"/proc/{pid}/stat")
        states = [_stat(f"/proc/{pid}/task/{t}/stat")[0] for t in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return 0.0, "S"
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK"), "R" if b"R" in states else "S"


def _stat(path: str) -> list[bytes]:
    with open(path, "rb") as f:
        return f.read().rpartition(b")")[2].split()
