"""Answers in words: numbers written out, and short texts such as "Monday", "no solution", "Yes, because ..."."""

import re

_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {w: i for i, w in enumerate(_ONES)} | {w: 10 * i for i, w in enumerate(_TENS, 2)}
_SCALES = (("billion", 10**9), ("million", 10**6), ("thousand", 1000))
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4} | {
    w + s: n for n, w in enumerate(["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 3) for s in ("", "s")}
_LETTERS = re.compile(r"[A-Za-z][A-Za-z \-]{2,60}")
_SIGN = re.compile(r"(?<![\w)}\]])(?:minus|negative)\s+(?=[\d.$\\(])", re.IGNORECASE)
_ARTICLE = re.compile(r"^(?:(?:a|an|the)\s+)+", re.IGNORECASE)
_SYNONYMS = {"dne": "doesnotexist", "nosolutions": "nosolution", "notdefined": "undefined", "infinitesolutions": "infinitelymanysolutions"}

_FILLER = frozenset(["a", "an", "the", "on", "is", "are", "be", "was", "were", "at", "by", "to", "it", "its", "it's", "that", "that's", "this", "there", "there's", "answer", "so", "thus", "hence", "therefore", "equals"])
_DOUBT = re.compile(r"\b(?:not|never|neither|nor|or|either|maybe|perhaps|if|unless|unlikely|wrong|incorrect|false\s+that)\b|n['’]t\b", re.IGNORECASE)
_VERDICTS = frozenset(("yes", "no", "true", "false"))
_CLAUSE = re.compile(r"[,;:!?\n]|\.(?:\s|$)|\s[-–—]\s|\b(?:because|since|as|for|so)\b", re.IGNORECASE)
_ENDED = re.compile(r"[^,;.!?\n]{1,60}?(?:[.!?:;\n]|\s[-–—]\s|,?\s*\b(?:because|since|as|for|so)\b|$)", re.IGNORECASE)
MAX_SENTENCE = 300


def number(s: str) -> str | None:
    """``seventeen`` -> ``17``, ``two-thirds`` -> ``\\frac{2}{3}``, ``one hundred and five`` -> ``105``; None for other texts."""
    if not _LETTERS.fullmatch(s):
        return None
    parts = [w for w in re.split(r"[\s-]+", s.lower()) if w != "and"]
    if len(parts) >= 2 and (bottom := _PARTS.get(parts[-1])) is not None:
        top = 1 if parts[:-1] in (["a"], ["an"]) else _whole(parts[:-1])
        return None if top is None else rf"\frac{{{top}}}{{{bottom}}}"
    if parts == ["half"]:
        return r"\frac{1}{2}"
    value = _whole(parts)
    return None if value is None else str(value)


def _whole(parts: list[str]) -> int | None:
    total = 0
    for word, scale in _SCALES:
        if word in parts:
            at = parts.index(word)
            group = _group(parts[:at])
            if not group:
                return None
            total, parts = total + group * scale, parts[at + 1:]
    rest = _group(parts) if parts or not total else 0
    return None if rest is None else total + rest


def _group(parts: list[str]) -> int | None:
    """Below a thousand."""
    if len(parts) > 1 and parts[1] == "hundred":
        rest = _group(parts[2:]) if parts[2:] else 0
        return None if rest is None or rest > 99 or not 0 < _VALUES.get(parts[0], 0) < 10 else 100 * _VALUES[parts[0]] + rest
    values = [_VALUES.get(w, -1) for w in parts]
    if len(values) == 2 and values[0] >= 20 and 0 < values[1] < 10:
        return values[0] + values[1]
    return values[0] if len(values) == 1 and values[0] >= 0 else None


def signs(text: str) -> str:
    """``minus 7`` as ``-7``; between two terms it is the operator anyway."""
    return _SIGN.sub("-", text)


def fold(text: str) -> str:
    """Case, punctuation, articles and a few synonyms away; '' when nothing is left."""
    folded = re.sub(r"[^a-z0-9]+", "", _ARTICLE.sub("", text.strip().casefold()))
    return _SYNONYMS.get(folded, folded)


def stated(region: str, gold: str, marked: str | None) -> bool:
    """Does a response without a box give the text answer ``gold``?

    Args:
      region: the response's final region.
      gold: the text.
      marked: what follows its last "answer is", or None.

    The first clause after the marker decides; without a marker a response of few words, a leading yes/no/true/false, or
    the end of its last sentence ("It falls on a Monday."), unless that sentence doubts or denies.
    """
    wanted = fold(gold)
    if marked is not None:
        return _clause(marked) == wanted or fold(_sentence(marked)) == wanted
    region = region.strip().strip("*_#`\"' ")
    if _clause(region) == wanted and (wanted in _VERDICTS or _ENDED.match(region[:MAX_SENTENCE])):
        return wanted in _VERDICTS or not _DOUBT.search(region[len(gold) + 2:])
    last = _sentence(region.splitlines()[-1], last=True) if region else ""
    if _DOUBT.search(last) and not _DOUBT.search(gold):
        return False
    said, tail = re.findall(r"[\w'’]+", last.casefold()), re.findall(r"[\w'’]+", gold.casefold())
    if fold(last) == wanted:
        return True
    return len(said) > len(tail) > 0 and said[-len(tail):] == tail and said[-len(tail) - 1] in _FILLER


def _clause(text: str) -> str:
    text = text.strip().strip("*_#`\"' ")
    return fold(_CLAUSE.split(text[:MAX_SENTENCE], maxsplit=1)[0])


def _sentence(text: str, last: bool = False) -> str:
    parts = [p for p in re.split(r"(?<=[.!?])\s+|\n", text.strip()[-MAX_SENTENCE:] if last else text.strip()[:MAX_SENTENCE]) if p.strip()]
    return parts[-1 if last else 0].strip(" .!?*_`\"'") if parts else ""
