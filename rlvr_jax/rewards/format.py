"""Format: does the response have a required shape? Pure text checks; the answer is not looked at."""

import re
from typing import Any

from rlvr_jax.rewards import extract
from rlvr_jax.rewards.verdict import Verdict, ok, unknown, wrong

KINDS = ("boxed", "answer_tags", "think_answer")


def verify(text: str, answer: Any = None, *, kind: str = "boxed", pattern: str | None = None,
           prefilled: bool = False, **_: Any) -> Verdict:
    """1 if the response has the shape, else 0.

    Args:
      text: the response.
      answer: ignored.
      kind: ``boxed`` (a non-empty, closed final box), ``answer_tags`` (exactly one non-empty ``<answer>…</answer>``),
        ``think_answer`` (exactly ``<think>…</think><answer>…</answer>`` and nothing around it).
      pattern: a Python regular expression that must be found (``re.DOTALL``); replaces ``kind``. A pattern that
        backtracks for ever runs into the worker's deadline.
      prefilled: the prompt already ended in ``<think>``, so the response starts inside it.

    Returns:
      unknown when ``kind`` or ``pattern`` cannot be used.
    """
    if pattern is not None:
        try:
            found = re.search(pattern, text, re.DOTALL)
        except re.error as e:
            return unknown(f"format: pattern is no regular expression ({e})")
        return ok("pattern found") if found else wrong("pattern not found")
    if kind not in KINDS:
        return unknown(f"format: unknown kind '{kind}', one of {', '.join(KINDS)}")
    shape = {"boxed": _boxed, "answer_tags": _answer_tags, "think_answer": _think_answer}[kind]
    if kind == "think_answer" and prefilled:
        text = "<think>" + text
    return ok(kind) if shape(text) else wrong(f"not of the shape '{kind}'")


def _boxed(text: str) -> bool:
    found = extract.boxes(extract.visible(text))
    return bool(found and (found[-1][2] or "").strip())


def _answer_tags(text: str) -> bool:
    shown = extract.visible(text)
    once = shown.count("<answer>") == 1 and shown.count("</answer>") == 1
    return once and bool((extract.answer_tag(shown) or "").strip())


def _think_answer(text: str) -> bool:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    at = [text.find(t) for t in tags]
    if any(text.count(t) != 1 for t in tags) or at != sorted(at):
        return False
    inside = text[at[2] + len(tags[2]): at[3]]
    between = text[at[1] + len(tags[1]): at[2]]
    around = text[: at[0]] + between + text[at[3] + len(tags[3]):]
    return bool(inside.strip()) and not extract.visible("x" + around)[1:].strip()
