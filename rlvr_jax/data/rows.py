"""What flows out of the data room: examples (text) and rows (text and token ids), and how prompts are compared."""

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvr_jax.config import ConfigError

Message = dict[str, Any]


class DataError(ConfigError):
    """Data that cannot be used as configured; the message is one line."""


@dataclass(frozen=True)
class Example:
    """One problem before tokenisation.

    ``key`` (:func:`problem_key`) decides whether two problems are the same, whatever template they are shown in. ``prompt`` is the last user message as the model sees it.
    """

    key: str
    prompt: str
    messages: list[Message]
    answer: Any
    fields: dict[str, Any]
    verifier: str
    solution: str | None = None


@dataclass(frozen=True)
class Row:
    """One prompt of a batch. ``prompt_id`` is a 31-bit hash of domain and prompt; ``fields`` go to the verifier."""

    domain: int
    domain_name: str
    prompt_id: int
    messages: list[Message]
    prompt: str
    answer: Any
    fields: dict[str, Any]
    verifier: str
    solution: str | None = None
    token_ids: tuple[int, ...] = ()


@dataclass
class Notes:
    """What happened to one domain's data, for the log: counts by name, and the first few faults in words."""

    counts: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n


def normalise(text: str) -> str:
    """Case, width and white space do not make two prompts different."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def problem_key(verifier: str, text: str, fields: Mapping[str, Any]) -> str:
    """What makes two problems the same: the normalised text, and for countdown the numbers in any order."""
    if verifier == "countdown" and isinstance(fields.get("numbers"), list | tuple):
        return f"countdown {sorted(map(str, fields['numbers']))} {fields.get('target')}"
    return normalise(text)


def digest(*parts: str) -> int:
    """64 bits of SHA-256 over the parts: stable over processes, platforms and Python versions."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return int.from_bytes(h.digest()[:8], "little")


def held_out(key: str, share: float) -> bool:
    """True for ``share`` of all keys, whatever the seed, the domain and the file order."""
    return digest("holdout", key) < share * 2.0**64


def prompt_id(domain_name: str, prompt: str) -> int:
    """31 bits, so that it fits int32 on the device."""
    return digest("prompt", domain_name, prompt) & 0x7FFFFFFF


def occurrences(rows: Sequence[Row]) -> np.ndarray:
    """``[N] int32``: how many earlier rows of the batch have the same ``prompt_id``."""
    seen: dict[int, int] = {}
    out = np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        out[i] = seen.get(row.prompt_id, 0)
        seen[row.prompt_id] = int(out[i]) + 1
    return out
