"""report.html: says what happened, whatever the files hold, and nothing in them can act on the page."""

import itertools
import json
import math
import re
import shutil
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_checks import EVIL, Page, check_self_contained, needs_chromium, shown_by_chromium

from rlvr_jax import charts, config, metrics, page, report


def a_run(folder: Path, steps: int = 6, names=("arithmetic", "knights"), finished: bool = True, texts=("12",), small: bool = False) -> Path:
    """A run folder with every file; ``small`` has one curve, so that a page is cheap."""
    with metrics.Writer(folder) as writer:
        for step in range(steps + 1):
            values: dict = {"reward/mean": 0.5} if small else {} if step == 0 else {
                "reward/mean": step / 10, "kept/rows": 0.5, "response/length_mean": 20.0 + step, "response/truncated": 0.0, "entropy": 1.0,
                "update/grad_norm": 2.0 ** step, "update/loss": -0.1, "logprob_gap/max": 1e-5, "time/rollout": 1.0, "time/verify": 0.1,
                "time/update": 2.0, "tokens/generated": 100, "tokens/updated": 50, "tokens_per_second": 12345.0, "verify/unknown": 0,
                "compiles": 3, "strategy/ess": 3.5, "brand_new/thing": math.nan if step == 2 else step,
                **{f"accuracy/{name}": step / 10 for name in names}, **{f"mix/{kind}/{name}": 0.5 for kind in ("target", "realised") for name in names}}
            if step % 3 == 0:
                values |= {f"eval/{name}": 0.25 + step / 20 for name in names}
                writer.write_samples(step, [{"domain": name, "prompt": text, "response": text, "answer": "12", "reward": 1.0, "status": "ok"}
                                            for name, text in zip(itertools.cycle(names), texts, strict=False)])
            writer.write(step, values)
    (folder / "config.yaml").write_text(config.dump(config.validate({"seed": 7})))
    metrics.write_environment(folder, ["rlvr-jax", "train", "configs/quickstart.yaml"], devices="1 x cpu")
    if finished:
        metrics.write_summary(folder, {"eval": {"before": dict.fromkeys(names, 0.25), "after": dict.fromkeys(names, 0.55)}, "steps": steps, "finished": True,
                                       "seconds": 331, "generated_tokens": 600, "updated_tokens": 300, "compiles": 3, "resumed_from_step": 0})
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return report.build(a_run(tmp_path_factory.mktemp("runs") / "myrun"))


def test_a_finished_run_is_told_completely(finished):
    path = finished
    shown = Page(path)
    shown.check_inert()
    assert path.name == "report.html" and path.parent.name == "myrun"
    for words in ("myrun", "25.0%", "55.0%", "+30.0", "5 min 31 s", "300 (50% of generated)", "Accuracy on held-out prompts", "Reward", "Response length",
                  "Kept by the data strategies", "Entropy", "Gradient norm", "Sampler against trainer", "Time of a step", "Domain mix", "brand_new",
                  "seed: 7", "rlvr-jax train configs/quickstart.yaml", "1 x cpu", "Step 3", "numpy"):
        assert words in shown.text, words
    assert "Not finished" not in shown.text
    assert shown.tags.count("svg") == shown.tags.count("figure") >= 14
    assert shown.tags.count("h1") == 1


def test_the_page_needs_nothing_from_outside(finished):
    check_self_contained(finished.read_text())


def test_same_files_same_bytes(finished, tmp_path):
    shutil.copytree(finished.parent, tmp_path / "myrun")
    assert report.build(tmp_path / "myrun").read_bytes() == finished.read_bytes()


def test_ids_do_not_repeat(finished):
    ids = [value for name, value in Page(finished).attributes if name == "id"]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("evil", [EVIL[:6], EVIL[6:]])
def test_model_text_cannot_act_on_the_page(tmp_path, evil):
    shown = Page(report.build(a_run(tmp_path, texts=evil, small=True)))
    shown.check_inert()
    assert not {"\x00", "\u202e", "\x1b"} & set(shown.text)
    for text in evil:
        assert re.sub(r"[\ud800\x00\x1b\u202e]", "", text) in re.sub(r"\[U\+[0-9A-F]{4}\]", "", shown.text)


def test_no_other_file_can_act_on_the_page(tmp_path):
    run = a_run(tmp_path, names=(*EVIL, *(f"{evil}/x" for evil in EVIL)))
    evil = "\n".join(EVIL)
    (run / "config.yaml").write_text(evil, errors="replace")
    (run / "environment.json").write_text(json.dumps({"command": evil, "versions": {e: e for e in EVIL}, evil: EVIL}))
    (run / "samples.jsonl").write_text("".join(json.dumps({"step": 1, "status": e, e: e, "domain": {e: 1}}) + "\n" for e in EVIL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Page(report.build(run)).check_inert()


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_text_is_inert_and_readable(words):
    shown = page.text(words)
    assert not re.search(r"[<>\"'\x00-\x08\x0b-\x1f\ud800-\udfff\u202a-\u202e]", shown)
    shown.encode("utf-8")


def test_long_texts_are_cut_and_say_so(tmp_path):
    shown = Page(report.build(a_run(tmp_path, texts=["y" * 50_000], small=True)))
    assert "47,000 more characters" in shown.text and len(shown.text) < 60_000


def test_an_unfinished_run_shows_what_there_is(tmp_path):
    shown = Page(report.build(a_run(tmp_path, finished=False, small=True)))
    assert "Not finished: there is no summary.json; the last record is of step 6." in shown.text
    assert "25.0%" in shown.text and "55.0%" in shown.text and "latest" in shown.text


def test_a_stopped_run_says_so(tmp_path):
    run = a_run(tmp_path, small=True)
    metrics.write_summary(run, {"steps": 4, "finished": False})
    assert "Stopped at step 4 before its last step" in Page(report.build(run)).text


def test_an_empty_folder_is_stated_not_raised(tmp_path):
    shown = Page(report.build(tmp_path))
    for words in ("Nothing recorded yet", "No evaluation was recorded", "No sample texts", "config.yaml is missing", "No environment.json"):
        assert words in shown.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "summary.json", "config.yaml", "environment.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00garbage", b"[1, 2]\n", b'{"step": 1', b"null", b'{"eval": 3, "versions": 1, "step": 1, "command": {}}'])
def test_a_broken_file_is_no_exception(tmp_path, name, content):
    run = a_run(tmp_path, small=True)
    (run / name).write_bytes(content)
    Page(report.build(run)).check_inert()


def test_only_one_record_and_odd_values(tmp_path):
    with metrics.Writer(tmp_path) as writer:
        writer.write(1, {"reward/mean": 0.0, "entropy": math.nan, "update/grad_norm": 0.0, "logprob_gap/max": -1.0, "tokens_per_second": 1e300})
    shown = Page(report.build(tmp_path))
    assert "Reward" in shown.text and "Entropy" not in shown.text


def test_no_folder_is_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run folder.*runs/quickstart"):
        report.build(tmp_path / "nowhere")


def test_a_worse_domain_is_not_dressed_up(tmp_path):
    run = a_run(tmp_path, small=True)
    metrics.write_summary(run, {"eval": {"before": {"a": 0.5, "b": 0.2}, "after": {"a": 0.4, "b": 0.2}}})
    source = report.build(run).read_text()
    assert '<td class="down">−10.0</td>' in source and '<td class="">+0.0</td>' in source


def test_later_record_of_a_step_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "x": 9}\n{"step": 1, "x": 1}\n{"step": 2, "x": 3}\n')
    steps, values = report._curves(report.read_records(tmp_path / "metrics.jsonl"))["x"]
    assert steps.tolist() == [1, 2] and values.tolist() == [1.0, 3.0]


def lines_of(svg: str) -> int:
    ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))  # well-formed
    return len(re.findall(r"stroke: var\(--c\d\)", svg))


def test_chart_is_well_formed_themed_and_bounded():
    n = 100_000
    steps = np.arange(n)
    one = charts.Series("a", steps, np.sin(steps / 1e4) + 2)
    svg = charts.line_chart([one, one._replace(color=1)], key="k", title="<t> & 'q'")
    assert lines_of(svg) == 4  # faint and smoothed, twice
    assert len(svg) < 60_000, "a long run must not make a huge page"
    assert "#0" not in svg and "mathdefault" not in svg and "NaN" not in svg.replace("<title>", "")


def test_a_log_axis_has_plain_labels():
    svg = charts.line_chart([charts.Series("a", np.arange(5), 10.0 ** -np.arange(5.0))], key="k", log=True)
    assert "0.001" in svg and "$" not in svg


def test_the_chart_shows_the_values():
    """The drawn path, read back from the SVG, is the data up to one affine map."""
    values = np.array([0.0, 1.0, 4.0, 2.0])
    svg = charts.line_chart([charts.Series("a", np.array([0, 10, 20, 30]), values)], key="k")
    path = re.search(r'd="([^"]*)"[^>]*stroke: var\(--c0\)', svg)
    xy = np.array([[float(v) for v in pair.split()] for pair in re.findall(r"[ML] ([\d.]+ [\d.]+)", path[1])])
    assert np.corrcoef(xy[:, 0], [0, 10, 20, 30])[0, 1] > 0.9999
    assert np.corrcoef(xy[:, 1], values)[0, 1] < -0.9999  # SVG's y axis points down


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=60), st.integers(1, 15))
def test_running_mean_is_the_mean_of_its_window(values, window):
    got = charts.running_mean(np.array(values), window)
    for i, mean in enumerate(got):
        part = [v for v in values[max(i - window // 2, 0): i + window // 2 + 1] if not math.isnan(v)]
        assert math.isnan(mean) if not part else mean == pytest.approx(sum(part) / len(part), abs=1e-6)


def test_a_flat_zero_and_a_lone_point_are_drawn():
    svg = charts.line_chart([charts.Series("a", np.array([3]), np.array([0.0]))], key="k", percent=True, log=True, robust=True)
    assert lines_of(svg) >= 1


@needs_chromium
def test_a_real_browser_shows_every_picture_and_runs_no_script(tmp_path):
    path = report.build(a_run(tmp_path / "run", texts=EVIL))
    dom, _ = shown_by_chromium(path, tmp_path)  # the body is still there: EVIL[0] would have removed it
    assert dom.count("<figure>") == path.read_text().count("<figure>")
