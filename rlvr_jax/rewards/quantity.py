"""Units that are known, what they are worth in one another, and when two answers carry units that clash."""

import functools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """Powers of its dimensions, sorted by name, and its factor to their base units."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction


def _names() -> dict[str, Unit]:
    """Spellings; those with capital letters are told apart from small ones (mW, MW), words of four letters and more are not."""
    inch, minute, day, pound = Fraction(254, 10_000), 60, 86_400, Fraction("453.59237")
    simple: dict[str, tuple[tuple[int | Fraction, str], ...]] = {
        "length": ((1, "m meter metre"), (Fraction(1, 10**6), "um micrometer micrometre"), (Fraction(1, 1000), "mm millimeter millimetre"), (Fraction(1, 100), "cm centimeter centimetre"),
                   (1000, "km kilometer kilometre"), (inch, "inch inches"), (12 * inch, "ft foot feet"), (36 * inch, "yd yard"), (63_360 * inch, "mi mile")),
        "mass": ((Fraction(1, 1000), "mg milligram"), (1, "g gram"), (1000, "kg kilogram"), (pound, "lb lbs"), (pound / 16, "oz ounce")),
        "time": ((Fraction(1, 1000), "ms millisecond"), (1, "s sec secs second"), (minute, "min mins minute"), (60 * minute, "h hr hrs hour"), (day, "day"), (7 * day, "week")),
        "calendar": ((1, "month"), (12, "year")),
        "money": ((1, "dollar"), (Fraction(1, 100), "cent")),
        "degree": ((1, "degree"),), "radian": ((1, "radian"),), "celsius": ((1, "°C"),), "fahrenheit": ((1, "°F"),),
        "voltage": ((1, "V volt"), (1000, "kV")), "amount": ((1, "mol"),), "electronvolt": ((1, "eV"),),
        "frequency": ((1, "Hz hertz"), (1000, "kHz"), (10**6, "MHz"), (10**9, "GHz")), "energy": ((1, "J joule"), (1000, "kJ")), "force": ((1, "N newton"), (1000, "kN")),
        "power": ((1, "W watt"), (1000, "kW"), (10**6, "MW")), "pressure": ((1, "Pa pascal"), (1000, "kPa")),
    }
    out = {name: Unit(((dimension, 1),), Fraction(factor)) for dimension, units in simple.items() for factor, names in units for name in names.split()}
    for name in ("L", "l", "liter", "litre"):
        out[name] = Unit((("length", 3),), Fraction(1, 1000))
    for name in ("mL", "ml", "milliliter", "millilitre"):
        out[name] = Unit((("length", 3),), Fraction(1, 10**6))
    for name, length in (("mph", "mile"), ("kmh", "km"), ("kph", "km")):
        out[name] = _times(out[length], _power(out["hour"], -1))
    return out | {name + "s": unit for name, unit in out.items() if len(name) > 2 and name.isalpha() and not name.endswith("s")}


def _power(unit: Unit, n: int) -> Unit:
    return Unit(tuple((d, p * n) for d, p in unit.dimensions), unit.factor**n)


def _times(a: Unit, b: Unit) -> Unit:
    powers = dict(a.dimensions)
    for dimension, p in b.dimensions:
        powers[dimension] = powers.get(dimension, 0) + p
    return Unit(tuple(sorted((d, p) for d, p in powers.items() if p)), a.factor * b.factor)


_NAMES = _names()
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_PART = re.compile(r"(sq(?:uare)?\.?\s+|cubic\s+)?([A-Za-z°]+)\.?(?:\s*\^?\s*\(?(-?[1-4])\)?)?")


@functools.lru_cache(maxsize=4096)
def read(words: str) -> Unit | None:
    """``\\text{ cm}^2``, ``meters per second``, ``\\frac{\\text{m}}{\\text{s}}``, ``sq. ft.`` as a unit; None for anything else."""
    s = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", words.replace("\\mu", "u"))
    s = re.sub(r"\bu\s+(?=m\b)", "u", re.sub(r"[{}~]|\\[,;: ]", "", _FRACTION.sub(r"\1/\2", s)))
    total: Unit | None = None
    for i, part in enumerate(re.split(r"\s*/\s*|\s+per\s+|\s+an?\s+", s.strip(" .,;"))):
        match = _PART.fullmatch(part.strip())
        name = match[2] if match else ""
        unit = _NAMES.get(name) or (_NAMES.get(name.lower()) if len(name) > 3 else None)
        if match is None or unit is None:
            return None
        unit = _power(unit, (int(match[3]) if match[3] else 2 if (match[1] or "").startswith("sq") else 3 if match[1] else 1) * (-1 if i else 1))
        total = unit if total is None else _times(total, unit)
    return total


def unlike(a: Unit | None, b: Unit | None) -> bool:
    """Whether both are known, and not the same. Degrees may be those of an angle or of any temperature."""
    kinds = [{d for d, _ in unit.dimensions} for unit in (a, b) if unit]
    return a is not None and b is not None and a != b and not ({"degree"} in kinds and any(k & {"celsius", "fahrenheit"} for k in kinds))


def of(dropped: Iterable[str]) -> Unit | None:
    """The unit among what was taken off an answer; None if none is known, or several are."""
    known = {unit for words in dropped if (unit := read(words)) is not None}
    return known.pop() if len(known) == 1 else None
