"""Key/value cache of a right-padded batch.

Every row writes the same column at the same time, so a write is one ``dynamic_update_slice`` and not a scatter. What
a query may see is decided by the *position* stored beside each column, never by the column's number: a short prompt
leaves a hole of columns with position -1 between itself and its answer, and nobody attends to a hole.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rlvr_jax.models.decoder import DecoderConfig

Array = jax.Array


class KVCache(struct.PyTreeNode):
    """Keys and values of B rows, S columns.

    Attributes:
      k, v: ``[L, B, K, S, head_dim]``, or a tuple of L arrays ``[B, K, S, head_dim]`` (decoding: a step then updates
        each layer in place, where a scan would copy the whole cache). S is inside K: attention multiplies one
        ``[S, head_dim]`` matrix per head, and the other order costs a transposed copy per step (3x slower on CPU).
      position: ``[B, S] int32`` position of the token in each column; -1 = empty or padding.
      index: ``[] int32`` next column to write, the same for all rows.
    """

    k: Any
    v: Any
    position: Array
    index: Array

    @property
    def columns(self) -> int:
        return self.position.shape[1]


def init_cache(cfg: DecoderConfig, B: int, S: int, dtype: Any = jnp.float32, *, stacked: bool = False) -> KVCache:
    """An empty cache of B rows and S columns; a tuple per layer unless ``stacked``."""
    shape = (B, cfg.num_kv_heads, S, cfg.head_dim)

    def one() -> Any:
        if stacked:
            return jnp.zeros((cfg.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(cfg.num_layers))

    return KVCache(k=one(), v=one(), position=jnp.full((B, S), -1, jnp.int32), index=jnp.zeros((), jnp.int32))


def repeat_rows(cache: KVCache, G: int) -> KVCache:
    """Each row G times, side by side: one prefill serves the G samples of a prompt."""
    axis = 0 if isinstance(cache.k, tuple) else 1
    widen = lambda x: jnp.repeat(x, G, axis=axis)  # noqa: E731
    return cache.replace(k=jax.tree.map(widen, cache.k), v=jax.tree.map(widen, cache.v),
                         position=jnp.repeat(cache.position, G, axis=0))


def grow(cache: KVCache, S: int) -> KVCache:
    """The same cache with room for S columns in all.

    Raises:
      ValueError: S is smaller than the present number of columns.
    """
    extra = S - cache.columns
    if extra < 0:
        raise ValueError(f"the cache has {cache.columns} columns and cannot shrink to {S}")
    axis = 2 if isinstance(cache.k, tuple) else 3

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])

    return cache.replace(k=jax.tree.map(pad, cache.k), v=jax.tree.map(pad, cache.v),
                         position=jnp.pad(cache.position, ((0, 0), (0, extra)), constant_values=-1))
