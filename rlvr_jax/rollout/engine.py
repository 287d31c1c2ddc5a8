"""Engines: prompts in, :class:`~rlvr_jax.types.Rollout` out.

:class:`LocalEngine` samples inside JAX with the trainer's own model function. Anything else that has ``generate``
(a server, a fake in a test) can stand in for it: see :class:`Engine`.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix
from rlvr_jax.rollout import keys, sampler
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.sharding import named
from rlvr_jax.types import Rollout, response_mask

Array = jax.Array


class Engine(Protocol):
    """What the loop asks of a sampler."""

    def generate(self, params: Any, prompts: Sequence[Sequence[int]], prompt_id: Sequence[int] | np.ndarray,
                 domain: Sequence[int] | np.ndarray, G: int, seed: int, step: int,
                 occurrence: Sequence[int] | np.ndarray | None = None) -> Rollout:
        """G samples of each prompt, row ``b`` being sample ``b % G`` of prompt ``b // G``."""
        ...


def length_buckets(longest: int, shortest: int = 32) -> tuple[int, ...]:
    """Prompt lengths to compile for: powers of two from ``shortest``, the last one rounded up to 32 only.

    ``length_buckets(200) == (32, 64, 128, 224)``.
    """
    out = []
    size = shortest
    while size < longest:
        out.append(size)
        size *= 2
    return (*out, min(size, -(-longest // 32) * 32) if longest > shortest else shortest)


class LocalEngine:
    """Samples inside JAX, on one device or on a mesh.

    Shapes are few: prompts are padded to a bucket, and their number to a multiple of ``batch_prompts`` with rows that
    are never sampled; both depend on the batch alone, so a resumed run compiles and computes the same.

    Args:
      cfg: the decoder's shape.
      sampling: how tokens are drawn.
      mesh: None, or the mesh that the parameters are sharded over; rows then go over its data axes.
      compute_dtype: dtype of matmuls and cache; logits and probabilities are float32 always.
      prompt_buckets: ascending prompt lengths; longer prompts are refused.
      batch_prompts: the number of prompts is padded to a multiple of it (evaluation's last batch).
      total_length: T of the result; default: the batch's bucket + ``max_new_tokens``.
      unroll_layers: decode with layers sliced out of their stack once per call. Default: on CPU, where a scan copies
        each layer's weights and cache in every step; elsewhere the copy would double the weights in memory.

    Attributes:
      compiles: shapes compiled so far.

    Raises:
      ValueError: an end id outside the vocabulary, or buckets that do not ascend.
    """

    def __init__(self, cfg: DecoderConfig, sampling: SamplingParams, mesh: Any = None, *,
                 compute_dtype: Any = jnp.float32, prompt_buckets: Sequence[int] = length_buckets(1024),
                 batch_prompts: int = 1, total_length: int | None = None, unroll_layers: bool | None = None) -> None:
        outside = [e for e in sampling.eos_ids if e >= cfg.vocab_size]
        if outside:
            raise ValueError(f"eos_ids {outside} lie outside the model's vocabulary of {cfg.vocab_size}")
        if list(prompt_buckets) != sorted(set(prompt_buckets)) or not prompt_buckets or prompt_buckets[0] < 1:
            raise ValueError(f"prompt_buckets {tuple(prompt_buckets)} must be positive and ascend")
        self.cfg, self.sampling, self.mesh = cfg, sampling, mesh
        self.prompt_buckets, self.batch_prompts, self.total_length = tuple(prompt_buckets), batch_prompts, total_length
        self.compiles = 0
        self._nonfinite: list[Array] = []
        self._nonfinite_total = 0
        self._dtype = jnp.dtype(compute_dtype)
        self._unroll = jax.default_backend() == "cpu" if unroll_layers is None else unroll_layers
        self._run = jax.jit(self._traced, static_argnames=("G", "T"))

    @property
    def nonfinite_rows(self) -> int:
        """Rows that ended because their logits held NaN or inf, over all calls; waits for the device."""
        self._nonfinite_total += sum(int(x) for x in self._nonfinite)
        self._nonfinite = []
        return self._nonfinite_total

    def generate(self, params: Any, prompts: Sequence[Sequence[int]], prompt_id: Sequence[int] | np.ndarray,
                 domain: Sequence[int] | np.ndarray, G: int, seed: int, step: int,
                 occurrence: Sequence[int] | np.ndarray | None = None, *,
                 max_new_tokens: Sequence[int] | np.ndarray | None = None) -> Rollout:
        """G samples of each of N prompts.

        Args:
          params: the decoder's parameters, layers stacked.
          prompts: N lists of token ids.
          prompt_id, domain: ``[N]``.
          G: samples per prompt.
          seed, step: of the run; with prompt id, occurrence, sample index and token position they fix every draw.
          occurrence: ``[N]`` how often each prompt id came before in this step; default: counted in this batch, which
            is right when a step is one call.
          max_new_tokens: ``[B]`` limit of each row, at most the sampling parameters'.

        Returns:
          B = N * G rows, on the device and not waited for, unless the batch had to be padded. ``truncated`` are rows without an end token, whatever
          stopped them; ``policy_step`` is ``step``.

        Raises:
          ValueError: no prompts, an empty or too long prompt, ids outside the vocabulary, lengths that do not match.
        """
        N = len(prompts)
        occurrence = keys.occurrences(prompt_id) if occurrence is None else occurrence
        P = self._check(prompts, prompt_id, domain, occurrence, G)
        T = self.total_length or P + self.sampling.max_new_tokens
        rows = self._pad(N, G)
        tokens = np.zeros((rows, P), np.int32)
        length = np.ones(rows, np.int32)
        for i, p in enumerate(prompts):
            tokens[i, : len(p)], length[i] = p, len(p)
        longest = int(length.max())
        if longest + self.sampling.max_new_tokens > T:
            raise ValueError(f"total_length {T} is less than the longest prompt {longest} + max_new_tokens {self.sampling.max_new_tokens}")
        per_prompt = [tokens, length, *(_fill(x, rows) for x in (prompt_id, occurrence, domain))]
        cap = _fill(self._caps(max_new_tokens, N * G), rows * G)
        with jax.set_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext():
            rollout, nonfinite = self._run(params, *self._place(per_prompt, cap), keys.split_seed(seed),
                                           np.int32(step), G=G, T=T)
        self._nonfinite.append(nonfinite)
        if len(self._nonfinite) > 8:  # finished long ago: nothing waits
            self._nonfinite_total += int(self._nonfinite.pop(0))
        return rollout if rows == N else jax.tree.map(lambda x: _first_rows(x, N * G), rollout)

    def _traced(self, params: Any, tokens: Array, length: Array, prompt_id: Array, occurrence: Array, domain: Array,
                cap: Array, seed: Array, step: Array, *, G: int, T: int) -> tuple[Rollout, Array]:
        self.compiles += 1  # runs once per compiled shape: only tracing executes Python
        u = keys.uniforms(keys.row_keys(seed, step, prompt_id, occurrence, G), self.sampling.max_new_tokens)
        out = sampler.generate(params, self.cfg, self.sampling, tokens, length, u, cap, compute_dtype=self._dtype,
                               unroll=self._unroll)
        rep = lambda x: jnp.repeat(x, G, axis=0)  # noqa: E731
        row_tokens, row_length = rep(tokens), rep(length)
        prompt = jnp.pad(row_tokens, ((0, 0), (0, max(0, T - tokens.shape[1]))))[:, :T]
        mask = response_mask(row_length, out.length, T)
        at = jnp.clip(jnp.arange(T) - row_length[:, None], 0, u.shape[1] - 1)
        place = lambda x: jnp.where(mask, jnp.take_along_axis(x, at, axis=1), 0)  # noqa: E731
        return Rollout(
            tokens=jnp.where(mask, jnp.take_along_axis(out.tokens, at, axis=1), prompt), prompt_length=row_length,
            response_length=out.length, logprob=place(out.logprob), behavior_logprob=place(out.behavior_logprob),
            entropy=None if out.entropy is None else place(out.entropy), truncated=~out.ended, prompt_id=rep(prompt_id), domain=rep(domain),
            policy_step=jnp.full_like(row_length, step)), jnp.sum(out.nonfinite)

    def _check(self, prompts: Sequence[Sequence[int]], prompt_id: Any, domain: Any, occurrence: Any, G: int) -> int:
        """The bucket of the longest prompt, after all that the caller may get wrong."""
        N = len(prompts)
        if N == 0 or G < 1:
            raise ValueError(f"nothing to sample: {N} prompts, {G} samples each; both must be at least 1")
        if {len(prompt_id), len(domain), len(occurrence)} != {N}:
            raise ValueError(f"{N} prompts, but {len(prompt_id)} prompt ids, {len(domain)} domains and {len(occurrence)} occurrences; give one each")
        for i, p in enumerate(prompts):
            if len(p) == 0:
                raise ValueError(f"prompt {i} is empty; a prompt needs at least one token (a BOS, say)")
            if min(p) < 0 or max(p) >= self.cfg.vocab_size:
                raise ValueError(f"prompt {i} holds token id {min(p) if min(p) < 0 else max(p)}, outside the vocabulary of {self.cfg.vocab_size}")
        longest = max(len(p) for p in prompts)
        for bucket in self.prompt_buckets:
            if longest <= bucket:
                return bucket
        raise ValueError(f"a prompt has {longest} tokens, more than the largest bucket {self.prompt_buckets[-1]}; raise data.max_prompt_length")

    def _caps(self, max_new_tokens: Sequence[int] | np.ndarray | None, B: int) -> np.ndarray:
        limit = self.sampling.max_new_tokens
        if max_new_tokens is None:
            return np.full(B, limit, np.int32)
        cap = np.asarray(max_new_tokens, np.int32)
        if cap.shape != (B,) or cap.min() < 1 or cap.max() > limit:
            raise ValueError(f"max_new_tokens per row must be {B} numbers in 1..{limit}, got shape {cap.shape}, {cap.min()}..{cap.max()}")
        return cap

    def _pad(self, N: int, G: int) -> int:
        """Prompts after padding: a multiple of ``batch_prompts`` whose rows divide over the mesh's data axes."""
        rows = -(-N // self.batch_prompts) * self.batch_prompts
        ways = 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        while rows * G % ways:
            rows += 1
        return rows

    def _place(self, per_prompt: list[np.ndarray], cap: np.ndarray) -> list[Any]:
        """Rows split over the data axes; prompts too where their number divides, else whole on every device."""
        if self.mesh is None:
            return [*per_prompt, cap]
        ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        split = len(per_prompt[0]) % ways == 0
        axes = lambda x: ("batch" if split else None, *(None,) * (x.ndim - 1))  # noqa: E731
        return [jax.device_put(x, named(self.mesh, *axes(x))) for x in per_prompt] + [jax.device_put(cap, named(self.mesh, "batch"))]


def _first_rows(x: Array, rows: int) -> Any:
    """Cut on the host where that is possible: a device would compile a slice for every number of rows."""
    return np.asarray(x)[:rows] if x.is_fully_addressable else x[:rows]


def _fill(x: Any, rows: int) -> np.ndarray:
    x = np.asarray(x, np.int32)
    return np.pad(x, (0, rows - len(x)))


def score(params: Any, cfg: DecoderConfig, tokens: Array, prompt_length: Array, response_length: Array,
          temperature: float = 1.0, *, compute_dtype: Any = jnp.float32) -> Array:
    """Teacher-forced logprobs of responses: what the trainer computes for the sampler's rows.

    Args:
      params, cfg: the decoder.
      tokens: ``[B, T] int32``; prompt_length, response_length: ``[B] int32``.
      temperature: of the softmax; 0 is read as 1, as the sampler does for greedy.

    Returns:
      ``[B, T] float32``, laid out as ``Rollout.logprob``. Holds ``[T, V]`` logits of one row at a time.
    """
    T = tokens.shape[1]
    t = jnp.arange(T, dtype=jnp.int32)
    positions = jnp.where(t < (prompt_length + response_length)[:, None], t, -1)
    hidden, _ = forward(params, cfg, tokens, positions, compute_dtype=compute_dtype)
    head = head_matrix(params, cfg).astype(compute_dtype)

    def row(args: tuple[Array, Array]) -> Array:
        h, target = args
        logits = jnp.einsum("td,vd->tv", h, head, preferred_element_type=jnp.float32) / (temperature or 1.0)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1)[:, 0]

    logprob = jax.lax.map(row, (hidden[:, :-1], tokens[:, 1:]))
    return jnp.where(response_mask(prompt_length, response_length, T), jnp.pad(logprob, ((0, 0), (1, 0))), 0.0)
