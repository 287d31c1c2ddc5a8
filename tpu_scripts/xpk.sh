#!/usr/bin/env bash
# tpu_scripts/xpk.sh [--dry-run]: the run as an xpk workload on a cluster that xpk has made.

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
line=$(quoted "${arguments[@]}")
# xpk restarts only after codes it is told: crashes and signals (1, 134, 137, 139, 143), a lost host (69), saved and stopped (75).
run xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" --workload="$RUN_NAME" --tpu-type="$ACCELERATOR" \
  --num-slices="$SLICES" --docker-image="$IMAGE" --max-restarts="$MAX_RESTARTS" --restart-on-exit-codes=1,69,75,134,137,139,143 \
  --termination-grace-period-seconds=600 \
  --command="export $(quoted "${settings[@]}"); rlvr-jax preflight $line && exec rlvr-jax train $line"
