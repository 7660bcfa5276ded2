"""How fast this machine samples, scores and learns: whole iterations of GSPO on random prompts, without an EOS.

    python -m gspo_jax.bench --model=HF_FOLDER --prompts=8 --group=8 --prompt_length=32 --new_tokens=128 --minibatches=4

Runs the functions that a training run is made of, with rewards drawn on the host; the parts of an iteration add up to
it. Each time stands beside a floor: the floating-point operations that the part cannot do without, at the speed that
this machine multiplies matrices with in the same process. Left out: data, reward functions, checkpoints, metrics files.

Programs are compiled ahead, by a process of its own that leaves them in a cache: the compiler's memory, which on CPU is
the larger part, is told apart from that of the process that samples and learns. `--compile=here` does both in one.
"""

import dataclasses
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int
from ml_collections import ConfigDict
from rich.console import Console

from gspo_jax import cli, experiment
from gspo_jax.config import base
from gspo_jax.models import huggingface, transformer
from gspo_jax.models.config import ModelConfig
from gspo_jax.parallel import hosts
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.reporting.drawing import Parser
from gspo_jax.reporting.progress import make_table
from gspo_jax.rollout.sampler import Sampler, Spent
from gspo_jax.training.experience import Rewards, make_experience
from gspo_jax.training.scoring import make_old_policy
from gspo_jax.training.state import new_state, state_shardings
from gspo_jax.training.update import make_update
from gspo_jax.types import Prompts, UserError

PARTS = ("sample", "score", "update")
"""Of an iteration, in their order."""
DTYPES = ("float32", "bfloat16")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
SIDES = {"cpu": (512, 1024, 2048), "accelerator": (2048, 4096, 8192)}
"""Of the square matrices that the speed of the floor is measured with."""
MATMUL_S = 0.3
"""Seconds for which each of them is multiplied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run."""

    model: Path
    """A Hugging Face folder."""
    prompts: int = 8
    group: int = 8
    """Responses to each prompt."""
    prompt_length: int = 32
    """Tokens of every prompt."""
    new_tokens: int = 128
    """Tokens of every response, at most."""
    lengths: str | None = None
    """How many tokens each response really has, as in uniform:16:128; None is `new_tokens` for all."""
    slots: int | None = None
    """Responses that decode at a time; None is all of them."""
    minibatches: int = 4
    """Updates per iteration."""
    microbatches: int = 1
    """That an update is cut into."""
    dtype: str = "float32"
    """Of the computation; parameters are float32."""
    repeats: int = 5
    """Iterations that are measured."""
    warmup: int = 1
    """Iterations before those; the first one compiles."""
    devices: int = 1
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
    """Sizes of the mesh's axes; -1 once: the rest of the devices. What is left out is 1."""

    @property
    def tokens(self) -> dict[str, int]:
        """What the speed of each part, and of the iteration, is counted in."""
        sampled = int(self.limits.sum())
        read = sampled + self.prompts * self.group * self.prompt_length
        return {"sample": sampled, "score": read, "update": read, "iteration": sampled}

    @property
    def limits(self) -> Int[np.ndarray, " B"]:
        """Tokens of each response, the same in every iteration.

        Raises:
          UserError: `lengths` cannot be read, or reaches beyond `new_tokens`.
        """
        responses = self.prompts * self.group
        if self.lengths is None:
            return np.full(responses, self.new_tokens, np.int32)
        kind, *ends = self.lengths.split(":")
        if kind != "uniform" or len(ends) != 2 or not all(end.isdigit() for end in ends):
            raise UserError(f"--lengths is {self.lengths!r}; write it as uniform:16:{self.new_tokens}")
        low, high = map(int, ends)
        if not 1 <= low <= high <= self.new_tokens:
            raise UserError(f"--lengths {self.lengths} does not lie in 1 to {self.new_tokens}, which is --new_tokens")
        return np.random.default_rng(0).integers(low, high + 1, responses).astype(np.int32)

    @property
    def config(self) -> ConfigDict:
        """The config of the training run whose iterations these are: a run's defaults, with activations kept."""
        config: Any = base()
        config.model.folder = str(self.model)
        config.model.dtype = self.dtype
        config.model.remat = "dots"
        config.data.prompts_per_batch = self.prompts
        config.data.max_prompt_length = self.prompt_length
        config.sampling.group_size = self.group
        config.sampling.max_response_length = self.new_tokens
        config.sampling.slots = self.slots
        config.training.minibatches = self.minibatches
        config.training.microbatches = self.microbatches
        config.training.old_logprobs = "recompute"
        config.optimizer.learning_rate = 1e-6
        config.optimizer.warmup_updates = 0
        config.optimizer.max_grad_norm = 1.0
        return config

    def check(self) -> ModelConfig:
        """The model's shape, read without a look at devices or weights.

        Raises:
          UserError: a number is out of its range, or does not fit the others or the model.
        """
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1")
        _ = self.limits  # raises where --lengths is no range
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype is {self.dtype!r}; use {' or '.join(DTYPES)}")
        model = huggingface.read_config(self.model)
        length, limit = self.prompt_length + self.new_tokens, model.max_position_embeddings
        if length > limit:
            raise UserError(
                f"--prompt_length {self.prompt_length} and --new_tokens {self.new_tokens} need {length} positions, and "
                f"the model has {limit}; take {length - limit} off"
            )
        sizes: dict[str, int] = dict(zip(mesh_lib.AXES, mesh_lib.mesh_sizes(self.mesh, self.devices), strict=True))
        try:
            experiment.check_batch(self.config, sizes)
        except UserError as error:
            raise UserError(_as_flags(str(error))) from None
        model.check_mesh(sizes)
        return model


def _as_flags(text: str) -> str:
    """A message about a config, about this command's flags."""
    for field, flag in {
        "data.prompts_per_batch": "prompts",
        "sampling.group_size": "group",
        "sampling.slots": "slots",
    }.items():
        text = text.replace(field, f"--{flag}")
    return text


def forward_flops(
    model: ModelConfig, *, lengths: Int[np.ndarray, " B"], rows_per_prompt: int, prompt_length: int
) -> int:
    """Floating-point operations that log-probs of responses cannot be had without, when the cache is perfect.

    A token's matmul parameters in one layer, with the K experts it goes to:

        A = D·H·h + 2·D·Kv·h + H·h·D + (D·E + 3·K·D·F, or 3·D·F in a dense layer)

    A prompt of S tokens is read once for the `rows_per_prompt` rows that share it; of a response of T tokens, one of
    `lengths`, all but the last are read, since nothing is predicted from that one. A token at position c (from 1)
    attends to exactly c keys, with 4·H·h·c operations: scores and weighted values. The vocabulary is projected to once
    for each response token, with D·V parameters. With N = B/rows_per_prompt·S + Σ(T − 1) tokens and Σc over their
    positions,

        flops = L·(2·A·N + 4·H·h·Σc) + 2·D·V·ΣT.

    A training pass costs three times as much: the gradient needs two products for each one of the forward. Norms,
    softmaxes, rotary positions, the embedding's lookup and the optimizer are not counted.
    """
    D, width = model.hidden_size, model.num_heads * model.head_dim
    S, fed = prompt_length, lengths.astype(np.int64) - 1
    feed = sum(stack.layers * D * (stack.experts + 3 * stack.active_width) for stack in model.stacks)
    active = model.num_layers * (2 * D * width + 2 * D * model.num_kv_heads * model.head_dim) + feed
    prompts = len(lengths) // rows_per_prompt
    tokens = prompts * S + int(fed.sum())
    contexts = prompts * (S * (S + 1) // 2) + int((S * fed + fed * (fed + 1) // 2).sum())
    of_head = 2 * D * model.vocab_size * int(lengths.sum(dtype=np.int64))
    return 2 * active * tokens + model.num_layers * 4 * width * contexts + of_head


def flops(model: ModelConfig, work: Workload) -> dict[str, int]:
    """Of each part, and of the iteration; the rows of a group share their prompt in all of them."""
    forward = forward_flops(model, lengths=work.limits, rows_per_prompt=work.group, prompt_length=work.prompt_length)
    return {"sample": forward, "score": forward, "update": 3 * forward, "iteration": 5 * forward}


def matmul_flops_per_s(mesh: Mesh, dtype: str) -> float:
    """How fast the devices multiply square matrices, all together: the best of each size, the median over sizes."""
    count, rates = mesh.devices.size, []
    multiply = jax.jit(jnp.matmul)
    spread = NamedSharding(mesh, PartitionSpec(mesh_lib.AXES))
    for side in SIDES["cpu" if mesh.devices.flat[0].platform == "cpu" else "accelerator"]:
        rows = jax.device_put(jnp.ones((count * side, side), dtype), spread)
        matrix = jax.device_put(jnp.ones((side, side), dtype), mesh_lib.replicated(mesh))
        jax.block_until_ready(multiply(rows, matrix))  # compiles
        seconds, end = [], time.perf_counter() + MATMUL_S
        while len(seconds) < 3 or time.perf_counter() < end:
            begun = time.perf_counter()
            jax.block_until_ready(multiply(rows, matrix))
            seconds.append(time.perf_counter() - begun)
        rates.append(2 * count * side**3 / min(seconds))
    return statistics.median(rates)


class Iterations:
    """The loop of train.py on random prompts and rewards, an iteration at a time. Needs its mesh in scope."""

    def __init__(self, work: Workload, model: ModelConfig, mesh: Mesh):
        config: Any = work.config
        dtype = jnp.dtype(work.dtype)
        objective = experiment.make_objective(config)
        graph, shapes = transformer.abstract(model, dtype=dtype)
        optimizer, schedule = experiment.make_update_rule(config)
        shardings = state_shardings(shapes, optimizer, mesh)
        scoring = experiment.scoring(config)
        self._work, self._mesh, self._vocabulary = work, mesh, model.vocab_size
        self.spent = Spent()
        """What sampling took in the newest iteration."""
        self._random, self._key = np.random.default_rng(0), experiment.run_key(config)
        self._sampler = Sampler(
            graph,
            shapes,
            mesh,
            dtype=dtype,
            group_size=work.group,
            length=work.new_tokens,
            sampling=experiment.make_sampling(config),
            eos_ids=(),
            pad_id=0,
            slots=config.sampling.slots,
            router_logprobs=experiment.keeps_router_logprobs(config, model),
        )
        self._old_policy = make_old_policy(
            graph, scoring, recompute=True, replay=config.routing.replay, microbatches=work.microbatches
        )
        self._experience = make_experience(objective, group_size=work.group, correction=None, kl_in_reward=0.0)
        self._update = make_update(
            graph,
            scoring,
            objective,
            optimizer,
            schedule,
            penalties=experiment.make_penalties(config),
            replay=config.routing.replay,
            shardings=shardings,
            minibatches=work.minibatches,
            microbatches=work.microbatches,
            group_size=work.group,
        )
        params = huggingface.load_params(work.model, model, mesh)
        self._state = jax.jit(lambda p: new_state(p, optimizer), out_shardings=shardings)(params)

    def run(self, number: int) -> dict[str, float]:
        """Seconds of each part of iteration `number`, and of all of it.

        The copy of the weights belongs to sampling, advantages belong to scoring.
        """
        work, state = self._work, self._state
        shape = (work.prompts, work.prompt_length)
        tokens: Any = self._random.integers(self._vocabulary, size=shape, dtype=np.int32)
        lengths: Any = np.full(work.prompts, work.prompt_length, np.int32)
        total = self._random.random(work.prompts * work.group, np.float32)
        rewards: tuple[Any, ...] = (total, np.ones(total.shape, bool))
        times = [time.perf_counter()]

        self._sampler.load(state.params)
        key = experiment.sample_key(self._key, number)
        limits = None if work.lengths is None else work.limits
        rollout = self._sampler(Prompts(tokens, lengths), key, limits=limits)
        self.spent = self._sampler.spent
        self._sampler.release()
        times.append(time.perf_counter())

        old = self._old_policy(state.params, None, None, rollout)
        scored = Rewards(*hosts.to_rows(self._mesh, rewards))
        experience = jax.block_until_ready(self._experience(rollout, old, scored))
        times.append(time.perf_counter())

        for minibatch in range(work.minibatches):
            state, metrics = self._update(state, experience, minibatch)
            jax.device_get(metrics)
        self._state = jax.block_until_ready(state)
        times.append(time.perf_counter())
        return dict(zip(PARTS, np.diff(times).tolist(), strict=True)) | {"iteration": times[-1] - times[0]}


def measure(work: Workload) -> dict[str, Any]:
    """Runs the workload; what `--json` writes.

    Raises:
      UserError: as `Workload.check`, the folder's weights do not load, or there are too few devices.
    """
    model = work.check()
    if len(jax.devices()) < work.devices:
        raise UserError(f"--devices is {work.devices} and there are {len(jax.devices())}; use what there is")
    mesh = mesh_lib.make_mesh(work.mesh, devices=jax.devices()[: work.devices])
    with jax.set_mesh(mesh):
        iterations, seen, spent = Iterations(work, model, mesh), [], []
        for number in range(work.warmup + work.repeats):
            seen.append(iterations.run(number))
            spent.append(iterations.spent)
            note = ", compilation included" if number == 0 else ", warm-up" if number < work.warmup else ""
            print(f"iteration {number + 1}: {seen[-1]['iteration']:.2f} s{note}", file=sys.stderr)
        peak = peak_rss_mb()
        rate = matmul_flops_per_s(mesh, work.dtype)
    columns = {name: [times[name] for times in seen[work.warmup :]] for name in (*PARTS, "iteration")}
    medians = {name: statistics.median(column) for name, column in columns.items()}
    least = flops(model, work)
    floors = {name: least[name] / rate for name in columns}
    return {
        **{
            name: {
                "median_s": medians[name],
                "min_s": min(column),
                "tokens_per_s": work.tokens[name] / medians[name],
            }
            for name, column in columns.items()
        },
        "prefill_s": statistics.median(s.prefill_s for s in spent[work.warmup :]),
        "decode_s": statistics.median(s.decode_s for s in spent[work.warmup :]),
        "decode_steps": spent[-1].steps,
        "occupancy": spent[-1].occupancy,
        "peak_rss_mb": peak,
        "compile_s": sum(max(0.0, seen[0][part] - medians[part]) for part in PARTS),
        "floor": {
            "matmul_flops_per_s": rate,
            **{f"{name}_flops": count for name, count in least.items()},
            "seconds": floors,
            "ratio": {name: medians[name] / floors[name] for name in columns},
        },
        "workload": {**vars(work), "model": str(work.model), "mesh": dict(mesh.shape)},
        "cores": cli.cores(),
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
    }


def peak_rss_mb() -> float:
    """The most memory of the host that this process has had, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def show(found: Mapping[str, Any]) -> None:
    """Prints a table and what belongs below it."""
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
    print(
        f"peak memory {found['peak_rss_mb']:,.0f} MB, with the compiler {found['compile_peak_rss_mb']:,.0f} MB; "
        f"compilation {found['compile_s']:.1f} s; {work['devices']} × "
        f"{found['device']}, {found['cores']} cores; matrices multiply at "
        f"{floor['matmul_flops_per_s'] / 1e9:,.0f} GFLOP/s"
    )


def read_mesh(text: str) -> dict[str, int]:
    """The sizes in `fsdp:-1,expert:2`."""
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        return {name: int(size) for name, _, size in pairs}
    except ValueError:
        raise UserError(f"--mesh is {text!r}; write axes and sizes such as fsdp:-1,expert:2") from None


def parser() -> Parser:
    """The command's flags; their defaults are those of Workload."""
    parser = Parser("python -m gspo_jax.bench", str(__doc__).partition("\n\n")[0])
    defaults = {field.name: field.default for field in dataclasses.fields(Workload)}
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a Hugging Face folder")
    for name, meaning in {
        "prompts": "in an iteration",
        "group": "responses to each prompt",
        "prompt_length": "tokens of every prompt",
        "new_tokens": "tokens of every response",
        "minibatches": "updates per iteration",
        "microbatches": "that an update and a scored batch are cut into",
        "repeats": "iterations that are measured",
        "warmup": "iterations before those; the first one compiles",
        "devices": "to spread it over; simulated ones where jax runs on CPU",
    }.items():
        default = defaults[name]
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning}; {default}")
    parser.add_argument("--lengths", metavar="KIND", help="what responses really have, as uniform:16:128; --new_tokens")
    parser.add_argument("--slots", type=int, metavar="N", help="responses that decode at a time; all")
    parser.add_argument("--dtype", default=defaults["dtype"], help=f"of the computation: {' or '.join(DTYPES)}")
    parser.add_argument("--mesh", metavar="AXIS:SIZE,…", help="of the devices, as in fsdp:-1,expert:2; -1 is the rest")
    parser.add_argument("--compile", default="ahead", help="ahead, in a process of its own, or here; ahead")
    parser.add_argument("--json", metavar="FILE", help="writes the same facts for programs")
    return parser


def compile_ahead(arguments: Sequence[str], cache: Path) -> dict[str, float]:
    """Fills the cache by running the same workload in a process of its own; seconds and memory that this took.

    Raises:
      UserError: that process failed; it has said why.
    """
    file = cache / "compiled.json"
    command = [sys.executable, "-m", "gspo_jax.bench", *arguments]
    command += ["--compile=here", "--warmup=1", "--repeats=1", f"--json={file}"]
    environment = {name.upper(): str(value) for name, value in cache_settings(cache).items()}
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"compiling ahead failed with exit code {done.returncode}; see above, or use --compile=here")
    found = json.loads(file.read_text())
    return {"compile_s": found["compile_s"], "compile_peak_rss_mb": found["peak_rss_mb"]}


def cache_settings(cache: Path) -> dict[str, Any]:
    """jax's options, in capitals its environment variables, that keep programs of any size in a folder."""
    return {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        given: dict[str, Any] = vars(parser().parse_args(arguments))
        file, mesh, place = given.pop("json"), given.pop("mesh"), given.pop("compile")
        if mesh is not None:
            given["mesh"] = read_mesh(mesh)
        if place not in ("ahead", "here"):
            raise UserError(f"--compile is {place!r}; use ahead or here")
        work = Workload(**given)
        work.check()
        cli.trim_around_compiling()
        if work.devices > 1:
            cli.simulate_devices(work.devices)
        if place == "ahead":
            with tempfile.TemporaryDirectory(prefix="gspo_jax-compiled-") as folder:
                compiled = compile_ahead(arguments, Path(folder))
                for name, value in cache_settings(Path(folder)).items():
                    jax.config.update(name, value)
                found = measure(work) | compiled
        else:
            found = measure(work)
            found["compile_peak_rss_mb"] = found["peak_rss_mb"]
        show(found)
        cli.write_facts(file, found)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
