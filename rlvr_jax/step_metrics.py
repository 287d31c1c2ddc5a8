"""What a step tells about its rollout, verdicts and mix: metric names to numbers, and sample texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlvr_jax.evaluate import Score
from rlvr_jax.types import Rollout


def rollout_metrics(rollout: Rollout, reward: np.ndarray, correct: np.ndarray, valid: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {"tokens/generated": int(rollout.response_length.sum()), "response/length_mean": float(rollout.response_length.mean()),
                              "response/truncated": float(rollout.truncated.mean()), "verify/unknown_share": float(1 - valid.mean())}
    for prefix, rows in [("mean", valid), *((n, valid & (rollout.domain == d)) for d, n in enumerate(names))]:
        if rows.any():
            values[f"reward/{prefix}"], values[f"accuracy/{prefix}"] = float(reward[rows].mean()), float(correct[rows].mean())
    return values


def mix_metrics(rows: Sequence[Any], proportions: np.ndarray, signal: np.ndarray | None, names: Sequence[str]) -> dict[str, float]:
    """Share of each domain asked for and drawn, and what a dynamic mixer's decision followed."""
    if len(names) < 2:
        return {}
    realised = np.bincount([r.domain for r in rows], minlength=len(names)) / len(rows)
    out = {f"mix/target/{n}": float(p) for n, p in zip(names, proportions)} | {f"mix/realised/{n}": float(p) for n, p in zip(names, realised)}
    return out | {f"mixer_signal/{n}": float(v) for n, v in zip(names, () if signal is None else signal) if np.isfinite(v)}


def eval_metrics(scores: Mapping[str, Score]) -> dict[str, float]:
    """Accuracy by domain and its mean; with several samples a prompt also pass@k and the accuracy of the majority."""
    kinds: dict[str, dict[str, float]] = {}
    for name, score in scores.items():
        for kind, value in score.measures().items():
            kinds.setdefault(kind, {})[name] = value
    return {f"{kind}/{n}": v for kind, values in kinds.items() for n, v in (values | {"mean": float(np.mean(list(values.values())))}).items()}


def samples(rows: Sequence[Any], texts: Sequence[str], reward: np.ndarray, valid: np.ndarray) -> list[dict[str, Any]]:
    """The first sample of the first group of every domain: ``rows`` of N groups, the others of their N * G rows."""
    first, G = {r.domain: n for n, r in reversed(list(enumerate(rows)))}, len(texts) // len(rows)
    return [{"domain": rows[n].domain_name, "prompt": rows[n].prompt, "response": texts[n * G], "answer": rows[n].answer, "reward": float(reward[n * G]),
             "known": bool(valid[n * G])} for _, n in sorted(first.items())]


def unknown(score: Score) -> str:
    return f" ({score.total - score.known} of {score.total} unknown)" if score.known < score.total else ""


class CompileCount:
    """XLA compilations since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
