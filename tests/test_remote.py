"""Paths of buckets, through epath and fsspec, against a bucket in memory: what is read is copied once, what people read is kept there."""

import json
import sys

import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

from rlvr_jax import config as C
from rlvr_jax import parts, remote
from rlvr_jax.data import sources
from rlvr_jax.data.rows import DataError
from rlvr_jax.metrics import Writer, read_records
from rlvr_jax.run_folder import RunFolder, only_one

REGISTRY = sys.modules["fsspec.registry"]._registry  # fsspec.registry itself is a read-only view


class Bucket(MemoryFileSystem):
    """What gcsfs is to epath, in memory; a write can be made to fail."""

    protocol = ("gs", "gcs")
    store, pseudo_dirs = {}, [""]
    reads, broken = 0, False

    def __init__(self, *args, finalize_on_close=True, **kwargs):
        super().__init__(*args, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("gs://").removeprefix("gcs://").strip("/")

    def _open(self, path, mode="rb", **kwargs):
        if "r" in mode:
            Bucket.reads += 1
        elif Bucket.broken:
            raise OSError("503 the bucket is away")
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(REGISTRY, "gcs", Bucket)
    backend.fsspec_backend._get_filesystem.cache_clear()
    Bucket.store.clear()
    Bucket.pseudo_dirs[:] = [""]
    Bucket.reads, Bucket.broken = 0, False
    fs = Bucket()
    fs.makedirs("gs://b")
    yield fs
    backend.fsspec_backend._get_filesystem.cache_clear()


def put(fs, path, content):
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    with fs.open(path, "wb") as file:
        file.write(content)


@pytest.mark.parametrize("root, path, joined", [
    ("gs://b/data", "x.jsonl", "gs://b/data/x.jsonl"), ("gs://b/data/", "deep/x.jsonl", "gs://b/data/deep/x.jsonl"), ("/data", "x.jsonl", "/data/x.jsonl"),
    ("/data", "gs://b/x.jsonl", "gs://b/x.jsonl"), ("gs://b", "/abs/x.jsonl", "/abs/x.jsonl"), (".", "x.jsonl", "x.jsonl"),
])
def test_paths_start_at_the_root_wherever_it_is(root, path, joined):
    assert remote.join(root, path) == joined == sources.resolve(path, root)


def test_a_data_file_is_copied_once_and_again_when_it_changes(bucket):
    put(bucket, "gs://b/data/x.jsonl", b'{"prompt": "1+1=?", "answer": "2"}\n')
    path = sources.resolve("x.jsonl", "gs://b/data")
    for _ in range(3):
        assert [r.value["answer"] for r in sources.read(path)] == ["2"]
    assert Bucket.reads == 1
    put(bucket, "gs://b/data/x.jsonl", b'{"prompt": "1+1=?", "answer": "two"}\n')
    assert [r.value["answer"] for r in sources.read(path)] == ["two"] and Bucket.reads == 2
    with pytest.raises(DataError, match=r"gs://b/data/y\.jsonl' does not exist"):
        sources.read("gs://b/data/y.jsonl")


def test_a_model_in_a_bucket(bucket, tiny_model):
    for file in tiny_model.iterdir():
        put(bucket, f"gs://b/model/{file.name}", file.read_bytes())
    put(bucket, "gs://b/model/pytorch_model.bin", b"not wanted")
    config = C.validate({"model": {"path": "gs://b/model"}})
    folder = parts.model_folder(config)
    assert (folder / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    assert not (folder / "pytorch_model.bin").exists()
    read = Bucket.reads
    assert parts.model_folder(config) == folder and Bucket.reads == read
    with pytest.raises(C.ConfigError, match=r"no config\.json in 'gs://b/nothing'"):
        parts.model_folder(C.validate({"model": {"path": "gs://b/nothing"}}))


def test_a_run_folder_in_a_bucket_goes_on_from_another_machine(bucket, tmp_path, monkeypatch):
    uri = "gs://b/runs/one"
    with only_one(uri) as folder:
        with Writer(folder.local) as writer:
            for step in (1, 2, 3):
                writer.write(step, {"x": step})
                if step == 2:
                    folder.push()  # the checkpoint of step 2 follows; then the machine is lost
        lost = RunFolder(uri)
        monkeypatch.setattr(folder, "push", lambda: None)
    assert lost.local == folder.local
    put(bucket, f"{uri}/checkpoints/2/state", b"large")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    with only_one(uri) as folder:
        assert not (folder.local / "checkpoints").exists()
        with Writer(folder.local, resume_step=2) as writer:
            writer.write(3, {"x": 30})
        assert [r["x"] for r in read_records(folder.local / "metrics.jsonl")] == [1, 2, 30]
    rows = [json.loads(line) for line in bucket.cat("gs://b/runs/one/metrics.jsonl").splitlines()]
    assert [r["x"] for r in rows] == [1, 2, 30]
    names = {path.rpartition("/")[2] for path in bucket.find(uri)}
    assert ".lock" not in names and any("tfevents" in n for n in names)


def test_only_what_changed_is_sent_and_a_bucket_that_is_away_stops_nothing(bucket, caplog):
    with only_one("gs://b/runs/two") as folder:
        (folder.local / "a.txt").write_text("1")
        folder.push()
        bucket.rm("gs://b/runs/two/a.txt")
        folder.push()
        assert not bucket.exists("gs://b/runs/two/a.txt")  # it had been sent and is as it was
        (folder.local / "a.txt").write_text("22")
        Bucket.broken = True
        folder.push()
        assert "could not be brought up to date" in caplog.text and not bucket.exists("gs://b/runs/two/a.txt")
        Bucket.broken = False
    assert bucket.cat("gs://b/runs/two/a.txt") == b"22"


def test_one_process_holds_the_stand_in(bucket):
    with only_one("gs://b/runs/three"), pytest.raises(C.ConfigError, match="another process trains in gs://b/runs/three"), only_one("gs://b/runs/three"):
        pass
    with only_one("gs://b/runs/three"), only_one("gs://b/runs/three", writer=False) as other:
        assert other.uri == "gs://b/runs/three"


def test_the_missing_package_is_named(monkeypatch):
    backend.fsspec_backend._get_filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(OSError, match=r"gs://b/x.*pip install 'rlvr-jax\[gcs\]'"):
        remote.local_file("gs://b/x")
