"""Causal attention within segments in plain XLA, a block of queries at a time: runs on every backend.

The backward pass makes the probabilities again from the saved log-sum-exp, so no ``[T, T]`` array lives in either pass.
Two walks over the same blocks: short rows are unrolled, each block of queries against all keys that it can see; long
rows go in a loop over square tiles with an online softmax (arXiv 1805.02867, 2205.14135), so that neither the program
nor its memory grows with the square of the length.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .reference import MASKED, product, seen

Array = jax.Array

UNROLLED_BLOCKS = 16
"""More would compile for minutes."""
SCORES = 2**25
"""Scores of a tile in the loop, or of a whole unrolled row (a compiler may hold all its blocks at once): 128 MiB in float32."""


class Plan(NamedTuple):
    """How a row is walked. ``block``: queries at a time; ``unrolled``: see the module."""

    window: int
    block: int
    unrolled: bool


def plan(B: int, H: int, T: int, window: int) -> Plan:
    """Small blocks skip more of what nobody sees, large ones multiply larger matrices."""
    block = -(-min(max(window // 3, 64), 512, T) // 8) * 8
    if -(-T // block) <= UNROLLED_BLOCKS and B * H * T * (block + window) <= SCORES:
        return Plan(window, block, True)
    block = 1024
    while block > 128 and (B * H * block**2 > SCORES or block > window):
        block //= 2
    return Plan(window, block, False)


def attention(q: Array, k: Array, v: Array, segment_ids: Array, *, window: int, walk: Plan | None = None) -> Array:
    """As :func:`reference.attention`, without a ``[T, T]`` array in the forward or the backward pass.

    Args:
      walk: default by :func:`plan`.
    """
    B, T, H, _ = q.shape
    return _attend(walk or plan(B, H, T, window), q, k, v, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(walk: Plan, q: Array, k: Array, v: Array, segment: Array) -> Array:
    return _forward(walk, q, k, v, segment)[0]


def _forward(walk: Plan, q: Array, k: Array, v: Array, segment: Array) -> tuple[Array, Any]:
    o, lse = (_unrolled_forward if walk.unrolled else _looped_forward)(walk, by_key_head(q, k), k, v, segment)
    o = by_token(o, q)
    return o, (q, k, v, segment, o, lse)


def _backward(walk: Plan, saved: Any, d_out: Array) -> tuple[Any, ...]:
    q, k, v, segment, o, lse = saved
    # Row sums of p * dp, for the derivative of the softmax; in float32, for they are differences of large numbers.
    inner = jnp.sum(by_key_head(d_out, k).astype(lse.dtype) * by_key_head(o, k).astype(lse.dtype), axis=-1)
    queries = (by_key_head(q, k), by_key_head(d_out, k), lse, inner)
    d_q, d_k, d_v = (_unrolled_backward if walk.unrolled else _looped_backward)(walk, queries, k, v, segment)
    return by_token(d_q, q), d_k.swapaxes(2, 3).astype(k.dtype), d_v.swapaxes(2, 3).astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _unrolled(walk: Plan, T: int) -> list[tuple[int, int, int]]:
    """``(first query, end, first key)`` of each block: its queries see keys from there to its own end."""
    return [(i, min(i + walk.block, T), max(i - walk.window + 1, 0) // 8 * 8) for i in range(0, T, walk.block)]


def _unrolled_forward(walk: Plan, heads: Array, k: Array, v: Array, segment: Array) -> tuple[Array, Array]:
    """``heads [B, K, G, T, hd] -> (o, lse [B, K, G, T])``."""
    out, lse = [], []
    for start, end, low in _unrolled(walk, k.shape[2]):
        score = scores(heads[:, :, :, start:end], k[:, :, low:end], segment[:, start:end], segment[:, low:end], start, low)
        top = jnp.max(score, axis=-1, keepdims=True)
        e = jnp.exp(score - top)
        total = jnp.sum(e, axis=-1)
        out.append(_weighted(e, v[:, :, low:end]) / total[..., None])
        lse.append(top[..., 0] + jnp.log(total))
    return jnp.concatenate(out, axis=3), jnp.concatenate(lse, axis=3)


def _unrolled_backward(walk: Plan, queries: tuple[Array, ...], k: Array, v: Array, segment: Array) -> tuple[Array, Array, Array]:
    """``d_q [B, K, G, T, hd]``, d_k and d_v ``[B, K, hd, T]``."""
    d_q, d_k, d_v = [], *(jnp.zeros(x.swapaxes(2, 3).shape, queries[2].dtype) for x in (k, v))
    for start, end, low in _unrolled(walk, k.shape[2]):
        block = tuple(x[:, :, :, start:end] for x in queries)
        one, d_k_part, d_v_part = gradients(block, k[:, :, low:end], v[:, :, low:end], segment[:, start:end], segment[:, low:end], start, low)
        d_q.append(one)
        d_k, d_v = d_k.at[..., low:end].add(d_k_part), d_v.at[..., low:end].add(d_v_part)
    return jnp.concatenate(d_q, axis=3), d_k, d_v


def _tiles(walk: Plan, T: int, *arrays: tuple[Array, int]) -> tuple[int, list[Array]]:
    """Number of tiles, and the arrays padded to whole ones along the given axis: with segment -1, behind every real query."""
    n = -(-T // walk.block)
    pad = lambda x, axis: jnp.pad(x, [(0, n * walk.block - T if i == axis else 0) for i in range(x.ndim)],  # noqa: E731
                                  constant_values=-1 if x.ndim == 2 else 0)
    return n, [pad(x, axis) for x, axis in arrays]


def _first_tile(walk: Plan, i: Array) -> Array:
    """The first tile of keys that a query of tile ``i`` can see."""
    return jnp.maximum(i * walk.block - walk.window + 1, 0) // walk.block


def _looped_forward(walk: Plan, heads: Array, k: Array, v: Array, segment: Array) -> tuple[Array, Array]:
    T, size = k.shape[2], walk.block
    n, (heads, k, v, segment) = _tiles(walk, T, (heads, 3), (k, 2), (v, 2), (segment, 1))
    tile = lambda x, i, axis: lax.dynamic_slice_in_dim(x, i * size, size, axis)  # noqa: E731

    def row(i: Array) -> tuple[Array, Array]:
        block, own = tile(heads, i, 3), tile(segment, i, 1)

        def column(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            o, total, top = carry
            score = scores(block, tile(k, j, 2), own, tile(segment, j, 1), i * size, j * size)
            higher = jnp.maximum(top, jnp.max(score, axis=-1))
            e, shrink = jnp.exp(score - higher[..., None]), jnp.exp(top - higher)
            return o * shrink[..., None] + _weighted(e, tile(v, j, 2)), total * shrink + jnp.sum(e, axis=-1), higher

        like = jax.eval_shape(_weighted, jax.ShapeDtypeStruct((*block.shape[:-1], size), k.dtype), tile(v, i, 2))
        zero = jnp.zeros(like.shape[:-1], like.dtype)
        o, total, top = lax.fori_loop(_first_tile(walk, i), i + 1, column, (jnp.zeros(like.shape, like.dtype), zero, zero + MASKED))
        return (o / total[..., None]).astype(k.dtype), top + jnp.log(total)

    return tuple(_join(x)[:, :, :, :T] for x in lax.map(row, jnp.arange(n)))  # type: ignore[return-value]


def _looped_backward(walk: Plan, queries: tuple[Array, ...], k: Array, v: Array, segment: Array) -> tuple[Array, Array, Array]:
    T, size, dtype = k.shape[2], walk.block, queries[2].dtype
    n, (k, v, segment, *rows) = _tiles(walk, T, (k, 2), (v, 2), (segment, 1), *((x, 3) for x in queries))
    tile = lambda x, i, axis: lax.dynamic_slice_in_dim(x, i * size, size, axis)  # noqa: E731

    def row(sums: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], Array]:
        block, own = tuple(tile(x, i, 3) for x in rows), tile(segment, i, 1)

        def column(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            parts = gradients(block, tile(k, j, 2), tile(v, j, 2), own, tile(segment, j, 1), i * size, j * size)
            add = lambda x, part: lax.dynamic_update_slice_in_dim(x, tile(x, j, 3) + part, j * size, 3)  # noqa: E731
            return carry[0] + parts[0], add(carry[1], parts[1]), add(carry[2], parts[2])

        d_q, *sums = lax.fori_loop(_first_tile(walk, i), i + 1, column, (jnp.zeros(block[0].shape, dtype), *sums))
        return tuple(sums), d_q.astype(block[0].dtype)

    (d_k, d_v), d_q = lax.scan(row, tuple(jnp.zeros(x.swapaxes(2, 3).shape, dtype) for x in (k, v)), jnp.arange(n))
    return _join(d_q)[:, :, :, :T], d_k[..., :T], d_v[..., :T]


def scores(heads: Array, k: Array, q_segment: Array, k_segment: Array, q_start: Any, k_start: Any) -> Array:
    """``heads [B, K, G, q, hd], k [B, K, s, hd] -> [B, K, G, q, s]``, MASKED where not seen; the starts are places in the row."""
    score = product("bkqh,bksh->bkqs", _flat(heads), k) / math.sqrt(heads.shape[-1])
    places = q_start + jnp.arange(heads.shape[3]), k_start + jnp.arange(k.shape[2])
    return jnp.where(seen(q_segment, k_segment, *places)[:, None, None], score.reshape(*heads.shape[:4], -1), MASKED)


def gradients(queries: tuple[Array, ...], k: Array, v: Array, q_segment: Array, k_segment: Array, q_start: Any, k_start: Any) -> tuple[Array, Array, Array]:
    """What a block of queries (heads, d_o, lse, inner) and a tile of keys give to d_q (like heads), d_k and d_v (``[B, K, hd, s]``), in float32.

    Keys last: XLA's CPU backend is a third slower where it contracts the first axis of the larger matrix.
    """
    heads, d_o, lse, inner = queries
    p = jnp.exp(scores(heads, k, q_segment, k_segment, q_start, k_start) - lse[..., None])
    d_p = product("bkqh,bksh->bkqs", _flat(d_o), v).reshape(p.shape)
    d_s = _flat(p * (d_p - inner[..., None]) / math.sqrt(heads.shape[-1])).astype(k.dtype)
    d_q = product("bkqs,bksh->bkqh", d_s, k).reshape(heads.shape)
    return d_q, product("bkqh,bkqs->bkhs", _flat(heads), d_s), product("bkqh,bkqs->bkhs", _flat(d_o), _flat(p).astype(v.dtype))


def _weighted(e: Array, v: Array) -> Array:
    """``e [B, K, G, q, s], v [B, K, s, hd] -> [B, K, G, q, hd]``."""
    return product("bkqs,bksh->bkqh", _flat(e).astype(v.dtype), v).reshape(*e.shape[:-1], v.shape[-1])


def _join(x: Array) -> Array:
    """``[n, B, K, G, size, ...] -> [B, K, G, n * size, ...]``."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])


def by_key_head(x: Array, k: Array) -> Array:
    """``[B, T, H, hd] -> [B, K, H / K, T, hd]``."""
    B, T, H, hd = x.shape
    return x.reshape(B, T, k.shape[1], H // k.shape[1], hd).transpose(0, 2, 3, 1, 4)


def by_token(x: Array, like: Array) -> Array:
    return x.transpose(0, 3, 1, 2, 4).reshape(like.shape).astype(like.dtype)


def _flat(x: Array) -> Array:
    """Merges a key head's queries with its query heads: one larger matrix per key head."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
