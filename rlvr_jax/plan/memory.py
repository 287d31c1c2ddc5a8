"""What lies on a device at the fullest moment of each phase of a step, in bytes.

Rollout and update take turns: the sampler's weights and cache are gone during the update, the optimizer is there always.
"""

import dataclasses
import math
from typing import NamedTuple

from rlvr_jax.config import Config
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.plan.programs import Programs, bytes_per_device


class Sizes(NamedTuple):
    """Bytes of one compiled program on each device, as the compiler says; ``kept`` outputs are not in its arguments' place."""

    arguments: int
    kept: int
    temporaries: int

    @classmethod
    def of(cls, compiled: object) -> "Sizes":
        m = compiled.memory_analysis()  # type: ignore[attr-defined]
        return cls(m.argument_size_in_bytes, max(m.output_size_in_bytes - m.alias_size_in_bytes, 0), m.temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class Held:
    """Arrays of the run, bytes per device. ``optimizer_on_host`` lies in the host's memory, all others in the device's."""

    parameters: int
    optimizer: int
    optimizer_on_host: int
    reference: int
    sampler_weights: int
    cache: int
    smaller_cache: int
    prompts: int
    prompt_batch: int

    @property
    def resident(self) -> int:
        """There in every phase."""
        return self.parameters + self.optimizer + self.reference


def held(config: Config, model: DecoderConfig, programs: Programs, tensor: int) -> Held:
    item = 2 if config.model.compute_dtype == "bfloat16" else 4
    # Every shard holds the keys and values of all prompts that wait for a slot, for its own heads.
    prompt = 2 * model.num_layers * model.num_kv_heads * model.head_dim * config.data.max_prompt_length * item // tensor
    waiting = min(config.train.prompts_per_step, -(-programs.slots // config.rollout.samples_per_prompt))
    return Held(bytes_per_device(programs.state.params), bytes_per_device(programs.state.opt_state),
                bytes_per_device(programs.state.opt_state, on_host=True),
                0 if programs.reference is None else bytes_per_device(programs.reference), bytes_per_device(programs.weights),
                bytes_per_device(programs.cache), 0 if programs.smaller is None else bytes_per_device(programs.smaller),
                waiting * prompt, programs.prefill_rows * prompt)


def phases(h: Held, sizes: dict[str, Sizes]) -> dict[str, int]:
    """Bytes per device in each phase whose program was compiled.

    update: state, rows and temporaries. prefill: the first prompts, with no cache yet. decode: the whole cache, or the
    moment at which it grows and the old one is copied; a batch of prompts waits beside it.
    """
    out = {}
    sampling = h.resident + h.sampler_weights
    if "update" in sizes:
        s = sizes["update"]
        out["update"] = s.arguments + s.kept + s.temporaries
    if "prefill" in sizes:
        out["prefill"] = sampling + h.prompts + sizes["prefill"].kept + sizes["prefill"].temporaries
    if "decode" in sizes:
        steady = h.prompt_batch + max(sizes["decode"].temporaries + sizes["decode"].kept, sizes["prefill"].temporaries if "prefill" in sizes else 0)
        # The compiler's own figure where it is larger: it counts what layouts fill up.
        out["decode"] = h.resident + max(h.sampler_weights + h.cache, sizes["decode"].arguments) + max(h.smaller_cache, steady)
    return out


def activations(config: Config, model: DecoderConfig, rows: float, tensor: int) -> float:
    """Bytes that the update's temporaries grow by with ``rows`` rows of full length on a device: a rough count of our own.

    remat full keeps a layer's input; dots also its products; none about twice that. One layer's values are there besides,
    forward and backward.
    """
    item = 2 if config.model.compute_dtype == "bfloat16" else 4
    T = config.data.max_prompt_length + config.rollout.max_new_tokens
    D = model.hidden_size
    products = 2 * D + ((model.num_heads + 2 * model.num_kv_heads) * model.head_dim + 3 * model.intermediate_size) / tensor
    saved = {"full": D, "dots": D + products, "none": 2 * products + 4 * D}[config.model.remat]
    return rows * T * (item * model.num_layers * saved + 8 * (products + 2 * D))


def suggest_micro_batch(config: Config, model: DecoderConfig, shards: int, tensor: int, free: float) -> int | None:
    """The largest micro-batch that leaves memory free, by :func:`activations`; None: not even one row a shard.

    Args:
      shards: devices that rows are split over.
      free: bytes left beside the present micro-batch; negative where it does not fit.
    """
    row = activations(config, model, 1.0, tensor)
    now = config.train.micro_batch / shards
    per_shard = math.floor(now + free / row)
    most = -(-config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.updates_per_batch // shards)
    if per_shard < 1:
        return None
    return shards * next(n for n in range(min(per_shard, max(most, 1)), 0, -1) if n == 1 or n % 2 == 0)
