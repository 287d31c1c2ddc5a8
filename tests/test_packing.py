"""Packing: every live row is somewhere, whole and once; what is computed there is what is computed apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.models.decoder import DecoderConfig, forward, init_params
from rlvr_jax.packing import gather, lay_out

MODEL = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 12), st.sampled_from([8, 13]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans())
def test_every_live_row_once_whole_and_inside_one_stream(data, B, T, streams, per_stream, packed):
    length = np.array(data.draw(st.lists(st.integers(1, T), min_size=B, max_size=B)), np.int32)
    live = np.array(data.draw(st.lists(st.booleans(), min_size=B, max_size=B)))
    layout = lay_out(jnp.asarray(length), jnp.asarray(live), T, micro_batch=per_stream * streams, devices=streams, packed=packed)
    source = np.asarray(layout.source)
    used = source[source < B * T]
    wanted = np.concatenate([b * T + np.arange(length[b]) for b in range(B) if live[b]] or [np.zeros(0, int)])
    assert sorted(used) == sorted(wanted)
    for stream in source.reshape(-1, source.shape[2]):
        for b in np.unique(stream[stream < B * T] // T):
            at = np.flatnonzero((stream < B * T) & (stream // T == b))
            assert (np.diff(at) == 1).all() and (stream[at] == b * T + np.arange(length[b])).all()
    in_use = np.any(source < B * T, axis=(1, 2))
    trips = int(layout.trips)
    assert in_use[:trips].all() and not in_use[trips:].any()
    in_turn = lay_out(jnp.asarray(length), jnp.asarray(live), T, micro_batch=per_stream * streams, devices=streams, packed=False)
    assert trips <= int(in_turn.trips)


def test_short_rows_need_fewer_chunks():
    length = np.random.default_rng(0).geometric(0.03, 64).clip(1, 120).astype(np.int32) + 8
    live = np.ones(64, bool)
    chunks = lambda packed: int(lay_out(jnp.asarray(length), jnp.asarray(live), 128, micro_batch=4, packed=packed).trips)  # noqa: E731
    ideal = length.sum() / (4 * 128)
    assert chunks(False) == 16 and chunks(True) <= np.ceil(ideal) + 1


def test_what_a_slot_predicts_is_the_next_token_of_its_row():
    B, T = 5, 6
    tokens = jnp.arange(B * T).reshape(B, T)
    length = jnp.array([6, 1, 3, 4, 2])
    layout = lay_out(length, jnp.ones(B, bool), T, micro_batch=2)
    got = jax.tree.map(np.asarray, gather(layout, tokens, {"x": tokens * 10 + 1}, {"r": jnp.arange(B) + 100}))
    real = got["segment"] > 0
    assert real.sum() == length.sum()
    inside = real & (got["tokens"] % T < T - 1)
    assert (got["target"][inside] == got["tokens"][inside] + 1).all() and (got["x"][inside] == got["target"][inside] * 10 + 1).all()
    assert (got["x"][~inside] == 0).all() and (got["target"][~inside] == 0).all()
    assert (got["r"][real] == got["tokens"][real] // T + 100).all() and (got["r"][~real] == 0).all()
    assert (got["position"][real] == got["tokens"][real] % T).all()


@pytest.mark.parametrize("packed", [True, False])
def test_a_packed_row_has_the_hidden_states_it_has_alone(packed):
    params = init_params(MODEL, jax.random.key(0))
    rng = np.random.default_rng(0)
    B, T = 7, 16
    tokens, length = jnp.asarray(rng.integers(0, 64, (B, T)), jnp.int32), jnp.asarray(rng.integers(1, T + 1, B), jnp.int32)
    layout = lay_out(length, jnp.ones(B, bool), T, micro_batch=3, packed=packed)
    chunks = gather(layout, tokens, {}, {})
    for i in range(int(layout.trips)):
        chunk = jax.tree.map(lambda x, i=i: np.asarray(x[i]), chunks)
        hidden, _ = forward(params, MODEL, chunk["tokens"], chunk["position"], segment_ids=chunk["segment"], window=layout.T)
        for stream, row in zip(np.asarray(hidden), chunk["row"]):
            for b in np.unique(row[row < B]):
                alone, _ = forward(params, MODEL, tokens[b][None, :length[b]], jnp.arange(length[b])[None])
                np.testing.assert_allclose(stream[row == b], alone[0], atol=3e-6)
