"""The published data strategies: a score and an act at the published setting. One function and one table line each.

The table is that of DataFlex-RL (arXiv 2609.06107).
"""

from collections.abc import Callable
from functools import partial

from rlvr_jax.strategies import scores
from rlvr_jax.strategies.base import Strategy
from rlvr_jax.strategies.reweight import damp, power, quantile_band, reweight
from rlvr_jax.strategies.reweight import softmax as softmax_act
from rlvr_jax.strategies.select import band, max_variance, select, top_fraction, top_k


def difffilter(low: float = 0.2, high: float = 0.8) -> Strategy:
    """Keep groups solved sometimes: low < solve rate < high, strict on the counts (arXiv 2504.03380)."""
    return select(scores.solve_rate, partial(band, low=low, high=high))


def maxvar(fraction: float = 0.5) -> Strategy:
    """Keep per group the rows whose rewards vary most (PODS, arXiv 2504.13818).

    The paper standardises advantages again over the kept rows: that is ``algorithm.restandardise`` here.
    """
    return select(scores.reward, partial(max_variance, fraction=fraction))


def gfpo(k: int = 3, by: str = "efficiency") -> Strategy:
    """Keep per group the k rows of most reward per token (by: efficiency) or the k shortest (short) (arXiv 2508.09726).

    The paper standardises advantages again over the kept rows: that is ``algorithm.restandardise`` here.
    """
    return select(scores.reward, partial(top_k, k=k, by=by))


def topk(fraction: float = 0.5) -> Strategy:
    """Keep the rows of largest absolute advantage in the whole batch."""
    return select(scores.advantage_magnitude, partial(top_fraction, fraction=fraction))


def softmax(tau: float = 1.0) -> Strategy:
    """Weigh rows by softmax(|advantage| / tau) over the batch."""
    return reweight(scores.advantage_magnitude, partial(softmax_act, tau=tau))


def per(alpha: float = 0.5) -> Strategy:
    """Weigh rows by |advantage| ** alpha, as prioritised experience replay does (arXiv 1511.05952)."""
    return reweight(scores.advantage_magnitude, partial(power, alpha=alpha))


def diffband(low_q: float = 0.25, high_q: float = 0.75, focus_weight: float = 2.0) -> Strategy:
    """Weigh rows whose reward lies within the batch's [low_q, high_q] quantiles by focus_weight, the others by 1.

    On 0/1 rewards it does nothing while between low_q and high_q (25-75%) of the rows are solved: the quantiles are 0
    and 1 then, and every row lies inside. It is meant for graded rewards.
    """
    return reweight(scores.reward, partial(quantile_band, low_q=low_q, high_q=high_q, focus_weight=focus_weight))


def ar(alpha: float = 0.5) -> Strategy:
    """Weigh tokens by alpha * probability + 1 - alpha, so that unlikely tokens push less (arXiv 2505.12929)."""
    return reweight(scores.token_prob, partial(damp, alpha=alpha))


PRESETS: dict[str, Callable[..., Strategy]] = {
    f.__name__: f for f in (difffilter, maxvar, gfpo, topk, softmax, per, diffband, ar)
}
