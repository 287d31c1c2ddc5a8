"""The command line: help with examples, verdicts in order, errors of one line, and the way from a run to an exported model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlvr_jax import cli, cli_arguments
from rlvr_jax.strategies import presets

SMALL = {
    "data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 1], "ops": "+"}}}, "max_prompt_length": 32},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-3},
    "train": {"steps": 1, "prompts_per_step": 2, "micro_batch": 4}, "eval": {"prompts_per_domain": 3, "batch_prompts": 2}}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("cli")
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "model": {"path": str(tiny_model)}, "run_dir": str(folder / "run")}))
    return str(path)


def out(capsys, *arguments) -> str:
    """Stdout of a command that must succeed."""
    assert cli.main([str(a) for a in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0 and "examples:\n  rlvr-jax train" in text
    assert {line.split()[0] for line in text.splitlines() if line.startswith("    ")} >= set(cli_arguments.EXAMPLES)


@pytest.mark.parametrize("command", sorted(cli_arguments.EXAMPLES))
def test_help_of_every_command_shows_an_example(capsys, command):
    with pytest.raises(SystemExit) as e:
        cli.main([command, "--help"])
    assert e.value.code == 0 and f"examples:\n  rlvr-jax {command}" in capsys.readouterr().out


def test_recipes_named_in_examples_exist():
    named = {word for example in cli_arguments.EXAMPLES.values() for word in example.split() if word.startswith("configs/")}
    assert named and all((Path(__file__).resolve().parents[1] / name).is_file() for name in named)


ROWS = [
    {"task": "math", "gold": "1/2", "answer": "\\boxed{0.5}", "id": 7, "source_repo": "x", "text": "y", "expected": True},
    {"task": "countdown", "gold": 10, "answer": "<answer>8+2</answer>", "numbers": [8, 3, 2], "target": 10, "note": None},
    {"task": "choice", "gold": "C", "answer": "The answer is C."}, {"task": "nothing", "gold": "C", "answer": "C"},
    *({"task": "math", "gold": str(i), "answer": f"\\boxed{{{i % 7}}}"} for i in range(70))]
STATUS = ["ok", "wrong", "ok", "unknown", *("ok" if i == i % 7 else "wrong" for i in range(70))]


def test_verify_prints_one_verdict_a_row_in_order(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert cli.main(["verify", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["74 rows: 9 ok, 64 wrong, 1 unknown", "rlvr-jax verify: 1 of them could not be used, the first: line 4: unknown task 'nothing', "
                                        "expected one of math, countdown, knights, choice, format or module:function"]
    verdicts = [json.loads(line) for line in printed.out.splitlines()]
    assert [v["status"] for v in verdicts] == STATUS and all(list(v) == ["status", "reward", "detail"] for v in verdicts)
    assert [v["reward"] for v in verdicts] == [float(s == "ok") for s in STATUS]


def test_verify_reads_stdin():
    done = subprocess.run([sys.executable, "-m", "rlvr_jax.cli", "verify", "-", "--workers", "1"], capture_output=True, text=True,
                          input="\n".join(map(json.dumps, ROWS[:3])))
    assert done.returncode == 0 and [json.loads(line)["status"] for line in done.stdout.splitlines()] == STATUS[:3], done.stderr


def test_strategies_lists_all_presets(capsys):
    text = out(capsys, "strategies")
    assert presets.PRESETS and all(f"\n{name}(" in f"\n{text}" for name in presets.PRESETS)
    one = out(capsys, "strategies", "difffilter")
    assert one.startswith("difffilter(") and one in text and len(one) < len(text) / 4


@pytest.mark.parametrize("arguments, words", [
    (["train", "CONFIG", "train.stepz=3"], ["train.stepz", "'train.steps'"]),
    (["train", "no_such.yaml"], ["no_such.yaml", "cannot be read"]),
    (["train", "CONFIG", "rollout.temperature=0", "run_dir=TMP/run"], ["rollout.temperature"]),
    (["train", "CONFIG", "strategies=[no_such]", "run_dir=TMP/run"], ["no_such"]),
    (["generate", "CONFIG", "model.path=TMP/nothing", "--prompt", "1+1=?"], ["model.path", "TMP/nothing", "config.json"]),
    (["eval", "CONFIG", "data.domains.more.path=TMP/nothing.jsonl", "data.domains.more.verifier=math"], ["nothing.jsonl"]),
    (["eval", "CONFIG", "--checkpoint", "best", "run_dir=TMP/nothing"], ["TMP/nothing"]),
    # Told before the model is looked for.
    (["train", "CONFIG", "model.path=TMP/none", "run_dir=TMP/run", "data.domains.more.path=TMP/nothing.jsonl", "data.domains.more.verifier=math"], ["nothing.jsonl"]),
    (["train", "CONFIG", "model.path=TMP/none", "run_dir=TMP/run", "data.domains.sums.verifier=maths"], ["unknown verifier 'maths'"]),
    (["train", "CONFIG", "model.path=TMP/none", "run_dir=TMP/run", "rewards=[{no_module:f: 1.0}]"], ["cannot import 'no_module'"]),
    (["verify", "TMP/nothing.jsonl"], ["TMP/nothing.jsonl", "cannot be read"]),
    (["export", "TMP", "TMP/out"], ["TMP", "no config.yaml"]),
    (["report", "TMP/nothing"], ["TMP/nothing"]),
    (["strategies", "no_such"], ["no_such", "rlvr-jax strategies"]),
])
def test_errors_are_one_line_and_exit_code_2(capsys, tmp_path, config, arguments, words):
    fill = lambda text: text.replace("CONFIG", config).replace("TMP", str(tmp_path))  # noqa: E731
    assert cli.main([fill(a) for a in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.startswith(f"rlvr-jax {arguments[0]}: ") and printed.out == ""
    assert all(fill(word) in printed.err for word in words), printed.err
    assert not (tmp_path / "run").exists(), "a start that failed leaves no folder"


def test_debug_shows_where(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        cli.main(["verify", str(tmp_path / "nothing"), "--debug"])


def test_unknown_options_are_refused(capsys, config):
    for more in ("--no-such-option", "no_override", "--seed=3"):
        with pytest.raises(SystemExit) as e:
            cli.main(["generate", config, "--prompt", "1", more])
        assert e.value.code == 2 and more in capsys.readouterr().err


def test_generate(capsys, config, monkeypatch):
    """Overrides behind options; prompts from options or stdin; another seed gives other answers."""
    run = lambda *more: [json.loads(line) for line in out(capsys, "generate", config, *more).splitlines()]  # noqa: E731
    rows = run("--prompt", "1+1=?", "--prompt", "2+2=?", "-n", "2", "rollout.max_new_tokens=4", "seed=5")
    assert [(r["prompt"], r["sample"]) for r in rows] == [("1+1=?", 0), ("1+1=?", 1), ("2+2=?", 0), ("2+2=?", 1)]
    assert all(1 <= r["tokens"] <= 4 and r["logprob"] < 0 and isinstance(r["response"], str) for r in rows)
    assert len({r["response"] for r in rows}) > 1
    monkeypatch.setattr("sys.stdin", iter(["1+1=?\n", "\n", "2+2=?\n"]))
    again = run("-n", "2", "rollout.max_new_tokens=4", "seed=6")
    assert [(r["prompt"], r["sample"]) for r in again] == [(r["prompt"], r["sample"]) for r in rows] and again != rows
    assert cli.main(["generate", config, "--prompt", "1", "-n", "0"]) == 2 and "nothing to answer" in capsys.readouterr().err


def test_generate_goes_on_where_it_was_stopped(capsys, config, tmp_path):
    """A file whose last lines were never written, or torn, ends up as if nothing had happened; equal prompts are sampled anew."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('1+1=?\n{"prompt": "2+2=?", "id": 3}\n\n1+1=?\n3+3=?\n')
    run = lambda: out(capsys, "generate", config, "--prompts", prompts, "--out", answers, "-n", "2", "rollout.max_new_tokens=6", "rollout.slots=3")  # noqa: E731
    assert run() == ""
    whole = answers.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [(r["prompt"], r["sample"]) for r in rows] == [(p, i) for p in ("1+1=?", "2+2=?", "1+1=?", "3+3=?") for i in range(2)]
    assert [r["response"] for r in rows[:2]] != [r["response"] for r in rows[4:6]]
    lines = whole.splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:5]) + lines[5][:9])
    run()
    again = [json.loads(line) for line in answers.read_bytes().splitlines()]
    assert [{k: v for k, v in r.items() if k != "logprob"} for r in again] == [{k: v for k, v in r.items() if k != "logprob"} for r in rows]
    run()  # nothing to do
    assert len(answers.read_bytes().splitlines()) == 8
    answers.write_bytes(lines[2])
    assert cli.main(["generate", config, "--prompts", str(prompts), "--out", str(answers), "-n", "2"]) == 2
    assert "is no answer 0 to prompt 0" in capsys.readouterr().err
    prompts.write_text('{"question": "?"}\n')
    assert cli.main(["generate", config, "--prompts", str(prompts)]) == 2 and "line 1" in capsys.readouterr().err


def test_eval(capsys, config):
    scores = json.loads(out(capsys, "eval", config, "data.domains.more={task: arithmetic, task_args: {digits: [2, 2]}}"))
    mean = scores.pop("mean")
    assert set(scores) == {"sums", "more"} and mean["accuracy"] == sum(s["accuracy"] for s in scores.values()) / 2
    for s in scores.values():
        assert s["total"] == s["known"] == 3 and s["accuracy"] == s["correct"] / 3 and 1 <= s["tokens_mean"] <= 8


def test_train_export_and_load_elsewhere(capsys, config, tmp_path):
    """[maxtext #3003 and others] a run's weights, exported, are the same model for transformers."""
    summary = json.loads(out(capsys, "train", config, f"run_dir={tmp_path / 'run'}"))
    assert summary["steps"] == 1 and (tmp_path / "run" / "report.html").is_file()
    assert json.loads(out(capsys, "eval", config, "--checkpoint", "last", f"run_dir={tmp_path / 'run'}"))["sums"]["total"] == 3
    assert out(capsys, "export", tmp_path / "run", tmp_path / "model", "--checkpoint", "last").strip() == str(tmp_path / "model")
    assert out(capsys, "report", tmp_path / "run").strip().endswith("report.html")
    from rlvr_jax.models import hf
    from rlvr_jax.models.decoder import forward, head_matrix
    from rlvr_jax.models.hf import load_config, load_params
    from rlvr_jax.state import weights_sha256

    cfg = load_config(tmp_path / "model")
    params = load_params(tmp_path / "model", cfg)
    assert weights_sha256(params) == summary["weights_sha256"] and hf.load_tokenizer(tmp_path / "model").vocab_size <= cfg.vocab_size
    torch = pytest.importorskip("torch", reason="torch, the reference, is not installed")
    from transformers import AutoModelForCausalLM

    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 24))
    hidden, _ = forward(params, cfg, tokens, np.broadcast_to(np.arange(24), tokens.shape))
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.abs(np.asarray(hidden @ head_matrix(params, cfg).T) - wanted).max() < 1e-4
