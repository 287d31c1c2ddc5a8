"""The three dynamic mixers: each follows what its own paper names, on a window, above a floor."""

import json

import numpy as np
import pytest

from rlvr_jax import config as C
from rlvr_jax.strategies.mix import DYNAMIC, build_mixer, dump_ucb, largest_remainder, reward_gap, tscl


def history(mixer, steps=6):
    """Three domains: easy and still, hard and seldom seen, in the middle and rising by 0.1 a step."""
    state = mixer.init()
    for step in range(steps):
        for domain, (prompts, reward, advantage) in enumerate([(8, 0.9, 0.1), (2, 0.2, 0.3), (6, 0.3 + 0.1 * step, 0.6)]):
            state = mixer.observe(state, domain, {"reward": np.full((prompts, 4), reward), "advantage": np.full((prompts, 4), advantage) * [1, -1, 1, -1],
                                                  "valid": np.ones((prompts, 4), bool), "step": step})
    return state


def softmax(z):
    e = np.exp(np.asarray(z) - np.max(z))
    return e / e.sum()


NOW = {"warmup_steps": 0, "update_every": 1, "floor": 0.0}


def test_hand_checked_proportions_on_one_history():
    # mean rewards 0.9, 0.2, 0.55: gaps to the best 0, 0.7, 0.35
    gap = reward_gap(3, temperature=0.5, **NOW)
    np.testing.assert_allclose(gap.proportions(history(gap), 6), softmax([0, 1.4, 0.7]), rtol=1e-9)
    np.testing.assert_allclose(gap.signal(history(gap), 6), [0.9, 0.2, 0.55])
    # 48, 12 and 36 prompts of 96: bonus sqrt(2 ln 97 / (n + 1))
    ucb = dump_ucb(3, **NOW)
    bonus = np.sqrt(2 * np.log(97) / np.array([49, 13, 37]))
    np.testing.assert_allclose(ucb.proportions(history(ucb), 6), softmax(np.array([0.1, 0.3, 0.6]) + bonus), rtol=1e-9)
    # slopes 0, 0, 0.1 a step; 50 steps a window, temperature 0.1
    slope = tscl(3, temperature=5.0, **NOW)
    np.testing.assert_allclose(slope.signal(history(slope), 6), [0, 0, 0.1], atol=1e-12)
    np.testing.assert_allclose(slope.proportions(history(slope), 6), softmax([0, 0, 1.0]), rtol=1e-9)
    published = tscl(3, temperature=1.0, published_slope=True, **NOW)
    np.testing.assert_allclose(published.proportions(history(published), 6), softmax([0, 0, 0.1]), rtol=1e-9)
    counts = [tuple(largest_remainder(m.proportions(history(m), 6), 64)[0]) for m in (gap, ucb, slope)]
    assert len(set(counts)) == 3 and all(sum(c) == 64 for c in counts), counts


@pytest.mark.parametrize("name", DYNAMIC)
def test_floor_warm_up_and_interval(name):
    mixer = build_mixer(name, [1, 1, 1], warmup_steps=4, update_every=5, floor=0.1, temperature=0.01)
    state = history(mixer, 12)
    assert json.loads(json.dumps(state)) == state
    for step in range(4):
        np.testing.assert_allclose(mixer.proportions(state, step), 1 / 3)
    for step in range(4, 12):
        p = mixer.proportions(state, step)
        assert p.sum() == pytest.approx(1) and p.min() >= 0.1 - 1e-12
        np.testing.assert_array_equal(p, mixer.proportions(state, step - step % 5 if step >= 5 else step))
    early = history(mixer, 10)  # what is observed later does not change what was decided
    np.testing.assert_array_equal(mixer.proportions(early, 10), mixer.proportions(state, 10))


@pytest.mark.parametrize("name", DYNAMIC)
def test_only_the_window_counts_and_the_state_stays_small(name):
    mixer = build_mixer(name, [1, 1], window=5, update_every=2, warmup_steps=0)
    state, late = mixer.init(), mixer.init()
    for step in range(40):
        values = {"reward": np.full((3, 4), step / 40), "advantage": np.full((3, 4), 1 / (step + 1)), "step": step}
        for domain in range(2):
            state = mixer.observe(state, domain, values)
            if step >= 33:
                late = mixer.observe(late, domain, values)
    np.testing.assert_allclose(mixer.signal(state, 40), mixer.signal(late, 40))
    assert max(map(len, state["entries"])) <= 7 and state["older"] == [3 * 33] * 2


def test_unknown_rows_are_no_evidence_and_a_silent_domain_is_average():
    mixer = reward_gap(3, **NOW)
    state = mixer.init()
    np.testing.assert_allclose(mixer.proportions(state, 3), 1 / 3)  # nothing is known
    valid = np.array([[True, False]])
    state = mixer.observe(state, 0, {"reward": np.array([[1.0, 0.0]]), "advantage": np.zeros((1, 2)), "valid": valid, "step": 0})
    state = mixer.observe(state, 1, {"reward": np.array([[0.0, 9.0]]), "advantage": np.zeros((1, 2)), "valid": valid, "step": 0})
    state = mixer.observe(state, 2, {"reward": np.array([[5.0, 9.0]]), "advantage": np.zeros((1, 2)), "valid": ~valid & False, "step": 0})
    np.testing.assert_allclose(mixer.signal(state, 1), [1.0, 0.0, np.nan])
    np.testing.assert_allclose(mixer.proportions(state, 1), softmax([-1.0, 0.0, -0.5]))


def test_observing_does_not_change_the_state_it_was_given():
    mixer = dump_ucb(2)
    state = mixer.init()
    mixer.observe(state, 0, {"reward": np.ones((1, 2)), "advantage": np.ones((1, 2)), "step": 0})
    assert state == mixer.init()


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("tscl", {"floor": 0.4}, "floor"), ("static", {"window": 5}, "static.*no such setting"), ("reward_gap", {"exploration": 2.0}, "exploration.*temperature")])
def test_settings_that_cannot_be_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(name, [1, 1, 1], **settings)


def test_every_setting_of_the_config_belongs_to_a_mixer():
    for field in set(C.Mixer.model_fields) - {"name"}:
        value = {"published_slope": True, "warmup_steps": 3, "window": 9, "update_every": 2}.get(field, 0.2)
        takers = []
        for name in DYNAMIC:
            try:
                build_mixer(name, [1, 1], **C.Mixer(name=name, **{field: value}).settings())
                takers.append(name)
            except ValueError:
                pass
        assert takers, field
