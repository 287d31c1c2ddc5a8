"""How the figures of a comparison are written, the same on a page, in a paper's table and in a terminal."""

import math

from rlvr_jax.compare.result import Comparison
from rlvr_jax.compare.statistics import MOST_PAIRS

HEAD = ["arm", "mean ± sd", "difference", "95% interval", "p", "smallest p", "p (Holm)", "seeds needed", "verdict"]


def verdict_row(comparison: Comparison, arm: str, measure: str) -> list[str]:
    """An arm's cells under HEAD; the baseline has no difference."""
    score, effect, digits = comparison.scores[arm, measure], comparison.effects.get((arm, measure)), decimals(comparison, measure)
    cells = [arm, figure(score.mean, digits) + (f" ± {figure(score.sd, digits)}" if math.isfinite(score.sd) else "")]
    if effect is None:
        return cells + ["–"] * 6 + ["baseline" if arm == comparison.baseline else "–"]
    interval = f"{figure(effect.low, digits, sign=True)} to {figure(effect.high, digits, sign=True)}" if math.isfinite(effect.low) else "–"
    needed = "–" if not effect.difference or effect.pairs < 2 else f"> {MOST_PAIRS}" if effect.pairs_needed is None else str(effect.pairs_needed)
    return [*cells, figure(effect.difference, digits, sign=True), interval, chance(effect.p), chance(effect.smallest_p), chance(effect.p_holm), needed, effect.verdict]


def decimals(comparison: Comparison, measure: str) -> int:
    """Digits behind the point that keep four that matter, whether scores are fractions or percentages."""
    most = max((abs(s.mean) for (_, m), s in comparison.scores.items() if m == measure and math.isfinite(s.mean)), default=1.0)
    return min(max(4 - math.ceil(math.log10(max(most, 1e-9) * 0.9999999)), 0), 8)


def figure(value: float, digits: int, sign: bool = False) -> str:
    """A score or a difference; '–' if there is none."""
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def chance(p: float) -> str:
    """A p to two digits that matter: 0.25, 0.012, 0.00049."""
    return f"{p:.2g}" if p >= 1e-4 else f"{p:.1e}"
