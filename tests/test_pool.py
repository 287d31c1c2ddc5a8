"""The worker pool under hostile verifiers: one verdict per row, in order, whatever happens to a worker."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlvr_jax import config
from rlvr_jax.rewards import Job, Pool, Verdict, process, registry, verify_file
from rlvr_jax.rewards.patience import Patience

VERIFIERS = """
    import ctypes, os, signal, sys, threading, time
    from rlvr_jax.rewards.verdict import Verdict

    def echo(text, answer): return float(text)
    def nap(text, answer): time.sleep(float(text)); return True
    def spin(text, answer):
        while True: pass
    def sleep(text, answer): time.sleep(1000)
    def leave(text, answer): os._exit(3)
    def quit(text, answer): sys.exit(1)
    def kill(text, answer): os.kill(os.getpid(), signal.SIGKILL)
    def stop(text, answer): os.kill(os.getpid(), signal.SIGSTOP)
    def alarm(text, answer): signal.alarm(1); time.sleep(60)
    def late_alarm(text, answer): signal.alarm(1); return True
    def segfault(text, answer): ctypes.string_at(0)
    def eat(text, answer):
        kept = []
        while True: kept.append(bytes(1 << 27))
    def fork(text, answer): os.fork(); return True
    def close(text, answer): os.closerange(3, 100); return True
    def babble(text, answer):
        print("noise" * 1000); os.write(1, b'{"job": 0}\\n'); os.write(2, b"noise"); return True
    def deep(text, answer): return deep(text, answer)
    def boom(text, answer): raise KeyError("no such thing")
    def strange(text, answer): return {"nan": float("nan"), "inf": float("inf"), "str": "yes", "none": None,
                                       "list": [1], "true": True, "int": 2, "minus": -0.5,
                                       "bad": Verdict(float("nan"), "ok")}[text]
    def spawn(text, answer):
        import subprocess
        subprocess.Popen(["sleep", "1000"]); return True
    def orphan(text, answer):
        if os.path.exists(text): return True
        open(text, "w").close(); os.kill(os.getppid(), signal.SIGKILL); time.sleep(5)
    def once(text, answer):
        if not os.path.exists(text):
            open(text, "w").close(); os._exit(1)
        return True
    def burn(text, answer):
        start = time.process_time()
        while time.process_time() - start < float(text): pass
        return True
    def in_thread(text, answer):
        out = []
        from rlvr_jax.rewards import verify
        t = threading.Thread(target=lambda: out.append(verify("math", text, answer))); t.start(); t.join()
        return out[0]
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A module of verifiers that workers can import."""
    (tmp_path / "hostile_verifiers.py").write_text(textwrap.dedent(VERIFIERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, text="1": Job(f"hostile_verifiers:{name}", text)


def small(**changes) -> Pool:
    return Pool(**({"workers": 2, "cpu_seconds": 0.5, "wall_seconds": 1.5, "memory_mb": 1024, "preload": ()} | changes))


def test_every_verdict_in_order_around_hostile_rows(hostile):
    kinds = ["spin", "sleep", "leave", "quit", "kill", "stop", "segfault", "eat", "alarm", "close"]
    jobs = [hostile("echo", str(i)) for i in range(1, 41)]
    for at, kind in enumerate(kinds):
        jobs.insert(4 * at, hostile(kind))
    with small() as pool:
        verdicts = pool.score(jobs)
        counters = dict(pool.counters)
    assert len(verdicts) == len(jobs)
    for job, verdict in zip(jobs, verdicts):
        if "echo" in job.verifier:
            assert verdict == Verdict(float(job.text), "ok")
        else:
            assert (verdict.status, verdict.reward) == ("unknown", 0.0), job
            assert ("twice" in verdict.detail) != any(k in job.verifier for k in ("spin", "sleep", "stop"))  # out of time: not tried again
    assert counters["verified"] == len(jobs) and counters["unknown"] == len(kinds)
    assert counters["timeouts"] == 3 and counters["crashes"] == 14 and counters["replaced"] == 17


@pytest.mark.parametrize("kind, detail", [
    ("spin", "0.5 s of CPU time"), ("sleep", "1.5 s of waiting"), ("kill", "SIGKILL"), ("leave", "exited with 3")])
def test_unknown_says_why(hostile, kind, detail):
    with small(workers=1) as pool:
        assert detail in pool.score([hostile(kind)])[0].detail


def test_row_is_tried_again_in_a_fresh_worker(hostile, tmp_path):
    with small(workers=1) as pool:
        assert pool.score([hostile("once", str(tmp_path / "marker"))])[0].status == "ok"
        assert (pool.counters["crashes"], pool.counters["replaced"], pool.counters["unknown"]) == (1, 1, 0)


def test_the_process_that_starts_workers_may_be_lost_too(hostile, tmp_path):
    with small(workers=1) as pool:
        verdicts = pool.score([hostile("orphan", str(tmp_path / "marker")), *[hostile("echo", str(i)) for i in range(1, 4)]])
        assert [v.reward for v in verdicts] == [1, 1, 2, 3] and pool.counters["crashes"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_of_what_verifiers_started(hostile):
    before = set(below(os.getpid()))
    with small() as pool:
        pool.score([hostile("spawn"), hostile("spawn"), hostile("echo")])
        pids = set(below(os.getpid())) - before
        assert len(pids) == 5  # the template, two workers, and what they have started
        pool.score([hostile("leave"), hostile("spin")])
    assert not any(alive(p) for p in pids)


def test_rows_that_hang_are_given_up_together():
    patience = Patience(5.0, 60.0, enough=2)
    assert patience.limits("math") == (5.0, 60.0, "")
    patience.ran_out("math", 5.1, 0.0)
    patience.ran_out("math", 0.0, 61.0)
    assert patience.limits("math")[:2] == (0.5, 0.5) and patience.limits("other") == (5.0, 60.0, "")
    for cpu, idle, limits in ((0.3, 0.0, (1.2, 0.5)), (0.1, 1.0, (1.2, 4.0)), (2.0, 0.0, (5.0, 4.0))):
        patience.had_verdict("math", cpu, idle)  # a verifier that takes long is not one that hangs
        assert patience.limits("math")[:2] == limits
    patience.forget()
    assert patience.limits("math") == (5.0, 60.0, "")
    patience.ran_out("math", 0.6, 0.0)
    patience.ran_out("math", 0.6, 0.0)  # given up early itself: no evidence
    assert patience.limits("math") == (5.0, 60.0, "")


def test_many_hanging_rows_cost_one_deadline_and_no_other_row_its_verdict(hostile):
    """12 sleeping rows on 2 workers: two of them get all their time, and the others what is left of that."""
    jobs = [hostile("sleep") if i % 5 == 0 else hostile("echo", str(i)) for i in range(60)]
    with small(cpu_seconds=30.0, wall_seconds=4.0) as pool:
        pool.score(jobs[1:3])
        verdicts = pool.score(jobs)
        assert pool.counters["timeouts"] == pool.counters["replaced"] == 12 and pool.counters["crashes"] == 0
    assert [v.status for v in verdicts] == ["ok" if i % 5 else "unknown" for i in range(60)]
    assert sum("since other rows ran out of all their time" in v.detail for v in verdicts) >= 8


def test_a_slow_row_gets_its_verdict_behind_rows_that_hang(hostile):
    jobs = [hostile("burn", "0.3"), hostile("spin"), hostile("spin"), *[hostile("echo", str(i)) for i in range(1, 6)], hostile("burn", "0.7"), hostile("spin")]
    with small(cpu_seconds=1.5, wall_seconds=30.0) as pool:
        verdicts = pool.score(jobs)
    assert [v.status for v in verdicts] == ["ok", "unknown", "unknown", *["ok"] * 6, "unknown"], verdicts


def test_errors_and_strange_results_are_counted_not_scored(hostile):
    texts = ["nan", "inf", "str", "none", "list", "true", "int", "minus", "bad"]
    with small(workers=1) as pool:
        *verdicts, boom, deep = pool.score([*(hostile("strange", t) for t in texts), hostile("boom"), hostile("deep")])
        assert pool.counters["errors"] == 2 and pool.counters["replaced"] == 0 and pool.counters["unknown"] == 8
    assert [v.status for v in verdicts] == ["unknown"] * 5 + ["ok"] * 3 + ["unknown"]
    assert [v.reward for v in verdicts] == [0, 0, 0, 0, 0, 1, 2, -0.5, 0]
    assert (boom.status, boom.reward) == ("unknown", 0.0) and "KeyError: 'no such thing'" in boom.detail
    assert "RecursionError" in deep.detail


def test_protocol_survives_output_forks_and_leftover_alarms(hostile):
    with small(workers=1) as pool:
        jobs = [hostile("babble"), hostile("fork"), hostile("late_alarm"), hostile("nap", "1.2"), hostile("echo", "7")]
        assert [v.reward for v in pool.score(jobs)] == [1, 1, 1, 1, 7]
        assert pool.counters["replaced"] == 0


def test_math_gives_the_same_verdict_in_a_thread(hostile):
    # math-verify's own time-outs raise "signal only works in main thread".
    with small(workers=1, cpu_seconds=30.0) as pool:
        job = hostile("in_thread", "\\boxed{\\frac{2}{7}}")
        right, wrong = pool.score([Job(job.verifier, job.text, "\\frac{2}{7}"), Job(job.verifier, job.text, "\\frac{3}{7}")])
        assert (right.status, wrong.status) == ("ok", "wrong")


def test_deadline_is_cpu_time_of_the_row(hostile):
    with small(workers=1, cpu_seconds=0.6, wall_seconds=30.0) as pool:
        # Sleeping longer than the CPU deadline is fine, and a worker's earlier rows are not charged to the next one.
        verdicts = pool.score([hostile("nap", "1.0"), *[hostile("burn", "0.3")] * 5])
        assert [v.status for v in verdicts] == ["ok"] * 6
        assert pool.counters["timeouts"] == 0


def test_a_starved_worker_is_not_idle(monkeypatch):
    template = process.Template(0, 1.0)
    worker = template.fork()
    try:
        for state, idle in (("R", False), ("S", True)):
            monkeypatch.setattr(process, "cpu_seconds", lambda pid, state=state: (0.0, state))
            worker.start_clocks()
            time.sleep(0.05)
            worker.tick()
            assert (worker.idle > 0) == idle
    finally:
        worker.kill()
        template.close()


def test_order_under_shuffle_and_overlap(hostile):
    rng = random.Random(0)
    jobs = [hostile("nap", str(rng.choice([0.0, 0.0, 0.02]))) if i % 3 else hostile("echo", str(i)) for i in range(60)]
    with small() as pool:
        tickets = {i: pool.submit(job) for i, job in enumerate(jobs)}
        order = list(tickets)
        rng.shuffle(order)
        verdicts = dict(zip(order, pool.collect([tickets[i] for i in order])))
        for i in range(0, 60, 3):
            assert verdicts[i].reward == i
        with pytest.raises(KeyError, match="collected before"):
            pool.collect([tickets[0]])


def test_callables_of_a_notebook_run_here(hostile):
    seen = []
    with small() as pool:
        jobs = [Job(lambda text, answer: seen.append(text) or text == answer, "a", "a"), hostile("echo", "3"),
                Job(lambda text, answer: 1 / 0, "a"), Job(lambda text, answer, **fields: fields["k"], "a", None, {"k": 0.25})]
        verdicts = pool.score(jobs)
    assert seen == ["a"] and [v.reward for v in verdicts] == [1, 3, 0, 0.25]
    assert "ZeroDivisionError" in verdicts[2].detail and verdicts[2].status == "unknown"


def test_a_module_that_no_other_process_finds_runs_here(tmp_path, monkeypatch):
    # As a test runner or a notebook loads one: in sys.modules, on no path.
    (tmp_path / "nowhere_to_be_found.py").write_text("def one(text, answer): return 1.0\n")
    spec = importlib.util.spec_from_file_location("nowhere_to_be_found", tmp_path / "nowhere_to_be_found.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", module)
    spec.loader.exec_module(module)
    assert registry.reference(module.one) is None
    with small(workers=1) as pool:
        assert pool.score([Job(module.one, "x")])[0].status == "ok"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.reference(module.one) == "nowhere_to_be_found:one"


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text("def one(text, answer): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    registry.check("beside_me:one")
    with small(workers=1, preload=["beside_me:one"]) as pool:
        assert pool.score([Job("beside_me:one", "x")])[0].status == "ok"


def test_a_row_that_cannot_travel_is_unknown(hostile):
    with small(workers=1) as pool:
        bad = Job("hostile_verifiers:echo", "1", None, {"x": lambda: 0})
        assert [v.status for v in pool.score([bad, hostile("echo")])] == ["unknown", "ok"]


def test_workers_that_cannot_start_say_why():
    with small(preload=("no_such_module:f",)) as pool, pytest.raises(RuntimeError, match="cannot import 'no_such_module'"):
        pool.score([Job("math", "1", "1")])


def test_closed_pool_refuses(hostile):
    pool = small()
    pool.score([hostile("echo")])
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(hostile("echo"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """All processes below one."""
    children = [int(p) for t in Path(f"/proc/{pid}/task").glob("*/children") for p in t.read_text().split()]
    return children + [p for child in children for p in below(child)]


def until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_orphans_after_kill_9(hostile, tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from rlvr_jax.rewards import Job, Pool
pool = Pool(2, 1000.0, 1000.0, preload=())
pool.submit(Job("hostile_verifiers:spin", ""))
pool.submit(Job("hostile_verifiers:spawn", "0")); pool.collect([1])
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    assert until(lambda: len(below(parent.pid)) == 4)  # a template, two workers, and what one of them started
    time.sleep(0.5)
    pids = below(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert until(lambda: not any(alive(p) for p in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_interrupt_does_not_reach_workers(hostile):
    with small(workers=1) as pool:
        pool.score([hostile("echo")])
        pids = [p for p in below(os.getpid()) if b"rewards.template" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert len(pids) == 2 and all(os.getsid(p) != os.getsid(0) for p in pids)  # Ctrl-C in a terminal goes to the foreground session only
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert pool.score([hostile("echo", "2")])[0].reward == 2
        assert pool.counters["replaced"] == 0


def test_verify_file(tmp_path):
    rows = [
        {"task": "math", "gold": "\\frac12", "answer": "\\boxed{0.5}", "source": "ignored", "text": "ignored"},
        {"task": "countdown", "gold": 10, "answer": "<answer>(8-3)*2</answer>", "numbers": [8, 3, 2], "target": 10},
        {"task": "choice", "gold": "C", "answer": "The answer is C because a valve closes."},
        {"task": "knights", "gold": "A is a knight, and B is a knave.", "answer": "A is a knave, B is a knave"},
        {"task": "sudoku", "gold": 1, "answer": "1"}, {"task": "math", "answer": "1"}, [1],
        {"task": "math", "gold": "", "answer": "1"}, {"task": "math", "gold": 3, "answer": 3}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "{broken", "", json.dumps(rows[0])]))
    out = list(verify_file(path, config.Pool(workers=1)))
    assert [r["status"] for r in out] == ["ok", "ok", "ok", "wrong", *["unknown"] * 6, "ok"]
    assert all(list(r) == ["status", "reward", "detail"] for r in out) and [r["reward"] for r in out[:4]] == [1, 1, 1, 0]
    assert out[4]["detail"].startswith("line 5: unknown task 'sudoku'") and out[9]["detail"].startswith("line 10: no JSON")
    with pytest.raises(config.ConfigError, match="cannot be read"):
        next(verify_file(tmp_path / "missing.jsonl", config.Pool()))


def test_verify_file_takes_ones_own_verifier_and_countdown_without_gold(tmp_path, monkeypatch):
    (tmp_path / "my_checks.py").write_text("def last_word(text, answer):\n    return text.split()[-1] == answer\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"task": "my_checks:last_word", "gold": "blue", "answer": "it is blue"}, {"task": "my_checks:last_word", "gold": "red", "answer": "it is blue"},
            {"task": "countdown", "answer": "<answer>3*5+7</answer>", "numbers": [3, 5, 7], "target": 22}, {"task": "my_checks:none", "gold": "", "answer": ""}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    out = list(verify_file(path, config.Pool(workers=1)))
    assert [r["status"] for r in out] == ["ok", "wrong", "ok", "unknown"] and "it has: last_word" in out[3]["detail"], out


def test_rewards_never_import_jax():
    code = ("import sys; from rlvr_jax.rewards import verify; verify('math', '\\\\boxed{x+1}', '1+x'); import rlvr_jax.rewards.worker; "
            "sys.exit(any(m in sys.modules for m in ('jax', 'jaxlib', 'flax', 'torch')))")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_throughput_is_printed(capsys):
    jobs = [Job("math", f"so \\boxed{{{i}}}", str(i)) for i in range(500)]
    with Pool(2) as pool:
        pool.score(jobs[:2])
        start = time.perf_counter()
        assert all(v.status == "ok" for v in pool.score(jobs))
        with capsys.disabled():
            print(f"\npool: {len(jobs) / (time.perf_counter() - start):.0f} plain numbers a second on 2 workers")
