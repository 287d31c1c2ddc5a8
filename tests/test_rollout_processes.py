"""Two processes, each with its share of the mesh, sample what one device samples, and both know all of it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import QUICK

ROOT = Path(__file__).resolve().parents[1]

WORKER = """
import sys
import numpy as np
import jax
number, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, number, initialization_timeout=120)
from rlvr_jax.models.decoder import DecoderConfig, abstract_params, param_axes
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine
from rlvr_jax.sharding import make_mesh, shardings

cfg = DecoderConfig(vocab_size=98, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
rng = np.random.default_rng(3)
host = jax.tree.map(lambda x: 0.16 * rng.standard_normal(x.shape).astype(np.float32), abstract_params(cfg))

def sample(mesh, params):
    engine = LocalEngine(cfg, SamplingParams(max_new_tokens=12, eos_ids=(0, 5)), mesh, prompt_buckets=(16,), slots=4, burst=3)
    told = []
    engine.update_weights(params, 0)
    r = engine.generate([[1, 2, 3], [7] * 9, [4, 90, 12]], [1, 2, 3], [0, 0, 0], 3, 0, 0, on_rows=lambda rows: told.extend(x.row for x in rows))
    assert sorted(told) == list(range(9))
    return r

mesh = make_mesh(2, 1, 2)
placed = jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]), host, shardings(mesh, param_axes(cfg)))
r, alone = sample(mesh, placed), sample(None, host)
np.testing.assert_array_equal(r.tokens, alone.tokens)
np.testing.assert_allclose(r.logprob, alone.logprob, atol=1e-4)
np.save(out, r.tokens)
"""


@pytest.mark.slow
def test_two_processes_sample_what_one_does(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = f"--xla_force_host_platform_device_count=2 {QUICK}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(i), port, str(tmp_path / f"{i}.npy")], env=env, stderr=subprocess.PIPE, text=True) for i in range(2)]
    for worker in workers:
        _, error = worker.communicate(timeout=600)
        assert worker.returncode == 0, error[-3000:]
    a, b = (np.load(tmp_path / f"{i}.npy") for i in range(2))
    np.testing.assert_array_equal(a, b)
    assert len(np.unique(a)) > 10
