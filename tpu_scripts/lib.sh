# shellcheck shell=bash
# What all scripts share: the env file, --dry-run, and the one command that every host runs.

# shellcheck disable=SC2034 # used by the scripts that source this one
set -euo pipefail
fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")

dry_run=${DRY_RUN:-}
given=" "
for argument in "$@"; do
  case $argument in
    --dry-run) dry_run=1 ;;
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *)
      [[ " ${flags:-} " == *" $argument "* ]] || fail "unknown argument '$argument'; expected --dry-run${flags:+ or $flags}"
      given+="$argument " ;;
  esac
done

has() { [[ $given == *" $1 "* ]]; }

env_file=${ENV_FILE:-$here/pod.env}
[[ -r $env_file ]] || fail "env file '$env_file' cannot be read; copy tpu_scripts/pod.env and set ENV_FILE"
set -a
# shellcheck source=pod.env
source "$env_file"
set +a
for name in RUN_NAME CONFIG BUCKET PROJECT ZONE ACCELERATOR RUNTIME SLICES HOSTS_PER_SLICE CAPACITY MAX_RESTARTS STEP_LIMIT_SECONDS; do
  [[ -n ${!name:-} ]] || fail "$name is not set in $env_file"
done
[[ $RUN_NAME =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] || fail "RUN_NAME '$RUN_NAME': machines are called so: lower-case letters, digits and '-', at most 40, a letter first"
[[ $BUCKET == gs://* ]] || fail "BUCKET '$BUCKET': expected gs://BUCKET or gs://BUCKET/FOLDER"
[[ $CAPACITY =~ ^(spot|on-demand|reserved)$ ]] || fail "CAPACITY '$CAPACITY': expected spot, on-demand or reserved"

# Arguments of rlvr-jax, the same on every host and at every start. OVERRIDES is split at spaces, as YAML values without spaces are.
read -ra overrides <<<"${OVERRIDES:-}"
arguments=("$CONFIG" "run_dir=$BUCKET/runs/$RUN_NAME" "train.step_limit_seconds=$STEP_LIMIT_SECONDS" ${overrides[@]+"${overrides[@]}"}
  --num-processes "$((SLICES * HOSTS_PER_SLICE))")
# Environment of every host: compiled programs are kept in the bucket, so a restart does not compile again.
settings=("JAX_COMPILATION_CACHE_DIR=$BUCKET/xla_cache" "RLVR_DATA=${RLVR_DATA:-}")

run() { # prints the command, ready to paste, under --dry-run; else executes it
  if [[ -n $dry_run ]]; then
    printf '%s\n' "$(quoted "$@")"
  else
    "$@"
  fi
}

quoted() { # words as a shell reads them back; plain words stay plain
  local word out=()
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./~^-]+$ ]]; then out+=("$word"); else out+=("'${word//\'/\'\\\'\'}'"); fi
  done
  echo "${out[*]}"
}

nodes() { # names of the TPU VMs: one for each slice
  if ((SLICES == 1)); then echo "$RUN_NAME"; else seq -f "$RUN_NAME-%.0f" 0 "$((SLICES - 1))"; fi
}

place=(--project="$PROJECT" --zone="$ZONE")

on_all_hosts() { # on_all_hosts COMMAND: on every host of every slice at once; the first exit code that is not 0
  local node pids=() code=0 one
  for node in $(nodes); do
    if [[ -n $dry_run ]]; then
      run gcloud compute tpus tpu-vm ssh "$node" "${place[@]}" --worker=all --command="$1"
    else
      gcloud compute tpus tpu-vm ssh "$node" "${place[@]}" --worker=all --command="$1" &
      pids+=($!)
    fi
  done
  for one in ${pids[@]+"${pids[@]}"}; do
    wait "$one" || { local got=$?; ((code)) || code=$got; }
  done
  return "$code"
}

render() { # render TEMPLATE: $NAMES of the environment filled in; a name that is not set is an error
  python3 -c 'import os, string, sys; sys.stdout.write(string.Template(open(sys.argv[1]).read()).substitute(os.environ))' "$1"
}

json_list() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }
