"""Where live rows go: whole rows laid end to end in streams of a fixed size, so that padding is not computed.

A *chunk* is what one turn of the update's loop computes: streams of ``L = 2 T`` tokens. A row is never cut. The number of chunks that are really used is a traced number, so the
cost follows the live tokens and nothing is compiled again when the kept rows or their lengths change.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.sharding import constrain

Array = jax.Array

PER_STREAM = 2


class Layout(NamedTuple):
    """``source [C, n, L] int32``: index of each slot's token in the flattened ``[B * T]`` rows, ``B * T`` = empty slot.

    ``trips []``: chunks in use, the first ones. ``T``: length of a row; no segment is longer.
    """

    source: Array
    trips: Array
    T: int


def lay_out(length: Array, live: Array, T: int, *, micro_batch: int, devices: int = 1, packed: bool = True) -> Layout:
    """Places the live rows.

    Packed: longest row first, each into the first chunk with room for it, there into the emptiest stream;
    never more chunks than without packing.
    Otherwise every live row takes ``T`` slots, in the order of the batch, and is a stream of its own.

    Args:
      length: ``[B] int`` tokens of each row, at most T.
      live: ``[B] bool``; the other rows are nowhere.
      micro_batch: rows of full length that a chunk has room for, over all devices.
      devices: that the rows of a batch are split over; divides ``micro_batch``.
    """
    B = length.shape[0]
    micro_batch = min(micro_batch, -(-B // devices) * devices)
    # Rows of full length per stream: two are as dense as many, and attention costs least where streams are short.
    per_stream = PER_STREAM if packed and micro_batch % (PER_STREAM * devices) == 0 else 1
    streams = micro_batch // per_stream
    L, chunks = per_stream * T, -(-B // micro_batch)
    length = jnp.where(live, length, 0).astype(jnp.int32)
    chunk, start = _first_fit(length, L, chunks, streams) if packed else _in_turn(live, T, micro_batch)
    t = jnp.arange(T, dtype=jnp.int32)
    used = t < length[:, None]
    at = chunk[:, None] * (streams * L) + start[:, None] + t
    empty = B * T
    source = jnp.full(chunks * streams * L, empty, jnp.int32)
    source = source.at[jnp.where(used, at, source.size)].set(jnp.arange(empty, dtype=jnp.int32).reshape(B, T), mode="drop")
    trips = jnp.max(jnp.where(length > 0, chunk + 1, 0))
    return Layout(constrain(source.reshape(chunks, streams, L), None, "batch", None), trips, T)


def _in_turn(live: Array, T: int, rows: int) -> tuple[Array, Array]:
    slot = jnp.cumsum(live, dtype=jnp.int32) - 1
    return slot // rows, slot % rows * T


def _first_fit(length: Array, L: int, chunks: int, streams: int) -> tuple[Array, Array]:
    """``(chunk [B], start within the chunk [B])``. With ``L >= k T`` a stream passed over holds k rows, so there is room for all."""
    bins = jnp.arange(chunks * streams, dtype=jnp.int32)
    order = jnp.argsort(-length, stable=True)

    def place(room: Array, size: Array) -> tuple[Array, Array]:
        rank = jnp.where(room >= size, (chunks - bins // streams) * (L + 1) + room, -1)
        at = jnp.argmax(rank).astype(jnp.int32)
        return room.at[at].add(-size), jnp.stack([at // streams, at % streams * L + L - room[at]])

    _, placed = jax.lax.scan(place, jnp.full(chunks * streams, L, jnp.int32), length[order])
    out = jnp.zeros((length.shape[0], 2), jnp.int32).at[order].set(placed)
    return out[:, 0], out[:, 1]


def gather(layout: Layout, tokens: Array, per_token: Mapping[str, Array], per_row: Mapping[str, Array]) -> dict[str, Array]:
    """The rows' arrays in the layout, ``[C, n, L]`` each.

    ``tokens``, ``position``, ``segment`` (row + 1, 0 = empty) and ``row`` belong to the slot's own token. ``target`` and
    every array of ``per_token`` belong to the token that the slot *predicts*: the next one of its row; 0 or False where
    there is none. ``per_row`` arrays (``[B]``) are spread over the row's slots.
    """
    own, T = layout.source, layout.T
    B = tokens.shape[0]
    empty = own >= B * T
    following = jnp.where(empty | (own % T == T - 1), B * T, own + 1)
    pick = lambda x, at: constrain(jnp.take(x, at, mode="fill", fill_value=0), None, "batch", None)  # noqa: E731
    row = jnp.where(empty, B, own // T)
    out = {"tokens": pick(tokens.reshape(-1), own), "target": pick(tokens.reshape(-1), following), "row": row, "following": following,
           "position": jnp.where(empty, 0, own % T), "segment": jnp.where(empty, 0, row + 1)}
    out |= {name: pick(x.reshape(-1), following) for name, x in per_token.items()}
    return out | {name: pick(x, row) for name, x in per_row.items()}


def turn(chunks: Mapping[str, Array], i: Array | int) -> dict[str, Array]:
    """Chunk ``i`` of what :func:`gather` returned."""
    return {name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in chunks.items()}
