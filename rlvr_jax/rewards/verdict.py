"""What a verifier says about one response. No jax in this room."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "wrong", "unknown"]
DETAIL_CHARACTERS = 300


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    Attributes:
      reward: always a finite number; 0 unless ``status`` is ok. Built-in verifiers give 0 or 1.
      status: ``ok`` = the reward counts, ``wrong`` = reward 0 counts, ``unknown`` = nothing is known (unusable gold
        answer, verifier failed or ran out of time); the row must then have no influence on learning.
      detail: one short line for people: what was compared, or why it is unknown.
    """

    reward: float
    status: Status
    detail: str = ""


def ok(detail: str = "", reward: float = 1.0) -> Verdict:
    return Verdict(float(reward), "ok", one_line(detail))


def wrong(detail: str = "") -> Verdict:
    return Verdict(0.0, "wrong", one_line(detail))


def unknown(detail: str = "") -> Verdict:
    return Verdict(0.0, "unknown", one_line(detail))


def raised(error: BaseException) -> Verdict:
    """Unknown, for a verifier that raised; its message may itself be broken."""
    try:
        text = f": {error}"
    except Exception:
        text = ""
    return unknown(f"verifier raised {type(error).__name__}{text}")


def one_line(text: str) -> str:
    """Model text may be huge or hold control characters; a detail never does."""
    text = " ".join(text[: 4 * DETAIL_CHARACTERS].split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= DETAIL_CHARACTERS else text[: DETAIL_CHARACTERS - 1] + "…"
