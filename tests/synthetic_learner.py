"""A learner that costs nothing: a policy gradient on one ability per domain, thousands of runs at a time in numpy.

As in real runs, a pair shares its initial ability and its prompts (of training, in order, and of evaluation); sampling noise
and what follows from it is each run's own. Scores are counts of right answers, so they are discrete and tie.
"""

from typing import NamedTuple

import numpy as np

from rlvr_jax.compare.table import Curve, Run

DOMAINS = ("sums", "knights", "words")


class Learned(NamedTuple):
    """``curve[L, E, D]``: accuracy at each evaluation (the last one is the score); ``tokens[E]``: what they had cost."""

    curve: np.ndarray
    tokens: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """Mean over domains at the end, ``[L]``."""
        return self.curve[:, -1].mean(-1)


def learn(pairs: int, arm: int, *, rate: float = 1.0, flip: float = 0.0, steps: int = 12, prompts: int = 50, seed: int = 0) -> Learned:
    """``pairs`` runs of one arm; arms of equal ``seed`` are paired.

    Args:
      arm: its own noise; everything else of two arms is equal unless told.
      rate: learning rate, in units of the usual one.
      flip: share of training rewards that are wrong.
      prompts: evaluation prompts a domain.
    """
    shared, own = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1 + arm])
    ability = shared.normal(-0.4, 0.3, (pairs, 1)) + shared.normal(0, 0.2, (pairs, len(DOMAINS)))
    held_out = shared.normal(0, 1, (pairs, len(DOMAINS), prompts))
    curve = []
    for step in range(steps + 1):
        if step % (steps // 4) == 0:
            curve.append((own.random(held_out.shape) < _right(ability[..., None] - held_out)).mean(-1))
        difficulty = shared.normal(0, 1, (pairs, len(DOMAINS), 6, 1))
        p = _right(ability[..., None, None] - difficulty)
        answer = own.random((*p.shape[:-1], 4)) < p
        reward = answer ^ (own.random(answer.shape) < flip)
        advantage = reward - reward.mean(-1, keepdims=True)
        ability = ability + rate * 0.5 * (advantage * (answer - p)).mean((-1, -2))
    return Learned(np.stack(curve, 1), np.arange(0, steps + 1, steps // 4) * 100.0)


def runs(arm: str, learned: Learned, first: int, count: int, curves: bool = False) -> list[Run]:
    """Rows of a table: runs ``first ... first + count - 1``, paired by their place."""
    return [Run(arm, str(i), dict(zip(DOMAINS, learned.curve[i, -1].tolist(), strict=True)),
                {"tokens": Curve(learned.tokens, learned.curve[i].mean(-1))} if curves else {}) for i in range(first, first + count)]


def _right(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))
