"""``plan``: compile what a step runs for a pod that is not here, and add up what it takes."""

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlvr_jax import parts as part
from rlvr_jax.config import Config
from rlvr_jax.kernels.token_logprob import blocks
from rlvr_jax.models import known
from rlvr_jax.models.decoder import DecoderConfig
from rlvr_jax.models.hf_config import end_ids, load_config, read_json
from rlvr_jax.plan import estimate, hlo, memory
from rlvr_jax.plan.programs import Programs, build, bytes_per_device
from rlvr_jax.plan.targets import Target, target
from rlvr_jax.sharding import check_host_memory, make_mesh
from rlvr_jax.state import check_model_divides

PROGRAMS = ("update", "prefill", "decode")
GIB = 2**30


def shape(config: Config) -> tuple[DecoderConfig, tuple[int, ...]]:
    """(shape, end ids) of the config's model, without its weights."""
    if known.is_hub_id(config.model.path):
        return known.shape_of(config.model.path)
    folder = part.model_folder(config)
    return load_config(folder), end_ids(read_json(folder / "config.json"))


def plan(config: Config, topology: str, *, quick: bool = False, only: Sequence[str] = PROGRAMS, tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """What a step of ``config`` takes on ``topology``: plain numbers and strings, sizes in GiB per device.

    Args:
      topology: see :func:`rlvr_jax.plan.targets.target`.
      quick: as there.
      only: programs to compile; what needs the others is left out.
      tell: called with a line before each long thing.

    Raises:
      ValueError: no such topology; a mesh, model or batch that does not divide; no host memory for the optimizer.
      RuntimeError: no compiler for it.
    """
    tell = tell or (lambda line: None)
    model, ends = shape(config)
    goal = target(topology, quick=quick)
    m = config.mesh
    ways = m.data * m.fsdp * m.tensor
    if ways != len(goal.devices):
        raise ValueError(f"mesh {m.data}x{m.fsdp}x{m.tensor} is {ways} devices, '{topology}' has {len(goal.devices)}; set mesh.data, mesh.fsdp and mesh.tensor")
    mesh = make_mesh(m.data, m.fsdp, m.tensor, devices=goal.devices)
    check_model_divides(model, mesh)
    if m.offload_optimizer:
        check_host_memory(mesh)
    programs = build(config, model, ends, mesh, goal.chip.platform)
    found = {name: _compile(name, programs, config, model, goal, tell) for name in PROGRAMS if name in only}
    return _report(config, model, goal, programs, found, topology)


def _compile(name: str, programs: Programs, config: Config, model: DecoderConfig, goal: Target, tell: Callable[[str], None]) -> dict[str, Any]:
    """Sizes, collectives and compile time of one program, or how far it does not fit."""
    tell(f"compiling {name} for {goal.name} ({len(goal.devices)} devices)")
    began = time.monotonic()
    try:
        compiled = programs.lower[name]().compile(compiler_options=goal.options)
    except Exception as e:
        wanted = refused(str(e))
        if wanted is None:
            raise
        return {"seconds": time.monotonic() - began} | wanted
    turns = (programs.burst,) if name == "decode" else _update_turns(config, model)
    collectives, loops = hlo.collectives(compiled.as_text() or "", turns, len(goal.devices))
    return {"seconds": time.monotonic() - began, "sizes": memory.Sizes.of(compiled), "collectives": collectives, "loops": loops}


def refused(message: str) -> dict[str, float] | None:
    """Bytes that a program wanted of a TPU's memory, from the compiler's refusal: ``used``, all in all, or ``temporaries``; None if it is about something else."""
    for name, pattern in (("used", r"Used ([\d.]+)([GM]) of"), ("temporaries", r"temporaries \(([\d.]+)([GM])\) exceeds")):
        if found := re.search(pattern, message):
            return {name: float(found[1]) * (GIB if found[2] == "G" else 2**20)}
    return None


def _chunks(config: Config) -> int:
    rows = config.train.prompts_per_step * config.rollout.samples_per_prompt
    return -(-rows // config.train.updates_per_batch // min(config.train.micro_batch, rows))


def _update_turns(config: Config, model: DecoderConfig) -> tuple[int, int]:
    """Turns of the loops whose length a run decides (chunks of rows, in each chunks of the loss's tokens), were every row as long as it may be."""
    m, P, R = config.mesh, config.data.max_prompt_length, config.rollout.max_new_tokens
    tokens = config.train.micro_batch // (m.data * m.fsdp) * part.row_length(config)
    chunk = blocks.chunk_size(tokens, model.vocab_size // m.tensor)
    return (_chunks(config), math.ceil(tokens * R / (P + R) / chunk))


def _work(name: str, config: Config, model: DecoderConfig, programs: Programs, one: dict[str, Any]) -> tuple[estimate.Work, int]:
    """Work of all runs of one program in a step, and their number."""
    rows, P = config.train.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_length
    sent = sum(hlo.total(one.get("collectives", [])).values())
    whole = 2 * estimate.parameters(model) / config.mesh.tensor  # a device's share of heads and ffn, gathered, in bfloat16
    if name == "update":
        need, done = estimate.update_flops(config, model)
        passes = 3 + (config.algorithm.kl_coef > 0) + (config.model.remat != "none")
        state = 3 * (bytes_per_device(programs.state) + bytes_per_device(programs.state, on_host=True))
        return estimate.Work(need, done, passes * _chunks(config) * whole + state, sent), 1
    if name == "prefill":
        runs = -(-config.train.prompts_per_step // programs.prefill_rows)
        need = estimate.forward_flops(model, config.train.prompts_per_step, P, 1)
        return estimate.Work(need, need, runs * whole, runs * sent), runs
    waves = -(-rows // programs.slots)
    steps = waves * (config.rollout.max_new_tokens - 1)
    runs = -(-steps // programs.burst)
    need = estimate.decode_flops(config, model)
    return estimate.Work(need, need, steps * (bytes_per_device(programs.weights) + bytes_per_device(programs.cache)), runs * sent), runs


def _report(config: Config, model: DecoderConfig, goal: Target, programs: Programs, found: dict[str, dict[str, Any]], topology: str) -> dict[str, Any]:
    m, chip, n = config.mesh, goal.chip, len(goal.devices)
    held = memory.held(config, model, programs, m.tensor)
    phases = memory.phases(held, {name: one["sizes"] for name, one in found.items() if "sizes" in one})
    for name, one in found.items():
        beside = {"update": 0, "prefill": held.resident - held.parameters + held.sampler_weights, "decode": held.resident}[name]
        arguments = {"update": held.resident, "prefill": held.parameters, "decode": held.sampler_weights + held.cache}[name]
        if "used" in one:
            phases[name] = int(one["used"]) + beside
        elif "temporaries" in one:
            phases[name] = int(one["temporaries"]) + beside + arguments
    fullest = max(phases.values())
    gib = lambda x: round(x / GIB, 3)  # noqa: E731
    rows, P, R = config.train.prompts_per_step * config.rollout.samples_per_prompt, config.data.max_prompt_length, config.rollout.max_new_tokens
    listed, shown, low, high, flops = [], {}, 0.0, 0.0, 0.0
    for name, one in found.items():
        work, runs = _work(name, config, model, programs, one)
        seconds = work.seconds(chip, n)
        low, high, flops = low + seconds[0], high + seconds[1], flops + work.model_flops
        listed += [{"program": name, "kind": c.kind, "devices": c.devices, "shape": c.shape, "bytes": c.bytes, "times": c.times * runs}
                   for c in one.get("collectives", [])]
        shown[name] = {"compile_seconds": round(one["seconds"], 1), "runs": runs, "gib": gib(phases[name]), "model_flops": work.model_flops,
                       "sent_gib": gib(work.network), "estimated_seconds": [round(s, 3) for s in seconds],
                       **({"temporary_gib": gib(one["sizes"].temporaries), "argument_gib": gib(one["sizes"].arguments)} if "sizes" in one else {}),
                       "assumed_turns": [x.turns for x in one.get("loops", [])]}
    free = chip.usable_gib * GIB - phases["update"] if "update" in phases else 0.0
    return {
        "topology": topology, "devices": n, "mesh": {"data": m.data, "fsdp": m.fsdp, "tensor": m.tensor}, "model": config.model.path,
        "params": estimate.parameters(model), "prompt_length": P, "response_length": R, "prompts_per_step": config.train.prompts_per_step,
        "samples_per_prompt": config.rollout.samples_per_prompt, "micro_batch": config.train.micro_batch, "remat": config.model.remat, "slots": programs.slots,
        "tokens_per_step": rows * (P + R), "fits": gib(fullest) <= chip.usable_gib, "gib_per_device": gib(fullest), "hbm_gib": chip.hbm_gib,
        "host_copies_gib": gib(2 * config.train.updates_per_batch * held.optimizer_on_host), "usable_gib": chip.usable_gib, "free_gib": round(chip.usable_gib - fullest / GIB, 3), "memory": {k: gib(v) for k, v in vars(held).items()},
        "programs": shown, "collectives": sorted(listed, key=lambda c: -c["bytes"] * c["times"]), "model_flops": flops,
        "estimated_step_seconds": [round(low, 2), round(high, 2)],
        "suggested_micro_batch": memory.suggest_micro_batch(config, model, m.data * m.fsdp, m.tensor, free) if "update" in phases else None}
