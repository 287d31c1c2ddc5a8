"""The benchmark configurations: every real file loads whole, and its verifier accepts the gold answer of its rows."""

import json
from pathlib import Path

import pytest

from rlvr_jax import config as configs
from rlvr_jax import data
from rlvr_jax.config import Pool
from rlvr_jax.data.rows import DataError
from rlvr_jax.data.templates import TEMPLATES
from rlvr_jax.rewards.pool import Job
from rlvr_jax.rewards.pool import Pool as Workers

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "eval"
# Config -> rows of each domain; and rows whose own gold answer gets no verdict, or is called wrong: faults of the data that a score can not see.
ROWS = {
    "gsm8k": {"gsm8k": 1319}, "math500": {"math500": 500}, "aime24": {"aime24": 30}, "amc23": {"amc23": 40}, "minerva_math": {"minerva_math": 272},
    "olympiadbench": {"olympiadbench": 675}, "kk_hard": {"kk_hard": 200}, "bbh_logical_deduction": {"bbh_logical_deduction": 750},
    "bbh_tracking": {"bbh_tracking": 750}, "bbh_web_of_lies": {"bbh_web_of_lies": 250}, "mmlu_pro": {"mmlu_pro_chemistry": 1132, "mmlu_pro_physics": 1299},
    "arc": {"arc_easy": 2376, "arc_challenge": 1172}, "openbookqa": {"openbookqa": 500}, "countdown": {"countdown": 500}}
UNREADABLE = {"minerva_math": 6, "olympiadbench": 3}


def load(name, root, *overrides):
    return configs.load(FOLDER / f"{name}.yaml", [f"data.root={root}", *overrides])


def built(shared, name, *overrides):
    config = load(name, shared / "data", *overrides)
    files = [f for d in config.data.domains.values() for f in ([d.eval_path] if isinstance(d.eval_path, str) else d.eval_path)]
    if missing := [f for f in files if not (shared / "data" / f).is_file()]:
        pytest.skip(f"no real data: {missing[0]} is missing")
    return data.build(config, None)


def gold(row, expressions):
    """A response that states the row's own answer the way its template asks for it."""
    if row.verifier == "countdown":
        return f"<answer>{expressions[tuple(row.fields['numbers']), row.fields['target']]}</answer>"
    return {"math": row.answer if "\\boxed" in row.answer else f"So it is \\boxed{{{row.answer}}}.", "choice": f"I think.\nAnswer: {row.answer}",
            "knights": f"Zoey is a knave?\n<answer>{row.answer}</answer>"}[row.verifier]


@pytest.fixture(scope="module")
def judges():
    p = Pool(workers=1)
    with Workers(p.workers, p.cpu_seconds, p.wall_seconds, p.memory_mb) as pool:
        yield pool


def refused(judges, shared, rows):
    """Rows whose gold answer is not accepted: (prompt, answer, verdict)."""
    solver = shared / "data/countdown/test_with_solver_answers.jsonl"
    expressions = {(tuple(r["numbers"]), r["target"]): r["gold_expr"] for r in map(json.loads, solver.read_text().splitlines())} if rows[0].verifier == "countdown" else {}
    verdicts = judges.collect([judges.submit(Job(r.verifier, gold(r, expressions), r.answer, r.fields)) for r in rows])
    return [(r.prompt[:60], r.answer[-60:], v.status) for r, v in zip(rows, verdicts) if v.status != "ok"]


def test_every_configuration_has_its_line():
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(ROWS)
    for path in FOLDER.glob("*.yaml"):
        config = load(path.stem, "somewhere")
        assert config.data.root == "somewhere" and not config.data.trained and f"configs/eval/{path.name}" in path.read_text()
        assert all(d.template in TEMPLATES for d in config.data.domains.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_file_is_evaluated_whole(judges, shared, name):
    dataset = built(shared, name)
    assert {n: len(rows) for n, rows in dataset.eval.items()} == ROWS[name] and not dataset.warnings and not dataset.overlaps
    for rows in dataset.eval.values():
        assert all(r.prompt.strip() and (r.verifier == "countdown" or r.answer) and "{" + "prompt" not in r.prompt for r in rows)
        if rows[0].verifier != "math":
            assert not refused(judges, shared, rows[:40])


@pytest.mark.parametrize("name, every", [("gsm8k", 40), ("math500", 25), ("aime24", 3), ("amc23", 4), ("minerva_math", 20), ("olympiadbench", 40)])
def test_gold_answers_of_some_rows_are_right(judges, shared, name, every):
    rows, = built(shared, name).eval.values()
    assert len(refused(judges, shared, rows[::every])) <= UNREADABLE.get(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_gold_answers_of_all_rows_are_right(judges, shared, name):
    for rows in built(shared, name).eval.values():
        bad = refused(judges, shared, rows)
        assert len(bad) <= UNREADABLE.get(name, 0), bad


def test_a_limit_takes_a_fair_prefix(shared):
    """The first rows of a larger limit are those of a smaller one, and come from all the files."""
    few, more = (built(shared, "kk_hard", f"eval.limit={n}").eval["kk_hard"] for n in (10, 30))
    assert len(few) == 10 and more[:10] == few and {len(r.fields["names"]) for r in few} == {7, 8}
    assert len(built(shared, "aime24", "eval.limit=100").eval["aime24"]) == 30


@pytest.mark.parametrize("template, told", [
    ("boxed_cto", ["data.domains.gsm8k.template", "'boxed_cto'", "nearest: 'boxed_cot'", "letter_cot"]),
    ("Answer the question.", ["no field of the row", "{prompt}"]),
    ("letter_cot", ["no field 'options'"])])
def test_a_template_that_cannot_be_meant(shared, template, told):
    with pytest.raises(DataError) as e:
        built(shared, "gsm8k", f"data.domains.gsm8k.template={template}")
    assert all(word in str(e.value) for word in told) and "\n" not in str(e.value)


def test_templates_say_what_their_verifier_reads():
    for name, text in TEMPLATES.items():
        assert ("step by step" in text) == name.endswith("_cot") and "{" in text
        assert "\\boxed{{}}" in text or "boxed" not in name


def test_repeated_benchmark_rows_count_twice(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 2 + '{"question": "a long question", "answer": "3"}\n')
    tree = {"data": {"domains": {"b": {"eval_path": [str(tmp_path / "b.jsonl")] * 2, "verifier": "math"}}}}
    dataset = data.build(configs.validate(tree), None)
    assert len(dataset.eval["b"]) == 6 and dataset.notes["b"].counts["eval_rows_read"] == 6 and dataset.names == () and dataset.order == ("b",)
