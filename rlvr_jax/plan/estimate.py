"""What a step computes and moves, by our own count: the compilers' counts miss loops and kernels.

All counts are for the longest case, every row with its full prompt and response.
"""

from typing import NamedTuple

from rlvr_jax.config import Config
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.plan.targets import Chip


class Work(NamedTuple):
    """Of one program in one step, over all devices.

    Attributes:
      model_flops: what the formulas need: two a weight and token, backward twice the forward pass, causal attention.
      flops: with what remat computes again.
      memory: bytes each device reads of its memory at least, over the whole step.
      network: bytes each device sends, over the whole step.
    """

    model_flops: float
    flops: float
    memory: float
    network: float

    def seconds(self, chip: Chip, devices: int) -> tuple[float, float]:
        """(all of it overlapped perfectly, nothing overlapped), at the chip's peak rates."""
        parts = (self.flops / devices / chip.flops, self.memory / chip.memory, self.network / chip.link)
        return max(parts), sum(parts)


def layer_weights(model: DecoderConfig) -> int:
    """Entries of the matrices of all layers."""
    D, hd = model.hidden_size, model.head_dim
    return model.num_layers * D * (hd * 2 * (model.num_heads + model.num_kv_heads) + 3 * model.intermediate_size)


def parameters(model: DecoderConfig) -> int:
    """All entries of the model, as published figures count them (a tied embedding once)."""
    D, hd, L = model.hidden_size, model.head_dim, model.num_layers
    small = L * 2 * D + D + L * ((model.num_heads + 2 * model.num_kv_heads) * hd if model.qkv_bias else 0) + L * (2 * hd if model.qk_norm else 0)
    return layer_weights(model) + small + model.vocab_size * D * (1 if model.tie_embeddings else 2)


def forward_flops(model: DecoderConfig, rows: int, length: int, scored: int) -> float:
    """Of ``rows`` causal rows of ``length`` tokens, of which ``scored`` a row need logits."""
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * length * length
    head = 2 * model.vocab_size * model.hidden_size * scored
    return float(rows * (2 * layer_weights(model) * length + attention + head))


def update_flops(config: Config, model: DecoderConfig) -> tuple[float, float]:
    """(model FLOPs, with remat) of one step's updates: forward and backward of all rows, reference and old policy."""
    a, t = config.algorithm, config.train
    rows, P, R = t.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_length, config.rollout.max_new_tokens
    once = forward_flops(model, rows, P + R, R)
    passes = 3.0 + (a.kl_coef > 0) + (t.updates_per_batch > 1 or a.recompute_old)
    again = forward_flops(model, rows, P + R, 0) if config.model.remat == "full" else (
        float(rows * 2 * model.num_layers * model.num_heads * model.head_dim * (P + R) ** 2) if config.model.remat == "dots" else 0.0)
    return passes * once, passes * once + again


def decode_flops(config: Config, model: DecoderConfig) -> float:
    """Of all responses of a step: every token by itself, over what is before it."""
    rows, P, R = config.train.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_length, config.rollout.max_new_tokens
    seen = R * (P + R / 2)
    return rows * (2.0 * R * (layer_weights(model) + model.vocab_size * model.hidden_size) + 4.0 * model.num_layers * model.num_heads * model.head_dim * seen)
