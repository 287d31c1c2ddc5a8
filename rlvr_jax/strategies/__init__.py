"""Data strategies: which rows (tokens) a step learns from, as pure functions score -> act -> weights.

``build(["difffilter"])`` gives a :class:`Strategy`; ``weights, state = s.apply(s.init(), signals)``.
"""

from rlvr_jax.strategies.base import Act, Score, Strategy
from rlvr_jax.strategies.compose import chain, scheduled
from rlvr_jax.strategies.registry import build, describe
from rlvr_jax.strategies.reweight import reweight
from rlvr_jax.strategies.select import select

__all__ = ["Act", "Score", "Strategy", "build", "chain", "describe", "reweight", "scheduled", "select"]
