"""The TPU kernels of token_logprob: numerics in the interpreter against float64, races, compilation for chips that are not here."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.kernels.token_logprob import pallas_tpu, pallas_tpu_backward, reference
from rlvr_jax.kernels.token_logprob.logits import Logits
from rlvr_jax.kernels.token_logprob.pallas_tpu_tiles import (
    CHIPS,
    MIB,
    UNKNOWN,
    Tiles,
    backward_bytes,
    backward_tiles,
    current_chip,
    forward_bytes,
    forward_tiles,
    usable,
)

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
    """(lse, target_logit, mean_logit), (d_hidden, d_head) in float64; rows from ``count`` on are 0."""
    n, (h, targets, g, ge) = len(hidden), (x[:count] for x in (hidden, targets, d_logprob, d_entropy))
    u = h @ head.T * static.logit_scale
    slope = static.logit_scale / static.temperature * np.ones_like(u)
    if static.soft_cap is not None:
        slope *= 1 - np.tanh(u / static.soft_cap) ** 2
        u = static.soft_cap * np.tanh(u / static.soft_cap)
    z = u / static.temperature
    top = z.max(axis=1, initial=-1e300)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    p = np.exp(z - lse[:, None])
    mean = (p * z).sum(axis=1)
    hit = np.arange(len(head)) == targets[:, None]
    d_z = g[:, None] * (hit - p) - (ge[:, None] * p * (z - mean[:, None]) if static.with_entropy else 0)
    d_u = d_z * slope

    def whole(x):
        return np.concatenate([x, np.zeros((n - count, *x.shape[1:]))])

    return tuple(map(whole, (lse, (hit * z).sum(axis=1), mean))), (whole(d_u @ head), d_u.T @ h), np.abs(z).max(initial=1.0)


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
    # Five blocks of tokens, three of the vocabulary. Up to three live blocks d-hidden stays in vector memory, then it goes around.
    check(PLAIN, problem(600, 700, 96), count, tiles=(128, 256))


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


def test_two_cores_share_a_device(capfd):
    # Three tiles of the head: the second core has one, and a turn without work. Both add up their own d-hidden.
    check(RICH, problem(520, 300, 8), 400, interpret=TWO_CORES, chip=CHIPS["v5p"], tiles=(128, 128))
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_a_ring_that_is_too_small_is_seen(capfd, monkeypatch):
    monkeypatch.setattr(pallas_tpu_backward, "RING", 2)  # the next tile would arrive where the last one is still leaving
    compiled.cache_clear()
    run(PLAIN, problem(520, 250, 8), 520, interpret=STRICT, tiles=(128, 128))
    compiled.cache_clear()
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.parametrize("dead", [0, 3])
def test_blocks_of_dead_tokens_are_not_computed(dead, monkeypatch):
    # The interpreter runs every block of the grid: the logits made are counted.
    made = []
    plain = pallas_tpu_backward.tile_logits

    def counted(*args):
        jax.debug.callback(lambda: made.append(1))
        return plain(*args)

    for module in (pallas_tpu, pallas_tpu_backward):
        monkeypatch.setattr(module, "tile_logits", counted)
    compiled.cache_clear()
    run(PLAIN, problem(512, 256, 8), 512 - 128 * dead, tiles=(128, 128))
    compiled.cache_clear()
    jax.effects_barrier()
    assert len(made) == 2 * 2 * (4 - dead)


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
        choose(8192, 151936, 4096 if choose is backward_tiles or tiles[0] != 2048 else 4096, 4, CHIPS["v5e"], tiles)
    assert "\n" not in str(e.value)


def test_a_width_that_fits_nowhere_names_the_way_out():
    with pytest.raises(ValueError, match="use implementation 'chunked'"):
        backward_tiles(8192, 151936, 65536, 2, CHIPS["v5p"])


@pytest.mark.slow
@pytest.mark.parametrize("n,V,D,count", [(1000, 49152, 64, 1000), (1000, 128256, 64, 700), (1000, 151936, 64, 999), (7, 151936, 576, 7), (7, 513, 4096, 6), (1, 151936, 4096, 1)])
def test_float32_at_real_vocabularies(n, V, D, count):
    check(PLAIN, problem(n, V, D), count, chip=CHIPS["v5e"])


@pytest.mark.slow
def test_strict_memory_at_a_real_vocabulary(capfd):
    check(PLAIN, problem(1000, 49152, 64), 900, interpret=STRICT, chip=CHIPS["v5e"], tiles=(128, 2048))
    assert "RACE DETECTED" not in capfd.readouterr().out


# ---------------------------------------------------------------- compiled for chips that are not here

TOPOLOGY = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TOKENS, VOCAB, WIDTH = 8192, 151936, 4096


@functools.cache
def devices(chip):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is missing: pip install 'rlvr-jax[tpu-aot]'")
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("TPU_ACCELERATOR_TYPE", "v5litepod-4"), ("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_WORKER_ID", "0")):
        os.environ.setdefault(name, value)
    return np.array(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[chip]).devices)


def arguments(mesh, dtype, n=TOKENS, V=VOCAB, D=WIDTH, tokens=None, vocab=None, shards=()):
    """Abstract arguments of the backward pass; the first four are those of the forward pass."""
    def shape(size, dtype, *spec):
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P(*spec)))

    row = shape((n,), jnp.float32, tokens)
    return [shape((n, D), dtype, tokens, None), shape((V, D), dtype, vocab, None), shape((n,), jnp.int32, tokens),
            shape(shards, jnp.int32, *(tokens,) * len(shards)), row, row, row, row]


def temporaries(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes / MIB


def passes(chip, static=PLAIN, **kw):
    return functools.partial(pallas_tpu.forward, static, chip=CHIPS[chip], **kw), functools.partial(pallas_tpu.backward, static, chip=CHIPS[chip], **kw)


@pytest.mark.aot
@pytest.mark.parametrize("chip", TOPOLOGY)
def test_compiled_temporaries_are_megabytes_where_plain_ones_are_gigabytes(chip):
    args = arguments(Mesh(devices(chip)[:1], "x"), jnp.bfloat16)
    forward, backward = passes(chip)

    def plain(hidden, head, targets, count, *_):
        logprob, entropy = reference.token_logprob(hidden, head, targets, jnp.arange(TOKENS) < count, temperature=0.7, with_entropy=True)
        return logprob, entropy

    ours, theirs = (temporaries(forward, *args[:4]), temporaries(backward, *args)), temporaries(plain, *args[:4])
    print(f"{chip}: forward {ours[0]:.2f} MiB, backward {ours[1]:.2f} MiB, plain forward {theirs:.0f} MiB")
    assert ours[0] < 1 and theirs > 1024
    # A device of two cores keeps the sum over half of the vocabulary for each: 128 MiB at these sizes.
    assert ours[1] < 1 + (2 * 4 * TOKENS * WIDTH / MIB if CHIPS[chip].cores == 2 else 0)


@pytest.mark.aot
@pytest.mark.parametrize("chip,dtype,static,n,V,D", [
    ("v5e", jnp.bfloat16, Logits(), 7, 513, 72), ("v5e", jnp.float32, RICH, 1000, 49152, 576), ("v5p", jnp.bfloat16, RICH, 1000, 128256, 2048),
    ("v6e", jnp.bfloat16, PLAIN, 1000, 49152, 576), ("v6e", jnp.float32, RICH, 300, 151936, 4096), ("v5p", jnp.bfloat16, PLAIN, 8192, 151936, 8192)])
def test_default_tiles_compile_within_their_budget(chip, dtype, static, n, V, D):
    args = arguments(Mesh(devices(chip)[:1], "x"), dtype, n, V, D)
    forward, backward = passes(chip, static)
    for fn, given in ((forward, args[:4]), (backward, args)):  # the compiler is given our own estimate as its limit
        jax.jit(fn).lower(*given).compile()


@pytest.mark.aot
def test_a_tile_that_is_too_large_is_refused_by_us_and_not_by_the_compiler():
    args = arguments(Mesh(devices("v5e")[:1], "x"), jnp.bfloat16)
    for fn, given in zip(passes("v5e", block_tokens=4096, block_vocab=4096), (args[:4], args)):
        with pytest.raises(ValueError, match="pallas_tpu .*4096 tokens x 4096 vocabulary rows of width 4096 need .* take smaller") as e:
            jax.jit(fn).lower(*given)
        assert "\n" not in str(e.value)


@pytest.mark.aot
@pytest.mark.parametrize("chip", TOPOLOGY)
def test_the_chip_is_that_of_the_mesh(chip):
    mesh = Mesh(devices(chip)[:1], "x", axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert current_chip() == CHIPS[chip]
    assert current_chip() == UNKNOWN


@pytest.mark.aot
@pytest.mark.parametrize("chip", TOPOLOGY)
def test_compiled_on_four_chips(chip):
    """Tokens over one axis and the vocabulary over the other: each device runs the kernels on its shard, sums meet outside."""
    mesh = Mesh(devices(chip)[:4].reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    forward, backward = passes(chip)

    def step(hidden, head, targets, count, g, ge):
        count = count[0]
        targets = targets - jax.lax.axis_index("tensor") * head.shape[0]
        lse, target, mean = forward(hidden, head, targets, count)
        top = jax.lax.pmax(lse, "tensor")
        share = jnp.exp(lse - top)
        total = jax.lax.psum(share, "tensor")
        lse, mean = top + jnp.log(total), jax.lax.psum(share * mean, "tensor") / total
        d_hidden, d_head = backward(hidden, head, targets, count, lse, mean, g, ge)
        return jax.lax.psum(target, "tensor") - lse, lse - mean, jax.lax.psum(d_hidden, "tensor"), jax.lax.psum(d_head, "data")

    rows, vocab = P("data"), P("tensor")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(rows, vocab, rows, rows, rows, rows), out_specs=(rows, rows, rows, vocab), check_vma=False)
    args = arguments(mesh, jnp.bfloat16, n=2 * TOKENS, tokens="data", vocab="tensor", shards=(2,))
    text = jax.jit(sharded).lower(*args[:6]).compile()
    memory = text.memory_analysis().temp_size_in_bytes / MIB
    print(f"{chip} 2x2: {memory:.0f} MiB")
    shard = 4 * VOCAB // 2 * WIDTH / MIB  # d_head before it meets the other data shard: the only large array
    assert memory < 1.2 * shard + 5 * 4 * TOKENS * WIDTH / MIB
    assert f"{TOKENS},{VOCAB // 2}]" not in text.as_text() and f"{VOCAB // 2},{TOKENS}]" not in text.as_text()
