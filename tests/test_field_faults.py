"""Faults seen in other RLVR trainers: which test holds each of them off here, and the tests that no other file has."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import config as C
from rlvr_jax import losses
from rlvr_jax.checkpoint import Checkpoints
from rlvr_jax.metrics import read_records
from rlvr_jax.models import hf
from rlvr_jax.state import weights_sha256
from rlvr_jax.step_metrics import rollout_metrics
from rlvr_jax.train import train
from rlvr_jax.types import Rollout, TrainState, response_mask

TESTS = Path(__file__).resolve().parent
ONE_PROCESS = "not here: one process per run, so no other host can hang or race it"
NO_ASYNC = "not here: rollout and update take turns, so no group is ever stale or discarded"

# The first reference of an entry -> the tests (file::function), or the reason why the part it belongs to is not here.
FAULTS: dict[str, list[str] | str] = {
    # Numerics, masks, filtered groups
    "trl #6369": ["test_losses::test_dropped_rows_leave_the_loss_of_the_kept_rows", "test_losses::test_everything_masked_is_zero_and_finite",
                  "test_update::test_dropped_rows_leave_the_denominator"],
    "unsloth-zoo PR #1262": ["test_metrics::test_an_all_masked_batch_gives_finite_metrics_only", "test_update::test_nothing_to_learn_is_a_defined_step"],
    "open-instruct PR #1660": ["test_update::test_nothing_to_learn_is_a_defined_step", "test_field_faults::test_a_constant_reward_ends_in_time_and_is_recorded"],
    "trl PR #7068": ["test_losses::test_dropped_rows_have_no_kl_and_no_entropy_gradient", "test_update::test_kl_pulls_towards_the_reference_and_not_from_dropped_rows"],
    "NeMo-RL PR #4158": ["test_advantages::test_one_odd_reward_keeps_all_eight", "test_advantages::test_equal_rewards_are_exactly_zero"],
    "trl PR #5775": ["test_advantages::test_unknown_rows_are_no_wrong_answers", "test_update::test_unknown_rows_teach_nothing_and_count_nothing"],
    "trl #2737": ["test_pool::test_errors_and_strange_results_are_counted_not_scored", "test_rewards::test_combine"],
    "trl #3015 (+PRs #5984 #6549 #6637)": ["test_losses::test_extreme_log_ratios_stay_finite"],
    "trl #2976": ["test_update::test_loss_is_zero_and_gradient_is_not_at_ratio_one", "test_losses::test_on_policy_the_loss_is_zero_and_the_gradient_is_not"],
    "tinker-cookbook PR #135": ["test_advantages::test_rloo_is_dr_grpo_scaled"],
    "Search-R1 #88": ["test_advantages::test_laws", "test_rollout::test_layout_lengths_and_end_tokens"],
    "trl #3021": ["test_update::test_any_micro_batch_gives_the_same_gradient"],
    "verl #5625 (PR #5641; older #906)": ["test_losses::test_gradients_do_not_depend_on_micro_batches"],
    "verl #3741": ["test_losses::test_gradients_do_not_depend_on_micro_batches", "test_update::test_any_micro_batch_gives_the_same_gradient"],
    "verl #7321": ["test_field_faults::test_the_denominator_is_never_implied", "test_update::test_skipped_rows_change_nothing"],
    "levanter #842": ["test_update::test_any_micro_batch_gives_the_same_gradient", "test_losses::test_gradients_do_not_depend_on_micro_batches"],
    "tunix #390": ["test_train::test_the_run_folder_holds_everything", "test_metrics::test_one_line_a_step_and_the_same_steps_in_tensorboard"],
    "trl PR #4976": ["test_field_faults::test_length_metrics_are_the_mask_sum"],
    "marin PR #1731": ["test_models::test_causal", "test_update::test_one_update_has_ratio_one_and_no_capped_weight",
                       "test_rollout::test_sampler_logprob_equals_teacher_forced_logprob"],
    "rasbt/reasoning-from-scratch PR #185 ; compose-rl #31": ["test_rollout::test_layout_lengths_and_end_tokens", "test_hf::test_several_eos"],
    # Rollout against trainer
    "miles PR #1345": ["test_rollout::test_sampler_logprob_equals_teacher_forced_logprob"],
    "vime #64": ["test_draw::test_sampled_frequencies_and_kept_set_match_the_exact_distribution", "test_rollout::test_without_truncation_behavior_is_logprob"],
    "maxtext PR #4016": ["test_models::test_a_row_is_the_same_alone_and_padded", "test_rollout::test_a_row_does_not_depend_on_its_batch"],
    "verl #1381": ["test_models::test_packed_segments_equal_rows_and_do_not_talk"],
    "trl #5312": ["test_rollout::test_new_weights_are_sampled_from_at_once"],
    "tunix PR #1962 (#874)": ["test_rollout::test_new_weights_are_sampled_from_at_once", "test_train::test_killed_and_started_again_is_the_same_run"],
    "ms-swift PR #10113": ["test_field_faults::test_resume_with_two_updates_per_batch", "test_draw::test_every_part_of_the_key_matters_and_nothing_else_does"],
    "prime-rl #1334 ; verl #6854 ; NeMo-RL #2821": ["test_hf::test_prefix_property_and_template_arguments"],
    "tunix #122": ["test_config::test_every_field_is_read_somewhere"],
    # Data, resume, checkpoints, export
    "tunix #2290": ["test_field_faults::test_resume_with_two_updates_per_batch"],
    "tunix #2288": ["test_data_stream::test_resume_in_a_new_process_continues_exactly"],
    "EasyR1 #57": ["test_data_stream::test_resume_in_a_new_process_continues_exactly", "test_train::test_killed_and_started_again_is_the_same_run"],
    "trl PR #5911": ["test_data_stream::test_a_lost_or_damaged_state_is_refused"],
    "torchtitan PR #3751": ["test_train::test_sigterm_saves_and_the_same_command_goes_on", "test_train::test_killed_and_started_again_is_the_same_run",
                            "test_update::test_a_gradient_that_is_not_finite_is_skipped_and_counted"],
    "orbax #605 ; orbax #2837": ["test_field_faults::test_a_failed_background_save_is_raised"],
    "maxtext #868": ["test_field_faults::test_a_failed_background_save_is_raised"],
    "maxtext #3003 ; EasyDeL #132 ; torchtune #1381 ; LlamaFactory PR #10832": ["test_hf::test_torch_parity_in_and_out", "test_cli::test_train_export_and_load_elsewhere"],
    "EasyR1 #338 ; Qwen-VL-Finetune #234": ["test_rewards::test_signature_is_checked_before_step_0", "test_data::test_a_wrong_column_stops_at_start_up_with_the_columns_found"],
    "trl PR #3459": ["test_field_faults::test_no_reward_is_a_clear_error"],
    # Verifiers
    "Math-Verify #50, #55, #11": ["test_pool::test_math_gives_the_same_verdict_in_a_thread", "test_rewards::test_every_public_case_is_right"],
    "verl PR #5635 ; trl PR #5281": ["test_pool::test_errors_and_strange_results_are_counted_not_scored"],
    "torchtitan PR #4681 ; compose-rl #97": ["test_rewards::test_attacks_are_wrong_quickly_and_run_nothing", "test_pool::test_every_verdict_in_order_around_hostile_rows"],
    "asuzukosi/post-training-experiments #6": ["test_rewards::test_our_table", "test_rewards::test_number_path_agrees_with_math_verify"],
    # Sampling loops, async, hosts, memory, compilation
    "DAPO #22": ["test_field_faults::test_a_constant_reward_ends_in_time_and_is_recorded"],
    "verl #876": ["test_train::test_prompts_follow_the_mix", "test_field_faults::test_resume_with_two_updates_per_batch"],
    "jax #38503": ONE_PROCESS,
    "trl PR #6913": "not here: the sampler reads the trainer's own arrays; there is no weight sync to fail",
    "marin #8955": NO_ASYNC,
    "marin PR #2350": ["test_field_faults::test_more_reward_workers_than_cores"],
    "maxtext PR #4409 ; SkyRL #891/#902/#1610 ; NeMo-RL #4222": ["test_update::test_memory_does_not_grow_with_tokens_times_vocabulary",
                                                                 "test_token_logprob::test_temporaries_do_not_grow_with_vocabulary_times_tokens"],
    "SkyRL PR #539": ["test_rollout::test_ragged_batches_compile_nothing",
                      "test_update::test_no_recompilation_when_the_live_share_changes"],
    "tunix #590 (PR #591 closed)": ["test_field_faults::test_accelerators_are_extras"],
}


def key(reference: str) -> str:
    """An entry's name: its text without '+' and with single spaces."""
    return " ".join(reference.split(" + ")[0].split())


def test_every_named_test_exists():
    for entry, tests in FAULTS.items():
        for name in [] if isinstance(tests, str) else tests:
            file, function = name.split("::")
            defined = {n.name for n in ast.parse((TESTS / f"{file}.py").read_text()).body if isinstance(n, ast.FunctionDef)}
            assert function in defined, f"{entry}: {name} does not exist"


def test_every_known_fault_is_in_the_table(shared):
    listed = [key(m) for m in re.findall(r"^- \[([^\]]+)\]", (shared / "FIELD_FAULTS.md").read_text(), re.MULTILINE)]
    assert len(listed) > 40 and sorted(listed) == sorted(FAULTS)


def test_the_denominator_is_never_implied():
    """[verl #7321] one scale, and whoever asks for it says what it is divided by: no second path by a default."""
    assert inspect.signature(losses.token_scale).parameters["counts"].default is inspect.Parameter.empty
    sources = "".join(p.read_text() for p in (TESTS.parent / "rlvr_jax").rglob("*.py") if p.name != "losses.py")
    assert sources.count("losses.token_scale(") == sources.count("losses.denominator_counts(") == 1


def test_length_metrics_are_the_mask_sum():
    """[trl PR #4976]"""
    length = np.array([1, 4, 2, 7], np.int32)
    start, zeros = np.array([3, 3, 1, 1], np.int32), np.zeros((4, 10), np.float32)
    rollout = Rollout(tokens=zeros.astype(np.int32), prompt_length=start, response_length=length, logprob=zeros, behavior_logprob=zeros, entropy=None,
                      truncated=length == 7, prompt_id=np.zeros(4, np.int32), domain=np.array([0, 0, 1, 1]), policy_step=np.zeros(4, np.int32))
    values = rollout_metrics(rollout, np.ones(4, np.float32), np.ones(4, bool), np.array([True, False, True, True]), ["a", "b"])
    mask = response_mask(start, length, 10)
    assert values["tokens/generated"] == int(mask.sum()) == 14 and values["response/length_mean"] == float(mask.sum(1).mean())
    assert values["response/truncated"] == values["verify/unknown_share"] == 0.25


def small(folder, model, **train_fields):
    return {"data": {"domains": {"sums": {"task": "arithmetic", "task_args": {"digits": [1, 1], "ops": "+"}},
                                 "more": {"task": "arithmetic", "task_args": {"digits": [2, 2], "ops": "-"}}}, "max_prompt_length": 32},
            "model": {"path": str(model)}, "run_dir": str(folder), "rollout": {"samples_per_prompt": 4, "max_new_tokens": 6}, "optimizer": {"learning_rate": 1e-3},
            "train": {"steps": 3, "prompts_per_step": 4, "micro_batch": 8, "save_every": 1, **train_fields}, "eval": {"prompts_per_domain": 0}}


def short_is_good(text: str, answer: str, **fields) -> float:
    return len(text) % 3 / 2


@pytest.mark.slow  # three runs, each compiling its own update
def test_resume_with_two_updates_per_batch(tmp_path, tiny_model):
    """[tunix #2290, ms-swift PR #10113] the position in the data counts prompts: neither samples nor optimizer steps."""
    whole = train(small(tmp_path / "whole", tiny_model, updates_per_batch=2), rewards=[short_is_good])
    first = train(small(tmp_path / "parts", tiny_model, updates_per_batch=2, max_seconds=1e-3), rewards=[short_is_good])
    assert first["steps"] == 1 and not first["finished"]
    parts = train(small(tmp_path / "parts", tiny_model, updates_per_batch=2), rewards=[short_is_good])
    assert parts["resumed_from_step"] == 1 and parts["weights_sha256"] == whole["weights_sha256"] != first["weights_sha256"]
    ids = [[(r["step"], r["prompt_ids"]) for r in read_records(tmp_path / run / "prompts.jsonl")] for run in ("whole", "parts")]
    assert ids[0] == ids[1] and [step for step, _ in ids[0]] == [1, 2, 3] and all(len(prompts) == 4 for _, prompts in ids[0])


def constant(text: str, answer: str, **fields) -> float:
    return 1.0


def test_a_constant_reward_ends_in_time_and_is_recorded(tmp_path, tiny_model):
    """[DAPO #22, open-instruct PR #1660] no endless resampling: every step ends, says that it was empty, and changes nothing."""
    summary = train(small(tmp_path / "run", tiny_model, steps=2), rewards=[constant])
    records = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["step"] > 0]
    assert summary["finished"] and [r["update/skipped_empty"] for r in records] == [1, 1] and [r["tokens/updated"] for r in records] == [0, 0]
    assert weights_sha256(hf.load_params(tiny_model, hf.load_config(tiny_model))) == summary["weights_sha256"]


def test_a_failed_background_save_is_raised(tmp_path):
    """[orbax #605, maxtext #868] one process needs no jax.distributed, and a save that fails later is not lost."""
    state = TrainState(step=jnp.int32(1), params={"x": jnp.arange(4.0)}, opt_state=(), strategy_state=())
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, state, {}, {"a": 1}, None)
    checkpoints.wait()
    restored = checkpoints.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state), {})
    assert restored is not None and restored[0].params["x"].tolist() == [0, 1, 2, 3] and restored[2] == {"a": 1} and not jax.distributed.is_initialized()
    folder = tmp_path / "checkpoints"
    folder.rename(tmp_path / "gone")
    folder.write_text("no folder any more")  # as on a disk that has failed; a superuser may write into read-only folders
    with pytest.raises((OSError, ValueError, RuntimeError)):
        checkpoints.save(2, state, {}, {"a": 2}, None)
        checkpoints.wait()


def test_no_reward_is_a_clear_error():
    """[trl PR #3459]"""
    with pytest.raises(C.ConfigError, match="rewards: a list of one-entry mappings"):
        C.load(None, ["rewards=[]"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_more_reward_workers_than_cores():
    """[marin PR #2350] workers reserve no cores: four of them get through on one."""
    code = ("import os, json; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]); from rlvr_jax.rewards import Job, Pool\n"
            "with Pool(4, preload=()) as pool: print(json.dumps([v.status for v in pool.score([Job('choice', '(A)', 'A')] * 12)]))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout) == ["ok"] * 12, done.stderr


def test_accelerators_are_extras():
    """[tunix #590] a plain install asks for jax without an accelerator; each accelerator is a choice."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    hard = " ".join(project["dependencies"])
    assert "jax[" not in hard and "libtpu" not in hard and "cuda" not in hard and "torch" not in hard
    for extra, wanted in {"cuda12": "jax[cuda12]", "cuda13": "jax[cuda13]", "tpu": "jax[tpu]"}.items():
        assert any(d.startswith(wanted) for d in project["optional-dependencies"][extra])
