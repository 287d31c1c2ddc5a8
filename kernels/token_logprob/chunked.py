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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .reference import accumulation_dtype

Array = jax.Array

# The trainer's mesh axes, where a mesh is set: rows go over the first two, the vocabulary over the third.
BATCH_AXES = ("data", "fsdp")
VOCAB_AXIS = "tensor"

LOGITS_PER_CHUNK = 2**24
"""64 MiB of float32 logits: large enough to keep a matmul busy, small beside any model with such a vocabulary."""


class Static(NamedTuple):
    """What the compiled program depends on besides shapes."""

    temperature: float
    with_entropy: bool
    chunk: int
    shards: int


def chunk_size(tokens: int, vocab: int) -> int:
    """Tokens per chunk on one device: at most ``LOGITS_PER_CHUNK / V``, within 128..1024, all chunks of equal size.

    Equal chunks (rounded up to a multiple of 8) waste at most seven tokens each on padding.
    """
    limit = min(max(LOGITS_PER_CHUNK // vocab // 64 * 64, 128), 1024)
    chunks = max(-(-tokens // limit), 1)
    return max(-(-tokens // chunks // 8) * 8, 8)


def token_logprob(hidden: Array, head: Array, targets: Array, live: Array, *, temperature: float,
                  with_entropy: bool, chunk: int | None = None) -> tuple[Array, Array | None]:
    """As :func:`reference.token_logprob`, without an array of ``[tokens, V]`` in the forward or the backward pass.

    Args:
      chunk: tokens per chunk and device; default by :func:`chunk_size`.
    """
    tokens, shards = hidden.shape[0], _batch_shards(hidden.shape[0])
    per_shard = tokens // shards
    chunk = chunk_size(per_shard, head.shape[0]) if chunk is None else chunk
    pad = -per_shard % chunk if per_shard else chunk

    def split(x: Array) -> Array:
        x = x.reshape(shards, per_shard, *x.shape[1:])
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return _over_batch(x.reshape(shards, -1, chunk, *x.shape[2:]), shards)

    hidden = jnp.where(live[:, None], hidden, 0)
    targets = jnp.where(live, targets, 0)
    static = Static(temperature, with_entropy, chunk, shards)
    out = _chunked(static, split(hidden), head, split(targets), split(live))
    logprob, entropy = (x.reshape(shards, -1)[:, :per_shard].reshape(tokens) for x in out)
    return logprob, entropy if with_entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static: Static, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Array, Array]:
    return _forward(static, hidden, head, targets, live)[0]


def _forward(static: Static, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Any, Any]:
    """``hidden [S, n, c, D]``, the others ``[S, n, c]`` -> (logprob, entropy) ``[S, n, c]`` and what backward needs."""
    dtype = accumulation_dtype(hidden)
    weight = _gathered(head.astype(hidden.dtype), static.shards)
    order, count = _live_chunks(live)

    def turn(i: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at = order[i]
        z = _logits(static, _take(hidden, at), weight)
        top = jnp.max(z, axis=-1, keepdims=True)
        shifted = z - top
        e = jnp.exp(shifted)
        total = jnp.sum(e, axis=-1)
        log_total = jnp.log(total)
        target = jnp.take_along_axis(shifted, _take(targets, at)[..., None], axis=-1)[..., 0]
        entropy = log_total - _row_dot(e, shifted) / total if static.with_entropy else jnp.zeros_like(total)
        alive = _take(live, at)
        new = (jnp.where(alive, target - log_total, 0), jnp.where(alive, entropy, 0), top[..., 0] + log_total)
        return tuple(_put(o, x, at) for o, x in zip(out, new))  # type: ignore[return-value]

    zeros = _over_batch(jnp.zeros(targets.shape, dtype), static.shards)
    logprob, entropy, lse = lax.fori_loop(0, count, turn, (zeros, zeros, zeros))
    return (logprob, entropy), (hidden, head, targets, live, entropy, lse)


def _backward(static: Static, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    hidden, head, targets, live, entropy, lse = saved
    dtype = accumulation_dtype(hidden)
    weight = _gathered(head.astype(hidden.dtype), static.shards)
    order, count = _live_chunks(live)
    # A dead token inside a live chunk: its coefficients are zeroed here, its hidden state was zeroed by the caller.
    d_logprob, d_entropy = (jnp.where(live, g, 0) / static.temperature for g in cotangents)

    def turn(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = grads
        at = order[i]
        h = _take(hidden, at)
        z = _logits(static, h, weight)
        logp = z - _take(lse, at)[..., None]
        p = jnp.exp(logp)
        slope = _take(d_logprob, at)[..., None]
        d_z = -slope * p
        if static.with_entropy:
            d_z = -p * (slope + _take(d_entropy, at)[..., None] * (logp + _take(entropy, at)[..., None]))
        is_target = lax.broadcasted_iota(jnp.int32, z.shape, 2) == _take(targets, at)[..., None]
        d_z = jnp.where(is_target, d_z + slope, d_z).astype(hidden.dtype)
        d_h = jnp.einsum("scv,vd->scd", d_z, weight, preferred_element_type=dtype)
        return (_put(d_hidden, d_h.astype(hidden.dtype), at),
                d_head + jnp.einsum("scv,scd->svd", d_z, h, preferred_element_type=dtype))

    zero_head = _over_batch(jnp.zeros((static.shards, *head.shape), dtype), static.shards, VOCAB_AXIS)
    d_hidden, d_head = lax.fori_loop(0, count, turn, (_over_batch(jnp.zeros_like(hidden), static.shards), zero_head))
    return d_hidden, jnp.sum(d_head, axis=0).astype(head.dtype), None, None


_chunked.defvjp(_forward, _backward)


def _logits(static: Static, hidden: Array, weight: Array) -> Array:
    z = jnp.einsum("scd,vd->scv", hidden, weight, preferred_element_type=accumulation_dtype(hidden))
    return z / static.temperature if static.temperature != 1 else z


def _row_dot(a: Array, b: Array) -> Array:
    """``sum(a * b, axis=-1)`` as a dot product: on CPU the fused sum adds one by one and loses two digits at 50k terms."""
    return jnp.einsum("scv,scv->sc", a, b, precision=lax.Precision.HIGHEST)


def _live_chunks(live: Array) -> tuple[Array, Array]:
    """``[S, n, c] bool`` -> (chunk numbers, those with a live token first; how many those are)."""
    alive = jnp.any(live, axis=(0, 2))
    return jnp.argsort(~alive, stable=True), jnp.sum(alive, dtype=jnp.int32)


def _take(x: Array, at: Array) -> Array:
    return lax.dynamic_index_in_dim(x, at, axis=1, keepdims=False)


def _put(x: Array, value: Array, at: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), at, axis=1)


def _auto_axes() -> dict[str, int]:
    """Mesh axes of the context that the compiler may lay out, with their sizes; none outside a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return {}
    return {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}


def _batch_shards(tokens: int) -> int:
    """Devices the tokens are split over; 1 where they do not divide (the compiler then lays them out as it likes)."""
    sizes = _auto_axes()
    shards = 1
    for name in BATCH_AXES:
        shards *= sizes.get(name, 1)
    return shards if tokens % shards == 0 else 1


def _over_batch(x: Array, shards: int, second: Any = None) -> Array:
    """Axis 0 over the batch axes of the mesh; axis 1 over ``second``."""
    axes = _auto_axes()
    if not axes or shards == 1:
        return x
    second = second if second in axes else None
    return lax.with_sharding_constraint(x, P(tuple(a for a in BATCH_AXES if a in axes), second))


def _gathered(head: Array, shards: int) -> Array:
    """``[V, D]`` with its width gathered once before the loop; the vocabulary stays split."""
    axes = _auto_axes()
    if not axes or shards == 1:
        return head
    return lax.with_sharding_constraint(head, P(VOCAB_AXIS if VOCAB_AXIS in axes else None, None))
