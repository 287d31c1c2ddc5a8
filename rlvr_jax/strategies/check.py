"""Traces a strategy on abstract signals, so that a misfit is found at start-up and not in the middle of a run."""

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.strategies.base import Strategy
from rlvr_jax.types import Signals

# Distinct sizes, so that a transposed or reduced result cannot pass for the right one.
N, G, T = 3, 4, 5


def check(strategy: Strategy, label: str) -> frozenset[str]:
    """What the strategy needs ("entropy", "groups"), after a trace without arithmetic.

    Entropy counts as needed when the traced computation reads it, so a user's strategy need not declare it.

    Args:
      label: how messages call the strategy.

    Raises:
      ValueError: it fails on signals of the promised shapes, returns weights of another shape than ``[N, G]`` or
        ``[N, G, T]``, or a state of another structure than ``init`` gives.
    """
    found = strategy.needs
    for per_token in (False, True):  # advantages of a critic are per token
        signals = abstract_signals(per_token)
        try:
            state = jax.eval_shape(strategy.init)
            jaxpr, out = jax.make_jaxpr(strategy.apply, return_shape=True)(state, signals)
            if not isinstance(out, tuple) or len(out) != 2:
                raise ValueError(f"apply returned {type(out).__name__ if not hasattr(out, 'shape') else 'one array'}, expected (weights, state): end it with 'return weights, state'")
            weights, after = out
        except ValueError as e:
            raise ValueError(f"strategy {label}: {_first_line(e)}") from e
        except Exception as e:
            raise ValueError(f"strategy {label} fails on signals of N={N}, G={G}, T={T}: {type(e).__name__}: {_first_line(e)}") from e
        _check_result(label, weights, state, after)
        place = len(jax.tree.leaves(state)) + _leaf_index(signals, "entropy")
        if _reads(jaxpr.jaxpr, place):
            found |= {"entropy"}
    return found


def abstract_signals(per_token: bool) -> Signals:
    """Signals of shapes only, entropy included; advantages ``[N, G, T]`` when ``per_token``."""
    x: Any = jax.ShapeDtypeStruct
    f, i, b = jnp.float32, jnp.int32, jnp.bool_
    return Signals(
        reward=x((N, G), f), advantage=x((N, G, T) if per_token else (N, G), f), logprob=x((N, G, T), f),
        mask=x((N, G, T), b), length=x((N, G), i), domain=x((N,), i), step=x((), i), valid=x((N, G), b),
        correct=x((N, G), b), truncated=x((N, G), b), age=x((N, G), i), entropy=x((N, G, T), f))


def _check_result(label: str, weights: Any, state: Any, after: Any) -> None:
    shape = getattr(weights, "shape", None)
    if shape not in ((N, G), (N, G, T)):
        raise ValueError(f"strategy {label} gives weights of shape {shape} for N={N}, G={G}, T={T}; expected [N, G] or [N, G, T]")
    same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
    before_leaves, before = jax.tree.flatten(state)
    after_leaves, structure = jax.tree.flatten(after)
    if str(before) != str(structure) or not all(map(same, before_leaves, after_leaves)):
        raise ValueError(f"strategy {label}: apply returns a state of another structure, shape or dtype than init; keep them fixed")


def _leaf_index(signals: Signals, field: str) -> int:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(signals)[0]]
    return paths.index(f".{field}")


def _reads(jaxpr: Any, place: int) -> bool:
    """Whether input number ``place`` of a jaxpr is used, looking into nested jit calls."""
    var = jaxpr.invars[place]
    if any(v is var for v in jaxpr.outvars):
        return True
    for eqn in jaxpr.eqns:
        for i, v in enumerate(eqn.invars):
            if v is not var:
                continue
            inner = eqn.params.get("jaxpr")
            inner = getattr(inner, "jaxpr", inner)
            if inner is None or len(inner.invars) != len(eqn.invars) or _reads(inner, i):
                return True
    return False


def _first_line(e: Exception) -> str:
    return next((line.strip() for line in str(e).splitlines() if line.strip()), "")
