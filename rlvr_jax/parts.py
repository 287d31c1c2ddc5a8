"""Builds what every command needs from a config: tokenizer, model, mesh, data, sampler, judge."""

import contextlib
import importlib.resources
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlvr_jax import data
from rlvr_jax.config import Config, ConfigError
from rlvr_jax.models import hf, known
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.models.hf_config import load_config
from rlvr_jax.models.tokenizer import load_tokenizer
from rlvr_jax.rewards import pool as pools
from rlvr_jax.rewards import registry
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine, length_buckets
from rlvr_jax.sharding import make_mesh
from rlvr_jax.state import check_model_divides
from rlvr_jax.strategies import mix

# A named random stream each, so that no two uses share a key: fold_in(fold_in(seed, step), stream).
STREAMS = {"update": 1, "init": 2}


def stream_key(seed: int, step: int, stream: str) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), STREAMS[stream])


def model_folder(config: Config) -> Path:
    """The Hugging Face folder of ``model.path``; a model of the hub is downloaded where the local cache lacks it.

    Raises:
      ConfigError: it does not exist, or cannot be had.
    """
    if config.model.path == "embedded":
        return Path(str(importlib.resources.files("rlvr_jax"))) / "embedded"
    if known.is_hub_id(config.model.path):
        try:
            return known.download(config.model.path)
        except hf.ModelError as e:
            raise ConfigError(f"model.path: {e}") from None
    folder = Path(os.path.expandvars(config.model.path)).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: no config.json in '{folder}'; give a Hugging Face model folder, the id of a model (Qwen/Qwen2.5-0.5B), or 'embedded'")
    return folder


@dataclass(frozen=True)
class Parts:
    config: Config
    folder: Path
    tokenizer: Any
    model: DecoderConfig
    mesh: jax.sharding.Mesh
    dataset: Any
    mixer: mix.Mixer
    judge: "Judge"

    def params(self) -> Any:
        return hf.load_params(self.folder, self.model, self.mesh)

    def engine(self, *, record_entropy: bool = False) -> LocalEngine:
        """The training sampler. Its rows have one length, so the update compiles once."""
        r = self.config.rollout
        return self._engine(SamplingParams(r.temperature, r.top_k, r.top_p, r.max_new_tokens, tuple(self.tokenizer.eos_ids), record_entropy or r.record_entropy,
                                           r.min_p, r.stop), total_length=row_length(self.config))

    def eval_engine(self) -> LocalEngine:
        """Evaluation's sampler: its own temperature, no truncation."""
        r = self.config.rollout
        return self._engine(SamplingParams(self.config.eval.temperature, max_new_tokens=r.max_new_tokens, eos_ids=tuple(self.tokenizer.eos_ids), stop=r.stop))

    def _engine(self, sampling: SamplingParams, **shape: Any) -> LocalEngine:
        return LocalEngine(self.model, sampling, self.mesh, compute_dtype=self.config.model.compute_dtype,
                           prompt_buckets=length_buckets(self.config.data.max_prompt_length), slots=self.config.rollout.slots, decode=self.tokenizer.decode, **shape)


def row_length(config: Config) -> int:
    """T of a training row; the longest prompt and response, rounded up so that it tiles."""
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    return -(-longest // 8) * 8


@contextlib.contextmanager
def build(config: Config, rewards: Sequence[Any] | None = None) -> Iterator[Parts]:
    """Parts for a config; verifier processes end with the context.

    Args:
      rewards: functions ``(text, answer, **fields) -> float`` that replace the configured rewards (notebooks).

    Raises:
      ConfigError: a file, model, verifier or mesh that cannot be used.
    """
    try:
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    folder = model_folder(config)
    tokenizer, model = load_tokenizer(folder), load_config(folder)
    try:
        check_model_divides(model, mesh)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    dataset = data.build(config, tokenizer)
    mixer = mix.build_mixer(config.data.mixer.name, dataset.weights, **config.data.mixer.settings())
    with Judge(config, dataset, rewards) as judge:
        yield Parts(config, folder, tokenizer, model, mesh, dataset, mixer, judge)


class Judge:
    """Texts to rewards: every row goes to the verifiers of its domain, in worker processes, and comes back in order."""

    def __init__(self, config: Config, dataset: Any, rewards: Sequence[Any] | None = None):
        self.recipes: list[Sequence[Mapping[Any, float]]] = []
        for domain, source in zip(config.data.domains.values(), dataset.train.sources):
            self.recipes.append([{fn: 1.0} for fn in rewards] if rewards else domain.rewards or config.rewards)
            first = source.order[0]
            for entry in self.recipes[-1]:
                (verifier, _), = entry.items()
                registry.check(self._verifier(first, verifier), first.fields)
        self.threshold = config.algorithm.success_threshold
        self.reasons: dict[str, int] = {}
        c = config.pool
        names = {registry.reference(self._verifier(source.order[0], v)) for source, recipe in zip(dataset.train.sources, self.recipes) for e in recipe for v in e}
        # Imported before the first row: a module that fails in a worker stops the run instead of judging every row unknown.
        self.pool = pools.Pool(c.workers, c.cpu_seconds, c.wall_seconds, c.memory_mb, preload=sorted(n for n in names if n))
        self.pool.start()

    def __call__(self, rows: Sequence[Any], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(reward [B] float32, correct [B] bool, valid [B] bool)``; an unknown verdict has reward 0 and is not valid.

        Why answers were unknown is counted in ``reasons`` (detail -> rows) until :meth:`take_reasons`.
        """
        return self.collect(rows, [self.submit(row, text) for row, text in zip(rows, texts)])

    def submit(self, row: Any, text: str) -> list[int]:
        """Queues one answer and returns at once: what :meth:`collect` wants for it."""
        return [self.pool.submit(pools.Job(self._verifier(row, verifier), text, row.answer, row.fields)) for entry in self.recipes[row.domain] for verifier in entry]

    def collect(self, rows: Sequence[Any], tickets: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Waits for the verdicts of submitted answers; returns what calling the judge does."""
        scored = self.pool.collect([t for of_row in tickets for t in of_row])
        for verdict in scored:
            if verdict.status == "unknown" and (verdict.detail in self.reasons or len(self.reasons) < 100):
                self.reasons[verdict.detail] = self.reasons.get(verdict.detail, 0) + 1
        verdicts = iter(scored)
        out = []
        for row in rows:
            recipe = self.recipes[row.domain]
            out.append(registry.combine(recipe, [next(verdicts) for _ in recipe], self.threshold))
        reward, correct, valid = zip(*out) if out else ((), (), ())
        return np.array(reward, np.float32), np.array(correct, bool), np.array(valid, bool)

    def take_reasons(self) -> dict[str, int]:
        """Details of the unknown verdicts since the last call, the most frequent first."""
        taken, self.reasons = self.reasons, {}
        return dict(sorted(taken.items(), key=lambda item: -item[1]))

    @staticmethod
    def _verifier(row: Any, verifier: Any) -> Any:
        """``verifier`` stands for what the row (its data set or task) asks for."""
        return row.verifier if verifier == "verifier" else verifier

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()
