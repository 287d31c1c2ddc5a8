"""Causal attention within segments, plain: what every other implementation has to agree with."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..token_logprob.reference import accumulation_dtype

Array = jax.Array

# Finite, so that a row of scores that is masked throughout averages noise instead of dividing 0 by 0.
MASKED = -1e30


def attention(q: Array, k: Array, v: Array, segment_ids: Array, *, window: int) -> Array:
    """Holds ``[B, H, T, T]`` and differentiates by plain autodiff; shapes as in :func:`.api.attention`."""
    del window  # A promise about the segments: nothing is hidden by it that they do not hide.
    B, T, H, hd = q.shape
    K = k.shape[1]
    score = product("btkgh,bksh->bkgts", q.reshape(B, T, K, H // K, hd), k) / math.sqrt(hd)
    at = jnp.arange(T)
    p = jax.nn.softmax(jnp.where(seen(segment_ids, segment_ids, at, at)[:, None, None], score, MASKED), axis=-1).astype(v.dtype)
    return product("bkgts,bksh->btkgh", p, v).reshape(B, T, H, hd).astype(q.dtype)


def seen(q_segment: Array, k_segment: Array, q_place: Array, k_place: Array) -> Array:
    """``[B, q, k] bool``: segments ``[B, q]``, ``[B, k]`` are the same and the place ``[k]`` of the key in the row is not after ``[q]``."""
    return (q_segment[:, :, None] == k_segment[:, None, :]) & (q_place[:, None] >= k_place)


def product(equation: str, a: Array, b: Array) -> Array:
    """A product of batches of matrices with a float32 result (float64 for float64), no digit lost on the way there."""
    dtype: Any = accumulation_dtype(a, b)
    # Accelerators multiply float32 in fewer digits unless asked.
    exact = lambda a, b: jnp.einsum(equation, a.astype(dtype), b.astype(dtype), precision=lax.Precision.HIGHEST)  # noqa: E731
    if a.dtype == b.dtype == dtype:
        return exact(a, b)
    # XLA's CPU backend refuses some batched bfloat16 products at run time ("DotThunk: BF16 x BF16 = F32").
    return lax.platform_dependent(a, b, cpu=exact, default=lambda a, b: jnp.einsum(equation, a, b, preferred_element_type=dtype))
