#!/usr/bin/env bash
# tpu_scripts/status.sh [--dry-run]: state of the queued resource, and the last lines of the first host's log.

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

run gcloud compute tpus queued-resources describe "$RUN_NAME" "${place[@]}" --format='value(state.state)'
run gcloud compute tpus tpu-vm ssh "$(nodes | head -n 1)" "${place[@]}" --worker=0 --command='tail -n 20 rlvr_jax.log'
