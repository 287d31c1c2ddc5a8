"""Generated tasks: problems for learning without files.

A problem is a function of (seed, index, arguments) alone, so any position of the stream is reached without
replaying it. Prompts and worked solutions are short: a model of a million parameters reads and writes them.
"""

import difflib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvr_jax.data.rows import DataError


@dataclass(frozen=True)
class Problem:
    """``fields`` are what the verifier needs besides the answer; ``solution`` is a worked answer for a warm start;
    ``parts`` are for templates that word the prompt in their own way."""

    prompt: str
    answer: Any
    verifier: str
    solution: str
    fields: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)


def arithmetic(rng: random.Random, digits: Any = (1, 3), ops: str = "+-*", work: float = 1.0) -> Problem:
    """Two operands, each of ``digits`` = [least, most] digits; differences are never negative.

    The solution goes column by column from the right with carries (sums), borrows (differences), or by partial
    products, and ends in a box. ``work``: share of solutions that show this work, the others are the box alone.
    """
    low, high = _range("digits", digits, 1, 9)
    op = rng.choice(_ops(ops, "+-*"))
    a, b = (_number(rng, rng.randint(low, high)) for _ in range(2))
    if op == "-" and a < b:
        a, b = b, a
    answer = {"+": a + b, "-": a - b, "*": a * b}[op]
    steps = {"+": _add, "-": _subtract, "*": _multiply}[op](a, b) if _shown(rng, work) else []
    return Problem(f"{a}{op}{b}=?", str(answer), "math", "\n".join([*steps, f"\\boxed{{{answer}}}"]),
                   parts={"a": a, "op": op, "b": b})


def _number(rng: random.Random, digits: int) -> int:
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digits of both numbers from the right, the shorter one filled with zeros."""
    n = max(len(str(a)), len(str(b)))
    return list(zip(map(int, reversed(str(a).zfill(n))), map(int, reversed(str(b).zfill(n)))))


def _add(a: int, b: int) -> list[str]:
    steps, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return steps


def _subtract(a: int, b: int) -> list[str]:
    steps, borrow = [], 0
    for x, y in _columns(a, b):
        short = x - y - borrow < 0
        steps.append(f"{x}{'+10' if short else ''}-{y}{'-1' if borrow else ''}={x - y - borrow + 10 * short}")
        borrow = int(short)
    return steps


def _multiply(a: int, b: int) -> list[str]:
    if len(str(b)) > len(str(a)):  # fewer partial products
        a, b = b, a
    parts = [int(d) * 10**i for i, d in enumerate(reversed(str(b))) if d != "0"] or [0]
    steps = [f"{a}*{p}={a * p}" for p in parts]
    total = a * parts[0]
    for p in parts[1:]:
        steps.append(f"{total}+{a * p}={total + a * p}")
        total += a * p
    return steps


def countdown(rng: random.Random, numbers: Any = (3, 4), max_number: int = 20, max_target: int = 100,
              ops: str = "+-*/", work: float = 1.0) -> Problem:
    """``numbers`` = [least, most] numbers from 1 to ``max_number``, each to be used exactly once.

    Built from its own solution, so it is always solvable; every intermediate result is a positive integer. A share
    ``work`` of the solutions names them before the expression.

    Raises:
      DataError: no such problem exists (or is too rare to be found) for these arguments.
    """
    low, high = _range("numbers", numbers, 2, 6)
    ops = _ops(ops, "+-*/")
    if not all(isinstance(x, int) and x >= 1 for x in (max_number, max_target)):
        raise DataError(f"task countdown: max_number and max_target must be integers >= 1, found {max_number!r} and {max_target!r}")
    for _ in range(1000):
        drawn = [rng.randint(1, max_number) for _ in range(rng.randint(low, high))]
        built = _combine(rng, drawn, ops)
        if built is not None and built[0] <= max_target:
            target, expression, steps = built
            shown = ", ".join(map(str, rng.sample(drawn, len(drawn))))
            return Problem(
                f"Make {target} from {shown}.", str(target), "countdown",
                "\n".join([*(steps if _shown(rng, work) else []), f"<answer>{expression}</answer>"]),
                {"numbers": [int(x) for x in shown.split(", ")], "target": target})
    raise DataError(f"task countdown: found no solvable problem with numbers={numbers} max_number={max_number} max_target={max_target} ops='{ops}'; widen them")


def _combine(rng: random.Random, numbers: list[int], ops: str) -> tuple[int, str, list[str]] | None:
    """Joins random pairs until one value is left: (value, expression, steps), or None for a dead end."""
    items = [(n, str(n)) for n in numbers]
    steps = []
    while len(items) > 1:
        (x, ex), (y, ey) = (items.pop(rng.randrange(len(items))) for _ in range(2))
        if x < y:
            x, ex, y, ey = y, ey, x, ex
        legal = [o for o in ops if o in "+*" or (o == "-" and x > y) or (o == "/" and x % y == 0)]
        if not legal:
            return None
        op = rng.choice(legal)
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y}[op]
        steps.append(f"{x}{op}{y}={value}")
        expression = f"{ex}{op}{ey}"
        items.append((value, f"({expression})" if items else expression))
    return items[0][0], items[0][1], steps


NAMES = ("Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal")
Claim = tuple[str, int, int, bool, bool]
"""(kind, person, person, first is a knight, second is a knight) with kind: is, same, and, or. For 'same' the first
flag says whether the claim is 'same' or 'different'."""


def knights(rng: random.Random, people: Any = (2, 3), work: float = 0.0) -> Problem:
    """Knights tell the truth, knaves lie; everyone says one thing; exactly one assignment fits.

    ``people`` = [least, most], 2 to 4. Claims: is a knight/knave, are the same/different, and, or. A share ``work`` of the
    solutions tries the assignments in order, a line each: who would be a knight (T, F), then which claims would be
    true; the line where both agree is the answer.
    """
    low, high = _range("people", people, 2, 4)
    n = rng.randint(low, high)
    names = rng.sample(NAMES, n)
    while True:
        claims = [_claim(rng, speaker, n) for speaker in range(n)]
        solutions = [s for s in range(2**n) if all(holds(c, s) == bool(s >> i & 1) for i, c in enumerate(claims))]
        if len(solutions) == 1:
            break
    said = " ".join(f"{names[i]}: {_say(c, names)}." for i, c in enumerate(claims))
    parts = [f"{name} is a {'knight' if solutions[0] >> i & 1 else 'knave'}" for i, name in enumerate(names)]
    answer = f"{', '.join(parts[:-1])}, and {parts[-1]}."
    tried = range(2**n - 1, solutions[0] - 1, -1) if _shown(rng, work) else ()
    lines = [f"{_flags(s >> i & 1 for i in range(n))} {_flags(holds(c, s) for c in claims)}" for s in tried]
    return Problem(said, answer, "knights", "\n".join([*lines, answer]), {"names": list(names)})


def _flags(values: Iterable[int | bool]) -> str:
    return "".join("T" if v else "F" for v in values)


def _shown(rng: random.Random, work: Any) -> bool:
    if not isinstance(work, int | float) or not 0 <= work <= 1:
        raise DataError(f"task argument work is a share between 0 and 1, found {work!r}")
    return rng.random() < work


def _claim(rng: random.Random, speaker: int, n: int) -> Claim:
    kind = rng.choice(("is", "is", "same", "and", "or"))
    a, b = rng.sample(range(n), 2)
    if kind == "is" and a == speaker:  # a claim of one's own kind says nothing or is a paradox
        a = b
    return kind, a, b, rng.random() < 0.5, rng.random() < 0.5


def holds(claim: Claim, assignment: int) -> bool:
    """Whether a claim is true when bit i of ``assignment`` says that person i is a knight."""
    kind, a, b, first, second = claim
    x, y = bool(assignment >> a & 1), bool(assignment >> b & 1)
    if kind == "is":
        return x == first
    if kind == "same":
        return (x == y) == first
    left, right = x == first, y == second
    return (left and right) if kind == "and" else (left or right)


def _say(claim: Claim, names: list[str]) -> str:
    kind, a, b, first, second = claim
    x, y = (f"{names[p]} is a {'knight' if f else 'knave'}" for p, f in ((a, first), (b, second)))
    if kind == "is":
        return x
    if kind == "same":
        return f"{names[a]} and {names[b]} are {'the same' if first else 'different'}"
    return f"{x} {kind} {y}"


TASKS: dict[str, Callable[..., Problem]] = {"arithmetic": arithmetic, "countdown": countdown, "knights": knights}


def generate(task: str, seed: str | int, index: int, args: Mapping[str, Any] | None = None) -> Problem:
    """Problem ``index`` of the stream ``seed``.

    Raises:
      DataError: unknown task, unknown argument, or arguments that allow no problem.
    """
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=1, cutoff=0.0)[0]
        raise DataError(f"unknown task '{task}'; nearest: '{near}' (there are {', '.join(TASKS)})")
    make = TASKS[task]
    known = make.__code__.co_varnames[1:make.__code__.co_argcount]
    for name in args or {}:
        if name not in known:
            raise DataError(f"task {task}: unknown argument '{name}'; it has {', '.join(known)}")
    # A string seed is hashed by random itself (SHA-512), the same in every process.
    return make(random.Random(f"{task}/{seed}/{index}"), **(args or {}))


def _range(name: str, value: Any, least: int, most: int) -> tuple[int, int]:
    """``3`` or ``[2, 3]`` to (low, high) within bounds."""
    low, high = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if not (isinstance(low, int) and isinstance(high, int) and least <= low <= high <= most):
        raise DataError(f"task argument {name}: expected a number or [low, high] between {least} and {most}, found {value!r}")
    return low, high


def _ops(ops: Any, known: str) -> str:
    text = "".join(ops) if isinstance(ops, list | tuple) else ops
    if not isinstance(text, str) or not text or set(text) - set(known):
        raise DataError(f"task argument ops: expected some of '{known}', found {ops!r}")
    return text
