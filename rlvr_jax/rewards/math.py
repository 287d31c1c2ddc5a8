"""Math: the final answer of a response against the gold answer, exactly where possible, else through math-verify.

Policies, each a decision that graders differ on:

* Only the final answer counts (see :mod:`rlvr_jax.rewards.final`); without box, tag or "answer is" it is the last formula
  or number that is not denied ("not 8"). An empty or unterminated final box or tag is wrong. ``require_box`` for more.
* A gold answer that cannot be read (empty, prose, undefined, too large) gives unknown, whatever the response says.
* A response that cannot be read, or is larger than the bounds of :mod:`rlvr_jax.rewards.latex`, is wrong.
* Numbers are compared exactly, repeating decimals too; for percent signs, roundings and number bases see
  :func:`rlvr_jax.rewards.number.equal`, for the settings ``percent``, ``significant``, ``precision`` :func:`verify`.
* ``1,000``, ``1 000``, ``1'000``, ``1{,}000`` are a thousand; ``2,74`` is 2.74 where the other side has a decimal point, else a list.
* Units, degree signs and text after a number are dropped where one side has none, or one that is not known: 5 cm is 5, and 5 apples
  too. Where both have known ones, the quantities are compared: 5 m is 500 cm, and not 5 cm; 90 minutes are 1.5 hours, 500 cents
  5 dollars (length, mass, time, money, and what is made of them, in :mod:`rlvr_jax.rewards.quantity`); of two kinds (5 kg, 5 km), or
  without a factor between them (months and days, °C and °F, degrees and radians) they are different. In lists, units must agree. A unit
  belongs to the answer in a box, a formula, or with its symbol: of "so 5 grams" outside of one only the number is read.
* Text that takes a number back ("17 (wrong)") is not dropped. Leading zeros are; ``5 9/4`` is not a mixed number but wrong. Numbers
  in words are numbers.
* An assignment stands for its value (``x = 11`` is 11) unless both sides name different variables; a chain ``a = b = c``
  for its last member. An equation without such a name is an equation, never the value of its right side. A residue may
  leave out its modulus.
* Lists are unordered (``ordered`` for the other way), tuples ordered; a tuple gold accepts a list in its order, and a
  column vector. ``a \\pm b`` is two values. Of three members on, square brackets are a list, no interval.
* An inequality gold accepts the interval; an interval gold does not accept the inequality (as in math-verify).
* A text answer is compared without case, punctuation and articles. Without a box it must be all that is said, or end the
  last sentence, or follow "answer is". A gold ``(C) 5`` accepts C, 5, or both. ``\\log`` may be the natural one where the other side has ``\\ln``.

math-verify parses LaTeX only: its ASCII route calls ``eval`` and is never used. Its time-outs are signals, which fail
outside the main thread, so they are off and the pool's deadline takes their place.
"""

import functools
import logging
import re
from typing import Any

from rlvr_jax.rewards import extract, final, latex, number, quantity, relations, structure, symbolic, words
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong

MAX_GOLD = 20_000

Quantity = tuple[str, quantity.Unit | None]

_NAMED = re.compile(r"^\\?[A-Za-z](?:_\{?\w+\}?)?\s*=\s*")
_LABELLED = re.compile(r"\(?([A-J])\)\s*[.:]?\s*(\S.*)|([A-J])[.:]\s+(\S.*)")
_COMMA = re.compile(r"\W{0,3}?(-?)(\d{1,3}(?:[. ]\d{3})+|\d+),(\d+)\D{0,12}")
_BARE_LOG = re.compile(r"\\log(?![_a-zA-Z])")
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}")
_DIGIT_SUBSCRIPT = re.compile(r"\d\s*_")
_WORDING = re.compile(r"[\w\s.,:'’]+")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDY = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")


def verify(text: str, answer: Any, *, require_box: bool = False, ordered: bool = False, percent: str = "optional",
           significant: int = number.SIGNIFICANT, precision: int | None = None, **_: Any) -> Verdict:
    """Judges a mathematical answer.

    Args:
      text: the response.
      answer: gold answer: a number, an expression (LaTeX with or without ``$``, or ASCII), or a solution that holds a box.
        A list holds alternatives.
      require_box: an answer outside of a box is wrong.
      ordered: lists and sets too are compared in their order.
      percent: ``optional``: 28% is 28 and also 0.28; ``exact``: 28% is 0.28 alone.
      significant: digits from which on a decimal stands for the exact value that it is the correct rounding of.
      precision: decimals at which a decimal is compared, however few digits it has; None: by ``significant`` alone.

    Returns:
      ok, wrong, or unknown when no gold can be read or a setting is not one of these.
    """
    policy = number.Policy(significant, precision, percent)
    if (problem := policy.problem()) is not None:
        return unknown(f"math: {problem}")
    answers = answer if isinstance(answer, (list, tuple)) else [answer]
    quantities = [g for a in answers if (g := _gold_quantity(a)) is not None]
    golds = [g for g, _ in quantities]
    if not golds:
        return unknown(f"math: the gold answer {str(answer)[:80]!r} cannot be read")
    found, explicit = final.response(text)
    if require_box and not explicit:
        return wrong("no closed box with an answer")
    if found is None or len(found) > 4 * latex.MAX_LENGTH:
        spoken = not explicit and any(_spoken(text, g) for g in golds)
        return ok(golds[0]) if spoken else wrong("no final answer" if found is None else f"final answer longer than {latex.MAX_LENGTH} characters")
    said, unit = latex.normalised(found)
    if not said:
        return wrong("no final answer")
    if (reason := latex.oversized(said)) is not None:
        return wrong(f"final answer not read: {reason}")
    try:
        good = any(_same_quantity(g, s, policy, ordered) for g in quantities for s in ((e, unit) for e in _readings(found, said, explicit)))
        good = good or (not any(quantity.unlike(u, unit) for _, u in quantities) and _decimal_comma(answers, golds, found, said))
    except number.Improper as e:
        return wrong(f"improper mixed number {e}")
    good = good or (not explicit and any(_spoken(text, g) for g in golds))
    return ok(f"{said} = {golds[0]}") if good else wrong(f"{said}, gold {golds[0]}")


def gold_expression(answer: Any) -> str | None:
    """The gold answer in canonical spelling, or None when it cannot be used."""
    found = _gold_quantity(answer)
    return None if found is None else found[0]


def _gold_quantity(answer: Any) -> Quantity | None:
    if answer is None or answer != answer or isinstance(answer, bool) or len(str(answer)) > MAX_GOLD:
        return None
    return _gold(str(answer))


@functools.lru_cache(maxsize=1024)
def _gold(answer: str) -> Quantity | None:
    found = final.of_gold(answer)
    canonical, unit = latex.normalised(found) if found else ("", None)
    if not canonical or latex.oversized(canonical):
        return None
    try:
        readable = number.read(canonical) is not None or structure.text_of(canonical) is not None
    except number.Improper:
        return None
    if readable or structure.split(canonical) or _WORDY.search(latex.untexted(canonical)) or ":" in canonical:
        return canonical, unit
    return (canonical, unit) if all(symbolic.finite(parse(e)) for e in structure.elements(relations.modulus(canonical)[0])) else None


def _readings(found: str, said: str, explicit: bool) -> list[str]:
    """The answer, and without an exclamation mark where that may end a sentence."""
    spoken = found.rstrip().endswith("!") and not explicit and "$" not in found
    return [said, latex.normalise(found.rstrip("! "))] if spoken else [said]


def _spoken(text: str, gold: str) -> bool:
    """Is the gold answer a text that a response without a box states in words?"""
    wording = latex.untexted(gold)
    if not _WORDING.fullmatch(wording) or (not _WORDY.search(wording) and wording.lower() != "no"):
        return False
    region = final.plain(extract.final_region(text)[0])  # type: ignore[index]
    return words.stated(region, wording, final.marked(region))


def _decimal_comma(answers: Any, golds: list[str], found: str, said: str) -> bool:
    """``2,74`` against 2.74: one side a number with a decimal point, the other with a comma that groups no thousands."""
    def point(s: str) -> number.Number | None:
        match = _COMMA.fullmatch(s.strip())
        return number.read(f"{match[1]}{re.sub('[. ]', '', match[2])}.{match[3]}") if match and len(match[3]) != 3 else None

    value = number.read(said)
    if (comma := point(found)) is not None:
        return any(g is not None and g.places is not None and g.value == comma.value for g in map(number.read, golds))
    return value is not None and value.places is not None and any((g := point(str(a))) is not None and g.value == value.value for a in answers)


def _same_quantity(gold: Quantity, said: Quantity, policy: number.Policy, ordered: bool) -> bool:
    """As :func:`_matches`; where both carry known units, and different ones, after conversion."""
    (expression, unit), (said_expression, said_unit) = gold, said
    if unit is None or said_unit is None or not quantity.unlike(unit, said_unit):
        return _matches(expression, said_expression, policy, ordered)
    if unit.dimensions != said_unit.dimensions:
        return False
    ratio = said_unit.factor / unit.factor
    expression, said_expression = (_NAMED.sub("", e) for e in (expression, said_expression))
    if structure.split(expression) or structure.split(said_expression):
        return False
    value, said_value = number.read(expression), number.read(said_expression)
    if value is not None and said_value is not None:
        return not (value.base or said_value.base) and number.equal(value, said_value.times(ratio), policy)
    return _single(expression, rf"({said_expression}) \cdot \frac{{{ratio.numerator}}}{{{ratio.denominator}}}", policy)


def _matches(gold: str, said: str, policy: number.Policy, ordered: bool) -> bool:
    """As :func:`equivalent`, for options with their letter (``(C) 5``) too: the letter, the value, or both."""
    if equivalent(gold, said, policy, ordered):
        return True
    (letter, value), (said_letter, said_value) = _labelled(gold), _labelled(said)
    if letter and said_letter:
        return letter == said_letter and equivalent(value, said_value, policy, ordered)
    if letter:
        return said.strip("()") == letter or equivalent(value, said, policy, ordered)
    return bool(said_letter) and (gold.strip("()") == said_letter or equivalent(gold, said_value, policy, ordered))


def _labelled(s: str) -> tuple[str, str]:
    match = _LABELLED.fullmatch(s)
    return (match[1] or match[3], match[2] or match[4]) if match else ("", "")


def equivalent(gold: str, said: str, policy: number.Policy = number.DEFAULT, ordered: bool = False) -> bool:
    """Do two canonical expressions mean the same?

    Raises:
      number.Improper: one of them is no number although it looks like a mixed one.
    """
    if latex.squeezed(gold) == latex.squeezed(said):
        return True
    return structure.equal(gold, said, functools.partial(_single, policy=policy), ordered)


def _single(gold: str, said: str, policy: number.Policy) -> bool:
    """Equality of two expressions that are neither lists nor tuples."""
    if latex.squeezed(gold) == latex.squeezed(said):
        return True
    g, s = number.read(gold), number.read(said)
    if g is not None and g.base and s is None and said.isalnum():
        s = number.read(f"{said}_{{{g.base}}}")  # 1F for 1F_{16}
    if g is not None and s is not None:
        return number.equal(g, s, policy)
    gold_text, said_text = structure.text_of(gold), structure.text_of(said)
    if gold_text is not None and gold_text == said_text:
        return True
    wording = [latex.untexted(e) for e in (gold, said)]
    if "\\text" in gold + said and latex.squeezed(_TEXT.sub(r"\1", gold)) == latex.squeezed(_TEXT.sub(r"\1", said)):
        return True
    if all(_WORDING.fullmatch(w) and _WORDY.search(w) for w in wording) and words.fold(wording[0]) == words.fold(wording[1]):
        return True
    if any(t is not None and (len(t) > 4 or "\\text" in e or e.isupper()) for t, e in ((gold_text, gold), (said_text, said))):
        return False  # a word; a few small letters may still be a product
    if _DATE.fullmatch(gold):
        return False
    return _parsed_equal(gold, said) or ("\\ln" in gold + said and _BARE_LOG.search(gold + said) is not None
                                         and _parsed_equal(_BARE_LOG.sub(r"\\ln", gold), _BARE_LOG.sub(r"\\ln", said)))


def _parsed_equal(gold: str, said: str) -> bool:
    g, s = parse(gold), parse(said)
    return g is not None and s is not None and symbolic.equal(g, s)


@functools.lru_cache(maxsize=512)
def parse(canonical: str) -> Any:
    """A sympy object, or None. Cached: the samples of a group share their gold answer."""
    import math_verify
    if _DIGIT_SUBSCRIPT.search(canonical):
        return None  # it would drop the subscript
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # first_match: never settle for a readable part of an unreadable whole.
    found = math_verify.parse(f"${canonical}$", [_config()], fallback_mode="no_fallback", extraction_mode="first_match",
                              parsing_timeout=None)  # type: ignore[arg-type]
    return found[0] if found else None


@functools.cache
def _config() -> Any:
    import math_verify
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    # Units are off: it takes the variable of 2t for one. Ours are off the expression already.
    return math_verify.LatexExtractionConfig(normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False))


def warm_up() -> None:
    """Imports and builds what the first calls need: the grammar takes a second, and learns each of its shapes once."""
    for gold, said in (("1 + x/2", r"\frac{x}{2} + 1"), (r"2\sqrt{3}", r"3\sqrt{2}"), ("(1, 2)", "(1, 3)"), ("x^2 + 2x + 1", "x^2 + 2x"), ("[1, 2)", "[1, 3)"),
                       (r"\frac{1+\sqrt{2}}{3}", r"2\pi")):
        verify(rf"\boxed{{{said}}}", gold)
