"""What two runs must share to be a pair: initial weights, evaluation, and the order of prompts within each domain.

Every run writes down what it began with (``pairing.json``) and, step by step, the prompts it drew (``prompts.jsonl``); a
comparison reads both. No jax in here.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr_jax.config import Config, ConfigError
from rlvr_jax.imports import find
from rlvr_jax.records import read_records

log = logging.getLogger(__name__)

FILE = "pairing.json"


def identity(config: Config, weights_sha256: str | None, evaluation: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The content of ``pairing.json``: what the run starts from and is measured by.

    Args:
      weights_sha256: of the initial weights.
      evaluation: held-out rows by domain, in their order.
    """
    return {"seed": config.seed, "weights_sha256": weights_sha256, "chooses_prompts": chooses_prompts(config), "code": code(config),
            "evaluation": {name: _evaluation(config, name, rows) for name, rows in evaluation.items()}}


def refuse_others(began: Mapping[str, Any], now: Mapping[str, Any], run_dir: str) -> None:
    """Holds a continued run to what it began with, beside its config: the same questions, answers and weights at the same paths.

    Args:
      began, now: :func:`identity`, the second without weights where nothing but the checkpoint is used of them; a part that the first
        lacks, for it is older than this check, is not held to anything.

    Raises:
      ConfigError: evaluation or the weights at ``model.path`` are others.
    """
    fresh = f"bring them back, or choose another run_dir than {run_dir}"
    for domain, sha in now["evaluation"].items():
        if began.get("evaluation", {}).get(domain, sha) != sha:
            raise ConfigError(f"the evaluation rows of domain '{domain}' are not those this run began with, so its scores would not go on; {fresh} (if only this package has changed, remove {FILE} there)")
    for module in (m for m, sha in now["code"].items() if began.get("code", {}).get(m, sha) != sha):
        log.warning("the file of '%s' has changed since %s was begun; the run goes on with the new one", module, run_dir)
    if now["weights_sha256"] is not None and began.get("weights_sha256", now["weights_sha256"]) != now["weights_sha256"]:
        raise ConfigError(f"the weights at model.path are not those this run began with, and its KL is to them; {fresh}")


def chooses_prompts(config: Config) -> bool:
    """Whether the run decides which prompts come next: it may then see others than its pair, at an equal budget."""
    return config.data.mixer.name != "static" or config.data.prompts.kind != "random" or config.dynamic_sampling is not None


def reorders_prompts(config: Config) -> bool:
    """Whether even the order within a domain is the run's own: it picks among candidates, or fills batches until enough teach."""
    return config.data.prompts.kind != "random"


def code(config: Config) -> dict[str, str]:
    """SHA-256 of the files behind every ``module:function`` of a config: a run is not one of its code after an edit.

    Of those files alone, not of what they import. A module that is not found is left out.
    """
    found = {}
    for module in sorted(set(_modules(config.model_dump(mode="json", include={"strategies", "rewards", "data"})))):
        path = _source(module)
        if path is not None:
            found[module] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def prompt_order(run_dir: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Prompt ids by domain, in the order in which a run drew them.

    Raises:
      ValueError: a step is missing, or domains are, so the order is not known.
    """
    records = read_records(Path(run_dir) / "prompts.jsonl")
    steps = [r["step"] for r in records]
    if steps != list(range(1, len(steps) + 1)) or any(len(r.get("domains", ())) != len(r["prompt_ids"]) for r in records):
        raise ValueError("prompts.jsonl lacks steps or domains, so the order of its prompts is not known")
    order: dict[str, list[int]] = {}
    for record in records:
        for domain, prompt in zip(record["domains"], record["prompt_ids"]):
            order.setdefault(domain, []).append(prompt)
    return order


def _evaluation(config: Config, name: str, rows: Sequence[Any]) -> str:
    domain, e, r = config.data.domains[name], config.eval, config.rollout
    decides, = (domain.rewards or config.rewards)[0]  # the first reward's verdict is what counts as right
    h = hashlib.sha256(_text([e.samples_per_prompt, e.temperature, r.max_new_tokens, r.stop]))
    for row in rows:
        verifier = row.verifier if decides == "verifier" else decides
        h.update(_text([row.prompt_id, row.messages, row.token_ids, row.answer, row.fields, verifier]))
    return h.hexdigest()


def _text(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")


def _modules(tree: Any) -> Iterator[str]:
    """Module names of everything that looks like ``module:function``."""
    if isinstance(tree, str):
        module, colon, name = tree.partition(":")
        if colon and name.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            yield module
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _modules(key)
            yield from _modules(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _modules(item)


def _source(module: str) -> Path | None:
    """The file of a module, found without importing it."""
    spec = find(module)
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None
