"""Chips, and devices to compile for that are not here."""

import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax

TPU_NAMES = {"v5e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
             "v6e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
             "v5p": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8"}}
"""Names of slices -> topology. v5p names count cores, two a chip."""


class Chip(NamedTuple):
    """What a chip is said to be, by its vendor's data sheet.

    Attributes:
      platform: 'tpu' or 'cuda'.
      hbm_gib: memory, as it is called.
      usable_gib: what a program may hold: TPU: the compiler's own limit; GPU: 92% of what the driver reports
        (``XLA_PYTHON_CLIENT_MEM_FRACTION=.92``; jax's default is .75).
      flops: bfloat16 products with float32 sums, dense, per second.
      memory: bytes per second.
      link: bytes per second that a chip sends along one axis of its network, both directions together.
      card: of a GPU: (compute capability, cores, shared memory per core, per block, L2 in bytes, clock in GHz).
    """

    platform: str
    hbm_gib: float
    usable_gib: float
    flops: float
    memory: float
    link: float
    card: tuple[int, int, int, int, int, float] | None = None


_HOPPER = (90, 132, 228 << 10, 227 << 10, 50 << 20, 1.98)
CHIPS: dict[str, Chip] = {
    "v5e": Chip("tpu", 16, 15.75, 197e12, 819e9, 90e9),
    "v5p": Chip("tpu", 95, 94.75, 459e12, 2765e9, 180e9),
    "v6e": Chip("tpu", 32, 31.25, 918e12, 1640e9, 180e9),
    "rtx4090": Chip("cuda", 24, 22.0, 165e12, 1008e9, 25e9, (89, 128, 100 << 10, 99 << 10, 72 << 20, 2.52)),
    "a100": Chip("cuda", 80, 72.8, 312e12, 2039e9, 300e9, (80, 108, 164 << 10, 163 << 10, 40 << 20, 1.41)),
    "h100": Chip("cuda", 80, 73.2, 989e12, 3352e9, 450e9, _HOPPER),
    "h200": Chip("cuda", 141, 129.1, 989e12, 4800e9, 450e9, _HOPPER),
}
CUDA_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Tuning by measurement needs a card; matmuls go to the vendor's library, as they would at these sizes."""


class Target(NamedTuple):
    """A topology: its chip, its devices, and what compiling for it needs.

    Attributes:
      name: as given.
      options: of the compiler.
    """

    name: str
    chip: Chip
    devices: list[Any]
    options: dict[str, Any]


def target(topology: str, *, quick: bool = False) -> Target:
    """Devices of ``v5e:8x8``, ``v5p:2x2x4``, ``v5e-64``, ``h100:8`` and the like.

    Args:
      quick: let the compiler try less hard: twice as fast, and a few percent more memory.

    Raises:
      ValueError: no such chip or shape.
      RuntimeError: the compiler for it is not installed, or does not make this topology.
    """
    kind, shape = _parse(topology)
    chip = CHIPS[kind]
    try:
        devices = list((_tpu if chip.platform == "tpu" else _cuda)(kind, shape))
    except (jax.errors.JaxRuntimeError, NotImplementedError) as e:
        raise RuntimeError(f"topology '{topology}': the compiler refuses it: {' '.join(str(e).split())[:200]}") from None
    if chip.platform == "cuda":
        return Target(topology, chip, devices, dict(CUDA_OPTIONS))
    effort = {"exec_time_optimization_effort": -1.0} if jax.__version_info__ < (0, 12) else {"optimization_level": "O0"}
    return Target(topology, chip, devices, effort if quick else {})


def _parse(topology: str) -> tuple[str, tuple[int, ...]]:
    """'v5e:8x8', 'v5e-64' or 'h100:8' -> (chip, shape)."""
    found = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+){0,2})|-(\d+))", topology)
    if found is None or found[1] not in CHIPS:
        raise ValueError(f"topology '{topology}' is unknown; expected CHIP:SHAPE with a chip of {', '.join(CHIPS)}, e.g. v5e:8x8, v5p:2x2x4 or h100:8")
    kind, shape, size = found.groups()
    if size is not None:
        sizes = TPU_NAMES.get(kind, {})
        if int(size) not in sizes:
            raise ValueError(f"topology '{topology}': there is no such slice; expected {kind}-{{{','.join(map(str, sizes))}}}" if sizes else
                             f"topology '{topology}': give the number of cards as {kind}:{size}")
        shape = sizes[int(size)]
    out = tuple(map(int, shape.split("x")))
    dims = {"cuda": 1}.get(CHIPS[kind].platform, 3 if kind == "v5p" else 2)
    if len(out) != dims or math.prod(out) < 1:
        raise ValueError(f"topology '{topology}': {kind} has {dims} dimension{'s' * (dims > 1)}, e.g. {kind}:{'x'.join(['2', '2', '4'][:dims])}")
    return kind, out


def _tpu(kind: str, shape: tuple[int, ...]) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError("compiling for a TPU needs libtpu, which is not installed: pip install 'rlvr-jax[tpu-aot]'")
    from jax.experimental import topologies

    # Or libtpu asks the network for the machine it is on, and refuses to be loaded by two processes.
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
                        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{'x'.join(map(str, shape))}").devices


def _cuda(kind: str, shape: tuple[int, ...]) -> list[Any]:
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        version = jax.__version__
        raise RuntimeError(f"compiling for a GPU needs jax's CUDA plugin, which is not installed: pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}")
    from jax.experimental import topologies

    return topologies.get_topology_desc("", "cuda", target_config=card_description(kind), topology=f"1x1x{shape[0]}").devices


def card_description(kind: str) -> str:
    """The text of a GpuTargetConfigProto: what the compiler plans with, from data sheets and occupancy tables."""
    chip = CHIPS[kind]
    assert chip.card is not None
    capability, cores, per_core, per_block, l2, clock = chip.card
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {capability // 10} minor: {capability % 10} }}
  core_count: {cores} fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {1536 if capability == 89 else 2048}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {per_block} shared_memory_per_core: {per_core}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.memory)} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {int(chip.hbm_gib) << 30}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 patch: 0 }}
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{kind}"
"""
