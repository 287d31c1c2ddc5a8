"""Random numbers of the host: a function of (seed, stream, step), so that nothing of a generator is ever saved.

A run that goes on from a checkpoint, and every process of a run, draws the same numbers.
"""

import numpy as np

STREAMS = {"reservoir": 1, "hybrid": 2, "arpo": 3, "prompts": 4}
"""A named stream each, so that no two uses share their numbers."""


def generator(seed: int, stream: str, step: int, *more: int) -> np.random.Generator:
    """A generator of its own for every (seed, stream, step, *more), all >= 0."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(STREAMS[stream], step, *more))))
