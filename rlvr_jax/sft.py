"""Supervised warm start on prompt/response pairs: from a pretrained model, or a new tiny one with its own tokenizer.

Pairs come from generated tasks (their worked solutions) or files with a response column. The loss is the mean
negative log-probability over response tokens, the end token included; prompts are context only.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlvr_jax import config as configs
from rlvr_jax import data
from rlvr_jax import metrics as metric
from rlvr_jax import parts as part
from rlvr_jax.config import Config, ConfigError, Model
from rlvr_jax.config import Optimizer as OptimizerConfig
from rlvr_jax.evaluate import evaluate
from rlvr_jax.kernels.token_logprob.api import token_logprob
from rlvr_jax.models import hf, scratch
from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix, init_params, param_axes
from rlvr_jax.sharding import named, shardings
from rlvr_jax.state import make_optimizer
from rlvr_jax.types import response_mask

Pair = tuple[list[dict[str, Any]], str]


def sft(config: Config) -> dict[str, Any]:
    """Trains, exports a Hugging Face folder, and reports what the model can do: accuracy and share of rows in format.

    Returns:
      ``{"model": folder, "loss": last loss, "parameters": n, "accuracy": {domain: a}, "in_format": {domain: share}}``, also in
      ``<run_dir>/summary.json``.

    Raises:
      ConfigError: no domain to train on, no pairs, or no row short enough.
    """
    configs.check_trained(config)
    s = config.sft
    run_dir = Path(config.run_dir or "runs/sft")
    out = Path(s.export) if s.export else run_dir / "model"
    run_dir.mkdir(parents=True, exist_ok=True)
    metric.write_atomic(run_dir / "config.yaml", configs.dump(config).encode())
    if s.init == "scratch":
        texts = data.build(config, None)
        pairs, _ = data.pairs(texts, texts.train.init(), 4000)
        folder = scratch.write_folder(run_dir / "init", config.sft, [t for messages, response in pairs for t in (*(m["content"] for m in messages), response)])
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    with part.build(config) as parts:
        params = _initial(parts)
        params, loss = _fit(parts, params, run_dir)
        hf.export(out, params, parts.model, source_folder=parts.folder)
        summary = {"model": str(out), "loss": loss, "parameters": sum(x.size for x in jax.tree.leaves(params)), **_measure(parts, params)}
    metric.write_summary(run_dir, summary)
    return summary


def _initial(parts: part.Parts) -> Any:
    if parts.config.sft.init == "pretrained":
        return parts.params()
    where = shardings(parts.mesh, param_axes(parts.model))
    return jax.jit(lambda key: init_params(parts.model, key), out_shardings=where)(part.stream_key(parts.config.seed, 0, "init"))


def _fit(parts: part.Parts, params: Any, run_dir: Path) -> tuple[Any, float]:
    config, s = parts.config, parts.config.sft
    optimizer = make_optimizer(OptimizerConfig(learning_rate=s.learning_rate, schedule="cosine", warmup_steps=s.warmup_steps,
                                               weight_decay=config.optimizer.weight_decay, max_grad_norm=config.optimizer.max_grad_norm), s.steps)
    opt_state = jax.jit(optimizer.init)(params)
    step_fn = make_step(parts.model, optimizer, config.model)
    state, dropped, loss = parts.dataset.train.init(), 0, float("nan")
    fields = (("loss", "loss", ".4f"),)
    with metric.Writer(run_dir) as writer, metric.Progress(s.steps, description="sft", fields=fields) as progress, jax.set_mesh(parts.mesh):
        for i in range(s.steps):
            rows: list[tuple[list[int], list[int]]] = []
            while len(rows) < s.batch:
                pairs, state = data.pairs(parts.dataset, state, s.batch - len(rows))
                encoded = [encode_pair(parts.tokenizer, pair, config.model.template_args) for pair in pairs]
                short = [e for e in encoded if len(e[0]) + len(e[1]) <= s.max_length]
                dropped += len(encoded) - len(short)
                rows += short
                if dropped > 100 * s.batch and not rows:
                    raise ConfigError(f"sft.max_length: none of {dropped} rows has at most {s.max_length} tokens; raise it")
            batch = {k: jax.device_put(v, named(parts.mesh, "batch", *(None,) * (v.ndim - 1))) for k, v in pad(rows, s.max_length).items()}
            params, opt_state, loss_device = step_fn(params, opt_state, batch)
            if i % 10 == 9 or i + 1 == s.steps:
                loss = float(loss_device)
                values = {"loss": loss, "rows_too_long": dropped}
                writer.write(i + 1, values)
                progress.update(i + 1, values)
    return params, loss


def make_step(model: DecoderConfig, optimizer: optax.GradientTransformation, how: Model) -> Callable[..., Any]:
    """The jitted ``(params, opt_state, batch) -> (params, opt_state, loss)``; batch as :func:`pad` makes it."""
    dtype = jnp.dtype(how.compute_dtype)

    def loss_fn(params: Any, b: dict[str, Any]) -> jax.Array:
        B, T = b["tokens"].shape
        position = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        real = (position < (b["prompt_length"] + b["response_length"])[:, None]).astype(jnp.int32)
        hidden, _ = forward(params, model, b["tokens"], position, segment_ids=real, compute_dtype=dtype, remat=how.remat,
                            attention_kernel=how.attention)
        mask = response_mask(b["prompt_length"], b["response_length"], T)
        shift = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1))).reshape(-1)  # noqa: E731
        logprob, _ = token_logprob(hidden.reshape(B * T, -1), head_matrix(params, model).astype(dtype), shift(b["tokens"]),
                                   weights=shift(mask).astype(jnp.float32))
        return -jnp.sum(logprob) / jnp.maximum(jnp.sum(mask), 1)

    def step(params: Any, opt_state: Any, batch: dict[str, Any]) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def encode_pair(tokenizer: Any, pair: Pair, template_args: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(prompt ids as the sampler will see them, response ids with the first end token)."""
    messages, response = pair
    return tokenizer.encode_chat(messages, template_args), [*tokenizer.encode(response), tokenizer.eos_ids[0]]


def pad(rows: Sequence[tuple[list[int], list[int]]], T: int) -> dict[str, np.ndarray]:
    """Right-padded ``tokens [B, T]`` with ``prompt_length`` and ``response_length`` ``[B]``."""
    tokens = np.zeros((len(rows), T), np.int32)
    for i, (prompt, response) in enumerate(rows):
        tokens[i, : len(prompt) + len(response)] = prompt + response
    return {"tokens": tokens, "prompt_length": np.array([len(p) for p, _ in rows], np.int32),
            "response_length": np.array([len(r) for _, r in rows], np.int32)}


def _measure(parts: part.Parts, params: Any) -> dict[str, Any]:
    """Accuracy and share of answers in the right format on held-out prompts, as training would sample them."""
    e, r = parts.config.eval, parts.config.rollout
    if e.prompts_per_domain == 0:
        return {}
    decode = parts.tokenizer.decode
    formatted: dict[str, list[bool]] = {name: [] for name in parts.dataset.eval}
    names = parts.dataset.order

    def judge(rows: Sequence[Any], texts: list[str]) -> Any:
        for row, text in zip(rows, texts):
            formatted[names[row.domain]].append(_in_format(row, text))
        return parts.judge(rows, texts)

    sampled = parts.config.model_copy(update={"eval": e.model_copy(update={"temperature": r.temperature})})
    engine = dataclasses.replace(parts, config=sampled).eval_engine()
    scores = evaluate(engine, params, parts.dataset.eval, judge, decode, samples=e.samples_per_prompt, batch_prompts=e.batch_prompts)
    return {"accuracy": {n: s.accuracy for n, s in scores.items()}, "in_format": {n: float(np.mean(f)) for n, f in formatted.items() if f},
            "response_length": {n: s.tokens / max(s.total, 1) for n, s in scores.items()}, "truncated": {n: s.truncated / max(s.total, 1) for n, s in scores.items()}}


def _in_format(row: Any, text: str) -> bool:
    """Whether a verifier finds an answer to judge, right or wrong: everyone called knight or knave, or a closed answer."""
    if "names" in row.fields:
        return all(re.search(rf"\b{re.escape(n)} is a kn(ight|ave)\b", text) for n in row.fields["names"])
    return re.search(r"<answer>.+</answer>|\\boxed\{[^{}]+\}", text) is not None
