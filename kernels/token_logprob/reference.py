"""Token log-probability and entropy, plain: what every other implementation has to agree with."""

import jax
import jax.numpy as jnp

Array = jax.Array


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """float32 for bfloat16 and float32 inputs, float64 for float64 ones."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))


def _logits(hidden: Array, head: Array, temperature: float) -> Array:
    dtype = accumulation_dtype(hidden)
    return jnp.dot(hidden, head.astype(hidden.dtype).T, preferred_element_type=dtype) / temperature


def token_logprob(hidden: Array, head: Array, targets: Array, live: Array, *, temperature: float,
                  with_entropy: bool) -> tuple[Array, Array | None]:
    """Log-softmax at the targets; holds ``[tokens, V]`` and differentiates by plain autodiff.

    Args:
      hidden: ``[tokens, D]``.
      head: ``[V, D]``, cast to the dtype of ``hidden``.
      targets: ``[tokens] int``.
      live: ``[tokens] bool``; the others give 0 and no gradient, whatever ``hidden`` holds there.
      temperature: divides the logits.
      with_entropy: also return the entropy of the tempered distribution, in nats.

    Returns:
      ``(logprob [tokens], entropy [tokens] or None)`` in float32 (float64 for float64 inputs).
    """
    hidden, targets = jnp.where(live[:, None], hidden, 0), jnp.where(live, targets, 0)
    logp = jax.nn.log_softmax(_logits(hidden, head, temperature), axis=-1)
    logprob = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
    if not with_entropy:
        return jnp.where(live, logprob, 0), None
    return jnp.where(live, logprob, 0), jnp.where(live, -jnp.sum(jnp.exp(logp) * logp, axis=-1), 0)


def token_logprob_vjp(hidden: Array, head: Array, targets: Array, live: Array, d_logprob: Array,
                      d_entropy: Array | None, *, temperature: float) -> tuple[Array, Array]:
    """The backward pass written out; the formula the other implementations compute blockwise.

    With ``z`` the tempered logits, ``p`` their softmax and ``H`` its entropy::

        d logprob / d z_j = [j = target] - p_j          d H / d z_j = -p_j (log p_j + H)

    Args:
      d_logprob, d_entropy: ``[tokens]`` cotangents; the others as in :func:`token_logprob`.

    Returns:
      ``(d_hidden [tokens, D], d_head [V, D])`` in the dtypes of ``hidden`` and ``head``.
    """
    dtype = accumulation_dtype(hidden)
    hidden, targets = jnp.where(live[:, None], hidden, 0), jnp.where(live, targets, 0)
    logp = jax.nn.log_softmax(_logits(hidden, head, temperature), axis=-1)
    p = jnp.exp(logp)
    onehot = jax.nn.one_hot(targets, head.shape[0], dtype=dtype)
    d_z = d_logprob[:, None] * (onehot - p)
    if d_entropy is not None:
        entropy = -jnp.sum(p * logp, axis=-1, keepdims=True)
        d_z = d_z - d_entropy[:, None] * p * (logp + entropy)
    d_z = jnp.where(live[:, None], d_z, 0).astype(dtype) / temperature
    d_hidden = jnp.dot(d_z, head.astype(dtype), preferred_element_type=dtype)
    d_head = jnp.dot(d_z.T, hidden.astype(dtype), preferred_element_type=dtype)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)
