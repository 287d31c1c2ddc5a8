"""Rows that other weights sampled: the decoupled objective, its ablations, and what an importance weight above the cap becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import G, N, a_batch, a_config, run

from rlvr_jax import losses
from rlvr_jax.config import Algorithm
from rlvr_jax.kernels.token_logprob.objective import importance_weight, policy_objective

B, T = 4, 9
MASK = np.arange(T) < np.array([9, 1, 5, 3])[:, None]
STALE = np.array([False, True, True, False])


def inputs(seed=0, spread=0.4, **changes):
    rng = np.random.default_rng(seed)
    base = -rng.exponential(size=(B, T))
    near = lambda: (base + spread * rng.normal(size=(B, T))).astype(np.float32)  # noqa: E731
    x = dict(logprob=near(), old_logprob=near(), behavior_logprob=near(), advantage=rng.normal(size=B).astype(np.float32),
             weight=np.ones((B, T), np.float32), mask=MASK, on_policy=~STALE, fresh=~STALE)
    return {k: None if v is None else jnp.asarray(v) for k, v in (x | changes).items()}


def loss(x, **algorithm):
    """(loss of each token, gradient of their sum for the policy's log-probabilities, statistics)."""
    f = lambda logprob: policy_objective(losses.objective_of(Algorithm(**algorithm)), **(x | {"logprob": logprob}))  # noqa: E731
    (per_token, stats), grad = f(x["logprob"]), jax.grad(lambda p: jnp.sum(f(p)[0]))(x["logprob"])
    return np.asarray(per_token), np.asarray(grad), {k: (float(a), float(b)) for k, (a, b) in stats.items()}


def same(a, b):
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1], b[1])


# ---- decoupled ----

def test_the_weight_is_old_over_behaviour():
    x = inputs()
    w, capped = importance_weight(x["old_logprob"], x["behavior_logprob"], x["mask"])
    want = np.exp(np.asarray(x["old_logprob"], np.float64) - np.asarray(x["behavior_logprob"], np.float64))
    np.testing.assert_allclose(np.asarray(w)[MASK], want[MASK], rtol=1e-6)
    assert not np.any(capped)


@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
def test_the_ratio_is_1_at_the_first_update(objective, level):
    """One update per batch: old is the policy itself, for fresh and replayed rows alike, and only w tells them apart."""
    x = inputs(old_logprob=None)
    _, grad, stats = loss(x, objective=objective, is_level=level, is_cap=None)
    assert stats["ratio"][0] == stats["ratio"][1] and stats["ratio_max"][0] == 1 and stats["approx_kl"][0] == 0
    assert stats["clip_low_fraction"][0] == stats["clip_high_fraction"][0] == 0
    w, _ = importance_weight(x["logprob"], x["behavior_logprob"], x["mask"], level=level, fresh=x["on_policy"])
    np.testing.assert_allclose(grad, -np.asarray(w * x["advantage"][:, None]) * MASK, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [{}, {"is_cap": None}, {"is_mode": "mask"}, {"objective": "gspo"}, {"objective": "cispo"}, {"is_level": "sequence_sum"}], ids=str)
@pytest.mark.parametrize("updates", ["first", "later"])
def test_with_behaviour_equal_to_old_it_is_grpo_bit_for_bit(algorithm, updates):
    x = inputs(on_policy=np.zeros(B, bool), fresh=np.zeros(B, bool))
    old = x["old_logprob"] if updates == "later" else None
    x |= {"old_logprob": old, "behavior_logprob": x["logprob"] if old is None else old}
    grpo = loss(x | {"behavior_logprob": None}, **algorithm)
    assert np.any(grpo[0] != 0)
    for off_policy in ("decoupled", "naive", "behaviour"):
        same(loss(x, off_policy=off_policy, **algorithm), grpo)


def test_decoupled_uncapped_is_the_one_ratio_form():
    """min(R A, clip(R, (1 - low) w, (1 + high) w) A), R = policy / behaviour."""
    x = inputs(on_policy=np.zeros(B, bool))
    per_token, _, _ = loss(x, is_cap=None, clip_low=0.2, clip_high=0.28)
    v = {k: np.asarray(x[k], np.float64) for k in ("logprob", "old_logprob", "behavior_logprob", "advantage")}
    R_, w, A = np.exp(v["logprob"] - v["behavior_logprob"]), np.exp(v["old_logprob"] - v["behavior_logprob"]), v["advantage"][:, None]
    np.testing.assert_allclose(per_token, -np.minimum(R_ * A, np.clip(R_, 0.8 * w, 1.28 * w) * A) * MASK, rtol=1e-6, atol=1e-6)


# ---- ablations ----

@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo"])
def test_naive_treats_replayed_rows_as_on_policy(objective):
    x = inputs()
    naive = loss(x, off_policy="naive", objective=objective)
    same(naive, loss(x | {"on_policy": jnp.ones(B, bool)}, objective=objective))
    assert np.any(naive[0] != loss(x, objective=objective)[0]) and naive[2]["is_weight"][0] == MASK.sum()


@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo"])
def test_behaviour_clips_around_what_sampled_the_rows(objective):
    x = inputs()
    got = loss(x, off_policy="behaviour", objective=objective, clip_low=0.1, clip_high=0.2)
    around = jnp.where(STALE[:, None], x["behavior_logprob"], x["old_logprob"])
    same(got, loss(x | {"old_logprob": around, "behavior_logprob": None}, objective=objective, clip_low=0.1, clip_high=0.2))
    if objective == "clip":  # by hand, one ratio
        r = np.exp(np.asarray(x["logprob"], np.float64) - np.asarray(around, np.float64))
        A = np.asarray(x["advantage"], np.float64)[:, None]
        np.testing.assert_allclose(got[0], -np.minimum(r * A, np.clip(r, 0.9, 1.2) * A) * MASK, rtol=1e-6, atol=1e-6)
    assert got[2]["logprob_gap"] == loss(x, objective=objective)[2]["logprob_gap"], "the gap is measured against old, whatever is clipped around"


def test_behaviour_stops_the_gradient_of_far_rows_at_the_first_update_and_decoupled_does_not():
    x = inputs(old_logprob=None, advantage=np.ones(B, np.float32))
    x["behavior_logprob"] = x["logprob"] - 1.0  # the policy has since raised these tokens by e
    assert np.all(loss(x, off_policy="behaviour")[1][STALE] == 0)
    np.testing.assert_allclose(loss(x)[1][STALE], -2.0 * MASK[STALE], rtol=1e-6)
    np.testing.assert_array_equal(loss(x, off_policy="naive")[1], -1.0 * MASK)


# ---- cap, mask, none; statistics ----

def test_above_the_cap_a_weight_is_capped_masked_or_kept():
    old, zero = jnp.log(jnp.asarray([[0.5, 3.0, 1.0], [4.0, 4.0, 0.25]])), jnp.zeros((2, 3))
    mask = jnp.asarray([[True, True, False], [True, True, True]])
    for level, mode, cap, want in (("token", "mask", 2.0, [[0.5, 0, 1], [0, 0, 0.25]]), ("token", "cap", 2.0, [[0.5, 2, 1], [2, 2, 0.25]]),
                                   ("token", "mask", None, [[0.5, 3, 1], [4, 4, 0.25]]), ("sequence_sum", "mask", 2.0, [[1.5, 1.5, 1], [0, 0, 0]])):
        w, capped = importance_weight(old, zero, mask, level=level, mode=mode, cap=cap)
        np.testing.assert_allclose(w, want, rtol=1e-6)
        assert np.array_equal(capped, np.zeros((2, 3)) if cap is None else [[False, level == "token", False], [True, True, level != "token"]])
    w, capped = importance_weight(old, zero, mask, mode="mask", cap=0.1, fresh=jnp.asarray([True, False]))
    assert np.all(np.asarray(w[0]) == 1) and np.all(np.asarray(w[1]) == 0) and not np.any(capped[0])
    with pytest.raises(ValueError, match="mode 'drop' is not known"):
        importance_weight(old, zero, mask, mode="drop")
    with pytest.raises(ValueError, match="off_policy 'none' is not known"):
        policy_objective(losses.objective_of(Algorithm())._replace(off_policy="none"), **inputs())


def test_a_masked_row_has_no_policy_gradient():
    x = inputs(advantage=np.ones(B, np.float32))
    x["behavior_logprob"] = x["old_logprob"] - 2.0
    per_token, grad, stats = loss(x, is_mode="mask", is_level="sequence_mean")
    assert np.all(grad[STALE] == 0) and np.all(per_token[STALE] == 0) and np.any(grad[~STALE] != 0)
    assert stats["is_capped"] == (MASK[STALE].sum(), MASK.sum()) and stats["stale_weight"] == (0, MASK[STALE].sum())


def test_statistics_of_the_replayed_tokens():
    x = inputs()
    stats = loss(x, is_cap=1.2)[2]
    w = np.minimum(np.exp(np.asarray(x["old_logprob"], np.float64) - np.asarray(x["behavior_logprob"], np.float64)), 1.2)[MASK & STALE[:, None]]
    assert stats["stale_weight"] == (pytest.approx(w.sum(), rel=1e-5), len(w)) and stats["stale_weight_sq"][0] == pytest.approx((w**2).sum(), rel=1e-5)
    assert loss(x | {"fresh": None, "on_policy": None})[2]["stale_weight"] == (0, 0), "nothing is said to be old"


# ---- through the update ----

def test_the_update_reports_the_replayed_rows():
    """The first group was sampled three steps ago; the policy has moved since."""
    _, _, metrics = run(a_config(algorithm={"is_cap": None}), a_batch(policy_step=np.where(np.arange(N * G) < G, -3, 0).astype(np.int32)))
    w, n = metrics["replay/ess"]
    assert 0 < w / n < 1 - 1e-6 and metrics["replay/is_weight"][1] == a_batch().response_length[:G].sum()
    assert metrics["policy/is_capped"][0] == 0 and "policy/stale_weight" not in metrics
