"""The worker process of the pool: reads pickled jobs from a socket, answers with JSON lines.

Forked from a program of its own (:mod:`rlvr_jax.rewards.template`), so the user's ``__main__`` is not imported again and no thread of
jax is forked. The answers are JSON, never pickles: what a verifier did to this process must not be able to run code in the trainer.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

from rlvr_jax.rewards import registry
from rlvr_jax.rewards.verdict import Verdict, raised, unknown

HEADER = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int, memory_mb: int, cpu_seconds: float, preload: list[str]) -> None:
    """Serves jobs on the socket ``fd`` until it closes or ``parent`` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    _send(connection, {"pid": os.getpid()})
    warm_up(preload)
    _limit_memory(memory_mb)
    _silence()
    sys.dont_write_bytecode = True
    sys.addaudithook(_refuse)
    me = os.getpid()
    _send(connection, {"ready": True})
    while (job := _receive(connection)) is not None:
        number, verifier, text, answer, fields = job
        verdict, fatal = _judge(connection, number, verifier, text, answer, fields, cpu_seconds)
        if os.getpid() != me:
            os._exit(0)  # a verifier forked and this is its child
        _send(connection, {"job": number, "fatal": fatal, "error": verdict.detail.startswith("verifier raised"),
                           "verdict": [verdict.reward, verdict.status, verdict.detail]})
        if fatal:
            os._exit(1)


def _judge(connection: socket.socket, number: int, verifier: str, text: str, answer: Any, fields: dict[str, Any],
           cpu_seconds: float) -> tuple[Verdict, bool]:
    """One verdict; ``fatal`` when this process can no longer be trusted (no memory, exit requested)."""
    try:
        function = registry.resolve(verifier)
        # Import time is not the row's: the parent starts its clocks at this message.
        _send(connection, {"started": number})
        _limit_cpu(cpu_seconds)
        _GUARD.builtin = verifier in registry.BUILTIN
        return registry.call(function, text, answer, fields), False
    except MemoryError:
        return unknown("out of memory"), True
    except Exception as e:
        return raised(e), False
    except BaseException as e:
        return unknown(f"verifier raised {type(e).__name__}"), True
    finally:
        _GUARD.builtin = False
        # A leftover alarm of this row must not hit the next one.
        with contextlib.suppress(ValueError, OSError):
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Guard:
    """Whether a built-in verifier runs: those only compute, whatever the answer's text says."""

    builtin = False


_GUARD = _Guard()
_REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "pty.", "signal.", "tempfile.", "urllib.", "webbrowser.")
_HARMLESS = ("os.listdir", "os.scandir")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: while a built-in verifier runs, no process is started and nothing written, removed or sent.

    A second lock, behind parsers that never evaluate text; imports go on, since sympy's are lazy.
    """
    if not _GUARD.builtin:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(_REFUSED) and event not in _HARMLESS):
        raise PermissionError(f"a built-in verifier tried {event}")


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    head = _exactly(connection, HEADER.size)
    body = None if head is None else _exactly(connection, HEADER.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def _exactly(connection: socket.socket, n: int) -> bytes | None:
    parts = []
    while n:
        part = connection.recv(min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """No orphan: this process gets ``number`` when its parent ends, however it ends.

    Death is left to the kernel, where it does that (Linux). Any other signal comes from a watching thread, within a second: the kernel's
    comes again for each thread of the parent that outlives another, and a second SIGTERM means that there is no time to save.
    """
    if sys.platform == "linux" and number == signal.SIGKILL:
        import ctypes
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def warm_up(preload: list[str]) -> None:
    """Imports what rows need before their clocks run, and calls a ``warm_up`` beside the verifier if there is one."""
    for name in preload:
        function = registry.resolve(name)
        getattr(sys.modules.get(function.__module__), "warm_up", lambda: None)()


def _limit_memory(memory_mb: int) -> None:
    """Bounds what verdicts may take on top of what the imports took (jax alone maps gigabytes on a large machine)."""
    if memory_mb > 0:
        with contextlib.suppress(ValueError, OSError):  # no /proc: macOS, whose kernel does not keep this limit anyway
            limit = _mapped_bytes() + (memory_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _mapped_bytes() -> int:
    with open("/proc/self/statm", "rb") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def _limit_cpu(cpu_seconds: float) -> None:
    """The kernel's own deadline, well behind the parent's: for a machine where the parent cannot read CPU times."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + 2 * cpu_seconds) + 2
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _silence() -> None:
    """What verifiers print goes nowhere; the protocol has its own socket."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
