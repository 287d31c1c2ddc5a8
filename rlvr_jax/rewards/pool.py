"""Verification in worker processes: a hung, crashing or memory-eating verifier costs one worker, never the run."""

import contextlib
import dataclasses
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

from rlvr_jax.rewards import process, registry
from rlvr_jax.rewards.patience import LEAST_SECONDS, Patience
from rlvr_jax.rewards.verdict import Verdict, raised, unknown

MAX_START_FAILURES = 3
_POLL_SECONDS = 0.05
SLOW_SECONDS = 0.1
"""Idle time after which a row no longer holds up the others: a further worker is started beside it. Of CPU time it is
:data:`~rlvr_jax.rewards.patience.LEAST_SECONDS`: more workers make no more cores."""
MAX_EXTRA = 12


@dataclasses.dataclass(frozen=True)
class Job:
    """One response to judge.

    Attributes:
      verifier: name, ``module:function`` or callable.
      text: the response.
      answer: the gold answer.
      fields: further keyword arguments of the verifier.
    """

    verifier: registry.Verifier
    text: str
    answer: Any = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


class Pool:
    """Worker processes that judge responses, each under a deadline.

    ``cpu_seconds`` is CPU time of the worker, so a busy machine changes no verdict; ``wall_seconds`` bounds a verifier that
    sleeps: it counts only time in which the worker does not want a core. A row whose worker was killed, crashed or ran out
    of memory is tried once more in a fresh worker, then becomes unknown; a row that ran out of its time is unknown at once. Workers start at the first job (or
    :meth:`start`), in the background, and import the verifiers named in ``preload`` before they take one.

    Rows that hang cost a batch one deadline, not one each. While rows take long, up to :data:`MAX_EXTRA` further workers take the rest;
    of those that compute, the oldest have the cores, as many as there are ``workers``, and the others what is left. When so many rows of
    a verifier have run out of their whole time, the others that take as long are given up with them: see :class:`Patience`.

    A callable that cannot be imported by name (lambda, closure, function of a notebook or ``__main__``) is run in the
    calling process when its job is submitted: exceptions are caught, but nothing can stop it if it hangs.

    ``counters``: verified, unknown, errors (verifier raised), timeouts, crashes, replaced; since the pool was made.
    Usable from several threads.
    """

    def __init__(self, workers: int = 2, cpu_seconds: float = 5.0, wall_seconds: float = 60.0,
                 memory_mb: int = 4096, preload: Sequence[str] = ("math",)) -> None:
        self._preload = tuple(preload)
        self._size, self._cpu, self._memory = workers, cpu_seconds, memory_mb
        self.counters: Counter[str] = Counter(
            {k: 0 for k in ("verified", "unknown", "errors", "timeouts", "crashes", "replaced")})
        self._payload: dict[int, bytes] = {}
        self._verifier: dict[int, str] = {}
        self._patience = Patience(cpu_seconds, wall_seconds, enough=workers)
        self._template: process.Template | None = None
        self._retried: set[int] = set()
        self._queue: deque[int] = deque()
        self._done: dict[int, Verdict] = {}
        self._next = 0
        self._broken: str | None = None
        self._start_failures = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the workers in the background, so that they are warm when the first rows arrive."""
        with self._changed:
            if self._closing:
                raise RuntimeError("this pool is closed; make a new one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rewards-pool", daemon=True)
                self._thread.start()

    def submit(self, job: Job) -> int:
        """Queues a job and returns its ticket at once. Raises RuntimeError on a closed pool."""
        self.start()
        reference = registry.reference(job.verifier)
        if reference is None:
            return self._judge_here(job)
        with self._changed:
            ticket, self._next = self._next, self._next + 1
        try:
            payload = process.pack(ticket, reference, job.text, job.answer, job.fields)
        except Exception as e:
            self._finish(ticket, unknown(f"the row cannot be sent to a worker: {type(e).__name__}: {e}"), "errors")
            return ticket
        with self._changed:
            self._payload[ticket], self._verifier[ticket] = payload, reference
            self._queue.append(ticket)
        self._wake()
        return ticket

    def collect(self, tickets: Iterable[int]) -> list[Verdict]:
        """Waits for the verdicts of tickets, in their order; each ticket can be collected once.

        Raises:
          RuntimeError: the workers cannot be started, or the pool was closed meanwhile.
          KeyError: a ticket that was never given out or already collected.
        """
        wanted = list(tickets)
        with self._changed:
            for t in wanted:
                if t not in self._done and t not in self._payload:
                    raise KeyError(f"ticket {t} is unknown or was collected before")
            self._changed.wait_for(lambda: self._broken or self._closing or all(t in self._done for t in wanted))
            if not all(t in self._done for t in wanted):
                raise RuntimeError(self._broken or "the pool was closed while rows were waiting")
            return [self._done.pop(t) for t in wanted]

    def score(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict per job, same order."""
        return self.collect([self.submit(job) for job in jobs])

    def close(self) -> None:
        """Kills the workers; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        self._wake()
        if thread is not None:
            thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a wake-up is already waiting
            self._wake_write.send(b"x")

    def _judge_here(self, job: Job) -> int:
        with self._changed:
            ticket, self._next = self._next, self._next + 1
        assert callable(job.verifier)
        try:
            verdict, counter = registry.call(job.verifier, job.text, job.answer, job.fields), None
        except (Exception, SystemExit) as e:
            verdict, counter = raised(e), "errors"
        self._finish(ticket, verdict, counter)
        return ticket

    def _finish(self, ticket: int, verdict: Verdict, counter: str | None = None) -> None:
        with self._changed:
            self._done[ticket] = verdict
            self._payload.pop(ticket, None)
            self._verifier.pop(ticket, None)
            self._retried.discard(ticket)
            self.counters["verified"] += 1
            self.counters["unknown"] += verdict.status == "unknown"
            if counter:
                self.counters[counter] += 1
            self._changed.notify_all()

    # Everything below runs in the pool's thread: only it touches processes.

    def _run(self) -> None:
        workers: list[process.Process] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            try:
                while not self._closing and self._broken is None:
                    self._round(selector, workers)
            except Exception as e:
                self._fail(f"the reward pool failed: {type(e).__name__}: {e}")
            finally:
                for worker in workers:
                    worker.socket.close()
                if self._template is not None:
                    self._template.close()

    def _round(self, selector: selectors.BaseSelector, workers: list[process.Process]) -> None:
        self._retire(selector, workers)
        while len(workers) < self._wanted(workers):
            workers.append(self._fork())
            selector.register(workers[-1].socket, selectors.EVENT_READ, workers[-1])
        for worker in workers:
            self._dispatch(worker)
        # Clocks need polling only while somebody works.
        waiting = all(w.ready and w.job is None for w in workers)
        if waiting:
            self._patience.forget()
        arrived = selector.select(None if waiting else _POLL_SECONDS)
        lost: dict[process.Process, tuple[str, str]] = {}
        for key, _ in arrived:
            if key.data is None:
                self._wake_read.recv(4096)
            elif not self._listen(key.data):
                lost[key.data] = ("crashes", "worker")
        for worker in workers:
            if worker not in lost and (reason := self._overdue(worker)):
                lost[worker] = ("timeouts", reason)
        for worker, (counter, reason) in lost.items():
            workers.remove(worker)
            selector.unregister(worker.socket)
            worker.kill(grace=0.5 if counter == "crashes" else 0.0)
            self._replace(worker, counter, reason if counter == "timeouts" else f"{reason} {worker.exit_reason()}")

    def _fork(self) -> process.Process:
        if self._template is None or self._template.gone:
            if self._template is not None:
                self._template.close()
            self._template = process.Template(self._memory, self._cpu, self._preload)
        return self._template.fork()

    def _wanted(self, workers: list[process.Process]) -> int:
        """One worker more for every row that takes long while others wait."""
        slow = [w for w in workers if w.job is not None and w.started and (w.cpu > LEAST_SECONDS or w.idle > SLOW_SECONDS)]
        for worker in sorted((w for w in slow if w.cpu > LEAST_SECONDS), key=lambda w: w.began)[self._size:]:
            if not worker.background:
                worker.step_back()
        return self._size + min(MAX_EXTRA, len(slow) if self._queue else 0)

    def _retire(self, selector: selectors.BaseSelector, workers: list[process.Process]) -> None:
        """Ends idle workers beyond what is wanted, those first that have stepped back, and all of these."""
        free = [] if self._queue else sorted((w for w in workers if w.job is None), key=lambda w: not w.background)
        surplus = len(workers) - self._size
        for worker in [w for i, w in enumerate(free) if w.background or i < surplus]:
            workers.remove(worker)
            selector.unregister(worker.socket)
            worker.kill()

    def _dispatch(self, worker: process.Process) -> None:
        if not worker.ready or worker.job is not None:
            return
        with self._changed:
            if not self._queue:
                return
            ticket = self._queue.popleft()
            payload = self._payload[ticket]
        with contextlib.suppress(OSError):  # a dead worker is noticed by _listen, its job goes back to the queue
            worker.send(ticket, payload)

    def _listen(self, worker: process.Process) -> bool:
        """Takes in a worker's messages; False when it is gone or must be replaced."""
        messages = worker.receive()
        for message in messages or []:
            if "pid" in message and not worker.pid:
                worker.is_process(message["pid"])
            elif message.get("ready"):
                worker.ready, self._start_failures = True, 0
            elif worker.job is not None and message.get("started") == worker.job:
                worker.start_clocks()
            elif worker.job is not None and message.get("job") == worker.job:
                if message.get("fatal"):
                    return False
                self._learn(worker)
                ticket, worker.job = worker.job, None
                reward, status, detail = message["verdict"]
                self._finish(ticket, Verdict(reward, status, detail), "errors" if message.get("error") else None)
        return messages is not None

    def _overdue(self, worker: process.Process) -> str | None:
        if worker.ready and worker.job is None:
            return None
        worker.tick()
        if not worker.started:  # starting up, or importing the verifier's module
            return f"not ready after {process.START_SECONDS:g} s" if worker.idle > process.START_SECONDS else None
        cpu, wall, why = self._patience.limits(self._verifier[worker.job or 0])
        if worker.cpu > cpu:
            return f"no verdict after {cpu:g} s of CPU time{why}"
        return f"no verdict after {wall:g} s of waiting{why}" if worker.idle > wall else None

    def _learn(self, worker: process.Process) -> None:
        """How long a row took to its verdict; of quick ones it is not looked up."""
        if worker.started and time.monotonic() - worker.began > SLOW_SECONDS:
            worker.tick()
            self._patience.had_verdict(self._verifier[worker.job or 0], worker.cpu, worker.idle)

    def _replace(self, worker: process.Process, counter: str, reason: str) -> None:
        """A worker was lost: its row is tried once more, or unknown if it was before, or if it ran out of time."""
        with self._changed:
            self.counters[counter] += 1
            self.counters["replaced"] += 1
            if worker.job is not None:
                self._patience.ran_out(self._verifier[worker.job], worker.cpu, worker.idle)
            ticket = worker.job
            again = ticket in self._retried
            retry = ticket is not None and not again and not (counter == "timeouts" and worker.started)
            if ticket is not None and retry:
                self._retried.add(ticket)
                self._queue.appendleft(ticket)
        if ticket is not None and not retry:
            self._finish(ticket, unknown(f"{reason} (tried twice)" if again else reason))
        if not worker.ready:
            self._start_failures += 1
            if self._start_failures >= MAX_START_FAILURES:
                self._fail(f"reward workers cannot start: {reason}")

    def _fail(self, message: str) -> None:
        with self._changed:
            self._broken = message
            self._changed.notify_all()
