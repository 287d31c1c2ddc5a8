"""Attention of training compiled for a TPU and for a GPU that are not here: what fits, and what no program holds."""

import functools
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.kernels.attention.api import packed_attention
from rlvr_jax.models.decoder import DecoderConfig, abstract_params, forward, param_axes
from rlvr_jax.sharding import make_mesh, named, shardings

pytestmark = pytest.mark.aot

MODEL = DecoderConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=5, num_heads=8, num_kv_heads=2, head_dim=64)
QUICK = {"exec_time_optimization_effort": -1.0} if jax.__version_info__ < (0, 12) else {"optimization_level": "O0"}


@functools.cache
def devices():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra [tpu-aot])")
    # Or libtpu asks the network for the machine it is on.
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def compiled(T, implementation, *, fsdp=1, tensor=1, remat="dots"):
    """Gradient of the real decoder over packed rows of T tokens, segments up to T / 2, a row a device."""
    mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=devices()[:fsdp * tensor])
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract_params(MODEL),
                          shardings(mesh, param_axes(MODEL), abstract_params(MODEL)))
    ints = jax.ShapeDtypeStruct((fsdp, T), jnp.int32, sharding=named(mesh, "batch", None))

    def loss(params, tokens, positions, segments):
        hidden, _ = forward(params, MODEL, tokens, positions, segment_ids=segments, window=T // 2, compute_dtype=jnp.bfloat16, remat=remat,
                            attention_kernel=implementation)
        return jnp.sum(hidden.astype(jnp.float32))

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss)).lower(params, ints, ints, ints).compile(compiler_options=QUICK)


def squares(program, T):
    """Arrays in the compiled program with two axes of (nearly) T; the batch is not that long."""
    shapes = (tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", program.as_text()))
    return {shape for shape in shapes if sum(size >= T // 2 for size in shape) > 1}


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


def test_the_decoder_holds_no_square_at_8192_and_32768():
    splash, dense = compiled(8192, None), compiled(8192, "reference")
    assert "tpu_custom_call" in splash.as_text() and "tpu_custom_call" not in dense.as_text()
    assert squares(dense, 8192) and not squares(splash, 8192)
    assert temporaries(splash) < temporaries(dense) / 8
    long = compiled(32768, None)
    assert not squares(long, 32768) and temporaries(long) < 5 * temporaries(splash)


def test_by_default_the_kernel_of_the_platform_and_nothing_of_the_other():
    """The choice leaves no residuals of what was not chosen, also where nothing is recomputed."""
    assert temporaries(compiled(1024, None, remat="none")) == temporaries(compiled(1024, "splash", remat="none"))


def test_on_a_mesh_each_chip_computes_its_rows_and_heads():
    program = compiled(2048, None, fsdp=2, tensor=2)
    results = " ".join(line.partition("custom-call(")[0] for line in program.as_text().splitlines() if "tpu_custom_call" in line)
    heads = {int(n) for n in re.findall(r"bf16\[(?:1,)?(\d+),2048,64\]", results)}
    assert heads == {4, 1} and not squares(program, 2048)  # of 8 query heads and 2 key heads, of one row


@pytest.mark.parametrize(("B", "T", "H", "K", "hd", "window", "dtype"), [(2, 1000, 6, 3, 80, 300, "bfloat16"), (1, 39, 4, 1, 10, 39, "float32"),
                                                                        (1, 1500, 2, 2, 256, 1500, "float32")])
def test_sizes_that_divide_nothing_compile(B, T, H, K, hd, window, dtype):
    where = NamedSharding(make_mesh(devices=devices()[:1]), P())
    q, k, segment = (jax.ShapeDtypeStruct(shape, kind, sharding=where) for shape, kind in (((B, T, H, hd), dtype), ((B, K, T, hd), dtype), ((B, T), jnp.int32)))
    loss = lambda q, k, v, s: jnp.sum(packed_attention(q, k, v, s, window=window).astype(jnp.float32))  # noqa: E731
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, segment).compile(compiler_options=QUICK)
    assert program.as_text().count("tpu_custom_call") >= 3  # forward, d_q, d_k with d_v
    assert np.isfinite(temporaries(program))


def test_on_a_gpu_plain_blocks_hold_no_square():
    target = pytest.importorskip("gpu_target", reason="needs tests/gpu_target.py, the descriptions of cards")
    where, T = target.sharding("sm_90"), 8192
    q, k, segment = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in
                     (((1, T, 32, 128), jnp.bfloat16), ((1, 8, T, 128), jnp.bfloat16), ((1, T), jnp.int32)))
    grads = lambda q, k, v, s: jax.grad(lambda *qkv: jnp.sum(packed_attention(*qkv, s, window=T // 2).astype(jnp.float32)), argnums=(0, 1, 2))(q, k, v)  # noqa: E731
    program = target.compiled(where, grads, q, k, k, segment)
    assert not squares(program, T) and temporaries(program) < 2**30 < 32 * T * T
    with pytest.raises(ValueError, match="attention 'splash' is a TPU kernel and this program is compiled for cuda"):
        target.compiled(where, lambda q, k, v, s: packed_attention(q, k, v, s, implementation="splash"), q, k, k, segment)
