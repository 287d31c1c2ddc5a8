"""Prompts: files and generated tasks, split into training and evaluation, mixed by domain."""

from rlvr_jax.data.dataset import Dataset, build, check, pairs
from rlvr_jax.data.rows import DataError, Row, occurrences

__all__ = ["DataError", "Dataset", "Row", "build", "check", "occurrences", "pairs"]
