"""The benchmarks themselves: what they time is no compilation."""

import pytest

from rlvr_jax.bench import rollout, step
from rlvr_jax.models.decoder import DecoderConfig

SMALL = {"mini": DecoderConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for bench in (step, rollout):
        monkeypatch.setattr(bench, "WORKLOADS", SMALL)
        monkeypatch.setattr(bench, "matmul_rate", lambda dtype=None: 1e9)
        monkeypatch.setattr(bench, "bandwidth", lambda: 1e9)


def test_rollout():
    found = [r for r in rollout.bench_rollout("mini", repeat=1) if r["bench"] in ("rollout", "shared_prefill")]
    assert [r.get("lengths") for r in found] == [None, "geometric", None] and all(r["seconds"] > 0 for r in found)
    assert [r["compiles"] for r in found[:2]] == [0, 0]


def test_step():
    """The first step has what every later one has: its weights on the mesh."""
    found = {r["bench"]: r for r in step.bench_step("mini", repeat=2)}
    assert found["step"]["compiles"] == 0 and found["step"]["seconds"] > 0 and found["bookkeeping"]["seconds"] > 0
