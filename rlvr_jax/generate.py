"""``rlvr-jax generate``: answers to prompts, one JSON object a line, in the order of the prompts."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvr_jax import records
from rlvr_jax.config import Config
from rlvr_jax.data.rows import prompt_id
from rlvr_jax.rollout.book import Finished
from rlvr_jax.rollout.keys import occurrences

# Prompts of one call of the engine: what its arrays hold on the host.
BATCH = 1024


def read_prompts(lines: Iterable[str]) -> list[str]:
    """One prompt a line: plain text, or a JSON object with a ``prompt``. Empty lines are passed over.

    Raises:
      ValueError: a line looks like an object and is none, or has no prompt.
    """
    out = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if text.lstrip().startswith("{"):
            try:
                text = json.loads(text)["prompt"]
            except (ValueError, KeyError):
                raise ValueError(f"line {number} of the prompts is no JSON object with a 'prompt': {text[:80]!r}") from None
            if not isinstance(text, str):
                raise ValueError(f"line {number} of the prompts: 'prompt' must be a string, got {text!r:.80}")
        if text.strip():
            out.append(text)
    return out


def finished_prompts(path: Path, prompts: Sequence[str], n: int) -> int:
    """How many prompts, from the first on, have all their n answers in ``path``; what a kill left behind them is cut off.

    Raises:
      ValueError: the file holds answers to other prompts or another number of them.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    for i, raw in enumerate(path.read_bytes().splitlines(keepends=True)):
        if not raw.endswith(b"\n"):
            break
        record = json.loads(raw)
        if i >= len(prompts) * n or (record.get("prompt"), record.get("sample")) != (prompts[i // n], i % n):
            raise ValueError(f"line {i + 1} of '{path}' is no answer {i % n} to prompt {i // n}; give another file, or the prompts and -n it was begun with")
        kept.append(raw)
    done = len(kept) // n
    records.write_atomic(path, b"".join(kept[: done * n]))
    return done


def generate(config: Config, engine: Any, tokenizer: Any, prompts: Sequence[str], n: int, write: Callable[[dict[str, Any]], None], *, done: int = 0,
             on_prompt: Callable[[int], None] = lambda finished: None) -> None:
    """n answers to each prompt from number ``done`` on.

    An answer depends on weights, prompt, ``seed``, its number and how often the prompt came before, so a run that was
    stopped and goes on gives the answers of one that was not.

    Args:
      engine: has its weights.
      write: is told each answer: ``prompt sample response tokens truncated logprob``.
      on_prompt: is told how many prompts are finished.
    """
    system = [{"role": "system", "content": config.model.system_prompt}] if config.model.system_prompt else []
    every_id = np.array([prompt_id("", p) for p in prompts])
    earlier = occurrences(every_id)
    for start in range(done, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        ids = [tokenizer.encode_chat([*system, {"role": "user", "content": p}], config.model.template_args) for p in batch]
        ready: dict[int, Finished] = {}
        told = [0]

        def take(rows: Sequence[Finished], batch: Sequence[str] = batch, ready: dict[int, Finished] = ready, told: list[int] = told, start: int = start) -> None:
            ready.update((row.row, row) for row in rows)
            while all(told[0] * n + i in ready for i in range(n)):
                for sample in range(n):
                    row = ready.pop(told[0] * n + sample)
                    write({"prompt": batch[told[0]], "sample": sample, "response": tokenizer.decode(row.tokens), "tokens": len(row.tokens),
                           "truncated": row.truncated, "logprob": round(row.logprob, 4)})
                told[0] += 1
                on_prompt(start + told[0])

        part = slice(start, start + len(batch))
        engine.generate(ids, every_id[part], np.zeros(len(batch), np.int32), n, config.seed, 0, earlier[part], on_rows=take)
