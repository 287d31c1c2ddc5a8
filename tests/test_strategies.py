"""Scores and acts against plain NumPy, and the laws that every strategy obeys."""

import itertools
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import sharding
from rlvr_jax.strategies import base, build, scores
from rlvr_jax.strategies import presets as preset_table
from rlvr_jax.types import Signals

LEVELS = np.array([0, 0.25, 0.5, 1, 1], np.float32)  # dyadic: exact in float32, so ties are ties


def make(seed, N, G, T=7, *, ties=True, dead=True, per_token=False, step=0) -> Signals:
    """Random signals: ragged lengths, tied rewards, constant groups, unknown rows, a group of unknown rows only."""
    r = np.random.default_rng(seed)
    reward = r.choice(LEVELS, (N, G)) if ties else r.random((N, G), np.float32) * 2 - 0.5
    if ties:
        reward[0] = reward[0, 0]
    valid = np.ones((N, G), bool)
    if dead:
        valid = r.random((N, G)) < 0.8
        valid[-1] = False
    length = r.integers(1, T + 1, (N, G))
    mask = (np.arange(T) < length[..., None]) & valid[..., None]
    shape = (N, G, T) if per_token else (N, G)
    advantage = r.choice(np.float32([-1.5, -0.5, 0, 0.5, 1.5]), shape) if ties else r.normal(size=shape).astype(np.float32)
    return Signals.create(reward, advantage, -3 * r.random((N, G, T), np.float32), mask, length, r.integers(0, 3, N), np.int32(step),
                          valid=valid, entropy=2 * r.random((N, G, T), np.float32))


def run(items, signals, jit=False):
    strategy = build(items if isinstance(items, list) else [items])
    return np.asarray((jax.jit(strategy.apply) if jit else strategy.apply)(strategy.init(), signals)[0])


def arrays(signals):
    return {k: np.asarray(v) for k, v in vars(signals).items() if v is not None}


# --- references: loops, float64, fractions ---------------------------------------------------------------------------


def best(values, ids, n):
    """The n ids of largest value, the first ones of equals."""
    return sorted(ids, key=lambda i: (-values[i], i))[:n]


def count_of(fraction, n):
    return min(n, max(1, round(Fraction(str(fraction)) * n)))


def ref_difffilter(s, low="0.2", high="0.8"):
    out = np.zeros(s["reward"].shape)
    for n, (ok, valid) in enumerate(zip(s["correct"], s["valid"])):
        if valid.any() and Fraction(low) < Fraction(int((ok & valid).sum()), int(valid.sum())) < Fraction(high):
            out[n] = valid
    return out


def ref_maxvar(s, fraction=0.5):
    out = np.zeros(s["reward"].shape)
    for n, (reward, valid) in enumerate(zip(s["reward"], s["valid"])):
        live = [i for i in range(len(reward)) if valid[i]]
        size, chosen, most = count_of(fraction, len(live)), [], -1
        low, high = best(-reward, live, size), best(reward, live, size)
        for a in range(size + 1):
            ids = low[:a] + high[: size - a]
            x = [int(float(reward[i]) * 2**40) for i in ids]  # exact: float32 in [-1, 2]
            variance = size * sum(v * v for v in x) - sum(x) ** 2
            if len(set(ids)) == size and variance > most:
                chosen, most = ids, variance
        out[n, chosen] = 1
    return out


def ref_gfpo(s, k=3, by="efficiency"):
    out = np.zeros(s["reward"].shape)
    for n, (reward, length, valid) in enumerate(zip(s["reward"], s["length"], s["valid"])):
        key = reward / length.astype(np.float32) if by == "efficiency" else -length
        out[n, best(key, np.flatnonzero(valid), k)] = 1
    return out


def magnitude(s, reduce="mean"):
    full = np.broadcast_to(s["advantage"][..., None] if s["advantage"].ndim == 2 else s["advantage"], s["mask"].shape)
    f = {"mean": np.mean, "sum": np.sum, "max": np.max}[reduce]
    rows = [f(np.abs(a[m]).astype(np.float64)) if m.any() else 0.0 for a, m in zip(full.reshape(-1, full.shape[-1]), s["mask"].reshape(-1, full.shape[-1]))]
    return np.array(rows).reshape(s["valid"].shape)


def ref_topk(s, fraction=0.5, score=None):
    x = (magnitude(s) if score is None else score)
    live = (s["valid"] if x.ndim == 2 else s["mask"]).ravel()
    out = np.zeros(x.size)
    out[best(x.ravel(), np.flatnonzero(live), count_of(fraction, int(live.sum())) if live.any() else 0)] = 1
    return out.reshape(x.shape)


def mean_one(w, live):
    w = np.where(live, w, 0)
    return w / w[live].mean() if live.any() else w


def ref_softmax(s, tau=1.0):
    return mean_one(np.exp(magnitude(s) / tau), s["valid"])


def ref_per(s, alpha=0.5):
    return mean_one((magnitude(s) + 1e-8) ** alpha, s["valid"])


def ref_diffband(s, low_q=0.25, high_q=0.75, focus_weight=2.0):
    if not s["valid"].any():
        return np.zeros(s["reward"].shape)
    low, high = np.quantile(s["reward"][s["valid"]].astype(np.float64), [low_q, high_q])
    return mean_one(np.where((s["reward"] >= low) & (s["reward"] <= high), focus_weight, 1.0), s["valid"])


def ref_ar(s, alpha=0.5):
    return mean_one(alpha * np.exp(s["logprob"].astype(np.float64)) + 1 - alpha, s["mask"])


REFERENCES = [
    ("difffilter", ref_difffilter), ({"name": "difffilter", "low": 0.1, "high": 0.6}, partial(ref_difffilter, low="0.1", high="0.6")),
    ("maxvar", ref_maxvar), ({"maxvar": {"fraction": 0.3}}, partial(ref_maxvar, fraction=0.3)),
    ("gfpo", ref_gfpo), ({"name": "gfpo", "by": "short", "k": 2}, partial(ref_gfpo, k=2, by="short")),
    ("topk", ref_topk), ({"name": "topk", "fraction": 0.7}, partial(ref_topk, fraction=0.7)),
    ({"select": "top_fraction", "score": "entropy", "fraction": 0.2}, lambda s: ref_topk(s, 0.2, s["entropy"])),
    ("softmax", ref_softmax), ({"name": "softmax", "tau": 0.3}, partial(ref_softmax, tau=0.3)),
    ("per", ref_per), ({"name": "per", "alpha": 1.0}, partial(ref_per, alpha=1.0)),
    ("diffband", ref_diffband), ({"name": "diffband", "low_q": 0.1, "high_q": 0.35}, partial(ref_diffband, low_q=0.1, high_q=0.35)),
    ("ar", ref_ar), ({"name": "ar", "alpha": 0.9}, partial(ref_ar, alpha=0.9)),
]


@pytest.mark.parametrize("items,reference", REFERENCES, ids=[str(i) for i, _ in REFERENCES])
def test_equals_numpy(items, reference):
    strategy = build([items])
    apply = jax.jit(strategy.apply)
    shapes = ((2, False), (5, True)) if isinstance(items, str) else ((32, False),)  # one compilation each
    for (G, per_token), seed in itertools.product(shapes, range(6)):
        signals = make(seed, 6, G, ties=seed % 2 == 0, per_token=per_token)
        got, _ = apply(strategy.init(), signals)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, reference(arrays(signals)), rtol=2e-5, atol=1e-6, err_msg=f"G={G} seed={seed}")


@pytest.mark.parametrize("per_token", [False, True])
def test_scores_equal_numpy(per_token):
    signals = make(3, 6, 8, per_token=per_token)
    s = arrays(signals)
    live = s["valid"]
    want = {"reward": s["reward"], "length": s["length"], "entropy": s["entropy"], "token_prob": np.exp(s["logprob"]),
            "advantage_magnitude": magnitude(s)}
    want["solve_rate"] = np.array([[c[v].mean() if v.any() else 0] * 8 for c, v in zip(s["correct"], live)])
    want["reward_std"] = np.array([[r[v].std() if v.any() else 0] * 8 for r, v in zip(s["reward"], live)])
    assert want.keys() == scores.SCORES.keys()
    for name, value in want.items():
        got = np.asarray(scores.SCORES[name](signals))
        keep = live if got.ndim == 2 else s["mask"]
        np.testing.assert_allclose(got[keep], value[keep], rtol=1e-5, atol=1e-7, err_msg=name)
    for reduce in ("sum", "max"):
        np.testing.assert_allclose(np.asarray(scores.advantage_magnitude(signals, reduce=reduce))[live], magnitude(s, reduce)[live], rtol=1e-5)
    tenths = signals.replace(reward=jnp.full_like(signals.reward, 0.1))
    assert not np.any(scores.reward_std(tenths))  # exactly 0, no float noise


def counts(G=32):
    """One group for every pair (known rows, solved rows) up to G."""
    pairs = [(n, k) for n in range(G + 1) for k in range(n + 1)]
    valid = np.array([[g < n for g in range(G)] for n, _ in pairs])
    reward = np.array([[float(g < k) for g in range(G)] for _, k in pairs], np.float32)
    mask = np.broadcast_to(valid[..., None], (*valid.shape, 2))
    return Signals.create(reward, reward, np.zeros(mask.shape, np.float32), mask, valid * 2, np.zeros(len(pairs), int), 0, valid=valid)


@pytest.mark.parametrize("low,high", [("0.2", "0.8"), ("0", "1"), ("1/3", "2/3"), ("0.1", "0.7"), ("0.6", "0.9")])
def test_band_is_strict_on_integer_counts(low, high):
    signals = counts()
    got = run({"select": "band", "score": "solve_rate", "low": float(Fraction(low)), "high": float(Fraction(high))}, signals, jit=True)
    np.testing.assert_array_equal(got, ref_difffilter(arrays(signals), low, high))


def test_three_of_fifteen_is_not_above_a_fifth():
    reward = np.zeros((3, 15), np.float32)
    reward[0, :3], reward[1, :4], reward[2, :12] = 1, 1, 1
    assert np.sum(reward[0] * np.float32(1 / 15)) > np.float32(0.2)  # the trap: a mean compiled to a product
    signals = Signals.create(reward, reward, np.zeros((3, 15, 1)), np.ones((3, 15, 1)), np.ones((3, 15)), np.zeros(3), 0)
    assert run("difffilter", signals).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.8])
def test_maxvar_of_every_count_of_right_answers(fraction):
    signals = counts()
    np.testing.assert_array_equal(run({"name": "maxvar", "fraction": fraction}, signals, jit=True), ref_maxvar(arrays(signals), fraction))


def test_maxvar_is_the_best_of_all_subsets():
    signals = make(1, 40, 7, ties=False, dead=False)
    for reward, keep in zip(np.asarray(signals.reward, np.float64), run("maxvar", signals, jit=True)):
        best_variance = max(np.var(c) for c in itertools.combinations(reward, 4))
        assert keep.sum() == 4 and np.var(reward[keep > 0]) == pytest.approx(best_variance, rel=1e-5)


def test_round_is_half_to_even_and_ties_go_to_the_first():
    flat = Signals.create(np.ones((2, 5)), np.ones((2, 5)), np.zeros((2, 5, 1)), np.ones((2, 5, 1)), np.ones((2, 5)), np.zeros(2), 0)
    assert run("maxvar", flat, jit=True).tolist() == [[1, 1, 0, 0, 0]] * 2  # 0.5 * 5 = 2.5 -> 2
    assert run("gfpo", flat, jit=True).tolist() == [[1, 1, 1, 0, 0]] * 2
    assert run({"name": "topk", "fraction": 0.3}, flat, jit=True).ravel().tolist() == [1] * 3 + [0] * 7
    n = np.array([0, 1, 5, 10, 50, 150, 99_999, 10_000_000], np.int32)
    for fraction in (0.1, 0.15, 0.29, 0.35, 0.5, 0.57, 0.7, 1.0):
        assert base.portion(fraction, jnp.asarray(n)).tolist() == [count_of(fraction, int(k)) if k else 0 for k in n], fraction


# --- laws over all strategies ----------------------------------------------------------------------------------------

LAWS = [
    *([name] for name in preset_table.PRESETS),
    [{"select": "band", "score": "entropy", "low": 0.5, "high": 1.5}], [{"reweight": "quantile_band", "score": "token_prob"}],
    [], ["gfpo", {"select": "top_fraction", "score": "entropy"}, "diffband"],
    [{"chain": ["difffilter", "softmax"], "renormalise": False}, {"ar": {"every": 2}}],
]


@pytest.fixture(scope="module", params=LAWS, ids=[str(i) for i in LAWS])
def case(request):
    strategy = build(request.param)
    jitted = jax.jit(strategy.apply)
    return strategy, lambda signals: np.asarray(jitted(strategy.init(), signals)[0]), jitted


def test_laws(case):
    strategy, apply, jitted = case
    signals = make(11, 8, 5, ties=False, step=2)
    weights = apply(signals)
    live = arrays(signals)["valid" if weights.ndim == 2 else "mask"]
    eager, _ = strategy.apply(strategy.init(), signals)
    np.testing.assert_allclose(eager, weights, rtol=1e-5, atol=1e-7, err_msg="jit = eager")
    np.testing.assert_array_equal(apply(signals), weights, err_msg="pure")
    assert (weights[~live] == 0).all() and (weights >= 0).all() and weights.dtype == np.float32
    assert weights[weights > 0].mean() == pytest.approx(1, rel=1e-5), "mean one over what is kept"

    order = np.random.default_rng(0).permutation(8)
    moved = jax.tree.map(lambda x: x[order] if x.ndim else x, signals)
    np.testing.assert_allclose(apply(moved), weights[order], rtol=1e-5, err_msg="permutation of groups")

    other = make(12, 8, 5, ties=True, step=3)
    assert np.isfinite(apply(other)).all()
    assert jitted._cache_size() == 1, "values never recompile"


def test_padding_changes_nothing(case):
    """Padded groups and tokens, and whatever stands in unknown rows, even NaN."""
    _, apply, _ = case
    signals = make(13, 8, 5, ties=False)
    dirty = {}
    for name, x in arrays(signals).items():
        if x.ndim and x.dtype == np.float32:
            dead = ~np.asarray(signals.valid if x.ndim == 2 else signals.mask)
            x = np.where(dead, np.nan, x)
        fill = np.nan if x.dtype == np.float32 else 0
        pad = [(0, 3), (0, 0), (0, 2)][: x.ndim]
        dirty[name] = np.pad(x, pad, constant_values=fill) if x.ndim else x
    weights, padded = apply(signals), apply(Signals(**{k: jnp.asarray(v) for k, v in dirty.items()}))
    inner = (slice(8), slice(5), slice(7))[: weights.ndim]
    np.testing.assert_allclose(padded[inner], weights, rtol=1e-5)
    assert np.count_nonzero(padded) == np.count_nonzero(weights)


def test_extremes_are_finite_and_nothing_live_is_all_zero(case):
    _, apply, _ = case
    signals = make(14, 8, 5, ties=False)
    assert not apply(signals.replace(valid=jnp.zeros_like(signals.valid))).any()
    huge = signals.replace(advantage=signals.advantage * 1e30, reward=signals.reward * 1e30, logprob=signals.logprob * 1e4)
    tiny = signals.replace(advantage=signals.advantage * 0, reward=signals.reward * 0)
    for extreme in (huge, tiny):
        weights = apply(extreme)
        assert np.isfinite(weights).all() and (weights >= 0).all()


def test_sharded_equals_unsharded(case):
    _, apply, _ = case
    signals = make(15, 8, 5)
    mesh = sharding.make_mesh(2, 2, 2)
    where = jax.tree.map(lambda x: sharding.named(mesh, *(("batch", None, None)[: x.ndim])), signals)
    np.testing.assert_allclose(apply(jax.device_put(signals, where)), apply(signals), rtol=1e-5, atol=1e-7)
