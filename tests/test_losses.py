"""The policy objective against numpy written token by token, and the faults trainers had in it."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import losses
from rlvr_jax.advantages import advantages
from rlvr_jax.config import Algorithm
from rlvr_jax.kernels.token_logprob.objective import fold_stats, importance_weight, kl_estimate, policy_objective

B, T = 4, 7
LENGTHS = np.array([7, 1, 4, 2])
MASK = np.arange(T) < LENGTHS[:, None]
OBJECTIVES = ["clip", "gspo", "cispo"]
AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum_const"]


def batch(seed=0, spread=0.3, **changes):
    rng = np.random.default_rng(seed)
    base = -rng.exponential(size=(B, T))

    def near():
        return (base + spread * rng.normal(size=(B, T))).astype(np.float32)

    out = dict(logprob=near(), old_logprob=near(), behavior_logprob=near(), ref_logprob=near(),
               advantage=rng.normal(size=B).astype(np.float32), entropy=rng.exponential(size=(B, T)).astype(np.float32),
               weight=(rng.random((B, T)) + 0.5).astype(np.float32), mask=MASK)
    return {k: None if v is None else jnp.asarray(v) for k, v in {**out, **changes}.items()}


def finish(stats):
    """Means (maxima for '_max'), and ``ess``: ``(sum w)^2 / (n sum w^2)``, 1 when nothing is masked in."""
    out = {k: total if k.endswith("_max") else total / jnp.maximum(count, 1) for k, (total, count) in stats.items()}
    square = out.pop("is_weight_sq")
    out["ess"] = jnp.where(square > 0, out["is_weight"] ** 2 / jnp.where(square > 0, square, 1), 1)
    return out


def total(x, aggregation="token_mean", scale_mask=MASK, **cfg):
    """loss, per-token loss, statistics, d loss / d logprob, d loss / d entropy (or None). Eager: many configs, tiny arrays."""
    scale_mask = jnp.asarray(scale_mask)

    def loss(logprob, entropy):
        per_token, stats = policy_objective(losses.objective_of(Algorithm(**cfg)), **{**x, "logprob": logprob, "entropy": entropy})
        scale = losses.token_scale(aggregation, scale_mask, losses.denominator_counts(scale_mask), T)
        return jnp.sum(per_token * scale), (per_token, finish(stats))

    wanted = (0,) if x["entropy"] is None else (0, 1)
    (value, (per_token, stats)), grads = jax.value_and_grad(loss, wanted, has_aux=True)(x["logprob"], x["entropy"])
    d_logprob, d_entropy = (*(np.asarray(g) for g in grads), None)[:2]
    return float(value), np.asarray(per_token), {k: float(v) for k, v in stats.items()}, d_logprob, d_entropy


def plain_loss(cfg, x):
    """ALGORITHMS, one token at a time, in float64."""
    x = {k: None if v is None else np.asarray(v, np.float64) for k, v in x.items()}
    out = np.zeros((B, T))
    for b in range(B):
        n = LENGTHS[b]
        row = {k: v[b, :n] for k, v in x.items() if v is not None and v.ndim == 2}
        log_r = row["logprob"] - row["old_logprob"]
        log_w = row["old_logprob"] - row["behavior_logprob"]
        for t in range(n):
            A = x["advantage"][b]
            lw = {"token": log_w[t], "sequence_mean": log_w.mean(), "sequence_sum": log_w.sum()}[cfg.is_level]
            w = np.exp(lw) if cfg.is_cap is None else min(np.exp(lw), cfg.is_cap)
            r = np.exp(log_r.mean() if cfg.objective == "gspo" else log_r[t])
            c = np.clip(r, 1 - cfg.clip_low, 1 + cfg.clip_high)
            gain = c * A * row["logprob"][t] if cfg.objective == "cispo" else min(r * A, c * A)
            if cfg.dual_clip and A < 0 and cfg.objective != "cispo":
                gain = max(gain, cfg.dual_clip * A)
            d = row["ref_logprob"][t] - row["logprob"][t]
            kl = d * d / 2 if cfg.kl_estimator == "k2" else np.exp(d) - 1 - d
            out[b, t] = -row["weight"][t] * w * gain + cfg.kl_coef * kl - cfg.entropy_coef * row["entropy"][t]
    return out


CASES = [
    dict(), dict(clip_low=0.1, clip_high=0.28, is_cap=None), dict(objective="gspo", clip_low=0.05, clip_high=0.1), dict(objective="cispo", is_cap=1.1),
    dict(dual_clip=1.2), dict(is_level="sequence_mean"), dict(is_level="sequence_sum", is_cap=1.5), dict(kl_coef=0.1), dict(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01),
]


@pytest.mark.parametrize("cfg", CASES, ids=str)
def test_against_numpy(cfg):
    x = batch(seed=3, spread=0.4)
    loss, per_token, _, _, _ = total(x, **cfg)
    want = plain_loss(Algorithm(**cfg), x)
    np.testing.assert_allclose(per_token, want, rtol=2e-5, atol=2e-6)
    assert loss == pytest.approx(want.sum() / MASK.sum(), rel=1e-5)


def test_the_cases_reach_their_branches():
    # A dual clip or a cap that never bites would make the comparison above empty.
    x = batch(seed=3, spread=0.4)
    base = plain_loss(Algorithm(is_cap=None), x)
    for cfg in (dict(is_cap=None, dual_clip=1.2), dict(is_cap=1.5), dict(is_cap=None, clip_low=0.6, clip_high=0.9), dict(is_cap=None, is_level="sequence_sum")):
        assert np.abs(plain_loss(Algorithm(**cfg), x) - base).max() > 1e-3, cfg


def test_aggregations():
    mask = MASK.copy()
    mask[2] = False
    per_token = np.random.default_rng(1).normal(size=(B, T)) * mask
    counts = losses.denominator_counts(jnp.asarray(mask))
    want = {"token_mean": per_token.sum() / mask.sum(), "sequence_mean": np.mean([per_token[b].sum() / LENGTHS[b] for b in (0, 1, 3)]),
            "sequence_sum_const": per_token.sum() / (3 * 50)}
    for name, value in want.items():
        assert float(jnp.sum(per_token * losses.token_scale(name, jnp.asarray(mask), counts, 50))) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("aggregation, objective", list(zip(AGGREGATIONS, OBJECTIVES)))
def test_gradients_do_not_depend_on_micro_batches(aggregation, objective):
    # trl 3021, verl 5625 and 3741, levanter 842: ragged rows, global counts.
    x = batch(mask=MASK)
    cfg = Algorithm(objective=objective, kl_coef=0.1, entropy_coef=0.01)
    counts = losses.denominator_counts(x["mask"])

    @jax.jit
    def grad(part):
        def loss(logprob):
            per_token, stats = policy_objective(losses.objective_of(cfg), **{**part, "logprob": logprob})
            return jnp.sum(per_token * losses.token_scale(aggregation, part["mask"], counts, T)), stats

        return jax.grad(loss, has_aux=True)(part["logprob"])

    whole, whole_stats = grad(x)
    for size in (1, 2):
        parts = [grad({k: v[i:i + size] for k, v in x.items()}) for i in range(0, B, size)]
        np.testing.assert_allclose(np.concatenate([g for g, _ in parts]), whole, rtol=1e-6, atol=1e-9)
        merged = finish(fold_stats(jax.tree.map(lambda *x: jnp.stack(x), *(s for _, s in parts))))
        for k, v in finish(whole_stats).items():
            assert float(merged[k]) == pytest.approx(float(v), rel=1e-5, abs=1e-6), k


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dropped_rows_leave_the_loss_of_the_kept_rows(aggregation):
    # trl 6369: numerator and denominator follow one mask.
    kept = np.array([True, False, True, False])
    x = batch()
    dropped = {**x, "weight": x["weight"] * kept[:, None]}
    cfg = dict(kl_coef=0.1, entropy_coef=0.01)
    loss, _, _, grad, _ = total(dropped, aggregation, MASK & kept[:, None], **cfg)
    alone = {k: v[kept] for k, v in x.items()}
    want, _, _, want_grad, _ = total(alone, aggregation, MASK[kept], **cfg)
    assert loss == pytest.approx(want, rel=1e-6)
    np.testing.assert_allclose(grad[kept], want_grad, rtol=1e-6)
    # Averaged over all tokens instead, the same rows make a smaller step: the choice of the denominator shows.
    assert np.abs(total(dropped, aggregation, MASK, **cfg)[3]).sum() < 0.9 * np.abs(grad).sum()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_dropped_rows_have_no_kl_and_no_entropy_gradient(objective):
    # trl 7068: an advantage of 0 alone does not stop the KL.
    weight = np.ones((B, T), np.float32)
    weight[1:3] = 0
    x = batch(weight=weight, advantage=np.array([1, 0, 0.5, 0], np.float32))
    _, per_token, _, d_logprob, d_entropy = total(x, objective=objective, kl_coef=0.5, entropy_coef=0.1)
    assert np.all(per_token[1:3] == 0) and np.all(d_logprob[1:3] == 0) and np.all(d_entropy[1:3] == 0)
    assert np.all(d_logprob[3, :2] != 0) and np.all(d_entropy[3, :2] != 0)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_everything_masked_is_zero_and_finite(objective, aggregation):
    # unsloth-zoo 1262: every metric too.
    poison = np.full((B, T), np.nan, np.float32)
    x = batch(mask=np.zeros((B, T), bool), **dict.fromkeys(("logprob", "old_logprob", "behavior_logprob", "ref_logprob", "entropy"), poison))
    loss, per_token, stats, d_logprob, d_entropy = total(x, aggregation, np.zeros((B, T), bool), objective=objective, kl_coef=0.1, entropy_coef=0.1)
    assert loss == 0 and all(np.all(a == 0) for a in (per_token, d_logprob, d_entropy))
    assert all(np.isfinite(v) for v in stats.values()) and set(stats) >= {"kl", "entropy", "ess", "ratio_max", "logprob_gap_max"}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("is_level", ["token", "sequence_mean", "sequence_sum"])
def test_padding_is_never_read(objective, is_level):
    x = batch()
    poisoned = {k: jnp.where(MASK, v, jnp.nan) if k.endswith("logprob") or k == "entropy" else v for k, v in x.items()}
    cfg = dict(objective=objective, is_level=is_level, kl_coef=0.1, entropy_coef=0.1)
    for a, b in zip(jax.tree.leaves(total(x, **cfg)), jax.tree.leaves(total(poisoned, **cfg))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_policy_the_loss_is_zero_and_the_gradient_is_not(objective):
    # trl 2976: advantages of a group sum to 0, so does the loss; the policy still learns.
    reward = jnp.asarray([[1.0, 0.0, 0.0, 1.0]])
    advantage = advantages("grpo", reward, jnp.ones((1, 4), bool)).reshape(-1)
    x = batch(old_logprob=None, behavior_logprob=None, advantage=advantage, weight=np.ones((B, T), np.float32), entropy=None)
    loss, _, stats, grad, _ = total(x, "sequence_mean", objective=objective)
    if objective != "cispo":
        assert abs(loss) < 1e-6
    assert stats["ratio"] == stats["ratio_max"] == stats["ess"] == 1 and stats["approx_kl"] == 0
    # d/d logprob of -A r at r = 1 is -A, over the row's length and the number of rows.
    np.testing.assert_allclose(grad, -np.asarray(advantage)[:, None] * MASK / LENGTHS[:, None] / B, rtol=1e-6)


def test_decoupled_uncapped_equals_clipping_around_the_behaviour_policy():
    # min(R A, clip(R, (1-eps) w, (1+eps) w) A) with R = theta / behaviour.
    x = batch(spread=0.5, weight=np.ones((B, T), np.float32))
    _, per_token, _, _, _ = total(x, is_cap=None, clip_low=0.2, clip_high=0.28)
    v = {k: np.asarray(x[k], np.float64) for k in ("logprob", "old_logprob", "behavior_logprob", "advantage")}
    R, w, A = np.exp(v["logprob"] - v["behavior_logprob"]), np.exp(v["old_logprob"] - v["behavior_logprob"]), v["advantage"][:, None]
    want = -np.minimum(R * A, np.clip(R, 0.8 * w, 1.28 * w) * A) * MASK
    np.testing.assert_allclose(per_token, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kl_estimator", ["k2", "k3"])
def test_extreme_log_ratios_stay_finite(kl_estimator):
    # trl 3015: exp(100) is inf in float32.
    for logprob, other in ((-100.0, 0.0), (0.0, -100.0), (-1e30, 0.0)):
        x = batch(logprob=np.full((B, T), logprob, np.float32), **{k: np.full((B, T), other, np.float32) for k in ("old_logprob", "behavior_logprob", "ref_logprob")})
        for cfg in (dict(), dict(objective="gspo"), dict(objective="cispo"), dict(is_cap=None, is_level="sequence_sum")):
            loss, _, stats, grad, _ = total(x, kl_coef=0.1, kl_estimator=kl_estimator, **cfg)
            assert np.isfinite(loss) and np.all(np.isfinite(grad)) and all(np.isfinite(v) for v in stats.values())


def test_kl_estimates_agree_near_zero_and_k1_is_for_rewards():
    x, ref = jnp.full((1, 3), -1.0), jnp.full((1, 3), -1.01)
    mask = jnp.ones((1, 3), bool)
    np.testing.assert_allclose(kl_estimate("k2", x, ref, mask), 0.01**2 / 2, rtol=1e-3)
    np.testing.assert_allclose(kl_estimate("k3", x, ref, mask), np.exp(-0.01) - 1 + 0.01, rtol=2e-2)
    np.testing.assert_allclose(kl_estimate("k1", x, ref, mask), 0.01, rtol=1e-4)
    with pytest.raises(ValueError, match="'k4' is not known"):
        kl_estimate("k4", x, ref, mask)
    # In the reward, the loss has no KL term, only the statistic.
    a, b = total(batch(), kl_coef=0.3, kl_in_reward=True), total(batch())
    assert a[0] == b[0] and a[2]["kl"] > 0


def test_importance_weights():
    behavior, old = jnp.zeros((2, 3)), jnp.log(jnp.asarray([[0.5, 3.0, 1.0], [4.0, 4.0, 0.5]]))
    mask = jnp.asarray([[True, True, False], [True, True, True]])
    w, capped = importance_weight(old, behavior, mask, cap=2.0)
    np.testing.assert_allclose(w, [[0.5, 2, 1], [2, 2, 0.5]], rtol=1e-6)
    assert capped.tolist() == [[False, True, False], [True, True, False]]
    w, _ = importance_weight(old, behavior, mask, level="sequence_sum")
    np.testing.assert_allclose(w, [[1.5, 1.5, 1], [8, 8, 8]], rtol=1e-6)
    w, _ = importance_weight(old, behavior, mask, level="sequence_mean")
    np.testing.assert_allclose(w, [[1.5**0.5, 1.5**0.5, 1], [2, 2, 2]], rtol=1e-6)
    w, capped = importance_weight(old, behavior, mask, cap=0.5, fresh=jnp.asarray([False, True]))
    assert np.all(np.asarray(w[1]) == 1) and not np.any(capped[1]) and np.all(np.asarray(w[0, :2]) == 0.5)
    assert np.all(np.asarray(jax.grad(lambda o: importance_weight(o, behavior, mask)[0].sum())(old)) == 0)
    with pytest.raises(ValueError, match="'row' is not known"):
        importance_weight(old, behavior, mask, level="row")


def test_gradient_stops_where_the_clip_binds():
    x = batch(old_logprob=np.zeros((B, T), np.float32), behavior_logprob=None, advantage=np.array([1, 1, -1, -1], np.float32),
              logprob=np.log(np.array([1.5, 0.5, 1.5, 0.5]))[:, None].repeat(T, 1).astype(np.float32))
    _, _, stats, grad, _ = total(x)
    assert np.all(grad[[0, 3]] == 0) and np.all(grad[1, :1] != 0) and np.all(grad[2, :4] != 0)
    assert stats["clip_high_fraction"] == pytest.approx(LENGTHS[0] / LENGTHS.sum())
    assert stats["clip_low_fraction"] == pytest.approx(LENGTHS[3] / LENGTHS.sum())
    # cispo clips the coefficient, not the gradient.
    assert np.all(total(x, objective="cispo")[3][MASK] != 0)


def test_gspo_gradient_is_that_of_the_sequence_objective():
    x = batch(behavior_logprob=None, weight=np.ones((B, T), np.float32), entropy=None)

    def sequence(logprob):
        s = jnp.exp(jnp.sum((logprob - x["old_logprob"]) * MASK, 1) / LENGTHS)
        return -jnp.mean(jnp.minimum(s * x["advantage"], jnp.clip(s, 0.9, 1.1) * x["advantage"]))

    want, want_grad = jax.value_and_grad(sequence)(x["logprob"])
    loss, _, _, grad, _ = total(x, "sequence_mean", objective="gspo", clip_low=0.1, clip_high=0.1)
    assert loss == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-7)


def test_statistics():
    x = batch(weight=np.ones((B, T), np.float32))
    x["weight"] = x["weight"].at[3].set(0)
    stats = total(x, is_cap=1.2)[2]
    live = MASK.copy()
    live[3] = False
    v = {k: np.asarray(a, np.float64) for k, a in x.items()}
    r, w = np.exp(v["logprob"] - v["old_logprob"])[live], np.exp(v["old_logprob"] - v["behavior_logprob"])[live]
    gap, capped = np.abs(v["old_logprob"] - v["behavior_logprob"])[live], np.minimum(w, 1.2)
    want = {"ratio": r.mean(), "ratio_max": r.max(), "approx_kl": (r - 1 - np.log(r)).mean(), "is_weight": capped.mean(), "is_capped": (w > 1.2).mean(),
            "ess": capped.sum() ** 2 / (len(w) * (capped**2).sum()), "logprob_gap": gap.mean(), "logprob_gap_max": gap.max(), "entropy": v["entropy"][live].mean()}
    for k, value in want.items():
        assert stats[k] == pytest.approx(value, rel=1e-4), k


def test_logprob_gap_is_of_fresh_rows_against_the_samplers_own():
    x = batch(fresh=np.array([True, True, False, False]), sampler_logprob=np.zeros((B, T), np.float32))
    stats = total(x)[2]
    gap = np.abs(np.asarray(x["old_logprob"]))[:2][MASK[:2]]
    assert stats["logprob_gap"] == pytest.approx(gap.mean(), rel=1e-5) and stats["logprob_gap_max"] == pytest.approx(gap.max(), rel=1e-6)


def test_token_advantages():
    x = batch()
    rows = total(x)
    tokens = total({**x, "advantage": jnp.broadcast_to(x["advantage"][:, None], (B, T))})
    np.testing.assert_array_equal(rows[1], tokens[1])


def test_missing_inputs_are_one_line():
    for cfg, missing, message in ((dict(kl_coef=0.1), "ref_logprob", "kl_coef is 0.1"), (dict(entropy_coef=0.1), "entropy", "entropy_coef is 0.1")):
        with pytest.raises(ValueError, match=message):
            policy_objective(losses.objective_of(Algorithm(**cfg)), **batch(**{missing: None}))
    with pytest.raises(ValueError, match=r"dual_clip 0\.5"):
        policy_objective(losses.objective_of(Algorithm(dual_clip=0.5)), **batch())
    with pytest.raises(ValueError, match="'mean' is not known"):
        losses.token_scale("mean", jnp.ones((1, 1), bool), losses.Counts(jnp.ones(()), jnp.ones(())), 1)
