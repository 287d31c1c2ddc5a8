"""Engines: prompts in, :class:`~rlvr_jax.types.Rollout` out.

:class:`LocalEngine` samples inside JAX with the trainer's own model function. Anything else that satisfies
:class:`Engine` (a server, a fake in a test) can stand in for it.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.rollout import keys, slots
from rlvr_jax.rollout.book import Book, Finished
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.weights import decode_shardings, decode_weights
from rlvr_jax.sharding import named, place
from rlvr_jax.types import Rollout

Array = jax.Array
OnRows = Callable[[list[Finished]], None]
Ints = Sequence[int] | np.ndarray

# Tokens of one prefill on each shard of the batch: enough that its matrix products run at full speed, few enough that it
# takes no memory to speak of.
PREFILL_TOKENS = 512


class Engine(Protocol):
    """What the loop asks of a sampler.

    Attributes:
      sampling: how it draws.
      version: trainer step of the weights it samples from; every row says so in ``policy_step``.
      nonfinite_rows: rows that ended because their logits held NaN or inf, over all calls.
    """

    sampling: SamplingParams
    version: int
    nonfinite_rows: int

    def update_weights(self, params: Any, version: int) -> None:
        """From now on sample from these weights."""
        ...

    def release(self) -> None:
        """The weights may be forgotten; :meth:`generate` is not called before the next :meth:`update_weights`."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], prompt_id: Ints, domain: Ints, G: int, seed: int, step: int,
                 occurrence: Ints | None = None, *, max_new_tokens: Ints | None = None, on_rows: OnRows | None = None) -> Rollout:
        """G samples of each prompt, row ``b`` being sample ``b % G`` of prompt ``b // G``."""
        ...


def length_buckets(longest: int, shortest: int = 32) -> tuple[int, ...]:
    """Lengths to compile for: powers of two from ``shortest``, the last one rounded up to 32 only.

    ``length_buckets(200) == (32, 64, 128, 224)``.
    """
    out = []
    size = shortest
    while size < longest:
        out.append(size)
        size *= 2
    return (*out, min(size, -(-longest // 32) * 32) if longest > shortest else shortest)


class LocalEngine:
    """Samples inside JAX, on one device, on a mesh, on several processes (which all call it alike).

    A fixed number of slots decode together, in bursts of a few tokens; between bursts the host gives the slots of
    finished rows to rows that wait. So memory is bounded by slots x length, and shapes are few: prompts are padded to a
    bucket and prefilled a few at a time, the cache grows in buckets, and where time follows the number of slots
    (CPU) the last rows move to fewer of them. All of it depends on what was asked for and on nothing else, so a
    resumed run computes the same.

    Args:
      cfg: the decoder's shape.
      sampling: how tokens are drawn.
      mesh: None, or the mesh that the parameters are sharded over; slots go over its data axes, heads over tensor.
      compute_dtype: dtype of matmuls and cache; logits and probabilities are float32 always.
      prompt_buckets: ascending prompt lengths; longer prompts are refused.
      slots: most rows that decode together; rounded up to a multiple of the mesh's data axes.
      burst: tokens between two looks of the host.
      total_length: T of the result; default: the batch's bucket + ``max_new_tokens``.
      unroll_layers: decode with a weight tree per layer. A scan over stacked layers compiles faster, but copies each
        layer's weights and cache in every step.
      narrow: whether the last rows move to fewer slots. Default: on CPU without a mesh.
      decode: token ids to text; needed for ``sampling.stop``.
      platform: that the programs are made for; default: the one they are made on.

    Attributes:
      version: of the weights, see :class:`Engine`; -1 before the first.
      compiles: shapes compiled so far.
      nonfinite_rows: rows that ended because their logits held NaN or inf, over all calls.

    Raises:
      ValueError: an end id outside the vocabulary, buckets that do not ascend, sizes below 1, stop strings without ``decode``.
    """

    def __init__(self, cfg: DecoderConfig, sampling: SamplingParams, mesh: Any = None, *, compute_dtype: Any = jnp.float32,
                 prompt_buckets: Sequence[int] = length_buckets(1024), slots: int | None = None, burst: int | None = None, total_length: int | None = None,
                 unroll_layers: bool = True, narrow: bool | None = None, decode: Callable[[Sequence[int]], str] | None = None,
                 platform: str | None = None) -> None:
        cpu = self._cpu = (platform or jax.default_backend()) == "cpu"
        slots, burst = slots or (64 if cpu else 256), burst or (8 if cpu else 16)
        outside = [e for e in sampling.eos_ids if e >= cfg.vocab_size]
        if outside:
            raise ValueError(f"eos_ids {outside} lie outside the model's vocabulary of {cfg.vocab_size}")
        if list(prompt_buckets) != sorted(set(prompt_buckets)) or not prompt_buckets or prompt_buckets[0] < 1:
            raise ValueError(f"prompt_buckets {tuple(prompt_buckets)} must be positive and ascend")
        if slots < 1 or burst < 1:
            raise ValueError(f"slots {slots} and burst {burst} must be at least 1")
        if sampling.stop and decode is None:
            raise ValueError(f"stop strings {sampling.stop} need decode=, the tokenizer's ids-to-text function")
        mesh = None if mesh is None or mesh.size == 1 else mesh
        self.cfg, self.sampling, self.mesh, self.decode = cfg, sampling, mesh, decode
        self.prompt_buckets, self.total_length = tuple(prompt_buckets), total_length
        self.compiles, self.nonfinite_rows, self.version = 0, 0, -1
        self._ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        self._dtype, self._unroll, self._burst_tokens = jnp.dtype(compute_dtype), unroll_layers, burst
        self._widths = self._slot_counts(slots, (cpu and mesh is None) if narrow is None else narrow)
        self._rings = _ring_buckets(sampling.max_new_tokens - 1, burst)
        self._params: Any = None
        self._weights: Any = None
        self._compile()

    def _slot_counts(self, slots: int, narrow: bool) -> tuple[int, ...]:
        """Numbers of slots, ascending: few rows need no more, and the last rows of many may move to them."""
        most = -(-slots // self._ways) * self._ways
        out = [most]
        while narrow and out[-1] % 2 == 0 and out[-1] >= 16 and len(out) < 3:
            out.append(out[-1] // 2)
        return tuple(reversed(out))

    def prefill_rows(self, P: int, G: int) -> int:
        """Prompts of one prefill, whatever their number, so that it compiles once for each bucket P."""
        return min(-(-self._widths[-1] // G), max(1, PREFILL_TOKENS // P) * self._ways)

    def _compile(self) -> None:
        """The device functions, jitted; each counts the shapes it is traced for."""
        shared: dict[str, Any] = {"cfg": self.cfg, "sampling": self.sampling, "dtype": self._dtype}
        on_mesh = lambda x: None if self.mesh is None else x(self.mesh)  # noqa: E731
        whole = on_mesh(named)
        self._prefill = jax.jit(self._counted(functools.partial(slots.prefill, **shared)), static_argnames="G",
                                out_shardings=None if whole is None else (None, whole))
        self._admit = jax.jit(self._counted(slots.admit), donate_argnums=0)
        self._regrid = jax.jit(self._counted(slots.regrid), static_argnames=("prompt_columns", "ring"))
        self._burst = jax.jit(self._counted(functools.partial(slots.burst, **shared, tokens=self._burst_tokens)), static_argnames="prompt_columns",
                              donate_argnums=1, out_shardings=None if whole is None else (None, whole))
        self._empty = jax.jit(self._counted(functools.partial(slots.empty, self.cfg, dtype=self._dtype, unroll=self._unroll)), static_argnums=(0, 1, 2))
        place = on_mesh(functools.partial(decode_shardings, self.cfg, unroll=self._unroll))
        self._prepare = jax.jit(functools.partial(decode_weights, cfg=self.cfg, dtype=self._dtype, unroll=self._unroll, fuse=whole is None,
                                                  transpose=whole is None and self._cpu),
                                out_shardings=place)

    def _counted(self, f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def traced(*args: Any, **kw: Any) -> Any:
            self.compiles += 1  # only tracing executes Python
            return f(*args, **kw)

        return traced

    def update_weights(self, params: Any, version: int) -> None:
        """Samples from ``params`` (the decoder's tree, layers stacked) from now on.

        The engine keeps the arrays and a copy for decoding until the next call or :meth:`release`.
        """
        self.release()
        with self._context():
            self._params, self._weights, self.version = params, self._prepare(params), version

    def release(self) -> None:
        """Lets go of all weights: an update may have the memory. :meth:`generate` then needs new ones."""
        self._params = self._weights = None

    def _context(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def generate(self, prompts: Sequence[Sequence[int]], prompt_id: Ints, domain: Ints, G: int, seed: int, step: int, occurrence: Ints | None = None,
                 *, max_new_tokens: Ints | None = None, on_rows: OnRows | None = None) -> Rollout:
        """G samples of each of N prompts.

        Args:
          prompts: N lists of token ids.
          prompt_id, domain: ``[N]``.
          G: samples per prompt.
          seed, step: of the run; with prompt id, occurrence, sample index and token position they fix every draw.
          occurrence: ``[N]`` how often each prompt id came before in this step; default: counted in this batch, which
            is right when a step is one call.
          max_new_tokens: ``[B]`` limit of each row, at most the sampling parameters'.
          on_rows: told of rows as they finish, in no order, while others still decode; every row once, before the call returns.

        Returns:
          B = N * G rows, as NumPy arrays. ``truncated`` are rows without an end token or stop string, whatever stopped
          them; ``policy_step`` is :attr:`version`.

        Raises:
          ValueError: no prompts, an empty or too long prompt, ids outside the vocabulary, lengths that do not match.
          RuntimeError: there are no weights.
        """
        if self._weights is None:
            raise RuntimeError("the engine has no weights: call update_weights(params, version) first")
        occurrence = keys.occurrences(prompt_id) if occurrence is None else occurrence
        P = self._check(prompts, prompt_id, domain, occurrence, G)
        T = self.total_length or P + self.sampling.max_new_tokens
        longest = max(map(len, prompts))
        if longest + self.sampling.max_new_tokens > T:
            raise ValueError(f"total_length {T} is less than the longest prompt {longest} + max_new_tokens {self.sampling.max_new_tokens}")
        cap = self._caps(max_new_tokens, len(prompts) * G)
        width = next((w for w in self._widths if w >= len(cap)), self._widths[-1])
        book = Book(np.repeat(np.array([len(p) for p in prompts], np.int32), G), cap, width, entropy=self.sampling.record_entropy,
                    stop=self.sampling.stop, decode=self.decode)
        with self._context():
            feed = _Feed(self, prompts, prompt_id, occurrence, G, P, seed, step)
            self._run(book, feed, P, on_rows or (lambda rows: None))
        self.nonfinite_rows += int(book.nonfinite.sum())
        return book.rollout(prompts, T, np.asarray(prompt_id), np.asarray(domain), self.version)

    def _run(self, book: Book, feed: "_Feed", P: int, on_rows: OnRows) -> None:
        """Fills slots and decodes until every row is done; finished rows are told of while the next burst runs."""
        cache: Any = None
        while True:
            while book.free > len(book.waiting) and feed.more():
                feed.prefill(book)
            if not book.waiting and not book.live:
                break
            cache = self._fit(book, cache, P, more=feed.more())
            while book.waiting and book.free:
                cache = self._seat(book, cache)
            if not book.live:
                continue
            cache, drawn = self._burst(self._weights, cache, self._rows(book), self._stop_at(book, feed.more()), prompt_columns=P)
            self._tell(book, on_rows)
            book.burst(jax.tree.map(np.asarray, drawn))
        self._tell(book, on_rows)

    @staticmethod
    def _tell(book: Book, on_rows: OnRows) -> None:
        rows = book.deliver()
        if rows:
            on_rows(rows)

    def _fit(self, book: Book, cache: Any, P: int, more: bool) -> Any:
        """A cache with as many slots as there are rows for, and room for a burst of the oldest row."""
        ahead = self._burst_tokens
        live = book.row_of[book.row_of >= 0]
        need = max([1, *np.minimum(book.cap[live] - 1, book.length[live] - 1 + ahead), *(min(book.cap[w.row] - 1, ahead) for w in book.waiting)])
        ring = next(r for r in self._rings if r >= need)
        if cache is None:
            return self._empty(len(book.row_of), P, ring)
        rows = len(live) + len(book.waiting)
        width = len(book.row_of) if more else next((w for w in self._widths if w >= rows), len(book.row_of))
        ring, width = max(ring, cache.columns - P), min(width, len(book.row_of))
        if (ring, width) == (cache.columns - P, len(book.row_of)):
            return cache
        order = np.argsort(book.row_of < 0, kind="stable")[:width]  # live slots first
        book.row_of = book.row_of[order]
        return self._regrid(cache, self._whole(order.astype(np.int32)), prompt_columns=P, ring=ring)

    def _seat(self, book: Book, cache: Any) -> Any:
        prompts, source, seats = book.seat()
        fill = lambda x: self._whole(np.pad(np.array(x, np.int32), (0, len(book.row_of) - len(x))))  # noqa: E731
        return self._admit(cache, prompts, fill(source), fill(seats), self._whole(np.int32(len(seats)))) if seats else cache

    def _stop_at(self, book: Book, more: bool) -> Any:
        """How many live slots end a burst early: when a few are free and rows wait, or when fewer slots would do."""
        if more or book.waiting:
            return self._whole(np.int32(min(len(book.row_of) - max(1, len(book.row_of) // 16), book.live - 1)))
        return self._whole(np.int32(max([0, *(w for w in self._widths if w < book.live and w < len(book.row_of))])))

    def _rows(self, book: Book) -> slots.Rows:
        row, live = np.maximum(book.row_of, 0), book.row_of >= 0
        split = lambda x: x if self.mesh is None else place(x, named(self.mesh, "batch", *(None,) * (x.ndim - 1)))  # noqa: E731
        last = book.token[row, np.maximum(book.length[row] - 1, 0)]
        return slots.Rows(*map(split, (last, book.prompt_length[row], book.length[row], book.cap[row], live, book.key[row])))

    def _whole(self, x: Any) -> Any:
        return x if self.mesh is None else place(x, named(self.mesh))

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


class _Feed:
    """The prompts of one call, prefilled a few at a time as slots become free."""

    def __init__(self, engine: LocalEngine, prompts: Sequence[Sequence[int]], prompt_id: Ints, occurrence: Ints, G: int, P: int, seed: int, step: int):
        self.engine, self.prompts, self.G, self.P = engine, prompts, G, P
        self.prompt_id, self.occurrence = np.asarray(prompt_id, np.int32), np.asarray(occurrence, np.int32)
        self.seed, self.step = engine._whole(keys.split_seed(seed)), engine._whole(np.int32(step))
        self.size = engine.prefill_rows(P, G)
        self.next = 0

    def more(self) -> bool:
        return self.next < len(self.prompts)

    def prefill(self, book: Book) -> None:
        """The next prompts, in the order given; the last ones are filled up with one that nobody asked for."""
        take = range(self.next, min(self.next + self.size, len(self.prompts)))
        self.next = take.stop
        tokens, length = np.zeros((self.size, self.P), np.int32), np.ones(self.size, np.int32)
        for i, n in enumerate(take):
            tokens[i, : len(self.prompts[n])], length[i] = self.prompts[n], len(self.prompts[n])
        fill = lambda x: np.pad(x[take.start : take.stop], (0, self.size - len(take)))  # noqa: E731
        args = map(self.engine._whole, (tokens, length, fill(self.prompt_id), fill(self.occurrence)))
        kv, first = self.engine._prefill(self.engine._params, *args, self.seed, self.step, G=self.G)
        rows = np.arange(take.start * self.G, take.stop * self.G)
        first = jax.tree.map(lambda x: np.asarray(x)[: len(rows)], first)
        book.first(rows, first, np.isin(first.token, self.engine.sampling.eos_ids), kv, (rows - rows[0]) // self.G)


def _ring_buckets(longest: int, burst: int) -> tuple[int, ...]:
    """Lengths of the ring: a quarter, half and all of the longest answer, none shorter than 32 or a burst."""
    whole = max(-(-longest // 8) * 8, 8)
    parts = (-(-max(whole // n, 32, burst) // 8) * 8 for n in (4, 2))
    return tuple(sorted({*(p for p in parts if p < whole), whole}))
