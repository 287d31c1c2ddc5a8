"""Statistics of paired runs: each against its definition or scipy's own, never against itself."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as hs

from rlvr_jax.compare import statistics as st
from rlvr_jax.compare.curves import area_under_curve, common_range, cost_to_reach

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("pairs", [1, 2, 3, 5, 8, 12])
def test_p_is_scipys_exact_one(pairs):
    d = RNG.normal(0.5, 1, (pairs, 3))
    wanted = [scipy.stats.permutation_test((column,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue if pairs > 1 else 1.0 for column in d.T]
    np.testing.assert_allclose(st.sign_flip_p(d), wanted, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(hs.lists(hs.tuples(*[hs.integers(0, 7)] * 6), min_size=2, max_size=8))
def test_p_counts_ties_as_exact_arithmetic_does(pairs):
    """Means of three accuracies over 7, 10 and 30 prompts tie all the time; rounding of floats must not break a tie."""
    of = (7, 10, 30)
    exact = [sum(Fraction(pair[i], of[i]) - Fraction(pair[3 + i], of[i]) for i in range(3)) / 3 for pair in pairs]
    hits = [abs(sum(s * d for s, d in zip(signs, exact, strict=True))) >= abs(sum(exact)) for signs in itertools.product((1, -1), repeat=len(exact))]
    a, b = (np.array([[pair[k + i] / of[i] for i in range(3)] for pair in pairs]).mean(-1) for k in (0, 3))
    assert st.sign_flip_p((a - b)[:, None])[0] == sum(hits) / len(hits)


def test_p_of_many_pairs_is_drawn_close_and_the_same_each_time():
    d = RNG.normal(0.4, 1, (st.EXACT_PAIRS + 3, 20))
    p = st.sign_flip_p(d)
    near = scipy.stats.ttest_1samp(d, 0).pvalue  # no closed form at hand; t is close for normal differences
    np.testing.assert_array_equal(p, st.sign_flip_p(d))
    assert np.abs(p - near).max() < 0.02 and (p >= st.smallest_p(len(d))).all()


@pytest.mark.parametrize("pairs", [1, 3, 6, 12, 17, 18, 40])
def test_smallest_p_is_reached_and_no_p_is_below_it(pairs):
    same_sign = np.arange(1.0, pairs + 1)[:, None] ** 0.5
    assert st.sign_flip_p(same_sign)[0] == pytest.approx(st.smallest_p(pairs), rel=1e-12 if pairs < 17 else 1.01)
    assert st.smallest_p(3) == 0.25 and st.smallest_p(5) == 0.0625 and st.smallest_p(12) == 2 / 4096


def test_p_does_not_depend_on_order_sign_or_unit():
    d = RNG.normal(0.3, 1, (9, 40))
    p = st.sign_flip_p(d)
    for other in (d[::-1], -d, d * 100):
        np.testing.assert_allclose(st.sign_flip_p(other), p)


@settings(max_examples=100, deadline=None)
@given(hs.lists(hs.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_closed_testing_with_bonferroni(p):
    """A hypothesis falls only when every set of hypotheses that contains it does; Holm is the short way to that."""
    sets = [s for k in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), k)]
    wanted = [max(min(len(s) * min(p[j] for j in s), 1.0) for s in sets if i in s) for i in range(len(p))]
    np.testing.assert_allclose(st.holm(np.array(p)), wanted, rtol=1e-12)


def test_holm_of_nothing_is_nothing():
    assert st.holm(np.array([])).shape == (0,)


@pytest.mark.parametrize("pairs", [2, 5, 12])
def test_interval_is_scipys(pairs):
    a, b = RNG.normal(0, 1, (2, pairs, 4))
    low, high = st.paired_interval(a - b)
    wanted = scipy.stats.ttest_rel(a, b).confidence_interval(1 - st.ALPHA)
    np.testing.assert_allclose([low, high], [wanted.low, wanted.high])
    assert np.isnan(st.paired_interval((a - b)[:1])).all()


def test_spread_factors_are_scipys_and_one_value_has_no_spread():
    low, high = st.spread_known_within(12)
    assert (low, high) == pytest.approx(tuple(np.sqrt(11 / scipy.stats.chi2.ppf([0.975, 0.025], 11))))
    assert all(map(math.isnan, st.spread_known_within(1)))


@pytest.mark.parametrize("pairs, tests", [(6, 1), (8, 3), (9, 8), (10, 2), (10, 12), (12, 1), (12, 8)])
def test_power_is_how_often_the_test_finds(pairs, tests):
    level = st.ALPHA / tests
    for effect in (0.6, 1.0, 1.5, 2.0):
        d = np.random.default_rng(pairs).normal(effect, 1, (pairs, 8000))
        found = ((st.sign_flip_p(d) <= level * (1 + 1e-9)) & (d.mean(0) > 0)).mean()
        assert float(st.power(effect, pairs, level)) == pytest.approx(found, abs=0.05)  # 0.04, and the noise of 8000


def test_power_where_noncentral_t_gives_out():
    n, effect = np.meshgrid([6, 9, 17, 30, 1000], [0.0, 0.1, 1, 3, 8, 10, 50, 1e6, np.inf])
    for level in (0.05, 0.01, 1e-4):
        power = st.power(effect, n, level)
        assert ((power >= 0) & (power <= 1)).all() and (np.diff(power, axis=0) >= -1e-12).all()
    assert st.power(5.0, 4) == 0 and st.power(5.0, 9, 0.05 / 12) > 0.99


@pytest.mark.parametrize("tests", [1, 3, 8, 96])
def test_pairs_needed_is_the_first_that_is_enough(tests):
    level = st.ALPHA / tests
    for effect in (0.09, 0.3, 0.8, 1.5, 3.0, math.inf):
        n = np.arange(2, st.MOST_PAIRS + 1)
        enough = n[st.power(effect, n, level) >= st.POWER]
        assert st.pairs_needed(effect, level) == (enough[0] if len(enough) else None)
    assert st.pairs_needed(math.inf, level) == st.fewest_pairs(tests)  # a huge effect needs only that p can be small
    assert st.pairs_needed(0.0, level) is None and st.pairs_needed(1e-3, level) is None


@pytest.mark.parametrize("pairs", [6, 9, 12, 30])
def test_detectable_effect_is_found_with_the_wanted_power(pairs):
    assert st.power(st.detectable_effect(pairs), pairs) == pytest.approx(st.POWER)
    assert st.detectable_effect(5) == math.inf and st.detectable_effect(8, 0.05 / 12) == math.inf and st.detectable_effect(1) == math.inf


def test_fewest_pairs():
    assert [st.fewest_pairs(m) for m in (1, 2, 8, 12, 96)] == [6, 7, 9, 9, 12]
    assert st.fewest_pairs(10_000) is None  # no p of DRAWS patterns is that small


@pytest.mark.parametrize("difference, p, least, wanted", [
    (0.1, 0.04, 0.01, "better"), (-0.1, 0.05, 0.01, "worse"), (0.1, 0.2, 0.01, "not distinguishable"), (-9.0, 0.0625, 0.0625, "too few seeds to decide")])
def test_verdict(difference, p, least, wanted):
    assert st.verdict(difference, p, least) == wanted


def test_area_is_the_mean_height():
    x = np.array([0.0, 10, 30])
    assert area_under_curve(x, np.array([0.2, 0.2, 0.2])) == pytest.approx(0.2)
    assert area_under_curve(x, np.array([0.0, 1.0, 1.0])) == pytest.approx((5 + 20) / 30)
    assert area_under_curve(x, np.array([0.0, 1.0, 1.0]), 5, 20) == pytest.approx((0.75 * 5 + 10) / 15)
    curves = RNG.random((2, 3, 3))
    np.testing.assert_allclose(area_under_curve(x, curves), scipy.integrate.trapezoid(curves, x) / 30)
    np.testing.assert_allclose(area_under_curve(x[::-1], curves[..., ::-1]), area_under_curve(x, curves))
    np.testing.assert_allclose(area_under_curve(x * 1e6, curves), area_under_curve(x, curves))


def test_area_of_a_curve_with_gaps_or_too_short():
    x, y = np.array([0.0, 1, 2, np.nan]), np.array([0.0, np.nan, 1.0, 5.0])
    assert area_under_curve(x, y) == pytest.approx(0.5)
    assert np.isnan(area_under_curve(x, y, 0, 3)) and np.isnan(area_under_curve(x, np.full(4, np.nan))) and np.isnan(area_under_curve([1.0], [1.0]))


def test_cost_to_reach():
    x = np.array([0.0, 100, 200, 300])
    y = np.array([[0.1, 0.3, 0.2, 0.5], [0.1, 0.1, 0.1, 0.2], [0.4, 0.0, 0.0, 0.0], [0.1, np.nan, 0.3, 0.3]])
    np.testing.assert_allclose(cost_to_reach(x, y, 0.2), [50, 300, 0, 100])
    np.testing.assert_allclose(cost_to_reach(x, y, 0.3), [100, np.nan, 0, 200])


def test_common_range_is_what_every_measured_curve_covers():
    x = np.array([[0.0, 5, 9], [1, 2, np.nan], [np.nan] * 3])
    assert common_range(x, x) == (1.0, 2.0)
