"""``rlvr-jax COMMAND``: a thin layer over the Python API. Heavy imports happen inside the commands."""

import argparse
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlvr_jax import exit_codes

EXAMPLES = {
    "train": "rlvr-jax train configs/quickstart.yaml\n  rlvr-jax train configs/quickstart.yaml seed=1 run_dir=runs/seed1 'strategies=[difffilter]'",
    "eval": "rlvr-jax eval configs/quickstart.yaml\n  rlvr-jax eval configs/eval/gsm8k.yaml model.path=FOLDER data.root=FOLDER eval.limit=100   # or $RLVR_DATA\n  rlvr-jax eval configs/quickstart.yaml --checkpoint best eval.samples_per_prompt=4 eval.temperature=1",
    "generate": "rlvr-jax generate configs/quickstart.yaml --prompt '27+45=?' -n 4\n  rlvr-jax generate configs/quickstart.yaml --checkpoint last --prompts prompts.txt --out answers.jsonl",
    "sft": "rlvr-jax sft configs/quickstart_sft.yaml\n  rlvr-jax sft my.yaml model.path=/models/Qwen3-0.6B sft.steps=500",
    "export": "rlvr-jax export runs/quickstart my_model\n  rlvr-jax export runs/quickstart my_model --checkpoint last --dtype bfloat16",
    "strategies": "rlvr-jax strategies\n  rlvr-jax strategies difffilter",
    "verify": "rlvr-jax verify answers.jsonl\n  echo '{\"task\": \"countdown\", \"numbers\": [3, 5, 7], \"target\": 22, \"answer\": \"<answer>3*5+7</answer>\"}' | rlvr-jax verify -\n  echo '{\"task\": \"math\", \"gold\": \"1/2\", \"answer\": \"\\\\boxed{0.5}\"}' | rlvr-jax verify -",
    "preflight": "rlvr-jax preflight configs/quickstart.yaml\n  rlvr-jax preflight configs/quickstart.yaml run_dir=gs://bucket/run --num-processes 16",
    "report": "rlvr-jax report runs/quickstart",
    "compare": "rlvr-jax compare configs/dataflex/compare_quick.yaml\n  rlvr-jax compare configs/dataflex/compare.yaml --arms difffilter,gfpo --seeds 12 --budget generated=500_000\n"
               "  rlvr-jax compare configs/dataflex/compare.yaml --shard 0/2        # and 1/2 elsewhere, then --report-only on all folders\n  rlvr-jax compare --from runs.csv --arm method --pair seed --scores gsm8k --baseline grpo --where model=Qwen3-0.6B --out runs/qwen",
    "plan": "rlvr-jax plan configs/dataflex/qwen2_5_7b_v5e64.yaml --topology v5e:8x8\n"
            "  rlvr-jax plan my.yaml --topology h100:8 --sweep\n  rlvr-jax plan my.yaml mesh.fsdp=16 --topology v5p-32 --json",
    "bench": "rlvr-jax bench update --workload mini\n  rlvr-jax bench rollout --workload smol --json",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; errors a user can mend are one line on stderr and exit code 2."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and hasattr(args, "overrides") and all("=" in r and not r.startswith("-") for r in rest):
        args.overrides += rest  # overrides may stand behind options, where argparse no longer looks for them
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _quiet()
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: not an error of ours
        return 0
    except (ValueError, OSError, RuntimeError, ImportError) as e:
        if args.debug:
            raise
        print(f"rlvr-jax {args.command}: {type(e).__name__}: {' '.join(str(e).split())[:2000]}", file=sys.stderr)
        if not isinstance(e, ValueError | OSError):
            print("rlvr-jax: --debug shows where it happened", file=sys.stderr)
        return exit_codes.LOST if _lost(e) else exit_codes.MEND


def console() -> None:
    """The installed command. One of several processes that fails must not wait, in jax's exit handlers, for the others."""
    code = 1
    sys.unraisablehook = _unraisable
    if sys.argv[1:2] in (["train"], ["compare"]):
        # Until there is something to save, Ctrl-C is the system's: raised inside the imports of others, an exception may be swallowed.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main()
    except SystemExit as e:  # argparse
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else exit_codes.MEND
    except BaseException:
        traceback.print_exc()
    if code not in (0, exit_codes.STOPPED) and _joined():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _unraisable(found: Any) -> None:
    """A save that failed leaves callbacks of a loop that is over; their traces would bury the line that says why it failed."""
    if str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)


def _joined() -> bool:
    """Whether this is one of several processes; asks without making jax look for devices."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _lost(e: BaseException) -> bool:
    """Whether an error of one of several processes comes from the others or the network, as far as it can be told.

    XLA's errors begin with the name of a status; which class of Python they get depends on where they come up (ValueError too).
    """
    if type(e).__name__ == "LostProcess":
        return True
    return _joined() and re.match(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|DATA_LOSS|FAILED_PRECONDITION): ", str(e)) is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlvr-jax", description="Reinforcement learning with verifiable rewards, in JAX.",
                                     epilog="examples:\n  rlvr-jax train configs/quickstart.yaml\n  rlvr-jax COMMAND --help", formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int | None], help: str, config: bool = False,
                processes: bool = False) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=help, description=help, epilog=f"examples:\n  {EXAMPLES[name]}", formatter_class=argparse.RawDescriptionHelpFormatter)
        p.add_argument("--debug", action="store_true", help="show the trace of an error")
        if processes:
            several = p.add_argument_group("several processes", "needed only where no TPU pod, Slurm or MPI says it; also as JAX_COORDINATOR_ADDRESS, "
                                           "JAX_NUM_PROCESSES, JAX_PROCESS_ID")
            several.add_argument("--coordinator", metavar="HOST:PORT", help="a free port of process 0")
            several.add_argument("--num-processes", type=int, metavar="N", help="alone: refuse to start with another number of processes")
            several.add_argument("--process-id", type=int, metavar="I", help="0..N-1")
        if config:
            p.add_argument("config", help="YAML file")
            p.add_argument("overrides", nargs="*", metavar="a.b=value", help="fields of the config, e.g. train.steps=50; all of them, with their values, stand in config.yaml of any run_dir")
        p.set_defaults(run=run)
        return p

    command("train", _train, "train, or continue, the run of a config", config=True, processes=True)
    command("preflight", _preflight, "check all that a run on several hosts needs, before it is paid for", config=True, processes=True)
    p = command("eval", _eval, "accuracy on held-out prompts or a benchmark, per domain, as JSON and a table; started again, it goes on where it was stopped", config=True, processes=True)
    p.add_argument("--checkpoint", metavar="best|last|STEP", help="weights of the config's run instead of model.path")
    p = command("generate", _generate, "answers to prompts, one JSON object a line", config=True)
    p.add_argument("--checkpoint", metavar="best|last|STEP", help="weights of the config's run instead of model.path")
    p.add_argument("--prompt", action="append", help="a prompt (may be repeated)")
    p.add_argument("--prompts", metavar="FILE", help="one prompt a line, or a JSON object with a 'prompt'; default: stdin")
    p.add_argument("--out", metavar="FILE", help="write here instead of to stdout; started again with the same arguments, it goes on where it was stopped")
    p.add_argument("-n", type=int, default=1, help="samples per prompt")
    command("sft", _sft, "supervised warm start on prompt/response pairs; writes a Hugging Face folder", config=True)
    p = command("export", _export, "a run's weights as a Hugging Face folder")
    p.add_argument("run_dir", help="folder of the run")
    p.add_argument("out", help="folder to make")
    p.add_argument("--checkpoint", default="best", metavar="best|last|STEP", help="default: the best by its evaluations")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p = command("strategies", _strategies, "data strategies: what they do, their parameters, their sources")
    p.add_argument("name", nargs="?", help="only this one")
    p = command("verify", _verify, "score rows {task, gold, answer}: a verifier, the right answer, the model's text; one verdict a line, in order. "
                "Exit code 2 if a line could not be used (it gets the verdict unknown), else 0, whatever the verdicts")
    p.add_argument("file", help="JSONL file, or - for stdin; task: math, countdown (with numbers and target for gold), knights, choice, format, or module:function")
    p.add_argument("--workers", type=int, default=2, help="processes that judge")
    p.add_argument("--seconds", type=float, default=5.0, help="CPU time per verdict")
    p = command("report", _report, "(re)build report.html of a run")
    p.add_argument("run_dir")
    _compare_arguments(command("compare", _compare, "does an arm help? trains arms paired by seed, or reads a table of anybody's runs, and gives verdicts"))
    p = command("plan", _plan, "does it fit? compiles the step for a pod or GPU that is not here, and prints memory by part, collectives and estimated seconds (a few minutes; TPUs: pip install 'rlvr-jax[tpu-aot]')", config=True)
    p.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help="v5e:8x8 (also v5e-64, by its name), v5p:2x2x4, v6e:4x4, h100:8, h200:1, rtx4090:1")
    p.add_argument("--sweep", action="store_true", help="try meshes and micro-batches, and rank them")
    p.add_argument("--most", type=int, default=6, metavar="N", help="meshes that --sweep compiles at most (minutes each)")
    p.add_argument("--quick", action="store_true", help="let the compiler try less hard: sooner, and a few percent off; --sweep always does")
    p.add_argument("--json", action="store_true", help="one JSON object (with --sweep: one a line)")
    p = command("bench", _bench, "time a part of the trainer on a fixed workload, beside the limit of this machine")
    p.add_argument("part", choices=("update", "rollout", "step", "verify"))
    p.add_argument("--workload", default="mini", choices=("smol", "tinywide", "mini"), help="smol: SmolLM2-135M's shape; tinywide: vocabulary 151936; mini: overhead")
    p.add_argument("--micro-batch", type=int, default=4, help="rows of full length per forward and backward pass")
    p.add_argument("--repeat", type=int, help="timed steps per figure (the median is told)")
    p.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def _compare_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("config", nargs="?", help="comparison: a base config and named arms")
    p.add_argument("overrides", nargs="*", metavar="a.b=value", help="fields of the base config, for every arm")
    p.add_argument("--arms", metavar="ARM,ARM", help="only these, beside the baseline")
    p.add_argument("--seeds", type=int, metavar="N", help="pairs (default: what the file says, else 12; with 12 arms beside the baseline, fewer than 9 can decide nothing)")
    p.add_argument("--budget", metavar="UNIT=N", help="updates=300, generated=2_000_000 or updated=1_000_000 (tokens), the same for every run")
    p.add_argument("--shard", metavar="i/n", help="make only every n-th pair's runs, from i on; results are merged from the folders")
    p.add_argument("--workers", type=int, metavar="N", help="processes that train at once")
    p.add_argument("--run-dir", metavar="FOLDER", help="runs and results (default: runs/CONFIG)")
    p.add_argument("--report-only", action="store_true", help="train nothing; report on the runs that are there (exit code 2 while some are missing)")
    t = p.add_argument_group("a table of finished runs instead")
    t.add_argument("--from", dest="table", metavar="FILE.csv", help="one row a run, with a header")
    t.add_argument("--arm", metavar="COLUMN", help="what is compared, e.g. method")
    t.add_argument("--pair", metavar="COLUMN", help="what runs are paired by, e.g. seed")
    t.add_argument("--scores", metavar="COLUMN,COLUMN", help="scores by domain, larger is better; they count alike in the mean")
    t.add_argument("--baseline", metavar="ARM", help="arm that the others are compared with (default: the one called baseline)")
    t.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", help="only these rows (may be repeated)")
    t.add_argument("--out", metavar="FOLDER", help="results.csv, results.json, results.md, report.html (default: runs/compare_FILE)")


def _quiet() -> None:
    """Settings that must precede the first import of jax and transformers; a user's own values win."""
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false",
                        "TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR",
                        "JAX_COMPILATION_CACHE_DIR": str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlvr_jax" / "xla")}.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


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


def _train(args: argparse.Namespace) -> int:
    config = _load(args)
    _join(args)
    from rlvr_jax.train import train

    summary = train(config)
    _print_once({k: v for k, v in summary.items() if k != "finished"})
    return 0 if summary["finished"] else exit_codes.STOPPED


def _preflight(args: argparse.Namespace) -> None:
    config = _load(args)
    _join(args)
    from rlvr_jax.preflight import preflight

    _print_once(preflight(config))


def _sft(args: argparse.Namespace) -> None:
    from rlvr_jax.sft import sft

    print(json.dumps(sft(_load(args))))


def _eval(args: argparse.Namespace) -> None:
    config = _load(args)
    _join(args)
    from rlvr_jax import distributed
    from rlvr_jax.benchmark import benchmark
    from rlvr_jax.benchmark_table import markdown

    results = benchmark(config, args.checkpoint)
    if distributed.first():
        print(markdown(results), f"{results['folder']}", sep="\n", file=sys.stderr)
    _print_once(results["domains"] | ({"mean": results["mean"]} if len(results["domains"]) > 1 else {}))


def _generate(args: argparse.Namespace) -> None:
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


def _export(args: argparse.Namespace) -> None:
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


def _strategies(args: argparse.Namespace) -> None:
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


def _verify(args: argparse.Namespace) -> int:
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


def _report(args: argparse.Namespace) -> None:
    from rlvr_jax import remote, report
    from rlvr_jax.run_folder import RunFolder

    folder = RunFolder(args.run_dir)
    if folder.uri:
        folder.local.mkdir(parents=True, exist_ok=True)
        folder.pull()
    page = report.build(folder.local)
    folder.push()
    print(page if folder.uri is None else remote.join(folder.uri, page.name))


def _compare(args: argparse.Namespace) -> int | None:
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


def _plan(args: argparse.Namespace) -> int:
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


def _bench(args: argparse.Namespace) -> None:
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


if __name__ == "__main__":
    console()
