"""Which mesh, and which micro-batch: those whose arrays fit by arithmetic are compiled, then ranked."""

from collections.abc import Callable, Iterator
from typing import Any

from rlvr_jax import config as configs
from rlvr_jax.config import Config
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.plan import estimate, memory
from rlvr_jax.plan.run import GIB, plan, shape
from rlvr_jax.plan.targets import Chip, target

MICRO_ROWS = (1, 2, 4)


def sweep(config: Config, topology: str, *, most: int = 6, quick: bool = True, tell: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """Plans of the ``most`` candidates that promise most, the best first: what fits, then the shortest estimated step.

    Raises:
      ValueError: no mesh of these devices divides the model, or none holds it.
    """
    model, _ = shape(config)
    goal = target(topology)
    sized = [(c, _arrays(c, model)) for c in candidates(config, model, len(goal.devices))]
    fitting = [(c, size) for c, size in sized if size < goal.chip.usable_gib * GIB]
    found = [c for c, _ in sorted(fitting, key=lambda x: (_rank(x[0], model, goal.chip), x[1]))]
    if not found:
        raise ValueError(f"no mesh of {len(goal.devices)} devices holds this model and batch on '{topology}'; take more devices, fewer slots or shorter responses")
    plans = [plan(c, topology, quick=quick, tell=tell) for c in found[:most]]
    return sorted(plans, key=lambda p: (not p["fits"], p["estimated_step_seconds"][1]))


def candidates(config: Config, model: DecoderConfig, devices: int) -> Iterator[Config]:
    """Every mesh that divides model and slots, with a few micro-batches each."""
    rows = config.train.prompts_per_step * config.rollout.samples_per_prompt
    for tensor in (n for n in range(1, devices + 1) if devices % n == 0 and not any(s % n for s in (model.num_kv_heads, model.intermediate_size, model.vocab_size))):
        for fsdp in (n for n in range(1, devices // tensor + 1) if devices // tensor % n == 0 and model.hidden_size % n == 0):
            data = devices // tensor // fsdp
            for per_shard in MICRO_ROWS:
                if per_shard > 1 and data * fsdp * per_shard > rows:
                    continue
                yield configs.validate(configs.apply_overrides(config.model_dump(mode="json"), [
                    f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}", f"train.micro_batch={data * fsdp * per_shard}"]))


def _arrays(config: Config, model: DecoderConfig) -> float:
    """Bytes per device that no compiler can save: state, gradients twice, activations; or state, sampler's weights, and the cache
    beside the smaller one that it last grew from. Moments that the host keeps are there for the optimizer step alone, when
    activations are gone.
    """
    m, item = config.mesh, 2 if config.model.compute_dtype == "bfloat16" else 4
    weights = estimate.parameters(model)
    share = weights / (m.fsdp * m.tensor)
    whole = share * (12 + 4 * (config.algorithm.kl_coef > 0))
    state = whole - 8 * share * m.offload_optimizer
    update = max(whole, state + memory.activations(config, model, config.train.micro_batch / (m.data * m.fsdp), m.tensor)) + 8 * share
    slots = config.rollout.slots or 256
    columns = 2 * config.data.max_prompt_length + 1.5 * config.rollout.max_new_tokens
    cache = 2 * item * model.num_layers * model.num_kv_heads * model.head_dim * columns * slots / (m.data * m.fsdp * m.tensor)
    return max(update, state + item * weights / m.tensor + cache)


def _rank(config: Config, model: DecoderConfig, chip: Chip) -> float:
    """Seconds that differ between candidates: weights gathered for each micro-batch, gradients summed over data, sums over tensor, weights read for each token."""
    m, item = config.mesh, 2
    weights = item * estimate.parameters(model) / m.tensor
    rows, length = config.train.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_length + config.rollout.max_new_tokens
    chunks = -(-rows // config.train.micro_batch)
    gathered = chunks * 5 * weights * (m.fsdp - 1) / m.fsdp
    reduced = 2 * 4 * estimate.parameters(model) / (m.fsdp * m.tensor) * (m.data - 1) / m.data * config.train.updates_per_batch
    summed = 0 if m.tensor == 1 else rows / (m.data * m.fsdp) * length * model.hidden_size * model.num_layers * 4 * 2 * 5
    idle = (chunks * config.train.micro_batch / rows) * estimate.update_flops(config, model)[1] / (m.data * m.fsdp * m.tensor) / chip.flops
    return (gathered + reduced + summed) / chip.link + idle + config.rollout.max_new_tokens * weights / chip.memory
