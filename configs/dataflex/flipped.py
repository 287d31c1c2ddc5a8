"""A reward that is wrong about 30% of the answers: an arm trained on it must come out worse."""

import zlib
from typing import Any

from rlvr_jax.rewards import verify


def flipped(text: str, answer: Any, **fields: Any) -> float:
    """The verifier's verdict, turned round for every answer whose hash says so."""
    right = verify("knights" if "names" in fields else "math", text, answer, **fields).status == "ok"
    return float(right != (zlib.crc32(f"{answer} {text}".encode("utf-8", "replace")) % 10 < 3))
