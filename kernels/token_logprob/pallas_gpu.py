"""Token log-probability for NVIDIA GPUs (Ampere, Hopper), forward and backward of one device's shard.

Nothing of size ``[tokens, V]`` is held. The forward pass makes the statistics of every row tile by tile and merges them
over the vocabulary. The backward pass walks chunks of the vocabulary (outside) and of the live tokens (inside): the
gradient of a chunk of logits is made once more from hidden and head, rounded to the dtype of the inputs in a bounded
buffer, and two matmuls of the vendor's library turn it into its share of both gradients. Four matmuls in all,
against three of a version that keeps the logits.

Where the logits of a chunk are made is a plan's choice (:func:`plan_for`): in the Triton kernel itself, so that they never
leave the registers, or by the vendor's matmul into a float32 buffer that the kernel reads. The first saves 8 to 12 bytes
of memory traffic a logit, the second multiplies faster on Hopper (asynchronous copies and clusters, which this lowering
of Pallas does not give) and is the only fast way to multiply in full float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import pallas_gpu_tiles as tiles
from .logits import Logits
from .pallas_gpu_tiles import Statistics, Tile

Array = jax.Array

CHUNK_LOGITS = 2**26
"""Of a chunk: 128 MiB of bfloat16 gradients, and 256 MiB of float32 logits where the library makes them. A smaller chunk
copies its share of hidden and of the gradients more often: at D = 4096 about 3% of the time, 6% at half the size."""

CHUNK_TOKENS = 4096
"""At most, all chunks equal. Fewer tokens would read and write the float32 gradient of the head more often, more would round
the number of live tokens up further: it counts in whole chunks."""

WIDE = 3072
"""From this width on the vendor's matmul makes the logits of bfloat16 inputs too. An estimate for Hopper, not measured:
the kernel multiplies at about 0.78 of the library's rate, the buffer costs about 12% of the matmul at D = 4096."""


class Plan(NamedTuple):
    """How the work is cut.

    Attributes:
      tile: the share of one program; a ``depth`` of 0 says that the library makes the logits.
      chunk_tokens, chunk_vocab: extent of a chunk of logits (backward; forward too where the library makes them).
    """

    tile: Tile
    chunk_tokens: int
    chunk_vocab: int


def plan_for(tokens: int, vocab: int, width: int, dtype: jnp.dtype) -> Plan:
    """The default plan: see :data:`CHUNK_LOGITS`, :data:`CHUNK_TOKENS`, :data:`WIDE`."""
    chunk_tokens = _equal(tokens, CHUNK_TOKENS, 128)
    chunk_vocab = _equal(vocab, CHUNK_LOGITS // chunk_tokens, 128)
    make = dtype == jnp.bfloat16 and width % tiles.MAKE.depth == 0 and width < WIDE
    return Plan(tiles.MAKE if make else tiles.READ, chunk_tokens, chunk_vocab)


def _equal(size: int, limit: int, step: int) -> int:
    """Length of equal chunks of at most about ``limit``, a multiple of ``step`` unless one chunk is all."""
    chunks = -(-size // max(limit, step))
    return size if chunks <= 1 else -(-size // chunks // step) * step


def forward(static: Logits, hidden: Array, head: Array, targets: Array, count: Array, *, block_tokens: int | None = None, block_vocab: int | None = None,
            plan: Plan | None = None, interpret: bool = False) -> tuple[Array, Array, Array | None]:
    """Log-sum-exp, target logit and mean logit of each live token over this shard of the vocabulary.

    Args:
      static: how hidden states become logits.
      hidden: ``[n, D]`` bfloat16 or float32; rows at ``count`` and after may hold anything.
      head: ``[V, D]``, same dtype.
      targets: ``[n] int32`` into this shard; any other value: the target is elsewhere.
      count: ``[] int32``, live tokens; they come first.
      block_tokens, block_vocab: another tile than the plan's, powers of two.
      plan: default :func:`plan_for`.
      interpret: run on any backend, slowly.

    Returns:
      ``(lse, target_logit, mean_logit or None)``, ``[n] float32``, 0 in dead rows; ``target_logit`` is 0 where the target
      is elsewhere, ``mean_logit = sum_j softmax_j z_j`` is there with ``static.with_entropy``.

    Temporaries: 12 bytes (16 with entropy) a token and tile column where the kernel makes the logits, 117 MB at 16384 tokens
    and V = 151936; else one chunk of float32 logits.

    Raises:
      ValueError: a tile that does not fit, dtypes that do not, a D that the kernel cannot step through.
    """
    plan = _checked(plan, hidden, head, block_tokens, block_vocab)
    if not hidden.shape[0]:
        empty = jnp.zeros((0,), jnp.float32)
        return empty, empty, empty if static.with_entropy else None
    if plan.tile.depth:
        bounds = jnp.stack([jnp.int32(0), count.astype(jnp.int32), jnp.int32(0)])
        found = _merged(tiles.statistics(static, (hidden, head), targets, bounds, plan.tile, interpret))
    else:
        found = _statistics_by_chunk(static, hidden, head, targets, count, plan, interpret)
    live = jnp.arange(hidden.shape[0]) < count
    lse = jnp.where(live, found.top + jnp.log(found.total), 0)
    mean = None if found.moment is None else jnp.where(live, found.top + found.moment / found.total, 0)
    return lse, jnp.where(live, found.target, 0), mean


def backward(static: Logits, hidden: Array, head: Array, targets: Array, count: Array, lse: Array, mean_logit: Array | None, d_logprob: Array,
             d_entropy: Array | None, *, block_tokens: int | None = None, block_vocab: int | None = None, plan: Plan | None = None,
             interpret: bool = False) -> tuple[Array, Array]:
    """This shard's part of both gradients.

    Args:
      lse, mean_logit: ``[n]``, over all shards of the vocabulary; ``mean_logit`` and ``d_entropy`` with entropy only.
      d_logprob, d_entropy: ``[n]``, slopes of the loss.
      others: as in :func:`forward`.

    Returns:
      ``(d_hidden [n, D], d_head [V, D])`` in float32: sums over this shard's vocabulary, over its tokens.

    Temporaries: one chunk of gradients (and of float32 logits), a chunk's rows of the head, of its gradient, of hidden and
    of its gradient.

    Raises:
      ValueError: as :func:`forward`.
    """
    plan = _checked(plan, hidden, head, block_tokens, block_vocab)
    (n, width), vocab = hidden.shape, head.shape[0]
    grads = jnp.zeros((n, width), jnp.float32), jnp.zeros((vocab, width), jnp.float32)
    if not n:
        return grads
    per_row = (lse, d_logprob, mean_logit, d_entropy) if static.with_entropy else (lse, d_logprob)

    def vocab_turn(j: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        column, fresh_column = _chunk_start(j, plan.chunk_vocab, vocab)
        w = lax.dynamic_slice_in_dim(head, column, plan.chunk_vocab)

        def token_turn(i: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_w = grads
            row, fresh_row = _chunk_start(i, plan.chunk_tokens, n)
            h, target, *rows = (lax.dynamic_slice_in_dim(x, row, plan.chunk_tokens) for x in (hidden, targets, *per_row))
            bounds = jnp.stack([fresh_row, jnp.minimum(count - row, plan.chunk_tokens), fresh_column])
            # The gradient of a dead row is 0, and 0 times what the row holds must be.
            h = jnp.where((jnp.arange(plan.chunk_tokens) < bounds[1])[:, None], h, 0)
            d_raw = tiles.d_logits(static, _source(h, w, plan), target - column, bounds, tuple(rows), hidden.dtype, plan.tile, interpret)
            d_h = lax.dynamic_slice_in_dim(d_hidden, row, plan.chunk_tokens) + _dot(d_raw, w, 1, 0)
            return lax.dynamic_update_slice_in_dim(d_hidden, d_h, row, 0), d_w + _dot(d_raw, h, 0, 0)

        # The columns that this chunk shares with the one before start from what they have, and add nothing.
        d_hidden, d_w = lax.fori_loop(0, _chunks(count, plan.chunk_tokens), token_turn,
                                      (grads[0], lax.dynamic_slice_in_dim(grads[1], column, plan.chunk_vocab)))
        return d_hidden, lax.dynamic_update_slice_in_dim(grads[1], d_w, column, 0)

    return lax.fori_loop(0, -(-vocab // plan.chunk_vocab), vocab_turn, grads)


def _statistics_by_chunk(static: Logits, hidden: Array, head: Array, targets: Array, count: Array, plan: Plan, interpret: bool) -> Statistics:
    """``[n]`` each: the library makes a chunk of logits, the kernel reads it once, the result joins what was found before."""
    n, vocab = hidden.shape[0], head.shape[0]

    def vocab_turn(j: Array, found: Statistics) -> Statistics:
        column, fresh_column = _chunk_start(j, plan.chunk_vocab, vocab)
        w = lax.dynamic_slice_in_dim(head, column, plan.chunk_vocab)

        def token_turn(i: Array, found: Statistics) -> Statistics:
            # Rows shared with the chunk before must not be merged a second time.
            row, fresh_row = _chunk_start(i, plan.chunk_tokens, n)
            h, target = (lax.dynamic_slice_in_dim(x, row, plan.chunk_tokens) for x in (hidden, targets))
            bounds = jnp.stack([fresh_row, jnp.minimum(count - row, plan.chunk_tokens), fresh_column])
            new = tiles.statistics(static, _source(h, w, plan), target - column, bounds, plan.tile, interpret)
            old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, plan.chunk_tokens), found)
            both = _merged(jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), old, new))
            index = jnp.arange(plan.chunk_tokens)
            fresh = (index >= bounds[0]) & (index < bounds[1])
            return jax.tree.map(lambda x, a, b: lax.dynamic_update_slice_in_dim(x, jnp.where(fresh, b, a), row, 0), found, old, both)

        return lax.fori_loop(0, _chunks(count, plan.chunk_tokens), token_turn, found)

    zero = jnp.zeros((n,), jnp.float32)
    start = Statistics(jnp.full_like(zero, jnp.finfo(jnp.float32).min), zero, zero if static.with_entropy else None, zero)
    return lax.fori_loop(0, -(-vocab // plan.chunk_vocab), vocab_turn, start)


def _merged(parts: Statistics) -> Statistics:
    """Statistics of several parts of the vocabulary, ``[parts, n]``, as one of ``[n]``."""
    top = jnp.max(parts.top, axis=0)
    down = parts.top - top
    share = jnp.exp(down)
    moment = None if parts.moment is None else jnp.sum(share * (parts.moment + parts.total * down), axis=0)
    return Statistics(top, jnp.sum(share * parts.total, axis=0), moment, jnp.sum(parts.target, axis=0))


def _source(h: Array, w: Array, plan: Plan) -> tuple[Array, ...]:
    return (h, w) if plan.tile.depth else (_dot(h, w, 1, 1),)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _chunk_start(index: Array, chunk: int, size: int) -> tuple[Array, Array]:
    """(first element, how many at the chunk's front belong to the chunk before): the last chunk ends with the array."""
    start = jnp.minimum(index * chunk, size - chunk)
    return start, index * chunk - start


def _chunks(count: Array, chunk: int) -> Array:
    return (count.astype(jnp.int32) + chunk - 1) // chunk


def _checked(plan: Plan | None, hidden: Array, head: Array, block_tokens: int | None, block_vocab: int | None) -> Plan:
    """The plan with the caller's tile, its chunks no larger than the arrays; ValueError where it cannot run."""
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"token_logprob on GPU: hidden {hidden.dtype} and head {head.dtype} must both be bfloat16 or float32; cast them")
    plan = plan or plan_for(hidden.shape[0], head.shape[0], hidden.shape[1], hidden.dtype)
    tile = plan.tile._replace(tokens=block_tokens or plan.tile.tokens, vocab=block_vocab or plan.tile.vocab)
    tiles.check_tile(tile)
    if tile.depth and (hidden.dtype != jnp.bfloat16 or hidden.shape[1] % tile.depth):
        raise ValueError(f"token_logprob on GPU: the kernel multiplies bfloat16 in steps of {tile.depth}, got {hidden.dtype} of width {hidden.shape[1]}; "
                         "use a plan whose tile has depth 0")
    return Plan(tile, min(plan.chunk_tokens, hidden.shape[0]), min(plan.chunk_vocab, head.shape[0]))
