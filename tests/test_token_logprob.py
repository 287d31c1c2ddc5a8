"""token_logprob: reference against autodiff in float64, chunked against the reference, memory, skipping, sharding."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.kernels.token_logprob import api, blocks, chunked, fused, reference, streamed
from rlvr_jax.kernels.token_logprob.api import policy_loss, token_logprob
from rlvr_jax.kernels.token_logprob.logits import Logits
from rlvr_jax.kernels.token_logprob.objective import Objective, Rows, fold_stats, policy_objective
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


def chunks_of(chunk=None):
    """The chunked implementation with chunks of a given size."""
    return _implementation("chunked", chunk)


@functools.cache
def _implementation(name, chunk=None):
    if name == "reference":
        return reference.token_logprob
    passes = api.STREAMED[name]
    if chunk is not None:
        passes = streamed.Passes(*(functools.partial(f, chunk=chunk) for f in passes))
    return functools.partial(streamed.token_logprob, passes)


DEFAULT = Logits(0.7, with_entropy=True)


def value_and_grads(fn, p, how=DEFAULT):
    """(logprob, entropy), (d_hidden, d_head) for the cotangents of the problem."""
    return _compiled(fn, how)(*(jnp.asarray(p[k]) for k in ("hidden", "head", "targets", "live", "g", "ge")))


@functools.cache
def _compiled(fn, how):
    @jax.jit  # with everything as an argument: constants of this size would be folded at compile time, for minutes
    def run(hidden, head, targets, live, g, ge):
        out, pull = jax.vjp(lambda h, w: fn(how, h, w, targets, live), hidden, head)
        return out, pull(tuple(None if o is None else x.astype(o.dtype) for o, x in zip(out, (g, ge))))

    return run


def truth(p, *how):
    """The reference in float64, as numpy."""
    with jax.enable_x64(True):
        q = {k: np.asarray(v, np.float64) if np.asarray(v).dtype.kind == "f" else v for k, v in p.items()}
        return jax.tree.map(np.asarray, value_and_grads(reference.token_logprob, q, *how))


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30))


HOWS = [Logits(0.7), Logits(0.7, with_entropy=True), Logits(1.3, 5.0, 0.5, True)]


@pytest.mark.parametrize("how", HOWS)
def test_reference_backward_is_autodiff_in_float64(how):
    with jax.enable_x64(True):
        p = problem(13, 57, 5)
        _, want = value_and_grads(reference.token_logprob, p, how)
        got = reference.token_logprob_vjp(how, *(jnp.asarray(p[k]) for k in ("hidden", "head", "targets", "live", "g")),
                                          jnp.asarray(p["ge"]) if how.with_entropy else None)
        for a, b in zip(got, want):
            assert relative(a, b) < 1e-13


def test_reference_against_numpy():
    with jax.enable_x64(True):
        p = problem(9, 31, 4, weights="all")
        (logprob, entropy), _ = value_and_grads(reference.token_logprob, p, Logits(1.5, 4.0, 0.5, True))
    z = 4 * np.tanh(p["hidden"] @ p["head"].T * 0.5 / 4) / 1.5
    q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose(logprob, np.log(q[np.arange(9), p["targets"]]), rtol=1e-12)
    np.testing.assert_allclose(entropy, -(q * np.log(q)).sum(1), rtol=1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_chunked_in_float64_equals_the_reference(how):
    with jax.enable_x64(True):
        p = problem(75, 37, 5)
        got = value_and_grads(chunks_of(16), p, how)
        want = value_and_grads(reference.token_logprob, p, how)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            assert a.dtype == jnp.float64 and relative(a, b) < 1e-12


SIZES = [(1, 513, 64), (1000, 513, 64), (330, 49152, 4), (7, 151936, 8)]


@pytest.mark.parametrize("tokens,V,D", SIZES)
def test_chunked_float32_at_sizes_that_divide_nothing(tokens, V, D):
    p = problem(tokens, V, D, dtype=np.float32, weights="all" if tokens == 1 else "random")
    (logprob, entropy), grads = value_and_grads(chunks_of(), p)
    (want_logprob, want_entropy), want_grads = truth(p)
    bound = 2e-6 * max(1.0, np.abs(p["hidden"] @ p["head"].T).max() / 0.7)
    assert logprob.dtype == entropy.dtype == jnp.float32
    assert np.abs(logprob - want_logprob).max() <= bound and np.abs(entropy - want_entropy).max() <= bound
    for a, b in zip(grads, want_grads):
        assert a.dtype == jnp.float32 and relative(a, b) <= 5e-6


@pytest.mark.parametrize("weights", ["zero", "one", "random", "all"])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_dead_tokens_are_zero_whatever_they_hold(weights, implementation):
    p = problem(45, 29, 6, dtype=np.float32, weights=weights)
    want = truth(p)
    p["hidden"][~p["live"]] = np.nan
    p["targets"][~p["live"]] = 10**6
    fn = _implementation(implementation, 8 if implementation == "chunked" else None)
    (logprob, entropy), (d_hidden, d_head) = value_and_grads(fn, p)
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
    fn = functools.partial(chunks_of(chunk))  # compiled with the counter, and not for others
    p["live"][60] = True
    value_and_grads(fn, p)
    jax.effects_barrier()
    assert len(turns) == 2  # both live tokens stand in the first chunk: one turn forward, one backward
    turns.clear()
    p["live"][:] = False
    value_and_grads(fn, p)
    jax.effects_barrier()
    assert not turns


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_huge_logits(implementation):
    p = problem(24, 101, 8, dtype=np.float32, weights="all")
    p["hidden"] *= 1e4 / np.abs(p["hidden"] @ p["head"].T).max()
    (logprob, entropy), grads = value_and_grads(_implementation(implementation), p, Logits(with_entropy=True))
    (want_logprob, want_entropy), _ = truth(p, Logits(with_entropy=True))
    assert np.abs(logprob - want_logprob).max() <= 2e-6 * 1e4 and np.abs(entropy - want_entropy).max() <= 2e-6 * 1e4
    assert all(np.all(np.isfinite(g)) for g in grads)


def test_bfloat16_accumulates_in_float32():
    p = problem(300, 2053, 64, dtype=np.float32, scale=0.3)
    rounded = {**p, "hidden": jnp.asarray(p["hidden"], jnp.bfloat16), "head": jnp.asarray(p["head"], jnp.bfloat16)}
    (want_logprob, want_entropy), want_grads = truth({**p, "hidden": np.asarray(rounded["hidden"], np.float32), "head": np.asarray(rounded["head"], np.float32)})
    for head in (rounded["head"], rounded["head"].astype(jnp.float32)):
        (logprob, entropy), (d_hidden, d_head) = value_and_grads(chunks_of(64), {**rounded, "head": head})
        assert logprob.dtype == entropy.dtype == jnp.float32 and d_hidden.dtype == jnp.bfloat16 and d_head.dtype == head.dtype
        # The inputs are the same bfloat16 numbers, so float32 accumulation shows as a nearly exact logprob.
        assert np.abs(logprob - want_logprob).max() < 1e-4 and np.abs(entropy - want_entropy).max() < 1e-4
        assert relative(d_hidden, want_grads[0]) < 1e-2 and relative(d_head, want_grads[1]) < 1e-2


def test_head_gradient_does_not_lose_small_chunks():
    # 512 chunks of equal contributions: a bfloat16 accumulator would stop growing at 256.
    tokens = 4096
    hidden, head = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((2, 1), jnp.float32)
    live = jnp.ones(tokens, bool)
    grad = jax.grad(lambda w: chunks_of(8)(Logits(), hidden, w, jnp.zeros(tokens, int), live)[0].sum())(head)
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


@pytest.mark.parametrize("one_pass", [False, True])
def test_sharded_pass_moves_no_logits_and_no_head_gradient_per_chunk(one_pass):
    tokens, V, D = 8192, 1536, 16
    mesh = make_mesh(2, 2, 2)

    def shape(size, dtype, *spec):
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def loss(h, w, t):
        if one_pass:
            return policy_loss(h, w, t, advantage=jnp.ones(tokens), weights=jnp.ones(tokens)).sum
        return token_logprob(h, w, t)[0].sum()

    rows = ("data", "fsdp")
    args = (shape((tokens, D), jnp.float32, rows, None), shape((V, D), jnp.float32, "tensor", "fsdp"), shape((tokens,), jnp.int32, rows))
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().as_text()
    moving = [line for line in text.splitlines() if re.search(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(", line)]
    sizes = [math.prod(int(d or 1) for d in shape.split(",")) for line in moving if "while/body" in line for shape in re.findall(r"f32\[([\d,]*)\]", line.split("=")[1].split("(")[0])]
    # Maximum, sum and target logit of a chunk's tokens are combined over the vocabulary; two passes do that once, after the loop.
    assert bool(sizes) == one_pass and all(n <= 1024 for n in sizes), sizes
    assert moving and not [line for line in moving if f"[{tokens // 4},{V}" in line or f"[{tokens // 4},{V // 2}" in line]


def test_an_unknown_implementation_fails_loudly():
    with pytest.raises(ValueError, match=r"'fast' is not known.*reference, chunked") as e:
        token_logprob(jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.zeros(2, int), implementation="fast")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("change", [{"hidden": (1, 2, 3)}, {"head": (4, 2)}, {"targets": (3,)}, {"weights": (3,)}, {"temperature": 0.0}, {"soft_cap": 0.0}])
def test_wrong_input_is_one_line(change):
    shapes = {"hidden": (2, 3), "head": (4, 3), "targets": (2,), "weights": (2,), "temperature": 1.0, "soft_cap": None, **change}
    with pytest.raises(ValueError, match="token_logprob") as e:
        token_logprob(jnp.ones(shapes["hidden"]), jnp.ones(shapes["head"]), jnp.zeros(shapes["targets"], int), weights=jnp.ones(shapes["weights"]), temperature=shapes["temperature"], soft_cap=shapes["soft_cap"])
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


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("tokens", "V", "D", "chunk", "weights"), [(1, 513, 5, None, "all"), (37, 129, 7, 8, "random"), (64, 200, 3, 24, "one"), (20, 33, 4, 8, "zero")])
def test_one_pass_gives_the_loss_and_gradients_of_two(tokens, V, D, chunk, weights, how):
    with jax.enable_x64(True):
        p = {k: jnp.asarray(v) for k, v in problem(tokens, V, D, weights=weights).items()}
        operands = {k: p[k] for k in ("g", "ge", "live")}

        def plain(h, w):
            out = reference.token_logprob(how, h, w, p["targets"], p["live"])
            return 3.0 * squared(*out, operands)[0], out

        def one_pass(h, w):
            out = fused.token_loss(how, h, w, p["targets"], p["live"], operands, squared, fold_stats, chunk=chunk)
            return 3.0 * out.sum, out

        (want, vectors), want_grads = jax.value_and_grad(plain, (0, 1), has_aux=True)(p["hidden"], p["head"])
        (got, out), grads = jax.jit(jax.value_and_grad(one_pass, (0, 1), has_aux=True))(p["hidden"], p["head"])
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        for a, b in zip(jax.tree.leaves((grads, out.logprob, out.entropy)), jax.tree.leaves((want_grads, vectors))):
            assert relative(a, b) < 1e-12
        assert float(out.stats["count"][0]) == int(p["live"].sum())


@pytest.mark.parametrize("tokens", [96, 101])
def test_one_pass_sharded_equals_one_device(tokens):
    p = problem(tokens, 64, 8, dtype=np.float32)
    mesh = make_mesh(2, 2, 2)
    rows = ("data", "fsdp") if tokens % 4 == 0 else None

    def f(hidden, head, targets, live, g, ge):
        how = Logits(0.7, 6.0, with_entropy=True)
        out = fused.token_loss(how, hidden, head, targets, live, {"g": g, "ge": ge, "live": live}, squared, fold_stats, chunk=8)
        return out.sum, (out.logprob, out.entropy, out.stats)

    names = ("hidden", "head", "targets", "live", "g", "ge")
    want = jax.value_and_grad(f, (0, 1), has_aux=True)(*(jnp.asarray(p[k]) for k in names))
    specs = {"hidden": P(rows, None), "head": P("tensor", "fsdp")}
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*(jax.device_put(p[k], NamedSharding(mesh, specs.get(k, P(rows)))) for k in names))
    want[0][1][2]["count"] = (want[0][1][2]["count"][0], got[0][1][2]["count"][1])  # one call of the loss per chunk and device
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert relative(a, np.asarray(b, np.float64)) < 1e-5


@pytest.mark.parametrize("objective", [Objective("clip", entropy_coef=0.1, kl_coef=0.2), Objective("cispo", is_cap=None), Objective("gspo"),
                                       Objective(is_level="sequence_mean", dual_clip=3.0)], ids=lambda o: f"{o.objective}-{o.is_level}")
@pytest.mark.parametrize("implementation", [None, "reference", "chunked"])
def test_policy_loss_is_the_objective_of_the_reference_log_probabilities(objective, implementation):
    tokens, V = 40, 61
    with jax.enable_x64(True):
        p = {k: jnp.asarray(v) for k, v in problem(tokens, V, 5, scale=0.3).items()}
        rng = np.random.default_rng(1)
        weights = jnp.where(p["live"], jnp.asarray(rng.random(tokens) + 0.5), 0)
        row = jnp.arange(tokens) // 10
        scale = jnp.asarray(rng.random(tokens))
        base = reference.token_logprob(Logits(1.2, with_entropy=True), p["hidden"], p["head"], p["targets"], p["live"])[0]
        near = {name: base + 0.3 * rng.normal(size=tokens) for name in ("old_logprob", "behavior_logprob", "ref_logprob")}

        def want(h, w):
            logprob, entropy = reference.token_logprob(Logits(1.2, with_entropy=True), h, w, p["targets"], p["live"])
            loss, stats = policy_objective(objective, logprob=logprob, entropy=entropy if objective.entropy_coef else None, advantage=p["g"],
                                           weight=weights, mask=p["live"], rows=Rows(row, 4), **near)
            return jnp.sum(loss * scale), stats

        def got(h, w):
            out = policy_loss(h, w, p["targets"], advantage=p["g"], weights=weights, scale=scale, rows=Rows(row, 4), objective=objective,
                              temperature=1.2, implementation=implementation, **near)
            return out.sum, out

        (value, stats), grads = jax.value_and_grad(want, (0, 1), has_aux=True)(p["hidden"], p["head"])
        (value_, out), grads_ = jax.jit(jax.value_and_grad(got, (0, 1), has_aux=True))(p["hidden"], p["head"])
        np.testing.assert_allclose(value_, value, rtol=1e-10)
        for a, b in zip(grads_, grads):
            assert relative(a, b) < 1e-10
        assert float(out.tokens) == int(p["live"].sum()) and out.stats.keys() == stats.keys()
        for k in stats:
            np.testing.assert_allclose(out.stats[k], stats[k], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(out.logprob, base, rtol=1e-10)
        assert (out.entropy is None) == (objective.entropy_coef == 0)


def test_an_objective_over_rows_needs_the_rows():
    with pytest.raises(ValueError, match=r"gspo.*pass rows=Rows") as e:
        policy_loss(jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.zeros(2, int), advantage=jnp.ones(2), weights=jnp.ones(2), objective=Objective("gspo"))
    assert "\n" not in str(e.value)
