"""Accuracy on held-out prompts, per domain, with the sampler that training uses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.types import Rollout

# Evaluation always draws the same random numbers, whatever the seed of the run: two runs differ by their weights only.
EVAL_SEED = 0x5EED


class Score(NamedTuple):
    """correct and known (verdict not unknown) samples, all samples, their total length in tokens, truncated ones."""

    correct: int = 0
    known: int = 0
    total: int = 0
    tokens: int = 0
    truncated: int = 0

    @property
    def accuracy(self) -> float:
        """Share of known verdicts that are correct; 0 when nothing is known."""
        return self.correct / max(self.known, 1)


def evaluate(engine: Any, params: Any, rows: dict[str, Sequence[Any]], judge: Callable[[Sequence[Any], list[str]], Any], decode: Callable[[Sequence[int]], str], *,
             samples: int, batch_prompts: int, on_batch: Callable[[int], None] = lambda n: None) -> dict[str, Score]:
    """Scores every row of every domain with ``samples`` answers each.

    Args:
      engine: see :mod:`rlvr_jax.rollout.engine`; its sampling parameters decide greedy or not.
      rows: domain name -> data rows (``token_ids``, ``prompt_id``, ``domain``).
      judge: ``(rows, texts) -> (reward [B], correct [B], valid [B])``, one row per text.
      on_batch: told the number of prompts just finished (progress bars).
    """
    out: dict[str, Score] = {}
    engine.update_weights(params, 0)
    for name, domain_rows in rows.items():
        score = Score()
        for batch in _batches(domain_rows, batch_prompts):
            rollout = engine.generate([list(r.token_ids) for r in batch], np.array([r.prompt_id for r in batch]),
                                      np.array([r.domain for r in batch]), samples, EVAL_SEED, 0)
            texts = response_texts(rollout, decode)
            _, correct, valid = judge([r for r in batch for _ in range(samples)], texts)
            score = Score(*(a + int(b) for a, b in zip(score, (
                np.sum(correct & valid), np.sum(valid), len(texts), np.sum(rollout.response_length), np.sum(rollout.truncated)))))
            on_batch(len(batch))
        out[name] = score
    engine.release()
    return out


def response_texts(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The B responses as text, special tokens left out."""
    tokens, start, length = np.asarray(rollout.tokens), np.asarray(rollout.prompt_length), np.asarray(rollout.response_length)
    return [decode(t[a:a + n].tolist()) for t, a, n in zip(tokens, start, length)]


def _batches(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for i in range(0, len(rows), size):
        yield rows[i:i + size]
