"""What each command of ``rlvr-jax`` does with its arguments. Heavy imports happen inside."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rlvr_jax import exit_codes


def _load(args: argparse.Namespace) -> Any:
    from rlvr_jax import config

    return config.load(args.config, args.overrides)


def _join(args: argparse.Namespace) -> None:
    """Before anything else touches jax."""
    from rlvr_jax import distributed

    distributed.start(args.coordinator, args.num_processes, args.process_id)


def _print_once(result: Any) -> None:
    """One JSON line, from the first process."""
    from rlvr_jax import distributed

    if distributed.first():
        print(json.dumps(result), flush=True)


def train(args: argparse.Namespace) -> int:
    config = _load(args)
    _join(args)
    from rlvr_jax.train import train

    summary = train(config)
    _print_once({k: v for k, v in summary.items() if k != "finished"})
    return 0 if summary["finished"] else exit_codes.STOPPED


def preflight(args: argparse.Namespace) -> None:
    config = _load(args)
    _join(args)
    from rlvr_jax.preflight import preflight

    _print_once(preflight(config))


def sft(args: argparse.Namespace) -> None:
    from rlvr_jax.sft import sft

    print(json.dumps(sft(_load(args))))


def eval(args: argparse.Namespace) -> None:
    config = _load(args)
    _join(args)
    from rlvr_jax import distributed
    from rlvr_jax.benchmark import benchmark
    from rlvr_jax.benchmark_table import markdown

    results = benchmark(config, args.checkpoint)
    if distributed.first():
        print(markdown(results), f"{results['folder']}", sep="\n", file=sys.stderr)
    _print_once(results["domains"] | ({"mean": results["mean"]} if len(results["domains"]) > 1 else {}))


def generate(args: argparse.Namespace) -> None:
    from rlvr_jax import generate as room
    from rlvr_jax import parts as part
    from rlvr_jax.metrics import Progress
    from rlvr_jax.records import Appender, line

    config = _load(args)
    if args.prompt is None and args.prompts is not None:
        with open(args.prompts, encoding="utf-8") as file:
            prompts = room.read_prompts(file)
    else:
        prompts = args.prompt or room.read_prompts(sys.stdin)
    if not prompts or args.n < 1:
        raise ValueError("nothing to answer: give --prompt TEXT, --prompts FILE, or one prompt a line on stdin, and -n of at least 1")
    done = room.finished_prompts(Path(args.out), prompts, args.n) if args.out else 0
    out = Appender(Path(args.out)) if args.out else None
    write = (lambda record: out.append(line(record))) if out else (lambda record: print(json.dumps(record), flush=True))
    with part.build(config) as parts, Progress(len(prompts), done, description="generate", fields=()) as progress:
        if done < len(prompts):
            engine = parts.engine()
            engine.update_weights(_weights(parts, args.checkpoint), 0)
            room.generate(config, engine, parts.tokenizer, prompts, args.n, write, done=done, on_prompt=progress.update)


def _weights(parts: Any, checkpoint: str | None) -> Any:
    from rlvr_jax.checkpoint import restore_params

    return parts.params() if checkpoint is None else restore_params(parts, checkpoint)


def export(args: argparse.Namespace) -> None:
    from rlvr_jax import config as configs
    from rlvr_jax import parts as part
    from rlvr_jax import remote
    from rlvr_jax.checkpoint import restore_params
    from rlvr_jax.models import hf

    source = remote.join(args.run_dir, "config.yaml")
    try:
        file = remote.local_file(source) if remote.is_remote(source) else Path(source)
    except FileNotFoundError:
        file = Path(source)
    if not file.is_file():
        raise ValueError(f"'{args.run_dir}' is no run folder: it has no config.yaml")
    config = configs.load(file, [f"run_dir={args.run_dir}"])
    with part.build(config) as parts:
        hf.export(Path(args.out), restore_params(parts, args.checkpoint), parts.model, source_folder=parts.folder, dtype=args.dtype)
    print(args.out)


def strategies(args: argparse.Namespace) -> None:
    from rich.console import Console

    from rlvr_jax.strategies import describe

    entries = [e for e in describe() if args.name in (None, e.name)]
    if not entries:
        raise ValueError(f"no strategy, score, act or mixer is called '{args.name}'; 'rlvr-jax strategies' lists them")
    console = Console(soft_wrap=True)
    for e in entries:
        params = ", ".join(f"{k}={v}" for k, v in e.params.items())
        console.print(f"{e.name}({params})  [{e.kind}]", style="bold", markup=False, highlight=False)
        console.print(f"    {e.doc}  ({e.source})", markup=False, highlight=False)


def verify(args: argparse.Namespace) -> int:
    from rlvr_jax.config import Pool
    from rlvr_jax.rewards import verify_file

    counts: dict[str, int] = {}
    broken: list[str] = []
    for verdict in verify_file(args.file, Pool(workers=args.workers, cpu_seconds=args.seconds), broken.append):
        print(json.dumps(verdict), flush=True)
        counts[verdict["status"]] = counts.get(verdict["status"], 0) + 1
    print(f"{sum(counts.values())} rows: {', '.join(f'{n} {status}' for status, n in counts.items())}", file=sys.stderr)
    if broken:
        print(f"rlvr-jax verify: {len(broken)} of them could not be used, the first: {broken[0]}", file=sys.stderr)
    return exit_codes.MEND if broken else 0


def report(args: argparse.Namespace) -> None:
    from rlvr_jax import remote, report
    from rlvr_jax.run_folder import RunFolder

    folder = RunFolder(args.run_dir)
    if folder.uri:
        folder.local.mkdir(parents=True, exist_ok=True)
        folder.pull()
    page = report.build(folder.local)
    folder.push()
    print(page if folder.uri is None else remote.join(folder.uri, page.name))


def compare(args: argparse.Namespace) -> int | None:
    if (args.table is None) == (args.config is None):
        raise ValueError("give either a comparison (configs/dataflex/compare_quick.yaml) or --from FILE.csv; --help has examples of both")
    here, there = ("arms", "seeds", "budget", "shard", "workers", "run_dir", "report_only"), ("arm", "pair", "scores", "baseline", "where", "out")
    if wrong := [name for name in (here if args.table else there) if getattr(args, name)]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} goes with {'a comparison, not with --from' if args.table else '--from, not with a comparison'}")
    if args.table is None:
        return _compare_runs(args)
    _compare_table(args)
    return None


def _compare_runs(args: argparse.Namespace) -> int:
    from rlvr_jax.compare import command, spec
    from rlvr_jax.compare.output import plain

    for name in ("seeds", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    arms = None if args.arms is None else [name.strip() for name in args.arms.split(",")]
    plan = spec.load(args.config, arms=arms, seeds=args.seeds, budget=args.budget, run_dir=args.run_dir, overrides=args.overrides)
    told = command.run(plan, shard=args.shard, train=not args.report_only, workers=args.workers)
    if told.comparison is not None:
        print(plain(told.comparison), f"\n{told.report}", sep="\n")
    unfinished = command.unfinished(told.found)
    for line in [*command.problems(told.found), f"{unfinished}; without --report-only they are made" if unfinished and args.report_only else unfinished]:
        if line:
            print(f"rlvr-jax compare: {line}", file=sys.stderr)
    if told.stopped:
        return exit_codes.STOPPED
    return exit_codes.MEND if told.found.failed or told.found.refused or (args.report_only and told.found.missing) else 0


def _compare_table(args: argparse.Namespace) -> None:
    import csv
    import hashlib

    from rlvr_jax.compare.output import plain, write
    from rlvr_jax.compare.result import compare
    from rlvr_jax.compare.table import read_csv

    if missing := [name for name in ("arm", "pair", "scores") if not getattr(args, name)]:
        raise ValueError(f"--from needs --{missing[0]} (a column of the table)")
    path = Path(args.table)
    if bad := [w for w in args.where if "=" not in w]:
        raise ValueError(f"--where {bad[0]}: expected COLUMN=VALUE")
    where = dict(w.split("=", 1) for w in args.where)
    scores = [name.strip() for name in next(csv.reader([args.scores]))]
    comparison = compare(read_csv(path, args.arm, args.pair, scores, where), args.baseline)
    facts = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "arm": args.arm, "pair": args.pair, "scores": scores, "where": where}
    out = write(comparison, args.out or Path("runs") / f"compare_{path.stem}", " · ".join([path.stem, *args.where]), facts)
    print(plain(comparison), f"\n{out}", sep="\n")


def plan(args: argparse.Namespace) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # what is planned for is not here, and what is here is left alone
    from rlvr_jax.plan.run import plan
    from rlvr_jax.plan.show import ranking, text
    from rlvr_jax.plan.sweep import sweep

    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    if args.sweep:
        plans = sweep(_load(args), args.topology, most=args.most, tell=tell)
        print("\n".join(map(json.dumps, plans)) if args.json else ranking(plans))
        return 0 if plans[0]["fits"] else 1
    found = plan(_load(args), args.topology, quick=args.quick, tell=tell)
    print(json.dumps(found) if args.json else text(found))
    return 0 if found["fits"] else 1


def bench(args: argparse.Namespace) -> None:
    if args.part == "update":
        from rlvr_jax.bench.update import bench_update

        found = bench_update(args.workload, args.micro_batch, args.repeat)
    elif args.part == "rollout":
        from rlvr_jax.bench.rollout import bench_rollout

        found = bench_rollout(args.workload, args.repeat)
    elif args.part == "verify":
        from rlvr_jax.bench.verify import bench_verify

        found = bench_verify(repeat=args.repeat)
    else:
        from rlvr_jax.bench.step import bench_step

        found = bench_step(args.workload, args.micro_batch, args.repeat)
    for record in found:
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
        print(json.dumps(shown) if args.json else "  ".join(f"{k} {v}" for k, v in shown.items() if v is not None), flush=True)
