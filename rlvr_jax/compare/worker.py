"""A process that trains one run after another, and what its parent knows of it.

Importing and compiling is paid once a process, not once a run: runs whose compiled programs are equal share them. An arm
that takes its process along (out of memory, a crash) costs that run alone. Messages are JSON lines: a run's config in,
how it ended out.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rlvr_jax.rewards.worker import die_with

_RUN = "import sys, json; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); from rlvr_jax.compare.worker import main; main(**a)"


class Worker:
    """The parent's side. ``task``: what it is on (None = waiting for one); ``backend``: once it has said so."""

    def __init__(self, number: int, cores: Sequence[int], log: Path, locks: Sequence[int] = ()):
        """``locks``: descriptors of locks that end when the last process that has them does."""
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = json.dumps({"path": sys.path, "parent": os.getpid(), "cores": list(cores)})
        # Small programs are many: without the first variable each process compiles them anew.
        env = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | os.environ
        with log.open("ab") as errors:
            # A session of its own: Ctrl-C reaches the parent alone, which asks its workers to save, once.
            self._popen = subprocess.Popen([sys.executable, "-c", _RUN, arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env,
                                           start_new_session=True, pass_fds=locks)
        self.number, self.log = number, log
        self.task: Any = None
        self.backend: str | None = None
        self._buffer = b""

    def fileno(self) -> int:
        return self._out.fileno()

    @property
    def _out(self) -> IO[bytes]:
        assert self._popen.stdout is not None
        return self._popen.stdout

    def start(self, task: Any, config: dict[str, Any]) -> None:
        """Hands over a run. A worker that is gone is noticed by the next :meth:`receive`."""
        self.task = task
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(config).encode() + b"\n")
            self._popen.stdin.flush()

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None when the process has ended."""
        data = os.read(self.fileno(), 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def stop(self) -> None:
        """Asks for the running run to be saved."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)

    def end(self, grace: float = 10.0) -> str:
        """Ends the process and returns how it ended."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        try:
            code = self._popen.wait(grace)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        self._out.close()
        return f"killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -signal.SIGKILL else ''}" if code < 0 else f"exited with {code}"


def main(parent: int, cores: list[int]) -> None:
    """Trains the runs that come in on stdin until it closes; ``cores``: to stay on, if this is a CPU's job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent, signal.SIGTERM)  # a command that is killed loses nothing: the running step ends, and is saved
    # What user code prints is no message.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _stay_on(cores)  # before jax counts the cores for its threads
    import jax

    from rlvr_jax import config as configs
    from rlvr_jax.train import train

    backend = jax.default_backend()
    if backend != "cpu" and cores:
        _stay_on(range(os.cpu_count() or 1))

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    say(backend=backend)
    programs: dict[Any, Any] = {}
    for line in sys.stdin:
        try:
            summary = train(configs.validate(json.loads(line)), programs=programs)
            say(finished=summary["finished"])
        except BrokenPipeError:  # nobody is there to be told
            return
        except Exception as e:
            traceback.print_exc()
            words = " ".join(str(e).split())[:1000]
            say(reason=words if isinstance(e, configs.ConfigError) else f"{type(e).__name__}: {words}")


def _stay_on(cores: Sequence[int]) -> None:
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
