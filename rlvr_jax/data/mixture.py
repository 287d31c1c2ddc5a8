"""The stream of training prompts: per-domain orders through grain, joined by proportions.

A domain's order depends on (seed, domain name) alone. Orders are read by index, never by consuming an iterator, so
the state of the stream is a position per domain, and every process computes the same global order.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grain.python as grain
import numpy as np

from rlvr_jax.data.rows import DataError, Example, Row, digest, prompt_id
from rlvr_jax.strategies.mix import largest_remainder
from rlvr_jax.strategies.prompts import Proposal

State = dict[str, Any]
VERSION = 1
ENDLESS = 2**31 - 1  # indices of a generated task
_CHARACTERS_PER_TOKEN = 256  # more than the longest token of any vocabulary
_PATIENCE = 2_000  # positions of a generated task skipped in a row before giving up


class Tokenizer(Protocol):
    def encode_chat(self, messages: list[dict[str, Any]], template_args: dict[str, Any]) -> list[int]: ...


@dataclass(frozen=True)
class Encoder:
    """Messages to prompt ids within the limit. Without a tokenizer, rows carry no ids and have no limit."""

    tokenizer: Tokenizer | None
    template_args: dict[str, Any]
    max_length: int
    overlong: str

    def __call__(self, example: Example) -> tuple[int, ...] | None:
        """None for a prompt longer than the limit when those are dropped, and for one so long that it is not even measured."""
        if self.tokenizer is None:
            return ()
        # A text of megabytes (a book in one field) would take a tokenizer minutes, each time it is drawn.
        if sum(len(m["content"]) for m in example.messages) > _CHARACTERS_PER_TOKEN * self.max_length:
            return None
        ids = self.tokenizer.encode_chat(example.messages, self.template_args)
        if len(ids) <= self.max_length:
            return tuple(ids)
        if self.overlong == "drop":
            return None
        # Cut from the left: the question and the generation prompt are at the end. A BOS stays first.
        bos = getattr(self.tokenizer, "bos_id", None)
        head = ids[:1] if bos is not None and ids[0] == bos and self.max_length > 1 else []
        return tuple(head + ids[len(ids) - self.max_length + len(head):])


@dataclass(frozen=True)
class Source:
    """One domain's training examples.

    Attributes:
      order: position -> Example; reads as long as the training lasts.
      skip: True for an example that is not for training (held out).
      size: number of examples, None for a generated task.
    """

    index: int
    name: str
    order: grain.MapDataset
    skip: Callable[[Example], bool]
    size: int | None


def shuffled(examples: Sequence[Example], seed: int, name: str) -> grain.MapDataset:
    """All examples once per epoch, each epoch in an order of its own."""
    return grain.MapDataset.source(examples).seed(digest("order", str(seed), name) % 2**32).shuffle().repeat()


def endless(make: Callable[[int], Example]) -> grain.MapDataset:
    """A generated task: position i is problem i. Problems are already random, so nothing is shuffled."""
    return grain.MapDataset.range(ENDLESS).map(make)


def interleave(counts: Sequence[int]) -> list[int]:
    """Domain of each slot of a batch, every domain spread evenly, so that mini-batches are mixed like the batch."""
    slots = [((k + 0.5) / c, d) for d, c in enumerate(counts) for k in range(c)]
    return [d for _, d in sorted(slots)]


Propose = Callable[[Sequence[np.ndarray], np.ndarray], Sequence[Proposal]]
"""``(prompt ids of the candidates per domain, counts per domain) -> a proposal per domain``."""


@dataclass(frozen=True)
class _Window:
    """A domain's next usable prompts. ``after[k]``: position and prompts dropped for their length once k rows are taken;
    ``end``: the same when all are, and the domain's tail has been passed."""

    rows: list[Row]
    after: list[tuple[int, int]]
    end: tuple[int, int]

    def all(self) -> tuple[list[Row], int, int]:
        return self.rows, *self.end

    def chosen(self, proposal: Proposal) -> tuple[list[Row], int, int]:
        return [self.rows[int(i)] for i in proposal.indices], *(self.end if proposal.seen >= len(self.rows) else self.after[proposal.seen])


def _wanted(source: Source, count: int, candidates: int) -> int:
    """Candidates for ``count`` slots: not more than an epoch, in which every prompt comes once."""
    return count * candidates if source.size is None else min(count * candidates, max(count, source.size))


class Stream:
    """``init() -> state``; ``take(state, n, proportions) -> (rows, state)``: pure, the state is small and JSON-able.

    State: ``position`` and ``prompts_too_long`` per domain, ``carry`` (rounding still owed per domain), and the
    ``fingerprint`` of the data it belongs to.
    """

    def __init__(self, sources: Sequence[Source], encode: Encoder, fingerprint: Mapping[str, str], hand_over: bool = False):
        self.sources, self.encode, self.fingerprint, self.hand_over = tuple(sources), encode, dict(fingerprint), hand_over

    def init(self) -> State:
        names = [s.name for s in self.sources]
        return {"version": VERSION, "fingerprint": dict(self.fingerprint), "position": dict.fromkeys(names, 0),
                "carry": dict.fromkeys(names, 0.0), "prompts_too_long": dict.fromkeys(names, 0)}

    def take(self, state: State, n: int, proportions: Sequence[float] | np.ndarray, propose: Propose | None = None, candidates: int = 1
             ) -> tuple[list[Row], State]:
        """The next n prompts.

        Args:
          proportions: ``[domains]``, sum 1, in the order of the config.
          propose: chooses among a domain's next prompts; None takes them as they come. It is asked with the prompt ids of
            ``candidates`` times as many as the domain has slots (at most one epoch of it), and the domain goes on behind
            the last one it looked at: a prompt passed over comes again in the next epoch.

        Returns:
          (n rows with domains spread evenly, the next state; the given one is unchanged).

        Raises:
          DataError: a domain has no usable prompt left to give.
        """
        names = [s.name for s in self.sources]
        if len(proportions) != len(names):
            raise DataError(f"expected one proportion for each of the {len(names)} domains, found {len(proportions)}")
        new: State = {**state, "position": dict(state["position"]), "prompts_too_long": dict(state["prompts_too_long"])}
        drawn: list[list[Row]] = [[] for _ in names]
        carry = np.array([state["carry"][name] for name in names])
        missing = n
        while missing:
            share = self._share(np.asarray(proportions, np.float64), new["position"])
            counts, carry = largest_remainder(share, missing, np.where(share > 0, carry, 0.0))
            windows = [self._draw(source, new["position"][source.name], count if propose is None else _wanted(source, count, candidates))
                       for source, count in zip(self.sources, map(int, counts))]
            proposals: list[Proposal | None] = [None] * len(windows)
            if propose is not None:
                proposals = list(propose([np.array([r.prompt_id for r in w.rows], np.int32) for w in windows], counts))
            for d, (name, window, proposal) in enumerate(zip(names, windows, proposals)):
                rows, position, too_long = window.all() if proposal is None else window.chosen(proposal)
                drawn[d] += rows
                new["position"][name] = position
                new["prompts_too_long"][name] += too_long
            missing = n - sum(map(len, drawn))
        new["carry"] = dict(zip(names, map(float, carry)))
        waiting = [iter(rows) for rows in drawn]
        return [next(waiting[d]) for d in interleave([len(rows) for rows in drawn])], new

    def _share(self, proportions: np.ndarray, position: Mapping[str, int]) -> np.ndarray:
        """The proportions, without the domains that have run out."""
        if not self.hand_over:
            return proportions
        left = np.array([s.size is None or position[s.name] < s.size for s in self.sources])
        share = np.where(left, proportions, 0.0)
        if not share.any():
            raise DataError("every domain has run out of prompts; lower train.steps, or set data.exhausted to repeat")
        return share / share.sum()

    def _draw(self, source: Source, position: int, count: int) -> "_Window":
        """The next ``count`` usable prompts; fewer where the domain runs out and hands over."""
        rows: list[Row] = []
        after = [(position, 0)]
        too_long = barren = 0
        while len(rows) < count and not (self.hand_over and source.size is not None and position >= source.size):
            if barren > (source.size or _PATIENCE):
                raise DataError(f"domain '{source.name}': {barren} examples in a row are held out or longer than data.max_prompt_length={self.encode.max_length} tokens; raise the limit, truncate (data.overlong_prompt) or widen the task")
            example = source.order[position]
            position += 1
            ids = None if source.skip(example) else self.encode(example)
            if ids is None:
                too_long += not source.skip(example)
                barren += 1
                continue
            barren = 0
            rows.append(make_row(source.index, source.name, example, ids))
            after.append((position, too_long))
        return _Window(rows, after, (position, too_long))

    def restore(self, state: Any) -> State:
        """Checks a saved state against this data and returns it.

        Raises:
          DataError: no state, a damaged one, or one of other data (changed file, seed, domains or task arguments).
            Starting again at prompt 0 would repeat data, so nothing is guessed.
        """
        wanted = self.init()
        fresh = "restore the checkpoint, or start a new run folder"
        if not isinstance(state, Mapping) or set(state) != set(wanted) or state["version"] != VERSION:
            raise DataError(f"the saved data state cannot be read (found {str(state)[:80]!r}); {fresh}")
        for field, kind in (("fingerprint", str), ("position", int), ("prompts_too_long", int), ("carry", float)):
            value = state[field]
            if not isinstance(value, Mapping) or not all(isinstance(v, kind) for v in value.values()):
                raise DataError(f"the saved data state is damaged: '{field}' is {str(value)[:80]}; {fresh}")
            if set(value) != set(wanted[field]):
                raise DataError(f"the run was started with the domains {', '.join(value)}, now they are {', '.join(wanted[field])}; {fresh}")
        for name, value in wanted["fingerprint"].items():
            if state["fingerprint"][name] != value:
                raise DataError(f"domain '{name}' is not the data this run was started with (file, seed, template, hold-out or task changed); bring it back, or start a new run folder")
        if min(*state["position"].values(), *state["prompts_too_long"].values()) < 0 or max(map(abs, state["carry"].values())) > len(wanted["carry"]):
            raise DataError(f"the saved data state is damaged: {str(dict(state))[:200]}; {fresh}")
        return json.loads(json.dumps(state))


def make_row(index: int, name: str, example: Example, ids: tuple[int, ...]) -> Row:
    return Row(index, name, prompt_id(name, example.prompt), example.messages, example.prompt, example.answer,
               example.fields, example.verifier, example.solution, ids)
