"""Token log-probability and entropy, plain: what every other implementation has to agree with."""

import jax
import jax.numpy as jnp

from .logits import Logits

Array = jax.Array


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """float32 for bfloat16 and float32 inputs, float64 for float64 ones."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))


def logits(how: Logits, hidden: Array, head: Array) -> Array:
    """``[..., D], [V, D] -> [..., V]`` in the accumulation dtype; both operands in one dtype."""
    u = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=accumulation_dtype(hidden))
    u = u * how.logit_scale if how.logit_scale != 1 else u
    u = how.soft_cap * jnp.tanh(u / how.soft_cap) if how.soft_cap is not None else u
    return u / how.temperature if how.temperature != 1 else u


def through_logits(how: Logits, d_z: Array, z: Array) -> Array:
    """Gradient for ``hidden @ head.T`` from the one for ``z``."""
    if how.soft_cap is not None:
        d_z = d_z * (1 - (z * (how.temperature / how.soft_cap)) ** 2)
    factor = how.logit_scale / how.temperature
    return d_z * factor if factor != 1 else d_z


def token_logprob(how: Logits, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Array, Array | None]:
    """Log-softmax at the targets; holds ``[tokens, V]`` and differentiates by plain autodiff.

    Args:
      how: temperature, soft cap, scale, and whether the entropy is wanted.
      hidden: ``[tokens, D]``.
      head: ``[V, D]``, cast to the dtype of ``hidden``.
      targets: ``[tokens] int``.
      live: ``[tokens] bool``; the others give 0 and no gradient, whatever ``hidden`` holds there.

    Returns:
      ``(logprob [tokens], entropy in nats [tokens] or None)`` in float32 (float64 for float64 inputs).
    """
    hidden, targets = jnp.where(live[:, None], hidden, 0), jnp.where(live, targets, 0)
    logp = jax.nn.log_softmax(logits(how, hidden, head.astype(hidden.dtype)), axis=-1)
    logprob = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
    if not how.with_entropy:
        return jnp.where(live, logprob, 0), None
    return jnp.where(live, logprob, 0), jnp.where(live, -jnp.sum(jnp.exp(logp) * logp, axis=-1), 0)


def token_logprob_vjp(how: Logits, hidden: Array, head: Array, targets: Array, live: Array, d_logprob: Array,
                      d_entropy: Array | None) -> tuple[Array, Array]:
    """The backward pass written out; the formula the other implementations compute blockwise.

    With ``z`` the logits, ``p`` their softmax and ``H`` its entropy::

        d logprob / d z_j = [j = target] - p_j          d H / d z_j = -p_j (log p_j + H)

    Args:
      d_logprob, d_entropy: ``[tokens]`` cotangents; the others as in :func:`token_logprob`.

    Returns:
      ``(d_hidden [tokens, D], d_head [V, D])`` in the dtypes of ``hidden`` and ``head``.
    """
    dtype = accumulation_dtype(hidden)
    hidden, targets = jnp.where(live[:, None], hidden, 0), jnp.where(live, targets, 0)
    z = logits(how, hidden, head.astype(hidden.dtype))
    logp = jax.nn.log_softmax(z, axis=-1)
    p = jnp.exp(logp)
    d_z = d_logprob[:, None] * (jax.nn.one_hot(targets, head.shape[0], dtype=dtype) - p)
    if d_entropy is not None:
        entropy = -jnp.sum(p * logp, axis=-1, keepdims=True)
        d_z = d_z - d_entropy[:, None] * p * (logp + entropy)
    d_u = through_logits(how, jnp.where(live[:, None], d_z, 0).astype(dtype), z)
    d_hidden = jnp.dot(d_u, head.astype(dtype), preferred_element_type=dtype)
    d_head = jnp.dot(d_u.T, hidden.astype(dtype), preferred_element_type=dtype)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)
