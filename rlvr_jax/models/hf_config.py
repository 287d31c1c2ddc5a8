"""``config.json`` of a Hugging Face folder to :class:`DecoderConfig` and back. Plain JSON: neither torch nor transformers."""

import json
from pathlib import Path
from typing import Any

from rlvr_jax.models.decoder import DecoderConfig, Llama3Rope

# architecture -> (model_type, qkv_bias, qk_norm)
ARCHITECTURES: dict[str, tuple[str, bool, bool]] = {
    "LlamaForCausalLM": ("llama", False, False),
    "Qwen2ForCausalLM": ("qwen2", True, False),
    "Qwen3ForCausalLM": ("qwen3", False, True),
}
# Written where a folder is made without a source; rope has no table, so nothing here depends on it.
MAX_POSITION_EMBEDDINGS = 32768


class ModelError(ValueError):
    """A model folder that cannot be used; the message is one line."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ModelError: the file is missing or broken.
    """
    try:
        out = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"'{path}' is missing; give a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ModelError(f"'{path}' is not JSON: {e}") from None
    if not isinstance(out, dict):
        raise ModelError(f"'{path}' holds a {type(out).__name__}, expected an object")
    return out


def load_config(folder: str | Path) -> DecoderConfig:
    """The decoder's shape from ``folder/config.json`` (written by transformers 4 or 5).

    Raises:
      ModelError: another architecture, or a feature of it that this decoder does not compute.
    """
    path = Path(folder) / "config.json"
    return parse_config(read_json(path), path)


def parse_config(c: dict[str, Any], path: str | Path) -> DecoderConfig:
    """The decoder's shape from the content of a ``config.json``; ``path`` is what errors name.

    Raises:
      ModelError: as :func:`load_config`.
    """
    names = c.get("architectures") or [n for n, (kind, _, _) in ARCHITECTURES.items() if kind == c.get("model_type")]
    if not names or names[0] not in ARCHITECTURES:
        seen = names[0] if names else c.get("model_type")
        raise ModelError(f"'{path}': architecture {seen!r} is unknown; expected one of {', '.join(ARCHITECTURES)}")
    _, qkv_bias, qk_norm = ARCHITECTURES[names[0]]
    _refuse_unsupported(c, path, names[0])

    def need(key: str) -> Any:
        if c.get(key) is None:
            raise ModelError(f"'{path}': '{key}' is missing")
        return c[key]

    heads = need("num_attention_heads")
    theta, scaling = _rope(c, path)
    try:
        return DecoderConfig(
            vocab_size=need("vocab_size"), hidden_size=need("hidden_size"), intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"), num_heads=heads, num_kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or need("hidden_size") // heads, rope_theta=theta, rope_scaling=scaling,
            rms_eps=c.get("rms_norm_eps", 1e-6), tie_embeddings=bool(c.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias, qk_norm=qk_norm)
    except ValueError as e:
        raise ModelError(f"'{path}': {e}") from None


def _refuse_unsupported(c: dict[str, Any], path: str | Path, architecture: str) -> None:
    checks = {
        "hidden_act": c.get("hidden_act", "silu") == "silu",
        "attention_bias": architecture == "Qwen2ForCausalLM" or not c.get("attention_bias"),
        "mlp_bias": not c.get("mlp_bias"),
        "use_sliding_window": not c.get("use_sliding_window"),
        "layer_types": all(t == "full_attention" for t in c.get("layer_types") or ()),
        "quantization_config": not c.get("quantization_config"),
        "partial_rotary_factor": (c.get("partial_rotary_factor") or 1) == 1,
    }
    for key, fine in checks.items():
        if not fine:
            raise ModelError(f"'{path}': {key} = {json.dumps(c.get(key))[:80]} is not supported for {architecture}")


def _rope(c: dict[str, Any], path: str | Path) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling); transformers 5 keeps both in 'rope_parameters', 4 in 'rope_theta' and 'rope_scaling'."""
    r = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = r.get("rope_theta") or c.get("rope_theta") or 10000.0
    kind = r.get("rope_type") or r.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ModelError(f"'{path}': rope type '{kind}' is not supported; expected 'default' or 'llama3'")
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [f for f in fields if f not in r]
    if missing:
        raise ModelError(f"'{path}': rope type 'llama3' needs '{missing[0]}'")
    return float(theta), Llama3Rope(float(r["factor"]), float(r["low_freq_factor"]), float(r["high_freq_factor"]),
                                    int(r["original_max_position_embeddings"]))


def end_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """``eos_token_id`` of a ``config.json``: a number, a list, or nothing."""
    value = config.get("eos_token_id")
    return () if value is None else tuple(int(i) for i in (value if isinstance(value, list) else [value]))


def to_config(cfg: DecoderConfig, dtype: str, **more: Any) -> dict[str, Any]:
    """The ``config.json`` of a model of this shape, readable by transformers 4 and 5.

    Args:
      cfg: shape.
      dtype: 'float32' or 'bfloat16', of the stored weights.
      more: entries that the shape does not hold: bos_token_id, eos_token_id, pad_token_id, max_position_embeddings.

    Raises:
      ModelError: no architecture of transformers has both qkv_bias and qk_norm.
    """
    kind = [(n, t) for n, (t, bias, norm) in ARCHITECTURES.items() if (bias, norm) == (cfg.qkv_bias, cfg.qk_norm)]
    if not kind:
        raise ModelError("no supported architecture has both qkv_bias and qk_norm; export needs one of them at most")
    scaling = None
    if s := cfg.rope_scaling:
        scaling = {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
                   "high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_max_position_embeddings}
    return {
        "architectures": [kind[0][0]], "model_type": kind[0][1], "vocab_size": cfg.vocab_size, "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size, "num_hidden_layers": cfg.num_layers, "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim, "rope_theta": cfg.rope_theta, "rope_scaling": scaling,
        "rms_norm_eps": cfg.rms_eps, "tie_word_embeddings": cfg.tie_embeddings, "hidden_act": "silu",
        "attention_bias": cfg.qkv_bias, "max_position_embeddings": MAX_POSITION_EMBEDDINGS, "torch_dtype": dtype, **more}
