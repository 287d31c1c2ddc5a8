#!/usr/bin/env bash
# tpu_scripts/setup.sh [--dry-run]: copies this checkout (what is committed) to every host and installs it there.

# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

archive=${TMPDIR:-/tmp}/rlvr_jax-$RUN_NAME.tar.gz
run git -C "$root" archive --format=tar.gz --prefix=rlvr_jax/ --output="$archive" HEAD
for node in $(nodes); do
  run gcloud compute tpus tpu-vm scp "$archive" "$node:rlvr_jax.tar.gz" "${place[@]}" --worker=all
done
# TPU images bring an old Python: uv brings the one we want. The folder is new each time, so no file of an older commit stays.
on_all_hosts "set -e; rm -rf rlvr_jax; tar -xzf rlvr_jax.tar.gz; command -v ~/.local/bin/uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh; \
~/.local/bin/uv venv -q --allow-existing --python ${PYTHON:-3.12} ~/rlvr_jax_env; ~/.local/bin/uv pip install -q --python ~/rlvr_jax_env/bin/python ./rlvr_jax'[tpu,gcs]'"
