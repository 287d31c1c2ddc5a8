"""Advantages: formulas against numpy, ineffective groups exactly 0, unknown rows left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlvr_jax.advantages import ESTIMATORS, advantages, effective_groups

NAMES = sorted(ESTIMATORS)


def plain(name, reward, valid, eps=1e-6):
    """The formulas of the estimators in float64, one group at a time."""
    out, kept = np.zeros(reward.shape), []
    for n in range(len(reward)):
        r = reward[n, valid[n]].astype(np.float64)
        if len(r) < 2 or np.all(r == r[0]):
            continue
        a = np.array([x - np.mean(np.delete(r, i)) for i, x in enumerate(r)]) if name == "rloo" else r - r.mean()
        if name == "grpo":
            a = a / (r.std() + eps)
        kept += list(a)
        out[n, valid[n]] = a
    return out / (np.sqrt(np.mean(np.square(kept))) + eps) if name == "reinforce_pp_baseline" and kept else out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["binary", "normal"])
def test_against_numpy(name, kind):
    rng = np.random.default_rng(0)
    reward = (rng.random((40, 5)) > 0.6 if kind == "binary" else rng.normal(size=(40, 5))).astype(np.float32)
    valid = rng.random((40, 5)) > 0.3
    got = jax.jit(advantages, static_argnums=0)(name, jnp.asarray(reward), jnp.asarray(valid))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(name, reward, valid), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_are_exactly_zero(name):
    # 0.1 * 8 / 8 is not 0.1 in float32: a deviation of 1e-9 over eps would be an advantage.
    reward = jnp.stack([jnp.full(8, c, jnp.float32) for c in (0.1, 0.7, 1 / 3, 1e6, -0.95)])
    assert np.all(np.asarray(advantages(name, reward, jnp.ones((5, 8), bool))) == 0)
    assert not np.any(effective_groups(reward, jnp.ones((5, 8), bool)))


@pytest.mark.parametrize("name", NAMES)
def test_one_odd_reward_keeps_all_eight(name):
    reward = jnp.asarray([[0] + [0.95] * 7], jnp.float32)
    a = np.asarray(advantages(name, reward, jnp.ones((1, 8), bool)))
    assert effective_groups(reward, jnp.ones((1, 8), bool)).tolist() == [True]
    assert np.all(a != 0) and a[0, 0] < 0 and np.all(a[0, 1:] == a[0, 1]) and abs(a.sum()) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_unknown_rows_are_no_wrong_answers(name):
    # The unknown row holds a poisoned reward; the others get what they would get without it.
    valid = jnp.asarray([[True, True, False, True], [True] * 4])
    reward = jnp.asarray([[1.0, 0.0, np.nan, 1.0], [1.0, 0.0, 1.0, 0.0]])
    got = np.asarray(advantages(name, reward, valid))
    assert got[0, 2] == 0 and np.all(np.isfinite(got))
    np.testing.assert_allclose(got, plain(name, np.nan_to_num(np.asarray(reward)), np.asarray(valid)), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_groups_with_fewer_than_two_valid_rows_are_zero(name):
    reward = jnp.asarray([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    valid = jnp.asarray([[True, False, False], [False] * 3])
    assert np.all(np.asarray(advantages(name, reward, valid)) == 0)
    assert not np.any(effective_groups(reward, valid))


def test_rloo_is_dr_grpo_scaled():
    # A baseline that contains the row itself shrinks the gradient by (G-1)/G: documented, and undone by rloo.
    reward, valid = jnp.asarray([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]), jnp.ones((2, 4), bool)
    np.testing.assert_allclose(advantages("rloo", reward, valid), advantages("dr_grpo", reward, valid) * 4 / 3, rtol=1e-6)


def test_ineffective_groups_stay_zero_under_batch_standardisation():
    reward = jnp.asarray([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    a = np.asarray(advantages("reinforce_pp_baseline", reward, jnp.ones((3, 4), bool)))
    assert np.all(a[[0, 2]] == 0)
    np.testing.assert_allclose(a[1], (np.array([1, 0, 0, 0]) - 0.25) / np.std([1, 0, 0, 0]), rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.float32, (6, 4), elements=st.floats(-4, 4, width=16)), hnp.arrays(bool, (6, 4)), st.randoms(use_true_random=False))
def test_laws(reward, valid, random):
    """Finite; zero outside valid rows; the mean of a group is 0; follows the group and the row, not their position."""
    groups, rows = random.sample(range(6), 6), random.sample(range(4), 4)
    for name in NAMES:
        a = np.asarray(advantages(name, jnp.asarray(reward), jnp.asarray(valid)))
        assert np.all(np.isfinite(a)) and np.all(a[~valid] == 0)
        assert np.all(np.abs(a.sum(1)) < 1e-4)
        b = advantages(name, jnp.asarray(reward[groups][:, rows]), jnp.asarray(valid[groups][:, rows]))
        np.testing.assert_allclose(b, a[groups][:, rows], rtol=2e-4, atol=1e-5)
        assert np.all(a[~np.asarray(effective_groups(jnp.asarray(reward), jnp.asarray(valid)))] == 0)


def test_wrong_input_is_one_line():
    with pytest.raises(ValueError, match="'ppo' is not known; use one of grpo"):
        advantages("ppo", jnp.ones((2, 2)), jnp.ones((2, 2), bool))
    for reward, valid in ((jnp.ones(4), jnp.ones(4, bool)), (jnp.ones((2, 2)), jnp.ones(2, bool))):
        with pytest.raises(ValueError, match=r"must both be \[N, G\]"):
            advantages("grpo", reward, valid)
