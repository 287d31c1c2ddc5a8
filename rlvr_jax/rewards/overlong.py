"""Soft overlong penalty (DAPO, arXiv 2503.14476): answers that come near the token limit lose reward. No jax in here."""

import numpy as np

from rlvr_jax.config import Config


def penalty(length: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """0 up to ``longest - buffer`` tokens, then linear down to -1 at ``longest``, and -1 above.

    Args:
      length: ``[B] int`` response tokens.
      longest, buffer: tokens; 0 < buffer <= longest.

    Returns:
      ``[B] float32`` in [-1, 0].
    """
    over = np.clip(np.asarray(length, np.int64) - (longest - buffer), 0, buffer)
    return np.float32(0) - (over / buffer).astype(np.float32)


def shaped(config: Config, reward: np.ndarray, valid: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, dict[str, tuple[float, float]]]:
    """Rewards ``[B]`` with the penalty of ``algorithm.overlong_buffer`` on known rows, and its metrics; verdicts stay as they are.

    The penalty makes rewards differ within groups that are wrong throughout: where that must not count as effective,
    decide by accuracy (``dynamic_sampling.by``, ``replay.by``).
    """
    buffer = config.algorithm.overlong_buffer
    if buffer is None:
        return reward, {}
    lost = np.where(valid, penalty(length, config.rollout.max_new_tokens, buffer), np.float32(0))
    return reward + lost, {"reward/overlong_penalty": (float(lost.sum()), float(valid.sum())), "response/overlong": (float((lost < 0).sum()), float(valid.sum()))}
