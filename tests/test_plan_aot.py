"""Every recipe compiled for the hardware that it names. Minutes each: ``-m aot``."""

import importlib.util
import json

import pytest
from test_plan import CONFIGS, RECIPES, plans_of

from rlvr_jax import config as C
from rlvr_jax.plan.run import plan, shape
from rlvr_jax.plan.show import text
from rlvr_jax.plan.targets import CHIPS, _parse

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def needs_compiler(topology):
    module = {"tpu": "libtpu", "cuda": "jax_plugins.xla_cuda12"}[CHIPS[_parse(topology)[0]].platform]
    if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize(("recipe", "topology"), [(r, t) for r in RECIPES for t in plans_of(r)])
def test_a_recipe_fits(recipe, topology):
    needs_compiler(topology)
    config = C.load(CONFIGS / recipe)
    found = plan(config, topology, quick=True)
    assert found["fits"], text(found)
    assert set(found) >= {"fits", "gib_per_device", "hbm_gib", "collectives", "params", "prompt_length", "response_length", "tokens_per_step", "programs"}
    assert set(found["programs"]) == {"update", "prefill", "decode"} and json.loads(json.dumps(found)) == found
    assert 0 < found["gib_per_device"] <= found["usable_gib"] < found["hbm_gib"]
    if config.mesh.fsdp > 1:
        # Gradients leave as shares: what is summed whole over the rows' devices is norms, biases and counts. Not the head's: of its
        # psum_scatter a TPU's compiler makes an all-reduce and a slice, whichever axis is scattered, tried with effort and without.
        sent = [c for c in found["collectives"] if c["program"] == "update"]
        model = shape(config)[0]
        head = 4 * model.vocab_size // config.mesh.tensor * model.hidden_size
        whole = [c for c in sent if c["kind"] == "all-reduce" and c["devices"] == config.mesh.data * config.mesh.fsdp and c["bytes"] <= head]
        assert sum(c["bytes"] * c["times"] for c in whole) < 0.005 * sum(c["bytes"] * c["times"] for c in sent)


def test_more_of_the_same_chips_cost_no_more_each():
    """Weak scaling of the update, v5e 4x4 -> 16x16: data 1 -> 16 with as many tokens a chip. (Sampling 7B needs tensor 4 on this chip.)"""
    needs_compiler("v5e:4x4")
    recipe = CONFIGS / "dataflex/qwen2_5_7b_v5e64.yaml"
    small, large = (plan(C.load(recipe, [f"mesh.data={n}", "mesh.fsdp=16", "mesh.tensor=1", f"train.micro_batch={16 * n}", f"train.prompts_per_step={16 * n}"]),
                         topology, quick=True, only=("update",)) for n, topology in ((1, "v5e:4x4"), (16, "v5e:16x16")))
    for found in (small, large):
        print(found["topology"], {k: found["programs"]["update"][k] for k in ("gib", "sent_gib")})
    assert large["programs"]["update"]["gib"] <= 1.05 * small["programs"]["update"]["gib"]
    assert large["programs"]["update"]["sent_gib"] <= 1.15 * small["programs"]["update"]["sent_gib"]


def test_moments_on_the_host_are_not_in_the_device_s_memory():
    """The update brings them over: at its fullest it may hold as much as before, every other phase holds 8 bytes a parameter less."""
    needs_compiler("v5e:2x2")
    changes = ["mesh.fsdp=4", "train.micro_batch=4", "model.remat=full"]
    plain, moved = (plan(C.load(CONFIGS / "single_gpu/qwen2_5_0_5b_24gb.yaml", [*changes, *more]), "v5e:2x2", quick=True, only=("update",)) for more in ([], ["mesh.offload_optimizer=true"]))
    for found in (plain, moved):
        print({k: found["memory"][k] for k in ("parameters", "optimizer", "optimizer_on_host")}, found["programs"]["update"])
    assert moved["memory"]["optimizer"] < 0.001 and moved["memory"]["optimizer_on_host"] == plain["memory"]["optimizer"]
    freed = plain["programs"]["update"]["argument_gib"] - moved["programs"]["update"]["argument_gib"]
    assert freed == pytest.approx(moved["memory"]["optimizer_on_host"], rel=0.05)
    assert moved["programs"]["update"]["gib"] < plain["programs"]["update"]["gib"] + 0.05 * moved["memory"]["optimizer_on_host"]
    assert moved["host_copies_gib"] == pytest.approx(2 * moved["memory"]["optimizer_on_host"], abs=0.002) and "optimizer on the host" in text(moved)


def test_a_batch_too_large_is_told_with_how_much():
    needs_compiler("v5e:2x2")
    config = C.load(CONFIGS / "single_gpu/qwen2_5_0_5b_24gb.yaml", ["mesh.fsdp=4", "train.micro_batch=128", "model.remat=none"])
    found = plan(config, "v5e:2x2", quick=True, only=("update",))
    assert not found["fits"] and found["gib_per_device"] > found["usable_gib"] and "does not fit" in text(found)
    assert found["suggested_micro_batch"] is None or found["suggested_micro_batch"] < 128
