"""PPO's critic (arXiv 1707.06347): a value head on the policy's own decoder, GAE, and the clipped value loss.

``V[b, t] = mean_d(w_d h_d) + bias`` with ``h`` the final hidden state *before* token t is read, divided by its root mean
square. The mean (not the sum) makes the head's learning rate mean the same at every model width. The head starts at 0.

Policy and critic share the decoder: no second trunk in memory, and no second forward pass. So the value loss pulls on the weights that
sample: its gradient reaches the decoder times ``coef``, while the head itself always learns at its own learning rate with
an optimizer of its own. With ``coef`` 0 the decoder is the policy's alone, and values are what a linear map can read off
its hidden states; a small ``coef`` lets the decoder learn to tell good prefixes from bad ones. Differs from trainers with a
critic model of its own, which cost a second model's memory and time.

A state's value belongs to the token that follows: ``value[b, t]``, like log-probabilities, is 0 outside the response. An
answer ends with value 0, whether an end token or the token limit ended it. Every answered row teaches the critic, also
rows that a strategy drops or whose policy loss is masked, so every answered row is live; rows without a verdict take no part.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax import config as configs
from rlvr_jax.config import Config
from rlvr_jax.kernels.token_logprob.api import token_logprob
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.scoring import hidden_states, row_scores
from rlvr_jax.state import make_optimizer
from rlvr_jax.types import Array, UpdateBatch

Head = dict[str, Array]
Metrics = dict[str, tuple[Array, Array]]


class Critic(NamedTuple):
    """``settings`` of the config, the head's ``optimizer``, and the width it reads."""

    settings: configs.Critic
    optimizer: optax.GradientTransformation
    width: int

    def init(self) -> dict[str, Any]:
        """The critic's part of the state: ``head`` (float32) and ``opt_state``."""
        head = {"weight": jnp.zeros(self.width, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
        return {"head": head, "opt_state": self.optimizer.init(head)}

    def step(self, state: dict[str, Any], grads: Head, ok: Array) -> dict[str, Any]:
        """The state after one update of the head; the same state where not ``ok``."""
        updates, opt_state = self.optimizer.update(grads, state["opt_state"], state["head"])
        new = {"head": optax.apply_updates(state["head"], updates), "opt_state": opt_state}
        return jax.tree.map(lambda new, old: jnp.where(ok, new, old), new, state)


def make_critic(config: Config, model: DecoderConfig) -> Critic | None:
    """The critic of the config, None where ``algorithm.advantage`` has none. Its optimizer is the policy's, at its own
    learning rate and without warm-up and decay."""
    settings = config.algorithm.value
    if settings is None:
        return None
    own = config.optimizer.model_copy(update={"learning_rate": settings.learning_rate, "warmup_steps": 0, "weight_decay": 0.0})
    return Critic(settings, make_optimizer(own, config.train.steps * config.train.updates_per_batch), model.hidden_size)


def values_of(head: Head, hidden: Array) -> Array:
    """``hidden [tokens, D] -> [tokens]``, in the head's dtype."""
    h = hidden.astype(head["weight"].dtype)
    inverse = jax.lax.rsqrt(jnp.mean(h * h, -1) + 1e-6)
    return inverse * (h @ head["weight"]) / h.shape[-1] + head["bias"]


def start_of_step(params: Any, head: Head, model: DecoderConfig, config: Config, batch: UpdateBatch, mask: Array, *, with_logprob: bool) -> tuple[Array, Array | None]:
    """``(value, logprob)``, both ``[B, T]``, 0 outside ``mask``, without gradient, from one forward pass over the rows
    that have a masked token; ``logprob`` only if asked for."""

    def of(chunk: dict[str, Array], T: int) -> dict[str, Array]:
        hidden, out_head = hidden_states(params, model, config, chunk, T)
        live = chunk["mask"].reshape(-1)
        out = {"value": jnp.where(live, values_of(head, hidden), 0)}
        if with_logprob:
            out["logprob"], _ = token_logprob(hidden, out_head, chunk["target"].reshape(-1), weights=live.astype(jnp.float32),
                                              temperature=config.rollout.temperature)
        return out

    out = jax.lax.stop_gradient(row_scores(of, config, batch.tokens, batch.prompt_length + batch.response_length, mask))
    return out["value"], out.get("logprob")


def token_rewards(batch: UpdateBatch, mask: Array, kl: Array | None) -> Array:
    """``[B, T]``: the row's reward at its last response token, less ``kl [B, T]`` (coefficient included) at each."""
    t = jnp.arange(batch.tokens.shape[1])
    last = t == (batch.prompt_length + batch.response_length - 1)[:, None]
    reward = jnp.where(last, batch.reward[:, None], 0) - (0 if kl is None else kl)
    return jnp.where(mask, reward, 0)


def gae(reward: Array, value: Array, mask: Array, gamma: float, lam: float) -> tuple[Array, Array]:
    """Generalised advantage estimates (arXiv 1506.02438), ``[B, T]`` each::

        delta_t = reward_t + gamma value_{t+1} - value_t,    A_t = delta_t + gamma lam A_{t+1},    return_t = A_t + value_t

    Args:
      reward, value: ``[B, T]``.
      mask: ``[B, T] bool`` response tokens, side by side; what follows the last one is worth 0.

    Returns:
      ``(advantage, return)``, 0 outside the mask.
    """
    value = jnp.where(mask, value, 0)
    after = jnp.pad(value[:, 1:], ((0, 0), (0, 1)))
    delta = jnp.where(mask, reward + gamma * after - value, 0)
    decay = jnp.where(mask, jnp.asarray(gamma * lam, delta.dtype), 0)

    # (delta, decay) of neighbours compose; from the end, in log2(T) rounds instead of T.
    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    advantage, _ = jax.lax.associative_scan(join, (delta, decay), reverse=True, axis=1)
    return advantage, jnp.where(mask, advantage + value, 0)


def whiten(advantage: Array, mask: Array, eps: float = 1e-6) -> Array:
    """``(A - mean) / (std + eps)`` over the masked tokens of the whole batch, 0 elsewhere. Advantages that are all exactly
    equal give 0."""
    n = jnp.maximum(jnp.sum(mask, dtype=advantage.dtype), 1)
    same = jnp.max(jnp.where(mask, advantage, -jnp.inf)) == jnp.min(jnp.where(mask, advantage, jnp.inf))
    centred = jnp.where(mask & ~same, advantage - jnp.sum(jnp.where(mask, advantage, 0)) / n, 0)
    return centred / (jnp.sqrt(jnp.sum(centred**2) / n) + eps)


def value_loss(head: Head, hidden: Array, old: Array, returns: Array, scale: Array, settings: configs.Critic) -> tuple[Array, Metrics]:
    """Summed over the tokens: ``scale / 2 * max((V - return)^2, (clip(V, old - c, old + c) - return)^2)``.

    The gradient is the head's own, and ``coef`` times that for ``hidden``.

    Args:
      hidden: ``[tokens, D]``.
      old, returns: ``[tokens]``; ``old`` are the values at the start of the step.
      scale: ``[tokens]``, 0 where no value is learned.

    Returns:
      The sum, and statistics ``name -> (sum, count)``.
    """
    live, fixed = scale > 0, jax.lax.stop_gradient(hidden)
    hidden = fixed + settings.coef * (hidden - fixed) if settings.coef else fixed
    value = values_of(head, hidden)
    error, moved = (value - returns) ** 2, value - old
    # Chosen by the distance, not by which error is larger: within the bounds the two differ by rounding.
    far = jnp.abs(moved) > (jnp.inf if settings.value_clip is None else settings.value_clip)
    bounded = (old + jnp.sign(moved) * (settings.value_clip or 0) - returns) ** 2
    clipped = far & (bounded > error)
    loss = jnp.where(live, jnp.where(clipped, jax.lax.stop_gradient(bounded), error) / 2, 0)
    count = jnp.sum(live, dtype=jnp.float32)
    stats = {"value/loss": (jnp.sum(loss), count), "value/clip_fraction": (jnp.sum(live & clipped, dtype=jnp.float32), count)}
    return jnp.sum(loss * scale), jax.lax.stop_gradient(stats)


def start_metrics(value: Array, returns: Array, mask: Array) -> Metrics:
    """``value/mean``, ``value/return`` and ``value/explained_variance``: 1 - Var(return - value) / Var(return), over response
    tokens, at the start of the step. The last has no value where all returns are equal but for rounding."""
    n = jnp.sum(mask, dtype=jnp.float32)
    mean = lambda x: jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(n, 1)  # noqa: E731
    variance = lambda x: mean((x - mean(x)) ** 2)  # noqa: E731
    of_returns = variance(returns)
    differ = of_returns > 1e-10 * mean(returns**2 + value**2)
    explained = jnp.where(differ, 1 - variance(returns - value) / jnp.where(differ, of_returns, 1), 0)
    return {"value/mean": (jnp.sum(value), n), "value/return": (jnp.sum(returns), n), "value/explained_variance": (explained, jnp.float32(differ))}
