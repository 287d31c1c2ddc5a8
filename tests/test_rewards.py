"""Verifiers: field reports and public cases, a table of our own, attacks, policies."""

import itertools
import json
import math as pymath
import threading
import time

import pytest

from rlvr_jax import config
from rlvr_jax.rewards import Job, Pool, Verdict, check, combine, extract, final, latex, number, registry, verify
from rlvr_jax.rewards import math as math_verifier

T, F = True, False

# (gold, response, right?)
MATH = [
    ("7.41\\%", "7.41%", T), ("7.41", "The answer is 7.41%", T), ("0.28", "28%", T), ("28", "0.28", F), ("200\\%", "2", T), ("10\\%", "0.1", T),
    ("1,000", "1000", T), ("1000", "\\boxed{1{,}000}", T), ("1000", "\\boxed{1\\,000}", T), ("12,345.67", "12345.67", T), ("3,5", "5,3", T),
    ("1,234", "1, 234", F), ("(1,000, 2,000)", "(1000, 2000)", T), ("\\frac12", "0.5", T), ("-\\frac12", "\\boxed{-\\dfrac{1}{2}}", T),
    ("-1/2", "\\frac{1}{-2}", T), ("1.5", "1 \\frac12", T), ("3/2", "1 1/2", T), ("11/2", "1 1/2", F), ("9", "5 9/4", F), ("\\frac{11}{2}", "1\\frac12", F),
    ("[0,1)", "[0, 1)", T), ("[0,1)", "(0,1]", F), ("$x \\le 3$", "$(-\\infty, 3]$", T), ("$(-\\infty, 3]$", "$x \\le 3$", F), ("$1<x<2$", "$(1,2)$", T),
    ("\\{1,2,3\\}", "{3,2,1}", T), ("\\{1,2,3\\}", "\\{1,2\\}", F), ("1,2,3", "3,1,2", T), ("(1,2,3)", "(3,2,1)", F), ("(1,2)", "\\left(1,2\\right)", T),
    ("(2,3)", "2, 3", T), ("(3,2)", "2, 3", F), ("(x,y)=(2,3)", "(2,3)", T), ("[2,3]", "(2,3)", F), ("2\\sqrt{3}", "2√3", T), ("2\\sqrt{3}", "3.46", F),
    ("2\\sqrt{3}", "\\sqrt{12}", T), ("\\pi", "3.14", F), ("x^2+1", "1+x^2", T), ("x^2+1", "x^2-1", F), ("(x+1)^2", "x^2+2x+1", T), ("2t", "2", F), ("2m", "2", F),
    ("\\text{Monday}", "Monday", T), ("\\text{Monday}", "The answer is Monday.", T), ("\\text{even}", "\\text{odd}", F), ("p - q", "-q+p", T),
    ("5", "\\boxed{5} or \\boxed{6}", F), ("5", "\\boxed{5}\nWait, maybe \\boxed{6}", F), ("6", "\\boxed{5}\nWait, maybe \\boxed{6}", T), ("12", "\\boxed{12", F),
    ("12", "\\boxed{}", F), ("12", "\\fbox{12}", T), ("12", "\\boxed 12", T), ("12", "\\boxed{\\boxed{12}}", T), ("12", "<answer>12</answer>", T), ("12", "<answer>12", F),
    ("12", "<answer> The answer is 12. </answer>", T), ("12", "<think>12</think> I don't know", F), ("12", "<think>it is \\boxed{12}", F), ("12", "thus </think>\n\n12", T),
    ("72", "48+24=<<48+24=72>>72\n#### 72", T), ("72", "#### $72", T), ("4", "#### Step 3: compute\nThe answer is 4.", T), ("72", "The answer is **72**.", T),
    ("18", "so she makes $9 * 2 = $18", T), ("5", "The answer is 5 because 2+3 = 5 and 6 is wrong.", T), ("-3", "−3", T), ("10^6", "1000000", T), ("1.2e-3", "0.0012", T),
    ("3 \\times 10^8", "3e8", T), ("90^{\\circ}", "90 degrees", T), ("\\frac{\\pi}{2}", "90^\\circ", F), ("x=5", "5", T), ("x=5", "y=5", F), ("y=2x+1", "2x+1", T),
    ("y=2x+1", "y-2x=1", T), ("y=2x+1", "y=2x-1", F), ("x=1, y=2", "y=2, x=1", T), ("x=1,y=2", "x=2,y=1", F), ("x=\\pm 2", "x=2, x=-2", T), ("\\pm 2", "2", F),
    ("1 \\pm \\sqrt{2}", "1+\\sqrt2, 1-\\sqrt2", T), ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", T),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", F), ("2+3i", "2-3i", F), ("e^{i\\pi}", "-1", T), ("\\log_2 8", "3", T),
    ("\\binom{5}{2}", "10", T), ("2^10", "1024", T), ("\\infty", "-\\infty", F), ("\\emptyset", "\\varnothing", T),
    ("\\frac{1}{3^{50}\\pi}", "\\frac{1}{3^{49}\\pi}", F), ("0.00000001", "0.00000002", F), ("x^2+1=0", "x^2+2=0", F), ("0.3333", "1/3", F), ("0.333333", "1/3", T),
    ("6:8", "3:4", T), ("12:30", "2:5", F), ("5 \\text{ cm}", "5", T), ("5", "5 m/s", T), ("5", "$5.00", T), ("2516_8", "2516_7", F), ("\\text{(B)}", "\\boxed{B}", T),
    ("42", "The answer is 42<|endoftext|>Human: 43", T), ("\\frac{x+1}{2}", "(x+1)/2", T), ("sqrt(3)/2", "\\frac{\\sqrt{3}}{2}", T), ("x>5", "5<x", T), ("x>5", "x \\geq 5", F),
    ("(-\\infty,-1)\\cup(1,\\infty)", "(1,\\infty)\\cup(-\\infty,-1)", T), ("11", "0011", T), ("3", "3 million", F), ("\\frac{5\\pi}{6}", "5pi/6", T),
]
ATTACKS = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{9^{(9^{(9^9)})}}", "9**9**9**9", "\\boxed{(10^{100})!}", "\\boxed{10000000!}", "\\boxed{5!!!!!!}", "\\boxed{" * 20000,
           "\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}", "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}", "\\boxed{" + "\\frac{1}{" * 300 + "1" + "}" * 301,
           "1" * 100_000, "$" * 100_000, "(" * 100_000, "answer is " * 20_000, "answer to " * 10_000, "\\frac{" * 5000, "\\boxed{" + "+".join(["1"] * 400) + "}",
           "[__import__('os').system('touch pwned')]", "\\boxed{open('pwned', 'w')}", "x^{" * 50 + "2" + "}" * 50, "\\text{" * 10_000, "- " * 50_000, "\\boxed{2^{-9^{9^{9}}}}",
           "<think>" * 20_000, "\x00\x01\ud800", "<|im_end|>" * 10_000, "\\begin{pmatrix}" * 2000, "1 is " * 20_000, "a, " * 30_000, "\\[ x " * 20_000, "\\boxed{(" + "a " * 240 + "!=1}", "\\boxed{(a" + "_b" * 200 + "!=1}", "Zoey " * 20_000, "\\text{" * 9000 + "A" + "}" * 9000, "A or " * 20_000,
           "\\boxed{\\binom{10^9}{10^8}}"]
CHOICE = [
    ("B", "(b)", T), ("B", "B) because", T), ("B", "The correct answer is (B).", T), ("B", "\\boxed{\\text{(B)}}", T), ("B", "The answer is A or B", F), ("B", "A or B", F),
    ("B", "Not A, so B", T), ("B", "It is not B, it is C", F), ("C", "It is not B, it is C", T), ("A", "A valve closes the pipe.", F), ("I", "I think so", F),
    ("I", "The answer is I.", T), ("J", "Answer: J", T), ("A", "The best answer is A because plants grow", T), ("C", "Answer: C. The others, A and B, fail", T),
    ("C", "<think>Option C", F), ("K", "K", F), (2, "B", F), ("D", "Therefore, the answer is (D)\n\nLet me double check A.", T), ("answer2", "the correct answer is answer2", T),
    ("answer2", "the correct answer is answer3", F), ("answer2", "\\boxed{2}", T), ("true", "the correct answer is true", T), ("true", "false", F)]
ZOEY = "Zoey is a knave, and Riley is a knight."
KNIGHTS = [
    (ZOEY, "Riley is a knight and Zoey is a knave", T), (ZOEY, "Zoey is a knave.", F), (ZOEY, "Zoey is a knight. No. Zoey is a knave and Riley is a knight", T),
    (ZOEY, "Zoey is a knave. Riley is a knight. Zoey is a knight.", F), (ZOEY, "Zoey is a knave and Zoey is a knight and Riley is a knight", F),
    (ZOEY, "<answer>(1) Zoey is a knave\n(2) Riley is a knight</answer>", T), (ZOEY, "Zoey isn't a knight; Riley is a knight", T),
    (ZOEY, "If Zoey is a knight then Riley is a knave. So Zoey is a knave and Riley is a knight.", T), (ZOEY, "- **Zoey** is a **knave**\n- **Riley**: **knight**", T),
    (ZOEY, "<think>Zoey is a knave, Riley is a knight</think>", F), (ZOEY, "knights: Riley; knaves: Zoey", T), ({"Zoey": "knave", "Riley": "knight"}, ZOEY, T),
    ({"Zoey": False, "Riley": True}, ZOEY, T), ("A is a knight, and B is a knight.", "A and B are both knights.", T), ("Zoey is a fool, and Riley is a sage.", "Zoey fool Riley sage", T)]
COUNTDOWN = [
    ("<answer>(8-3)*2</answer>", T), ("<answer>(8-3)*2 = 10</answer>", T), ("<answer>(8-3)*2 = 11</answer>", F), ("\\boxed{(8-3)\\times 2}", T), ("We try.\n(8 − 3) × 2 = 10", T),
    ("(8-3)*2", T), ("-(3-8)*2", T), ("<answer>8+2</answer>", F), ("<answer>(8-3)*2*1</answer>", F), ("<answer>10</answer>", F), ("<answer>(8-3)*2", F), ("", F),
    ("<answer>8-3</answer> no, <answer>(8-3)*2</answer>", T), ("<answer>(8-3)**2</answer>", F), ("<answer>8//3*2</answer>", F), ("<answer>((8-3)*2)/(3-3)</answer>", F),
    ("<answer>" + "(" * 200 + "8" + ")" * 200 + "</answer>", F), ("<answer>" + "-" * 5000 + "8</answer>", F), ("<answer>8if 1else 2</answer>", F), ("<answer>0x8-3*2</answer>", F),
    ("__import__('os').getpid()", F), ("<answer>\\frac{8}{2}</answer>", F), ("<think>(8-3)*2</think>", F), ("<answer>" + "9" * 5000 + "</answer>", F)]


@pytest.fixture(scope="module")
def pool():
    with Pool(2, cpu_seconds=30.0) as workers:
        yield workers


def misjudged(pool, jobs, expected):
    return [(j.answer, j.text[:80], v) for j, v, e in zip(jobs, pool.score(jobs), expected) if (v.status == "ok") != e or (v.reward == 1.0) != e]


# Public cases that expect "not right" where ours says unknown (no reward, and the row leaves the update) rather than wrong.
UNKNOWN = {
    "reasoning_gym-0000": "countdown without numbers: there is nothing to hold the response against",
    "reasoning_gym-0003": "countdown without numbers",
    "slime-0014": "empty gold",
    "huggingface/open-r1#86": "gold is prose: policy unparsable_gold",
    "huggingface/open-r1#293": "empty gold: policy unparsable_gold",
}


def test_every_public_case_is_right(pool, shared):
    """core.jsonl and field_reports.jsonl: true is ok, false is wrong, but for the rows of UNKNOWN."""
    rows = [json.loads(line) for name in ("core", "field_reports") for line in (shared / "verifier_cases" / f"{name}.jsonl").open()]
    jobs = [Job(r["task"], r["answer"], r["gold"], {k: r[k] for k in ("numbers", "target", "max_seconds", "run_in") if k in r}) for r in rows]
    judged = [(r.get("id", r.get("source")), r["expected"], v) for r, v in zip(rows, pool.score(jobs))]
    assert [(name, v) for name, right, v in judged if (v.status, v.reward) != (("ok", 1.0) if right else ("wrong", 0.0)) and name not in UNKNOWN] == []
    assert {name: (right, v.status) for name, right, v in judged if name in UNKNOWN} == dict.fromkeys(UNKNOWN, (False, "unknown"))
    for row, job in zip(rows, jobs):
        if "max_seconds" in row or row.get("run_in") == "thread":
            out: list[tuple[Verdict, float]] = []

            def judge(job=job, out=out):
                start = time.thread_time()
                out.append((verify(job.verifier, job.text, job.answer, **job.fields), time.thread_time() - start))

            thread = threading.Thread(target=judge)
            thread.start()
            thread.join()
            assert (out[0][0].status == "ok") == row["expected"] and out[0][1] < row.get("max_seconds", 60)


@pytest.mark.parametrize("task, table", [("math", MATH), ("choice", CHOICE), ("knights", KNIGHTS)])
def test_our_table(pool, task, table):
    assert misjudged(pool, [Job(task, text, gold) for gold, text, _ in table], [right for *_, right in table]) == []


def test_countdown(pool):
    jobs = [Job("countdown", text, 10, {"numbers": [8, 3, 2], "target": 10}) for text, _ in COUNTDOWN]
    assert misjudged(pool, jobs, [right for _, right in COUNTDOWN]) == []
    assert verify("countdown", "(8-3)*2", {"numbers": [2, 3, 8], "target": 10}).status == "ok"
    assert verify("countdown", "1+1", 2, numbers=[1]).status == "wrong"
    assert verify("countdown", "10", 10).status == verify("countdown", "1", 1, numbers=["x"]).status == "unknown"


@pytest.mark.parametrize("task", ["math", "countdown", "knights", "choice", "format"])
def test_attacks_are_wrong_quickly_and_run_nothing(pool, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gold = {"math": "7", "knights": ZOEY, "choice": "H"}.get(task, "7")
    before = pool.counters["replaced"]
    verdicts = pool.score([Job(task, text, gold, {"numbers": [7], "target": 7}) for text in ATTACKS])
    allowed = ("wrong", "ok") if task == "format" else ("wrong",)  # a closed box is a closed box
    assert [(t[:40], v) for t, v in zip(ATTACKS, verdicts) if v.status not in allowed] == []
    assert pool.counters["replaced"] == before
    assert not list(tmp_path.iterdir())


def test_long_text_keeps_its_answer():
    for text in ("\\boxed{7}" + " x" * 50_000, " x" * 50_000 + "\\boxed{7}", "<answer>" * 5000 + "7</answer>", "#### 7\n" + "check. " * 10_000):
        assert verify("math", text, "7").status == "ok"


@pytest.mark.parametrize("gold", ["", "  ", None, float("nan"), "\\boxed{}", "about forty-two", "10^{10^{10}}", "see the figure below", True])
def test_unusable_gold_is_unknown_never_ok(gold):
    for text in ("\\boxed{17}", str(gold), f"\\boxed{{{gold}}}", ""):
        assert verify("math", text, gold) == Verdict(0.0, "unknown", verify("math", text, gold).detail)
    assert verify("choice", "A", gold).status == verify("knights", "A is a knight", gold).status == "unknown"


def test_number_path_agrees_with_math_verify():
    """Where both read two plain numbers, our exact path and the symbolic one say the same."""
    from rlvr_jax.rewards import symbolic
    plain = ["5", "-5", "0", "0.5", "1/2", "\\frac{1}{2}", "\\frac{2}{4}", "1000", "1e3", "10^{3}", "2.5", "5/2", "\\frac{5}{2}", "2\\frac{1}{2}", "-0.125", "-\\frac{1}{8}", "7.0"]
    for a in plain:
        for b in plain:
            x, y = latex.normalise(a), latex.normalise(b)
            exact = number.equal(number.read(x), number.read(y))
            if "e3" not in a + b:  # math-verify takes that e for Euler's number
                assert exact == symbolic.equal(math_verifier.parse(x), math_verifier.parse(y)), (a, b)
            assert exact == number.equal(number.read(y), number.read(x)) == math_verifier.equivalent(x, y)


def test_real_data_answers_itself(pool, shared):
    """Gold answers of real sets, given back in a box, are ok; the next row's answer is not (unless equal)."""
    rows = [json.loads(line)["answer"] for line in (shared / "data/math500/test.jsonl").open()]
    rows = [r for r in rows if not r.isdigit()][:60]
    assert misjudged(pool, [Job("math", f"Thus $\\boxed{{{r}}}$.", r) for r in rows], [True] * len(rows)) == []
    other = pool.score([Job("math", f"\\boxed{{{a}}}", b) for a, b in itertools.pairwise(rows)])
    assert [v.detail for v in other if v.status != "wrong"] == []
    people = [json.loads(line) for p in sorted((shared / "data/knights_and_knaves/test").iterdir()) for line in p.open()][::23]
    for row in people:
        for gold in (row["solution_text"], row["solution"]):
            assert verify("knights", row["solution_text_format"], gold, names=row["names"]).status == "ok"
        flipped = row["solution_text"].replace("knight", "x").replace("knave", "knight").replace("x", "knave")
        assert verify("knights", flipped, row["solution"], names=row["names"]).status == "wrong"
    puzzles = [json.loads(line) for line in (shared / "data/countdown/test_with_solver_answers.jsonl").open()][::10]
    for row in puzzles:
        assert verify("countdown", f"<answer>{row['gold_expr']}</answer>", None, numbers=row["numbers"], target=row["target"]).status == "ok"
    for name in ("arc/ARC-Easy_test.json", "openbookqa/test.json"):
        for row in json.loads((shared / "data" / name).read_text())[:50]:
            assert verify("choice", row["output"], row["answer"]).status == "ok"


@pytest.mark.parametrize("fields, text, right", [
    ({}, "so \\boxed{1}", T), ({}, "so \\boxed{", F), ({"kind": "answer_tags"}, "x <answer>1</answer>", T), ({"kind": "answer_tags"}, "<answer>1</answer><answer>2</answer>", F),
    ({"kind": "think_answer"}, "<think>a</think>\n<answer>1</answer>", T), ({"kind": "think_answer"}, "<think>a</think> b <answer>1</answer>", F),
    ({"kind": "think_answer", "prefilled": True}, "a</think><answer>1</answer>", T), ({"kind": "think_answer"}, "<think>a</think><answer></answer>", F),
    ({"pattern": r"^\d+$"}, "12", T), ({"pattern": r"^\d+$"}, "12a", F)])
def test_format(fields, text, right):
    assert verify("format", text, None, **fields).reward == float(right)


def test_format_that_cannot_be_used_is_unknown_and_a_backtracking_one_ends():
    assert verify("format", "a", None, pattern="(").status == verify("format", "a", None, kind="poem").status == "unknown"
    with Pool(1, cpu_seconds=0.5, preload=()) as pool:
        assert pool.score([Job("format", "a" * 60 + "b", None, {"pattern": "^(a|a?)+$"})])[0].status == "unknown"


def test_signature_is_checked_before_step_0():
    def good(text, answer, *, level=1): return True
    def needs(text, answer, difficulty): return True
    def unary(text): return True
    check("math", ["numbers"])
    check(good, ["numbers"])
    check(needs, ["difficulty"])
    for bad, fields, message in ((needs, ["numbers"], r"requires \['difficulty'\].*"), (unary, [], "text, answer"), ("no_such", [], "unknown verifier 'no_such': use math"),
                                 ("no_such:f", [], "cannot import 'no_such'"), ("json:nothing", [], "has no 'nothing'"), ("json:__name__", [], "not a function")):
        with pytest.raises(config.ConfigError, match=message):
            check(bad, fields)
    assert registry.reference(json.dumps) == "json:dumps" and registry.reference(good) is None


def test_combine():
    ok, wrong, unknown = Verdict(1.0, "ok"), Verdict(0.0, "wrong"), Verdict(0.0, "unknown")
    weights = [{"math": 1.0}, {"format": 0.1}]
    assert combine(weights, [ok, ok]) == (1.1, True, True)
    assert combine(weights, [wrong, ok]) == (0.1, False, True)
    assert combine(weights, [ok, wrong]) == (1.0, True, True)
    assert combine(weights, [unknown, ok]) == combine(weights, [ok, unknown]) == (0.0, False, False)
    assert combine([{"math": 1.0}, {"format": 0.0}], [ok, unknown]) == (1.0, True, True)
    assert combine([{"f": 1.0}], [Verdict(-0.5, "ok")]) == (-0.5, False, True)
    for bad in ([], [ok]):
        with pytest.raises(config.ConfigError, match="rewards"):
            combine([] if not bad else weights, bad)


def test_reward_is_a_number_and_zero_unless_ok(pool):
    jobs = [Job(t, text, gold) for t in ("math", "choice", "knights", "countdown", "format") for gold in ("7", "", None, ZOEY, "B") for text in ("7", "", "B", ZOEY)]
    for verdict in pool.score(jobs):
        assert pymath.isfinite(verdict.reward) and (verdict.reward == 0.0 or verdict.status == "ok") and "\n" not in verdict.detail


def test_final_answer_positions():
    assert final.of_response("\\boxed{615}. Again: **Final** \\boxed{615}") == "615"
    assert final.of_response("\\boxed{1} and \\boxed{2}") == "1, 2"
    assert extract.boxes("a \\boxed{{x} b \\boxed{3}")[-1][2] == "3"
    assert extract.visible("x</think>y<think>z") == "y"
