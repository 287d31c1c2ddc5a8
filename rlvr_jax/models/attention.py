"""Attention behind one function, so that a backend's own kernel can stand in for the plain one."""

import functools
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
      window: query i is entry i, and no segment is longer than this, so that most of what cannot be seen need not be
        looked at; None = nothing is known (a cache).
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
    if mask.window is not None:
        return _causal(mask.window, q, k, v, mask)
    if T == 1:
        return _attend_one(q, k, v, mask)
    score = _einsum("btkgh,bksh->bkgts", q.reshape(B, T, K, H // K, hd), k) / math.sqrt(hd)
    score = jnp.where(mask.dense()[:, None, None], score, MASKED)
    p = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    return _einsum("bkgts,bksh->btkgh", p, v).reshape(B, T, H, hd).astype(q.dtype)


def _attend_one(q: Array, k: Array, v: Array, mask: AttentionMask) -> Array:
    """:func:`attention` of one query a row: a decode step, which reads the cache and does little else.

    XLA's CPU backend packs the right operand of a product first. So the keys stand on the left, and a barrier keeps XLA
    from turning the product around; the values, read along their rows, are faster on the right.
    """
    B, _, H, hd = q.shape
    K = k.shape[1]
    score = jax.lax.optimization_barrier(_einsum("bksh,bkgh->bksg", k, q.reshape(B, K, H // K, hd))).swapaxes(2, 3) / math.sqrt(hd)
    p = jax.nn.softmax(jnp.where(mask.dense()[:, None], score, MASKED), axis=-1).astype(v.dtype)
    return _einsum("bkgs,bksh->bkgh", p, v).reshape(B, 1, H, hd).astype(q.dtype)


def block_bounds(length: int, window: int) -> list[tuple[int, int, int]]:
    """``(first query, end, first entry)`` of each block: the queries of a block see entries from there to its own end.

    Small blocks skip more of what nobody sees; at most 16, since each is compiled by itself.
    """
    block = -(-max(min(max(window // 3, 64), 512), -(-length // 16)) // 8) * 8
    return [(i, min(i + block, length), max(i - window + 1, 0) // 8 * 8) for i in range(0, length, block)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal(window: int, q: Array, k: Array, v: Array, mask: AttentionMask) -> Array:
    """:func:`attention` where query i is entry i and no segment is longer than ``window``.

    A block of queries at a time, against the entries it can see; the backward pass makes the probabilities again, so
    no ``[T, T]`` array lives in either pass.
    """
    return _causal_forward(window, q, k, v, mask)[0]


def _causal_forward(window: int, q: Array, k: Array, v: Array, mask: AttentionMask) -> tuple[Array, Any]:
    heads = _by_key_head(q, k)
    out, lse = [], []
    for start, end, low in block_bounds(q.shape[1], window):
        score = _block_scores(heads, k, mask, start, end, low)
        top = jnp.max(score, axis=-1, keepdims=True)
        e = jnp.exp(score - top)
        total = jnp.sum(e, axis=-1)
        o = _einsum("bkqs,bksh->bkqh", _flat(e).astype(v.dtype), v[:, :, low:end])
        out.append(o.reshape(*total.shape, -1) / total[..., None])
        lse.append(top[..., 0] + jnp.log(total))
    o = jnp.concatenate(out, axis=3).astype(q.dtype)
    return _by_token(o, q), (q, k, v, mask, o, jnp.concatenate(lse, axis=3))


def _causal_backward(window: int, saved: Any, d_out: Array) -> tuple[Any, ...]:
    q, k, v, mask, o, lse = saved
    heads, d_o = _by_key_head(q, k), _by_key_head(d_out, k)
    # Row sums of p * dp, for the derivative of the softmax.
    inner = jnp.sum((d_o * o).astype(lse.dtype), axis=-1)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, lse.dtype), jnp.zeros(v.shape, lse.dtype)
    for start, end, low in block_bounds(q.shape[1], window):
        at = slice(start, end)
        p = jnp.exp(_block_scores(heads, k, mask, start, end, low) - lse[:, :, :, at, None])
        seen, d_block = slice(low, end), _flat(d_o[:, :, :, at])
        d_p = _einsum("bkqh,bksh->bkqs", d_block, v[:, :, seen]).reshape(p.shape)
        d_s = _flat(p * (d_p - inner[:, :, :, at, None]) / math.sqrt(q.shape[-1])).astype(k.dtype)
        d_q.append(_einsum("bkqs,bksh->bkqh", d_s, k[:, :, seen]).reshape(*p.shape[:-1], -1))
        d_k = d_k.at[:, :, seen].add(_einsum("bkqs,bkqh->bksh", d_s, _flat(heads[:, :, :, at])))
        d_v = d_v.at[:, :, seen].add(_einsum("bkqs,bkqh->bksh", _flat(p).astype(v.dtype), d_block))
    return _by_token(jnp.concatenate(d_q, axis=3).astype(q.dtype), q), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_causal.defvjp(_causal_forward, _causal_backward)


def _block_scores(heads: Array, k: Array, mask: AttentionMask, start: int, end: int, low: int) -> Array:
    """``[B, K, H / K, end - start, end - low]``, what is not seen MASKED."""
    B, K, group = heads.shape[:3]
    score = _einsum("bkqh,bksh->bkqs", _flat(heads[:, :, :, start:end]), k[:, :, low:end]) / math.sqrt(heads.shape[-1])
    part = lambda x, a: None if x is None else x[:, a:end]  # noqa: E731
    seen = AttentionMask(mask.q_position[:, start:end], mask.k_position[:, low:end], part(mask.q_segment, start), part(mask.k_segment, low)).dense()
    return jnp.where(seen[:, None, None], score.reshape(B, K, group, end - start, end - low), MASKED)


def _by_key_head(x: Array, k: Array) -> Array:
    """``[B, T, H, hd] -> [B, K, H / K, T, hd]``."""
    B, T, H, hd = x.shape
    return x.reshape(B, T, k.shape[1], H // k.shape[1], hd).transpose(0, 2, 3, 1, 4)


def _by_token(x: Array, like: Array) -> Array:
    return x.transpose(0, 3, 1, 2, 4).reshape(like.shape)


def _flat(x: Array) -> Array:
    """Merges a key head's queries with its query heads: one larger matrix per key head."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


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
