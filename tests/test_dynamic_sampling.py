"""Dynamic sampling: what is kept, what is missing, what waits for the next step; and the soft overlong penalty."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import G, T, make, origin

from rlvr_jax import config as C
from rlvr_jax import dynamic_sampling, replay
from rlvr_jax.rewards import overlong


def build(N, max_batches=4, by="reward"):
    return dynamic_sampling.build(C.validate({"dynamic_sampling": {"max_batches": max_batches, "by": by}, "rollout": {"samples_per_prompt": G},
                                              "train": {"prompts_per_step": N, "micro_batch": 16}}), T)


def play(d, pool, step, supply):
    """One step; ``supply`` gives the solved counts of each batch. The tags of batch k are those of step ``10 step + k``."""
    pool, made = d.start(pool), 0
    while d.more(pool):
        batch, prompt_id = make(10 * step + made, next(supply))
        batch = batch.replace(policy_step=np.full_like(batch.policy_step, step))
        pool, made = d.collect(pool, batch, prompt_id), made + 1
    return d.release(pool, batch, prompt_id, step), made


def value(metrics, name):
    total, count = metrics[f"dynamic/{name}"]
    return total / count


def live(released, N):
    return released.batch.valid.reshape(N, G).all(1).tolist()


def test_batches_are_made_until_enough_groups_are_effective_and_the_rest_waits():
    d = build(3)
    supply = iter([[2, 0, 4], [1, 3, 2], [0, 0, 1], [2, 2, 0]])
    first, made = play(d, d.init(), 1, supply)
    assert made == 2 and origin(first.batch, 3) == [(10, 0), (11, 0), (11, 1)] and live(first, 3) == [True] * 3
    assert first.prompt_id.tolist() == [10000, 11000, 11001] and first.warning is None and first.batch.domain.tolist() == [0, 0, 1]
    assert {k: value(first.metrics, k) for k in ("batches", "generated_groups", "trained_groups", "waiting_groups", "age_mean", "short")} == {
        "batches": 2, "generated_groups": 6, "trained_groups": 3, "waiting_groups": 1, "age_mean": 0, "short": 0}
    assert value(first.metrics, "effective_fraction") == 4 / 6
    second, made = play(d, first.state, 2, supply)
    assert made == 2 and origin(second.batch, 3) == [(11, 2), (20, 2), (21, 0)], "what waited comes first"
    assert second.batch.policy_step.reshape(3, G)[:, 0].tolist() == [1, 2, 2] and value(second.metrics, "age_mean") == 1 / 3
    assert value(second.metrics, "effective_fraction") == 3 / 6, "of what this step generated"
    assert value(second.metrics, "waiting_groups") == 1


def test_a_group_is_handed_on_bit_for_bit():
    d = build(2)
    sources = [make(10, [0, 2]), make(11, [3, 1])]
    pool = d.start(d.init())
    for batch, prompt_id in sources:
        pool = d.collect(pool, batch, prompt_id)
    out = d.release(pool, *sources[-1], 1).batch
    for name in replay.FIELDS:
        if getattr(out, name) is not None:
            rows = slice(1, 2) if name == "domain" else slice(G, 2 * G)
            np.testing.assert_array_equal(getattr(out, name)[: len(getattr(out, name)) // 2], getattr(sources[0][0], name)[rows], err_msg=name)


def test_after_max_batches_the_step_trains_on_what_there_is():
    d = build(3, max_batches=2)
    released, made = play(d, d.init(), 1, iter([[0, 4, 0], [0, 1, 4]]))
    assert made == 2 and live(released, 3) == [True, False, False] and origin(released.batch, 3)[0] == (11, 1)
    assert value(released.metrics, "short") == 1 and value(released.metrics, "trained_groups") == 1
    assert "step 1: 1 of 3 groups are effective after 2 batches" in released.warning and "\n" not in released.warning
    released, made = play(d, released.state, 2, iter([[0, 0, 0], [4, 4, 4]]))
    assert made == 2 and not released.batch.valid.any() and value(released.metrics, "trained_groups") == 0, "a reward that is constant"
    assert released.metrics["dynamic/age_mean"] == (0, 0) and value(released.metrics, "effective_fraction") == 0


def test_a_step_of_one_group():
    d = build(1, max_batches=3)
    released, made = play(d, d.init(), 1, iter([[0], [2]]))
    assert made == 2 and live(released, 1) == [True] and value(released.metrics, "waiting_groups") == 0


@settings(max_examples=60, deadline=None)
@given(N=st.integers(1, 4), max_batches=st.integers(1, 4), steps=st.integers(1, 5), data=st.data())
def test_laws(N, max_batches, steps, data):
    d, used, waiting = build(N, max_batches), [], []
    pool = d.init()
    for step in range(1, steps + 1):
        batches = [data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 4]), min_size=N, max_size=N)) for _ in range(max_batches)]
        before = {k: v.copy() for k, v in pool.items()}
        released, made = play(d, pool, step, iter(batches))
        assert all(np.array_equal(pool[k], before[k]) for k in pool), "pure"
        assert 1 <= made <= max_batches, "at least one batch, never more than allowed"
        came = waiting + [(10 * step + k, n) for k in range(made) for n in range(N) if 0 < batches[k][n] < G]
        enough = [len(waiting) + sum(0 < s < G for b in batches[:k] for s in b) >= N for k in range(made + 1)]
        assert not any(enough[:made]) and (enough[made] or made == max_batches), "no batch more than needed"
        trained = [o for o, ok in zip(origin(released.batch, N), live(released, N)) if ok]
        assert trained == came[:N], "the oldest first, each once"
        assert not set(trained) & set(used)
        assert (released.warning is None) == (len(trained) == N) and len(released.batch.domain) == len(released.prompt_id) == N
        assert [p for p, ok in zip(released.prompt_id, live(released, N)) if ok] == [1000 * s + g for s, g in trained]
        used, waiting, pool = used + trained, came[N:], released.state
        assert len(waiting) == value(released.metrics, "waiting_groups") < N


def test_resume_with_waiting_groups_is_exact(tmp_path):
    d = build(3)
    supply = lambda step: iter(np.random.default_rng(step).choice([0, 1, 2, 4], (9, 3)).tolist())  # noqa: E731
    pool = play(d, d.init(), 1, iter([[1, 0, 2], [3, 1, 2]]))[0].state
    assert dynamic_sampling.stored(pool) == 2
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "pool", pool)
        saver.wait_until_finished()
        restored = {k: np.asarray(v) for k, v in saver.restore(tmp_path / "pool", d.init()).items()}
    for step in range(2, 7):
        a, b = play(d, pool, step, supply(step))[0], play(d, restored, step, supply(step))[0]
        assert a.metrics == b.metrics and np.array_equal(a.batch.tokens, b.batch.tokens) and np.array_equal(a.batch.valid, b.batch.valid)
        pool, restored = a.state, b.state


def test_what_it_leaves_empty_replay_can_fill():
    d = build(2, max_batches=1)
    r = replay.build(C.validate({"replay": {}, "rollout": {"samples_per_prompt": G}, "train": {"prompts_per_step": 2, "micro_batch": 16}}), T)
    pool, memory = d.init(), r.init()
    for step, (solved, want) in enumerate([([2, 0], [True, False]), ([0, 1], [True, True])], 1):
        released, _ = play(d, pool, step, iter([solved]))
        batch, memory, _ = r.apply(memory, released.batch, prompt_id=released.prompt_id, step=step)
        pool = released.state
        assert batch.valid.reshape(2, G).all(1).tolist() == want
    assert origin(batch, 2) == [(20, 1), (10, 0)]


def test_by_accuracy_and_misuse():
    batch, prompt_id = make(1, [0, 2])
    batch = batch.replace(reward=batch.reward + np.tile(np.float32([0.1, 0, 0, 0]), 2))
    for by, kept in (("reward", 2), ("accuracy", 1)):
        d = build(2, by=by)
        assert dynamic_sampling.stored(d.collect(d.init(), batch, prompt_id)) == kept
    d = build(2)
    full = d.collect(d.init(), batch, prompt_id)
    assert not d.more(full)
    with pytest.raises(ValueError, match="2 of 2 groups are there and 2 more came"):
        d.collect(full, batch, prompt_id)
    assert dynamic_sampling.build(C.validate({}), T) is None


# ---- overlong answers ----

def test_soft_overlong_penalty_by_hand():
    got = overlong.penalty(np.array([0, 79, 80, 81, 90, 99, 100, 120]), longest=100, buffer=20)
    np.testing.assert_allclose(got, [0, 0, 0, -0.05, -0.5, -0.95, -1, -1], rtol=1e-6)
    assert got.dtype == np.float32 and not np.signbit(got[:3]).any()


@given(st.integers(1, 500), st.data())
def test_the_penalty_is_monotone_and_bounded(longest, data):
    buffer = data.draw(st.integers(1, longest))
    got = overlong.penalty(np.arange(2 * longest), longest, buffer)
    assert np.all(np.diff(got) <= 0) and got[longest - buffer] == 0 and got[longest] == got.min() == -1 and np.sum((got < 0) & (got > -1)) == buffer - 1


def test_shaped_rewards():
    config = C.validate({"rollout": {"max_new_tokens": 100}, "algorithm": {"overlong_buffer": 20}})
    reward, valid, length = np.float32([1, 1, 0, 0]), np.array([True, True, True, False]), np.array([50, 90, 100, 100])
    shaped, metrics = overlong.shaped(config, reward, valid, length), overlong.metrics(config, valid, length)
    np.testing.assert_allclose(shaped, [1, 0.5, -1, 0])
    assert metrics == {"reward/overlong_penalty": (-1.5, 3.0), "response/overlong": (2.0, 3.0)}
    assert overlong.shaped(C.validate({}), reward, valid, length) is reward
    assert overlong.metrics(C.validate({}), valid, length) == {}
    with pytest.raises(C.ConfigError, match=r"overlong_buffer: 65 is more than rollout\.max_new_tokens 64"):
        C.validate({"algorithm": {"overlong_buffer": 65}})
