"""Models by Hugging Face id: their folder for training, and their shape without weights, hub or network for planning."""

import os
import re
from pathlib import Path
from typing import Any

from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.models.hf_config import ModelError, end_ids, load_config, parse_config, read_json

_QWEN25 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
           "tie_word_embeddings": True, "eos_token_id": 151643, "use_sliding_window": False}
_R1_QWEN = _QWEN25 | {"rope_theta": 10000.0, "tie_word_embeddings": False}
_LLAMA31_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _shape(width: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, **more}


KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25 | _shape(896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _QWEN25 | _shape(1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B": _QWEN25 | _shape(2048, 11008, 36, 16, 2),
    "Qwen/Qwen2.5-7B": _QWEN25 | _shape(3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _R1_QWEN | _shape(1536, 8960, 28, 12, 2),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _R1_QWEN | _shape(3584, 18944, 28, 28, 4, vocab_size=152064),
    "meta-llama/Llama-3.1-8B": _shape(4096, 14336, 32, 32, 8, architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, rms_norm_eps=1e-5,
                                      rope_theta=500000.0, rope_scaling=_LLAMA31_ROPE, tie_word_embeddings=False, eos_token_id=128001),
}
"""What the published ``config.json`` says, as far as the decoder reads it."""

# What training reads of a repository: not its weights in other formats.
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def is_hub_id(path: str) -> bool:
    """Whether ``path`` can only mean a model on the Hugging Face hub: OWNER/NAME, and no folder of that name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.startswith((".", "~")) and not Path(path).exists()


def download(model_id: str) -> Path:
    """The local folder of a hub's model; downloads what its cache lacks.

    Raises:
      ModelError: the hub cannot be reached, or does not have (or give) this model.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=_PATTERNS))
    except Exception as e:  # the client raises errors of its own, of requests and of the file system
        reason = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise ModelError(f"'{model_id}' is no folder, not in the Hugging Face cache, and cannot be downloaded ({reason}); give a local "
                         f"folder, or run 'hf download {model_id}' where there is a network") from None


def shape_of(model_id: str) -> tuple[DecoderConfig, tuple[int, ...]]:
    """(shape, end ids) of a hub's model from the local cache, else from :data:`KNOWN`; no network.

    Raises:
      ModelError: neither has it.
    """
    cached = _cached_config(model_id)
    if cached is not None:
        return load_config(cached), end_ids(read_json(cached / "config.json"))
    if model_id not in KNOWN:
        raise ModelError(f"the shape of '{model_id}' is not known here: run 'hf download {model_id} config.json', or plan one of {', '.join(KNOWN)}")
    config = KNOWN[model_id]
    return parse_config(config, model_id), end_ids(config)


def _cached_config(model_id: str) -> Path | None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None
