"""The main job: sample groups, verify, choose what to learn from, update. All effects of a run are in this file.

Killed at any instant and started again with the same command, a run goes on to the same weights, bit for bit on the
same mesh and backend: everything that decides is in the checkpoint or a function of (seed, step).
"""

import contextlib
import copy
import json
import logging
import math
import signal
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlvr_jax import config as configs
from rlvr_jax import distributed, page, pairing, report
from rlvr_jax import metrics as metric
from rlvr_jax import parts as part
from rlvr_jax import step_metrics as observe
from rlvr_jax import strategies as strategy_room
from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.collect import Collector
from rlvr_jax.config import Config
from rlvr_jax.critic import make_critic
from rlvr_jax.evaluate import evaluate
from rlvr_jax.records import write_json
from rlvr_jax.run_folder import RunFolder, only_one, refuse_changes
from rlvr_jax.state import abstract_state, init_state, policy_optimizer, weights_sha256
from rlvr_jax.stopping import NothingLearned, Stop, nothing_learned
from rlvr_jax.strategies.mix import build_mixer
from rlvr_jax.types import TrainState
from rlvr_jax.update import make_update
from rlvr_jax.watchdog import Watchdog

log = logging.getLogger(__name__)

@dataclass
class Record:
    """What the host remembers beside the device state; saved as JSON in every checkpoint."""

    step: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    mixer: dict[str, Any] = field(default_factory=dict)
    eval: dict[str, dict[str, float]] = field(default_factory=dict)
    generated_tokens: int = 0
    updated_tokens: int = 0
    seconds: float = 0.0
    resumed_from_step: int = 0
    barren: int = 0
    """Steps in a row, up to this one, that taught nothing because something is broken."""


def train(config: Config | Mapping[str, Any] | str | Path, *, rewards: Sequence[Any] | None = None, strategies: Sequence[Any] | None = None,
          overrides: Sequence[str] = (), programs: dict[Any, Any] | None = None) -> dict[str, Any]:
    """Trains, or continues, the run of ``config`` and returns its summary.

    Args:
      config: a Config, a mapping of the YAML's form, or a YAML file.
      rewards: functions ``(text, answer, **fields) -> float | bool | None`` instead of the configured rewards.
      strategies: like the config's ``strategies``; Strategy objects are allowed too.
      overrides: ``a.b=value`` strings, for a mapping or a file.
      programs: a dict that keeps what is compiled for the next run of this process.

    Returns:
      The content of ``summary.json``.

    Raises:
      ConfigError: the configuration, or what it names, cannot be used.
    """
    config = as_config(config, overrides)
    configs.check_for_training(config)
    assert config.run_dir is not None
    # Before a folder is made: what can be refused by its name alone.
    strategy = strategy_room.build(list(config.strategies if strategies is None else strategies))
    if strategy.needs_groups and config.rollout.samples_per_prompt < 2:
        raise configs.ConfigError("strategies: they compare the samples of one prompt, and rollout.samples_per_prompt is 1; use at least 2, or strategies of single rows")
    build_mixer(config.data.mixer.name, [1.0] * len(config.data.trained), **config.data.mixer.settings())
    with (only_one(config.run_dir, distributed.first()) as folder, part.build(config, rewards, programs) as parts,
          Watchdog(config.train.step_limit_seconds) as watchdog, _Loop(parts, strategies, folder, watchdog) as loop):
        return loop.run()


def as_config(config: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> Config:
    if isinstance(config, Config):
        tree = config.model_dump(mode="json")
    elif isinstance(config, Mapping):
        tree = dict(config)
    else:
        return configs.load(config, overrides)
    tree = configs.apply_overrides(tree, overrides)
    return configs.validate(tree | {"run_dir": tree.get("run_dir") or "runs/default"})


class _Loop:
    def __init__(self, parts: part.Parts, strategies: Sequence[Any] | None, folder: RunFolder, watchdog: Watchdog):
        config = self.config = parts.config
        self.parts, self.folder, self.run_dir, self.watchdog, self.first = parts, folder, folder.local, watchdog, distributed.first()
        self.strategy = strategy_room.build(list(config.strategies if strategies is None else strategies))
        self.compiles = observe.CompileCount()
        self.optimizer, self.critic = policy_optimizer(config), make_critic(config, parts.model)
        make = lambda: make_update(parts.model, config, self.strategy, self.optimizer, parts.mesh)  # noqa: E731
        self.update = parts.program(compiled_in(config), make) if strategies is None else make()
        self.collector = Collector(parts, entropy=self.strategy.needs_entropy)
        self.eval_engine = parts.eval_engine()
        self.checkpoints = Checkpoints(config.run_dir or "runs/default", config.train.max_to_keep)
        self.stop = Stop()
        self.told: set[str] = set()
        self.saved = time.monotonic()
        self.clock: list[float] = []  # of the last step: device free, update begins, device free again

    def __enter__(self) -> "_Loop":
        self.stop.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.__exit__(*error)
        self.compiles.close()
        with contextlib.suppress(Exception) if error[0] else contextlib.nullcontext():  # it would hide the first error behind its own
            self.checkpoints.close()

    def run(self) -> dict[str, Any]:
        config, started = self.config, time.monotonic()
        ref_params = self.parts.params() if config.algorithm.kl_coef else None
        state, host, record = self._start(ref_params)
        base = record.seconds
        writer = metric.Writer(self.run_dir, record.step if record.resumed_from_step else None, enabled=self.first)
        pending: tuple[int, dict[str, Any]] | None = None
        stop, _ = self._stop(started)
        with writer, metric.Progress(config.train.steps, record.step, enabled=self.first) as progress:
            for warning in self.parts.dataset.warnings:
                progress.log(f"data: {warning}")
            if not record.eval and config.eval.prompts_per_domain:
                writer.write(0, self._evaluate(state.params, record, progress) | {"compiles": self.compiles.count})
            while not self._at_end(record) and not stop:
                self.watchdog.feed(f"step {record.step + 1}")
                state, host, values = self._step(state, host, record, ref_params, writer, progress)
                self._tell_unknown(progress, "train", record.step)
                self.checkpoints.check()
                if pending:  # one step late, so that the device never waits for the host
                    self._write(writer, progress, record, *pending)
                pending = (record.step, values)
                record.seconds = base + time.monotonic() - started
                last = self._at_end(record, values["sums"])
                if config.eval.prompts_per_domain and (last or record.step % config.train.eval_every == 0):
                    values |= self._evaluate(state.params, record, progress)
                stop, late = self._stop(started)
                if last or stop or late or self._save_due(record):
                    self._write(writer, progress, record, *pending)
                    pending = None
                    self._save(state, host, record)
            if pending:
                self._write(writer, progress, record, *pending)
            self._save(state, host, record)
        self.checkpoints.wait()
        summary = self._summary(state, record)
        if self.first:
            metric.write_summary(self.run_dir, summary)
            report.build(self.run_dir)
        return summary

    def _at_end(self, record: Record, unwritten: Mapping[str, Any] | None = None) -> bool:
        """Whether train.steps or a token budget is reached; ``unwritten``: sums of a step that the record does not count yet."""
        limit = self.config.train
        if record.step >= limit.steps or record.generated_tokens >= (limit.generated_tokens or math.inf):
            return True
        if limit.updated_tokens is None:  # else this waits for the device: only its count decides
            return False
        more = 0 if unwritten is None else int(metric.means({"n": jax.device_get(unwritten["tokens/updated"])})["n"])
        return record.updated_tokens + more >= limit.updated_tokens

    def _stop(self, started: float) -> tuple[bool, bool]:
        """Whether any process got a signal or is out of time, and whether the last save is too long ago for any of them; all
        processes get the same answers, so they stop, and save, after the same step."""
        limit, now = self.config.train, time.monotonic()
        out_of_time = limit.max_seconds is not None and now - started > limit.max_seconds
        late = now - self.saved > limit.save_seconds
        number = distributed.largest(2 + self.stop.signal if self.stop.signal else 2 if out_of_time else int(late))
        if number > 2:
            self.stop.signal = number - 2
        return number > 1, number > 0

    def _start(self, ref_params: Any) -> tuple[TrainState, dict[str, Any], Record]:
        """Fresh state, or the newest checkpoint's. ``ref_params``: of the reference model, if the run has one."""
        parts, config = self.parts, self.config
        distributed.require_equal({"the config": config, "the versions": metric.versions(), "the data": parts.dataset.fingerprint})
        host = self.collector.init()
        abstract = abstract_state(parts.model, self.optimizer, self.strategy, parts.mesh, self.critic, offload=config.mesh.offload_optimizer)
        saved = self.checkpoints.record()
        if saved is not None:
            refuse_changes(saved["config"], config)
            now = pairing.identity(config, None if ref_params is None else weights_sha256(ref_params), parts.dataset.eval)
            if self.first:
                pairing.refuse_others(page.read_json(self.run_dir / pairing.FILE), now, str(config.run_dir))
            self._greet(abstract, f"goes on after step {saved['record']['step']}")
            restored = self.checkpoints.restore(abstract, host)
            assert restored is not None  # its record has just been read
            state, host, got = restored
            record = Record(**got["record"])
            record.data = parts.dataset.train.restore(record.data)
            record.resumed_from_step = record.step
            distributed.require_equal({"the checkpoint that can be read": record.step})
            self.checkpoints.set_aside()
            log.info("resumed %s at step %d", config.run_dir, record.step)
            return state, host, record
        if self.first:
            metric.write_atomic(self.run_dir / "config.yaml", configs.dump(config).encode())
            metric.write_environment(self.run_dir, sys.argv, devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}", backend=jax.default_backend())
            parts.tokenizer.hf.save_pretrained(self.run_dir / "tokenizer")
        self._greet(abstract, f"{config.train.steps} steps")
        state = init_state(parts.params(), parts.model, self.optimizer, self.strategy, parts.mesh, self.critic, offload=config.mesh.offload_optimizer)
        identity = pairing.identity(config, weights_sha256(state.params), parts.dataset.eval)
        if self.first:
            write_json(self.run_dir / pairing.FILE, identity)
        return state, host, Record(data=parts.dataset.train.init(), mixer=parts.mixer.init())

    def _greet(self, state: TrainState, what: str) -> None:
        """What there is to see until the first evaluation or step is through."""
        if self.first:
            parameters = metric.count(sum(x.size for x in jax.tree.leaves(state.params)))
            metric.say(f"train: {self.config.model.path} ({parameters} parameters) on {self.parts.mesh.size} x {jax.devices()[0].device_kind}, {what}, in {self.config.run_dir}; "
                       "reading weights and compiling: the first evaluation and the first step take longest")

    def _step(self, state: TrainState, host: dict[str, Any], record: Record, ref_params: Any, writer: metric.Writer, progress: metric.Progress
              ) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
        """One step of the flow; returns metrics whose device part is still being computed."""
        config, step = self.config, record.step
        got = self.collector.step(state.params, host, record.data, record.mixer, step)
        if self.clock:
            self.clock.append(got.began)
        clock = self.clock = [got.began, time.monotonic()]
        record.data, record.mixer = got.data, got.mixer
        state, sums = self.update(state, got.batch, part.stream_key(config.seed, step, "update"), ref_params)
        record.step += 1
        record.generated_tokens += int(got.generated.rollout.response_length.sum())
        for note in got.notes:
            progress.log(note)
        writer.write_prompts(record.step, [r.prompt_id for r in got.generated.rows], [r.domain_name for r in got.generated.rows])
        if record.step % config.train.samples_every == 0 or record.step == 1:
            writer.write_samples(record.step, observe.samples(got.generated.rows, got.generated.texts, got.generated.reward, got.generated.valid))
        values = got.values | {f"time/{name}": s for name, s in got.seconds.items()} | {f"verify/{k}": v for k, v in self.parts.judge.counters.items()}
        # Written a step late: what the record has counted by then is one step more.
        return state, got.host, values | {"tokens/generated_total": record.generated_tokens, "sums": sums, "clock": clock}

    def _write(self, writer: metric.Writer, progress: metric.Progress, record: Record, step: int, values: dict[str, Any]) -> None:
        sums, clock = values.pop("sums"), values.pop("clock")
        sums = jax.device_get(sums)
        if len(clock) < 3:
            clock.append(time.monotonic())
        values |= metric.means(sums)
        record.updated_tokens += int(values["tokens/updated"])
        values |= {"time/update": clock[2] - clock[1], "time/step": clock[2] - clock[0], "tokens_per_second": values["tokens/generated"] / (clock[2] - clock[0]),
                   "tokens/updated_total": record.updated_tokens, "compiles": self.compiles.count}
        writer.write(step, values)
        progress.update(step, values)
        self._refuse_barren(progress, record, step, values)

    def _refuse_barren(self, progress: metric.Progress, record: Record, step: int, values: Mapping[str, Any]) -> None:
        """One step that is spoilt is passed over and told; a run that would go on so all night ends."""
        why, limit = nothing_learned(values, self.config.train.updates_per_batch), self.config.train.barren_steps
        record.barren = record.barren + 1 if why else 0
        if record.barren == 1:
            progress.log(f"step {step}: {why}; nothing was learned from it")
        if record.barren >= limit:
            raise NothingLearned(f"the last {limit} steps, up to {step}, taught nothing: {why}; look at rewards, strategies and optimizer.learning_rate "
                                 f"(train.barren_steps={limit} decides how many are borne); {self.checkpoints.newest()}")

    def _evaluate(self, params: Any, record: Record, progress: metric.Progress) -> dict[str, float]:
        """Scores the held-out prompts; accuracy goes into the record, all of it is returned as metrics."""
        e = self.config.eval
        self.watchdog.feed(f"evaluation at step {record.step}")
        scores = evaluate(self.eval_engine, params, self.parts.dataset.eval, self.parts.judge, self.parts.tokenizer.decode, samples=e.samples_per_prompt, batch_prompts=e.batch_prompts)
        record.eval[str(record.step)] = {name: s.accuracy for name, s in scores.items()}
        self._tell_unknown(progress, "evaluation", record.step)
        progress.log(f"evaluation at step {record.step}: " + "  ".join(f"{n} {s.accuracy:.1%}{observe.unknown(s)}" for n, s in scores.items()))
        return observe.eval_metrics(scores)

    def _tell_unknown(self, progress: metric.Progress, during: str, step: int) -> None:
        """Each new reason why answers could not be judged is told once; how many, every step, is a metric."""
        new = {reason: n for reason, n in self.parts.judge.take_reasons().items() if reason not in self.told}
        for reason, n in list(new.items())[:3]:
            progress.log(f"{during} {step}: no verdict on {n} answer{'s' * (n > 1)}, not learned from: {reason}", urgent=True)
        self.told |= new.keys()

    def _save_due(self, record: Record) -> bool:
        """Every save_every steps, and when an evaluation was the best so far."""
        scores = {int(s): float(np.mean(list(v.values()))) for s, v in record.eval.items()}
        best = record.step in scores and scores[record.step] >= max(scores.values())
        return record.step % self.config.train.save_every == 0 or best

    def _save(self, state: TrainState, host: dict[str, Any], record: Record) -> None:
        self.watchdog.feed(f"save of step {record.step}")
        if self.first:
            self.folder.push()  # before the checkpoint, so that whoever goes on from it finds the records of its steps
        scores = record.eval.get(str(record.step))
        # A copy: the save goes on in the background while the next step changes the record.
        saved = {"record": copy.deepcopy(record.__dict__), "config": self.config.model_dump(mode="json")}
        self.checkpoints.save(record.step, state, host, saved, None if not scores else float(np.mean(list(scores.values()))))
        self.saved = time.monotonic()

    def _summary(self, state: TrainState, record: Record) -> dict[str, Any]:
        steps = sorted(map(int, record.eval))
        finished = self._at_end(record)
        return {
            "eval": {"before": record.eval[str(steps[0])] if steps else {}, "after": record.eval[str(steps[-1])] if steps else {}},
            "steps": record.step, "finished": finished, "seconds": round(record.seconds, 3), "generated_tokens": record.generated_tokens,
            "updated_tokens": record.updated_tokens, "compiles": self.compiles.count, "resumed_from_step": record.resumed_from_step,
            "stopped_by": None if self.stop.signal is None else signal.Signals(self.stop.signal).name,
            "weights_sha256": weights_sha256(state.params)}


def compiled_in(config: Config) -> str:
    """All of a config that may be part of its compiled update; the seed is not, nor how long the run lasts at a constant rate."""
    host = {"save_every", "save_seconds", "barren_steps", "eval_every", "max_to_keep", "max_seconds", "samples_every", "generated_tokens", "updated_tokens", "step_limit_seconds"}
    train = host | ({"steps"} if config.optimizer.schedule == "constant" else set())
    tree = config.model_dump(mode="json", exclude={"train": train} | dict.fromkeys(("seed", "run_dir", "data", "rewards", "pool", "eval", "sft"), True))
    return json.dumps([tree, config.data.trained, config.data.max_prompt_length])


class _Callable(types.ModuleType):
    # ``rlvr_jax.train`` is this module; a notebook calls it: rlvr_jax.train(config).
    __call__ = staticmethod(train)


sys.modules[__name__].__class__ = _Callable
