#!/usr/bin/env bash
# tpu_scripts/gke.sh [--dry-run]: the run as a JobSet on a GKE cluster; --dry-run prints the manifest and the command.
# Needs the JobSet controller, a TPU node pool of this shape, and an image (tpu_scripts/Dockerfile).

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ARGUMENTS=$(json_list "${arguments[@]}")
export ARGUMENTS COMPILATION_CACHE="$BUCKET/xla_cache" SPOT_SELECTOR="# not spot"
[[ $CAPACITY != spot ]] || SPOT_SELECTOR='cloud.google.com/gke-spot: "true"'
manifest=$(render "$here/jobset.yaml")
if [[ -n $dry_run ]]; then
  printf '%s\n' "$manifest"
  run kubectl apply -f -
else
  kubectl apply -f - <<<"$manifest"
fi
