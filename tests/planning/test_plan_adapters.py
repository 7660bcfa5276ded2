"""The planner with low-rank adapters beside a frozen base: memory counts it once, and no gradient of it is counted."""

import json
from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import pytest

from gspo_jax import cli, plan
from gspo_jax.engine import build
from gspo_jax.models import huggingface
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.published import find
from gspo_jax.parallel import processes
from gspo_jax.parallel.mesh import make_mesh, shard_bytes
from gspo_jax.planning import hlo, jaxpr, memory, programs, rates, topology
from gspo_jax.planning.ahead import Compiled, LiveBuffer, compile_ahead
from gspo_jax.planning.loads import SKEW
from gspo_jax.planning.setting import Setting, nbytes
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import Meshes, make_meshes
from gspo_jax.setup.players import make_stop_rule
from tests import ahead, tiny

SHARED, OWN = {"expert": 8}, {"fsdp": 2, "expert": 4}
"""Meshes whose sampler reads the trainer's frozen arrays, and has a copy of its own."""
DENSE = replace(tiny.CONFIG, num_experts=0, experts_per_token=0)
COUNTERS = 64
"""More bytes than the counters of an optimizer have."""


def setting(model: ModelConfig = tiny.CONFIG, mesh: Any = SHARED, **fields: Any):
    """Return a setting with adapters on the simulated devices, as if they were v5e's chips."""
    config = cli.load_config("configs/tiny.py")
    adapted = {"adapter.rank": 3, "adapter.expert_rank": 2 * model.is_routed}
    adapted |= {"model.dtype": "bfloat16", "training.old_logprobs": "sampler"}
    config.update_from_flattened_dict(adapted | {"mesh": mesh} | fields)
    meshes = Meshes(make_mesh(mesh), make_mesh(mesh))
    stop = StopRule(max_length=config.sampling.max_response_length, eos_ids=(1,))
    return Setting(build(config, model, meshes, stop), topology.CHIPS["v5e"], rates.assumed("v5e"))


def used(given, name):
    """Return what the trainer keeps beside a program, and the kinds of its arguments, as if it needed 1 MB."""
    program = programs.make(name, given.engine)[0]
    with jax.set_mesh(program.mesh):
        text = program.trace().lower().compile().as_text() or ""
    module = hlo.Module(text)
    arguments = [op for op in module.computations[module.entry].values() if op.opcode == "parameter"]
    live = tuple(LiveBuffer(op.name, None, round(op.arrays[0].bytes)) for op in arguments)
    compiled = Compiled(text, 10**6, 0, True, live, "", 0.0)
    return memory.resident(module, given, name), memory.by_kind(module, compiled, given, name)


def sizes(given):
    """Return bytes per chip of the adapters, in float32, and of the frozen base."""
    weights = given.engine.trained
    return shard_bytes(weights.trainable), shard_bytes(weights.frozen)


@pytest.mark.parametrize(("dtype", "chips"), [("", 4), ("float32", 8)])
def test_the_least_number_of_chips_holds_the_base(dtype, chips):
    """30.5e9 parameters, 61.1 GB in bfloat16, and 16 bytes of each of 13.4e6 in adapters; v5e has 16.9 GB a chip."""
    fields = {"adapter.rank": 16, "adapter.expert_rank": 0, "adapter.base_dtype": dtype}
    assert setting(find("Qwen3-30B-A3B"), **fields).least_chips() == chips


@pytest.mark.parametrize(("mesh", "shares"), [(SHARED, True), (OWN, False)], ids=["one base", "a copy"])
def test_what_the_trainer_keeps_beside_a_program(mesh, shares):
    """Adam's two moments with the adapters, and the base where the program does not get the trainer's own arrays."""
    given = setting(mesh=mesh)
    adapters, frozen = sizes(given)
    assert given.engine.sampler.shares_frozen == shares and frozen > adapters
    beside = {
        "reshard": 2 * adapters + frozen * shares,
        "sample_prefill": 3 * adapters + frozen * (not shares),
    }
    for name, expected in beside.items():
        found, kinds = used(given, name)
        assert found == pytest.approx(expected, abs=COUNTERS)
        own = 0 if shares else frozen
        base = own if name == "reshard" else shard_bytes(given.engine.copied.frozen)
        assert kinds.get("frozen weights", 0) == base


@pytest.mark.parametrize("old_logprobs", tiny.mostly_slow(["sampler", "recompute"], always=["recompute"]))
def test_the_references_weights_are_the_base(old_logprobs):
    """Scoring gets them once, whether it reads the policy's adapters beside them or not."""
    given = setting(**{"reference.kl_weight": 0.1, "training.old_logprobs": old_logprobs})
    adapters, frozen = sizes(given)
    found, kinds = used(given, "score")
    beside = (2 if old_logprobs == "recompute" else 3) * adapters
    assert found == pytest.approx(beside, abs=COUNTERS)
    assert kinds["frozen weights"] == frozen and "reference" not in kinds


def test_a_reference_of_its_own_is_kept_too():
    """In full training, and, of adapters of a folder, these alone."""
    full, without = (
        memory.held(setting(**{"adapter.rank": 0, "adapter.expert_rank": 0, "reference.kl_weight": kl}))
        for kl in (0.1, 0.0)
    )
    assert without["reference"] == without["frozen weights"] == full["frozen weights"] == 0
    assert full["reference"] == pytest.approx(full["parameters"] / 2, rel=0.1), "all but norms and routers in bfloat16"
    given = setting(**{"reference.kl_weight": 0.1, "adapter.folder": "some"})
    kept = memory.held(given)
    assert (kept["reference"], kept["frozen weights"]) == sizes(given)


def test_a_buffer_as_large_as_frozen_weights_is_no_gradient():
    given = setting()
    kinds, weights = memory.parameter_shapes(given), given.engine.trained
    for part, kind in ((weights.trainable, "gradients"), (weights.frozen, memory.FROZEN_AGAIN)):
        assert {kinds[x.sharding.shard_shape(x.shape)] for x in jax.tree.leaves(part)} == {kind}


@pytest.mark.parametrize("remat", ["full", "none"])
def test_flops_that_a_frozen_base_saves(remat):
    """The difference is as traced; attention, of which the CPU computes more than the formula counts, cancels."""
    targets = ("q_proj", "o_proj", "gate_proj")  # the second product of down_proj's is recomputed in the formula alone

    def flops(**fields):
        given = setting(DENSE, {"data": 8}, **{"model.remat": remat, "adapter.targets": targets} | fields)
        traced = jaxpr.product_flops(programs.make("update", given.engine)[0].trace().jaxpr) / 8
        forward, _ = given.formula("update")
        return traced, forward.forward + forward.backward(recomputed=given.recomputes), forward.needed

    adapted, full = flops(), flops(**{"adapter.rank": 0})
    traced, written, needed = (of_full - of_adapters for of_full, of_adapters in zip(full, adapted, strict=True))
    assert traced == pytest.approx(written, rel=1e-6)
    assert 0 < needed < 0.5 * full[2]


def test_flops_of_scoring_are_those_of_the_policies_that_are_read():
    """The reference alone with the sampler's log π_old, and two policies if it is recomputed."""

    def flops(**fields):
        given = setting(DENSE, {"data": 8}, **{"adapter.rank": 0} | fields)
        traced = jaxpr.product_flops(plan.read(programs.make("score", given.engine)[0].trace())) / 8
        return traced, given.formula("score")[0].forward

    alone = flops()
    energies = flops(**{"objective.name": "grpo", "objective.advantage": "optimal_token_baseline"})
    assert energies[0] - alone[0] == pytest.approx(energies[1] - alone[1], rel=1e-6), "one more product with the head"
    assert energies[1] > alone[1]
    reference, both = (
        flops(**{"reference.kl_weight": 0.1, "training.old_logprobs": x}) for x in ("sampler", "recompute")
    )
    assert reference == alone and both == (2 * alone[0], 2 * alone[1])


TAUGHT_BY = replace(DENSE, vocab_size=DENSE.vocab_size + 8, num_layers=3, max_position_embeddings=64)


@pytest.fixture(scope="module")
def taught_by(tmp_path_factory) -> str:
    """Return a folder with the config.json of a teacher, which is all that a plan reads of it."""
    folder = tmp_path_factory.mktemp("teacher")
    huggingface.save(tiny.params(TAUGHT_BY), TAUGHT_BY, folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.mark.parametrize("dtype", ["", "float32", "int8"])
def test_a_teacher_s_weights_are_kept_as_they_are_stored(taught_by, dtype):
    """Beside every program, and on the least number of chips; the pool of keys has less room by as much."""
    with_teacher, without = (
        setting(
            DENSE, {"data": 2, "fsdp": 4}, **{"teacher.folder": folder, "teacher.dtype": dtype, "teacher.form": "k2"}
        )
        for folder in (taught_by, "")
    )
    kept = memory.held(with_teacher)
    assert memory.held(without) == kept | {"teacher": 0}
    shapes, norms = with_teacher.engine.teacher.shapes, 4 * (7 * 32 + 2 * 3 * 8)
    whole, embeds = sum(x.size for x in jax.tree.leaves(shapes)), 2 * TAUGHT_BY.vocab_size * 32
    matrices = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert (
        nbytes(shapes)
        == {
            "": norms + 2 * (embeds + matrices),
            "float32": 4 * whole,
            "int8": norms + 2 * embeds + matrices + 4 * 3 * (2 * 32 + 2 * 16 + 2 * 48 + 32),
        }[dtype]
    )
    assert kept["teacher"] < nbytes(shapes) / 3, "sharded over fsdp"


@pytest.mark.parametrize(("form", "name"), [("k2", "score"), ("full", "update")])
def test_flops_of_a_teacher(taught_by, form, name):
    """In scoring one forward. In an update its forward, and logits of both, in the backward pass too, as traced.

    A forward's attention, of which the CPU computes more than the formula counts, is taken as scoring traces it.
    """

    def flops(name, model, **fields):
        given = setting(model, {"data": 8}, **{"adapter.rank": 0} | fields)
        read = programs.make(name, given.engine)[0].trace()
        forward, times = given.formula(name)
        traced = jaxpr.product_flops(plan.read(read)) / 8
        return traced, forward.forward, forward.beside, forward.attention * times

    taught = {"teacher.folder": taught_by, "teacher.form": form}
    alone, scored = flops("score", TAUGHT_BY), flops(name, DENSE, **taught)
    if name == "score":
        assert scored == alone
        return
    without = flops(name, DENSE)
    head = 2 * setting(DENSE, {"data": 8}).work("update").tokens * DENSE.hidden_size
    heads = head * (4 * DENSE.vocab_size + TAUGHT_BY.vocab_size)
    minibatches = cli.load_config("configs/tiny.py").training.minibatches
    assert scored[0] - without[0] == pytest.approx(alone[0] / minibatches + heads, rel=1e-6)
    assert scored[2] == pytest.approx(alone[1] / minibatches + heads, rel=1e-6) and without[2] == 0
    assert scored[3] - without[3] == pytest.approx(alone[3] / minibatches)


def test_bytes_of_the_base_as_it_is_stored():
    """Once all that is multiplied, without the embedding: the base in its dtype and adapters in bfloat16."""
    given, wide = setting(DENSE), setting(DENSE, **{"adapter.base_dtype": "float32"})
    weights = given.engine.policy.shapes
    adapters, base = (sum(x.size for x in jax.tree.leaves(part)) for part in (weights.trainable, weights.frozen))
    norms = sum(x.size for x in jax.tree.leaves(weights.frozen) if x.dtype == "float32")
    matrices = base - norms - DENSE.vocab_size * DENSE.hidden_size
    for name in ("update", "score", "sample_prefill"):
        assert given.least_bytes(name) == (2 * (matrices + adapters) + 4 * norms) / 8
    assert wide.least_bytes("update") == (4 * (matrices + norms) + 2 * adapters) / 8
    assert wide.least_bytes("sample_prefill") == given.least_bytes("sample_prefill"), "the sampler's copy is bfloat16"
    assert given.least_bytes("reshard") == (4 + 2) * adapters / 8


SMALL = {"adapter.rank": 8, "adapter.expert_rank": 4, "adapter.base_dtype": "int8"}
"""Adapters of the tiny run whose trainable state and gradients are less than a fifth of the full run's."""


def tiny_run(**fields: Any) -> Setting:
    """Return the run of `configs/tiny.py` with these fields."""
    config = cli.load_config("configs/tiny.py")
    config.update_from_flattened_dict(fields)
    model = check(config)
    meshes = make_meshes(config, model)
    stop = make_stop_rule(config, eos_ids=model.eos_token_ids, pad_id=model.pad_token_id or 0)
    return Setting(build(config, model, meshes, stop), topology.CHIPS["v5e"], rates.assumed("v5e"))


def test_trained_parameters_and_optimizer_state_of_the_tiny_run():
    """19.7% of the full run's per device, of eight: shards of 145,824 parameters, and 28,672 in adapters."""
    full, adapted = (memory.held(tiny_run(**fields)) for fields in ({}, SMALL))
    assert full["parameters"] == 4 * 145824 and adapted["parameters"] == 4 * 28672
    for kind in ("parameters", "optimizer"):
        assert adapted[kind] <= full[kind] / 5


@pytest.mark.slow
def test_trainable_state_and_gradients_at_the_peak_of_the_tiny_update(tmp_path):
    """19.0% of the full run's per device, by the compiler's own list of what is live then.

    New moments, and gradients as they are before they are sharded, have the shapes of parameters, and count by these.
    """

    def at_the_peak(**fields: Any) -> int:
        given = tiny_run(**fields)
        program = programs.make("update", given.engine)[0]
        with jax.set_mesh(program.mesh):
            compiled = compile_ahead(program.trace().lower(), key="", cache=tmp_path)
        module, trained = hlo.Module(compiled.text), jax.tree.leaves(given.engine.trained.trainable)
        shapes = {shape: "gradients" for x in trained for shape in (x.shape, x.sharding.shard_shape(x.shape))}
        live: Counter[str] = Counter()
        for buffer in memory.without_aliases(module, compiled.live):
            live[memory.kind_of(module, buffer, (), shapes, "update")] += buffer.bytes
        assert live["parameters"] == memory.held(given)["parameters"]
        return live["parameters"] + live["optimizer"] + live["gradients"]

    full, adapted = at_the_peak(), at_the_peak(**SMALL)
    assert full > 4 * 4 * 145824 and adapted >= 4 * 4 * 28672, "parameters, two moments, gradients"
    assert adapted <= full / 5


def sizes_in_int8(given: Setting) -> set[tuple[int, ...]]:
    """Return the sides, sorted, of the base's matrices in int8: of a layer or its experts, and of all layers.

    Both whole and as a chip's shard.
    """
    frozen = jax.tree.leaves(given.engine.trained.frozen)
    whole = [shape for x in frozen if x.dtype == "int8" for shape in (x.shape, x.sharding.shard_shape(x.shape))]
    return {tuple(sorted(shape)) for stack in whole for shape in (stack, stack[1:])}


def of_sizes(text: str, sizes: Container[tuple[int, ...]]) -> dict[str, list[str]]:
    """Return by dtype the results outside of fusions, in a compiled program, that have these sides in any order."""
    module, found = hlo.Module(text), defaultdict(list)
    every = [operation for inside in module.computations.values() for operation in inside.values()]
    fused = {called for operation in every if operation.opcode == "fusion" for called in operation.calls}
    for name, inside in module.computations.items():
        for operation in inside.values() if name not in fused else ():
            for dtype, dims, _ in operation.arrays:
                if tuple(sorted(size for size in dims if size > 1)) in sizes:
                    found[dtype].append(f"{list(dims)} {operation.opcode} {operation.name}: {operation.scope}")
    return found


CONVERTS = """HloModule m

%inside (q: s8[64,48], x: bf16[8,64]) -> bf16[8,48] {
  %q = s8[64,48]{1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %w = bf16[64,48]{1,0} convert(%q)
  ROOT %y = bf16[8,48]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: s8[2,64,48], t: bf16[8,64]) -> bf16[8,48] {
  %p = s8[2,64,48]{2,1,0} parameter(0)
  %t = bf16[8,64]{1,0} parameter(1)
  %one = s8[1,64,48]{2,1,0} slice(%p), slice={[0:1], [0:64], [0:48]}
  %bare = s8[64,48]{1,0} bitcast(%one)
  %kept = bf16[48,64]{0,1} convert(%bare)
  ROOT %out = bf16[8,48]{1,0} fusion(%bare, %t), kind=kOutput, calls=%inside
}
"""


def test_a_matrix_that_is_converted_outside_of_a_fusion_is_found():
    found = of_sizes(CONVERTS, {(2, 48, 64), (48, 64)})
    assert {dtype: len(lines) for dtype, lines in found.items()} == {"s8": 3, "bf16": 1}
    assert found["bf16"] == ["[48, 64] convert kept: "]


def figures():
    """Return the plan of the 30B recipe's shapes, with two layers and adapters everywhere, on one host of v5e.

    With the base in int8, and what each program keeps in the sizes of its matrices; no activation has one of them.
    """
    config = cli.load_config("configs/qwen3_30b_a3b.py")
    fields = {"adapter.rank": 16, "adapter.expert_rank": 2, "model.remat": "full", "data.prompts_per_batch": 8}
    fields |= {"adapter.base_dtype": "int8", "sampling.group_size": 4, "data.max_prompt_length": 128}
    fields |= {"sampling.max_response_length": 256, "training.row_tokens": 384}
    fields |= {"mesh.fsdp": 1, "mesh.expert": 8, "sampling.mesh.data": 1, "sampling.mesh.expert": 8}
    config.update_from_flattened_dict(fields | {"training.logprob_chunk": 8 * 192})
    model = replace(find("Qwen3-30B-A3B"), num_layers=2)
    given, _, key = plan.prepare(config, model, "v5e:2x4", slices=1, rates=None, skew=SKEW)
    with TemporaryDirectory() as folder, plan.ThreadPoolExecutor(processes.cores()) as pool:
        place = Path(folder)
        options = {"pool": pool, "key": key, "cache": place, "dump": place}
        found = dict(plan.plan_programs(("update", "sample_prefill", "reshard"), given, **options))
        for name in ("update", "sample_prefill"):
            found[name]["of_sizes"] = of_sizes((place / f"{name}.hlo").read_text(), sizes_in_int8(given))
    return found


@pytest.mark.slow
@ahead.needs_libtpu
def test_programs_with_adapters_are_counted_right():
    """And hold the base's matrices in int8 alone: they are converted in fusions and kernels, a block at a time."""
    found = ahead.figures("tests.planning.test_plan_adapters")
    assert all(program["fits"] and program["flops_apart"] < 0.02 for program in found.values())
    kinds = found["update"]["hbm_by_kind"]
    assert kinds["frozen weights"] > 0.2e9 and kinds.get("gradients", 0) <= 1.01 * kinds["parameters"]
    assert kinds.get(memory.FROZEN_AGAIN, 0) < 0.01 * kinds["frozen weights"]
    assert found["sample_prefill"]["hbm_by_kind"]["frozen weights"] == kinds["frozen weights"]
    assert found["sample_prefill"]["resident_bytes"] < 0.1e9 < 0.2e9 < found["reshard"]["resident_bytes"]
    assert found["sample_prefill"]["seconds"]["per_op"] <= 0.9e-3, "of a prompt a chip, in two layers"
    assert found["update"]["of_sizes"].keys() == found["sample_prefill"]["of_sizes"].keys() == {"s8"}


if __name__ == "__main__":
    print(json.dumps(figures()))
