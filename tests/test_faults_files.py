"""Files and functions that are broken, for real: checkpoints, rows, model folders, rewards. Each is one clear line or a counted survival."""

import json
import logging
import os
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import config as C
from rlvr_jax import data, pairing
from rlvr_jax.checkpoint import Checkpoints, SaveError
from rlvr_jax.models import hf
from rlvr_jax.models.tokenizer import load_tokenizer
from rlvr_jax.rewards import Job, Pool, Verdict, registry
from rlvr_jax.run_folder import refuse_changes
from rlvr_jax.types import TrainState

# --- checkpoints ---

HOST = {"replay": {"tokens": np.arange(12, dtype=np.int32).reshape(3, 4)}}


def state(value: float) -> TrainState:
    x = value + jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    return TrainState(step=jnp.int32(value), params={"a": x}, opt_state=(x,), strategy_state=())


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state(step), HOST, {"step": step}, None)
    checkpoints.wait()


def restored(checkpoints):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    got, host, record = checkpoints.restore(like, HOST)
    np.testing.assert_array_equal(got.params["a"], state(record["step"]).params["a"])
    np.testing.assert_array_equal(host["replay"]["tokens"], HOST["replay"]["tokens"])
    return record["step"]


def biggest(folder: Path) -> Path:
    return max((p for p in folder.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)


BREAK = {
    "truncated": lambda f: os.truncate(biggest(f / "state"), 1000),
    "data gone": lambda f: [shutil.rmtree(p) for p in (f / "state").rglob("d")],
    "buffers gone": lambda f: shutil.rmtree(f / "host"),
    "record gone": lambda f: shutil.rmtree(f / "record"),
    "record cut": lambda f: os.truncate(f / "record" / "metadata", 5),
    "empty": lambda f: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in f.iterdir()],
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_checkpoint_is_passed_over_said_so_and_saved_anew(tmp_path, caplog, how):
    first = Checkpoints(tmp_path, 2)
    save(first, 3, 6)
    first.close()
    BREAK[how](tmp_path / "checkpoints" / "6")
    again = Checkpoints(tmp_path, 2)
    assert again.record() is not None
    with caplog.at_level(logging.WARNING):
        assert restored(again) == 3
        again.set_aside()
    assert "6 cannot be read" in caplog.text and "set aside" in caplog.text
    save(again, 4, 6, 7)  # its own step too: what is trained again must not go unsaved
    again.close()
    last = Checkpoints(tmp_path, 2)
    assert restored(last) == 7 and set(last.manager.all_steps()) == {6, 7}
    assert (tmp_path / "checkpoints" / "6.unreadable").is_dir()


def test_where_nothing_can_be_read_is_no_fresh_start(tmp_path):
    first = Checkpoints(tmp_path, 1)
    save(first, 5)
    first.close()
    (tmp_path / "checkpoints" / "5" / "record" / "metadata").unlink()
    for act in (lambda c: c.record(), restored):
        with pytest.raises(RuntimeError, match=r"none of the checkpoints \[5\] in .* can be read; .*move the folder away"):
            act(Checkpoints(tmp_path, 1))


def test_a_save_that_finds_no_room_is_one_line_and_the_next_one_succeeds(tmp_path):
    """A limit on the size of files, set for this process by the kernel, stands for a disk that is full."""
    checkpoints = Checkpoints(tmp_path, 2)
    save(checkpoints, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(SaveError, match=r"could not be written \(.*File too large.*\); the newest checkpoint is of step 1: mend the disk") as e:
            save(checkpoints, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(e.value)
    save(checkpoints, 3)
    checkpoints.close()
    assert restored(Checkpoints(tmp_path, 2)) == 3


# --- what may change between two starts ---

@pytest.mark.parametrize("changes, refused", [
    (["train.steps=7", "train.save_every=1", "train.save_seconds=1", "train.eval_every=3", "train.barren_steps=2", "pool.workers=9", "mesh.fsdp=2", "data.root=/x"], None),
    (["train.max_seconds=5", "train.generated_tokens=9", "train.updated_tokens=9", "train.max_to_keep=5", "train.samples_every=2", "train.step_limit_seconds=9"], None),
    (["optimizer.learning_rate=1e-4"], "optimizer.learning_rate"), (["train.prompts_per_step=4"], "prompts_per_step"), (["eval.samples_per_prompt=2"], "samples_per_prompt"),
    (["model.path=/other"], "model.path"), (["replay={kind: popo}"], "replay"), (["strategies=[maxvar]"], "strategies"),
    (["data.domains.arithmetic.template=x {prompt}"], "template"), (["algorithm.kl_coef=0.1"], "kl_coef")])
def test_what_may_change_between_two_starts(changes, refused):
    began = C.validate({"run_dir": "runs/x"})
    now = C.validate(C.apply_overrides(began.model_dump(mode="json"), changes))
    if refused is None:
        refuse_changes(began.model_dump(mode="json"), now)
    else:
        with pytest.raises(C.ConfigError, match=rf"runs/x was begun with .*{refused}.*restore it, or choose another run_dir"):
            refuse_changes(began.model_dump(mode="json"), now)


def test_a_learning_rate_that_follows_the_steps_is_not_stretched():
    began = C.validate({"run_dir": "runs/x", "optimizer": {"schedule": "cosine"}})
    with pytest.raises(C.ConfigError, match=r"train.steps=100, now 200, and its learning rate follows them \(optimizer.schedule: cosine\)"):
        refuse_changes(began.model_dump(mode="json"), began.model_copy(update={"train": began.train.model_copy(update={"steps": 200})}))


def test_what_a_config_names_must_still_be_what_it_was(caplog):
    began = {"weights_sha256": "w", "evaluation": {"a": "1", "b": "2"}, "code": {"mine": "c"}}
    pairing.refuse_others(began, began, "runs/x")
    pairing.refuse_others(began, began | {"weights_sha256": None}, "runs/x")  # without a KL only the checkpoint's weights count
    pairing.refuse_others({}, began, "runs/x")  # a run from before this check
    with pytest.raises(C.ConfigError, match=r"evaluation rows of domain 'b' are not those"):
        pairing.refuse_others(began, began | {"evaluation": {"a": "1", "b": "3"}}, "runs/x")
    with pytest.raises(C.ConfigError, match=r"weights at model.path are not those"):
        pairing.refuse_others(began, began | {"weights_sha256": "v"}, "runs/x")
    assert not caplog.text
    pairing.refuse_others(began, began | {"code": {"mine": "d"}}, "runs/x")
    assert "the file of 'mine' has changed since runs/x was begun" in caplog.text


# --- rows ---

ODD_ROWS = {
    "half a surrogate pair": ('{"question": "odd \\ud800", "answer": "1"}', "the prompt holds half a surrogate pair at character 4"),
    "in a chat": ('{"question": [{"role": "system", "content": "\\udc00"}, {"role": "user", "content": "odd"}], "answer": "1"}', "half a surrogate pair at character 0"),
    "in the answer": ('{"question": "odd", "answer": "\\ud800"}', "the answer holds half"),
    "nan": ('{"question": "odd", "answer": NaN}', "the answer is nan, expected a finite number"),
    "infinity": ('{"question": "odd", "answer": [1e999]}', "the answer is inf"),
    "huge answer": (json.dumps({"question": "odd", "answer": "7" * 200_000}), "the answer has 200000 characters"),
    "huge number": ('{"question": "odd", "answer": ' + "9" * 5000 + "}", "not JSON"),
}


@pytest.mark.parametrize("name", [*ODD_ROWS, "huge prompt"])
def test_an_odd_row_is_left_out_by_name_and_the_others_are_drawn(tmp_path, tiny_model, name):
    line, words = ODD_ROWS.get(name, (json.dumps({"question": "12+34 " * 1_000_000, "answer": "1"}), ""))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*(json.dumps({"question": f"q{i}", "answer": str(i)}) for i in range(20)), line]))
    config = C.validate({"data": {"domains": {"d": {"path": str(path), "verifier": "math"}}, "max_prompt_length": 32}, "eval": {"prompts_per_domain": 1}})
    dataset = data.build(config, load_tokenizer(tiny_model))
    rows, after = dataset.train.take(dataset.train.init(), 30, dataset.weights)
    counts = dataset.counters(after)["d"]
    assert len(rows) == 30 and all(r.prompt.startswith("q") for r in rows)
    if words:
        assert counts["rows_broken"] == 1 and any(words in w and f"{path}:21:" in w for w in dataset.warnings), dataset.warnings
    else:
        assert counts["prompts_too_long"] >= 1 and counts["rows_broken"] == 0


def test_numbers_that_are_none_are_a_broken_row(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"numbers": [1, 2, i], "target": i}) for i in range(1, 30)) + '\n{"numbers": [1, NaN], "target": 3}\n{"numbers": [1, 2], "target": Infinity}\n')
    dataset = data.build(C.validate({"data": {"domains": {"d": {"path": str(path), "verifier": "countdown", "template": "{numbers} {target}"}}}}), None)
    assert dataset.notes["d"].counts["rows_broken"] == 2 and "field 'numbers' is nan" in dataset.warnings[0] and "field 'target' is inf" in dataset.warnings[1]


# --- rewards ---

class Shy(Exception):
    def __str__(self):
        raise ValueError


def odd_reward(text: str, answer: str):
    if text == "shy":
        raise Shy
    if text == "exit":
        raise SystemExit(3)
    return {"numpy verdict": Verdict(np.float32(0.5), "ok"), "no detail": Verdict(1.0, "ok", None), "long detail": Verdict(1.0, "ok", "y" * 5_000_000),
            "list": [1.0, 0.0], "array": np.ones(3), "empty": np.ones(0), "string": "1" * 10_000_000, "beyond float32": 1e39, "none": None,
            "nan": float("nan"), "fine": 1.0}[text]


ODD_REWARDS = {"numpy verdict": (0.5, "ok", ""), "no detail": (1.0, "ok", ""), "long detail": (1.0, "ok", "yyy"), "list": (0, "unknown", "returned [1.0, 0.0], expected one finite number"),
               "array": (0, "unknown", "expected one finite number"), "empty": (0, "unknown", "expected one finite number"), "string": (0, "unknown", "verifier returned '1111"),
               "beyond float32": (0, "unknown", "returned 1e+39, expected one finite number (at most 1e+09 in size)"), "shy": (0, "unknown", "verifier raised Shy"),
               "none": (0, "unknown", "abstained"), "nan": (0, "unknown", "returned nan"), "fine": (1.0, "ok", "")}


@pytest.mark.parametrize("where", ["in a worker", "here"])
def test_odd_rewards_are_known_or_unknown_by_their_kind(where):
    function = odd_reward if where == "in a worker" else lambda text, answer: odd_reward(text, answer)
    assert (registry.reference(function) is None) == (where == "here")
    texts = [*ODD_REWARDS, *(["exit"] if where == "here" else [])]  # what a worker does about it: test_pool
    with Pool(1, preload=()) as pool:
        verdicts = pool.score([Job(function, text) for text in texts])
        assert pool.counters["replaced"] == 0 and pool.counters["errors"] == (2 if where == "here" else 1)
    for text, verdict in zip(texts, verdicts):
        reward, status, words = ODD_REWARDS.get(text, (0, "unknown", "verifier raised SystemExit: 3"))
        assert (verdict.reward, verdict.status) == (reward, status) and words in verdict.detail and len(verdict.detail) <= 300, text


# --- model folders ---

def tensors(folder):
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    return load_file(path), lambda new, name="model.safetensors": save_file(new, folder / name)


def without(folder: Path, text: str | None) -> None:
    """An index, or with None nothing, in place of the weights."""
    (folder / "model.safetensors").unlink()
    if text is not None:
        (folder / "model.safetensors.index.json").write_text(text)


def left_over(folder: Path) -> None:
    known, write = tensors(folder)
    write({k: v + 1 for k, v in known.items()}, "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(known, "part.safetensors")}))


def changed(folder: Path, **more) -> None:
    known, write = tensors(folder)
    write({k: v for k, v in (known | more).items() if v is not None})


SPOIL = {
    "missing tensor": lambda f: changed(f, **{"model.norm.weight": None}),
    "wrong shape": lambda f: changed(f, **{"model.norm.weight": np.ones(5, np.float32)}),
    "extra tensor": lambda f: changed(f, **{"adapter.weight": np.ones(3, np.float32)}),
    "pointer": lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
    "index of nothing": lambda f: without(f, "{}"), "index of a list": lambda f: without(f, '{"weight_map": ["a"]}'),
    "index of a file that is gone": lambda f: without(f, '{"weight_map": {"a": "gone.safetensors"}}'),
    "extra files": lambda f: [(f / name).write_bytes(b"x") for name in ("optimizer.pt", "model.old.safetensors", "notes.json")],
    "index left over": left_over,
}


@pytest.mark.parametrize("how, words", [
    ("missing tensor", "tensor 'model.norm.weight' is missing"), ("wrong shape", r"'model.norm.weight' has shape \(5,\), config.json says \(32,\)"),
    ("extra tensor", "'adapter.weight' .* has no place in this architecture"), ("pointer", "cannot be read"), ("index of nothing", "'weight_map' must map"),
    ("index of a list", "'weight_map' must map"), ("index of a file that is gone", "gone.safetensors' cannot be read"), ("extra files", None), ("index left over", None)])
def test_a_model_folder_that_is_not_in_order(tmp_path, tiny_model, how, words):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    SPOIL[how](folder)
    load = lambda path: hf.load_params(path, hf.load_config(path))  # noqa: E731
    if words is None:  # of two sets of weights the one that transformers reads
        jax.tree.map(np.testing.assert_array_equal, load(folder), load(tiny_model))
        return
    with pytest.raises(hf.ModelError, match=words) as e:
        load(folder)
    assert "\n" not in str(e.value) and str(folder) in str(e.value)
