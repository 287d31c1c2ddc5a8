"""The update with a critic: exact in every layout, a warm-up that leaves the policy alone, values that are learned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from update_cases import KEY, MODEL, G, N, P, R, a_batch, a_config, distance

from rlvr_jax import strategies
from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.coefficients import make_coefficients
from rlvr_jax.critic import make_critic, start_of_step
from rlvr_jax.models.decoder import forward, head_matrix, init_params, param_axes
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.state import abstract_state, init_state, policy_optimizer
from rlvr_jax.types import response_mask
from rlvr_jax.update import gradients, make_update

B, T = N * G, P + R


def ppo(critic=None, algorithm=None, **more):
    return a_config(algorithm={"advantage": "gae", "critic": {"learning_rate": 0.05, **(critic or {})}, **(algorithm or {})}, **more)


class Run:
    """The compiled update of a config and its state; a call is one step."""

    def __init__(self, config, strategy_list=(), ref=False):
        self.config = config
        self.mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        self.parts = (MODEL, policy_optimizer(config), strategies.build(list(strategy_list)), self.mesh, make_critic(config, MODEL))
        params = init_params(MODEL, KEY)
        params = jax.device_put(params, shardings(self.mesh, param_axes(MODEL), params))
        self.ref = jax.tree.map(lambda x: x * 1.01, params) if ref else None
        self.update = make_update(MODEL, config, self.parts[2], self.parts[1], self.mesh)
        self.state = init_state(params, *self.parts)

    def __call__(self, batch):
        batch = batch.replace(policy_step=np.full(B, int(self.state.step), np.int32))
        self.state, sums = self.update(self.state, batch, jax.random.fold_in(KEY, int(self.state.step)), self.ref)
        return {k: (float(s), float(c)) for k, (s, c) in sums.items()}

    def put_back(self, saved):
        self.state = jax.device_put(saved, jax.tree.map(lambda x: x.sharding, self.state))


def host(tree):
    return jax.tree.map(np.array, tree)  # copies: the update gives its input away


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@functools.cache
def case():
    """A batch with an unknown row, strategy weights 0 and not 0, and a head that has learned something."""
    rng = np.random.default_rng(5)
    valid = np.ones(B, bool)
    valid[7] = False
    head = {"weight": 10 * rng.normal(size=MODEL.hidden_size).astype(np.float32), "bias": np.float32(0.2)}
    return a_batch(seed=5, rewards=rng.random(B).astype(np.float32), valid=valid), head


def both(config, dtype):
    """``(policy gradient, head gradient, plan)`` by the update's own passes, in this dtype."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"compute_dtype": dtype})})
    batch, head = case()
    mesh, strategy = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor), strategies.build(["topk"])
    params = jax.tree.map(lambda x: x.astype(dtype), init_params(MODEL, KEY))
    params = jax.device_put(params, shardings(mesh, param_axes(MODEL), params))
    head = jax.tree.map(lambda x: x.astype(dtype), head)

    def passes(params, head):
        mask = response_mask(batch.prompt_length, batch.response_length, T) & jnp.asarray(batch.valid)[:, None]
        value, _ = start_of_step(params, head, MODEL, config, batch, mask, with_logprob=False)
        plan, _, _ = make_coefficients(batch, jnp.int32(0), strategy.init(), config.algorithm, strategy, G, False, value=value)
        if dtype == "float64":
            plan = plan._replace(weight=plan.weight.astype(dtype))
        return *gradients(params, batch, plan, jnp.ones(B, bool), None, None, MODEL, config, head)[:2], plan

    with jax.set_mesh(mesh):
        return host(jax.jit(passes)(params, head))


@functools.cache
def wanted():
    """The same in float64: every row, padded, in one pass; values, GAE and loss written out again."""
    batch, head = case()
    c = ppo().algorithm.critic
    mask = np.asarray(response_mask(batch.prompt_length, batch.response_length, T)) & batch.valid[:, None]

    def hidden_of(params):
        return forward(params, MODEL, jnp.asarray(batch.tokens), jnp.broadcast_to(jnp.arange(T), (B, T)), compute_dtype=jnp.float64)[0]

    def values(head, hidden):
        rms = jnp.sqrt(jnp.mean(hidden**2, -1, keepdims=True) + 1e-6)
        return jnp.pad(jnp.mean(hidden / rms * head["weight"], -1) + head["bias"], ((0, 0), (1, 0)))[:, :T]

    def loss(weights, old, advantage, weight):
        params, head = weights
        hidden = hidden_of(params)
        logp = jax.nn.log_softmax(hidden[:, :-1] @ head_matrix(params, MODEL).T)
        logprob = jnp.pad(jnp.take_along_axis(logp, jnp.asarray(batch.tokens)[:, 1:, None], 2)[..., 0], ((0, 0), (1, 0)))
        kept = mask & (weight > 0)
        policy = -jnp.sum(jnp.where(kept, weight * advantage * jnp.exp(logprob - jax.lax.stop_gradient(logprob)), 0)) / kept.sum()
        returns = jnp.asarray(batch.reward, jnp.float64)[:, None]  # gamma = lambda = 1, reward at the end
        of = lambda head, hidden: jnp.sum(jnp.where(mask, (values(head, hidden) - returns) ** 2 / 2, 0)) / mask.sum()  # noqa: E731
        fixed = jax.lax.stop_gradient
        return policy + of(head, fixed(hidden)) + c.coef * of(fixed(head), hidden)

    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype("float64"), init_params(MODEL, KEY))
        head = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), head)
        old = host(values(head, hidden_of(params)))
        raw = np.where(mask, batch.reward[:, None] - old, 0)
        advantage = np.where(mask, (raw - raw[mask].mean()) / (raw[mask].std() + 1e-6), 0)
        size = np.abs(advantage).sum(1) / np.maximum(mask.sum(1), 1)
        kept = np.zeros(B, bool)
        kept[np.argsort(-np.where(batch.valid, size, -1), kind="stable")[:8]] = True  # topk: half of the 15 known rows, to even
        weight = np.where(mask & kept[:, None], 1.0, 0)
        return *host(jax.jit(jax.grad(loss))((params, head), old, advantage, weight)), advantage, old, kept


@pytest.mark.parametrize("layout", [pytest.param(dict(micro=4, train={"packing": False}), marks=pytest.mark.slow), dict(micro=8, mesh=(2, 2, 2))], ids=str)
def test_gradients_of_float32(layout):
    policy, head, advantage, old, kept = wanted()
    got_policy, got_head, plan = both(ppo(**layout), "float32")
    assert np.array_equal(np.any(plan.weight > 0, 1), kept) and np.array_equal(plan.live, case()[0].valid)
    np.testing.assert_allclose(plan.advantage, advantage, atol=2e-5)
    np.testing.assert_allclose(plan.value, np.where(plan.mask, old, 0), atol=1e-5)
    assert distance(policy, got_policy) < 1e-5 and distance(head, got_head) < 1e-5


def test_gradients_of_float64_in_packed_chunks():
    policy, head, *_ = wanted()
    with jax.enable_x64(True):
        got_policy, got_head, _ = both(ppo(micro=4), "float64")
    assert distance(head, got_head) < 2e-7 and distance(policy, got_policy) < 2e-7  # rewards and whitening are float32


@pytest.mark.slow
def test_steps_agree_between_layouts():
    """Three steps of two updates each: states, values and metrics."""
    more = dict(algorithm={"kl_coef": 0.1, "kl_in_reward": True}, critic={"lam": 0.9, "gamma": 0.99, "learning_rate": 1.0},
                optimizer={"learning_rate": 1.0, "eps": 1.0})  # a large eps: rounding is not blown up to whole steps of Adam
    train = {"updates_per_batch": 2}
    one = Run(ppo(**more, micro=16, train=train), ref=True)
    eight = Run(ppo(**more, micro=4, mesh=(2, 2, 2), train={**train, "packing": False}), ref=True)
    for seed in range(3):
        sums, sums8 = one(a_batch(seed)), eight(a_batch(seed))
        for name, (total, count) in sums.items():
            assert sums8[name] == pytest.approx((total, count), rel=2e-3, abs=2e-3), name
    assert distance(host(one.state.params), host(eight.state.params)) < 1e-4
    assert distance(host(one.state.critic["head"]), host(eight.state.critic["head"])) < 1e-3
    assert int(one.state.opt_state[1][0].count) == int(one.state.critic["opt_state"][1][0].count) == 6
    assert one.update.jitted._cache_size() == 1 and sums["update/live_rows"] == (16, 16)
    assert all(np.isfinite(v) for pair in sums.values() for v in pair)


@pytest.fixture(scope="module")
def warm():
    """Two steps of warm-up, then one with the policy, of two updates each: states before and after."""
    run = Run(ppo({"warmup_steps": 2, "coef": 0.5}, train={"updates_per_batch": 2}), ["difffilter"])
    states = [host(run.state)]
    sums = []
    for seed in range(3):
        sums.append(run(a_batch(seed)))
        states.append(host(run.state))
    return run, states, sums


def test_warm_up_leaves_the_policy_bit_for_bit(warm):
    _, states, sums = warm
    assert same((states[0].params, states[0].opt_state), (states[2].params, states[2].opt_state))
    assert not same(states[0].critic, states[1].critic) and not same(states[1].critic, states[2].critic)
    assert not same(states[2].params, states[3].params) and states[3].opt_state[1][0].count + sums[2]["update/skipped_empty"][0] == 2
    assert all(s["update/skipped_nonfinite"][0] == 0 for s in sums) and states[3].step == 3 and states[3].critic["opt_state"][1][0].count == 6


def test_a_batch_without_kept_rows_teaches_the_critic_alone(warm):
    run, *_ = warm
    before = host(run.state)
    sums = run(a_batch(rewards=np.ones(B, np.float32)))  # difffilter drops groups that are all right
    assert sums["kept/rows"] == (0, 16) and sums["update/live_rows"] == (16, 16) and sums["update/skipped_empty"][0] == 2
    assert same(before.params, run.state.params) and same(before.opt_state, run.state.opt_state) and not same(before.critic, host(run.state.critic))


def test_rows_without_a_verdict_teach_nothing(warm):
    run, *_ = warm
    valid = np.arange(B) % 5 != 0
    batch = a_batch(valid=valid)
    junk = np.where(valid[:, None], batch.tokens, 7), np.where(valid, batch.reward, 9).astype(np.float32)
    before = host(run.state)
    sums = run(batch)
    after = host(run.state)
    run.put_back(before)
    assert sums == run(batch.replace(tokens=junk[0], reward=junk[1])) and same(after, host(run.state))
    assert sums["value/loss"][1] == np.asarray(batch.response_length)[valid].sum()
    before = host(run.state)
    sums = run(a_batch(valid=np.zeros(B, bool)))
    assert same((before.params, before.critic), host((run.state.params, run.state.critic))) and all(np.isfinite(v) for p in sums.values() for v in p)


def test_values_are_learned():
    """Each prompt has its own four tokens and a reward of its own: a linear head on a fixed decoder learns what to expect."""
    run = Run(ppo({"learning_rate": 0.1, "coef": 0.0, "warmup_steps": 999, "value_clip": None}))
    tokens = 4 * np.arange(N).repeat(G)[:, None] + np.random.default_rng(0).integers(0, 4, (B, T))
    batch = a_batch(rewards=np.repeat([0.1, 0.9, 0.4, 0.6], G).astype(np.float32), tokens=tokens.astype(np.int32))
    first = run(batch)
    assert first["value/mean"][0] == 0 and first["value/explained_variance"] == (pytest.approx(0, abs=1e-5), 1)
    for _ in range(100):
        sums = run(batch)
    assert sums["value/explained_variance"][0] > 0.9 and sums["value/loss"][0] / sums["value/loss"][1] < 0.005
    assert sums["value/mean"][0] / sums["value/mean"][1] == pytest.approx(sums["value/return"][0] / sums["value/return"][1], abs=0.02)
    constant = batch.replace(reward=np.full(B, 0.7, np.float32))
    for _ in range(100):
        sums = run(constant)
    assert sums["value/mean"][0] / sums["value/mean"][1] == pytest.approx(0.7, abs=0.02) and sums["value/explained_variance"][1] == 0


def test_strategies_see_advantages_of_tokens():
    sums = Run(ppo(algorithm={"restandardise": True}), ["maxvar", "per", "ar"])(a_batch())
    assert all(np.isfinite(v) for pair in sums.values() for v in pair) and sums["update/grad_norm"][0] > 0
    assert sums["update/live_rows"] == (16, 16) and sums["advantage/abs_mean"][1] == np.asarray(a_batch().response_length).sum()


@pytest.mark.slow
def test_single_samples():
    run = Run(ppo(rollout={"samples_per_prompt": 1}, train={"prompts_per_step": B}), ["softmax"])
    sums = run(a_batch(domain=np.zeros(B, np.int32)))
    assert sums["update/grad_norm"][0] > 0 and sums["effective/groups"] == (0, 16) and sums["kept/rows"] == (16, 16)


class OldState(struct.PyTreeNode):
    """What was saved before there was a critic."""

    step: object
    params: object
    opt_state: object
    strategy_state: object


def test_checkpoints_with_and_without_a_critic(warm, tmp_path):
    run, *_ = warm
    with_critic = Checkpoints(tmp_path / "a", 3)
    with_critic.save(1, run.state, {}, {}, None)
    with_critic.wait()
    saved = host(run.state)
    got, _, _ = with_critic.restore(abstract_state(*run.parts), {})
    assert same(saved, host(got)) and jax.tree.structure(got) == jax.tree.structure(run.state)
    run(a_batch(8))
    after = host(run.state)
    run.state = got
    run(a_batch(8))
    assert same(after, host(run.state))  # goes on bit for bit
    with_critic.close()

    plain = Run(a_config())
    fields = {f.name: getattr(plain.state, f.name) for f in dataclasses.fields(OldState)}
    import orbax.checkpoint as ocp

    old = Checkpoints(tmp_path / "b", 3)
    old.manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(OldState(**fields)), record=ocp.args.JsonSave({})))
    old.save(2, plain.state, {}, {}, None)
    old.wait()
    for step in (1, 2):
        got, _, _ = old.restore(abstract_state(*plain.parts), {}, step)
        assert got.critic is None and same(host(plain.state), host(got)), step
    old.close()
