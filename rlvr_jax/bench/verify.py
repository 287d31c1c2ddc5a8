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
_PROSE = "We set up the equation and solve it step by step. First, 3 + 4 = 7, and then $x^2 - 5x + 6 = 0$. " * 12
_SYMBOLIC = ("\\frac{{{a}}}{{{b}}}", "{a}\\sqrt{{{b}}}", "({a}, {b})", "x^2 + {a}x + {b}", "{a}\\pi", "[{a}, {b})", "\\{{{a}, {b}, 99\\}}", "{a}\\%",
             "\\frac{{{a}+\\sqrt{{{b}}}}}{{2}}", "{a}{b}", "{a}.{b}", "-{a}/{b}")


def bench_verify(workers: int = 2, rows: int = 1200, repeat: int | None = None) -> Iterator[dict[str, Any]]:
    """Measures kinds of answers; yields one record each. The first pass over other rows warms the workers up.

    Keys: ``bench kind workers rows seconds verdicts_per_s cpu_s verdicts_per_cpu_s ok``; the CPU time is that of this process and
    its workers, and says what an idle machine would do where this one is busy (None without /proc). Kinds: ``integer``: boxed whole numbers behind prose;
    ``mixed``: in equal parts whole numbers, decimals, fractions, roots, tuples, intervals, sets, polynomials, half of them
    wrong; ``word``: option letters. Groups of 8 share a gold answer.
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
    return time.process_time() + sum(process.cpu_seconds(p)[0] for p in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    children = [int(p) for task in Path(f"/proc/{pid}/task").glob("*/children") for p in task.read_text().split()]
    return children + [p for child in children for p in _descendants(child)]
