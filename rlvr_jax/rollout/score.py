"""Teacher-forced log-probabilities of a sampler's rows, in the plainest way: what a sampler is compared with."""

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix
from rlvr_jax.types import response_mask

Array = jax.Array


def score(params: Any, cfg: DecoderConfig, tokens: Array, prompt_length: Array, response_length: Array,
          temperature: float = 1.0, *, compute_dtype: Any = jnp.float32) -> Array:
    """Teacher-forced logprobs of responses: what the trainer computes for the sampler's rows.

    Args:
      params, cfg: the decoder.
      tokens: ``[B, T] int32``; prompt_length, response_length: ``[B] int32``.
      temperature: of the softmax; 0 is read as 1, as the sampler does for greedy.

    Returns:
      ``[B, T] float32``, laid out as ``Rollout.logprob``. Holds ``[T, V]`` logits of one row at a time.
    """
    T = tokens.shape[1]
    t = jnp.arange(T, dtype=jnp.int32)
    positions = jnp.where(t < (prompt_length + response_length)[:, None], t, -1)
    hidden, _ = forward(params, cfg, tokens, positions, compute_dtype=compute_dtype)
    head = head_matrix(params, cfg).astype(compute_dtype)

    def row(args: tuple[Array, Array]) -> Array:
        h, target = args
        logits = jnp.einsum("td,vd->tv", h, head, preferred_element_type=jnp.float32) / (temperature or 1.0)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1)[:, 0]

    logprob = jax.lax.map(row, (hidden[:, :-1], tokens[:, 1:]))
    return jnp.where(response_mask(prompt_length, response_length, T), jnp.pad(logprob, ((0, 0), (1, 0))), 0.0)
