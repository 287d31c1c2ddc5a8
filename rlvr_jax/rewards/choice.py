"""Multiple choice: one letter A–J, or a numbered label such as ``answer2``."""

import re
from typing import Any

from rlvr_jax.rewards import clean, extract
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong

WINDOW = 20_000
"""Characters read, from the end."""

_LABEL = re.compile(r"\b(answer|option|choice|ending|solution)\s?_?([1-9]\d?)\b", re.IGNORECASE)
_WORDS = ("true", "false", "yes", "no")
_MARKER = re.compile(
    r"\b(?:answer|choice|option)\b\s*(?:\((?:final|letter)\))?[\s*_]*(?:is|are|was|should\s+be|must\s+be|would\s+be|:|=)"
    r"|\b(?:correct|right|best)\s+(?:answer|choice|option|one)\b[\s*_]*(?:is|:|=)?", re.IGNORECASE)
_LETTER = re.compile(r"(?<![\w'’\\])([A-J])(?![\w'’])")
_WRAPPED = re.compile(r"\(\s*([A-Ja-j])\s*\)|\*\*\s*\(?([A-Ja-j])\)?[.:]?\s*\*\*|\[\s*([A-J])\s*\]")
_ALONE = re.compile(r"[\s(\[{*_\"'`$]*([A-Ja-j])[\s)\]}*_\"'`$.:,;!]*")
_LEADING = re.compile(r"[\s(\[*_]*([A-J])[)\]*_]*(?:[.:),]|\s*$|\s*\n)")
_OUT = re.compile(r"[\s)\]*.]*(?:is|are|was|would\s+be|can|seems)?\s*(?:n[o']t\b|not\b|also\s+wrong|wrong|incorrect|false|ruled\s+out|eliminated|out\b|impossible|fails?\b)", re.IGNORECASE)
_NO_OPTION = re.compile(r"(?:\d|°|\bvitamin|\bpoint|\bhepatitis|\btype|\bgrade|\bfigure|\btable)\s*$", re.IGNORECASE)
_NEGATED = re.compile(r"(?:\bnot|n[’']t(?:\s+be)?|\bneither|\bnor|\brather\s+than|\binstead\s+of|\bbe)\s+(?:option\s+|choice\s+)?[(*]*$", re.IGNORECASE)
_HEDGE = re.compile(r"[\s)*\]]*(?:,|/|&|\bor\b|\band\b)\s*(?:or\s+|and\s+)?[(*\[]*([A-J])(?![\w'’])")
_EITHER = re.compile(r"(?<![\w'’])[A-J][)*\]]*\s*(?:/|&|\bor\b|\band\b)\s*[(*\[]*$")


def verify(text: str, answer: Any, **_: Any) -> Verdict:
    """Compares the chosen option with the gold one.

    Args:
      text: the response. Reasoning block ignored; then its last box, answer tag, "answer is X" / "Answer: X", a leading
        "X.", else the last standalone capital letter A–J. The article "a" and the pronoun "I" are no choices, and neither
        is a letter that is ruled out ("not B"). "A or B" is no choice at all: wrong.
      answer: a letter, also as "(C) Cecile" or inside a sentence; or a label such as ``answer2``; or true/false/yes/no.

    Returns:
      unknown when the gold names no option.
    """
    gold = str(answer).strip() if isinstance(answer, str) else ""
    if label := _label(gold):
        said = _chosen_label(text, label)
        return ok(label) if said == label else wrong(f"{said or 'no label'}, gold {label}")
    letter = chosen(gold)
    if letter is None:
        return unknown(f"choice: the gold answer {answer!r} names no option A-J")
    said = chosen(text)
    return ok(letter) if said == letter else wrong(f"{said or 'no choice'}, gold {letter}")


def chosen(text: str) -> str | None:
    """The letter a text settles on, or None."""
    region = extract.final_region(text)
    if region is None:
        return None
    source = _plain(region[0])
    if (region[1] or len(source) < 20) and _several(source):
        return None
    if alone := _ALONE.fullmatch(source):
        return alone.group(1).upper()
    for marker in reversed(list(_MARKER.finditer(source))):
        if (found := _first(source[marker.end(): marker.end() + 300])) is not None:
            return found or None
    lines = [m.group(1) for line in source.splitlines() if (m := _LEADING.match(line))]
    if len(set(lines)) == 1 and _LEADING.match(source.lstrip()) and not _HEDGE.match(source, _LEADING.match(source.lstrip()).end(1)):  # type: ignore[union-attr]
        return lines[0]
    if first := re.match(r"([A-J])\s+(?![a-z=])", source.lstrip()):
        return first.group(1)
    return _last(source)


def _plain(source: str) -> str:
    """TeX wrappers, box commands and dollar signs off."""
    return clean.texts(source[-WINDOW:]).replace("$", " ").replace("\\(", "(").replace("\\)", ")").replace("\\left", "").replace("\\right", "")


def _usable(source: str, match: re.Match[str]) -> bool:
    """False for the article A, the pronoun I, and letters that are ruled out."""
    after = source[match.end(): match.end() + 20]
    before = source[max(0, match.start() - 40): match.start()]
    if _NEGATED.search(before) or _OUT.match(after) or _NO_OPTION.search(before) or re.match(r"\s*=", after):
        return False
    if match.group(1) == "I":
        return not re.match(r"\s+[a-z]|[’']", after)
    if match.group(1) == "A":
        return not re.match(r"\s+(?!because|since|as\b|is\b|for\b|which|that\b|and\b|or\b|due|so\b|but\b|not\b|in\b)[a-z]", after)
    return True


def _several(source: str) -> bool:
    """A short answer in a box or tag that is nothing but two or more different letters."""
    if len(source) > 60 or re.search(r"(?i)\bnot\b|n['’]t\b", source) or re.search(r"[a-z]{2}", re.sub(r"and|or|text", "", source)):
        return False
    return len(set(re.findall(r"(?<![A-Za-z])[A-J](?![A-Za-z])", source))) > 1


def _first(segment: str) -> str | None:
    """First choice after a marker; '' when it hedges between several; None when there is none."""
    if lower := re.match(r"[\s*:]*\(?([a-j])\)?[\s*.]*(?:$|\n|[.,;](?:\s|$))|[\s*:]*\(([a-j])\)", segment):
        return (lower.group(1) or lower.group(2)).upper()
    for match in _LETTER.finditer(segment):
        if _usable(segment, match):
            hedge = _HEDGE.match(segment, match.end())
            return "" if hedge and hedge.group(1) != match.group(1) and not re.match(r"\s+[a-z]", segment[hedge.end():]) \
                else match.group(1)
    # "The answer is A valve": the article reading left nothing, so the letter reading stands.
    if bare := re.match(r"[\s*:(]*([A-J])\b", segment):
        return bare.group(1)
    return None


def _last(source: str) -> str | None:
    wrapped = [next(g for g in m.groups() if g).upper() for m in _WRAPPED.finditer(source)
               if not _NEGATED.search(source[max(0, m.start() - 40): m.start()])]
    if wrapped:
        return wrapped[-1]
    letters = [m for m in _LETTER.finditer(source) if _usable(source, m)]
    if not letters or _EITHER.search(source[: letters[-1].start()]):
        return None
    return letters[-1].group(1)


def _label(gold: str) -> str | None:
    if match := _LABEL.fullmatch(gold):
        return f"{match.group(1).lower()}{int(match.group(2))}"
    return gold.lower() if gold.lower() in _WORDS else None


def _chosen_label(text: str, gold: str) -> str | None:
    region = extract.final_region(text)
    if region is None:
        return None
    source = _plain(region[0])
    if gold in _WORDS:
        return _word(source)
    stem = gold.rstrip("0123456789")
    if number := re.fullmatch(r"\s*\(?([1-9]\d?)\)?\.?\s*", source):
        return f"{stem}{int(number.group(1))}"
    found = [f"{kind.lower()}{int(n)}" for kind, n in _LABEL.findall(source)]
    marked = [m for m in re.finditer(r"\b(?:answer|choice|option)\s*(?:is|:)\s*", source, re.IGNORECASE)]
    if marked and (after := _LABEL.search(source, marked[-1].end())):
        return f"{stem}{int(after.group(2))}"
    if marked and (bare := re.match(r"[\s(*\"']*([1-9]\d?)[)*.\"']*(?:\s|$)", source[marked[-1].end():])):
        return f"{stem}{int(bare.group(1))}"
    return found[-1] if found else None


def _word(source: str) -> str | None:
    """true/false/yes/no: after the last marker, else the first word, else the last one that is not denied."""
    pattern = re.compile(rf"(?<![\w'’])({'|'.join(_WORDS)})(?![\w'’])", re.IGNORECASE)
    for marker in reversed(list(_MARKER.finditer(source))):
        if found := pattern.match(source, marker.end() + len(re.match(r"[\s*_:\"'(]*", source[marker.end():]).group())):  # type: ignore[union-attr]
            return found.group(1).lower()
    if found := pattern.match(source.lstrip(" \n*_\"'(")):
        return found.group(1).lower()
    said = [m for m in pattern.finditer(source) if not re.search(r"(?:\bnot|n['’]t)\s*$", source[max(0, m.start() - 8): m.start()])]
    return said[-1].group(1).lower() if said and len(said) == len(pattern.findall(source)) else None
