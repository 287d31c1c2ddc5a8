"""Backward pass on TPU: one kernel that makes each tile of logits once and both gradients from it, three matmuls and not four.

A tile of the head stays in vector memory while all live tokens pass by; its gradient accumulates there and is written once. The
gradient of the hidden states is too large to stay. Each block of it is read, added to and written back once per tile of the head,
by copies of our own that run during the matmuls (:class:`Ring`): 10 bytes per element of ``hidden`` for ``6 * tiles.vocab`` FLOPs.
At D = 4096 in bfloat16, 1536 rows of the head fit on v5e and v6e and 512 on v5p; by the published rates the copies take
0.26, 0.61 and 0.55 of the matmuls' time. A kernel per gradient would move less and make the logits twice.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .logits import Logits
from .pallas_tpu_ops import dot, for_each, live_count, target_row, tile_logits, zero_from
from .pallas_tpu_tiles import (
    GRAD_COLUMNS,
    LANES,
    PART,
    RING,
    Chip,
    Tiles,
    backward_bytes,
    backward_tiles,
    check_dtypes,
    current_chip,
    part,
)

Array = jax.Array


def backward(static: Logits, hidden: Array, head: Array, targets: Array, count: Array, lse: Array, mean_logit: Array | None,
             d_logprob: Array, d_entropy: Array | None, *, block_tokens: int | None = None, block_vocab: int | None = None,
             chip: Chip | None = None, interpret: bool | pltpu.InterpretParams = False) -> tuple[Array, Array]:
    """Gradients of ``sum(d_logprob * logprob + d_entropy * entropy)``; arguments as in :func:`.pallas_tpu.forward`, and:

    With ``p = exp(z - lse)``: ``d_z_j = d_logprob ([j = target] - p_j) - d_entropy p_j (z_j - mean_logit)``. Beside the outputs,
    a device of one core holds nothing in main memory, one of two cores two ``d_hidden``: each sums over half of the vocabulary.

    Args:
      lse, mean_logit: ``[n] float32`` over *all* shards of the vocabulary; ``mean_logit`` is used where ``d_entropy`` is given.
      d_logprob, d_entropy: ``[n] float32``; ``d_entropy`` may be None.

    Returns:
      ``(d_hidden [n, D], d_head [V, D])`` in float32: this shard's part of both sums. Rows of dead tokens are 0.

    Raises:
      ValueError: no tiles, or not the given ones, fit in vector memory; other dtypes.
    """
    check_dtypes(hidden, head)
    (n, width), vocab = hidden.shape, head.shape[0]
    if n == 0:
        return jnp.zeros((0, width), jnp.float32), jnp.zeros((vocab, width), jnp.float32)
    chip = current_chip() if chip is None else chip
    tiles = backward_tiles(n, vocab, width, hidden.dtype.itemsize, chip, (block_tokens, block_vocab))
    blocks, slabs = pl.cdiv(n, tiles.tokens), pl.cdiv(vocab, tiles.vocab)
    cores = min(chip.cores, slabs)
    per_core, padded = pl.cdiv(slabs, cores), blocks * tiles.tokens
    of_tokens = [lse, d_logprob]
    if d_entropy is not None:
        assert mean_logit is not None, "the gradient of the entropy needs the mean logit"
        of_tokens += [d_entropy, mean_logit]
    rows = jnp.pad(jnp.where(jnp.arange(n) < count, jnp.stack(of_tokens).astype(jnp.float32), 0), ((0, 0), (0, padded - n)))

    def token_block(core: Array, slab: Array, block: Array, count: Array) -> Array:
        return jnp.minimum(block, jnp.maximum(pl.cdiv(count[0], tiles.tokens) - 1, 0))

    def head_block(core: Array, slab: Array, block: Array, count: Array) -> tuple[Array, int]:
        return jnp.minimum(core * per_core + slab, slabs - 1), 0

    d_hidden, d_head = pl.pallas_call(
        functools.partial(_kernel, static, vocab),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(cores, per_core, blocks),
            in_specs=[pl.BlockSpec((1, tiles.tokens), lambda *at: (0, token_block(*at))),
                      pl.BlockSpec((len(rows), tiles.tokens), lambda *at: (0, token_block(*at))),
                      pl.BlockSpec((tiles.tokens, width), lambda *at: (token_block(*at), 0)),
                      pl.BlockSpec((tiles.vocab, width), head_block),
                      pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec((tiles.vocab, width), head_block)],
            scratch_shapes=[pltpu.VMEM(tiles[::-1], hidden.dtype), pltpu.VMEM(tiles, hidden.dtype), pltpu.VMEM((RING, tiles.tokens, width), jnp.float32),
                            pltpu.SemaphoreType.DMA((RING,)), pltpu.SemaphoreType.DMA((RING,))]),
        out_shape=[pltpu.HBM((cores, padded, width), jnp.float32), jax.ShapeDtypeStruct((vocab, width), jnp.float32)],
        input_output_aliases={5: 0},  # the sums start at zero, and those of dead blocks stay there
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"),
                                             vmem_limit_bytes=backward_bytes(tiles, width, hidden.dtype.itemsize)),
        cost_estimate=pl.CostEstimate(
            flops=6 * n * vocab * width, transcendentals=n * vocab * (1 if static.soft_cap is None else 2),
            bytes_accessed=slabs * n * width * (hidden.dtype.itemsize + 8) + vocab * width * (head.dtype.itemsize + 4)),
        interpret=interpret,
    )(live_count(count, n), target_row(targets, vocab, padded), rows, hidden, head, jnp.zeros((cores, padded, width), jnp.float32))
    return (d_hidden[0] if cores == 1 else jnp.sum(d_hidden, axis=0))[:n], d_head


def _kernel(static: Logits, vocab: int, count_ref: Any, targets_ref: Any, rows_ref: Any, hidden_ref: Any, head_ref: Any, _: Any,
            d_hidden_ref: Any, d_head_ref: Any, d_z_ref: Any, d_z_turned_ref: Any, tiles_ref: Any, reads: Any, writes: Any) -> None:
    """One tile of the head against one block of tokens: d-logits, then what they add to both gradients."""
    core, slab, block = (pl.program_id(axis) for axis in range(3))
    (tokens, width), rows = hidden_ref.shape, head_ref.shape[0]
    per_core, count = pl.num_programs(1), count_ref[0]
    blocks, slabs = pl.cdiv(count, tokens), jnp.minimum(per_core, pl.cdiv(vocab, rows) - core * per_core)  # those with work, on this core
    first = (core * per_core + slab) * rows

    @pl.when((block == 0) & (slab < slabs))
    def clear_d_head() -> None:
        def clear(row: Any) -> None:
            d_head_ref[row, :] = jnp.zeros((LANES, width), jnp.float32)

        for_each(rows // LANES, LANES, clear)

    if vocab % rows:
        @pl.when((block == 0) & (first + rows > vocab))
        def clear_head_tail() -> None:
            zero_from(head_ref, vocab % rows)

    @pl.when((block < blocks) & ((block + 1) * tokens > count))
    def clear_dead_tokens() -> None:
        zero_from(hidden_ref, count - block * tokens)

    def d_logits(at: Any, row: Any) -> None:
        z, slope = tile_logits(static, head_ref.at[row, :], hidden_ref.at[at, :])
        index = first + row.start + lax.broadcasted_iota(jnp.int32, z.shape, 0)
        lse, d_logprob, *entropy = (rows_ref[i:i + 1, at] for i in range(rows_ref.shape[0]))
        pull = d_logprob + entropy[0] * (z - entropy[1]) if entropy else d_logprob
        d_z = (jnp.where(index == targets_ref[:, at], d_logprob, 0) - jnp.exp(z - lse) * pull) * slope
        if vocab % rows:
            d_z = jnp.where(index < vocab, d_z, 0)
        d_z_ref[row, at] = d_z.astype(d_z_ref.dtype)
        d_z_turned_ref[at, row] = d_z.astype(d_z_ref.dtype).T

    @pl.when((block < blocks) & (slab < slabs))
    def work() -> None:
        ring = Ring(d_hidden_ref.at[core], tiles_ref, reads, writes, blocks, slabs)
        d_hidden_tile = ring.take(slab, block)
        at_once = Tiles(part(tokens, PART.tokens), part(rows, PART.vocab))
        for_each(tokens // at_once.tokens, at_once.tokens, lambda at: for_each(rows // at_once.vocab, at_once.vocab, lambda row: d_logits(at, row)))

        def gradients(column: Any) -> None:
            d_head_ref[:, column] += dot(d_z_ref[...], hidden_ref[:, column], (1, 0))
            d_hidden_tile[:, column] += dot(d_z_turned_ref[...], head_ref[:, column], (1, 0))

        whole = width // GRAD_COLUMNS
        for_each(whole, GRAD_COLUMNS, gradients)
        if width % GRAD_COLUMNS:
            gradients(pl.ds(whole * GRAD_COLUMNS, width % GRAD_COLUMNS))
        ring.put(slab, block)


class Ring(NamedTuple):
    """The gradient of the hidden states on its way: main memory, vector memory, main memory, once per tile of the head.

    Where all live blocks fit in the ring, they stay there from the first tile of the head to the last. Else step ``k`` works in
    slot ``k % RING``. Before it does, the write of step ``k - 2`` is awaited and the read of step ``k + 1`` starts in the slot that
    this frees. The block of step ``k + 1`` was last written in step ``k + 1 - blocks``, which is before ``k - 2``: awaited as well.
    """

    main: Any  # [blocks * tokens, D] in main memory
    tiles: Any  # [RING, tokens, D] in vector memory
    reads: Any  # semaphores, one per slot
    writes: Any
    blocks: Array
    slabs: Array

    def take(self, slab: Array, block: Array) -> Any:
        """The tile to add to, holding the sum so far."""
        k, stays = slab * self.blocks + block, self.blocks <= RING
        slot = jnp.where(stays, block, lax.rem(k, RING))

        @pl.when(stays & (slab == 0))
        def begin_at_zero() -> None:
            self.tiles[slot] = jnp.zeros(self.tiles.shape[1:], self.tiles.dtype)

        @pl.when(~stays)
        def await_tile() -> None:
            @pl.when(k == 0)
            def read_first() -> None:
                self._copy(k, self.reads).start()

            @pl.when(k >= 2)
            def await_write() -> None:
                self._copy(k - 2, self.writes).wait()

            @pl.when(k + 1 < self.slabs * self.blocks)
            def read_next() -> None:
                self._copy(k + 1, self.reads).start()

            self._copy(k, self.reads).wait()

        return self.tiles.at[slot]

    def put(self, slab: Array, block: Array) -> None:
        """The tile was added to: it leaves now, or, where it stays, after the last tile of the head."""
        k, stays = slab * self.blocks + block, self.blocks <= RING

        @pl.when(stays & (slab == self.slabs - 1))
        def leave_at_last() -> None:
            copy = self._between(block, block, self.writes)
            copy.start()
            copy.wait()

        @pl.when(~stays)
        def leave() -> None:
            self._copy(k, self.writes).start()

            @pl.when(k == self.slabs * self.blocks - 1)
            def await_all() -> None:
                self._copy(k - 1, self.writes).wait()
                self._copy(k, self.writes).wait()

    def _copy(self, k: Array, semaphores: Any) -> Any:
        return self._between(lax.rem(k, self.blocks), lax.rem(k, RING), semaphores)

    def _between(self, block: Array, slot: Array, semaphores: Any) -> Any:
        tokens = self.tiles.shape[1]
        main, tile = self.main.at[pl.ds(block * tokens, tokens)], self.tiles.at[slot]
        source, goal = (main, tile) if semaphores is self.reads else (tile, main)
        return pltpu.make_async_copy(source, goal, semaphores.at[slot])
