"""Log-probability (and entropy) of given tokens, straight from the hidden states: no ``[tokens, V]`` array.

``token_logprob`` is what the update, the reference policy and the scoring pass call. See :mod:`.reference` for the
formulas, :mod:`.chunked` for the version that runs everywhere.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from . import chunked, fused, reference

Array = jax.Array
Implementation = Literal["reference", "chunked"]

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array | None]]] = {
    "reference": reference.token_logprob,
    "chunked": chunked.token_logprob,
}


def token_logprob(hidden: Array, head: Array, targets: Array, *, weights: Array | None = None,
                  temperature: float = 1.0, with_entropy: bool = False,
                  implementation: Implementation | None = None) -> tuple[Array, Array | None]:
    """``log softmax(hidden @ head.T / temperature)[target]`` for each token, differentiable in hidden and head.

    Works under ``jit``, inside ``scan`` and ``while_loop`` bodies, and with arrays sharded over a mesh (set the mesh
    with ``jax.set_mesh`` so that the chunks follow the layout of the batch).

    Args:
      hidden: ``[tokens, D]`` float32 or bfloat16; logits and sums accumulate in float32.
      head: ``[V, D]``; cast to the dtype of ``hidden``, its gradient accumulates in float32 and keeps its own dtype.
      targets: ``[tokens] int``, in ``[0, V)``.
      weights: ``[tokens]`` or None (all live). They only mark what may be skipped: a token of weight 0 gives logprob 0,
        entropy 0 and no gradient, whatever its hidden state holds; chunks of such tokens are not computed. They scale
        nothing.
      temperature: > 0, a Python number.
      with_entropy: also return the entropy (nats) of the tempered distribution.
      implementation: 'reference', 'chunked', or None for the fastest one (chunked) on the platform.

    Returns:
      ``(logprob [tokens] float32, entropy [tokens] float32 or None)``.

    Raises:
      ValueError: an implementation that does not exist here, shapes that do not fit, temperature <= 0.
    """
    _check(hidden, head, targets, weights, temperature)
    name = "chunked" if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation '{name}' is not available in this build; use one of {', '.join(IMPLEMENTATIONS)}, or None")
    live = jnp.ones(targets.shape, bool) if weights is None else weights != 0
    return IMPLEMENTATIONS[name](hidden, head, targets, live, temperature=float(temperature), with_entropy=with_entropy)


def token_loss(hidden: Array, head: Array, targets: Array, live: Array, operands: Any, loss: fused.TokenLoss, merge: Callable[[Any, Any], Any], *,
               temperature: float = 1.0, with_entropy: bool = False) -> tuple[Array, Any]:
    """Loss and gradients of the last matmul in one pass, see :func:`fused.token_loss`.

    Raises:
      ValueError: shapes that do not fit, temperature <= 0.
    """
    _check(hidden, head, targets, live, temperature)
    return fused.token_loss(hidden, head, targets, live, operands, loss, merge, temperature=float(temperature), with_entropy=with_entropy)


def _check(hidden: Array, head: Array, targets: Array, weights: Array | None, temperature: float) -> None:
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(f"token_logprob: hidden {hidden.shape} and head {head.shape} must be [tokens, D] and [V, D]; flatten rows first")
    if targets.shape != hidden.shape[:1] or (weights is not None and weights.shape != targets.shape):
        seen = f"targets {targets.shape}" + ("" if weights is None else f", weights {weights.shape}")
        raise ValueError(f"token_logprob: {seen} must be [tokens] = ({hidden.shape[0]},) like hidden {hidden.shape}")
    if not temperature > 0:
        raise ValueError(f"token_logprob: temperature {temperature} must be > 0; greedy decoding has no log-probability")
