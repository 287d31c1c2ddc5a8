"""One jitted, sharded optimizer update: strategies -> weights -> live rows first -> loop over micro-batches.

A row is *computed* only if some coefficient of it is non-zero (weight and advantage, KL or entropy); a row whose
advantage is 0 is skipped but still counts in the denominator, so the gradient is exactly that of the full batch. The
coefficients are known before the forward pass, so live rows are ordered first and the micro-batch loop runs a traced
number of times: its cost follows the live rows, and nothing recompiles when their number changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax import losses
from rlvr_jax.advantages import advantages, effective_groups
from rlvr_jax.config import Algorithm, Config
from rlvr_jax.config import Optimizer as OptimizerConfig
from rlvr_jax.kernels.token_logprob.api import token_logprob
from rlvr_jax.models.decoder import DecoderConfig, abstract_params, forward, head_matrix, param_axes
from rlvr_jax.sharding import constrain, named, shardings
from rlvr_jax.types import Array, Signals, TrainState, UpdateBatch, response_mask

Metrics = dict[str, tuple[Array, Array]]


class Plan(NamedTuple):
    """Per-row and per-token coefficients, all known before the forward pass.

    advantage ``[B]``; weight ``[B, T]`` (0 = dropped); mask ``[B, T] bool`` response tokens of valid rows;
    live ``[B] bool`` rows that must be computed; on_policy ``[B] bool`` rows whose importance weight is 1 by
    definition; fresh ``[B] bool`` rows sampled by the current weights.
    """

    advantage: Array
    weight: Array
    mask: Array
    live: Array
    on_policy: Array
    fresh: Array


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


def init_state(params: Any, model: DecoderConfig, optimizer: optax.GradientTransformation, strategy: Any, mesh: jax.sharding.Mesh) -> TrainState:
    """A state whose optimizer moments are laid out like the parameters; nothing exists unsharded."""
    out = state_shardings(jax.eval_shape(lambda p: p, params), model, optimizer, strategy, mesh)
    make = jax.jit(lambda p: (optimizer.init(p), strategy.init(), jnp.zeros((), jnp.int32)),
                   out_shardings=(out.opt_state, out.strategy_state, out.step))
    opt_state, strategy_state, step = make(params)
    return TrainState(step=step, params=params, opt_state=opt_state, strategy_state=strategy_state)


def state_shardings(params: Any, model: DecoderConfig, optimizer: optax.GradientTransformation, strategy: Any, mesh: jax.sharding.Mesh) -> TrainState:
    """A TrainState of shardings for parameters of these shapes."""
    of_params, whole = shardings(mesh, param_axes(model), params), named(mesh)
    opt_shape = jax.eval_shape(optimizer.init, params)
    of_opt = optax.tree_utils.tree_map_params(optimizer, lambda _, s: s, opt_shape, of_params, transform_non_params=lambda _: whole)
    return TrainState(step=whole, params=of_params, opt_state=of_opt,  # type: ignore[arg-type]  # a tree of shardings
                      strategy_state=jax.tree.map(lambda _: whole, jax.eval_shape(strategy.init)))


def make_update(model: DecoderConfig, config: Config, strategy: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted ``update(state, batch, key, ref_params=None) -> (state, metrics)``.

    ``batch`` is an :class:`UpdateBatch` of B = N * G rows; the key orders groups into mini-batches when there are
    several updates per batch. ``ref_params`` is needed exactly when ``algorithm.kl_coef > 0``. Metrics are
    ``{name: (sum, count)}``. The state is donated. A batch in which nothing is kept, or a gradient that is not
    finite, leaves parameters and optimizer untouched and is counted.
    """
    # The state leaves with the shardings it came with: were they the compiler's choice, the second step would compile anew.
    where = state_shardings(abstract_params(model), model, optimizer, strategy, mesh)
    jitted = jax.jit(lambda s, b, k, r: _update(s, b, k, r, model=model, config=config, strategy=strategy, optimizer=optimizer),
                     donate_argnums=0, out_shardings=(where, named(mesh)))

    def update(state: TrainState, batch: UpdateBatch, key: Array, ref_params: Any = None) -> tuple[TrainState, Metrics]:
        if (ref_params is None) != (config.algorithm.kl_coef == 0):
            raise ValueError("update: ref_params must be given exactly when algorithm.kl_coef > 0")
        with jax.set_mesh(mesh):
            return jitted(state, batch, key, ref_params)

    update.jitted = jitted  # type: ignore[attr-defined]  # for memory analysis and ahead-of-time compilation
    return update


def _update(state, batch, key, ref_params, *, model, config, strategy, optimizer):
    algo, G, U = config.algorithm, config.rollout.samples_per_prompt, config.train.updates_per_batch
    B = batch.tokens.shape[0]
    N = B // G
    micro = min(config.train.micro_batch, B)
    # With truncated sampling the behaviour policy is not the trainer's softmax, so w does not vanish.
    truncates = config.rollout.top_k > 0 or config.rollout.top_p < 1
    temperature = config.rollout.temperature

    score = _row_scorer(batch, model, config, micro)
    ref_logprob = score(ref_params, _answered(batch)) if algo.kl_coef and algo.kl_in_reward else None
    plan, strategy_state, metrics = make_plan(batch, state.step, state.strategy_state, algo, strategy, G, truncates, ref_logprob)
    old = score(state.params, plan.live) if U > 1 or algo.recompute_old else None

    place = jnp.zeros(N, jnp.int32).at[jax.random.permutation(key, N)].set(jnp.arange(N, dtype=jnp.int32) // (N // U))

    def one(carry, u):
        params, opt_state, skipped = carry
        rows = jnp.repeat(place == u, G)
        grads, stats, any_live = _gradients(params, batch, plan, rows, old, ref_params, model, config, micro, temperature)
        norm = optax.global_norm(grads)
        ok = any_live & jnp.isfinite(norm)
        updates, new_opt = optimizer.update(grads, opt_state, params)
        keep = lambda new, prev: jnp.where(ok, new, prev)  # noqa: E731
        params, opt_state = jax.tree.map(keep, (optax.apply_updates(params, updates), new_opt), (params, opt_state))
        empty, broken = jnp.float32(~any_live), jnp.float32(any_live & ~jnp.isfinite(norm))
        stats["update/grad_norm"] = (jnp.where(ok, norm, 0.0), jnp.float32(ok))
        return (params, opt_state, (skipped[0] + empty, skipped[1] + broken)), stats

    zero = jnp.float32(0)
    (params, opt_state, (empty, broken)), stats = jax.lax.scan(one, (state.params, state.opt_state, (zero, zero)), jnp.arange(U))
    metrics |= _named({k: _merge(k, s, c) for k, (s, c) in stats.items()})
    metrics["update/skipped_empty"] = (empty, jnp.float32(1))
    metrics["update/skipped_nonfinite"] = (broken, jnp.float32(1))
    return TrainState(step=state.step + 1, params=params, opt_state=opt_state, strategy_state=strategy_state), metrics


def make_plan(batch: UpdateBatch, step: Array, strategy_state: Any, algo: Algorithm, strategy: Any, G: int, truncates: bool,
              ref_logprob: Array | None = None) -> tuple[Plan, Any, Metrics]:
    """Advantages and strategies: everything that is decided before the forward pass."""
    B, T = batch.tokens.shape
    group = lambda x: x.reshape(B // G, G, *x.shape[1:])  # noqa: E731
    mask = response_mask(batch.prompt_length, batch.response_length, T) & batch.valid[:, None]
    reward = batch.reward
    if ref_logprob is not None:  # k1 in the reward; "effective" is still decided on the reward alone
        reward = reward - algo.kl_coef * jnp.sum((batch.logprob - ref_logprob) * mask, 1)
    effective = effective_groups(group(batch.reward), group(batch.valid))
    standardise = lambda valid: advantages(algo.advantage, group(reward), valid) * effective[:, None]  # noqa: E731
    advantage = standardise(group(batch.valid))

    # Overlong filtering: such rows stay in the group's mean and std, and take no part in the rest.
    usable = batch.valid & ~batch.truncated if algo.mask_truncated else batch.valid
    signals = Signals.create(
        group(batch.reward), advantage, group(batch.logprob), group(mask & usable[:, None]), group(batch.response_length), batch.domain,
        step, valid=group(usable), correct=group(batch.correct), truncated=group(batch.truncated), age=group(step - batch.policy_step),
        entropy=None if batch.entropy is None else group(batch.entropy))
    weight, strategy_state = strategy.apply(strategy_state, signals)
    weight = weight[..., None] if weight.ndim == 2 else weight
    weight = (jnp.broadcast_to(weight, signals.mask.shape) * signals.mask).reshape(B, T)
    kept = jnp.any(weight > 0, 1)
    if algo.restandardise:
        advantage = standardise(group(kept))
    advantage = advantage.reshape(B)

    fresh = batch.policy_step == step
    has_loss = (advantage != 0) if not _regularised(algo) else jnp.ones(B, bool)
    on_policy = jnp.zeros(B, bool) if truncates else fresh
    plan = Plan(advantage, weight, mask, kept & has_loss, on_policy, fresh)
    return plan, strategy_state, _plan_metrics(plan, effective, batch, G)


def _regularised(algo: Algorithm) -> bool:
    return (algo.kl_coef > 0 and not algo.kl_in_reward) or algo.entropy_coef > 0


def _answered(batch: UpdateBatch) -> Array:
    return batch.valid & (batch.response_length > 0)


def _plan_metrics(plan: Plan, effective: Array, batch: UpdateBatch, G: int) -> Metrics:
    f = jnp.float32
    B = plan.live.shape[0]
    kept_T = plan.weight > 0
    kept_row = jnp.any(kept_T, 1)
    valid, tokens = f(jnp.sum(batch.valid)), f(jnp.sum(plan.mask))
    w = jnp.where(kept_T, plan.weight, 0.0)
    n_kept, w_sum, w_sq = f(jnp.sum(kept_T)), jnp.sum(w), jnp.sum(w * w)
    return {
        "kept/rows": (f(jnp.sum(kept_row)), valid),
        "kept/groups": (f(jnp.sum(jnp.any(kept_row.reshape(-1, G), 1))), f(B // G)),
        "kept/tokens": (n_kept, tokens),
        "update/live_rows": (f(jnp.sum(plan.live)), f(B)),
        "tokens/updated_share": (f(jnp.sum(kept_T & plan.live[:, None])), tokens),
        "tokens/updated": (f(jnp.sum(kept_T & plan.live[:, None])), f(1)),
        "effective/groups": (f(jnp.sum(effective)), f(B // G)),
        "strategy/weight_mean": (w_sum, n_kept),
        "strategy/weight_std": (jnp.sqrt(jnp.maximum(w_sq / jnp.maximum(n_kept, 1) - (w_sum / jnp.maximum(n_kept, 1)) ** 2, 0)), f(1)),
        "strategy/ess": (w_sum**2 / jnp.maximum(w_sq, 1e-30), jnp.maximum(n_kept, 1)),
        "entropy_estimate": (-jnp.sum(batch.logprob * plan.mask), tokens),
        "advantage/abs_mean": (jnp.sum(jnp.abs(plan.advantage) * batch.valid), valid),
    }


def _gradients(params, batch, plan, rows, old, ref_params, model, config, micro, temperature):
    """Gradient of the mean loss over the selected rows, summed over live micro-batches; (grads, stats, any live)."""
    algo = config.algorithm
    B = batch.tokens.shape[0]
    denominator = plan.mask & rows[:, None]
    if algo.loss_denominator == "kept":
        denominator &= plan.weight > 0
    length = config.rollout.max_new_tokens
    scale = losses.token_scale(algo.aggregation, denominator, losses.denominator_counts(denominator), length)
    live = plan.live & rows
    order, trips = _live_order(live, micro)

    def loss_fn(params, idx, alive):
        take = lambda x: constrain(x[idx], "batch", *(None,) * (x.ndim - 1))  # noqa: E731
        weight = take(plan.weight) * alive[:, None]
        mask = take(plan.mask) & (weight > 0)
        tokens, prompt, response = take(batch.tokens), take(batch.prompt_length), take(batch.response_length)
        logprob, entropy = row_logprob(params, model, config, tokens, prompt + response, mask, with_entropy=algo.entropy_coef > 0)
        ref = None
        if ref_params is not None and not algo.kl_in_reward:
            ref = jax.lax.stop_gradient(row_logprob(ref_params, model, config, tokens, prompt + response, mask)[0])
        loss, stats = losses.policy_objective(
            algo, logprob=logprob, old_logprob=None if old is None else take(old), behavior_logprob=take(batch.behavior_logprob),
            sampler_logprob=take(batch.logprob), advantage=take(plan.advantage), weight=weight, mask=mask, on_policy=take(plan.on_policy),
            fresh=take(plan.fresh), ref_logprob=ref, entropy=entropy)
        total = jnp.sum(loss * take(scale))
        return total, stats | {"update/loss": (total, jnp.float32(0))}

    def body(i, carry):
        grads, stats = carry
        at = jax.lax.dynamic_slice(order, (i * micro,), (micro,))
        (_, s), g = jax.value_and_grad(loss_fn, has_aux=True)(params, at % B, at < B)
        return jax.tree.map(jnp.add, grads, g), losses.merge_stats(stats, s)

    zeros = jax.tree.map(jnp.zeros_like, params)
    shape = jax.eval_shape(lambda: loss_fn(params, order[:micro] % B, order[:micro] < B)[1])
    stats = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    grads, stats = jax.lax.fori_loop(0, trips, body, (zeros, stats))
    stats["update/loss"] = (stats["update/loss"][0], jnp.float32(1))
    return grads, stats, trips > 0


def _merge(name: str, sums: Array, counts: Array) -> tuple[Array, Array]:
    """``losses.merge_stats`` over the mini-batches of one rollout, stacked on axis 0."""
    return (jnp.max(sums), jnp.max(counts)) if name.endswith("_max") else (jnp.sum(sums), jnp.sum(counts))


def _named(stats: Metrics) -> Metrics:
    """Metric names, and pairs whose quotient is the value: a maximum counts once, the effective sample size is a ratio."""
    w, n = stats["is_weight"]
    square = stats.pop("is_weight_sq")[0]
    out = {"policy/is_ess": (w * w, n * square)}
    for name, (total, count) in stats.items():
        group, _, rest = name.rpartition("/")
        if name.endswith("_max"):
            name, count, rest = name.removesuffix("_max") + "/max", jnp.float32(count > 0), ""
        elif name == "logprob_gap":
            name, rest = "logprob_gap/mean", ""
        out[f"{group or 'policy'}/{rest}" if rest else name] = (total, count)
    return out


def _live_order(live: Array, micro: int) -> tuple[Array, Array]:
    """Row indices, live ones first in their order, then B (= none) up to a multiple of ``micro``; and the trip count."""
    B = live.shape[0]
    n_live = jnp.sum(live)
    order = jnp.argsort(~live, stable=True)
    order = jnp.where(jnp.arange(B) < n_live, order, B)
    order = jnp.pad(order, (0, -B % micro), constant_values=B)
    return order, (n_live + micro - 1) // micro


def row_logprob(params: Any, model: DecoderConfig, config: Config, tokens: Array, length: Array, mask: Array, *, with_entropy: bool = False) -> tuple[Array, Array | None]:
    """``tokens [m, T], length [m], mask [m, T] -> logprob [m, T]`` (and entropy), tempered; 0 where the mask is False."""
    m, T = tokens.shape
    dtype = jnp.dtype(config.model.compute_dtype)
    position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (m, T))
    segment = (position < length[:, None]).astype(jnp.int32)
    hidden, _ = forward(params, model, tokens, position, segment_ids=segment, compute_dtype=dtype, remat=config.model.remat)
    # tokens[:, t] is predicted by hidden[:, t-1]; the last position predicts nothing.
    predicts = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    wanted = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    logprob, entropy = token_logprob(hidden.reshape(m * T, -1), head_matrix(params, model).astype(dtype), predicts.reshape(-1),
                                     weights=wanted.reshape(-1).astype(jnp.float32), temperature=config.rollout.temperature,
                                     with_entropy=with_entropy)
    back = lambda x: jnp.pad(x.reshape(m, T)[:, :-1], ((0, 0), (1, 0))) * mask  # noqa: E731
    return back(logprob), None if entropy is None else back(entropy)


def _row_scorer(batch, model, config, micro):
    """``(params, live [B]) -> logprob [B, T]``: a forward pass over live rows only, 0 elsewhere, no gradient."""
    B, T = batch.tokens.shape

    def score(params, live):
        order, trips = _live_order(live, micro)

        def body(i, out):
            at = jax.lax.dynamic_slice(order, (i * micro,), (micro,))
            take = lambda x: constrain(x[at % B], "batch", *(None,) * (x.ndim - 1))  # noqa: E731
            prompt, response = take(batch.prompt_length), take(batch.response_length)
            mask = response_mask(prompt, response, T) & (at < B)[:, None]
            logprob, _ = row_logprob(params, model, config, take(batch.tokens), prompt + response, mask)
            return out.at[at].set(logprob, mode="drop")

        return jax.lax.stop_gradient(jax.lax.fori_loop(0, trips, body, jnp.zeros((B, T), jnp.float32)))

    return score
