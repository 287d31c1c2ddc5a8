"""Where the final answer of a response stands: reasoning blocks, boxes, answer tags.

All scans are linear in the text. Of a longer response only the last :data:`MAX_TEXT` characters are read: a final answer
stands at the end.
"""

import re

from rlvr_jax.rewards import clean

MAX_TEXT = 200_000

_TURN_END = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end|eos|eom_id)\|>|</s>|<eos>|<end_of_turn>|<\|end▁of▁sentence\|>|<｜end▁of▁sentence｜>")
_OPEN_THINK = re.compile(r"<(?:think|thinking|reasoning)>", re.IGNORECASE)
_CLOSE_THINK = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
_OPEN_ANSWER = re.compile(r"<answer>", re.IGNORECASE)
_CLOSE_ANSWER = re.compile(r"</answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_NUMBER = re.compile(r"-?\d[\d,.]*\d|-?\d")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")


def visible(text: str) -> str:
    """The response without reasoning block, what follows the end of its turn, and characters that cannot be seen.

    Everything up to the last closing think tag is reasoning (templates often put the opening tag into the prompt).
    A block that is opened and never closed hides the rest: a response cut inside its reasoning has no answer.
    """
    text = clean.characters(text[-MAX_TEXT:])
    for match in _TURN_END.finditer(text):
        if text[: match.start()].strip():
            text = text[: match.start()]
            break
    closes = list(_CLOSE_THINK.finditer(text))
    if closes:
        text = text[closes[-1].end():]
    opened = _OPEN_THINK.search(text)
    return text[: opened.start()] if opened else text


def answer_tag(text: str) -> str | None:
    """Content of the last ``<answer>`` tag; '' when that tag is never closed; None without a tag."""
    opens = list(_OPEN_ANSWER.finditer(text))
    if not opens:
        return None
    closed = _CLOSE_ANSWER.search(text, opens[-1].end())
    return text[opens[-1].end(): closed.start()] if closed else ""


def boxes(text: str) -> list[tuple[int, int, str | None]]:
    """All boxes ``(start, end, content)`` of a text, outermost only; content None = braces never close.

    ``\\boxed`` without a brace is a mention of the command, not a box, unless a plain number follows
    (TeX boxes the next token).
    """
    if "box" not in text:
        return []
    closing = _braces(text)
    found: list[tuple[int, int, str | None]] = []
    position = 0
    while match := _BOX.search(text, position):
        position = match.end()
        if position < len(text) and text[position] == "{":
            end = closing.get(position)
            content = None if end is None else text[position + 1: end]
            position = position + 1 if end is None else end + 1
            found.append((match.start(), position, content))
        elif number := _BARE_NUMBER.match(text, position):
            position = number.end()
            found.append((match.start(), position, number.group()))
    return found


def _braces(text: str) -> dict[int, int]:
    """Opening brace -> its closing brace, in one pass; escaped braces do not count."""
    pairs, stack = {}, []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            stack.append(match.start())
        elif match.group() == "}" and stack:
            pairs[stack.pop()] = match.start()
    return pairs


def final_region(text: str) -> tuple[str, bool] | None:
    """``(text, explicit)``: content of the last answer tag or last box, else the whole visible text (explicit False).

    None when the final tag or box is empty or never closed: an earlier one is not the final answer.
    """
    shown = visible(text)
    tag = answer_tag(shown)
    explicit = tag is not None
    region = shown if tag is None else tag
    found = boxes(region)
    if found:
        explicit = True
        region = found[-1][2] or ""
    if explicit and not region.strip():
        return None
    return region, explicit
