"""The main job: sample groups, verify, choose what to learn from, update. All effects of a run are in this file.

Killed at any instant and started again with the same command, a run goes on to the same weights, bit for bit on the
same mesh and backend: everything that decides is in the checkpoint or a function of (seed, step).
"""

import copy
import logging
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
from rlvr_jax import metrics as metric
from rlvr_jax import parts as part
from rlvr_jax import replay, report
from rlvr_jax import step_metrics as observe
from rlvr_jax import strategies as strategy_room
from rlvr_jax.advantages import advantages
from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.config import Config
from rlvr_jax.critic import make_critic
from rlvr_jax.evaluate import evaluate
from rlvr_jax.rollout.book import Finished
from rlvr_jax.run_folder import only_one, refuse_changes
from rlvr_jax.state import abstract_state, init_state, policy_optimizer, weights_sha256
from rlvr_jax.strategies.mix import Mixer, build_mixer
from rlvr_jax.types import Rollout, TrainState, UpdateBatch
from rlvr_jax.update import make_update

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


def train(config: Config | Mapping[str, Any] | str | Path, *, rewards: Sequence[Any] | None = None, strategies: Sequence[Any] | None = None,
          overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Trains, or continues, the run of ``config`` and returns its summary.

    Args:
      config: a Config, a mapping of the YAML's form, or a YAML file.
      rewards: functions ``(text, answer, **fields) -> float | bool | None`` instead of the configured rewards.
      strategies: like the config's ``strategies``; Strategy objects are allowed too.
      overrides: ``a.b=value`` strings, for a mapping or a file.

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
    build_mixer(config.data.mixer.name, [1.0] * len(config.data.domains), **config.data.mixer.settings())
    with only_one(Path(config.run_dir)), part.build(config, rewards) as parts, _Loop(parts, strategies) as loop:
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
    def __init__(self, parts: part.Parts, strategies: Sequence[Any] | None):
        config = self.config = parts.config
        self.parts, self.run_dir = parts, Path(config.run_dir or "runs/default")
        self.strategy = strategy_room.build(list(config.strategies if strategies is None else strategies))
        self.compiles = observe.CompileCount()
        self.optimizer, self.critic = policy_optimizer(config), make_critic(config, parts.model)
        self.update = make_update(parts.model, config, self.strategy, self.optimizer, parts.mesh)
        self.engine = parts.engine(record_entropy=self.strategy.needs_entropy)
        self.eval_engine = parts.eval_engine()
        self.decode = parts.tokenizer.decode
        self.checkpoints = Checkpoints(self.run_dir, config.train.max_to_keep)
        self.stop_signal: int | None = None
        self.told: set[str] = set()
        self.clock: list[float] = []  # of the running step: rollout begins, ends; verdicts in; update done

    def __enter__(self) -> "_Loop":
        self._handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)} if _in_main_thread() else {}
        return self

    def __exit__(self, *error: object) -> None:
        for s, handler in self._handlers.items():
            signal.signal(s, handler)
        self.checkpoints.close()
        self.compiles.close()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.stop_signal is not None:  # a second Ctrl-C does not wait for the step
            raise KeyboardInterrupt
        self.stop_signal = number
        print(f"\n{signal.Signals(number).name}: finishing this step and saving; the same command goes on from there", file=sys.stderr)

    def run(self) -> dict[str, Any]:
        config, started = self.config, time.monotonic()
        state, host, record = self._start()
        base = record.seconds
        ref_params = self.parts.params() if config.algorithm.kl_coef else None
        writer = metric.Writer(self.run_dir, record.step if record.resumed_from_step else None, enabled=jax.process_index() == 0)
        pending: tuple[int, dict[str, Any]] | None = None
        with writer, metric.Progress(config.train.steps, record.step) as progress:
            if not record.eval and config.eval.prompts_per_domain:
                self._evaluate(state.params, record, progress)
                writer.write(0, observe.eval_metrics(record.eval["0"]) | {"compiles": self.compiles.count})
            while record.step < config.train.steps and self.stop_signal is None:
                state, host, values = self._step(state, host, record, ref_params, writer)
                self._tell_unknown(progress, "train", record.step)
                if pending:  # one step late, so that the device never waits for the host
                    self._write(writer, progress, record, *pending)
                pending = (record.step, values)
                record.seconds = base + time.monotonic() - started
                out_of_time = config.train.max_seconds is not None and time.monotonic() - started > config.train.max_seconds
                last = record.step == config.train.steps
                if config.eval.prompts_per_domain and (last or record.step % config.train.eval_every == 0):
                    self._evaluate(state.params, record, progress)
                    values |= observe.eval_metrics(record.eval[str(record.step)])
                if last or out_of_time or self.stop_signal is not None or self._save_due(record):
                    self._write(writer, progress, record, *pending)
                    pending = None
                    self._save(state, host, record)
                if out_of_time:
                    break
            if pending:
                self._write(writer, progress, record, *pending)
            self._save(state, host, record)
        self.checkpoints.wait()
        summary = self._summary(state, record)
        metric.write_summary(self.run_dir, summary)
        report.build(self.run_dir)
        return summary

    def _start(self) -> tuple[TrainState, dict[str, Any], Record]:
        """Fresh state, or the newest checkpoint's."""
        parts, config = self.parts, self.config
        host = self._fresh_host()
        abstract = abstract_state(parts.model, self.optimizer, self.strategy, parts.mesh, self.critic)
        saved = self.checkpoints.record()
        if saved is not None:
            refuse_changes(saved["config"], config)
            restored = self.checkpoints.restore(abstract, host)
            assert restored is not None  # its record has just been read
            state, host, got = restored
            record = Record(**got["record"])
            record.data = parts.dataset.train.restore(record.data)
            record.resumed_from_step = record.step
            log.info("resumed %s at step %d", self.run_dir, record.step)
            return state, host, record
        self.run_dir.mkdir(parents=True, exist_ok=True)
        metric.write_atomic(self.run_dir / "config.yaml", configs.dump(config).encode())
        metric.write_environment(self.run_dir, sys.argv, devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}", backend=jax.default_backend())
        parts.tokenizer.hf.save_pretrained(self.run_dir / "tokenizer")
        state = init_state(parts.params(), parts.model, self.optimizer, self.strategy, parts.mesh, self.critic)
        return state, host, Record(data=parts.dataset.train.init(), mixer=parts.mixer.init())

    def _fresh_host(self) -> dict[str, Any]:
        c = self.config
        if c.replay is None:
            return {}
        return {"replay": replay.init(c.replay.capacity or c.train.prompts_per_step, c.rollout.samples_per_prompt, part.row_length(c),
                                      entropy=self.engine.sampling.record_entropy)}

    def _step(self, state: TrainState, host: dict[str, Any], record: Record, ref_params: Any, writer: metric.Writer) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
        """One step of the flow; returns metrics whose device part is still being computed."""
        config, step = self.config, record.step
        G = config.rollout.samples_per_prompt
        mixer = self.parts.mixer
        proportions, signal = mixer.proportions(record.mixer, step), mixer.signal(record.mixer, step) if mixer.signal else None
        rows, record.data = self.parts.dataset.train.take(record.data, config.train.prompts_per_step, proportions)
        # The next prompts were drawn while the device still updated; from here on its time is the rollout's.
        jax.block_until_ready(state.params)
        self.clock.append(time.monotonic())
        clock = self.clock = [time.monotonic()]
        tick = lambda: clock.append(time.monotonic())  # noqa: E731
        row_of = [r for r in rows for _ in range(G)]
        rollout, texts, tickets = self._rollout(state.params, rows, row_of, step)
        tick()
        reward, correct, valid = self.parts.judge.collect(row_of, tickets)
        tick()
        values = observe.rollout_metrics(rollout, reward, correct, valid, self.parts.dataset.names)
        domain = np.array([r.domain for r in rows], np.int32)
        record.mixer = _observe(mixer, record.mixer, config.algorithm.advantage, reward.reshape(-1, G), valid.reshape(-1, G), domain, step)
        batch = to_batch(rollout, reward, correct, valid, domain)
        if config.replay is not None:
            batch, buffer, replayed = replay.apply(host["replay"], batch, prompt_id=np.array([r.prompt_id for r in rows], np.int32), step=step)
            host, values = {"replay": buffer}, values | metric.means(replayed)
        state, sums = self.update(state, batch, part.stream_key(config.seed, step, "update"), ref_params)
        record.step += 1
        record.generated_tokens += int(rollout.response_length.sum())
        writer.write_prompts(record.step, [r.prompt_id for r in rows])
        if record.step % config.train.samples_every == 0 or record.step == 1:
            writer.write_samples(record.step, observe.samples(row_of, texts, reward, valid, G))
        values |= observe.mix_metrics(rows, proportions, signal, self.parts.dataset.names)
        values |= {f"verify/{k}": v for k, v in self.parts.judge.pool.counters.items()}
        return state, host, values | {"sums": sums, "clock": clock}

    def _rollout(self, params: Any, rows: Sequence[Any], row_of: Sequence[Any], step: int) -> tuple[Rollout, list[str], list[list[int]]]:
        """Samples all rows; each is decoded and handed to the verifiers when it ends, while others still decode."""
        texts, tickets = [""] * len(row_of), [[0]] * len(row_of)

        def judge(finished: Sequence[Finished]) -> None:
            for row in finished:
                texts[row.row] = self.decode(row.tokens)
                tickets[row.row] = self.parts.judge.submit(row_of[row.row], texts[row.row])

        self.engine.update_weights(params, step)
        rollout = self.engine.generate([list(r.token_ids) for r in rows], np.array([r.prompt_id for r in rows]), np.array([r.domain for r in rows]),
                                       self.config.rollout.samples_per_prompt, self.config.seed, step, on_rows=judge)
        self.engine.release()  # the update may have the memory
        return rollout, texts, tickets

    def _write(self, writer: metric.Writer, progress: metric.Progress, record: Record, step: int, values: dict[str, Any]) -> None:
        sums, clock = values.pop("sums"), values.pop("clock")
        sums = jax.device_get(sums)
        if len(clock) < 4:
            clock.append(time.monotonic())
        values |= metric.means(sums)
        record.updated_tokens += int(values["tokens/updated"])
        values |= {"time/rollout": clock[1] - clock[0], "time/verify": clock[2] - clock[1], "time/update": clock[3] - clock[2],
                   "time/step": clock[3] - clock[0], "tokens_per_second": values["tokens/generated"] / (clock[3] - clock[0]),
                   "tokens/generated_total": record.generated_tokens, "tokens/updated_total": record.updated_tokens, "compiles": self.compiles.count}
        writer.write(step, values)
        progress.update(step, values)

    def _evaluate(self, params: Any, record: Record, progress: metric.Progress) -> None:
        e = self.config.eval
        scores = evaluate(self.eval_engine, params, self.parts.dataset.eval, self.parts.judge, self.decode, samples=e.samples_per_prompt, batch_prompts=e.batch_prompts)
        record.eval[str(record.step)] = {name: s.accuracy for name, s in scores.items()}
        self._tell_unknown(progress, "evaluation", record.step)
        progress.log(f"evaluation at step {record.step}: " + "  ".join(f"{n} {s.accuracy:.1%}{observe.unknown(s)}" for n, s in scores.items()))

    def _tell_unknown(self, progress: metric.Progress, during: str, step: int) -> None:
        """Each new reason why answers could not be judged is told once; how many, every step, is a metric."""
        new = {reason: n for reason, n in self.parts.judge.take_reasons().items() if reason not in self.told}
        for reason, n in list(new.items())[:3]:
            progress.log(f"{during} {step}: no verdict on {n} answer{'s' * (n > 1)}, not learned from: {reason}")
        self.told |= new.keys()

    def _save_due(self, record: Record) -> bool:
        """Every save_every steps, and when an evaluation was the best so far."""
        scores = {int(s): float(np.mean(list(v.values()))) for s, v in record.eval.items()}
        best = record.step in scores and scores[record.step] >= max(scores.values())
        return record.step % self.config.train.save_every == 0 or best

    def _save(self, state: TrainState, host: dict[str, Any], record: Record) -> None:
        scores = record.eval.get(str(record.step))
        # A copy: the save goes on in the background while the next step changes the record.
        saved = {"record": copy.deepcopy(record.__dict__), "config": self.config.model_dump(mode="json")}
        self.checkpoints.save(record.step, state, host, saved, None if not scores else float(np.mean(list(scores.values()))))

    def _summary(self, state: TrainState, record: Record) -> dict[str, Any]:
        steps = sorted(map(int, record.eval))
        finished = record.step >= self.config.train.steps
        return {
            "eval": {"before": record.eval[str(steps[0])] if steps else {}, "after": record.eval[str(steps[-1])] if steps else {}},
            "steps": record.step, "finished": finished, "seconds": round(record.seconds, 3), "generated_tokens": record.generated_tokens,
            "updated_tokens": record.updated_tokens, "compiles": self.compiles.count, "resumed_from_step": record.resumed_from_step,
            "stopped_by": None if self.stop_signal is None else signal.Signals(self.stop_signal).name,
            "weights_sha256": weights_sha256(state.params)}


_advantages = jax.jit(advantages, static_argnums=0)


def _observe(mixer: Mixer, state: Any, estimator: str, reward: np.ndarray, valid: np.ndarray, domain: np.ndarray, step: int) -> Any:
    """Tells the mixer of this step's fresh groups, before any replay: ``reward, valid [N, G]``, ``domain [N]``."""
    if mixer.signal is None:
        return state
    seen = {"reward": reward, "valid": valid}
    if estimator != "gae":  # a critic's advantages come later, in the update; mixers that read them are refused
        seen["advantage"] = np.asarray(_advantages(estimator, reward, valid))
    for d in np.unique(domain):
        of = domain == d
        state = mixer.observe(state, int(d), {name: x[of] for name, x in seen.items()} | {"step": step})
    return state


def to_batch(rollout: Rollout, reward: Any, correct: Any, valid: Any, domain: Any) -> UpdateBatch:
    """Fresh rows and their verdicts, as NumPy arrays: ``reward, correct, valid [B]``, ``domain [N]``."""
    return UpdateBatch(
        tokens=rollout.tokens, prompt_length=rollout.prompt_length, response_length=rollout.response_length, logprob=rollout.logprob,
        behavior_logprob=rollout.behavior_logprob, entropy=rollout.entropy, reward=reward, valid=valid, correct=correct,
        truncated=rollout.truncated, policy_step=rollout.policy_step, domain=domain)


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


class _Callable(types.ModuleType):
    # ``rlvr_jax.train`` is this module; a notebook calls it: rlvr_jax.train(config).
    __call__ = staticmethod(train)


sys.modules[__name__].__class__ = _Callable
