"""Throughput of sampling, scoring and updates on this machine: whole GSPO iterations on random prompts, EOS disabled.

    python -m gspo_jax.bench --model=HF_FOLDER --prompts=8 --group=8 --prompt_length=32 --new_tokens=128 --minibatches=4
    python -m gspo_jax.bench --calibrate=FILE

Runs the iterations of `train` with random rewards, without data, reward functions, checkpoints and metrics files. Each
time is compared with a floor: unavoidable flops at the matmul speed measured in the same process.

`--calibrate=FILE` measures the attached devices instead (planning/calibration.py) and writes rates for `plan --rates`.

A separate process first compiles the programs into a cache, so peak memory excludes the compiler's, the larger part on
CPU. `--compile=here` does both in one process.
"""

import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from gspo_jax import cli, engine
from gspo_jax.errors import UserError
from gspo_jax.iteration import Observer, iterate
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import hosts, processes
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parser import Parser, make_parser
from gspo_jax.planning import calibration
from gspo_jax.planning import rates as rates_lib
from gspo_jax.profiling.phases import PhaseTraces, Span
from gspo_jax.progress import make_table
from gspo_jax.rollout.episodes import new_batch
from gspo_jax.setup import keys
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.setup.players import make_stop_rule
from gspo_jax.training.metrics import Metrics
from gspo_jax.types import Batch, Prompts, Rewards, SamplerStats
from gspo_jax.versions import versions
from gspo_jax.workload import Workload, flops

PARTS = ("sample", "score", "update")
PART_OF = {"reshard": "sample", "reward": "score"}
"""Parts of the iteration's other phases."""


class Iterations(Observer):
    """Iterations of `train` on random prompts and rewards, one per call. All processes make the same."""

    def __init__(self, work: Workload, model: ModelConfig, mesh: Mesh, *, begin: bool = True):
        """Build the programs, and with `begin` the state that they start from."""
        config = work.config
        stop = make_stop_rule(config, eos_ids=(), pad_id=0)
        self.engine = engine.build(config, model, make_meshes(config, model, mesh), stop, memory=hosts.memory_of(mesh))
        self.packed: dict[str, float] = {}
        """Packing metrics of the newest iteration."""
        self._work, self._vocabulary = work, model.vocab_size
        self.traces: PhaseTraces | None = None
        """Traces the next iterations' phases."""
        self.measured: list[Metrics] = []
        """Metrics of its updates."""
        self.stats = SamplerStats()
        """Sampling time and work of the newest iteration."""
        self._random, self._key = np.random.default_rng(0), keys.run_key(config)
        self._phases: list[tuple[str, float]] = []
        if begin:
            self.begin_state()

    def begin_state(self) -> None:
        """Load the weights and begin their training."""
        weights = self.engine.load(self._work.model)
        self.engine, self._state = dataclasses.replace(self.engine, frozen=weights.frozen), self.engine.begin(weights)

    def run(self, number: int) -> dict[str, float]:
        """Run iteration `number` and return its seconds by part.

        Resharding counts as sampling, packing as scoring, advantages as updating.
        """
        key = keys.sample_key(self._key, number)
        self._phases = []
        if self.traces is not None:
            self.traces.begin(number + 1)
        state, batch, self.measured = iterate(self.engine, self, self, self._state, iter([self._prompts()]), key, self)
        self._state = jax.block_until_ready(state)
        self.enter("")
        self.packed = self.engine.packer.metrics(batch.packing, batch.lengths, batch.prompt_lengths)
        seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for (phase, begun), (_, ended) in itertools.pairwise(self._phases):
            seconds[PART_OF.get(phase, phase)] += ended - begun
        return seconds | {"iteration": sum(seconds.values())}

    def enter(self, phase: str) -> None:
        """Record the start of a phase, and trace it if wanted."""
        if phase == "score":
            self.stats = self.engine.sampler.stats
        if self.traces is not None:
            try:
                self.traces.stop()
            except OSError as error:
                print(f"a trace is lost: {error}", file=sys.stderr)
            self.traces.start(phase)
        self._phases.append((phase, time.perf_counter()))

    def _prompts(self) -> Prompts:
        shape = (self._work.prompts, self._work.prompt_length)
        tokens: Any = self._random.integers(self._vocabulary, size=shape, dtype=np.int32)
        lengths: Any = np.full(self._work.prompts, self._work.prompt_length, np.int32)
        return Prompts(tokens, lengths)

    def play(self, prompts: Iterator[Prompts], key: jax.Array, *, first: int = 0) -> Batch:
        """Sample responses of the workload's lengths."""
        asked, work = next(prompts), self._work
        limits = None if work.lengths is None else work.limits
        return new_batch(self.engine.sampler(asked, key, first=first, limits=limits), asked)

    def begin(self, batch: Batch) -> Callable[[], Rewards]:
        """Draw random rewards."""
        total = self._random.random(len(batch.lengths), np.float32)
        return lambda: Rewards(total=total, learn=np.ones(total.shape, bool))


def measure(work: Workload, profile: Path | None = None) -> dict[str, Any]:
    """Run the workload and return timings, floors and settings, as `--json` writes them.

    With a folder `profile` the phases of one more iteration are traced there.

    Raises:
      UserError: see `Workload.check`, or the weights do not load, or devices are missing.
    """
    model = work.check()
    if len(jax.devices()) < work.devices:
        raise UserError(f"--devices is {work.devices}, but jax finds only {len(jax.devices())}; use at most that many")
    mesh = mesh_lib.make_mesh(work.mesh, devices=jax.devices()[: work.devices])
    with jax.set_mesh(mesh):
        iterations, seen, stats = Iterations(work, model, mesh), [], []
        for number in range(work.warmup + work.repeats):
            seen.append(iterations.run(number))
            stats.append(iterations.stats)
            note = ", compilation included" if number == 0 else ", warm-up" if number < work.warmup else ""
            print(f"iteration {number + 1}: {seen[-1]['iteration']:.2f} s{note}", file=sys.stderr)
        peak = peak_rss_mb()
        if profile is not None:
            number = work.warmup + work.repeats
            iterations.traces = PhaseTraces(profile, Span(number + 1, number + 1))
            iterations.run(number)
            print("\n".join(iterations.traces.conclude()), file=sys.stderr)
        rate = calibration.matmul_flops_per_s(mesh, work.dtype)
    columns = {name: [times[name] for times in seen[work.warmup :]] for name in (*PARTS, "iteration")}
    medians = {name: statistics.median(column) for name, column in columns.items()}
    least = flops(model, work)
    floors = {name: least[name] / rate for name in columns}
    return {
        **{
            name: {"median_s": s, "min_s": min(columns[name]), "tokens_per_s": work.tokens[name] / s}
            for name, s in medians.items()
        },
        "packing": {name.removeprefix("packing/"): value for name, value in iterations.packed.items()},
        "prefill_s": statistics.median(s.prefill_s for s in stats[work.warmup :]),
        "decode_s": statistics.median(s.decode_s for s in stats[work.warmup :]),
        "decode_steps": stats[-1].steps,
        "occupancy": stats[-1].occupancy,
        "peak_rss_mb": peak,
        "compile_s": sum(max(0.0, seen[0][part] - medians[part]) for part in PARTS),
        "floor": {
            "matmul_flops_per_s": rate,
            **{f"{name}_flops": count for name, count in least.items()},
            "seconds": floors,
            "ratio": {name: medians[name] / floors[name] for name in columns},
        },
        "workload": {**vars(work), "model": str(work.model), "mesh": dict(mesh.shape)},
        "cores": processes.cores(),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }


def peak_rss_mb() -> float:
    """Return this process's peak resident memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def show(found: Mapping[str, Any]) -> None:
    """Print timings as a table, with memory and compilation below."""
    floor, work = found["floor"], found["workload"]
    rows = [
        {
            "part": name,
            "median s": found[name]["median_s"],
            "min s": found[name]["min_s"],
            "tokens/s": f"{found[name]['tokens_per_s']:,.0f}",
            "floor s": floor["seconds"][name],
            "× floor": f"{floor['ratio'][name]:.2f}",
        }
        for name in (*PARTS, "iteration")
    ]
    size = f"{work['prompts']} × {work['group']} responses, {work['prompt_length']} + {work['new_tokens']} tokens"
    size += f" ({work['lengths']})" if work["lengths"] else ""
    size += f", {work['slots']} slots" if work["slots"] else ""
    console = Console(highlight=False)
    console.print(make_table(rows, title=f"{size}, {work['minibatches']} updates, {work['dtype']}"))
    print(
        f"prefill {found['prefill_s']:.3f} s; decode {found['decode_s']:.3f} s, {found['decode_steps']} steps with "
        f"{found['occupancy']:.0%} of their slots in use"
    )
    packed = found["packing"]
    print(f"{packed['microbatches']:g} micro-batches an update, {packed['fill']:.0%} of whose token slots are in use")
    print(
        f"peak memory {found['peak_rss_mb']:,.0f} MB, with the compiler {found['compile_peak_rss_mb']:,.0f} MB; "
        f"compilation {found['compile_s']:.1f} s; {work['devices']} × "
        f"{found['device']}, {found['cores']} cores; matrices multiply at "
        f"{floor['matmul_flops_per_s'] / 1e9:,.0f} GFLOP/s"
    )


def read_mesh(text: str) -> dict[str, int]:
    """Parse mesh sizes such as `fsdp:-1,expert:2`."""
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        return {name: int(size) for name, _, size in pairs}
    except ValueError:
        raise UserError(f"--mesh is {text!r}; write axes and sizes such as fsdp:-1,expert:2") from None


def parser() -> Parser:
    """Build the parser, with the defaults of `Workload`."""
    parser = make_parser("bench")
    defaults = {field.name: field.default for field in dataclasses.fields(Workload)}
    parser.set_defaults(**{name: value for name, value in defaults.items() if value is not dataclasses.MISSING})
    return parser


def compile_ahead(arguments: Sequence[str], cache: Path) -> dict[str, float]:
    """Fill the cache by running the workload in another process. Return its compile time and peak memory.

    Raises:
      UserError: that process failed, after its own message.
    """
    file = cache / "compiled.json"
    command = [sys.executable, "-m", "gspo_jax.bench", *arguments]
    command += ["--compile=here", "--warmup=1", "--repeats=1", "--profile=", f"--json={file}"]
    environment = {name.upper(): str(value) for name, value in cache_settings(cache).items()}
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"compiling ahead failed with exit code {done.returncode}; see above, or use --compile=here")
    found = json.loads(file.read_text())
    return {"compile_s": found["compile_s"], "compile_peak_rss_mb": found["peak_rss_mb"]}


def cache_settings(cache: Path) -> dict[str, Any]:
    """Return jax options to cache every program. In capitals, they are environment variables."""
    return {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }


def calibrate(file: str) -> None:
    """Measure all attached devices, print their rates and write them to a file, in the first process.

    Raises UserError if the file cannot be written.
    """
    cli.check_facts_file(file, flag="calibrate")
    devices = jax.devices()
    rates = calibration.measure(mesh_lib.make_mesh({"data": -1}, devices=devices))
    for name in rates_lib.FIGURES:
        print(f"{name}: {getattr(rates, name):.4g} ({rates.sources[name]})")
    if processes.is_first():
        rates_lib.write(Path(file), rates, generation=calibration.generation(devices[0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments, options = sys.argv[1:] if arguments is None else arguments, parser()

    def command(parsed: Namespace) -> None:
        given = vars(parsed)
        if given["calibrate"] is not None:
            others = [name for name, value in given.items() if value != options.get_default(name)]
            if len(others) > 1:
                raise UserError(f"--calibrate measures the devices alone; leave out --{others[0]}")
            with processes.guarded(processes.start()):
                calibrate(given["calibrate"])
            return
        if given["model"] is None:
            raise UserError("--model is missing; give the model's Hugging Face folder")
        del given["calibrate"]
        file, mesh, place = given.pop("json"), given.pop("mesh"), given.pop("compile")
        profile = Path(given["profile"]) if given["profile"] else None
        del given["profile"]
        if mesh is not None:
            given["mesh"] = read_mesh(mesh)
        if place not in ("ahead", "here"):
            raise UserError(f"--compile is {place!r}; use ahead or here")
        work = Workload(**given)
        work.check()
        cli.check_facts_file(file)
        cli.check_output_folder(profile, flag="profile")
        cli.reuse_memory()
        if work.devices > 1:
            cli.simulate_devices(work.devices)
        if place == "ahead":
            with tempfile.TemporaryDirectory(prefix="gspo_jax-compiled-") as folder:
                compiled = compile_ahead(arguments, Path(folder))
                for name, value in cache_settings(Path(folder)).items():
                    jax.config.update(name, value)
                found = measure(work, profile) | compiled
        else:
            found = measure(work, profile)
            found["compile_peak_rss_mb"] = found["peak_rss_mb"]
        show(found)
        cli.write_facts(file, found)

    return options.run(command, arguments, place="--json")


if __name__ == "__main__":
    sys.exit(main())
