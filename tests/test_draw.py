"""Keys and draws: what makes a sample reproducible, and that it comes from the distribution it claims."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.rollout import keys
from rlvr_jax.rollout.draw import SamplingParams, block_sums, inverse_cdf, sample, top_p_mask

V = 97

# --- keys ---


@functools.partial(jax.jit, static_argnums=(4, 5))
def _uniforms(seed, step, ids, occurrence, g, n):
    return keys.uniforms(keys.row_keys(seed, step, ids, occurrence, g), n)


def numbers(seed=0, step=0, ids=(5, 9), occurrence=(0, 0), g=2, n=3):
    return np.asarray(_uniforms(keys.split_seed(seed), np.int32(step), np.array(ids), np.array(occurrence), g, n))


def test_every_part_of_the_key_matters_and_nothing_else_does():
    base = numbers()
    assert base.shape == (4, 3) and len(np.unique(base)) == 12 and (base >= 0).all() and (base < 1).all()
    np.testing.assert_array_equal(base, numbers())
    for other in (numbers(seed=1), numbers(seed=2**32), numbers(step=1), numbers(ids=(6, 10)), numbers(occurrence=(1, 1))):
        assert len(np.intersect1d(base, other)) == 0
    np.testing.assert_array_equal(numbers(ids=(9, 5)), np.roll(base, 2, axis=0))  # order of the batch
    np.testing.assert_array_equal(numbers(g=1), base[::2])  # sample 0 does not depend on how many there are
    np.testing.assert_array_equal(numbers(n=5)[:, :3], base)


def test_occurrences_count_earlier_equal_prompts():
    assert keys.occurrences([7, 8, 7, 7, 8]).tolist() == [0, 0, 1, 2, 1]


def test_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match="non-negative seed"):
        keys.split_seed(-1)


# --- draws ---


draw = jax.jit(sample, static_argnums=2)


def kept_set(z, params):
    """Reference: sort, cumulative sum, keep the smallest set with enough probability. ``[V] -> kept probabilities``."""
    p = np.exp((z - z.max()).astype(np.float64) / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    q = p[order] / p[order].sum()
    n = min(int(np.sum(np.cumsum(q) - q < params.top_p)), int(np.sum(q >= params.min_p * q[0])))
    out = np.zeros(len(z))
    out[order[:n]] = q[:n] / q[:n].sum()
    return out


TRUNCATIONS = [SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(temperature=0.7, top_k=7),
               SamplingParams(temperature=1.3, top_k=20, top_p=0.6), SamplingParams(temperature=0.7),
               SamplingParams(top_p=1e-6), SamplingParams(top_k=1), SamplingParams(temperature=0.7, min_p=0.05),
               SamplingParams(temperature=1.3, top_p=0.9, min_p=0.1), SamplingParams(top_k=20, min_p=0.2)]


@pytest.mark.parametrize("vocab, params", [*((300, p) for p in TRUNCATIONS), (5, TRUNCATIONS[2]), (5, TRUNCATIONS[3])],
                         ids=lambda x: x if isinstance(x, int) else f"T{x.temperature}k{x.top_k}p{x.top_p}m{x.min_p}")
def test_sampled_frequencies_and_kept_set_match_the_exact_distribution(vocab, params):
    """Chi-square over 8,000 draws; exp(behaviour logprob) is the exact probability and sums to 1 over the kept set."""
    z = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    exact = kept_set(z, params)
    n = 8_000
    u = jax.random.uniform(jax.random.key(1), (n,))
    d = draw(jnp.broadcast_to(z, (n, vocab)), u, params)
    count = np.bincount(np.asarray(d.token), minlength=vocab)
    assert (count[exact == 0] == 0).all()
    likely = exact * n >= 5
    chi2 = float(np.sum((count - exact * n)[likely] ** 2 / (exact * n)[likely]))
    k = int(likely.sum())
    assert chi2 < k + 5 * math.sqrt(2 * k) + 5, (chi2, k)
    behavior = np.exp(np.asarray(d.behavior_logprob))
    np.testing.assert_allclose(behavior, exact[np.asarray(d.token)], rtol=2e-5)
    seen = {int(t): float(b) for t, b in zip(d.token, behavior)}
    assert abs(sum(seen.values()) + exact[[i for i in range(vocab) if i not in seen]].sum() - 1) < 1e-4
    full = np.exp(np.asarray(d.logprob))
    p = np.exp(z.astype(np.float64) / params.temperature)
    np.testing.assert_allclose(full, (p / p.sum())[np.asarray(d.token)], rtol=2e-5)


def test_top_p_keeps_what_transformers_keeps():
    torch = pytest.importorskip("torch")
    from transformers import TopPLogitsWarper

    z = np.random.default_rng(0).normal(size=(16, 401)).astype(np.float32) * 3
    mask = jax.jit(top_p_mask)
    z[0] *= 0.01  # so flat that its nucleus is found by bisection, beside rows that find theirs among a few candidates
    for p in (0.1, 0.5, 0.9, 0.99):
        want = torch.isfinite(TopPLogitsWarper(p)(None, torch.tensor(z))).numpy()
        np.testing.assert_array_equal(mask(z, z.max(-1), p), want)


def test_ties_are_broken_by_the_lower_id():
    z = jnp.zeros((1, 300))
    assert np.flatnonzero(jax.jit(top_p_mask)(z, jnp.zeros(1), 0.5)[0]).tolist() == list(range(150))
    two = jnp.array([[0.0, 1.0, 1.0, -1.0]])
    for u in (0.0, 0.5, 0.999):
        assert draw(two, jnp.array([u]), SamplingParams(top_k=1)).token[0] == 1
        assert draw(two, jnp.array([u]), SamplingParams(top_p=0.1)).token[0] == 1
    assert draw(two, jnp.zeros(1), SamplingParams(temperature=0)).token[0] == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 127, 128, 129, 700]),
       st.sampled_from([0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0]))
def test_no_token_of_probability_zero_or_outside_the_vocabulary_is_ever_drawn(seed, vocab, u):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(4, vocab)).astype(np.float32) * rng.choice([0.1, 5, 40])
    z[rng.random(z.shape) < 0.7] = -np.inf
    z[:, rng.integers(vocab)] = 0.0
    token, sums = _inverse_cdf(jnp.asarray(z), jnp.full(4, u, jnp.float32))
    token = np.asarray(token)
    assert ((token >= 0) & (token < vocab)).all()
    peak = z.max(-1)
    weight = np.exp(z - peak[:, None])
    weight[weight < np.finfo(np.float32).tiny] = 0  # XLA flushes subnormal numbers
    assert (weight[np.arange(4), token] > 0).all()
    if u == 0.0:
        assert (token == (weight > 0).argmax(-1)).all()
    np.testing.assert_allclose(sums.sum(-1), weight.sum(-1), rtol=1e-5)


@jax.jit
def _inverse_cdf(z, u):
    peak = jnp.max(z, axis=-1)
    sums = block_sums(z, peak)
    return inverse_cdf(z, peak, sums, u), sums


def test_greedy_has_finite_logprobs_at_temperature_one():
    z = np.random.default_rng(0).normal(size=(8, V)).astype(np.float32) * 30
    d = draw(jnp.asarray(z), jnp.full(8, 0.99), SamplingParams(temperature=0, record_entropy=True))
    np.testing.assert_array_equal(d.token, z.argmax(-1))
    np.testing.assert_allclose(d.logprob, jax.nn.log_softmax(z)[np.arange(8), z.argmax(-1)], atol=1e-5)
    assert np.isfinite(d.entropy).all() and (np.asarray(d.behavior_logprob) == 0).all()


def test_entropy_is_that_of_the_tempered_full_softmax_also_with_forbidden_tokens():
    z = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    z[:, :40] = -np.inf
    d = draw(jnp.asarray(z), jnp.full(3, 0.5), SamplingParams(temperature=0.5, top_k=3, record_entropy=True))
    p = np.exp(np.asarray(jax.nn.log_softmax(z / 0.5)))[:, 40:]
    np.testing.assert_allclose(d.entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


@pytest.mark.parametrize("params", [*TRUNCATIONS, SamplingParams(temperature=0)], ids=lambda p: f"T{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_bad_logits_mark_the_row_and_leave_the_others_alone(params):
    z = np.random.default_rng(0).normal(size=(5, V)).astype(np.float32)
    good = draw(jnp.asarray(z), jnp.full(5, 0.4), params)
    z[0, 3], z[1, 3], z[2, :] = np.nan, np.inf, -np.inf
    bad = draw(jnp.asarray(z), jnp.full(5, 0.4), params)
    assert bad.finite.tolist() == [False, False, False, True, True]
    for a, b in ((bad.token, good.token), (bad.logprob, good.logprob), (bad.behavior_logprob, good.behavior_logprob)):
        assert np.isfinite(a).all() and (np.asarray(a)[:3] == 0).all()
        np.testing.assert_array_equal(a[3:], b[3:])


@pytest.mark.parametrize("kw", [{"temperature": -1.0}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
                                {"top_p": 1.5}, {"max_new_tokens": 0}, {"eos_ids": (-1,)},
                                {"min_p": 1.0}, {"stop": ("",)}, {"stop": "END"}])
def test_impossible_sampling_parameters_are_refused_by_name(kw):
    with pytest.raises(ValueError, match=f"sampling {next(iter(kw))} is"):
        SamplingParams(**kw)
