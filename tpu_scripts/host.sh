#!/usr/bin/env bash
# tpu_scripts/host.sh ARGUMENTS of rlvr-jax: one host's part of run.sh. Ends what an earlier start left here, checks, trains.
# tpu_scripts/host.sh --stop: SIGTERM to what runs here; it saves and ends.

# What trains here survives a lost connection, in a session of its own; its number is in a file, so that nothing else is ever ended.
set -uo pipefail
pid_file=$HOME/.rlvr_jax.pid
log=$HOME/rlvr_jax.log
grace=${GRACE_SECONDS:-600}

alive() { [[ -r $pid_file ]] && kill -0 -- "-$(<"$pid_file")" 2>/dev/null; }

end() { # SIGTERM, then up to $grace seconds to save, then SIGKILL
  alive || return 0
  kill -TERM -- "-$(<"$pid_file")" 2>/dev/null
  for ((i = 0; i < grace * 10; i++)); do
    alive || return 0
    sleep 0.1
  done
  kill -KILL -- "-$(<"$pid_file")" 2>/dev/null
  sleep 1
}

end
if [[ ${1:-} == --stop ]]; then exit 0; fi

# shellcheck disable=SC2016 # "$@" is for the inner shell; exec, so that SIGTERM reaches the trainer itself
setsid bash -c 'rlvr-jax preflight "$@" && exec rlvr-jax train "$@"' rlvr-jax "$@" </dev/null >>"$log" 2>&1 &
pid=$!
echo "$pid" >"$pid_file"
tail -n 0 -F --pid="$pid" "$log" 2>/dev/null &
trap 'kill -TERM -- "-$pid" 2>/dev/null' TERM INT
code=0
wait "$pid" || code=$?
while kill -0 "$pid" 2>/dev/null; do # the trap ended the wait, not the process
  code=0
  wait "$pid" || code=$?
done
wait
exit "$code"
