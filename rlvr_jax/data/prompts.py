"""Records to examples: which column is what, the prompt template, chat messages.

Column names are found once, at start-up, so that a wrong one stops the run with the list of columns; a row that then
lacks a value is a broken row.
"""

import ast
import difflib
import json
import math
import string
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr_jax.config import Domain
from rlvr_jax.data.rows import DataError, Example, Message, problem_key
from rlvr_jax.data.templates import TEMPLATES

# Columns tried in this order when the config does not map one.
COMMON = {
    "prompt": ("prompt", "question", "problem", "quiz", "instruction", "messages"),
    "answer": ("reward_model.ground_truth", "answer", "ground_truth", "final_answer", "solution_text", "target", "output"),
    "response": ("response", "completion"),
    "numbers": ("numbers", "nums"),
    "target": ("target",),
    "names": ("names",),
}
# What each verifier must have, and what it takes when it is there. A user's own function needs nothing.
NEEDS: dict[str, tuple[str, ...]] = {"math": ("answer",), "choice": ("answer",), "knights": ("answer",),
                                     "countdown": ("numbers", "target"), "format": ()}
TAKES: dict[str, tuple[str, ...]] = {"knights": ("names",)}
_MISSING = object()
_LIST_FORMATS = ("letters", "commas")
_ANSWER_LIMIT = 100_000  # characters; no verifier makes sense of more, and every sample's would be sent to a worker
_LITERAL_LIMIT = 1_000_000  # characters; a longer string is text, not a stored structure


class BrokenRow(ValueError):
    """One row that cannot be used; the message says why."""


class _Listed:
    """A value with two formats for lists: ``{options:letters}`` (A. ..., a line each) and ``{numbers:commas}``."""

    def __init__(self, value: Any):
        self.value = value

    def __format__(self, spec: str) -> str:
        if spec not in _LIST_FORMATS:
            return format(self.value, spec)
        items = structure(self.value)
        if not isinstance(items, list | tuple):
            raise ValueError(f"':{spec}' needs a list, found {type(self.value).__name__}")
        if spec == "commas":
            return ", ".join(map(str, items))
        return "\n".join(f"{letter}. {item}" for letter, item in zip(string.ascii_uppercase, items))


@dataclass(frozen=True)
class Template:
    """A checked prompt template; ``names`` are the fields it reads, ``listed`` those with a format for lists."""

    text: str
    names: tuple[str, ...]
    listed: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, where: str) -> "Template":
        """
        Args:
          text: the name of a convention, or a format string.

        Raises:
          DataError: an unknown name, unbalanced braces, a field without a name, or anything but a plain name in braces.
        """
        if "{" not in text:
            if text not in TEMPLATES:
                near = difflib.get_close_matches(text, TEMPLATES, n=1, cutoff=0.0)[0]
                raise DataError(f"{where}.template: '{' '.join(text.split())[:60]}' shows no field of the row, such as {{prompt}}, and no convention is called so; "
                                f"nearest: '{near}' (there are {', '.join(TEMPLATES)})")
            text = TEMPLATES[text]
        hint = "fields are plain names like {prompt}; write {{ and }} for braces, e.g. \\boxed{{}}"
        try:
            fields = [(name, spec) for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as e:
            raise DataError(f"{where}.template: {e}; {hint}") from None
        for name, _ in fields:
            if not name.isidentifier():
                raise DataError(f"{where}.template: '{{{name}}}' is no field; {hint}")
        listed = tuple(name for name, spec in fields if spec in _LIST_FORMATS)
        return cls(text, tuple(dict.fromkeys(name for name, _ in fields)), listed)

    def render(self, values: Mapping[str, Any]) -> str:
        """
        Raises:
          BrokenRow: a field is missing or does not fit its format.
        """
        for name in self.names:
            if values.get(name) is None:
                raise BrokenRow(f"field '{name}' of the template is missing")
        try:
            shown = {**values, **{name: _Listed(values[name]) for name in self.listed}} if self.listed else values
            return self.text.format_map(shown)
        except (ValueError, TypeError, LookupError) as e:
            raise BrokenRow(f"template does not fit: {e}") from None


def structure(value: Any) -> Any:
    """A list or mapping that was stored as a string (JSON, or a Python literal), else the value itself."""
    if not isinstance(value, str) or len(value) > _LITERAL_LIMIT:
        return value
    text = value.strip()
    if (text[:1], text[-1:]) not in (("{", "}"), ("[", "]")):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # LaTeX in a Python literal: "\\sin" is an unknown escape
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(text)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return value


def descend(record: Mapping[str, Any], path: str) -> Any:
    """Value at ``a.b.c`` (a column whose name holds dots wins); ``_MISSING`` where there is none."""
    if path in record:
        return record[path]
    head, _, rest = path.partition(".")
    if not rest or head not in record:
        return _MISSING
    inner = structure(record[head])
    return descend(inner, rest) if isinstance(inner, Mapping) else _MISSING


def is_chat(value: Any) -> bool:
    return (isinstance(value, list) and len(value) > 0
            and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value))


class Schema:
    """How one domain's records become examples: built (and checked) from its config and the first records."""

    def __init__(self, name: str, domain: Domain, records: Iterable[Mapping[str, Any]], source: str,
                 system_prompt: str | None = None):
        """
        Args:
          name: the domain, for messages.
          records: the first readable records.
          source: the file, for messages.

        Raises:
          DataError: a mapped, needed or templated column is in none of the records.
        """
        self.where, self.source, self.domain, self.system_prompt = f"data.domains.{name}", source, domain, system_prompt
        self.template = Template.parse(domain.template, self.where)
        used = [n for n in (domain.verifier, *(k for r in domain.rewards or () for k in r)) if n not in (None, "verifier")]
        if not used:
            raise DataError(f"{self.where}: its rewards stand for a verifier that is not given; set {self.where}.verifier")
        self.verifier = str(used[0])
        self.needs = tuple(dict.fromkeys(f for n in used for f in NEEDS.get(str(n), ())))
        takes = tuple(f for n in used for f in TAKES.get(str(n), ()))
        self._probe = list(records)
        found = {c: None for r in self._probe for c in r}
        self.columns = dict(domain.columns)
        for ours, path in self.columns.items():
            if not self._exists(path):
                self._missing(f"columns.{ours}: no column '{path}'", path, found)
        for ours in dict.fromkeys((*COMMON, *self.needs)):
            if ours not in self.columns:
                candidates = [c for c in COMMON.get(ours, (ours,)) if self._exists(c)]
                if candidates:
                    self.columns[ours] = candidates[0]
        for ours in self.needs:
            if ours not in self.columns:
                self._missing(f"the verifier '{self.verifier}' needs '{ours}' and no column looks like it; set columns.{ours}", ours, found)
        for field in self.template.names:
            if field not in self.columns and field not in found:
                self._missing(f"template: no field '{field}'" + ("; set columns.prompt" if field == "prompt" else ""), field, found)
        self.fields = tuple(f for f in dict.fromkeys((*domain.columns, *self.needs, *takes))
                            if f in self.columns and f not in ("prompt", "answer", "response"))

    def _exists(self, path: str) -> bool:
        return any(descend(r, path) is not _MISSING for r in self._probe)

    def _missing(self, what: str, name: str, found: Mapping[str, None]) -> None:
        near = difflib.get_close_matches(name, [*found, *self.columns], n=1)
        nearest = f" (nearest: '{near[0]}')" if near else ""
        raise DataError(f"{self.where}: {what}{nearest}; columns of '{self.source}': {', '.join(map(str, found))}")

    def example(self, record: Mapping[str, Any]) -> Example:
        """
        Raises:
          BrokenRow: a needed value is missing, null, empty or of the wrong type.
        """
        values = dict(record)
        for ours, path in self.columns.items():
            value = descend(record, path)
            values[ours] = None if value is _MISSING else value
        chat = self._prompt(values)
        prompt = self.template.render(values)
        if not prompt.strip():
            raise BrokenRow("the prompt is empty")
        messages = self._messages(chat, prompt)
        for message in messages:
            _check_unicode("prompt", message["content"])
        key = values["prompt"] if isinstance(values.get("prompt"), str) and "prompt" in self.template.names else prompt
        fields = {f: structure(values[f]) for f in self.fields if values[f] is not None}
        for field in self.needs:
            if field != "answer" and fields.get(field) in (None, [], ""):
                raise BrokenRow(f"field '{field}' is missing")
            if field != "answer":
                _check_finite(f"field '{field}'", fields[field])
        return Example(problem_key(self.verifier, key, fields), prompt, messages, self._answer(values.get("answer")),
                       {**fields, **self.domain.verifier_args}, self.verifier, self._response(values.get("response")))

    def _prompt(self, values: dict[str, Any]) -> list[Message] | None:
        """Reduces a chat prompt to its last user message in place; returns the chat, or None for plain text."""
        if "prompt" not in self.columns:
            return None
        prompt = structure(values["prompt"])
        if is_chat(prompt):
            chat = [dict(m) for m in prompt]
            if chat[-1]["role"] != "user":
                raise BrokenRow(f"the last message of the prompt is from '{chat[-1]['role']}', expected 'user'")
            if any(not isinstance(m["content"], str) for m in chat):
                raise BrokenRow("a message of the prompt has no text")
            values["prompt"] = chat[-1]["content"]
        else:
            chat = None
        if "prompt" in self.template.names:
            _check_text("prompt", values["prompt"])
        return chat

    def _messages(self, chat: list[Message] | None, prompt: str) -> list[Message]:
        """A system message in the data wins over ``model.system_prompt``."""
        messages = [*(chat[:-1] if chat else []), {"role": "user", "content": prompt}]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _answer(self, value: Any) -> Any:
        """The answer as text; a single-element list counts as its element, 27.0 as 27."""
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if "answer" not in self.needs and not isinstance(value, str):
            return value  # a user's own verifier may compare with anything, or with nothing
        _check_finite("the answer", value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        _check_text("answer", value)
        text: str = value
        after = self.domain.answer_after
        if after is not None:
            if after not in text:
                raise BrokenRow(f"the answer does not contain '{after}' (answer_after)")
            text = text.rpartition(after)[2]
        if not text.strip():
            raise BrokenRow("the answer is empty")
        if len(text) > _ANSWER_LIMIT:
            raise BrokenRow(f"the answer has {len(text)} characters, expected at most {_ANSWER_LIMIT}")
        _check_unicode("answer", text)
        return text.strip()

    def _response(self, value: Any) -> str | None:
        return value if isinstance(value, str) and value.strip() else None


def _check_unicode(name: str, text: str) -> None:
    """JSON may hold half of a surrogate pair (``"\\ud83d"`` alone), which is no character: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise BrokenRow(f"the {name} holds half a surrogate pair at character {e.start}, which is no text") from None


def _check_finite(what: str, value: Any) -> None:
    """JSON as Python reads it has NaN and Infinity, alone or in a list of numbers."""
    for x in value if isinstance(value, list) else [value]:
        if isinstance(x, float) and not math.isfinite(x):
            raise BrokenRow(f"{what} is {x}, expected a finite number")


def _check_text(name: str, value: Any) -> None:
    if value is None:
        raise BrokenRow(f"the {name} is null or missing")
    if not isinstance(value, str):
        raise BrokenRow(f"the {name} is {'binary' if isinstance(value, bytes) else 'of type ' + type(value).__name__}, expected text")
    if not value.strip():
        raise BrokenRow(f"the {name} is empty")
    if "\x00" in value:
        raise BrokenRow(f"the {name} holds a null byte: binary, not text")
