"""Attention of training: every implementation against the reference in float64, segments apart, sharded, bounded memory, loud refusals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlvr_jax import config as configs
from rlvr_jax.config import Model
from rlvr_jax.kernels.attention import api, blocks, reference, splash
from rlvr_jax.kernels.attention.api import packed_attention
from rlvr_jax.models.decoder import DecoderConfig, abstract_params, forward, init_params
from rlvr_jax.sharding import make_mesh

MODEL = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8)
# B, T, H, K, head size, longest segment: nothing divides anything, and rows of one segment.
CASES = [(2, 39, 4, 2, 8, 13), (1, 200, 4, 2, 10, 70), (2, 131, 4, 1, 8, 131)]
CALLS = {"blocks": blocks.attention, "loop": None, "splash": functools.partial(splash.attention, size=128, interpret=True)}
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}


def segments(rng, B, T, window, gaps=True):
    """``[B, T]``: segments of random length side by side, 0 between some of them."""
    out = np.zeros((B, T), np.int32)
    for row in out:
        at, number = 0, 1
        while at < T:
            n = min(int(rng.integers(1, window + 1)), T - at)
            row[at:at + n] = number
            at, number = at + n + (int(rng.integers(0, 3)) if gaps else 0), number + 1
    return out


def problem(B, T, H, K, hd, window, seed=0):
    """q, k, v, the cotangent (0 at padding, as the loss leaves it), segments."""
    rng = np.random.default_rng(seed)
    segment = segments(rng, B, T, window)
    q, k, v, g = (rng.normal(size=shape) for shape in ((B, T, H, hd), (B, K, T, hd), (B, K, T, hd), (B, T, H, hd)))
    return q, k, v, g * (segment > 0)[:, :, None, None], segment


def value_and_grads(call, q, k, v, g, segment, dtype=jnp.float32):
    """(output at real tokens, d_q, d_k, d_v) in float64 numpy."""
    return [np.asarray(x, np.float64) for x in _compiled(call)(*(jnp.asarray(x, dtype) for x in (q, k, v, g)), jnp.asarray(segment))]


@functools.lru_cache(maxsize=4)
def _compiled(call):
    @jax.jit
    def run(q, k, v, g, segment):
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, segment), q, k, v)
        return jnp.where((segment > 0)[:, :, None, None], out, 0), *pull(g)

    return run


@functools.cache
def truth(case):
    """The reference in float64, on inputs that bfloat16 holds exactly (so that both dtypes are given the same numbers)."""
    given = [x.astype(jnp.bfloat16).astype(np.float64) for x in problem(*case)[:4]]
    segment = problem(*case)[4]
    with jax.enable_x64(True):
        return (*given, segment), value_and_grads(functools.partial(reference.attention, window=case[-1]), *given, segment, dtype=jnp.float64)


def distance(got, want):
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want))


def test_the_reference_is_softmax_over_the_own_segment():
    """Written out in numpy, token by token."""
    q, k, v, _, segment = problem(2, 17, 4, 2, 6, 7)
    with jax.enable_x64(True):
        got = np.asarray(reference.attention(*(jnp.asarray(x) for x in (q, k, v, segment)), window=7))
    for b, t, h in np.ndindex(2, 17, 4):
        near = [s for s in range(t + 1) if segment[b, s] == segment[b, t]]
        p = np.exp([q[b, t, h] @ k[b, h // 2, s] / math.sqrt(6) for s in near])
        np.testing.assert_allclose(got[b, t, h], p @ v[b, h // 2, near] / p.sum(), rtol=1e-12)


@pytest.mark.parametrize(("case", "name", "dtype"), [
    *((case, name, "float32") for case in CASES for name in ("blocks", "loop")), (CASES[0], "splash", "float32"),
    *((CASES[1], name, "bfloat16") for name in CALLS), (CASES[1], "splash", "float32")])
def test_forward_and_backward_agree_with_the_reference_in_float64(case, name, dtype):
    given, want = truth(case)
    call = CALLS[name] or functools.partial(blocks.attention, walk=blocks.Plan(case[-1], 16, False))
    got = value_and_grads(functools.partial(call, window=case[-1]), *given, dtype=dtype)
    assert distance(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["blocks", "loop"])
def test_float64_stays_float64(name):
    given, want = truth(CASES[0])
    call = CALLS[name] or functools.partial(blocks.attention, walk=blocks.Plan(13, 16, False))
    with jax.enable_x64(True):
        assert distance(value_and_grads(functools.partial(call, window=13), *given, dtype=jnp.float64), want) < 1e-13


@pytest.mark.parametrize("name", ["blocks", "loop"])
def test_the_slope_of_the_softmax_is_summed_in_float32(name):
    """All values of a segment are one vector: the scores then change nothing, and what is left of d_q is rounding. Outside of jit, whose
    compiler may keep more digits than the program says."""
    q, k, v, g, _ = (jnp.asarray(x, jnp.bfloat16) for x in problem(1, 24, 2, 1, 64, 24))
    v = jnp.broadcast_to(v[:, :, :1], v.shape)
    call = functools.partial(blocks.attention, segment_ids=jnp.ones((1, 24), jnp.int32), window=24, walk=blocks.Plan(24, 8, name == "blocks"))
    d_q, d_k, d_v = (float(jnp.max(jnp.abs(x))) for x in jax.vjp(call, q, k, v)[1](g))
    assert max(d_q, d_k) < 1e-4 < d_v


@pytest.mark.parametrize("name", ["blocks", "loop", "splash"])
def test_a_segment_is_blind_to_the_others(name):
    case = CASES[0]
    q, k, v, g, segment = problem(*case)
    own = segment == 2
    g = g * own[:, :, None, None]
    call = functools.partial(CALLS[name] or functools.partial(blocks.attention, walk=blocks.Plan(13, 16, False)), window=13)
    before = value_and_grads(call, q, k, v, g, segment)
    other, other_k = ~own[:, :, None, None], ~own[:, None, :, None]
    after = value_and_grads(call, np.where(other, 30 - q, q), np.where(other_k, 30 - k, k), np.where(other_k, -1e4 * v, v), g, segment)
    for x, y, keep in zip(before, after, (~other, ~other, ~other_k, ~other_k)):
        np.testing.assert_allclose(x * keep, y * keep, atol=2e-6)
        assert np.abs(y * keep).max() > 0.1
    assert all(np.all(y * ~keep == 0) for y, keep in zip(after[1:], (~other, ~other_k, ~other_k)))


def test_without_segments_a_row_is_one():
    q, k, v, g, segment = problem(2, 20, 4, 2, 8, 20)
    want = value_and_grads(functools.partial(reference.attention, window=20), q, k, v, g, np.ones_like(segment))
    assert distance(value_and_grads(lambda q, k, v, _: packed_attention(q, k, v), q, k, v, g, np.ones_like(segment)), want) < 1e-6


@pytest.mark.parametrize(("B", "H", "T", "window"), [(1, 4, 24, 24), (2, 6, 384, 192), (1, 32, 8192, 4096), (2, 32, 32768, 32768), (1, 64, 131072, 4096)])
def test_a_plan_bounds_the_scores_and_the_program(B, H, T, window):
    walk = blocks.plan(B, H, T, window)
    assert walk.block % 8 == 0 and walk.window == window
    held = sum((end - start) * (end - low) for start, end, low in blocks._unrolled(walk, T)) if walk.unrolled else walk.block**2
    assert B * H * held <= blocks.SCORES
    assert not walk.unrolled or -(-T // walk.block) <= blocks.UNROLLED_BLOCKS


def temporaries(call, B, T, H, K, hd):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    loss = lambda q, k, v, s: jnp.sum(call(q, k, v, s))  # noqa: E731
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return run.lower(shape(B, T, H, hd), shape(B, K, T, hd), shape(B, K, T, hd), jax.ShapeDtypeStruct((B, T), jnp.int32)).compile().memory_analysis().temp_size_in_bytes


def test_long_rows_hold_no_square():
    T, H, hd = 8192, 2, 8
    linear = 4 * T * H * hd
    got = temporaries(functools.partial(blocks.attention, window=T), 1, T, H, 1, hd)
    assert got < 4 * blocks.SCORES + 20 * linear < H * T * T * 4 / 3


@pytest.mark.parametrize(("dtype", "exact"), [(jnp.float32, 20), (jnp.bfloat16, 0)])
def test_splash_multiplies_float32_in_all_digits_backwards_too(dtype, exact):
    """Ten products: two in the forward kernel, three for d_q, five for d_k and d_v; the interpreter would not show the difference."""
    q, k, _, _, segment = problem(1, 128, 2, 1, 8, 128)
    q, k = jnp.asarray(q, dtype), jnp.asarray(k, dtype)
    loss = lambda q, k, v: jnp.sum(splash.attention(q, k, v, jnp.asarray(segment), window=128))  # noqa: E731
    with jax.default_matmul_precision("high"):
        assert str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, k)).count("Precision.HIGHEST") == exact


@pytest.mark.parametrize("window", [1, 3, 4, 9, 24])
def test_the_band_that_splash_is_given(window):
    """Tile by tile it is the band written out, and equal bands are one to the cache of what was worked out about them."""
    band, at = splash._Band(24, window), np.arange(24)
    want = (at[:, None] >= at) & (at[:, None] - at < window)
    for i, j in np.ndindex(6, 6):
        tile = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
        np.testing.assert_array_equal(band[tile], want[tile])
    assert len({band, splash._Band(24, window), splash._Band(24, window + 1), splash._Band(28, window)}) == 3


def test_splash_pads_little():
    assert [splash.tile(T) for T in (1, 128, 200, 640, 768, 1000, 8192)] == [128, 128, 256, 128, 384, 512, 512]
    assert all(-T % splash.tile(T) < 128 or -T % splash.tile(T) <= T / 8 for T in range(1, 3000))


# --- on a mesh

SHARDED = {"all divide": (8, 24, 4, 2), "odd rows, few key heads": (3, 24, 4, 1), "odd heads": (4, 24, 3, 3)}


@pytest.mark.parametrize("shape", SHARDED.values(), ids=SHARDED.keys())
def test_sharded_equals_unsharded(shape):
    B, T, H, K = shape
    given = problem(B, T, H, K, 8, 10)
    call = lambda q, k, v, s: packed_attention(q, k, v, s, window=10)  # noqa: E731
    want = value_and_grads(call, *given)
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        assert distance(value_and_grads(call, *given), want) < 1e-6


def test_splash_on_a_mesh_works_on_local_arrays():
    given = problem(4, 39, 4, 2, 8, 13)
    shapes = []

    def local(q, k, v, s):
        shapes.append((q.shape, k.shape))
        return splash.attention(q, k, v, s, window=13, interpret=True)

    want = value_and_grads(functools.partial(reference.attention, window=13), *given)
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        got = value_and_grads(lambda *arrays: api._on_each_device(local, *arrays), *given)
    assert distance(got, want) < 5e-6
    assert set(shapes) == {((1, 39, 2, 8), (1, 1, 39, 8))}


# --- in the decoder

def decoder_grads(attention_kernel, remat, window=13):
    rng = np.random.default_rng(0)
    segment = jnp.asarray(segments(rng, 4, 39, 13))
    start = np.asarray([[np.flatnonzero(row == n)[0] for n in row] for row in np.asarray(segment)])
    positions = jnp.asarray(np.arange(39) - start, jnp.int32)
    tokens = jnp.asarray(rng.integers(0, 64, (4, 39)), jnp.int32)
    weight = jnp.asarray(rng.normal(size=(4, 39, 32)) * np.asarray(segment > 0)[..., None], jnp.float32)

    def loss(params):
        hidden, _ = forward(params, MODEL, tokens, positions, segment_ids=segment, window=window, remat=remat, attention_kernel=attention_kernel)
        return jnp.sum(hidden * weight)

    return jax.jit(jax.grad(loss))(init_params(MODEL, jax.random.key(0)))


def test_the_decoder_on_a_mesh_equals_the_reference_on_one_device():
    """Through scan and checkpoint."""
    want = decoder_grads("reference", "none")
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        got = decoder_grads(None, "dots")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.max(jnp.abs(b)))), got, want)


def lowered(attention_kernel):
    """The decoder's training pass for CPU, as the update and sft ask for it."""
    from rlvr_jax import scoring

    config = configs.validate({"model": {"attention": attention_kernel}})
    chunk = {name: jax.ShapeDtypeStruct((2, 96), jnp.int32) for name in ("tokens", "position", "segment")}
    return jax.jit(lambda p, c: scoring.hidden_states(p, MODEL, config, c, 12)[0]).lower(abstract_params(MODEL), chunk)


def lowered_sft(attention_kernel):
    import optax

    from rlvr_jax.sft import make_step

    optimizer, params, ints = optax.sgd(1.0), abstract_params(MODEL), functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    batch = {"tokens": ints((2, 96)), "prompt_length": ints((2,)), "response_length": ints((2,))}
    return make_step(MODEL, optimizer, Model(attention=attention_kernel)).lower(params, jax.eval_shape(optimizer.init, params), batch)


@pytest.mark.parametrize("lower", [lowered, lowered_sft])
def test_the_config_chooses_and_a_kernel_that_cannot_run_says_so_in_one_line(lower):
    with pytest.raises(ValueError, match=r"^attention 'splash' is a TPU kernel and this program is compiled for cpu; use 'blocks', or None ") as seen:
        lower("splash")
    assert "\n" not in str(seen.value)
    square = "2x2x2x96x96xf32"  # [B, K, H / K, T, T]
    assert square in lower("reference").as_text() and square not in lower(None).as_text()


def test_refused_outside_jit_too_and_in_a_derivative():
    q, k, v, _, segment = problem(1, 8, 2, 1, 8, 8)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    call = lambda q: jnp.sum(packed_attention(q, *arrays[1:], jnp.asarray(segment), implementation="splash"))  # noqa: E731
    for run in (call, jax.grad(call), lambda q: lax.scan(lambda x, _: (x + jax.grad(call)(x), None), q, length=2)[0]):
        with pytest.raises(ValueError, match="TPU kernel"):
            run(arrays[0])


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(("change", "message"), [
    ({"implementation": "flash"}, "attention 'flash' does not exist; use one of reference, blocks, splash, or None"),
    ({"k": zeros(1, 3, 8, 4), "v": zeros(1, 3, 8, 4)}, "K dividing H"),
    ({"v": zeros(1, 1, 8, 6)}, r"q \(1, 8, 2, 4\), k \(1, 1, 8, 4\), v \(1, 1, 8, 6\)"),
    ({"segment_ids": jnp.zeros((1, 7), jnp.int32)}, r"segment_ids \(1, 7\) must be \[B, T\] = \(1, 8\)"),
    ({"window": 0}, "window 0 must be at least 1"),
    ({"k": zeros(1, 1, 8, 4, dtype=jnp.bfloat16)}, "one dtype"),
    ({"implementation": "splash", "q": zeros(1, 8, 2, 4, dtype=jnp.float16), "k": zeros(1, 1, 8, 4, dtype=jnp.float16),
      "v": zeros(1, 1, 8, 4, dtype=jnp.float16)}, "'splash' takes float32 or bfloat16, not float16"),
])
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        packed_attention(**{"q": zeros(1, 8, 2, 4), "k": zeros(1, 1, 8, 4), "v": zeros(1, 1, 8, 4)} | change)


def test_config_and_kernel_know_the_same_names():
    for name in (None, *api.IMPLEMENTATIONS):
        assert configs.validate({"model": {"attention": name}}).model.attention == name
    with pytest.raises(configs.ConfigError, match=r"model\.attention"):
        configs.validate({"model": {"attention": "flash"}})
