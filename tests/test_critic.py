"""The critic's formulas against plain loops; what its configuration refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import a_batch

from rlvr_jax import config as C
from rlvr_jax import critic
from rlvr_jax.run_folder import refuse_changes
from rlvr_jax.train import train
from rlvr_jax.types import response_mask


def rows(seed=0, B=6, T=11):
    """Random rewards and values of ragged responses, one of them empty."""
    rng = np.random.default_rng(seed)
    start = rng.integers(1, 4, B)
    length = np.array([0, 1, *rng.integers(1, T - 4, B - 2)])
    t = np.arange(T)
    mask = (t >= start[:, None]) & (t < (start + length)[:, None])
    return rng.normal(size=(B, T)), rng.normal(size=(B, T)), mask


def loop(reward, value, mask, gamma, lam):
    advantage, returns = np.zeros(reward.shape), np.zeros(reward.shape)
    for b in range(len(reward)):
        carried, after = 0.0, 0.0
        for t in reversed(np.flatnonzero(mask[b])):
            delta = reward[b, t] + gamma * after - value[b, t]
            carried = delta + gamma * lam * carried
            advantage[b, t], returns[b, t] = carried, carried + value[b, t]
            after = value[b, t]
    return advantage, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.8)])
def test_gae_is_the_loop(gamma, lam):
    for seed in range(5):
        reward, value, mask = rows(seed)
        for got, wanted in zip(jax.jit(critic.gae, static_argnums=(3, 4))(reward, value, mask, gamma, lam), loop(reward, value, mask, gamma, lam)):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
            assert np.all(np.asarray(got)[~mask] == 0)


def test_gae_of_a_long_row_is_exact_in_float64():
    rng = np.random.default_rng(1)
    reward, value, mask = rng.normal(size=(1, 5000)), rng.normal(size=(1, 5000)), np.ones((1, 5000), bool)
    with jax.enable_x64(True):
        for got, wanted in zip(critic.gae(reward, value, mask, 0.999, 0.99), loop(reward, value, mask, 0.999, 0.99)):
            np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)


def test_the_reward_stands_at_the_last_token_and_the_kl_at_each():
    batch = a_batch()
    mask = response_mask(batch.prompt_length, batch.response_length, 16) & (np.arange(16) != 3)[:, None]  # row 3 has no verdict
    kl = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    got = np.asarray(critic.token_rewards(batch, mask, kl))
    wanted = -kl * np.asarray(mask)
    for b in range(16):
        wanted[b, batch.prompt_length[b] + batch.response_length[b] - 1] += batch.reward[b] * (b != 3)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_whitening_is_over_the_masked_tokens_alone():
    advantage, _, mask = rows(3)
    got = np.asarray(critic.whiten(jnp.float32(advantage), mask))
    assert got[mask].mean() == pytest.approx(0, abs=1e-6) and got[mask].std() == pytest.approx(1, abs=1e-4)
    assert np.array_equal(got, critic.whiten(jnp.float32(np.where(mask, advantage, 1e9)), mask))
    assert np.all(np.asarray(critic.whiten(jnp.full((2, 3), 0.1), jnp.ones((2, 3), bool))) == 0)  # not noise over a tiny deviation
    assert np.all(np.asarray(critic.whiten(jnp.ones((2, 3)), jnp.zeros((2, 3), bool))) == 0)


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_and_gradient_in_float64(clip):
    """Against a loop over the tokens, and its gradient by hand."""
    rng = np.random.default_rng(0)
    n, D = 40, 12
    hidden, weight, old, returns = rng.normal(size=(n, D)), rng.normal(size=D) * 3, rng.normal(size=n) * 0.3, rng.normal(size=n)
    scale = rng.random(n) * (rng.random(n) > 0.3)
    settings = C.Critic(value_clip=clip, coef=0.25)
    wanted, by_weight, by_hidden, clipped = 0.0, np.zeros(D), np.zeros((n, D)), 0
    for i in range(n):
        rms = np.sqrt(np.mean(hidden[i] ** 2) + 1e-6)
        value = hidden[i] @ weight / D / rms + 0.1
        near = value if clip is None or abs(value - old[i]) <= clip else old[i] + np.clip(value - old[i], -clip, clip)
        error, bounded = (value - returns[i]) ** 2, (near - returns[i]) ** 2
        wanted += scale[i] / 2 * max(error, bounded)
        clipped += scale[i] > 0 and bounded > error
        by_value = scale[i] * (value - returns[i]) * (error >= bounded)  # the clipped value is a constant
        by_weight += by_value * hidden[i] / D / rms
        by_hidden[i] = 0.25 * by_value * (weight / D / rms - hidden[i] * (hidden[i] @ weight) / D**2 / rms**3)
    with jax.enable_x64(True):
        head = {"weight": jnp.asarray(weight), "bias": jnp.asarray(0.1)}
        f = lambda head, hidden: critic.value_loss(head, hidden, old, returns, scale, settings)  # noqa: E731
        (total, stats), (of_head, of_hidden) = jax.value_and_grad(f, (0, 1), has_aux=True)(head, jnp.asarray(hidden))
    assert total == pytest.approx(wanted, rel=1e-12)
    np.testing.assert_allclose(of_head["weight"], by_weight, rtol=1e-10)
    np.testing.assert_allclose(of_hidden, by_hidden, rtol=1e-9, atol=1e-12)
    assert stats["value/clip_fraction"] == (clipped, (scale > 0).sum()) and (clipped > 5) == (clip is not None)


def test_a_frozen_decoder_gets_no_gradient_at_all():
    settings = C.Critic(coef=0.0)
    head, ones = {"weight": jnp.ones(4), "bias": jnp.float32(0)}, jnp.ones(3)
    of_hidden = jax.grad(lambda h: critic.value_loss(head, h, 0 * ones, ones, ones, settings)[0])(jax.random.normal(jax.random.key(0), (3, 4)))
    assert np.all(np.asarray(of_hidden) == 0)


def test_explained_variance():
    _, returns, mask = rows(4)
    ev = lambda value, returns: critic.start_metrics(jnp.asarray(value), jnp.asarray(returns), jnp.asarray(mask))["value/explained_variance"]  # noqa: E731
    assert ev(returns, returns) == (1, 1) and ev(0 * returns, returns)[0] == pytest.approx(0, abs=1e-6)
    half = returns + np.random.default_rng(0).normal(size=returns.shape)
    assert ev(half, returns)[0] == pytest.approx(1 - np.var((returns - half)[mask]) / np.var(returns[mask]), rel=1e-4)
    assert ev(returns, np.ones(returns.shape)) == (0, 0)  # equal returns explain nothing: no value


@pytest.mark.parametrize(("overrides", "words"), [
    (["algorithm.critic.gamma=0.9"], ["'critic'", "'gae'", "'grpo'"]),
    (["algorithm.advantage=gae", "algorithm.critic.gamma=1.1"], ["algorithm.critic.gamma", "1.1"]),
    (["algorithm.advantage=gae", "algorithm.critic.lambda=1"], ["algorithm.critic.lambda", "'algorithm.critic.lam'"]),
    (["algorithm.advantage=gae", "algorithm.critic.value_clip=0"], ["algorithm.critic.value_clip"]),
    (["algorithm.advantage=gae", "algorithm.vf_coef=1"], ["algorithm.vf_coef", "'algorithm.critic.coef'"]),
    (["algorithm.advantage=ppo"], ["algorithm.advantage", "'gae'"]),
])
def test_a_wrong_critic_is_one_line(overrides, words):
    with pytest.raises(C.ConfigError) as e:
        C.load(None, overrides)
    assert "\n" not in str(e.value) and all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize(("overrides", "word"), [
    (["algorithm.critic.warmup_steps=100"], "warmup_steps"), (["data.mixer.name=dump_ucb"], "dump_ucb"),
    (["rollout.samples_per_prompt=1", "replay.kind=popo"], "replay"), (["rollout.samples_per_prompt=1", "dynamic_sampling={}"], "dynamic_sampling"),
    (["rollout.samples_per_prompt=1", "data.prompts.kind=greso"], "greso"),
])
def test_what_makes_no_sense_with_a_critic_is_refused_before_training(overrides, word):
    config = C.load(None, ["algorithm.advantage=gae", *overrides])
    with pytest.raises(C.ConfigError, match=word):
        C.check_for_training(config)


def test_a_critic_needs_no_groups():
    C.check_for_training(C.load(None, ["algorithm.advantage=gae", "rollout.samples_per_prompt=1"]))
    C.check_for_training(C.load(None, ["algorithm.advantage=gae", "replay.kind=popo", "data.mixer.name=tscl", "data.prompts.kind=mopps"]))


def test_strategies_that_compare_samples_need_some(tmp_path):
    tree = {"algorithm": {"advantage": "gae"}, "rollout": {"samples_per_prompt": 1}, "run_dir": str(tmp_path / "run")}
    with pytest.raises(C.ConfigError, match="strategies: they compare the samples of one prompt"):
        train({**tree, "strategies": ["difffilter"]})
    assert not (tmp_path / "run").exists()


def test_a_run_begun_before_there_was_a_critic_goes_on():
    config = C.load(None, ["replay.capacity=4"])
    saved = config.model_dump(mode="json")
    del saved["algorithm"]["critic"], saved["algorithm"]["off_policy"], saved["replay"]["reservoir"], saved["dynamic_sampling"]
    refuse_changes(saved, config)
    saved["algorithm"]["advantage"] = "rloo"
    with pytest.raises(C.ConfigError, match="begun with algorithm"):
        refuse_changes(saved, config)
