"""``python -m rlvr_jax.kernels.check_gpu``: do the GPU kernels agree with float64, and how fast are they on this card?

Exit code 0: all agree; 1: something does not; 2: no NVIDIA GPU here. Takes under four minutes, ``--tune`` more.
"""

import argparse
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import measure
from .token_logprob import pallas_gpu, reference, streamed
from .token_logprob import pallas_gpu_tiles as tiles
from .token_logprob.logits import Logits
from .token_logprob.pallas_gpu import Plan

GRADIENT_LIMIT = {"float32": 5e-6, "bfloat16": 1e-2}
VALUE_LIMIT = {"float32": 2e-6, "bfloat16": 1e-2}
"""Of gradients norm-wise; of log-probability and entropy per unit of the largest logit, or of 1."""

UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""For the comparisons: the compiler would spend minutes on finding the fastest matmul for sizes that run once."""

PLAIN, ENTROPY, CAPPED = Logits(), Logits(0.7, with_entropy=True), Logits(1.3, 5.0, 0.5, with_entropy=True)


class Case(NamedTuple):
    """One comparison; ``made`` says where the logits come from: 'kernel', 'library', or None for the default plan."""

    dtype: str
    tokens: int
    vocab: int
    width: int
    how: Logits
    live: float = 1.0
    made: str | None = None
    scale: float = 1.0


CASES = (
    Case("float32", 1, 513, 64, ENTROPY),
    Case("float32", 7, 49152, 576, CAPPED),
    Case("float32", 1000, 151936, 64, ENTROPY, 0.6),
    Case("float32", 300, 513, 100, ENTROPY, scale=3000.0),
    Case("bfloat16", 1, 513, 64, PLAIN),
    Case("bfloat16", 7, 128256, 576, CAPPED, made="kernel"),
    Case("bfloat16", 1000, 151936, 576, ENTROPY, 0.6, made="kernel"),
    Case("bfloat16", 1000, 151936, 576, ENTROPY, 0.6, made="library"),
    Case("bfloat16", 4500, 49152, 4096, PLAIN, 0.99),
    Case("bfloat16", 300, 513, 100, ENTROPY, 0.0),
)


class Agreement(NamedTuple):
    """Errors over their limits (NaN counts as infinite): 1 is the most that agrees."""

    case: Case
    logprob: float
    entropy: float
    d_hidden: float
    d_head: float

    @property
    def ok(self) -> bool:
        return max(self[1:]) <= 1


class Timing(NamedTuple):
    """Of the ``6 tokens V D`` operations that three matmuls take: ``share`` of the card's matmul rate."""

    name: str
    forward: float | None
    both: float | None
    share: float | None
    temporaries: int | None
    note: str = ""


def plan_of(case: Case) -> Plan | None:
    if case.made is None:
        return None
    default = pallas_gpu.plan_for(case.tokens, case.vocab, case.width, jnp.dtype(case.dtype))
    return default._replace(tile=tiles.MAKE if case.made == "kernel" else tiles.READ)


def passes(plan: Plan | None, interpret: bool = False) -> streamed.Passes:
    return streamed.Passes(functools.partial(pallas_gpu.forward, plan=plan, interpret=interpret),
                           functools.partial(pallas_gpu.backward, plan=plan, interpret=interpret))


def agreement(case: Case, plan: Plan | None = None, interpret: bool = False) -> Agreement:
    """One case against the reference in float64 (of the inputs as rounded to the case's dtype)."""
    p = measure.problem(case.tokens, case.vocab, case.width, jnp.dtype(case.dtype), case.live)
    p = p._replace(hidden=p.hidden * jnp.asarray(case.scale, p.hidden.dtype))
    # Dead tokens lie between live ones, and what they hold must not matter.
    live = jax.random.permutation(jax.random.key(1), p.live)
    p = p._replace(live=live, hidden=jnp.where(live[:, None], p.hidden, jnp.nan))
    got = jax.jit(comparison(case, plan or plan_of(case), interpret), compiler_options=UNTUNED)(p)
    with jax.enable_x64(True):
        exact = measure.Problem(*(x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in p))
        want = jax.jit(functools.partial(_both, functools.partial(reference.token_logprob, case.how)), compiler_options=UNTUNED)(exact)
        hidden = jnp.where(exact.live[:, None], exact.hidden, 0)
        unit = jnp.maximum(jnp.max(jnp.abs(reference.logits(case.how, hidden, exact.head))), 1) * VALUE_LIMIT[case.dtype]
        values = [0.0 if b is None else float(jnp.max(jnp.abs(a.astype(jnp.float64) - b)) / unit) for a, b in zip(got[0], want[0])]
        grads = [float(_distance(a, b)) / GRADIENT_LIMIT[case.dtype] for a, b in zip(got[1], want[1])]
    return Agreement(case, *(float("inf") if x != x else x for x in (*values, *grads)))


def comparison(case: Case, plan: Plan | None, interpret: bool = False) -> Any:
    """``Problem -> (values, gradients)`` of the kernels."""
    return functools.partial(_both, functools.partial(streamed.token_logprob, passes(plan, interpret), case.how))


def _both(logprob: Any, p: measure.Problem) -> Any:
    out, pull = jax.vjp(lambda h, w: logprob(h, w, p.targets, p.live), p.hidden, p.head)
    slopes = (p.d_logprob, p.d_entropy)
    return out, pull(tuple(None if x is None else s.astype(x.dtype) for x, s in zip(out, slopes)))


def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """Norm-wise; where all is 0, what is not."""
    norm = jnp.linalg.norm(b)
    return jnp.linalg.norm(a.astype(jnp.float64) - b) / jnp.where(norm > 0, norm, 1)


def timing(name: str, p: measure.Problem, rate: float, both: measure.Step, forward: Any = None, repeat: int = 5) -> Timing:
    """Times one implementation; an error of the compiler or of the memory is a note, not the end."""
    (tokens, width), vocab = p.hidden.shape, p.head.shape[0]
    try:
        alone = None
        if forward is not None:
            run = jax.jit(forward)
            alone = measure.seconds(lambda: run(p), repeat)
        compiled = jax.jit(both).lower(p).compile()
        took = measure.seconds(lambda: compiled(p), repeat)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return Timing(name, None, None, None, None, str(error).strip().splitlines()[0][:90])
    return Timing(name, alone, took, 6 * tokens * width * vocab / took / rate, measure.temporaries(compiled))


def forward_only(how: Logits, how_passes: streamed.Passes | None = None) -> Any:
    logprob = functools.partial(streamed.token_logprob, how_passes) if how_passes else reference.token_logprob
    return lambda p: logprob(how, p.hidden, p.head, p.targets, p.live)


def timings(tokens: int, vocab: int, width: int, rate: float, interpret: bool = False, repeat: int = 5) -> Iterator[Timing]:
    """Plain XLA, the chunked versions, and the kernels with both sources of logits; bfloat16, all tokens live, then a quarter."""
    p = measure.problem(tokens, vocab, width, jnp.bfloat16)
    how = Logits()
    yield timing("plain XLA", p, rate, measure.plain(how), forward_only(how), repeat)
    yield timing("one pass, default chunk", p, rate, measure.one_pass(how), None, repeat)
    yield timing("one pass, chunk 2048", p, rate, measure.one_pass(how, 2048), None, repeat)
    default = pallas_gpu.plan_for(tokens, vocab, width, jnp.dtype(jnp.bfloat16))
    for name, tile in (("kernel", tiles.MAKE), ("library", tiles.READ)):
        if tile.depth and width % tile.depth:
            continue
        chosen = passes(default._replace(tile=tile), interpret)
        mark = " (default)" if tile == default.tile else ""
        yield timing(f"pallas_gpu, logits by the {name}{mark}", p, rate, measure.two_passes(how, chosen), forward_only(how, chosen), repeat)
    quarter = measure.problem(tokens, vocab, width, jnp.bfloat16, 0.25)
    chosen = passes(default, interpret)
    yield timing("pallas_gpu, a quarter of the tokens live", quarter, rate, measure.two_passes(how, chosen), forward_only(how, chosen), repeat)


def variants(tokens: int, vocab: int, width: int) -> Iterator[tuple[str, Plan]]:
    """What ``--tune`` tries: tiles of both kinds, then chunks around the default ones."""
    default = pallas_gpu.plan_for(tokens, vocab, width, jnp.dtype(jnp.bfloat16))
    for sizes in ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3),
                  (128, 256, 32, 8, 4), (64, 256, 64, 4, 4)):
        if width % sizes[2] == 0:
            yield f"kernel {sizes}", default._replace(tile=tiles.Tile(*sizes))
    for sizes in ((4, 1024, 0, 4, 1), (1, 4096, 0, 4, 1), (8, 1024, 0, 8, 1), (8, 512, 0, 4, 1), (2, 2048, 0, 4, 1), (16, 256, 0, 4, 1)):
        yield f"library {sizes}", default._replace(tile=tiles.Tile(*sizes))
    for factor_tokens, factor_vocab in ((0.5, 1), (2, 1), (1, 0.5), (1, 2), (0.5, 2), (2, 0.5)):
        chunk = default._replace(chunk_tokens=max(int(default.chunk_tokens * factor_tokens), 128), chunk_vocab=max(int(default.chunk_vocab * factor_vocab), 128))
        yield f"chunks of {chunk.chunk_tokens} x {chunk.chunk_vocab}", chunk


def tune(tokens: int, vocab: int, width: int, rate: float, interpret: bool = False, repeat: int = 3) -> Iterator[Timing]:
    p, how = measure.problem(tokens, vocab, width, jnp.bfloat16), Logits()
    for name, plan in variants(tokens, vocab, width):
        chosen = passes(plan, interpret)
        yield timing(name, p, rate, measure.two_passes(how, chosen), forward_only(how, chosen), repeat)
    for chunk in (256, 512, 1024, 2048, 4096):
        if chunk <= tokens:
            yield timing(f"one pass, chunk {chunk}", p, rate, measure.one_pass(how, chunk), None, repeat)


def show_agreement(a: Agreement) -> str:
    c = a.case
    what = f"{c.dtype:<9} {c.tokens:>5} x {c.vocab:>6} x {c.width:>4}  {c.made or 'default':<8} {round(100 * c.live):>3}% live"
    return f"{what}  {a.logprob:8.3f} {a.entropy:8.3f} {a.d_hidden:8.3f} {a.d_head:8.3f}  {'ok' if a.ok else 'DISAGREES'}"


def show_timing(t: Timing) -> str:
    if t.both is None:
        return f"{t.name:<46} {t.note}"
    alone = "" if t.forward is None else f"{1e3 * t.forward:.1f}"
    return f"{t.name:<46} {alone:>10} {1e3 * t.both:>10.1f} {100 * (t.share or 0):>8.0f}% {(t.temporaries or 0) / 2**20:>10.0f}"


def gpu() -> Any:
    """The first NVIDIA GPU that jax sees, or None."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    return device


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlvr_jax.kernels.check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tune", action="store_true", help="also time other tiles and chunks")
    parser.add_argument("--seconds", type=float, default=180, help="no timing is started after this many (not with --tune)")
    args = parser.parse_args(argv)
    device = gpu()
    if device is None:
        print(f"check_gpu: no NVIDIA GPU here (jax sees {jax.default_backend()}); run it where there is one, with pip install 'rlvr-jax[cuda12]'")
        return 2
    start = time.perf_counter()
    print(f"{device.device_kind}, compute capability {device.compute_capability}, jax {jax.__version__}")
    print(f"\nerrors over their limits, against float64 (limits: {GRADIENT_LIMIT}, values {VALUE_LIMIT})")
    print(f"{'dtype, tokens x V x D, logits made by':<53}  {'logprob':>8} {'entropy':>8} {'d_hidden':>8} {'d_head':>8}")
    agreed = True
    for case in CASES:
        result = agreement(case)
        agreed &= result.ok
        print(show_agreement(result), flush=True)
    rate = measure.matmul_rate(jnp.bfloat16, 8192, queue=10)
    shape = args.tokens, args.vocab, args.width
    print(f"\nbfloat16 matmul 8192^3: {rate / 1e12:.0f} TFLOP/s; times at {shape[0]} tokens, V {shape[1]}, D {shape[2]}, share: of 6 tokens V D operations at that rate")
    print(f"{'':<46} {'forward ms':>10} {'both ms':>10} {'share':>9} {'temp. MiB':>10}")
    for t in timings(*shape, rate):
        print(show_timing(t), flush=True)
        if time.perf_counter() - start > args.seconds and not args.tune:
            print(f"stopped: {args.seconds:.0f} s are over")
            break
    for t in tune(*shape, rate) if args.tune else ():
        print(show_timing(t), flush=True)
    print(f"\n{'all agree' if agreed else 'NOT all agree'}; {time.perf_counter() - start:.0f} s")
    return 0 if agreed else 1


if __name__ == "__main__":
    raise SystemExit(main())
