"""Several processes, one run: joining them, and the few things they must tell each other.

All processes run the same program on the same prompts, so a decision made from what the device computed, from the config or
from the data is the same everywhere. What only one process can know (its clock, a signal it got, verdicts of its own
verifiers) goes through :func:`gather` before anything is decided by it. With one process nothing here has any effect.
"""

import hashlib
import importlib.util
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.config import ConfigError

JOIN_SECONDS = 300
HEARTBEAT_SECONDS = 100
"""Silence after which the coordinator declares a process dead, and jax ends the others; ``$RLVR_HEARTBEAT_SECONDS`` where
machines pause for longer."""
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


class LostProcess(RuntimeError):
    """Another process of the run, or the network to it, is gone; this process cannot go on alone."""


class Cluster(NamedTuple):
    """How to join. None = found out by jax from where it runs (TPU pod, Slurm, Open MPI)."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def find(coordinator: str | None = None, processes: int | None = None, process: int | None = None,
         env: Mapping[str, str] = os.environ) -> Cluster | None:
    """What the flags, the environment and the machine say; None = this process is alone.

    Flags win over ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``, those over Slurm, Open MPI and
    TPU metadata. With ``processes`` alone the rest is found, and the number is checked after joining.

    Raises:
      ConfigError: parts of an address, numbers that do not fit.
    """
    coordinator = coordinator or env.get("JAX_COORDINATOR_ADDRESS") or None
    processes = _number(env, "JAX_NUM_PROCESSES") if processes is None else processes
    process = _number(env, "JAX_PROCESS_ID") if process is None else process
    if processes is not None and processes < 1:
        raise ConfigError(f"--num-processes {processes}: expected at least 1")
    if coordinator is not None or process is not None:
        if processes == 1 and process in (None, 0):
            return None
        missing = [name for name, x in (("--coordinator HOST:PORT", coordinator), ("--num-processes", processes), ("--process-id", process)) if x is None]
        if missing:
            raise ConfigError(f"{' and '.join(missing)} missing: --coordinator, --num-processes and --process-id (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, "
                              "JAX_PROCESS_ID) go together; on a TPU pod or under Slurm give none of them")
        assert coordinator is not None and processes is not None and process is not None
        if not 0 <= process < processes:
            raise ConfigError(f"--process-id {process}: expected 0..{processes - 1} for --num-processes {processes}")
        if not coordinator.rpartition(":")[2].isdigit() or not coordinator.rpartition(":")[0]:
            raise ConfigError(f"--coordinator '{coordinator}': expected HOST:PORT of process 0")
        return Cluster(coordinator, processes, process)
    if managed(env):
        return Cluster(processes=processes)
    if processes not in (None, 1):
        raise ConfigError(f"{processes} processes were asked for, but this is no TPU pod, Slurm step or MPI job: give --coordinator HOST:PORT and --process-id too")
    return None


def managed(env: Mapping[str, str]) -> bool:
    """Whether a launcher started several processes that jax can find by itself."""
    if int(env.get("SLURM_NTASKS", 1)) > 1 and all(k in env for k in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")):
        return True  # a step of srun; an interactive allocation has no SLURM_PROCID
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return True
    if int(env.get("MEGASCALE_NUM_SLICES", 1)) > 1 or len(_names(env.get("TPU_WORKER_HOSTNAMES", ""))) > 1:
        return True  # GKE sets these
    if env.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu" or not _has_tpu():
        return False
    request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})  # a TPU VM knows its slice from here
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return len(_names(answer.read().decode())) > 1
    except (urllib.error.URLError, OSError):
        return False


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name.strip()]


def _has_tpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None and (os.path.exists("/dev/accel0") or os.path.isdir("/dev/vfio"))


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if text and not text.isdigit():
        raise ConfigError(f"{name}='{text}': expected a whole number")
    return int(text) if text else None


def start(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the other processes, if there are any; before anything else uses jax. Arguments as in :func:`find`.

    Raises:
      ConfigError: wrong arguments, or another number of processes than was asked for.
      LostProcess: the others could not be reached.
    """
    cluster = find(coordinator, processes, process)
    if cluster is None:
        return
    import jax

    # jax's own SIGTERM handler would take the signal away from everything before the training loop.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(cluster.coordinator, cluster.processes if cluster.coordinator else None, cluster.process,
                                   initialization_timeout=JOIN_SECONDS, heartbeat_timeout_seconds=_number(os.environ, "RLVR_HEARTBEAT_SECONDS") or HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as e:
        raise LostProcess(f"the other processes cannot be joined within {JOIN_SECONDS} s ({_line(e)}); coordinator {cluster.coordinator or 'found by jax'}: "
                          "is process 0 running, is its port open, does every process have a number of its own?") from None
    if cluster.processes is not None and jax.process_count() != cluster.processes:
        raise ConfigError(f"{cluster.processes} processes were asked for, {jax.process_count()} have joined; start the same command on every host of the slice")


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:300]


def first() -> bool:
    """Whether this process is the one that writes."""
    import jax

    return jax.process_index() == 0


def gather(x: np.ndarray) -> np.ndarray:
    """``[...] -> [processes, ...]``: everybody's array, of one shape and dtype; for small things."""
    import jax
    from jax.experimental import multihost_utils

    return x[None] if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(x))


def largest(x: int) -> int:
    """The largest of everybody's numbers."""
    return int(gather(np.array(x, np.int32)).max())


def require_equal(facts: Mapping[str, Any]) -> None:
    """Refuses to go on where the processes differ in something that decides.

    Args:
      facts: name -> anything whose ``repr`` says it all; the same names everywhere.

    Raises:
      ConfigError: names what differs, and on which processes.
    """
    digests = gather(np.stack([np.frombuffer(hashlib.sha256(repr(x).encode()).digest(), np.uint8) for x in facts.values()]))
    differs = (digests != digests[0]).any(-1)  # [processes, facts]
    for name, where in zip(facts, differs.T):
        if where.any():
            raise ConfigError(f"{name} of process {', '.join(map(str, np.flatnonzero(where)[:8]))} differs from that of process 0; "
                              "give all hosts the same code, config and data")
