"""Token log-probability in plain XLA, a chunk of tokens at a time: runs on every backend.

The tokens are viewed as ``[shards, chunks, chunk]``. A loop with a *dynamic* number of turns walks the chunks that
hold a live token, so a dropped chunk costs nothing in either pass and nothing is recompiled when their number changes.
The backward pass computes the logits of a chunk again: four matmuls against three, for ``chunk * V`` floats of memory
instead of ``tokens * V``.

``shards`` is the number of devices the rows of the batch are split over, 1 outside a mesh. Each keeps its own
accumulator of the head's gradient, so the devices meet once after the loop and not once per chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import (
    VOCAB_AXIS,
    LiveFirst,
    batch_shards,
    chunk_size,
    gathered,
    live_chunks,
    logits,
    over_batch,
    put,
    row_dot,
    take,
)
from .reference import accumulation_dtype

Array = jax.Array

class Static(NamedTuple):
    """What the compiled program depends on besides shapes."""

    temperature: float
    with_entropy: bool
    chunk: int
    shards: int


def token_logprob(hidden: Array, head: Array, targets: Array, live: Array, *, temperature: float,
                  with_entropy: bool, chunk: int | None = None) -> tuple[Array, Array | None]:
    """As :func:`reference.token_logprob`, without an array of ``[tokens, V]`` in the forward or the backward pass.

    Args:
      chunk: tokens per chunk and device; default by :func:`chunk_size`.
    """
    tokens, shards = hidden.shape[0], batch_shards(hidden.shape[0])
    per_shard = tokens // shards
    chunk = chunk_size(per_shard, head.shape[0]) if chunk is None else chunk
    pad = -per_shard % chunk if per_shard else chunk
    pick = LiveFirst(live, shards)

    def split(x: Array) -> Array:
        x = pick(x)
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return over_batch(x.reshape(shards, -1, chunk, *x.shape[2:]), shards)

    hidden = jnp.where(live[:, None], hidden, 0)
    targets = jnp.where(live, targets, 0)
    static = Static(temperature, with_entropy, chunk, shards)
    out = _chunked(static, split(hidden), head, split(targets), split(live))
    logprob, entropy = (pick.back(x.reshape(shards, -1)[:, :per_shard]).reshape(tokens) for x in out)
    return logprob, entropy if with_entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static: Static, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Array, Array]:
    return _forward(static, hidden, head, targets, live)[0]


def _forward(static: Static, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Any, Any]:
    """``hidden [S, n, c, D]``, the others ``[S, n, c]`` -> (logprob, entropy) ``[S, n, c]`` and what backward needs."""
    dtype = accumulation_dtype(hidden)
    weight = gathered(head.astype(hidden.dtype), static.shards)
    order, count = live_chunks(live)

    def turn(i: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at = order[i]
        z = logits(take(hidden, at), weight, static.temperature)
        top = jnp.max(z, axis=-1, keepdims=True)
        shifted = z - top
        e = jnp.exp(shifted)
        total = jnp.sum(e, axis=-1)
        log_total = jnp.log(total)
        target = jnp.take_along_axis(shifted, take(targets, at)[..., None], axis=-1)[..., 0]
        entropy = log_total - row_dot(e, shifted) / total if static.with_entropy else jnp.zeros_like(total)
        alive = take(live, at)
        new = (jnp.where(alive, target - log_total, 0), jnp.where(alive, entropy, 0), top[..., 0] + log_total)
        return tuple(put(o, x, at) for o, x in zip(out, new))  # type: ignore[return-value]

    zeros = over_batch(jnp.zeros(targets.shape, dtype), static.shards)
    logprob, entropy, lse = lax.fori_loop(0, count, turn, (zeros, zeros, zeros))
    return (logprob, entropy), (hidden, head, targets, live, entropy, lse)


def _backward(static: Static, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    hidden, head, targets, live, entropy, lse = saved
    dtype = accumulation_dtype(hidden)
    weight = gathered(head.astype(hidden.dtype), static.shards)
    order, count = live_chunks(live)
    # A dead token inside a live chunk: its coefficients are zeroed here, its hidden state was zeroed by the caller.
    d_logprob, d_entropy = (jnp.where(live, g, 0) / static.temperature for g in cotangents)

    def turn(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = grads
        at = order[i]
        h = take(hidden, at)
        z = logits(h, weight, static.temperature)
        logp = z - take(lse, at)[..., None]
        p = jnp.exp(logp)
        slope = take(d_logprob, at)[..., None]
        d_z = -slope * p
        if static.with_entropy:
            d_z = -p * (slope + take(d_entropy, at)[..., None] * (logp + take(entropy, at)[..., None]))
        is_target = lax.broadcasted_iota(jnp.int32, z.shape, 2) == take(targets, at)[..., None]
        d_z = jnp.where(is_target, d_z + slope, d_z).astype(hidden.dtype)
        d_h = jnp.einsum("scv,vd->scd", d_z, weight, preferred_element_type=dtype)
        return (put(d_hidden, d_h.astype(hidden.dtype), at),
                d_head + jnp.einsum("scv,scd->svd", d_z, h, preferred_element_type=dtype))

    zero_head = over_batch(jnp.zeros((static.shards, *head.shape), dtype), static.shards, VOCAB_AXIS)
    d_hidden, d_head = lax.fori_loop(0, count, turn, (over_batch(jnp.zeros_like(hidden), static.shards), zero_head))
    return d_hidden, jnp.sum(d_head, axis=0).astype(head.dtype), None, None


_chunked.defvjp(_forward, _backward)
