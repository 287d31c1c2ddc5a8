"""Tokens of one device in chunks: what the XLA implementations share."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

LOGITS_PER_CHUNK = 2**23
"""32 MiB of float32 logits: enough to keep a matmul busy, small beside any model with such a vocabulary. Measured on two CPU cores
at V 49152, 1024 tokens, time over plain XLA's: chunks of 128 tokens 0.96, 256 1.11, 512 0.99; and small chunks skip more."""


def chunk_size(tokens: int, vocab: int) -> int:
    """Tokens per chunk on one device: at most ``LOGITS_PER_CHUNK / V``, within 128..1024, all chunks of equal size.

    Equal chunks (rounded up to a multiple of 8) waste at most seven tokens each on padding.
    """
    limit = min(max(LOGITS_PER_CHUNK // vocab // 64 * 64, 128), 1024)
    chunks = max(-(-tokens // limit), 1)
    return max(-(-tokens // chunks // 8) * 8, 8)


def split(x: Array, chunk: int) -> Array:
    """``[n, ...] -> [chunks, chunk, ...]``, at least one chunk, the tail filled with 0."""
    pad = -x.shape[0] % chunk if x.shape[0] else chunk
    return jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])


def turns(count: Array, chunk: int) -> Array:
    """Chunks that hold a live token, live ones coming first."""
    return (count + chunk - 1) // chunk


def row_dot(a: Array, b: Array) -> Array:
    """``sum(a * b, axis=-1)`` as a dot product: on CPU the fused sum adds one by one and loses two digits at 50k terms."""
    return jnp.einsum("cv,cv->c", a, b, precision=lax.Precision.HIGHEST)


def at_target(z: Array, targets: Array) -> Array:
    """``z [c, V]`` at each row's target, 0 where the target is no column of it."""
    inside = (targets >= 0) & (targets < z.shape[1])
    return jnp.where(inside, jnp.take_along_axis(z, jnp.where(inside, targets, 0)[:, None], axis=-1)[:, 0], 0)


def add_at_target(x: Array, targets: Array, value: Array) -> Array:
    """``x [c, V]`` with ``value [c, 1]`` added in each row's target column, if that is one of these."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) == targets[:, None], x + value, x)
