"""Laws of what a run writes: one step axis, nothing twice after a kill, nothing torn, nothing lost to a full disk."""

import errno
import io
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rlvr_jax import metrics, records


def lines(path: Path) -> list[dict]:
    """Strict: every line must be JSON by the standard (no NaN)."""
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")
    return [json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines()]


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def test_one_line_a_step_and_the_same_steps_in_tensorboard(tmp_path):
    with metrics.Writer(tmp_path / "run") as writer:
        for step in range(5):
            writer.write(step, {"reward/mean": np.float32(step) / 4, "compiles": 3})
            # On disk before the next step: a kill loses nothing.
            assert lines(tmp_path / "run/metrics.jsonl")[-1] == {"step": step, "reward/mean": step / 4, "compiles": 3}
    assert scalars(tmp_path / "run", "reward/mean") == [(step, step / 4) for step in range(5)]


def test_jax_arrays_are_numbers(tmp_path):
    import jax.numpy as jnp

    with metrics.Writer(tmp_path) as writer:
        writer.write(1, {"a": jnp.float32(0.5), "b": jnp.int32(2)})
        writer.write_samples(1, [{"reward": jnp.float32(1), "tokens": np.arange(3)}])
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": 2.0}]
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "reward": 1.0, "tokens": [0, 1, 2]}]


def test_nonfinite_is_null_and_counted_also_after_a_resume(tmp_path):
    with metrics.Writer(tmp_path) as writer:
        writer.write(0, {"a": 1.0})
        writer.write(1, {"a": math.nan, "b": -math.inf, "c": 2.0})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "a": 1.0}, {"step": 1, "a": None, "b": None, "c": 2.0, "metrics/nonfinite": 2}]
    assert scalars(tmp_path, "a") == [(0, 1.0)]
    assert scalars(tmp_path, "metrics/nonfinite") == [(1, 2.0)]
    with metrics.Writer(tmp_path, resume_step=1) as writer:
        writer.write(2, {"a": math.inf})
    assert lines(tmp_path / "metrics.jsonl")[-1] == {"step": 2, "a": None, "metrics/nonfinite": 3}


def test_resume_removes_what_the_killed_run_left_beyond_its_checkpoint(tmp_path):
    with metrics.Writer(tmp_path) as writer:
        for step in range(8):
            writer.write(step, {"x": step})
            writer.write_samples(step, [{"response": f"old {step}"}])
            writer.write_prompts(step, np.array([step, 7]), ["sums", "knights"])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "x"')  # killed in mid-write
    with metrics.Writer(tmp_path, resume_step=4) as writer:
        for step in range(5, 10):
            writer.write(step, {"x": -step})
            writer.write_samples(step, [{"response": f"new {step}"}])
            writer.write_prompts(step, [step, 7], ["sums", "knights"])
    assert lines(tmp_path / "prompts.jsonl") == [{"step": step, "prompt_ids": [step, 7], "domains": ["sums", "knights"]} for step in range(10)]
    expected = [0, 1, 2, 3, 4, -5, -6, -7, -8, -9]
    assert [r["x"] for r in lines(tmp_path / "metrics.jsonl")] == expected
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == list(range(10))
    assert [r["response"][:3] for r in lines(tmp_path / "samples.jsonl")] == ["old"] * 5 + ["new"] * 5
    assert scalars(tmp_path, "x") == [(step, float(x)) for step, x in enumerate(expected)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "prompts.jsonl", "samples.jsonl", "tensorboard"]


def test_a_fresh_start_forgets_a_run_that_died_before_its_first_checkpoint(tmp_path):
    with metrics.Writer(tmp_path) as writer:
        writer.write(3, {"x": 1})
    with metrics.Writer(tmp_path) as writer:
        writer.write(0, {"x": 2})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "x": 2}]
    assert scalars(tmp_path, "x") == [(0, 2.0)]


def test_a_kill_in_the_middle_of_the_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    with metrics.Writer(tmp_path) as writer:
        writer.write(1, {"x": 1})
        writer.write(2, {"x": 2})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(records.os, "fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        metrics.Writer(tmp_path, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


class FullDisk:
    """A file that takes ``room`` more bytes, partially if need be, then fails like a full disk."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, block):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(block[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_warns_once_is_counted_and_tears_no_line(tmp_path):
    writer = metrics.Writer(tmp_path)
    writer.write(0, {"x": 0})
    disk = FullDisk(writer._files["metrics.jsonl"]._file, room=5)
    writer._files["metrics.jsonl"]._file = disk
    with pytest.warns(UserWarning, match="No space left on device.*training goes on") as caught:
        writer.write(1, {"x": 1})
        writer.write(2, {"x": 2})
    assert len(caught) == 1
    disk.room = 10**6  # space again
    writer.write(3, {"x": 3})
    writer.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "x": 0}, {"step": 3, "x": 3, "metrics/write_errors": 2}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_really_full_device(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with metrics.Writer(tmp_path) as writer:
            (tmp_path / "samples.jsonl").symlink_to("/dev/full")
            writer.write_samples(0, [{"response": "x"}])
            writer.write(0, {"x": 1})
    assert len(caught) == 1 and "training goes on" in str(caught[0].message)
    assert lines(tmp_path / "metrics.jsonl")[0]["x"] == 1


def test_a_disabled_writer_touches_nothing(tmp_path):
    with metrics.Writer(tmp_path / "run", enabled=False) as writer:
        writer.write(0, {"x": 1})
        writer.write_samples(0, [{}])
    assert not (tmp_path / "run").exists()


def test_model_text_of_any_kind_survives_the_round_trip(tmp_path):
    texts = ["\ud800 lone", "a\nb\r\n\u2028c", "\x00\x1b[31m", "</script>", '"\\']
    with metrics.Writer(tmp_path) as writer:
        writer.write_samples(7, [{"response": text} for text in texts])
    assert [r["response"] for r in records.read_records(tmp_path / "samples.jsonl")] == texts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_reading_never_raises_on_garbage(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("g") / "m.jsonl"
    good = b'{"step": 1, "a": 2}\n'
    path.write_bytes(good + b"\n".join(garbage) + b"\n" + good + b"[" * 100_000 + b"\n[1]\n{}\nnull\n")
    assert records.read_records(path).count({"step": 1, "a": 2}) >= 2
    assert records.read_records(path.with_name("missing")) == []


def test_means_leave_out_what_was_not_measured():
    out = metrics.means({"a": (3.0, 4), "b": (0.0, 0), "c": (np.float32(1), np.int32(2))})
    assert out == {"a": 0.75, "c": 0.5}


def test_an_all_masked_batch_gives_finite_metrics_only():
    # A denominator of 0 with a non-zero or even a NaN sum must not become inf or NaN.
    assert metrics.means({"kl": (math.nan, 0), "loss": (1.0, 0.0)}) == {}


def test_summary_is_replaced_whole(tmp_path, monkeypatch):
    summary = {"eval": {"before": {"a": 0.25}}, "seconds": math.nan, "steps": np.int64(3)}
    path = metrics.write_summary(tmp_path, summary)
    assert json.loads(path.read_text()) == {"eval": {"before": {"a": 0.25}}, "seconds": None, "steps": 3}
    monkeypatch.setattr(records.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        metrics.write_summary(tmp_path, {"steps": 9})
    assert json.loads(path.read_text())["steps"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_environment_holds_command_and_versions(tmp_path):
    path = metrics.write_environment(tmp_path, ["rlvr-jax", "train", "a b.yaml"], devices="cpu x8")
    found = json.loads(path.read_text())
    assert found["command"] == "rlvr-jax train 'a b.yaml'" and found["devices"] == "cpu x8"
    assert {"python", "jax", "numpy"} <= set(found["versions"])


def plain(**kwargs) -> tuple[metrics.Progress, io.StringIO]:
    out = io.StringIO()
    return metrics.Progress(100, console=Console(file=out, force_terminal=False, width=80), **kwargs), out


def test_plain_progress_is_a_few_whole_lines():
    progress, out = plain(seconds=1000)
    with progress:
        for step in range(1, 101):
            progress.update(step, {"reward/mean": 0.5, "update/live_rows": 0.25, "tokens_per_second": 1234.0})
    first, last = out.getvalue().splitlines()
    assert first.startswith("train 1/100  reward 0.500  trained 25%  length -  tokens/s 1,234  ETA ")
    assert last.startswith("train 100/100") and last.endswith("ETA 0:00:00")
    assert "\x1b" not in out.getvalue()


def test_plain_progress_keeps_late_values_and_survives_odd_ones():
    progress, out = plain(seconds=0)
    with progress:
        progress.update(1, {"reward/mean": 0.5})
        progress.update(2, {"update/live_rows": math.nan, "reward/mean": None})
        progress.log("[red]not markup[/red]")
    assert "reward 0.500  trained -" in out.getvalue().splitlines()[1]
    assert "[red]not markup[/red]" in out.getvalue()


def test_eta_leaves_the_compilation_out_and_counts_from_the_resumed_step(monkeypatch):
    clock = iter([500.0, 510.0, 520.0])  # the 500 s before the first step: compilation
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    progress, _ = plain(start=40)
    progress.update(41)
    assert progress.eta() == "-"
    progress.update(42)
    assert progress.eta() == "0:09:40"  # 58 steps of 10 s
    progress.update(43)
    assert progress.eta() == "0:09:30"  # 57 steps of 10 s


def test_a_pipe_gets_no_line_twice():
    progress, out = plain(seconds=1000)
    with progress:
        for finished in (0, 0, 1, 1):
            progress.update(50, {"finished": finished}, news=finished and not progress._values["finished"])
        for _ in range(5):
            progress.update(100)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["50/100", "50/100", "100/100"]


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    with metrics.Progress(3, console=Console(file=out, force_terminal=True, width=140)) as progress:
        for step in (1, 2, 3):
            progress.update(step, {"reward/mean": 0.125})
    assert "3/3" in out.getvalue() and "reward 0.125" in out.getvalue() and "\x1b" in out.getvalue()


def test_progress_leaves_stdout_to_results():
    code = "from rlvr_jax.metrics import Progress\nwith Progress(1) as p: p.update(1)\nprint('result')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "result\n" and "1/1" in run.stderr
