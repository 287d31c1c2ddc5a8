"""A tiny model, ragged batches and one step of the update: what the tests of the update share."""

import functools
import json

import jax
import numpy as np

from rlvr_jax import config as C
from rlvr_jax import strategies
from rlvr_jax.models.decoder import DecoderConfig, init_params, param_axes
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.state import init_state, make_optimizer
from rlvr_jax.types import UpdateBatch
from rlvr_jax.update import make_update

MODEL = DecoderConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
N, G, P, R = 4, 4, 8, 8
KEY = jax.random.key(0)


def a_batch(seed=0, rewards=None, vocab=96, **changes):
    rng = np.random.default_rng(seed)
    B, T = N * G, P + R
    prompt = np.repeat(rng.integers(1, P, N), G).astype(np.int32)
    response = rng.integers(1, R + 1, B).astype(np.int32)  # ragged
    if rewards is None:
        rewards = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], np.float32).reshape(-1)
    fields = dict(
        tokens=rng.integers(0, vocab, (B, T)).astype(np.int32), prompt_length=prompt, response_length=response,
        logprob=np.full((B, T), -4.5, np.float32), behavior_logprob=np.full((B, T), -4.5, np.float32), entropy=None, reward=rewards,
        valid=np.ones(B, bool), correct=rewards > 0.5, truncated=np.zeros(B, bool), policy_step=np.zeros(B, np.int32),
        domain=np.zeros(N, np.int32))
    return UpdateBatch(**(fields | changes))


def a_config(mesh=(1, 1, 1), micro=16, model=None, **sections):
    tree = {"train": {"prompts_per_step": N, "micro_batch": micro}, "rollout": {"samples_per_prompt": G, "max_new_tokens": R},
            "data": {"max_prompt_length": P}, "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 1e9},
            "mesh": dict(zip(("data", "fsdp", "tensor"), mesh)), "model": model or {}}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return C.validate(tree)


@functools.lru_cache(maxsize=32)
def built(config, model, strategy_list):
    """Equal settings (JSON) share one compiled update: compiling is most of these tests."""
    config, strategy = C.validate(json.loads(config)), strategies.build(json.loads(strategy_list))
    mesh, optimizer = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor), make_optimizer(config.optimizer, 100)
    return mesh, strategy, optimizer, make_update(model, config, strategy, optimizer, mesh)


def run(config, batch, model=MODEL, strategy_list=(), steps=1, ref=False, params=None):
    """First moments of AdamW are (1 - b1) x gradient after one step: gradients as they were applied."""
    mesh, strategy, optimizer, update = built(config.model_dump_json(), model, json.dumps(list(strategy_list)))
    params = init_params(model, KEY) if params is None else params
    params = jax.device_put(params, shardings(mesh, param_axes(model), params))
    state = init_state(params, model, optimizer, strategy, mesh)
    ref_params = jax.tree.map(lambda x: x * 1.01, params) if ref else None
    for _ in range(steps):
        state, sums = update(state, batch, KEY, ref_params)
    grads = jax.tree.map(lambda m: np.asarray(m) / (1 - config.optimizer.b1), state.opt_state[1][0].mu)
    return state, grads, {k: (float(s), float(c)) for k, (s, c) in sums.items()}


def distance(a, b):
    """Norm of the difference over the norm of a."""
    sq = lambda t: sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(t))  # noqa: E731
    return (sq(jax.tree.map(np.subtract, a, b)) / max(sq(a), 1e-30)) ** 0.5
