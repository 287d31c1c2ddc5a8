"""The data of a step, in the loop for real: rounds of dynamic sampling, choice of prompts and replay together, killed and continued."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from processes import QUICK

from rlvr_jax import config as C
from rlvr_jax import parts as part
from rlvr_jax.collect import Collector
from rlvr_jax.metrics import read_records
from rlvr_jax.rollout import keys

TINY = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "+"}}, "knights": {"task": "knights", "task_args": {"people": [2, 2]}}},
             "max_prompt_length": 32},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 32},
    "train": {"steps": 5, "prompts_per_step": 4, "micro_batch": 8, "save_every": 1, "eval_every": 10},
    "eval": {"prompts_per_domain": 0},
}


def config(**changes):
    return C.validate(TINY | changes | {"run_dir": "unused"})


def collect(c, steps, host=None):
    with part.build(c) as parts:
        collector, params, out = Collector(parts, entropy=False), parts.params(), []
        host, data, mixer = collector.init() if host is None else host, parts.dataset.train.init(), parts.mixer.init()
        for step in range(steps):
            got = collector.step(params, host, data, mixer, step)
            host, data, mixer = got.host, got.data, got.mixer
            out.append(got)
    return out


def test_rounds_of_one_step():
    """Batches are generated until four groups teach something; all of them are counted, and no random number is used twice."""
    for got in collect(config(dynamic_sampling={"max_batches": 3}), 3):
        N, G = 4, 2
        batches = int(got.values["dynamic/batches"])
        reward, valid = got.generated.reward.reshape(-1, G), got.generated.valid.reshape(-1, G)
        assert 1 <= batches <= 3 and len(got.generated.rows) == batches * N == got.values["dynamic/generated_groups"]
        assert got.values["tokens/generated"] == got.generated.rollout.response_length.sum()
        assert got.values["accuracy/mean"] == pytest.approx(got.generated.correct[got.generated.valid].mean())
        # What is trained on differs within its groups, unless it is masked.
        R, V = np.asarray(got.batch.reward).reshape(N, G), np.asarray(got.batch.valid).reshape(N, G)
        teaches = (R[:, 0] != R[:, 1]) & V.all(1)
        assert teaches.sum() == got.values["dynamic/trained_groups"] and (teaches | ~V.any(1)).all()
        assert (got.values["dynamic/short"] == 1) == bool(got.notes) == (teaches.sum() < N)
        assert (reward[:, 0] != reward[:, 1])[valid.all(1)].sum() <= got.values["dynamic/trained_groups"] + got.values["dynamic/waiting_groups"]


def test_a_prompt_of_two_rounds_is_sampled_anew(tmp_path):
    """A file of three problems: every round asks the same prompts, and must not get the same answers."""
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a, b in ((48, 57), (68, 93), (77, 86), (59, 64))]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "1+1=?", "answer": "2"}) + "\n")
    few = {"domains": {"few": {"path": str(tmp_path / "few.jsonl"), "eval_path": str(tmp_path / "other.jsonl"), "verifier": "math"}}, "max_prompt_length": 32}
    got, = collect(config(data=few, dynamic_sampling={"max_batches": 4}), 1)
    ids = [r.prompt_id for r in got.generated.rows]
    assert got.values["dynamic/batches"] >= 2 and len(set(ids)) == 4
    assert max(keys.occurrences(ids)) == got.values["dynamic/batches"] - 1
    texts = {}
    for n, i in enumerate(ids):
        texts.setdefault(i, []).append(tuple(got.generated.texts[2 * n: 2 * n + 2]))
    assert any(len(set(t)) == len(t) > 1 for t in texts.values())


def test_prompts_are_chosen_and_learned_from():
    steps = collect(config(data=TINY["data"] | {"prompts": {"kind": "mopps", "candidates": 3}}), 3)
    for t, got in enumerate(steps):
        table = got.host["prompts"]
        assert table["used"] == got.values["prompts/remembered"] <= 4 * (t + 1)
        seen = table["prompt_id"][: int(table["used"])]
        assert {r.prompt_id for r in got.generated.rows} <= set(seen.tolist())
    # Three candidates a slot: the stream has gone three times as far as the prompts it gave (and past the held-out ones).
    assert 3 * 4 * 3 <= sum(steps[-1].data["position"].values()) < 3 * 4 * 4


def test_replay_sees_what_dynamic_sampling_released_and_fills_the_rest():
    steps = collect(config(dynamic_sampling={"max_batches": 1}, replay={"capacity": 8}, train=TINY["train"] | {"prompts_per_step": 8}), 4)
    for got in steps[1:]:
        wanted = 8 - got.values["dynamic/trained_groups"]
        assert got.values["replay/replayed_groups"] <= wanted
    assert sum(got.values["replay/replayed_groups"] for got in steps) > 0


def test_overlong_answers_lose_reward_but_not_their_verdict():
    plain, = collect(config(), 1)
    shaped, = collect(config(algorithm={"overlong_buffer": 32}), 1)
    g = shaped.generated
    assert (g.correct == plain.generated.correct).all() and g.texts == plain.generated.texts
    np.testing.assert_allclose(g.reward, plain.generated.reward - g.rollout.response_length / 32 * g.valid, rtol=1e-6)
    assert shaped.values["reward/overlong_penalty"] == pytest.approx((g.reward - plain.generated.reward).sum() / g.valid.sum(), rel=1e-5)


EVERYTHING = {"strategies": ["difffilter"], "dynamic_sampling": {"max_batches": 2}, "replay": {"kind": "hybrid", "capacity": 3},
              "algorithm": {"overlong_buffer": 8, "is_mode": "mask"}}


@pytest.mark.parametrize("prompts", ["mopps", pytest.param("greso", marks=pytest.mark.slow)])
def test_killed_with_everything_on_it_goes_on_bit_for_bit(tmp_path, prompts):
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump(TINY | EVERYTHING | {"data": TINY["data"] | {"prompts": {"kind": prompts}}}))
    env = os.environ | {"XLA_FLAGS": QUICK, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # one device
    start = lambda name: subprocess.Popen([sys.executable, "-m", "rlvr_jax.cli", "train", str(path), f"run_dir={tmp_path / name}"], env=env,  # noqa: E731
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    out, err = start("whole").communicate(timeout=900)
    assert not err or "Error" not in err, err
    want = json.loads(out.splitlines()[-1])
    killed = start("killed")
    deadline = time.monotonic() + 600
    while not list((tmp_path / "killed").glob("checkpoints/3/*")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    again = json.loads(start("killed").communicate(timeout=900)[0].splitlines()[-1])
    assert again["resumed_from_step"] >= 2 and again["weights_sha256"] == want["weights_sha256"]
    prompts_of = lambda name: [(r["step"], r["prompt_ids"]) for r in read_records(Path(tmp_path / name) / "prompts.jsonl")]  # noqa: E731
    assert prompts_of("whole") == prompts_of("killed")


@pytest.mark.slow
@pytest.mark.parametrize("G, algorithm", [(4, {}), (8, {}), (16, {}), (32, {}), (8, {"advantage": "rloo"}), (8, {"advantage": "gae"})],
                         ids=["4", "8", "16", "32", "rloo", "ppo"])
def test_replay_fills_the_batch_at_every_group_size(tmp_path, G, algorithm):
    """From what the rollout gives to at least 90% of groups that teach, within ten steps."""
    from rlvr_jax.train import train

    domains = {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 2], "ops": "+"}}, "knights": {"task": "knights", "task_args": {"people": [2, 2]}, "weight": 2}}
    train({"data": {"domains": domains, "max_prompt_length": 32}, "rollout": {"samples_per_prompt": G, "max_new_tokens": 32}, "replay": {"kind": "popo"},
           "algorithm": algorithm, "optimizer": {"learning_rate": 1e-5}, "eval": {"prompts_per_domain": 0}, "run_dir": str(tmp_path / "run"),
           "train": {"steps": 10, "prompts_per_step": 12, "micro_batch": 12, "save_every": 100}})
    steps = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["step"]]
    fresh, trained = ([r[f"replay/{name}effective_fraction"] for r in steps] for name in ("fresh_", ""))
    print(f"G {G} {algorithm}: fresh {np.mean(fresh):.0%}, trained {' '.join(f'{x:.0%}' for x in trained)}")
    assert np.mean(fresh) < 0.9 and trained[0] == fresh[0] and max(trained) >= 0.9 and np.mean(trained[5:]) >= 0.9
