"""Kinds of faults of answer checkers, each in many variants; properties that hold for every answer; thirty attacks."""

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifier_kinds import MATHEMATICS_AND_WORDS, NUMBERS_AND_SHAPES
from verifier_kinds_tasks import NO_ANSWER, OTHER_TASKS, WORD_WRAPPERS, WRAPPERS

from rlvr_jax.rewards import Job, Pool, latex, number, symbolic, verify
from rlvr_jax.rewards import math as math_verifier

COUNTDOWN = {"numbers": [8, 3, 2], "target": 10}


def misjudged(rows, task="math", **fields):
    return [(gold, text, verdict.detail) for gold, right, wrong in rows for texts, status in ((right, "ok"), (wrong, "wrong")) for text in texts
            if (verdict := verify(task, text, gold, **fields)).status != status and not (status == "wrong" and verdict.status == "unknown")]


@pytest.mark.parametrize("kind", [*NUMBERS_AND_SHAPES, *MATHEMATICS_AND_WORDS])
def test_mathematics(kind):
    assert misjudged((NUMBERS_AND_SHAPES | MATHEMATICS_AND_WORDS)[kind]) == []


@pytest.mark.parametrize("task", OTHER_TASKS)
def test_other_tasks(task):
    assert misjudged(OTHER_TASKS[task], task, **(COUNTDOWN if task == "countdown" else {})) == []


@pytest.mark.parametrize("gold, right, wrong", [("17", "17", "18"), ("-4", "-4", "4"), ("\\frac{5}{7}", "\\frac{5}{7}", "\\frac{5}{9}"), ("(1,2)", "(1, 2)", "(2, 1)")])
def test_however_it_is_wrapped(gold, right, wrong):
    formula = "\\" in gold
    wrappers = [w for w in WRAPPERS if not (formula and any(x in w for x in WORD_WRAPPERS))]
    assert misjudged([(gold, [w.replace("X", right) for w in wrappers], [w.replace("X", wrong) for w in wrappers])]) == []


def test_what_is_no_answer():
    assert misjudged([("17", [], [w.replace("X", "17").replace("Y", "23") for w in NO_ANSWER])]) == []


PLAIN = st.one_of(st.integers(-10**6, 10**6).map(str), st.decimals(-1000, 1000, places=3).map(str), st.integers(1, 10**7).map(lambda n: f"{n:,}"),
                  st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda t: f"{t[0]}/{t[1]}"),
                  st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"))


@given(PLAIN, PLAIN, st.booleans())
@settings(max_examples=120, deadline=None)
def test_the_quick_path_for_numbers_never_disagrees_with_the_symbolic_one(a, b, same):
    x, y = latex.normalise(a), latex.normalise(a if same else b)
    quick = number.equal(number.read(x), number.read(y))
    assert quick == number.equal(number.read(y), number.read(x)) == symbolic.equal(math_verifier.parse(x), math_verifier.parse(y))


@given(st.text(max_size=200), st.sampled_from(["7", "\\frac{1}{2}", "(1,2)", "x+1", "\\text{even}"]))
@settings(max_examples=150, deadline=None)
def test_any_text_gets_a_verdict_and_noise_around_a_box_changes_nothing(noise, gold):
    assert verify("math", noise, gold).status in ("ok", "wrong")
    quiet = "".join(c for c in noise if c not in "\\{}<|%")  # no box, tag or end of turn of its own, no percent sign behind the box
    assert verify("math", f"{quiet} so \\boxed{{{gold}}} {quiet}", gold).status == "ok"
    assert verify("math", f"{quiet} so \\boxed{{12345}} {quiet}", gold).status == "wrong"


def test_policies_are_settings():
    for text, gold, setting, default in (("The answer is 7", "7", {"require_box": True}, "ok"), ("28", "28\\%", {"percent": "exact"}, "ok"), ("2,1", "1,2", {"ordered": True}, "ok"),
                                         ("0.333333", "1/3", {"significant": 9}, "ok"), ("0.33", "1/3", {"precision": 2}, "wrong")):
        assert verify("math", text, gold).status == default
        assert verify("math", text, gold, **setting).status == ("wrong" if default == "ok" else "ok")
    assert verify("math", "\\boxed{7}", "7", require_box=True).status == verify("math", "0.28", "28\\%", percent="exact").status == "ok"
    for bad in ({"percent": "maybe"}, {"precision": -1}, {"significant": "6"}):
        assert verify("math", "1", "1", **bad).status == "unknown"


CODE = "__import__('os').system('touch pwned')"
ATTACKS = [
    f"\\boxed{{{CODE}}}", CODE, f"\\boxed{{[{CODE}, 2]}}", f"\\boxed{{\\text{{{CODE}}}}}", f"\\boxed{{f({CODE})}}", "\\boxed{eval(\"open('pwned','w')\")}", "\\boxed{open('pwned','w').write('x')}",
    "\\boxed{().__class__.__base__.__subclasses__()}", "\\boxed{lambda: exit()}", "\\boxed{exit()}", "\\boxed{\\operatorname{exit}()}", "\\boxed{import os; os.abort()}", "\\boxed{{x.__class__}}",
    "\\boxed{%s%n{0.__init__.__globals__}}", "\\boxed{\\input{/etc/passwd}}", "\\boxed{\\write18{touch pwned}}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{10^{10^{10}}}", "\\boxed{(10^{9})!}", "\\boxed{99999999!}",
    "\\boxed{\\binom{10^9}{10^8}}", "\\boxed{\\sum_{k=1}^{10^{12}} k^{k}}", "\\boxed{\\prod_{k=1}^{10^9} k}", "\\boxed{\\int_0^{10^9} x^{x^{x}} dx}", "\\boxed{" + "x^{" * 18 + "2" + "}" * 19,
    "\\boxed{" + "(" * 100_000 + "1" + ")" * 100_000 + "}", "\\boxed{" + "\\sqrt{" * 5000 + "2" + "}" * 5001, "7" * 1_000_000, "\\boxed{" + "7" * 1_000_000 + "}", "x" * 1_000_000, "\x00" * 1000 + "8", "\ud800\udfff\ud83d 8",
    "\\boxed{1" + " " * 1900 + "x}", "\\boxed{" + "{ " * 900 + "\\choose" + " }" * 900 + "}", "\\begin{align}" * 5000, "says " + " " * 100_000, "(a" * 400 + "!", "\\boxed{" + "1/" * 240 + "1}", "#### " * 100_000,
    "The answer is therefore thus hence " * 20_000, "`" * 200_000, "\u202e7\u202c8", "\\boxed{\u0667+\u0661}", "A" * 500_000 + "=", "-" * 300_000, "\\boxed{\\begin{pmatrix}" + "1&" * 200 + "\\end{pmatrix}}",
    "\\boxed{" + "|" * 300 + "}", "\\boxed{x" + "'" * 300 + "}", "\\boxed{\\lim_{x\\to\\infty} x^{x^{x}}}", "\\boxed{\\{x : " + "x<" * 200 + "1\\}}"]
GOLDS = {"math": "7", "countdown": None, "knights": "Zoey is a knave, and Riley is a knight.", "choice": "H", "format": None}


def test_attacks_through_the_pool_run_nothing_and_change_no_other_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sympify.py").write_text("open('pwned', 'w')")
    honest = [Job("math", "\\boxed{x+1}", "1+x"), Job("math", "\\boxed{8}", "7"), Job("choice", "(B)", "B"), Job("countdown", "(8-3)*2", None, COUNTDOWN)]
    jobs = [Job(task, text, gold, COUNTDOWN) for text in ATTACKS for task, gold in GOLDS.items()]
    mixed = [job for pair in zip(jobs, (honest * len(jobs))[: len(jobs)]) for job in pair]
    with Pool(2, cpu_seconds=20.0, memory_mb=512) as pool:
        verdicts = pool.score(mixed)
        counters = dict(pool.counters)
    assert [v.status for v in verdicts[1::2]] == (["ok", "wrong", "ok", "ok"] * len(jobs))[: len(jobs)]
    assert [(j.verifier, j.text[:60], v) for j, v in zip(jobs, verdicts[::2]) if v.status == "ok" and j.verifier != "format"] == []
    assert [(j.verifier, j.text[:60], v.detail) for j, v in zip(jobs, verdicts[::2]) if v.status == "unknown"] == []
    assert counters["crashes"] == counters["timeouts"] == counters["errors"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["sympify.py"]


def test_a_built_in_verifier_may_not_touch_the_machine(tmp_path):
    """The worker's second lock, tried by code of ours in the verifier's place."""
    code = f"""
import os, socket, subprocess, sys
from rlvr_jax.rewards import worker
sys.addaudithook(worker._refuse)
tries = [lambda: os.system("true"), lambda: subprocess.run(["true"]), lambda: open({str(tmp_path / 'pwned')!r}, "w"), lambda: os.remove("x"),
         lambda: os.mkdir({str(tmp_path / 'd')!r}), lambda: socket.create_connection(("127.0.0.1", 9)), lambda: os.kill(os.getpid(), 0), lambda: os.fork()]
worker._GUARD.builtin = True
refused = 0
for attempt in tries:
    try:
        attempt()
    except PermissionError as e:
        refused += "a built-in verifier tried" in str(e)
open(os.devnull).read()
worker._GUARD.builtin = False
os.system("true")
print(refused, len(tries))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == out[1] == "8" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "exec('while True: pass')"])
def test_five_percent_of_hanging_rows_cost_one_deadline(hang, tmp_path, monkeypatch):
    """A row that ran out of its time is not tried again; the others go on beside it."""
    (tmp_path / "hanging_verifier.py").write_text(f"import time\ndef hang(text, answer): {hang}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    deadline = 3.0
    jobs = [Job("math", f"\\boxed{{{i}}}", str(i)) for i in range(60)]
    for i in (7, 23, 31):
        jobs[i] = Job("hanging_verifier:hang", "")
    with Pool(2, cpu_seconds=deadline, wall_seconds=deadline) as pool:
        pool.score(jobs[:2])
        start = time.monotonic()
        verdicts = pool.score(jobs)
        taken = time.monotonic() - start
        assert pool.counters["timeouts"] == pool.counters["replaced"] == 3
    assert [v.status for v in verdicts] == ["unknown" if i in (7, 23, 31) else "ok" for i in range(60)]
    print(f"60 rows, 3 of them hanging, deadline {deadline:g} s: {taken:.2f} s")  # -s shows it; a busy machine is no failure
