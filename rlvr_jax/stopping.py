"""When a run ends before its time: signals, and steps that teach nothing because something is broken. No jax in here."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

HANDLED = (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))


class Stop:
    """The first SIGTERM, SIGINT (Ctrl-C) or SIGHUP (a terminal that closes) is remembered in ``signal``, so that what runs can
    end and be saved; the second raises KeyboardInterrupt, the third ends the process at once.

    Signals reach the main thread alone: elsewhere this does nothing. A SIGHUP that is ignored (nohup) stays ignored.

    Args:
      first: called with the number of the first signal, inside the handler; default: a line on stderr.
    """

    def __init__(self, first: Callable[[int], None] | None = None):
        self.signal: int | None = None
        self._first = first or _tell
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if number == signal.SIGINT or number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal is not None:  # does not wait for the step; what then hangs in a library is ended by the third
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.signal = number
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            self._first(number)


def _tell(number: int) -> None:
    print(f"\n{signal.Signals(number).name}: finishing this step and saving; the same command goes on from there", file=sys.stderr)


class NothingLearned(ValueError):
    """Too many steps in a row from which nothing could be learned; the message is one line."""


def nothing_learned(values: Mapping[str, Any], updates: int) -> str | None:
    """Why a step taught nothing although it should have, by its metrics; None for a step that is in order.

    A step whose groups were all right or all wrong is in order: there was nothing to learn.
    """
    if values["verify/unknown_share"] == 1:
        return "no answer could be judged"
    if values["rollout/nonfinite"] == 1:
        return "the model's logits are not finite"
    if (broken := values["update/skipped_nonfinite"]) and broken + values["update/skipped_empty"] >= updates:
        return "the gradient, or a strategy's weight, is not finite"
    return None
