"""One jitted, sharded optimizer update: strategies -> weights -> live rows first -> loop over micro-batches.

A row is *computed* only if some coefficient of it is non-zero (weight and advantage, KL, entropy or value loss); a row whose
advantage is 0 is skipped but still counts in the denominator, so the gradient is exactly that of the full batch. The
coefficients are known before the forward pass, so live rows are ordered first and the micro-batch loop runs a traced
number of times: its cost follows the live rows, and nothing recompiles when their number changes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlvr_jax import losses
from rlvr_jax.coefficients import Coefficients, Metrics, make_coefficients
from rlvr_jax.config import Config
from rlvr_jax.critic import Critic, make_critic, start_of_step, value_loss
from rlvr_jax.kernels.token_logprob.api import policy_loss
from rlvr_jax.kernels.token_logprob.objective import Rows, fold_stats
from rlvr_jax.models.decoder import DecoderConfig, abstract_params
from rlvr_jax.packing import gather, lay_out, turn
from rlvr_jax.scoring import batch_devices, chunk_logprob, hidden_states, row_logprob
from rlvr_jax.sharding import named
from rlvr_jax.state import state_shardings
from rlvr_jax.types import Array, TrainState, UpdateBatch, response_mask


def make_update(model: DecoderConfig, config: Config, strategy: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted ``update(state, batch, key, ref_params=None) -> (state, metrics)``.

    ``batch`` is an :class:`UpdateBatch` of B = N * G rows; the key orders groups into mini-batches when there are
    several updates per batch. ``ref_params`` is needed exactly when ``algorithm.kl_coef > 0``. Metrics are
    ``{name: (sum, count)}``. The state is donated. A batch in which nothing is kept, or a gradient or strategy's weight that
    is not finite, leaves parameters and optimizer untouched and is counted. With advantage 'gae' the state has a critic
    (:mod:`rlvr_jax.critic`); it learns from every answered row, and alone for its warm-up's steps.
    """
    critic = make_critic(config, model)
    # The state leaves with the shardings it came with: were they the compiler's choice, the second step would compile anew.
    where = state_shardings(abstract_params(model), model, optimizer, strategy, mesh, critic, offload=config.mesh.offload_optimizer)
    jitted = jax.jit(lambda s, b, k, r: _update(s, b, k, r, model=model, config=config, strategy=strategy, optimizer=optimizer, critic=critic),
                     donate_argnums=0, out_shardings=(where, named(mesh)))

    def update(state: TrainState, batch: UpdateBatch, key: Array, ref_params: Any = None) -> tuple[TrainState, Metrics]:
        if (ref_params is None) != (config.algorithm.kl_coef == 0):
            raise ValueError("update: ref_params must be given exactly when algorithm.kl_coef > 0")
        with jax.set_mesh(mesh):
            return jitted(state, batch, key, ref_params)

    update.jitted = jitted  # type: ignore[attr-defined]  # for memory analysis and ahead-of-time compilation
    return update


def _update(state: TrainState, batch: UpdateBatch, key: Array, ref_params: Any, *, model: DecoderConfig, config: Config, strategy: Any,
            optimizer: optax.GradientTransformation, critic: Critic | None) -> tuple[TrainState, Metrics]:
    algo, G, U = config.algorithm, config.rollout.samples_per_prompt, config.train.updates_per_batch
    B = batch.tokens.shape[0]
    N = B // G
    # With truncated sampling the behaviour policy is not the trainer's softmax, so w does not vanish.
    truncates = config.rollout.truncates

    answered = response_mask(batch.prompt_length, batch.response_length, batch.tokens.shape[1]) & batch.valid[:, None]
    score = lambda params, mask: jax.lax.stop_gradient(  # noqa: E731
        row_logprob(params, model, config, batch.tokens, batch.prompt_length + batch.response_length, mask))
    ref_logprob = score(ref_params, answered) if algo.kl_coef and algo.kl_in_reward else None
    needs_old = U > 1 or algo.recompute_old
    value, old = None, None
    if critic is not None:  # all answered rows are live: one pass gives both
        value, old = start_of_step(state.params, state.critic["head"], model, config, batch, answered, with_logprob=needs_old)
    plan, strategy_state, metrics = make_coefficients(batch, state.step, state.strategy_state, algo, strategy, G, truncates,
                                              config.data.trained, ref_logprob, value)
    if needs_old and old is None:
        old = score(state.params, plan.mask & plan.live[:, None])
    sound = jnp.all(jnp.isfinite(jnp.where(plan.mask, plan.weight, 0)))  # a strategy that fails drops no rows: it spoils the step
    teaches = plan.live & jnp.any(plan.weight > 0, 1)  # the policy; other live rows are the critic's
    learns = True if critic is None else state.step >= critic.settings.warmup_steps

    place = jnp.zeros(N, jnp.int32).at[jax.random.permutation(key, N)].set(jnp.arange(N, dtype=jnp.int32) // (N // U))

    def one(carry: Any, u: Array) -> tuple[Any, Metrics]:
        params, opt_state, of_critic, skipped = carry
        rows = jnp.repeat(place == u, G)
        grads, value_grads, stats = gradients(params, batch, plan, rows, old, ref_params, model, config, None if critic is None else of_critic["head"])
        any_live, norm = jnp.any(teaches & rows), optax.tree.norm(grads)
        finite = sound & jnp.isfinite(norm if critic is None else norm + optax.tree.norm(value_grads))
        if critic is not None:
            of_critic = critic.step(of_critic, value_grads, finite & jnp.any(plan.live & rows))
        ok = any_live & finite & learns
        held = _moments_to(jax.memory.Space.Device, opt_state) if config.mesh.offload_optimizer else opt_state
        updates, new_opt = optimizer.update(grads, held, params)
        keep = lambda new, prev: jnp.where(ok, new, prev)  # noqa: E731
        params, opt_state = jax.tree.map(keep, (optax.apply_updates(params, updates), new_opt), (params, held))
        if config.mesh.offload_optimizer:
            opt_state = _moments_to(jax.memory.Space.Host, opt_state)
        empty, broken = jnp.float32(~any_live & sound), jnp.float32(any_live & ~finite | ~sound)
        stats["update/grad_norm"] = (jnp.where(ok, norm, 0.0), jnp.float32(ok))
        return (params, opt_state, of_critic, (skipped[0] + empty, skipped[1] + broken)), stats

    zero = jnp.float32(0)
    (params, opt_state, of_critic, (empty, broken)), stats = jax.lax.scan(one, (state.params, state.opt_state, state.critic, (zero, zero)), jnp.arange(U))
    metrics |= _named(fold_stats(stats))
    metrics["update/skipped_empty"] = (empty, jnp.float32(1))
    metrics["update/skipped_nonfinite"] = (broken, jnp.float32(1))
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state, strategy_state=strategy_state, critic=of_critic), metrics


def _moments_to(space: Any, opt_state: Any) -> Any:
    """All but its counters, which stay on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, opt_state)


def gradients(params: Any, batch: UpdateBatch, plan: Coefficients, rows: Array, old: Array | None, ref_params: Any, model: DecoderConfig,
              config: Config, head: Any = None) -> tuple[Any, Any, Metrics]:
    """Gradient of the mean loss over the selected rows, summed over the chunks of live rows: of the parameters and of the
    value ``head`` (None without one), and statistics."""
    algo = config.algorithm
    B, T = batch.tokens.shape
    denominator = plan.mask & rows[:, None]
    if algo.loss_denominator == "kept":
        denominator &= plan.weight > 0
    scale = losses.token_scale(algo.aggregation, denominator, losses.denominator_counts(denominator), config.rollout.max_new_tokens)
    layout = lay_out(batch.prompt_length + batch.response_length, plan.live & rows, T, micro_batch=config.train.micro_batch,
                     devices=batch_devices(config), packed=config.train.packing)
    per_token = {"mask": plan.mask & (plan.weight > 0), "weight": plan.weight, "scale": scale, "behavior_logprob": batch.behavior_logprob,
                 "sampler_logprob": batch.logprob} | ({} if old is None else {"old_logprob": old})
    per_row = {"on_policy": plan.on_policy, "fresh": plan.fresh}
    (per_row if plan.advantage.ndim == 1 else per_token)["advantage"] = plan.advantage
    if head is not None and plan.value is not None and plan.returns is not None:
        learned = (plan.mask & rows[:, None]).astype(jnp.float32)  # whatever a strategy drops, the critic learns
        per_token |= {"value": plan.value, "returns": plan.returns, "value_scale": learned / jnp.maximum(jnp.sum(learned), 1)}
    chunks = gather(layout, batch.tokens, per_token, per_row)

    def loss_fn(weights: Any, chunk: dict[str, Array]) -> tuple[Array, Metrics]:
        params, head = weights
        if ref_params is not None and not algo.kl_in_reward:
            ref, _ = chunk_logprob(ref_params, model, config, chunk, layout.T)
            chunk |= {"ref_logprob": jax.lax.stop_gradient(ref)}
        return _chunk_loss(params, head, chunk, layout.T, B, model, config)

    def body(i: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
        grads, stats = carry
        (_, s), g = jax.value_and_grad(loss_fn, has_aux=True)(weights, turn(chunks, i))
        return jax.tree.map(jnp.add, grads, g), fold_stats(jax.tree.map(lambda a, b: jnp.stack([a, b]), stats, s))

    weights = (params, head)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    shape = jax.eval_shape(lambda: loss_fn(weights, turn(chunks, 0))[1])
    stats = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    grads, stats = jax.lax.fori_loop(0, layout.trips, body, (zeros, stats))
    stats["update/loss"] = (stats["update/loss"][0], jnp.float32(1))
    return *grads, stats


def _chunk_loss(params: Any, value_head: Any, chunk: dict[str, Array], T: int, num_rows: int, model: DecoderConfig, config: Config) -> tuple[Array, Metrics]:
    """Summed loss of one chunk, and its statistics."""
    hidden, head = hidden_states(params, model, config, chunk, T)
    names = {"scale", "old_logprob", "behavior_logprob", "sampler_logprob", "advantage", "on_policy", "fresh", "ref_logprob"}
    per_token: dict[str, Any] = {name: x.reshape(-1) for name, x in chunk.items() if name in names}
    out = policy_loss(hidden, head, chunk["target"].reshape(-1), weights=jnp.where(chunk["mask"], chunk["weight"], 0).reshape(-1),
                      rows=Rows(chunk["row"].reshape(-1), num_rows), objective=losses.objective_of(config.algorithm),
                      temperature=config.rollout.temperature, **per_token)
    total, stats = out.sum, out.stats | {"update/loss": (out.sum, jnp.float32(0))}
    if value_head is not None:
        assert config.algorithm.value is not None
        old, returns, value_scale = (chunk[name].reshape(-1) for name in ("value", "returns", "value_scale"))
        value_sum, value_stats = value_loss(value_head, hidden, old, returns, value_scale, config.algorithm.value)
        total, stats = total + value_sum, stats | value_stats
    return total, stats


def _named(stats: Metrics) -> Metrics:
    """Metric names, and pairs whose quotient is the value: a maximum counts once, the effective sample size is a ratio."""
    out = {}
    for ess, weight in (("policy/is_ess", "is_weight"), ("replay/ess", "stale_weight")):
        w, n = stats[weight]
        out[ess] = (w * w, n * stats.pop(f"{weight}_sq")[0])
    out["replay/is_weight"] = stats.pop("stale_weight")
    for name, (total, count) in stats.items():
        group, _, rest = name.rpartition("/")
        if name.endswith("_max"):
            name, count, rest = name.removesuffix("_max") + "/max", jnp.float32(count > 0), ""
        elif name == "logprob_gap":
            name, rest = "logprob_gap/mean", ""
        out[f"{group or 'policy'}/{rest}" if rest else name] = (total, count)
    return out
