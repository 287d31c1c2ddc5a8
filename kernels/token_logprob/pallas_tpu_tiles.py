"""Tiles of the TPU kernels: what a chip offers, what a pair of tiles needs, which pair is taken."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

DTYPES = ("float32", "bfloat16")
LANES = 128
MIB = 1 << 20

RING = 3
"""Tiles of d-hidden in vector memory: one arrives, one is added to, one leaves."""

GRAD_COLUMNS = 512
"""Columns of the width in one turn of the gradient matmuls."""

STACK = 8 * MIB
"""What the compiler spills to vector memory beside the buffers counted below: at most 7 MiB were seen."""


class Tiles(NamedTuple):
    """Tokens and rows of the head that a kernel has in vector memory at a time, each over the full width D."""

    tokens: int
    vocab: int


PART = Tiles(256, 512)
"""The part of a pair of tiles whose logits are made in one turn of a loop: bounds code and stack, and still keeps the matrix units busy."""


class Chip(NamedTuple):
    """Bytes of vector memory of a TensorCore, and how many of them one JAX device drives (2 where a device is a megacore)."""

    vmem: int
    cores: int


CHIPS = {"v4": Chip(16 * MIB, 2), "v5e": Chip(128 * MIB, 1), "v5p": Chip(64 * MIB, 2), "v6e": Chip(128 * MIB, 1), "v7x": Chip(64 * MIB, 1)}

UNKNOWN = Chip(64 * MIB, 1)
"""Runs on every chip since v5e; taken in the interpreter, and when compiling for a chip that neither caller nor mesh names."""


def current_chip() -> Chip:
    """The chip of the mesh in the context (``jax.set_mesh``; its devices need not be here), else of the default device."""
    try:
        info = pltpu.get_tpu_info()
    except ValueError:  # no TPU
        return UNKNOWN
    return Chip(info.vmem_capacity_bytes, info.num_cores)


def usable(chip: Chip) -> int:
    """Bytes a kernel may ask for: the compiler keeps an eighth for the program around it."""
    return chip.vmem // 8 * 7


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def part(block: int, largest: int) -> int:
    """The largest power of two times 128 up to ``largest`` that divides a block."""
    while block % largest:
        largest //= 2
    return largest


def forward_bytes(tiles: Tiles, width: int, itemsize: int) -> int:
    """Vector memory of the forward kernel."""
    blocks = 2 * (tiles.tokens + tiles.vocab) * round_up(width, LANES) * itemsize  # hidden and head, double-buffered
    rows = (2 * 4 + 4) * 8 * tiles.tokens * 4  # targets, three outputs (double-buffered), four running sums; 8 sublanes each
    return blocks + rows + STACK


def backward_bytes(tiles: Tiles, width: int, itemsize: int) -> int:
    """Vector memory of the backward kernel."""
    width = round_up(width, LANES)
    blocks = 2 * (tiles.tokens + tiles.vocab) * width * itemsize  # hidden and head, double-buffered
    d_head = 2 * tiles.vocab * width * 4  # accumulated in the block that is written, double-buffered
    d_hidden = RING * tiles.tokens * width * 4
    d_z = 2 * tiles.vocab * tiles.tokens * (itemsize if itemsize == 2 else itemsize + 6)  # and its transpose; float32 is split into three bfloat16 copies
    rows = 2 * 2 * 8 * tiles.tokens * 4  # targets and coefficients, double-buffered; 8 sublanes each
    return blocks + d_head + d_hidden + d_z + rows + STACK


def forward_tiles(tokens: int, vocab: int, width: int, itemsize: int, chip: Chip, given: tuple[int | None, int | None] = (None, None)) -> Tiles:
    """The most tokens that fit: the head is read once per block of tokens, so a byte read feeds ``tiles.tokens`` FLOPs in bfloat16."""
    pairs = [Tiles(t, v) for t in (1024, 512, 256, 128) for v in (1024, 512, 256, 128)]
    return _first_that_fits("forward", forward_bytes, pairs, (tokens, vocab, width, itemsize), chip, given)


def backward_tiles(tokens: int, vocab: int, width: int, itemsize: int, chip: Chip, given: tuple[int | None, int | None] = (None, None)) -> Tiles:
    """The most of the vocabulary that fits: d-hidden is read and written once per tile of the head.

    Fewer than 256 tokens fill only half of a matrix unit since v6e: taken where the head would get fewer than 256 rows.
    """
    vocabs = (2048, 1536, 1024, 512, 256)
    pairs = [Tiles(t, v) for v in vocabs for t in (512, 256)] + [Tiles(128, v) for v in (*vocabs, 128)]
    return _first_that_fits("backward", backward_bytes, pairs, (tokens, vocab, width, itemsize), chip, given)


def takes(hidden: jax.Array, head: jax.Array, chip: Chip | None = None) -> bool:
    """Whether both kernels can be compiled for these arrays: bfloat16 or float32, and a width of which the smallest tiles fit."""
    if str(hidden.dtype) not in DTYPES:
        return False
    return backward_bytes(Tiles(LANES, LANES), head.shape[1], hidden.dtype.itemsize) <= usable(chip or current_chip())


def check_dtypes(hidden: jax.Array, head: jax.Array) -> None:
    """Raises ValueError, in one line, for dtypes that the kernels do not multiply."""
    if str(hidden.dtype) not in DTYPES or head.dtype != hidden.dtype:
        raise ValueError(f"pallas_tpu: hidden {hidden.dtype} and head {head.dtype} must both be {' or '.join(DTYPES)}; cast them, or use implementation 'chunked'")


def _first_that_fits(kind: str, need: Callable[[Tiles, int, int], int], pairs: Sequence[Tiles], sizes: tuple[int, int, int, int], chip: Chip,
                     given: tuple[int | None, int | None]) -> Tiles:
    """The first pair within the chip's memory; what the caller fixed stays, the rest is cut to the arrays.

    Raises:
      ValueError: none fits, or a fixed size is not a multiple of 128.
    """
    tokens, vocab, width, itemsize = sizes
    for name, size in zip(("block_tokens", "block_vocab"), given):
        if size is not None and (size <= 0 or size % LANES):
            raise ValueError(f"pallas_tpu {kind}: {name} {size} must be a positive multiple of {LANES}")
    for pair in pairs:
        tiles = Tiles(given[0] or _even(tokens, pair.tokens, PART.tokens), given[1] or _even(vocab, pair.vocab, PART.vocab))
        if need(tiles, width, itemsize) <= usable(chip):
            return tiles
    todo = "use implementation 'chunked'" if given == (None, None) else "take smaller block_tokens or block_vocab"
    raise ValueError(f"pallas_tpu {kind}: {tiles.tokens} tokens x {tiles.vocab} vocabulary rows of width {width} need {need(tiles, width, itemsize) / MIB:.1f} MiB of "
                     f"vector memory, the chip gives {usable(chip) / MIB:.1f} MiB; {todo}")


def _even(total: int, block: int, multiple: int) -> int:
    """The smallest block of whole parts that needs no more blocks than ``block`` does: the last one is nearly full."""
    multiple = min(multiple, block, max(round_up(total, LANES), LANES))
    return min(round_up(-(-total // -(-total // block)), multiple), block)
