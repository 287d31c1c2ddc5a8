"""Attention behind one function, so that a backend's own kernel can stand in for the plain one."""

import math

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array

# Finite, so that a query that sees nothing (padding) averages noise instead of dividing 0 by 0.
MASKED = -1e30


class AttentionMask(struct.PyTreeNode):
    """Who sees whom, as vectors a kernel can take instead of a ``[B, T, S]`` array.

    A query sees the entries of its own segment with ``0 <= entry position <= query position``.

    Attributes:
      q_position: ``[B, T] int32``.
      k_position: ``[B, S] int32``, negative = empty or padding.
      q_segment, k_segment: ``[B, T]``, ``[B, S] int32``, or None where every row is one segment.
    """

    q_position: Array
    k_position: Array
    q_segment: Array | None = None
    k_segment: Array | None = None

    def dense(self) -> Array:
        """``[B, T, S] bool``."""
        k, q = self.k_position[:, None, :], self.q_position[:, :, None]
        seen = (k >= 0) & (k <= q)
        if self.q_segment is not None and self.k_segment is not None:
            seen &= self.q_segment[:, :, None] == self.k_segment[:, None, :]
        return seen


def attention(q: Array, k: Array, v: Array, mask: AttentionMask) -> Array:
    """Scaled dot-product attention; query head h reads key head ``h // (H / K)``, keys are never repeated in memory.

    Args:
      q: ``[B, T, H, head_dim]``.
      k, v: ``[B, K, S, head_dim]``: the cache's layout, a matrix per head, so that no step transposes the cache.
      mask: see :class:`AttentionMask`.

    Returns:
      ``[B, T, H, head_dim]`` in q's dtype; scores and softmax are float32.
    """
    B, T, H, hd = q.shape
    K = k.shape[1]
    score = _einsum("btkgh,bksh->bkgts", q.reshape(B, T, K, H // K, hd), k) / math.sqrt(hd)
    score = jnp.where(mask.dense()[:, None, None], score, MASKED)
    p = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    return _einsum("bkgts,bksh->btkgh", p, v).reshape(B, T, H, hd).astype(q.dtype)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """float32 result of a product of batches of matrices."""
    if a.dtype == jnp.float32:
        return jnp.einsum(equation, a, b)
    # XLA's CPU backend refuses some batched bfloat16 products at run time ("DotThunk: BF16 x BF16 = F32").
    return jax.lax.platform_dependent(
        a, b,
        cpu=lambda a, b: jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32)),
        default=lambda a, b: jnp.einsum(equation, a, b, preferred_element_type=jnp.float32))
