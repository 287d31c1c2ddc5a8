"""Adam's moments in the host's memory: the same weights, wherever they lie; told in one line where a backend has no such memory."""

import types

import jax
import numpy as np
import pytest
from update_cases import KEY, MODEL, G, N, a_batch, a_config

from rlvr_jax import config as C
from rlvr_jax import strategies
from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.models.decoder import init_params, param_axes
from rlvr_jax.plan import memory, programs
from rlvr_jax.sharding import HOST, check_host_memory, make_mesh, shardings
from rlvr_jax.state import abstract_state, init_state, policy_optimizer, weights_sha256
from rlvr_jax.update import make_update

EVERY_GROUP_TEACHES = np.tile([0, 1, 0, 1], N).astype(np.float32)


def where(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def trained(mesh, offload, updates, steps=2):
    config = a_config(mesh=mesh, micro=8, train={"updates_per_batch": updates})
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"offload_optimizer": offload})})
    on, strategy, optimizer = make_mesh(*mesh), strategies.build([]), policy_optimizer(config)
    params = jax.device_put(init_params(MODEL, KEY), shardings(on, param_axes(MODEL)))
    state = init_state(params, MODEL, optimizer, strategy, on, offload=offload)
    update = make_update(MODEL, config, strategy, optimizer, on)
    for seed in range(steps):
        before = where(state.opt_state)
        state, _ = update(state, a_batch(seed=seed, rewards=EVERY_GROUP_TEACHES), KEY)
        assert where(state.opt_state) == before
    assert update.jitted._cache_size() == 1
    return state, lambda offload: abstract_state(MODEL, optimizer, strategy, on, offload=offload)


@pytest.mark.parametrize(("mesh", "updates"), [((1, 1, 1), 1), ((2, 2, 2), 2)])
def test_the_same_weights_with_moments_on_the_host_and_a_checkpoint_moves_them(mesh, updates, tmp_path):
    plain, _ = trained(mesh, False, updates)
    state, abstract = trained(mesh, True, updates)
    assert where(state.opt_state) == {HOST} and HOST not in where(plain.opt_state) | where(state.params)
    assert weights_sha256(state.params) == weights_sha256(plain.params) and weights_sha256(state.opt_state) == weights_sha256(plain.opt_state)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, state, {}, {}, None)
    checkpoints.wait()
    for offload in (True, False):
        found, _, _ = checkpoints.restore(abstract(offload), {})
        assert (where(found.opt_state) == {HOST}) is offload and weights_sha256(found.opt_state) == weights_sha256(plain.opt_state)
    checkpoints.close()


def test_a_backend_without_pinned_memory_is_told_in_one_line():
    check_host_memory(make_mesh())
    device = types.SimpleNamespace(platform="abacus", addressable_memories=lambda: [types.SimpleNamespace(kind="device")])
    with pytest.raises(ValueError, match=r"^mesh\.offload_optimizer: abacus devices have no memory 'pinned_host', only device; set it to false$"):
        check_host_memory(types.SimpleNamespace(devices=np.array([[[device]]])))


def test_plan_counts_moments_on_the_host_apart():
    tree = {"data": {"max_prompt_length": 8}, "rollout": {"samples_per_prompt": G, "max_new_tokens": 8, "slots": 16}, "train": {"prompts_per_step": N, "micro_batch": 8},
            "mesh": {"fsdp": 4, "tensor": 2}}
    config = C.validate(tree)
    moved = C.validate({**tree, "mesh": {**tree["mesh"], "offload_optimizer": True}})
    a, b = (memory.held(c, MODEL, programs.build(c, MODEL, (1,), make_mesh(fsdp=4, tensor=2), "tpu"), 2) for c in (config, moved))
    assert a.optimizer_on_host == 0 and b.optimizer_on_host == 2 * a.parameters and a.resident - b.resident == b.optimizer_on_host
    assert b.optimizer == a.optimizer - b.optimizer_on_host == 8  # two counters
