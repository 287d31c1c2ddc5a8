"""What a program is compiled for decides which kernel is in it: looked up at lowering, as the machine that traces may be another."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

Array = jax.Array


def on_tpu(kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` in a program for TPU, else ``otherwise``: same arguments, same shapes and dtypes out. Both are traced, one is compiled."""
    return lambda *args: jax.lax.platform_dependent(*args, tpu=kernel, default=otherwise)


def refuse(x: Array, kernel: str, instead: str) -> Array:
    """``x``, of which no program can be made: for the branch of the platforms that a kernel asked for by name does not run on.

    Raises:
      ValueError: when it is lowered. "``kernel`` is a TPU kernel and this program is compiled for ...; use ``instead``, or None".
    """
    return jax.jit(functools.partial(_refused.bind, kernel=kernel, instead=instead))(x)  # outside of any jit there would be no lowering


_refused = Primitive("refused")
_refused.def_abstract_eval(lambda x, **_: x)


def _refusal(ctx: mlir.LoweringRuleContext, _: Any, *, kernel: str, instead: str) -> Any:
    seen = " and ".join(ctx.module_context.platforms)
    raise ValueError(f"{kernel} is a TPU kernel and this program is compiled for {seen}; use {instead}, or None to choose by platform")


mlir.register_lowering(_refused, _refusal)
