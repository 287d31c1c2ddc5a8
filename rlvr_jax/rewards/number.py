"""Plain numbers: read exactly, compared exactly. The one place where two numbers are called equal."""

import re
from dataclasses import dataclass
from fractions import Fraction

SIGNIFICANT = 6
"""A decimal stands for an exact value that it is the correct rounding of, from this many significant digits on."""
_MAX_SCALE = 400

_DECIMAL = r"\d+(?:\.\d+)?"
_PLAIN = re.compile(rf"({_DECIMAL})(?:[eE]([-+]?\d{{1,3}}))?(?:\s*(?:\\cdot|\\times)\s*10\s*\^\s*(?:\{{\s*(-?\d{{1,3}})\s*\}}|(\d)))?")
_POWER_OF_TEN = re.compile(r"10\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(\d))")
_FRACTION = re.compile(rf"(?:\\frac\s*\{{\s*(-?{_DECIMAL})\s*\}}\s*\{{\s*(-?{_DECIMAL})\s*\}}|\(?\s*(-?{_DECIMAL})\s*\)?\s*/\s*\(?\s*(-?{_DECIMAL})\s*\)?)")
_MIXED = re.compile(r"(\d+)\s*(?:\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s(\d+)\s*/\s*(\d+))")
_OVERLINE = re.compile(r"(\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?|\((\d+)\))")
_BASED = re.compile(r"([0-9A-Za-z]+)\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(.*\d)\s*({'|'.join(_SCALES)})", re.IGNORECASE)


@dataclass(frozen=True)
class Number:
    """An exact value, and how it was written.

    Attributes:
      value: the value; of ``28%`` it is 28.
      places: digits after the decimal point where it was written as a decimal, else None.
      digits: significant digits of a decimal.
      percent: a percent sign was there.
      base: subscript of a number in another base; the value is then that of its digits' text.
    """

    value: Fraction
    places: int | None = None
    digits: int = 0
    percent: bool = False
    base: int | None = None

    def times(self, ratio: Fraction) -> "Number":
        """In another unit: exact, and still a rounded decimal where only the decimal point moves."""
        for power in range(-12, 13) if self.places is not None else ():
            if ratio == Fraction(10) ** power:
                return Number(self.value * ratio, (self.places or 0) - power, self.digits, self.percent)
        return Number(self.value * ratio, percent=self.percent)


@dataclass(frozen=True)
class Policy:
    """How numbers are compared: see :func:`rlvr_jax.rewards.math.verify`."""

    significant: int = SIGNIFICANT
    precision: int | None = None
    percent: str = "optional"

    def problem(self) -> str | None:
        """What is wrong with these settings, if anything."""
        if self.percent not in ("optional", "exact"):
            return f"percent is {self.percent!r}, expected optional or exact"
        for name, value, low in (("significant", self.significant, 1), ("precision", self.precision, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                return f"{name} is {value!r}, expected a whole number from {low} on"
        return None


DEFAULT = Policy()


class Improper(ValueError):
    """``5 9/4``: neither a mixed number nor anything else."""


def read(s: str) -> Number | None:
    """A normalised expression as a number; None if it is something else.

    Raises:
      Improper: an integer beside a fraction that is not below 1.
    """
    s = s.strip()
    percent = s.endswith("%")
    s = s.rstrip("% ").strip()
    sign = 1
    while s[:1] in "+-" and s:
        sign, s = (-sign if s[0] == "-" else sign), s[1:].strip()
    if not s or len(s) > 1000:
        return None
    if (based := _BASED.fullmatch(s)) and any(c.isdigit() for c in based.group(1)) and not percent:
        base = int(based.group(2))
        if not 2 <= base <= 16 or not based.group(1)[0].isdigit():
            return None
        try:
            return Number(Fraction(sign * int(based.group(1), base)), base=base)
        except ValueError:
            return None
    found = _repeating(s) or _unsigned(s)
    return None if found is None else Number(sign * found.value, found.places, found.digits, percent)


def _repeating(s: str) -> Number | None:
    """``0.1\\overline{6}``, ``0.1(6)``: exactly what they stand for."""
    if "." not in s or len(s) > 60:
        return None
    match = _OVERLINE.fullmatch(s)
    if match is None:
        return None
    whole, start, period = match.group(1), match.group(2), match.group(3) or match.group(4)
    scale = 10 ** len(start)
    return Number(Fraction(int(whole + start), scale) + Fraction(int(period), scale * (10 ** len(period) - 1)))


def _unsigned(s: str) -> Number | None:
    if scaled := _SCALED.fullmatch(s):
        inner = _unsigned(scaled.group(1).strip())
        return Number(inner.value * _SCALES[scaled.group(2).lower()]) if inner else None
    if plain := _PLAIN.fullmatch(s):
        mantissa, *exponents = plain.groups()
        exponent = sum(int(e) for e in exponents if e)
        if abs(exponent) > _MAX_SCALE:
            return None
        whole, _, places = mantissa.partition(".")
        digits = len((whole + places).lstrip("0"))
        return Number(Fraction(mantissa) * Fraction(10) ** exponent, len(places) - exponent if places else None, digits)
    if power := _POWER_OF_TEN.fullmatch(s):
        return Number(Fraction(10) ** int(power.group(1) or power.group(2)))
    if mixed := _MIXED.fullmatch(s):
        whole, *parts = (int(g) for g in mixed.groups() if g)
        if not 0 < parts[0] < parts[1]:
            raise Improper(s)
        return Number(whole + Fraction(parts[0], parts[1]))
    if fraction := _FRACTION.fullmatch(s):
        top, bottom = (Fraction(g) for g in fraction.groups() if g)
        return Number(top / bottom) if bottom else None
    return None


def equal(gold: Number, said: Number, policy: Policy = DEFAULT) -> bool:
    """Exact equality, with these readings allowed.

    A percent sign is optional: 28% is 28, and also 0.28. A decimal of at least :data:`SIGNIFICANT` digits equals the exact
    value that it rounds: 3.33333333 is 10/3, 33.3 is not 100/3. A missing base subscript means the gold's base, for its
    digits.
    """
    if gold.base != said.base:
        based, bare = (gold, said) if gold.base else (said, gold)
        return bool(based.base and not bare.base and bare.places is None and bare.value.denominator == 1
                    and _in_base(abs(int(based.value)), based.base) == str(abs(int(bare.value)))
                    and (based.value < 0) == (bare.value < 0))
    if gold.percent == said.percent:
        return _close(gold, said, policy)
    hundredth = Number((gold if gold.percent else said).value / 100)
    return (policy.percent == "optional" and _close(gold, said, policy)) or hundredth.value == (said if gold.percent else gold).value


def _in_base(value: int, base: int) -> str:
    digits = ""
    while value:
        value, rest = divmod(value, base)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[rest] + digits
    return digits or "0"


def _close(a: Number, b: Number, policy: Policy) -> bool:
    if a.value == b.value:
        return True
    decimals = [n for n in (a, b) if n.places is not None]
    if not decimals:
        return False
    rounded = min(decimals, key=lambda n: n.places or 0)
    places = rounded.places or 0
    if policy.precision is not None:
        places = min(places, policy.precision)
    elif rounded.digits < policy.significant:
        return False
    return abs(a.value - b.value) <= Fraction(1, 2) / Fraction(10) ** places
