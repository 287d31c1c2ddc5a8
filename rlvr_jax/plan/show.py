"""A plan as text."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_NAMES = {"parameters": "parameters, float32", "optimizer": "optimizer", "optimizer_on_host": "optimizer, on the host", "reference": "reference policy", "sampler_weights": "sampler's weights", "cache": "key/value cache",
          "prompts": "prompts that wait for a slot"}


def text(p: dict[str, Any]) -> str:
    """What :func:`rlvr_jax.plan.run.plan` found, for a terminal."""
    mesh = " x ".join(f"{k} {n}" for k, n in p["mesh"].items())
    verdict = f"fits: {p['free_gib']:.2f} GiB free" if p["fits"] else f"does not fit: {-p['free_gib']:.2f} GiB too much"
    lines = [f"{p['model']} ({p['params'] / 1e9:.2f} B) on {p['topology']}: {p['devices']} devices, {mesh}",
             f"{verdict}; {p['gib_per_device']:.2f} of {p['usable_gib']:g} usable GiB per device ({p['hbm_gib']:g} in all)", "", "held per device            GiB"]
    lines += [f"  {_NAMES[k]:<24} {p['memory'][k]:6.2f}" for k in _NAMES if p["memory"][k]]
    lines += ["", "program   runs   GiB at its fullest   sends GiB   model TFLOP   estimated s   compiled in s"]
    for name, one in p["programs"].items():
        low, high = one["estimated_seconds"]
        lines.append(f"  {name:<8} {one['runs']:>4}   {one['gib']:>17.2f}   {one['sent_gib']:>9.2f}   {one['model_flops'] / 1e12:>11.0f}   {low:>5.1f}-{high:<5.1f}   {one['compile_seconds']:>13.0f}")
    lines += ["", "collectives of a step, GiB that each device sends"]
    lines += [f"  {name:<8} {kind:<18} over {n:>3}   {sent / 2**30:8.2f}" for (name, kind, n), sent in _by_kind(p["collectives"])[:12]]
    low, high = p["estimated_step_seconds"]
    lines += ["", f"estimated step: {low:.1f} s with everything overlapped, {high:.1f} s with nothing, at the chip's peak rates and every row at its full length "
              f"({p['prompt_length']} + {p['response_length']} tokens, {p['prompts_per_step']} x {p['samples_per_prompt']} rows). An estimate, not a measurement."]
    if p["host_copies_gib"]:
        lines.append(f"optimizer on the host: {p['host_copies_gib']:.2f} GiB between each device and its host a step, whose time is not in the estimate (data sheets do not say it)")
    micro = p["suggested_micro_batch"]
    if micro is not None and micro != p["micro_batch"]:
        lines.append(f"train.micro_batch {p['micro_batch']}: {micro} may fit better (estimate; plan it)")
    return "\n".join(lines)


def ranking(plans: Sequence[dict[str, Any]]) -> str:
    """A line a plan, as :func:`rlvr_jax.plan.sweep.sweep` ranks them."""
    lines = ["data  fsdp  tensor  micro_batch  fits   GiB   estimated s"]
    for p in plans:
        m, (low, high) = p["mesh"], p["estimated_step_seconds"]
        lines.append(f"{m['data']:>4}  {m['fsdp']:>4}  {m['tensor']:>6}  {p['micro_batch']:>11}  {'yes' if p['fits'] else 'no':<4} {p['gib_per_device']:6.2f}   {low:.1f}-{high:.1f}")
    return "\n".join(lines)


def _by_kind(found: Sequence[dict[str, Any]]) -> list[tuple[tuple[str, str, int], int]]:
    sums: dict[tuple[str, str, int], int] = defaultdict(int)
    for c in found:
        sums[c["program"], c["kind"], c["devices"]] += c["bytes"] * c["times"]
    return sorted(sums.items(), key=lambda item: -item[1])
