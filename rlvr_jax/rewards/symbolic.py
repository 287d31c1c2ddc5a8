"""Equality of parsed expressions: math-verify's judgement, with a veto where it is known to be too lenient."""

from typing import Any

FLOAT_TOLERANCE = 1e-5
EXACT_TOLERANCE = 1e-9
_SAMPLES = (("0.7310585", "1.2984712", "0.4142135"), ("1.6180339", "0.5772156", "2.2360679"))


def equal(gold: Any, said: Any) -> bool:
    """Gold first: math-verify is not symmetric (assignments, inequality against interval).

    Two kinds of wrong yes are vetoed: values that are far apart relative to their size (it compares with an absolute
    tolerance), and equations that it calls equal because it finds no solution to either.
    """
    import math_verify
    if not (finite(gold) and finite(said)):
        return False
    # Evaluating at points is quick and settles most unequal pairs; simplifying them takes seconds.
    if not _apart(gold, said) and math_verify.verify(gold, said, timeout_seconds=None):  # type: ignore[arg-type]
        return not _unsolved(gold, said)
    g, s = _imaginary(gold), _imaginary(said)
    return (g is not gold or s is not said) and not _apart(g, s) and math_verify.verify(g, s, timeout_seconds=None)  # type: ignore[arg-type]


def finite(e: Any) -> bool:
    """A value that can be compared: parsed, and neither undefined nor divided by zero."""
    import sympy
    return e is not None and e is not sympy.nan and e is not sympy.zoo and not (isinstance(e, sympy.Expr) and e.has(sympy.nan, sympy.zoo))


def _imaginary(e: Any) -> Any:
    """math-verify reads i as a variable; as the imaginary unit it is tried second."""
    import sympy
    names = [s for s in getattr(e, "free_symbols", ()) if s.name == "i"]
    return e.subs({s: sympy.I for s in names}) if names and isinstance(e, sympy.Expr) else e


def _apart(gold: Any, said: Any) -> bool:
    """Both are numbers or expressions, and differ when evaluated."""
    import sympy
    if not (isinstance(gold, sympy.Expr) and isinstance(said, sympy.Expr)):
        return False
    try:
        names = sorted(gold.free_symbols | said.free_symbols, key=str)
        if not names:
            return _far(gold.doit(), said.doit(), gold, said)
        if len(names) > 3 or _towers(gold) or _towers(said):
            return False
        points = [dict(zip(names, map(sympy.Float, values))) for values in _SAMPLES]
        return any(_far(gold.subs(p), said.subs(p), gold, said) for p in points)
    except Exception:
        return False


def _far(a: Any, b: Any, gold: Any, said: Any) -> bool:
    import sympy
    x, y = complex(a.evalf(30)), complex(b.evalf(30))
    size = max(abs(x), abs(y))
    tolerance = FLOAT_TOLERANCE if gold.has(sympy.Float) or said.has(sympy.Float) else EXACT_TOLERANCE
    # A percent sign is optional, so a factor of 100 is not "apart" here.
    ratios = (1, 100) if "UnevaluatedExpr" in sympy.srepr(gold) + sympy.srepr(said) else (1,)
    return size > 0 and all(abs(x * r - y) > tolerance * size * r and abs(x - y * r) > tolerance * size * r for r in ratios)


def _towers(e: Any) -> bool:
    import sympy
    return any(p.exp.has(sympy.Pow) for p in e.atoms(sympy.Pow))


def _unsolved(gold: Any, said: Any) -> bool:
    """Two equations that are no multiples of each other and have no (real) solution to be compared by."""
    import sympy
    if not (isinstance(gold, sympy.Eq) and isinstance(said, sympy.Eq)):
        return False
    try:
        ratio = sympy.simplify((gold.lhs - gold.rhs) / (said.lhs - said.rhs))
        if not ratio.free_symbols and ratio != 0:
            return False
        return not sympy.solve(gold, list(gold.free_symbols))
    except Exception:
        return False
