"""Compile for an NVIDIA GPU that is not here: descriptions of an A100 and an H100, and what the compiler makes for them."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# From the vendor's data sheets and occupancy tables: what the compiler plans with, not what a single card was measured at.
CARDS = {
    "sm_80": dict(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, cores=108, per_core=164 << 10, per_block=163 << 10, l2=40 << 20, bandwidth=2_039_000_000_000, clock=1.41),
    "sm_90": dict(name="NVIDIA H100 80GB HBM3", major=9, minor=0, cores=132, per_core=228 << 10, per_block=227 << 10, l2=50 << 20, bandwidth=3_352_000_000_000, clock=1.98),
}
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Tuning by measurement needs a card; matmuls go to the vendor's library, as they would at these sizes."""


def description(card: str) -> str:
    """The text of a GpuTargetConfigProto."""
    c = CARDS[card]
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {c["major"]} minor: {c["minor"]} }}
  core_count: {c["cores"]} fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {c["per_block"]} shared_memory_per_core: {c["per_core"]}
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {c["bandwidth"]} l2_cache_size: {c["l2"]} clock_rate_ghz: {c["clock"]} device_memory_size: {80 << 30}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 patch: 0 }}
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{c["name"]}"
"""


def sharding(card: str, shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("data",)) -> NamedSharding:
    """Replicated over ``shape`` cards; the test is skipped, with the reason, where jax's CUDA plugin is missing."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        pytest.skip(f"no CUDA compiler: pip install --no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}")
    topology = topologies.get_topology_desc("", "cuda", target_config=description(card), topology=f"1x1x{int(np.prod(shape))}")
    return NamedSharding(Mesh(np.array(topology.devices).reshape(shape), axes), P())


def compiled(where: NamedSharding, f, *shapes):
    """``f`` compiled for arguments like ``shapes`` (a tree of ShapeDtypeStruct)."""
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes)
    with jax.set_mesh(where.mesh):  # from jax 0.11 on, kernels are lowered for the card of the mesh
        return jax.jit(f).lower(*placed).compile(compiler_options=OPTIONS)


def kernels(program) -> list[str]:
    """Names of the Triton kernels that the program calls."""
    return re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*?name = "(\w+)"', program.as_text())
