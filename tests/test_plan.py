"""The planner: argument errors, what it reports of a program, and, with the TPU compiler, that its counts agree."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gspo_jax import cli, plan
from gspo_jax.engine import build
from gspo_jax.models import flops, published
from gspo_jax.models.published import find
from gspo_jax.parallel import hlo, topology
from gspo_jax.parallel.ahead import Buffer
from gspo_jax.parallel.mesh import make_mesh
from gspo_jax.planning import memory
from gspo_jax.planning.setting import Setting
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import Meshes
from gspo_jax.setup.policy import model_config
from gspo_jax.types import UserError
from tests import ahead

RECIPE = "configs/qwen3_30b_a3b.py"


@pytest.mark.parametrize(
    ("name", "whole", "met"), [("Qwen3-30B-A3B", 30.53e9, 3.042e9), ("OLMoE-1B-7B-0924", 6.919e9, 1.179e9)]
)
def test_published_shapes_have_the_parameters_in_their_names(name, whole, met):
    """Check total parameters, and those in a token's matrix products: the head counts there, the embedding does not."""
    model = find(name)
    one = flops.forward(model, flops.Work(1, 1, 0))
    assert one.forward / 2 == pytest.approx(met, rel=1e-3)
    experts = 3 * model.hidden_size * model.moe_intermediate_size * model.num_layers
    embedding = model.vocab_size * model.hidden_size
    idle = experts * (model.num_experts - model.experts_per_token)
    assert one.forward / 2 + idle + embedding == pytest.approx(whole, rel=1e-3)
    heads = model.num_layers * model.num_heads * model.head_dim
    assert flops.forward(model, flops.Work(0, 0, 1)).forward == 4 * heads  # per query-key pair


def test_flops_of_rows_that_share_their_prompt():
    """A prompt of 2 tokens shared by two responses of 3: 2 + 2·3 tokens; pairs 1 + 2, and 2 · (6 + 1 + 2 + 3)."""
    assert flops.of_rows(2, prompt=2, response=3, share=2) == flops.Work(8, 6, 3 + 2 * 12)
    assert flops.of_rows(2, prompt=2, response=3, share=1) == flops.Work(10, 6, 2 * (3 + 12))


@pytest.mark.parametrize(
    "name", ["", "v6e", "v5e", "long", "16", "1024", "long,256", "16k", "16k_padded", "16k_partial"]
)
def test_recipes_are_configs(name):
    config = cli.load_config(f"{RECIPE}:{name}")
    check(config)
    assert model_config(config) == find("Qwen3-30B-A3B")


@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B", "8B"])
def test_dense_recipes_are_configs(size):
    config = cli.load_config(f"configs/qwen3_dense.py:{size}")
    check(config)
    assert model_config(config) == find(f"Qwen3-{size}")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            f"{RECIPE}:v7",
            "takes no argument 'v7'; there are v6e, v5e, long, 16k, 16k_padded, 16k_partial, a number of chips",
        ),
        (f"{RECIPE}:48", "cannot be laid out on 48 chips; use 16, 32 or a multiple of 64"),
        ("configs/qwen3_dense.py:7B", "takes no argument '7B'; did you mean"),
        ("configs/qwen3_235b_a22b.py:most", "takes no argument 'most'; use least, or none"),
    ],
)
def test_wrong_arguments_of_recipes(config, says):
    with pytest.raises(UserError, match=says):
        cli.load_config(config)


def test_a_folder_that_holds_another_model(tmp_path):
    config = cli.load_config(RECIPE)
    shape = dataclasses.replace(find("Qwen3-30B-A3B"), num_layers=3)
    with pytest.raises(UserError, match="num_layers 3 and Qwen3-30B-A3B has 48; give the folder of"):
        published.check(shape, config.model.published, str(tmp_path))
    config.model.published = "Qwen3-30B"
    with pytest.raises(UserError, match="no published model 'Qwen3-30B' here; did you mean"):
        check(config)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"name": "v7x:4x4"}, "unknown TPU generation 'v7x'; there are v4, v5e"),
        ({"name": "v5p:4x4x4", "only": ["updates"]}, "unknown program 'updates'; did you mean 'update'"),
    ],
)
def test_mistakes_are_told_before_anything_is_compiled(asked, says, tmp_path):
    with pytest.raises(UserError, match=says):
        plan.plan(cli.load_config(RECIPE), cache=tmp_path, **asked)


@pytest.mark.parametrize(("size", "chips"), [("Qwen3-30B-A3B", 5), ("Qwen3-235B-A22B", 37)])
def test_the_least_number_of_chips(size, chips):
    """16 bytes per parameter in float32 (weight, gradient, Adam's two moments) over v5p's 102.8e9 bytes of HBM."""
    mesh = make_mesh({"fsdp": -1})
    engine = build(cli.load_config(RECIPE), find(size), Meshes(mesh, mesh), StopRule(max_length=8, eos_ids=()))
    assert Setting(engine, topology.CHIPS["v5p"]).least_chips() == chips


TEXT = """HloModule m

ENTRY %main (p: f32[48,2,8]) -> f32[48,2,8] {
  %param.0 = f32[48,2,8]{2,1,0} parameter(0), metadata={op_name="state.policy.params['layers']['mlp']['gate'].value"}
  %param.1 = f32[48,2,8]{2,1,0} parameter(1), metadata={op_name="state.policy.opt_state[1][0].mu"}
  %param.2 = s32[4,9]{1,0} parameter(2), metadata={op_name="experience.rollout.tokens"}
  %all-gather.1 = bf16[96,8]{1,0} all-gather(%param.0), replica_groups={{0,1}}
  %saved.1 = bf16[48,1,16,8]{3,2,1,0} broadcast(%param.0), metadata={op_name="jit(update)/jvp()/while"}
  %grads.1 = f32[48,2,8]{2,1,0} broadcast(%param.0), metadata={op_name="jit(update)/transpose(jvp())/while"}
  ROOT %x = bf16[16,8]{1,0} negate(%all-gather.1), metadata={op_name="jit(update)/feed_forward/neg"}
}
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("param.0", "parameters"),
        ("param.1", "optimizer"),
        ("param.2", "batch"),
        ("all-gather.1", "collectives"),
        ("saved.1", "saved activations"),
        ("grads.1", "gradients"),
        ("x", "feed forward"),
        ("unheard.of", "other"),
    ],
)
def test_memory_is_told_by_what_it_is(name, kind):
    assert memory.kind_of(hlo.Module(TEXT), Buffer(name, None, 8), {48}, {(48, 2, 8)}, "update") == kind


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_mesh_that_does_not_fit_the_slice(tmp_path):
    config = cli.load_config(RECIPE)
    config.mesh.data = 48
    with pytest.raises(UserError, match="needs a multiple of 48 devices but there are 64"):
        plan.plan(config, "v5p:4x4x4", cache=tmp_path)


PROGRAMS = ["update", "sample_prefill", "reshard"]
"""What is compiled: scoring is the forward pass of the update, and test_tpu_decode.py compiles the decoder."""


def figures(name):
    """Return the plan of the recipe on slice `name`."""
    with TemporaryDirectory() as cache:
        config = cli.load_config(RECIPE)
        found = plan.plan(config, name, cache=Path(cache), only=PROGRAMS)
        again = plan.plan(config, name, cache=Path(cache), only=["reshard"])
    assert again["programs"]["reshard"] == found["programs"]["reshard"]
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_programs_of_the_recipe_fit_and_are_counted_right():
    """The 30B recipe on 64 chips of v5p: the figures in docs/plan.md."""
    found = ahead.figures("tests.test_plan", "v5p:4x4x4")
    assert list(found["programs"]) == PROGRAMS
    for program in found["programs"].values():
        assert program["fits"] and program["peak_bytes"] < program["limit_bytes"]
        assert program["flops_apart"] < 0.02
        assert program["seconds"]["per_op"] > 0
    update = found["programs"]["update"]
    experts = [c for c in update["collectives"] if c["kind"] == "all-reduce"]
    assert sum(c["bytes"] for c in experts) < 0.05 * update["ici_bytes"], (
        "gradients are reduce-scattered, not all-reduced"
    )
    seconds = update["seconds"]
    assert 0 < seconds["exposed"] < 0.5 * seconds["ici"], "most gathers overlap with compute"
    assert update["peak_bytes"] <= 60e9 and seconds["per_op"] <= 1.20
    assert update["ici_bytes"] <= 185e9
    assert found["programs"]["sample_prefill"]["seconds"]["per_op"] <= 0.035
    assert found["chip"] == "v5p"


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1])))
