"""``rlvr-jax eval``: accuracy on held-out prompts and benchmarks, answer by answer on disk, as JSON and as a table.

An evaluation has a folder of its own, ``<run_dir>/eval/<model>-<hash>``, whose hash is over the weights, the data and all that decides
an answer: the same command goes on where a kill stopped it, and answers of two models or settings never meet. An
answer depends on weights, prompt and sample number, and batches are cut the same way, so the result is that of an evaluation
that was not stopped.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvr_jax import distributed, pairing, records, remote
from rlvr_jax import metrics as metric
from rlvr_jax import parts as part
from rlvr_jax.benchmark_table import markdown
from rlvr_jax.checkpoint import restore_params
from rlvr_jax.config import Config, ConfigError
from rlvr_jax.evaluate import Answers, Score, evaluate
from rlvr_jax.run_folder import only_one
from rlvr_jax.state import weights_sha256

ANSWERS, RESULTS, TABLE = "answers.jsonl", "results.json", "results.md"
_TOLD = 3  # reasons of unknown verdicts that are named
Records = dict[str, list[dict[str, Any]]]


def benchmark(config: Config, checkpoint: str | None = None, programs: dict[Any, Any] | None = None) -> dict[str, Any]:
    """Evaluates ``model.path``, or the weights of the config's run, on every domain.

    Args:
      checkpoint: best, last or a step.
      programs: a dict that keeps what is compiled for the next call of this process.

    Returns:
      The content of ``results.json``; ``folder`` says where it is.

    Raises:
      ConfigError: data, model or checkpoint cannot be used, several samples are asked for at temperature 0, or another process
        evaluates the same.
    """
    e = config.eval
    if e.samples_per_prompt > 1 and e.temperature == 0:
        raise ConfigError(f"eval.samples_per_prompt: {e.samples_per_prompt} samples at eval.temperature 0 are one answer {e.samples_per_prompt} times; give a temperature > 0, or 1 sample")
    with part.build(config, programs=programs) as parts:
        params = parts.params() if checkpoint is None else restore_params(parts, checkpoint)
        identity = _identity(parts, weights_sha256(params))
        name = "_".join(re.findall(r"[\w.-]+", f"checkpoint-{checkpoint}" if checkpoint else Path(config.model.path).name)) or "model"
        where = remote.join(str(config.run_dir), f"eval/{name}-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]}")
        with only_one(where, distributed.first(), "evaluates") as folder:
            found = _answer(parts, params, folder.local)
            results = {"model": config.model.path, "checkpoint": checkpoint, "folder": where, **identity, **_results(parts, found)}
            if distributed.first():
                records.write_json(folder.local / RESULTS, results)
                records.write_atomic(folder.local / TABLE, markdown(results).encode())
    return results


def _identity(parts: part.Parts, sha256: str) -> dict[str, Any]:
    """All that decides an answer or its verdict, but for what the first so many prompts share with more of them."""
    c, data = parts.config, parts.dataset
    settings = {"samples": c.eval.samples_per_prompt, "temperature": c.eval.temperature, "max_new_tokens": c.rollout.max_new_tokens, "stop": list(c.rollout.stop),
                "max_prompt_length": c.data.max_prompt_length, "overlong_prompt": c.data.overlong_prompt, "compute_dtype": c.model.compute_dtype}
    decides = [c.model_dump(mode="json", include={"rewards": True, "algorithm": {"success_threshold"}, "model": {"template_args"}}), list(parts.tokenizer.eos_ids),
               [[rows[0].token_ids for rows in (data.eval[name],) if rows] for name in data.order], pairing.code(c), metric.versions()]
    return {"weights_sha256": sha256, "settings": settings, "data": data.eval_fingerprint, "else_sha256": hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()}


def _answer(parts: part.Parts, params: Any, folder: Path) -> Records:
    """Answers what the folder does not hold yet, and returns a record of every answer by domain (in the first process)."""
    e, rows, first = parts.config.eval, parts.dataset.eval, distributed.first()
    found = _kept(folder / ANSWERS, rows, e.samples_per_prompt, e.batch_prompts) if first else {name: [] for name in rows}
    counts = distributed.gather(np.array([len(of_domain) // e.samples_per_prompt for of_domain in found.values()], np.int32))[0]
    skip = {name: int(n) for name, n in zip(rows, counts)}
    done = [sum(min(n, len(rows[name])) for name, n in skip.items())]
    total = sum(map(len, rows.values()))
    file = records.Appender(folder / ANSWERS) if first else None
    with metric.Progress(total, done[0], description="eval", fields=(), enabled=first) as progress:
        for warning in parts.dataset.warnings:
            progress.log(f"data: {warning}")

        def on_batch(answers: Answers) -> None:
            new = _records(answers, e.samples_per_prompt, parts.judge.details)
            if file is not None:
                file.append(b"".join(map(records.line, new)))
                found[answers.domain] += new
            done[0] += len(answers.rows)
            progress.update(done[0])

        try:
            if done[0] < total:
                evaluate(parts.eval_engine(), params, rows, parts.judge, parts.tokenizer.decode, samples=e.samples_per_prompt, batch_prompts=e.batch_prompts,
                         on_batch=on_batch, skip=skip)
        finally:
            if file is not None:
                file.close()
    return {name: of_domain[: len(rows[name]) * e.samples_per_prompt] for name, of_domain in found.items()}


def _records(answers: Answers, G: int, details: Sequence[str]) -> list[dict[str, Any]]:
    status = ["unknown" if not v else "ok" if c else "wrong" for c, v in zip(answers.correct, answers.valid)]
    return [{"domain": answers.domain, "number": answers.first + i // G, "sample": i % G, "prompt": answers.rows[i // G].prompt, "answer": answers.rows[i // G].answer,
             "response": text, "verdict": status[i], "reward": float(answers.reward[i]), "detail": details[i], "tokens": int(answers.tokens[i]),
             "truncated": bool(answers.truncated[i])} for i, text in enumerate(answers.texts)]


def _kept(path: Path, rows: Mapping[str, Sequence[Any]], G: int, batch: int) -> Records:
    """The answers of an earlier start: of each domain those to its first prompts, as far as none is missing and whole batches go.

    A smaller limit may have ended inside a batch: its answers stay. The file is rewritten without what a kill tore; answers beyond
    the present limit stay in it.
    """
    ended = _ended(path.parent / RESULTS)
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for raw in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(raw)
            found[record["domain"], record["number"], record["sample"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    kept: Records = {}
    for name, of_domain in rows.items():
        n = 0
        while all((name, n, g) in found for g in range(G)) and (n >= len(of_domain) or found[name, n, 0]["prompt"] == of_domain[n].prompt):
            n += 1
        n -= 0 if n >= len(of_domain) or n == ended.get(name) else n % batch
        kept[name] = [found[name, i, g] for i in range(n) for g in range(G)]
    if path.exists():
        records.write_atomic(path, b"".join(records.line(r) for of_domain in kept.values() for r in of_domain))
    return kept


def _ended(path: Path) -> dict[str, int]:
    """How many prompts of each domain the last evaluation that came to its end had."""
    try:
        return {name: d["prompts"] for name, d in json.loads(path.read_bytes())["domains"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _results(parts: part.Parts, found: Records) -> dict[str, Any]:
    """Scores by domain, their macro average, and what must be known to read them."""
    G, data = parts.config.eval.samples_per_prompt, parts.dataset
    domains = {name: _domain(found[name], G, data.notes[name].counts) for name in data.order if len(data.eval[name])}
    measures = dict.fromkeys(m for d in domains.values() for m in d if m == "accuracy" or m.startswith(("pass_at_", "majority_of_")))
    known = [d for d in domains.values() if d["accuracy"] is not None]
    mean = {m: float(np.mean([d[m] for d in known])) if known else None for m in measures}
    mean["stderr"] = float(np.sqrt(sum(d["stderr"] ** 2 for d in known)) / len(known)) if known else None
    return {"limit": parts.config.eval.limit, "domains": domains, "mean": mean | {"domains": len(known)},
            "overlaps": [o._asdict() for o in data.overlaps], "warnings": data.warnings}


def _domain(found: Sequence[Mapping[str, Any]], G: int, counts: Mapping[str, int]) -> dict[str, Any]:
    """Null instead of a share of nothing: no verdict is known."""
    valid, correct = (np.array([r["verdict"] in of for r in found], bool) for of in (("ok", "wrong"), ("ok",)))
    s = Score().plus([r["response"] for r in found], [r["tokens"] for r in found], [r["truncated"] for r in found], correct, valid, G)
    reasons = Counter(r["detail"] for r in found if r["verdict"] == "unknown")
    shares = {"accuracy": s.accuracy, "stderr": s.stderr, **{k: v for k, v in s.measures().items() if k != "eval"}}
    return {**{k: v if s.known else None for k, v in shares.items()}, "correct": s.correct, "known": s.known, "unknown": s.total - s.known, "total": s.total,
            "prompts": len(s.prompts), "rows": counts.get("eval_rows_read"), "too_long": counts.get("eval_prompts_too_long", 0),
            "broken": counts.get("eval_rows_broken", 0), "truncated": s.truncated, "tokens_mean": s.tokens / max(s.total, 1),
            "unknown_reasons": dict(reasons.most_common(_TOLD))}
