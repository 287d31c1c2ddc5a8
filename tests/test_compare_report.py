"""What a comparison leaves behind: tables, a page, and what the terminal says."""

import csv
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree

import matplotlib.image
import numpy as np
import pytest
from page_checks import EVIL, Page, check_self_contained, needs_chromium, shown_by_chromium
from synthetic_learner import DOMAINS, learn, runs

from rlvr_jax import charts, cli
from rlvr_jax.compare import output
from rlvr_jax.compare.result import OVERALL, compare
from rlvr_jax.compare.table import Run, tabulate
from rlvr_jax.compare.wording import decimals

ARMS = {"grpo": {}, "slow": {"rate": 0.4}, "fast": {"rate": 1.8}, "alike": {}}


@pytest.fixture(scope="module")
def comparison():
    table = tabulate([run for i, (arm, settings) in enumerate(ARMS.items()) for run in runs(arm, learn(10, i, **settings), 0, 10, curves=True)])
    return compare(table, "grpo")


@pytest.fixture(scope="module")
def written(comparison, tmp_path_factory):
    return output.write(comparison, tmp_path_factory.mktemp("out") / "cmp", "fair & <square>", {"file": "runs.csv", "where": {}}).parent


def test_json_has_what_a_program_wants(comparison, written):
    tree = json.loads((written / "results.json").read_text())
    assert list(tree["arms"]) == list(ARMS) and tree["baseline"] == "grpo" and tree["pairs"] == list(map(str, range(10))) and tree["source"]["file"] == "runs.csv"
    for arm, verdict in (("slow", "worse"), ("fast", "better"), ("alike", "not distinguishable")):
        told, effect = tree["arms"][arm], comparison.effects[arm, OVERALL]
        assert told["verdict"] == effect.verdict == verdict
        assert (told["difference"], told["interval"], told["p"], told["p_holm"]) == (effect.difference, [effect.low, effect.high], effect.p, effect.p_holm)
        assert told["mean"] == comparison.scores[arm, OVERALL].mean and set(told["domains"]) == set(DOMAINS)
        assert told["domains"]["sums"]["tests"] == 9 and told["area_under_curve"]["tokens"]["verdict"] and told["cost_to_reach"]["tokens"]["runs"] == 10
    assert "difference" not in tree["arms"]["grpo"] and tree["arms"]["grpo"]["mean"] > 0


def test_csv_has_a_row_per_arm_and_measure(comparison, written):
    with (written / "results.csv").open() as file:
        rows = {(row["arm"], row["measure"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4 * (1 + 3 + 1) == len(comparison.scores)
    row, effect = rows["fast", "sums"], comparison.effects["fast", "sums"]
    assert float(row["difference"]) == effect.difference and row["verdict"] == effect.verdict and float(row["p_holm"]) == effect.p_holm
    assert rows["grpo", OVERALL]["difference"] == "" and float(rows["grpo", OVERALL]["mean"]) == comparison.scores["grpo", OVERALL].mean


def test_markdown_is_a_table_for_a_paper(comparison, written):
    lines = (written / "results.md").read_text().splitlines()
    assert all(line.count("|") == 10 for line in lines[:6]) and lines[2].startswith("| grpo | ") and lines[3].endswith("| worse |")
    assert f"{comparison.effects['fast', OVERALL].difference:+.4f}" in lines[4] and "10 pairs" in lines[7]


def test_the_page_tells_everything_and_asks_for_nothing(comparison, written):
    path = written / "report.html"
    shown = Page(path)
    shown.check_inert()
    check_self_contained(path.read_text())
    e = comparison.effects["slow", OVERALL]
    for words in ("fair & <square>", "fast is better than grpo; slow is worse than grpo; 'alike' cannot be told from grpo.", f"−{abs(e.difference):.4f}", f"−{abs(e.low):.4f} to −{abs(e.high):.4f}",
                  "0.002", "Paired differences", "Learning curves", "tokens to reach", "runs.csv", "mean over 3 domains", "all 9 cells of arm × domain", "P pairs have 2 to the power of P"):
        assert words in shown.text, words
    assert shown.tags.count("svg") == shown.tags.count("figure") == 1 + 1 + 3 + 1 and shown.tags.count("h1") == 1
    ids = [value for name, value in shown.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_pictures_stand_alone(comparison, written):
    """Well-formed XML with its own colours, nothing fetched, and the arms' names as text."""
    for name, words in (("forest.svg", {"slow", "fast", "alike"}), ("curves_tokens.svg", {"grpo", "slow", "fast", "alike"})):
        svg = (written / name).read_text()
        tree = xml.etree.ElementTree.fromstring(svg)
        assert tree.tag.endswith("svg") and words <= {(e.text or "").strip() for e in tree.iter() if e.tag.endswith("text")}, name
        assert "--c0:" in svg and not re.search(r"""(?:href|src)=["'](?!#)|url\((?!#)|@import""", svg)


def test_same_comparison_same_bytes(comparison, written, tmp_path):
    output.write(comparison, tmp_path, "fair & <square>", {"file": "runs.csv", "where": {}})
    for name in ("results.csv", "results.json", "results.md", "report.html", "forest.svg", "curves_tokens.svg"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes(), name


def test_the_terminal_shows_aligned_columns(comparison):
    lines = output.plain(comparison).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["arm", "grpo", "slow", "fast", "alike"] and lines[6].endswith("cannot be told from grpo.")
    column = lines[0].index("verdict")
    assert [line[column:] for line in lines[1:5]] == ["baseline", "worse", "better", "not distinguishable"]


def test_hostile_names_act_nowhere(tmp_path):
    names = [*EVIL, "a|b", "x" * 5000]
    rows = [Run(arm, f"{pair} {EVIL[0]}", {f"{d} {name}": 0.1 * i + 0.01 * pair for d, name in enumerate(EVIL[:2])}) for i, arm in enumerate(names) for pair in range(3)]
    path = output.write(compare(tabulate(rows), names[0]), tmp_path, EVIL[0], {EVIL[1]: EVIL})
    Page(path).check_inert()
    assert not {"\x00", "\u202e", "\x1b"} & set(path.read_text())
    table = [line for line in (tmp_path / "results.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == len(names) + 2 and all(line.replace("\\|", "").count("|") == 10 for line in table) and "<script" not in "".join(table)


def test_one_domain_two_arms_one_pair_is_still_a_page(tmp_path):
    path = output.write(compare(tabulate([Run("baseline", "1", {"gsm8k": 71.2}), Run("x", "1", {"gsm8k": 73.0})])), tmp_path, "t")
    shown = Page(path)
    assert "too few seeds to decide" in shown.text and "By domain" not in shown.text and "+1.80" in shown.text and "nan" not in shown.text
    assert "nan" not in (tmp_path / "results.csv").read_text() and json.loads((tmp_path / "results.json").read_text())["arms"]["x"]["interval"] == [None, None]


@pytest.mark.parametrize("score, wanted", [(53.6, 2), (0.536, 4), (100.0, 2), (1.0, 4), (0.0123, 5), (1500.0, 0), (0.0, 8)])
def test_digits_suit_fractions_and_percentages(score, wanted):
    c = compare(tabulate([Run(arm, "1", {"a": score}) for arm in ("baseline", "x")]))
    assert decimals(c, "a") == wanted


def test_the_forest_shows_the_values():
    """Marks and ends of intervals, read back from the SVG, are the data up to one affine map."""
    spans = [charts.Span("a", 1.0, 0.5, 2.0, "good"), charts.Span("b", -3.0, -4.0, -2.0, "bad"), charts.Span("c", 0.0, math.nan, math.nan)]
    svg = charts.forest_chart(spans, key="k", unit="points")
    assert "NaN" not in svg and "nan" not in svg and all(f">{s.label}<" in svg for s in spans)
    marks = dict(zip("abc", [float(x) for x in re.findall(r'<use xlink:href="#m[^"]*" x="([\d.]+)" y="[\d.]+" style="fill', svg)][-3:], strict=True))
    lines = [tuple(map(float, ends)) for ends in re.findall(r'd="M ([\d.]+) [\d.]+\s+L ([\d.]+) [\d.]+\s*"[^>]*stroke: var\(--(?:good|bad)\)', svg)]
    x = [marks["a"], *lines[0], marks["b"], *lines[1], marks["c"]]
    assert np.corrcoef(x, [1.0, 0.5, 2.0, -3.0, -4.0, -2.0, 0.0])[0, 1] > 0.9999


def test_a_band_is_drawn_around_its_line():
    x = np.arange(5.0)
    plain = charts.line_chart([charts.Series("a", x, x)], key="k")
    banded = charts.line_chart([charts.Series("a", x, x, band=(x - 1, x + 1))], key="k", across="tokens")
    assert "fill-opacity: 0.15" in banded and "fill-opacity: 0.15" not in plain and ">tokens<" in banded and ">trainer step<" in plain


@needs_chromium
def test_a_real_browser_shows_table_forest_and_curves(comparison, written, tmp_path):
    dom, shot = shown_by_chromium(written / "report.html", tmp_path, height=3000)
    assert dom.count("<figure>") == 6 and dom.count("<table") == (written / "report.html").read_text().count("<table")
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    near = lambda color: int((np.abs(pixels - color).max(-1) <= 8).sum())  # noqa: E731
    assert pixels.shape[1] == 1200 and near((0x0B, 0x7A, 0x4B)) > 400 and near((0xB3, 0x26, 0x1E)) > 400, "better and worse: words and forest marks in their colours"
    assert near((0x00, 0x72, 0xB2)) > 60 and near((0xD5, 0x5E, 0x00)) > 60, "curves of the first two arms"
    assert near((0x1D, 0x21, 0x29)) > 3000, "text"


def table_file(tmp_path):
    lines = ["method,seed,gsm8k,math,group"]
    for i, (arm, settings) in enumerate({"baseline": {}, "fast": {"rate": 2.0}}.items()):
        lines += [f"{arm},{run.pair},{run.scores['sums']},{run.scores['words']},g" for run in runs(arm, learn(8, i, **settings), 0, 8)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([*lines, "other,1,0.1,0.1,h"]))
    return path


def test_cli_writes_and_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "--from", str(table_file(tmp_path)), "--arm", "method", "--pair", "seed", "--scores", "gsm8k, math", "--where", "group=g"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "fast is better than baseline." in printed and printed.splitlines()[-1] == "runs/compare_runs/report.html"
    told = json.loads((tmp_path / "runs" / "compare_runs" / "results.json").read_text())
    assert told["arms"]["fast"]["verdict"] == "better" and told["source"]["where"] == {"group": "g"} and len(told["source"]["sha256"]) == 64
    assert cli.main([*arguments, "--baseline", "fast", "--out", "elsewhere"]) == 0
    assert "baseline is worse than fast." in capsys.readouterr().out and (tmp_path / "elsewhere" / "results.md").is_file()


@pytest.mark.parametrize("change, words", [
    (["--scores", "gsm8k,x"], "no column 'x'"), (["--where", "group"], "expected COLUMN=VALUE"), (["--where", "group=h"], "only one arm"),
    (["--baseline", "grpo"], "'grpo'"), (["--from", "nothing.csv"], "nothing.csv"), (["--pair", "group"], "rows 2 and 3"), ([], "unpaired")])
def test_cli_errors_are_one_line(tmp_path, capsys, change, words):
    base = {"--from": str(table_file(tmp_path)), "--arm": "method", "--pair": "seed", "--scores": "gsm8k"} | ({"--where": "group=g"} if change else {})
    options = base | dict([change] if change else [])
    assert cli.main(["compare", *(word for pair in options.items() for word in pair), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and words in printed.err and printed.out == "" and not (tmp_path / "out").exists()


def test_a_table_needs_no_jax(tmp_path):
    code = ("import sys\nfrom rlvr_jax.cli import main\nassert main(sys.argv[1:]) == 0\n"
            "print('HEAVY', sorted({'jax', 'transformers', 'torch', 'scipy.stats'} & set(sys.modules)))")
    run = subprocess.run([sys.executable, "-c", code, "compare", "--from", str(table_file(tmp_path)), "--arm", "method", "--pair", "seed", "--scores", "gsm8k",
                          "--where", "group=g", "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "HEAVY []", run.stderr[-2000:]
