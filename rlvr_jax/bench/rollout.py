"""``rlvr-jax bench rollout``: tokens a second of the sampler, at fixed lengths and at ragged ones."""

import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.bench.workloads import (
    GROUP,
    PROMPT,
    PROMPTS,
    RESPONSE,
    ROWS,
    WORKLOADS,
    bandwidth,
    matmul_rate,
    rollout_seconds,
    timed,
)
from rlvr_jax.models.decoder import DecoderConfig, init_params
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine

RAGGED_PROMPTS = 32
RAGGED_MEAN = 0.25
LONG_PROMPT, LONG_GROUP, LONG_RESPONSE = 512, 16, 8


def bench_rollout(workload: str, repeat: int | None = None, dtypes: tuple[str, ...] = ("float32",)) -> Iterator[dict[str, Any]]:
    """Measures one workload with random weights; yields one record per measurement. No row ends but by its limit.

    Keys: ``bench workload kept lengths dtype seconds tokens_per_s limit_fraction peak_mb``, as in ``bench update``.
    ``lengths``: None = 8 prompts x 8 samples of 128 tokens; 'geometric' = 32 prompts x 8 on 64 slots, each row with its
    own limit, mean 25% of 128, in random order (slots are given to rows in the order of the prompts, not by their limits).
    ``limit_fraction``: the time of the FLOPs at the matmul rate of this run, or of reading the weights once for every
    token of the longest row at its copy bandwidth, whichever is longer, over ``seconds``. ``process_s``: CPU seconds of
    the process, over the number of its cores.

    Raises:
      ValueError: unknown workload.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload '{workload}'; use {', '.join(WORKLOADS)}")
    repeat = repeat or {"smol": 1, "tinywide": 2, "mini": 9}[workload]
    copy = bandwidth()
    yield {"bench": "copy", "workload": workload, "gb_per_s": copy / 1e9}
    for dtype in dtypes:
        rate = matmul_rate(jnp.dtype(dtype))
        yield {"bench": "matmul", "workload": workload, "dtype": dtype, "gflops": rate / 1e9}
        run = _Sampler(workload, dtype, rate, copy)
        fixed = run.measure(np.full((PROMPTS, GROUP), RESPONSE), repeat)
        yield fixed
        ragged = run.measure(ragged_lengths(), repeat)
        yield ragged | {"ratio": ragged["tokens_per_s"] / fixed["tokens_per_s"]}
        yield run.shared_prefill(repeat)


def ragged_lengths(seed: int = 0) -> np.ndarray:
    """``[32, 8]`` limits, geometric with a mean of about a quarter of the longest answer."""
    drawn = np.random.default_rng(seed).geometric(1 / (RAGGED_MEAN * RESPONSE), (RAGGED_PROMPTS, GROUP))
    return np.clip(drawn, 1, RESPONSE)


class _Sampler:
    """An engine of a workload with random weights."""

    def __init__(self, workload: str, dtype: str, rate: float, copy: float):
        self.workload, self.dtype, self.rate, self.copy, self.model = workload, dtype, rate, copy, WORKLOADS[workload]
        self.params = jax.jit(lambda key: init_params(self.model, key))(jax.random.key(0))
        self.engine = self._engine(PROMPT, RESPONSE, ROWS)

    def _engine(self, prompt: int, response: int, slots: int) -> LocalEngine:
        engine = LocalEngine(self.model, SamplingParams(max_new_tokens=response), compute_dtype=self.dtype, prompt_buckets=(prompt,), slots=slots)
        engine.update_weights(self.params, 0)
        return engine

    def measure(self, cap: np.ndarray, repeat: int) -> dict[str, Any]:
        """Seconds to sample ``cap`` ([prompts, samples]) tokens; the first, untimed call compiles."""
        prompts = random_prompts(self.model, len(cap), PROMPT)
        args = (prompts, np.arange(len(cap)), np.zeros(len(cap), int), cap.shape[1], 0, 0)
        used: list[float] = []

        def run() -> Any:
            start = time.process_time()
            out = self.engine.generate(*args, max_new_tokens=cap.ravel()).tokens
            used.append((time.process_time() - start) / cores())
            return out

        run()
        compiled = self.engine.compiles
        used.clear()
        seconds, peak = timed(run, repeat, warm=0)
        limit = rollout_seconds(self.model, PROMPT, cap, self.rate, self.copy, jnp.dtype(self.dtype).itemsize)
        return {"bench": "rollout", "workload": self.workload, "kept": 1.0, "lengths": None if np.all(cap == RESPONSE) else "geometric", "dtype": self.dtype,
                "seconds": seconds, "tokens_per_s": float(cap.sum()) / seconds, "limit_fraction": limit / seconds, "peak_mb": peak,
                "process_s": float(np.median(used)), "compiles": self.engine.compiles - compiled}

    def shared_prefill(self, repeat: int) -> dict[str, Any]:
        """16 short answers to one prompt of 512 tokens, against 16 prompts that are each computed."""
        slots = LONG_GROUP
        engine = self._engine(LONG_PROMPT, LONG_RESPONSE, slots)
        one = random_prompts(self.model, 1, LONG_PROMPT)

        def run(n: int, G: int) -> float:
            call = lambda: engine.generate(one * n, np.arange(n), np.zeros(n, int), G, 0, 0).tokens  # noqa: E731
            return timed(call, repeat)[0]

        shared, alone = run(1, LONG_GROUP), run(LONG_GROUP, 1)
        return {"bench": "shared_prefill", "workload": self.workload, "dtype": self.dtype, "prompt": LONG_PROMPT, "samples": LONG_GROUP, "tokens": LONG_RESPONSE,
                "seconds": shared, "seconds_unshared": alone, "gain": alone / shared}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def random_prompts(model: DecoderConfig, n: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, model.vocab_size, (n, length)).tolist()
