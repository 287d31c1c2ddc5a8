"""Units and degree signs, off: where one side has none, the number counts (the question states the unit). What was taken off is
handed over, so that two units that are known can be compared: :mod:`rlvr_jax.rewards.quantity`."""

import re

_UNIT = ("degrees?|radians?|cm|mm|km|kg|mg|ml|mL|ft|lbs?|mph|kmh|sec|secs|min|mins|hrs?|hours?|minutes?|seconds?|kPa|Pa|kHz|MHz|GHz|Hz|kJ|kN|kW|MW|eV|mol|kV"
         "|days?|weeks?|months?|years?|dollars?|cents?|units?|inch(?:es)?|feet|foot|yards?|miles?|meters?|metres?|grams?|liters?|litres?|points?|people")
_AFTER = r"(?:(?<=[\d})])|(?<=[a-zA-Z}] ))"
# A single letter may be a variable: it is a unit only after a number and a space, or with an exponent (1000 m^2).
_ATTACHED_UNIT = re.compile(
    rf"{_AFTER}\s*(?:sq(?:uare)?\.?\s+|cubic\s+)?(?<![a-zA-Z\\])(?:{_UNIT})(?:\s*(?:\^\s*\{{?\d\}}?|\d)|/\w+|\s+per\s+\w+)?\s*$"
    r"|(?<=[\d})])(?:\s*(?:[ckm]?m|ft|mi)/(?:s|h|hr|sec|min)(?:\s*\^\s*\{?\d\}?)?|\s+[mgshLJNWV]|\s*m(?:\s*\^\s*\{?[23]\}?|[23]))\s*$")
_TRAILING_WORDS = re.compile(r"(?<=[\d})%])(?:\s+(?!(?:where|if|mod|hundred|thousand|[mbtr]+illion|base)\b)[a-zA-Z]{3,}[.,]?|\s+(?:of|in|to|by|is|at|the|a|an)\b){1,6}\s*$")
_PARENTHESES = re.compile(r"(?<=[\d})%])\s*\((?:[a-zA-Z]{4,}\s*){1,3}\)\s*$")
_TRAILING_TEXT = re.compile(r"\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?\s*$")
# 17 (not sure), 17 is wrong: what follows a number may take it back.
_CONTRADICTED = re.compile(r"(?<![a-zA-Z\\])(?:not|wrong|incorrect|false|neither|or|than)(?![a-zA-Z])")
_RATE = re.compile(r"\s*\\[dt]?frac\s*\{\s*\\text\s*\{[^{}]*\}\s*\}\s*\{\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*\}\s*$")
_COMMAND_UNIT = re.compile(
    r"(?<=[\d}) ~])\\text\s*\{[^{}\\]*\\(?:mu|Omega|AA|degree|circ)(?![a-zA-Z])[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?\s*$|(?<=\d)\s*\\(?:mu\s*m|Omega)\s*$")
_TEMPERATURE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?)\s*(?:\\text\s*\{)?\s*[CF]\s*\}?\s*$")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])|\\circ(?![a-zA-Z]))")
_LAST_DEGREE = re.compile(rf"(?:{_DEGREE.pattern})\s*\.?\s*$")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z]))")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


def commands_off(s: str, dropped: list[str]) -> str:
    """Trailing ``\\text{\\mu m}`` and ``\\frac{\\text{m}}{\\text{s}}``, before anything is unwrapped."""
    return _without(_RATE, _without(_COMMAND_UNIT, s.rstrip(" ."), dropped), dropped)


def degrees(s: str, dropped: list[str]) -> str:
    """Degree signs off; beside a trigonometric function they are the factor that they are."""
    if _TRIGONOMETRY.search(s):
        return _ANGLE.sub(r"(\\frac{\1\\pi}{180})", s)
    if match := _TEMPERATURE.search(s):
        dropped.append(f"°{match.group().rstrip(' }')[-1]}")
        s = s[: match.start()]
    elif _LAST_DEGREE.search(s):
        dropped.append("degrees")
    return _DEGREE.sub("", s)


def _without(pattern: re.Pattern[str], s: str, dropped: list[str]) -> str:
    match = pattern.search(s)
    if match is None or not match.group():
        return s
    dropped.append(match.group())
    return s[: match.start()]


def off(s: str, dropped: list[str]) -> str:
    """Trailing units and words, unless the words take the number back."""
    if _CONTRADICTED.search(s):
        return s
    for _ in range(2):
        for pattern in (_TRAILING_TEXT, _ATTACHED_UNIT, _TRAILING_WORDS, _PARENTHESES):
            taken: list[str] = []
            shorter = _without(pattern, s.rstrip(" .,;"), taken)
            if shorter.strip() and re.search(r"\d|\\(?!text)[a-z]|^\W*[a-zA-Z]\W*$", shorter):
                s = shorter
                dropped += taken
    return s
