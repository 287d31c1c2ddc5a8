"""From one device to a mesh: tokens over ('data', 'fsdp'), vocabulary over 'tensor', through ``shard_map``."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

Array = jax.Array

# The trainer's mesh axes.
BATCH_AXES = ("data", "fsdp")
VOCAB_AXIS = "tensor"


class Split(NamedTuple):
    """Mesh axes that carry tokens, the vocabulary, and the gradient of the head's width; () or None = not split."""

    batch: tuple[str, ...] = ()
    vocab: str | None = None
    width: str | None = None


def free_axes() -> dict[str, int]:
    """Mesh axes of the context (``jax.set_mesh``) that the compiler may lay out, with their sizes; none outside a mesh, or on one device.

    Axes that are already manual (inside a ``shard_map``) are the caller's.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return {}
    return {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}


def split_for(V: int, D: int) -> tuple[Split, int]:
    """How the mesh of the context splits a head ``[V, D]``, and over how many devices tokens go. What does not divide is not split."""
    free = free_axes()
    batch = tuple(a for a in BATCH_AXES if free.get(a, 1) > 1)
    vocab = VOCAB_AXIS if free.get(VOCAB_AXIS, 1) > 1 and V % free[VOCAB_AXIS] == 0 else None
    width = BATCH_AXES[-1] if BATCH_AXES[-1] in batch and D % free[BATCH_AXES[-1]] == 0 else None
    return Split(batch, vocab, width), math.prod(free[a] for a in batch)


def over_tokens(tree: Any, shards: int) -> Any:
    """Every array's first axis filled up to a multiple of ``shards`` with 0."""
    def pad(x: Array) -> Array:
        extra = -x.shape[0] % shards
        return jnp.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1)) if extra else x

    return jax.tree.map(pad, tree)


def run(body: Callable[..., Any], specs: Any, out_specs: Any, *args: Any) -> Any:
    """``body(*args)`` on each device's part, on the whole where nothing is split: a kernel cannot be split by the compiler."""
    free = set(free_axes())
    return jax.shard_map(body, in_specs=specs, out_specs=out_specs, axis_names=free, check_vma=False)(*args) if free else body(*args)


def head_spec(split: Split) -> P:
    """A device sees its rows of the head at full width: gathered once, before any loop."""
    return P(split.vocab, None)


def gradient_spec(split: Split) -> P:
    return P(split.vocab, split.width)


def vocab_start(split: Split, size: int) -> Array | int:
    """Number of the first row of the head that this device holds ``size`` rows of."""
    return lax.axis_index(split.vocab) * size if split.vocab else 0


def whole_vocab(split: Split, lse: Array, target: Array, mean: Array | None) -> tuple[Array, Array, Array | None]:
    """The sums of :func:`chunked.forward` over all parts of the vocabulary."""
    if split.vocab is None:
        return lse, target, mean
    top = lax.pmax(lse, split.vocab)
    total = top + jnp.log(lax.psum(jnp.exp(lse - top), split.vocab))
    if mean is not None:
        mean = lax.psum(mean * jnp.exp(lse - total), split.vocab)
    return total, lax.psum(target, split.vocab), mean


def reduced(split: Split, d_hidden: Array, d_head: Array) -> tuple[Array, Array]:
    """Gradients from their parts: the devices meet once, and each keeps only its share of the head's."""
    if split.vocab:
        d_hidden = lax.psum(d_hidden, split.vocab)
    for axis in sorted(split.batch, key=lambda a: a != split.width):  # the other axes then sum a share, not the whole
        d_head = lax.psum_scatter(d_head, axis, scatter_dimension=1, tiled=True) if axis == split.width else lax.psum(d_head, axis)
    return d_hidden, d_head


class LiveFirst:
    """Puts the live entries first, in order; :meth:`back` undoes it. ``count``: how many there are."""

    def __init__(self, live: Array) -> None:
        self.order = jnp.argsort(~live, stable=True)
        self.count = jnp.sum(live, dtype=jnp.int32)

    def __call__(self, x: Array) -> Array:
        return jnp.take(x, self.order, axis=0)

    def back(self, x: Array) -> Array:
        return jnp.zeros_like(x).at[self.order].set(x, unique_indices=True)


def live_first(split: Split, rows: int, hidden: Array, targets: Array, live: Array) -> tuple[LiveFirst, Array, Array]:
    """The order, and hidden states and targets in it; targets count from the first of the head's ``rows`` on this device."""
    first = LiveFirst(live)
    # What a dead token holds must not reach a product with 0.
    return first, first(jnp.where(live[:, None], hidden, 0)), first(jnp.where(live, targets, 0)) - vocab_start(split, rows)
