"""Prefill and decode as one pure function of arrays.

A prompt is prefilled once and its cache row repeated for its G samples. Decoding is one ``while_loop`` that ends when
every row is done; each step writes column ``P + t`` of the cache and column ``t`` of the outputs for all rows alike,
so nothing is scattered. The hole of a short prompt between its end and column P is masked by the cache's positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rlvr_jax.models.cache import KVCache, grow, init_cache, repeat_rows
from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix, unstack_layers
from rlvr_jax.rollout.draw import Draw, SamplingParams, sample
from rlvr_jax.sharding import constrain

Array = jax.Array


class Responses(struct.PyTreeNode):
    """Sampled responses, aligned at their first token: ``x[b, t]`` belongs to response token t.

    Attributes:
      tokens: ``[B, R] int32``, 0 after the end.
      logprob, behavior_logprob: ``[B, R] float32``, 0 after the end.
      entropy: ``[B, R] float32`` or None.
      length: ``[B] int32``, the end token counted.
      ended: ``[B] bool`` the last token is one of ``eos_ids``.
      nonfinite: ``[B] bool`` logits held NaN or inf: the row stopped before that token.
    """

    tokens: Array
    logprob: Array
    behavior_logprob: Array
    entropy: Any
    length: Array
    ended: Array
    nonfinite: Array


class _Loop(struct.PyTreeNode):
    """What changes from one decoded token to the next."""

    t: Array
    token: Array
    done: Array
    out: Responses
    cache: KVCache


def generate(params: Any, cfg: DecoderConfig, sampling: SamplingParams, prompts: Array, prompt_length: Array,
             u: Array, cap: Array, *, compute_dtype: Any = jnp.float32, unroll: bool = True) -> Responses:
    """Samples G responses for each of N prompts.

    Args:
      params: tree of ``decoder.init_params``.
      cfg, sampling: static.
      prompts: ``[N, P] int32``, right-padded.
      prompt_length: ``[N] int32``, at least 1.
      u: ``[B, R] float32`` in [0, 1), B = N * G: the number that draws token t of row b.
      cap: ``[B] int32`` most new tokens of a row, at most R; 0 = the row is padding and is never sampled.
      compute_dtype: dtype of the matmuls and of the cache.
      unroll: decode with one weight tree per layer, sliced out of the stack once, instead of scanning the stack.
    """
    B, R = u.shape
    G = B // prompts.shape[0]
    head = head_matrix(params, cfg).astype(compute_dtype)
    hidden, cache = _prefill(params, cfg, prompts, prompt_length, compute_dtype)
    if unroll:
        params, cache = unstack_layers(params, compute_dtype), _unstack_cache(cache)
    logits = jnp.repeat(_logits(hidden, head), G, axis=0)
    cache = _split_rows(grow(repeat_rows(cache, G), prompts.shape[1] + R))
    position = jnp.repeat(prompt_length, G)

    state = _Loop(t=jnp.int32(0), token=jnp.zeros(B, jnp.int32), done=cap <= 0, out=_empty(B, R, sampling), cache=cache)
    state = _write(state, sample(logits, u[:, 0], sampling), cap, sampling)

    def step(s: _Loop) -> _Loop:
        h, cache = forward(params, cfg, s.token[:, None], (position + s.t - 1)[:, None], cache=s.cache,
                           compute_dtype=compute_dtype)
        column = jax.lax.dynamic_slice_in_dim(u, s.t, 1, axis=1)[:, 0]
        return _write(s.replace(cache=cache), sample(_logits(h[:, 0], head), column, sampling), cap, sampling)

    return jax.lax.while_loop(lambda s: (s.t < R) & jnp.any(~s.done), step, state).out


def _prefill(params: Any, cfg: DecoderConfig, prompts: Array, prompt_length: Array, dtype: Any) -> tuple[Array, KVCache]:
    """Hidden state ``[N, D]`` of each prompt's last token, and the stacked cache of the prompts.

    The layers are scanned whatever decoding does: it runs once, and an unrolled one is slow to compile.
    """
    N, P = prompts.shape
    t = jnp.arange(P, dtype=jnp.int32)
    positions = jnp.where(t < prompt_length[:, None], t, -1)
    hidden, cache = forward(params, cfg, prompts, positions, compute_dtype=dtype,
                            cache=init_cache(cfg, N, P, dtype, stacked=True))
    assert cache is not None
    return jnp.take_along_axis(hidden, (prompt_length - 1)[:, None, None], axis=1)[:, 0], cache


def _unstack_cache(cache: KVCache) -> KVCache:
    return cache.replace(k=tuple(cache.k), v=tuple(cache.v))


def _split_rows(cache: KVCache) -> KVCache:
    """On a mesh, rows go over the data axes: said here, because the prompts may have been too few to be split."""
    axes = ("batch", "kv_heads", "length", "head_dim")
    split = lambda x: constrain(x, *(axes if x.ndim == 4 else ("layers", *axes)))  # noqa: E731
    return cache.replace(k=jax.tree.map(split, cache.k), v=jax.tree.map(split, cache.v),
                         position=constrain(cache.position, "batch", "length"))


def _logits(hidden: Array, head: Array) -> Array:
    """``[B, D], [V, D] -> [B, V] float32``."""
    logits = jnp.einsum("bd,vd->bv", hidden, head, preferred_element_type=jnp.float32)
    return constrain(logits, "batch", "vocab")


def _empty(B: int, R: int, sampling: SamplingParams) -> Responses:
    zeros = jnp.zeros((B, R), jnp.float32)
    return Responses(tokens=jnp.zeros((B, R), jnp.int32), logprob=zeros, behavior_logprob=zeros,
                     entropy=zeros if sampling.record_entropy else None, length=jnp.zeros(B, jnp.int32),
                     ended=jnp.zeros(B, bool), nonfinite=jnp.zeros(B, bool))


def _write(s: _Loop, draw: Draw, cap: Array, sampling: SamplingParams) -> _Loop:
    """Records token t of the live rows and decides which of them are done."""
    live = ~s.done & draw.finite
    eos = jnp.zeros_like(live)
    for e in sampling.eos_ids:
        eos |= draw.token == e

    def put(buffer: Array, value: Array) -> Array:
        column = jnp.where(live, value, 0).astype(buffer.dtype)[:, None]
        return jax.lax.dynamic_update_slice(buffer, column, (0, s.t))

    old = s.out
    out = Responses(
        tokens=put(old.tokens, draw.token), logprob=put(old.logprob, draw.logprob),
        behavior_logprob=put(old.behavior_logprob, draw.behavior_logprob),
        entropy=None if old.entropy is None else put(old.entropy, draw.entropy),
        length=old.length + live, ended=old.ended | (live & eos), nonfinite=old.nonfinite | (~s.done & ~draw.finite))
    done = s.done | eos | ~draw.finite | (s.t + 1 >= cap)
    return s.replace(t=s.t + 1, token=jnp.where(live, draw.token, 0), done=done, out=out)
