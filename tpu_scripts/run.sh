#!/usr/bin/env bash
# tpu_scripts/run.sh [--dry-run]: preflight and training, the same command on every host, in the foreground.
# Its exit code is that of the first host that failed: 0 finished, 75 stopped after saving, 69 a host was lost or stuck, 2 something
# to mend. What an earlier start left running is stopped first; the run goes on from its last checkpoint.

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

on_all_hosts "cd rlvr_jax && PATH=\$HOME/rlvr_jax_env/bin:\$PATH $(quoted "${settings[@]}") bash tpu_scripts/host.sh $(quoted "${arguments[@]}")"
