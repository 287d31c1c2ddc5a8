"""Batches whose every value tells which step and group it belongs to: what the tests of replay share."""

import numpy as np

from rlvr_jax import replay
from rlvr_jax.types import UpdateBatch

G, T = 4, 6


def make(step, solved, *, prompt=None, T=T, entropy=False):
    """Groups with ``solved`` right rows each; every value tells which step and group it belongs to."""
    N = len(solved)
    group = np.repeat(np.arange(N), G)
    tag = (100 * step + 10 * group + np.tile(np.arange(G), N)).astype(np.int32)
    reward = (np.tile(np.arange(G), N) < np.repeat(solved, G)).astype(np.float32)
    per_token = np.zeros((N * G, T), np.float32)
    per_token[:, 1:4] = tag[:, None]
    batch = UpdateBatch(
        tokens=per_token.astype(np.int32), prompt_length=np.full(N * G, 1, np.int32), response_length=np.full(N * G, 3, np.int32),
        logprob=-per_token, behavior_logprob=-per_token - 1, entropy=per_token / 2 if entropy else None, reward=reward,
        valid=np.ones(N * G, bool), correct=reward > 0.5, truncated=np.zeros(N * G, bool), policy_step=np.full(N * G, step, np.int32),
        domain=np.arange(N, dtype=np.int32))
    return batch, np.arange(N) + 1000 * step if prompt is None else np.asarray(prompt)


def step(state, number, solved, *, apply=replay.apply, prompt=None, T=T, entropy=False, **settings):
    """One step of replay over a made batch; ``apply`` may be that of any kind."""
    batch, prompt_id = make(number, solved, prompt=prompt, T=T, entropy=entropy)
    return apply(state, batch, prompt_id=prompt_id, step=number, **settings)


def origin(batch, N):
    """(step, group) that each slot's tokens come from."""
    return [divmod(int(t) // 10, 10) for t in batch.tokens.reshape(N, G, -1)[:, 0, 1]]


def value(metrics, name):
    total, count = metrics[f"replay/{name}"]
    return total / count
