"""``python -m rlvr_jax.kernels.bench [--json]``: loss kernels against plain XLA on the platform jax finds, in about a minute.

Time of loss and both gradients, and the temporaries of the compiled program, at the vocabularies of SmolLM2 and Qwen;
with all tokens live, and with the last three quarters of the blocks at weight zero. Where tokamax is installed, its
chunked ``linear_softmax_cross_entropy_loss`` stands beside ours, with both errors.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from . import measure
from .token_logprob import reference
from .token_logprob.logits import Logits

HOW = Logits()
WIDTH = 256
TIMED = ((49152, 1024), (151936, 512))
"""(V, tokens): about a second of matmuls on two cores each."""

MEMORY_TOKENS = 8192
"""Temporaries are those of a program compiled for this many tokens; it is not run."""

LIVE = (1.0, 0.25)


def tokamax_step(p: measure.Problem) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """tokamax's summed loss and gradients; it knows no weights, so this is all tokens at slope -1."""
    loss = measure.tokamax_loss()
    assert loss is not None
    return jax.value_and_grad(lambda h, w: loss(h, p.targets, w.T, reduction="sum", implementation="chunked_xla"), (0, 1))(p.hidden, p.head)


def steps() -> dict[str, measure.Step]:
    ways = {"plain": measure.plain(HOW), "one pass": measure.one_pass(HOW), "two passes": measure.two_passes(HOW)}
    return ways if measure.tokamax_loss() is None else {**ways, "tokamax chunked": tokamax_step}


def bench(timed: tuple[tuple[int, int], ...] = TIMED, width: int = WIDTH, memory_tokens: int = MEMORY_TOKENS, repeat: int = 4) -> Iterator[dict[str, Any]]:
    """Yields one record per vocabulary, implementation and share of live tokens; times are the best of ``repeat``.

    Keys: ``platform implementation vocab tokens width live seconds gflops`` (of the live tokens' three matmuls), ``ratio``
    (to plain with all tokens live), ``temporaries_mb`` (at ``memory_tokens``) and, with all tokens live, ``error``: the
    largest difference of a token's negative log-probability from that in float64, in nats, over the first 16 tokens.
    """
    for vocab, tokens in timed:
        problems = {live: measure.problem(tokens, vocab, width, live=live) for live in LIVE}
        compiled: dict[str, Any] = {name: jax.jit(step).lower(problems[1.0]).compile() for name, step in steps().items()}
        memory = {name: _temporaries(step, memory_tokens, vocab, width) for name, step in steps().items()}
        runs = [(name, live) for name in compiled for live in LIVE if live == 1 or name in ("one pass", "two passes")]
        times: dict[tuple[str, float], list[float]] = {run: [] for run in runs}
        for _ in range(repeat):  # in turns, and the best: other work on the machine can only add time
            for name, live in runs:
                times[name, live].append(measure.seconds(lambda f=compiled[name], p=problems[live]: f(p), 1, warm=0))  # type: ignore[misc]
        for name, live in runs:
            took = min(times[name, live])
            yield {"platform": jax.default_backend(), "implementation": name, "vocab": vocab, "tokens": tokens, "width": width, "live": live,
                   "seconds": took, "gflops": 6 * tokens * live * vocab * width / took / 1e9, "ratio": took / min(times["plain", 1.0]),
                   "temporaries_mb": memory[name] / 2**20, **({"error": _error(name, problems[1.0])} if live == 1 else {})}


def _temporaries(step: measure.Step, tokens: int, vocab: int, width: int) -> int:
    shapes = jax.eval_shape(lambda: measure.problem(tokens, vocab, width))
    return measure.temporaries(jax.jit(step).lower(shapes).compile())


def _error(name: str, p: measure.Problem, tokens: int = 16) -> float:
    """In nats: of one token's loss at a time, so that nothing averages out."""
    p = jax.tree.map(lambda x: x[:tokens] if x.shape[0] == p.hidden.shape[0] else x, p)._replace(head=p.head)
    with jax.enable_x64(True):
        exact, _ = reference.token_logprob(HOW, p.hidden.astype(jnp.float64), p.head.astype(jnp.float64), p.targets, p.live)
    if name == "tokamax chunked":
        loss = measure.tokamax_loss()
        assert loss is not None
        got = -jax.jit(lambda p: loss(p.hidden, p.targets, p.head.T, reduction="none", implementation="chunked_xla"))(p)
    elif name == "one pass":
        one = jax.jit(measure.one_pass(HOW))
        got = jnp.stack([one(p._replace(d_logprob=(jnp.arange(tokens) == i).astype(jnp.float32)))[0] for i in range(tokens)])
    else:
        way = {"plain": measure.plain, "two passes": measure.two_passes}[name](HOW)
        got = jax.jit(lambda p: jax.vmap(lambda d: way(p._replace(d_logprob=d))[0])(jnp.eye(tokens)))(p)
    with jax.enable_x64(True):
        return float(jnp.max(jnp.abs(got.astype(jnp.float64) - exact)))


def facts(records: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """What the kernels have to show, and whether they do."""
    by = {(r["implementation"], r["vocab"], r["live"]): r for r in records}
    for vocab in sorted({r["vocab"] for r in records}):
        plain, one = by["plain", vocab, 1.0], by["one pass", vocab, 1.0]
        yield f"V {vocab}: one pass takes {one['ratio']:.2f} of plain's time (at most 1)", one["ratio"] <= 1
        share = one["temporaries_mb"] / plain["temporaries_mb"]
        yield f"V {vocab}: one pass needs 1/{1 / share:.0f} of plain's temporaries (at most 1/20)", share <= 1 / 20
        for name in ("one pass", "two passes"):
            quarter = by[name, vocab, 0.25]["seconds"] / by[name, vocab, 1.0]["seconds"]
            yield f"V {vocab}: {name}, 75% of the blocks at weight zero, takes {quarter:.2f} of the full time (at most 0.35)", quarter <= 0.35


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlvr_jax.kernels.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--repeat", type=int, default=4)
    args = parser.parse_args(argv)
    records = []
    if not args.json:
        print(f"loss and gradients on {jax.default_backend()}, float32, D {WIDTH}; temporaries of a program for {MEMORY_TOKENS} tokens")
        print(f"{'':<16} {'V':>7} {'tokens':>7} {'live':>5} {'seconds':>8} {'GFLOP/s':>8} {'/ plain':>8} {'temp. MiB':>10} {'error, nat':>11}")
    for r in bench(repeat=args.repeat):
        records.append(r)
        error = f"{r['error']:.1e}" if "error" in r else ""
        print(json.dumps(r) if args.json else f"{r['implementation']:<16} {r['vocab']:>7} {r['tokens']:>7} {r['live']:>5.0%} {r['seconds']:>8.3f} "
              f"{r['gflops']:>8.0f} {r['ratio']:>8.2f} {r['temporaries_mb']:>10.0f} {error:>11}", flush=True)
    for text, met in facts(records):
        print(json.dumps({"fact": text, "met": met}) if args.json else f"{'met   ' if met else 'MISSED'} {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
