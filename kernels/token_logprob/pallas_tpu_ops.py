"""What the TPU kernels of both passes do inside a tile."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .logits import Logits
from .pallas_tpu_tiles import GRAD_COLUMNS

Array = jax.Array


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matmul over one axis of each, in float32; float32 inputs are multiplied as such and not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _product(head: Any, hidden: Any) -> Array:
    """``head @ hidden.T`` of two references, a part of the width at a time where copies of whole factors would fill the memory.

    float32 factors are split into bfloat16 ones, three copies of each.
    """
    width, columns = head.shape[1], GRAD_COLUMNS if head.dtype == jnp.float32 else 4096
    if width <= columns:
        return dot(head[...], hidden[...], (1, 1))

    def turn(i: Array, u: Array) -> Array:
        at = pl.ds(pl.multiple_of(i * columns, columns), columns)
        return u + dot(head[:, at], hidden[:, at], (1, 1))

    whole = width // columns
    u = lax.fori_loop(0, whole, turn, jnp.zeros((head.shape[0], hidden.shape[0]), jnp.float32))
    return u + dot(head[:, whole * columns:], hidden[:, whole * columns:], (1, 1)) if width % columns else u


def tile_logits(static: Logits, head: Any, hidden: Any) -> tuple[Array, Array | float]:
    """References ``[V, D], [n, D] -> z [V, n]`` and the slope ``dz / d(head @ hidden.T)``."""
    u = _product(head, hidden)
    if static.soft_cap is None:
        slope = static.logit_scale / static.temperature
        return (u if slope == 1 else u * slope), slope
    u = u * (static.logit_scale / static.soft_cap)
    e = jnp.exp(-2 * jnp.abs(u))  # 1 - tanh(u)^2 = 4 e / (1 + e)^2 keeps its digits where tanh is almost 1
    return jnp.tanh(u) * (static.soft_cap / static.temperature), e / ((1 + e) * (1 + e)) * (4 * static.logit_scale / static.temperature)


def for_each(pieces: Array | int, size: int, body: Callable[[Any], None]) -> None:
    """``body`` for the first ``pieces`` slices of ``size``, as a loop in the program: unrolled code would be megabytes."""
    if isinstance(pieces, int) and pieces <= 1:
        return body(pl.ds(0, size)) if pieces else None

    def turn(i: Array, carry: None) -> None:
        body(pl.ds(pl.multiple_of(i * size, size), size))

    lax.fori_loop(0, pieces, turn, None)


def zero_from(ref: Any, first: Array | int) -> None:
    """Rows from ``first`` on become 0 in place, whatever they hold: a product with NaN is NaN even where the other factor is 0."""
    rows = 32  # a whole tile of any dtype; small, so that no second copy of the block is needed

    def turn(i: Array, carry: None) -> None:
        at = pl.ds(pl.multiple_of(i * rows, rows), rows)
        index = i * rows + lax.broadcasted_iota(jnp.int32, (rows, ref.shape[1]), 0)
        ref[at, :] = jnp.where(index < first, ref[at, :], 0)

    lax.fori_loop(lax.div(first, rows), ref.shape[0] // rows, turn, None)


def live_count(count: Array, tokens: int) -> Array:
    """``[] -> [1]``, as it is handed to the index maps."""
    return jnp.minimum(jnp.asarray(count, jnp.int32), tokens).reshape(1)


def target_row(targets: Array, vocab: int, padded: int) -> Array:
    """``[n] -> [1, padded]``; a target that is not in this shard becomes -1, which is in no tile."""
    known = jnp.where((targets >= 0) & (targets < vocab), targets, -1)
    return jnp.pad(known, (0, padded - targets.shape[0]), constant_values=-1)[None]
