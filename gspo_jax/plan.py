"""Ahead-of-time compilation of every program of an iteration for a TPU slice: does it fit, and what does it cost?

    python -m gspo_jax.plan --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4 [--slices=2]
        [--programs=update,score] [--json=FILE] [--dump=DIR] [--cycles] [--rates=FILE] [--skew=0.25]
        [--lengths=lognormal:4096:0.8 [--figure=FILE.png] [--tune]]

Runs on any machine with libtpu, without a TPU. Figures come from the compiled programs and the compiler's memory
analysis. Times are bounds, executed times at the rates of planning/rates.py, and a projection calibrated on published
v5p results: an estimate, not a measurement. Compiled programs are cached, so a second plan takes seconds.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax.interpreters import partial_eval
from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli
from gspo_jax import engine as engine_lib
from gspo_jax.errors import UserError, choices
from gspo_jax.kernels import backend
from gspo_jax.lengths import Lengths
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import compilation, processes
from gspo_jax.planning import cycles, executed, iteration, jaxpr, memory, programs, topology, verdict
from gspo_jax.planning import rates as rates_lib
from gspo_jax.planning.ahead import Compiled, compile_ahead
from gspo_jax.planning.figures import figures, warnings
from gspo_jax.planning.loads import SKEW
from gspo_jax.planning.setting import Setting
from gspo_jax.planning.show import (
    show_cycles,
    show_fit,
    show_header,
    show_iteration,
    show_program,
    show_try,
    show_verdict,
)
from gspo_jax.planning.timeline import draw
from gspo_jax.planning.topology import CHIPS
from gspo_jax.planning.tune import Search
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.players import make_stop_rule

Piece = tuple[jax.stages.Traced, Future[Compiled]]
"""A traced program and its pending compilation."""
PACKAGES = ("jax", "jaxlib", "libtpu")
LARGEST = 10
"""Buffers listed for a program that does not fit."""


def plan_programs(
    names: Sequence[str],
    setting: Setting,
    *,
    pool: ThreadPoolExecutor,
    key: str,
    cache: Path,
    dump: Path | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each program's name and facts, in order. `pool` compiles them in parallel."""

    def started(program: programs.Program) -> Piece:
        traced = program.trace()
        with jax.set_mesh(program.mesh):
            lowered = traced.lower(lowering_platforms=("tpu",))
        return traced, pool.submit(compile_ahead, lowered, key=key, cache=cache)

    pieces = [[started(program) for program in programs.make(name, setting.engine)] for name in names]
    for name, own in zip(names, pieces, strict=True):
        yield name, program_facts(name, own, setting, dump=dump)


def program_facts(name: str, pieces: Sequence[Piece], setting: Setting, *, dump: Path | None) -> dict[str, Any]:
    """Return memory, costs, time bounds and warnings of a compiled program.

    Of several pieces: memory of the largest, costs of the loop that they step through.
    """
    traced, found = [one for one, _ in pieces], [compiled.result() for _, compiled in pieces]
    modules = [executed.costed(setting, name, one.text) for one in found]
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        for i, one in enumerate(found):
            (dump / f"{name}{f'_{i}' if i else ''}.hlo").write_text(one.text)
    fits, chip = all(one.fits for one in found), setting.chip
    beside = [memory.resident(module, setting, name) for module in modules]
    largest = max(range(len(found)), key=lambda i: found[i].peak_bytes + beside[i])
    compiled, module, resident = found[largest], modules[largest], beside[largest]
    peak = compiled.peak_bytes
    facts: dict[str, Any] = {
        "fits": fits and peak + resident <= chip.memory,
        "peak_bytes": peak,
        "resident_bytes": resident,
        "limit_bytes": chip.memory,
        "headroom": round(1 - (peak + resident) / chip.memory, 4),
        "host_bytes": max(one.host_bytes for one in found),
        "hbm_by_kind": memory.by_kind(module, compiled, setting, name),
        "compile_s": round(sum(one.seconds for one in found), 1),
        "warnings": [],
    }
    if not facts["fits"]:
        over = (peak + resident - chip.memory) / 1e9
        said = f": {compiled.complaint.splitlines()[0][:200]}" if compiled.complaint else ""
        facts["warnings"].append(f"needs {over:.1f} GB more than a chip has{said}")
        facts["largest"] = [memory.described(module, buffer) for buffer in compiled.live[:LARGEST]]
    if not fits:
        return facts
    if name == "sample_decode":
        loops = [
            loop for module in modules for loop in zip(module.loops(), module.elapsed_loops(setting.rates), strict=True)
        ]
        facts["steps"] = iteration.decode_steps(loops, setting)
        slots, pool = setting.decoder_size
        facts["decoder"] = {"slots": slots, "page": pool.columns, "pages": pool.pages}
        costs, elapsed = max(loops, key=lambda loop: loop[0].bytes)
    else:
        costs, elapsed = module.costs(), module.elapsed(setting.rates)
    filled = executed.filled(setting, name)
    traced_flops = sum(jaxpr.product_flops(read(one), filled=filled) for one in traced) / setting.mesh.size
    facts |= figures(costs, name, setting, traced_flops=traced_flops, elapsed=elapsed)
    facts["cycles"] = cycles.compared(costs, setting)
    facts["warnings"] += warnings(costs, setting)
    return facts


def read(traced: jax.stages.Traced) -> Any:
    """Return a traced program without unread parts, such as the policy if only the reference is scored."""
    whole = traced.jaxpr.jaxpr
    return partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))[0]


def prepare(
    config: ConfigDict, model: ModelConfig, name: str, *, slices: int, rates: Path | None, skew: float
) -> tuple[Setting, dict[str, Any], str]:
    """Return the run on a slice, its plan's identifying facts, and its cache key."""
    mesh = topology.topology_mesh(name, dict(config.mesh), slices=slices)
    meshes = make_meshes(config, model, mesh)
    stop = make_stop_rule(config, eos_ids=model.eos_token_ids, pad_id=model.pad_token_id or 0)
    kind = topology.generation(name)
    used = rates_lib.assumed(kind) if rates is None else rates_lib.read(rates, generation=kind)
    chip, torus = CHIPS[kind], topology.torus(name, mesh)
    engine = engine_lib.build(config, model, meshes, stop, memory=chip.memory)
    # The steps with drafts alone: those without are the plan of `sampling.draft=none`.
    engine.sampler.drafting = dataclasses.replace(engine.sampler.drafting, always=True)
    setting = Setting(engine, chip, used, skew=skew, torus=torus, slices=slices)
    facts = {
        "chip": kind,
        "topology": name if slices == 1 else f"{slices} x {name}",
        "mesh": dict(mesh.shape),
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "skew": skew if model.is_routed else None,
        "rates": dataclasses.asdict(used),
    }
    with jax.set_mesh(mesh):
        return setting, facts, f"{facts['topology']} {facts['versions']} {backend.compiler_options()}"


def check_accepted(config: ConfigDict, lengths: str | None, accepted: float | None) -> None:
    """Raise a UserError unless an iteration with drafts, and only that, has the tokens per step that it gains."""
    drafts = config.sampling.draft != "none"
    if accepted is not None and lengths is None:
        raise UserError(f"--accepted={accepted} needs the lengths of responses, such as --lengths=lognormal:4096:0.8")
    if accepted is None:
        if drafts and lengths is not None:
            raise UserError(
                f"sampling.draft is {config.sampling.draft}, and what drafts gain depends on the texts; give the "
                "tokens per step, such as --accepted=1.6 (gspo-jax accept tells them), or use "
                "--config.sampling.draft=none"
            )
        return
    most = 1 + config.sampling.draft_tokens if drafts else 1
    if not 1 <= accepted <= most:
        raise UserError(
            f"--accepted is {accepted}; with sampling.draft={config.sampling.draft} and "
            f"sampling.draft_tokens={config.sampling.draft_tokens} a slot samples from 1 to {most} tokens in a step"
        )


def tune(
    config: ConfigDict,
    name: str,
    lengths: str,
    *,
    slices: int,
    headroom: float,
    cache: Path,
    rates: Path | None,
    skew: float,
    console: Console,
) -> dict[str, Any]:
    """Search for the fastest settings. Print and return the tries and the best.

    Raises:
      UserError: see `plan`, or the config's own settings do not fit.
    """
    check(config)
    drawn_from = Lengths(lengths, config.sampling.max_response_length, "sampling.max_response_length")

    pool = ThreadPoolExecutor(processes.cores())

    def planner(config: ConfigDict, names: Sequence[str]) -> tuple[dict[str, Any], Setting]:
        setting, _, key = prepare(config, check(config), name, slices=slices, rates=rates, skew=skew)
        found = plan_programs(names, setting, pool=pool, key=key, cache=cache, dump=None)
        return dict(found), setting

    search = Search(config, planner, drawn_from, headroom, partial(show_try, console))
    with pool:
        changes, found = search.run()
    facts = found.facts(lengths, math.prod(search.planner(config, ())[1].mesh.shape.values()))
    show_iteration(console, facts)
    flags_of_best = [f"--config.{field}={value}" for field, value in changes.items()]
    console.print(f"\n{' '.join(flags_of_best) or 'the settings of the config are the best'}", soft_wrap=True)
    return {"tries": [vars(one) for one in search.tries], "changes": changes, "iteration": facts}


def chosen(names: Sequence[str]) -> list[str]:
    """Return the requested programs in the usual order, all if none is named."""
    for name in names:
        if name not in programs.NAMES:
            raise UserError(f"unknown program {name!r}; {choices(name, programs.NAMES)}")
    return [name for name in programs.NAMES if not names or name in names]


def plan(
    config: ConfigDict,
    name: str,
    *,
    slices: int = 1,
    only: Sequence[str] = (),
    cache: Path,
    dump: Path | None = None,
    rates: Path | None = None,
    skew: float = SKEW,
    console: Console | None = None,
    with_cycles: bool = False,
    lengths: str | None = None,
    accepted: float | None = None,
    figure: Path | None = None,
) -> dict[str, Any]:
    """Return the facts of all programs, and print them to a given console.

    First a line for each program once it is compiled and a verdict, as early as it is known, then what they cost.

    `with_cycles` also prints the compiler's estimates. `lengths`, a distribution, adds the facts of an iteration, drawn
    to the file `figure`. With drafts a slot samples `accepted` tokens in a step.

    Raises:
      UserError: the config, topology, mesh, `lengths` or `accepted` is wrong, libtpu is missing, or an iteration lacks
        a program that fits.
    """
    wanted, console = chosen(only), console or Console(quiet=True)
    model = check(config)
    check_accepted(config, lengths, accepted)
    drawn_from = None
    if lengths is not None:
        drawn_from = Lengths(lengths, config.sampling.max_response_length, "sampling.max_response_length")
        if missing := [one for one in programs.NAMES if one not in wanted]:
            raise UserError(f"--lengths needs all programs, and --programs leaves out {', '.join(missing)}; name none")
    elif figure is not None:
        raise UserError(f"--figure={figure} needs the lengths of responses, such as --lengths=lognormal:4096:0.8")
    setting, facts, key = prepare(config, model, name, slices=slices, rates=rates, skew=skew)
    meshes, mesh = setting.engine.meshes, setting.mesh
    facts |= {"sampler_mesh": dict(meshes.sampler.shape), "least_chips": setting.least_chips(), "programs": {}}
    show_header(console, facts)
    with ThreadPoolExecutor(processes.cores()) as pool:
        planned = plan_programs(wanted, setting, pool=pool, key=key, cache=cache, dump=dump)
        for one, found in planned:
            facts["programs"][one] = found
            show_fit(console, one, found)
            if not found["fits"] and "verdict" not in facts:
                facts["verdict"] = verdict.misfit(one, found, setting, name)
                show_verdict(console, facts["verdict"])
    if "verdict" not in facts:
        facts["verdict"] = verdict.fits(facts["programs"])
        show_verdict(console, facts["verdict"])
    for one, found in facts["programs"].items():
        show_program(console, one, found)
        if with_cycles and found["fits"]:
            show_cycles(console, found)
    if drawn_from is not None:
        run = iteration.make_run(facts["programs"], setting, tokens_per_step=accepted or 1.0)
        found = iteration.simulate(run, drawn_from)
        facts["iteration"] = found.facts(drawn_from.text, mesh.size)
        show_iteration(console, facts["iteration"])
        if figure is not None:
            on = f"{facts['topology']}, {topology.counted(facts['chip'], mesh.size)}"
            draw(run, found, drawn_from.text, on, figure)
    return facts


def main(config: ConfigDict) -> int:
    """Run the command and return its exit code, 1 if a program does not fit."""
    f = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # leaves this machine's TPU free
    jax.config.update("jax_enable_compilation_cache", False)  # texts of programs are cached, not programs
    cli.check_output_folder(f.cache or None, flag="cache")
    cli.check_output_folder(f.dump, flag="dump")
    cli.check_facts_file(f.figure, flag="figure")
    cache, rates = Path(f.cache) if f.cache else compilation.user_cache() / "plan", Path(f.rates) if f.rates else None
    if f.tune:
        if f.lengths is None:
            raise UserError("--tune needs the lengths of responses, such as --lengths=lognormal:4096:0.8")
        if config.sampling.draft != "none" or f.accepted is not None:
            raise UserError("--tune does not search with drafts; use --config.sampling.draft=none, without --accepted")
        shared: dict[str, Any] = {
            "slices": f.slices,
            "cache": cache,
            "rates": rates,
            "skew": f.skew,
            "console": Console(),
        }
        found = tune(config, f.topology, f.lengths, headroom=f.headroom, **shared)
        cli.write_facts(f.json, {"arguments": sys.argv[1:]} | found)
        return 0
    facts = plan(
        config,
        f.topology,
        slices=f.slices,
        only=f.programs,
        cache=cache,
        dump=Path(f.dump) if f.dump else None,
        rates=rates,
        skew=f.skew,
        console=Console(),
        with_cycles=f.cycles,
        lengths=f.lengths,
        accepted=f.accepted,
        figure=Path(f.figure) if f.figure else None,
    )
    cli.write_facts(f.json, {"arguments": sys.argv[1:]} | facts)
    return int(not all(program["fits"] for program in facts["programs"].values()))


if __name__ == "__main__":
    cli.run(main, "plan")
