"""Eight fake CPU devices and quick compilation, set once, before jax is imported anywhere."""

import atexit
import os
import shutil
import tempfile

from processes import QUICK

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
for _flag in ("--xla_force_host_platform_device_count=8", *QUICK.split()):
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
# The same program is compiled once for all tests of a run, in whichever process; thrown away at its end.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="rlvr-jax-tests-xla-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

# Real data and verifier cases live beside a developer's checkout; the package never reads them.
SHARED = Path(os.environ.get("RLVR_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data sets and cases; the test is skipped, with the reason, where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"no real data: {SHARED} is missing (set RLVR_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face folder: two layers of random weights (it knows nothing) and a tokenizer of 300 ids."""
    import jax

    from rlvr_jax.config import Sft
    from rlvr_jax.models import hf, scratch
    from rlvr_jax.models.decoder import init_params

    folder = tmp_path_factory.mktemp("tiny")
    shape = Sft(vocab_size=300, layers=2, width=32, ffn=64, heads=4, kv_heads=2)
    scratch.write_folder(folder / "shape", shape, ["12+34=46", "27+45=72"])
    cfg = hf.load_config(folder / "shape")
    return hf.export(folder / "model", init_params(cfg, jax.random.key(0)), cfg, source_folder=folder / "shape")
