"""Inequalities and ratios in one form each: chains ascend, bounds on one variable become an interval, moduli stand apart."""

import re
from collections.abc import Callable
from fractions import Fraction

from rlvr_jax.rewards import number

Equal = Callable[[str, str], bool]

_STEP = re.compile(r"(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))")
_FLIP = {">": "<", "\\ge": "\\le"}
_BOUND = re.compile(r"\s*(.+?)\s*(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))\s*(.+?)\s*")
_VARIABLE = re.compile(r"\\?[a-zA-Z]+|[a-zA-Z]_\{?\w+\}?")
_MODULUS = re.compile(r"\s*\\pmod\{(\w+)\}$")
_CLOCK = re.compile(r"\s*\d{1,2}:\d\d(?::\d\d)?\s*([ap]\.?m\.?)?\s*", re.IGNORECASE)


def ascending(s: str) -> str:
    """``3 > x > 1`` as ``1 < x < 3``; single relations and mixed chains stay."""
    parts = _STEP.split(s)
    if len(parts) < 5 or not all(p in _FLIP for p in parts[1::2]):
        return s
    turned = [_FLIP.get(p, p.strip()) for p in parts[::-1]]
    return " ".join(turned)


def interval(bounds: list[str]) -> str | None:
    """``x > 1, x < 3`` as ``(1, 3)``, ``x < 1, x > 3`` as the union outside; None for anything but two numeric bounds on one variable."""
    if len(bounds) != 2:
        return None
    found = [_bound(b) for b in bounds]
    if found[0] is None or found[1] is None or found[0][0] != found[1][0] or found[0][1] == found[1][1]:
        return None
    above, below = sorted((found[0], found[1]), key=lambda b: b[1])  # False first: the lower bound
    low, high = number.read(above[3]), number.read(below[3])
    if low is None or high is None or low.value == high.value:
        return None
    if low.value < high.value:
        return f"{'(' if above[2] else '['}{above[3]}, {below[3]}{')' if below[2] else ']'}"
    return rf"(-\infty, {below[3]}{')' if below[2] else ']'}\cup {'(' if above[2] else '['}{above[3]}, \infty)"


def _bound(s: str) -> tuple[str, bool, bool, str] | None:
    """(variable, from above?, strict?, number)."""
    match = _BOUND.fullmatch(s)
    if not match or len(_STEP.findall(s)) != 1:
        return None
    left, sign, right = match.groups()
    strict, less = sign in "<>", sign in ("<", "\\le")
    if _VARIABLE.fullmatch(left):
        return left, less, strict, right
    return (right, not less, strict, left) if _VARIABLE.fullmatch(right) else None


def modulus(s: str) -> tuple[str, str | None]:
    """A residue and its modulus: ``x \\equiv 3 \\pmod{7}`` is ``x = 3`` and 7."""
    match = _MODULUS.search(s)
    return (s[: match.start()].replace("\\equiv", "="), match.group(1)) if match else (s, None)


def same_ratio(gold: str, said: str, single: Equal) -> bool:
    """``7:32``: part by part, or in proportion; clock times (``12:00``) only part by part, their am or pm if both have one."""
    halves = [m.group(1) for e in (gold, said) if (m := _CLOCK.fullmatch(e)) and m.group(1)]
    if len(halves) == 2 and halves[0][0].lower() != halves[1][0].lower():
        return False
    g, s = (re.sub(r"\s*[ap]\.?m\.?\s*$", "", e, flags=re.IGNORECASE).split(":") for e in (gold, said))
    if len(g) == len(s) and all(single(a.strip(), b.strip()) for a, b in zip(g, s)):
        return True
    if len(g) != len(s) or any(_CLOCK.fullmatch(e) for e in (gold, said)):
        return False
    if len(g) == 2:
        return single("/".join(f"({x.strip()})" for x in g), "/".join(f"({x.strip()})" for x in s))
    values = [[number.read(x.strip()) for x in e] for e in (g, s)]
    if any(v is None for e in values for v in e):
        return False
    first, second = ([Fraction(v.value) for v in e if v is not None] for e in values)
    return all(a * second[0] == b * first[0] for a, b in zip(first, second)) and first[0] * second[0] != 0
