"""The update: exact under micro-batching, sharding and skipping; defined on empty and broken batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import KEY, MODEL, G, N, P, R, a_batch, a_config, distance, run

from rlvr_jax import strategies
from rlvr_jax.kernels.token_logprob.blocks import LOGITS_PER_CHUNK
from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix, init_params, param_axes
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.state import init_state, make_optimizer
from rlvr_jax.update import make_update

KINDS = [{}, {"aggregation": "sequence_mean"}, {"aggregation": "sequence_sum_const", "advantage": "dr_grpo"}, {"loss_denominator": "all"}]


@pytest.mark.parametrize(("algorithm", "micro"), [(KINDS[0], 1), (KINDS[0], 2), *((k, 2) for k in KINDS[1:])], ids=str)
def test_any_micro_batch_gives_the_same_gradient(algorithm, micro):
    _, whole, _ = run(a_config(algorithm=algorithm), a_batch())
    _, parts, _ = run(a_config(micro=micro, algorithm=algorithm), a_batch())
    assert distance(whole, parts) < 1e-6


def test_eight_devices_give_the_same_gradient():
    _, one, sums = run(a_config(), a_batch(), strategy_list=["softmax"])
    _, eight, sums8 = run(a_config(mesh=(2, 2, 2), micro=4), a_batch(), strategy_list=["softmax"])
    assert distance(one, eight) < 1e-5
    for name, (total, count) in sums.items():
        assert sums8[name] == pytest.approx((total, count), rel=1e-4, abs=1e-5), name


def test_skipped_rows_change_nothing():
    """Against a full-batch reference that computes every row, in plain jnp and autodiff."""
    batch = a_batch()
    reward = jnp.asarray(batch.reward).reshape(N, G)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
    advantage = jnp.where(reward.max(1, keepdims=True) == reward.min(1, keepdims=True), 0, advantage).reshape(-1)
    t = np.arange(P + R)
    mask = jnp.asarray((t >= batch.prompt_length[:, None]) & (t < (batch.prompt_length + batch.response_length)[:, None]))

    def loss(params):
        position = jnp.broadcast_to(jnp.asarray(t), batch.tokens.shape)
        hidden, _ = forward(params, MODEL, batch.tokens, position)
        logits = jax.nn.log_softmax(hidden[:, :-1] @ head_matrix(params, MODEL).T)
        logprob = jnp.pad(jnp.take_along_axis(logits, jnp.asarray(batch.tokens)[:, 1:, None], 2)[..., 0], ((0, 0), (1, 0)))
        ratio = jnp.exp(logprob - jax.lax.stop_gradient(logprob))
        return -jnp.sum(ratio * advantage[:, None] * mask) / jnp.sum(mask)

    wanted = jax.tree.map(np.asarray, jax.grad(loss)(init_params(MODEL, KEY)))
    for packing in (True, False):
        _, got, sums = run(a_config(micro=4, train={"packing": packing}), batch)
        assert distance(wanted, got) < 1e-5
    assert sums["update/live_rows"] == (8, 16)  # two of four groups are ineffective: neither forward nor backward
    assert sums["kept/rows"] == (16, 16)  # and still count


def test_dropped_rows_leave_the_denominator():
    batch = a_batch()
    _, grads, sums = run(a_config(), batch, strategy_list=[{"select": "band", "score": "solve_rate", "low": 0.3, "high": 0.7}])
    assert sums["kept/groups"] == (1, 4)
    only = a_batch(valid=np.arange(N * G) < G)
    _, alone, _ = run(a_config(), only)
    assert distance(alone, grads) < 1e-6


def test_a_token_weight_reaches_the_gradient():
    probable = np.random.default_rng(1).uniform(-6, 0, (N * G, P + R)).astype(np.float32)
    _, plain, _ = run(a_config(), a_batch(logprob=probable))
    _, damped, sums = run(a_config(), a_batch(logprob=probable), strategy_list=["ar"])
    assert distance(plain, damped) > 1e-3
    assert sums["strategy/weight_mean"][0] / sums["strategy/weight_mean"][1] == pytest.approx(1, abs=1e-5)


def test_nothing_to_learn_is_a_defined_step():
    config, before = a_config(), init_params(MODEL, KEY)
    strategy, optimizer, mesh = strategies.build([]), make_optimizer(config.optimizer, 10), make_mesh()
    update = make_update(MODEL, config, strategy, optimizer, mesh)
    for changes in ({"reward": np.zeros(N * G, np.float32)}, {"reward": np.full(N * G, 0.1, np.float32)}, {"valid": np.zeros(N * G, bool)},
                    {"response_length": np.zeros(N * G, np.int32)}):
        state, pairs = update(init_state(init_params(MODEL, KEY), MODEL, optimizer, strategy, mesh), a_batch(**changes), KEY)
        sums = {k: (float(s), float(c)) for k, (s, c) in pairs.items()}
        assert sums["update/skipped_empty"][0] == 1 and int(state.step) == 1, changes
        assert all(np.isfinite(v) for pair in sums.values() for v in pair), changes
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params))), changes
        assert int(state.opt_state[1][0].count) == 0, changes


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    params = init_params(MODEL, KEY)
    params["final_norm"] = params["final_norm"].at[0].set(jnp.nan)
    state, _, sums = run(a_config(), a_batch(), params=params)
    assert sums["update/skipped_nonfinite"][0] == 1 and int(state.opt_state[1][0].count) == 0
    assert np.isfinite(np.asarray(state.params["embed"])).all()


def test_unknown_rows_teach_nothing_and_count_nothing():
    valid = np.ones(N * G, bool)
    valid[1] = False
    _, grads, sums = run(a_config(), a_batch(valid=valid))
    tokens = a_batch(valid=valid).tokens.copy()
    tokens[1] = 7
    _, other, _ = run(a_config(), a_batch(valid=valid, tokens=tokens))
    assert distance(grads, other) == 0 and sums["kept/rows"] == (15, 15)


def test_kl_pulls_towards_the_reference_and_not_from_dropped_rows():
    algorithm = {"kl_coef": 0.5}
    _, grads, sums = run(a_config(algorithm=algorithm), a_batch(), ref=True)
    _, plain, _ = run(a_config(), a_batch())
    assert distance(plain, grads) > 1e-3 and sums["update/live_rows"] == (16, 16) and sums["policy/kl"][0] > 0
    band = [{"select": "band", "score": "solve_rate", "low": 0.0, "high": 1.0}]
    tokens = a_batch().tokens.copy()
    tokens[G:2 * G] = 5  # an all-right group, filtered
    _, kept, _ = run(a_config(algorithm=algorithm), a_batch(), strategy_list=band, ref=True)
    _, changed, _ = run(a_config(algorithm=algorithm), a_batch(tokens=tokens), strategy_list=band, ref=True)
    assert distance(kept, changed) == 0


def test_kl_in_the_reward_keeps_ineffective_groups_silent():
    _, _, sums = run(a_config(algorithm={"kl_coef": 0.5, "kl_in_reward": True}), a_batch(), ref=True)
    assert sums["update/live_rows"] == (8, 16)


def test_reference_params_exactly_when_there_is_a_kl():
    with pytest.raises(ValueError, match="ref_params"):
        run(a_config(algorithm={"kl_coef": 0.5}), a_batch())


def test_the_entropy_bonus_reaches_rows_without_advantage():
    _, _, sums = run(a_config(algorithm={"entropy_coef": 0.1}), a_batch(reward=np.zeros(N * G, np.float32)))
    assert sums["update/grad_norm"][0] > 0 and sums["update/skipped_empty"][0] == 0


def test_several_updates_per_batch_use_the_old_policy():
    state, _, sums = run(a_config(train={"updates_per_batch": 2}), a_batch(rewards=np.tile([0, 1, 0, 1], N).astype(np.float32)))
    assert int(state.opt_state[1][0].count) == 2
    assert sums["ratio/max"][0] > 1.001  # the second mini-batch sees weights that have moved


def test_one_update_has_ratio_one_and_no_capped_weight():
    _, _, sums = run(a_config(), a_batch())
    assert sums["policy/ratio"][0] == sums["policy/ratio"][1] and sums["policy/is_weight"][0] == sums["policy/is_weight"][1]


def test_rows_of_an_older_policy_are_corrected():
    stale = a_batch(policy_step=np.full(N * G, -1, np.int32), behavior_logprob=np.full((N * G, P + R), -5.0, np.float32))
    _, _, sums = run(a_config(algorithm={"is_cap": None}), stale)
    assert sums["policy/is_weight"][0] / sums["policy/is_weight"][1] > 1.2


def test_loss_is_zero_and_gradient_is_not_at_ratio_one():
    _, _, sums = run(a_config(algorithm={"aggregation": "sequence_mean"}), a_batch(response_length=np.full(N * G, 4, np.int32)))
    assert abs(sums["update/loss"][0]) < 1e-6 and sums["update/grad_norm"][0] > 1e-3


def test_truncated_rows_can_be_masked():
    truncated = np.arange(N * G) % G == 1
    _, _, sums = run(a_config(algorithm={"mask_truncated": True}), a_batch(truncated=truncated))
    assert sums["kept/rows"] == (12, 16)


def test_no_recompilation_when_the_live_share_changes():
    config = a_config(micro=4)
    strategy, optimizer, mesh = strategies.build(["difffilter"]), make_optimizer(config.optimizer, 10), make_mesh()
    params = jax.device_put(init_params(MODEL, KEY), shardings(mesh, param_axes(MODEL)))  # as a model is loaded
    state = init_state(params, MODEL, optimizer, strategy, mesh)
    update = make_update(MODEL, config, strategy, optimizer, mesh)
    rng = np.random.default_rng(0)
    sizes = set()
    for i in range(6):
        state, sums = update(state, a_batch(seed=i, rewards=(rng.random(N * G) < i / 6).astype(np.float32)), KEY)
        sizes.add(float(sums["update/live_rows"][0]))
    assert len(sizes) > 2 and update.jitted._cache_size() == 1


def test_memory_does_not_grow_with_tokens_times_vocabulary(capsys):
    """Temporaries of the compiled update at two vocabularies and two batch sizes."""
    def temporaries(vocab, micro):
        model = DecoderConfig(vocab, 16, 32, 1, 2, 1, 8)
        config = a_config(micro=micro, rollout={"max_new_tokens": 120})
        strategy, optimizer, mesh = strategies.build([]), make_optimizer(config.optimizer, 10), make_mesh()
        state = init_state(init_params(model, KEY), model, optimizer, strategy, mesh)
        update = make_update(model, config, strategy, optimizer, mesh)
        B, T = N * G, 128
        batch = a_batch(tokens=np.zeros((B, T), np.int32), logprob=np.zeros((B, T), np.float32), behavior_logprob=np.zeros((B, T), np.float32))
        with jax.set_mesh(mesh):
            return update.jitted.lower(state, batch, KEY, None).compile().memory_analysis().temp_size_in_bytes

    small, large, few = temporaries(4096, 16), temporaries(65536, 16), temporaries(65536, 8)
    with capsys.disabled():
        print(f"\nupdate temporaries, MiB: V=4096 {small / 2**20:.1f}, V=65536 {large / 2**20:.1f}, V=65536 with half of the tokens {few / 2**20:.1f}")
    logits = 16 * 128 * 65536 * 4  # of one micro-batch: 512 MiB; what is held is one chunk's (here 32), forward and backward
    assert large - small < 2.2 * 4 * LOGITS_PER_CHUNK < logits / 4 and large - few < logits / 16
