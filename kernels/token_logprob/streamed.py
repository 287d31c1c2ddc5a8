"""Two passes around any implementation that streams: differentiation, dead tokens, and the mesh.

An implementation gives :func:`chunked.forward` and :func:`chunked.backward`: plain functions of one device's arrays,
live tokens first. Everything that is the same for all of them is here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from . import mesh
from .logits import Logits

Array = jax.Array


class Passes(NamedTuple):
    """``forward`` and ``backward`` of an implementation, see :mod:`.chunked`."""

    forward: Callable[..., tuple[Array, Array, Array | None]]
    backward: Callable[..., tuple[Array, Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_logprob(passes: Passes, how: Logits, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Array, Array | None]:
    """As :func:`reference.token_logprob`, without an array of ``[tokens, V]`` in the forward or the backward pass."""
    return _forward(passes, how, hidden, head, targets, live)[0]


def _forward(passes: Passes, how: Logits, hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Any, Any]:
    n = hidden.shape[0]
    split, shards = mesh.split_for(*head.shape)

    def body(hidden: Array, head: Array, targets: Array, live: Array) -> tuple[Array, ...]:
        first, h, t = mesh.live_first(split, head.shape[0], hidden, targets, live)
        lse, target, mean = mesh.whole_vocab(split, *passes.forward(how, h, head.astype(h.dtype), t, first.count))
        return tuple(jnp.where(live, first.back(x), 0) for x in (target - lse, lse, *(() if mean is None else (lse - mean, mean))))

    rows = P(split.batch or None)
    tokens, *columns = mesh.over_tokens((hidden, targets, live), shards)
    out = mesh.run(body, (rows, mesh.head_spec(split), rows, rows), rows, tokens, head, *columns)
    logprob, lse, *rest = (x[:n] for x in out)
    entropy, mean = rest if rest else (None, None)
    return (logprob, entropy), (hidden, head, targets, live, lse, mean)


def _backward(passes: Passes, how: Logits, saved: Any, cotangents: tuple[Array, Array | None]) -> tuple[Array, Array, None, None]:
    hidden, head, targets, live, lse, mean = saved
    n = hidden.shape[0]
    split, shards = mesh.split_for(*head.shape)

    def body(hidden: Array, head: Array, targets: Array, live: Array, *vectors: Array) -> tuple[Array, Array]:
        first, h, t = mesh.live_first(split, head.shape[0], hidden, targets, live)
        lse, d_logprob, *rest = (first(jnp.where(live, x, 0)) for x in vectors)
        mean, d_entropy = rest if rest else (None, None)
        grads = passes.backward(how, h, head.astype(h.dtype), t, first.count, lse, mean, d_logprob, d_entropy)
        d_hidden, d_head = mesh.reduced(split, *grads)
        return jnp.where(live[:, None], first.back(d_hidden), 0).astype(h.dtype), d_head.astype(head.dtype)

    rows = P(split.batch or None)
    vectors = (lse, cotangents[0]) if mean is None else (lse, cotangents[0], mean, cotangents[1])
    specs = (rows, mesh.head_spec(split), rows, rows, *(rows for _ in vectors))
    tokens, *columns = mesh.over_tokens((hidden, targets, live, *vectors), shards)
    d_hidden, d_head = mesh.run(body, specs, (rows, mesh.gradient_spec(split)), tokens, head, *columns)
    return d_hidden[:n], d_head, None, None


token_logprob.defvjp(_forward, _backward)
