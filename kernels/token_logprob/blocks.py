"""Tokens in chunks: what the chunked implementations share.

Tokens are viewed as ``[shards, chunks, chunk]``; ``shards`` is the number of devices the rows of the batch are split over,
1 outside a mesh.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .reference import accumulation_dtype

Array = jax.Array

# The trainer's mesh axes, where a mesh is set: rows go over the first two, the vocabulary over the third.
BATCH_AXES = ("data", "fsdp")
VOCAB_AXIS = "tensor"

LOGITS_PER_CHUNK = 2**24
"""64 MiB of float32 logits: large enough to keep a matmul busy, small beside any model with such a vocabulary."""


class LiveFirst:
    """``[tokens, ...] -> [shards, per_shard, ...]``, in each shard the live tokens first, so that dead chunks are whole.

    ``back`` undoes it for ``[shards, per_shard]`` arrays.
    """

    def __init__(self, live: Array, shards: int) -> None:
        self.shards = shards
        self.order = jnp.argsort(~live.reshape(shards, -1), axis=1, stable=True)

    def __call__(self, x: Array) -> Array:
        x = x.reshape(self.shards, -1, *x.shape[1:])
        return jnp.take_along_axis(x, self.order.reshape(self.order.shape + (1,) * (x.ndim - 2)), axis=1)

    def back(self, x: Array) -> Array:
        return jnp.zeros_like(x).at[jnp.arange(self.shards)[:, None], self.order].set(x, unique_indices=True)


def chunk_size(tokens: int, vocab: int) -> int:
    """Tokens per chunk on one device: at most ``LOGITS_PER_CHUNK / V``, within 128..1024, all chunks of equal size.

    Equal chunks (rounded up to a multiple of 8) waste at most seven tokens each on padding.
    """
    limit = min(max(LOGITS_PER_CHUNK // vocab // 64 * 64, 128), 1024)
    chunks = max(-(-tokens // limit), 1)
    return max(-(-tokens // chunks // 8) * 8, 8)


def logits(hidden: Array, weight: Array, temperature: float) -> Array:
    z = jnp.einsum("scd,vd->scv", hidden, weight, preferred_element_type=accumulation_dtype(hidden))
    return z / temperature if temperature != 1 else z


def row_dot(a: Array, b: Array) -> Array:
    """``sum(a * b, axis=-1)`` as a dot product: on CPU the fused sum adds one by one and loses two digits at 50k terms."""
    return jnp.einsum("scv,scv->sc", a, b, precision=lax.Precision.HIGHEST)


def live_chunks(live: Array) -> tuple[Array, Array]:
    """``[S, n, c] bool`` -> (chunk numbers, those with a live token first; how many those are)."""
    alive = jnp.any(live, axis=(0, 2))
    return jnp.argsort(~alive, stable=True), jnp.sum(alive, dtype=jnp.int32)


def take(x: Array, at: Array) -> Array:
    return lax.dynamic_index_in_dim(x, at, axis=1, keepdims=False)


def put(x: Array, value: Array, at: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), at, axis=1)


def auto_axes() -> dict[str, int]:
    """Mesh axes of the context that the compiler may lay out, with their sizes; none outside a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return {}
    return {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}


def batch_shards(tokens: int) -> int:
    """Devices the tokens are split over; 1 where they do not divide (the compiler then lays them out as it likes)."""
    sizes = auto_axes()
    shards = 1
    for name in BATCH_AXES:
        shards *= sizes.get(name, 1)
    return shards if tokens % shards == 0 else 1


def over_batch(x: Array, shards: int, second: str | None = None) -> Array:
    """Axis 0 over the batch axes of the mesh; axis 1 over ``second``."""
    axes = auto_axes()
    if not axes or shards == 1:
        return x
    second = second if second in axes else None
    return lax.with_sharding_constraint(x, P(tuple(a for a in BATCH_AXES if a in axes), second))


def gathered(head: Array, shards: int) -> Array:
    """``[V, D]`` with its width gathered once before the loop; the vocabulary stays split."""
    axes = auto_axes()
    if not axes or shards == 1:
        return head
    return lax.with_sharding_constraint(head, P(VOCAB_AXIS if VOCAB_AXIS in axes else None, None))
