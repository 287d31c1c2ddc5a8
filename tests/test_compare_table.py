"""Tables of runs: what is read, what is refused, and in which words."""

import math
import random

import numpy as np
import pytest

from rlvr_jax.compare.result import OVERALL, compare, headline
from rlvr_jax.compare.table import Curve, Run, read_csv, tabulate

HEADER = "method,seed,model,gsm8k,math\n"
ROWS = [f"{arm},{seed},{model},{g},{m}\n" for model, shift in (("small", 0), ("large", 30)) for arm, gain in (("baseline", 0), ("ppo", 2))
        for seed in (1, 2, 10) for g, m in [(40 + shift + gain + seed / 10, 20 + shift)]]


def file(tmp_path, *lines: str, name: str = "runs.csv"):
    path = tmp_path / name
    path.write_bytes("".join(lines).encode())
    return path


def read(path, **more):
    return read_csv(path, **{"arm": "method", "pair": "seed", "scores": ["gsm8k", "math"], "where": {"model": "small"}} | more)


def test_rows_become_a_table_in_any_order(tmp_path):
    table = read(file(tmp_path, HEADER, *ROWS))
    assert table.arms == ("baseline", "ppo") and table.pairs == ("1", "2", "10") and table.domains == ("gsm8k", "math")
    np.testing.assert_allclose(table.scores[:, :, 0], [[40.1, 40.2, 41.0], [42.1, 42.2, 43.0]])
    assert (table.scores[:, :, 1] == 20).all() and not table.curves
    mixed = ROWS.copy()
    random.Random(0).shuffle(mixed)
    again = read(file(tmp_path, HEADER, *mixed))
    order = [again.arms.index(arm) for arm in table.arms]
    np.testing.assert_array_equal(again.scores[order], table.scores)


def test_what_spreadsheets_write_is_read(tmp_path):
    lines = ["\ufeff method , seed,\"gsm8k\",notes\r\n", "baseline,1, 40 ,\"a, b\"\r\n", "\r\n", "ppo,1,4.1e1,\r\n", ",,,\r\n"]
    table = read(file(tmp_path, *lines), scores=["gsm8k"], where=None)
    assert table.scores.tolist() == [[[40.0]], [[41.0]]]


SMALL = [r for r in ROWS if "small" in r]


@pytest.mark.parametrize("lines, more, words", [
    ([HEADER, *ROWS], {"scores": ["gsm8k", "mat"]}, ["no column 'mat'", "--scores", "gsm8k"]),
    ([HEADER, *ROWS], {"arm": "arm"}, ["no column 'arm'", "--arm", "method"]),
    ([HEADER, *ROWS], {"pair": "run"}, ["no column 'run'", "--pair"]),
    ([HEADER, *ROWS], {"where": {"campaign": "main"}}, ["no column 'campaign'", "--where"]),
    ([HEADER, *ROWS], {"where": {"model": "huge"}}, ["model=huge", "'small', 'large'"]),
    ([HEADER, *ROWS], {"where": None}, ["rows 2 and 8", "method=baseline, seed=1", "differ in 'model'", "--where model=VALUE"]),
    ([HEADER, *ROWS, SMALL[0]], {}, ["rows 2 and 14", "leave one out"]),
    ([HEADER, *SMALL[:-1]], {}, ["unpaired", "'ppo'", "'10'", "leave that pair or arm out"]),
    ([HEADER, *SMALL[:3]], {}, ["only one arm", "'baseline'"]),
    ([HEADER, *SMALL, "dapo,1,small,n/a,3\n"], {}, ["row 8", "'gsm8k'", "'n/a'", "finite number"]),
    ([HEADER, *SMALL, "dapo,1,small,nan,3\n"], {}, ["row 8", "'nan'"]),
    ([HEADER, *SMALL, "dapo,1,small,1e999,3\n"], {}, ["row 8", "'1e999'"]),
    ([HEADER, *SMALL, "dapo,1,small,,3\n"], {}, ["row 8", "''"]),
    ([HEADER, *SMALL, ",1,small,3,3\n"], {}, ["row 8", "'method' is empty"]),
    ([HEADER, *SMALL, "dapo,1,small,3\n"], {}, ["row 8", "4 cells, expected 5"]),
    ([HEADER, *ROWS], {"scores": ["math", "math"]}, ["different columns", "math,math"]),
    ([HEADER], {"where": None}, ["no rows"]),
    ([], {}, ["is empty"]),
    (["a,b,a\n"], {}, ["two columns are called 'a'"]),
    (["\udcff\udcfe"], {}, ["not UTF-8"]),
])
def test_what_is_wrong_is_said_in_one_line(tmp_path, lines, more, words):
    path = tmp_path / "runs.csv"
    path.write_bytes("".join(lines).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as e:
        read(path, **more)
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value), e.value


def test_no_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"nothing\.csv"):
        read(tmp_path / "nothing.csv")


def a_run(arm: str, pair: int, score: float = 0.5, **more) -> Run:
    return Run(arm, str(pair), {"a": score}, **more)


def test_runs_from_elsewhere_are_held_to_the_same():
    good = [a_run("baseline", 1), a_run("x", 1)]
    for runs, words in (([], "no runs"), ([*good, a_run("x", 1)], "two runs of arm 'x' and pair '1'"), ([*good, Run("y", "1", {"b": 0.1})], "scores of 'b', expected 'a'"),
                        ([*good, a_run("y", 1, math.nan)], "'a' is nan"), ([*good, a_run("y", 1, curves={"updates": Curve([1, 2], [0.1])})], "2 costs and 1 accuracies"),
                        ([*good, Run("y", "1", {})], "expected 'a'")):
        with pytest.raises(ValueError, match=words):
            tabulate(runs)
    with pytest.raises(ValueError, match="'x' has no run of pair '2'"):
        tabulate([*good, a_run("baseline", 2)])


def test_a_run_that_failed_leaves_the_pairs_that_are_whole():
    gains = [0.1, 0.2, 0.15, 0.12, 0.3, 0.25, 0.11, 0.4]
    runs = [a_run("baseline", i, 0.3 + i / 100) for i in range(8)] + [a_run(arm, i, 0.3 + i / 100 + g) for arm in ("x", "y") for i, g in enumerate(gains)]
    whole = compare(tabulate(runs))
    partly = compare(tabulate([r for r in runs if (r.arm, r.pair) not in (("x", "3"), ("baseline", "6"))], incomplete=True))
    alone = compare(tabulate([r for r in runs if r.arm != "y" and r.pair not in ("3", "6")]))
    assert [whole.effects[arm, "a"].pairs for arm in "xy"] == [8, 8] and [partly.effects[arm, "a"].pairs for arm in "xy"] == [6, 7]
    assert partly.effects["x", "a"].difference == alone.effects["x", "a"].difference and partly.effects["x", "a"].p == alone.effects["x", "a"].p
    assert partly.scores["x", "a"].runs == 7
    assert any("Missing runs: baseline (pair 6), x (pair 3)" in note for note in partly.notes) and not any("Missing" in note for note in whole.notes)
    with pytest.raises(ValueError, match="'z' shares no pair with the baseline"):
        compare(tabulate([*runs, a_run("z", 9)], incomplete=True))


def compared(scores_by_arm: dict[str, list], **more):
    runs = [Run(arm, str(i), dict(zip("ab", s, strict=False) if isinstance(s, tuple) else {"a": s})) for arm, all_s in scores_by_arm.items() for i, s in enumerate(all_s)]
    return compare(tabulate(runs), **more)


def test_every_verdict():
    base = [0.50, 0.52, 0.47, 0.55, 0.51, 0.49, 0.53, 0.48]
    noise = [0.01, -0.02, 0.015, -0.01, 0.02, -0.015, 0.005, -0.004]
    c = compared({"baseline": base, "up": [b + 0.1 + n for b, n in zip(base, noise, strict=True)], "down": [b - 0.1 + n for b, n in zip(base, noise, strict=True)],
                  "same": [b + n for b, n in zip(base, noise, strict=True)]})
    assert [c.effects[arm, "a"].verdict for arm in c.arms] == ["better", "worse", "not distinguishable"]
    assert c.effects["up", "a"].p == 2 / 256 and c.effects["up", "a"].p_holm == pytest.approx(6 / 256)
    assert headline(c) == "up is better than baseline; down is worse than baseline; 'same' cannot be told from baseline."
    few = compared({"baseline": base[:5], "up": [b + 0.1 for b in base[:5]], "other": base[:5]})
    assert {e.verdict for e in few.effects.values()} == {"too few seeds to decide"}
    assert "With 5 pairs and 2 arms no p can be below 0.062 (0.12 after Holm's correction)" in few.notes[0] and "at least 7 pairs" in few.notes[0]
    assert any("other: every score equals that of baseline" in note for note in few.notes)
    assert headline(few) == "There are too few seeds to decide about any of the 2 arms."


def test_differences_that_do_not_vary_and_a_lone_pair():
    steady = compared({"baseline": [0.25, 0.5, 0.75, 0.25, 0.5, 0.75], "x": [0.5, 0.75, 1.0, 0.5, 0.75, 1.0]}).effects["x", "a"]
    assert (steady.difference, steady.sd, steady.low, steady.high, steady.verdict, steady.pairs_needed) == (0.25, 0.0, 0.25, 0.25, "better", 6)
    lone = compared({"baseline": [0.1], "x": [0.9]}).effects["x", "a"]
    assert lone.p == 1.0 and math.isnan(lone.low) and lone.verdict == "too few seeds to decide" and lone.pairs_needed is None
    rounding = compared({"baseline": [0.1 + 0.2] * 7, "x": [0.3] * 7}).effects["x", "a"]  # differ in the last bit only
    assert rounding.difference == 0 and rounding.p == 1 and rounding.pairs_needed is None


def test_domains_are_one_family_and_count_alike_in_the_mean():
    rng = np.random.default_rng(0)
    base, x, y = ([tuple(row) for row in rng.normal(mean, 0.05, (8, 2))] for mean in (0.5, (0.8, 0.5), (0.5, 0.5)))
    c = compared({"grpo": base, "x": x, "y": y}, baseline="grpo")
    assert c.overall == OVERALL and c.domains == ("a", "b")
    assert c.scores["x", OVERALL].mean == pytest.approx(np.mean(x)) and c.effects["x", OVERALL].tests == 2
    assert c.effects["x", "a"].tests == 4 and c.effects["x", "a"].p_holm == pytest.approx(4 * 2 / 256) and c.effects["x", "a"].verdict == "better"
    assert c.effects["x", "a"].difference + c.effects["x", "b"].difference == pytest.approx(2 * c.effects["x", OVERALL].difference)
    with pytest.raises(ValueError, match=r"no arm is called 'baseline'.*grpo, x"):
        compared({"grpo": base, "x": x})


def test_fractions_among_percentages_are_noticed():
    assert any("a: never above 1" in note for note in compared({"baseline": [(0.5, 50.0)], "x": [(0.6, 60.0)]}).notes)
    assert not any("never above 1" in note for note in compared({"baseline": [(0.0, 50.0)], "x": [(0.0, 60.0)]}).notes)


def test_curves_become_areas_and_costs():
    def curve(speed):
        return {"updates": Curve([0, 10, 20], [0.0, 0.1 * speed, 0.2 * speed]), "tokens": Curve([0, 500 * speed], [0.0, 0.2 * speed])}

    runs = [a_run(arm, i, 0.2 * speed, curves=curve(speed)) for arm, start in (("baseline", 1.0), ("fast", 2.0)) for i in range(6) for speed in [start + i / 10]]
    c = compare(tabulate(runs))
    area = c.areas["updates"]
    assert area == "area under the curve over updates" and c.effects["fast", area].difference == pytest.approx(0.1) and c.effects["fast", area].verdict == "better"
    assert c.scores["baseline", c.areas["tokens"]].mean == pytest.approx(np.mean([0.1] * 6)), "areas are taken over the costs that all curves cover"
    reach = c.reach["fast", "updates"]
    assert reach.target == pytest.approx(0.25) and (reach.reached, reach.runs) == (6, 6) and reach.median == pytest.approx(np.median([25 / (2 + i / 10) for i in range(6)]))
    assert c.reach["baseline", "updates"].reached == 3
    never = compare(tabulate(runs), target=0.9).reach["fast", "updates"]
    assert never.reached == 0 and never.median == math.inf
