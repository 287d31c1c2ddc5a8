"""Log-probability (and entropy) of given tokens, and the policy loss, straight from the hidden states: no ``[tokens, V]`` array.

``token_logprob`` is what the reference policy and the scoring pass call, ``policy_loss`` what the update differentiates.
See :mod:`.reference` for the formulas, :mod:`.objective` for the loss of a token.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from . import by_platform, chunked, fused, pallas_gpu, reference, streamed
from .logits import Logits
from .objective import Objective, Rows, Stats, fold_stats, needs_whole_rows, policy_objective

Array = jax.Array
Implementation = Literal["reference", "chunked", "pallas_gpu", "pallas_tpu"]

STREAMED = {"chunked": streamed.Passes(chunked.forward, chunked.backward), "pallas_gpu": streamed.Passes(pallas_gpu.forward, pallas_gpu.backward),
            "pallas_tpu": by_platform.ONLY_ON_TPU}
IMPLEMENTATIONS = ("reference", *STREAMED)


def token_logprob(hidden: Array, head: Array, targets: Array, *, weights: Array | None = None, temperature: float = 1.0,
                  soft_cap: float | None = None, logit_scale: float = 1.0, with_entropy: bool = False,
                  implementation: Implementation | None = None) -> tuple[Array, Array | None]:
    """``log softmax(z)[target]`` of each token, ``z = cap(hidden @ head.T * logit_scale) / temperature``; differentiable in hidden and head.

    Works under ``jit``, inside ``scan`` and ``while_loop`` bodies, and with arrays sharded over a mesh: set it with
    ``jax.set_mesh``, and tokens go over its axes 'data' and 'fsdp', the vocabulary over 'tensor'.

    Args:
      hidden: ``[tokens, D]`` float32 or bfloat16; logits and sums accumulate in float32.
      head: ``[V, D]``; cast to the dtype of ``hidden``, its gradient accumulates in float32 and keeps its own dtype.
      targets: ``[tokens] int``, in ``[0, V)``.
      weights: ``[tokens]`` or None (all live). They only mark what may be skipped: a token of weight 0 gives logprob 0,
        entropy 0 and no gradient, whatever its hidden state holds; chunks of such tokens are not computed. They scale
        nothing.
      temperature: > 0, a Python number.
      soft_cap: ``cap(u) = soft_cap * tanh(u / soft_cap)``, > 0, or None.
      logit_scale: factor before the cap.
      with_entropy: also return the entropy (nats) of the tempered distribution.
      implementation: 'reference', 'chunked', 'pallas_gpu' (CUDA only), 'pallas_tpu' (bfloat16 or float32, TPU only), or None for the choice
        by the platform that the program is compiled for: on TPU :func:`by_platform.kernels_for_tpu`, elsewhere 'chunked' until a
        kernel has been measured to be faster.

    Returns:
      ``(logprob [tokens] float32, entropy [tokens] float32 or None)``.

    Raises:
      ValueError: an implementation that does not exist here, shapes that do not fit, temperature or soft_cap <= 0;
        a kernel named for another platform (when the program is lowered) or for dtypes that it does not take.
    """
    how = Logits(float(temperature), soft_cap, float(logit_scale), with_entropy)
    _check("token_logprob", how, implementation, hidden, head, targets, weights)
    live = jnp.ones(targets.shape, bool) if weights is None else weights != 0
    if implementation == "reference":
        return reference.token_logprob(how, hidden, head, targets, live)
    passes = by_platform.default_passes(hidden, head) if implementation is None else STREAMED[implementation]
    return streamed.token_logprob(passes, how, hidden, head, targets, live)


class PolicyLoss(NamedTuple):
    """What :func:`policy_loss` gives.

    Attributes:
      sum: ``[]`` sum of ``per-token loss * scale``: what is differentiated.
      tokens: ``[]`` number of live tokens, float32.
      logprob: ``[tokens]`` under the policy, 0 where not live; no gradient.
      entropy: ``[tokens]`` in nats, or None where the objective has no entropy bonus; no gradient.
      stats: ``name -> (sum, count)`` of :func:`objective.policy_objective`.
    """

    sum: Array
    tokens: Array
    logprob: Array
    entropy: Array | None
    stats: Stats


def policy_loss(hidden: Array, head: Array, targets: Array, *, advantage: Array, weights: Array, scale: Array | None = None,
                behavior_logprob: Array | None = None, old_logprob: Array | None = None, ref_logprob: Array | None = None,
                sampler_logprob: Array | None = None, on_policy: Array | None = None, fresh: Array | None = None, rows: Rows | None = None,
                objective: Objective = Objective(), temperature: float = 1.0, soft_cap: float | None = None, logit_scale: float = 1.0,  # noqa: B008
                implementation: Implementation | None = None) -> PolicyLoss:
    """The policy loss of given tokens; the gradient for hidden and head never holds ``[tokens, V]``.

    Where a token's loss needs only its own log-probability, logits, loss and both gradients are made in one pass
    (:mod:`.fused`, three matmuls); objectives over whole rows, and on TPU all of them, take two passes, 'reference' is plain.

    Args:
      hidden, head, targets, temperature, soft_cap, logit_scale: as in :func:`token_logprob`.
      advantage: ``[tokens]``.
      weights: ``[tokens] >= 0``, a factor of the policy term; a token of weight 0 is dropped and costs nothing.
      scale: ``[tokens]`` factors that make one loss of the tokens' (1 / number of tokens and the like), default 1.
      behavior_logprob, old_logprob, ref_logprob, sampler_logprob, on_policy, fresh: ``[tokens]`` or None, see
        :func:`objective.policy_objective`.
      rows: which row each token belongs to, for objectives over whole rows.
      objective: variant, clip bounds, KL, entropy bonus, importance weight.

    Raises:
      ValueError: as :func:`token_logprob`; an input that the objective needs is missing.
    """
    how = Logits(float(temperature), soft_cap, float(logit_scale), objective.entropy_coef > 0)
    _check("policy_loss", how, implementation, hidden, head, targets, weights)
    if needs_whole_rows(objective) and rows is None:
        raise ValueError(f"policy_loss: objective {objective.objective} with is_level {objective.is_level} is over whole rows; pass rows=Rows(row of each token, number of rows)")
    live = weights != 0
    operands = {"advantage": advantage, "weight": weights, "scale": jnp.ones(weights.shape, jnp.float32) if scale is None else scale,
                "behavior_logprob": behavior_logprob, "old_logprob": old_logprob, "ref_logprob": ref_logprob,
                "sampler_logprob": sampler_logprob, "on_policy": on_policy, "fresh": fresh}
    operands = {name: x for name, x in operands.items() if x is not None}
    loss = functools.partial(_summed, objective)
    if implementation in (None, "chunked") and not needs_whole_rows(objective):
        kernels = by_platform.kernels_for_tpu(hidden, head) if implementation is None else None
        total, stats, logprob, entropy = fused.token_loss(how, hidden, head, targets, live, operands, loss, fold_stats, kernels=kernels)
    else:
        logprob, entropy = token_logprob(hidden, head, targets, weights=weights, temperature=temperature, soft_cap=soft_cap,
                                         logit_scale=logit_scale, with_entropy=how.with_entropy, implementation=implementation)
        total, stats = loss(logprob, entropy, operands, rows)
    logprob, entropy = jax.lax.stop_gradient((logprob, entropy))
    return PolicyLoss(total, jnp.sum(live, dtype=jnp.float32), logprob, entropy, stats)


def _summed(objective: Objective, logprob: Array, entropy: Array | None, operands: dict[str, Any], rows: Rows | None = None) -> tuple[Array, Stats]:
    operands = dict(operands)
    scale = operands.pop("scale")
    operands = {"behavior_logprob": None, **operands}
    loss, stats = policy_objective(objective, logprob=logprob, entropy=entropy, mask=operands["weight"] != 0, rows=rows, **operands)
    return jnp.sum(loss * scale), stats


def _check(name: str, how: Logits, implementation: str | None, hidden: Array, head: Array, targets: Array, weights: Array | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{name}: implementation '{implementation}' is not known; use one of {', '.join(IMPLEMENTATIONS)}, or None")
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(f"{name}: hidden {hidden.shape} and head {head.shape} must be [tokens, D] and [V, D]; flatten rows first")
    if targets.shape != hidden.shape[:1] or (weights is not None and weights.shape != targets.shape):
        seen = f"targets {targets.shape}" + ("" if weights is None else f", weights {weights.shape}")
        raise ValueError(f"{name}: {seen} must be [tokens] = ({hidden.shape[0]},) like hidden {hidden.shape}")
    if not how.temperature > 0:
        raise ValueError(f"{name}: temperature {how.temperature} must be > 0; greedy decoding has no log-probability")
    if how.soft_cap is not None and not how.soft_cap > 0:
        raise ValueError(f"{name}: soft_cap {how.soft_cap} must be > 0, or None for none")
