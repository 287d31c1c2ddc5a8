"""Decode slots: what runs on the device, as pure functions of arrays.

A slot is one row of the KV cache, for as long as the answer in it lasts. Its first ``P`` columns hold the prompt; the
other ``C`` are a ring that all slots write at the same column, so a step writes with one ``dynamic_update_slice`` and
scatters nothing. A slot that was filled later starts at a later column: what it may see is decided by the positions
stored beside the columns, and filling a slot clears all of them. The ring must be as long as the longest answer in it
is old, and no longer: :func:`regrid` makes it longer, and the number of slots smaller.

The host knows everything else about a slot and hands it in with each :func:`burst`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from rlvr_jax.models.cache import KVCache, init_cache
from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix, times_transposed
from rlvr_jax.rollout import keys
from rlvr_jax.rollout.draw import SamplingParams, sample
from rlvr_jax.sharding import RULES, constrain

Array = jax.Array


class Prompts(struct.PyTreeNode):
    """Prefilled prompts.

    Attributes:
      k, v: ``[L, n, K, P, head_dim]``.
      length: ``[n] int32``.
    """

    k: Array
    v: Array
    length: Array


class First(struct.PyTreeNode):
    """The first token of each of n * G rows, and the row's key: ``[n * G]``, the key's bits ``[n * G, 2] uint32``."""

    token: Array
    logprob: Array
    behavior_logprob: Array
    entropy: Any
    finite: Array
    key: Array


class Rows(struct.PyTreeNode):
    """What the host says about S slots.

    Attributes:
      token: ``[S] int32`` the last token drawn, not in the cache yet.
      prompt_length, length: ``[S] int32`` tokens of the prompt, and of the answer so far.
      cap: ``[S] int32`` most tokens of the answer.
      live: ``[S] bool``.
      key: ``[S, 2] uint32``.
    """

    token: Array
    prompt_length: Array
    length: Array
    cap: Array
    live: Array
    key: Array


class Drawn(struct.PyTreeNode):
    """Tokens of one burst: slot s drew ``count[s]`` of them, ``x[s, :count[s]]``.

    Attributes:
      token: ``[S, n] int32``; logprob, behavior_logprob: ``[S, n] float32``; entropy: the same, or None.
      count: ``[S] int32``.
      ended: ``[S] bool`` the last one is an end token.
      nonfinite: ``[S] bool`` logits held NaN or inf: the row stopped before that token.
    """

    token: Array
    logprob: Array
    behavior_logprob: Array
    entropy: Any
    count: Array
    ended: Array
    nonfinite: Array


class _Loop(struct.PyTreeNode):
    t: Array
    token: Array
    live: Array
    cache: KVCache
    out: Drawn


def prefill(params: Any, tokens: Array, length: Array, prompt_id: Array, occurrence: Array, seed: Array, step: Array, *, cfg: DecoderConfig,
            sampling: SamplingParams, G: int, dtype: Any) -> tuple[Prompts, First]:
    """Computes n prompts once, for G samples each, and draws the samples' first tokens.

    Args:
      params: tree of ``decoder.init_params``. Its layers are scanned whatever decoding does: unrolled they compile slowly.
      tokens: ``[n, P] int32``, right-padded; length: ``[n] int32``, at least 1.
      prompt_id, occurrence, seed, step: of the rows' keys, see :mod:`rlvr_jax.rollout.keys`.
    """
    n, columns = tokens.shape
    t = jnp.arange(columns, dtype=jnp.int32)
    positions = jnp.where(t < length[:, None], t, -1)
    hidden, cache = forward(params, cfg, tokens, positions, compute_dtype=dtype, cache=init_cache(cfg, n, columns, dtype, stacked=True))
    assert cache is not None
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    key = keys.row_keys(seed, step, prompt_id, occurrence, G)
    draw = sample(jnp.repeat(_logits(last, params, cfg), G, axis=0), keys.uniforms(key, 1)[:, 0], sampling)
    # Slots of every shard may ask for any of the prompts.
    whole = lambda x: constrain(x, "layers", None, "kv_heads", "length", "head_dim")  # noqa: E731
    return Prompts(whole(cache.k), whole(cache.v), length), First(
        token=draw.token, logprob=draw.logprob, behavior_logprob=draw.behavior_logprob, entropy=draw.entropy, finite=draw.finite,
        key=jax.random.key_data(key))


def _logits(hidden: Array, params: Any, cfg: DecoderConfig) -> Array:
    """``[B, D] -> [B, V] float32``."""
    return constrain(times_transposed(hidden, head_matrix(params, cfg).astype(hidden.dtype)), "batch", "vocab")


def admit(cache: KVCache, prompts: Prompts, source: Array, slot: Array, count: Array) -> KVCache:
    """Fills ``slot[i]`` with ``prompts[source[i]]`` for i below ``count``; whatever the slots held is gone.

    ``source, slot: [S] int32``. On a mesh every shard writes the slots that are its own.
    """
    def local(first: Array, k: Any, v: Any, position: Array, prompts: Prompts, source: Array, slot: Array, count: Array) -> tuple[Any, Any, Array]:
        columns = position.shape[1]

        def one(i: Array, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
            k, v, position = carry
            place = jnp.clip(slot[i] - first, 0, position.shape[0] - 1)
            mine = place == slot[i] - first
            t = jnp.arange(columns, dtype=jnp.int32)
            filled = jnp.where(t < prompts.length[source[i]], t, -1)
            old = jax.lax.dynamic_slice_in_dim(position, place, 1)
            position = jax.lax.dynamic_update_slice_in_dim(position, jnp.where(mine, filled[None], old), place, 0)
            return _put(k, prompts.k, source[i], place, mine), _put(v, prompts.v, source[i], place, mine), position

        return jax.lax.fori_loop(0, count, one, (k, v, position))

    args: Any = (cache.k, cache.v, cache.position, prompts, source, slot, count)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        k, v, position = local(jnp.int32(0), *args)
    else:
        def on_shard(*args: Any) -> tuple[Any, Any, Array]:
            return local(jax.lax.axis_index(RULES["batch"]) * args[2].shape[0], *args)

        kv, row, whole = _cache_spec(cache), P(RULES["batch"]), P(None, None, RULES["kv_heads"])
        specs: Any = (kv, kv, row, jax.tree.map(lambda x: whole if x.ndim > 1 else P(), prompts), P(), P(), P())
        k, v, position = jax.shard_map(on_shard, in_specs=specs, out_specs=(kv, kv, row), check_vma=False)(*args)
    return cache.replace(k=k, v=v, position=position)


def _put(cache: Any, prompts: Array, source: Array, slot: Array, mine: Array) -> Any:
    """One slot of every layer: a prompt's entries, then zeros (a masked NaN would still poison the sum)."""
    def row(x: Array, piece: Array, at: tuple[Any, ...]) -> Array:
        piece = jnp.pad(piece, [(0, 0)] * (piece.ndim - 2) + [(0, x.shape[-2] - piece.shape[-2]), (0, 0)]).astype(x.dtype)
        old = jax.lax.dynamic_slice(x, at, piece.shape)
        return jax.lax.dynamic_update_slice(x, jnp.where(mine, piece, old), at)

    if not isinstance(cache, tuple):
        return row(cache, jax.lax.dynamic_slice_in_dim(prompts, source, 1, axis=1), (0, slot, 0, 0, 0))
    pick = lambda i: jax.lax.dynamic_slice(prompts, (i, source, 0, 0, 0), (1, 1, *prompts.shape[2:]))[0]  # noqa: E731
    return tuple(row(x, pick(i), (slot, 0, 0, 0)) for i, x in enumerate(cache))


def _cache_spec(cache: KVCache) -> Any:
    spec = P(RULES["batch"], RULES["kv_heads"])
    return tuple(spec for _ in cache.k) if isinstance(cache.k, tuple) else P(None, *spec)


def split_slots(cache: KVCache) -> KVCache:
    """On a mesh, slots go over the data axes and heads over tensor."""
    axes = ("batch", "kv_heads", "length", "head_dim")
    split = lambda x: constrain(x, *(axes if x.ndim == 4 else ("layers", *axes)))  # noqa: E731
    return cache.replace(k=jax.tree.map(split, cache.k), v=jax.tree.map(split, cache.v), position=constrain(cache.position, "batch", "length"),
                         index=constrain(cache.index))


def empty(cfg: DecoderConfig, slots: int, prompt_columns: int, ring: int, dtype: Any, *, unroll: bool) -> KVCache:
    """A cache without rows."""
    cache = init_cache(cfg, slots, prompt_columns + ring, dtype, stacked=not unroll)
    return split_slots(cache.replace(index=jnp.int32(prompt_columns)))


def regrid(cache: KVCache, order: Array, *, prompt_columns: int, ring: int) -> KVCache:
    """Slots ``order`` ([slots] int32) only, and a ring of at least its present length, oldest column first."""
    present = cache.columns - prompt_columns
    oldest_first = prompt_columns + (cache.index - prompt_columns + jnp.arange(present)) % present
    column = jnp.concatenate([jnp.arange(prompt_columns), oldest_first])
    extra = ring - present

    def take(x: Array, row_axis: int, column_axis: int, fill: int) -> Array:
        x = jnp.take(jnp.take(x, order, axis=row_axis), column, axis=column_axis)
        return jnp.pad(x, [(0, extra if i == x.ndim + column_axis else 0) for i in range(x.ndim)], constant_values=fill)

    grid = lambda x: take(x, -4, -2, 0)  # noqa: E731
    return split_slots(cache.replace(k=jax.tree.map(grid, cache.k), v=jax.tree.map(grid, cache.v), position=take(cache.position, -2, -1, -1),
                                     index=jnp.int32(prompt_columns) + jnp.int32(present if extra else 0)))


def burst(params: Any, cache: KVCache, rows: Rows, stop_at: Array, *, cfg: DecoderConfig, sampling: SamplingParams, prompt_columns: int, tokens: int,
          dtype: Any) -> tuple[KVCache, Drawn]:
    """Up to ``tokens`` tokens for every live slot; ends early when no more than ``stop_at`` slots live.

    Args:
      params: see :func:`rlvr_jax.rollout.weights.decode_weights`.
      cache: its ring has room for ``tokens`` more of the oldest row.
      stop_at: ``[] int32``, less than the number of live slots.
    """
    S, ring = rows.live.shape[0], cache.columns - prompt_columns
    u = keys.uniforms(jax.random.wrap_key_data(rows.key, impl="threefry2x32"), tokens, rows.length)
    zeros = jnp.zeros((S, tokens), jnp.float32)
    none = jnp.zeros(S, bool)
    out = Drawn(jnp.zeros((S, tokens), jnp.int32), zeros, zeros, zeros if sampling.record_entropy else None, jnp.zeros(S, jnp.int32), none, none)

    def step(s: _Loop) -> _Loop:
        position = jnp.where(s.live, rows.prompt_length + rows.length + s.out.count - 1, -1)
        hidden, cache = forward(params, cfg, s.token[:, None], position[:, None], cache=s.cache, compute_dtype=dtype)
        assert cache is not None
        cache = cache.replace(index=prompt_columns + (cache.index - prompt_columns) % ring)
        column = jax.lax.dynamic_slice_in_dim(u, s.t, 1, axis=1)[:, 0]
        return _record(s.replace(cache=cache), sample(_logits(hidden[:, 0], params, cfg), column, sampling), rows, sampling)

    going = lambda s: (s.t < tokens) & (jnp.sum(s.live) > stop_at)  # noqa: E731
    s = jax.lax.while_loop(going, step, _Loop(jnp.int32(0), rows.token, rows.live, split_slots(cache), out))
    return split_slots(s.cache), jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), s.out)


def _record(s: _Loop, draw: Any, rows: Rows, sampling: SamplingParams) -> _Loop:
    """Writes token t of the live slots and decides which of them are done."""
    good = s.live & draw.finite
    eos = jnp.zeros_like(good)
    for e in sampling.eos_ids:
        eos |= draw.token == e

    def put(buffer: Array, value: Array) -> Array:
        column = jnp.where(good, value, 0).astype(buffer.dtype)[:, None]
        return jax.lax.dynamic_update_slice(buffer, column, (0, s.t))

    old = s.out
    count = old.count + good
    out = Drawn(put(old.token, draw.token), put(old.logprob, draw.logprob), put(old.behavior_logprob, draw.behavior_logprob),
                None if old.entropy is None else put(old.entropy, draw.entropy), count, old.ended | (good & eos), old.nonfinite | (s.live & ~draw.finite))
    live = good & ~eos & (rows.length + count < rows.cap)
    return s.replace(t=s.t + 1, token=jnp.where(good, draw.token, 0), live=live, out=out)
