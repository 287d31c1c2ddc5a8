"""How hidden states become logits: the numbers every implementation compiles in."""

from typing import NamedTuple


class Logits(NamedTuple):
    """``z = cap(hidden @ head.T * logit_scale) / temperature``, ``cap(u) = soft_cap * tanh(u / soft_cap)``."""

    temperature: float = 1.0
    soft_cap: float | None = None
    logit_scale: float = 1.0
    with_entropy: bool = False
