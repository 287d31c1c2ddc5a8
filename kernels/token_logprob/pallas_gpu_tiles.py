"""Triton kernels over tiles of logits, through Pallas: statistics of the rows, and gradients of the logits.

A tile of raw logits (``hidden @ head.T``) is either multiplied in the kernel (bfloat16, tensor cores, never in memory)
or read from a float32 buffer that a matmul of the vendor's library filled (float32 inputs, and wide models). What
follows is the same code for both. Programs are one tile each; tiles that hold no row within ``bounds`` return at once.

``bounds`` is ``int32 [3]``: rows in ``[bounds[0], bounds[1])`` are live, columns ``>= bounds[2]`` count. So a chunk may
overlap the one before it (the last chunk is shifted back instead of padded), and the dead end of the tokens is skipped.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from .logits import Logits

Array = jax.Array

SHARED_MEMORY = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024}
"""Bytes of shared memory one program may use, by compute capability: A100, smaller Ampere, Ada, Hopper (H100, H200)."""

ACCUMULATORS_PER_THREAD = 128
"""Half of a thread's registers: a tile of logits stays in them from the first product to the last statistic."""

GROUP = 16
"""Row tiles that run beside each other. With Hopper's 132 programs at a time, 16 row tiles x 8 column tiles of the default
size read 34 MB at D = 4096, which the L2 cache (50 MB) keeps for the next wave; row-major order would read 134 MB."""

_LOWEST = float(jnp.finfo(jnp.float32).min)


class Tile(NamedTuple):
    """The share of one program.

    Attributes:
      tokens, vocab: rows and columns of its logits, powers of two.
      depth: of the width D, what is multiplied at a time; 0: the logits are read, not made.
      warps, stages: 32-thread groups of the program; tiles of hidden and head in flight.
    """

    tokens: int
    vocab: int
    depth: int
    warps: int
    stages: int


# 48 KiB a stage: 144 KiB on Hopper, 96 KiB on Ampere, within every limit above. 128 x 256 float32 accumulators are 128
# registers of each of 256 threads; a smaller tile reads more of the L2 cache per product.
MAKE = Tile(128, 256, 64, 8, 3)
# Bound by memory: each thread reads vectors of four along the rows, and many programs share a processor.
READ = Tile(4, 1024, 0, 4, 1)


class Statistics(NamedTuple):
    """Of the columns seen so far, per row: ``top`` >= all z, ``total`` = sum exp(z - top), ``moment`` = sum exp(z - top) (z - top)
    (zeros without entropy), ``target`` = z of the target or 0. The leading axis, if any, counts parts of the vocabulary."""

    top: Array
    total: Array
    moment: Array | None
    target: Array


def shared_memory_bytes(tile: Tile, capability: str = "9.0") -> int:
    """Shared memory of one program: tiles of bfloat16 hidden and head in flight, at least room to turn the logits around.

    The pipeline's buffers are free again when the tile of logits is written out, so the larger of the two counts. Hopper's
    tensor cores read the buffer of every stage in place; before it, the stage being multiplied is in registers.
    """
    buffers = tile.stages if capability == "9.0" else tile.stages - 1
    pipeline = buffers * (tile.tokens + tile.vocab) * tile.depth * 2
    return max(pipeline, tile.tokens * tile.vocab * 2 if tile.depth else 0)


def shared_memory_limit() -> tuple[str, int]:
    """(compute capability, bytes) of this process's GPU; Hopper's where there is none or it is not in the table."""
    try:
        capability = str(jax.local_devices(backend="gpu")[0].compute_capability)
    except RuntimeError:
        capability = "9.0"
    return (capability, SHARED_MEMORY[capability]) if capability in SHARED_MEMORY else ("9.0", SHARED_MEMORY["9.0"])


def check_tile(tile: Tile) -> None:
    """Raises ValueError, in one line, for a tile that cannot be compiled or would not stay in registers."""
    for name, size, least in (("block_tokens", tile.tokens, 16 if tile.depth else 1), ("block_vocab", tile.vocab, 16), ("depth", tile.depth or 16, 16)):
        if size < least or size & (size - 1):
            raise ValueError(f"token_logprob on GPU: {name} {size} must be a power of two, at least {least}")
    capability, limit = shared_memory_limit()
    need = shared_memory_bytes(tile, capability)
    if need > limit:
        raise ValueError(f"token_logprob on GPU: a tile of {tile.tokens} x {tile.vocab} with depth {tile.depth} and {tile.stages} stages needs {need} bytes "
                         f"of shared memory, the limit (compute capability {capability}) is {limit}; use a smaller block_tokens or block_vocab")
    held = tile.tokens * tile.vocab // (32 * tile.warps)
    if held > ACCUMULATORS_PER_THREAD:
        raise ValueError(f"token_logprob on GPU: a tile of {tile.tokens} x {tile.vocab} over {tile.warps} warps holds {held} logits a thread, "
                         f"the limit is {ACCUMULATORS_PER_THREAD}; use a smaller block_tokens or block_vocab, or more warps")


def statistics(static: Logits, source: tuple[Array, ...], targets: Array, bounds: Array, tile: Tile, interpret: bool = False) -> Statistics:
    """Row statistics of a chunk, one part per tile column.

    Args:
      static: temperature, cap and scale.
      source: ``(hidden [T, D], head [C, D])``, D a multiple of ``tile.depth``; or ``(raw logits [T, C] float32,)``.
      targets: ``[T] int32``, the column in this chunk; one outside ``[bounds[2], C)`` is not here.
      bounds: see above.
      tile: its ``depth`` says which ``source`` is meant.
      interpret: run on any backend, slowly.

    Returns:
      Arrays ``[parts, T]``; rows outside the bounds hold anything.
    """
    tokens, vocab = _extent(source)
    parts = pl.cdiv(vocab, tile.vocab)
    out: Any = jax.ShapeDtypeStruct((parts, tokens), jnp.float32)
    shapes = Statistics(out, out, out if static.with_entropy else None, out)
    kernel = functools.partial(_statistics_kernel, static, (tokens, vocab), tile)
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, _call(kernel, (tokens, vocab), tile, leaves, interpret)((bounds, targets), source))


def d_logits(static: Logits, source: tuple[Array, ...], targets: Array, bounds: Array, rows: tuple[Array, ...], dtype: Any, tile: Tile,
             interpret: bool = False) -> Array:
    """Gradient of the raw logits of a chunk ``[T, C]`` in ``dtype``: zero in rows and columns outside the bounds.

    Args:
      rows: ``(lse, d_logprob)``, and with entropy ``(mean_logit, d_entropy)`` after them, each ``[T] float32``.
      others: as in :func:`statistics`.
    """
    shape = _extent(source)
    kernel = functools.partial(_d_logits_kernel, static, shape, tile)
    return _call(kernel, shape, tile, jax.ShapeDtypeStruct(shape, dtype), interpret)((bounds, targets), rows, source)


def _extent(source: tuple[Array, ...]) -> tuple[int, int]:
    return source[0].shape[0], source[0].shape[1] if len(source) == 1 else source[1].shape[0]


def _call(kernel: Callable[..., None], shape: tuple[int, int], tile: Tile, out: Any, interpret: bool) -> Callable[..., Any]:
    grid = pl.cdiv(shape[0], tile.tokens) * pl.cdiv(shape[1], tile.vocab)
    return pl.pallas_call(kernel, grid=(grid,), out_shape=out, interpret=interpret, name=kernel.func.__name__.strip("_"),  # type: ignore[attr-defined]
                          compiler_params=pltriton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages))


def _place(shape: tuple[int, int], tile: Tile) -> tuple[Array, Array]:
    """(row tile, column tile) of this program: down a group of row tiles first, then to the next column."""
    row_tiles, column_tiles = pl.cdiv(shape[0], tile.tokens), pl.cdiv(shape[1], tile.vocab)
    program = pl.program_id(0)
    per_group = GROUP * column_tiles
    first = program // per_group * GROUP
    height = jnp.minimum(row_tiles - first, GROUP)
    within = program % per_group
    return first + within % height, within // height


def _live(row_tile: Array, bounds: Any, tile: Tile) -> Array:
    return (row_tile * tile.tokens < bounds[1]) & ((row_tile + 1) * tile.tokens > bounds[0])


def _raw_logits(source: tuple[Any, ...], rows: Array, columns: Array, shape: tuple[int, int], tile: Tile) -> Array:
    """``[tokens, vocab] float32``; anything outside the arrays."""
    if not tile.depth:
        # Masked, not clamped: whole vectors are read only where columns are seen to follow each other.
        return pltriton.load(source[0].at[rows[:, None], columns[None, :]], mask=(rows < shape[0])[:, None] & (columns < shape[1])[None, :], other=0.0)
    rows, columns = jnp.minimum(rows, shape[0] - 1), jnp.minimum(columns, shape[1] - 1)
    hidden, head = source

    def step(k: Array, raw: Array) -> Array:
        along = (k * tile.depth + jnp.arange(tile.depth))[None, :]
        h, w = pltriton.load(hidden.at[rows[:, None], along]), pltriton.load(head.at[columns[:, None], along])
        return raw + lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    return lax.fori_loop(0, hidden.shape[1] // tile.depth, step, jnp.zeros((tile.tokens, tile.vocab), jnp.float32))


def _tempered(static: Logits, raw: Array) -> Array:
    z = raw * static.logit_scale if static.logit_scale != 1 else raw
    if static.soft_cap is not None:
        z = static.soft_cap * jnp.tanh(z * (1 / static.soft_cap))
    return z * (1 / static.temperature) if static.temperature != 1 else z


def _through_logits(static: Logits, d_z: Array, z: Array) -> Array:
    """Gradient of the raw logits. From z and not from the tanh it came from: a second tile would not fit into the registers."""
    if static.soft_cap is not None:
        bent = z * (static.temperature / static.soft_cap)
        d_z = d_z * (1 - bent * bent)
    factor = static.logit_scale / static.temperature
    return d_z * factor if factor != 1 else d_z


def _statistics_kernel(static: Logits, shape: tuple[int, int], tile: Tile, given: tuple[Any, Any], source: tuple[Any, ...], *out: Any) -> None:
    bounds, targets = given
    row_tile, part = _place(shape, tile)
    rows, columns = row_tile * tile.tokens + jnp.arange(tile.tokens), part * tile.vocab + jnp.arange(tile.vocab)

    @pl.when(_live(row_tile, bounds, tile))
    def _() -> None:
        z = _tempered(static, _raw_logits(source, rows, columns, shape, tile))
        counts = ((columns >= bounds[2]) & (columns < shape[1]))[None, :]
        inside = rows < shape[0]
        target = pltriton.load(targets.at[rows], mask=inside, other=-1)
        at_target = jnp.sum(jnp.where(counts & (columns[None, :] == target[:, None]), z, 0), axis=1)
        top = jnp.maximum(jnp.max(jnp.where(counts, z, -jnp.inf), axis=1), _LOWEST)
        shifted = z - top[:, None]
        e = jnp.where(counts, jnp.exp(shifted), 0)
        moment = jnp.sum(jnp.where(counts, e * shifted, 0), axis=1) if static.with_entropy else None
        found = Statistics(top, jnp.sum(e, axis=1), moment, at_target)
        for ref, value in zip(out, jax.tree.leaves(found), strict=True):
            pltriton.store(ref.at[part, rows], value, mask=inside)


def _d_logits_kernel(static: Logits, shape: tuple[int, int], tile: Tile, given: tuple[Any, Any], per_row: tuple[Any, ...], source: tuple[Any, ...],
                     out: Any) -> None:
    bounds, targets = given
    row_tile, column_tile = _place(shape, tile)
    rows, columns = row_tile * tile.tokens + jnp.arange(tile.tokens), column_tile * tile.vocab + jnp.arange(tile.vocab)
    inside = (rows < shape[0])[:, None] & (columns < shape[1])[None, :]
    place = out.at[rows[:, None], columns[None, :]]
    live = _live(row_tile, bounds, tile)

    @pl.when(live)
    def _() -> None:
        z = _tempered(static, _raw_logits(source, rows, columns, shape, tile))
        target = pltriton.load(targets.at[rows], mask=rows < shape[0], other=-1)
        lse, d_logprob, *entropy = (pltriton.load(x.at[rows], mask=rows < shape[0], other=0.0)[:, None] for x in per_row)
        p = jnp.exp(z - lse)
        d_z = jnp.where(columns[None, :] == target[:, None], d_logprob, 0) - d_logprob * p
        if static.with_entropy:
            mean_logit, d_entropy = entropy
            d_z -= d_entropy * p * (z - mean_logit)
        counts = (columns >= bounds[2])[None, :] & ((rows >= bounds[0]) & (rows < bounds[1]))[:, None]
        pltriton.store(place, jnp.where(counts, _through_logits(static, d_z, z), 0).astype(out.dtype), mask=inside)

    # The matmuls that follow read the whole chunk: a dead tile has to be written too.
    @pl.when(jnp.logical_not(live))
    def _() -> None:
        pltriton.store(place, jnp.zeros((tile.tokens, tile.vocab), out.dtype), mask=inside)
