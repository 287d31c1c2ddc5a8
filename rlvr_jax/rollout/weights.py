"""Parameters as decoding wants them: made once per policy, read by every burst."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.models.decoder import DecoderConfig, Params, Transposed, param_axes, unstack_layers
from rlvr_jax.sharding import RULES


def decode_weights(params: Params, cfg: DecoderConfig, dtype: Any, *, unroll: bool, fuse: bool, transpose: bool) -> Params:
    """The tree that :func:`rlvr_jax.models.decoder.forward` decodes with.

    Matrices are in ``dtype``, norms stay float32.

    Args:
      params: tree of ``init_params``, layers stacked.
      unroll: one tree per layer (see :func:`unstack_layers`), else stacked.
      fuse: queries, keys and values as one matrix, gate and up as one: fewer, larger products.
      transpose: matrices ``[out, in]`` (see :class:`~rlvr_jax.models.decoder.Transposed`).
    """
    cast = lambda name, x: x if name.endswith("norm") else x.astype(dtype)  # noqa: E731
    layers = {name: cast(name, x) for name, x in params["layers"].items()}
    if fuse:
        layers = _fused(layers)
    if transpose:
        layers = {name: Transposed(x.swapaxes(-1, -2)) if name.startswith("w") else x for name, x in layers.items()}
    out = {"embed": params["embed"].astype(dtype), "layers": layers, "final_norm": params["final_norm"]}
    if not cfg.tie_embeddings:
        out["head"] = params["head"].astype(dtype)
    return unstack_layers(out) if unroll else out


def _fused(layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    out = dict(layers)
    out["wqkv"] = jnp.concatenate([out.pop(name) for name in ("wq", "wk", "wv")], axis=-1)
    out["w_gate_up"] = jnp.concatenate([out.pop(name) for name in ("w_gate", "w_up")], axis=-1)
    if "bq" in out:
        out["bqkv"] = jnp.concatenate([out.pop(name) for name in ("bq", "bk", "bv")], axis=-1)
    return out


def decode_shardings(cfg: DecoderConfig, mesh: jax.sharding.Mesh, *, unroll: bool) -> Any:
    """Where :func:`decode_weights` (neither fused nor transposed) lie: split over ``tensor`` only.

    A decode step reads every weight, so a weight split over ``fsdp`` would be gathered again for every token.
    """
    def place(axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, P(*(None if a == "embed" else RULES[a] for a in axes)))

    axes = param_axes(cfg)
    layers = axes["layers"]
    if unroll:
        layers = tuple({name: a[1:] for name, a in layers.items()} for _ in range(cfg.num_layers))
    return jax.tree.map(place, {**axes, "layers": layers}, is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(a, str) for a in x))
