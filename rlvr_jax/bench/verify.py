"""``rlvr-jax bench verify``: verdicts a second of the worker pool on answers as models write them."""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr_jax.rewards import Job, Pool, process

GROUP = 8
"""Responses to one prompt, as in a step of group-relative training: they share the gold answer."""
HANGING_ROWS, DEADLINE = 60, 3.0
_PROSE = "We set up the equation and solve it step by step. First, 3 + 4 = 7, and then $x^2 - 5x + 6 = 0$. " * 12
_SYMBOLIC = ("\\frac{{{a}}}{{{b}}}", "{a}\\sqrt{{{b}}}", "({a}, {b})", "x^2 + {a}x + {b}", "{a}\\pi", "[{a}, {b})", "\\{{{a}, {b}, 99\\}}", "{a}\\%",
             "\\frac{{{a}+\\sqrt{{{b}}}}}{{2}}", "{a}{b}", "{a}.{b}", "-{a}/{b}")


def bench_verify(workers: int = 2, rows: int = 1200, repeat: int | None = None) -> Iterator[dict[str, Any]]:
    """Measures kinds of answers; yields one record each. The first pass over other rows warms the workers up.

    Keys: ``bench kind workers rows seconds verdicts_per_s cpu_s verdicts_per_cpu_s ok``; the CPU time is that of this process and
    its workers, and says what an idle machine would do where this one is busy (None without /proc). Kinds: ``integer``: boxed whole numbers behind prose;
    ``mixed``: in equal parts whole numbers, decimals, fractions, roots, tuples, intervals, sets, polynomials, half of them
    wrong; ``word``: option letters. Groups of 8 share a gold answer. ``sleeping`` and ``computing``: integers, 5% of which hang so, under a
    ``deadline_s`` of 3; their time should be within a second of it, where the machine has a core for each worker.
    """
    with Pool(workers) as pool:
        for kind in ("integer", "mixed", "word"):
            pool.score(_jobs(kind, 4 * GROUP * workers, start=10_000))
            passes, right = [], 0
            for attempt in range(repeat or 3):
                jobs = _jobs(kind, rows, start=attempt * rows)
                start, cpu = time.perf_counter(), _cpu_seconds()
                right = sum(v.status == "ok" for v in pool.score(jobs))
                passes.append((time.perf_counter() - start, _cpu_seconds() - cpu))
            seconds, cpu = sorted(passes)[len(passes) // 2]
            yield {"bench": "verify", "kind": kind, "workers": workers, "rows": rows, "seconds": seconds, "verdicts_per_s": rows / seconds,
                   "cpu_s": cpu or None, "verdicts_per_cpu_s": rows / cpu if cpu else None, "ok": right}
    yield from (_bench_hanging(kind, workers) for kind in ("sleeping", "computing"))


def sleeping(text: str, answer: str) -> bool:
    while True:
        time.sleep(1.0)


def computing(text: str, answer: str) -> bool:
    while True:
        pass


def _bench_hanging(kind: str, workers: int) -> dict[str, Any]:
    jobs = _jobs("integer", HANGING_ROWS, start=0)
    for i in range(7, HANGING_ROWS, 20):
        jobs[i] = Job(f"{__name__}:{kind}", jobs[i].text, jobs[i].answer)
    with Pool(workers, cpu_seconds=DEADLINE, wall_seconds=DEADLINE) as pool:
        pool.score(_jobs("integer", 4 * GROUP * workers, start=10_000))
        start, cpu = time.perf_counter(), _cpu_seconds()
        verdicts = pool.score(jobs)
        seconds = time.perf_counter() - start
        return {"bench": "verify", "kind": kind, "workers": workers, "rows": HANGING_ROWS, "seconds": seconds, "deadline_s": DEADLINE,
                "cpu_s": _cpu_seconds() - cpu or None, "unknown": sum(v.status == "unknown" for v in verdicts), "ok": sum(v.status == "ok" for v in verdicts)}


def _jobs(kind: str, rows: int, start: int) -> list[Job]:
    jobs = []
    for prompt, sample in itertools.product(range((rows + GROUP - 1) // GROUP), range(GROUP)):
        n = start + prompt
        a, b = 2 + n % 83, 3 + n % 89
        if kind == "word":
            jobs.append(Job("choice", f"{_PROSE}\nThe answer is ({'ABCD'[(n + sample) % 4]}).", "ABCD"[n % 4]))
            continue
        form = "{a}{b}" if kind == "integer" else _SYMBOLIC[n % len(_SYMBOLIC)]
        said = form.format(a=a + sample % 2, b=b)  # every second one is wrong
        jobs.append(Job("math", f"{_PROSE}\nThe answer is $\\boxed{{{said}}}$.", form.format(a=a, b=b)))
    return jobs[:rows]


def _cpu_seconds() -> float:
    return time.process_time() + _of_children(os.getpid())


def _of_children(pid: int) -> float:
    """CPU seconds of all processes below this one, and of those that these have waited for."""
    children = [int(p) for task in Path(f"/proc/{pid}/task").glob("*/children") for p in task.read_text().split()]
    return sum(process.cpu_seconds(p, ended_too=True)[0] + _of_children(p) for p in children)
