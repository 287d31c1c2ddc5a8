"""The state that is trained: optimizer, fresh or abstract or restored state, and its fingerprint."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

from rlvr_jax.config import Config
from rlvr_jax.config import Optimizer as OptimizerConfig
from rlvr_jax.models.decoder import DecoderConfig, abstract_params, param_axes
from rlvr_jax.sharding import check_divides, in_host_memory, named, shardings
from rlvr_jax.types import TrainState

PIECE_BYTES = 1 << 28


def make_optimizer(cfg: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up, schedule and global-norm clipping; norms and biases are not decayed."""
    lr, warm = cfg.learning_rate, cfg.warmup_steps
    rest = max(total_steps - warm, 1)
    after = {"constant": optax.constant_schedule(lr), "linear": optax.linear_schedule(lr, 0.0, rest),
             "cosine": optax.cosine_decay_schedule(lr, rest)}[cfg.schedule]
    # The first update must not be lost to a learning rate of exactly 0.
    schedule = optax.join_schedules([lambda n: lr * (n + 1) / (warm + 1), after], [warm])
    def decayed(params: Any) -> Any:  # a stacked norm or bias is [L, D]; a matrix has one axis more
        return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim - ("layers" in jax.tree_util.keystr(path)) > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.adamw(schedule, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay, mask=decayed))


def policy_optimizer(config: Config) -> optax.GradientTransformation:
    """The policy's: its schedule ends with the run. The critic's warm-up is no update of the policy."""
    critic = config.algorithm.value
    return make_optimizer(config.optimizer, (config.train.steps - (critic.warmup_steps if critic else 0)) * config.train.updates_per_batch)


def check_model_divides(model: DecoderConfig, mesh: jax.sharding.Mesh) -> None:
    """Heads are split as heads: sampling keeps each chip's own in its cache.

    Raises:
      ValueError: a size of the model that its mesh axis does not divide.
    """
    check_divides(mesh, {"columns of width (hidden_size)": ("embed", model.hidden_size), "heads": ("heads", model.num_heads),
                         "key heads": ("kv_heads", model.num_kv_heads), "columns of the feed-forward layer": ("ffn", model.intermediate_size),
                         "rows of the vocabulary": ("vocab", model.vocab_size)})


def init_state(params: Any, model: DecoderConfig, optimizer: optax.GradientTransformation, strategy: Any, mesh: jax.sharding.Mesh,
               critic: Any = None, *, offload: bool = False) -> TrainState:
    """A state whose optimizer moments are laid out like the parameters; nothing exists unsharded.

    Args:
      critic: a :class:`rlvr_jax.critic.Critic`, or None.
      offload: the policy's moments lie in the host's memory (``mesh.offload_optimizer``).
    """
    out = state_shardings(jax.eval_shape(lambda p: p, params), model, optimizer, strategy, mesh, critic, offload=offload)
    make = jax.jit(lambda p: (optimizer.init(p), strategy.init(), jnp.zeros((), jnp.int32), _init(critic)),
                   out_shardings=(out.opt_state, out.strategy_state, out.step, out.critic))
    opt_state, strategy_state, step, of_critic = make(params)
    return TrainState(step=step, params=params, opt_state=opt_state, strategy_state=strategy_state, critic=of_critic)


def _init(critic: Any) -> Any:
    return None if critic is None else critic.init()


def state_shardings(params: Any, model: DecoderConfig, optimizer: optax.GradientTransformation, strategy: Any, mesh: jax.sharding.Mesh,
                    critic: Any = None, *, offload: bool = False) -> TrainState:
    """A TrainState of shardings for parameters of these shapes. A value head is small and whole on every device."""
    of_params, whole = shardings(mesh, param_axes(model), params), named(mesh)
    opt_shape = jax.eval_shape(optimizer.init, params)
    of_opt = optax.tree_utils.tree_map_params(optimizer, lambda _, s: in_host_memory(s) if offload else s, opt_shape, of_params, transform_non_params=lambda _: whole)
    return TrainState(step=whole, params=of_params, opt_state=of_opt,  # type: ignore[arg-type]  # a tree of shardings
                      strategy_state=jax.tree.map(lambda _: whole, jax.eval_shape(strategy.init)),
                      critic=jax.tree.map(lambda _: whole, jax.eval_shape(lambda: _init(critic))))


def abstract_state(model: DecoderConfig, optimizer: optax.GradientTransformation, strategy: Any, mesh: jax.sharding.Mesh,
                   critic: Any = None, *, offload: bool = False) -> TrainState:
    """The state's shapes with the shardings they are restored to."""
    params = abstract_params(model)
    shapes = TrainState(step=jax.eval_shape(lambda: jnp.zeros((), np.int32)), params=params, opt_state=jax.eval_shape(optimizer.init, params),
                        strategy_state=jax.eval_shape(strategy.init), critic=jax.eval_shape(lambda: _init(critic)))
    where = state_shardings(params, model, optimizer, strategy, mesh, critic, offload=offload)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)


def weights_sha256(params: Any) -> str:
    """Hash of all weights in the order of their names; equal exactly when they are equal bit for bit, however they are sharded.

    Weights of several processes are fetched in pieces, so that no device and no host holds a whole one; all processes call it.
    """
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        for piece in [x] if x.is_fully_addressable else _pieces(x):
            digest.update(np.asarray(piece).tobytes())
    return digest.hexdigest()


def _pieces(x: jax.Array) -> Iterator[np.ndarray]:
    """Rows of a sharded array, about :data:`PIECE_BYTES` at a time."""
    rows = max(1, PIECE_BYTES // max(1, x.nbytes // x.shape[0]))
    for i in range(0, x.shape[0], rows):
        yield np.asarray(process_allgather(jax.lax.dynamic_slice_in_dim(x, i, min(rows, x.shape[0] - i)), tiled=True))
