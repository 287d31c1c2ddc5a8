"""Lists, tuples, assignments and texts: the outer shape of a canonical expression, compared part by part."""

import re
from collections.abc import Callable

from rlvr_jax.rewards import relations, words
from rlvr_jax.rewards.latex import squeezed

Equal = Callable[[str, str], bool]

MAX_ELEMENTS = 60
_OPEN, _CLOSE = "([{", ")]}"
_NAME = re.compile(
    r"\s*(?:\\text\s*\{[^{}]*\}|\\?[A-Za-z]+(?:_\{?[\w,]+\}?)?'{0,3}(?:\s*\(\s*\\?[a-z](?:,\s*[a-z])*\s*\))?|[A-Za-z]'{0,3}\s*\([^()=]*\)|m?\s*\\(?:angle|triangle)\s*[A-Z]{1,3}"
    r"|\\(?:overline|vec|hat|overrightarrow|mathbf)\s*\{\w+\}|\|[A-Z]{2}\||\[[A-Z]{3,6}\]|\(\s*\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:,\s*\\?[a-zA-Z]+(?:_\{?\w+\}?)?)*\s*\)"
    r"|[A-Z](?:_\{\w+\})?:[A-Z](?:_\{\w+\})?|[A-Z]_\{[A-Z]+\}:[A-Z])\s*")
_MEMBER = re.compile(r"^\s*\\?[A-Za-z]\w*\s*\\in(?![a-z])\s*")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])")
_INTERVAL = re.compile(r"\\cup|^\s*[(\[].*[)\]]\s*$")
_TEXT = re.compile(r"\\text\{([^{}]*)\}|\(?([A-Za-z][A-Za-z' -]*[A-Za-z])\)?")
_FUNCTION = re.compile(r"\\[a-z]+|[A-Za-z]\d|[A-Za-z]\(")


def text_of(s: str) -> str | None:
    """A word answer (``\\text{even}``, ``Even``, ``\\text{(C)}``), case and punctuation folded; None for mathematics."""
    if s.strip() in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return "nosolution"
    match = _TEXT.fullmatch(s.strip())
    if not match:
        return None
    said = match.group(1) if match.group(1) is not None else match.group(2)
    if match.group(1) is None and not re.search(r"[A-Za-z]{3}", said):
        return None  # xy is a product, p - q a difference
    return words.fold(said) or None


def split(s: str, separator: str = ",") -> list[str]:
    """Parts at the top level of brackets; [] for a single one."""
    parts, depth, start = [], 0, 0
    i = 0
    while i < len(s):
        if s.startswith(("\\begin", "\\end"), i):
            depth += 1 if s[i + 1] == "b" else -1
        elif s[i] in _OPEN:
            depth += 1
        elif s[i] in _CLOSE:
            depth -= 1
        elif s[i] == separator and depth == 0 and not (separator == "=" and i and s[i - 1] in "<>!:"):
            parts.append(s[start:i])
            start = i + 1
        i += 1
    parts.append(s[start:])
    return [p.strip() for p in parts] if len(parts) > 1 else []


def equal(gold: str, said: str, single: Equal, ordered: bool = False) -> bool:
    """Equality of any two expressions, down to ``single`` for plain ones; lists count as sets unless ``ordered``."""
    (gold, gold_modulus), (said, said_modulus) = relations.modulus(gold), relations.modulus(said)
    if gold_modulus and said_modulus and gold_modulus != said_modulus:
        return False
    gold, said = relations.ascending(gold), relations.ascending(said)
    if _both_equations(gold, said, single):
        return True
    gold_named, said_named = _assignments(gold), _assignments(said)
    if len(gold_named) > 1 and len(said_named) > 1 and len(set(gold_named)) == len(gold_named):
        if set(gold_named) == set(said_named):
            return all(equal(gold_named[k], said_named[k], single) for k in gold_named)
    elif len(gold_named) == len(said_named) == 1 and _differ(*gold_named, *said_named):
        return False
    gold, said = _united(gold, said)
    gold_relation = _is_relation(gold) and re.search(r"[a-zA-Z]", gold) is not None
    gold, said = value(gold, chain=not re.search(r"[a-zA-Z]", gold)), value(said, chain=not gold_relation)
    if gold_relation and not _RELATION.search(gold) and not _is_relation(said):
        return False
    g, s = elements(gold), elements(said)
    if len(g) > 1 and len(s) > 1:
        return _in_order(g, s, single) if ordered else _same_set(g, s, single)
    pairs = _tuple(gold), _tuple(said)
    if pairs[0] and pairs[1]:
        same = pairs[0][0] == pairs[1][0] or (len(pairs[0][1]) > 2 and {pairs[0][0], pairs[1][0]} == {"[]", "()"})
        return same and _in_order(pairs[0][1], pairs[1][1], single)
    if pairs[0] and len(s) > 1:
        return (pairs[0][0] == "()" or len(s) > 2) and _in_order(pairs[0][1], s, single)
    vectors = _vector(gold), _vector(said)
    for pair, vector in ((pairs[0], vectors[1]), (pairs[1], vectors[0])):
        if pair and vector and pair[0] == "()":
            return _in_order(*((pair[1], vector) if pair is pairs[0] else (vector, pair[1])), single)
    if max(len(g), len(s)) > 1 and not (pairs[0] or pairs[1]):
        return False
    if ":" in gold and ":" in said:
        return relations.same_ratio(gold, said, single)
    return single(gold, said)


def _both_equations(gold: str, said: str, single: Equal) -> bool:
    """Two plain equations as equations; their names may matter (``y - 2x = 3`` against ``y = 2x + 3``)."""
    plain = all(len(split(e, "=")) == 2 and not split(e) for e in (gold, said))
    if not plain:
        return False
    sides = split(gold, "="), split(said, "=")
    if all(_NAME.fullmatch(side) for e in sides for side in e):
        return {squeezed(x) for x in sides[0]} == {squeezed(x) for x in sides[1]}
    return not (_NAME.fullmatch(sides[0][0]) and _NAME.fullmatch(sides[1][0])) and single(gold, said)


def _united(gold: str, said: str) -> tuple[str, str]:
    """Two bounds on one variable as an interval, where the other side is one or has two bounds as well."""
    g, s = relations.interval(split(gold)), relations.interval(split(said))
    if g and (s or _INTERVAL.search(said)):
        return g, s or said
    chain = re.fullmatch(r"(.+?)(<|\\le)(.+?)(<|\\le)(.+)", gold)
    if s and chain:
        return f"{'(' if chain[2] == '<' else '['}{chain[1].strip()}, {chain[5].strip()}{')' if chain[4] == '<' else ']'}", s
    return gold, said


def _assignments(s: str) -> dict[str, str]:
    """Name -> value when every top-level part is ``name = value`` with a name of its own."""
    found: dict[str, str] = {}
    for part in split(s) or [s]:
        sides = split(part, "=")
        if len(sides) != 2 or not _NAME.fullmatch(sides[0]) or sides[0] in found:
            return {}
        found[sides[0]] = sides[1]
    return found


def _differ(gold: str, said: str) -> bool:
    """Two plain variables with different names; f(x) and y, or words, may stand for each other."""
    plain = re.compile(r"\\?[a-z](?:_\{?\w+\}?)?|\\[a-z]+")
    return gold != said and bool(plain.fullmatch(gold) and plain.fullmatch(said))


def _is_relation(s: str) -> bool:
    """An equation or inequality that does not merely name a value."""
    if _RELATION.search(s):
        return True
    sides = split(s, "=")
    return len(sides) == 2 and not _NAME.fullmatch(sides[0]) and not split(s)


def value(s: str, chain: bool = True) -> str:
    """What an expression says a name is: right side of an assignment, last member of a chain, exact side of ``\\approx``.

    Args:
      s: canonical expression.
      chain: also take the right side of an equation without a name (``2 + 2 = 4`` stands for 4).
    """
    s = _MEMBER.sub("", s)
    if "\\approx" in s:
        left, right = s.split("\\approx", 1)
        s = right if _NAME.fullmatch(left) or not left.strip() else left
    parts = split(s)
    if not parts:
        sides = split(s, "=")
        if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]) and sides[0] and not _RELATION.search(s):
            return sides[0]  # 5 = x
        take = sides and all(sides[1:]) and (len(sides) > 2 or _NAME.fullmatch(sides[0]) or chain)
        return sides[-1] if take and not _RELATION.search(s) else s
    values = [value(p) if len(v := split(p, "=")) == 2 and _NAME.fullmatch(v[0]) else p for p in parts]
    return ", ".join(v.strip() for v in values)


def elements(s: str) -> list[str]:
    """Members of a list or set, ``\\pm`` written out."""
    inner = s
    if braces := re.fullmatch(r"\\\{(.*)\\\}|\{(.*)\}", s):
        body = braces.group(1) or braces.group(2) or ""
        inner = body if _balanced(body) else s
    members = []
    for part in split(inner) or [inner]:
        if "\\pm" in part and part.count("\\pm") == 1 and not split(part, "="):
            members += [part.replace("\\pm", sign).strip().removeprefix("+").strip() for sign in "+-"]
        else:
            members.append(part)
    return [m.strip() for m in members if m.strip()]


def _tuple(s: str) -> tuple[str, list[str]] | None:
    """Brackets and members of ``(1, 2)``, ``[0, 9)``, of a point ``A(1, 2)``; None for anything else."""
    s = s.strip()
    s = s[1:].strip() if re.match(r"[A-Z]\s*\(", s) else s
    if len(s) < 3 or s[0] not in "([" or s[-1] not in ")]" or not _balanced(s[1:-1]):
        return None
    members = split(s[1:-1])
    return (s[0] + s[-1], members) if members else None


def _vector(s: str) -> list[str] | None:
    """Components of a column or row vector."""
    match = re.fullmatch(r"\\begin\{[pbB]matrix\}(.*)\\end\{[pbB]matrix\}", s.strip())
    if not match or "\\begin" in match[1]:
        return None
    rows = [r.strip() for r in match[1].split("\\\\") if r.strip()]
    parts = rows if all("&" not in r for r in rows) else rows[0].split("&") if len(rows) == 1 else []
    return [p.strip() for p in parts] if len(parts) > 1 else None


def _balanced(s: str) -> bool:
    depth = 0
    for c in s:
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth < 0:
            return False
    return depth == 0


def _in_order(gold: list[str], said: list[str], single: Equal) -> bool:
    return len(gold) == len(said) <= MAX_ELEMENTS and all(equal(g, s, single) for g, s in zip(gold, said))


def _same_set(gold: list[str], said: list[str], single: Equal) -> bool:
    """Every member of each list has an equal one in the other; repeats do not count."""
    if max(len(gold), len(said)) > MAX_ELEMENTS:
        return False
    left = list(dict.fromkeys(squeezed(g) for g in gold))
    right = list(dict.fromkeys(squeezed(s) for s in said))
    common = set(left) & set(right)
    if len(right) > 2 * len(left) + 2:
        return False  # a list of guesses
    left, right = [g for g in left if g not in common], [s for s in right if s not in common]
    return all(any(equal(g, s, single) for s in right or common) for g in left) and \
        all(any(equal(g, s, single) for g in left or common) for s in right)
