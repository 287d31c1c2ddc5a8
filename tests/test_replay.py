"""Laws of group replay: what is put into a slot, what never is, ages, masking, exact resume."""

import dataclasses

import numpy as np
import orbax.checkpoint as ocp
import pytest
from replay_cases import G, T, make, origin, step, value

from rlvr_jax import replay
from rlvr_jax.replay.choice import recent
from rlvr_jax.replay.fill import fill
from rlvr_jax.types import UpdateBatch


def test_the_stored_fields_are_those_of_a_batch():
    assert list(replay.FIELDS) == [f.name for f in dataclasses.fields(UpdateBatch)]


def test_most_recent_effective_groups_fill_the_slots():
    state = replay.init(4, G, T)
    first, state, metrics = step(state, 1, [2, 0, 4, 1])
    assert origin(first, 4) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert first.valid.reshape(4, G).all(1).tolist() == [True, False, False, True], "buffer empty: masked, not replaced"
    assert value(metrics, "effective_fraction") == value(metrics, "fresh_effective_fraction") == 0.5
    second, state, metrics = step(state, 4, [0, 3, 4, 0])
    assert origin(second, 4) == [(1, 3), (4, 1), (1, 0), (4, 3)], "newest first; no group twice; slot 3 keeps its own"
    assert second.valid.reshape(4, G).all(1).tolist() == [True, True, True, False]
    assert second.domain.tolist() == [3, 1, 0, 3]
    assert value(metrics, "effective_fraction") == 0.75 and value(metrics, "fresh_effective_fraction") == 0.25
    assert value(metrics, "age_mean") == 3 and value(metrics, "replayed_groups") == 2 and value(metrics, "same_prompt") == 0
    assert sorted(state["serial"]) == [-1, 0, 1, 2]


def test_a_replayed_group_is_stored_bit_for_bit():
    state = replay.init(2, G, T, entropy=True)
    first, state, _ = step(state, 1, [2], entropy=True)
    second, _, _ = step(state, 2, [0], entropy=True)
    for name in replay.FIELDS:
        np.testing.assert_array_equal(getattr(second, name), getattr(first, name), err_msg=name)
        assert getattr(second, name).dtype == getattr(first, name).dtype


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8])
def test_laws_over_a_long_run(capacity):
    r = np.random.default_rng(capacity)
    N, state, seen = 5, replay.init(capacity, G, T), []  # seen: (step, group) of effective groups, oldest first
    for number in range(30):
        solved = r.choice([0, 0, 1, 2, 4], N)
        fresh = [(number, n) for n in range(N) if 0 < solved[n] < G]
        batch, after, metrics = step(state, number, solved)
        slots = origin(batch, N)
        live = batch.valid.reshape(N, G).all(1)
        used = [s for s, ok in zip(slots, live) if ok]
        assert len(set(used)) == len(used), "a group is used at most once"
        replayed = [s for s in used if s[0] != number]
        assert replayed == seen[::-1][: len(replayed)], "most recent first, never a copy of this step's groups"
        assert len(replayed) == min(N - len(fresh), len(seen))
        assert [s for s in used if s[0] == number] == fresh
        ages = (number - batch.policy_step.reshape(N, G)[:, 0])[[s in replayed for s in slots]]
        assert ages.tolist() == [number - s[0] for s in slots if s in replayed], "age counts from the rollout"
        assert metrics["replay/age_mean"] == (ages.sum(), len(ages))
        state, seen = after, (seen + fresh)[-capacity:]


def test_pure_and_the_batch_is_not_changed():
    _, state, _ = step(replay.init(3, G, T), 1, [2, 1])
    before = {k: v.copy() for k, v in state.items()}
    batch, prompt_id = make(2, [0, 3])
    kept = {f: np.copy(getattr(batch, f)) for f in replay.FIELDS if f != "entropy"}
    a, after_a, _ = replay.apply(state, batch, prompt_id=prompt_id, step=2)
    b, after_b, _ = replay.apply(state, batch, prompt_id=prompt_id, step=2)
    for name, x in before.items():
        np.testing.assert_array_equal(state[name], x)
        np.testing.assert_array_equal(after_a[name], after_b[name])
    for name, x in kept.items():
        np.testing.assert_array_equal(getattr(batch, name), x)
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_resume_with_a_half_full_buffer_is_exact(tmp_path):
    def play(state, steps):
        out = []
        for number in steps:
            batch, state, metrics = step(state, number, np.random.default_rng(number).choice([0, 1, 4], 3))
            out.append((batch, metrics))
        return state, out

    whole, expected = play(replay.init(8, G, T), range(6))
    half, _ = play(replay.init(8, G, T), range(2))
    assert 0 < np.count_nonzero(half["serial"] >= 0) < 8
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "buffer", half)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "buffer", replay.init(8, G, T))
    assert {k: (v.shape, v.dtype) for k, v in restored.items()} == {k: (v.shape, v.dtype) for k, v in half.items()}
    again, got = play({k: np.asarray(v) for k, v in restored.items()}, range(2, 6))
    for (a, m), (b, n) in zip(got, expected[2:], strict=True):
        assert m == n
        for name in replay.FIELDS:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name in whole:
        np.testing.assert_array_equal(again[name], whole[name])


def test_a_buffer_of_one_group():
    state = replay.init(1, G, T)
    _, state, _ = step(state, 1, [1, 2, 3])
    batch, state, metrics = step(state, 2, [0, 0, 0])
    assert origin(batch, 3) == [(1, 2), (2, 1), (2, 2)], "the last one inserted is the one kept"
    assert batch.valid.reshape(3, G).all(1).tolist() == [True, False, False]
    batch, _, metrics = step(state, 9, [4, 4, 4])
    assert origin(batch, 3)[0] == (1, 2) and value(metrics, "age_mean") == 8, "replay does not consume and does not rejuvenate"


def test_constant_rewards_and_unknown_rows_are_ineffective():
    reward = np.float32([[0.1] * 4, [0, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    valid = np.array([[True] * 4, [True, False, True, True], [True, True, False, False], [False] * 4])
    assert replay.effective_groups(reward, valid).tolist() == [False, False, True, False]


def test_effective_by_reward_or_by_accuracy():
    """A format bonus makes rewards differ in a group that is wrong throughout."""
    batch, prompt_id = make(1, [0, 2])
    batch = batch.replace(reward=batch.reward + np.tile(np.float32([0.1, 0, 0, 0]), 2))
    for by, fresh in (("reward", 1.0), ("accuracy", 0.5)):
        _, _, metrics = replay.apply(replay.init(2, G, T), batch, prompt_id=prompt_id, step=1, by=by)
        assert value(metrics, "fresh_effective_fraction") == fresh


def test_same_prompt_fresh_and_replayed_is_counted():
    _, state, _ = step(replay.init(4, G, T), 1, [2, 2], prompt=[7, 8])
    _, _, metrics = step(state, 2, [2, 0, 0], prompt=[7, 8, 9])
    assert value(metrics, "replayed_groups") == 2
    assert value(metrics, "same_prompt") == 1, "7 stays fresh; the fresh 8 gave way"


def test_batches_of_other_widths():
    state = replay.init(4, G, 6)
    _, state, _ = step(state, 1, [2], T=9)
    narrow, state, _ = step(state, 2, [0], T=4)
    assert narrow.tokens.shape == (G, 4) and origin(narrow, 1) == [(1, 0)]
    tall, prompt_id = make(3, [2])
    tall = tall.replace(prompt_length=tall.prompt_length + 2)
    _, state, _ = replay.apply(state, tall, prompt_id=prompt_id, step=3)
    widened, _, _ = step(state, 4, [0], T=4)
    assert widened.tokens.shape == (G, 6), "a replayed row that needs the buffer's width gets it"


def test_misfits_are_refused():
    state = replay.init(2, G, T)
    long, prompt_id = make(1, [2])
    with pytest.raises(ValueError, match="at most 6 tokens, got one of 8"):
        replay.apply(state, long.replace(response_length=long.response_length + 4), prompt_id=prompt_id, step=1)
    with pytest.raises(ValueError, match="no room for entropies"):
        step(state, 1, [2], entropy=True)
    with pytest.raises(ValueError, match="groups of 8 rows, got 4 rows in 1 groups"):
        step(replay.init(2, 8, T), 1, [2])
    with pytest.raises(ValueError, match="expected 'reward' or 'accuracy'"):
        step(state, 1, [2], by="length")
    with pytest.raises(ValueError, match="capacity 0"):
        replay.init(0, G, T)


def test_processes_that_see_the_same_choose_the_same():
    """The choice reads only insertion order, ages and the effective flags, so it is the same on every host."""
    state = {"serial": np.int32([6, 7, 4, 5, -1]), "policy_step": np.zeros((5, G), np.int32)}
    effective = np.array([True, False, False, True, False, False, False, False])
    assert fill(effective, recent()(state, 6, 9, None)).tolist() == [-1, 1, 0, -1, 3, 2, -1, -1]
