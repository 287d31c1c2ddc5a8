"""``rlvr-jax plan``: does this config fit that pod or card, and what would a step cost? Answered by compiling the run's own programs."""
