"""Fixed workloads and the arithmetic limit of each: 8 prompts x 8 samples, 64 prompt and 128 response tokens, float32."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.decoder import DecoderConfig

PROMPTS, GROUP, PROMPT, RESPONSE = 8, 8, 64, 128
ROWS = PROMPTS * GROUP

WORKLOADS = {
    # SmolLM2-135M's shape; one whose vocabulary dominates; one where overhead does.
    "smol": DecoderConfig(49152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5),
    "tinywide": DecoderConfig(151936, 256, 1024, 4, 4, 4, 64, rope_theta=1e5),
    "mini": DecoderConfig(512, 192, 768, 4, 6, 6, 32, rope_theta=1e5),
}


def update_flops(model: DecoderConfig, prompt: np.ndarray, response: np.ndarray) -> float:
    """Multiplications and additions that forward and backward of these rows cannot do without.

    Three times the forward pass: projections of every token, the head at response tokens, the causal half of attention.
    """
    D, Q, KV = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    body = model.num_layers * (2 * D * Q + 2 * D * KV + 3 * D * model.intermediate_size)
    prompt, response = prompt.astype(np.float64), response.astype(np.float64)
    length = prompt + response
    return float(np.sum(6 * body * length + 6 * D * model.vocab_size * response + 6 * length**2 * Q * model.num_layers))


def rollout_seconds(model: DecoderConfig, prompt: int, response: np.ndarray, rate: float, copy: float, itemsize: int) -> float:
    """Seconds that sampling ``response`` ([prompts, samples] lengths) cannot do without on this machine.

    FLOPs at ``rate``: every prompt once, every token but a row's last once through the body, every token's logits, the
    causal half of attention. Or bytes at ``copy``: all weights once for each token of the longest row. The longer one.
    """
    D, Q, KV = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    body = model.num_layers * (2 * D * Q + 2 * D * KV + 3 * D * model.intermediate_size)
    n = response.astype(np.float64)
    attention = 2 * Q * model.num_layers * (len(response) * prompt**2 + float(np.sum((prompt + n) ** 2 - prompt**2)))
    flops = 2 * body * (len(response) * prompt + float(np.sum(n - 1))) + 2 * D * model.vocab_size * float(n.sum()) + attention
    return max(flops / rate, itemsize * (body + D * model.vocab_size) * float(n.max()) / copy)


def bandwidth(megabytes: int = 256, repeat: int = 7) -> float:
    """Bytes a second that are read and written by a copy of ``megabytes`` on this device now."""
    x = jnp.ones(megabytes * 2**18, jnp.float32)
    f = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / timed(lambda: f(x), repeat)[0]


def matmul_rate(dtype: Any = jnp.float32, size: int = 2048, repeat: int = 7) -> float:
    """FLOP/s of a square matmul on this device now, accumulated in float32: what the limits are stated against."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    f = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    seconds, _ = timed(lambda: f(x, x), repeat)
    return 2 * size**3 / seconds


def timed(run: Callable[[], Any], repeat: int, warm: int = 1) -> tuple[float, float | None]:
    """(median seconds, peak resident MB or None where the kernel does not tell it)."""
    for _ in range(warm):
        jax.block_until_ready(run())
    resettable = _reset_peak()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return median(seconds), _peak_mb() if resettable else None


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_mb() -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
