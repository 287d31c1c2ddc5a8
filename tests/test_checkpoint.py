"""A checkpoint goes on elsewhere: on fewer devices, in another process; the best one is remembered across starts."""

import jax
import numpy as np
import pytest

from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.config import Optimizer
from rlvr_jax.models.decoder import DecoderConfig, init_params, param_axes
from rlvr_jax.sharding import make_mesh, shardings
from rlvr_jax.state import abstract_state, init_state, make_optimizer, weights_sha256
from rlvr_jax.strategies import build
from rlvr_jax.types import TrainState

MODEL = DecoderConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
HOST = {"replay": {"tokens": np.arange(12, dtype=np.int32).reshape(3, 4), "inserted": np.int32(7)}}


def parts(*mesh):
    devices = jax.devices()[: int(np.prod(mesh))]
    return make_optimizer(Optimizer(), 10), build(["difffilter"]), make_mesh(*mesh, devices=devices)


def test_eight_devices_to_two_to_one(tmp_path):
    """Parameters, moments and buffers are the same bit for bit, split as the new mesh wants them."""
    optimizer, strategy, mesh = parts(2, 2, 2)
    params = jax.device_put(init_params(MODEL, jax.random.key(0)), shardings(mesh, param_axes(MODEL)))
    state = init_state(params, MODEL, optimizer, strategy, mesh)
    state = state.replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    expected, moments = weights_sha256(state.params), weights_sha256(state.opt_state)
    host = HOST
    for step, shape in enumerate([(2, 2, 2), (1, 2, 1), (1, 1, 1), (2, 1, 2)]):
        optimizer, strategy, mesh = parts(*shape)
        checkpoints = Checkpoints(tmp_path, 2)
        if step:
            like = jax.tree.map(np.zeros_like, HOST)
            state, host, record = checkpoints.restore(abstract_state(MODEL, optimizer, strategy, mesh), like)
            assert record == {"step": step - 1}
        assert weights_sha256(state.params) == expected and weights_sha256(state.opt_state) == moments
        assert state.params["layers"]["w_up"].sharding.mesh.size == mesh.size
        jax.tree.map(np.testing.assert_array_equal, host, HOST)
        checkpoints.save(step, state, host, {"step": step}, None)
        checkpoints.wait()
        checkpoints.close()


def test_the_best_is_kept_and_found_by_later_starts(tmp_path):
    x = TrainState(step=jax.numpy.int32(0), params={"a": jax.numpy.arange(3.0)}, opt_state=(), strategy_state=())
    for steps, accuracy in (((1, 2, 3), {1: 0.2, 2: 0.5}), ((4, 5, 6), {5: 0.4})):  # killed in between
        checkpoints = Checkpoints(tmp_path, 2)
        for step in steps:
            checkpoints.save(step, x, {}, {"step": step}, accuracy.get(step))
        checkpoints.wait()
        checkpoints.close()
    later = Checkpoints(tmp_path, 2, read_only=True)
    assert later.best_step() == 2 and set(later.manager.all_steps()) == {2, 5, 6}


def test_the_hash_knows_weights_not_shards(monkeypatch):
    params = init_params(MODEL, jax.random.key(1))
    assert weights_sha256(params) != weights_sha256(jax.tree.map(lambda x: x * 2, params))
    from rlvr_jax import state as room

    monkeypatch.setattr(room, "PIECE_BYTES", 100)
    monkeypatch.setattr(room, "process_allgather", lambda x, tiled: np.asarray(x))
    for x in jax.tree.leaves(params):
        np.testing.assert_array_equal(np.concatenate(list(room._pieces(x))), np.asarray(x))


@pytest.mark.parametrize("changes", [["mesh.fsdp=2", "train.micro_batch=4"], ["rollout.slots=8", "model.remat=full"]])
def test_other_machines_may_go_on_with_a_run(changes):
    from rlvr_jax import config as C
    from rlvr_jax.run_folder import refuse_changes

    refuse_changes(C.validate({}).model_dump(mode="json"), C.validate(C.apply_overrides({}, changes)))
    with pytest.raises(C.ConfigError, match="seed"):
        refuse_changes(C.validate({}).model_dump(mode="json"), C.validate({"seed": 1}))
