"""Causal attention within segments by JAX's splash kernel, for TPU: scores stay in the chip's vector memory.

Tiles that the causal mask or the window empties are not visited; keys are not repeated for grouped query heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

Array = jax.Array

DTYPES = ("float32", "bfloat16")


def tile(T: int) -> int:
    """The largest of 512, 384, 256 and 128 that does not pad a row of T tokens by more than an eighth, or than 128 does."""
    return next(size for size in (512, 384, 256, 128) if -T % size <= max(T // 8, -T % 128))


def attention(q: Array, k: Array, v: Array, segment_ids: Array, *, window: int, size: int | None = None, interpret: bool = False) -> Array:
    """As :func:`reference.attention`, on one device.

    Rows are padded to whole tiles with a segment of their own. Any head size that is even; the kernel pads it to lanes.

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
    """The kernel's products take the precision of the context they are traced in."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


@jax.custom_vjp
def _attend(kernel: Any, q: Array, k: Array, v: Array, segment: Array) -> Array:
    return _forward(kernel, q, k, v, segment)[0]


def _forward(kernel: Any, q: Array, k: Array, v: Array, segment: Array) -> tuple[Array, Any]:
    ids = kernels.SegmentIds(segment, segment)
    with _digits(q.dtype):
        return jax.vjp(lambda q, k, v: jax.vmap(kernel)(q, k, v, ids), q, k, v)


def _backward(pull: Any, d_out: Array) -> tuple[Any, ...]:
    with _digits(d_out.dtype):
        return None, *pull(d_out), None


_attend.defvjp(_forward, _backward)


def _kernel(H: int, T: int, window: int, size: int, interpret: bool) -> Any:
    shape = (T, T)
    mask = masks.CausalMask(shape) if window >= T else masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    sizes = kernels.BlockSizes(block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size)
    return kernels.make_splash_mha_single_device(masks.MultiHeadMask([mask] * H), block_sizes=sizes, interpret=interpret)
