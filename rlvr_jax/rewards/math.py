"""Math: final answers compared through math-verify."""
import logging
from typing import Any

from rlvr_jax.rewards import extract
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong


def verify(text: str, answer: Any, **_: Any) -> Verdict:
    import math_verify
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    region = extract.final_region(text)
    g = str(answer).strip()
    if not g:
        return unknown("empty gold")
    if region is None:
        return wrong("unterminated")
    s, explicit = region
    if len(s) > 5000:
        s = s[-5000:]
    if s.count("^") > 4:
        return wrong("exponents")
    gold = math_verify.parse(g if "$" in g or "box" in g else f"${g}$", parsing_timeout=None)
    pred = math_verify.parse(f"${s}$" if explicit else s, parsing_timeout=None)
    good = math_verify.verify(gold, pred, timeout_seconds=None)
    return ok(s) if good else wrong(s)


def warm_up() -> None:
    verify("1/2+x", "x+0.5")
