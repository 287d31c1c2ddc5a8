"""One decoder for Llama (with Llama-3.1 rope scaling), Qwen2/2.5 (qkv bias) and Qwen3 (q/k norm).

The same :func:`forward` serves training (layers stacked, walked by a scan), prefill and decoding (layers as a tuple,
an unrolled loop over a cache that is updated in place), so sampler and trainer compute the same numbers.

Weights are float32 masters, cast to ``compute_dtype`` where they are used; norms, rope and softmax stay in float32.
Projections are stored ``[in, out]``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from rlvr_jax.kernels.attention.api import Implementation, packed_attention
from rlvr_jax.models.attention import AttentionMask, at_least_float32, attention
from rlvr_jax.sharding import constrain, ways

if TYPE_CHECKING:
    from rlvr_jax.models.cache import KVCache

Array = jax.Array
Params = dict[str, Any]
Remat = Literal["none", "dots", "full"]
UNROLLED_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama-3.1's frequency scaling: long wavelengths are slowed by ``factor``, short ones kept, between: a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. ``qkv_bias`` is Qwen2's, ``qk_norm`` Qwen3's (an RMS norm per head, before rope)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rope turns pairs")


def _layer_table(cfg: DecoderConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name -> (shape, logical axes) of one layer's weights."""
    D, F = cfg.hidden_size, cfg.intermediate_size
    Q, KV = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    table: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "attn_norm": ((D,), ("norm",)),
        "wq": ((D, Q), ("embed", "heads")),
        "wk": ((D, KV), ("embed", "kv_heads")),
        "wv": ((D, KV), ("embed", "kv_heads")),
        "wo": ((Q, D), ("heads", "embed")),
        "mlp_norm": ((D,), ("norm",)),
        "w_gate": ((D, F), ("embed", "ffn")),
        "w_up": ((D, F), ("embed", "ffn")),
        "w_down": ((F, D), ("ffn", "embed")),
    }
    if cfg.qkv_bias:
        table |= {"bq": ((Q,), ("heads",)), "bk": ((KV,), ("kv_heads",)), "bv": ((KV,), ("kv_heads",))}
    if cfg.qk_norm:
        table |= {"q_norm": ((cfg.head_dim,), ("norm",)), "k_norm": ((cfg.head_dim,), ("norm",))}
    return table


def abstract_params(cfg: DecoderConfig) -> Params:
    """The tree of :func:`init_params` as float32 ShapeDtypeStructs, layers stacked on axis 0."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    out: Params = {
        "embed": leaf(cfg.vocab_size, cfg.hidden_size),
        "layers": {name: leaf(cfg.num_layers, *shape) for name, (shape, _) in _layer_table(cfg).items()},
        "final_norm": leaf(cfg.hidden_size),
    }
    if not cfg.tie_embeddings:
        out["head"] = leaf(cfg.vocab_size, cfg.hidden_size)
    return out


def param_axes(cfg: DecoderConfig) -> Params:
    """The same tree with each leaf's logical axes (``sharding.RULES``)."""
    out: Params = {
        "embed": ("vocab", "embed"),
        "layers": {name: ("layers", *axes) for name, (_, axes) in _layer_table(cfg).items()},
        "final_norm": ("norm",),
    }
    if not cfg.tie_embeddings:
        out["head"] = ("vocab", "embed")
    return out


def init_params(cfg: DecoderConfig, key: Array) -> Params:
    """Random float32 weights: normal with deviation 0.02, the two projections back into the residual stream divided
    by ``sqrt(2 L)`` (GPT-2's rule); norms one, biases zero. Jit it with ``out_shardings`` to create them sharded."""
    flat, tree = jax.tree.flatten_with_path(abstract_params(cfg))
    leaves = []
    for i, (path, leaf) in enumerate(flat):
        name = path[-1].key
        if name.endswith("norm"):
            leaves.append(jnp.ones(leaf.shape, leaf.dtype))
        elif name in ("bq", "bk", "bv"):
            leaves.append(jnp.zeros(leaf.shape, leaf.dtype))
        else:
            scale = 0.02 / math.sqrt(2 * cfg.num_layers) if name in ("wo", "w_down") else 0.02
            leaves.append(scale * jax.random.normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype))
    return jax.tree.unflatten(tree, leaves)


def unstack_layers(params: Params, dtype: Any = None) -> Params:
    """Stacked layers to a tuple of per-layer trees, for decoding.

    With ``dtype`` the layers' matrices are cast once instead of in every step; norms stay float32, as in training.
    """
    stacked = params["layers"]
    if isinstance(stacked, tuple):
        return params
    L = stacked["attn_norm"].shape[0]

    def pick(name: str, i: int) -> Array:
        x = jax.tree.map(lambda x: x[i], stacked[name])
        return x if dtype is None or name.endswith("norm") else x.astype(dtype)

    return {**params, "layers": tuple({name: pick(name, i) for name in stacked} for i in range(L))}


def head_matrix(params: Params, cfg: DecoderConfig) -> Array:
    """``[V, D]`` output projection: the embedding itself where it is tied."""
    return params["embed"] if cfg.tie_embeddings else params["head"]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32, returned in x's dtype."""
    wide = x.astype(at_least_float32(x.dtype))
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(wide.dtype)).astype(x.dtype)


def rope_frequencies(cfg: DecoderConfig) -> Array:
    """``[head_dim / 2] float32`` radians per position."""
    freq = cfg.rope_theta ** (-jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    s = cfg.rope_scaling
    if s is None:
        return freq
    turns = s.original_max_position_embeddings * freq / (2 * math.pi)
    keep = jnp.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / s.factor


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Turns ``x[B, T, heads, head_dim]``: the pair of coordinate i is i + head_dim/2 (the layout of HF weights)."""
    a, b = jnp.split(x.astype(at_least_float32(x.dtype)), 2, axis=-1)
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)


class Transposed(struct.PyTreeNode):
    """A weight stored ``[out, in]``, for decoding on CPU."""

    matrix: Array


def times_transposed(x: Array, w: Array) -> Array:
    """``x[B, D] @ w[V, D].T -> [B, V]`` in at least float32, as XLA's CPU backend does it fastest for few rows.

    It packs the right operand anew for every product: with 16 rows that takes as long as the multiplications. So the
    weight stands on the left, and the barrier keeps XLA from turning the product around again.
    """
    wide = at_least_float32(x.dtype)
    return jax.lax.platform_dependent(
        x, w,
        cpu=lambda x, w: jax.lax.optimization_barrier(jnp.einsum("bd,vd->vb", x, w, preferred_element_type=wide)).T,
        default=lambda x, w: jnp.einsum("bd,vd->bv", x, w, preferred_element_type=wide))


def _project(x: Array, w: Array | Transposed, bias: Array | None = None) -> Array:
    """``x @ w`` in x's dtype, accumulated in float32; ``w`` is ``[in, ...]``."""
    # As a matrix: XLA's CPU backend contracts the weight gradient over two axes (batch, time) 1.7 times slower.
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(w, Transposed):
        y = times_transposed(flat, w.matrix.astype(x.dtype))
    else:
        y = jnp.tensordot(flat, w.astype(x.dtype), 1, preferred_element_type=at_least_float32(x.dtype))
    y = y if bias is None else y + bias.astype(y.dtype)
    return y.astype(x.dtype).reshape(*x.shape[:-1], *y.shape[1:])


def _queries_keys_values(h: Array, w: dict[str, Array], cfg: DecoderConfig, *, joint: bool) -> Any:
    """Three projections of ``h[B, T, D]``, or one that decoding has made of them (``wqkv``), or one made here (``joint``)."""
    if joint:  # side by side for each key head, so that no device needs another's part
        K, G = cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads
        by_head = lambda x: x.reshape(*x.shape[:-1], K, -1, cfg.head_dim).astype(h.dtype)  # noqa: E731
        bias = jnp.concatenate([by_head(w["b" + name]) for name in "qkv"], axis=-2) if "bq" in w else None
        y = _project(h, jnp.concatenate([by_head(w["w" + name]) for name in "qkv"], axis=-2), bias)
        return y[..., :G, :], y[..., G, :], y[..., G + 1, :]
    if "wqkv" not in w:
        return (_project(h, w["w" + name], w.get("b" + name)) for name in "qkv")
    Q, KV = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    return jnp.split(_project(h, w["wqkv"], w.get("bqkv")), (Q, Q + KV), axis=-1)


def _gate_and_up(h: Array, w: dict[str, Array], *, joint: bool) -> Any:
    if joint:
        y = _project(h, jnp.stack([w["w_gate"].astype(h.dtype), w["w_up"].astype(h.dtype)], axis=1))
        return y[..., 0, :], y[..., 1, :]
    return jnp.split(_project(h, w["w_gate_up"]), 2, axis=-1) if "w_gate_up" in w else (_project(h, w["w_gate"]), _project(h, w["w_up"]))


@dataclasses.dataclass(frozen=True)
class _Step:
    """What all layers of one forward pass share; ``attend`` is given q, k and v (and this layer's cache, where there is one)."""

    cfg: DecoderConfig
    cos: Array
    sin: Array
    attend: Callable[[Array, Array, Array], Array]
    index: Array | None = None
    read: int | None = None


def _layer(x: Array, w: dict[str, Array], kv: tuple[Array, Array] | None, step: _Step) -> tuple[Array, tuple[Array, Array] | None]:
    """One block: ``x[B, T, D]`` and this layer's cache (or None) to the same."""
    cfg, (B, T, _) = step.cfg, x.shape
    # Where chips share a layer, each product's gradient for its input is summed over them: of joined products, once.
    joint = kv is None and ways("heads") > 1 and cfg.num_kv_heads % ways("heads") == 0
    h = rms_norm(x, w["attn_norm"], cfg.rms_eps)
    q, k, v = (x.reshape(B, T, -1, cfg.head_dim) for x in _queries_keys_values(h, w, cfg, joint=joint))
    if cfg.qk_norm:
        q, k = rms_norm(q, w["q_norm"], cfg.rms_eps), rms_norm(k, w["k_norm"], cfg.rms_eps)
    q = constrain(apply_rope(q, step.cos, step.sin), "batch", "length", "heads", None)
    k = constrain(apply_rope(k, step.cos, step.sin), "batch", "length", "kv_heads", None)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if kv is not None and step.index is not None:
        at = (0, 0, step.index, 0)
        kv = tuple(jax.lax.dynamic_update_slice(old, new.astype(old.dtype), at) for old, new in zip(kv, (k, v)))  # type: ignore[assignment]
        k, v = (c[:, :, : step.read].astype(x.dtype) for c in kv)
    out = step.attend(q, k, v).reshape(B, T, cfg.num_heads * cfg.head_dim)
    x = constrain(x + _project(out, w["wo"]), "batch", "length", None)
    h = rms_norm(x, w["mlp_norm"], cfg.rms_eps)
    gate, up = _gate_and_up(h, w, joint=joint)
    gated = jax.nn.silu(gate) * up
    gated = constrain(gated, "batch", "length", "ffn")
    return constrain(x + _project(gated, w["w_down"]), "batch", "length", None), kv


def _remat(body: Any, remat: Remat) -> Any:
    if remat == "none":
        return body
    # Attention scores have batch dimensions, so 'dots' recomputes them too: they are what memory is short of.
    policy = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}[remat]
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _run_layers(x: Array, layers: Any, kv: Any, step: _Step, remat: Remat) -> tuple[Array, Any]:
    """All layers: an unrolled loop over a tuple, a scan over stacked weights."""
    body = _remat(lambda x, w, kv: _layer(x, w, kv, step), remat)
    if isinstance(layers, tuple):
        new = []
        for i, w in enumerate(layers):
            x, one = body(x, w, None if kv is None else (kv[0][i], kv[1][i]))
            new.append(one)
        return x, None if kv is None else (tuple(k for k, _ in new), tuple(v for _, v in new))
    # A shallow model is a tenth faster without the loop's copies; a deep one would compile for minutes.
    shallow = layers["attn_norm"].shape[0] <= UNROLLED_LAYERS
    return jax.lax.scan(lambda x, wkv: body(x, *wkv), x, (layers, kv), unroll=shallow)


def forward(params: Params, cfg: DecoderConfig, tokens: Array, positions: Array, *, segment_ids: Array | None = None,
            cache: "KVCache | None" = None, cache_read: int | None = None, window: int | None = None, compute_dtype: Any = jnp.float32,
            remat: Remat = "none", attention_kernel: Implementation | None = None) -> tuple[Array, "KVCache | None"]:
    """Hidden states after the final norm.

    Args:
      params: tree of :func:`init_params`; ``params["layers"]`` stacked (scan) or a tuple (:func:`unstack_layers`).
      tokens: ``[B, T] int32``.
      positions: ``[B, T] int32``, restarting at 0 in each segment; -1 marks padding that nobody may attend to.
      segment_ids: ``[B, T] int32``, 0 = padding; a token attends within its own segment only, to itself and what is
        before it in the row. Without them a row is one segment, and right padding is behind every real token.
      cache: where this call's keys and values are written (columns ``index .. index + T - 1``, which the caller
        keeps below the cache's size) and read from. Its k and v are a tuple exactly when the layers are. A cached row
        holds one segment: ``segment_ids`` then only say which tokens are padding.
      cache_read: attend to the first ``cache_read`` columns only (static), when the caller knows the rest is empty.
        For a prefill; in a decode step XLA's CPU backend fuses the write into the sliced read and then copies the
        cache, so growing the cache between loops (``cache.grow``) is the cheaper bucket there.
      window: no segment is longer than this, and its tokens stand side by side (static): attention then costs as much
        as on rows of that length. Without a cache only.
      compute_dtype: dtype of the matmuls and of the result.
      remat: what the backward pass recomputes, as in ``config.Model.remat``.
      attention_kernel: as ``implementation`` of ``kernels.attention.api.packed_attention``. Without a cache only.

    Returns:
      ``[B, T, D]`` and the cache after the call (None without one). Hidden states at padding are finite noise.

    Raises:
      ValueError: the cache is stacked and the layers are not, or the reverse.
    """
    if segment_ids is not None:
        positions = jnp.where(segment_ids == 0, -1, positions)
    angle = positions[..., None].astype(jnp.float32) * rope_frequencies(cfg)
    cos, sin, kv = jnp.cos(angle), jnp.sin(angle), None
    if cache is None:
        segments = (positions >= 0).astype(jnp.int32) if segment_ids is None else segment_ids
        step = _Step(cfg, cos, sin, functools.partial(packed_attention, segment_ids=segments, window=window, implementation=attention_kernel))
    else:
        if isinstance(cache.k, tuple) != isinstance(params["layers"], tuple):
            raise ValueError("the cache and the layers must both be stacked or both be tuples; see unstack_layers and init_cache")
        kv, index = (cache.k, cache.v), cache.index
        written = jax.lax.dynamic_update_slice(cache.position, positions.astype(jnp.int32), (0, index))
        step = _Step(cfg, cos, sin, functools.partial(attention, mask=AttentionMask(positions, written[:, :cache_read])), index, cache_read)
        cache = cache.replace(position=written, index=index + tokens.shape[1])

    x = jnp.take(params["embed"], tokens, axis=0, mode="clip").astype(compute_dtype)
    x, kv = _run_layers(constrain(x, "batch", "length", None), params["layers"], kv, step, remat)
    if cache is not None:
        cache = cache.replace(k=kv[0], v=kv[1])
    return rms_norm(x, params["final_norm"], cfg.rms_eps), cache
