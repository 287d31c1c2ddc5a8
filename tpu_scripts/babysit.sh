#!/usr/bin/env bash
# tpu_scripts/babysit.sh [--dry-run]: create, setup and run until the run is finished; safe to start again at any time.
# Machines that were preempted are asked for anew. Ends with 0 when the run has finished, with 2 when a person must mend something,
# with the last code after MAX_RESTARTS restarts.

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

wait_seconds=${POLL_SECONDS:-60}
describe=(gcloud compute tpus queued-resources describe "$RUN_NAME" "${place[@]}" --format='value(state.state)')
if [[ -n $dry_run ]]; then
  echo "# as if there were no machines yet; the last command is repeated at most $MAX_RESTARTS times, until its exit code is 0 or 2"
  run "${describe[@]}"
  for part in create setup run; do DRY_RUN=1 "$here/$part.sh"; done
  exit 0
fi

state() { "${describe[@]}" 2>/dev/null || true; }

say() { echo "babysit: $(date -u +%FT%TZ) $*" >&2; }

machines() { # until all slices are there; 0 = they are the ones that were there before, 1 = new ones
  local now new=0
  while true; do
    now=$(state)
    case $now in
      ACTIVE) return "$new" ;;
      '') say "asking for $SLICES x $ACCELERATOR"; "$here/create.sh" || say "the request was refused"; new=1 ;;
      SUSPENDING | SUSPENDED | FAILED)
        say "machines are $now: giving them back"
        gcloud compute tpus queued-resources delete "$RUN_NAME" "${place[@]}" --force --quiet || true
        new=1 ;;
      *) say "machines are $now" ; new=1 ;;
    esac
    sleep "$wait_seconds"
  done
}

ready=
for ((start = 0; ; start++)); do
  machines || ready=
  code=0
  if [[ -z $ready ]]; then "$here/setup.sh" || code=$?; fi
  if ((code == 0)); then
    ready=1
    "$here/run.sh" || code=$?
    case $code in
      0) say "finished"; exit 0 ;;
      2) say "something must be mended (exit code 2): see the log above"; exit 2 ;;
    esac
  fi
  if ((start >= MAX_RESTARTS)); then say "exit code $code, and $MAX_RESTARTS restarts are used up"; exit "$code"; fi
  say "exit code $code: restart $((start + 1)) of $MAX_RESTARTS"
  sleep "$wait_seconds"
done
