"""pass@k, majority and what an evaluation adds up to."""

import itertools

import numpy as np
import pytest

from rlvr_jax.evaluate import Score, evaluate, majority
from rlvr_jax.step_metrics import eval_metrics
from rlvr_jax.types import Rollout


@pytest.mark.parametrize("n, c, k", [(n, c, k) for n in (1, 4, 6) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c, k):
    answers = [True] * c + [False] * (n - c)
    wanted = np.mean([any(s) for s in itertools.combinations(answers, k)])
    assert Score(prompts=((n, c, 0.0),)).pass_at(k) == pytest.approx(wanted)


def test_pass_at_k_leaves_out_prompts_with_fewer_known_samples():
    score = Score(prompts=((4, 2, 1.0), (1, 1, 1.0), (0, 0, 0.0)))
    assert score.pass_at(2) == pytest.approx(1 - 1 / 6) and score.pass_at(1) == pytest.approx(0.75) and Score().pass_at(3) == 0 and score.majority == 1.0


@pytest.mark.parametrize("texts, correct, valid, wanted", [
    ([r"\boxed{4}", r"\boxed{4}", r"\boxed{5}"], [1, 1, 0], [1, 1, 1], 1.0),
    ([r"\boxed{4}", r"so \boxed{5}", r"thus \boxed{5}"], [1, 0, 0], [1, 1, 1], 0.0),
    ([r"\boxed{4}", r"\boxed{5}", r"\boxed{6}"], [1, 0, 0], [1, 1, 1], 1 / 3),          # a fair draw of three
    ([r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{3}"], [1, 1, 0], [1, 1, 1], 1.0),       # right in two forms: one answer
    ([r"\boxed{5}", r"\boxed{5}", r"\boxed{4}"], [0, 0, 1], [1, 0, 1], 0.5),          # no verdict, no vote
    ([r"\boxed{", r"\boxed{", r"\boxed{4}"], [0, 0, 1], [1, 1, 1], 1.0),              # no answer, no vote
    (["Ann is a  Knight", "ann is a knight", "Ann is a knave"], [0, 0, 1], [1, 1, 1], 0.0),
    (["", ""], [0, 0], [0, 0], 0.0)])
def test_majority(texts, correct, valid, wanted):
    assert majority(texts, np.array(correct, bool), np.array(valid, bool)) == pytest.approx(wanted)


def test_measures_are_named_after_the_samples():
    one, six = Score(total=3, prompts=((1, 1, 1.0),) * 3), Score(correct=3, known=6, total=6, prompts=((6, 3, 1.0),))
    assert one.measures() == {"eval": 0.0} and list(six.measures()) == ["eval", "pass_at_2", "pass_at_4", "pass_at_6", "majority_of_6"]
    assert six.measures()["eval"] == 0.5 and six.measures()["pass_at_6"] == 1.0
    assert eval_metrics({"a": six, "b": Score(total=6, known=6, prompts=((6, 0, 0.0),))})["pass_at_6/mean"] == 0.5


class Engine:
    """Answers the prompt's id, or one more for every second sample of it."""

    def update_weights(self, params, version): ...
    def release(self): ...

    def generate(self, prompts, prompt_id, domain, G, seed, step, occurrence):
        B = len(prompts) * G
        tokens = np.array([[p[0], p[0] + (g % 2)] for p in prompts for g in range(G)])
        one, zero = np.ones(B, int), np.zeros((B, 2))
        return Rollout(tokens, one, one, zero, zero, None, one * 0 > 0, np.repeat(prompt_id, G), np.repeat(domain, G), one)


class Row:
    def __init__(self, number):
        self.token_ids, self.prompt_id, self.domain = (number,), number, 0


def test_an_evaluation_counts_by_prompt():
    judge = lambda rows, texts: (None, np.array([int(t) == r.prompt_id for r, t in zip(rows, texts)]), np.array([r.prompt_id != 7 for r in rows]))  # noqa: E731
    scores = evaluate(Engine(), None, {"d": [Row(i) for i in (3, 5, 7)]}, judge, lambda ids: str(ids[0]), samples=3, batch_prompts=2)
    assert scores["d"] == Score(4, 6, 9, 9, 0, ((3, 2, 1.0), (3, 2, 1.0), (0, 0, 0.0)))
    assert scores["d"].measures() == {"eval": 4 / 6, "pass_at_2": 1.0, "pass_at_3": 1.0, "majority_of_3": 1.0}


def test_an_evaluation_that_goes_on_cuts_the_same_batches():
    judge = lambda rows, texts: (np.zeros(len(texts)), np.zeros(len(texts), bool), np.ones(len(texts), bool))  # noqa: E731
    told = []
    evaluate(Engine(), None, {"d": [Row(i) for i in range(7)], "e": [Row(9)]}, judge, lambda ids: str(ids[0]), samples=1, batch_prompts=3,
             on_batch=lambda a: told.append((a.domain, a.first, [r.prompt_id for r in a.rows])), skip={"d": 2, "e": 1})
    assert told == [("d", 2, [2]), ("d", 3, [3, 4, 5]), ("d", 6, [6])]


def test_the_standard_error_is_over_prompts():
    assert Score(prompts=((2, 2, 1.0), (2, 0, 0.0))).stderr == pytest.approx(0.5) and Score(prompts=((4, 2, 1.0),)).stderr == 0.0
    assert Score(prompts=((4, 2, 1.0),) * 9 + ((0, 0, 0.0),)).stderr == 0.0
