"""Knights and knaves: who is what? Every person must be named, and the last statement about each decides."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlvr_jax.rewards import clean, extract
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong

PAIRS = (("knight", "knave"), ("sage", "fool"), ("saint", "sinner"), ("angel", "devil"), ("hero", "villain"),
         ("altruist", "egoist"), ("pioneer", "laggard"), ("truth-teller", "liar"), ("truthteller", "liar"))
MAX_PEOPLE = 50
WINDOW = 10_000
"""Characters read, from the end: the last statement decides."""

_ROLE = "|".join(sorted({r for p in PAIRS for r in p}, key=len, reverse=True))
_GOLD = re.compile(rf"([^\W\d_][\w'-]*)\s*(?:\bis\b|:|=|-)?\s*(?:\b(?:a|an|the)\b)?\s*\b({_ROLE})\b", re.IGNORECASE)
_HYPOTHESIS = re.compile(r"\b(?:if|suppose|assume|assuming|supposing|whether)\b[^.;\n]*"
    r"|\b(?:says?|said|claims?|claimed|states?|stated|asserts?)\b(?:(?!,?\s{0,3}\b(?:so|therefore|thus|hence|which|meaning)\b)[^.;\n])*", re.IGNORECASE)
_HEDGED = re.compile(r"\b(?:either|or|could|might|may|maybe|perhaps|possibly|not\s+the\s+case|(?:is|are)\s+(?:false|wrong|impossible)|contradict\w*)\b", re.IGNORECASE)


def verify(text: str, answer: Any, *, names: Iterable[str] | None = None, **_: Any) -> Verdict:
    """Compares the roles a response gives to all people with the solution.

    Args:
      text: the response; its last answer tag or box if there is one, else all of it. "A is a knight", "A: knave",
        "A is not a knave", "A and B are knights" are read; clauses with if, suppose, assume, what somebody says,
        and sentences with either, or, might, "is false" are not statements. Liar and truth-teller are roles too.
      answer: the solution as text ("Oliver is a knight, and Ethan is a knave."), as a mapping from name to role (or to
        True for the truthful role), or as a list of roles or booleans in the order of ``names``.
      names: people; needed for lists only.

    Returns:
      ok when every person has the right role; wrong when one is missing, wrong, or called both in one sentence;
      unknown when the solution cannot be read.
    """
    gold = solution(answer, names)
    if not gold:
        return unknown(f"knights: no roles in the solution {answer!r}")
    region = extract.final_region(text)
    if region is None:
        return wrong("the final answer is empty or unterminated")
    said = statements(_HYPOTHESIS.sub(" ", clean.texts(region[0][-WINDOW:])), list(gold), set(gold.values()))
    for name, role in gold.items():
        if said.get(name) != role:
            return wrong(f"{name}: {said.get(name) or 'not stated'}, solution {role}")
    return ok("; ".join(f"{n} {r}" for n, r in gold.items()))


def solution(answer: Any, names: Iterable[str] | None = None) -> dict[str, str]:
    """Lower-case name -> lower-case role of a solution in any form; empty if it cannot be read."""
    people = [str(n).lower() for n in names] if names is not None else []
    if isinstance(answer, str):
        found: dict[str, str] = {}
        for name, role in _GOLD.findall(answer):
            if found.setdefault(name.lower(), role.lower()) != role.lower():
                return {}
        return found if not people or set(people) == set(found) else {}
    if isinstance(answer, Mapping):
        return _roles([str(n).lower() for n in answer], list(answer.values()))
    if isinstance(answer, Iterable) and people:
        return _roles(people, list(answer))
    return {}


def _roles(people: list[str], values: list[Any]) -> dict[str, str]:
    known = {r for p in PAIRS for r in p}
    roles = [str(v).lower() if isinstance(v, str) else PAIRS[0][0 if v else 1] for v in values]
    fits = len(people) == len(roles) <= MAX_PEOPLE and len(set(people)) == len(people) and set(roles) <= known
    return dict(zip(people, roles)) if fits else {}


def statements(text: str, people: list[str], used: set[str]) -> dict[str, str]:
    """Name -> role by the last statement; 'both' where one sentence calls a person two things."""
    pair = next(p for p in PAIRS if used & set(p))
    other = {pair[0]: pair[1], pair[1]: pair[0]}
    name = "|".join(sorted(map(re.escape, people), key=len, reverse=True))
    plain = {**{r: r for r in pair}, "truth-teller": pair[0], "truthteller": pair[0], "liar": pair[1]}
    claim, listing = _patterns(name, "|".join(map(re.escape, plain)))
    said: dict[str, str] = {}
    for sentence in re.split(r"[.;\n]", text):
        claims = [(m["who"], plain[m["role"].lower()], bool(m["no"] or m["not"]), bool(m["more"])) for m in claim.finditer(sentence)]
        claims = claims or [(m["who"], plain[m["role"].lower()], False, False) for m in listing.finditer(sentence)]
        here: dict[str, str] = {}
        for who, role, negated, more in claims if not _HEDGED.search(sentence) else ():
            meant = "both" if more else other[role] if negated else role
            for person in re.findall(rf"\b(?:{name})\b", who.lower()):
                here[person] = meant if here.get(person, meant) == meant else "both"
        said.update(here)
    return said


def _patterns(name: str, role: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """``A (and B) is not a knight``, and ``knights: A, B``. Every repetition is bounded: the text is hostile."""
    group = rf"\b(?:{name})\b(?:\W{{1,6}}(?:and\W{{1,4}})?\b(?:{name})\b){{0,{MAX_PEOPLE}}}"
    mark = r"[\s*_\"'`()|]{0,5}"
    verb = r"\b(?:is|are|was|were|must\s+be|has\s+to\s+be)\b"
    deny = r"\b(?:(?:is|are|was|were)n['’]?t|(?:is|are)\s+not|can(?:not|['’]t)\s+be)\b"
    link = rf"(?:(?P<no>{deny})|{verb}|['’]s\b|:|=+>?|[-–—]+>?|→)?"
    adverbs = r"(?:(?:both|all|indeed|therefore|definitely|also|actually|thus|certainly)\s+){0,3}"
    claim = rf"(?P<who>{group}){mark}{link}{mark}{adverbs}(?P<not>not\s+)?(?:(?:a|an|the)\s+)?{mark}\b(?P<role>{role})s?\b(?P<more>\s*(?:/|\band\b)\s*(?:an?\s+)?(?:{role})\b)?"
    listing = rf"\b(?P<role>{role})s?\b{mark}(?:are|is|:|=){mark}(?P<who>{group})"
    return re.compile(claim, re.IGNORECASE), re.compile(listing, re.IGNORECASE)
