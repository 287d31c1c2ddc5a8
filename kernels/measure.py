"""Inputs, times and memory of the loss kernels: what :mod:`.bench` and :mod:`.check_gpu` share."""

import functools
import importlib
import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .token_logprob import chunked, fused, reference, streamed
from .token_logprob.logits import Logits

Array = jax.Array
Step = Callable[..., tuple[Array, tuple[Array, Array]]]


class Problem(NamedTuple):
    """``hidden [n, D]``, ``head [V, D]``, ``targets [n]``, ``live [n] bool``, slopes of the loss ``[n] float32``.

    Logits have a standard deviation of about 2; the first and the last token aim at the ends of the vocabulary.
    """

    hidden: Array
    head: Array
    targets: Array
    live: Array
    d_logprob: Array
    d_entropy: Array


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _problem(tokens: int, vocab: int, width: int, dtype: Any, live: Array, seed: Array) -> Problem:
    keys = jax.random.split(jax.random.key(seed), 5)
    hidden = jax.random.normal(keys[0], (tokens, width), dtype) * (2 / width**0.5)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab).at[0].set(0).at[-1].set(vocab - 1)
    slopes = jax.random.normal(keys[3], (2, tokens))
    alive = jnp.arange(tokens) < jnp.round(live * tokens).astype(jnp.int32)
    return Problem(hidden.astype(dtype), jax.random.normal(keys[1], (vocab, width), dtype), targets, alive, slopes[0], slopes[1])


def problem(tokens: int, vocab: int, width: int, dtype: Any = jnp.float32, live: float = 1.0, seed: int = 0) -> Problem:
    """``live``: the share of tokens, the first ones, that is not at weight zero."""
    return _problem(tokens, vocab, width, dtype, jnp.float32(live), jnp.int32(seed))


def loss_and_grads(logprob: Callable[..., tuple[Array, Array | None]], how: Logits) -> Step:
    """``Problem -> (sum of d_logprob * logprob (+ d_entropy * entropy), (d_hidden, d_head))`` of an implementation."""

    def run(p: Problem) -> tuple[Array, tuple[Array, Array]]:
        def loss(hidden: Array, head: Array) -> Array:
            value, entropy = logprob(how, hidden, head, p.targets, p.live)
            return jnp.sum(p.d_logprob * value) + (0 if entropy is None else jnp.sum(p.d_entropy * entropy))

        return jax.value_and_grad(loss, (0, 1))(p.hidden, p.head)

    return run


def one_pass(how: Logits, chunk: int | None = None) -> Step:
    """The same through :func:`fused.token_loss`."""

    def run(p: Problem) -> tuple[Array, tuple[Array, Array]]:
        def loss(hidden: Array, head: Array) -> Array:
            return fused.token_loss(how, hidden, head, p.targets, p.live, (p.d_logprob, p.d_entropy), _weighted, _no_statistics, chunk=chunk).sum

        return jax.value_and_grad(loss, (0, 1))(p.hidden, p.head)

    return run


def _weighted(logprob: Array, entropy: Array | None, slopes: tuple[Array, Array]) -> tuple[Array, dict[str, Array]]:
    return jnp.sum(slopes[0] * logprob) + (0 if entropy is None else jnp.sum(slopes[1] * entropy)), {}


def _no_statistics(stacked: dict[str, Array]) -> dict[str, Array]:
    return stacked


def plain(how: Logits) -> Step:
    return loss_and_grads(reference.token_logprob, how)


def two_passes(how: Logits, passes: streamed.Passes | None = None) -> Step:
    """Through the wrapper of the streaming implementations; default chunked."""
    return loss_and_grads(functools.partial(streamed.token_logprob, passes or streamed.Passes(chunked.forward, chunked.backward)), how)


def tokamax_loss() -> Callable[..., Array] | None:
    """``tokamax.linear_softmax_cross_entropy_loss`` where it is installed (Python 3.12 or later), else None."""
    try:
        found = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    except ImportError:
        return None
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns at every shape that it was not tuned for
    return found


def seconds(run: Callable[[], Any], repeat: int, warm: int = 1, queue: int = 1) -> float:
    """Median time of a call; ``queue`` calls are handed to the device before waiting, so that it is never idle between them."""
    for _ in range(warm):
        jax.block_until_ready(run())
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        out = [run() for _ in range(queue)]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / queue)
    return median(times)


def temporaries(compiled: Any) -> int:
    """Bytes that the compiled program holds besides arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def matmul_rate(dtype: Any, size: int, repeat: int = 5, queue: int = 1) -> float:
    """FLOP/s of a square matmul of this device, accumulated in float32, results in ``dtype``."""
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype))
    return 2 * size**3 / seconds(lambda: multiply(x, x), repeat, queue=queue)
