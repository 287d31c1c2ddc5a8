"""One mesh, ('data', 'fsdp', 'tensor'), and one table from logical axes to mesh axes.

Arrays name their axes ('embed', 'heads', ...); only this file knows which mesh axis carries them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH_AXES = ("data", "fsdp", "tensor")
HOST = "pinned_host"

# Rows of a batch go over both data-like axes; a weight is split over fsdp along its width and over tensor along
# heads, ffn or vocabulary. 'layers' is never split: the scan walks it.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ffn": "tensor",
    "vocab": "tensor",
    "layers": None,
    "length": None,
    "head_dim": None,
    "norm": None,
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over exactly ``data * fsdp * tensor`` devices.

    Raises:
      ValueError: the product is larger than the number of devices, or does not use all of them when none are named.
    """
    devices = list(jax.devices() if devices is None else devices)
    need = data * fsdp * tensor
    if need > len(devices):
        raise ValueError(f"mesh {data}x{fsdp}x{tensor} needs {need} devices, {len(devices)} are visible; lower mesh.data/fsdp/tensor")
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need])


def spec(*axes: str | None) -> P:
    """Logical axis names to a PartitionSpec; None is a replicated axis."""
    return P(*(None if a is None else RULES[a] for a in axes))


def named(mesh: Mesh, *axes: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec(*axes))


def shardings(mesh: Mesh, axes_tree: Any, shapes: Any | None = None) -> Any:
    """A tree of logical-axis tuples to a tree of shardings.

    With ``shapes`` (a matching tree of arrays or ShapeDtypeStructs) every split axis is checked.

    Raises:
      ValueError: an axis does not divide over its mesh axes.
    """
    is_axes = lambda x: isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x)  # noqa: E731
    out = jax.tree.map(lambda a: named(mesh, *a), axes_tree, is_leaf=is_axes)
    if shapes is not None:
        jax.tree.map(lambda s, a, x: _check(mesh, a, x.shape), out, axes_tree, shapes, is_leaf=is_axes)
    return out


def _check(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> None:
    for axis, size in zip(axes, shape):
        mesh_axes = RULES[axis] if axis else None
        if mesh_axes is None:
            continue
        names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
        parts = math.prod(mesh.shape[n] for n in names)
        if size % parts:
            raise ValueError(f"axis '{axis}' of size {size} does not divide over mesh axes {names} ({parts} ways); change mesh.{names[-1]}")


def check_divides(mesh: Mesh, sizes: Mapping[str, tuple[str, int]]) -> None:
    """What the compiler would only pad, or refuse deep inside: ``what -> (logical axis, size)``.

    Raises:
      ValueError: the first size that its mesh axis does not divide, and what would.
    """
    for what, (axis, size) in sizes.items():
        name = RULES[axis]
        assert isinstance(name, str)
        if size % mesh.shape[name]:
            fits = [n for n in range(1, 65) if size % n == 0 and mesh.size % n == 0]
            raise ValueError(f"mesh.{name}: {mesh.shape[name]} does not divide the model's {size} {what}; of {mesh.size} devices it may be {', '.join(map(str, fits))}")


def check_host_memory(mesh: Mesh) -> None:
    """
    Raises:
      ValueError: the devices cannot work on arrays in pinned memory of their host.
    """
    device = mesh.devices.flat[0]
    kinds = sorted(m.kind for m in device.addressable_memories())
    if HOST not in kinds:
        raise ValueError(f"mesh.offload_optimizer: {device.platform} devices have no memory '{HOST}', only {', '.join(kinds) or 'their own'}; set it to false")


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(HOST)


def ways(axis: str) -> int:
    """Over how many devices the mesh of the context (``jax.set_mesh``) splits a logical axis."""
    mesh, on = jax.sharding.get_abstract_mesh(), RULES[axis]
    if mesh.empty or on is None:
        return 1
    return math.prod(mesh.shape.get(n, 1) for n in ((on,) if isinstance(on, str) else on))


def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array that every process holds alike onto all devices; where device_put would compare it across processes, nothing is sent."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """A sharding hint by logical axes; does nothing outside a mesh context (one device, or plain tests)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))
