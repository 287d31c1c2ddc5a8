"""A new tiny model: a byte-level BPE tokenizer trained on the task's own texts, and a Llama config for it."""

import json
from collections.abc import Iterable
from pathlib import Path

from rlvr_jax.config import Sft

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# One token opens a turn and one closes it: a tiny model's context is short.
CHAT_TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def write_folder(folder: Path, shape: Sft, texts: Iterable[str]) -> Path:
    """Writes tokenizer and config.json (no weights) of a Llama of this shape; every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=shape.vocab_size, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=list(SPECIAL[2:]),
                                   chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": -(-bpe.get_vocab_size() // 8) * 8, "hidden_size": shape.width,
        "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.width // shape.heads, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "hidden_act": "silu", "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": None, "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
