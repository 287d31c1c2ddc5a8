"""The data room: prompt length, train/evaluation split, stream, resume, supervised pairs."""

import collections
import hashlib
import json
import os
import subprocess
import sys

import grain.python as grain
import numpy as np
import pytest

from rlvr_jax import config as config_lib
from rlvr_jax.data import DataError, build, occurrences, pairs
from rlvr_jax.data.mixture import interleave
from rlvr_jax.data.rows import digest, held_out, prompt_id


class Bytes:
    """A tokenizer with a BOS (256), one id a byte."""

    bos_id = 256

    def encode_chat(self, messages, template_args):
        return [256, *"".join(f"<{m['role']}>{m['content']}" for m in messages).encode()]


def make(domains, *, data=None, seed=0, tokenizer=None, **sections):
    tree = {"seed": seed, "data": {"domains": domains, "max_prompt_length": 4096, **(data or {})}, **sections}
    tree.setdefault("eval", {"prompts_per_domain": 10})
    return build(config_lib.validate(tree), tokenizer or Bytes())


def math(path, **more):
    return {"d": {"path": str(path), "verifier": "math", **more}}


def jsonl(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture
def numbered(tmp_path):
    """60 questions 'q0'..'q59'."""
    return jsonl(tmp_path / "numbered.jsonl", [{"question": f"q{i}", "answer": str(i)} for i in range(60)])


def draw(dataset, n, state=None, p=None, batch=8):
    """n prompts in batches of 8 -> (rows, state)."""
    state, rows = state or dataset.train.init(), []
    while len(rows) < n:
        new, state = dataset.train.take(state, batch, dataset.weights if p is None else p)
        rows += new
    return rows[:n], state


def texts(rows, domain=None):
    return [r.prompt for r in rows if domain in (None, r.domain_name)]


# ---- length ----

def test_prompts_over_the_limit_are_dropped_with_a_counter(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "x" * (i + 1), "answer": "1"} for i in range(60)])
    dataset = make(math(path), data={"max_prompt_length": 40}, eval={"prompts_per_domain": 60})
    held = dataset.notes["d"].counts["rows_held_out"]
    rows, state = draw(dataset, 200)
    assert all(len(r.token_ids) <= 40 for r in (*rows, *dataset.eval["d"]))
    fits = {"x" * (i + 1) for i in range(60) if 7 + i + 1 <= 40}
    assert set(texts(rows)) | set(texts(dataset.eval["d"])) == fits
    assert dataset.counters(state)["d"]["prompts_too_long"] > 0
    assert dataset.notes["d"].counts["eval_prompts_too_long"] + len(dataset.eval["d"]) == held


def test_prompts_over_the_limit_can_lose_their_left_end_but_not_the_bos(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": f"{'x' * 50} end{i}", "answer": "1"} for i in range(30)])
    row = draw(make(math(path), data={"max_prompt_length": 8, "overlong_prompt": "truncate"}), 1)[0][0]
    assert row.token_ids == (256, *row.prompt.encode()[-7:])
    plain = type("Plain", (), {"encode_chat": lambda self, m, a: list(m[-1]["content"].encode())})()
    row = draw(make(math(path), data={"max_prompt_length": 8, "overlong_prompt": "truncate"}, tokenizer=plain), 1)[0][0]
    assert row.token_ids == tuple(row.prompt.encode()[-8:])


def test_a_limit_that_nothing_fits_is_an_error_not_an_endless_loop(numbered):
    for domains in (math(numbered), {"d": {"task": "knights"}}):
        with pytest.raises(DataError, match="max_prompt_length=3"):
            draw(make(domains, data={"max_prompt_length": 3}), 1)


def test_template_arguments_reach_the_tokenizer(numbered):
    class Thinking(Bytes):
        def encode_chat(self, messages, template_args):
            return [template_args["enable_thinking"]]

    row = draw(make(math(numbered), model={"template_args": {"enable_thinking": False}}, tokenizer=Thinking()), 1)[0][0]
    assert row.token_ids == (False,)


# ---- split ----

def test_evaluation_is_disjoint_from_training_for_files(numbered):
    dataset = make(math(numbered), data={"holdout": 0.3})
    train, held = set(texts(draw(dataset, 400)[0])), set(texts(dataset.eval["d"]))
    assert train and held and not train & held
    assert all(held_out(t, 0.3) for t in held) and not any(held_out(t, 0.3) for t in train)


@pytest.mark.parametrize("task, args", [("arithmetic", {"digits": 1}), ("arithmetic", {}), ("countdown", {"numbers": 3, "max_number": 6}), ("knights", {"people": 2})])
def test_evaluation_is_disjoint_from_training_for_generated_tasks(task, args):
    dataset = make({"d": {"task": task, "task_args": args}}, eval={"prompts_per_domain": 200})
    train, held = draw(dataset, 600)[0], dataset.eval["d"]
    assert len(set(texts(held))) == len(held) > 10 and not set(texts(train)) & set(texts(held))
    if task == "countdown":  # the same numbers in another order are the same problem
        problems = [{(tuple(sorted(r.fields["numbers"])), r.fields["target"]) for r in rows} for rows in (train, held)]
        assert not problems[0] & problems[1]


def test_evaluation_is_the_same_for_every_seed_and_order_of_the_file(tmp_path, numbered):
    domains = {**math(numbered), "k": {"task": "knights"}, "a": {"task": "arithmetic"}}
    one, two = make(domains, seed=0), make(domains, seed=1)
    assert one.eval == two.eval and all(len(one.eval[n]) == n_ for n, n_ in (("k", 10), ("a", 10)))
    lines = numbered.read_text().splitlines()
    turned = jsonl(tmp_path / "turned.jsonl", lines[::-1])
    assert make(math(turned)).eval["d"] == make(math(numbered)).eval["d"]
    more = make(domains, eval={"prompts_per_domain": 20}).eval["k"]
    assert more[:10] == one.eval["k"]  # asking for more keeps the first ones


def test_training_rows_that_are_in_the_evaluation_file_are_dropped(tmp_path, numbered):
    evaluation = jsonl(tmp_path / "e.jsonl", [{"question": "  Q7 ", "answer": "7"}, {"question": "q9", "answer": "9"}, {"question": "q9", "answer": "9"}, {"question": "new", "answer": "1"}])
    dataset = make(math(numbered, eval_path=str(evaluation)))
    assert dataset.counters(dataset.train.init())["d"]["overlap_dropped"] == 2
    assert any("2 training rows are 2 of the evaluation prompts" in w for w in dataset.warnings)
    assert set(texts(draw(dataset, 58)[0])) == {f"q{i}" for i in range(60)} - {"q7", "q9"}
    assert sorted(texts(dataset.eval["d"])) == ["  Q7 ", "new", "q9"]


def test_another_domains_evaluation_is_kept_out_too(tmp_path, numbered):
    evaluation = jsonl(tmp_path / "e.jsonl", [{"question": "q3", "answer": "3"}])
    own = jsonl(tmp_path / "o.jsonl", [{"question": f"other{i}", "answer": "3"} for i in range(40)])
    dataset = make({"a": math(own, eval_path=str(evaluation))["d"], "b": math(numbered)["d"]})
    assert "q3" not in texts(draw(dataset, 300)[0])
    assert dataset.notes["b"].counts["overlap_dropped"] == (not held_out("q3", 0.1))


def test_nothing_left_to_train_on_is_an_error(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "1"}] * 4)
    with pytest.raises(DataError, match="no training row is left"):
        make(math(path, eval_path=str(path)))


def test_too_few_evaluation_prompts_warn(numbered):
    dataset = make(math(numbered), eval={"prompts_per_domain": 50})
    [told] = [w for w in dataset.warnings if "50 were wanted" in w]
    assert told.endswith("(eval.prompts_per_domain); raise data.holdout, or give an eval_path")
    other = jsonl(numbered.parent / "train.jsonl", [{"question": "x", "answer": "1"}])
    dataset = make(math(other, eval_path=str(numbered)), eval={"prompts_per_domain": 60}, data={"max_prompt_length": 9})  # q10 on are too long
    [told] = [w for w in dataset.warnings if "60 were wanted" in w]
    assert told.endswith("(eval.prompts_per_domain); 50 more are longer than data.max_prompt_length=9 tokens: raise it")
    assert not make(math(numbered), eval={"prompts_per_domain": 0}).eval["d"]


# ---- stream ----

def test_every_epoch_is_a_permutation_of_its_own(numbered):
    dataset = make(math(numbered))
    size = 60 - dataset.notes["d"].counts["rows_held_out"]
    rows = texts(draw(dataset, 3 * size, batch=1)[0])
    epochs = [rows[i * size:(i + 1) * size] for i in range(3)]
    assert len({tuple(sorted(e)) for e in epochs}) == 1 and len(set(epochs[0])) == size
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert texts(draw(make(math(numbered), seed=1), size, batch=1)[0]) != epochs[0]


def test_the_stream_is_grains_own_iteration(numbered):
    dataset = make(math(numbered))
    order = dataset.train.sources[0].order
    assert isinstance(order, grain.MapDataset)
    size = 60 - dataset.notes["d"].counts["rows_held_out"]
    iterator = iter(order.to_iter_dataset())
    assert texts(draw(dataset, 2 * size)[0]) == [next(iterator).prompt for _ in range(2 * size)]


def test_a_domains_order_depends_on_neither_proportions_nor_other_domains(numbered):
    a, b, c = math(numbered)["d"], {"task": "arithmetic"}, {"task": "knights"}
    alone, _ = draw(make({"a": a}), 20)
    both, _ = draw(make({"a": a, "b": b}), 60)
    skewed, _ = draw(make({"c": c, "b": {**b, "weight": 3.0}, "a": a}), 120, p=[0.1, 0.6, 0.3])
    assert texts(alone) == texts(both, "a")[:20] == texts(skewed, "a")[:20]
    assert texts(both, "b")[:20] == texts(skewed, "b")[:20]
    twice, _ = draw(make({"a": a, "b": a}), 40)
    assert texts(twice, "a") != texts(twice, "b")  # two domains over one file do not walk in step


def test_a_domain_smaller_than_the_batch_repeats_within_it(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(4)])
    other = jsonl(tmp_path / "e.jsonl", [{"question": "e", "answer": "1"}])
    rows = make(math(path, eval_path=str(other))).train.take(make(math(path, eval_path=str(other))).train.init(), 10, [1.0])[0]
    assert sorted(collections.Counter(texts(rows)).values()) == [2, 2, 3, 3]
    count = occurrences(rows)
    assert count.dtype == np.int32 and sorted(count) == [0] * 4 + [1] * 4 + [2] * 2
    assert len({(r.prompt_id, o) for r, o in zip(rows, count)}) == 10


def test_a_domain_that_has_run_out_hands_its_share_over(tmp_path, numbered):
    few = jsonl(tmp_path / "few.jsonl", [{"question": f"few{i}", "answer": "1"} for i in range(5)])
    dataset = make({"few": {"path": str(few), "verifier": "math"}, "many": {"path": str(numbered), "verifier": "math"}},
                   data={"exhausted": "hand_over"}, eval={"prompts_per_domain": 0})
    rows, state = draw(dataset, 40, p=[0.5, 0.5])
    assert len(texts(rows, "few")) == len(set(texts(rows, "few"))) <= 5 and len(texts(rows, "many")) == len(set(texts(rows, "many"))) >= 35
    again, _ = draw(dataset, 16, p=[0.5, 0.5])
    assert [r.prompt_id for r in again] == [r.prompt_id for r in rows[:16]]  # 4 + 4, then 1 + 7: the batch is always whole
    assert dataset.train.restore(state) == state
    with pytest.raises(DataError, match="every domain has run out"):
        draw(dataset, 80, state=state, p=[0.5, 0.5])


def test_proportions_hold_over_every_prefix_and_within_a_batch():
    dataset = make({"a": {"task": "arithmetic"}, "b": {"task": "countdown"}, "c": {"task": "knights"}})
    p, state, seen = np.array([0.55, 0.3, 0.15]), dataset.train.init(), np.zeros(3)
    for step in range(1, 12):
        rows, state = dataset.train.take(state, 7, p)
        seen += np.bincount([r.domain for r in rows], minlength=3)
        assert np.abs(seen - p * 7 * step).max() < 1 + 1e-9
        assert seen.sum() == 7 * step
    assert interleave([4, 2, 0]) == [0, 1, 0, 0, 1, 0]
    with pytest.raises(DataError, match="each of the 3 domains"):
        dataset.train.take(state, 7, [1.0])


def test_take_is_pure(numbered):
    dataset = make({**math(numbered), "k": {"task": "knights"}})
    state = draw(dataset, 24)[1]
    before = json.dumps(state)
    first, again = dataset.train.take(state, 8, dataset.weights), dataset.train.take(state, 8, dataset.weights)
    assert first == again and json.dumps(state) == before


def test_prompt_ids_are_31_bit_and_tell_domains_apart():
    assert prompt_id("a", "x") != prompt_id("b", "x") and 0 <= prompt_id("a", "x") < 2**31
    assert prompt_id("ab", "c") != prompt_id("a", "bc")
    assert digest("x") == int.from_bytes(hashlib.sha256(b"\x01" + bytes(7) + b"x").digest()[:8], "little")  # not Python's hash()


# ---- resume ----

RESUME = """
import json, sys
from rlvr_jax import config
from rlvr_jax.data import build
dataset = build(config.validate(json.loads(sys.argv[1])), None)
state = dataset.train.restore(json.loads(sys.argv[2]))
ids = []
for _ in range(6):
    rows, state = dataset.train.take(state, 7, dataset.weights)
    ids += [r.prompt_id for r in rows]
print(json.dumps([ids, state]))
"""


def test_resume_in_a_new_process_continues_exactly(numbered):
    """Positions count prompts, not samples or batches, and the shuffle of later epochs is the same."""
    tree = {"data": {"domains": {**math(numbered), "k": {"task": "knights", "weight": 2.0}, "c": {"task": "countdown"}}}}
    dataset = build(config_lib.validate(tree), None)
    saved = draw(dataset, 70, batch=7)[1]
    rows, end = draw(dataset, 42, saved, batch=7)
    out = subprocess.run([sys.executable, "-c", RESUME, json.dumps(tree), json.dumps(saved)], capture_output=True, text=True,
                         env={**os.environ, "PYTHONHASHSEED": "3"}, check=True).stdout
    ids, state = json.loads(out)
    assert ids == [r.prompt_id for r in rows] and state == end
    assert len(json.dumps(saved)) < 1000


def test_a_lost_or_damaged_state_is_refused(numbered):
    dataset = make({**math(numbered), "k": {"task": "knights"}})
    good = draw(dataset, 16)[1]
    assert dataset.train.restore(good) == good and dataset.train.restore(good) is not good
    bad = [None, {}, [], "x", {**good, "version": 0}, {k: v for k, v in good.items() if k != "carry"}, {**good, "position": 5},
           {**good, "position": {"d": 3}}, {**good, "position": {"d": 3, "k": -1}}, {**good, "position": {"d": 3, "k": "7"}},
           {**good, "carry": {"d": 99.0, "k": -99.0}}, {**good, "carry": {"d": None, "k": 0.0}}]
    for state in bad:
        with pytest.raises(DataError, match="start a new run folder"):
            dataset.train.restore(state)


def test_other_data_is_refused_on_resume(tmp_path, numbered):
    domains = {**math(numbered), "k": {"task": "knights"}}
    saved = draw(make(domains), 16)[1]
    assert make(domains).train.restore(saved) == saved
    changed = jsonl(tmp_path / "changed.jsonl", [*numbered.read_text().splitlines()[:-1], {"question": "q59", "answer": "60"}])
    assert not held_out("q59", 0.1)
    for other, message in ((make({**domains, **math(changed)}), "domain 'd' is not the data"),
                           (make({**domains, **math(numbered, template="{prompt}!")}), "domain 'd' is not the data"),
                           (make(domains, seed=1), "domain 'd' is not the data"),
                           (make(domains, data={"holdout": 0.2}), "is not the data"),
                           (make({**domains, "k": {"task": "knights", "task_args": {"people": 4}}}), "domain 'k' is not the data"),
                           (make(math(numbered)), "started with the domains d, k"),
                           (make({**domains, "new": {"task": "arithmetic"}}), "now they are d, k, new")):
        with pytest.raises(DataError, match=message):
            other.train.restore(saved)


# ---- supervised pairs ----

def test_pairs_from_worked_solutions_and_from_a_response_column(tmp_path, numbered):
    dataset = make({"a": {"task": "arithmetic", "template": "Compute {a} {op} {b}."}, "k": {"task": "knights"}}, model={"system_prompt": "s"})
    got, state = pairs(dataset, dataset.train.init(), 6)
    assert got[0][0][0] == {"role": "system", "content": "s"} and got[0][0][1]["content"].startswith("Compute ")
    assert all("\\boxed" in response or " is a kn" in response for _, response in got) and len(got) == 6
    assert pairs(dataset, state, 6)[0] != got
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": f"p{i}", "completion": f"r{i}"} for i in range(30)])
    got, _ = pairs(d := make({"d": {"path": str(path), "verifier": "format"}}), d.train.init(), 3)
    assert all(m[0]["content"][1:] == r[1:] for m, r in got)
    with pytest.raises(DataError, match=r"columns\.response"):
        pairs(d := make(math(numbered)), d.train.init(), 1)


def test_generated_tasks_take_templates_and_refuse_what_does_not_fit():
    row = draw(make({"d": {"task": "countdown", "template": "{numbers} -> {target}. {prompt}"}}), 1)[0][0]
    assert row.prompt.startswith(str(row.fields["numbers"])) and "Make" in row.prompt
    for domain, message in (({"template": "{nums}"}, "'nums'.*it has prompt, numbers, target"), ({"eval_path": "x.jsonl"}, "eval_path"),
                            ({"task_args": {"numbers": 9}}, "between 2 and 6")):
        with pytest.raises(DataError, match=message):
            make({"d": {"task": "countdown", **domain}})


def test_a_task_of_so_many_problems_comes_again_each_epoch():
    task = {"d": {"task": "countdown", "task_args": {"numbers": [3, 3], "max_number": 9, "ops": "+-"}, "problems": 24}}
    first, second = make(task), make(task, seed=1)
    epochs = [texts(rows) for rows in np.array_split(np.array(draw(first, 72)[0], object), 3)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 24 for e in epochs) and epochs[0] != epochs[1]
    other = texts(draw(second, 24)[0])
    assert sorted(other) == sorted(epochs[0]) and other != epochs[0]  # a seed decides the order alone
    assert not set(epochs[0]) & set(texts(first.eval["d"]))
    with pytest.raises(DataError, match=r"data\.domains\.d\.problems: 500 are wanted, but task 'arithmetic' has only about \d+ .*widen the task"):
        make({"d": {"task": "arithmetic", "task_args": {"digits": [1, 1], "ops": "+"}, "problems": 500}})
    with pytest.raises(config_lib.ConfigError, match="'problems' goes with 'task'"):
        make(math("a.jsonl", problems=3))
