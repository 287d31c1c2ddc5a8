"""Training rows that are evaluation prompts: told apart from problems that only look alike, and found in the real files."""

import json

import pytest

from rlvr_jax import config as configs
from rlvr_jax import data
from rlvr_jax.data.overlap import loose
from rlvr_jax.data.rows import normalise

SAME = [
    ("Find $x$ such that $\\frac{1}{x} + 2 = 7$ holds.", "Find \\(x\\) such that \\[\\dfrac{1}{x}+2=7\\] holds"),
    ("Let $a \\le b$ be real. Compute $\\left( a + b \\right)$ now.", "let $a \\leqslant b$ be real; compute $(a+b)$ now"),
    ("Alice and Bob share 3.5 litres of milk, how much each?", "Alice and Bob share 3.5 litres of milk: how much each? Let's think step by step and output the final answer within \\boxed{}."),
    ("In the diagram, find the area of triangle $ABC$. [asy]\ndraw((0,0)--(1,1));\n[/asy]", "In the diagram, find the area of triangle $ABC$."),
    ("The gardener - taking the first turn - waters twelve trees", "The gardener – taking the first turn – waters twelve trees."),
]
OTHER = [
    ("Let $z$ be a root of $z^4 + z^2 + 1 = 0$ of unity.", "Let $z$ be a root of $z^4 - z^2 + 1 = 0$ of unity."),
    ("Alice and Bob share 3.5 litres of milk, how much each?", "Alice and Bob share 35 litres of milk, how much each?"),
    ("Solve for all real x with x < 14 and x odd", "Solve for all real x with x > 14 and x odd"),
    ("What is 12?", "What is 1 2"),
    ("Compute $2^{10} + 3$ by hand, please show it", "Compute $210 + 3$ by hand, please show it"),
]


@pytest.mark.parametrize("a, b", SAME)
def test_layout_makes_no_difference(a, b):
    assert loose(normalise(a)) == loose(normalise(b)) and normalise(a) != normalise(b)


@pytest.mark.parametrize("a, b", OTHER)
def test_what_is_another_problem_stays_one(a, b):
    assert loose(normalise(a)) != loose(normalise(b))


def build(domains, **tree):
    return data.build(configs.validate({"data": {"domains": domains, "max_prompt_length": 8192}, **tree}), None)


def write(path, questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    return str(path)


def test_every_pair_of_domains_is_told_and_dropped(tmp_path):
    asked = write(tmp_path / "test.jsonl", [SAME[0][0], "Which of the numbers is odd, 4 or 5 or 6?"])
    other = write(tmp_path / "other.jsonl", [SAME[2][0]])
    train = write(tmp_path / "train.jsonl", [SAME[0][0].upper(), SAME[0][1], SAME[2][1], "A question of its own that nobody asks elsewhere"])
    math = {"verifier": "math", "template": "boxed_cot"}
    dataset = build({"bench": {"eval_path": asked, **math}, "train": {"path": train, "eval_path": other, **math}})
    pairs = {(o.train, o.eval): (o.exact, o.layout, o.prompts) for o in dataset.overlaps}
    assert pairs == {("train", "bench"): (1, 1, 1), ("train", "train"): (0, 1, 1)}
    told = "\n".join(dataset.warnings)
    assert "2 training rows are 1 of the evaluation prompts of 'bench' (1 word for word, 1 but for the layout) and were dropped, e.g. 'FIND" in told
    assert "1 training row is 1 of the evaluation prompts of 'train' (0 word for word" in told
    rows, _ = dataset.train.take(dataset.train.init(), 3, dataset.weights)
    assert {r.prompt.split("\n")[0] for r in rows} == {"A question of its own that nobody asks elsewhere"}
    assert dataset.notes["train"].counts["overlap_dropped"] == 3


# The overlaps that the data's own README lists (different evaluation prompts); more are found, because it knew them word for word.
KNOWN = {("dapo", "math500"): 8, ("dapo", "amc23"): 8, ("dapo", "olympiadbench"): 10, ("aime", "math500"): 6, ("countdown", "countdown_test"): 19}


def test_all_known_overlaps_of_the_real_files_are_found(shared):
    root = shared / "data"
    files = {"dapo": "dapo_math_17k/dapo_math_17k.parquet", "aime": "deepscaler/deepscaler_aime_1983_2023.json", "math500": "math500/test.jsonl",
             "amc23": "amc23/test.jsonl", "olympiadbench": "olympiadbench/test.jsonl", "countdown": "countdown/raw_train.parquet", "countdown_test": "countdown/raw_test.json"}
    if missing := [f for f in files.values() if not (root / f).is_file()]:
        pytest.skip(f"no real data: {root / missing[0]} is missing")
    domains = {name: {("path" if name in ("dapo", "aime", "countdown") else "eval_path"): file, "verifier": "countdown" if "countdown" in name else "math",
                      "template": "countdown_tag_cot" if "countdown" in name else "question"} for name, file in files.items()}
    dataset = data.build(configs.validate({"data": {"domains": domains, "root": str(root), "max_prompt_length": 8192, "holdout": 0.001}}), None)
    found = {(o.train, o.eval): o for o in dataset.overlaps}
    assert {pair: found[pair].prompts >= n for pair, n in KNOWN.items()} == dict.fromkeys(KNOWN, True)
    assert found["countdown", "countdown_test"].prompts == found["countdown", "countdown_test"].exact == 19
    assert all(f"'{o.eval}'" in "\n".join(dataset.warnings) and o.example for o in dataset.overlaps)
