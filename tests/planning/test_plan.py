"""The planner: argument errors, what it reports of a program, and, with the TPU compiler, that its counts agree."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from gspo_jax import cli, plan
from gspo_jax.engine import build
from gspo_jax.errors import UserError
from gspo_jax.models import flops, published
from gspo_jax.models.published import find
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.mesh import make_mesh
from gspo_jax.planning import costs, cycles, executed, hlo, loads, memory, rates, topology
from gspo_jax.planning.ahead import LiveBuffer
from gspo_jax.planning.figures import warnings
from gspo_jax.planning.setting import Setting
from gspo_jax.planning.show import cycles_table
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import Meshes, check_sizes
from gspo_jax.setup.policy import model_config
from tests import ahead
from tests.pods import drawer

tables = drawer("plan_tables")

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


@pytest.mark.parametrize(
    "name", ["", "v6e", "v5e", "long", "16", "1024", "long,256", "16k", "16k_int8,256", "16k_whole"]
)
def test_recipes_are_configs(name):
    config = cli.load_config(f"{RECIPE}:{name}")
    check(config)
    assert model_config(config) == find("Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("recipe", "chips"),
    [
        *(("mixtures.py:Qwen3.5-35B-A3B", 64), ("mixtures.py:GLM-4.7-Flash", 64), ("mixtures.py:GLM-4.5-Air", 128)),
        *(("one_host.py:Qwen3.5-35B-A3B", 8), ("one_host.py:GLM-4.7-Flash", 8)),
    ],
)
def test_recipes_of_other_mixtures_are_configs(recipe, chips):
    config = cli.load_config(f"configs/{recipe}")
    model = check(config)
    assert model == find(recipe.partition(":")[2])
    sizes = dict(zip(mesh_lib.AXES, mesh_lib.mesh_sizes(dict(config.mesh), chips), strict=True))
    check_sizes(config, model, sizes)
    assert cli.load_config("configs/mixtures.py:r3").routing.replay == "r3"


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
            "takes no argument 'v7'; there are v6e, v5e, long, 16k, 16k_int8, 16k_whole, a number of chips",
        ),
        (f"{RECIPE}:48", "cannot be laid out on 48 chips; use 16, 32 or a multiple of 64"),
        ("configs/qwen3_dense.py:7B", "takes no argument '7B'; did you mean"),
        ("configs/qwen3_235b_a22b.py:most", "takes no argument 'most'; use least, or none"),
        ("configs/mixtures.py:GLM-4.7", "takes no argument 'GLM-4.7'; did you mean 'GLM-4.7-Flash'"),
        ("configs/mixtures.py:GLM-4.7-Flash,GLM-4.5-Air", "one model, not GLM-4.7-Flash and GLM-4.5-Air; name one"),
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


def setting(size="Qwen3-30B-A3B", prompts=64, *, sampler=None, slots=None, **options):
    """Return the recipe's setting on the simulated devices, as if they were v5p's chips."""
    mesh, config = make_mesh({"fsdp": -1}), cli.load_config(RECIPE)
    config.data.prompts_per_batch, config.sampling.slots = prompts, slots
    meshes = Meshes(mesh, mesh if sampler is None else make_mesh(sampler))
    engine = build(config, find(size), meshes, StopRule(max_length=8, eos_ids=()))
    return Setting(engine, topology.CHIPS["v5p"], rates.assumed("v5p"), **options)


@pytest.mark.parametrize(("size", "chips"), [("Qwen3-30B-A3B", 5), ("Qwen3-235B-A22B", 37)])
def test_the_least_number_of_chips(size, chips):
    """16 bytes per parameter in float32 (weight, gradient, Adam's two moments) over v5p's 102.8e9 bytes of HBM."""
    assert setting(size).least_chips() == chips


def test_executed_attention_of_packed_rows(monkeypatch):
    """Rows of a prompt of 512 tokens and a response of 15,872: of 64 parts of 256, a query sees those before.

    2080 pairs, each of 2 products of [256, 128, 256] per head in the forward pass and of 5 in the backward pass.
    """
    recipe = setting(prompts=8)
    recipe.config.sampling.max_response_length, recipe.config.training.row_tokens = 15872, 16384
    work = executed.kernels(recipe, "update")["packed_attention"]
    spans, queries = hlo.Array("s32", (32, 3, 512), 0), hlo.Array("bf16", (16384, 4096), 0)
    once = 2 * 32 * 2080 * 256 * 256 * 128
    for name, products in (("packed_attention.1", 2), ("packed_attention_backward.2", 5)):
        call = costs.KernelCall(name, (spans, queries), (), costs.OpWork(0, 7))
        assert work(call) == costs.OpWork(products * once, 7, steps=528)
    with monkeypatch.context() as patch:
        patch.setattr(Setting, "rows_at_once", lambda self, name: 4)
        call = call._replace(operands=(hlo.Array("s32", (128, 3, 512), 0), hlo.Array("bf16", (65536, 4096), 0)))
        work = executed.kernels(recipe, "score")["packed_attention"]
        assert work(call) == costs.OpWork(4 * 5 * once, 7, steps=4 * 528), "four rows in one pass"
    begin, end, own = executed.spans_at_full_length(16500, **recipe.row_size)
    assert (end[0, 512:16384] == 512).all() and (own[0, 512:16384] == 512).all() and not begin.any()
    assert not end[0, :512].any() and (own[0, 16384:] > np.arange(16384, 16500)).all()


@pytest.mark.parametrize(
    ("longest", "tokens", "prompts", "parts"),
    [(512, 512, 1, 3 * 256**2), (512, 4096, 8, 3 * 256**2), (48, 256, 2, 128**2)],
)
def test_executed_attention_of_prompts(longest, tokens, prompts, parts):
    """A prompt of 512 tokens has four parts of 256 queries and keys, one of which sees nothing. A short one has one."""
    recipe = setting(prompts=8)
    recipe.config.data.max_prompt_length = longest
    work = executed.kernels(recipe, "sample_prefill")["packed_attention"]
    spans, queries = hlo.Array("s32", (2, 3, 256), 0), hlo.Array("bf16", (tokens, 4096), 0)
    once = costs.OpWork(2 * 2 * 4096 * prompts * parts, 7, steps=prompts)
    assert work(costs.KernelCall("packed_attention.1", (spans, queries), (), costs.OpWork(0, 7))) == once


def test_executed_grouped_matmuls_of_the_recipe():
    """One chip's layers of an update: 131,072 pairs over 128 experts; 3 matrices, each forward and with two gradients.

    A group that begins anywhere computes 127 rows more than it has, in parts of 128 rows; in whole tiles of 512 it
    would be 511, and 580 ms as an independent count has it.
    """
    recipe = setting(prompts=8)
    kernels, layers = executed.kernels(recipe, "update"), recipe.model.num_layers

    def seconds(name, operands, results, flops):
        work = next(work for begin, work in kernels.items() if name.startswith(begin))
        call = costs.KernelCall(name, operands, results, costs.OpWork(flops, 0))
        return layers * work(call).flops / recipe.chip.flops

    rows = hlo.Array("bf16", (131072, 2048), 0), hlo.Array("bf16", (131072, 768), 0)
    weights = hlo.Array("bf16", (128, 2048, 768), 0)
    needed = 2 * 131072 * 2048 * 768
    grouped = 9 * seconds("grouped_matmul_512.3", (rows[0], weights), (rows[1],), needed)
    assert grouped == pytest.approx(9 * seconds("grouped_outer_512", rows, (weights,), needed))
    assert grouped == pytest.approx((1 + 127 * 128 / 131072) * 9 * layers * needed / recipe.chip.flops, rel=0.005)
    assert grouped * (131072 + 511 * 128) / (131072 + 127 * 128) == pytest.approx(0.580, rel=0.01)


@pytest.mark.parametrize(("slots", "room"), [(16, 160), (4, 48)])  # 1.25 times 128 and 32 pairs, in tiles of 16
def test_executed_grouped_matmuls_of_the_busiest_shard(slots, room):
    """A decode step over 8 shards of 16 experts, row by row: an expert's rows in a tile of 16 cost the whole tile.

    In the first pass and, where more arrive than there is room for, in a further one. Both read the weights of experts
    with rows.
    """
    recipe = setting(prompts=8, sampler={"expert": 8}, slots=8 * slots, skew=0.75)
    work = executed.kernels(recipe, "sample_decode")["grouped_matmul"]
    rows, weights = hlo.Array("bf16", (room, 2048), 0), hlo.Array("bf16", (16, 2048, 768), 0)
    call = costs.KernelCall("grouped_matmul_16.1", (rows, weights), (), costs.OpWork(room, 16 * weights.bytes / 16))
    drawn = loads.draw(8 * slots, 128, 8, skew=0.75)
    assert drawn.pairs.sum() == loads.DRAWS * 8 * 8 * slots
    passes = {False: [], True: []}
    for layer in drawn.busiest:
        arriving = np.repeat(np.arange(16), layer)
        for rare, ids in ((False, arriving[:room]), (True, arriving[room : 2 * room])):
            if len(ids):
                visits = {(expert, row // 16) for row, expert in enumerate(ids)}
                passes[rare].append((len(visits), len({expert for expert, _ in visits})))
    assert len(passes[True]) > 20
    for rare, found in passes.items():
        visits, held = np.mean(found, axis=0)
        flops, moved, steps = work(call._replace(rare=rare))
        assert (flops, steps) == (pytest.approx(16 * visits), pytest.approx(visits))
        assert moved == pytest.approx(held * weights.bytes / 16)
    outer = executed.kernels(recipe, "sample_decode")["grouped_outer"]
    assert outer(call._replace(name="grouped_outer_16.1")).steps > work(call).steps, "zeros for experts without rows"
    more = executed.passes(recipe, "sample_decode")([call._replace(name="row_sums_16.1"), call])
    assert more == pytest.approx(len(passes[True]) / loads.DRAWS, abs=0.01)
    assert executed.passes(recipe, "sample_decode")([]) == 0


def test_warnings_of_collectives_and_kernels():
    """Two slices of 4 chips: 3 GB of all-reduces over 4 are over a whole slice, over 2 they are not."""
    both = setting(prompts=8, slices=2)
    for group, count in ((4, 1), (2, 0)):
        traffic = costs.Traffic("all-reduce", group, 3e9, "a/b")
        said = warnings(costs.Costs((), ((1.0, traffic),), {}, ()), both)
        assert len(said) == count and all("3.0 GB of all-reduces over the whole slice (a/b)" in one for one in said)
    (said,) = warnings(costs.Costs((), (), {}, (), unsized=("swept",)), both)
    assert said == "grids known only at run time are counted as one step: swept"


TEXT = """HloModule m

ENTRY %main (p: f32[48,2,8]) -> f32[48,2,8] {
  %param.0 = f32[48,2,8]{2,1,0} parameter(0), metadata={op_name="state.policy.params['layers']['mlp']['gate'].value"}
  %param.1 = f32[48,2,8]{2,1,0} parameter(1), metadata={op_name="state.policy.opt_state[1][0].mu"}
  %param.2 = s32[4,9]{1,0} parameter(2), metadata={op_name="experience.rollout.tokens"}
  %param.3 = s8[48,8,4]{2,1,0} parameter(3), metadata={op_name="frozen['layers']['mlp']['gate'].value"}
  %param.4 = s8[48,8,4]{2,1,0} parameter(4), metadata={op_name="weights.frozen['layers']['mlp']['gate'].value"}
  %param.5 = s8[48,8,4]{2,1,0} parameter(5), metadata={op_name="reference.trainable['layers']['mlp']['gate'].value"}
  %param.6 = f32[48,2,8]{2,1,0} parameter(6), metadata={op_name="weights.trainable['layers']['mlp']['a'].value"}
  %all-gather.1 = bf16[96,8]{1,0} all-gather(%param.0), replica_groups={{0,1}}
  %saved.1 = bf16[48,1,16,8]{3,2,1,0} broadcast(%param.0), metadata={op_name="jit(update)/jvp()/while"}
  %grads.1 = f32[48,2,8]{2,1,0} broadcast(%param.0), metadata={op_name="jit(update)/transpose(jvp())/while"}
  %again.1 = bf16[48,8,4]{2,1,0} convert(%param.3), metadata={op_name="jit(update)/transpose(jvp())/while"}
  ROOT %x = bf16[16,8]{1,0} negate(%all-gather.1), metadata={op_name="jit(update)/feed_forward/neg"}
}
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("param.0", "parameters"),
        ("param.1", "optimizer"),
        ("param.2", "batch"),
        ("param.3", "frozen weights"),
        ("param.4", "frozen weights"),
        ("param.5", "reference"),
        ("param.6", "parameters"),
        ("all-gather.1", "collectives"),
        ("saved.1", "saved activations"),
        ("grads.1", "gradients"),
        ("again.1", "copies or gradients of frozen weights"),
        ("x", "feed forward"),
        ("unheard.of", "other"),
    ],
)
def test_memory_is_told_by_what_it_is(name, kind):
    shapes = {(48, 2, 8): "gradients", (48, 8, 4): memory.FROZEN_AGAIN}
    assert memory.kind_of(hlo.Module(TEXT), LiveBuffer(name, None, 8), {48}, shapes, "update") == kind


ESTIMATES = """HloModule m

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  %q = f32[2]{0:S(1)} parameter(1)
  %c = f32[1024,1024]{0,1} copy(%p), metadata={op_name="a/b"}, backend_config={"estimated_cycles":"14000"}
  %t = f32[2]{0:S(1)} negate(%q), metadata={op_name="a/c"}, backend_config={"estimated_cycles":"2120"}
  ROOT %r = f32[1024,1024]{1,0} sort(%c), dimensions={0}
}
"""


def test_executed_times_beside_the_compilers_estimates():
    """A copy of 4 MiB moves 8.39 MB: 3.03 µs, estimated at 8 µs. A small operation is estimated at 1.21 µs.

    Estimated at 10 µs, the copy would be work on vectors.
    """
    found = cycles.compared(costs.CostedProgram(ESTIMATES).costs(), setting())
    assert [line["scope"] for line in found["lines"]] == ["a/b", "small operations", "all others"]
    moved = 2 * 4 * 2**20 / topology.CHIPS["v5p"].bandwidth
    assert found["executed_s"] == pytest.approx(moved + 2120 / 1.75e9)
    assert found["estimated_s"] == pytest.approx(8e-6 + 2120 / 1.75e9)
    assert found["without_estimate_s"] == pytest.approx(moved)
    assert found["lines"][0]["why"] == "estimated at 1.05 TB/s, a change of layout"
    table = cycles_table(found)
    assert table[2] == "| `copy a/b` | memory | 1 | 0.00 | 0.01 | 2.64 | estimated at 1.05 TB/s, a change of layout |"
    assert table[3] == "| small operations | latency | 1 | 0.00 | 0.00 | 1.00 |  |"
    found = cycles.compared(costs.CostedProgram(ESTIMATES.replace('"14000"', '"17500"')).costs(), setting())
    assert [line["bound"] for line in found["lines"]] == ["vector", "latency", ""]
    assert found["executed_s"] == pytest.approx(10e-6 + 2120 / 1.75e9)


def test_what_the_compiler_estimates_at_nothing_is_listed_without_a_reason():
    found = cycles.compared(costs.CostedProgram(ESTIMATES.replace('"14000"', '"0"')).costs(), setting())
    (line,) = (line for line in found["lines"] if line["scope"] == "a/b")
    assert line["executed_s"] > 0 and line["estimated_s"] == 0 and line["why"] == ""


def planned(*arguments, **programs):
    """Return a plan as it is written, with one line of estimates for each of its programs."""
    line = {"scope": "", "opcode": "copy", "bound": "memory", "count": 3, "executed_s": 0.1, "estimated_s": 0.2}
    found = {"executed_s": 0.1, "estimated_s": 0.2, "without_estimate_s": 0.5, "lines": [line | {"why": "because"}]}
    facts = {
        "peak_bytes": 53.48e9,
        "resident_bytes": 5.7e9,
        "limit_bytes": 102.8e9,
        "flops": 418.6e12,
        "ici_bytes": 180.5e9,
        "binds": "hbm",
        "projected_step_s": [2.2, 2.5],
        "executed_by": {"attention": 0.51, "latency": 0.0089},
        "cycles": found,
    }
    times = {"compute": 0.9, "hbm": 0.7, "ici": 0.301, "attention": 0.238, "per_op": 1.135, "executed": 1.824}
    times |= {"exposed": 0.103, "floor": 0.854}
    return {
        "arguments": ["--config=configs/some.py:v6e", "--topology=v5p:4x4x4", *arguments],
        "topology": "v5p:4x4x4",
        "programs": {name: facts | {"seconds": times | changed} for name, changed in programs.items()},
    }


NAMES = ("recipes", "in full", "parts", "choices", *(f"cycles of {name}" for name in tables.ESTIMATED))


def test_tables_of_the_page_are_written_from_plans(tmp_path):
    page, files = tmp_path / "plan.md", []
    for i, arguments in enumerate([(), ("--config.model.remat=full", "--config.mesh.tensor=2")]):
        files.append(str(tmp_path / f"{i}.json"))
        step = {"per_op": 0.0048, "exposed": None, "executed": 0.0116}
        programs = {"update": {}} if i else {"update": {}, "score": {}, "sample_decode": step}
        Path(files[-1]).write_text(json.dumps(planned(*arguments, **programs)))
    other = tmp_path / "cycles.md"
    for file, names in ((page, NAMES[:2]), (other, NAMES[2:])):
        file.write_text("\n".join(f"text\n<!-- table: {name} -->\nold\n<!-- end -->" for name in names) + "\nafter\n")
    for _ in range(2):  # a page that has its tables is rewritten
        assert tables.main([str(page), str(other), "--recipes", files[0], "--choices", files[1]]) == 0
        assert page.read_text().count("<!-- table") == 2
        written = page.read_text() + other.read_text()
        assert "old" not in written and written.endswith("after\n") and written.count("text\n") == len(NAMES)
        for line in (
            "| `configs/some.py:v6e` | `v5p:4x4x4` | 102.8 | 53.5 | 1135 | 238 | 1824 | 301, 103 | memory | 854 "
            "| 53.5 + 5.7 | 4.8 | 11.6 | 854 |",
            "| `sample_decode` | 53.5 | 5.7 | 418.6 | 900 | 700 | 301, – | 4.8 | 238 | 11.6 | 854 | 2200 to 2500 |",
            "| `update` | 1824 | 510 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 8.9 |",
            "| `model.remat=full`, `mesh.tensor=2` | 53.5 | 1135 | 238 | 1824 | 301, 103 | 180.5 |",
            "| `copy` | memory | 3 | 100.00 | 200.00 | 2.00 | because |",
        ):
            assert line in written.splitlines()


def test_pages_and_plans_without_what_the_tables_need(tmp_path, capsys):
    plan_file, page = tmp_path / "plan.json", tmp_path / "page.md"
    page.write_text("<!-- table: recipes -->\n<!-- end -->\n")
    plan_file.write_text("{}")
    assert tables.main([str(page), "--recipes", str(plan_file)]) == 2
    assert "plan.json is not a plan" in capsys.readouterr().err
    plan_file.write_text(json.dumps(planned(update={}, score={}, sample_decode={})))
    assert tables.main([str(page), "--recipes", str(plan_file)]) == 2
    assert "the pages have 0 tables 'in full'" in capsys.readouterr().err


def test_the_pages_have_every_table():
    docs = Path(__file__).parents[2] / "docs"
    pages = (docs / "plan.md").read_text() + (docs / "plan" / "cycles.md").read_text()
    for name in NAMES:
        assert pages.count(f"<!-- table: {name} -->") == 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_mesh_that_does_not_fit_the_slice(tmp_path):
    config = cli.load_config(RECIPE)
    config.mesh.data = 48
    with pytest.raises(UserError, match="needs a multiple of 48 devices but there are 64"):
        plan.plan(config, "v5p:4x4x4", cache=tmp_path)


PROGRAMS = ["update", "reshard"]
"""What is compiled: scoring is the forward pass of the update. test_tpu_decode.py compiles the decoder, and
test_plan_adapters.py a prefill."""
ROWS = {"sampling.max_response_length": 384, "training.row_tokens": 512 + 4 * 384, "training.logprob_chunk": 64 * 512}
"""Rows of an eighth of the recipe's 16,384 tokens, which take the compiler two fifths of the time."""


def figures(name):
    """Return the plan of the recipe with short rows on slice `name`."""
    with TemporaryDirectory() as cache:
        config = cli.load_config(RECIPE)
        config.update_from_flattened_dict(ROWS)
        found = plan.plan(config, name, cache=Path(cache), only=PROGRAMS)
        again = plan.plan(config, name, cache=Path(cache), only=["reshard"])
    assert again["programs"]["reshard"] == found["programs"]["reshard"]
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_programs_of_the_recipe_fit_and_are_counted_right():
    """The 30B recipe on 64 chips of v5p, all of its layers, with an eighth of a row's tokens.

    Whole rows (`plan --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4 --programs=update`) take 56.4 GB, and
    1.33 s executed. What is sent is the same, the weights and their gradients, but for a percent.
    """
    found = ahead.figures("tests.planning.test_plan", "v5p:4x4x4")
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
    assert 0 < seconds["exposed"] < 0.8 * seconds["ici"], "gathers overlap with what there is to compute, 0.09 s"
    assert update["peak_bytes"] <= 19.6e9 and seconds["per_op"] <= 0.25
    assert 175e9 <= update["ici_bytes"] <= 185e9
    assert seconds["executed"] == pytest.approx(0.309, rel=0.05)
    assert sum(update["executed_by"].values()) == pytest.approx(seconds["executed"])
    assert found["chip"] == "v5p"


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1])))
