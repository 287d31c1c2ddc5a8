"""Config to dataset: training stream, evaluation rows, what was dropped and why."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr_jax.config import Config, Domain
from rlvr_jax.data import mixture, overlap, sources, tasks
from rlvr_jax.data.mixture import Encoder, Source, State, Stream, Tokenizer
from rlvr_jax.data.prompts import BrokenRow, Schema, Template
from rlvr_jax.data.rows import DataError, Example, Message, Notes, Row, digest, held_out, problem_key

_PROBED = 100  # records that decide which columns there are
_NAMED = 5  # broken rows named one by one in the warnings
_EVAL_SEED, _PROBLEM_SEED = "evaluation", "problems"
_PROBLEM_PATIENCE = 20  # problems generated for each one wanted


@dataclass(frozen=True)
class Dataset:
    """
    Attributes:
      names: domains that are trained on, in the order of the config.
      order: these and then the domains that are evaluated only; a row's ``domain`` is its place in here.
      train: the endless training stream.
      eval: evaluation rows per domain, the same for every seed.
      notes: counts and warnings per domain, from reading the data.
      fingerprint: hash of the content per domain of ``names``.
      eval_fingerprint: hash of all evaluation rows there are, whatever the limit, per domain.
      weights: ``[names]`` the config's weights, sum 1.
      overlaps: training rows that were evaluation prompts, per pair of domains; they are in ``train`` no longer.
    """

    names: tuple[str, ...]
    order: tuple[str, ...]
    train: Stream
    eval: dict[str, tuple[Row, ...]]
    notes: dict[str, Notes]
    fingerprint: dict[str, str]
    eval_fingerprint: dict[str, str]
    weights: np.ndarray
    overlaps: tuple[overlap.Overlap, ...] = ()

    def counters(self, state: State) -> dict[str, dict[str, int]]:
        """Per domain: rows_read, rows_broken, rows_held_out, rows_repeated, overlap_dropped, prompts_too_long, ..."""
        return {name: {"rows_read": 0, "rows_broken": 0, "overlap_dropped": 0, **self.notes[name].counts,
                       "prompts_too_long": state["prompts_too_long"][name]} for name in self.names}

    @property
    def warnings(self) -> list[str]:
        return [w for name in self.order for w in self.notes[name].warnings]


def build(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """Reads all sources and splits them.

    Args:
      tokenizer: None when only text is wanted (training a tokenizer): rows then have no ids and no length limit.

    Raises:
      DataError: one line for a missing, empty or unreadable file, a wrong column, a wrong template, a wrong task.
    """
    data = config.data
    encode = Encoder(tokenizer, config.model.template_args, data.max_prompt_length, data.overlong_prompt)
    notes = {name: Notes() for name in data.domains}
    train: dict[str, list[Example] | None] = {}
    held: dict[str, list[Example]] = {}
    for name, domain in data.domains.items():
        train[name], held[name] = _split(name, domain, config, notes[name])
    # Against every domain's evaluation: one domain's training file may hold another's test questions.
    kept, overlaps = overlap.split({name: examples for name, examples in train.items() if examples is not None}, held)
    forbidden = {overlap.loose(e.key) for examples in held.values() for e in examples}
    order = (*data.trained, *(name for name in data.domains if name not in data.trained))
    out, fingerprint, evaluation = [], {}, {}
    for index, name in enumerate(order):
        domain, examples = data.domains[name], train[name]
        if domain.trained and examples is None:
            source, fingerprint[name] = _task_source(index, name, domain, config, forbidden)
            out.append(source)
        elif domain.trained and examples is not None:
            _tell_overlap(name, len(examples), kept[name], overlaps, notes[name])
            examples = kept[name]
            shuffled = mixture.shuffled(examples, config.seed, name)
            out.append(Source(index, name, shuffled, lambda e: False, len(examples)))
            fingerprint[name] = _fingerprint([*examples, *(shuffled[i] for i in range(min(8, len(examples))))])
        if domain.trained:
            _probe_length(out[-1], encode, notes[name])
        evaluation[name] = _eval_rows(index, name, held[name], _wanted(domain, config), encode, notes[name], domain)
    weights = np.asarray([data.domains[name].weight for name in data.trained], np.float64)
    return Dataset(data.trained, order, Stream(out, encode, fingerprint, data.exhausted == "hand_over"), evaluation, notes, fingerprint,
                   {name: _fingerprint(held[name]) for name in order}, weights / weights.sum() if len(weights) else weights, tuple(overlaps))


def check(config: Config) -> None:
    """Fails, before a model is fetched or read, for a data file that is not there.

    Raises:
      DataError: names it.
    """
    for domain in config.data.domains.values():
        for path in (domain.path, *((domain.eval_path,) if isinstance(domain.eval_path, str) else domain.eval_path or ())):
            if path is not None:
                sources.check(sources.resolve(path, config.data.root))


def pairs(dataset: Dataset, state: State, n: int) -> tuple[list[tuple[list[Message], str]], State]:
    """The next n (messages, response) pairs for supervised training: worked solutions, or a file's response column.

    Raises:
      DataError: a row has no response.
    """
    rows, state = dataset.train.take(state, n, dataset.weights)
    for row in rows:
        if row.solution is None:
            raise DataError(f"domain '{row.domain_name}' has no responses to imitate; set data.domains.{row.domain_name}.columns.response, or use a generated task")
    return [(row.messages, str(row.solution)) for row in rows], state


def _split(name: str, domain: Domain, config: Config, notes: Notes) -> tuple[list[Example] | None, list[Example]]:
    """(training examples or None for a generated task, all evaluation examples in a seed-independent order)."""
    data = config.data
    if domain.task is not None:
        if domain.eval_path is not None:
            raise DataError(f"data.domains.{name}: 'eval_path' goes with 'path'; a generated task evaluates on problems of its own")
        held = _task_eval(name, domain, config, notes)
        return None if domain.problems is None else _task_problems(name, domain, domain.problems, config), held
    if domain.path is None:  # a benchmark: every row counts, a repeated one twice
        return None, sorted(_load_eval(name, domain, config, notes), key=_place)
    examples = _load(name, domain, domain.path, config, notes)
    repeated = len(examples) - len({e.key for e in examples})
    if repeated:
        notes.add("rows_repeated", repeated)
        notes.warnings.append(f"domain '{name}': {repeated} of {len(examples)} rows repeat the problem of another row and are trained on more often")
    if domain.eval_path:
        return examples, _by_hash(_load_eval(name, domain, config, notes))
    held = [e for e in examples if held_out(e.key, data.holdout)]
    notes.add("rows_held_out", len(held))
    return [e for e in examples if not held_out(e.key, data.holdout)], _by_hash(held)


def _by_hash(examples: Iterable[Example]) -> list[Example]:
    """Distinct examples in the order of a hash: a prefix is a fair sample even of a sorted file."""
    return sorted({e.key: e for e in examples}.values(), key=_place)


def _place(example: Example) -> int:
    return digest("evaluation", example.key)


def _wanted(domain: Domain, config: Config) -> int | None:
    """Evaluation prompts of a domain; None = all there are."""
    most = [n for n in (config.eval.prompts_per_domain if domain.trained else None, config.eval.limit) if n is not None]
    return min(most, default=None)


def _load_eval(name: str, domain: Domain, config: Config, notes: Notes) -> list[Example]:
    files = (domain.eval_path,) if isinstance(domain.eval_path, str) else domain.eval_path or ()
    return [e for file in files for e in _load(name, domain, file, config, notes, "eval_")]


def _load(name: str, domain: Domain, path: str, config: Config, notes: Notes, prefix: str = "") -> list[Example]:
    """Examples of one file; broken rows are reported by file and line, then skipped or refused."""
    path = sources.resolve(path, config.data.root)
    records = sources.read(path, domain.split)
    schema = Schema(name, domain, [r.value for r in records if r.value is not None][:_PROBED], path, config.model.system_prompt)
    examples, faults = [], []
    for record in records:
        try:
            if record.value is None:
                raise BrokenRow(record.fault)
            examples.append(schema.example(record.value))
        except BrokenRow as e:
            faults.append(f"{path}:{record.line}: {e}")
            if config.data.broken_row == "refuse":
                raise DataError(f"{faults[0]} (data.broken_row=skip goes on without such rows)") from None
    notes.add(f"{prefix}rows_read", len(records))
    notes.add(f"{prefix}rows_broken", len(faults))
    if not examples:
        raise DataError(f"data file '{path}': all {len(records)} rows are broken, the first: {faults[0]}")
    notes.warnings += [f"broken row skipped: {f}" for f in faults[:_NAMED]]
    if len(faults) > _NAMED:
        notes.warnings.append(f"{path}: {len(faults)} of {len(records)} rows are broken and were skipped")
    return examples


def _tell_overlap(name: str, before: int, kept: Sequence[Example], overlaps: Sequence[overlap.Overlap], notes: Notes) -> None:
    notes.add("overlap_dropped", before - len(kept))
    notes.warnings += [str(o) for o in overlaps if o.train == name]
    if not kept:
        raise DataError(f"domain '{name}': no training row is left after the evaluation rows were taken out; lower data.holdout or give another eval_path")


def _task_example(domain: Domain, template: Template, seed: str, index: int, system_prompt: str | None) -> Example:
    problem = tasks.generate(str(domain.task), seed, index, domain.task_args)
    try:
        prompt = template.render({**problem.parts, **problem.fields, "prompt": problem.prompt})
    except BrokenRow as e:
        raise DataError(f"task {domain.task}: {e}; it has {', '.join(['prompt', *problem.fields, *problem.parts])}") from None
    messages: list[Message] = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    verifier = domain.verifier or problem.verifier
    return Example(problem_key(problem.verifier, problem.prompt, problem.fields), prompt, messages, problem.answer, {**problem.fields, **domain.verifier_args},
                   verifier, problem.solution)


def _task_source(index: int, name: str, domain: Domain, config: Config, forbidden: set[str]) -> tuple[Source, str]:
    template = Template.parse(domain.template, f"data.domains.{name}")
    seed = f"{config.seed}/{name}"
    order = mixture.endless(lambda i: _task_example(domain, template, seed, int(i), config.model.system_prompt))
    share = config.data.holdout
    source = Source(index, name, order, lambda e: held_out(e.key, share) or overlap.loose(e.key) in forbidden, None)
    return source, _fingerprint([order[i] for i in range(8)], str(share))


def _task_eval(name: str, domain: Domain, config: Config, notes: Notes) -> list[Example]:
    """Distinct held-out problems of a stream of its own: the same for every training seed."""
    template = Template.parse(domain.template, f"data.domains.{name}")
    wanted, found = config.eval.prompts_per_domain, dict[str, Example]()
    budget = 1000 + 5 * int(wanted / config.data.holdout)  # a small task may not have so many
    for index in range(budget):
        if len(found) >= wanted:
            break
        example = _task_example(domain, template, _EVAL_SEED, index, config.model.system_prompt)
        if held_out(example.key, config.data.holdout):
            found.setdefault(example.key, example)
    return list(found.values())


def _task_problems(name: str, domain: Domain, wanted: int, config: Config) -> list[Example]:
    """``wanted`` distinct problems for training, the same for every seed, which decides their order.

    Raises:
      DataError: the task does not have so many.
    """
    template = Template.parse(domain.template, f"data.domains.{name}")
    found: dict[str, Example] = {}
    for index in range(_PROBLEM_PATIENCE * wanted):
        example = _task_example(domain, template, _PROBLEM_SEED, index, config.model.system_prompt)
        if not held_out(example.key, config.data.holdout):
            found.setdefault(example.key, example)
        if len(found) == wanted:
            return list(found.values())
    raise DataError(f"data.domains.{name}.problems: {wanted} are wanted, but task '{domain.task}' has only about {len(found)} with these arguments; lower it or widen the task")


def _probe_length(source: Source, encode: Encoder, notes: Notes) -> None:
    """Prompts are measured when they are drawn; a limit that loses much of the data is worth a word at start-up."""
    n = min(source.size or _PROBED, _PROBED)
    lost = sum(encode(source.order[i]) is None for i in range(n))
    if lost > 0.05 * n:
        notes.warnings.append(f"domain '{source.name}': {lost} of the first {n} prompts are longer than data.max_prompt_length={encode.max_length} tokens and will be dropped")


def _eval_rows(index: int, name: str, examples: Sequence[Example], wanted: int | None, encode: Encoder, notes: Notes, domain: Domain) -> tuple[Row, ...]:
    rows: list[Row] = []
    benchmark, origin = not domain.trained, "given" if domain.eval_path else "task" if domain.task else "file"
    for example in examples:
        if len(rows) == wanted:
            break
        ids = encode(example)
        if ids is None:
            notes.add("eval_prompts_too_long")
        else:
            rows.append(mixture.make_row(index, name, example, ids))
    notes.counts["eval_rows"] = len(rows)
    too_long = notes.counts.get("eval_prompts_too_long", 0)
    if too_long and benchmark:
        notes.warnings.append(f"domain '{name}': {too_long} of {len(rows) + too_long} prompts are longer than data.max_prompt_length={encode.max_length} tokens and are not asked; "
                              "raise it, or the score is that of the others")
    elif wanted is not None and len(rows) < wanted and not benchmark:
        longer = f"; {too_long} more are longer than data.max_prompt_length={encode.max_length} tokens: raise it" if too_long else ""
        held = {"given": "", "task": "; raise data.holdout or widen the task", "file": "; raise data.holdout, or give an eval_path"}[origin]
        notes.warnings.append(f"domain '{name}': {len(rows)} evaluation prompts, {wanted} were wanted (eval.prompts_per_domain){longer or held}")
    return tuple(rows)


def _fingerprint(examples: Iterable[Example], *more: str) -> str:
    """Content and order: a changed file, template, seed or task changes it; the path does not."""
    h = hashlib.sha256()
    for part in more:
        h.update(part.encode())
    for e in examples:
        content: list[Any] = [e.key, e.messages, e.answer, e.fields, e.verifier, e.solution]
        h.update(json.dumps(content, sort_keys=True, default=repr).encode())
    return h.hexdigest()[:32]
