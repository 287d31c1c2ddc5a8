"""The TPU loss kernels compiled for chips that are not here: what fits, what no program holds, and which kernel is in it."""

import functools
import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.kernels.token_logprob import pallas_tpu
from rlvr_jax.kernels.token_logprob.api import policy_loss, token_logprob
from rlvr_jax.kernels.token_logprob.logits import Logits
from rlvr_jax.kernels.token_logprob.objective import Objective, Rows
from rlvr_jax.kernels.token_logprob.pallas_tpu_tiles import CHIPS, MIB, UNKNOWN, current_chip
from rlvr_jax.sharding import make_mesh

pytestmark = pytest.mark.aot

TOPOLOGY = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TOKENS, VOCAB, WIDTH = 8192, 151936, 4096
PLAIN, RICH = Logits(0.7, with_entropy=True), Logits(1.3, soft_cap=5.0, logit_scale=1.5, with_entropy=True)


@functools.cache
def devices(chip):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra [tpu-aot])")
    # Or libtpu asks the network for the machine it is on.
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[chip]).devices


def kernel_arguments(chip, dtype=jnp.bfloat16, n=TOKENS, V=VOCAB, D=WIDTH):
    """Abstract arguments of the backward pass; the first four are those of the forward pass."""
    where = NamedSharding(Mesh(np.array(devices(chip)[:1]), "x"), P())
    row, *others = (jax.ShapeDtypeStruct(shape, kind, sharding=where) for shape, kind in
                    (((n,), jnp.float32), ((n, D), dtype), ((V, D), dtype), ((n,), jnp.int32), ((), jnp.int32)))
    return [*others, row, row, row, row]


def passes(chip, static=PLAIN, **kw):
    return [functools.partial(f, static, chip=CHIPS[chip], **kw) for f in (pallas_tpu.forward, pallas_tpu.backward)]


def update(implementation, objective=Objective(entropy_coef=0.1)):  # noqa: B008
    """Gradients of the policy loss: what the trainer asks for."""
    def loss(hidden, head, targets, row):
        return policy_loss(hidden, head, targets, advantage=row, weights=row, behavior_logprob=row, objective=objective, implementation=implementation).sum

    return jax.grad(loss, (0, 1))


def score(implementation):
    return lambda hidden, head, targets, row: token_logprob(hidden, head, targets, weights=row, with_entropy=True, implementation=implementation)


def compiled(fn, mesh, n=TOKENS, V=VOCAB, D=WIDTH, dtype=jnp.bfloat16):
    """``fn(hidden, head, targets, row)`` with tokens over 'data' and the head over 'tensor' and 'fsdp', as the trainer holds them."""
    args = [jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, P(*spec))) for shape, kind, spec in
            (((n, D), dtype, (("data", "fsdp"), None)), ((V, D), dtype, ("tensor", "fsdp")), ((n,), jnp.int32, (("data", "fsdp"),)),
             ((n,), jnp.float32, (("data", "fsdp"),)))]
    with jax.set_mesh(mesh):
        return jax.jit(fn).lower(*args).compile()


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes / MIB


def squares(program, tokens, vocab):
    """Arrays of the program with an axis of the vocabulary and one of all tokens, or nearly."""
    shapes = (sorted(map(int, dims.split(","))) for dims in re.findall(r"\[(\d+(?:,\d+)+)\]", program.as_text()))
    return [shape for shape in shapes if shape[-1] >= vocab and shape[-2] >= tokens and shape[-2] not in (WIDTH, WIDTH // 2)]


@pytest.mark.parametrize("chip", TOPOLOGY)
def test_temporaries_are_megabytes_where_plain_ones_are_gigabytes(chip):
    """Of the passes alone, and of what is called: kernels by default, the one pass in chunks, plain XLA."""
    mesh, args = make_mesh(devices=devices(chip)[:1]), kernel_arguments(chip)
    forward, backward = passes(chip)
    kernels = [temporaries(jax.jit(f).lower(*a).compile()) for f, a in ((forward, args[:4]), (backward, args))]
    scores, updates = ({name: compiled(fn(name), mesh) for name in (None, "chunked")} for fn in (score, update))
    half = compiled(score("reference"), mesh)
    try:
        plain = temporaries(compiled(update("reference"), mesh))
        shown = f"{plain:.0f}"
    except jax.errors.JaxRuntimeError as e:  # more than the chip has
        plain, shown = np.inf, f"refused, {' '.join(re.findall(r'Used [0-9.]+G of [0-9.]+G hbm', str(e))[:1])}"
    row = [f"{x:.1f}" for x in kernels] + [f"{temporaries(p[name]):.0f}" for p in (scores, updates) for name in (None, "chunked")]
    print(f"\n{chip} MiB: forward kernel {row[0]}, backward kernel {row[1]} | log-probabilities: kernels {row[2]}, chunks {row[3]}, plain {temporaries(half):.0f} | "
          f"gradients of the loss: kernels {row[4]}, one pass in chunks {row[5]}, plain {shown}")
    for p in (scores, updates):
        assert "tpu_custom_call" in p[None].as_text() and "tpu_custom_call" not in p["chunked"].as_text()
        assert not squares(p[None], TOKENS // 2, VOCAB)
    assert squares(half, TOKENS // 2, VOCAB)
    two_cores = 2 * 4 * TOKENS * WIDTH / MIB if CHIPS[chip].cores == 2 else 0  # each sums d-hidden over half of the vocabulary
    assert kernels[0] < 1 and kernels[1] < 1 + two_cores
    assert temporaries(scores[None]) < temporaries(half) / 20 and temporaries(half) > 1024


@pytest.mark.parametrize("chip,dtype,static,n,V,D", [
    ("v5e", jnp.bfloat16, Logits(), 7, 513, 72), ("v5e", jnp.float32, RICH, 1000, 49152, 576), ("v5p", jnp.bfloat16, RICH, 1000, 128256, 2048),
    ("v6e", jnp.bfloat16, PLAIN, 1000, 49152, 576), ("v6e", jnp.float32, RICH, 300, 151936, 4096), ("v5p", jnp.bfloat16, PLAIN, 8192, 151936, 8192)])
def test_default_tiles_compile_within_their_budget(chip, dtype, static, n, V, D):
    args = kernel_arguments(chip, dtype, n, V, D)
    for fn, given in zip(passes(chip, static), (args[:4], args)):  # the compiler is given our own estimate as its limit
        jax.jit(fn).lower(*given).compile()


def test_a_tile_that_is_too_large_is_refused_by_us_and_not_by_the_compiler():
    args = kernel_arguments("v5e")
    for fn, given in zip(passes("v5e", block_tokens=4096, block_vocab=4096), (args[:4], args)):
        with pytest.raises(ValueError, match=r"pallas_tpu .*4096 tokens x 4096 vocabulary rows of width 4096 need .* take smaller") as e:
            jax.jit(fn).lower(*given)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("chip", TOPOLOGY)
def test_the_chip_is_that_of_the_mesh(chip):
    with jax.set_mesh(make_mesh(devices=devices(chip)[:1])):
        assert current_chip() == CHIPS[chip]
    assert current_chip() == UNKNOWN


@pytest.mark.parametrize("chip", TOPOLOGY)
def test_on_four_chips_each_runs_the_kernels_on_its_part(chip):
    """Tokens over one axis and the vocabulary over the other; twice the tokens, so that a device has as many as alone."""
    mesh = make_mesh(2, 1, 2, devices=devices(chip)[:4])
    step = compiled(update(None), mesh, n=2 * TOKENS)
    print(f"\n{chip} 2x2, gradients of the loss, {2 * TOKENS} tokens: {temporaries(step):.0f} MiB a device")
    results = " ".join(line.partition("custom-call(")[0] for line in step.as_text().splitlines() if "tpu_custom_call" in line)
    assert f"f32[{VOCAB // 2},{WIDTH}]" in results and re.search(rf"f32\[1,{TOKENS}\]", results)  # of the vocabulary and of the tokens a half
    assert not squares(step, TOKENS // 2, VOCAB // 2)
    # d-head before it meets the other half of the tokens is the only large array.
    assert temporaries(step) < 1.2 * (4 * VOCAB // 2 * WIDTH) / MIB + 6 * 4 * TOKENS * WIDTH / MIB


@pytest.mark.parametrize("objective", [Objective("gspo"), Objective()], ids=lambda o: o.objective)
def test_a_vocabulary_that_does_not_divide_is_on_every_chip_whole(objective):
    mesh = make_mesh(1, 1, 2, devices=devices("v5e")[:2])

    def fn(hidden, head, targets, row):
        rows = Rows(targets // 64, 4)
        return jax.grad(lambda h, w: policy_loss(h, w, targets, advantage=row, weights=row, behavior_logprob=row, objective=objective, rows=rows).sum, (0, 1))(hidden, head)

    args = [jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, P())) for shape, kind in
            (((300, 64), jnp.bfloat16), ((513, 64), jnp.bfloat16), ((300,), jnp.int32), ((300,), jnp.float32))]
    with jax.set_mesh(mesh):
        assert "tpu_custom_call" in jax.jit(fn).lower(*args).compile().as_text()
