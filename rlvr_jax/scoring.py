"""Log-probabilities of given tokens under given weights: what the update, the old and the reference policy share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.config import Config
from rlvr_jax.kernels.token_logprob.api import token_logprob
from rlvr_jax.models.decoder import DecoderConfig, forward, head_matrix
from rlvr_jax.packing import gather, lay_out, turn
from rlvr_jax.sharding import constrain
from rlvr_jax.types import Array


def batch_devices(config: Config) -> int:
    """Devices that the rows of a batch are split over."""
    return config.mesh.data * config.mesh.fsdp


def hidden_states(params: Any, model: DecoderConfig, config: Config, chunk: dict[str, Array], T: int) -> tuple[Array, Array]:
    """One chunk of a layout -> (``[tokens, D]`` hidden states in compute dtype, ``[V, D]`` head)."""
    dtype = jnp.dtype(config.model.compute_dtype)
    hidden, _ = forward(params, model, chunk["tokens"], chunk["position"], segment_ids=chunk["segment"], window=T, compute_dtype=dtype,
                        remat=config.model.remat, attention_kernel=config.model.attention)
    # Named once more after the cast, or the compiler gathers the float32 head and casts then: twice the bytes.
    return hidden.reshape(-1, hidden.shape[-1]), constrain(head_matrix(params, model).astype(dtype), "vocab", "embed")


def chunk_logprob(params: Any, model: DecoderConfig, config: Config, chunk: dict[str, Array], T: int, *, with_entropy: bool = False) -> tuple[Array, Array | None]:
    """``[n, L]`` tempered logprob (and entropy) of the tokens that the slots predict; 0 where ``chunk['mask']`` is False."""
    hidden, head = hidden_states(params, model, config, chunk, T)
    shape = chunk["target"].shape
    logprob, entropy = token_logprob(hidden, head, chunk["target"].reshape(-1), weights=chunk["mask"].reshape(-1).astype(jnp.float32),
                                     temperature=config.rollout.temperature, with_entropy=with_entropy)
    return logprob.reshape(shape), None if entropy is None else entropy.reshape(shape)


def row_logprob(params: Any, model: DecoderConfig, config: Config, tokens: Array, length: Array, mask: Array) -> Array:
    """``tokens [B, T], length [B], mask [B, T] -> logprob [B, T]``, tempered, 0 where the mask is False; no gradient.

    Computes the rows that have a masked token, in micro-batches of ``train.micro_batch``, packed if ``train.packing``.
    """
    of = lambda chunk, T: chunk_logprob(params, model, config, chunk, T)[0]  # noqa: E731
    return row_scores(of, config, tokens, length, mask)


def row_scores(of: Callable[[dict[str, Array], int], Any], config: Config, tokens: Array, length: Array, mask: Array) -> Any:
    """As :func:`row_logprob`, of whatever ``of(chunk, T)`` computes: a tree of arrays, a number for each of the chunk's slots."""
    B, T = tokens.shape
    layout = lay_out(length, jnp.any(mask, 1), T, micro_batch=config.train.micro_batch, devices=batch_devices(config), packed=config.train.packing)
    chunks = gather(layout, tokens, {"mask": mask}, {})

    def body(i: Array, out: Any) -> Any:
        chunk = turn(chunks, i)
        put = lambda all_rows, x: all_rows.at[chunk["following"].reshape(-1)].set(x.reshape(-1), mode="drop")  # noqa: E731
        return jax.tree.map(put, out, of(chunk, layout.T))

    empty = jax.tree.map(lambda x: jnp.zeros(B * T, x.dtype), jax.eval_shape(lambda: of(turn(chunks, 0), layout.T)))
    return jax.tree.map(lambda x: x.reshape(B, T), jax.lax.fori_loop(0, layout.trips, body, empty))
