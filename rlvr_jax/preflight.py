"""What a run on several hosts needs, checked in a minute, before the model is loaded and the pod is paid for."""

import os
import uuid
from typing import Any

import jax
import numpy as np

from rlvr_jax import config as configs
from rlvr_jax import distributed, parts, remote
from rlvr_jax import metrics as metric
from rlvr_jax.config import Config, ConfigError
from rlvr_jax.sharding import MESH_AXES, make_mesh, named, place


def preflight(config: Config) -> dict[str, Any]:
    """All processes call it. Checks that they run the same versions and config, that the mesh uses every device, that every
    process can write into the run folder and read what the first one wrote there, and that one sum over all devices is right.

    Returns:
      What was found: processes, devices, device kind, mesh, run folder, compilation cache, versions.

    Raises:
      ConfigError: one line for the first thing that is wrong.
    """
    configs.check_for_training(config)
    distributed.require_equal({"the config": config, "the versions": metric.versions(), "the device kind": jax.devices()[0].device_kind})
    shape = tuple(getattr(config.mesh, axis) for axis in MESH_AXES)
    if (product := int(np.prod(shape))) != jax.device_count():
        raise ConfigError(f"mesh {'x'.join(map(str, shape))} has {product} devices, the {jax.process_count()} processes have {jax.device_count()}; "
                          "set mesh.data, mesh.fsdp and mesh.tensor so that their product is the number of devices")
    _check_folder(str(config.run_dir))
    _check_sum(make_mesh(*shape))
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if remote.is_remote(cache):
        _write_and_read(cache, "cache")
    model = parts.model_folder(config)
    return {"processes": jax.process_count(), "devices": jax.device_count(), "device_kind": jax.devices()[0].device_kind,
            "mesh": dict(zip(MESH_AXES, shape)), "run_dir": config.run_dir, "model": str(model), "compilation_cache": cache, "versions": metric.versions()}


def _check_folder(run_dir: str) -> None:
    """Every process writes; what the first one wrote is seen by all: Orbax needs one folder, not one for each host."""
    token = distributed.gather(np.frombuffer(uuid.uuid4().bytes, np.uint8))[0].tobytes().hex()
    folder = remote.open_path(run_dir)
    shared = folder / f".preflight-{token}"
    if distributed.first():
        _attempt(run_dir, lambda: (folder.mkdir(parents=True, exist_ok=True), shared.write_text(token)))
    distributed.largest(0)  # all wait for the first
    seen = _attempt(run_dir, lambda: shared.exists() and shared.read_text() == token)
    if blind := np.flatnonzero(distributed.gather(np.array(not seen))).tolist():
        raise ConfigError(f"run_dir '{run_dir}' of process 0 is not that of process {', '.join(map(str, blind[:8]))}; "
                          "several hosts need one shared folder: gs://bucket/... or a network file system")
    _write_and_read(run_dir, token)
    distributed.largest(0)
    if distributed.first():
        shared.unlink()


def _write_and_read(where: str, token: str) -> None:
    path = remote.open_path(where) / f".preflight-{token}-{jax.process_index()}"

    def attempt() -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(token)
        same = path.read_text() == token
        path.unlink()
        return bool(same)

    if not _attempt(where, attempt):
        raise ConfigError(f"'{where}': process {jax.process_index()} does not read what it wrote")


def _attempt(where: str, act: Any) -> Any:
    try:
        return act()
    except Exception as e:  # every library of buckets has its own
        raise ConfigError(f"'{where}' cannot be written by process {jax.process_index()} ({type(e).__name__}: {' '.join(str(e).split())[:200]}); "
                          "create the bucket and let the hosts' service account write to it") from None


def _check_sum(mesh: jax.sharding.Mesh) -> None:
    """One psum over all devices, the collective that every step ends with."""
    n = mesh.size
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, MESH_AXES), mesh=mesh, in_specs=jax.sharding.PartitionSpec(MESH_AXES),
                                  out_specs=jax.sharding.PartitionSpec()), out_shardings=named(mesh))
    numbers = place(np.arange(1, n + 1, dtype=np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(MESH_AXES)))
    found = float(np.asarray(total(numbers))[0])
    if found != n * (n + 1) / 2:
        raise ConfigError(f"a sum over all {n} devices gave {found:g}, expected {n * (n + 1) / 2:g}; a device or a link is broken")
