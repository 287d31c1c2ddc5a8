"""Skipping is exact: the gradient is that of the whole batch with the dropped weights set to 0, for every preset."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_cases import KEY, MODEL, G, N, P, R, a_batch, a_config, distance

from rlvr_jax import strategies
from rlvr_jax.coefficients import make_coefficients
from rlvr_jax.losses import denominator_counts, token_scale
from rlvr_jax.models.decoder import forward, head_matrix, init_params, param_axes
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.strategies.presets import PRESETS
from rlvr_jax.types import response_mask
from rlvr_jax.update import gradients

LISTS = [[], *([name] for name in PRESETS), ["difffilter", "softmax"]]
LAYOUTS = {"packed": dict(micro=4), "unpacked": dict(micro=4, train={"packing": False}), "packed, 8 devices": dict(micro=8, mesh=(2, 2, 2)),
           "unpacked, 8 devices": dict(micro=4, mesh=(2, 2, 2), train={"packing": False})}


@functools.cache
def batch():
    rng = np.random.default_rng(5)
    reward = rng.integers(0, 3, N * G).astype(np.float32) / 2
    reward[:G] = 1  # an ineffective group
    valid = np.ones(N * G, bool)
    valid[7] = False
    return a_batch(seed=5, rewards=reward, valid=valid, logprob=rng.uniform(-6, 0, (N * G, P + R)).astype(np.float32))


@functools.cache
def coefficients(names):
    config = a_config()
    strategy = strategies.build(list(names))
    return make_coefficients(batch(), jnp.int32(0), strategy.init(), config.algorithm, strategy, G, False)[0]


def with_dtype(config, dtype):
    return config.model_copy(update={"model": config.model.model_copy(update={"compute_dtype": dtype})})


@functools.cache
def compiled(layout, dtype):
    """Gradients by the update's own loop, for any coefficients."""
    config = with_dtype(a_config(**LAYOUTS[layout]), dtype)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    params = init_params(MODEL, KEY)
    params = jax.device_put(jax.tree.map(lambda x: x.astype(dtype), params), shardings(mesh, param_axes(MODEL), params))
    rows = jnp.ones(N * G, bool)
    run = jax.jit(lambda p, c: gradients(p, batch(), c, rows, None, None, MODEL, config)[0])

    def call(c):
        with jax.set_mesh(mesh):
            return jax.tree.map(np.asarray, run(params, c))

    return call


@functools.cache
def whole(dtype):
    """Every row, padded, in one pass, by autodiff of the obvious loss."""
    b, T = batch(), P + R

    def loss(params, c):
        hidden, _ = forward(params, MODEL, jnp.asarray(b.tokens), jnp.broadcast_to(jnp.arange(T), b.tokens.shape), compute_dtype=jnp.dtype(dtype))
        logp = jax.nn.log_softmax(hidden[:, :-1] @ head_matrix(params, MODEL).T)
        logprob = jnp.pad(jnp.take_along_axis(logp, jnp.asarray(b.tokens)[:, 1:, None], 2)[..., 0], ((0, 0), (1, 0)))
        mask = response_mask(b.prompt_length, b.response_length, T) & b.valid[:, None] & (c.weight > 0)
        scale = token_scale("token_mean", mask, denominator_counts(mask), R)
        ratio = jnp.exp(logprob - jax.lax.stop_gradient(logprob))
        return -jnp.sum(jnp.where(mask, c.weight * c.advantage[:, None] * ratio * scale, 0))

    params = jax.tree.map(lambda x: x.astype(dtype), init_params(MODEL, KEY))
    run = jax.jit(jax.grad(loss))
    return lambda c: jax.tree.map(np.asarray, run(params, c))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_float32(layout):
    for names in LISTS:
        c = coefficients(tuple(names))
        assert distance(whole("float32")(c), compiled(layout, "float32")(c)) < 1e-5, names


@pytest.mark.parametrize("layout", ["packed", "unpacked", "packed, 8 devices"])
def test_in_float64(layout):
    with jax.enable_x64(True):
        for names in LISTS:
            c = coefficients(tuple(names))
            c = c._replace(advantage=c.advantage.astype("float64"), weight=c.weight.astype("float64"))
            assert distance(whole("float64")(c), compiled(layout, "float64")(c)) < 1e-10, names


def test_the_presets_really_skip():
    live = {tuple(names): int(coefficients(tuple(names)).live.sum()) for names in LISTS}
    assert live[()] == 8 and live[("difffilter",)] == 4 and live[("maxvar",)] == 4 and live[("gfpo",)] < 8, live
