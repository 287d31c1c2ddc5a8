"""The final mathematical answer of a response, and the answer inside a gold solution, as one expression."""

import re

from rlvr_jax.rewards import clean, extract, words

_GSM = re.compile(r"####\s*(?=[-+]?[$\\(]?\s*[\d.\\(])")
_BE = (r"(?:(?:is|are|was|were|equals)\b(?!n)|:|=|(?:would|will|must|should|has\s+to|turns?\s+out\s+to|comes?\s+out\s+to)\s+be\b"
       r"|comes?\s+(?:out\s+)?to\b|works\s+out\s+to\b)")
_HEDGES = (r"(?:(?:therefore|thus|hence|simply|clearly|exactly|approximately|about|roughly|around|just|only|indeed|then|now|also|equal\s+to"
           r"|obviously|given\s+by|found\s+to\s+be)\b[\s,:*_]*){0,4}")
_ANSWER = re.compile(rf"(?:\banswer\b|答案)(?:\s+to\s+[^.:\n]{{1,80}}?)?[\s*_]*(?:{_BE}|[是为])[\s*_:]*{_HEDGES}", re.IGNORECASE)
_DENIED = re.compile(r"(?:not|never|neither|nor)\b|n['’]t\b", re.IGNORECASE)
_BEFORE_DENIED = re.compile(
    r"(?:\b(?:not|never|nor|than|except|unlike|instead\s+of|rather\s+than)|n['’]t)(?:\s+(?:be|equal\s+to|exactly|the\s+answer))?[\s:*_$\\(]*$", re.IGNORECASE)
_RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\s+to\s+(-?\d+(?:\.\d+)?)")
_ENV = re.compile(
    r"(?<!\\)\$\$(?P<a>(?:[^$\\]|\\.|\$(?!\$))+)\$\$|(?<!\\)\$(?P<b>(?:[^$\\]|\\.)+)\$|(?<!\\)\\\[(?P<c>(?:[^\\]|\\(?!\]))+)\\\]"
    r"|(?<!\\)\\\((?P<d>(?:[^\\]|\\(?!\)))+)\\\)", re.DOTALL)
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|pct\b|percentage\b)", re.IGNORECASE)
_LINK = re.compile(r"[\s,;]*(?:\\text\s*\{\s*)?(?:,|;|and|or|\\quad|\s)*(?:\}\s*)?")
_NUMBER = re.compile(
    r"(?<![\w.,])[-+−]?\s?[$€£]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\s+\d+/\d+|\d+,\d{1,2}(?![\d,])|\d*\.?\d+(?:[eE][-+]?\d+)?)(?:\s*/\s*\d+(?:\.\d+)?)?(?:\s*(?:\\?%|percent\b|pct\b))?")
_SENTENCE = re.compile(r"(?<=[^\d\s])\.(?=\s|$)|\.\s+(?=[A-Z<])|\.$|\n|[!?](?=\s[A-Z])")
_IS = re.compile(r"\b(?:is|are|equals|be)\b[\s:]*", re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$", re.MULTILINE)
_BOLD = re.compile(r"(?<![\w)*])\*\*(?![\s*])([^*\n]+)\*\*(?![\w*])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_KNOWN = frozenset(re.findall(r"\w+", """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt lim max min gcd lcm mod pi inf
    infinity oo det and or theta alpha beta gamma delta lambda omega phi cm mm km kg mg ml ft lb mph degrees
    degree percent pct percentage units unit dollars cents hours minutes seconds days inches feet miles meters
    million billion thousand base"""))
_RETRACTION = re.compile(r"\b(?:not|wait|but|actually|instead|wrong|no|then|so|first|check|hence|therefore|thus|gives?)\b|[.!?:=](?:\s|$)", re.IGNORECASE)
_JOINER = re.compile(r"\b(?:and|or)\b|,|;")
_LONE = re.compile(r"\s*\\?[A-Za-z]+(?:\s*\(\s*[a-z]\s*\))?\s*|\s*[A-Za-z]_\{?\w\}?\s*")
_HALF_DAY = re.compile(r"\s?[ap]\.?m\b\.?", re.IGNORECASE)
_CLOCK = re.compile(r"\d{1,2}:\d\d(?:\s?[ap]\.?m\.?)?", re.IGNORECASE)
_FORMULA = re.compile(r"\d\s*[-+*/^_=:,<>|)\]}]\s*[\w\\({\[]|[(\[{\\^_=<>|]")
_BARE = re.compile(r"[-+(]?[a-z]{1,2}\^\{?\d+\}?[-+a-z0-9^*/(){}]{0,40}")
MAX_BETWEEN = 70
MAX_WORDS = 5
WINDOW = 4000
"""Characters searched for a formula or number after a marker, or at the end of a text without one."""


def of_response(text: str) -> str | None:
    """The expression a response ends in, or None: see :func:`response`."""
    return response(text)[0]


def response(text: str) -> tuple[str | None, bool]:
    """The expression a response ends in; None when there is none, or when its final box or tag is empty or not closed.

    The flag says that it stands in a box (True too for an unusable box or tag: then words outside do not count either).

    Order: the last answer tag narrows the text; then the last box (boxes joined by "and" or commas count as one answer);
    the last of ``####`` and "answer is"; the last formula or number.
    """
    shown = extract.visible(text)
    tag = extract.answer_tag(shown)
    region = shown if tag is None else tag
    boxes = extract.boxes(region)
    if boxes:
        return _joined(region, boxes) or None, True
    if not region.strip():
        return None, True
    region = plain(region)
    segment = marked(region)
    if segment is not None:
        return _leading(segment[:WINDOW]) if segment else None, False
    return _trailing(region), False


def plain(region: str) -> str:
    """Without Markdown's bold and code marks, and with signs for "minus" and "negative"."""
    region = _BOLD.sub(r"\1", region)
    if "`" in region:
        region = _FENCE.sub("", region).replace("`", "")
    return words.signs(region)


def marked(region: str) -> str | None:
    """What follows the last of ``####`` and "answer is" that does not deny ("the answer is not 8"); None without one."""
    found = [*_GSM.finditer(region), *(m for m in _ANSWER.finditer(region) if not _DENIED.match(region, m.end()))]
    if not found:
        return None
    last = max(found, key=lambda m: m.end())
    segment = region[last.end():].strip()
    return segment.splitlines()[0] if last.re is _GSM and segment else segment


def of_gold(gold: str) -> str | None:
    """The expression in a gold answer: its boxes, what follows ``####``, its formulas, or all of it; None for prose."""
    gold = clean.characters(gold).strip()
    boxes = extract.boxes(gold)
    if boxes:
        return _joined(gold, boxes) or None
    if "####" in gold:
        gold = gold.rpartition("####")[2].strip()
    gold = re.split(r",?\s*\$?\s*\bwhere\b", gold)[0].strip()
    if (found := _env_group(gold)) is not None and not is_expression(gold):
        return found
    return gold if words.number(gold) or is_expression(gold) or not _prose(gold) else None


def is_expression(text: str) -> bool:
    """Mathematics from end to end: no words but functions, constants, units and text commands."""
    if len(text) > 2000 or not text.strip():
        return False
    bare = re.sub(r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}(?:\{[clr|]*\})?|\\q?quad|\b[0-9A-F]+_\{?1[1-6]\b", " ", text)
    return all(w.lower() in _KNOWN for w in _WORD.findall(_COMMAND.sub(" ", bare)))


def _prose(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", _COMMAND.sub(" ", text))) > 1 and not re.match(r"\W*\d", text)


def _joined(text: str, boxes: list[tuple[int, int, str | None]]) -> str:
    """Content of the last box, preceded by the boxes that belong to the same answer; equal ones count once."""
    content = (boxes[-1][2] or "").strip()
    if not content:
        return ""
    parts = [content + _percent_after(text, boxes[-1][1])]
    for (_, end, before), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1]):
        between = text[end:start]
        words = re.sub(r"\\text\s*\{([^{}]*)\}|\\q?quad|[$\\()\[\]]", r" \1 ", between)
        if not before or len(between) > MAX_BETWEEN or not _JOINER.search(words) or _RETRACTION.search(words) or len(words.split()) > 6:
            break
        parts.insert(0, before.strip())
    unique = list(dict.fromkeys(parts))
    return ", ".join(unique)


def _percent_after(text: str, end: int) -> str:
    return "\\%" if re.match(r"\s*\$?\s*(?:\\?%|percent\b|pct\b)", text[end: end + 20], re.IGNORECASE) else ""


def _leading(segment: str) -> str | None:
    """The expression right after "answer is", else the one that its sentence ends in."""
    segment = re.split(r"\n\s*\n", segment.strip().lstrip("*_ "))[0].strip()
    segment = clean.environments(segment).strip("*_ ")
    if is_expression(segment) and len(segment) < 300 and segment.count("\n") == 0:
        return segment
    if match := _ENV.match(segment):
        return _env_group(segment, first=True) if match else None
    sentence = _first_sentence(segment)
    if is_expression(sentence):
        return sentence
    tokens: list[str] = []
    for token in sentence.split():
        if not is_expression(token) or (token in ("a", "I", "A") and not tokens):
            break
        tokens.append(token)
    lead = " ".join(tokens).strip(" ,;:*_")
    if lead and re.search(r"\d|\\", lead) and "$" not in lead:
        return lead
    return _after_is(sentence) or _trailing(sentence)


def _first_sentence(text: str) -> str:
    position = 0
    while match := _SENTENCE.search(text, position):
        before = text[: match.start()]
        # A full stop inside $...$ does not end the sentence.
        if before.count("$") % 2 == 0 and before.strip():
            return before.strip(" *_")
        position = match.end()
        if match.end() == match.start():
            break
    return text.strip(" *_")


def _after_is(sentence: str) -> str | None:
    for match in reversed(list(_IS.finditer(sentence))):
        rest = sentence[match.end():].strip(" *_.")
        if rest and is_expression(rest) and re.search(r"[\d\\]|^[A-Za-z]$|^[a-z][-+*/^]", rest):
            return rest
    return None


def _trailing(text: str) -> str | None:
    """The last formula or number of a text."""
    text = clean.environments(text.strip().strip("*_ ")[-WINDOW:])
    lines = [line.strip(" *_") for line in text.splitlines() if line.strip(" *_")]
    if not lines:
        return None
    if (span := _RANGE.fullmatch(lines[-1].strip(" ."))) or all(_NUMBER.fullmatch(line) for line in lines):
        return ":".join(span.groups()) if span else ", ".join(lines)
    for whole in (" ".join(lines), lines[-1]):
        if is_expression(whole) and len(whole) < 300 and len(_ENV.findall(whole)) < 2:
            return whole
    if (found := _after_is(re.split(r"(?<=[^\d])\.\s", lines[-1].rstrip("."))[-1])) and not _ENV.search(found):
        return found
    env = list(_ENV.finditer(text))
    useful = [m for m in env if not _LONE.fullmatch(next(g for g in m.groups() if g))] or env
    masked = _ENV.sub(lambda m: " " * len(m.group()), text)
    numbers = [m for m in _NUMBER.finditer(masked) if not _BEFORE_DENIED.search(masked[max(0, m.start() - 40): m.start()])]
    useful = [m for m in useful if not _BEFORE_DENIED.search(text[max(0, m.start() - 40): m.start()])]
    if useful and (not numbers or numbers[-1].end() <= useful[-1].end()):
        return _env_group(text, until=useful[-1].end())
    if numbers:
        return _whole_token(masked, numbers[-1])
    return lines[-1] if len(lines[-1].split()) <= MAX_WORDS and not _ENV.search(text) and not _NUMBER.search(masked) else None


def _whole_token(text: str, number: re.Match[str]) -> str:
    """The number, or the formula that it is a part of: ``(1, 2)`` and ``\\frac{5}{7}``, not their last number."""
    start, end = number.start(), number.end()
    while start and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    for _ in range(12):
        depth = [text[start:end].count(o) - text[start:end].count(c) for o, c in ("()", "[]", "{}")]
        if max(depth) <= 0 <= min(depth) or not (start if min(depth) < 0 else end < len(text)):
            break
        if min(depth) < 0:
            start = max(text.rfind(" ", 0, start - 1), text.rfind("\n", 0, start - 1)) + 1
        else:
            end = min((i for i in (text.find(" ", end + 1), text.find("\n", end + 1)) if i > 0), default=len(text))
    if half := _HALF_DAY.match(text, end):
        end = half.end()
    token = text[start:end].strip(" .,;:!?*_\"'|")
    if "(" not in token:
        token = token.rstrip(")")
    return token if _CLOCK.fullmatch(token) or (_FORMULA.search(token) and is_expression(token)) or _BARE.fullmatch(token) else number.group().strip()


def _env_group(text: str, first: bool = False, until: int | None = None) -> str | None:
    """The last (or first) formula and those joined to it by comma, and, or; with a percent sign that follows."""
    found = [m for m in _ENV.finditer(text) if until is None or m.end() <= until]
    if not found:
        return None
    groups: list[list[re.Match[str]]] = [[found[0]]]
    for match in found[1:]:
        between = text[groups[-1][-1].end(): match.start()]
        linked = len(between) < 20 and _LINK.fullmatch(between) and _JOINER.search(between)
        if linked:
            groups[-1].append(match)
        else:
            groups.append([match])
    group = groups[0] if first else groups[-1]
    inner = [next(g for g in m.groups() if g).strip() for m in group]
    return ", ".join(inner) + ("\\%" if _PERCENT.match(text, group[-1].end()) and not inner[-1].endswith("%") else "")
