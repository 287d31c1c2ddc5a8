"""The decoder and its cache: who sees whom, the same numbers on every path, sharded as unsharded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models import cache as caches
from rlvr_jax.models.decoder import (
    DecoderConfig,
    Llama3Rope,
    abstract_params,
    forward,
    head_matrix,
    init_params,
    param_axes,
    rope_frequencies,
    unstack_layers,
)
from rlvr_jax.sharding import make_mesh, named, shardings

CFG = DecoderConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
                    head_dim=8, rope_theta=1e4, qkv_bias=True, qk_norm=True)
T = 12

run = jax.jit(forward, static_argnames=("cfg", "compute_dtype", "remat", "cache_read"))


@pytest.fixture(scope="module")
def params():
    """Random everywhere: with norms of one and biases of zero a forgotten one would not show."""
    rng = np.random.default_rng(0)
    flat, treedef = jax.tree.flatten_with_path(abstract_params(CFG))
    return jax.tree.unflatten(treedef, [
        jnp.asarray(path[-1].key.endswith("norm") + 0.2 * rng.standard_normal(x.shape), jnp.float32) for path, x in flat])


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, CFG.vocab_size - 1, (3, T)), jnp.int32)


def arange(B: int, T: int, start: int = 0) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(start, start + T, dtype=jnp.int32), (B, T))


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance, rtol=tolerance)


def test_trees_match():
    for cfg in (CFG, dataclasses.replace(CFG, tie_embeddings=False, qkv_bias=False, qk_norm=False)):
        shapes, axes = abstract_params(cfg), param_axes(cfg)
        made = jax.eval_shape(lambda key, cfg=cfg: init_params(cfg, key), jax.random.key(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
        jax.tree.map(lambda x, a: len(x.shape) == len(a) or pytest.fail(f"{x} {a}"), shapes, axes,
                     is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))
        assert head_matrix(shapes, cfg).shape == (cfg.vocab_size, cfg.hidden_size)
        assert ("head" in shapes) is not cfg.tie_embeddings


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        dataclasses.replace(CFG, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim 7"):
        dataclasses.replace(CFG, head_dim=7)


def test_llama3_rope_has_three_regimes():
    scaling = Llama3Rope(8.0, 1.0, 4.0, 64)
    plain = rope_frequencies(CFG)
    scaled = rope_frequencies(dataclasses.replace(CFG, rope_scaling=scaling))
    ratio = np.asarray(scaled / plain)
    turns = 64 * np.asarray(plain) / (2 * np.pi)
    assert (ratio[turns > 4] == 1).all() and (turns > 4).any()
    close(ratio[turns < 1], 1 / 8)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size and (between > 1 / 8).all() and (between < 1).all()


def test_causal(params, tokens):
    """maxtext PR #4016, marin PR #1731: a later token must not change an earlier hidden state."""
    before, _ = run(params, CFG, tokens, arange(3, T))
    for t in (1, 5, T - 1):
        after, _ = run(params, CFG, tokens.at[:, t].add(1) % CFG.vocab_size, arange(3, T))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert (jnp.abs(before[:, t:] - after[:, t:]).max(-1) > 1e-4).all()


@pytest.mark.parametrize("mark", ["none", "segment_ids", "position"])
def test_a_row_is_the_same_alone_and_padded(params, tokens, mark):
    """maxtext PR #4016: right padding, whatever it holds, changes nothing."""
    length = np.array([4, T, 7])
    real = np.arange(T) < length[:, None]
    garbage = jnp.where(real, tokens, (tokens * 7 + 3) % CFG.vocab_size)
    position = jnp.where(real, arange(3, T), -1) if mark == "position" else arange(3, T)
    segment = jnp.asarray(real, jnp.int32) if mark == "segment_ids" else None
    padded, _ = run(params, CFG, garbage, position, segment_ids=segment)
    assert jnp.isfinite(padded).all()
    for b, n in enumerate(length):
        alone, _ = run(params, CFG, tokens[b : b + 1, :n], arange(1, n))
        close(padded[b, :n], alone[0])


@functools.partial(jax.jit, static_argnames=("remat", "compute_dtype"))
def gradients(params, tokens, segment_ids, remat="none", compute_dtype=jnp.float32):
    def loss(p):
        hidden, _ = forward(p, CFG, tokens, arange(3, T), segment_ids=segment_ids, remat=remat, compute_dtype=compute_dtype)
        return jnp.sum(hidden.astype(jnp.float32)[..., :3] ** 2)

    return jax.grad(loss)(params)


def test_all_padding_has_finite_gradients(params, tokens):
    for g in jax.tree.leaves(gradients(params, tokens, np.zeros((3, T), np.int32))):
        assert np.isfinite(g).all()


def test_packed_segments_equal_rows_and_do_not_talk(params, tokens):
    """verl #1381."""
    a, b = tokens[0, :4], tokens[1, :7]
    packed = np.concatenate([a, b, np.zeros(T - 11)]).astype(np.int32)[None]
    position = np.concatenate([np.arange(4), np.arange(7), np.zeros(T - 11)]).astype(np.int32)[None]
    segment = np.asarray([[1] * 4 + [2] * 7 + [0] * (T - 11)], np.int32)
    hidden, _ = run(params, CFG, packed, position, segment_ids=segment)
    close(hidden[0, :4], run(params, CFG, a[None], arange(1, 4))[0][0])
    close(hidden[0, 4:11], run(params, CFG, b[None], arange(1, 7))[0][0])
    other = packed.copy()
    other[0, 2] += 1
    touched, _ = run(params, CFG, other, position, segment_ids=segment)
    np.testing.assert_array_equal(hidden[0, 4:11], touched[0, 4:11])
    assert jnp.abs(hidden[0, 2:4] - touched[0, 2:4]).max() > 1e-4


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mark", ["segment_ids", "position"])
def test_prefill_and_decode_equal_the_full_forward(params, tokens, stacked, mark):
    """Ragged right-padded prompts leave holes in the cache; every later position agrees with a forward without cache."""
    P, length = 6, np.array([6, 3, 1])
    p = params if stacked else unstack_layers(params)
    real = np.arange(P) < length[:, None]
    position = arange(3, P) if mark == "segment_ids" else jnp.where(real, arange(3, P), -1)
    segment = jnp.asarray(real, jnp.int32) if mark == "segment_ids" else None
    cache = caches.init_cache(CFG, 3, P, stacked=stacked)
    hidden, cache = run(p, CFG, jnp.where(real, tokens[:, :P], 5), position, segment_ids=segment, cache=cache)
    full, _ = run(params, CFG, tokens, arange(3, T))
    cache = caches.grow(cache, P + 5)
    np.testing.assert_array_equal(cache.position[:, :P], np.where(real, np.arange(P), -1))
    for b, n in enumerate(length):
        close(hidden[b, :n], full[b, :n])
    for i in range(5):
        at = jnp.asarray(length + i)
        one = jnp.take_along_axis(tokens, at[:, None], axis=1)
        hidden, cache = run(p, CFG, one, at[:, None].astype(jnp.int32), cache=cache)
        close(hidden[:, 0], jnp.take_along_axis(full, at[:, None, None], axis=1)[:, 0])
    assert int(cache.index) == P + 5


def test_cache_read_and_repeat_rows(params, tokens):
    """Reading only the filled columns, and one prefill for G samples, change nothing."""
    p = unstack_layers(params)
    _, cache = run(p, CFG, tokens[:, :4], arange(3, 4), cache=caches.init_cache(CFG, 3, 16))
    wide = caches.repeat_rows(cache, 2)
    assert wide.k[0].shape == (6, CFG.num_kv_heads, 16, CFG.head_dim)
    step = jnp.repeat(tokens[:, 4:5], 2, axis=0)
    a, _ = run(p, CFG, step, arange(6, 1, 4), cache=wide)
    b, _ = run(p, CFG, step, arange(6, 1, 4), cache=wide, cache_read=5)
    close(a, b)
    full, _ = run(params, CFG, tokens, arange(3, T))
    close(a[::2, 0], full[:, 4])
    np.testing.assert_array_equal(a[::2], a[1::2])
    with pytest.raises(ValueError, match="cannot shrink to 8"):
        caches.grow(cache, 8)


def test_cache_and_layers_must_have_one_form(params, tokens):
    with pytest.raises(ValueError, match="both be stacked or both be tuples"):
        forward(params, CFG, tokens, arange(3, T), cache=caches.init_cache(CFG, 3, T))


def test_a_decode_step_updates_the_cache_in_place(params):
    """With the cache donated, nothing as large as the cache is allocated."""
    p, cache = unstack_layers(params), caches.init_cache(CFG, 2, 2048)
    step = jax.jit(lambda p, t, q, c: forward(p, CFG, t, q, cache=c)[1], donate_argnums=3)
    memory = step.lower(p, jnp.zeros((2, 1), jnp.int32), arange(2, 1), cache).compile().memory_analysis()
    one = cache.k[0].nbytes
    assert memory.alias_size_in_bytes >= 2 * CFG.num_layers * one
    assert memory.temp_size_in_bytes < one


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_memory_only(params, tokens, remat):
    real = np.ones((3, T), np.int32)
    jax.tree.map(close, gradients(params, tokens, real), gradients(params, tokens, real, remat))


def test_bfloat16_runs_on_every_path_and_is_near(params, tokens):
    exact, _ = run(params, CFG, tokens, arange(3, T))
    hidden, _ = run(params, CFG, tokens, arange(3, T), compute_dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    assert jnp.abs(hidden.astype(jnp.float32) - exact).mean() < 0.05 * jnp.abs(exact).mean()
    p = unstack_layers(params, jnp.bfloat16)
    assert p["layers"][0]["wq"].dtype == jnp.bfloat16 and p["layers"][0]["q_norm"].dtype == jnp.float32
    cache = caches.init_cache(CFG, 3, T, jnp.bfloat16)
    _, cache = run(p, CFG, tokens[:, : T - 1], arange(3, T - 1), cache=cache, compute_dtype=jnp.bfloat16)
    last, _ = run(p, CFG, tokens[:, T - 1 :], arange(3, 1, T - 1), cache=cache, compute_dtype=jnp.bfloat16)
    assert jnp.abs((last[:, 0] - hidden[:, -1]).astype(jnp.float32)).max() < 0.1


def test_bfloat16_gradients(params, tokens):
    """Finite, float32 like the masters, and near the float32 ones."""
    real = np.ones((3, T), np.int32)
    got, exact = gradients(params, tokens, real, "dots", jnp.bfloat16), gradients(params, tokens, real)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(exact)):
        assert g.dtype == jnp.float32 and np.linalg.norm(np.asarray(g) - e) < 0.05 * np.linalg.norm(e)


def test_sharded_equals_unsharded(tokens):
    """2 x 2 x 2 fake devices: hidden states and gradients; activations stay sharded by rows."""
    cfg, mesh = dataclasses.replace(CFG, tie_embeddings=False), make_mesh(2, 2, 2)
    params = jax.jit(lambda key: init_params(cfg, key))(jax.random.key(3))
    rows = jnp.concatenate([tokens, tokens[:1]])

    def loss(p, tokens):
        hidden, _ = forward(p, cfg, tokens, arange(4, T))
        return jnp.sum(jnp.sin(hidden @ head_matrix(p, cfg).T)), hidden

    step = jax.value_and_grad(loss, has_aux=True)
    (value, hidden), grads = jax.jit(step)(params, rows)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(mesh, param_axes(cfg), abstract_params(cfg)))
        (value8, hidden8), grads8 = jax.jit(step)(placed, jax.device_put(rows, named(mesh, "batch", None)))
    close(value8, value)
    close(hidden8, hidden)
    assert hidden8.addressable_shards[0].data.shape[0] == 1
    jax.tree.map(close, grads8, grads)  # the largest is 30
