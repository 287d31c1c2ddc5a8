"""``rlvr-jax bench update``: what an update costs by the share of rows that is kept, and by their lengths."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax import config as configs
from rlvr_jax import strategies
from rlvr_jax.bench.workloads import GROUP, PROMPT, PROMPTS, RESPONSE, ROWS, WORKLOADS, matmul_rate, timed, update_flops
from rlvr_jax.models.decoder import init_params
from rlvr_jax.sharding import make_mesh
from rlvr_jax.state import init_state, make_optimizer
from rlvr_jax.types import UpdateBatch
from rlvr_jax.update import make_update

RAGGED_MEAN = 0.3
RAGGED_STEPS = 50


def bench_update(workload: str, micro_batch: int = 4, repeat: int | None = None, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Iterator[dict[str, Any]]:
    """Measures one workload; yields one record per measurement.

    Keys: ``bench workload kept lengths dtype seconds tokens_per_s limit_fraction peak_mb`` and ``ratio`` (seconds over
    those of all rows at full length). ``kept``: share of the rows that is live, the others have no verdict. ``lengths``:
    None = every response has 128 tokens, 'geometric' = mean 30% of that. ``tokens_per_s`` counts response tokens of the
    whole batch. ``limit_fraction``: time the float32 FLOPs of the live rows take at the matmul rate of this run, over
    ``seconds``.

    Raises:
      ValueError: unknown workload.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload '{workload}'; use {', '.join(WORKLOADS)}")
    repeat = repeat or {"smol": 1, "tinywide": 2, "mini": 15}[workload]
    rate = matmul_rate()
    yield {"bench": "matmul", "workload": workload, "dtype": "float32", "gflops": rate / 1e9}
    for dtype in dtypes:
        if dtype == "bfloat16":
            yield {"bench": "matmul", "workload": workload, "dtype": dtype, "gflops": matmul_rate(jnp.bfloat16) / 1e9}
        run = _Update(workload, micro_batch, dtype, packing=True)
        full = None
        for rows in (ROWS, ROWS // 2, ROWS // 4, ROWS // 10) if dtype == "float32" else (ROWS,):
            record = run.measure(_batch(workload, rows), rate, repeat)
            full = full or record["seconds"]
            yield record | {"ratio": record["seconds"] / full}
        if dtype == "float32":
            yield from _ragged(workload, micro_batch, run, rate, repeat, full)


def _ragged(workload: str, micro_batch: int, run: "_Update", rate: float, repeat: int, full: float | None) -> Iterator[dict[str, Any]]:
    """Packed against padded, and whether new lengths compile anything."""
    batch = _batch(workload, ROWS, seed=1)
    real = int(np.sum(batch.prompt_length + batch.response_length))
    padded = _Update(workload, micro_batch, "float32", packing=False).measure(batch, rate, repeat)
    yield padded | {"packing": False, "ratio": padded["seconds"] / (full or 1)}
    packed = run.measure(batch, rate, repeat)
    ideal = ROWS * (PROMPT + RESPONSE) / real
    gain = padded["seconds"] / packed["seconds"]
    yield packed | {"ratio": packed["seconds"] / (full or 1), "gain_over_padded": gain, "ideal_gain": ideal, "gain_fraction": gain / ideal}
    if workload == "mini":
        before = run.update.jitted._cache_size()
        rng = np.random.default_rng(2)
        for i in range(RAGGED_STEPS):
            run(_batch(workload, int(rng.integers(1, ROWS + 1)), seed=10 + i))
        yield {"bench": "update", "workload": workload, "lengths": "geometric", "steps": RAGGED_STEPS, "compiles": run.update.jitted._cache_size() - before}


class _Update:
    """The compiled update of a workload with random weights, and the state it goes on with."""

    def __init__(self, workload: str, micro_batch: int, dtype: str, packing: bool):
        self.workload, self.dtype, self.model = workload, dtype, WORKLOADS[workload]
        config = configs.validate({
            "rollout": {"samples_per_prompt": GROUP, "max_new_tokens": RESPONSE}, "data": {"max_prompt_length": PROMPT},
            "optimizer": {"learning_rate": 1e-6}, "model": {"compute_dtype": dtype, "remat": "none"},
            "train": {"prompts_per_step": PROMPTS, "micro_batch": micro_batch, "packing": packing}})
        strategy, optimizer, mesh = strategies.build([]), make_optimizer(config.optimizer, 1000), make_mesh(devices=jax.devices()[:1])
        params = jax.jit(lambda key: init_params(self.model, key))(jax.random.key(0))
        self.state = init_state(params, self.model, optimizer, strategy, mesh)
        self.update: Any = make_update(self.model, config, strategy, optimizer, mesh)
        self.key = jax.random.key(1)
        jax.block_until_ready(self(_batch(workload, 1)))  # compiles; one row is as good as all

    def __call__(self, batch: UpdateBatch) -> Any:
        self.state, sums = self.update(self.state, batch.replace(policy_step=np.full(ROWS, int(self.state.step), np.int32)), self.key)
        return sums

    def measure(self, batch: UpdateBatch, rate: float, repeat: int) -> dict[str, Any]:
        seconds, peak = timed(lambda: self(batch), repeat, warm=0)
        alive = np.asarray(batch.valid)
        flops = update_flops(self.model, np.asarray(batch.prompt_length)[alive], np.asarray(batch.response_length)[alive])
        ragged = bool(np.any(np.asarray(batch.response_length) != RESPONSE))
        return {"bench": "update", "workload": self.workload, "kept": float(alive.mean()), "lengths": "geometric" if ragged else None, "dtype": self.dtype,
                "seconds": seconds, "tokens_per_s": float(np.sum(batch.response_length)) / seconds, "limit_fraction": flops / rate / seconds, "peak_mb": peak}


def _batch(workload: str, live: int, seed: int | None = None) -> UpdateBatch:
    """64 rows of which the first ``live`` have a verdict; ragged with a seed. Every group is effective."""
    rng = np.random.default_rng(0 if seed is None else seed)
    T, V = PROMPT + RESPONSE, WORKLOADS[workload].vocab_size
    response = np.full(ROWS, RESPONSE) if seed is None else np.clip(rng.geometric(1 / (RAGGED_MEAN * RESPONSE), ROWS), 1, RESPONSE)
    reward = rng.random(ROWS).astype(np.float32)
    logprob = np.full((ROWS, T), -np.log(V), np.float32)
    fields: dict[str, Any] = dict(
        tokens=rng.integers(0, V, (ROWS, T)).astype(np.int32), prompt_length=np.full(ROWS, PROMPT, np.int32), response_length=response.astype(np.int32),
        logprob=logprob, behavior_logprob=logprob, entropy=None, reward=reward, valid=np.arange(ROWS) < live, correct=reward > 0.5,
        truncated=np.zeros(ROWS, bool), policy_step=np.zeros(ROWS, np.int32), domain=np.zeros(PROMPTS, np.int32))
    return UpdateBatch(**fields)
