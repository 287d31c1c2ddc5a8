"""Accuracy on held-out prompts, per domain, with the sampler that training uses."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.rewards import extract
from rlvr_jax.rollout.keys import occurrences
from rlvr_jax.types import Rollout

# Evaluation always draws the same random numbers, whatever the seed of the run: two runs differ by their weights only.
EVAL_SEED = 0x5EED


class Answers(NamedTuple):
    """B = N * G answers to N prompts, a prompt's G samples side by side.

    ``domain`` and ``first``: they are the prompts number ``first`` and following of a domain; ``rows[N]`` the prompts, ``texts[B]`` the
    answers, ``tokens[B]`` their lengths, ``truncated[B]``, and the verdicts ``reward[B]``, ``correct[B]``, ``valid[B]`` (not unknown).
    """

    domain: str
    first: int
    rows: Sequence[Any]
    texts: Sequence[str]
    tokens: np.ndarray
    truncated: np.ndarray
    reward: np.ndarray
    correct: np.ndarray
    valid: np.ndarray


class Score(NamedTuple):
    """What the answers to N prompts were worth.

    ``correct`` and ``known`` (verdict not unknown) samples, all samples, their total length in tokens, truncated ones;
    ``prompts[N]``: (known, correct, share of the vote) of each prompt, see :func:`majority`.
    """

    correct: int = 0
    known: int = 0
    total: int = 0
    tokens: int = 0
    truncated: int = 0
    prompts: tuple[tuple[int, int, float], ...] = ()

    def plus(self, texts: Sequence[str], tokens: Sequence[int] | np.ndarray, truncated: Sequence[bool] | np.ndarray, correct: np.ndarray, valid: np.ndarray,
             G: int) -> "Score":
        """With the answers to more prompts, G samples each; see :class:`Answers`."""
        more = (np.sum(correct & valid), np.sum(valid), len(texts), np.sum(tokens), np.sum(truncated))
        return Score._make([*(a + int(b) for a, b in zip(self[:5], more)), self.prompts + _prompts(texts, correct, valid, G)])

    @property
    def accuracy(self) -> float:
        """Share of known verdicts that are correct (pass@1); 0 when nothing is known."""
        return self.correct / max(self.known, 1)

    def pass_at(self, k: int) -> float:
        """The chance that one of k samples is right, unbiased, mean over the prompts with at least k known samples; 0 without one.

        ``1 - C(n - c, k) / C(n, k)`` with c of n right (arXiv 2107.03374).
        """
        enough = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c, _ in self.prompts if n >= k]
        return sum(enough) / max(len(enough), 1)

    @property
    def stderr(self) -> float:
        """Standard error of the accuracy over the choice of prompts (a prompt's samples are one draw); 0 with fewer than two."""
        shares = [c / n for n, c, _ in self.prompts if n]
        return float(np.std(shares, ddof=1) / math.sqrt(len(shares))) if len(shares) > 1 else 0.0

    @property
    def majority(self) -> float:
        """How often the most frequent answer of a prompt's samples is right; prompts without a known sample are left out."""
        voted = [vote for n, _, vote in self.prompts if n]
        return sum(voted) / max(len(voted), 1)

    def measures(self) -> dict[str, float]:
        """``eval`` (accuracy); with n > 1 samples a prompt also ``pass_at_2 ... pass_at_n`` (powers of two, and n) and ``majority_of_n``."""
        n = self.total // max(len(self.prompts), 1)
        more = sorted({2**i for i in range(1, n.bit_length()) if 2**i < n} | ({n} if n > 1 else set()))
        return {"eval": self.accuracy} | {f"pass_at_{k}": self.pass_at(k) for k in more} | ({f"majority_of_{n}": self.majority} if n > 1 else {})


def majority(texts: Sequence[str], correct: np.ndarray, valid: np.ndarray) -> float:
    """Whether the answer that most samples of a prompt give is right: 1 or 0, and between them the chance in a fair draw of a tie.

    Answers are told apart by their final box, tag or text, white space and case aside; all that the verifier calls right count
    as one. A sample without an answer, or without a verdict, does not vote.
    """
    votes: dict[str | None, int] = {}
    for text, right, known in zip(texts, correct, valid):
        region = extract.final_region(text)
        if known and (right or region is not None):
            answer = None if right else " ".join(region[0].casefold().split()) if region else ""
            votes[answer] = votes.get(answer, 0) + 1
    most = [answer for answer, n in votes.items() if n == max(votes.values())]
    return (None in most) / len(most) if most else 0.0


def evaluate(engine: Any, params: Any, rows: Mapping[str, Sequence[Any]], judge: Callable[[Sequence[Any], list[str]], Any], decode: Callable[[Sequence[int]], str], *,
             samples: int, batch_prompts: int, on_batch: Callable[[Answers], None] = lambda answers: None, skip: Mapping[str, int] | None = None) -> dict[str, Score]:
    """Scores the rows of every domain with ``samples`` answers each.

    Args:
      engine: see :mod:`rlvr_jax.rollout.engine`; its sampling parameters decide greedy or not.
      rows: domain name -> data rows (``token_ids``, ``prompt_id``, ``domain``).
      judge: ``(rows, texts) -> (reward [B], correct [B], valid [B])``, one row per text.
      on_batch: told the answers to each batch of prompts (files, progress bars).
      skip: domain name -> how many of its first rows are passed over and do not count.
    """
    out: dict[str, Score] = {}
    engine.update_weights(params, 0)
    for name, of_domain in rows.items():
        score = Score()
        ids = np.array([r.prompt_id for r in of_domain], np.int64)
        earlier = occurrences(ids)  # over all rows, so that an answer does not depend on where a batch begins
        for part in _batches((skip or {}).get(name, 0), len(of_domain), batch_prompts):
            batch = of_domain[part]
            rollout = engine.generate([list(r.token_ids) for r in batch], ids[part], np.array([r.domain for r in batch]), samples, EVAL_SEED, 0, earlier[part])
            texts = response_texts(rollout, decode)
            reward, correct, valid = judge([r for r in batch for _ in range(samples)], texts)
            answers = Answers(name, part.start, batch, texts, np.asarray(rollout.response_length), np.asarray(rollout.truncated), reward, correct, valid)
            score = score.plus(texts, answers.tokens, answers.truncated, correct, valid, samples)
            on_batch(answers)
        out[name] = score
    engine.release()
    return out


def response_texts(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The B responses as text, special tokens left out."""
    tokens, start, length = np.asarray(rollout.tokens), np.asarray(rollout.prompt_length), np.asarray(rollout.response_length)
    return [decode(t[a:a + n].tolist()) for t, a, n in zip(tokens, start, length)]


def _prompts(texts: Sequence[str], correct: np.ndarray, valid: np.ndarray, G: int) -> tuple[tuple[int, int, float], ...]:
    groups = [slice(i, i + G) for i in range(0, len(texts), G)]
    return tuple((int(valid[g].sum()), int((correct & valid)[g].sum()), majority(texts[g], correct[g], valid[g])) for g in groups)


def _batches(first: int, end: int, size: int) -> Iterator[slice]:
    """``first ... end - 1`` cut at the multiples of ``size``, wherever it begins."""
    while first < end:
        stop = min(first - first % size + size, end)
        yield slice(first, stop)
        first = stop
