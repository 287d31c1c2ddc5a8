"""Math: the final answer of a response against the gold answer, exactly where possible, else through math-verify.

Policies, each a decision that graders differ on:

* Only the final answer counts (see :mod:`rlvr_jax.rewards.final`); without box, tag or "answer is" it is the last formula
  or number. An empty or unterminated final box or tag is wrong.
* A gold answer that cannot be read (empty, prose, too large) gives unknown, whatever the response says.
* A response that cannot be read, or is larger than the bounds of :mod:`rlvr_jax.rewards.latex`, is wrong.
* Numbers are compared exactly; for percent signs, roundings and number bases see :func:`rlvr_jax.rewards.number.equal`.
* Units, degree signs and text after a number are dropped; leading zeros too; ``5 9/4`` is not a mixed number but wrong.
* An assignment stands for its value (``x = 11`` is 11) unless both sides name different variables; a chain ``a = b = c``
  for its last member. An equation without such a name is an equation, never the value of its right side.
* Lists are unordered, tuples ordered; a tuple gold accepts a list in its order. ``a \\pm b`` is two values.
* An inequality gold accepts the interval; an interval gold does not accept the inequality (as in math-verify).

math-verify parses LaTeX only: its ASCII route calls ``eval`` and is never used. Its time-outs are signals, which fail
outside the main thread, so they are off and the pool's deadline takes their place.
"""

import functools
import logging
from typing import Any

from rlvr_jax.rewards import final, latex, number, structure
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong

MAX_GOLD = 20_000


def verify(text: str, answer: Any, **_: Any) -> Verdict:
    """Judges a mathematical answer.

    Args:
      text: the response.
      answer: gold answer: a number, an expression (LaTeX with or without ``$``, or ASCII), or a solution that holds a box.
        A list holds alternatives.

    Returns:
      ok, wrong, or unknown when no gold can be read.
    """
    golds = [g for a in (answer if isinstance(answer, (list, tuple)) else [answer]) if (g := gold_expression(a)) is not None]
    if not golds:
        return unknown(f"math: the gold answer {str(answer)[:80]!r} cannot be read")
    said = final.of_response(text)
    if said is None:
        return wrong("no final answer")
    if len(said) > 4 * latex.MAX_LENGTH:
        return wrong(f"final answer longer than {latex.MAX_LENGTH} characters")
    said = latex.normalise(said)
    if not said:
        return wrong("no final answer")
    if (reason := latex.oversized(said)) is not None:
        return wrong(f"final answer not read: {reason}")
    try:
        good = any(equivalent(g, said) for g in golds)
    except number.Improper as e:
        return wrong(f"improper mixed number {e}")
    return ok(f"{said} = {golds[0]}") if good else wrong(f"{said}, gold {golds[0]}")


def gold_expression(answer: Any) -> str | None:
    """The gold answer in canonical spelling, or None when it cannot be used."""
    if answer is None or answer != answer or isinstance(answer, bool) or len(str(answer)) > MAX_GOLD:
        return None
    found = final.of_gold(str(answer))
    canonical = latex.normalise(found) if found else ""
    if not canonical or latex.oversized(canonical):
        return None
    try:
        readable = number.read(canonical) is not None or structure.text_of(canonical) is not None
    except number.Improper:
        return None
    return canonical if readable or structure.split(canonical) or parse(canonical) is not None else None


def equivalent(gold: str, said: str) -> bool:
    """Do two canonical expressions mean the same?

    Raises:
      number.Improper: one of them is no number although it looks like a mixed one.
    """
    if latex.squeezed(gold) == latex.squeezed(said):
        return True
    return structure.equal(gold, said, _single)


def _single(gold: str, said: str) -> bool:
    """Equality of two expressions that are neither lists nor tuples."""
    if latex.squeezed(gold) == latex.squeezed(said):
        return True
    g, s = number.read(gold), number.read(said)
    if g is not None and s is not None:
        return number.equal(g, s)
    gold_text, said_text = structure.text_of(gold), structure.text_of(said)
    if gold_text is not None and gold_text == said_text:
        return True
    if any(t is not None and (len(t) > 4 or "\\text" in e) for t, e in ((gold_text, gold), (said_text, said))):
        return False  # a word; a few bare letters may still be a product
    from rlvr_jax.rewards import symbolic
    g_parsed, s_parsed = parse(gold), parse(said)
    return g_parsed is not None and s_parsed is not None and symbolic.equal(g_parsed, s_parsed)


@functools.lru_cache(maxsize=512)
def parse(canonical: str) -> Any:
    """A sympy object, or None. Cached: the samples of a group share their gold answer."""
    import math_verify
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
    """Imports and builds what the first call needs (the grammar takes a second)."""
    verify(r"\boxed{\frac{x}{2} + 1}", "1 + x/2")
