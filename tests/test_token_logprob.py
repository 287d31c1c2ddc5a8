"""token_logprob: reference against autodiff in float64, chunked against the reference, memory, skipping, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.kernels.token_logprob import blocks, chunked, fused, reference
from rlvr_jax.kernels.token_logprob.api import IMPLEMENTATIONS, token_logprob
from rlvr_jax.sharding import make_mesh


def problem(tokens, V, D, seed=0, dtype=np.float64, weights="random", scale=1.0):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, tokens)
    targets[0] = 0
    targets[-1] = V - 1
    live = {"zero": np.zeros(tokens, bool), "random": rng.random(tokens) > 0.4, "all": np.ones(tokens, bool),
            "one": np.arange(tokens) == tokens // 2}[weights]
    return dict(hidden=(rng.normal(size=(tokens, D)) * scale).astype(dtype), head=rng.normal(size=(V, D)).astype(dtype),
                targets=targets, live=live, g=rng.normal(size=tokens).astype(dtype), ge=rng.normal(size=tokens).astype(dtype))


def value_and_grads(fn, p, temperature=0.7, with_entropy=True, **kw):
    """(logprob, entropy), (d_hidden, d_head) for the cotangents of the problem."""
    run = _compiled(fn, temperature, with_entropy, tuple(kw.items()))
    return run(*(jnp.asarray(p[k]) for k in ("hidden", "head", "targets", "live", "g", "ge")))


@functools.cache
def _compiled(fn, temperature, with_entropy, kw):
    @jax.jit  # with everything as an argument: constants of this size would be folded at compile time, for minutes
    def run(hidden, head, targets, live, g, ge):
        out, pull = jax.vjp(lambda h, w: fn(h, w, targets, live, temperature=temperature, with_entropy=with_entropy, **dict(kw)), hidden, head)
        return out, pull(tuple(None if o is None else x.astype(o.dtype) for o, x in zip(out, (g, ge))))

    return run


def truth(p, **kw):
    """The reference in float64, as numpy."""
    with jax.enable_x64(True):
        q = {k: np.asarray(v, np.float64) if np.asarray(v).dtype.kind == "f" else v for k, v in p.items()}
        return jax.tree.map(np.asarray, value_and_grads(reference.token_logprob, q, **kw))


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30))


@pytest.mark.parametrize("with_entropy", [False, True])
def test_reference_backward_is_autodiff_in_float64(with_entropy):
    with jax.enable_x64(True):
        p = problem(13, 57, 5)
        _, want = value_and_grads(reference.token_logprob, p, with_entropy=with_entropy)
        got = reference.token_logprob_vjp(*(jnp.asarray(p[k]) for k in ("hidden", "head", "targets", "live", "g")),
                                          jnp.asarray(p["ge"]) if with_entropy else None, temperature=0.7)
        for a, b in zip(got, want):
            assert relative(a, b) < 1e-13


def test_reference_against_numpy():
    with jax.enable_x64(True):
        p = problem(9, 31, 4, weights="all")
        (logprob, entropy), _ = value_and_grads(reference.token_logprob, p, temperature=1.5)
    z = p["hidden"] @ p["head"].T / 1.5
    q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose(logprob, np.log(q[np.arange(9), p["targets"]]), rtol=1e-12)
    np.testing.assert_allclose(entropy, -(q * np.log(q)).sum(1), rtol=1e-12)


def test_chunked_in_float64_equals_the_reference():
    with jax.enable_x64(True):
        p = problem(75, 37, 5)
        got = value_and_grads(chunked.token_logprob, p, chunk=16)
        want = value_and_grads(reference.token_logprob, p)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert a.dtype == jnp.float64 and relative(a, b) < 1e-12


SIZES = [(1, 513, 64), (1000, 513, 64), (330, 49152, 4), (7, 151936, 8)]


@pytest.mark.parametrize("tokens,V,D", SIZES)
def test_chunked_float32_at_sizes_that_divide_nothing(tokens, V, D):
    p = problem(tokens, V, D, dtype=np.float32, weights="all" if tokens == 1 else "random")
    (logprob, entropy), grads = value_and_grads(chunked.token_logprob, p)
    (want_logprob, want_entropy), want_grads = truth(p)
    bound = 2e-6 * max(1.0, np.abs(p["hidden"] @ p["head"].T).max() / 0.7)
    assert logprob.dtype == entropy.dtype == jnp.float32
    assert np.abs(logprob - want_logprob).max() <= bound and np.abs(entropy - want_entropy).max() <= bound
    for a, b in zip(grads, want_grads):
        assert a.dtype == jnp.float32 and relative(a, b) <= 5e-6


@pytest.mark.parametrize("weights", ["zero", "one", "random", "all"])
@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_dead_tokens_are_zero_whatever_they_hold(weights, implementation):
    p = problem(45, 29, 6, dtype=np.float32, weights=weights)
    want = truth(p)
    p["hidden"][~p["live"]] = np.nan
    p["targets"][~p["live"]] = 10**6
    fn = IMPLEMENTATIONS[implementation]
    kw = {"chunk": 8} if implementation == "chunked" else {}
    (logprob, entropy), (d_hidden, d_head) = value_and_grads(fn, p, **kw)
    for x in (logprob, entropy, d_hidden):
        assert np.all(np.asarray(x)[~p["live"]] == 0)
    for a, b in zip(jax.tree.leaves(((logprob, entropy), (d_hidden, d_head))), jax.tree.leaves(want)):
        assert np.all(np.isfinite(a)) and relative(a, b) < 5e-6
    if weights == "zero":
        assert np.all(np.asarray(d_head) == 0)


def test_weights_do_not_scale():
    p = problem(12, 19, 4, dtype=np.float32, weights="random")
    out = []
    for factor in (1.0, 7.5, -2.0):
        weights = jnp.asarray(p["live"] * factor, jnp.float32)
        out.append(jax.value_and_grad(lambda h, w=weights: token_logprob(h, jnp.asarray(p["head"]), jnp.asarray(p["targets"]), weights=w)[0].sum())(jnp.asarray(p["hidden"])))
    for other in out[1:]:
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), out[0], other))


@pytest.mark.parametrize("chunk", [8, 24, 64])
def test_chunks_that_are_dead_are_not_computed(chunk, monkeypatch):
    turns = []
    plain = chunked.logits

    def counted(*args):
        jax.debug.callback(lambda: turns.append(1))
        return plain(*args)

    monkeypatch.setattr(chunked, "logits", counted)
    p = problem(64, 17, 3, dtype=np.float32, weights="one")
    p["live"][60] = True
    value_and_grads(chunked.token_logprob, p, chunk=chunk)
    jax.effects_barrier()
    assert len(turns) == 2  # both live tokens stand in the first chunk: one turn forward, one backward
    turns.clear()
    p["live"][:] = False
    value_and_grads(chunked.token_logprob, p, chunk=chunk)
    jax.effects_barrier()
    assert not turns


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_huge_logits(implementation):
    p = problem(24, 101, 8, dtype=np.float32, weights="all")
    p["hidden"] *= 1e4 / np.abs(p["hidden"] @ p["head"].T).max()
    (logprob, entropy), grads = value_and_grads(IMPLEMENTATIONS[implementation], p, temperature=1.0)
    (want_logprob, want_entropy), _ = truth(p, temperature=1.0)
    assert np.abs(logprob - want_logprob).max() <= 2e-6 * 1e4 and np.abs(entropy - want_entropy).max() <= 2e-6 * 1e4
    assert all(np.all(np.isfinite(g)) for g in grads)


def test_bfloat16_accumulates_in_float32():
    p = problem(300, 2053, 64, dtype=np.float32, scale=0.3)
    rounded = {**p, "hidden": jnp.asarray(p["hidden"], jnp.bfloat16), "head": jnp.asarray(p["head"], jnp.bfloat16)}
    (want_logprob, want_entropy), want_grads = truth({**p, "hidden": np.asarray(rounded["hidden"], np.float32), "head": np.asarray(rounded["head"], np.float32)})
    for head in (rounded["head"], rounded["head"].astype(jnp.float32)):
        (logprob, entropy), (d_hidden, d_head) = value_and_grads(chunked.token_logprob, {**rounded, "head": head}, chunk=64)
        assert logprob.dtype == entropy.dtype == jnp.float32 and d_hidden.dtype == jnp.bfloat16 and d_head.dtype == head.dtype
        # The inputs are the same bfloat16 numbers, so float32 accumulation shows as a nearly exact logprob.
        assert np.abs(logprob - want_logprob).max() < 1e-4 and np.abs(entropy - want_entropy).max() < 1e-4
        assert relative(d_hidden, want_grads[0]) < 1e-2 and relative(d_head, want_grads[1]) < 1e-2


def test_head_gradient_does_not_lose_small_chunks():
    # 512 chunks of equal contributions: a bfloat16 accumulator would stop growing at 256.
    tokens = 4096
    hidden, head = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((2, 1), jnp.float32)
    live = jnp.ones(tokens, bool)
    grad = jax.grad(lambda w: chunked.token_logprob(hidden, w, jnp.zeros(tokens, int), live, temperature=1.0, with_entropy=False, chunk=8)[0].sum())(head)
    np.testing.assert_allclose(grad[:, 0], [tokens / 2, -tokens / 2], rtol=1e-6)


def test_entropy_of_a_uniform_distribution():
    logprob, entropy = token_logprob(jnp.zeros((3, 4)), jnp.ones((1000, 4)), jnp.array([0, 5, 999]), with_entropy=True)
    np.testing.assert_allclose(entropy, np.log(1000), rtol=1e-6)
    np.testing.assert_allclose(logprob, -np.log(1000), rtol=1e-6)


def compiled_memory(implementation, tokens, V, D=32):
    def loss(hidden, head, targets):
        logprob, entropy = token_logprob(hidden, head, targets, with_entropy=True, implementation=implementation)
        return jnp.sum(logprob) + 0.1 * jnp.sum(entropy)

    shapes = (jax.ShapeDtypeStruct((tokens, D), jnp.float32), jax.ShapeDtypeStruct((V, D), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.int32))
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_temporaries_do_not_grow_with_vocabulary_times_tokens():
    few, many, D = 4096, 32768, 32
    for V in (8192, 49152):
        small, large = compiled_memory("chunked", few, V), compiled_memory("chunked", many, V)
        assert large - small <= 8 * 4 * (many - few) * (D + 4)
        # Two chunks of logits, the head's gradient and its transpose, a few arrays of tokens.
        assert large <= 3 * 4 * blocks.LOGITS_PER_CHUNK + 4 * 4 * V * D + 8 * 4 * many * (D + 4)
    assert large <= compiled_memory("reference", many, 49152) / 20


def test_no_array_of_all_tokens_by_vocabulary():
    tokens, V = 4096, 49999
    text = str(jax.make_jaxpr(jax.grad(lambda h, w: token_logprob(h, w, jnp.zeros(tokens, int), with_entropy=True)[0].sum(), (0, 1)))(
        jnp.zeros((tokens, 2)), jnp.zeros((V, 2))))
    assert f"{tokens},{V}" not in text and f",{V}]" in text


def test_chunk_size_rule():
    for tokens in (1, 7, 1000, 4096, 100_000):
        for V in (2, 513, 49152, 151936, 10**6):
            chunk = blocks.chunk_size(tokens, V)
            assert chunk % 8 == 0 and 8 <= chunk <= 1024
            assert chunk <= 128 or chunk * V <= blocks.LOGITS_PER_CHUNK
            assert -(-tokens // chunk) * chunk - tokens < 8 * -(-tokens // chunk)


def test_inside_while_and_scan_with_gradients_in_the_body():
    p = problem(20, 23, 4, dtype=np.float32)
    hidden, head = jnp.asarray(p["hidden"]), jnp.asarray(p["head"])
    grad = jax.grad(lambda w, h: token_logprob(h, w, jnp.asarray(p["targets"]), weights=jnp.asarray(p["live"]))[0].sum())

    @jax.jit
    def run(count):
        total = lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, s[1] + grad(head, hidden * (s[0] + 1))), (0, jnp.zeros_like(head)))[1]
        scanned = lax.scan(lambda c, i: (c + grad(head, hidden * (i + 1)), None), jnp.zeros_like(head), jnp.arange(3))[0]
        return total, scanned

    total, scanned = run(3)
    want = sum(grad(head, hidden * (i + 1)) for i in range(3))
    np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scanned, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [96, 101])
@pytest.mark.parametrize("mesh_known", [True, False])
def test_sharded_equals_one_device(tokens, mesh_known):
    p = problem(tokens, 64, 8, dtype=np.float32)
    mesh = make_mesh(2, 2, 2)
    rows = ("data", "fsdp") if tokens % 4 == 0 else None

    def f(hidden, head, targets, live, g, ge):
        logprob, entropy = token_logprob(hidden, head, targets, weights=live, temperature=0.7, with_entropy=True)
        return jnp.sum(logprob * g) + jnp.sum(entropy * ge)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    names = ("hidden", "head", "targets", "live", "g", "ge")
    want = jax.value_and_grad(f, (0, 1))(*(jnp.asarray(p[k]) for k in names))
    args = [put(p["hidden"], rows, None), put(p["head"], "tensor", "fsdp"), *(put(p[k], rows) for k in names[2:])]
    step = jax.jit(jax.value_and_grad(f, (0, 1)))
    if mesh_known:
        with jax.set_mesh(mesh):
            got = step(*args)
    else:
        got = step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert relative(a, np.asarray(b, np.float64)) < 1e-5


def test_sharded_pass_moves_no_logits_and_no_head_gradient_per_chunk():
    tokens, V, D = 8192, 1536, 16  # V is no chunk's size, so that shapes tell them apart
    mesh = make_mesh(2, 2, 2)

    def shape(size, dtype, *spec):
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P(*spec)))

    rows = ("data", "fsdp")
    args = (shape((tokens, D), jnp.float32, rows, None), shape((V, D), jnp.float32, "tensor", "fsdp"), shape((tokens,), jnp.int32, rows))
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(lambda h, w, t: token_logprob(h, w, t)[0].sum(), (0, 1)))
        text = step.lower(*args).compile().as_text()
    moved = [line.split("=")[1].split("(")[0] for line in text.splitlines() if "while/body" in line and (" all-reduce(" in line or " all-gather(" in line)]
    assert moved, "the vocabulary is split over 'tensor': the body has to combine its sums"
    assert not [m for m in moved if f",{V}]" in m or f",{V // 2}]" in m or f"{V // 2},{D}]" in m or f"{V},{D}]" in m], moved


@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_gpu", "fast"])
def test_an_implementation_that_is_not_here_fails_loudly(name):
    with pytest.raises(ValueError, match=rf"'{name}' is not available.*reference, chunked") as e:
        token_logprob(jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.zeros(2, int), implementation=name)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("change", [{"hidden": (1, 2, 3)}, {"head": (4, 2)}, {"targets": (3,)}, {"weights": (3,)}, {"temperature": 0.0}])
def test_wrong_input_is_one_line(change):
    shapes = {"hidden": (2, 3), "head": (4, 3), "targets": (2,), "weights": (2,), "temperature": 1.0, **change}
    with pytest.raises(ValueError, match="token_logprob") as e:
        token_logprob(jnp.ones(shapes["hidden"]), jnp.ones(shapes["head"]), jnp.zeros(shapes["targets"], int), weights=jnp.ones(shapes["weights"]), temperature=shapes["temperature"])
    assert "\n" not in str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize("tokens,V,D", [(1000, 49152, 64), (1000, 128256, 32), (1000, 151936, 32)])
def test_chunked_float32_large(tokens, V, D):
    test_chunked_float32_at_sizes_that_divide_nothing(tokens, V, D)


def squared(logprob, entropy, operands):
    """A loss that needs nothing but the token's own numbers; its slope depends on the log-probability."""
    loss = jnp.where(operands["live"], operands["g"] * logprob**2, 0)
    if entropy is not None:
        loss = loss + jnp.where(operands["live"], operands["ge"] * entropy, 0)
    return jnp.sum(loss), {"count": (jnp.sum(operands["live"], dtype=jnp.float32), jnp.float32(1))}


def add(a, b):
    return jax.tree.map(jnp.add, a, b)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("tokens", "V", "D", "chunk", "weights"), [(1, 513, 5, None, "all"), (37, 129, 7, 8, "random"), (64, 200, 3, 24, "one"), (20, 33, 4, 8, "zero")])
def test_one_pass_gives_the_loss_and_gradients_of_two(tokens, V, D, chunk, weights, with_entropy):
    with jax.enable_x64(True):
        p = {k: jnp.asarray(v) for k, v in problem(tokens, V, D, weights=weights).items()}
        operands = {k: p[k] for k in ("g", "ge", "live")}

        def plain(h, w):
            out = reference.token_logprob(h, w, p["targets"], p["live"], temperature=0.7, with_entropy=with_entropy)
            return 3.0 * squared(*out, operands)[0]

        def one_pass(h, w):
            total, stats = fused.token_loss(h, w, p["targets"], p["live"], operands, squared, add, temperature=0.7, with_entropy=with_entropy, chunk=chunk)
            return 3.0 * total, stats

        want, want_grads = jax.value_and_grad(plain, (0, 1))(p["hidden"], p["head"])
        (got, stats), grads = jax.jit(jax.value_and_grad(one_pass, (0, 1), has_aux=True))(p["hidden"], p["head"])
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        for a, b in zip(grads, want_grads):
            assert relative(a, b) < 1e-12
        assert float(stats["count"][0]) == int(p["live"].sum())


def test_one_pass_sharded_equals_one_device():
    p = problem(96, 64, 8, dtype=np.float32)
    mesh = make_mesh(2, 2, 2)
    rows = ("data", "fsdp")

    def f(hidden, head, targets, live, g, ge):
        return fused.token_loss(hidden, head, targets, live, {"g": g, "ge": ge, "live": live}, squared, add, temperature=0.7, with_entropy=True, chunk=8)[0]

    names = ("hidden", "head", "targets", "live", "g", "ge")
    want = jax.value_and_grad(f, (0, 1))(*(jnp.asarray(p[k]) for k in names))
    specs = {"hidden": P(rows, None), "head": P("tensor", "fsdp")}
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(f, (0, 1)))(*(jax.device_put(p[k], NamedSharding(mesh, specs.get(k, P(rows)))) for k in names))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert relative(a, np.asarray(b, np.float64)) < 1e-5
