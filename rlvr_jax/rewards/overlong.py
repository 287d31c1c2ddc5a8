"""Soft overlong penalty (DAPO, arXiv 2503.14476): answers that come near the token limit lose reward. No jax in here."""

import numpy as np
import numpy.typing as npt

from rlvr_jax.config import Config


def penalty(length: npt.ArrayLike, longest: int, buffer: int) -> np.ndarray:
    """0 up to ``longest - buffer`` tokens, then linear down to -1 at ``longest``, and -1 above.

    Args:
      length: ``[B] int`` response tokens.
      longest, buffer: tokens; 0 < buffer <= longest.

    Returns:
      ``[B] float32`` in [-1, 0].
    """
    over = np.clip(np.asarray(length, np.int64) - (longest - buffer), 0, buffer)
    return np.float32(0) - (over / buffer).astype(np.float32)


def shaped(config: Config, reward: np.ndarray, valid: npt.ArrayLike, length: npt.ArrayLike) -> np.ndarray:
    """Rewards ``[B]`` with the penalty of ``algorithm.overlong_buffer`` on known rows; verdicts stay as they are.

    The penalty makes rewards differ within groups that are wrong throughout: where that must not count as effective,
    decide by accuracy (``dynamic_sampling.by``, ``replay.by``).
    """
    return reward if config.algorithm.overlong_buffer is None else reward + _lost(config, valid, length)


def metrics(config: Config, valid: npt.ArrayLike, length: npt.ArrayLike) -> dict[str, tuple[float, float]]:
    """The penalty's sum and the rows it fell on, over the known rows; nothing where it is off."""
    if config.algorithm.overlong_buffer is None:
        return {}
    lost = _lost(config, valid, length)
    known = float(np.sum(valid))
    return {"reward/overlong_penalty": (float(lost.sum()), known), "response/overlong": (float((lost < 0).sum()), known)}


def _lost(config: Config, valid: npt.ArrayLike, length: npt.ArrayLike) -> np.ndarray:
    assert config.algorithm.overlong_buffer is not None
    return np.where(valid, penalty(length, config.rollout.max_new_tokens, config.algorithm.overlong_buffer), np.float32(0))
