"""The kinds of replay behind one interface: ablations of POPO, hybrid, and the laws that all of them keep."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import G, T, make, origin, step, value

from rlvr_jax import config as C
from rlvr_jax import replay
from rlvr_jax.replay import buffer, choice, fill

KINDS = [{"kind": "popo"}, {"kind": "ineffective"}, {"kind": "stale", "min_age": 2}, {"kind": "kl"}, {"kind": "popo", "max_age": 3, "capacity": 2},
         {"kind": "hybrid", "reservoir_share": 0.5, "capacity": 3, "reservoir": 4, "max_age": 6}]
IDS = [" ".join(map(str, k.values())) for k in KINDS]


def build(N, seed=0, **kind):
    return replay.build(C.validate({"seed": seed, "replay": kind, "rollout": {"samples_per_prompt": G}, "train": {"prompts_per_step": N}}), T)


def drift(tokens, prompt_length, response_length):
    """A current policy whose log-probabilities differ from the stored ones the more, the larger the tokens."""
    return np.where(tokens > 0, -tokens - 1 + 1e-4 * tokens, 0).astype(np.float32)


def play(r, number, solved, state, **more):
    return step(state, number, solved, apply=r.apply, **more, **({"score": drift} if r.needs_score else {}))


# ---- laws ----

@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.lists(st.sampled_from([0, 0, 1, 2, 4]), min_size=3, max_size=3), min_size=1, max_size=10), seed=st.integers(0, 2**40))
def test_laws_of_every_kind(kind, steps, seed):
    r = build(3, seed, **kind)
    state, serial_of = r.init(), {}
    for number, solved in enumerate(steps):
        batch, after, metrics = play(r, number, solved, state)
        slots, live = origin(batch, 3), batch.valid.reshape(3, G).all(1)
        used = [s for s, ok in zip(slots, live) if ok]
        assert len(set(used)) == len(used), "a group is used at most once per batch"
        replayed = [s for s in used if s not in [(number, n) for n in range(3)]]
        assert all(s in serial_of for s in replayed), "only what was stored before this step; never this step's own copy"
        for n in range(3):
            assert slots[n] == (number, n) or solved[n] in (0, G), "a fresh group that teaches stays in its slot"
            assert live[n] == (0 < solved[n] < G or slots[n] in replayed), "what could not be filled is masked"
        ages = batch.policy_step.reshape(3, G)[[s in replayed for s in slots]].max(1, initial=0)
        assert metrics["replay/age_mean"] == (float(sum(number - a for a in ages)), len(replayed)), "age counts from the rollout"
        assert sum(metrics[f"replay/age/{k}"][0] for k in (*fill.AGES, "older")) == len(replayed) == value(metrics, "replayed_groups")
        assert value(metrics, "generated_groups") == 3 and value(metrics, "trained_groups") == live.sum()
        teaching = [0 < solved[n] < G or (slots[n] in replayed and 0 < serial_of[slots[n]] < G) for n in range(3)]
        assert value(metrics, "effective_fraction") == sum(teaching) / 3
        serial_of |= {(number, n): s for n, s in enumerate(solved) if 0 < s < G or kind["kind"] == "ineffective"}
        again = play(r, number, solved, state)
        assert all(np.array_equal(again[1][k], after[k]) for k in after) and np.array_equal(again[0].tokens, batch.tokens), "pure, also its draws"
        state = after


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_a_constant_reward_replays_nothing_of_its_own(kind):
    r = build(2, **kind)
    state = r.init()
    for number in range(4):
        batch, state, metrics = play(r, number, [0, 4], state)
        assert value(metrics, "effective_fraction") == value(metrics, "fresh_effective_fraction") == 0
        assert kind["kind"] == "ineffective" or (not batch.valid.any() and np.all(state["serial"] == -1))


@pytest.mark.parametrize("kind", [k for k in KINDS if k["kind"] != "stale"])
def test_a_buffer_of_one_group(kind):
    r = build(3, **({**kind, "capacity": 1} | ({"reservoir": 1} if kind["kind"] == "hybrid" else {})))
    _, state, _ = play(r, 1, [1, 2, 3], r.init())
    batch, _, metrics = play(r, 2, [0, 0, 0], state)
    assert batch.valid.reshape(3, G).all(1).sum() == value(metrics, "replayed_groups") >= 1 and origin(batch, 3)[0][0] == 1


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_resume_half_full_is_exact(kind, tmp_path):
    r = build(3, seed=5, **kind)

    def run(state, steps):
        seen = []
        for number in steps:
            batch, state, metrics = play(r, number, np.random.default_rng(number).choice([0, 2, 4], 3), state)
            seen.append((origin(batch, 3), batch.valid.tolist(), metrics))
        return state, seen

    whole, expected = run(r.init(), range(9))
    half, _ = run(r.init(), range(3))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "buffer", half)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "buffer", r.init())
    again, got = run({k: np.asarray(v) for k, v in restored.items()}, range(3, 9))
    assert got == expected[3:] and all(np.array_equal(again[k], whole[k]) for k in whole)


# ---- each kind ----

def test_filter_drops_and_fills_nothing():
    r = build(3, kind="filter")
    assert r.init() == {}
    batch, state, metrics = play(r, 1, [0, 2, 4], {})
    assert batch.valid.reshape(3, G).all(1).tolist() == [False, True, False] and state == {} and origin(batch, 3) == [(1, 0), (1, 1), (1, 2)]
    assert value(metrics, "effective_fraction") == value(metrics, "fresh_effective_fraction") == 1 / 3 and value(metrics, "trained_groups") == 1
    batch, _, metrics = play(r, 1, [0, 0, 4], {})
    assert not batch.valid.any() and value(metrics, "trained_groups") == 0, "a filter that keeps nothing"


def test_ineffective_replays_whatever_came_last():
    r = build(3, kind="ineffective")
    _, state, _ = play(r, 1, [2, 0, 4], r.init())
    batch, state, metrics = play(r, 2, [0, 3, 4], state)
    assert origin(batch, 3) == [(1, 2), (2, 1), (1, 1)] and batch.valid.all()
    assert value(metrics, "effective_fraction") == 1 / 3 and value(metrics, "replayed_groups") == 2
    assert sorted(state["serial"]) == [3, 4, 5]


def test_stale_groups_are_at_least_so_old_and_the_newest_of_those():
    r = build(2, kind="stale", min_age=3)
    state = r.init()
    assert len(state["serial"]) == 6, "room for min_age steps of groups"
    for number in range(1, 5):
        _, state, _ = play(r, number, [2, 2], state)
    batch, state, metrics = play(r, 5, [0, 2], state)
    assert origin(batch, 2) == [(2, 1), (5, 1)] and value(metrics, "age_mean") == 3
    r = build(2, kind="stale", min_age=3, capacity=2)
    state = r.init()
    for number in range(1, 5):
        _, state, _ = play(r, number, [2, 2], state)
    batch, _, _ = play(r, 5, [0, 2], state)
    assert batch.valid.reshape(2, G).all(1).tolist() == [False, True], "the buffer is too short to hold groups so old"


def test_max_age_bounds_what_is_replayed():
    r = build(2, kind="popo", max_age=2)
    _, state, _ = play(r, 1, [2, 2], r.init())
    for number, filled in ((3, True), (4, False)):
        assert play(r, number, [0, 0], state)[0].valid.all() == filled


def test_kl_takes_the_nearest_group_and_scores_once():
    r = build(2, kind="kl", capacity=4)
    asked = []

    def score(tokens, prompt_length, response_length):
        asked.append((tokens.shape, int((response_length > 0).sum())))
        t = np.arange(tokens.shape[1])
        live = (t >= prompt_length[:, None]) & (t < (prompt_length + response_length)[:, None])
        return np.where(live, -tokens - 1 + 0.1 * (tokens < 120), np.nan).astype(np.float32)  # step 1's first two groups have moved

    _, state, metrics = step(r.init(), 1, [0, 2], apply=r.apply, score=score)
    assert not asked and value(metrics, "replayed_groups") == 0, "nothing is stored: nothing to score"
    _, state, _ = step(state, 2, [2, 2], apply=r.apply, score=score)
    assert not asked, "nothing to fill"
    batch, _, _ = step(state, 3, [0, 0], apply=r.apply, score=score)
    assert asked == [((4 * G, T), 3 * G)] and origin(batch, 2) == [(2, 1), (2, 0)], "equally near: the most recent first"
    moved = lambda *rows: score(*rows) + np.where(rows[0] >= 200, 0.3, 0).astype(np.float32)  # noqa: E731
    assert origin(step(state, 3, [0, 2], apply=r.apply, score=moved)[0], 2)[0] == (1, 1)
    with pytest.raises(ValueError, match="score="):
        step(state, 3, [0, 0], apply=r.apply)


def test_group_kl_by_hand():
    _, state, _ = step(replay.init(2, G, T), 1, [2])
    logprob = state["behavior_logprob"] + np.float32(np.log(2))
    logprob[:, 1] = np.nan  # an unknown row is not read
    state["valid"][0, 1] = False
    logprob[..., 4:] = np.inf  # padding is not read
    kl = choice.group_kl(state, logprob)
    assert kl[0] == pytest.approx(2 - 1 - np.log(2), rel=1e-5) and kl[1] == np.inf


def test_kl_estimate_is_unbiased():
    """On samples of the behaviour policy its mean is KL(behaviour || current)."""
    p, q, rng = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2]), np.random.default_rng(0)
    tokens = rng.choice(3, (1, 200, 200), p=p)
    state = {"tokens": tokens, "prompt_length": np.zeros((1, 200), int), "response_length": np.full((1, 200), 200), "valid": np.ones((1, 200), bool),
             "behavior_logprob": np.log(p)[tokens]}
    assert choice.group_kl(state, np.log(q)[tokens])[0] == pytest.approx((p * np.log(p / q)).sum(), rel=0.05)


# ---- hybrid ----

def test_the_reservoir_is_a_uniform_sample_of_all_groups_seen():
    batch, prompt_id = make(1, [2] * 20)
    empty, kept = buffer.init(1, G, T, reservoir=5), np.zeros(20)
    for draws in np.random.default_rng(0).random((400, 20)):
        state = empty
        for part in np.split(np.arange(20), [3, 4, 11]):  # in several steps
            state = buffer.insert(state, batch, prompt_id, part, fifo=1, draws=draws[part])
        stored = state["serial"][1:]
        assert len(set(stored)) == 5 and state["serial"][0] == 19
        np.testing.assert_array_equal(state["prompt_id"], prompt_id[state["serial"]])
        kept[stored] += 1
    assert np.abs(kept / 400 - 0.25).max() < 0.09  # 4 standard deviations of a share of 400


def test_hybrid_shares():
    """The share of reservoir draws is the configured one; without it hybrid is popo."""
    plain, never = build(4, kind="popo"), build(4, kind="hybrid", reservoir_share=0)
    a, b = plain.init(), never.init()
    for number in range(6):
        solved = np.random.default_rng(number).choice([0, 1, 4], 4)
        x, a, _ = play(plain, number, solved, a)
        y, b, _ = play(never, number, solved, b)
        assert np.array_equal(x.tokens, y.tokens) and np.array_equal(x.valid, y.valid)
    state = buffer.init(1000, G, T, reservoir=1000)
    state["serial"] = np.arange(2000, dtype=np.int32)
    places = choice.hybrid(7, 1000, share=0.2, max_age=16)(state, 900, 3, None)
    assert len(set(places)) == 900 and 0.15 < np.mean(places >= 1000) < 0.25
    assert np.array_equal(places, choice.hybrid(7, 1000, share=0.2, max_age=16)(state, 900, 3, None))
    assert not np.array_equal(places, choice.hybrid(8, 1000, share=0.2, max_age=16)(state, 900, 3, None))
    state["policy_step"] += 50
    state["policy_step"][1000:] -= 47  # the reservoir is 17 steps too old
    assert np.all(choice.hybrid(7, 1000, share=1.0, max_age=16)(state, 10, 20, None) < 1000), "falls back to the ring"


# ---- config ----

def test_settings_that_a_kind_does_not_have_are_refused():
    for settings_, message in (({"kind": "popo", "min_age": 3}, "replay 'popo' has no setting 'min_age'; it takes by, capacity, max_age"),
                               ({"kind": "filter", "capacity": 3}, "'filter' has no setting 'capacity'"), ({"kind": "arpo", "by": "accuracy"}, "'arpo' has no setting 'by'"),
                               ({"kind": "stale", "min_age": 5, "max_age": 4}, "no group could be replayed")):
        with pytest.raises(C.ConfigError, match=message):
            C.validate({"replay": settings_})
    assert replay.build(C.validate({}), T) is None


def test_by_accuracy_reaches_every_kind():
    """A format bonus makes rewards differ in a group that is wrong throughout."""
    batch, prompt_id = make(1, [0, 2])
    batch = batch.replace(reward=batch.reward + np.tile(np.float32([0.1, 0, 0, 0]), 2))
    for kind in ("popo", "filter", "hybrid"):
        for by, live in (("reward", [True, True]), ("accuracy", [False, True])):
            r = build(2, kind=kind, by=by)
            out, _, _ = r.apply(r.init(), batch, prompt_id=prompt_id, step=1)
            assert out.valid.reshape(2, G).all(1).tolist() == live, (kind, by)
