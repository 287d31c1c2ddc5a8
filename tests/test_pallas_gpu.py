"""The GPU kernels: numerics in the interpreter, compilation for cards that are not here, and the prepared check."""

import functools

import gpu_target
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.kernels import bench, check_gpu, measure
from rlvr_jax.kernels.token_logprob import pallas_gpu, streamed
from rlvr_jax.kernels.token_logprob import pallas_gpu_tiles as tiles
from rlvr_jax.kernels.token_logprob.logits import Logits
from rlvr_jax.kernels.token_logprob.pallas_gpu import Plan
from rlvr_jax.kernels.token_logprob.pallas_gpu_tiles import Tile

MADE, READ = Tile(16, 32, 16, 4, 2), Tile(8, 64, 0, 4, 1)
CAPPED = Logits(1.3, 5.0, 0.5, with_entropy=True)
# 37 tokens and 129 columns in chunks of 16 and 64: the last chunks of both overlap the ones before, the last tiles stick out.
SOURCES = {"kernel": (jnp.bfloat16, Plan(MADE, 16, 64)), "library": (jnp.float32, Plan(READ, 16, 64))}
ROWS = ("lse", "target_logit", "mean_logit")


def problem(n, V, D, dtype, count, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(n, D)) * scale, dtype)
    targets = rng.integers(0, V, n).astype(np.int32)
    targets[0], targets[n - 1] = 0, V - 1
    if n > 4:
        targets[1], targets[2], targets[3] = -1, V, V + 5  # in other shards of the vocabulary
    return dict(hidden=jnp.where((jnp.arange(n) < count)[:, None], hidden, jnp.nan), head=jnp.asarray(rng.normal(size=(V, D)) / D**0.5, dtype),
                targets=jnp.asarray(targets), count=jnp.int32(count), d_logprob=jnp.asarray(rng.normal(size=n), jnp.float32),
                d_entropy=jnp.asarray(rng.normal(size=n), jnp.float32))


def truth(how, hidden, head, targets, count, d_logprob, d_entropy):
    """The contract in numpy and float64: rows [n], gradients, and the largest logit; dead rows 0."""
    n, V, live = hidden.shape[0], head.shape[0], int(count)
    h, w, t, g, ge = (np.asarray(x, np.float64)[:live] for x in (hidden, head, targets, d_logprob, d_entropy))
    w = np.asarray(head, np.float64)
    u, slope = h @ w.T * how.logit_scale, how.logit_scale / how.temperature
    if how.soft_cap is not None:
        bent = np.tanh(u / how.soft_cap)
        u, slope = how.soft_cap * bent, slope * (1 - bent**2)
    z = u / how.temperature
    hot = (t[:, None] == np.arange(V)).astype(np.float64)
    top = z.max(1, keepdims=True)
    lse = np.log(np.exp(z - top).sum(1, keepdims=True)) + top
    p = np.exp(z - lse)
    mean = (p * z).sum(1, keepdims=True)
    d_z = g[:, None] * (hot - p) - (ge[:, None] * p * (z - mean) if how.with_entropy else 0)
    rows = {"lse": lse[:, 0], "target_logit": (hot * z).sum(1), "mean_logit": mean[:, 0]}
    padded = {name: np.concatenate([x, np.zeros(n - live)]) for name, x in rows.items()}
    d_hidden = np.concatenate([(d_z * slope) @ w, np.zeros((n - live, h.shape[1]))])
    return padded, (d_hidden, (d_z * slope).T @ h), max(float(np.abs(z).max(initial=0)), 1)


@functools.cache
def passes(how, plan):
    @jax.jit
    def run(hidden, head, targets, count, d_logprob, d_entropy):
        lse, target, mean = pallas_gpu.forward(how, hidden, head, targets, count, plan=plan, interpret=True)
        grads = pallas_gpu.backward(how, hidden, head, targets, count, lse, mean, d_logprob, d_entropy if how.with_entropy else None, plan=plan, interpret=True)
        return (lse, target, mean), grads

    return run


def shapes(n, V, D, dtype):
    S = jax.ShapeDtypeStruct
    rows = S((n,), jnp.float32)
    return (S((n, D), dtype), S((V, D), dtype), S((n,), jnp.int32), S((), jnp.int32)), (rows, rows, rows, rows)


def both_passes(how, plan):
    def run(hidden, head, targets, count, d_logprob, d_entropy):
        lse, target, mean = pallas_gpu.forward(how, hidden, head, targets, count, plan=plan)
        return target, pallas_gpu.backward(how, hidden, head, targets, count, lse, mean, d_logprob, d_entropy if how.with_entropy else None, plan=plan)

    return run


def agrees(how, plan, p):
    rows, grads = passes(how, plan)(**p)
    want_rows, want_grads, unit = truth(how, **p)
    low = p["hidden"].dtype == jnp.bfloat16
    for name, x in zip(ROWS, rows):
        if x is not None:
            # bfloat16 inputs too are multiplied exactly and summed in float32.
            assert np.abs(np.asarray(x, np.float64) - want_rows[name]).max() <= 2e-6 * unit, name
    assert (rows[2] is None) == (not how.with_entropy)
    for x, want in zip(grads, want_grads):
        assert x.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(x, np.float64) - want)
        # What a logit is rounded by is the relative error of its word's probability.
        assert error <= (1e-2 if low else 5e-6 + 6e-8 * unit) * np.linalg.norm(want), error
    assert not np.asarray(grads[0])[int(p["count"]):].any()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("how", [Logits(0.7), CAPPED], ids=["plain", "capped"])
def test_both_passes_against_float64(source, how):
    dtype, plan = SOURCES[source]
    for seed, count in enumerate((0, 1, 16, 30, 37)):
        agrees(how, plan, problem(37, 129, 32, dtype, count, seed=seed))


@pytest.mark.parametrize("source", SOURCES)
def test_logits_of_ten_thousand(source):
    dtype, plan = SOURCES[source]
    p = problem(37, 129, 32, dtype, 30, scale=3000.0)
    assert truth(Logits(0.7), **p)[2] > 1e4
    agrees(Logits(0.7), plan, p)


def test_a_single_token_with_the_default_plan():
    agrees(Logits(), None, problem(1, 513, 64, jnp.float32, 1))


def test_tiles_without_a_live_row_are_not_computed():
    """The interpreter fills outputs with NaN: what no program wrote stays NaN."""
    p = problem(64, 40, 32, jnp.float32, 20)
    z = jnp.zeros((64, 40))
    found = tiles.statistics(Logits(), (z,), p["targets"], jnp.array([8, 20, 0]), Tile(8, 64, 0, 4, 1), interpret=True)
    written = np.isfinite(np.asarray(found.total))[0]
    assert written[8:24].all() and not written[:8].any() and not written[24:].any()


def largest(jaxpr):
    """Elements of the largest array that a program makes, inside its loops too, but not inside its kernels."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) for v in eqn.outvars]
        if eqn.primitive.name != "pallas_call":
            sizes += [largest(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params)]
    return max(sizes)


@pytest.mark.parametrize("tile", [Tile(16, 64, 16, 4, 2), READ], ids=["kernel", "library"])
def test_no_array_of_tokens_by_vocabulary(tile):
    n, V, D, plan = 512, 700, 16, Plan(tile, 16, 64)
    first, rows = shapes(n, V, D, jnp.bfloat16)
    programs = (jax.make_jaxpr(both_passes(CAPPED, plan))(*first, *rows[:2]), jax.make_jaxpr(functools.partial(pallas_gpu.forward, CAPPED, plan=plan))(*first))
    for program, allowed in zip(programs, (V * D, n * D)):  # the gradient of the head; hidden, as statistics of 11 tiles are less
        assert largest(program.jaxpr) <= allowed


# -- plans and tiles


@pytest.mark.parametrize("n", [1, 7, 1000, 4096, 4097, 16384, 100_000])
@pytest.mark.parametrize("V", [513, 49152, 151936])
def test_plans_stay_within_their_bounds(n, V):
    for D, dtype in ((64, jnp.bfloat16), (4096, jnp.bfloat16), (100, jnp.bfloat16), (4096, jnp.float32)):
        plan = pallas_gpu.plan_for(n, V, D, jnp.dtype(dtype))
        tiles.check_tile(plan.tile)
        assert 0 < plan.chunk_tokens <= min(n, pallas_gpu.CHUNK_TOKENS) and 0 < plan.chunk_vocab <= V
        assert plan.chunk_tokens * plan.chunk_vocab <= pallas_gpu.CHUNK_LOGITS + 128 * plan.chunk_tokens
        assert not plan.tile.depth or (dtype == jnp.bfloat16 and D % plan.tile.depth == 0)


@pytest.mark.parametrize(("sizes", "said"), [
    (dict(block_tokens=256, block_vocab=512), "needs 294912 bytes of shared memory.*limit.*is 232448; use a smaller block_tokens or block_vocab"),
    (dict(block_tokens=256, block_vocab=256), "holds 256 logits a thread, the limit is 128; use a smaller"),
    (dict(block_tokens=96), "block_tokens 96 must be a power of two"),
    (dict(block_vocab=8), "block_vocab 8 must be a power of two, at least 16"),
])
def test_a_tile_that_does_not_fit_is_refused(sizes, said):
    p = problem(5, 40, 64, jnp.bfloat16, 5)
    args = [p[k] for k in ("hidden", "head", "targets", "count")]
    with pytest.raises(ValueError, match=said) as error:
        pallas_gpu.forward(Logits(), *args, **sizes)
    assert "\n" not in str(error.value)
    vectors = [p["d_logprob"]] * 2
    with pytest.raises(ValueError, match=said):
        pallas_gpu.backward(Logits(), *args, vectors[0], None, vectors[1], None, **sizes)


@pytest.mark.parametrize(("dtype", "width", "said"), [(jnp.float32, 64, "multiplies bfloat16"), (jnp.bfloat16, 40, "in steps of 64, got bfloat16 of width 40"),
                                                      (jnp.float16, 64, "must both be bfloat16 or float32")])
def test_inputs_that_the_kernel_cannot_take_are_refused(dtype, width, said):
    with pytest.raises(ValueError, match=said):
        pallas_gpu.forward(Logits(), jnp.zeros((4, width), dtype), jnp.zeros((9, width), dtype), jnp.zeros(4, jnp.int32), jnp.int32(4), plan=Plan(tiles.MAKE, 4, 9))


def test_the_default_tile_fits_every_card_in_the_table():
    assert tiles.shared_memory_bytes(tiles.MAKE) == 3 * (128 + 256) * 64 * 2
    for capability, limit in tiles.SHARED_MEMORY.items():
        assert tiles.shared_memory_bytes(tiles.MAKE, capability) <= limit


# -- check_gpu and bench


def test_the_check_says_so_where_no_gpu_is(capsys):
    assert check_gpu.main([]) == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "no NVIDIA GPU here" in out


@pytest.mark.parametrize(("dtype", "source"), [("bfloat16", "kernel"), ("float32", "library")])
def test_the_checks_comparison(dtype, source):
    case = check_gpu.Case(dtype, 21, 70, 32, CAPPED, 0.6)
    result = check_gpu.agreement(case, SOURCES[source][1], interpret=True)
    assert result.ok and 0 < result.d_head <= 1 and result.entropy > 0, result
    assert check_gpu.show_agreement(result).endswith("ok")


def test_the_checks_comparison_sees_a_wrong_gradient(monkeypatch):
    right = pallas_gpu.backward
    monkeypatch.setattr(pallas_gpu, "backward", lambda *args, **kwargs: tuple(x * 1.02 for x in right(*args, **kwargs)))
    result = check_gpu.agreement(check_gpu.Case("bfloat16", 21, 70, 32, Logits()), SOURCES["kernel"][1], interpret=True)
    assert not result.ok and result.logprob <= 1 and "DISAGREES" in check_gpu.show_agreement(result)


def test_the_checks_timing_of_one_implementation():
    p, rate = measure.problem(24, 70, 32, jnp.bfloat16), 1e12
    t = check_gpu.timing("plain", p, rate, measure.plain(Logits()), check_gpu.forward_only(Logits()), repeat=1)
    assert t.forward and t.both and t.temporaries and t.share == pytest.approx(6 * 24 * 70 * 32 / t.both / rate)
    t = check_gpu.timing("bad", p, rate, measure.two_passes(Logits(), check_gpu.passes(Plan(Tile(256, 256, 32, 8, 3), 24, 70))))
    assert t.both is None and "holds 256 logits a thread" in check_gpu.show_timing(t)


@pytest.mark.slow
def test_the_checks_timings(monkeypatch):
    monkeypatch.setattr(tiles, "MAKE", MADE)
    monkeypatch.setattr(tiles, "READ", READ)
    rows = list(check_gpu.timings(24, 70, 32, 1e12, interpret=True, repeat=1))
    assert len(rows) == 6 and all(t.both and not t.note for t in rows), rows
    assert sum("(default)" in t.name for t in rows) == 1


def test_what_the_tuning_tries_can_be_compiled():
    plans = dict(check_gpu.variants(16384, 151936, 4096))
    assert len(plans) >= 15
    for plan in plans.values():
        tiles.check_tile(plan.tile)


def test_bench_records_and_facts():
    records = list(bench.bench(((300, 24),), width=8, memory_tokens=4096, repeat=1))
    assert {(r["implementation"], r["live"]) for r in records} >= {("plain", 1.0), ("one pass", 0.25), ("two passes", 0.25)}
    assert all(r["seconds"] > 0 and r["temporaries_mb"] > 0 for r in records)
    assert all(r["error"] < 1e-5 for r in records if "error" in r and "tokamax" not in r["implementation"])
    assert len(list(bench.facts(records))) == 4


# -- compilation without a card


@pytest.mark.aot
@pytest.mark.parametrize("card", gpu_target.CARDS)
@pytest.mark.parametrize(("dtype", "D", "tile", "how"), [(jnp.bfloat16, 1024, tiles.MAKE, CAPPED), (jnp.bfloat16, 4096, None, Logits()), (jnp.float32, 576, None, CAPPED)],
                         ids=["kernel", "library", "float32"])
def test_compiles_for(card, dtype, D, tile, how):
    n, V = 8192, 151936
    where = gpu_target.sharding(card)
    plan = pallas_gpu.plan_for(n, V, D, jnp.dtype(dtype))
    plan = plan._replace(tile=tile or plan.tile)
    first, rows = shapes(n, V, D, dtype)
    program = gpu_target.compiled(where, both_passes(how, plan), *first, *rows[:2])
    assert set(gpu_target.kernels(program)) == {"statistics_kernel", "d_logits_kernel"}
    logits = 4 * n * V
    assert measure.temporaries(program) < logits / 4


@pytest.mark.aot
@pytest.mark.parametrize("case", check_gpu.CASES, ids=str)
def test_the_checks_comparisons_compile(case):
    p = jax.eval_shape(lambda: measure.problem(case.tokens, case.vocab, case.width, jnp.dtype(case.dtype)))
    program = gpu_target.compiled(gpu_target.sharding("sm_90"), check_gpu.comparison(case, check_gpu.plan_of(case)), p)
    assert {"statistics_kernel", "d_logits_kernel"} <= set(gpu_target.kernels(program))


@pytest.mark.aot
def test_compiles_over_a_mesh():
    """Tokens over two cards, the vocabulary over two: the wrapper around the kernels."""
    where = gpu_target.sharding("sm_90", (2, 2), ("data", "tensor"))
    p = jax.eval_shape(lambda: measure.problem(4096, 32768, 1024, jnp.bfloat16))
    how_passes = streamed.Passes(pallas_gpu.forward, pallas_gpu.backward)
    program = gpu_target.compiled(where, measure.two_passes(Logits(with_entropy=True), how_passes), p)
    assert set(gpu_target.kernels(program)) == {"statistics_kernel", "d_logits_kernel"}
    assert "all-reduce" in program.as_text()


@pytest.mark.aot
def test_our_limit_is_the_compilers(monkeypatch):
    """One stage more than we allow is refused by the compiler, the most that we allow is not."""
    where = gpu_target.sharding("sm_90")
    most, beyond = tiles.MAKE._replace(stages=4), tiles.MAKE._replace(stages=5)
    first, _ = shapes(256, 512, 512, jnp.bfloat16)
    forward = lambda tile: functools.partial(pallas_gpu.forward, Logits(), plan=Plan(tile, 256, 512))  # noqa: E731
    gpu_target.compiled(where, forward(most), *first)
    with pytest.raises(ValueError, match=r"needs 245760 bytes of shared memory.*compute capability 9\.0"):
        gpu_target.compiled(where, forward(beyond), *first)
    monkeypatch.setattr(tiles, "check_tile", lambda tile: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)shared memory"):
        gpu_target.compiled(where, forward(beyond), *first)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "V", "D", "dtype", "how"), [
    (7, 151936, 64, jnp.bfloat16, CAPPED), (7, 151936, 64, jnp.float32, CAPPED), (1000, 513, 576, jnp.bfloat16, Logits(0.7)),
    (1000, 49152, 64, jnp.float32, Logits(0.7, with_entropy=True)), (130, 128256, 4096, jnp.bfloat16, Logits())])
def test_real_sizes_in_the_interpreter(n, V, D, dtype, how):
    plan = pallas_gpu.plan_for(n, V, D, jnp.dtype(dtype))
    wide = plan.tile._replace(tokens=32, vocab=4096, warps=32) if not plan.tile.depth else plan.tile  # fewer programs to interpret
    agrees(how, plan._replace(tile=wide, chunk_vocab=min(plan.chunk_vocab, 65536)), problem(n, V, D, dtype, (3 * n + 3) // 4))
