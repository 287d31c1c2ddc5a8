"""Attention behind one function, so that a backend's own kernel can stand in for the plain one."""

import math
from typing import Any

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
      window: no segment is longer than this, and query i is entry i; None = nothing is known. Then only the entries
        that can be seen are looked at.
    """

    q_position: Array
    k_position: Array
    q_segment: Array | None = None
    k_segment: Array | None = None
    window: int | None = struct.field(pytree_node=False, default=None)

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
    if mask.window is not None and mask.window < T:
        return _banded(q, k, v, mask, mask.window)
    score = _einsum("btkgh,bksh->bkgts", q.reshape(B, T, K, H // K, hd), k) / math.sqrt(hd)
    score = jnp.where(mask.dense()[:, None, None], score, MASKED)
    p = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    return _einsum("bkgts,bksh->btkgh", p, v).reshape(B, T, H, hd).astype(q.dtype)


def _banded(q: Array, k: Array, v: Array, mask: AttentionMask, window: int) -> Array:
    """Packed rows: blocks of queries against the entries up to ``window`` before them; the cost of a token is that of an
    unpacked row (and a quarter more for the block), however long the stream is."""
    B, T, H, hd = q.shape
    K = k.shape[1]
    block = _block(T, window)
    blocks, back = T // block, -(-(window - 1) // block)

    def near(x: Array, axis: int, empty: int = 0) -> Array:
        """Axis of T entries -> two axes: blocks, and the ``back + 1`` blocks that each can see."""
        edge = [(0, 0)] * x.ndim
        edge[axis] = (back * block, 0)
        x = jnp.pad(x, edge, constant_values=empty)
        seen = [jax.lax.slice_in_dim(x, j * block, j * block + T, axis=axis) for j in range(back + 1)]
        seen = [s.reshape(*s.shape[:axis], blocks, block, *s.shape[axis + 1:]) for s in seen]
        return jnp.concatenate(seen, axis=axis + 1)

    def many(x: Array) -> Array:  # [B, blocks, ...] -> [B * blocks, ...]
        return x.reshape(B * blocks, *x.shape[2:])

    split = lambda x: x.reshape(B * blocks, block)  # noqa: E731
    inner = AttentionMask(
        split(mask.q_position), many(near(mask.k_position, 1, -1)), None if mask.q_segment is None else split(mask.q_segment),
        None if mask.k_segment is None else many(near(mask.k_segment, 1)))
    k, v = (many(near(x, 2).swapaxes(1, 2)) for x in (k, v))
    assert k.shape[1] == K
    return attention(q.reshape(B * blocks, block, H, hd), k, v, inner).reshape(B, T, H, hd)


def _block(length: int, window: int) -> int:
    """Largest divisor of ``length`` that is at most a quarter of the window, but not below 8 where that can be."""
    limit = max(window // 4, min(8, length))
    return max(b for b in range(1, limit + 1) if length % b == 0)


def at_least_float32(dtype: Any) -> jnp.dtype:
    """What sums of ``dtype`` are kept in: float32, or float64 where a test computes in it."""
    return jnp.result_type(jnp.float32, dtype)


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """float32 result of a product of batches of matrices."""
    if a.dtype != jnp.bfloat16:
        return jnp.einsum(equation, a, b)
    # XLA's CPU backend refuses some batched bfloat16 products at run time ("DotThunk: BF16 x BF16 = F32").
    return jax.lax.platform_dependent(
        a, b,
        cpu=lambda a, b: jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32)),
        default=lambda a, b: jnp.einsum(equation, a, b, preferred_element_type=jnp.float32))
