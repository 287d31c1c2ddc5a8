"""``rlvr-jax bench step``: a whole GRPO step, rollout, rewards in worker processes and update, on a fixed workload."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import jax
import numpy as np

from rlvr_jax import config as configs
from rlvr_jax import replay, strategies
from rlvr_jax.bench.rollout import random_prompts
from rlvr_jax.bench.workloads import (
    GROUP,
    PROMPT,
    PROMPTS,
    RESPONSE,
    WORKLOADS,
    bandwidth,
    matmul_rate,
    rollout_seconds,
    update_flops,
)
from rlvr_jax.collect import to_batch
from rlvr_jax.models.decoder import init_params, param_axes
from rlvr_jax.rewards import pool
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.state import init_state, make_optimizer
from rlvr_jax.step_metrics import CompileCount
from rlvr_jax.strategies import prompts
from rlvr_jax.update import make_update


def bench_step(workload: str, micro_batch: int = 8, repeat: int | None = None) -> Iterator[dict[str, Any]]:
    """Measures one workload with random weights, 8 prompts x 8 samples of 128 tokens, float32.

    Keys: ``bench workload kept lengths dtype seconds tokens_per_s limit_fraction peak_mb`` as in ``bench update``, and
    ``rollout_s verify_s update_s compiles`` (in the timed steps: none). A second record, ``bookkeeping``: seconds, and share of the step, of what POPO and MoPPS do on
    the host for such a batch when half of its groups teach nothing. Answers are judged in two worker processes as they end; so that every row is
    learned from, the reward of the update is drawn, and the verdicts (random text: wrong) are only waited for.

    Raises:
      ValueError: unknown workload.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload '{workload}'; use {', '.join(WORKLOADS)}")
    repeat = repeat or {"smol": 1, "tinywide": 1, "mini": 5}[workload]
    rate, copy = matmul_rate(), bandwidth()
    yield {"bench": "matmul", "workload": workload, "dtype": "float32", "gflops": rate / 1e9}
    model = WORKLOADS[workload]
    with pool.Pool(2) as judge:
        step = _Step(workload, micro_batch, judge)
        step()
        compiled = CompileCount()
        times = [step() for _ in range(repeat)]
        compiled.close()
        bookkeeping = median(step.bookkeeping(t) for t in range(20))
    full = np.full((PROMPTS, GROUP), RESPONSE)
    limit = (rollout_seconds(model, PROMPT, full, rate, copy, 4) + update_flops(model, np.full(full.size, PROMPT), full.ravel()) / rate)
    seconds = median(sum(t) for t in times)
    rollout, verify, update = (median(t[i] for t in times) for i in range(3))
    yield {"bench": "step", "workload": workload, "kept": 1.0, "lengths": None, "dtype": "float32", "seconds": seconds, "tokens_per_s": full.sum() / seconds,
           "limit_fraction": limit / seconds, "rollout_s": rollout, "verify_s": verify, "update_s": update, "compiles": compiled.count}
    yield {"bench": "bookkeeping", "workload": workload, "seconds": bookkeeping, "share": bookkeeping / seconds}


class _Step:
    """Everything a step needs; called, it makes one and returns the seconds of rollout, verdicts and update."""

    def __init__(self, workload: str, micro_batch: int, judge: pool.Pool):
        self.model, self.judge = WORKLOADS[workload], judge
        config = configs.validate({
            "rollout": {"samples_per_prompt": GROUP, "max_new_tokens": RESPONSE}, "data": {"max_prompt_length": PROMPT, "prompts": {"kind": "mopps"}},
            "optimizer": {"learning_rate": 1e-6}, "replay": {"kind": "popo"}, "train": {"prompts_per_step": PROMPTS, "micro_batch": micro_batch}})
        strategy, optimizer, mesh = strategies.build([]), make_optimizer(config.optimizer, 1000), make_mesh(devices=jax.devices()[:1])
        params = jax.jit(lambda key: init_params(self.model, key))(jax.random.key(0))
        params = jax.device_put(params, shardings(mesh, param_axes(self.model), params))  # as every later step has them: or the second step compiles anew
        self.state = init_state(params, self.model, optimizer, strategy, mesh)
        self.update = make_update(self.model, config, strategy, optimizer, mesh)
        self.engine = LocalEngine(self.model, SamplingParams(max_new_tokens=RESPONSE), mesh, prompt_buckets=(PROMPT,), slots=PROMPTS * GROUP)
        self.prompts = random_prompts(self.model, PROMPTS, PROMPT)
        self.replay, self.chooser = replay.build(config, PROMPT + RESPONSE), prompts.build(config)
        assert self.replay is not None
        self.buffer, self.posteriors = self.replay.init(), self.chooser.init()

    def __call__(self) -> tuple[float, float, float]:
        start = time.perf_counter()
        tickets: list[int] = []

        def submit(rows: Any) -> None:
            tickets.extend(self.judge.submit(pool.Job("math", " ".join(map(str, row.tokens)), "1")) for row in rows)

        step = int(self.state.step)
        self.engine.update_weights(self.state.params, step)
        rollout = self.engine.generate(self.prompts, np.arange(PROMPTS), np.zeros(PROMPTS, int), GROUP, 0, step, on_rows=submit)
        self.engine.release()
        sampled = time.perf_counter()
        self.judge.collect(tickets)
        judged = time.perf_counter()
        reward = np.random.default_rng(step).random(PROMPTS * GROUP).astype(np.float32)
        self.batch = to_batch(rollout, reward, reward > 0.5, np.ones(len(reward), bool), np.zeros(PROMPTS, np.int32))
        self.state, sums = self.update(self.state, self.batch, jax.random.key(1))
        jax.block_until_ready(sums)
        return sampled - start, judged - sampled, time.perf_counter() - judged

    def bookkeeping(self, step: int) -> float:
        """Seconds to choose this step's prompts, learn from their verdicts, and fill half of the batch from the buffer."""
        assert self.replay is not None
        ids = np.random.default_rng(step).integers(0, 2**31, PROMPTS * self.chooser.candidates, np.int32)
        half = np.repeat(np.arange(PROMPTS) % 2 == 0, GROUP)
        batch = self.batch.replace(reward=np.where(half, 0, self.batch.reward))
        start = time.perf_counter()
        chosen, = self.chooser.propose(self.posteriors, 0, step, [ids], [PROMPTS])
        solved = np.asarray(self.batch.correct).reshape(PROMPTS, GROUP).sum(1)
        self.posteriors = self.chooser.observe(self.posteriors, ids[chosen.indices], solved, np.full(PROMPTS, GROUP), step)
        _, self.buffer, _ = self.replay.apply(self.buffer, batch, prompt_id=ids[chosen.indices], step=step)
        return time.perf_counter() - start
