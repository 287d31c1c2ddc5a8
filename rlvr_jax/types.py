"""Arrays that flow between the rooms, as frozen pytrees.

Dimension key, used in signatures and as suffixes of local names::

    N  prompts in a batch          G  samples per prompt (a group)
    B  rows, B = N * G             T  tokens of a row: prompt, response, padding
    V  vocabulary                  D  model width
    H  query heads                 K  key/value heads          L  layers

Row ``b`` is sample ``b % G`` of prompt ``b // G``. Rows are **right-padded** and positions start at 0. ``x[b, t]``
of a ``[B, T]`` array of probabilities belongs to ``tokens[b, t]`` given the tokens before it, and is 0 outside
the response. The response mask follows from the lengths, never from comparing ids with a pad id.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array


class Rollout(struct.PyTreeNode):
    """What a sampler returns: B rows and how they were sampled.

    Attributes:
      tokens: ``[B, T] int32`` prompt, then response, then padding.
      prompt_length: ``[B] int32``.
      response_length: ``[B] int32``, the end-of-sequence token counted (it is learned too).
      logprob: ``[B, T] float32`` of the tempered, full softmax.
      behavior_logprob: ``[B, T] float32`` of the distribution really sampled from; differs from ``logprob`` only
        where top-k, top-p or min-p truncate.
      entropy: ``[B, T] float32`` of the tempered, full softmax, or None when it was not recorded.
      truncated: ``[B] bool`` the row ran into its token limit without an end token.
      prompt_id: ``[B] int32``.
      domain: ``[B] int32`` index into the configured domains.
      policy_step: ``[B] int32`` trainer step of the weights that sampled the row.
    """

    tokens: Array
    prompt_length: Array
    response_length: Array
    logprob: Array
    behavior_logprob: Array
    entropy: Array | None
    truncated: Array
    prompt_id: Array
    domain: Array
    policy_step: Array


class Signals(struct.PyTreeNode):
    """What a data strategy may read. See :func:`signals` for the defaults.

    Attributes:
      reward: ``[N, G] float32``.
      advantage: ``[N, G]`` or ``[N, G, T] float32``.
      logprob: ``[N, G, T] float32`` the sampler's (for replayed rows the stored one).
      mask: ``[N, G, T] bool`` response tokens of live rows.
      length: ``[N, G] int32`` response length in tokens.
      domain: ``[N] int32``.
      step: ``[] int32`` trainer step.
      valid: ``[N, G] bool`` False for unknown, padded and already dropped rows.
      correct: ``[N, G] bool`` reward > success threshold.
      truncated: ``[N, G] bool``.
      age: ``[N, G] int32`` trainer steps since the row was sampled.
      entropy: ``[N, G, T] float32`` or None.
    """

    reward: Array
    advantage: Array
    logprob: Array
    mask: Array
    length: Array
    domain: Array
    step: Array
    valid: Array
    correct: Array
    truncated: Array
    age: Array
    entropy: Array | None = None

    @classmethod
    def create(cls, reward, advantage, logprob, mask, length, domain, step, *, valid=None, correct=None,
               truncated=None, age=None, entropy=None) -> "Signals":
        """Fills the defaults: every row valid, correct = reward > 0.5, not truncated, age 0, no entropy."""
        reward = jnp.asarray(reward, jnp.float32)
        return cls(
            reward=reward, advantage=jnp.asarray(advantage), logprob=jnp.asarray(logprob), mask=jnp.asarray(mask, bool),
            length=jnp.asarray(length), domain=jnp.asarray(domain), step=jnp.asarray(step),
            valid=jnp.ones(reward.shape, bool) if valid is None else jnp.asarray(valid, bool),
            correct=reward > 0.5 if correct is None else jnp.asarray(correct, bool),
            truncated=jnp.zeros(reward.shape, bool) if truncated is None else jnp.asarray(truncated, bool),
            age=jnp.zeros(reward.shape, jnp.int32) if age is None else jnp.asarray(age),
            entropy=entropy)


class UpdateBatch(struct.PyTreeNode):
    """Input of the jitted update: N groups of G rows, fresh and replayed alike.

    Attributes:
      tokens: ``[B, T] int32``.
      prompt_length, response_length: ``[B] int32``.
      logprob, behavior_logprob: ``[B, T] float32`` as in :class:`Rollout`.
      entropy: ``[B, T] float32`` or None.
      reward: ``[B] float32``, 0 where the verdict is unknown.
      valid: ``[B] bool`` False where the verdict is unknown or the row is padding.
      correct, truncated: ``[B] bool``.
      policy_step: ``[B] int32`` step of the weights that sampled the row.
      domain: ``[N] int32``.
    """

    tokens: Array
    prompt_length: Array
    response_length: Array
    logprob: Array
    behavior_logprob: Array
    entropy: Array | None
    reward: Array
    valid: Array
    correct: Array
    truncated: Array
    policy_step: Array
    domain: Array


class TrainState(struct.PyTreeNode):
    """Everything on the device that changes from step to step.

    ``step`` counts trainer steps (rollouts); ``params`` and ``opt_state`` are float32; ``strategy_state`` belongs to
    the chain of data strategies; ``critic`` is the value head and its optimizer, None without a critic.
    """

    step: Array
    params: Any
    opt_state: Any
    strategy_state: Any
    critic: Any = None


def response_mask(prompt_length: Array, response_length: Array, T: int) -> Array:
    """``[B] int, [B] int -> [B, T] bool``: True exactly on response tokens, the end token included."""
    t = jnp.arange(T)
    return (t >= prompt_length[:, None]) & (t < (prompt_length + response_length)[:, None])
