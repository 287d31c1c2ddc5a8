"""One line for a config that does not fit: which field, and what was probably meant. No jax in here."""

import difflib
from collections.abc import Iterator
from typing import Any

import pydantic

ELSEWHERE = {
    "lr": "optimizer.learning_rate", "num_generations": "rollout.samples_per_prompt", "group_size": "rollout.samples_per_prompt",
    "n": "rollout.samples_per_prompt", "G": "rollout.samples_per_prompt", "batch_size": "train.prompts_per_step", "max_steps": "train.steps",
    "beta": "algorithm.kl_coef", "epsilon": "algorithm.clip_low", "max_completion_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens", "output_dir": "run_dir", "dtype": "model.compute_dtype",
    "vf_coef": "algorithm.critic.coef", "cliprange_value": "algorithm.critic.value_clip", "critic_warmup": "algorithm.critic.warmup_steps",
}
"""What other trainers call a field."""


def explain(error: pydantic.ValidationError, root: type[pydantic.BaseModel]) -> str:
    """The likeliest cause among the faults of a config whose model is ``root``."""
    # An unknown key is the likeliest root of the others ('missing task' after a misspelt 'taks'), so it is named first.
    e = min(error.errors(include_url=False), key=lambda x: x["type"] != "extra_forbidden")
    where = ".".join(str(p) for p in e["loc"])
    if e["type"] == "extra_forbidden":
        return f"unknown key '{where}'; nearest valid key: '{nearest(e['loc'], root)}'"
    message = e["msg"].removeprefix("Value error, ")
    if e["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: {message[0].lower() + message[1:]}, got {e['input']!r}"


def nearest(loc: tuple[int | str, ...], root: type[pydantic.BaseModel]) -> str:
    """The dotted path that an unknown one is likest to: a key of the same section if one is close, else any key.

    Keys of other sections are compared by their last part as well: ``eval.every`` means ``train.eval_every``.
    """
    section, key = loc[:-1], str(loc[-1])
    if key in ELSEWHERE:
        return ELSEWHERE[key]
    likeness = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()  # noqa: E731
    siblings = list(_section(section, root).model_fields)
    best = max(siblings, key=lambda k: likeness(key, k))
    own = ".".join(str(p) for p in (*section, best))
    if likeness(key, best) >= 0.7:
        return own
    parts = [str(p) for p in loc]
    wanted = {key, "_".join(parts), "_".join(parts[-2:]), ".".join(parts)}

    def closeness(path: str) -> float:
        return max(likeness(w, p) for w in wanted for p in (path, path.rpartition(".")[2]))

    other = max((p for p in paths(root) if p not in root.model_fields or not section), key=closeness)
    return other if closeness(other) > likeness(key, best) else own


def paths(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields; inside a mapping of named sections, ``NAME`` stands for the name."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from paths(inner, f"{prefix}{name}." + ("NAME." if "dict" in str(field.annotation) else ""))


def _section(loc: tuple[int | str, ...], root: type[pydantic.BaseModel]) -> type[pydantic.BaseModel]:
    """The model at a path; a step through a dict (a domain's name) does not change the model."""
    model = root
    for part in loc:
        field = model.model_fields.get(str(part))
        for candidate in [] if field is None else _models_in(field.annotation):
            model = candidate
    return model


def _models_in(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [m for a in getattr(annotation, "__args__", ()) for m in _models_in(a)]
