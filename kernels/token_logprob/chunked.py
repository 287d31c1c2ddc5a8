"""Token log-probability in plain XLA, a chunk of tokens at a time: runs on every backend.

The two passes of an implementation on one device, see :mod:`.streamed`: a loop over chunks with a *dynamic* number of
turns, so that dropped tokens cost nothing in either pass and nothing is compiled again when their number changes. The
backward pass makes the logits of a chunk again: four matmuls against three, for ``chunk * V`` floats of memory instead
of ``tokens * V``.
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import blocks
from .logits import Logits
from .reference import accumulation_dtype, logits, through_logits

Array = jax.Array


def forward(how: Logits, hidden: Array, head: Array, targets: Array, count: Array, *, chunk: int | None = None) -> tuple[Array, Array, Array | None]:
    """Sums over this device's part of the vocabulary.

    Args:
      how: see :class:`Logits`.
      hidden, head: ``[n, D]``, ``[V, D]`` in one dtype.
      targets: ``[n] int``, rows of ``head``; anything else is a target that another device holds.
      count: ``[] int32``: the first ``count`` tokens are live, the others give 0.
      chunk: tokens per turn; default by :func:`blocks.chunk_size`.

    Returns:
      ``(log sum exp z [n], z of the target or 0 [n], mean of z under softmax(z) [n] or None)`` in the accumulation dtype.
    """
    n, V, dtype = hidden.shape[0], head.shape[0], accumulation_dtype(hidden)
    chunk = blocks.chunk_size(n, V) if chunk is None else chunk
    hidden, targets = blocks.split(hidden, chunk), blocks.split(targets, chunk)

    def turn(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        z = logits(how, hidden[i], head)
        top = jnp.max(z, axis=-1, keepdims=True)
        shifted = z - top
        e = jnp.exp(shifted)
        total = jnp.sum(e, axis=-1)
        new = [top[:, 0] + jnp.log(total), blocks.at_target(z, targets[i])]
        if how.with_entropy:
            new.append(top[:, 0] + blocks.row_dot(e, shifted) / total)
        alive = i * chunk + jnp.arange(chunk) < count
        return tuple(o.at[i].set(jnp.where(alive, x, 0)) for o, x in zip(out, new))

    zeros = tuple(jnp.zeros(targets.shape, dtype) for _ in range(3 if how.with_entropy else 2))
    out = lax.fori_loop(0, blocks.turns(count, chunk), turn, zeros)
    lse, target, *mean = (x.reshape(-1)[:n] for x in out)
    return lse, target, mean[0] if mean else None


def backward(how: Logits, hidden: Array, head: Array, targets: Array, count: Array, lse: Array, mean: Array | None, d_logprob: Array,
             d_entropy: Array | None, *, chunk: int | None = None) -> tuple[Array, Array]:
    """This device's part of the gradients.

    Args:
      lse, mean: ``[n]`` of the whole vocabulary.
      d_logprob, d_entropy: ``[n]`` cotangents, 0 for dead tokens; the others as in :func:`forward`.

    Returns:
      ``(d_hidden [n, D], d_head [V, D])`` in the accumulation dtype.
    """
    (n, D), V, dtype = hidden.shape, head.shape[0], accumulation_dtype(hidden)
    chunk = blocks.chunk_size(n, V) if chunk is None else chunk
    hidden, targets, lse, d_logprob = (blocks.split(x, chunk) for x in (hidden, targets, lse, d_logprob))
    entropy = None if mean is None or d_entropy is None else (blocks.split(mean, chunk), blocks.split(d_entropy, chunk))

    def turn(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        h = hidden[i]
        z = logits(how, h, head)
        p = jnp.exp(z - lse[i][:, None])
        slope = d_logprob[i][:, None]
        d_z = -slope * p
        if entropy is not None:
            d_z -= p * entropy[1][i][:, None] * (z - entropy[0][i][:, None])
        d_u = through_logits(how, blocks.add_at_target(d_z, targets[i], slope), z).astype(h.dtype)
        d_h = jnp.einsum("cv,vd->cd", d_u, head, preferred_element_type=dtype)
        return grads[0].at[i].set(d_h), grads[1] + jnp.einsum("cv,cd->vd", d_u, h, preferred_element_type=dtype)

    zeros = jnp.zeros(hidden.shape, dtype), jnp.zeros((V, D), dtype)
    d_hidden, d_head = lax.fori_loop(0, blocks.turns(count, chunk), turn, zeros)
    return d_hidden.reshape(-1, D)[:n], d_head
