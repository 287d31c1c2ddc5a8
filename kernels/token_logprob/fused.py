"""Loss and gradients of the last matmul in one pass: a chunk's logits are made once.

The loss of a token is a function of its log-probability (and entropy) and of numbers that are known before the pass
(advantage, weight, old log-probability, global counts). So when a chunk's logits exist, its loss, the slope of the loss
and both gradients follow on the spot: three matmuls instead of the four of :mod:`.chunked`, which makes the logits
again in its backward pass. Not for objectives that need a whole row's log-probabilities first.

The forward pass leaves finished gradients behind; the backward pass multiplies them by the incoming scalar.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import blocks
from .reference import accumulation_dtype

Array = jax.Array
TokenLoss = Callable[[Array, Array | None, Any], tuple[Array, Any]]


class Static(NamedTuple):
    """What the compiled program depends on besides shapes."""

    temperature: float
    with_entropy: bool
    shards: int
    loss: TokenLoss
    merge: Callable[[Any, Any], Any]


def token_loss(hidden: Array, head: Array, targets: Array, live: Array, operands: Any, loss: TokenLoss, merge: Callable[[Any, Any], Any], *,
               temperature: float, with_entropy: bool, chunk: int | None = None) -> tuple[Array, Any]:
    """``loss(logprob, entropy or None, operands) -> (sum [], statistics)``, summed over the tokens and differentiated.

    Args:
      hidden: ``[tokens, D]``.
      head: ``[V, D]``.
      targets: ``[tokens] int``.
      live: ``[tokens] bool``; a token that is not live has logprob 0 and gets no gradient, chunks of such are skipped.
      operands: tree of ``[tokens, ...]`` arrays; ``loss`` gets the slices that belong to its tokens. No gradient.
      loss: pure, hashable, applied to ``[shards, chunk]`` blocks of tokens, each token by itself.
      merge: sums two trees of statistics.
      temperature, with_entropy, chunk: as in :func:`chunked.token_logprob`.

    Returns:
      ``(sum [], statistics)``; differentiable in hidden and head through the sum.
    """
    tokens, shards = hidden.shape[0], blocks.batch_shards(hidden.shape[0])
    per_shard = tokens // shards
    chunk = blocks.chunk_size(per_shard, head.shape[0]) if chunk is None else chunk
    pad = -per_shard % chunk if per_shard else chunk
    pick = blocks.LiveFirst(live, shards)

    def split(x: Array) -> Array:
        x = pick(x)
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return blocks.over_batch(x.reshape(shards, -1, chunk, *x.shape[2:]), shards)

    hidden = split(jnp.where(live[:, None], hidden, 0))
    targets = split(jnp.where(live, targets, 0))
    static = Static(temperature, with_entropy, shards, loss, merge)
    return _fused(static, hidden, head, targets, split(live), jax.tree.map(split, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(static: Static, hidden: Array, head: Array, targets: Array, live: Array, operands: Any) -> tuple[Array, Any]:
    return _walk(static, hidden, head, targets, live, operands, False)[0]


def _forward(static: Static, hidden: Array, head: Array, targets: Array, live: Array, operands: Any) -> tuple[Any, Any]:
    return _walk(static, hidden, head, targets, live, operands, True)


def _backward(static: Static, saved: tuple[Array, Array], cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
    g = cotangents[0]
    return (*((x * g).astype(x.dtype) for x in saved), None, None, None)


_fused.defvjp(_forward, _backward)


def _walk(static: Static, hidden: Array, head: Array, targets: Array, live: Array, operands: Any, with_grad: bool) -> tuple[tuple[Array, Any], Any]:
    """``hidden [S, n, c, D]``, the others ``[S, n, c, ...]`` -> ((sum, statistics), (d_hidden, d_head) or None)."""
    dtype = accumulation_dtype(hidden)
    weight = blocks.gathered(head.astype(hidden.dtype), static.shards)
    order, count = blocks.live_chunks(live)

    def losses(logprob: Array, entropy: Array, at: Array) -> tuple[Array, Any]:
        alive = blocks.take(live, at)
        return static.loss(jnp.where(alive, logprob, 0), jnp.where(alive, entropy, 0) if static.with_entropy else None,
                           jax.tree.map(lambda x: blocks.take(x, at), operands))

    def turn(i: Array, carry: Any) -> Any:
        total, stats, grads = carry
        at = order[i]
        h = blocks.take(hidden, at)
        z = blocks.logits(h, weight, static.temperature)
        shifted = z - jnp.max(z, axis=-1, keepdims=True)
        e = jnp.exp(shifted)
        norm = jnp.sum(e, axis=-1)
        log_norm = jnp.log(norm)
        target = blocks.take(targets, at)
        logprob = jnp.take_along_axis(shifted, target[..., None], axis=-1)[..., 0] - log_norm
        entropy = log_norm - blocks.row_dot(e, shifted) / norm if static.with_entropy else jnp.zeros_like(norm)
        (value, new), slopes = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)(logprob, entropy, at)
        if grads is not None:
            slope, slope_h = (s[..., None].astype(dtype) / static.temperature for s in slopes)
            d_z = e * (-slope / norm[..., None])
            if static.with_entropy:  # d entropy / d z = -p (log p + entropy)
                d_z -= e / norm[..., None] * slope_h * (shifted - log_norm[..., None] + entropy[..., None])
            is_target = lax.broadcasted_iota(jnp.int32, z.shape, 2) == target[..., None]
            d_z = jnp.where(is_target, d_z + slope, d_z).astype(hidden.dtype)
            d_h = jnp.einsum("scv,vd->scd", d_z, weight, preferred_element_type=dtype)
            grads = (blocks.put(grads[0], d_h.astype(hidden.dtype), at),
                     grads[1] + jnp.einsum("scv,scd->svd", d_z, h, preferred_element_type=dtype))
        return total + value, static.merge(stats, new), grads

    zero = jnp.zeros((), jnp.int32)
    shape = jax.eval_shape(lambda: losses(jnp.zeros(targets.shape[::2], dtype), jnp.zeros(targets.shape[::2], dtype), zero))
    total, stats = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    grads = None
    if with_grad:
        grads = (blocks.over_batch(jnp.zeros_like(hidden), static.shards),
                 blocks.over_batch(jnp.zeros((static.shards, *head.shape), dtype), static.shards, blocks.VOCAB_AXIS))
    total, stats, grads = lax.fori_loop(0, count, turn, (total, stats, grads))
    return (total, stats), None if grads is None else (grads[0], jnp.sum(grads[1], axis=0).astype(head.dtype))
