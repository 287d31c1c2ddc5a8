"""The template: a process that has imported the built-in verifiers, and forks the workers from what it has.

A worker that replaces a lost one, or runs beside one that hangs, is there in milliseconds and shares the memory of its imports. User
modules are imported in the worker, never here: they may start threads, which a fork does not survive.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback

from rlvr_jax.rewards import registry, worker

COMMAND = struct.Struct("!cId")
"""``F number _`` with the worker's socket beside it: fork; ``E number grace``: end, and answer a :data:`STATUS`; ``Q _ _``: end all and quit."""
STATUS = struct.Struct("!i")
NEVER_THERE = 1 << 16
"""Status of a worker that was not forked, or has been ended before."""


def main(fd: int, parent: int, memory_mb: int, cpu_seconds: float, preload: list[str]) -> None:
    """Serves commands on the socket ``fd`` until it closes, ``parent`` is gone or it is told to quit; takes its workers along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)
    worker.warm_up([name for name in preload if name in registry.BUILTIN])
    gc.freeze()  # no collection in a worker touches, and so copies, what it shares
    own = [name for name in preload if name not in registry.BUILTIN]
    workers: dict[int, int] = {}
    try:
        while (command := _next(control, parent)) is not None:
            kind, number, seconds, connection = command
            if kind == b"F" and connection is not None:
                workers[number] = _fork(control, connection, memory_mb, cpu_seconds, own)
            elif kind == b"E":
                control.sendall(STATUS.pack(end(workers.pop(number, None), seconds)))
            else:
                break
    finally:
        for pid in workers.values():
            end(pid, 0.0)


def _next(control: socket.socket, parent: int) -> tuple[bytes, int, float, int | None] | None:
    while not select.select([control], [], [], 1.0)[0]:
        if os.getppid() != parent:
            return None
    try:
        data, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
    except OSError:
        return None
    if len(data) < COMMAND.size:  # commands are shorter than anything that a socket would split
        return None
    kind, number, seconds = COMMAND.unpack(data)
    return kind, number, seconds, fds[0] if fds else None


def _fork(control: socket.socket, connection: int, memory_mb: int, cpu_seconds: float, preload: list[str]) -> int:
    me = os.getpid()
    pid = os.fork()
    if pid:
        os.close(connection)
        with contextlib.suppress(OSError):  # the child has done it, or is gone
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        # A group, so that all that a verifier starts ends with it; not a session: where those share cores as such, nice is void between them.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        control.close()
        worker.main(connection, me, memory_mb, cpu_seconds, preload)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end(pid: int | None, grace: float) -> int:
    """Ends a worker and everything it started; within ``grace`` seconds it may exit by itself. Its exit code, or minus a signal."""
    if pid is None:
        return NEVER_THERE
    deadline = time.monotonic() + grace
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it started outlives it
    return os.waitstatus_to_exitcode(status if ended else os.waitpid(pid, 0)[1])
