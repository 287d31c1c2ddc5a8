"""Runs to a table: what is refused by name, what survives, and that nothing depends on how often one had to start again."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from compare_runs import BASE, change_json, load, rows, write_run
from page_checks import Page, check_self_contained

from rlvr_jax import cli, pairing, report
from rlvr_jax.compare import command, runner
from rlvr_jax.compare import spec as specs
from rlvr_jax.compare.collect import collect
from rlvr_jax.compare.output import plain
from rlvr_jax.compare.result import OVERALL, pair_counts

ARMS = {"baseline": {}, "x": {"strategies": ["per"]}, "ucb": {"data": {"mixer": {"name": "dump_ucb"}}}}


@pytest.fixture
def made(tmp_path):
    """A whole comparison of runs that nobody trained: x is better, ucb is not."""
    spec = load(tmp_path, ARMS)
    for arm, seed in spec.runs:
        write_run(spec, arm, seed, score=0.5 + 0.1 * (arm == "x"))
    return spec


def test_finished_runs_become_a_table_and_a_page(made):
    told = command.run(made, train=False)
    c = told.comparison
    assert c.table.arms == ("baseline", "x", "ucb") and c.table.pairs == ("0", "1", "2") and c.table.domains == ("sums", "knights")
    assert c.effects["x", OVERALL].difference == pytest.approx(0.1) and c.effects["ucb", OVERALL].difference == pytest.approx(0)
    x, y = c.table.curves["rollouts"]
    assert x[0, 0].tolist() == [0, 8, 16, 24, 32] and y[1, 2, -1] == pytest.approx(0.67)
    assert c.table.curves["generated tokens"][0][0, 0, -1] == 400 and c.table.curves["seconds"][0][0, 0, -1] == 8
    assert told.found.cost["x"] == {"updates": 4, "rollouts": 32, "generated tokens": 400, "updated tokens": 200, "seconds": 8}
    assert not command.problems(told.found) and not command.unfinished(told.found) and any(note.startswith("ucb: chooses which prompts") for note in c.notes)
    tree = json.loads((made.folder / "results.json").read_text())
    assert list(tree["arms"]) == list(ARMS) and tree["source"]["budget"] == "updates=4" and tree["source"]["cost"]["x"]["updates"] == 4
    shown = Page(told.report)
    shown.check_inert()
    check_self_contained((made.folder / "report.html").read_text())
    for words in ("What the arms cost", "budget is updates=4", "What was learned from", "Kept rows", "Domain mix", "Mix of baseline", "Accuracy over rollouts", "rollouts to reach"):
        assert words in shown.text, words
    ids = [value for name, value in shown.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and "Mix of x" not in shown.text, "an arm with the baseline's mix is not drawn again"


def tampered_weights(spec, folder):
    change_json(folder / pairing.FILE, weights_sha256="f" * 64)


def tampered_evaluation(spec, folder):
    identity = pairing.identity(spec.run_config("x", 1), "w" * 64, {"sums": rows(), "knights": rows((1, 2, 4))})
    (folder / pairing.FILE).write_text(json.dumps(identity))


def tampered_order(spec, folder):
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ids = records[1]["prompt_ids"]
    ids[0], ids[1] = ids[1], ids[0]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def other_seed(spec, folder):
    change_json(folder / pairing.FILE, seed=7)


def no_pairing(spec, folder):
    (folder / pairing.FILE).unlink()


def lost_prompts(spec, folder):
    lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[:1] + lines[2:]))


def no_evaluation(spec, folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({k: v for k, v in r.items() if r["step"] < 4 or not k.startswith("eval/")}) + "\n" for r in records))


def too_long(spec, folder):
    write_run(spec, "x", 1, steps=6)


@pytest.mark.parametrize("tamper, words", [
    (tampered_weights, "other initial weights (ffffffff, expected wwwwwwww)"), (tampered_evaluation, "domain 'knights' is evaluated differently"),
    (tampered_order, "another order of prompts in domain 'sums', from its prompt 2 on"), (other_seed, "missing or of another seed"), (no_pairing, "missing or of another seed"),
    (lost_prompts, "prompts.jsonl lacks steps or domains"), (no_evaluation, "no 'eval' was recorded at its last step, 4"), (too_long, "its budget differs: 6 updates, expected 4")])
def test_a_run_that_is_no_pair_is_refused_by_name(made, tamper, words):
    tamper(made, made.run_dir("x", 1))
    found = collect(made)
    assert list(found.refused) == [("x", 1)] and words in found.refused["x", 1]
    assert np.isnan(found.table.scores[1, 1]).all() and not np.isnan(found.table.scores[1, [0, 2]]).any() and not np.isnan(found.table.scores[[0, 2]]).any()


def test_a_refused_pair_is_told_everywhere(made, capsys):
    tampered_weights(made, made.run_dir("x", 1))
    assert cli.main(["compare", str(made.folder.parent / "cmp.yaml"), "--run-dir", str(made.folder), "--report-only"]) == 2
    printed, tree = capsys.readouterr(), json.loads((made.folder / "results.json").read_text())
    assert "other initial weights" in printed.err and "(x seed 1)" in printed.err and printed.out.splitlines()[-1] == str(made.folder / "report.html")
    assert tree["arms"]["x"]["pairs"] == 2 and tree["arms"]["ucb"]["pairs"] == 3 and "other initial weights" in tree["source"]["left out"]["x seed 1"]
    assert any("x seed 1" in note and "other initial weights" in note for note in tree["notes"])


def test_mixers_are_held_to_the_order_within_a_domain_too(made):
    """They draw more of one domain and less of another: the common part must agree."""
    folder = write_run(made, "ucb", 0, order={"sums": list(range(100)), "knights": list(range(1000, 1100))})
    more = [{"step": s, "prompt_ids": [3 * s - 3, 3 * s - 2, 3 * s - 1, 999 + s], "domains": ["sums"] * 3 + ["knights"]} for s in range(1, 5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in more))
    assert not collect(made).refused
    more[0]["prompt_ids"][2] = 50
    (folder / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in more))
    assert "domain 'sums', from its prompt 2 on" in collect(made).refused["ucb", 0]


def test_arms_that_pick_their_prompts_need_not_repeat_the_order(made, monkeypatch):
    tampered_order(made, made.run_dir("x", 1))
    monkeypatch.setattr(pairing, "reorders_prompts", lambda config: config.strategies == ("per",))
    assert not collect(made).refused


@pytest.mark.parametrize("unit, steps, words", [
    ("generated", 4, None), ("generated", 3, "300 generated tokens when it ended at step 3, expected 400"), ("generated", 5, "went on to 500 generated tokens"),
    ("updated", 8, None), ("updated", 7, "350 updated tokens when it ended"), ("updated", 9, "went on to 450 updated tokens")])
def test_budgets_of_tokens_are_checked(tmp_path, unit, steps, words):
    spec = load(tmp_path, ARMS, budget=f"{unit}=391")
    for arm, seed in spec.runs:
        write_run(spec, arm, seed, steps={"generated": 4, "updated": 8}[unit])
    folder = write_run(spec, "x", 1, steps=steps)
    if words and "ended" in words:  # as if it had stopped at train.steps
        spec.arms["x"] = spec.arms["x"].model_copy(update={"train": spec.arms["x"].train.model_copy(update={"steps": steps})})
        change_json(folder / "summary.json", steps=steps)
    refused = collect(spec).refused
    assert (not refused) if words is None else words.replace("400", "391") in refused["x", 1], refused


def test_unequal_costs_are_said(made):
    for seed in made.seeds:
        write_run(made, "x", seed, tokens=150)
    notes = collect(made).notes
    assert any(note == "Equal in updates, not in generated tokens: x used 1.50 times those of baseline." for note in notes), notes


def test_another_experiment_in_a_folder_is_refused(made):
    change = made.arms["x"].model_copy(update={"strategies": ("ar",)})
    spec = made._replace(arms={**made.arms, "x": change})
    refused = collect(spec).refused
    assert set(refused) == {("x", 0), ("x", 1), ("x", 2)} and "strategies=" in refused["x", 0]
    longer = made._replace(budget=specs.Budget("updates", 6), arms={a: c.model_copy(update={"train": c.train.model_copy(update={"steps": 6})}) for a, c in made.arms.items()})
    assert collect(longer).missing == tuple(longer.runs), "a larger budget goes on with the same runs"


def test_a_schedule_is_not_stretched(tmp_path):
    arms = {a: {"optimizer": {"schedule": "linear"}, **changes} for a, changes in ARMS.items()}
    spec = load(tmp_path, arms, seeds=1)
    for arm, seed in spec.runs:
        write_run(spec, arm, seed)
    assert not collect(spec).refused
    assert all("was begun with train.steps=4, now 6" in why for why in collect(load(tmp_path, arms, seeds=1, budget="updates=6")).refused.values())
    assert len(collect(load(tmp_path, arms, seeds=1, budget="updates=6")).refused) == 3


def test_edited_user_code_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("A = 1")
    spec = load(tmp_path, {"baseline": {}, "mine": {"strategies": ["mine:f"]}})
    for arm, seed in spec.runs:
        write_run(spec, arm, seed)
    assert not collect(spec).refused and pairing.code(spec.arms["mine"]).keys() == {"mine"}
    (tmp_path / "mine.py").write_text("A = 2")
    assert all("the file of 'mine' has changed" in why for why in collect(spec).refused.values()) and len(collect(spec).refused) == 3


def test_nothing_finished_is_no_table(tmp_path, capsys):
    load(tmp_path, ARMS)
    assert cli.main(["compare", str(tmp_path / "cmp.yaml"), "--run-dir", str(tmp_path / "out"), "--report-only"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "9 runs are not finished yet (baseline seed 0, x seed 0, ucb seed 0 and 6 more); without --report-only they are made" in printed.err


class Inline:
    """A worker in this process: what is compiled once serves every run of a test."""

    programs: dict = {}  # noqa: RUF012

    def __init__(self, number, cores, log, locks=()):
        self.number, self.log, self.task, self.backend = number, log, None, None
        self.read, self.write = os.pipe()
        self.say(backend="gpu")  # one worker only

    def say(self, **message):
        os.write(self.write, json.dumps(message).encode() + b"\n")

    def fileno(self):
        return self.read

    def start(self, task, config):
        from rlvr_jax import config as configs
        from rlvr_jax.train import train

        self.task = task
        try:
            self.say(finished=train(configs.validate(config), programs=self.programs)["finished"])
        except ValueError as e:
            self.say(reason=str(e))

    def receive(self):
        return [json.loads(line) for line in os.read(self.read, 1 << 16).splitlines()]

    def end(self, grace=0.0):
        os.close(self.read)
        os.close(self.write)
        return ""


def trained(model):
    """BASE for runs that really train: little of everything, and a reward that random weights get."""
    return {**BASE, "model": {"path": str(model)}, "data": {"domains": {"sums": BASE["data"]["domains"]["sums"]}, "max_prompt_length": 32},
            "eval": {**BASE["eval"], "prompts_per_domain": 4}, "rewards": [{"compare_runs:parity": 1.0}]}


@pytest.fixture
def inline(monkeypatch, tiny_model):
    monkeypatch.setattr(runner, "Worker", Inline)
    monkeypatch.setattr(report, "build", lambda run_dir: None)  # pages of single runs have their own tests
    return trained(tiny_model) | {"train": {**BASE["train"], "steps": 2}}


USER = """
from rlvr_jax.strategies import Strategy

def shortest_half():
    def apply(state, s):
        middle = (s.length * s.valid).sum(1, keepdims=True) / s.valid.sum(1, keepdims=True).clip(1)
        return (s.valid & (s.length <= middle)).astype("float32"), state
    return Strategy(init=lambda: (), apply=apply)
"""


def table_of(folder: Path) -> list[dict]:
    """results.csv without what a clock measured."""
    with (folder / "results.csv").open() as file:
        return [row for row in csv.DictReader(file) if "seconds" not in row["measure"]]


def test_a_users_strategy_is_one_line_of_yaml(inline, tmp_path, monkeypatch):
    """Ten lines in one file, compared with difffilter by one more line of a comparison that exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_too", raising=False)
    (tmp_path / "mine_too.py").write_text(USER)
    assert len(USER.strip().splitlines()) <= 10
    text = yaml.safe_dump({"base": inline, "baseline": "difffilter"}) + "arms:\n  difffilter: {strategies: [difffilter]}\n  maxvar: {strategies: [maxvar]}\n"
    Path("cmp.yaml").write_text(text.replace("  maxvar: {strategies: [maxvar]}", "  mine: {strategies: ['mine_too:shortest_half']}"))
    assert cli.main(["compare", "cmp.yaml", "--seeds", "2"]) == 0
    tree = json.loads(Path("runs/cmp/results.json").read_text())
    assert list(tree["arms"]) == ["difffilter", "mine"] and tree["arms"]["mine"]["pairs"] == 2 and tree["arms"]["mine"]["verdict"] == "too few seeds to decide"
    kept = [json.loads(line).get("kept/rows") for line in Path("runs/cmp/runs/mine/seed0/metrics.jsonl").read_text().splitlines()]
    assert 0 < kept[-1] <= 1 and "mine_too" in json.loads(Path("runs/cmp/runs/mine/seed0/pairing.json").read_text())["code"]


class Pretend(Inline):
    """A worker that writes down finished runs at once; arms with a strategy of no name fail, and arm 'lost' takes its process along."""

    spec: specs.Spec
    made: list = []  # noqa: RUF012

    def start(self, task, config):
        self.task = task
        if task[0] == "lost":
            self.dead = True
            os.write(self.write, b" ")  # wakes the reader, as a closed pipe does
        elif "no_such" in config["strategies"]:
            self.say(reason="unknown strategy 'no_such'")
        else:
            self.made.append(task)
            write_run(self.spec, *task, score=0.4 + 0.1 * len(task[0]))
            self.say(finished=True)

    def receive(self):
        return None if getattr(self, "dead", False) else super().receive()

    def end(self, grace=0.0):
        super().end()
        return "killed by SIGKILL (out of memory?)"


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """``run(arms, folder, ...)``: a comparison by workers that only pretend; its runs are counted in ``Pretend.made``."""
    monkeypatch.setattr(runner, "Worker", Pretend)
    monkeypatch.setattr(Pretend, "made", [])

    def run(arms, folder, shard=None, **more):
        Pretend.spec = load(tmp_path, arms, seeds=2)._replace(folder=tmp_path / folder)
        return command.run(Pretend.spec, shard=shard, **more)

    return run


def test_failing_and_lost_arms_are_told_and_the_rest_goes_on(pretend, tmp_path, capsys):
    told = pretend({"baseline": {}, "broken": {"strategies": ["no_such"]}, "lost": {"strategies": ["ar"]}, "other": {"strategies": ["per"]}}, "whole")
    assert set(told.found.failed) == {("broken", 0), ("broken", 1), ("lost", 0), ("lost", 1)} and told.comparison.table.arms == ("baseline", "other")
    assert Pretend.made == [("baseline", 0), ("other", 0), ("baseline", 1), ("other", 1)], "pair by pair, each once"
    lines = command.problems(told.found)
    assert lines[0] == "failed: unknown strategy 'no_such' (broken seed 0, broken seed 1)" and "its process was lost: killed by SIGKILL" in lines[1]
    assert any(note.startswith("broken, lost: no finished run") for note in told.comparison.notes)
    reason = json.loads((tmp_path / "whole" / "runs" / "broken" / "seed1" / "failure.json").read_text())["reason"]
    assert reason == "unknown strategy 'no_such'" and "broken seed 0: failed: unknown strategy" in capsys.readouterr().err
    Pretend.made.clear()
    mended = pretend({"baseline": {}, "broken": {"strategies": ["ar"]}, "other": {"strategies": ["per"]}}, "whole")
    assert Pretend.made == [("broken", 0), ("broken", 1)] and not mended.found.failed, "tried again, and nothing else is"


def test_two_shards_are_the_whole(pretend, tmp_path):
    pretend(ARMS, "whole")
    first = pretend(ARMS, "here", "0/2")
    assert {seed for _, seed in Pretend.made[6:]} == {0} and first.comparison.table.pairs == ("0",)
    assert pair_counts(first.comparison) == "1" and "With 1 pair and 2 arms" in plain(first.comparison)
    assert command.unfinished(first.found) == "3 runs are not finished yet (baseline seed 1, x seed 1, ucb seed 1)"
    pretend(ARMS, "there", "1/2")
    shutil.copytree(tmp_path / "there" / "runs", tmp_path / "here" / "runs", dirs_exist_ok=True)
    made = list(Pretend.made)
    merged = pretend(ARMS, "here", train=False)
    for name in ("results.csv", "results.json", "results.md"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not command.unfinished(merged.found) and pretend(ARMS, "here").report and Pretend.made == made, "what is finished is not made again"


@pytest.mark.parametrize("unit", ["generated", "updated"])
def test_a_budget_of_tokens_ends_a_run_at_the_first_step_that_reaches_it(inline, tmp_path, unit):
    text = {"base": inline, "arms": {"baseline": {}, "other": {"strategies": ["difffilter"]}}, "seeds": 1}
    (tmp_path / "cmp.yaml").write_text(yaml.safe_dump(text))
    told = command.run(specs.load(tmp_path / "cmp.yaml", budget=f"{unit}=150", run_dir=str(tmp_path / "out")))
    assert not told.found.refused and not told.found.failed, (told.found.refused, told.found.failed)
    assert set(told.found.records) == {("baseline", 0), ("other", 0)}
    totals = [r[f"tokens/{unit}_total"] for r in told.found.records["other", 0] if r["step"]]
    assert totals[-1] >= 150 > totals[-2] and told.found.records["other", 0][-1]["eval/mean"] is not None


def processes_of(folder: Path) -> list[int]:
    """Ids of live processes that have a file of ``folder`` open."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(fd).startswith(str(folder)):
                found.append(int(fd.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_anywhere_the_next_start_yields_the_same_table(inline, tmp_path):
    """SIGKILL of the command while a run trains: its worker ends with it and saves, so that not a step is lost, and the same command ends
    in the same table."""
    path = tmp_path / "cmp.yaml"
    path.write_text(yaml.safe_dump({"base": inline | {"train": BASE["train"] | {"save_every": 1000}}, "arms": {"baseline": {}, "other": {"strategies": ["difffilter"]}}, "seeds": 2}))
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": search}
    mine, whole = tmp_path / "mine", tmp_path / "whole"
    running = mine / "runs" / "other" / "seed0"
    start = lambda: subprocess.Popen([sys.executable, "-m", "rlvr_jax.cli", "compare", str(path), "--run-dir", str(mine)],  # noqa: E731
                                     env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = start()
    while runner.last_record(running / "metrics.jsonl").get("step", 0) < 1 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 300
    while processes_of(mine) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of(mine), "the worker outlived the command"
    kept = max(int(p.name) for p in (running / "checkpoints").iterdir() if p.name.isdigit())
    assert kept == runner.last_record(running / "metrics.jsonl")["step"] >= 1
    first = json.loads((mine / "runs" / "baseline" / "seed0" / "summary.json").read_text())
    again = start()
    _, error = again.communicate(timeout=1500)
    assert again.returncode == 0, error
    assert json.loads((mine / "runs" / "baseline" / "seed0" / "summary.json").read_text()) == first, "a finished run is not made again"
    assert cli.main(["compare", str(path), "--run-dir", str(whole)]) == 0
    assert table_of(mine) == table_of(whole)
    weights = lambda folder: [json.loads(p.read_text())["weights_sha256"] for p in sorted((folder / "runs").glob("*/*/summary.json"))]  # noqa: E731
    assert weights(mine) == weights(whole) and len(set(weights(mine))) == 4


def test_last_record_reads_past_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "x')
    assert runner.last_record(path) == {"step": 2} and runner.last_record(tmp_path / "nothing") == {}


def test_pairing_names_what_decides_an_evaluation(tmp_path):
    spec = load(tmp_path, ARMS)
    config = spec.arms["x"]
    of = lambda c, r=None: pairing.identity(c, "w", {"sums": rows() if r is None else r})["evaluation"]["sums"]  # noqa: E731
    same = of(config)
    assert of(spec.arms["baseline"]) == same and of(config.model_copy(update={"seed": 5})) == same
    for change in ({"rollout": config.rollout.model_copy(update={"max_new_tokens": 9})}, {"eval": config.eval.model_copy(update={"temperature": 0.5})},
                   {"rewards": ({"choice": 1.0},)}):
        assert of(config.model_copy(update=change)) != same
    assert of(config.model_copy(update={"rewards": ({"verifier": 0.0}, {"mine:f": 1.0})})) == same, "trained on another reward, measured by the same"
    assert of(config.model_copy(update={"rewards": ({"math": 2.0},)})) == same, "the rows' own verifier by its name"
    assert of(config, rows((1, 2))) != same and of(config, rows()[::-1]) != same
