"""Which random number a sampled token sees: a function of what is sampled, never of where.

The key of a row is ``fold_in`` over (seed, stream, step, prompt id, occurrence of that prompt in the step, sample
index), and token t of its response uses ``fold_in(row key, t)``. So two steps differ, equal prompts in one step
differ, a repeated step is identical, and neither batch order, neighbours, padding nor device count change a sample.
Threefry is asked for by name: it gives the same bits on every backend and every mesh.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# Keeps these keys apart from the trainer's own fold_in(seed, step) streams.
ROLLOUT_STREAM = 0x726F6C6C


def occurrences(prompt_id: Sequence[int] | np.ndarray) -> np.ndarray:
    """``[N] int -> [N] int32``: how many earlier entries hold the same id (0 for the first)."""
    seen: dict[int, int] = {}
    out = np.zeros(len(prompt_id), np.int32)
    for i, p in enumerate(np.asarray(prompt_id).tolist()):
        out[i] = seen.get(p, 0)
        seen[p] = out[i] + 1
    return out


def row_keys(seed: Array, step: Array, prompt_id: Array, occurrence: Array, G: int) -> Array:
    """Keys of the ``B = N * G`` rows, row ``b`` being sample ``b % G`` of prompt ``b // G``.

    Args:
      seed: ``[2] uint32`` low and high half of the run's seed (see :func:`split_seed`).
      step: ``[] int32`` trainer step.
      prompt_id, occurrence: ``[N] int32``.
      G: samples per prompt.

    Returns:
      ``[B]`` typed threefry keys.
    """
    N = prompt_id.shape[0]
    same = [jnp.broadcast_to(x.astype(jnp.uint32), (N, G)) for x in (seed[1], jnp.uint32(ROLLOUT_STREAM), jnp.asarray(step))]
    own = [jnp.broadcast_to(x.astype(jnp.uint32)[:, None], (N, G)) for x in (prompt_id, occurrence)]
    sample = jnp.broadcast_to(jnp.arange(G, dtype=jnp.uint32), (N, G))
    words = jnp.stack([*same, *own, sample]).reshape(-1, N * G)
    start = jnp.broadcast_to(jax.random.key(seed[0], impl="threefry2x32"), (N * G,))
    # A scan, because XLA compiles a threefry for every fold written out, and that took seconds.
    return jax.lax.scan(lambda key, word: (jax.vmap(jax.random.fold_in)(key, word), None), start, words)[0]


def split_seed(seed: int) -> np.ndarray:
    """A seed of up to 64 bits as ``[2] uint32``, so that a seed is traced and no new one compiles again.

    Raises:
      ValueError: the seed is negative or does not fit.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is outside 0..2**64-1; choose a non-negative seed")
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def uniforms(keys: Array, tokens: int, start: Array | None = None) -> Array:
    """``[B] keys -> [B, tokens] float32`` in [0, 1): one number for each token from number ``start`` ([B], default 0).

    They are made before the decode loop: as one fused operation they cost next to nothing, inside it they would be many
    tiny ones. 24 bits each, all that a float32 below 1 holds evenly.
    """
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    # A folded key is the output of a threefry block: 32 random bits need no second one.
    first = jnp.zeros(keys.shape, jnp.uint32) if start is None else start.astype(jnp.uint32)
    bits = jax.random.key_data(fold(keys, first[:, None] + jnp.arange(tokens, dtype=jnp.uint32)))[..., 0]
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
