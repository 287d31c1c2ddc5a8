"""RLVR in JAX: which data a model learns from, as small pure functions inside one sharded update."""
