"""One step's data, from weights to the batch to learn from: prompts -> rollout -> verdicts -> which groups.

Prompts are chosen before the rollout (mixer, then :mod:`rlvr_jax.strategies.prompts`), batches are generated until enough
groups teach something (:mod:`rlvr_jax.dynamic_sampling`), and slots of groups that teach nothing are filled from earlier
steps (:mod:`rlvr_jax.replay`). What any of them remembers is one dict of NumPy arrays, ``host``, that a checkpoint holds.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax import dynamic_sampling, replay
from rlvr_jax import metrics as metric
from rlvr_jax import parts as part
from rlvr_jax import step_metrics as observe
from rlvr_jax.advantages import advantages
from rlvr_jax.rewards import overlong
from rlvr_jax.rollout import keys
from rlvr_jax.rollout.book import Finished
from rlvr_jax.scoring import row_logprob
from rlvr_jax.sharding import named
from rlvr_jax.strategies import prompts
from rlvr_jax.types import Rollout, UpdateBatch, response_mask

Host = dict[str, Any]


class Generated(NamedTuple):
    """Answers to the prompts of ``rows [N]``, sampled and judged; arrays are NumPy, ``[B]`` with B = N * G."""

    rows: Sequence[Any]
    texts: list[str]
    rollout: Rollout
    reward: np.ndarray
    correct: np.ndarray
    valid: np.ndarray

    @property
    def prompt_id(self) -> np.ndarray:
        """``[N] int32``."""
        return np.array([r.prompt_id for r in self.rows], np.int32)

    @property
    def domain(self) -> np.ndarray:
        """``[N] int32``."""
        return np.array([r.domain for r in self.rows], np.int32)

    def join(self, other: "Generated") -> "Generated":
        rollout = jax.tree.map(lambda a, b: np.concatenate([a, b]), self.rollout, other.rollout)
        return Generated([*self.rows, *other.rows], self.texts + other.texts, rollout,
                         *(np.concatenate(pair) for pair in zip(self[3:], other[3:], strict=True)))


class Collected(NamedTuple):
    """What a step trains on. ``generated`` is everything that was sampled for it; ``began`` the time the device was free,
    ``seconds`` of sampling and of waiting for verdicts; ``notes`` are for the user."""

    batch: UpdateBatch
    host: Host
    data: Any
    mixer: Any
    generated: Generated
    values: dict[str, Any]
    began: float
    seconds: dict[str, float]
    notes: list[str]


class Collector:
    """Makes the data of a step. Holds no state of the run: that goes in and comes out."""

    def __init__(self, parts: part.Parts, *, entropy: bool):
        config = self.config = parts.config
        self.parts, self.engine, self.G = parts, parts.engine(record_entropy=entropy), config.rollout.samples_per_prompt
        T, entropy = part.row_length(config), self.engine.sampling.record_entropy
        self.replay = replay.build(config, T, entropy=entropy)
        self.dynamic = dynamic_sampling.build(config, T, entropy=entropy)
        self.chooser = prompts.build(config)
        self.score = jax.jit(lambda params, tokens, prompt, response: row_logprob(
            params, parts.model, config, tokens, prompt + response, response_mask(prompt, response, tokens.shape[1])), out_shardings=named(parts.mesh))

    def init(self) -> Host:
        """What replay, dynamic sampling and the choice of prompts remember at the start; kinds that remember nothing are left out."""
        kinds = {"replay": self.replay, "pool": self.dynamic, "prompts": self.chooser}
        return {name: state for name, kind in kinds.items() if kind is not None and (state := kind.init())}

    def step(self, params: Any, host: Host, data: Any, mixer: Any, step: int) -> Collected:
        """The batch of one step; ``data`` and ``mixer`` are the states of the prompt stream and the mixer."""
        of, names = self.parts.mixer, self.parts.dataset.names
        proportions, signal = of.proportions(mixer, step), of.signal(mixer, step) if of.signal else None
        rows, data = self._draw(host, data, proportions, step, 0)
        # The next prompts were drawn while the device still updated; from here on its time is the rollout's.
        jax.block_until_ready(params)
        began, seconds, nonfinite = time.monotonic(), {"rollout": 0.0, "verify": 0.0}, self.engine.nonfinite_rows
        self.engine.update_weights(params, step)
        everything = now = self._generate(rows, step, [], seconds)
        batch, ids = self._judged(now)
        notes: list[str] = []
        extra: dict[str, Any] = {}
        if self.dynamic is not None:
            pool = self.dynamic.collect(self.dynamic.start(host["pool"]), batch, ids)
            while self.dynamic.more(pool):
                rows, data = self._draw(host, data, proportions, step, int(pool["batches"]))
                now = self._generate(rows, step, everything.rows, seconds)
                everything, (batch, ids) = everything.join(now), self._judged(now)
                pool = self.dynamic.collect(pool, batch, ids)
            batch, ids, pool, told, warning = self.dynamic.release(pool, batch, ids, step)
            host, extra = host | {"pool": pool}, extra | metric.means(told)
            notes += [] if warning is None else [warning]
        self.engine.release()  # the update may have the memory
        host, mixer = self._learn(host, mixer, everything, step)
        values = observe.rollout_metrics(everything.rollout, everything.reward, everything.correct, everything.valid, names)
        values |= observe.mix_metrics(everything.rows, proportions, signal, names) | prompts.metrics(host.get("prompts", {})) | extra
        values["rollout/nonfinite"] = (self.engine.nonfinite_rows - nonfinite) / len(everything.texts)
        values |= metric.means(overlong.metrics(self.config, everything.valid, everything.rollout.response_length))
        if self.replay is not None:
            score = {"score": lambda *rows: self._score(params, *rows)} if self.replay.needs_score else {}
            batch, buffer, told = self.replay.apply(host.get("replay", {}), batch, prompt_id=ids, step=step, **score)
            host, values = host | ({"replay": buffer} if buffer else {}), values | metric.means(told)
        return Collected(batch, host, data, mixer, everything, values, began, seconds, notes)

    def _draw(self, host: Host, data: Any, proportions: np.ndarray, step: int, round: int) -> tuple[list[Any], Any]:
        c = self.config
        choose = None if c.data.prompts.kind == "random" else (
            lambda ids, counts: self.chooser.propose(host["prompts"], c.seed, step, ids, counts, round=round))
        return self.parts.dataset.train.take(data, c.train.prompts_per_step, proportions, choose, self.chooser.candidates)

    def _generate(self, rows: Sequence[Any], step: int, before: Sequence[Any], seconds: dict[str, float]) -> Generated:
        """Samples all rows; each is decoded and handed to the verifiers when it ends, while others still decode."""
        began, row_of = time.monotonic(), [r for r in rows for _ in range(self.G)]
        texts = [""] * len(row_of)
        tickets: list[list[int]] = [[]] * len(row_of)

        def judge(finished: Sequence[Finished]) -> None:
            for row in finished:
                texts[row.row] = self.parts.tokenizer.decode(row.tokens)
                tickets[row.row] = self.parts.judge.submit(row_of[row.row], texts[row.row])

        ids = np.array([r.prompt_id for r in rows])
        # A prompt that an earlier batch of this step had already must not see its random numbers again.
        occurrence = keys.occurrences([*(r.prompt_id for r in before), *ids.tolist()])[len(before):]
        rollout = self.engine.generate([list(r.token_ids) for r in rows], ids, np.array([r.domain for r in rows]), self.G, self.config.seed, step,
                                       occurrence, on_rows=judge)
        sampled = time.monotonic()
        reward, correct, valid = self.parts.judge.collect(row_of, tickets)
        seconds["rollout"] += sampled - began
        seconds["verify"] += time.monotonic() - sampled
        return Generated(rows, texts, rollout, overlong.shaped(self.config, reward, valid, rollout.response_length), correct, valid)

    def _judged(self, g: Generated) -> tuple[UpdateBatch, np.ndarray]:
        return to_batch(g.rollout, g.reward, g.correct, g.valid, g.domain), g.prompt_id

    def _learn(self, host: Host, mixer: Any, g: Generated, step: int) -> tuple[Host, Any]:
        """Mixer and chooser see every fresh group, before any replay."""
        of, G = self.parts.mixer, self.G
        reward, correct, valid = (x.reshape(-1, G) for x in (g.reward, g.correct, g.valid))
        domain = g.domain
        if of.signal is not None:
            seen = {"reward": reward, "valid": valid}
            if self.config.algorithm.advantage != "gae":  # a critic's advantages come later, in the update; mixers that read them are refused
                P = self.config.train.prompts_per_step  # by batches: their number differs from step to step, and a size is a program
                seen["advantage"] = np.concatenate([_advantages(self.config.algorithm.advantage, reward[i:i + P], valid[i:i + P])
                                                    for i in range(0, len(reward), P)])
            for d in np.unique(domain):
                here = domain == d
                mixer = of.observe(mixer, int(d), {name: x[here] for name, x in seen.items()} | {"step": step})
        if "prompts" in host:
            host = host | {"prompts": self.chooser.observe(host["prompts"], g.prompt_id, (correct & valid).sum(1), valid.sum(1), step)}
        return host, mixer

    def _score(self, params: Any, tokens: np.ndarray, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        with jax.set_mesh(self.parts.mesh):
            return np.asarray(self.score(params, tokens, prompt, response))


_advantages = jax.jit(advantages, static_argnums=0)


def to_batch(rollout: Rollout, reward: Any, correct: Any, valid: Any, domain: Any) -> UpdateBatch:
    """Fresh rows and their verdicts, as NumPy arrays: ``reward, correct, valid [B]``, ``domain [N]``."""
    return UpdateBatch(
        tokens=rollout.tokens, prompt_length=rollout.prompt_length, response_length=rollout.response_length, logprob=rollout.logprob,
        behavior_logprob=rollout.behavior_logprob, entropy=rollout.entropy, reward=reward, valid=valid, correct=correct,
        truncated=rollout.truncated, policy_step=rollout.policy_step, domain=domain)
