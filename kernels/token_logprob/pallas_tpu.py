"""Token log-probability on TPU: Pallas kernels that never write a logit to main memory.

Both passes work on one device's shard, and on transposed tiles of logits ``[vocabulary, tokens]``: what belongs to a token
lies along the lanes, sums over the vocabulary are additions of whole vectors, per-token arrays are rows and not padded columns.

What is relied on: the Pallas pipeline fetches the next block of every operand while a tile is computed (double buffering,
:mod:`.pallas_tpu_tiles` counts those blocks twice) and fetches nothing where the index of a block stays the same. So tokens
from ``count`` on cost no traffic: the index maps read the prefetched count and stay where they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .logits import Logits
from .pallas_tpu_backward import backward
from .pallas_tpu_ops import for_each, live_count, target_row, tile_logits
from .pallas_tpu_tiles import PART, Chip, Tiles, check_dtypes, current_chip, forward_bytes, forward_tiles, part

__all__ = ["backward", "forward"]

Array = jax.Array

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Where nothing is: not -inf, whose difference with itself is NaN; its exponential is 0 all the same."""


def forward(static: Logits, hidden: Array, head: Array, targets: Array, count: Array, *, block_tokens: int | None = None,
            block_vocab: int | None = None, chip: Chip | None = None,
            interpret: bool | pltpu.InterpretParams = False) -> tuple[Array, Array, Array | None]:
    """Log-sum-exp, target logit and mean logit over this shard of the vocabulary; nothing but the outputs is in main memory.

    Args:
      static: how hidden states become logits.
      hidden: ``[n, D]`` float32 (multiplied as such) or bfloat16 (accumulated in float32).
      head: ``[V, D]``, same dtype.
      targets: ``[n] int32``, rows of this shard of the head; one outside ``[0, V)`` is in no column here.
      count: ``[] int32``; tokens from there on are dead: 0 in all outputs, whatever ``hidden`` holds.
      block_tokens, block_vocab: tile sizes, multiples of 128; default by :func:`.pallas_tpu_tiles.forward_tiles`.
      chip: what is compiled for; default :func:`.pallas_tpu_tiles.current_chip`.
      interpret: run on any backend, slowly.

    Returns:
      ``(lse, target_logit, mean_logit)``, each ``[n] float32``; ``target_logit`` is 0 where the target is elsewhere,
      ``mean_logit`` (the expected logit; entropy is lse minus it) None without ``static.with_entropy``.

    Raises:
      ValueError: no tiles, or not the given ones, fit in vector memory; other dtypes.
    """
    check_dtypes(hidden, head)
    (n, width), vocab = hidden.shape, head.shape[0]
    if n == 0:
        none = jnp.zeros(0, jnp.float32)
        return none, none, none if static.with_entropy else None
    chip = current_chip() if chip is None else chip
    tiles = forward_tiles(n, vocab, width, hidden.dtype.itemsize, chip, (block_tokens, block_vocab))
    slabs = pl.cdiv(vocab, tiles.vocab)
    # Blocks of tokens go to the cores in turn: the live ones come first, so each core gets its share of them.
    cores = min(chip.cores, pl.cdiv(n, tiles.tokens))
    turns = pl.cdiv(pl.cdiv(n, tiles.tokens), cores)
    padded = turns * cores * tiles.tokens

    def token_block(core: Array, turn: Array, _: Array, count: Array) -> Array:
        return jnp.minimum(turn * cores + core, jnp.maximum(pl.cdiv(count[0], tiles.tokens) - 1, 0))

    def head_block(core: Array, turn: Array, slab: Array, count: Array) -> Array:
        return jnp.where((turn * cores + core) * tiles.tokens < count[0], slab, slabs - 1)

    row = (1, tiles.tokens)
    outputs = 3 if static.with_entropy else 2
    out = pl.pallas_call(
        functools.partial(_kernel, static, vocab),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(cores, turns, slabs),
            in_specs=[pl.BlockSpec(row, lambda *at: (0, token_block(*at))),
                      pl.BlockSpec((tiles.tokens, width), lambda *at: (token_block(*at), 0)),
                      pl.BlockSpec((tiles.vocab, width), lambda *at: (head_block(*at), 0))],
            out_specs=[pl.BlockSpec(row, lambda core, turn, slab, count: (0, turn * cores + core))] * outputs,
            scratch_shapes=[pltpu.VMEM(row, jnp.float32)] * 4),
        out_shape=[jax.ShapeDtypeStruct((1, padded), jnp.float32)] * outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                                             vmem_limit_bytes=forward_bytes(tiles, width, hidden.dtype.itemsize)),
        cost_estimate=_cost(static, n, vocab, width, hidden.dtype.itemsize, tiles),
        interpret=interpret,
    )(live_count(count, n), target_row(targets, vocab, padded), hidden, head)
    lse, target, *mean = (x[0, :n] for x in out)
    return lse, target, mean[0] if mean else None


def _cost(static: Logits, n: int, vocab: int, width: int, itemsize: int, tiles: Tiles) -> pl.CostEstimate:
    return pl.CostEstimate(flops=2 * n * vocab * width, transcendentals=n * vocab * (1 if static.soft_cap is None else 2),
                           bytes_accessed=(n + pl.cdiv(n, tiles.tokens) * vocab) * width * itemsize + 4 * n * 4)


def _kernel(static: Logits, vocab: int, count_ref: Any, targets_ref: Any, hidden_ref: Any, head_ref: Any,
            lse_ref: Any, target_ref: Any, *refs: Any) -> None:
    """One tile of the head against one block of tokens: the running sums of an online log-sum-exp.

    ``top`` is the largest logit so far, ``total = sum exp(z - top)``, ``tilt = sum exp(z - top) (z - top)``: relative to
    ``top``, so that the mean of logits around 1e4 keeps its digits.
    """
    *mean_ref, top_ref, total_ref, found_ref, tilt_ref = refs
    core, turn, slab = (pl.program_id(axis) for axis in range(3))
    tokens, rows = hidden_ref.shape[0], head_ref.shape[0]
    first, count = (turn * pl.num_programs(0) + core) * tokens, count_ref[0]

    @pl.when(slab == 0)
    def begin() -> None:
        top_ref[...] = jnp.full_like(top_ref, LOWEST)
        for ref in (total_ref, found_ref, tilt_ref):
            ref[...] = jnp.zeros_like(ref)

    def add(at: Any, row: Any) -> None:
        z, _ = tile_logits(static, head_ref.at[row, :], hidden_ref.at[at, :])
        index = slab * rows + row.start + lax.broadcasted_iota(jnp.int32, z.shape, 0)
        found_ref[:, at] += jnp.sum(jnp.where(index == targets_ref[:, at], z, 0), axis=0, keepdims=True)
        if vocab % rows:
            z = jnp.where(index < vocab, z, LOWEST)
        old, total = top_ref[:, at], total_ref[:, at]
        top = jnp.maximum(old, jnp.max(z, axis=0, keepdims=True))
        shift, z = old - top, z - top
        scale, e = jnp.exp(shift), jnp.exp(z)
        if static.with_entropy:
            tilt_ref[:, at] = scale * (tilt_ref[:, at] + total * shift) + jnp.sum(e * z, axis=0, keepdims=True)
        total_ref[:, at] = scale * total + jnp.sum(e, axis=0, keepdims=True)
        top_ref[:, at] = top

    at_once = Tiles(part(tokens, PART.tokens), part(rows, PART.vocab))
    live = pl.cdiv(jnp.clip(count - first, 0, tokens), at_once.tokens)
    for_each(live, at_once.tokens, lambda at: for_each(rows // at_once.vocab, at_once.vocab, lambda row: add(at, row)))

    @pl.when(slab == pl.num_programs(2) - 1)
    def finish() -> None:
        alive = first + lax.broadcasted_iota(jnp.int32, lse_ref.shape, 1) < count
        total = jnp.where(alive, total_ref[...], 1)
        lse_ref[...] = jnp.where(alive, top_ref[...] + jnp.log(total), 0)
        target_ref[...] = jnp.where(alive, found_ref[...], 0)
        for ref in mean_ref:
            ref[...] = jnp.where(alive, top_ref[...] + tilt_ref[...] / total, 0)
