"""Builds what every command needs from a config: tokenizer, model, mesh, data, sampler, judge."""

import contextlib
import importlib.resources
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlvr_jax import data, distributed, remote
from rlvr_jax.config import Config, ConfigError
from rlvr_jax.models import hf, known
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.models.hf_config import load_config
from rlvr_jax.models.tokenizer import load_tokenizer
from rlvr_jax.rewards import pool as pools
from rlvr_jax.rewards import registry
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine, length_buckets
from rlvr_jax.sharding import check_host_memory, make_mesh
from rlvr_jax.state import check_model_divides
from rlvr_jax.strategies import mix

# A named random stream each, so that no two uses share a key: fold_in(fold_in(seed, step), stream).
STREAMS = {"update": 1, "init": 2}


def stream_key(seed: int, step: int, stream: str) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), STREAMS[stream])


def model_folder(config: Config) -> Path:
    """The Hugging Face folder of ``model.path``; one in a bucket is copied to this machine first (and once), a model of the hub
    is downloaded where the local cache lacks it.

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
    path = os.path.expandvars(config.model.path)
    folder = remote.local_folder(path, _part_of_model) if remote.is_remote(path) else Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: no config.json in '{path}'; give a Hugging Face model folder, the id of a model (Qwen/Qwen2.5-0.5B), or 'embedded'")
    return folder


def _part_of_model(name: str) -> bool:
    return name in hf.COPIED or name.endswith((".safetensors", ".safetensors.index.json")) or name == "config.json"


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
    programs: dict[Any, Any] = field(default_factory=dict)
    """What has been compiled, by everything that is compiled in; runs of one process may share it."""

    def program(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, or what an earlier run made for the same key."""
        if key not in self.programs:
            self.programs[key] = make()
        return self.programs[key]

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
        c = self.config
        make = lambda: LocalEngine(self.model, sampling, self.mesh, compute_dtype=c.model.compute_dtype,  # noqa: E731
                                   prompt_buckets=length_buckets(c.data.max_prompt_length), slots=c.rollout.slots, decode=self.tokenizer.decode, **shape)
        return self.program((str(self.folder), sampling, self.mesh, c.model.compute_dtype, c.data.max_prompt_length, c.rollout.slots, *shape.items()), make)


def row_length(config: Config) -> int:
    """T of a training row; the longest prompt and response, rounded up so that it tiles."""
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    return -(-longest // 8) * 8


@contextlib.contextmanager
def build(config: Config, rewards: Sequence[Any] | None = None, programs: dict[Any, Any] | None = None) -> Iterator[Parts]:
    """Parts for a config; verifier processes end with the context.

    Args:
      rewards: functions ``(text, answer, **fields) -> float`` that replace the configured rewards (notebooks).
      programs: of earlier runs of this process.

    Raises:
      ConfigError: a file, model, verifier or mesh that cannot be used.
    """
    _check_names(config, rewards)
    try:
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        if config.mesh.offload_optimizer:
            check_host_memory(mesh)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    folder = model_folder(config)
    tokenizer, model = load_tokenizer(folder), load_config(folder)
    try:
        check_model_divides(model, mesh)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    dataset = data.build(config, tokenizer)
    # Without a domain to train on there is nothing to mix; no one will ask this mixer.
    mixer = mix.build_mixer(config.data.mixer.name, dataset.weights if dataset.names else [1.0], **config.data.mixer.settings())
    with Judge(config, dataset, rewards) as judge:
        yield Parts(config, folder, tokenizer, model, mesh, dataset, mixer, judge, {} if programs is None else programs)


def _check_names(config: Config, rewards: Sequence[Any] | None) -> None:
    """What a config names beside the model: a slip in it is told before a model is fetched, and a tokenizer read.

    Raises:
      ConfigError: a data file or verifier that is not there.
    """
    data.check(config)
    for domain in config.data.domains.values() if rewards is None else ():
        for name in {domain.verifier, *(name for entry in domain.rewards or config.rewards for name in entry)} - {None, "verifier", *registry.BUILTIN}:
            registry.resolve(str(name))


class Judge:
    """Texts to rewards: every row goes to the verifiers of its domain, in worker processes, and comes back in order.

    Of several processes each judges every n-th answer, in the order of submission, which is the same everywhere; all learn
    all verdicts, so a verifier that times out on one host alone makes its row unknown on every host.
    """

    def __init__(self, config: Config, dataset: Any, rewards: Sequence[Any] | None = None):
        self.recipes: list[Sequence[Mapping[Any, float]]] = []
        asked: set[Any] = set()
        for name, first in _first_rows(dataset).items():
            self.recipes.append([{fn: 1.0} for fn in rewards] if rewards else config.data.domains[name].rewards or config.rewards)
            for verifier in () if first is None else [v for entry in self.recipes[-1] for v in entry]:
                asked.add(self._verifier(first, verifier))
                registry.check(self._verifier(first, verifier), first.fields)
        self.threshold = config.algorithm.success_threshold
        self.reasons: dict[str, int] = {}
        self.details: list[str] = []
        """What the first verifier said of each answer of the last :meth:`collect`; '' where another process judged it."""
        self.counters: dict[str, int] = {}
        """Of the pools of all processes, as of the last :meth:`collect`."""
        self._submitted = 0
        c = config.pool
        names = {registry.reference(v) for v in asked}
        # Imported before the first row: a module that fails in a worker stops the run instead of judging every row unknown.
        self.pool = pools.Pool(c.workers, c.cpu_seconds, c.wall_seconds, c.memory_mb, preload=sorted(n for n in names if n))
        self.pool.start()

    def __call__(self, rows: Sequence[Any], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(reward [B] float32, correct [B] bool, valid [B] bool)``; an unknown verdict has reward 0 and is not valid.

        Why answers were unknown is counted in ``reasons`` (detail -> rows) until :meth:`take_reasons`.
        """
        return self.collect(rows, [self.submit(row, text) for row, text in zip(rows, texts)])

    def submit(self, row: Any, text: str) -> list[int]:
        """Queues one answer and returns at once: what :meth:`collect` wants for it; nothing where another process judges it."""
        self._submitted += 1
        if self._submitted % jax.process_count() != jax.process_index():
            return []
        return [self.pool.submit(pools.Job(self._verifier(row, verifier), text, row.answer, row.fields)) for entry in self.recipes[row.domain] for verifier in entry]

    def collect(self, rows: Sequence[Any], tickets: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Waits for the verdicts of submitted answers; returns what calling the judge does."""
        scored = self.pool.collect([t for of_row in tickets for t in of_row])
        for verdict in scored:
            if verdict.status == "unknown" and (verdict.detail in self.reasons or len(self.reasons) < 100):
                self.reasons[verdict.detail] = self.reasons.get(verdict.detail, 0) + 1
        verdicts = iter(scored)
        own = np.zeros((len(rows), 3), np.float32)  # 0 where another process judges
        self.details = [""] * len(rows)
        for i, (row, of_row) in enumerate(zip(rows, tickets)):
            if of_row:
                of_this = [next(verdicts) for _ in of_row]
                own[i], self.details[i] = registry.combine(self.recipes[row.domain], of_this, self.threshold), of_this[0].detail
        out, self.counters = _of_all(own, self.pool.counters)
        return out[:, 0], out[:, 1].astype(bool), out[:, 2].astype(bool)

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


def _first_rows(dataset: Any) -> dict[str, Any]:
    """A row of each domain, in the order in which rows number them; None for a domain without any."""
    trained = {source.name: source.order[0] for source in dataset.train.sources}
    return {name: trained.get(name) or next(iter(dataset.eval[name]), None) for name in dataset.order}


def _of_all(verdicts: np.ndarray, counters: Mapping[str, int]) -> tuple[np.ndarray, dict[str, int]]:
    """Sums over processes: ``verdicts [B, 3]``, each row judged by one of them and 0 elsewhere, and the counters."""
    B, count = len(verdicts), np.array([*counters.values()], np.int32)
    # One exchange, of few sizes: every size is a program to compile.
    message = np.zeros(-(-(3 * B + len(count)) // 1024) * 1024, np.int32)
    message[: 3 * B], message[3 * B : 3 * B + len(count)] = verdicts.reshape(-1).view(np.int32), count
    everybody = distributed.gather(message)
    total = everybody[:, : 3 * B].view(np.float32).sum(0).reshape(B, 3)
    return total, dict(zip(counters, everybody[:, 3 * B : 3 * B + len(count)].sum(0).tolist()))
