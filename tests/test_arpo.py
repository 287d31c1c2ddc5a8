"""ARPO: a stored success in a group that failed throughout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import G, T, make, step, value

from rlvr_jax import config as C
from rlvr_jax import replay
from rlvr_jax.replay import arpo


def build(N, seed=0, **more):
    config = C.validate({"seed": seed, "replay": {"kind": "arpo", **more}, "rollout": {"samples_per_prompt": G}, "train": {"prompts_per_step": N}})
    return replay.build(config, T)


def play(r, state, number, solved, prompt, **more):
    return step(state, number, solved, apply=r.apply, prompt=np.array(prompt), **more)


def test_the_first_row_of_an_all_failed_group_becomes_a_stored_success():
    r = build(2)
    first, state, metrics = play(r, r.init(), 1, [2, 0], [7, 8])
    assert value(metrics, "injected_rows") == 0 and value(metrics, "all_failed") == 0.5
    fresh, _ = make(4, [0, 0])
    out, _, metrics = play(r, state, 4, [0, 0], [7, 8])
    row = int(out.tokens[0, 1])
    assert row in (100, 101), "one of the two successes of prompt 7"
    for name in replay.FIELDS:
        x, y, old = (getattr(b, name) for b in (out, fresh, first))
        if x is not None and name != "domain":
            np.testing.assert_array_equal(x[0], old[row - 100], err_msg=name)  # tokens, log-probabilities and policy step as they were sampled
            np.testing.assert_array_equal(x[1:], y[1:], err_msg=name)
    assert value(metrics, "injected_rows") == 1 and value(metrics, "age_mean") == 3 and value(metrics, "age/4") == 1
    assert value(metrics, "fresh_effective_fraction") == 0 and value(metrics, "effective_fraction") == 0.5
    assert out.domain.tolist() == [0, 1]


def test_all_failed_by_hand():
    reward = np.float32([[0, 0, 0, 0], [0, 1, 0, 0], [0.1, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2], [0.15, 0, 0.15, 0], [0, 9, 0, 0], [0, 0, 0, 0]])
    valid = np.ones((7, 4), bool)
    valid[5, 1] = False
    valid[6] = False
    assert arpo.all_failed(reward, valid).tolist() == [True, False, True, False, False, True, False]


def test_a_prompt_keeps_its_newest_successes():
    r = build(1, successes_per_prompt=3, capacity=10)
    state = r.init()
    for number in range(1, 4):
        _, state, _ = play(r, state, number, [2], [7])
    held = state["tokens"][state["serial"] >= 0, 1]
    assert sorted(held) == [201, 300, 301]
    _, state, _ = play(r, state, 4, [2], [8])
    assert sorted(state["tokens"][state["serial"] >= 0, 1]) == [201, 300, 301, 400, 401], "another prompt takes none of its places"
    small = build(1, capacity=2)
    state = small.init()
    for number, prompt in ((1, 7), (2, 8)):
        _, state, _ = play(small, state, number, [2], [prompt])
    assert set(state["prompt_id"]) == {8}, "full: the oldest of all give way"


def test_a_stored_row_is_used_once_per_batch_and_only_for_its_own_prompt():
    r = build(3)
    _, state, _ = play(r, r.init(), 1, [1, 0, 0], [7, 8, 9])
    out, _, metrics = play(r, state, 2, [0, 0, 0], [7, 7, 9])
    assert out.correct.reshape(3, G).any(1).tolist() == [True, False, False] and value(metrics, "injected_rows") == 1
    batch, _ = make(2, [0, 0, 0])
    tokens = batch.tokens.copy()
    tokens[:, 0] = 5  # an id is a hash: here another prompt has it
    out, _, metrics = r.apply(state, batch.replace(tokens=tokens), prompt_id=np.array([7, 8, 9]), step=2)
    assert value(metrics, "injected_rows") == 0


def test_unknown_rows_are_no_successes_and_no_failures():
    r = build(1)
    batch, _ = make(1, [2])
    valid = batch.valid.copy()
    valid[0] = False
    _, state, _ = r.apply(r.init(), batch.replace(valid=valid), prompt_id=np.array([7]), step=1)
    assert state["tokens"][state["serial"] >= 0, 1].tolist() == [101]
    lost, _ = make(2, [0])
    _, _, metrics = r.apply(state, lost.replace(valid=np.zeros(G, bool)), prompt_id=np.array([7]), step=2)
    assert value(metrics, "injected_rows") == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from([0, 0, 1, 4]), st.integers(5, 7)), min_size=3, max_size=3), min_size=1, max_size=8), st.integers(0, 2**33))
def test_laws(steps, seed):
    r = build(3, seed, successes_per_prompt=2, capacity=5)
    state = r.init()
    for number, groups in enumerate(steps, 1):
        solved, prompt = zip(*groups)
        out, after, metrics = play(r, state, number, solved, prompt)
        again = play(r, state, number, solved, prompt)
        assert np.array_equal(out.tokens, again[0].tokens) and all(np.array_equal(after[k], again[1][k]) for k in after), "pure, and the draw is a function of the step"
        old = out.policy_step < number
        assert old.sum() == value(metrics, "injected_rows") and not np.any(np.delete(old, np.s_[::G])), "first rows only"
        assert len(set(out.tokens[old, 1])) == old.sum(), "never twice in a batch"
        assert np.all(out.correct[old]) and all(solved[b // G] == 0 for b in np.flatnonzero(old))
        assert set(out.tokens[old, 1]) <= set(state["tokens"][state["serial"] >= 0, 1]), "never of this very batch"
        held = after["serial"] >= 0
        assert max(np.unique(after["prompt_id"][held], return_counts=True)[1], default=0) <= 2
        assert len(set(after["serial"][held])) == held.sum()
        state = after


def test_longer_rows_widen_the_batch():
    r = build(1)
    _, state, _ = play(r, r.init(), 1, [2], [7])
    out, _, _ = play(r, state, 2, [0], [7], T=4)
    assert out.tokens.shape == (G, 4)
    tall, _ = make(1, [2])
    _, state, _ = r.apply(r.init(), tall.replace(response_length=tall.response_length + 2), prompt_id=np.array([7]), step=1)
    out, _, _ = play(r, state, 2, [0], [7], T=4)
    assert out.tokens.shape == (G, T)
    with pytest.raises(ValueError, match="at most 6 tokens, got one of 9"):
        r.apply(state, tall.replace(response_length=tall.response_length + 5), prompt_id=np.array([7]), step=3)
