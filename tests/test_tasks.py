"""Generated tasks: solvable, unique, a function of (seed, index), short, and right by our own verifiers."""

import itertools
import os
import re
import subprocess
import sys
from fractions import Fraction

import pytest

from rlvr_jax.data.rows import DataError
from rlvr_jax.data.tasks import TASKS, generate
from rlvr_jax.rewards import verify

VARIANTS = [
    ("arithmetic", {}), ("arithmetic", {"digits": 1, "ops": "+*"}), ("arithmetic", {"digits": [2, 5], "ops": "+-"}),
    ("arithmetic", {"digits": [1, 3], "ops": ["*"]}),
    ("countdown", {}), ("countdown", {"numbers": 3, "max_number": 99, "ops": "+-"}), ("countdown", {"numbers": [4, 4], "max_target": 24}),
    ("knights", {}), ("knights", {"people": 2}), ("knights", {"people": [4, 4]}),
]
ids = [f"{t}-{'-'.join(map(str, a.values())) or 'default'}" for t, a in VARIANTS]


@pytest.mark.parametrize("task, args", VARIANTS, ids=ids)
def test_worked_solution_is_right_and_a_wrong_one_is_not(task, args):
    problems = [generate(task, 0, i, args) for i in range(60)]
    for p in problems:
        verdict = verify(p.verifier, p.solution, p.answer, **p.fields)
        assert verdict.status == "ok" and verdict.reward == 1, (p, verdict)
    wrong = [verify(p.verifier, q.solution, p.answer, **p.fields).status
             for p, q in itertools.pairwise(problems) if p.answer != q.answer]
    assert wrong and set(wrong) == {"wrong"}


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_is_a_function_of_seed_and_index(task):
    first = [generate(task, 7, i) for i in range(20)]
    assert [generate(task, 7, i) for i in reversed(range(20))] == first[::-1]
    assert [generate(task, 8, i) for i in range(20)] != first
    assert generate(task, 7, 2**31 - 2).prompt
    assert len({p.prompt for p in (generate(task, 7, i, {}) for i in range(300))}) > 200


def test_the_same_in_another_process_whatever_the_hash_seed():
    code = "from rlvr_jax.data.tasks import generate as g; print([g(t, 3, 11) for t in ('arithmetic', 'countdown', 'knights')])"
    out = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True).stdout
    assert out == str([generate(t, 3, 11) for t in ("arithmetic", "countdown", "knights")]) + "\n"


def test_arithmetic_covers_its_digits_and_every_step_is_true():
    seen = set()
    for i in range(400):
        p = generate("arithmetic", 0, i, {"digits": [1, 3]})
        a, op, b = re.fullmatch(r"(\d+)([-+*])(\d+)=\?", p.prompt).groups()
        seen |= {(op, len(a)), (op, len(b))}
        assert p.parts == {"a": int(a), "op": op, "b": int(b)}
        assert int(p.answer) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] >= 0
        *steps, box = p.solution.split("\n")
        assert box == f"\\boxed{{{p.answer}}}" and steps
        for step in steps:
            left, right = step.split("=")
            terms = [int(t) for t in re.findall(r"[+-]?\d+", left)] if "*" not in left else [int(left.split("*")[0]) * int(left.split("*")[1])]
            assert sum(terms) == int(right), step
    assert seen == {(op, d) for op in "+-*" for d in (1, 2, 3)}


def test_columns_carry_and_borrow():
    """The digits of the result can be read off the steps, lowest first."""
    for i in range(200):
        p = generate("arithmetic", 1, i, {"digits": [2, 4], "ops": "+-"})
        results = [s.split("=")[1] for s in p.solution.split("\n")[:-1]]
        digits = [r[-1] for r in results[:-1]] + [results[-1]]
        assert int("".join(reversed(digits))) == int(p.answer), p


def solvable(numbers: list[Fraction], target: int) -> bool:
    """All ways to join two values, down to one (written apart from the generator)."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        if any(solvable([*rest, v], target) for v in (a + b, a - b, a * b, *([a / b] if b else []))):
            return True
    return False


def test_countdown_is_solvable_with_a_positive_target():
    sizes = set()
    for i in range(60):
        p = generate("countdown", 0, i, {"max_number": 30, "max_target": 90})
        numbers, target = p.fields["numbers"], p.fields["target"]
        sizes.add(len(numbers))
        assert 1 <= target <= 90 and all(1 <= n <= 30 for n in numbers)
        assert p.prompt == f"Make {target} from {', '.join(map(str, numbers))}."
        assert solvable([Fraction(n) for n in numbers], target)
    assert sizes == {3, 4}
    # Integer intermediates only, as the worked steps show.
    assert all("." not in generate("countdown", 0, i).solution.split("<")[0] for i in range(50))


def read_claim(text: str, knight: dict[str, bool]) -> bool:
    """Truth of an English claim, from the text alone (written apart from the generator)."""
    if m := re.fullmatch(r"(\w+) and (\w+) are (the same|different)", text):
        return (knight[m[1]] == knight[m[2]]) == (m[3] == "the same")
    atom = r"(\w+) is a (knight|knave)"
    if m := re.fullmatch(f"{atom} (and|or) {atom}", text):
        left, right = knight[m[1]] == (m[2] == "knight"), knight[m[4]] == (m[5] == "knight")
        return (left and right) if m[3] == "and" else (left or right)
    m = re.fullmatch(atom, text)
    assert m, text
    return knight[m[1]] == (m[2] == "knight")


@pytest.mark.parametrize("people", [2, 3, 4])
def test_knights_have_exactly_one_solution_and_it_is_the_answer(people):
    words: set[str] = set()
    for i in range(120):
        p = generate("knights", 0, i, {"people": people})
        said = dict(s.split(": ") for s in p.prompt.removesuffix(".").split(". "))
        assert list(said) == p.fields["names"] and len(said) == people
        words |= set(p.prompt.replace(".", "").split())
        fits = [roles for roles in itertools.product([True, False], repeat=people)
                if all(read_claim(claim, dict(zip(said, roles))) == dict(zip(said, roles))[who] for who, claim in said.items())]
        assert len(fits) == 1, p
        assert p.answer == ", ".join(f"{'and ' * (k == people - 1)}{n} is a {'knight' if r else 'knave'}"
                                     for k, (n, r) in enumerate(zip(said, fits[0]))) + "."
    assert {"knight", "knave", "same", "different", "and", "or"} <= words


def test_no_blind_guess_solves_knights():
    """The commonest answer must leave room to learn."""
    answers = [re.sub(r"[A-Z]\w+", "X", generate("knights", 0, i, {"people": 2}).answer) for i in range(400)]
    assert max(answers.count(a) for a in set(answers)) / 400 < 0.5


@pytest.mark.parametrize("task, args, most_prompt, most_solution", [
    ("arithmetic", {"digits": [1, 3]}, 12, 90), ("countdown", {}, 40, 75), ("knights", {"people": [2, 3]}, 140, 70)])
def test_prompts_and_solutions_are_short(task, args, most_prompt, most_solution):
    problems = [generate(task, 0, i, args) for i in range(300)]
    assert max(len(p.prompt) for p in problems) <= most_prompt
    assert max(len(p.solution) for p in problems) <= most_solution


@pytest.mark.parametrize("task, args, message", [
    ("arithmetics", {}, "nearest: 'arithmetic'"),
    ("arithmetic", {"digit": 3}, "unknown argument 'digit'; it has digits, ops"),
    ("arithmetic", {"digits": [3, 1]}, "digits"),
    ("arithmetic", {"digits": "many"}, "digits"),
    ("arithmetic", {"ops": "+%"}, "ops"),
    ("arithmetic", {"ops": ""}, "ops"),
    ("countdown", {"numbers": 1}, "numbers"),
    ("countdown", {"max_number": 0}, "max_number"),
    ("countdown", {"max_number": "x"}, "max_number"),
    ("countdown", {"max_number": 1, "ops": "-"}, "no solvable problem"),
    ("knights", {"people": 5}, "people"),
    ("knights", {"people": [2, 3, 4]}, "people"),
])
def test_a_wrong_argument_is_one_clear_line(task, args, message):
    with pytest.raises(DataError, match=message) as e:
        generate(task, 0, 0, args)
    assert "\n" not in str(e.value)
