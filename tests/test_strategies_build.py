"""Composition, YAML forms, error messages, and a user's own strategy."""

import re
import textwrap
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlvr_jax.strategies
from rlvr_jax.strategies import Strategy, build, chain, describe, mix, presets, reweight, scheduled, scores, select
from rlvr_jax.strategies import registry as registry_module
from rlvr_jax.strategies.reweight import REWEIGHT_ACTS
from rlvr_jax.strategies.select import SELECT_ACTS, band
from rlvr_jax.types import Signals

N, G, T = 4, 5, 3


def make(step=0, entropy=True):
    r = np.random.default_rng(0)
    reward = np.float32([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    length = r.integers(1, T + 1, (N, G))
    return Signals.create(reward, r.normal(size=(N, G)).astype(np.float32), -r.random((N, G, T), np.float32), np.arange(T) < length[..., None],
                          length, np.zeros(N, int), np.int32(step), entropy=r.random((N, G, T), np.float32) if entropy else None)


def weights(items, signals):
    strategy = build(items)
    return np.asarray(strategy.apply(strategy.init(), signals)[0])


# --- composition -----------------------------------------------------------------------------------------------------


def test_an_empty_list_keeps_every_live_row():
    signals = make()
    signals = signals.replace(valid=signals.valid.at[0, 0].set(False))
    np.testing.assert_array_equal(weights([], signals), np.asarray(signals.valid, np.float32))


def test_a_later_stage_sees_only_what_is_left():
    seen = []

    def spy(state, signals):
        seen.append(signals)
        return jnp.ones(signals.valid.shape), state

    signals = make()
    chain(presets.difffilter(), Strategy(tuple, spy)).apply(((), ()), signals)
    kept = np.array([True, False, True, False])[:, None] & np.ones((N, G), bool)
    np.testing.assert_array_equal(seen[-1].valid, kept)
    np.testing.assert_array_equal(seen[-1].mask, np.asarray(signals.mask) & kept[..., None])

    tokens = select(scores.entropy, partial(band, low=0.5, high=2.0))
    chain(tokens, Strategy(tuple, spy)).apply(((), ()), signals)
    left = np.asarray(signals.mask) & (np.asarray(signals.entropy) > 0.5)
    np.testing.assert_array_equal(seen[-1].mask, left)
    np.testing.assert_array_equal(seen[-1].valid, left.any(-1))


def test_selection_before_weighting_equals_weighting_of_the_rest():
    signals = make()
    rest = jax.tree.map(lambda x: x[jnp.array([0, 2])] if x.ndim else x, signals)
    got = weights(["difffilter", "softmax"], signals)
    np.testing.assert_allclose(got[[0, 2]], weights(["softmax"], rest), rtol=1e-6)
    assert not got[[1, 3]].any()


def test_a_product_is_renormalised_unless_told_otherwise():
    signals = make()
    each = [weights([n], signals) for n in ("softmax", "per", "ar")]
    bare = each[0] * each[1]
    assert bare.mean() > 1.05
    np.testing.assert_allclose(weights(["softmax", "per"], signals), bare / bare.mean(), rtol=1e-6)
    s = build(["softmax", "per"], renormalise=False)
    np.testing.assert_allclose(s.apply(s.init(), signals)[0], bare, rtol=1e-6)
    np.testing.assert_allclose(weights([{"chain": ["softmax", "per"], "renormalise": False}], signals), bare / bare.mean(), rtol=1e-6)
    mixed = weights(["softmax", "ar"], signals)  # per row times per token
    product = each[0][..., None] * each[2]
    np.testing.assert_allclose(mixed, product / product[np.asarray(signals.mask)].mean(), rtol=1e-5)


def counting(state, signals):
    return jnp.where(signals.valid, 1.0 + state, 0.0), state + 1


def test_warm_up_and_every():
    strategy = build([{"name": "difffilter", "warmup_steps": 2, "every": 3}])
    on = [bool((np.asarray(strategy.apply(strategy.init(), make(step))[0]) == 0).any()) for step in range(9)]
    assert on == [False, False, True, False, False, True, False, False, True]
    stateful = scheduled(Strategy(lambda: jnp.int32(0), counting), warmup_steps=2, every=2)
    state, history = stateful.init(), []
    for step in range(6):
        w, state = stateful.apply(state, make(step))
        history.append((float(w[0, 0]), int(state)))
    assert history == [(1, 0), (1, 0), (1, 1), (1, 1), (2, 2), (1, 2)], "neutral, and the state rests, on the other steps"


def test_what_a_strategy_needs():
    assert build(["difffilter"]).needs_groups and not build(["difffilter"]).needs_entropy
    assert not build(["topk", "softmax", "per", "ar", "diffband"]).needs
    assert build([{"reweight": "softmax", "score": "entropy"}]).needs_entropy
    assert build(["topk", {"chain": [{"select": "top_k", "score": "reward"}]}]).needs_groups

    def reads(state, signals):
        return jax.jit(lambda s: jnp.mean(s.entropy, -1) + s.reward)(signals), state

    def does_not(state, signals):
        return jax.jit(lambda s: s.reward + 1)(signals), state

    assert build([Strategy(tuple, reads)]).needs_entropy, "found in the traced computation, not declared"
    assert not build([Strategy(tuple, does_not)]).needs_entropy
    with pytest.raises(ValueError, match=r"recorded no entropy; set rollout\.record_entropy"):
        weights([{"select": "band", "score": "entropy"}], make(entropy=False))


# --- forms and messages ----------------------------------------------------------------------------------------------


def test_forms_that_mean_the_same():
    signals = make()
    forms = [{"name": "difffilter", "low": 0.1, "high": 0.5}, {"difffilter": {"low": 0.1, "high": 0.5}},
             {"select": "band", "score": "solve_rate", "low": 0.1, "high": 0.5}, {"chain": [{"name": "difffilter", "low": 0.1, "high": 0.5}]},
             presets.difffilter(0.1, 0.5), lambda: presets.difffilter(0.1, 0.5)]
    want = [[0] * 5, [0] * 5, [1] * 5, [0] * 5]
    for form in forms:
        assert weights([form], signals).tolist() == want, form
    assert weights([{"difffilter": None}], signals).tolist() == weights(["difffilter"], signals).tolist()
    assert weights([{"select": "top_fraction", "score": "advantage_magnitude", "reduce": "sum", "fraction": 0.1}], signals).sum() == 2


MISTAKES = [
    (["diffilter"], "unknown strategy 'diffilter'; nearest valid one: 'difffilter'"),
    (["band"], "'band' is an act: write {select: band, score: ...}"),
    ([{"name": "difffilter", "lo": 0.1}], "'difffilter' has no parameter 'lo'; nearest: 'low' (all: low, high, warmup_steps, every)"),
    ([{"difffilter": {"low": "0.2"}}], "low must be a float, got '0.2'"),
    ([{"name": "gfpo", "k": 2.5}], "k must be a int, got 2.5"),
    ([{"name": "gfpo", "by": "long"}], "'long' is not one of efficiency, short, score"),
    ([{"name": "difffilter", "low": 0.9}], "low 0.9 must be below high 0.8"),
    ([{"name": "maxvar", "fraction": 50}], "fraction 50 is outside [0, 1]"),
    ([{"name": "softmax", "tau": 0}], "tau 0 must be positive"),
    ([{"name": "diffband", "low_q": 0.8}], "0 <= low_q <= high_q <= 1"),
    ([{"name": "per", "every": 0}], "every 0 at least 1"),
    ([{"select": "softmax", "score": "reward"}], "act 'softmax' goes with 'reweight', not 'select'"),
    ([{"select": "bnd", "score": "reward"}], "unknown act 'bnd'; nearest valid one: 'band'"),
    ([{"select": "band", "score": "rewards"}], "unknown score 'rewards'; nearest valid one: 'reward'"),
    ([{"select": "band"}], "needs a score; one of reward, solve_rate"),
    ([{"select": "band", "score": "reward", "tau": 1}], "no parameter 'tau'"),
    ([{"select": "top_k", "score": "token_prob"}], "act 'top_k' compares rows and needs a score [N, G]"),
    ([{"select": "max_variance", "score": "entropy"}], "act 'max_variance' compares rows"),
    ([{"low": 0.1, "high": 0.3}], "needs exactly one of name, select, reweight, chain"),
    ([{"select": "band", "name": "x"}], "needs exactly one of name, select, reweight, chain"),
    ([{"chain": "topk"}], "'chain' must be a list"),
    (["no_such_module:f"], "cannot be imported: No module named 'no_such_module'"),
    (["math:no_such_name"], "cannot be imported: module 'math' has no attribute"),
    (["math:pi"], "is a float; expected a function that returns rlvr_jax.strategies.Strategy"),
    (["operator:add"], "needs a value for a, b"),
    (["os:getcwdb"], "returned a bytes; expected rlvr_jax.strategies.Strategy"),
    ([lambda: 1 / 0], "fails when it is called: ZeroDivisionError"),
    (["time:time"], "returned a float; expected rlvr_jax.strategies.Strategy"),
    ([3], "3 is neither a name nor a mapping"),
    ("topk", "must be a list, got 'topk'"),
    ([Strategy(tuple, lambda state, s: (s.reward.sum(1), state))], "weights of shape (3,) for N=3, G=4, T=5"),
    ([Strategy(tuple, lambda state, s: (s.reward, jnp.int32(0)))], "state of another structure"),
    ([Strategy(tuple, lambda state, s: (s.rewards, state))], "AttributeError"),
    ([select(scores.reward, lambda s, signals: s.sum(1))], "act returned shape (3,) for a score of shape (3, 4)"),
]


@pytest.mark.parametrize("items,message", MISTAKES, ids=[re.sub(r" at 0x\w+", "", str(i))[:60] for i, _ in MISTAKES])
def test_mistakes_are_one_line(items, message):
    with pytest.raises(ValueError) as e:
        build(items)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_group_strategies_are_refused_without_groups():
    build(["topk", "ar"], groups=False)
    for item in ("difffilter", "maxvar", "gfpo", {"select": "band", "score": "reward_std"}, {"chain": ["difffilter"]}):
        with pytest.raises(ValueError, match="this advantage estimator has no groups"):
            build(["topk", item], groups=False)


def test_describe_lists_everything_with_its_parameters():
    rows = {(e.kind, e.name): e for e in describe()}
    for kind, table in (("preset", presets.PRESETS), ("select", SELECT_ACTS), ("reweight", REWEIGHT_ACTS), ("score", scores.SCORES),
                        ("mixer", {"static", *mix.DYNAMIC})):
        assert {n for k, n in rows if k == kind} == set(table)
    assert rows["preset", "difffilter"].params == {"low": 0.2, "high": 0.8}
    assert rows["select", "top_k"].params == {"k": 3, "by": "efficiency"}
    assert rows["score", "solve_rate"].source == "rlvr_jax.strategies.scores:solve_rate"
    assert rows["mixer", "tscl"].params["temperature"] == 0.1 and rows["mixer", "tscl"].params["floor"] == 0.05
    assert all(e.doc for e in rows.values())


def test_select_and_reweight_are_the_functions():
    """A submodule of the same name must not shadow them."""
    assert rlvr_jax.strategies.select is select and rlvr_jax.strategies.reweight is reweight
    assert callable(rlvr_jax.strategies.select) and callable(rlvr_jax.strategies.reweight)


# --- a user's own ----------------------------------------------------------------------------------------------------

OWN = """
    import jax.numpy as jnp
    from rlvr_jax.strategies import reweight, select

    def quick(bonus: float = 1.0):
        '''Weigh right answers that are shorter than the batch's mean by 1 + bonus.'''
        def short(signals):
            mean = jnp.sum(signals.length * signals.valid) / jnp.maximum(jnp.sum(signals.valid), 1)
            return 1 + bonus * (signals.correct & (signals.length < mean))
        return reweight(short, lambda score, signals: score)

    def even(score, signals, period: int = 2):
        return score % period == 0

    fixed = select(lambda s: s.reward, lambda r, s: r > 0)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    return name


def test_a_users_strategy_in_ten_lines(own):
    import sys

    before = list(sys.path)
    signals = make()
    right = np.asarray(signals.correct & (signals.length < signals.length.mean()))
    got = weights([{"name": f"{own}:quick", "bonus": 3.0}], signals)
    want = 1 + 3 * right
    np.testing.assert_allclose(got, want / want.mean(), rtol=1e-6)
    assert sys.path == before, "the working directory is searched for this import only"
    np.testing.assert_array_equal(weights([f"{own}:fixed"], signals), signals.reward)
    even = weights([{"select": f"{own}:even", "score": "length", "period": 2}], signals)
    np.testing.assert_array_equal(even, np.asarray(signals.length) % 2 == 0)
    with pytest.raises(ValueError, match=r"no parameter 'bonsu'; nearest: 'bonus'"):
        build([{"name": f"{own}:quick", "bonsu": 3.0}])


def test_a_module_that_fails_is_named(own, tmp_path):
    (tmp_path / f"{own}_bad.py").write_text("raise RuntimeError('first\\nsecond')")
    with pytest.raises(ValueError, match="module fails on import: RuntimeError: first second"):
        build([f"{own}_bad:x"])


def test_installed_packages_add_names(own, monkeypatch):
    points = [metadata.EntryPoint("quick", f"{own}:quick", "rlvr_jax.strategies"), metadata.EntryPoint("gone", "no_such:x", "rlvr_jax.strategies")]
    monkeypatch.setattr(registry_module.metadata, "entry_points", lambda group: points if group == "rlvr_jax.strategies" else [])
    monkeypatch.syspath_prepend(".")
    assert build(["quick"]).needs == frozenset()
    with pytest.raises(ValueError, match=r"'gone' \(entry point no_such:x\) cannot be loaded"):
        build(["gone"])
    rows = {e.name: e for e in describe() if e.kind == "installed"}
    assert rows["quick"].params == {"bonus": 1.0} and "cannot be loaded" in rows["gone"].doc


def test_a_strategy_that_returns_its_weights_alone_is_told_so():
    def forgets_state():
        return Strategy(init=lambda: (), apply=lambda state, s: s.valid.astype("float32"))

    with pytest.raises(ValueError, match=r"apply returned one array, expected \(weights, state\): end it with 'return weights, state'"):
        build([forgets_state()])
