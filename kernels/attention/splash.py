"""Causal attention within segments by JAX's splash kernel, for TPU: scores stay in the chip's vector memory.

Tiles that the causal mask or the window empties are not visited; keys are not repeated for grouped query heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as stock

Array = jax.Array

DTYPES = ("float32", "bfloat16")


def tile(T: int) -> int:
    """The largest of 512, 384, 256 and 128 that does not pad a row of T tokens by more than an eighth, or than 128 does."""
    return next(size for size in (512, 384, 256, 128) if -T % size <= max(T // 8, -T % 128))


def attention(q: Array, k: Array, v: Array, segment_ids: Array, *, window: int, size: int | None = None, interpret: bool = False) -> Array:
    """As :func:`reference.attention`, on one device.

    Rows are padded to whole tiles, the padding a segment of its own. Any head size; the compiler pads it to lanes.

    Args:
      size: of the tiles, a multiple of 128; default by :func:`tile`.
      interpret: run by Pallas's interpreter, on any backend.
    """
    T, H, hd = q.shape[1:]
    size = size or tile(T)
    pad = -T % size
    kernel = _kernel(H, T + pad, window, size, interpret)
    q = (q / math.sqrt(hd)).astype(q.dtype).swapaxes(1, 2)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (q, k, v))
    segment = jnp.pad(segment_ids, ((0, 0), (0, pad)), constant_values=-1)
    return _attend(kernel, q, k, v, segment)[:, :, :T].swapaxes(1, 2)


def _digits(dtype: Any) -> Any:
    """The kernel's products take the precision of the context they are traced in: all digits of float32, and for bfloat16 the only
    one that there is."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


@jax.custom_vjp
def _attend(kernel: Any, q: Array, k: Array, v: Array, segment: Array) -> Array:
    return _forward(kernel, q, k, v, segment)[0]


def _forward(kernel: Any, q: Array, k: Array, v: Array, segment: Array) -> tuple[Array, Any]:
    ids = stock.SegmentIds(segment, segment)
    with _digits(q.dtype):
        return jax.vjp(lambda q, k, v: jax.vmap(kernel)(q, k, v, ids), q, k, v)


def _backward(pull: Any, d_out: Array) -> tuple[Any, ...]:
    with _digits(d_out.dtype):
        return None, *pull(d_out), None


_attend.defvjp(_forward, _backward)


def _kernel(H: int, T: int, window: int, size: int, interpret: bool) -> Any:
    # Not the fused backward kernel: it would hold d_q once for every tile of keys.
    sizes = stock.BlockSizes(block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size)
    return stock.make_splash_mha_single_device(stock.MultiHeadMask([_Band(T, window)] * H), block_sizes=sizes, interpret=interpret)


class _Band(stock.Mask):
    """A query sees the ``window`` keys that end with its own.

    The kernel computes ``mask_function`` where it needs it; tracing asks for every tile to find those that are empty or full. The stock
    masks compare each pair of places for that, 15 seconds at 32768 tokens.
    """

    def __init__(self, T: int, window: int) -> None:
        self.window, self.q_sequence = window, np.arange(T, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_sequence.size, self.q_sequence.size

    def mask_function(self, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < self.window)

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        q, k = (self.q_sequence[part] for part in tile)
        nearest, farthest = q[0] - k[-1], q[-1] - k[0]
        full, empty = nearest >= 0 and farthest < self.window, farthest < 0 or nearest >= self.window
        if full or empty:
            return np.full((q.size, k.size), full)
        return self.mask_function(q[:, None], k)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Band) and (self.shape, self.window) == (other.shape, other.window)

    def __hash__(self) -> int:
        return hash((self.shape, self.window))
