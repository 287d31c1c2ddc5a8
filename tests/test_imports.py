"""The shape of the code: imports point one way, the light rooms stay light, the top level stays fixed."""

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rlvr_jax.imports import find

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlvr_jax"

# A room (a module or sub-package of rlvr_jax) may import rooms of earlier lines, and of its own line without a cycle.
TIERS = (
    {"types", "config", "config_errors", "sharding", "imports", "kernels", "records", "page", "host_random", "exit_codes", "watchdog", "remote", "distributed", "stopping"},
    {"models", "advantages", "strategies", "replay", "rewards", "data", "metrics", "charts", "packing", "run_folder", "dynamic_sampling", "pairing", "benchmark_table"},
    {"losses", "rollout", "report", "coefficients", "critic", "scoring", "state"},
    {"update", "parts", "evaluate", "checkpoint"},
    {"step_metrics"},
    {"collect"},
    {"train", "compare", "plan", "sft", "bench", "generate", "preflight", "benchmark"},
    {"cli", "cli_arguments", "cli_commands"},
)
TIER = {room: number for number, rooms in enumerate(TIERS) for room in rooms}
WITHOUT_JAX = ("config", "config_errors", "metrics", "records", "page", "charts", "report", "rewards", "cli", "cli_arguments", "cli_commands", "watchdog", "exit_codes", "remote", "run_folder", "distributed", "stopping")
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "rlvr_jax", "configs", "kernels", "tests", "tpu_scripts"}


def sources() -> Iterator[tuple[tuple[str, ...], Path]]:
    """Every module as (dotted parts below rlvr_jax, path); kernels/ through its own folder, not the link to it."""
    for base, prefix in ((PACKAGE, ()), (ROOT / "kernels", ("kernels",))):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if prefix or parts[0] != "kernels":
                yield (*prefix, *parts), path


def imports(parts: tuple[str, ...], path: Path) -> Iterator[str]:
    """Absolute names of all imported modules, those inside functions too, but not those only for type checkers."""
    tree = ast.parse(path.read_text(), str(path))
    typing_only = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
                   for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ("rlvr_jax", *parts)[: -node.level]
                base = ".".join((*above, base) if base else above)
            # 'from rlvr_jax import x' names the room x
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def rooms() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for parts, path in sources():
        if parts == ("__init__",):
            continue
        used = {name.split(".")[1] for name in imports(parts, path) if name.startswith("rlvr_jax.")}
        graph.setdefault(parts[0], set()).update(used - {parts[0]})
    return graph


def test_every_room_has_its_place():
    missing = sorted(set(rooms()) - set(TIER))
    assert not missing, f"give {missing} a line in TIERS of this test"


def test_imports_point_one_way():
    back = [f"{room} (line {TIER[room]}) imports {used} (line {TIER.get(used)})"
            for room, all_used in sorted(rooms().items()) for used in sorted(all_used)
            if TIER.get(used, len(TIERS)) > TIER[room]]
    assert not back, "\n".join(back)


def test_no_cycle_between_rooms():
    try:
        TopologicalSorter(rooms()).prepare()
    except CycleError as error:
        pytest.fail(f"rooms import each other in a circle: {' -> '.join(error.args[1])}")


def test_the_walker_sees_what_it_should(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("import a.b\nfrom rlvr_jax import types\nfrom rlvr_jax.config import Config\nfrom . import sibling\n"
                    "from ..rewards import pool\ndef f():\n    import late\nif TYPE_CHECKING:\n    import never\n")
    assert set(imports(("models", "x"), path)) == {
        "a.b", "rlvr_jax.types", "rlvr_jax.config.Config", "rlvr_jax.models.sibling", "rlvr_jax.rewards.pool", "late"}


@pytest.mark.parametrize("leaf", ["types", "config", "config_errors", "sharding", "host_random"])
def test_leaves_import_nothing_of_ours(leaf):
    assert rooms()[leaf] == ({"config_errors"} if leaf == "config" else set())


def test_kernels_import_jax_and_numpy_only():
    foreign = {}
    for parts, path in sources():
        if parts[0] == "kernels":
            roots = {name.split(".")[0] for name in imports(parts, path) if not name.startswith("rlvr_jax.kernels")}
            foreign[str(path.relative_to(ROOT))] = roots - {"jax", "jaxlib", "numpy"} - sys.stdlib_module_names
    assert not {path: names for path, names in foreign.items() if names}


def test_kernels_package_is_inert():
    """transformers looks for a package of this name and for its version: ours must be nothing to it."""
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body)
    assert (PACKAGE / "kernels").resolve() == ROOT / "kernels"
    spec = importlib.util.find_spec("rlvr_jax.kernels")
    assert spec is not None and spec.origin is not None


def test_the_bare_name_kernels_is_not_ours(tmp_path):
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec.origin if spec else '')"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert not found or not Path(found).resolve().is_relative_to(ROOT)


def test_transformers_survives_our_folder_on_its_path():
    """In a notebook or with ``python -m`` started in the checkout, the bare name 'kernels' *is* our folder."""
    code = ("import kernels; from transformers import AutoConfig, AutoTokenizer\n"
            "from transformers.utils import is_kernels_available; print(is_kernels_available())")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr[-2000:]


@pytest.mark.parametrize("room", WITHOUT_JAX)
def test_light_rooms_never_import_jax(room):
    """Not even through others: every module of the room is imported, then sys.modules is looked at."""
    modules = [f"rlvr_jax.{'.'.join(parts).removesuffix('.__init__')}" for parts, _ in sources()
               if parts[0] == room and "__main__" not in parts]
    assert modules, f"no room {room}"
    code = (f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
            "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax', 'transformers', 'torch')][:3])")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr[-2000:]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["preflight", "--help"], ["report", "--help"], ["verify", "--help"]])
def test_help_does_not_pay_for_heavy_imports(arguments):
    code = ("import sys\nfrom rlvr_jax.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
            "heavy = ('jax', 'transformers', 'optax', 'orbax', 'grain', 'matplotlib', 'torch', 'tensorboard', 'math_verify', 'sympy')\n"
            "print('HEAVY', sorted({m.split('.')[0] for m in sys.modules} & set(heavy)))")
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "usage: rlvr-jax" in run.stdout
    assert run.stdout.splitlines()[-1] == "HEAVY []"


def test_top_level_is_fixed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = {name.split("/")[0] for name in listed.stdout.splitlines()}
    found = {name for name in tracked if not name.startswith(".")}
    assert found <= TOP_LEVEL and found >= TOP_LEVEL - {"tpu_scripts"}  # git tracks no empty folder


def test_a_file_in_folders_without_init_is_found_and_nothing_is_imported(tmp_path, monkeypatch):
    folder = tmp_path / "outer_of_mine" / "inner"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    found = find("outer_of_mine.inner.mine")
    assert found is not None and found.origin == str(folder / "mine.py") and find("outer_of_mine.inner.other") is None
    assert "outer_of_mine" not in sys.modules
