"""One token per row from logits and one uniform number per row.

``jax.random.categorical`` makes a random number per vocabulary entry, which at V = 151936 costs more than a small
model's forward pass. Here the inverse of the cumulative distribution is searched in two levels: sums of blocks of the
vocabulary, then the one block that the uniform number falls into. Nothing of size V is sorted.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array

BLOCK = 128
# Tokens that top-p looks at before it searches the whole vocabulary; a trained model's nucleus is smaller as a rule.
CANDIDATES = 256


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a row ends.

    Attributes:
      temperature: logits are divided by it; 0 = greedy.
      top_k: keep the k likeliest tokens; 0 = all. Of equal tokens the lower id goes first.
      top_p: of the tempered (and top-k) distribution keep the smallest set of likeliest tokens whose probabilities
        sum to at least top_p, at least one token; 1 = all. Equal tokens as in top_k.
      max_new_tokens: limit of a response, its end token included.
      eos_ids: ids that end a row; the end token is kept.
      record_entropy: also return the entropy of every tempered, full distribution.
      min_p: of what top-k and top-p leave, keep the tokens at least min_p times as likely as the likeliest; 0 = all.
      stop: strings that end a row: it is cut behind the first token with which its text holds one of them.

    Raises:
      ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    eos_ids: tuple[int, ...] = ()
    record_entropy: bool = False
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = {"temperature": (self.temperature >= 0 and self.temperature < float("inf"), "finite and >= 0"),
                  "top_k": (self.top_k >= 0, ">= 0 (0 = off)"),
                  "top_p": (0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
                  "max_new_tokens": (self.max_new_tokens >= 1, ">= 1"),
                  "eos_ids": (all(e >= 0 for e in self.eos_ids), "a tuple of non-negative token ids"),
                  "min_p": (0 <= self.min_p < 1, "in [0, 1) (0 = off)"),
                  "stop": (isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop), "a tuple of strings that are not empty")}
        for name, (ok, expected) in checks.items():
            if not ok:
                raise ValueError(f"sampling {name} is {getattr(self, name)!r}; it must be {expected}")

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole softmax."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class Draw(struct.PyTreeNode):
    """Sampled tokens and their probabilities.

    Attributes:
      token: ``[B] int32``, always inside the vocabulary.
      logprob: ``[B] float32`` under the tempered, full softmax (temperature 1 for greedy).
      behavior_logprob: ``[B] float32`` under the distribution really sampled from: tempered, truncated, renormalised.
        For greedy, a point mass, it is 0.
      entropy: ``[B] float32`` of the tempered, full softmax in nats, or None.
      finite: ``[B] bool`` False where the logits held a NaN or +inf or nothing but -inf; the row's other values are
        then 0.
    """

    token: Array
    logprob: Array
    behavior_logprob: Array
    entropy: Any
    finite: Array


def sample(logits: Array, u: Array, params: SamplingParams) -> Draw:
    """Draws one token per row.

    Args:
      logits: ``[B, V]`` of the next token.
      u: ``[B] float32`` in [0, 1); ignored for greedy.
      params: see :class:`SamplingParams`; static.
    """
    V = logits.shape[1]
    z = logits.astype(jnp.float32)
    if params.temperature not in (0, 1):
        z = z / params.temperature
    peak = jnp.max(z, axis=-1)
    sums = block_sums(z, peak)
    total = jnp.sum(sums, axis=-1)
    finite = jnp.isfinite(peak) & jnp.isfinite(total)
    if params.temperature == 0:
        token = jnp.argmax(z, axis=-1).astype(jnp.int32)
        behavior = jnp.zeros_like(peak)
    elif 0 < params.top_k < V:
        token, behavior = _draw_top_k(z, u, params)
    elif params.top_p < 1 or params.min_p > 0:
        mask = top_p_mask(z, peak, params.top_p) if params.top_p < 1 else True
        if params.min_p > 0:
            mask &= z >= peak[:, None] + math.log(params.min_p)
        kept = jnp.where(mask, z, -jnp.inf)
        sums = block_sums(kept, peak)
        token = inverse_cdf(kept, peak, sums, u)
        behavior = _at(z, token) - peak - jnp.log(jnp.sum(sums, axis=-1))
    else:
        token = inverse_cdf(z, peak, sums, u)
        behavior = None
    logprob = _at(z, token) - peak - jnp.log(total)
    clean = lambda x: jnp.where(finite, x, 0)  # noqa: E731
    entropy = clean(_entropy(z, peak, total)) if params.record_entropy else None
    return Draw(token=clean(token), logprob=clean(logprob), entropy=entropy, finite=finite,
                behavior_logprob=clean(logprob if behavior is None else behavior))


def _at(z: Array, token: Array) -> Array:
    return jnp.take_along_axis(z, token[:, None], axis=-1, mode="clip")[:, 0]


def _entropy(z: Array, peak: Array, total: Array) -> Array:
    shifted = z - peak[:, None]
    # exp(-inf) * -inf is NaN; a token of probability 0 adds nothing.
    mean = jnp.sum(jnp.exp(shifted) * jnp.maximum(shifted, -1e9), axis=-1) / total
    return jnp.log(total) - mean


def block_sums(z: Array, peak: Array) -> Array:
    """``[B, V], [B] -> [B, ceil(V / BLOCK)]``: sums of ``exp(z - peak)``; a ragged tail is a block of its own."""
    B, V = z.shape
    whole = V // BLOCK * BLOCK
    e = lambda x: jnp.exp(x - peak[:, None, None])  # noqa: E731
    sums = [jnp.sum(e(z[:, :whole].reshape(B, -1, BLOCK)), axis=-1)] if whole else []
    if whole < V:
        sums.append(jnp.sum(e(z[:, None, whole:]), axis=-1))
    # The barrier keeps XLA from turning the sum of these sums into another pass over the vocabulary.
    return jax.lax.optimization_barrier(jnp.concatenate(sums, axis=-1) if len(sums) > 1 else sums[0])


def _search(weight: Array, target: Array) -> tuple[Array, Array]:
    """``[B, n] weights >= 0, [B] targets`` -> (index, weight before it).

    The index is the first whose running sum exceeds the target. A parallel running sum need not be monotone in its
    last bit, so entries of weight 0 are excluded by name and not by arithmetic; a target that rounding has lifted to
    the total gets the heaviest entry.
    """
    running = jnp.cumsum(weight, axis=-1)
    i = jnp.argmax(jnp.where((running > target[:, None]) & (weight > 0), jnp.inf, weight), axis=-1)
    before = jnp.where(i == 0, 0.0, jnp.take_along_axis(running, jnp.maximum(i - 1, 0)[:, None], axis=-1)[:, 0])
    return i, before


def inverse_cdf(z: Array, peak: Array, sums: Array, u: Array) -> Array:
    """Draws index i with probability proportional to ``exp(z[:, i])`` by a search in two levels.

    Args:
      z: ``[B, V]`` log weights; -inf = never drawn.
      peak: ``[B]`` at least the row's maximum, for scale.
      sums: ``[B, blocks]``, :func:`block_sums` of z.
      u: ``[B]`` in [0, 1].

    Returns:
      ``[B] int32`` index of an entry of positive weight.
    """
    V = z.shape[1]
    target = u * jnp.sum(sums, axis=-1)
    block, before = _search(sums, target)
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK)
    weight = jnp.exp(jnp.take_along_axis(z, ids, axis=-1, mode="clip") - peak[:, None])
    offset, _ = _search(jnp.where(ids < V, weight, 0.0), target - before)
    return jnp.minimum(block * BLOCK + offset, V - 1).astype(jnp.int32)


def _draw_top_k(z: Array, u: Array, params: SamplingParams) -> tuple[Array, Array]:
    """Top-k, then top-p and min-p, entirely within the k sorted candidates: ``-> (token[B], behavior_logprob[B])``."""
    value, index = jax.lax.top_k(z, params.top_k)
    shifted = value - value[:, :1]
    weight = jnp.exp(shifted)
    if params.top_p < 1:
        running = jnp.cumsum(weight, axis=-1)
        keep = running - weight < params.top_p * running[:, -1:]
        weight = jnp.where(keep.at[:, 0].set(True), weight, 0.0)
    if params.min_p > 0:
        weight = jnp.where(shifted >= math.log(params.min_p), weight, 0.0)
    total = jnp.sum(weight, axis=-1)
    i, _ = _search(weight, u * total)
    token = jnp.take_along_axis(index, i[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), jnp.log(jnp.take_along_axis(weight, i[:, None], axis=-1)[:, 0] / total)


def top_p_mask(z: Array, peak: Array, top_p: float) -> Array:
    """``[B, V], [B] -> [B, V] bool``: the smallest set of likeliest tokens with probability at least top_p.

    The threshold is the largest weight w for which tokens of weight >= w hold that much. A row finds it among its
    likeliest tokens if these hold enough, else by bisection over the whole vocabulary; each row by its own rule, so
    that no row depends on another. Of tokens that tie at the threshold only as many are kept as are needed, lowest
    ids first.
    """
    weight = jnp.exp(z - peak[:, None])
    target = top_p * _mass(weight, weight > 0)
    best = jax.lax.top_k(weight, min(CANDIDATES, weight.shape[1]))[0]
    enough = jnp.cumsum(best, axis=-1) >= target[:, None]
    near = jnp.take_along_axis(best, jnp.argmax(enough, axis=-1)[:, None], axis=-1)
    found = jnp.any(enough, axis=-1)
    far = jax.lax.cond(jnp.all(found), lambda: near, lambda: _bisect(weight, target)[:, None])
    threshold = jnp.where(found[:, None], near, far)
    above, tied = weight > threshold, (weight == threshold) & (weight > 0)
    missing = target - _mass(weight, above)
    needed = jnp.maximum(jnp.ceil(missing / jnp.maximum(threshold[:, 0], 1e-38)), 1).astype(jnp.int32)
    some = jnp.any(jnp.sum(tied, axis=-1) > needed)
    tied = jax.lax.cond(some, lambda: tied & (jnp.cumsum(tied, axis=-1) <= needed[:, None]), lambda: tied)
    return above | tied


def _mass(weight: Array, keep: Array) -> Array:
    return jnp.sum(jnp.sum(_blocks(jnp.where(keep, weight, 0.0)), axis=-1), axis=-1)


def _bisect(weight: Array, target: Array) -> Array:
    """``[B, V] weights in [0, 1], [B] -> [B]``: the largest w with ``sum(weight[weight >= w]) >= target``, exactly.

    Positive floats are ordered as their bits are, so 31 halvings of the bit pattern end at it. Each is a pass over
    the weights; sorting 64 rows of 49152 costs as much as two hundred.
    """
    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # mass(weight >= low) >= target > mass(weight >= high)
        middle = low + (high - low) // 2
        enough = _mass(weight, weight >= middle.view(jnp.float32)[:, None]) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    one = jnp.float32(1.0).view(jnp.int32)
    start = jnp.zeros_like(target, jnp.int32)
    return jax.lax.fori_loop(0, 31, halve, (start, jnp.broadcast_to(one + 1, start.shape)))[0].view(jnp.float32)


def _blocks(x: Array) -> Array:
    """``[B, V] -> [B, blocks, BLOCK]``, the tail filled with 0: short sums are vectorised and more exact."""
    B, V = x.shape
    return jnp.pad(x, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
