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

from rlvr_jax.rewards.template import COMMAND, NEVER_THERE, STATUS
from rlvr_jax.rewards.worker import HEADER

START_SECONDS = 120.0
"""Bound for importing a verifier's module; generous, since it says nothing about a row."""
_TICK_CAP = 0.5
_END_SECONDS = 5.0
_MAX_MESSAGE = 1 << 20
_BACKGROUND = 10
_RUN = "import sys, json; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); from rlvr_jax.rewards.template import main; main(**a)"


class Template:
    """The process that forks the workers, see :mod:`rlvr_jax.rewards.template`; ``gone`` once it does not answer."""

    def __init__(self, memory_mb: int, cpu_seconds: float, preload: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        # One thread of arithmetic per worker; a verifier that imports jax must not grab the trainer's accelerator.
        env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                            "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        arguments = json.dumps({"path": sys.path, "fd": theirs.fileno(), "parent": os.getpid(),
                                "memory_mb": memory_mb, "cpu_seconds": cpu_seconds, "preload": list(preload)})
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the template)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _RUN, arguments], pass_fds=[theirs.fileno()], env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors)
        theirs.close()
        self._socket = ours
        self._socket.settimeout(_END_SECONDS)
        self._number = 0
        self.answered = False
        self.gone = False

    def fork(self) -> "Process":
        """A new worker. Where it cannot be had, its socket closes at once, as that of one that ends."""
        ours, theirs = socket.socketpair()
        self._number += 1
        with theirs:
            try:
                socket.send_fds(self._socket, [COMMAND.pack(b"F", self._number, 0.0)], [theirs.fileno()])
            except OSError:
                self.gone = True
        return Process(self, self._number, ours)

    def end(self, number: int, grace: float) -> int:
        """Ends a worker, which may do so by itself within ``grace`` seconds: its exit code, or minus the signal."""
        if self.gone:
            return NEVER_THERE
        try:
            self._socket.settimeout(grace + (_END_SECONDS if self.answered else START_SECONDS))
            self._socket.sendall(COMMAND.pack(b"E", number, grace))
            data = self._socket.recv(STATUS.size)
        except OSError:
            data = b""
        self.gone = len(data) < STATUS.size
        return NEVER_THERE if self.gone else int(STATUS.unpack(data)[0])

    def mark(self) -> int:
        """Length of what it and its workers have complained of so far."""
        return os.fstat(self._errors.fileno()).st_size

    def complaint(self, mark: int) -> str:
        """The last line of what they have complained of since, '' if they have not."""
        text = os.pread(self._errors.fileno(), max(self.mark() - mark, 0), mark)  # the offset is theirs too
        return next(iter(text.decode(errors="replace").strip().splitlines()[::-1]), "")

    def close(self) -> None:
        """Ends it and all its workers."""
        if self.answered and not self.gone:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._socket.sendall(COMMAND.pack(b"Q", 0, 0.0))
                self._popen.wait(_END_SECONDS)
        self._socket.close()
        self._popen.kill()  # its workers die with it
        self._popen.wait()
        self._errors.close()


class Process:
    """A worker and the job it is on (None = idle).

    Clocks of the current job: ``cpu`` seconds used by the process, and ``idle`` seconds in which it neither computed nor
    waited for a core. A worker that is starved by a busy machine uses up neither, so load changes no verdict. ``began``: when they
    started; ``background``: it has been asked to leave the cores to others.
    """

    def __init__(self, template: Template, number: int, connection: socket.socket) -> None:
        self._template, self._number, self.socket = template, number, connection
        self._mark = template.mark()
        self._status = NEVER_THERE
        self.pid = 0
        self.ready = False
        self.job: int | None = None
        self.started = False
        self.background = False
        self._buffer = b""
        self._reset_clocks()

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

    def is_process(self, pid: Any) -> None:
        """It has said who it is."""
        self.pid, self._template.answered = int(pid), True

    def start_clocks(self) -> None:
        self.started = True
        self._reset_clocks()

    def _reset_clocks(self) -> None:
        self._cpu_base = cpu_seconds(self.pid)[0]
        self.began = self._last_tick = time.monotonic()
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

    def step_back(self) -> None:
        """Leaves the cores to the others where they want them; for good, as no one may take it back."""
        self.background = True
        if self.pid:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self.pid, os.getpriority(os.PRIO_PROCESS, self.pid) + _BACKGROUND)

    def exit_reason(self) -> str:
        """Why it ended, after :meth:`kill`: signal or exit code, and the last line of its start-up errors."""
        code = self._status
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else "was lost" if code == NEVER_THERE else f"exited with {code}"
        line = self._template.complaint(self._mark)
        return f"{reason}: {line}" if line else reason

    def kill(self, grace: float = 0.0) -> None:
        """Ends the worker and everything it started; within ``grace`` seconds it may exit with its own code."""
        self.socket.close()
        self._status = self._template.end(self._number, grace)


def pack(number: int, verifier: str, text: str, answer: Any, fields: dict[str, Any]) -> bytes:
    return pickle.dumps((number, verifier, text, answer, fields), protocol=pickle.HIGHEST_PROTOCOL)


def cpu_seconds(pid: int, ended_too: bool = False) -> tuple[float, str]:
    """CPU seconds of a process so far (``ended_too``: with those of its children that have ended), and R if any of its threads runs or
    waits for a core, else S.

    (0, S) where /proc is missing (macOS; there the worker's own RLIMIT_CPU holds) or the process is gone.
    """
    try:
        used = _stat(f"/proc/{pid}/stat")
        states = [_stat(f"/proc/{pid}/task/{t}/stat")[0] for t in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return 0.0, "S"
    return sum(map(int, used[11: 15 if ended_too else 13])) / os.sysconf("SC_CLK_TCK"), "R" if b"R" in states else "S"


def _stat(path: str) -> list[bytes]:
    with open(path, "rb") as f:
        return f.read().rpartition(b")")[2].split()
