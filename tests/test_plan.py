"""``plan``: the reader of compiled programs, the arithmetic, and the recipes it is for."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from rlvr_jax import config as C
from rlvr_jax.models import known
from rlvr_jax.models.decoder import DecoderConfig, abstract_params, forward, param_axes
from rlvr_jax.plan import estimate, hlo, memory, programs, run, sweep, targets
from rlvr_jax.sharding import check_divides, make_mesh, named, shardings

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RECIPES = sorted(p.relative_to(CONFIGS).as_posix() for folder in ("dataflex", "popo", "single_gpu") for p in (CONFIGS / folder).glob("*.yaml")
                 if "rlvr-jax plan" in p.read_text())
TINY = DecoderConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)

PROGRAM = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,4]) -> f32[4,4] {
  %input = f32[8,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[8,4]{1,0:T(8,128)} all-reduce(%input), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %part = f32[4,4] dynamic-slice(%all-reduce.1), dynamic_slice_sizes={4,4}
}

%condition (c: (s32[], f32[4,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6), metadata={stack_frame_id=1}
  %c = (s32[]{:T(128)}, f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%traced (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (c: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %kernel = f32[4,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":
"metadata":"{\\"block\\": 512}"
}}, metadata={op_name="jit(f)"}
  %gathered = (bf16[4,4]{1,0}, bf16[16,4]{1,0:T(8,128)(2,1)}) all-gather-start(%y), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  %done = bf16[16,4]{1,0} all-gather-done(%gathered)
  ROOT %scattered = f32[4,4]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
}

%outer (c: (s32[], s32[])) -> (s32[], s32[]) {
  %loop = (s32[], f32[4,4]) while(%t), condition=%condition, body=%body
  %moved = (s32[8]{0}, s32[8]{0}, u32[], u32[]) collective-permute-start(%s), channel_id=3, source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %outermost = (s32[], s32[]) while(%t), condition=%traced, body=%outer
  %sums = (f32[3]{0}, f32[5]{0}) all-reduce(%a, %b), channel_id=4, replica_groups=mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_1'}, to_apply=%add
  %parts = ((f32[8,4]{1,0}, f32[16]{0}), (f32[2,4]{1,0}, f32[4]{0})) reduce-scatter-start(%a, %b), channel_id=6, replica_groups={{0,1,2,3}}, to_apply=%add
  %alone = f32[3]{0} all-reduce(%a), channel_id=5, replica_groups={{0},{1},{2},{3}}, to_apply=%add
}
"""


def test_every_collective_is_found_once_and_as_often_as_its_loops_turn():
    found, loops = hlo.collectives(PROGRAM, (10,), 4)
    assert {(c.kind, c.devices, c.bytes, c.times) for c in found} == {
        ("reduce-scatter", 2, 8 * 4 * 4 // 2, 60), ("all-gather", 4, 16 * 4 * 2 * 3 // 4, 60), ("collective-permute", 2, 8 * 4, 10),
        ("reduce-scatter", 4, (8 * 4 + 16) * 4 * 3 // 4, 1), ("all-reduce", 2, 8 * 4, 1)}  # half of twice 8 floats; a group of one is none
    assert loops == [hlo.Loop("outer", 10)]
    assert hlo.total(found) == {"all-gather": 5760, "all-reduce": 32, "reduce-scatter": 3984, "all-to-all": 0, "collective-permute": 320}


@pytest.mark.parametrize(("groups", "size"), [
    ("{{0,1,2},{3,4,5}}", 3), ("[16,4]<=[64]", 4), ("[2,32]<=[4,16]T(1,0)", 32), ("mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 8), ("{}", 64),
    ("mesh['axis_0'=2,'axis_1'=8], device_ids=([8,2]T(1,0)) {'axis_0','axis_1'}", 16), ("mesh['a'=16] {'a':(2)4}", 4)])
def test_groups_in_every_notation(groups, size):
    assert hlo._group_size(f"%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true", 64) == size


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.collectives("HloModule x\n", ())


def test_a_real_program_says_what_it_was_written_to_say():
    """Four devices: three turns of a gather, a scatter and a sum, compiled here."""
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])

    def step(x, _):
        whole = lax.all_gather(x, "fsdp", tiled=True)
        part = lax.psum_scatter(whole * 2, "fsdp", tiled=True)
        return part + lax.psum(x, "fsdp"), None

    run = jax.shard_map(lambda x: lax.scan(step, x, None, length=3)[0], mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    text = jax.jit(run).lower(jax.ShapeDtypeStruct((64, 128), jnp.float32)).compile().as_text()
    size = 64 * 128 * 4
    found = hlo.total(hlo.collectives(text, (), 4)[0])
    assert found["all-gather"] == 3 * size * 3 // 4 and found["reduce-scatter"] == 3 * size * 3 // 4
    assert found["all-reduce"] == 3 * 2 * (size // 4) * 3 // 4


def test_chips_that_share_a_layer_sum_its_gradient_twice_not_five_times():
    """Forward two sums over ``tensor`` (heads, feed-forward), backward two: of all queries, keys and values, and of gate and up."""
    mesh, rows = make_mesh(tensor=2, devices=jax.devices()[:2]), (2, 16)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract_params(TINY), shardings(mesh, param_axes(TINY)))
    ints = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=named(mesh, "batch", None))
    loss = lambda params, tokens, position: jnp.sum(forward(params, TINY, tokens, position)[0] ** 2)  # noqa: E731
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).lower(params, ints, ints).compile().as_text()
    whole = rows[0] * rows[1] * TINY.hidden_size * 4
    summed = sum(c.bytes * c.times for c in hlo.collectives(text, (), 2)[0] if c.kind == "all-reduce")
    embedding = 1  # looked up in halves
    assert summed // whole == 4 * TINY.num_layers + embedding


@pytest.mark.parametrize(("name", "parameters"), [
    ("Qwen/Qwen2.5-0.5B", 494_032_768), ("Qwen/Qwen2.5-1.5B", 1_543_714_304), ("Qwen/Qwen2.5-3B", 3_085_938_688), ("Qwen/Qwen2.5-7B", 7_615_616_512),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248)])
def test_known_shapes_have_the_published_number_of_parameters(name, parameters, monkeypatch):
    monkeypatch.setattr(known, "_cached_config", lambda _: None)
    model, ends = known.shape_of(name)
    assert estimate.parameters(model) == parameters == sum(x.size for x in jax.tree.leaves(abstract_params(model)))
    assert ends and all(e < model.vocab_size for e in ends)


def test_a_model_of_the_hub_is_asked_for_and_its_absence_told_in_one_line(monkeypatch, tmp_path):
    import huggingface_hub

    assert known.is_hub_id("Qwen/Qwen2.5-7B") and not any(map(known.is_hub_id, ("/models/x", "./a/b", "embedded", "a/b/c", "$M/x", str(tmp_path))))
    def offline(*args, **kw):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(known.ModelError, match=r"^'a/b' is no folder, not in the Hugging Face cache, and cannot be downloaded \(no route\); [^\n]*$"):
        known.download("a/b")
    monkeypatch.setattr(known, "_cached_config", lambda _: None)
    with pytest.raises(known.ModelError, match=r"shape of 'a/b' is not known here[^\n]*Qwen2.5-7B"):
        known.shape_of("a/b")


def test_flops_by_hand():
    weights = 2 * 32 * (8 * 2 * (4 + 2) + 3 * 64)
    assert estimate.layer_weights(TINY) == weights
    # 3 rows of 10 tokens: two a weight and token, both attention products over half a square, logits of 4 tokens a row
    assert estimate.forward_flops(TINY, 3, 10, 4) == 3 * (2 * weights * 10 + 2 * (2 * 2 * 4 * 8 * 10 * 10 / 2) + 2 * 96 * 32 * 4)
    config = a_config(model={"path": "embedded", "remat": "full"}, algorithm={"kl_coef": 0.1})
    once = estimate.forward_flops(TINY, 16, 16, 8)
    assert estimate.update_flops(config, TINY) == (4 * once, 4 * once + estimate.forward_flops(TINY, 16, 16, 0))


def a_config(**sections):
    tree = {"data": {"max_prompt_length": 8}, "rollout": {"samples_per_prompt": 4, "max_new_tokens": 8, "slots": 16},
            "train": {"prompts_per_step": 4, "micro_batch": 4}}
    return C.validate(tree | sections)


def test_phases_add_up_what_is_there_at_the_same_time():
    held = memory.Held(parameters=10, optimizer=20, optimizer_on_host=40, reference=5, sampler_weights=7, cache=100, smaller_cache=50, prompts=30, prompt_batch=3)
    sizes = {"update": memory.Sizes(40, 2, 60), "prefill": memory.Sizes(0, 4, 25), "decode": memory.Sizes(0, 1, 8)}
    assert memory.phases(held, sizes) == {"update": 102, "prefill": 42 + 30 + 4 + 25, "decode": 42 + 100 + 50}
    assert memory.phases(held, {"decode": memory.Sizes(0, 1, 80)}) == {"decode": 42 + 100 + 3 + 81}


def test_the_suggested_micro_batch_uses_what_is_free_and_no_more():
    config = a_config(mesh={"fsdp": 4}, train={"prompts_per_step": 16, "micro_batch": 8})
    row = memory.activations(config, TINY, 1.0, 1)
    assert memory.suggest_micro_batch(config, TINY, 4, 1, 0.5 * row) == 8
    assert memory.suggest_micro_batch(config, TINY, 4, 1, 2.1 * row) == 16
    assert memory.suggest_micro_batch(config, TINY, 4, 1, -1.0 * row) == 4
    assert memory.suggest_micro_batch(config, TINY, 4, 1, -2.0 * row) is None
    assert memory.suggest_micro_batch(config, TINY, 4, 1, 1e6 * row) == 64  # all rows at once


@pytest.mark.parametrize(("topology", "says"), [
    ("v5e", "expected CHIP:SHAPE"), ("v9:2x2", "with a chip of v5e"), ("v5p-30", r"no such slice; expected v5p-\{8,16,32"), ("h100-8", "as h100:8"),
    ("v5p:4x4", "v5p has 3 dimensions"), ("h100:2x4", "h100 has 1 dimension,"), ("v5e:0x2", "v5e has 2")])
def test_a_topology_that_is_none_is_refused_in_one_line(topology, says):
    with pytest.raises(ValueError, match=says) as e:
        targets.target(topology)
    assert "\n" not in str(e.value)


def test_names_of_slices_count_cores_on_v5p_and_chips_elsewhere():
    assert targets._parse("v5p-32") == ("v5p", (2, 2, 4)) and targets._parse("v5e-64") == ("v5e", (8, 8)) and targets._parse("h200:1") == ("h200", (1,))
    for kind, sizes in targets.TPU_NAMES.items():
        for size, shape in sizes.items():
            assert functools.reduce(int.__mul__, map(int, shape.split("x"))) == (size // 2 if kind == "v5p" else size)


@pytest.mark.parametrize(("topology", "missing", "says"), [("v5e:2x2", "libtpu", r"pip install 'rlvr-jax\[tpu-aot\]'"), ("h100:1", "jax_plugins", "jax-cuda12-plugin==")])
def test_a_missing_compiler_names_what_to_install(topology, missing, says, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name.startswith(missing) else find(name, *a))
    with pytest.raises(RuntimeError, match=says):
        targets.target(topology)


def test_heads_that_do_not_divide_are_refused_before_anything_is_compiled():
    mesh = make_mesh(fsdp=2, tensor=4)
    with pytest.raises(ValueError, match=r"^mesh.tensor: 4 does not divide the model's 2 key heads; of 8 devices it may be 1, 2$"):
        check_divides(mesh, {"heads": ("heads", 8), "key heads": ("kv_heads", 2)})
    check_divides(mesh, {"heads": ("heads", 8), "width": ("embed", 6)})


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_the_programs_of_a_run_take_the_abstract_arrays(mesh):
    """Lowered only: every shape and tree is what the run's own functions expect."""
    config = a_config(mesh=mesh, algorithm={"kl_coef": 0.1}, rollout={"samples_per_prompt": 4, "max_new_tokens": 80, "slots": 16})
    where = make_mesh(*(mesh.get(k, 1) for k in ("data", "fsdp", "tensor")), devices=jax.devices()[:8 if mesh else 1])
    built = programs.build(config, TINY, (1,), where, "tpu")
    for name, lower in built.lower.items():
        assert "func.func public @main" in lower().as_text(), name
    shards, tensor = (4, 2) if mesh else (1, 1)
    assert built.slots == 16 and built.burst == 16 and built.ring == 80 and built.prefill_rows == 4
    assert programs.bytes_per_device(built.cache.k) == 2 * 16 * 2 * (32 + 80) * 8 * 4 // shards // tensor
    assert programs.bytes_per_device(built.smaller.k) == 2 * 16 * 2 * (32 + 40) * 8 * 4 // shards // tensor


def test_a_sweep_only_looks_at_meshes_that_divide():
    found = list(sweep.candidates(a_config(), TINY, 8))
    meshes = {(c.mesh.data, c.mesh.fsdp, c.mesh.tensor) for c in found}
    assert (1, 8, 1) in meshes and (2, 2, 2) in meshes and max(t for _, _, t in meshes) == 2  # two key heads
    assert all(d * f * t == 8 for d, f, t in meshes) and {c.train.micro_batch for c in found if c.mesh.tensor == 2} == {4, 8, 16}


@pytest.mark.parametrize(("recipe", "compiled"), [
    ("popo/r1_distill_qwen_1_5b_v5e16.yaml", 10.7), ("popo/qwen2_5_3b_countdown_v5e16.yaml", 10.1), ("dataflex/qwen2_5_7b_v5e64.yaml", 8.8)])
def test_what_a_sweep_compiles_is_chosen_by_sizes_near_the_compiler_s(recipe, compiled, monkeypatch):
    """GiB a device that these recipes took when they were compiled for v5e (configs/README.md)."""
    monkeypatch.setattr(known, "_cached_config", lambda _: None)
    config = C.load(CONFIGS / recipe)
    model, _ = known.shape_of(config.model.path)
    plain, moved = (sweep._arrays(c, model) / 2**30 for c in (config, C.load(CONFIGS / recipe, ["mesh.offload_optimizer=true"])))
    assert 0.8 * compiled < plain < 1.05 * compiled
    assert plain - moved == pytest.approx(8 * estimate.parameters(model) / (config.mesh.fsdp * config.mesh.tensor) / 2**30, rel=0.2)


def test_there_are_recipes():
    assert len(RECIPES) >= 11 and "dataflex/qwen2_5_7b_v5e64.yaml" in RECIPES


def lines_of(recipe):
    return [line[1:].strip() for line in (CONFIGS / recipe).read_text().splitlines() if line.startswith("#")]


def plans_of(recipe):
    """Topologies of the plan commands in a recipe's head."""
    return [found[1] for line in lines_of(recipe) if (found := re.fullmatch(rf"rlvr-jax plan configs/{re.escape(recipe)} --topology (\S+)", line))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_a_model_of_the_hub_and_no_place_of_ours(recipe):
    config = C.load(CONFIGS / recipe)
    assert config.model.path in known.KNOWN and plans_of(recipe)
    assert f"rlvr-jax train configs/{recipe}" in lines_of(recipe)
    assert all(d.path is None or not Path(d.path).is_absolute() for d in config.data.domains.values()) and config.data.root is None
    C.check_for_training(config)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.startswith("popo/")])
def test_the_arms_in_a_recipe_are_configurations(recipe):
    arms = dict(re.fullmatch(r"(grpo|dapo|mopps|arpo|popo):(.*)", line).groups() for line in lines_of(recipe) if re.match(r"(grpo|dapo|mopps|arpo|popo):", line))
    assert list(arms) == ["grpo", "dapo", "mopps", "arpo", "popo"]
    loaded = {name: C.load(CONFIGS / recipe, changes.split()) for name, changes in arms.items()}
    assert loaded["popo"].replay.kind == "popo" and loaded["arpo"].replay.kind == "arpo" and loaded["grpo"].replay is None
    assert loaded["dapo"].dynamic_sampling is not None and loaded["mopps"].data.prompts.kind == "mopps"


def test_the_command_says_in_one_line_what_is_wrong():
    done = subprocess.run([sys.executable, "-m", "rlvr_jax.cli", "plan", str(CONFIGS / "quickstart.yaml"), "--topology", "v5e"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "expected CHIP:SHAPE" in done.stderr


@pytest.mark.parametrize("message, wanted", [
    ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm. Exceeded", {"used": 18.5 * 2**30}),
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (51.50G) exceeds available HBM (15.75G).", {"temporaries": 51.5 * 2**30}),
    ("INTERNAL: something else", None)])
def test_a_refusal_for_memory_is_told_from_others(message, wanted):
    assert run.refused(message) == wanted
