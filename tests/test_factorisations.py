"""Twenty steps on one device, on eight in every factorisation over (data, fsdp, tensor), on two processes of four: the same run.

On rollouts kept from the run on one device, everything that is computed from them is the same to rounding, and what is decided by
it (kept rows, replay, mixer) the same outright. On rollouts of its own a run is the same until rounding first moves a token.
"""

import pickle
from itertools import product
from pathlib import Path

import jax
import numpy as np
import processes as P
import pytest
import recorded as R
from update_cases import distance

from rlvr_jax.metrics import read_records

pytestmark = pytest.mark.slow
MESHES = [m for m in product((1, 2, 4, 8), repeat=3) if m[0] * m[1] * m[2] == 8]
DECIDED = ("kept/", "replay/replayed", "replay/trained", "replay/age", "mix/", "tokens/", "update/live", "update/skipped")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(folder, config, rollouts) of the run on one device."""
    folder = tmp_path_factory.mktemp("one")
    config = R.write(folder)
    return folder, config, R.run(config, folder / "alone", (1, 1, 1))


def records(run):
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "tokens_per", "compiles", "verify/"))} for r in read_records(Path(run) / "metrics.jsonl")]


def prompts(run):
    return [(r["step"], r["prompt_ids"]) for r in read_records(Path(run) / "prompts.jsonl")]


def same_run(config, alone, other):
    """Asserts it for runs on the same rollouts; the largest differences, for whoever reads the output."""
    a, b = records(alone), records(other)
    assert [r["step"] for r in a] == [r["step"] for r in b] == list(range(1, R.STEPS + 1)) and prompts(alone) == prompts(other)
    worst = {}
    for x, y in zip(a, b):
        assert set(x) == set(y)
        for name in x:
            if name.startswith(DECIDED):
                assert x[name] == pytest.approx(y[name], rel=1e-6), (x["step"], name)
            worst[name] = max(worst.get(name, 0.0), abs(x[name] - y[name]) / max(1.0, abs(x[name])))
    (params, kept), (theirs, their_kept) = (R.final(config, run) for run in (alone, other))
    np.testing.assert_array_equal(kept, their_kept)
    print(f"\n{other}: loss differs by at most {worst['update/loss']:.1e}, weights by {distance(params, theirs):.1e},", max((v, k) for k, v in worst.items()))
    assert worst["update/loss"] < 1e-4 and max(worst.values()) < 1e-3, worst
    assert distance(params, theirs) < 1e-3


def test_the_run_has_everything_in_it(one):
    """Or the comparisons below would compare nothing."""
    folder, config, rollouts = one
    of = records(folder / "alone")
    _, kept = R.final(config, folder / "alone")
    assert 0.2 < kept.mean() < 0.9 and kept.any((1, 2)).sum() > R.STEPS / 2
    assert len({r["mix/target/sums"] for r in of}) > 2
    assert sum(r["replay/replayed_groups"] > 0 for r in of) > R.STEPS / 4
    assert len({n for _, r in rollouts for n in r.response_length.tolist()}) > R.NEW / 2
    assert sum(abs(r["update/loss"]) > 1e-3 for r in of) > R.STEPS / 2


@pytest.fixture(scope="module")
def programs():
    """By mesh: what one run on it has compiled, the next one takes."""
    return {mesh: {} for mesh in MESHES}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m)))
def test_eight_devices_train_as_one_does(one, programs, tmp_path, mesh):
    folder, config, rollouts = one
    R.run(config, tmp_path / "played", mesh, rollouts, programs[mesh])
    same_run(config, folder / "alone", tmp_path / "played")


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m)))
def test_eight_devices_sample_as_one_does(one, programs, tmp_path, mesh):
    """The first step; how long it stays so, no one can promise."""
    folder, config, rollouts = one
    own = R.run(config, tmp_path / "own", mesh, programs=programs[mesh])
    first, theirs = own[0][1], rollouts[0][1]
    assert own[0][0] == rollouts[0][0] and prompts(tmp_path / "own")[0] == prompts(folder / "alone")[0]
    jax.tree.map(np.testing.assert_array_equal, (first.tokens, first.response_length), (theirs.tokens, theirs.response_length))
    assert np.abs(first.logprob - theirs.logprob).max() < 1e-4
    for name, value in records(tmp_path / "own")[0].items():
        assert value == pytest.approx(records(folder / "alone")[0][name], rel=1e-4, abs=1e-4), name
    parted = next((i + 1 for i, (a, b) in enumerate(zip(own, rollouts)) if a[0] != b[0] or not np.array_equal(a[1].tokens, b[1].tokens)), None)
    print(f"\n{mesh}, own rollouts:", f"step {parted} is the first that differs" if parted else f"all {R.STEPS} steps the same")


def test_two_processes_train_as_one_device_does(one, tmp_path):
    folder, config, rollouts = one
    (tmp_path / "kept").write_bytes(pickle.dumps(rollouts))
    env = P.environment(4, tmp_path)
    env["PYTHONPATH"] += f":{P.ROOT / 'tests'}"
    P.finish(P.start([str(config), str(tmp_path / "two"), "2x2x2", str(tmp_path / "kept")], env, 2, program=[str(P.ROOT / "tests" / "recorded.py")]))
    same_run(config, folder / "alone", tmp_path / "two")
