"""Every program of a training iteration, compiled for a TPU slice that is not there: does it fit, what does it cost?

    python -m gspo_jax.plan --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4 [--slices=2]
        [--programs=update,score] [--json=FILE] [--dump=DIR]

Runs on any machine with libtpu, without a TPU. What it tells is read off the compiled programs (parallel/costs.py) and
the compiler's memory analysis; times are bounds, and a projection calibrated on published v5p results: an estimate made
ahead of time, not a measurement. Compiled programs are kept under their content, so a second plan takes seconds.
"""

import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli, experiment, programs
from gspo_jax.kernels import backend
from gspo_jax.models import flops as flops_lib
from gspo_jax.models import transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.models.dispatch import HEADROOM
from gspo_jax.parallel import costs as costs_lib
from gspo_jax.parallel import hlo, jaxpr, topology
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.ahead import Buffer, Compiled, compile_ahead
from gspo_jax.parallel.topology import CHIPS, Chip
from gspo_jax.training.state import TrainState, new_state, state_shardings
from gspo_jax.types import UserError, choices

PACKAGES = ("jax", "jaxlib", "libtpu")
EFFICIENCY = 0.83
"""Σ of the operations' bounds over the time of a step, in published v5p training of dense models of 32B to 128B."""
AGREEMENT = 0.02
"""How far the three counts of flops may lie apart for a projection to be made."""
GROUPED = ("grouped_matmul", "grouped_outer")
"""What the names of the grouped matmul's kernels begin with."""
MUCH = 2e9
"""Bytes that a chip sends for an all-reduce over the whole slice which deserve a warning."""
LARGEST = 10
"""Buffers that are named where a program does not fit."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is planned."""

    config: ConfigDict
    model: ModelConfig
    chip: Chip
    mesh: Mesh

    def work(self, name: str) -> flops_lib.Work:
        """What a chip's part of a program is given; of `sample_decode` a step with all responses at their longest."""
        data, sampling, training = self.config.data, self.config.sampling, self.config.training
        P, G = data.prompts_per_batch, sampling.group_size
        S, T = data.max_prompt_length, sampling.max_response_length
        rows = P * G
        if name == "sample_prefill":
            whole = flops_lib.of_rows(P, prompt=S, response=0, share=1)
            whole = dataclasses.replace(whole, predictions=P)
        elif name == "sample_decode":
            slots = sampling.slots or rows
            whole = flops_lib.Work(slots, slots, slots * (S + T))
        elif name == "reshard":
            whole = flops_lib.Work(0, 0, 0)
        else:
            rows = rows // training.minibatches if name == "update" else rows
            with jax.set_mesh(self.mesh):
                share = mesh_lib.shared_rows(rows // training.microbatches, G)
            whole = flops_lib.of_rows(rows, prompt=S, response=T, share=share)
        return whole / self.mesh.size

    def filled(self, name: str) -> float:
        """How much of the rows that the experts' buffers have room for there are, where experts are balanced."""
        model, mesh = self.model, self.mesh
        if name.startswith("sample"):
            mesh = experiment.make_sampler_mesh(self.config, mesh)
        shards = mesh.shape["expert"]
        dispatch = self.config.model.dispatch
        if not model.is_routed or dispatch == "capacity":
            return 1.0
        K = model.experts_per_token
        share = K / (shards * min(K, model.num_experts // shards))
        return max(share, 1 / HEADROOM) if name == "sample_decode" and dispatch == "gather" else share

    def state(self) -> tuple[TrainState, TrainState]:
        """The trainer's, as shapes, and where it lives."""
        optimizer, _ = experiment.make_update_rule(self.config)
        critic = experiment.make_critic(self.config, self.model)
        _, shapes = transformer.abstract(self.model)
        places = state_shardings(shapes, optimizer, self.mesh, critic=critic)
        return jax.eval_shape(partial(new_state, optimizer=optimizer, critic=critic), shapes), places

    def least_chips(self) -> int:
        """So many have the memory for the trainer's state and gradients alone, however they are laid out."""
        state, _ = self.state()
        trained = (state.params, None if state.critic is None else state.critic.params)
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, trained)))
        return math.ceil(held / self.chip.memory)

    def resident(self, name: str) -> int:
        """Bytes of a chip that others hold while a program runs: of the trainer's state what it is not given."""
        if name == "update":
            return 0
        state, places = self.state()
        given = {"score": ("policy.params", "critic.params"), "reshard": ("policy.params",)}.get(name, ())
        leaves = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(places), strict=True)
        return sum(
            math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
            for (path, x), place in leaves
            if not jax.tree_util.keystr(path).startswith(tuple(f".{part}" for part in given))
        )

    def formula(self, name: str) -> tuple[flops_lib.Flops, float]:
        """A forward's flops on a chip, by part, and how often attention's are run in the program as it is written."""
        forward = flops_lib.forward(self.model, self.work(name))
        if name != "update":
            return forward, 1.0
        return forward, 3.5 + (self.config.model.remat in transformer.LEAN)


def plan_program(
    name: str, setting: Setting, *, slices: int, key: str, cache: Path, dump: Path | None
) -> dict[str, Any]:
    """The facts of one program; see DESIGN's fixed keys, and `docs/tpu.md`."""
    program = programs.make(name, setting.config, setting.model, setting.mesh)
    traced = program.trace()
    with jax.set_mesh(program.mesh):
        compiled = compile_ahead(traced.lower(lowering_platforms=("tpu",)), key=key, cache=cache)
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / f"{name}.hlo").write_text(compiled.text)
    fill, resident = setting.filled(name), setting.resident(name)
    module, chip = costs_lib.Program(compiled.text, filled=dict.fromkeys(GROUPED, fill)), setting.chip
    facts: dict[str, Any] = {
        "fits": compiled.fits and compiled.peak_bytes + resident <= chip.memory,
        "peak_bytes": compiled.peak_bytes,
        "resident_bytes": resident,
        "limit_bytes": chip.memory,
        "headroom": round(1 - (compiled.peak_bytes + resident) / chip.memory, 4),
        "host_bytes": compiled.host_bytes,
        "hbm_by_kind": memory_by_kind(module, compiled, setting, name),
        "compile_s": round(compiled.seconds, 1),
        "warnings": [],
    }
    if not facts["fits"]:
        over = (compiled.peak_bytes + resident - chip.memory) / 1e9
        said = f": {compiled.complaint.splitlines()[0][:200]}" if compiled.complaint else ""
        facts["warnings"].append(f"needs {over:.1f} GB more than a chip has{said}")
        facts["largest"] = [described(module, buffer) for buffer in compiled.live[:LARGEST]]
    if not compiled.fits:
        return facts
    whole = module.costs()
    costs = whole if name != "sample_decode" else module.loop() or whole
    asked = jaxpr.product_flops(traced.jaxpr, filled=dict.fromkeys(GROUPED, fill)) / setting.mesh.size
    facts |= figures(costs, name, setting, traced_flops=asked, scheduled=module if costs is whole else None)
    facts["warnings"] += warnings(costs, setting, slices)
    return facts


def figures(
    costs: costs_lib.Costs, name: str, setting: Setting, *, traced_flops: float, scheduled: costs_lib.Program | None
) -> dict[str, Any]:
    """Flops, bytes, collectives and times of a program, or of a step of a decoder's loop, on one chip.

    What of the time on the links the compiler's schedule leaves exposed is told where `scheduled` is the program.
    """
    chip, (forward, times) = setting.chip, setting.formula(name)
    attention = forward.attention * times if costs.kernels else 0.0  # which kernels do that estimate nothing
    if name == "update":
        written = forward.forward + forward.backward(recomputed=setting.config.model.remat in transformer.LEAN)
        needed = forward.needed
    else:
        written = needed = forward.forward
    found = costs.flops + attention
    rates = costs_lib.Rates(chip.flops, chip.bandwidth, chip.links)
    with_kernels = rates._replace(kernel=attention / chip.flops / max(1.0, sum(costs.kernels.values())))
    seconds = {
        "compute": found / chip.flops,
        "hbm": costs.bytes / chip.bandwidth,
        "ici": costs.sent / chip.links,
        "attention": attention / chip.flops,
        "per_op": costs.seconds(rates),
        "exposed": None if scheduled is None else scheduled.elapsed(with_kernels) - costs.seconds(with_kernels),
        "floor": max(needed / chip.flops, least_bytes(name, setting) / chip.bandwidth),
    }
    counts = {"formula": written, "traced": traced_flops + attention, "compiled": found}
    if name == "sample_decode":  # traced is the whole program and not a step
        del counts["traced"]
    apart = max(counts.values()) / min(counts.values()) - 1 if all(counts.values()) else 0.0
    facts: dict[str, Any] = {
        "per": "step of the decode loop, all responses at their longest" if name == "sample_decode" else "run",
        "flops": found,
        "flops_by": counts,
        "flops_apart": round(apart, 4),
        "hbm_bytes": costs.bytes,
        "host_link_bytes": sum(c.times * c.host_bytes for c in costs.operations),
        "collectives": [
            {"kind": kind, "group": group, "count": round(count), "bytes": sent, "source": shortened(scope)}
            for (kind, group), (count, sent, scope) in costs.by_group().items()
        ],
        "ici_bytes": costs.sent,
        "seconds": seconds,
        "binds": max(("compute", "hbm", "ici"), key=lambda what: seconds[what]),
        "projected_step_s": None,
        "projected_mfu": None,
    }
    if name in ("update", "score") and apart > AGREEMENT:
        return facts
    low = (seconds["per_op"] + seconds["attention"]) / EFFICIENCY
    high = low + seconds["ici"]
    facts["projected_step_s"] = [low, high]
    facts["projected_mfu"] = [needed / chip.flops / max(t, 1e-12) for t in (high, low)]
    return facts


def least_bytes(name: str, setting: Setting) -> float:
    """Bytes that a chip must read at least: its share of all weights once, and of a decoder's cache what is seen."""
    model, chips = setting.model, setting.mesh.size
    embedding = model.vocab_size * model.hidden_size
    layers = flops_lib.forward(model, flops_lib.Work(1, 0, 0))
    dense = (layers.trunk + layers.down) / 2  # parameters that a token meets, of experts K
    idle = sum(stack.layers * stack.width * (stack.experts - stack.experts_per_token) for stack in model.stacks)
    whole = dense + 3 * model.hidden_size * idle
    if name == "reshard":
        return (4 + 2) * (whole + 2 * embedding) / chips
    seen = 0.0
    if name == "sample_decode":
        seen = setting.work(name).pairs * 2 * 2 * model.num_kv_heads * model.head_dim * model.num_layers
    return 2 * (whole + embedding) / chips + seen


def memory_by_kind(module: hlo.Module, compiled: Compiled, setting: Setting, name: str) -> dict[str, int]:
    """What a chip's memory holds at the peak, in bytes: what the compiler says is alive, sorted by what it is."""
    kinds: Counter[str] = Counter()
    shapes = parameter_shapes(setting)
    for buffer in without_aliases(module, compiled.live):
        kinds[kind_of(module, buffer, setting.model, shapes, name)] += buffer.bytes
    if compiled.fits:
        kinds["unused between buffers"] += max(0, compiled.peak_bytes - sum(kinds.values()))
    return dict(kinds.most_common())


def made(module: hlo.Module, buffer: Buffer) -> tuple[hlo.Operation | None, hlo.Array | None]:
    """The operation that makes a buffer and what is in it; None where the text does not tell."""
    operation = module.find(buffer.name)
    arrays = operation.arrays[buffer.element or 0 :] if operation is not None else ()
    return operation, arrays[0] if arrays else None


def without_aliases(module: hlo.Module, live: Sequence[Buffer]) -> list[Buffer]:
    """The buffers that are not a loop's names for others: it changes in place what it is given."""
    found, seen, inner = [], Counter[hlo.Array | None](), []
    for buffer in live:
        operation, array = made(module, buffer)
        if operation is not None and operation.opcode == "parameter" and buffer.element is not None:
            inner.append((buffer, array))
        else:
            found.append(buffer)
            seen[array] += 1
    for buffer, array in inner:
        if seen[array]:
            seen[array] -= 1
        else:
            found.append(buffer)
    return found


def parameter_shapes(setting: Setting) -> set[tuple[int, ...]]:
    """Of the parameters as a chip of the trainer holds them."""
    _, shapes = transformer.abstract(setting.model)
    placed = mesh_lib.param_shardings(shapes, setting.mesh)
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True)
    return {tuple(sharding.shard_shape(x.shape)) for x, sharding in leaves}


def kind_of(module: hlo.Module, buffer: Buffer, model: ModelConfig, shapes: set[tuple[int, ...]], name: str) -> str:
    """Parameters, optimizer, gradients, saved activations, cache, collectives, …, of one buffer."""
    operation, array = made(module, buffer)
    if operation is None:
        return "other"
    if operation.opcode == "parameter" and buffer.element is None:
        path = operation.scope
        if "opt_state" in path:
            return "optimizer"
        if "params" in path:
            return "parameters"
        return "cache" if ".k" in path or ".v" in path else "batch"
    if operation.opcode.removesuffix("-start").removesuffix("-done") in hlo.COLLECTIVES:
        return "collectives"
    dims = array.dims if array else ()
    if name == "update" and dims in shapes:
        return "gradients"
    if len(dims) > 1 and dims[0] in {model.num_layers, *(stack.layers for stack in model.stacks)}:
        kinds = {"update": "saved activations", "score": "routes", "reshard": "the sampler's weights"}
        return kinds.get(name, "cache")
    for scope in ("attention", "feed_forward", "logits", "optimizer"):
        if scope in operation.scope:
            return scope.replace("_", " ")
    return "other"


def described(module: hlo.Module, buffer: Buffer) -> str:
    """One line on a buffer."""
    operation, array = made(module, buffer)
    if operation is None or array is None:
        return f"{buffer.bytes / 1e9:.2f} GB {buffer.name}"
    shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
    return f"{buffer.bytes / 1e9:.2f} GB {shape} {operation.opcode}: {shortened(operation.scope)}"


def shortened(scope: str) -> str:
    """The end of a scope, without what every program has in it."""
    parts = [p for p in scope.split("/") if p not in ("while", "body", "eval_jaxpr", "checkpoint", "closed_call")]
    return "/".join(parts[-4:])


def warnings(costs: costs_lib.Costs, setting: Setting, slices: int) -> list[str]:
    """What to look at in a program that fits."""
    found = []
    reduced = [
        (times * t.bytes, t.scope)
        for times, t in costs.collectives
        if t.kind == "all-reduce" and t.group == setting.mesh.size > 1 and times * t.bytes > MUCH
    ]
    if reduced:
        sent = sum(size for size, _ in reduced) / 1e9
        found.append(f"{sent:.1f} GB of all-reduces over the whole slice ({shortened(max(reduced)[1])})")
    if slices > 1:
        found.append("what goes from slice to slice is counted as if it went over links, and is slower")
    copied = sum(
        c.times * c.bytes
        for c in costs.operations
        if c.operation.startswith("copy ") and c.times * c.bytes > 0.02 * costs.bytes
    )
    if copied:
        found.append(f"{copied / 1e9:.1f} GB of main-memory traffic only changes the layout of arrays")
    if costs.unknown:
        found.append(f"{len(costs.unknown)} loops whose turns depend on data are counted as one turn")
    return found


def topology_facts(name: str, slices: int, mesh: Mesh) -> dict[str, Any]:
    """What identifies a plan."""
    return {
        "chip": topology.generation(name),
        "topology": name if slices == 1 else f"{slices} x {name}",
        "mesh": dict(mesh.shape),
        "versions": {package: metadata.version(package) for package in PACKAGES},
    }


def show(console: Console, name: str, facts: Mapping[str, Any]) -> None:
    """One program for the eye."""
    gb = 1e9
    fits = "fits" if facts["fits"] else "DOES NOT FIT"
    console.print(
        f"\n[bold]{name}[/bold]: {fits}, {facts['peak_bytes'] / gb:.2f} GB beside {facts['resident_bytes'] / gb:.2f} "
        f"of {facts['limit_bytes'] / gb:.2f} GB ({facts['headroom']:.0%} free), compiled in {facts['compile_s']:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    held = ", ".join(f"{kind} {size / gb:.2f}" for kind, size in facts["hbm_by_kind"].items() if size > 0.005 * gb)
    on_host = f"; {facts['host_bytes'] / gb:.2f} of the host's" if facts["host_bytes"] else ""
    console.print(f"  at the peak, GB: {held}{on_host}", highlight=False, soft_wrap=True)
    if facts["fits"]:
        show_costs(console, facts)
    for line in facts.get("largest", []):
        console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
    for text in facts["warnings"]:
        console.print(f"  warning: {text}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def show_costs(console: Console, facts: Mapping[str, Any]) -> None:
    """Flops, collectives and times."""
    seconds, per = facts["seconds"], facts["per"]
    counts = ", ".join(f"{by} {count / 1e12:.2f}" for by, count in facts["flops_by"].items())
    console.print(
        f"  Tflop per chip and {per}: {counts} ({facts['flops_apart']:.1%} apart)", highlight=False, soft_wrap=True
    )
    for c in facts["collectives"][:4]:
        console.print(
            f"  {c['kind']} over {c['group']}: {c['count']} times, {c['bytes'] / 1e9:.2f} GB sent, "
            f"most in {c['source']}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    if facts["host_link_bytes"]:
        moved = facts["host_link_bytes"] / 1e9
        console.print(f"  to and from the host's memory: {moved:.2f} GB", highlight=False, soft_wrap=True)
    bounds = ", ".join(f"{what} {1e3 * s:.2f}" for what, s in seconds.items() if s is not None)
    console.print(f"  ms: {bounds}; {facts['binds']} binds", highlight=False, soft_wrap=True)
    if facts["projected_step_s"] is None:
        console.print("  no projection: the counts of flops lie too far apart", style="yellow", soft_wrap=True)
    elif seconds["floor"]:
        low, high = facts["projected_step_s"]
        console.print(
            f"  projected (ahead of time, not measured): {1e3 * low:.1f} ms with collectives hidden, "
            f"{1e3 * high:.1f} ms with them exposed, {low / seconds['floor']:.2f} to "
            f"{high / seconds['floor']:.2f} times the floor",
            highlight=False,
            soft_wrap=True,
        )


def chosen(names: Sequence[str]) -> list[str]:
    """The programs that are asked for; all of them for none."""
    for name in names:
        if name not in programs.NAMES:
            raise UserError(f"there is no program {name!r}; {choices(name, programs.NAMES)}")
    return [name for name in programs.NAMES if not names or name in names]


def plan(
    config: ConfigDict,
    name: str,
    *,
    slices: int = 1,
    only: Sequence[str] = (),
    cache: Path,
    dump: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """The facts of all programs for a slice, or several; printed as they come where there is a console.

    Raises:
      UserError: the config, the topology or the mesh is wrong, or libtpu is missing.
    """
    wanted = chosen(only)
    experiment.check(config)
    model = experiment.model_config(config)
    generation = topology.generation(name)
    mesh = topology.topology_mesh(name, dict(config.mesh), slices=slices)
    experiment.check_batch(config, dict(mesh.shape))
    model.check_mesh(dict(mesh.shape))
    sampler_mesh = experiment.make_sampler_mesh(config, mesh)
    model.check_mesh(dict(sampler_mesh.shape))
    setting = Setting(config, model, CHIPS[generation], mesh)
    facts = topology_facts(name, slices, mesh)
    with jax.set_mesh(mesh):
        key = f"{facts['topology']} {facts['versions']} {backend.compiler_options()}"
    least = setting.least_chips()
    facts |= {"sampler_mesh": dict(sampler_mesh.shape), "least_chips": least, "programs": {}}
    if console is not None:
        mesh_text = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        console.print(
            f"{facts['topology']}, {mesh.size} chips, mesh {mesh_text}; parameters, gradients and optimizer alone need "
            f"{least}",
            highlight=False,
            soft_wrap=True,
        )
    for one in wanted:
        found = facts["programs"][one] = plan_program(one, setting, slices=slices, key=key, cache=cache, dump=dump)
        if console is not None:
            show(console, one, found)
    return facts


def default_cache() -> Path:
    """Where compiled programs are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gspo_jax" / "plan"


def main(config: ConfigDict) -> None:
    """The command line."""
    f = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # a TPU that is there is left alone
    facts = plan(
        config,
        f.topology,
        slices=f.slices,
        only=f.programs,
        cache=Path(f.cache) if f.cache else default_cache(),
        dump=Path(f.dump) if f.dump else None,
        console=Console(),
    )
    cli.write_facts(f.json, facts)
    if not all(program["fits"] for program in facts["programs"].values()):
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_string("topology", None, "Slice to compile for, such as v5p:4x4x4 or v6e:8x8.", required=True)
    flags.DEFINE_integer("slices", 1, "How many of them, joined by the network.", lower_bound=1)
    flags.DEFINE_list("programs", [], f"Only these, of {', '.join(programs.NAMES)}.")
    flags.DEFINE_string("json", None, "Also write the facts to this file.")
    flags.DEFINE_string("dump", None, "Keep each program's compiled text in this folder, as PROGRAM.hlo.")
    flags.DEFINE_string("cache", "", "Folder of compiled programs; empty: ~/.cache/gspo_jax/plan.")
    cli.run(main)
