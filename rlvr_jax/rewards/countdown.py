"""Countdown: combine the given numbers, each exactly once, with + - * / to reach the target."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from rlvr_jax.rewards import extract
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong

MAX_EXPRESSION = 500
MAX_DEPTH = 50
MAX_DIGITS = 15

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SYMBOLS = str.maketrans({"×": "*", "·": "*", "∗": "*", "⋅": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_LATEX = [(r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""), (r"\,", " "), (r"\ ", " "),
          (r"\(", ""), (r"\)", ""), (r"\[", ""), (r"\]", ""), ("$", ""), ("`", ""), ("**", " ** ")]
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_INTRODUCTION = re.compile(r"^\s*(?:[A-Za-z]+\s+){0,4}[A-Za-z]+\s*:\s*")
_RUN = re.compile(r"[-(\d][-+*/()=.\d\s]*[)\d]")


class _Rejected(ValueError):
    """The text is no allowed expression; the message says why."""


def verify(text: str, answer: Any = None, *, numbers: Iterable[Any] | None = None, target: Any = None,
           nums: Iterable[Any] | None = None, **_: Any) -> Verdict:
    """Checks an expression over ``numbers`` that must equal ``target``.

    Args:
      text: the response; its last ``<answer>`` tag, last box, or last line is read. An optional ``= target`` may follow.
      answer: the target where ``target`` is None; or a mapping with ``numbers`` (or ``nums``) and ``target``.
      numbers: the multiset to use, each number exactly once (``nums`` is an alias).
      target: the value to reach; compared as exact fractions.

    Returns:
      ok, wrong, or unknown when numbers or target are missing or are no numbers. Nothing is ever evaluated as code:
      an AST of + - * / and unary minus over integer literals is the whole language; ``×``, ``÷``, ``−`` and their
      LaTeX commands and ``x`` between numbers are read as these, ``2(3+4)`` as a product; of ``a = b = target`` the first
      side is the answer, and every side must be the target.
    """
    if isinstance(answer, Mapping):
        numbers = numbers if numbers is not None else answer.get("numbers", answer.get("nums"))
        target = target if target is not None else answer.get("target")
    numbers = nums if numbers is None else numbers
    target = answer if target is None else target
    try:
        given = Counter(_number(n) for n in numbers) if numbers is not None else Counter()
        goal = _number(target)
    except (TypeError, ValueError):
        return unknown(f"countdown needs numbers and a numeric target, got numbers={numbers!r} target={target!r}")
    if not given:
        return unknown("countdown needs a non-empty 'numbers'")
    try:
        source = expression(text, goal)
        used: Counter[Fraction] = Counter()
        value = _evaluate(source, used)
    except (_Rejected, ZeroDivisionError, RecursionError) as e:
        return wrong(str(e) or type(e).__name__)
    if used != given:
        return wrong(f"{source}: uses {_listed(used)}, given {_listed(given)}")
    return ok(f"{source} = {goal}") if value == goal else wrong(f"{source} = {value}, target {goal}")


def _number(x: Any) -> Fraction:
    if isinstance(x, bool) or x is None or len(str(x)) > 2 * MAX_DIGITS:
        raise ValueError(f"no number: {x!r}")
    return Fraction(str(x).strip())


def _listed(numbers: Counter[Fraction]) -> list[str]:
    return sorted(str(n) for n in numbers.elements())


def expression(text: str, goal: Fraction) -> str:
    """The final expression of a response, normalised, without ``= target``.

    Raises:
      _Rejected: no expression, too long, or an equation whose other side is not the target.
    """
    tagged = extract.final_region(text)
    if tagged is None:
        raise _Rejected("the final answer is empty or unterminated")
    region, explicit = tagged
    lines = [line for line in region.splitlines() if line.strip()]
    while len(lines) > 1 and not explicit and not re.search(r"\d", lines[-1]):
        lines.pop()  # a closing phrase
    if not lines:
        raise _Rejected("no answer")
    source = region if explicit and len(lines) == 1 else lines[-1]
    if len(source) > MAX_EXPRESSION:
        raise _Rejected(f"expression longer than {MAX_EXPRESSION} characters")
    source = _normalise(source)
    if explicit:
        source = _INTRODUCTION.sub("", source)
    else:
        runs = [r for r in _RUN.findall(source) if any(c in r for c in "+-*/=")]
        if not runs:
            raise _Rejected(f"no expression in the last line: {lines[-1]}")
        source = runs[-1]
    return _without_target(source.strip().rstrip(".").strip(), goal)


def _normalise(source: str) -> str:
    source = source.translate(_SYMBOLS).strip().removeprefix("**").removesuffix("**")
    source = re.sub(r"(?<=[\d)])\s*[xX]\s*(?=[\d(])", "*", source)
    while (reduced := _FRACTION.sub(r"((\1)/(\2))", source)) != source:
        source = reduced
    for old, new in _LATEX:
        source = source.replace(old, new)
    return source


def _without_target(source: str, goal: Fraction) -> str:
    sides = [s.strip() for s in source.split("=")]
    if len(sides) == 1:
        return source
    if len(sides) > 2:
        return _chain(sides, goal)
    if len(sides) == 2:
        for expr, value in (sides, sides[::-1]):
            if re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", value) and Fraction(value) == goal:
                return expr
    raise _Rejected(f"equation does not end in the target {goal}: {source}")


def _chain(sides: list[str], goal: Fraction) -> str:
    """``(8 - 3) * 2 = 5 * 2 = 10``: the first side, if every side is the target."""
    for side in sides[:MAX_DEPTH]:
        if _evaluate(side, Counter()) != goal:
            raise _Rejected(f"{side} is not the target {goal}")
    return sides[0]


def _evaluate(source: str, used: Counter[Fraction]) -> Fraction:
    """Value of an expression; adds every literal to ``used``.

    Raises:
      _Rejected: anything but integer literals, + - * /, unary minus and parentheses.
      ZeroDivisionError: as it says.
    """
    if not re.fullmatch(r"[-+*/().\d\s]+", source):
        raise _Rejected(f"only digits, + - * / and parentheses are allowed: {source}")
    depth = peak = 0
    for c in source:
        depth += (c == "(") - (c == ")")
        peak = max(peak, depth)
    if peak > MAX_DEPTH:
        raise _Rejected(f"parentheses nest deeper than {MAX_DEPTH}")
    try:
        tree = ast.parse(re.sub(r"(?<=[\d)])\s*(?=\()", "*", " ".join(source.split())), mode="eval")
    except (SyntaxError, ValueError, MemoryError):
        raise _Rejected(f"no valid expression: {source}") from None
    return _node(tree.body, used)


def _node(node: ast.AST, used: Counter[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = _number(node.value)
        used[value] += 1
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_node(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _node(node.left, used), _node(node.right, used)
        return Fraction(_OPERATORS[type(node.op)](left, right))
    raise _Rejected("only + - * /, unary minus and parentheses over the given numbers are allowed")
