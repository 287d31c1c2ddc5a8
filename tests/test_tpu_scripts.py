"""The launch scripts: what they would execute, word for word, and what the babysitter does for each way a run can end."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tpu_scripts"
GOLDEN = Path(__file__).parent / "golden_tpu_scripts"
PODS = {
    "single": {},
    "multi": {"RUN_NAME": "qwen", "CONFIG": "configs/a.yaml", "OVERRIDES": '"train.steps=5 strategies=[difffilter]"', "ACCELERATOR": "v5p-32", "RUNTIME": "v2-alpha-tpuv5",
              "SLICES": "2", "CAPACITY": "reserved", "SERVICE_ACCOUNT": "me@p.iam", "NETWORK": "net", "SUBNETWORK": "sub", "RLVR_DATA": "gs://my-bucket/data",
              "GKE_ACCELERATOR": "tpu-v5p-slice", "TOPOLOGY": "2x2x4"},
}


def env_file(folder, **changes):
    lines = (SCRIPTS / "pod.env").read_text().splitlines()
    keys = {line.partition("=")[0] for line in lines}
    assert changes.keys() <= keys
    out = [f"{k}={changes[k]}" if (k := line.partition("=")[0]) in changes else line for line in lines]
    path = folder / "my.env"
    path.write_text("\n".join(out) + "\n")
    return path


def call(script, *arguments, env, **more):
    clean = {k: v for k, v in os.environ.items() if k not in ("DRY_RUN", "TMPDIR")}
    return subprocess.run([SCRIPTS / script, *arguments], env={**clean, "ENV_FILE": str(env), **more}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize("script", ["create.sh", "setup.sh", "run.sh", "status.sh", "stop.sh", "stop.sh --delete", "babysit.sh", "gke.sh", "xpk.sh"])
def test_dry_run_prints_what_would_be_executed(tmp_path, script, pod):
    """A change of a script shows here; after looking at it: RLVR_GOLDEN=write pytest tests/test_tpu_scripts.py."""
    name, *arguments = script.split()
    done = call(name, *arguments, "--dry-run", env=env_file(tmp_path, **PODS[pod]))
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace(str(ROOT), "ROOT")
    golden = GOLDEN / f"{pod}_{script.replace('.sh', '').replace(' --', '_')}.txt"
    if os.environ.get("RLVR_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(printed)
    assert printed == golden.read_text()


def test_every_host_gets_the_same_command_everywhere(tmp_path):
    """gcloud, GKE and xpk start the same: the arguments of rlvr-jax differ in nothing."""
    env = env_file(tmp_path, **PODS["multi"])
    expected = ["configs/a.yaml", "run_dir=gs://my-bucket/rlvr/runs/qwen", "train.step_limit_seconds=1800", "train.steps=5", "strategies=[difffilter]", "--num-processes", "8"]
    words = " ".join(f"'{w}'" if "[" in w else w for w in expected)
    ssh = call("run.sh", "--dry-run", env=env).stdout.replace("'\\''", "'")
    assert ssh.count(f"host.sh {words}") == 2  # one line for each slice
    assert call("xpk.sh", "--dry-run", env=env).stdout.replace("'\\''", "'").count(words) == 2  # preflight and train
    manifest = call("gke.sh", "--dry-run", env=env).stdout.partition("kubectl")[0]
    job = yaml.safe_load(manifest)["spec"]
    container = job["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == expected and container["command"][2] == 'rlvr-jax preflight "$@" && exec rlvr-jax train "$@"'


def test_manifests_are_whole(tmp_path):
    for pod, spot in (("single", True), ("multi", False)):
        manifest = yaml.safe_load(call("gke.sh", "--dry-run", env=env_file(tmp_path, **PODS[pod])).stdout.partition("kubectl")[0])
        template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert ("cloud.google.com/gke-spot" in template["template"]["spec"]["nodeSelector"]) == spot
        assert template["backoffLimit"] == 0 and manifest["spec"]["failurePolicy"]["maxRestarts"] == 20
        assert template["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    sky = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [69, 75]
    names = {line.partition("=")[0] for line in (SCRIPTS / "pod.env").read_text().splitlines() if "=" in line and not line.startswith("#")}
    assert sky["envs"].keys() <= names  # --env-file fills all of them


@pytest.mark.parametrize("changes, words", [({"RUN_NAME": "My_Run"}, "RUN_NAME 'My_Run'"), ({"BUCKET": "/tmp/x"}, "BUCKET '/tmp/x'"),
                                            ({"CAPACITY": "cheap"}, "CAPACITY 'cheap'"), ({"ZONE": ""}, "ZONE is not set")])
def test_a_wrong_env_file_is_refused(tmp_path, changes, words):
    done = call("create.sh", "--dry-run", env=env_file(tmp_path, **changes))
    assert done.returncode == 2 and words in done.stderr and done.stdout == "" and done.stderr.count("\n") == 1


def test_unknown_arguments_are_refused_and_help_is_there(tmp_path):
    env = env_file(tmp_path)
    assert call("create.sh", "--delete", env=env).returncode == 2
    for script in SCRIPTS.glob("*.sh"):
        if script.name not in ("lib.sh", "host.sh"):
            assert call(script.name, "--help", env=env).stdout.startswith(f"tpu_scripts/{script.name}")


def test_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "-x", *sorted(map(str, SCRIPTS.glob("*.sh")))], cwd=SCRIPTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


GCLOUD = """#!/usr/bin/env bash
# A cloud of two files: state (of the queued resource) and codes (exit codes of the runs to come).
echo "$*" >>"$CLOUD/calls"
case "$*" in
  *"queued-resources describe"*) cat "$CLOUD/state" 2>/dev/null ;;
  *"queued-resources create"*) echo ACTIVE >"$CLOUD/state" ;;
  *"queued-resources delete"*) rm -f "$CLOUD/state" ;;
  *host.sh*)
    read -r code <"$CLOUD/codes"; sed -i 1d "$CLOUD/codes"
    [[ $code != preempted ]] || { echo SUSPENDED >"$CLOUD/state"; exit 255; }
    exit "$code" ;;
esac
"""


def babysit(tmp_path, *codes, restarts=3):
    cloud = tmp_path / "cloud"
    cloud.mkdir()
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)
    (cloud / "codes").write_text("".join(f"{c}\n" for c in codes))
    env = env_file(tmp_path, MAX_RESTARTS=str(restarts))
    done = call("babysit.sh", env=env, CLOUD=str(cloud), POLL_SECONDS="0", PATH=f"{tmp_path}:{os.environ['PATH']}", TMPDIR=str(tmp_path))
    calls = (cloud / "calls").read_text().splitlines()
    return done, [("create" if "create" in c else "delete" if "delete" in c else "setup" if " scp " in c else "run") for c in calls
                  if "describe" not in c and "uv pip" not in c]


@pytest.mark.parametrize("codes, restarts, end, calls", [
    ([0], 3, 0, "create setup run"),
    ([75, 69, 137, 0], 3, 0, "create setup run run run run"),
    ([2], 3, 2, "create setup run"),  # a person must mend it: no restart
    ([75, 75, 75], 1, 75, "create setup run run"),  # bounded
    (["preempted", 0], 3, 0, "create setup run delete create setup run"),
])
def test_babysit_acts_by_exit_code(tmp_path, codes, restarts, end, calls):
    done, made = babysit(tmp_path, *codes, restarts=restarts)
    assert done.returncode == end, done.stderr
    assert made == calls.split()


RLVR = """#!/usr/bin/env bash
echo "$1" >>"$HOME/calls"
[[ $1 == train ]] || exit 0
trap 'echo saved >>"$HOME/calls"; exit 75' TERM
echo training
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""


@pytest.fixture
def host(tmp_path):
    (tmp_path / "rlvr-jax").write_text(RLVR)
    (tmp_path / "rlvr-jax").chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "GRACE_SECONDS": "20"}
    yield tmp_path, lambda *a: subprocess.Popen(["bash", str(SCRIPTS / "host.sh"), *a], env=env, stdout=subprocess.PIPE, text=True)
    subprocess.run(["bash", str(SCRIPTS / "host.sh"), "--stop"], env=env)


def wait_for(path, text, seconds=60):
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text().split()[-len(text.split()):] == text.split()):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "nothing"
        time.sleep(0.05)


def test_a_host_stops_what_ran_before_and_passes_signals_on(host):
    home, start = host
    first = start("config.yaml")
    wait_for(home / "calls", "preflight train")
    second = start("config.yaml")  # a lost connection, and the run is started again
    assert first.wait(60) == 75
    wait_for(home / "calls", "preflight train saved preflight train")
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 75 and second.stdout.read().split()[0] == "training"
    assert (home / "calls").read_text().split()[-1] == "saved"


def test_stop_waits_until_it_has_saved(host):
    home, start = host
    run = start("config.yaml")
    wait_for(home / "calls", "preflight train")
    assert start("--stop").wait(60) == 0 and (home / "calls").read_text().split()[-1] == "saved" and run.wait(60) == 75


def test_the_json_of_arguments_is_json(tmp_path):
    text = call("gke.sh", "--dry-run", env=env_file(tmp_path)).stdout
    assert json.loads(next(line for line in text.splitlines() if "args:" in line).partition("args:")[2])[0] == "configs/quickstart.yaml"
