"""The run's own programs (update, prefill, decode) with abstract arrays: lowered and compiled for devices that are not here."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax import parts as part
from rlvr_jax import strategies
from rlvr_jax.config import Config
from rlvr_jax.critic import make_critic
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine, length_buckets
from rlvr_jax.rollout.slots import Rows
from rlvr_jax.rollout.weights import decode_shardings
from rlvr_jax.sharding import HOST, named
from rlvr_jax.state import abstract_state, policy_optimizer
from rlvr_jax.types import UpdateBatch
from rlvr_jax.update import make_update

Lower = Callable[[], jax.stages.Lowered]


class Programs(NamedTuple):
    """What a step runs.

    Attributes:
      lower: name -> makes the lowered program.
      state: abstract TrainState: resident always, as ``reference`` (parameters, or None) is.
      weights, cache: abstract, as decoding holds them; ``smaller`` is the cache that the last growth copies from (None without).
      slots, prefill_rows: rows of one decode step, and prompts of one prefill.
      ring: answer columns of the cache; burst: tokens that one run of decode draws for each slot.
    """

    lower: dict[str, Lower]
    state: Any
    reference: Any
    weights: Any
    cache: Any
    smaller: Any
    slots: int
    prefill_rows: int
    ring: int
    burst: int


def build(config: Config, model: DecoderConfig, eos_ids: tuple[int, ...], mesh: jax.sharding.Mesh, platform: str) -> Programs:
    """The programs of ``config`` on ``mesh``; nothing is allocated, traced or compiled yet.

    Raises:
      ValueError: the model or the batch does not divide over the mesh.
    """
    strategy = strategies.build(list(config.strategies))
    optimizer = policy_optimizer(config)
    state = abstract_state(model, optimizer, strategy, mesh, make_critic(config, model), offload=config.mesh.offload_optimizer)
    reference = state.params if config.algorithm.kl_coef else None
    engine = sampler(config, model, eos_ids, mesh, platform, entropy=strategy.needs_entropy)
    update = make_update(model, config, strategy, optimizer, mesh)
    P, G, slots = engine.prompt_buckets[-1], config.rollout.samples_per_prompt, engine._widths[-1]
    weights, caches = _weights(engine, model, state.params, mesh), [_cache(engine, slots, P, ring, mesh) for ring in engine._rings[-2:]]
    n = engine.prefill_rows(P, G)

    def lower_update() -> jax.stages.Lowered:
        with jax.set_mesh(mesh):
            return update.jitted.lower(state, abstract_batch(config, entropy=engine.sampling.record_entropy), jax.eval_shape(lambda: jax.random.key(0)), reference)  # type: ignore[attr-defined]

    def lower_prefill() -> jax.stages.Lowered:
        whole = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh))  # noqa: E731
        with _context(engine, mesh):
            return engine._prefill.lower(state.params, whole(n, P), whole(n), whole(n), whole(n), whole(2, dtype=jnp.uint32), whole(), G=G)

    def lower_decode() -> jax.stages.Lowered:
        row: Callable[..., Any] = lambda dtype, *more: jax.ShapeDtypeStruct((slots, *more), dtype, sharding=named(mesh, "batch", *(None,) * len(more)))  # noqa: E731
        rows = Rows(row(jnp.int32), row(jnp.int32), row(jnp.int32), row(jnp.int32), row(jnp.bool), row(jnp.uint32, 2))
        with _context(engine, mesh):
            return engine._burst.lower(weights, caches[-1], rows, jax.ShapeDtypeStruct((), jnp.int32, sharding=named(mesh)), prompt_columns=P)

    return Programs({"update": lower_update, "prefill": lower_prefill, "decode": lower_decode}, state, reference, weights, caches[-1],
                    caches[0] if len(caches) > 1 else None, slots, n, engine._rings[-1], engine._burst_tokens)


def sampler(config: Config, model: DecoderConfig, eos_ids: tuple[int, ...], mesh: jax.sharding.Mesh, platform: str, *, entropy: bool) -> LocalEngine:
    """The engine that training would make (:meth:`rlvr_jax.parts.Parts.engine`), for ``platform``."""
    r = config.rollout
    sampling = SamplingParams(r.temperature, r.top_k, r.top_p, r.max_new_tokens, eos_ids, entropy or r.record_entropy, r.min_p, r.stop)
    return LocalEngine(model, sampling, mesh, compute_dtype=config.model.compute_dtype, prompt_buckets=length_buckets(config.data.max_prompt_length),
                       slots=r.slots, total_length=part.row_length(config), platform=platform, decode=str)


def _context(engine: LocalEngine, mesh: jax.sharding.Mesh) -> Any:
    return contextlib.nullcontext() if engine.mesh is None else jax.set_mesh(mesh)


def _weights(engine: LocalEngine, model: DecoderConfig, params: Any, mesh: jax.sharding.Mesh) -> Any:
    shapes = jax.eval_shape(engine._prepare, params)
    where = decode_shardings(model, mesh, unroll=engine._unroll) if engine.mesh is not None else jax.tree.map(lambda _: named(mesh), shapes)
    return _placed(shapes, where)


def _cache(engine: LocalEngine, slots: int, prompt_columns: int, ring: int, mesh: jax.sharding.Mesh) -> Any:
    shapes = jax.eval_shape(lambda: engine._empty(slots, prompt_columns, ring))
    axes = {4: ("batch", "kv_heads", "length", "head_dim"), 2: ("batch", "length"), 0: ()}
    return _placed(shapes, jax.tree.map(lambda x: named(mesh, *axes[x.ndim]), shapes))


def _placed(shapes: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)


def abstract_batch(config: Config, *, entropy: bool) -> UpdateBatch:
    """Shapes of a step's rows; they come from the host, and the compiler says where they lie."""
    N, T = config.train.prompts_per_step, part.row_length(config)
    B = N * config.rollout.samples_per_prompt
    array: Callable[..., Any] = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    i32, f32, flag = np.int32, np.float32, np.bool_
    return UpdateBatch(tokens=array(i32, B, T), prompt_length=array(i32, B), response_length=array(i32, B), logprob=array(f32, B, T),
                       behavior_logprob=array(f32, B, T), entropy=array(f32, B, T) if entropy else None, reward=array(f32, B), valid=array(flag, B),
                       correct=array(flag, B), truncated=array(flag, B), policy_step=array(i32, B), domain=array(i32, N))


def bytes_per_device(tree: Any, *, on_host: bool = False) -> int:
    """Of placed abstract arrays, on the device that holds most: their own shapes, no layout padding.

    Args:
      on_host: count those that lie in the host's memory, and no others.
    """
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree) if (x.sharding.memory_kind == HOST) == on_host)
