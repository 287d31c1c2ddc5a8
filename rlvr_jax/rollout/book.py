"""What the host knows of a rollout: every row's tokens, which slot holds it, which rows wait. NumPy only."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.types import Rollout

# Tokens before the newest ones that are decoded with them when a stop string is looked for, beside one for each byte of
# the string: special tokens have no text, and a tokenizer may treat the first token of a text in its own way.
STOP_MARGIN = 8


class Finished(NamedTuple):
    """A row that has ended.

    Attributes:
      row: its number.
      tokens: of its answer, the end token included.
      truncated: a limit cut it.
      logprob: sum of its tokens' logprobs, nats.
    """

    row: int
    tokens: list[int]
    truncated: bool
    logprob: float


class Waiting(NamedTuple):
    """A row that has its first token and waits for a slot: its prompt is entry ``entry`` of ``prompts``."""

    row: int
    prompts: Any
    entry: int


class Book:
    """Rows, slots and what was drawn.

    Args:
      prompt_length: ``[B] int32``.
      cap: ``[B] int32`` most new tokens.
      slots: how many there are at first.
      entropy: whether entropies are kept.
      stop: strings that end a row; decode: tokens to text, needed with them.
    """

    def __init__(self, prompt_length: np.ndarray, cap: np.ndarray, slots: int, *, entropy: bool, stop: Sequence[str] = (),
                 decode: Callable[[Sequence[int]], str] | None = None):
        B, R = len(cap), int(cap.max())
        self.prompt_length, self.cap = prompt_length, cap
        self.token = np.zeros((B, R), np.int32)
        self.logprob, self.behavior = np.zeros((B, R), np.float32), np.zeros((B, R), np.float32)
        self.entropy = np.zeros((B, R), np.float32) if entropy else None
        self.length = np.zeros(B, np.int32)
        self.key = np.zeros((B, 2), np.uint32)
        self.ended, self.nonfinite, self.done = np.zeros(B, bool), np.zeros(B, bool), np.zeros(B, bool)
        self.row_of = np.full(slots, -1)  # -1 = the slot is free
        self.waiting: deque[Waiting] = deque()
        self._stop, self._decode = tuple(stop), decode
        self._margin = STOP_MARGIN + max((len(s.encode()) for s in stop), default=0)
        self._checked = np.zeros(B, np.int32)  # tokens known to hold no stop string
        self._finished: list[int] = []

    @property
    def free(self) -> int:
        return int(np.sum(self.row_of < 0))

    @property
    def live(self) -> int:
        return len(self.row_of) - self.free

    def first(self, rows: np.ndarray, drawn: Any, ended: np.ndarray, prompts: Any, index: np.ndarray) -> None:
        """Takes the first tokens of ``rows``; those that go on wait for a slot."""
        self.key[rows] = drawn.key
        alone = lambda x: None if x is None else x[:, None]  # noqa: E731
        self._add(rows, alone(drawn.token), alone(drawn.logprob), alone(drawn.behavior_logprob), alone(drawn.entropy), drawn.finite.astype(np.int32),
                  ended & drawn.finite, ~drawn.finite)
        self.waiting.extend(Waiting(int(r), prompts, int(i)) for r, i in zip(rows, index) if not self.done[r])

    def burst(self, drawn: Any) -> None:
        """Takes what the slots drew, and frees those whose rows are done."""
        slots = np.flatnonzero(self.row_of >= 0)
        rows = self.row_of[slots]
        pick = lambda x: None if x is None else x[slots]  # noqa: E731
        self._add(rows, pick(drawn.token), pick(drawn.logprob), pick(drawn.behavior_logprob), pick(drawn.entropy), drawn.count[slots],
                  drawn.ended[slots], drawn.nonfinite[slots])
        self.row_of[slots[self.done[rows]]] = -1

    def _add(self, rows: np.ndarray, token: Any, logprob: Any, behavior: Any, entropy: Any, count: np.ndarray,
             ended: np.ndarray, nonfinite: np.ndarray) -> None:
        fresh = np.arange(token.shape[1]) < np.where(self.done[rows], 0, count)[:, None]
        place = (self.length[rows][:, None] + np.arange(token.shape[1]))[fresh]
        at = (np.repeat(rows, fresh.sum(1)), place)
        self.token[at], self.logprob[at], self.behavior[at] = token[fresh], logprob[fresh], behavior[fresh]
        if self.entropy is not None:
            self.entropy[at] = entropy[fresh]
        going = ~self.done[rows]  # a stop string may have ended the row while this burst ran
        self.length[rows] += fresh.sum(1, dtype=np.int32)
        self.ended[rows] |= ended & going
        self.nonfinite[rows] |= nonfinite & going
        over = going & (self.ended[rows] | self.nonfinite[rows] | (self.length[rows] >= self.cap[rows]))
        self.done[rows[over]] = True
        self._finished.extend(rows[over].tolist())

    def seat(self) -> tuple[Any, list[int], list[int]]:
        """Rows that wait for the same prefilled prompts take free slots: ``(prompts, entries of them, slots)``."""
        free = np.flatnonzero(self.row_of < 0).tolist()
        prompts = self.waiting[0].prompts
        source, slots = [], []
        while free and self.waiting and self.waiting[0].prompts is prompts:
            one = self.waiting.popleft()
            if self.done[one.row]:
                continue
            slot = free.pop(0)
            self.row_of[slot] = one.row
            source.append(one.entry)
            slots.append(slot)
        return prompts, source, slots

    def deliver(self) -> list[Finished]:
        """Rows finished since the last call. Looks for stop strings first: a row that holds one ends there."""
        if self._stop:
            self._cut_at_stop()
        rows, self._finished = self._finished, []
        return [Finished(r, self.token[r, : self.length[r]].tolist(), not bool(self.ended[r]), float(self.logprob[r].sum())) for r in rows]

    def _cut_at_stop(self) -> None:
        assert self._decode is not None
        for r in [*np.flatnonzero((self.length > self._checked) & ~self.done), *self._finished]:
            old, new = int(self._checked[r]), int(self.length[r])
            start = max(0, old - self._margin)
            text = lambda n, r=r, start=start: self._decode(self.token[r, start:n].tolist())  # type: ignore[misc]  # noqa: E731
            self._checked[r] = new
            if new == old or not _holds(text(new), self._stop):
                continue
            n = next(n for n in range(old + 1, new + 1) if _holds(text(n), self._stop))
            for x in (self.token, self.logprob, self.behavior, self.entropy):
                if x is not None:
                    x[r, n:] = 0
            self.length[r], self.ended[r], self.nonfinite[r] = n, True, False
            if not self.done[r]:
                self.done[r] = True
                self._finished.append(int(r))
        self.row_of[(self.row_of >= 0) & self.done[self.row_of]] = -1

    def rollout(self, prompts: Sequence[Sequence[int]], T: int, prompt_id: np.ndarray, domain: np.ndarray, version: int) -> Rollout:
        """All rows, as arrays of NumPy; G = rows / prompts."""
        B, G = len(self.cap), len(self.cap) // len(prompts)
        tokens = np.zeros((B, T), np.int32)
        for i, p in enumerate(prompts):
            tokens[i * G : (i + 1) * G, : len(p)] = p
        fresh = np.arange(self.token.shape[1]) < self.length[:, None]
        at = (np.repeat(np.arange(B), self.length), (self.prompt_length[:, None] + np.arange(self.token.shape[1]))[fresh])

        def place(x: np.ndarray) -> np.ndarray:
            out = np.zeros((B, T), x.dtype)
            out[at] = x[fresh]
            return out

        tokens[at] = self.token[fresh]
        rep = lambda x: np.repeat(np.asarray(x, np.int32), G)  # noqa: E731
        return Rollout(tokens=tokens, prompt_length=self.prompt_length, response_length=self.length, logprob=place(self.logprob),  # type: ignore[arg-type]
                       behavior_logprob=place(self.behavior), entropy=None if self.entropy is None else place(self.entropy), truncated=~self.ended,  # type: ignore[arg-type]
                       prompt_id=rep(prompt_id), domain=rep(domain), policy_step=np.full(B, version, np.int32))  # type: ignore[arg-type]


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(s in text for s in stop)
