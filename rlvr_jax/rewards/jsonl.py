"""Scoring a JSONL file: what ``rlvr-jax verify`` prints."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rlvr_jax.rewards import registry
from rlvr_jax.rewards.pool import Job, Pool
from rlvr_jax.rewards.verdict import Verdict, unknown

AHEAD = 64
"""Rows in flight; a file may be larger than memory."""


class PoolConfig(Protocol):
    """The config section ``pool``."""

    @property
    def workers(self) -> int: ...
    @property
    def cpu_seconds(self) -> float: ...
    @property
    def wall_seconds(self) -> float: ...
    @property
    def memory_mb(self) -> int: ...


def verify_file(path: str | os.PathLike[str], pool: PoolConfig, on_broken: Callable[[str], None] = lambda detail: None) -> Iterator[dict[str, Any]]:
    """Scores rows ``{task, gold, answer, numbers?, target?, ...}``, where ``answer`` is the response and ``gold`` the solution
    (countdown: ``numbers`` and ``target`` stand for it); ``task`` is a verifier, one's own as ``module:function``.

    Args:
      path: JSONL file; ``-`` is standard input.
      pool: the config section ``pool``.
      on_broken: told of every row that cannot be used.

    Yields:
      ``{"status", "reward", "detail"}`` per row, in order. A row that cannot be used gives unknown, its detail starts
      with the line number. Blank lines are no rows.

    Raises:
      ConfigError: the file cannot be read.
    """
    try:
        stdin = path == "-"
        file = open(0 if stdin else path, "rb", closefd=not stdin)  # noqa: SIM115 (closed below, after the error is told)
    except OSError as e:
        raise registry.config_error(f"'{path}' cannot be read: {e.strerror}") from None
    waiting: deque[tuple[int, int | Verdict]] = deque()
    with file, Pool(pool.workers, pool.cpu_seconds, pool.wall_seconds, pool.memory_mb) as workers:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            job = _job(line)
            waiting.append((number, workers.submit(job) if isinstance(job, Job) else unknown(job)))
            if len(waiting) >= AHEAD:
                yield _result(workers, *waiting.popleft(), on_broken)
        while waiting:
            yield _result(workers, *waiting.popleft(), on_broken)


def _job(line: bytes) -> Job | str:
    try:
        row = json.loads(line)
    except ValueError as e:
        return f"no JSON ({e})"
    if not isinstance(row, dict):
        return f"expected an object with task, gold and answer, found {type(row).__name__}"
    missing = [k for k in ("task", "gold", "answer") if k not in row and not (k == "gold" and row.get("task") == "countdown")]
    if missing:
        return f"missing {', '.join(missing)}"
    task, text = row["task"], row["answer"]
    if task not in registry.BUILTIN and not (isinstance(task, str) and ":" in task):
        return f"unknown task {task!r}, expected one of {', '.join(registry.BUILTIN)} or module:function"
    if not isinstance(text, str):
        return f"'answer' must be a string, found {type(text).__name__}"
    fields = {k: v for k, v in row.items() if k not in ("task", "gold", "answer", "text")}
    return Job(task, text, row.get("gold", ""), fields)


def _result(workers: Pool, number: int, ticket: int | Verdict, on_broken: Callable[[str], None]) -> dict[str, Any]:
    bad_row = isinstance(ticket, Verdict)
    verdict = ticket if isinstance(ticket, Verdict) else workers.collect([ticket])[0]
    detail = f"line {number}: {verdict.detail}" if bad_row else verdict.detail
    if bad_row:
        on_broken(detail)
    return {"status": verdict.status, "reward": verdict.reward, "detail": detail}
