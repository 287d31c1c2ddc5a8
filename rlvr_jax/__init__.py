"""RLVR in JAX: which data a model learns from, as small pure functions inside one sharded update.

``rlvr_jax.train(config, rewards=[fn], strategies=[...])`` runs the main job; ``rlvr_jax.strategies.build`` and
``rlvr_jax.types.Signals`` are for trying a strategy by hand. Submodules load on first use: ``import rlvr_jax`` is cheap.
"""

import importlib
from typing import Any

_SUBMODULES = ("config", "kernels", "metrics", "rewards", "strategies", "train", "types")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"rlvr_jax.{name}")
    raise AttributeError(f"module 'rlvr_jax' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *_SUBMODULES]
