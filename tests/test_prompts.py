"""Which prompts are rolled out: the choosers against what their papers say, and the stream that feeds them."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax import config as C
from rlvr_jax import data
from rlvr_jax.host_random import generator
from rlvr_jax.strategies import prompts

KINDS = [{"kind": "random"}, {"kind": "mopps"}, {"kind": "greso"}]
ids = lambda *x: np.array(x, np.int32)  # noqa: E731


def build(**settings):
    return prompts.build(C.validate({"data": {"prompts": settings}}))


def tell(chooser, state, step, **solved):
    """Groups of 4 samples: p7=3 means prompt 7 was solved 3 times."""
    names = ids(*(int(k[1:]) for k in solved))
    return chooser.observe(state, names, ids(*solved.values()), np.full(len(names), 4), step)


# ---- laws of all choosers ----

@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k["kind"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**40))
def test_every_chooser_fills_its_slots_with_different_prompts(kind, data, seed):
    chooser = build(**kind)
    state = chooser.init()
    for step in range(3):
        domains = data.draw(st.integers(1, 3))
        candidates = [ids(*data.draw(st.lists(st.integers(0, 12), max_size=10))) for _ in range(domains)]
        counts = [data.draw(st.integers(0, 8)) for _ in range(domains)]
        proposals = chooser.propose(state, seed, step, candidates, counts)
        again = chooser.propose(state, seed, step, candidates, counts)
        for c, n, p, q in zip(candidates, counts, proposals, again, strict=True):
            assert len(p.indices) == min(n, len(c)) and np.all(np.diff(p.indices) > 0), "as many as there are slots, positions ascending"
            assert p.indices.max(initial=-1) < p.seen <= len(c) or (n == 0 and p.seen <= len(c))
            if kind["kind"] != "random":
                assert len(set(c[p.indices])) == min(n, len(set(c))), "no prompt twice while there are others"
            assert np.array_equal(p.indices, q.indices) and p.seen == q.seen
        before = {k: v.copy() for k, v in state.items()}
        chosen = np.concatenate([c[p.indices] for c, p in zip(candidates, proposals)])
        known = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(chosen), max_size=len(chosen))), int)
        new = chooser.observe(state, chosen, known // 2, known, step)
        assert all(np.array_equal(state[k], before[k]) for k in before), "pure"
        state = new


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda k: k["kind"])
def test_a_restored_state_goes_on_exactly(kind, tmp_path):
    chooser = build(**kind, remembered=40)
    rng = np.random.default_rng(0)
    history = [(rng.integers(0, 60, 5).astype(np.int32), rng.integers(0, 5, 5)) for _ in range(20)]

    def run(state, steps):
        seen = []
        for step in steps:
            names, solved = history[step]
            seen.append([p.indices.tolist() for p in chooser.propose(state, 3, step, [np.arange(30, dtype=np.int32)], [6])])
            state = chooser.observe(state, names, solved, np.full(5, 4), step)
        return state, seen

    whole, expected = run(chooser.init(), range(20))
    half, _ = run(chooser.init(), range(5))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "prompts", half)
        saver.wait_until_finished()
        restored = {k: np.asarray(v) for k, v in saver.restore(tmp_path / "prompts", chooser.init()).items()}
    assert {k: (v.shape, v.dtype) for k, v in restored.items()} == {k: (v.shape, v.dtype) for k, v in half.items()}
    again, got = run(restored, range(5, 20))
    assert got == expected[5:] and all(np.array_equal(again[k], whole[k]) for k in whole)


def test_the_draw_depends_on_seed_step_round_and_domain():
    chooser = build(kind="mopps")
    draw = lambda *a, **k: chooser.propose(chooser.init(), *a, [np.arange(64, dtype=np.int32)] * 2, [8, 8], **k)  # noqa: E731
    base = [p.indices.tolist() for p in draw(0, 0)]
    others = [p.indices.tolist() for a, k in (((1, 0), {}), ((0, 1), {}), ((0, 0), {"round": 1})) for p in draw(*a, **k)]
    assert base[0] != base[1] and all(o not in base for o in others)


# ---- MoPPS ----

def test_mopps_posterior_by_hand():
    chooser = build(kind="mopps", decay=0.5)
    state = tell(chooser, chooser.init(), 0, p7=3, p9=0)
    state = tell(chooser, state, 1, p7=4)
    got = prompts.look_up(state, ids(7, 8, 9), {"alpha": np.float32(1), "beta": np.float32(1)})
    assert got["alpha"].tolist() == [0.5 * 4 + 0.5 + 4, 1, 1] and got["beta"].tolist() == [0.5 * 2 + 0.5 + 0, 1, 5]
    keep = build(kind="mopps", decay=1.0)
    state = tell(keep, tell(keep, keep.init(), 0, p7=3), 1, p7=1)
    assert (state["alpha"][0], state["beta"][0]) == (1 + 3 + 1, 1 + 1 + 3), "decay 1 counts everything"


def test_mopps_counts_known_samples_and_passes_unknown_groups_over():
    chooser = build(kind="mopps", decay=1.0)
    state = chooser.observe(chooser.init(), ids(1, 2, 1), ids(1, 0, 2), ids(3, 0, 2), 5)
    assert state["used"] == 1 and state["prompt_id"][0] == 1 and state["visited"][0] == 5
    assert (state["alpha"][0], state["beta"][0]) == (1 + 1 + 2, 1 + 2 + 0), "a prompt that comes twice is learned from twice"


def test_mopps_takes_the_draws_nearest_to_one_half():
    chooser = build(kind="mopps", decay=1.0)
    state, names = chooser.init(), np.arange(30, dtype=np.int32)
    for step in range(200):  # certain: 0..9 never solved, 10..19 always, 20..29 half of the time
        state = chooser.observe(state, names, np.repeat([0, 4, 2], 10), np.full(30, 4), step)
    proposal, = chooser.propose(state, 0, 0, [names], [10])
    assert proposal.indices.tolist() == list(range(20, 30)) and proposal.seen == 30
    drawn = generator(0, "prompts", 0, 0, 0).beta(state["alpha"][:30], state["beta"][:30])
    proposal, = chooser.propose(state, 0, 0, [names], [4])
    assert set(proposal.indices) == set(np.argsort((drawn - 0.5) ** 2)[:4])


def test_mopps_knows_nothing_at_first_and_is_uniform():
    chooser, chosen = build(kind="mopps"), np.zeros(16)
    for seed in range(400):
        chosen[chooser.propose(chooser.init(), seed, 0, [np.arange(16, dtype=np.int32)], [4])[0].indices] += 1
    assert np.abs(chosen / 400 - 0.25).max() < 0.09


# ---- GRESO ----

def test_greso_skips_by_the_run_of_groups_that_taught_nothing():
    """p^z: after z visits without variance a prompt stays with probability 0.5^z, never below 0.01."""
    chooser = build(kind="greso")
    state, names = chooser.init(), np.arange(4, dtype=np.int32)
    state = prompts.write(state, names, {"run": np.array([0, 1, 3, 40]), "all_right": np.array([False, True, False, True])}, 0)
    stayed = np.zeros(4)
    for seed in range(1000):
        for k in range(4):
            other = ids(k, 99)  # 99 is new and is never skipped: it is taken first exactly when k is skipped
            stayed[k] += chooser.propose(state, seed, 0, [other], [1])[0].indices[0] == 0
    np.testing.assert_allclose(stayed / 1000, [1, 0.5, 0.125, 0.01], atol=0.06)
    assert 0 < stayed[3] < 40


def test_greso_trailing_runs():
    chooser = build(kind="greso")
    state = chooser.init()
    for step, solved in enumerate([4, 4, 0, 2, 0]):
        state = tell(chooser, state, step, p7=solved, p8=4)
        got = prompts.look_up(state, ids(7, 8), {"run": np.int32(0), "all_right": np.bool_(False)})
        assert got["run"].tolist() == [[1, 2, 3, 0, 1][step], step + 1]
        assert got["all_right"].tolist() == [solved == 4, True]


def test_greso_moves_its_exploration_toward_the_targets():
    """Target 0.24: 8 % all right, 16 % all wrong. At or above: explore less; below: more; 0.01 a step, within [0, 1]."""
    chooser = build(kind="greso", zero_variance_target=0.24)
    state = chooser.init()
    assert state["explore"].tolist() == [50, 50]
    state = tell(chooser, state, 0, **{f"p{k}": 2 for k in range(10)})
    assert state["explore"].tolist() == [51, 51]
    state = tell(chooser, state, 1, p0=4, p1=0, **{f"p{k}": 2 for k in range(2, 10)})
    assert state["explore"].tolist() == [50, 52], "10 % all right is above 8 %, 10 % all wrong is below 16 %"
    for step in range(120):
        state = tell(chooser, state, step, p0=0)
    assert state["explore"].tolist() == [100, 0]
    assert chooser.observe(state, ids(1), ids(0), ids(0), 9)["explore"].tolist() == [100, 0], "nothing known: nothing moves"
    assert prompts.metrics(state)["prompts/explore_right"] == 1.0


def test_greso_stops_looking_when_its_slots_are_full_and_fills_up_when_too_few_are_left():
    chooser = build(kind="greso")
    proposal, = chooser.propose(chooser.init(), 0, 0, [np.arange(12, dtype=np.int32)], [3])
    assert proposal.indices.tolist() == [0, 1, 2] and proposal.seen == 3, "new prompts are never skipped, the rest stays for the next step"
    state, names = chooser.init(), np.arange(6, dtype=np.int32)
    state = prompts.write(state, names, {"run": np.full(6, 60), "all_right": np.ones(6, bool)}, 0)
    proposal, = chooser.propose(state, 1, 0, [names], [4])
    assert len(proposal.indices) == 4 and proposal.seen == 6, "a batch is whole though all are skipped"


# ---- the table ----

def test_the_prompts_visited_longest_ago_are_forgotten():
    chooser = prompts.mopps(3, decay=1.0)
    state = chooser.init()
    for step, name in enumerate([5, 9, 7, 5, 8]):
        state = tell(chooser, state, step, **{f"p{name}": 1})
    assert state["used"] == 3 and state["prompt_id"][:3].tolist() == [5, 7, 8], "9 went; 5 was seen again"
    assert prompts.look_up(state, ids(5, 9), {"alpha": np.float32(1)})["alpha"].tolist() == [3, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 2**31 - 1) | st.integers(0, 9), st.integers(-5, 5), max_size=4), max_size=8))
def test_the_table_is_a_dictionary(writes):
    field = {"x": np.int32(-9)}
    state, want = prompts.table(64, field), {}
    for step, values in enumerate(writes):
        state = prompts.write(state, np.array(list(values), np.int32), {"x": np.array(list(values.values()), np.int32)}, step)
        want |= values
        asked = np.array([*want, 1, 2**31 - 2], np.int32)
        assert prompts.look_up(state, asked, field)["x"].tolist() == [want.get(int(k), -9) for k in asked]
        assert state["used"] == len(want) and np.all(np.diff(state["prompt_id"][: len(want)]) > 0)


def test_settings_that_a_chooser_does_not_have_are_refused():
    for settings_, message in (({"kind": "random", "decay": 0.5}, "prompts 'random' has no setting 'decay'; it takes none"),
                               ({"kind": "greso", "decay": 0.5}, "'greso' has no setting 'decay'; it takes candidates, zero_variance_target")):
        with pytest.raises(C.ConfigError, match=message):
            build(**settings_)
    with pytest.raises(C.ConfigError, match=r"less than train\.prompts_per_step"):
        build(kind="mopps", remembered=3)
    assert (build(kind="mopps").candidates, build(kind="greso").candidates, build(kind="random").candidates) == (8, 4, 1)


# ---- the stream ----

class Bytes:
    def encode_chat(self, messages, template_args):
        return list(messages[-1]["content"].encode())


@pytest.fixture
def dataset(tmp_path):
    """Domains a (24 prompts), b (40) and a generated task."""
    for name, size in (("a", 24), ("b", 40)):
        lines = [json.dumps({"question": f"{name}{i}" + "x" * (i % 5), "answer": str(i)}) for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "e.jsonl").write_text(json.dumps({"question": "e", "answer": "1"}))
    files = {n: {"path": str(tmp_path / f"{n}.jsonl"), "eval_path": str(tmp_path / "e.jsonl"), "verifier": "math"} for n in "ab"}
    return data.build(C.validate({"data": {"domains": {**files, "t": {"task": "arithmetic"}}}, "eval": {"prompts_per_domain": 1}}), Bytes())


def test_the_mixer_gives_slots_and_the_chooser_fills_them(dataset):
    asked = []

    def last(candidates, counts):
        asked.append(([len(c) for c in candidates], list(counts)))
        return [prompts.Proposal(np.arange(len(c))[len(c) - int(n):], len(c)) for c, n in zip(candidates, counts)]

    stream, state, p = dataset.train, dataset.train.init(), [0.25, 0.5, 0.25]
    plain, _ = stream.take(state, 40, p)
    rows, after = stream.take(state, 8, p, last, 5)
    assert asked == [([10, 20, 10], [2, 4, 2])] and [r.domain for r in rows] == [r.domain for r in plain[:8]]
    for d, n in enumerate((2, 4, 2)):
        own = [r for r in plain if r.domain == d]
        assert [r for r in rows if r.domain == d] == own[4 * n:5 * n], "by index among the domain's next prompts"
    assert after["position"] == stream.take(state, 40, p)[1]["position"], "what was looked at is passed"
    assert stream.restore(after) == after and state == stream.init()


def test_prompts_behind_the_last_one_looked_at_stay(dataset):
    first = lambda candidates, counts: [prompts.Proposal(np.arange(int(n)), int(n)) for n in counts]  # noqa: E731
    stream = dataset.train
    a, b = stream.init(), stream.init()
    for _ in range(12):  # over several epochs
        plain, a = stream.take(a, 6, dataset.weights)
        rows, b = stream.take(b, 6, dataset.weights, first, 4)
        assert rows == plain and a == b


def test_a_window_is_at_most_one_epoch(dataset):
    seen = []

    def spy(candidates, counts):
        seen.append([len(set(c.tolist())) / max(len(c), 1) for c in candidates])
        return build(kind="random").propose({}, 0, 0, candidates, counts)

    rows, _ = dataset.train.take(dataset.train.init(), 8, [0.5, 0.5, 0], spy, 16)
    assert seen == [[1, 1, 0]] and len({r.prompt_id for r in rows}) == 8


def test_too_long_prompts_are_counted_once(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"question": f"{i:03d}" + "x" * 30 * (i % 2), "answer": "1"}) for i in range(40)))
    (tmp_path / "e.jsonl").write_text(json.dumps({"question": "e", "answer": "1"}))
    domain = {"path": str(tmp_path / "a.jsonl"), "eval_path": str(tmp_path / "e.jsonl"), "verifier": "math"}
    stream = data.build(C.validate({"data": {"domains": {"a": domain}, "max_prompt_length": 20}, "eval": {"prompts_per_domain": 1}}), Bytes()).train
    a, b = stream.init(), stream.init()
    for _ in range(5):
        rows, a = stream.take(a, 4, [1.0])
        same, b = stream.take(b, 4, [1.0], lambda c, n: [prompts.Proposal(np.arange(4), 4)], 4)
        assert rows == same and a == b


def test_greso_leaves_out_what_taught_nothing(dataset):
    """End to end over epochs: prompts that are always solved are rolled out seldom, the others at every epoch."""
    chooser, stream = build(kind="greso"), dataset.train
    state, position, visits = chooser.init(), stream.init(), {}
    for step in range(60):
        rows, position = stream.take(position, 8, [0.0, 1.0, 0.0], lambda c, n: chooser.propose(state, 0, step, c, n), chooser.candidates)  # noqa: B023
        easy = np.array([r.prompt.startswith("b1") for r in rows])
        state = chooser.observe(state, ids(*(r.prompt_id for r in rows)), np.where(easy, 4, 2), np.full(8, 4), step)
        for r in rows:
            visits[r.prompt] = visits.get(r.prompt, 0) + 1
    of = lambda flag: np.mean([n for p, n in visits.items() if p.startswith("b1") == flag])  # noqa: E731
    assert len(visits) == 40 and of(True) < 0.6 * of(False)
