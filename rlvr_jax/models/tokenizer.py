"""Tokenizer and chat template of a Hugging Face folder, through ``transformers`` (which needs no torch for them)."""

import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlvr_jax.models.hf_config import ModelError, end_ids, read_json

# Two turns with visible reasoning: templates of reasoning models drop it from earlier turns.
_PROBE = [
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo."},
    {"role": "user", "content": "Three?"}, {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nFour."},
]


class Tokenizer:
    """Token ids for prompts and texts.

    Attributes:
      hf: the transformers tokenizer.
      eos_ids: every id that ends an answer: the tokenizer's own first (the one a template ends a turn with), then those
        of generation_config.json and config.json.
      bos_id: the id that begins every input, or None where this model has none.
      pad_id: never compared with a sampled id; only fills arrays.
      vocab_size: ids run below it (a model's embedding may have more rows).
    """

    def __init__(self, hf: Any, eos_ids: Sequence[int] = ()):
        self.hf = hf
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *eos_ids)))
        self.vocab_size = len(hf)
        self.pad_id = int(hf.pad_token_id) if hf.pad_token_id is not None else (self.eos_ids or (0,))[0]
        # bos_token alone says nothing: some models define one and never begin with it. What the tokenizer does decides.
        begins = list(hf("a").input_ids)[:1] == [hf.bos_token_id]
        self.bos_id: int | None = hf.bos_token_id if begins else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text in the middle of an input: no special token is added."""
        return list(self.hf(text, add_special_tokens=False).input_ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def encode_chat(self, messages: Sequence[dict[str, Any]], template_args: dict[str, Any] | None = None, *,
                    add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, ready for the model's answer, with exactly one BOS if the model begins with one.

        Without a chat template (a base model) the contents are joined by newlines and roles are ignored.

        Args:
          messages: ``{"role": ..., "content": ...}`` each.
          template_args: for the template, e.g. ``{"enable_thinking": False}``.
          add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
          ModelError: the template refuses the messages.
        """
        if not self.hf.chat_template:
            return self._one_bos(self.encode("\n".join(str(m["content"]) for m in messages)))
        try:
            ids = self.hf.apply_chat_template(list(messages), tokenize=True, return_dict=False,
                                              add_generation_prompt=add_generation_prompt, **(template_args or {}))
        except Exception as e:  # jinja and the template itself may raise anything
            raise ModelError(f"the chat template refuses {[m.get('role') for m in messages]}: {e}") from None
        return self._one_bos(list(ids))

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.hf.bos_token_id if self.bos_id is None else self.bos_id
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        # A template of a model without BOS may begin with that token for its own reasons (SmolLM2's <|im_start|>).
        keep = self.bos_id is not None or start > 0
        return [bos, *ids[start:]] if keep else ids

    def keeps_prefix(self, template_args: dict[str, Any] | None = None) -> bool:
        """Whether a conversation's ids begin with the ids of its earlier turns.

        False for templates that drop earlier reasoning (Qwen3, DeepSeek-R1): with them, tokens of a later turn must not
        be taken for a continuation of an earlier row.
        """
        if not self.hf.chat_template:
            return False
        turns = [self.encode_chat(_PROBE[:k], template_args, add_generation_prompt=k % 2 == 1) for k in range(1, len(_PROBE) + 1)]
        return all(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(turns))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder; nothing is downloaded.

    Raises:
      ModelError: there is none, or no id that ends an answer.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found ..."
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = Path(folder)
    try:
        hf = _tokenizer_class(folder).from_pretrained(str(folder), local_files_only=True)
    except Exception as e:
        raise ModelError(f"'{folder}': no usable tokenizer: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from None
    out = Tokenizer(hf, [i for name in ("generation_config.json", "config.json") if (folder / name).is_file() for i in end_ids(read_json(folder / name))])
    if not out.eos_ids:
        raise ModelError(f"'{folder}': no end token in tokenizer, generation_config.json or config.json; set eos_token_id in one")
    return out


def _tokenizer_class(folder: Path) -> Any:
    """What AutoTokenizer would choose. Importing it brings torch along where that is installed (5 s): not for a folder that says all of it in tokenizer.json.

    (Of a qwen2 folder it does not believe the class, and builds its own.)
    """
    says = {name: read_json(folder / name) if (folder / name).is_file() else {} for name in ("config.json", "tokenizer_config.json")}
    whole = (folder / "tokenizer.json").is_file() and says["tokenizer_config.json"].get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    if whole and says["config.json"].get("model_type") in ("llama", "qwen3"):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
