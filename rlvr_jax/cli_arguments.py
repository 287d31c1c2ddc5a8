"""The arguments of every command of ``rlvr-jax``, with examples for its ``--help``."""

import argparse
from collections.abc import Callable

from rlvr_jax import cli_commands

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


def parser() -> argparse.ArgumentParser:
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

    command("train", cli_commands.train, "train, or continue, the run of a config", config=True, processes=True)
    command("preflight", cli_commands.preflight, "check all that a run on several hosts needs, before it is paid for", config=True, processes=True)
    p = command("eval", cli_commands.eval, "accuracy on held-out prompts or a benchmark, per domain, as JSON and a table; started again, it goes on where it was stopped", config=True, processes=True)
    p.add_argument("--checkpoint", metavar="best|last|STEP", help="weights of the config's run instead of model.path")
    p = command("generate", cli_commands.generate, "answers to prompts, one JSON object a line", config=True)
    p.add_argument("--checkpoint", metavar="best|last|STEP", help="weights of the config's run instead of model.path")
    p.add_argument("--prompt", action="append", help="a prompt (may be repeated)")
    p.add_argument("--prompts", metavar="FILE", help="one prompt a line, or a JSON object with a 'prompt'; default: stdin")
    p.add_argument("--out", metavar="FILE", help="write here instead of to stdout; started again with the same arguments, it goes on where it was stopped")
    p.add_argument("-n", type=int, default=1, help="samples per prompt")
    command("sft", cli_commands.sft, "supervised warm start on prompt/response pairs; writes a Hugging Face folder", config=True)
    p = command("export", cli_commands.export, "a run's weights as a Hugging Face folder")
    p.add_argument("run_dir", help="folder of the run")
    p.add_argument("out", help="folder to make")
    p.add_argument("--checkpoint", default="best", metavar="best|last|STEP", help="default: the best by its evaluations")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p = command("strategies", cli_commands.strategies, "data strategies: what they do, their parameters, their sources")
    p.add_argument("name", nargs="?", help="only this one")
    p = command("verify", cli_commands.verify, "score rows {task, gold, answer}: a verifier, the right answer, the model's text; one verdict a line, in order. "
                "Exit code 2 if a line could not be used (it gets the verdict unknown), else 0, whatever the verdicts")
    p.add_argument("file", help="JSONL file, or - for stdin; task: math, countdown (with numbers and target for gold), knights, choice, format, or module:function")
    p.add_argument("--workers", type=int, default=2, help="processes that judge")
    p.add_argument("--seconds", type=float, default=5.0, help="CPU time per verdict")
    p = command("report", cli_commands.report, "(re)build report.html of a run")
    p.add_argument("run_dir")
    _compare_arguments(command("compare", cli_commands.compare, "does an arm help? trains arms paired by seed, or reads a table of anybody's runs, and gives verdicts"))
    _plan_arguments(command("plan", cli_commands.plan, "does it fit? compiles the step for a pod or GPU that is not here, and prints memory by part, collectives and estimated seconds (a few minutes; TPUs: pip install 'rlvr-jax[tpu-aot]')", config=True))
    _bench_arguments(command("bench", cli_commands.bench, "time a part of the trainer on a fixed workload, beside the limit of this machine"))
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


def _plan_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help="v5e:8x8 (also v5e-64, by its name), v5p:2x2x4, v6e:4x4, h100:8, h200:1, rtx4090:1")
    p.add_argument("--sweep", action="store_true", help="try meshes and micro-batches, and rank them")
    p.add_argument("--most", type=int, default=6, metavar="N", help="meshes that --sweep compiles at most (minutes each)")
    p.add_argument("--quick", action="store_true", help="let the compiler try less hard: sooner, and a few percent off; --sweep always does")
    p.add_argument("--json", action="store_true", help="one JSON object (with --sweep: one a line)")


def _bench_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("part", choices=("update", "rollout", "step", "verify"))
    p.add_argument("--workload", default="mini", choices=("smol", "tinywide", "mini"), help="smol: SmolLM2-135M's shape; tinywide: vocabulary 151936; mini: overhead")
    p.add_argument("--micro-batch", type=int, default=4, help="rows of full length per forward and backward pass")
    p.add_argument("--repeat", type=int, help="timed steps per figure (the median is told)")
    p.add_argument("--json", action="store_true", help="one JSON object a line")
