"""Self-attention of training: causal, within the segments of packed rows, one function for every backend.

See :mod:`.reference` for the formula, :mod:`.blocks` for the version that runs everywhere, :mod:`.splash` for TPU.

Left out, and why. cuDNN's fused attention (``jax.nn.dot_product_attention(implementation='cudnn')``): segments need a
``[T, T]`` mask there, or its private packed layout, which takes no float32, needs a fixed number of segments, and asks
the machine that *traces* for a card, so that it cannot be one of several branches. Pallas's stock attention for GPU:
needs keys repeated for every query head, visits all tiles below the diagonal whatever the window, and sums the row's
``d_o * o`` in bfloat16.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..platforms import on_tpu, refuse
from ..token_logprob.mesh import BATCH_AXES, VOCAB_AXIS, free_axes
from . import blocks, reference, splash

Array = jax.Array
Implementation = Literal["reference", "blocks", "splash"]

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {"reference": reference.attention, "blocks": blocks.attention, "splash": splash.attention}
HEAD_AXIS = VOCAB_AXIS


def packed_attention(q: Array, k: Array, v: Array, segment_ids: Array | None = None, *, window: int | None = None,
                     implementation: Implementation | None = None) -> Array:
    """Scaled dot-product attention in which a token sees the tokens of its own segment at and before its own place.

    Query head h reads key head ``h // (H / K)``. Differentiable in q, k and v; works under ``jit``, ``scan`` and
    ``checkpoint``. Where a mesh is set, each device computes its own rows (axes ``data`` and ``fsdp``) and heads
    (``tensor``): rows that do not divide are filled up, key heads that are too few are repeated until they divide, and
    where query heads do not divide every device of ``tensor`` computes all of them.

    Args:
      q: ``[B, T, H, hd]`` float32, bfloat16 or float64. Scores, softmax and sums are float32 (float64 for float64).
      k, v: ``[B, K, T, hd]`` in q's dtype; K divides H.
      segment_ids: ``[B, T] int``, not negative; None where every row is one segment. Padding is a segment like others,
        so no result is NaN.
      window: a promise that no segment is longer and that its tokens stand side by side: what lies further back is not
        looked at. None promises nothing.
      implementation: 'reference' (holds ``[B, H, T, T]``), 'blocks' (plain XLA), 'splash' (TPU; not float64), or None for the best on
        the platform that the program is compiled for: splash on TPU where the dtype allows, else blocks.

    Returns:
      ``[B, T, H, hd]`` in q's dtype.

    Raises:
      ValueError: an unknown implementation, or one that cannot take these arrays or this platform (the last one when
        the program is lowered); shapes that do not fit; window < 1.
    """
    _check(q, k, v, segment_ids, window, implementation)
    B, T = q.shape[:2]
    segment = jnp.zeros((B, T), jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    run = functools.partial(_dispatch, implementation, T if window is None else min(window, T))
    return _on_each_device(run, q, k, v, segment)


def _dispatch(name: str | None, window: int, *arrays: Array) -> Array:
    call = lambda name: functools.partial(IMPLEMENTATIONS[name], window=window)  # noqa: E731
    if name == "splash":
        return on_tpu(call(name), _refuse)(*arrays)
    if name is None and str(arrays[0].dtype) in splash.DTYPES:
        return on_tpu(call("splash"), call("blocks"))(*arrays)
    return call(name or "blocks")(*arrays)


def _on_each_device(run: Callable[..., Array], q: Array, k: Array, v: Array, segment: Array) -> Array:
    """``run`` on local arrays: a kernel cannot be split by the compiler."""
    sizes = free_axes()
    if not sizes:
        return run(q, k, v, segment)
    B, H, K = q.shape[0], q.shape[2], k.shape[1]
    row_axes = tuple(a for a in BATCH_AXES if a in sizes)
    fill = -B % math.prod(sizes[a] for a in row_axes)
    heads: str | None = HEAD_AXIS if HEAD_AXIS in sizes else None
    repeat = math.lcm(K, sizes[heads]) // K if heads else 1
    if H % (K * repeat):
        heads, repeat = None, 1
    if repeat > 1:
        k, v = (jnp.repeat(x, repeat, axis=1) for x in (k, v))
    if fill:
        q, k, v, segment = (jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)) for x in (q, k, v, segment))
    by_key, by_token = P(row_axes, heads, None, None), P(row_axes, None, heads, None)
    # The kernels' outputs do not say over which axes they vary.
    split = jax.shard_map(run, in_specs=(by_token, by_key, by_key, P(row_axes, None)), out_specs=by_token,
                          axis_names={a for a in (*row_axes, HEAD_AXIS) if a in sizes}, check_vma=False)
    return split(q, k, v, segment)[:B]


def _check(q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, name: str | None) -> None:
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(f"attention '{name}' does not exist; use one of {', '.join(IMPLEMENTATIONS)}, or None")
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], q.shape[1], q.shape[3]) or q.shape[2] % k.shape[1]:
        raise ValueError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} must be [B, T, H, hd] and twice [B, K, T, hd] with K dividing H")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(f"attention: segment_ids {segment_ids.shape} must be [B, T] = {q.shape[:2]}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window {window} must be at least 1, the length of the longest segment")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q {q.dtype}, k {k.dtype}, v {v.dtype} must have one dtype; cast them to the compute dtype")
    if name == "splash" and str(q.dtype) not in splash.DTYPES:
        raise ValueError(f"attention 'splash' takes {' or '.join(splash.DTYPES)}, not {q.dtype}; use 'blocks', or None")


_stop = functools.partial(refuse, kernel="attention 'splash'", instead="'blocks'")


@jax.custom_vjp
def _refuse(q: Array, k: Array, v: Array, segment: Array) -> Array:
    """Stops the lowering of a program for a platform that the named implementation does not run on."""
    return _stop(q)


_refuse.defvjp(lambda *arrays: (_refuse(*arrays), arrays), lambda arrays, _: (*map(_stop, arrays[:3]), None))
