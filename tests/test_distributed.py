"""How a process finds the others, before any of them is there; and what it tells whoever asked for the wrong thing."""

import numpy as np
import pytest

from rlvr_jax import distributed
from rlvr_jax.config import ConfigError
from rlvr_jax.distributed import Cluster, find

SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
JAX = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize("arguments, env, cluster", [
    ((), {}, None),
    ((None, 1), {}, None),
    (("host:1", 1, 0), {}, None),
    (("host:1", 2, 0), {}, Cluster("host:1", 2, 0)),
    ((), JAX, Cluster("host:1", 4, 3)),
    ((None, None, 1), JAX, Cluster("host:1", 4, 1)),  # flags win
    ((), SLURM, Cluster()),
    ((None, 4), SLURM, Cluster(processes=4)),  # the number is checked after joining
    ((), {**SLURM, "SLURM_NTASKS": "1"}, None),
    ((), {k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, None),  # an interactive allocation, not a step
    ((), {"OMPI_COMM_WORLD_SIZE": "2"}, Cluster()),
    ((), {"TPU_WORKER_HOSTNAMES": "a,b"}, Cluster()),
    ((), {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ((), {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, Cluster()),
])
def test_a_process_knows_whether_it_is_alone(arguments, env, cluster):
    assert find(*arguments, env={"JAX_PLATFORMS": "cpu", **env}) == cluster


@pytest.mark.parametrize("arguments, env, words", [
    (("host:1",), {}, "--num-processes and --process-id missing"),
    ((None, 2, 0), {}, "--coordinator HOST:PORT missing"),
    (("host:1", 2, 2), {}, "--process-id 2: expected 0..1"),
    (("host", 2, 1), {}, "'host': expected HOST:PORT"),
    ((None, 2), {}, "2 processes were asked for, but this is no TPU pod"),
    ((None, 0), {}, "--num-processes 0"),
    ((), {**JAX, "JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID='first'"),
])
def test_wrong_requests_are_one_line(arguments, env, words):
    with pytest.raises(ConfigError, match=words) as e:
        find(*arguments, env={"JAX_PLATFORMS": "cpu", **env})
    assert "\n" not in str(e.value)


def test_a_tpu_machine_asks_its_metadata(monkeypatch):
    class Answer:
        def __init__(self, text):
            self.text = text

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self):
            return self.text.encode()

    monkeypatch.setattr(distributed, "_has_tpu", lambda: True)
    for text, several in (("h0:8470,h1:8470", True), ("h0:8470", False)):
        monkeypatch.setattr(distributed.urllib.request, "urlopen", lambda request, timeout, text=text: Answer(text))
        assert distributed.managed({}) is several
        assert distributed.managed({"JAX_PLATFORMS": "cpu"}) is False

    def unreachable(request, timeout):
        raise distributed.urllib.error.URLError("no such host")

    monkeypatch.setattr(distributed.urllib.request, "urlopen", unreachable)
    assert distributed.managed({}) is False


def test_alone_nothing_is_exchanged():
    distributed.start(processes=1)
    x = np.arange(3, dtype=np.int32)
    np.testing.assert_array_equal(distributed.gather(x), x[None])
    assert distributed.first() and distributed.largest(7) == 7
    distributed.require_equal({"a": 1})


def test_what_differs_is_named(monkeypatch):
    def two_more(x):  # process 2 differs in its second fact
        other = x.copy()
        other[1] += 1
        return np.stack([x, x, other])

    monkeypatch.setattr(distributed, "gather", two_more)
    with pytest.raises(ConfigError, match="the data of process 2 differs from that of process 0"):
        distributed.require_equal({"the config": {"a": 1}, "the data": "x"})
