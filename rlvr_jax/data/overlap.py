"""Training rows that are evaluation prompts: found word for word, and where only the layout differs."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlvr_jax.data.rows import Example

_FIGURE = re.compile(r"\[asy\].*?\[/asy\]|!\[[^\]]*\]\([^)]*\)", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?:\n])\s+")
_INSTRUCTS = ("step by step", "\\boxed{}", "\\boxed{ }")
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?|q?quad|mbox|text(?:bf|it|rm)?|math(?:rm|bf|it)|operatorname|[,;:!() \[\]])(?![a-z])"
                     r"|(?<=[a-z]{2})\s*[-–—]+\s*(?=[a-z]{2})")
_SPELT = re.compile(r"\\(?:[dt](?=frac)|[cl](?=dots)|leq?(slant)?(?![a-z])|geq?(slant)?(?![a-z]))")
_REST = re.compile(r"(?<!\d)\.|\.(?!\d)|[^\w.+\-*/^=<>!%|]|_")
_SHOWN = 80  # characters of an example in a warning


class Overlap(NamedTuple):
    """Rows of a training domain that an evaluation domain asks.

    ``exact``: the same text but for case, width and white space; ``layout``: the same but for TeX spacing, punctuation, figures and
    instructions such as "think step by step"; ``prompts``: how many different evaluation prompts they are; ``example``: one of them.
    """

    train: str
    eval: str
    exact: int
    layout: int
    prompts: int
    example: str

    def __str__(self) -> str:
        rows = self.exact + self.layout
        how = f"{self.exact} word for word, {self.layout} but for the layout"
        return (f"domain '{self.train}': {rows} training row{'s are' if rows > 1 else ' is'} {self.prompts} of the evaluation prompts of '{self.eval}' "
                f"({how}) and {'were' if rows > 1 else 'was'} dropped, e.g. {self.example!r}")


def _one_spelling(m: re.Match[str]) -> str:
    return {"l": "<=", "g": ">="}.get(m[0][1:2], "") if "e" in m[0] else ""


def loose(key: str) -> str:
    """A problem's key (:func:`rlvr_jax.data.rows.problem_key`) without what may differ between two copies of one problem.

    Letters, digits, decimal points and operators stay, so that ``x + y`` and ``x - y`` are two problems. Short texts keep
    all: too little would be left to tell them apart.
    """
    if key.startswith("countdown ["):
        return key
    if any(word in key for word in _INSTRUCTS):
        key = " ".join(s for s in _SENTENCE.split(key) if not any(word in s for word in _INSTRUCTS)) or key
    text = _FIGURE.sub(" ", key)
    text = _REST.sub("", _SPELT.sub(_one_spelling, _LAYOUT.sub("", text)))
    return text if len(text) >= 20 else key


def split(train: Mapping[str, Sequence[Example]], held: Mapping[str, Sequence[Example]]) -> tuple[dict[str, list[Example]], list[Overlap]]:
    """Training rows without the evaluation prompts of any domain, and what was taken out for each pair of domains."""
    asked = {name: {loose(e.key): e.key for e in of_eval} for name, of_eval in held.items()}
    everything = {k for keys in asked.values() for k in keys}
    kept, out = {}, []
    for train_name, of_train in train.items():
        keys = [loose(e.key) for e in of_train]
        kept[train_name] = [e for e, k in zip(of_train, keys) if k not in everything]
        taken = [(e, k) for e, k in zip(of_train, keys) if k in everything]
        for eval_name, by_loose in asked.items():
            rows = [(e, k) for e, k in taken if k in by_loose]
            exact = {e.key for e in held[eval_name]}
            n = sum(e.key in exact for e, _ in rows)
            if rows:
                out.append(Overlap(train_name, eval_name, n, len(rows) - n, len({k for _, k in rows}), " ".join(rows[0][0].prompt.split())[:_SHOWN]))
    return kept, out
