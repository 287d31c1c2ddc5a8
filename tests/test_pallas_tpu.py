"""The TPU kernels of token_logprob: numerics in the interpreter against float64, races, tiles, and when they are taken."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rlvr_jax.kernels.token_logprob import blocks, by_platform, fused, pallas_tpu, pallas_tpu_backward, streamed
from rlvr_jax.kernels.token_logprob.api import policy_loss, token_logprob
from rlvr_jax.kernels.token_logprob.logits import Logits
from rlvr_jax.kernels.token_logprob.objective import Objective
from rlvr_jax.kernels.token_logprob.pallas_tpu_tiles import (
    CHIPS,
    UNKNOWN,
    Tiles,
    backward_bytes,
    backward_tiles,
    forward_bytes,
    forward_tiles,
    usable,
)
from rlvr_jax.sharding import make_mesh

# The clocks of copies in flight must not be shared, or a race between two of them goes unseen: the default has one for all.
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", vector_clock_size=32)
TWO_CORES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", vector_clock_size=32, num_cores_or_threads=2)
PLAIN = Logits(0.7, with_entropy=True)
RICH = Logits(1.3, soft_cap=5.0, logit_scale=1.5, with_entropy=True)


def problem(n, V, D, seed=0, dtype=jnp.float32, largest=None):
    """Inputs that are numbers of ``dtype``, as float64; targets at both ends of the vocabulary and outside of it on both sides."""
    rng = np.random.default_rng(seed)
    hidden, head = (np.asarray(jnp.asarray(rng.normal(size=(size, D)), dtype), np.float64) for size in (n, V))
    if largest is not None:
        hidden = np.asarray(jnp.asarray(hidden * largest / np.abs(hidden @ head.T).max(), dtype), np.float64)
    targets = rng.integers(-V // 4, V + V // 4, n)
    targets[: min(n, 4)] = [0, V - 1, -1, V][: min(n, 4)]
    return hidden, head, targets.astype(np.int32), *rng.normal(size=(2, n))


def truth(static, hidden, head, targets, d_logprob, d_entropy, count):
    """(lse, target_logit, mean_logit), (d_hidden, d_head) in float64, largest logit; rows from ``count`` on are 0."""
    rows, d_head, largest = [], np.zeros(head.shape), 1.0
    for i in range(0, count, 128):  # blocks: thousands of rows of a real vocabulary take gigabytes
        *some, d, top = _truth_of_rows(static, head, *(x[i:min(i + 128, count)] for x in (hidden, targets, d_logprob, d_entropy)))
        rows.append(some)
        d_head += d
        largest = max(largest, top)
    dead = [np.zeros((len(hidden) - count, *shape)) for shape in ((), (), (), head.shape[1:])]
    *out, d_hidden = (np.concatenate([*live, rest]) for live, rest in zip(zip(*rows) if rows else [()] * 4, dead))
    return tuple(out), (d_hidden, d_head), largest


def _truth_of_rows(static, head, h, targets, g, ge):
    u = h @ head.T * static.logit_scale
    slope = static.logit_scale / static.temperature * np.ones_like(u)
    if static.soft_cap is not None:
        slope *= 1 - np.tanh(u / static.soft_cap) ** 2
        u = static.soft_cap * np.tanh(u / static.soft_cap)
    z = u / static.temperature
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    p = np.exp(z - lse[:, None])
    mean = (p * z).sum(axis=1)
    hit = np.arange(len(head)) == targets[:, None]
    d_z = g[:, None] * (hit - p) - (ge[:, None] * p * (z - mean[:, None]) if static.with_entropy else 0)
    d_u = d_z * slope
    return lse, (hit * z).sum(axis=1), mean, d_u @ head, d_u.T @ h, np.abs(z).max()


@functools.cache
def compiled(static, interpret, chip, tiles):
    """Both passes with their tiles, compiled once for all counts."""
    kw = dict(interpret=interpret, chip=chip, block_tokens=tiles and tiles[0], block_vocab=tiles and tiles[1])
    return jax.jit(functools.partial(pallas_tpu.forward, static, **kw)), jax.jit(functools.partial(pallas_tpu.backward, static, **kw))


def run(static, inputs, count, dtype=jnp.float32, interpret=True, chip=UNKNOWN, tiles=None):
    """Both passes on poisoned dead rows; lse and mean that the backward pass takes are those of the forward pass."""
    hidden, head, targets, g, ge = inputs
    hidden = np.where(np.arange(len(hidden))[:, None] < count, hidden, np.nan)
    args = jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets), jnp.int32(count)
    forward, backward = compiled(static, interpret, chip, tiles)
    out = forward(*args)
    g, ge = (jnp.asarray(x, jnp.float32) for x in (g, ge))
    return out, backward(*args, out[0], out[2], g, ge if static.with_entropy else None)


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30))


def check(static, inputs, count, gradient=5e-6, **kw):
    out, grads = run(static, inputs, count, **kw)
    want, want_grads, largest = truth(static, *inputs, count)
    assert (out[2] is not None) == static.with_entropy
    logprob, entropy = out[1] - out[0], None if out[2] is None else out[0] - out[2]
    here = (inputs[2] >= 0) & (inputs[2] < len(inputs[1]))
    bound = 2e-6 * max(1.0, largest)
    assert np.abs(logprob - (want[1] - want[0]))[here].max(initial=0) <= bound
    assert np.all(np.asarray(out[1])[~here] == 0) and np.abs(out[0] - want[0]).max() <= bound
    if static.with_entropy:
        assert np.abs(entropy - (want[0] - want[2])).max() <= bound
    for x in (*(x for x in out if x is not None), grads[0]):
        assert x.dtype == jnp.float32 and np.all(np.asarray(x)[count:] == 0)
    for got, exact in zip(grads, want_grads):
        assert got.shape == exact.shape and got.dtype == jnp.float32 and relative(got, exact) <= gradient
    if count == 0:
        assert not np.any(np.asarray(grads[1]))


@pytest.mark.parametrize("count", [0, 1, 200, 384, 513, 600])
def test_counts_on_tiles_that_divide_nothing(count):
    # Five blocks of tokens, three of the vocabulary, two cores. Up to three live blocks d-hidden stays in vector memory, then it goes around.
    check(PLAIN, problem(600, 700, 96), count, chip=CHIPS["v5p"], tiles=(128, 256))


@pytest.mark.parametrize("static,n,V,D,count", [(PLAIN, 1, 513, 64, 1), (RICH, 7, 513, 576, 5), (Logits(), 300, 130, 64, 300), (Logits(2.0, soft_cap=3.0), 40, 57, 3, 33)])
def test_default_tiles_and_every_way_to_make_logits(static, n, V, D, count):
    check(static, problem(n, V, D), count)


def test_logits_of_ten_thousand():
    inputs = problem(200, 300, 8, largest=1e4)
    # A tempered logit of 1e4 has a spacing of 1e-3 in float32, so has the exponent of p: the gradients cannot be better.
    check(Logits(with_entropy=True), inputs, 150, gradient=2e-3, tiles=(128, 128))


def test_bfloat16_accumulates_in_float32():
    check(PLAIN, problem(300, 700, 64, dtype=jnp.bfloat16), 260, dtype=jnp.bfloat16, gradient=1e-2, tiles=(128, 256))


def test_nothing_is_read_before_it_is_written_and_no_copy_races(capfd):
    check(PLAIN, problem(520, 250, 8), 520, interpret=STRICT, tiles=(128, 128))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
def test_two_cores_share_a_device(capfd):
    # Three tiles of the head: the second core has one, and a turn without work. Both add up their own d-hidden.
    check(RICH, problem(520, 300, 8), 400, interpret=TWO_CORES, chip=CHIPS["v5p"], tiles=(128, 128))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
def test_a_ring_that_is_too_small_is_seen(capfd, monkeypatch):
    monkeypatch.setattr(pallas_tpu_backward, "RING", 2)  # the next tile would arrive where the last one is still leaving
    compiled.cache_clear()
    run(PLAIN, problem(520, 250, 8), 520, interpret=STRICT, tiles=(128, 128))
    compiled.cache_clear()
    assert "RACE DETECTED" in capfd.readouterr().out


def test_blocks_of_dead_tokens_are_not_computed(monkeypatch):
    # The interpreter runs every block of the grid: the logits made are counted.
    made = []
    plain = pallas_tpu_backward.tile_logits

    def counted(*args):
        jax.debug.callback(lambda: made.append(1))
        return plain(*args)

    for module in (pallas_tpu, pallas_tpu_backward):
        monkeypatch.setattr(module, "tile_logits", counted)
    compiled.cache_clear()
    run(PLAIN, problem(512, 256, 8), 129, tiles=(128, 128))
    compiled.cache_clear()
    jax.effects_barrier()
    assert len(made) == 2 * 2 * 2  # passes, tiles of the head, live blocks of four


def test_no_tokens():
    none, row = jnp.zeros((0, 8)), jnp.zeros(0)
    head = jnp.ones((5, 8))
    assert [x.shape for x in pallas_tpu.forward(PLAIN, none, head, row.astype(int), jnp.int32(0))] == [(0,)] * 3
    d_hidden, d_head = pallas_tpu.backward(PLAIN, none, head, row.astype(int), jnp.int32(0), row, row, row, row)
    assert d_hidden.shape == (0, 8) and d_head.shape == (5, 8) and not d_head.any()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("chip", sorted(set(CHIPS) - {"v4"}))
def test_default_tiles_fit_and_keep_the_matrix_units_busy(chip, itemsize):
    for width in (3, 64, 576, 896, 2048, 4096, 5120, 8192):
        for choose, need in ((forward_tiles, forward_bytes), (backward_tiles, backward_bytes)):
            for tokens, vocab in ((1, 2), (7, 513), (1000, 49152), (8192, 151936), (16384, 128256)):
                tiles = choose(tokens, vocab, width, itemsize, CHIPS[chip])
                assert need(tiles, width, itemsize) <= usable(CHIPS[chip]) and tiles.tokens % 128 == tiles.vocab % 128 == 0
                assert tiles.tokens < tokens + 256 and tiles.vocab < vocab + 512
        if width <= 4096 and itemsize == 2:
            assert forward_tiles(8192, 151936, width, 2, CHIPS[chip]).tokens >= 1024
            assert backward_tiles(8192, 151936, width, 2, CHIPS[chip]) >= Tiles(256, 512)


@pytest.mark.parametrize("tiles,seen", [((2048, 2048), r"2048 tokens x 2048 .* width 4096 need \d+\.\d MiB .* gives 112\.0 MiB; take smaller"),
                                        ((None, 8192), "8192 vocabulary rows .* take smaller"), ((100, None), "block_tokens 100 must be a positive multiple of 128"),
                                        ((128, -128), "block_vocab -128 must be a positive multiple of 128")])
@pytest.mark.parametrize("choose", [forward_tiles, backward_tiles])
def test_tiles_that_do_not_fit_are_refused_in_one_line(choose, tiles, seen):
    with pytest.raises(ValueError, match=seen) as e:
        choose(8192, 151936, 4096, 4, CHIPS["v5e"], tiles)
    assert "\n" not in str(e.value)


def test_a_width_that_fits_nowhere_names_the_way_out():
    with pytest.raises(ValueError, match="use implementation 'chunked'"):
        backward_tiles(8192, 151936, 65536, 2, CHIPS["v5p"])


def test_a_dtype_that_is_not_multiplied_is_refused():
    row = jnp.zeros(3, jnp.int32)
    for hidden, head in (("float16", "float16"), ("bfloat16", "float32")):
        with pytest.raises(ValueError, match=f"pallas_tpu: hidden {hidden} and head {head} must both be float32 or bfloat16; cast them, or use") as e:
            pallas_tpu.forward(PLAIN, jnp.zeros((3, 8), hidden), jnp.zeros((5, 8), head), row, jnp.int32(3))
        assert "\n" not in str(e.value)


# -- as the rest of the program meets them

INTERPRETED = streamed.Passes(*(functools.partial(f, interpret=True, block_tokens=128, block_vocab=128) for f in (pallas_tpu.forward, pallas_tpu.backward)))


@pytest.mark.parametrize("mesh", [pytest.param(None, marks=pytest.mark.slow), (2, 1, 2)], ids=["one device", "2x2"])
def test_what_a_program_for_tpu_takes_by_default_gives_what_the_reference_gives(mesh, monkeypatch):
    """Policy loss and log-probabilities; 301 tokens and 300 columns make two blocks of each on a quarter of the devices."""
    n, V, D = 301, 300, 8
    hidden, head, _, g, ge = problem(n, V, D)
    rng = np.random.default_rng(1)
    columns = {"targets": rng.integers(0, V, n), "advantage": g, "weights": np.where(rng.random(n) < 0.7, rng.random(n) + 0.5, 0), "g": g, "ge": ge,
               "old_logprob": -rng.random(n), "behavior_logprob": -rng.random(n), "ref_logprob": -6 - rng.random(n)}

    def value(implementation, hidden, head, targets, g, ge, **columns):
        out = policy_loss(hidden, head, targets, objective=Objective(entropy_coef=0.1, kl_coef=0.2), temperature=0.7, soft_cap=30.0, implementation=implementation,
                          **columns)
        logprob, entropy = token_logprob(hidden, head, targets, weights=columns["weights"], with_entropy=True, implementation=implementation)
        return out.sum + jnp.sum(g * logprob + ge * entropy), (out, logprob, entropy)

    def run(implementation, dtype):
        args = {k: jnp.asarray(x, dtype if x.dtype.kind == "f" else None) for k, x in columns.items()}
        return jax.jit(jax.value_and_grad(functools.partial(value, implementation), (0, 1), has_aux=True))(jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), **args)

    with jax.enable_x64(True):
        want = jax.tree.map(lambda x: np.asarray(x, np.float64), run("reference", jnp.float64))
    monkeypatch.setattr(by_platform, "kernels_for_tpu", lambda *_: INTERPRETED)
    monkeypatch.setattr(by_platform, "_DEFAULT", INTERPRETED)
    monkeypatch.setattr(fused, "on_tpu", lambda kernel, _: kernel)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(*mesh, devices=jax.devices()[:4])):
        got = run(None, jnp.float32)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert relative(a, b) <= 5e-6


def test_by_name_they_stop_a_program_for_another_platform():
    arrays = jnp.ones((3, 4)), jnp.ones((9, 4)), jnp.zeros(3, int)

    def loss(hidden, head, targets):
        return token_logprob(hidden, head, targets, implementation="pallas_tpu")[0].sum()

    said = r"^token_logprob 'pallas_tpu' is a TPU kernel and this program is compiled for cpu; use 'chunked', or None to choose by platform"
    update = jax.grad(lambda *a: policy_loss(*a, advantage=jnp.ones(3), weights=jnp.ones(3), implementation="pallas_tpu", behavior_logprob=jnp.zeros(3)).sum)
    for call in (jax.jit(loss), jax.jit(update)):
        with pytest.raises(ValueError, match=said):
            call(*arrays)


@pytest.mark.parametrize(("width", "dtype", "kernels"), [(64, "float32", True), (8192, "bfloat16", True), (65536, "bfloat16", False), (64, "float16", False)])
def test_by_default_they_are_left_out_where_they_cannot_run(width, dtype, kernels):
    arrays = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in (((300, width), dtype), ((700, width), dtype), ((300,), "int32"))]
    row = jnp.ones(300)
    calls = (lambda *a: token_logprob(*a)[0].sum(), lambda *a: policy_loss(*a, advantage=row, weights=row, behavior_logprob=row).sum)
    assert [("pallas_call" in str(jax.make_jaxpr(jax.grad(call, (0, 1)))(*arrays))) for call in calls] == [kernels] * 2


RATES = {"v5e": (197e12, 819e9), "v5p": (459e12, 2765e9), "v6e": (918e12, 1640e9)}  # published: bfloat16 FLOP/s, bytes/s of main memory


def one_pass_seconds(chip, n, V, D, chunk):
    flops, bandwidth = RATES[chip]
    matmul, head, logits = 2 * n * V * D / flops, 2 * -(-n // chunk) * V * D / bandwidth, 2 * n * V / bandwidth  # times of FLOPs, and of bfloat16 bytes
    return max(matmul, head + 2 * logits) + 7 * logits + max(matmul, head + logits) + max(matmul, 4 * head + logits)


def two_pass_seconds(chip, n, V, D):
    flops, bandwidth = RATES[chip]
    matmul, tokens, vocab = 2 * n * V * D / flops, forward_tiles(n, V, D, 2, CHIPS[chip]).tokens, backward_tiles(n, V, D, 2, CHIPS[chip]).vocab
    backward = (-(-V // vocab) * n * 10 + V * 6) * D / bandwidth
    return max(matmul, 2 * (-(-n // tokens) * V + n) * D / bandwidth) + max(3 * matmul, backward)


def test_the_estimates_that_the_rule_gives_as_its_reason():
    def row(*times):
        show = [" / ".join(f"{1e3 * t(chip):.{0 if t(chip) >= 0.00995 else 1}f}" for t in times) for chip in RATES]
        return " ".join(show)

    n, doc = 8192, " ".join(by_platform.kernels_for_tpu.__doc__.split())
    for V, D in ((151936, 4096), (37984, 4096), (49152, 576)):
        chunk = blocks.chunk_size(n, V)
        one, wide, two = (lambda c, V=V, D=D, chunk=chunk: one_pass_seconds(c, n, V, D, chunk), lambda c, V=V, D=D: one_pass_seconds(c, n, V, D, 1024),
                          lambda c, V=V, D=D: two_pass_seconds(c, n, V, D))
        if V == 151936:
            assert f"{chunk} tokens (the rule's, 74 MiB) {row(one)} 1024 tokens (0.6 GiB of logits) {row(wide)} two passes in kernels {row(two)}" in doc
        else:
            assert f"one pass, chunks of {chunk} / kernels {row(one, two)}" in doc
        assert all(two(chip) < one(chip) for chip in RATES)


@pytest.mark.slow
@pytest.mark.parametrize("n,V,D,count", [(1000, 49152, 64, 1000), (1000, 128256, 64, 700), (1000, 151936, 64, 999), (7, 151936, 576, 7), (7, 513, 4096, 6), (1, 24576, 4096, 1)])
def test_float32_at_real_vocabularies(n, V, D, count):
    # Logits as a model has them: of unit normals at width 576 they reach 170, where the rounding of a sum alone is 1e-5 of p.
    check(PLAIN, problem(n, V, D, largest=30), count, chip=CHIPS["v5e"])


@pytest.mark.slow
def test_strict_memory_at_a_real_vocabulary(capfd):
    check(PLAIN, problem(1000, 49152, 64), 900, interpret=STRICT, chip=CHIPS["v5e"], tiles=(128, 2048))
    assert "RACE DETECTED" not in capfd.readouterr().out
