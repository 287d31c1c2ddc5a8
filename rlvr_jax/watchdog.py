"""Ends a process that is stuck, and says where it was: a host that hangs silently stops a whole pod. No jax in here."""

import contextlib
import faulthandler
import os
import threading
import time
from typing import Self

from rlvr_jax.exit_codes import LOST

# The second line, for a process stuck inside a library that holds Python's lock: a thread of C, which cannot choose its exit code.
GRACE_SECONDS = 15.0


class Watchdog:
    """Between two calls of :meth:`feed` at most ``seconds`` may pass; None = never looks.

    After that the stacks of all threads go to stderr and the process ends with :data:`~rlvr_jax.exit_codes.LOST`, without
    waiting for anybody: the last checkpoint holds what there is. Where even Python's threads stand still, the stacks
    follow 15 s later and the exit code is 1.
    """

    def __init__(self, seconds: float | None):
        self.seconds, self._doing, self._since = seconds, "start", time.monotonic()
        self._changed, self._closed = threading.Condition(), False
        # A copy: libraries and tests replace sys.stderr, which need not have a file below it.
        self._stderr = os.dup(2) if seconds is not None else -1

    def __enter__(self) -> Self:
        if self.seconds is not None:
            self.feed("start")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.seconds is None:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)

    def feed(self, doing: str) -> None:
        """Something new begins; ``doing`` names it in the message."""
        if self.seconds is None:
            return
        with self._changed:
            self._doing, self._since = doing, time.monotonic()
        faulthandler.dump_traceback_later(self.seconds + GRACE_SECONDS, exit=True, file=self._stderr)

    def _watch(self) -> None:
        assert self.seconds is not None
        with self._changed:
            while not self._closed and (left := self._since + self.seconds - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._closed:
                return
            message = f"watchdog: '{self._doing}' took longer than train.step_limit_seconds={self.seconds:g}; exit code {LOST}, stacks of all threads:\n"
        with contextlib.suppress(OSError):
            os.write(self._stderr, message.encode())
            faulthandler.dump_traceback(self._stderr, all_threads=True)
        os._exit(LOST)  # no exit handler may wait for other processes or stuck threads


