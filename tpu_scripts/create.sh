#!/usr/bin/env bash
# tpu_scripts/create.sh [--dry-run]: asks for the TPU slices of pod.env as a queued resource named RUN_NAME.

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

options=(--accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME")
if ((SLICES == 1)); then options+=(--node-id="$RUN_NAME"); else options+=(--node-count="$SLICES" --node-prefix="$RUN_NAME"); fi
case $CAPACITY in
  spot) options+=(--spot) ;;
  reserved) options+=(--reserved) ;;
esac
[[ -z ${SERVICE_ACCOUNT:-} ]] || options+=(--service-account="$SERVICE_ACCOUNT")
[[ -z ${NETWORK:-} ]] || options+=(--network="$NETWORK")
[[ -z ${SUBNETWORK:-} ]] || options+=(--subnetwork="$SUBNETWORK")
run gcloud compute tpus queued-resources create "$RUN_NAME" "${place[@]}" "${options[@]}"
