"""Loss kernels; imported as rlvr_jax.kernels."""
