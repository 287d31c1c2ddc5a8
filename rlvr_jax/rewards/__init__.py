"""Verifiable rewards: one verdict per response, computed in worker processes. No jax in this room."""

from rlvr_jax.rewards.jsonl import verify_file
from rlvr_jax.rewards.pool import Job, Pool
from rlvr_jax.rewards.registry import check, combine, verify
from rlvr_jax.rewards.verdict import Verdict

__all__ = ["Job", "Pool", "Verdict", "check", "combine", "verify", "verify_file"]
