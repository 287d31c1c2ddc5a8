"""Mixers and the split of a batch by largest remainder."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.strategies.mix import build_mixer, largest_remainder, static


def simplex(domains: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.floats(1e-3, 1.0), min_size=domains, max_size=domains).map(lambda w: np.array(w) / sum(w))


def realise(ps, n):
    """Cumulative (target - realised) after every batch."""
    carry, gap = None, np.zeros(len(ps[0]))
    for p in ps:
        counts, carry = largest_remainder(p, n, carry)
        assert counts.sum() == n and (counts >= 0).all() and counts.dtype == np.int64
        gap = gap + p * n - counts
        np.testing.assert_allclose(gap, carry, atol=1e-6)
        yield gap


def test_hand_computed_split():
    counts, carry = largest_remainder([0.5, 0.3, 0.2], 4)
    assert counts.tolist() == [2, 1, 1]
    np.testing.assert_allclose(carry, [0, 0.2, -0.2], atol=1e-12)
    counts, carry = largest_remainder([0.5, 0.3, 0.2], 4, carry)
    assert counts.tolist() == [2, 1, 1]
    np.testing.assert_allclose(carry, [0, 0.4, -0.4], atol=1e-12)
    counts, carry = largest_remainder([0.5, 0.3, 0.2], 4, carry)
    assert counts.tolist() == [2, 2, 0]


def test_equal_fractions_go_to_the_lowest_index():
    assert largest_remainder([0.25] * 4, 6)[0].tolist() == [2, 2, 1, 1]
    assert largest_remainder([1 / 3] * 3, 4)[0].tolist() == [2, 1, 1]


def test_exact_shares_leave_no_carry():
    counts, carry = largest_remainder([0.1] * 10, 30)
    assert counts.tolist() == [3] * 10 and not carry.any()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 40))
def test_constant_proportions_stay_within_one_prompt(data, domains, n):
    p = data.draw(simplex(domains))
    for gap in realise([p] * 40, n):
        assert np.abs(gap).max() < 1 + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_moving_proportions_stay_within_one_prompt_while_all_are_due_one(data, domains):
    ps = data.draw(st.lists(simplex(domains), min_size=1, max_size=25))
    n = int(np.ceil(1 / min(p.min() for p in ps))) + data.draw(st.integers(0, 5))
    for gap in realise(ps, n):
        assert np.abs(gap).max() < 1 + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 6), st.integers(0, 3))
def test_moving_proportions_in_tiny_batches_still_sum_and_carry(data, domains, n):
    ps = data.draw(st.lists(simplex(domains), min_size=1, max_size=25))
    for gap in realise(ps, n):
        assert abs(gap.sum()) < 1e-6


def test_rare_domains_in_tiny_batches_need_more_than_the_largest_fraction():
    """One prompt a batch over these shares: always giving to the largest fraction falls 1.13 prompts behind."""
    w = np.array([1, 3, 3, 9, 15, 45, 103, 303])
    p, greedy, worst = w / w.sum(), np.zeros(8), 0.0
    for _ in range(300):
        greedy += p
        greedy[np.argmax(greedy)] -= 1
        worst = max(worst, np.abs(greedy).max())
    assert worst > 1.1
    for gap in realise([p] * 600, 1):
        assert np.abs(gap).max() < 1


def test_a_domain_with_share_zero_gets_nothing():
    carry = None
    for _ in range(20):
        counts, carry = largest_remainder([0.0, 0.7, 0.3], 5, carry)
        assert counts[0] == 0


@pytest.mark.parametrize("p, n", [([0.5, 0.6], 4), ([-0.5, 1.5], 4), ([np.nan, 1.0], 4), ([0.5, 0.5], -1), ([[1.0]], 1)])
def test_no_distribution_is_refused(p, n):
    with pytest.raises(ValueError, match="sum to 1"):
        largest_remainder(p, n)


def test_static_gives_the_ratio_at_every_step_whatever_is_observed():
    mixer = static([2, 1, 1])
    state = mixer.init()
    assert json.loads(json.dumps(state)) == state
    p = mixer.proportions(state, 0)
    p[:] = 9  # the caller's copy
    state = mixer.observe(state, 0, {"reward": np.ones((4, 8)), "step": 0})
    np.testing.assert_array_equal(mixer.proportions(state, 100), [0.5, 0.25, 0.25])


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [np.inf, 1]])
def test_static_refuses_weights_that_give_no_ratio(weights):
    with pytest.raises(ValueError, match="weights"):
        static(weights)


def test_unknown_mixer_is_named():
    with pytest.raises(ValueError, match=r"'dump'.*static"):
        build_mixer("dump", [1])
