#!/usr/bin/env bash
# tpu_scripts/stop.sh [--delete] [--dry-run]: the run saves and ends; with --delete the machines are given back too.

flags="--delete"
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

stopped=0
on_all_hosts 'bash rlvr_jax/tpu_scripts/host.sh --stop' || stopped=$?
if has --delete; then
  run gcloud compute tpus queued-resources delete "$RUN_NAME" "${place[@]}" --force --quiet
else
  exit "$stopped"
fi
