"""``rlvr-jax eval`` as a command: rows on disk, going on after a kill, the table, unknown verdicts, domains for evaluation only."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rlvr_jax import cli
from rlvr_jax import config as configs
from rlvr_jax.benchmark import benchmark
from rlvr_jax.benchmark_table import markdown

PROGRAMS: dict = {}  # compiled once for all tests


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "b.jsonl").write_text("".join(json.dumps({"question": f"{i}+{i}=?", "answer": "ABC"[i % 3] if i % 4 else "none of them"}) + "\n" for i in range(10)))
    tree = {"model": {"path": str(tiny_model)}, "rollout": {"max_new_tokens": 8}, "run_dir": str(folder / "run"), "pool": {"workers": 1},
            "data": {"root": str(folder), "max_prompt_length": 96, "domains": {
                "bench": {"eval_path": "b.jsonl", "verifier": "choice", "template": "question"},
                "other": {"eval_path": "b.jsonl", "verifier": "choice", "template": "question", "columns": {"answer": "question"}}}},
            "eval": {"batch_prompts": 4, "samples_per_prompt": 2, "temperature": 1.0}}
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def run(config, *overrides):
    results = benchmark(configs.load(config, overrides), programs=PROGRAMS)
    return results["domains"] | {"mean": results["mean"]}


def only(folder: Path) -> Path:
    found, = (folder / "eval").iterdir()
    return found


def test_an_evaluation_is_on_disk_and_goes_on(config, tmp_path):
    """Cut at any byte, the answers that are whole batches stay, and the result is the same file."""
    whole = run(config, f"run_dir={tmp_path / 'a'}")
    folder = only(tmp_path / "a")
    results, answers = (folder / "results.json").read_bytes(), (folder / "answers.jsonl").read_bytes()
    lines = [json.loads(line) for line in answers.splitlines()]
    assert len(lines) == 40 and [(r["number"], r["sample"]) for r in lines[:3]] == [(0, 0), (0, 1), (1, 0)]
    assert {"prompt", "answer", "response", "verdict", "detail"} <= set(lines[0])
    # 3 of 10 gold answers are prose: known apart, with the reason, and never a 0 among the others
    assert whole["bench"]["unknown"] == 6 and whole["bench"]["known"] == 14 and whole["bench"]["total"] == 20
    assert [r["verdict"] for r in lines if r["domain"] == "bench"].count("unknown") == 6 and "names no option" in str(whole["bench"]["unknown_reasons"])
    # nothing known at all: no number
    assert whole["other"]["accuracy"] is None and whole["mean"] == whole["mean"] | {"accuracy": whole["bench"]["accuracy"], "domains": 1}
    table = (folder / "results.md").read_text()
    assert "mean of the 1 of 2 with verdicts" in table and "| other | - |" in table and "pass@2" in table and "majority@2" in table
    for cut in (len(answers) // 2, len(answers) // 3 + 7, 0):
        (folder / "answers.jsonl").write_bytes(answers[:cut])
        (folder / "results.json").unlink()
        again = run(config, f"run_dir={tmp_path / 'a'}")
        assert again == whole and (folder / "results.json").read_bytes() == results
        assert (folder / "answers.jsonl").read_bytes() == answers and only(tmp_path / "a") == folder


def test_a_limit_that_grows_goes_on_and_one_that_shrinks_keeps(config, tmp_path):
    """Also where the smaller limit ended inside a batch (of 4)."""
    file = lambda: (only(tmp_path / "a") / "answers.jsonl").read_text().splitlines()  # noqa: E731
    few = run(config, f"run_dir={tmp_path / 'a'}", "eval.limit=3")
    first = file()
    edited = [line.replace('"response": "', '"response": "kept ') for line in first]
    (only(tmp_path / "a") / "answers.jsonl").write_text("\n".join(edited) + "\n")
    more = run(config, f"run_dir={tmp_path / 'a'}", "eval.limit=8")
    second = file()
    assert few["bench"]["prompts"] == 3 and more["bench"]["prompts"] == 8 and len(first) == 12 and len(second) == 32
    assert set(edited) < set(second), "answers that were there were made again"
    assert run(config, f"run_dir={tmp_path / 'a'}", "eval.limit=3")["bench"]["total"] == 6 and sorted(file()) == sorted(second)


def test_other_settings_and_other_data_have_another_folder(config, tmp_path):
    run(config, f"run_dir={tmp_path / 'a'}", "eval.limit=2")
    run(config, f"run_dir={tmp_path / 'a'}", "eval.limit=2", "data.overlong_prompt=truncate")
    run(config, f"run_dir={tmp_path / 'a'}", "eval.limit=2", "data.domains.bench.template=boxed")
    assert len(list((tmp_path / "a" / "eval").iterdir())) == 3


@pytest.mark.slow
def test_a_killed_evaluation_gives_the_same_json(config, tmp_path):
    command = [sys.executable, "-m", "rlvr_jax.cli", "eval", config]
    subprocess.run([*command, f"run_dir={tmp_path / 'whole'}"], check=True, capture_output=True)
    whole = only(tmp_path / "whole")
    process = subprocess.Popen([*command, f"run_dir={tmp_path / 'cut'}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file = tmp_path / "cut" / "eval" / whole.name / "answers.jsonl"
    deadline = time.monotonic() + 600
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(file.read_bytes()) < len((whole / "answers.jsonl").read_bytes()), "it ended before it could be killed"
    subprocess.run([*command, f"run_dir={tmp_path / 'cut'}"], check=True, capture_output=True)
    trees = [json.loads((folder / "results.json").read_text()) | {"folder": ""} for folder in (whole, file.parent)]
    assert trees[0] == trees[1] and file.read_bytes() == (whole / "answers.jsonl").read_bytes()


@pytest.mark.parametrize("command, change, told", [
    ("train", [], "every domain has an 'eval_path' alone"),
    ("sft", [], "every domain has an 'eval_path' alone"),
    ("eval", ["eval.temperature=0"], "eval.samples_per_prompt: 2 samples at eval.temperature 0 are one answer 2 times"),
    ("eval", ["data.domains.bench.eval_path=nothing.jsonl"], "nothing.jsonl' does not exist"),
    ("eval", ["data.domains.bench.eval_path=null"], "an 'eval_path' alone"),
    ("eval", ["eval.limit=0"], "eval.limit")])
def test_what_cannot_be_done_is_one_line(capsys, config, command, change, told):
    assert cli.main([command, config, *change]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1


def test_an_evaluation_asks_for_no_training_field(config):
    """16 rows of training's micro-batch do not divide over 3 devices; nothing here trains."""
    assert configs.load(config, ["mesh.data=3"]).mesh.data == 3
    with pytest.raises(configs.ConfigError, match="micro_batch"):
        configs.load(config, ["mesh.data=3", "data.domains.sums={task: arithmetic}"])


@pytest.mark.slow
def test_a_run_trains_on_one_domain_and_is_measured_on_another(capsys, config, tmp_path):
    """The overlap is told at the start of train and in eval, and the rows are gone."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"question": f"{i} + {i}=?", "answer": str(2 * i)}) + "\n" for i in range(9, 40)))
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 1=?", "answer": "2"}\n{"question": "9 + 9=?", "answer": "18"}\n')
    domain = f"{{path: '{tmp_path / 'train.jsonl'}', eval_path: '{tmp_path / 'test.jsonl'}', verifier: math, template: boxed}}"
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.domains.sums={domain}"]
    small = ["train.steps=1", "train.prompts_per_step=2", "train.micro_batch=4", "rollout.samples_per_prompt=2", "eval.limit=2", "data.domains.other.weight=5"]
    assert cli.main(["train", config, *overrides, *small]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    told = "domain 'sums': 1 training row is 1 of the evaluation prompts of 'sums' (1 word for word"
    assert told in printed.err and set(json.loads(printed.out)["eval"]["after"]) == {"sums", "bench", "other"}
    assert cli.main(["eval", config, *overrides, *small, "--checkpoint", "last"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    scores = json.loads(printed.out)
    assert told in printed.err and "| bench |" in printed.err and set(scores) == {"sums", "bench", "other", "mean"}
    results = json.loads((only(tmp_path / "run") / "results.json").read_text())
    assert results["overlaps"][0]["train"] == results["overlaps"][0]["eval"] == "sums" and results["checkpoint"] == "last"


def test_a_table_survives_hostile_names():
    domain = {"accuracy": 0.5, "stderr": 0.1, "prompts": 4, "rows": 9, "unknown": 1, "total": 4, "truncated": 0, "tokens_mean": 3.0, "unknown_reasons": {"a|b\nc": 1}}
    results = {"model": "m|\nx", "checkpoint": None, "limit": 4, "settings": {"samples": 1, "temperature": 0, "max_new_tokens": 8}, "warnings": [],
               "domains": {"a|b": domain, "c": domain}, "mean": {"accuracy": 0.5, "stderr": 0.07, "domains": 2}}
    lines = markdown(results).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 5 and {line.replace("\\|", "").count("|") for line in table} == {7}
    assert "| a\\|b | 50.0 ± 10.0 | 4 of 9 | 1 of 4 | 0 of 4 | 3 |" in table and "the first 4 prompts of a domain" in "\n".join(lines)
    assert table[-1].startswith("| **mean of 2** | 50.0 ± 7.0 |")
