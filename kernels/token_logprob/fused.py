"""Loss and gradients of the last matmul in one pass: a chunk's logits are made once.

The loss of a token is a function of its log-probability (and entropy) and of numbers that are known before the pass
(advantage, weight, old log-probability, global counts). So when a chunk's logits exist, its loss, the slope of the loss
and both gradients follow on the spot: three matmuls instead of the four of :mod:`.chunked`, which makes the logits
again in its backward pass. Not for objectives that need a whole row's log-probabilities first.

In a program for TPU the caller may put the two passes of a kernel in the place of the chunks: four matmuls, but no logit in
main memory (:mod:`.by_platform`).

The forward pass leaves finished gradients behind; the backward pass multiplies them by the incoming scalar.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..platforms import on_tpu
from . import blocks, mesh
from .logits import Logits
from .reference import accumulation_dtype, logits, through_logits
from .streamed import Passes

Array = jax.Array
TokenLoss = Callable[[Array, Array | None, Any], tuple[Array, Any]]


class Static(NamedTuple):
    """What the compiled program depends on besides shapes."""

    how: Logits
    loss: TokenLoss
    fold: Callable[[Any], Any]
    chunk: int | None
    kernels: Passes | None


class Out(NamedTuple):
    """Sum of the loss, its statistics, and each token's log-probability and entropy (None unless asked for)."""

    sum: Array
    stats: Any
    logprob: Array
    entropy: Array | None


def token_loss(how: Logits, hidden: Array, head: Array, targets: Array, live: Array, operands: Any, loss: TokenLoss, fold: Callable[[Any], Any], *,
               chunk: int | None = None, kernels: Passes | None = None) -> Out:
    """``loss(logprob, entropy or None, operands) -> (sum [], statistics)`` over all live tokens, differentiated.

    Args:
      how: temperature, soft cap, scale, and whether the entropy is wanted.
      hidden: ``[tokens, D]``.
      head: ``[V, D]``.
      targets: ``[tokens] int``.
      live: ``[tokens] bool``; the loss never sees the others' values, chunks of such are skipped.
      operands: tree of ``[tokens, ...]`` arrays; ``loss`` gets the slices that belong to its tokens. No gradient.
      loss: pure, hashable, applied to ``[chunk]`` tokens, each by itself; a token that only fills a chunk comes with
        logprob 0 and operands of 0, and must add nothing.
      fold: statistics stacked on a new first axis -> one tree of statistics.
      chunk: as in :func:`chunked.forward`.
      kernels: what a program for TPU uses instead of chunks.

    Returns:
      See :class:`Out`; differentiable in hidden and head through the sum.
    """
    total, stats, logprob, entropy = _fused(Static(how, loss, fold, chunk, kernels), hidden, head, targets, live, operands)
    return Out(total, stats, logprob, entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(static: Static, hidden: Array, head: Array, targets: Array, live: Array, operands: Any) -> Any:
    return _run(static, False, hidden, head, targets, live, operands)[0]


def _forward(static: Static, hidden: Array, head: Array, targets: Array, live: Array, operands: Any) -> tuple[Any, Any]:
    return _run(static, True, hidden, head, targets, live, operands)


def _backward(static: Static, saved: tuple[Array, Array], cotangents: Any) -> tuple[Any, ...]:
    g = cotangents[0]
    return (*((x * g).astype(x.dtype) for x in saved), None, None, None)


_fused.defvjp(_forward, _backward)


def _run(static: Static, with_grad: bool, *args: Any) -> tuple[Any, Any]:
    """((sum, statistics, logprob, entropy), (d_hidden, d_head) or None) over the mesh of the context."""
    hidden, head, targets, live, operands = args
    n = hidden.shape[0]
    split, shards = mesh.split_for(*head.shape)

    def body(hidden: Array, head: Array, targets: Array, live: Array, operands: Any) -> Any:
        first, h, t = mesh.live_first(split, head.shape[0], hidden, targets, live)
        walk: Callable[..., Any] = functools.partial(_walk, static, split, with_grad)
        if static.kernels is not None:
            walk = on_tpu(functools.partial(_by_kernels, static, split, with_grad), walk)
        total, stats, logprob, entropy, grads = walk(h, head.astype(h.dtype), t, first.count, jax.tree.map(first, operands))
        if grads is not None:
            d_hidden, d_head = mesh.reduced(split, *grads)
            grads = first.back(d_hidden).astype(h.dtype), d_head.astype(head.dtype)
        stack = lambda x: x[None]  # noqa: E731
        return stack(total), jax.tree.map(stack, stats), first.back(logprob), None if entropy is None else first.back(entropy), grads

    rows = P(split.batch or None)
    hidden, targets, live, operands = mesh.over_tokens((hidden, targets, live, operands), shards)
    grads_spec = (rows, mesh.gradient_spec(split)) if with_grad else None
    specs = (rows, mesh.head_spec(split), rows, rows, rows)
    total, stats, logprob, entropy, grads = mesh.run(body, specs, (rows, rows, rows, rows, grads_spec), hidden, head, targets, live, operands)
    out = jnp.sum(total), static.fold(stats), logprob[:n], None if entropy is None else entropy[:n]
    return out, None if grads is None else (grads[0][:n], grads[1])


def _by_kernels(static: Static, split: mesh.Split, with_grad: bool, hidden: Array, head: Array, targets: Array, count: Array, operands: Any) -> Any:
    """As :func:`_walk`: between the two passes the loss of all tokens, and its slopes."""
    how, kernels = static.how, static.kernels
    assert kernels is not None
    alive = jnp.arange(hidden.shape[0]) < count
    lse, target, mean = mesh.whole_vocab(split, *kernels.forward(how, hidden, head, targets, count))
    # Over the parts of the vocabulary a dead token has become the sum of nothing: log 2 of two.
    logprob, entropy = (None if x is None else jnp.where(alive, x, 0) for x in (target - lse, None if mean is None else lse - mean))
    losses = jax.value_and_grad(static.loss, argnums=(0,) if entropy is None else (0, 1), has_aux=True)
    (total, stats), slopes = losses(logprob, entropy, operands)
    grads = None
    if with_grad:
        d_hidden, d_head = kernels.backward(how, hidden, head, targets, count, lse, mean, slopes[0], None if entropy is None else slopes[1])
        grads = d_hidden if split.vocab else d_hidden.astype(hidden.dtype), d_head
    return total, stats, logprob, entropy, grads


def _walk(static: Static, split: mesh.Split, with_grad: bool, hidden: Array, head: Array, targets: Array, count: Array, operands: Any) -> Any:
    """One device's live-first tokens -> (sum, statistics, logprob, entropy, parts of the gradients or None)."""
    how, dtype, n = static.how, accumulation_dtype(hidden), hidden.shape[0]
    chunk = blocks.chunk_size(n, head.shape[0]) if static.chunk is None else static.chunk
    hidden, targets, operands = jax.tree.map(lambda x: blocks.split(x, chunk), (hidden, targets, operands))

    def losses(logprob: Array, entropy: Array | None, i: Array) -> tuple[Array, Any]:
        alive = i * chunk + jnp.arange(chunk) < count
        logprob, entropy = jax.tree.map(lambda x: jnp.where(alive, x, 0), (logprob, entropy))
        return static.loss(logprob, entropy, jax.tree.map(lambda x: x[i], operands))

    def turn(i: Array, carry: Any) -> Any:
        total, stats, out, grads = carry
        h, target = hidden[i], targets[i]
        z = logits(how, h, head)
        top = jnp.max(z, axis=-1)
        top = lax.pmax(top, split.vocab) if split.vocab else top
        shifted = z - top[:, None]
        e = jnp.exp(shifted)
        over_vocab = lambda x: lax.psum(x, split.vocab) if split.vocab else x  # noqa: E731
        norm = over_vocab(jnp.sum(e, axis=-1))
        logprob = over_vocab(blocks.at_target(shifted, target)) - jnp.log(norm)
        mean = over_vocab(blocks.row_dot(e, shifted)) / norm if how.with_entropy else None
        entropy = None if mean is None else jnp.log(norm) - mean
        (value, new), slopes = jax.value_and_grad(losses, argnums=(0,) if entropy is None else (0, 1), has_aux=True)(logprob, entropy, i)
        if grads is not None:
            slope = slopes[0].astype(dtype)
            d_z = e * (-slope / norm)[:, None]
            if mean is not None:
                d_z -= e * (slopes[1].astype(dtype) / norm)[:, None] * (shifted - mean[:, None])
            d_u = through_logits(how, blocks.add_at_target(d_z, target, slope[:, None]), z).astype(h.dtype)
            d_h = jnp.einsum("cv,vd->cd", d_u, head, preferred_element_type=dtype)
            grads = grads[0].at[i].set(d_h.astype(grads[0].dtype)), grads[1] + jnp.einsum("cv,cd->vd", d_u, h, preferred_element_type=dtype)
        out = tuple(None if o is None else o.at[i].set(x) for o, x in zip(out, (logprob, entropy)))
        return total + value, static.fold(jax.tree.map(lambda a, b: jnp.stack([a, b]), stats, new)), out, grads

    empty = jnp.zeros(chunk, dtype)
    shapes = jax.eval_shape(lambda: losses(empty, empty if how.with_entropy else None, jnp.zeros((), jnp.int32)))
    total, stats = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    vectors = jnp.zeros(targets.shape, dtype), jnp.zeros(targets.shape, dtype) if how.with_entropy else None
    # Parts that still have to be added over the vocabulary stay in full precision.
    grads = (jnp.zeros(hidden.shape, dtype if split.vocab else hidden.dtype), jnp.zeros(head.shape, dtype)) if with_grad else None
    total, stats, vectors, grads = lax.fori_loop(0, blocks.turns(count, chunk), turn, (total, stats, vectors, grads))
    alive = jnp.arange(n) < count
    logprob, entropy = (None if x is None else jnp.where(alive, x.reshape(-1)[:n], 0) for x in vectors)
    return total, stats, logprob, entropy, None if grads is None else (grads[0].reshape(-1, hidden.shape[-1])[:n], grads[1])
