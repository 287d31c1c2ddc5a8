"""Attention of the decoding path, over a cache; training has its own (``rlvr_jax.kernels.attention``)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rlvr_jax.kernels.attention.reference import MASKED, product

Array = jax.Array


class AttentionMask(struct.PyTreeNode):
    """Who sees whom, as vectors a kernel can take instead of a ``[B, T, S]`` array: ``0 <= entry position <= query position``.

    Attributes:
      q_position: ``[B, T] int32``.
      k_position: ``[B, S] int32``, negative = empty or padding.
    """

    q_position: Array
    k_position: Array

    def dense(self) -> Array:
        """``[B, T, S] bool``."""
        k, q = self.k_position[:, None, :], self.q_position[:, :, None]
        return (k >= 0) & (k <= q)


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
    if T == 1:
        return _attend_one(q, k, v, mask)
    score = product("btkgh,bksh->bkgts", q.reshape(B, T, K, H // K, hd), k) / math.sqrt(hd)
    score = jnp.where(mask.dense()[:, None, None], score, MASKED)
    p = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    return product("bkgts,bksh->btkgh", p, v).reshape(B, T, H, hd).astype(q.dtype)


def _attend_one(q: Array, k: Array, v: Array, mask: AttentionMask) -> Array:
    """:func:`attention` of one query a row: a decode step, which reads the cache and does little else.

    XLA's CPU backend packs the right operand of a product first. So the keys stand on the left, and a barrier keeps XLA
    from turning the product around; the values, read along their rows, are faster on the right.
    """
    B, _, H, hd = q.shape
    K = k.shape[1]
    score = jax.lax.optimization_barrier(product("bksh,bkgh->bksg", k, q.reshape(B, K, H // K, hd))).swapaxes(2, 3) / math.sqrt(hd)
    p = jax.nn.softmax(jnp.where(mask.dense()[:, None], score, MASKED), axis=-1).astype(v.dtype)
    return product("bkgs,bksh->bkgh", p, v).reshape(B, 1, H, hd).astype(q.dtype)


def at_least_float32(dtype: Any) -> jnp.dtype:
    """What sums of ``dtype`` are kept in: float32, or float64 where a test computes in it."""
    return jnp.result_type(jnp.float32, dtype)
