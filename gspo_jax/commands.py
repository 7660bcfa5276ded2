"""The commands with their flags and examples, for help and parsing.

Only the standard library is imported, for fast help.
"""

import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A flag of a command, or an argument without dashes."""

    name: str
    """Name as typed, without dashes."""
    help: str
    kind: Any = str
    """str, int, float, bool, Path, or list for comma-separated words."""
    default: Any = None
    metavar: str = "X"
    """Placeholder of the value in help."""
    required: bool = False
    repeated: bool = False
    """May be given several times."""
    low: float | None = None
    """Least value."""
    high: float | None = None
    """Greatest value."""
    choices: tuple[str, ...] = ()
    """All values. Empty: any."""
    dest: str | None = None
    """Attribute of the parsed arguments. None: the name."""
    dashes: bool = True


class Command(NamedTuple):
    """`gspo-jax NAME`, or `python -m gspo_jax.NAME`."""

    group: str
    """Heading in the list of commands."""
    says: str
    """Its purpose in one sentence."""
    examples: tuple[str, str, str]
    """Runnable from a folder with the runs they name."""
    flags: tuple[Flag, ...] = ()
    """Flags other than the config's."""
    config: str = ""
    """"required" or "optional" for commands with `--config=FILE` and `--config.a.b=value`."""


_WORKDIR = Flag("workdir", "run folder, or gs://BUCKET/RUN", metavar="DIR", required=True)
_JSON = Flag("json", "also write the same facts to this file", metavar="FILE")
_RUNS = Flag("runs", "folder of a run, the --workdir of train", metavar="RUN", repeated=True, dashes=False)

COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train",
        "Start a run, or resume it from the newest checkpoint in its folder.",
        (
            "--config=tiny --workdir=runs/tiny",
            "--config=tiny --config.objective.name=grpo --config.seed=1 --workdir=runs/grpo",
            "--config=tiny --from=runs/tiny@80 --workdir=runs/slower --config.optimizer.learning_rate=5e-5",
        ),
        (
            _WORKDIR._replace(help="run folder, or gs://BUCKET/RUN; a run in it is resumed"),
            Flag(
                "from",
                "begin a new run from another one's checkpoint: its newest, or the one after STEP iterations; without "
                "--config, with the config of that run's newest start",
                metavar="RUN[@STEP]",
            ),
            Flag(
                "from_parts",
                "with --from: what to take, of weights, moments and data; all that fits by default",
                list,
                metavar="PART,…",
            ),
            Flag("start_over", "begin again if the run's checkpoints are gone or damaged", bool, False),
            Flag("profile", "trace these iterations, such as 3 or 3:5, into the run folder", metavar="START:STOP"),
            Flag(
                "check_for",
                "only check the config, for so many devices, 0: any, or a slice: v5e-8, 2xv5p-128",
                metavar="N",
            ),
            _JSON._replace(help="also write first and last evaluation, and counts of compiled programs, to this file"),
        ),
        "required",
    ),
    "coldstart": Command(
        "Train",
        "Train by cross-entropy on worked answers or conversations, for RL to begin from.",
        (
            "--config=tiny --workdir=runs/cold",
            "--config=tiny --config.coldstart.steps=200 --workdir=runs/short",
            "--config=gsm8k --config.model.folder=Qwen3-0.6B --config.coldstart.steps=200 --workdir=runs/sft",
        ),
        (Flag("workdir", "new folder to write the model to", metavar="DIR", required=True),),
        "required",
    ),
    "sweep": Command(
        "Train",
        "Train several variants of one config, and compare them on one page.",
        (
            "--config=tiny --sweep objective.name=gspo,grpo --seeds=3",
            "--config=objectives --jobs=2",
            "--config=tiny --seeds=0,2,5 --runs=runs/seeds --dry-run",
        ),
        (
            Flag(
                "sweep",
                "train with each value; several --sweep: with each combination",
                metavar="FIELD=VALUE,…",
                repeated=True,
            ),
            Flag("seeds", "how many seeds, counted from the config's, or which: 0,2,5", metavar="N"),
            Flag("runs", "folder of the runs and their report; runs/NAME-sweep by default", metavar="DIR"),
            Flag("jobs", "runs at a time", int, 1, metavar="N", low=1),
            Flag("record", "CSV file that keeps every iteration of finished runs; runs in it are done", metavar="FILE"),
            Flag("dry-run", "only print the commands", bool, False),
        ),
        "required",
    ),
    "evaluate": Command(
        "Measure",
        "Evaluate a run's newest policy on held-out prompts, or on a published benchmark.",
        (
            "--config=tiny --workdir=runs/tiny",
            "--config=tiny --workdir=runs/tiny --json=held_out.json",
            "--config=gsm8k --workdir=runs/gsm8k --benchmark=aime24 --data=aime24 --samples=32",
        ),
        (
            _WORKDIR,
            Flag("benchmark", "name of a benchmark, or a file of rows; the held-out prompts without", metavar="NAME"),
            Flag("data", "folder or file of the benchmark", metavar="DIR"),
            Flag("samples", "responses to every problem of the benchmark", int, 8, metavar="N", low=1),
            Flag("keep", "new file for the held-out responses with their rewards, JSON Lines", metavar="FILE"),
            _JSON._replace(help="also write the result to this file"),
        ),
        "required",
    ),
    "sample": Command(
        "Measure",
        "Sample from a run's policy or a Hugging Face folder: answers to a prompt or to a file of rows, or a chat.",
        (
            "--workdir=runs/tiny",
            "--workdir=runs/tiny --prompt='584+605=?' --samples=4",
            "--workdir=runs/gsm8k --step=200 --in=rows.jsonl --out=completions.jsonl --score --logprobs",
        ),
        (
            _WORKDIR._replace(required=False),
            Flag("model", "Hugging Face folder, instead of a run", metavar="DIR"),
            Flag(
                "step", "iteration of a checkpoint, 0: the first policy; the newest by default", int, metavar="N", low=0
            ),
            Flag("prompt", "question to answer; without it and --in, a chat", metavar="TEXT"),
            Flag("in", "rows to answer, in the forms of training rows", metavar="FILE"),
            Flag("out", "new file for the responses, JSON Lines", metavar="FILE"),
            Flag("samples", "responses per prompt", int, 1, metavar="N", low=1),
            Flag("temperature", "0 for greedy decoding; the run's by default", float, low=0.0),
            Flag("max_tokens", "most tokens of a response; the run's by default", int, metavar="N", low=1),
            Flag("seed", "fixes the responses", int, 0, metavar="N", low=0),
            Flag("score", "also score the responses to rows with the run's rewards", bool, False),
            Flag("logprobs", "also write the log-prob of every token", bool, False),
            Flag("routes", "also write the experts that computed every token", bool, False),
        ),
        "optional",
    ),
    "bench": Command(
        "Measure",
        "Time sampling, scoring and updates on this machine, and compare them with their floors.",
        (
            "--model=Qwen3-0.6B --prompts=8 --group=8",
            "--model=Qwen3-0.6B --devices=8 --mesh=fsdp:-1 --lengths=lognormal:64:0.8",
            "--calibrate=rates.json",
        ),
        (
            Flag("model", "Hugging Face folder of the model", Path, metavar="DIR"),
            Flag("prompts", "prompts per iteration", int, metavar="N"),
            Flag("group", "responses per prompt", int, metavar="N"),
            Flag("prompt_length", "tokens per prompt", int, metavar="N"),
            Flag("new_tokens", "most tokens per response", int, metavar="N"),
            Flag("lengths", "lengths of responses, such as uniform:16:128; --new_tokens by default", metavar="KIND"),
            Flag("slots", "responses decoded at a time; all by default", int, metavar="N"),
            Flag("row_tokens", "tokens of a packed row; as in a run by default", int, metavar="N"),
            Flag("minibatches", "updates per iteration", int, metavar="N"),
            Flag("repeats", "measured iterations", int, metavar="N"),
            Flag("warmup", "iterations before the measured ones; the first one compiles", int, metavar="N"),
            Flag("devices", "devices to use; simulated where jax runs on CPU", int, metavar="N"),
            Flag("dtype", "compute dtype: float32 or bfloat16", metavar="NAME"),
            Flag("mesh", "such as fsdp:-1,expert:2; -1: the rest of the devices", metavar="AXIS:SIZE,…"),
            Flag("compile", "ahead, in a process of its own, or here", default="ahead", metavar="WHERE"),
            Flag("profile", "trace the phases of one more iteration into this folder", metavar="DIR"),
            Flag("calibrate", "measure the devices instead, and write their rates to this file", metavar="FILE"),
            _JSON,
        ),
    ),
    "noise": Command(
        "Measure",
        "Split the noise of a run's importance ratios into weights and routes.",
        (
            "--config=tiny --workdir=runs/tiny",
            "--config=tiny --workdir=runs/tiny --updates=0,1,4",
            "--config=tiny --workdir=runs/tiny --updates=1,2,4,16 --out=runs/tiny/noise",
        ),
        (
            _WORKDIR,
            Flag("updates", "numbers of updates after which to measure", default="1,2,4,16", metavar="N,…"),
            Flag("layers", "after the most, also each layer's routes alone, a forward pass each", bool, True),
            Flag("out", "folder for noise.json and the pictures", default="noise", metavar="DIR"),
        ),
        "required",
    ),
    "bias": Command(
        "Measure",
        "Measure the bias that sampler-trainer mismatch gives a run's gradients, by source.",
        (
            "--config=tiny --workdir=runs/tiny",
            "--config=tiny --workdir=runs/tiny --updates=16",
            "--config=tiny --workdir=runs/tiny --config.sampling.weights_dtype=int8 --out=runs/tiny/bias",
        ),
        (
            _WORKDIR,
            Flag("updates", "of another batch, by which the policy is ahead of its sampler", int, 4, "N", low=0),
            Flag("out", "folder for bias.json and the pictures", default="bias", metavar="DIR"),
        ),
        "required",
    ),
    "score": Command(
        "Measure",
        "Score the completions of a file with any reward functions, to try a reward before a run.",
        (
            "--reward=math_verify --in=completions.jsonl --out=scores.jsonl",
            "--reward=code_tests,my_rewards.py:polite --in=completions.jsonl --out=scores.jsonl",
            "--reward=exact_answer --in=completions.jsonl --out=scores.jsonl --json=means.json",
        ),
        (
            Flag("reward", "rewards: names, or file.py:function", metavar="NAME,…", required=True),
            Flag("in", "completions, JSON Lines", Path, metavar="FILE", required=True, dest="source"),
            Flag("out", "file to write", Path, metavar="FILE", required=True, dest="target"),
            Flag("timeout_s", "seconds per completion", float, 2.0, metavar="S"),
            Flag("workers", "processes for isolated rewards; all cores by default", int, metavar="N"),
            Flag("unsafe", "run programs without a sandbox", bool, False),
            _JSON._replace(help="also write what is printed to this file"),
        ),
    ),
    "accept": Command(
        "Measure",
        "Tell how many tokens a decode step would have added with drafts, from completions that are there already.",
        (
            "runs/tiny",
            "gsm8k/train.jsonl --prompt=question --completion=answer --tokenizer=Qwen3-0.6B",
            "completions.jsonl --tokenizer=Qwen3-0.6B --drafts=1,2,4,8 --together=2 --json=accepted.json",
        ),
        (
            Flag("sources", "run folders, and files of completions", metavar="SOURCE", repeated=True, dashes=False),
            Flag("tokenizer", "folder of a tokenizer; a run's own by default", Path, metavar="DIR"),
            Flag("drafts", "numbers of drafts per step, 1 to 8", default="1,2,4,8", metavar="N,…"),
            Flag("together", "responses of a group decoded at a time; all by default", int, metavar="N"),
            Flag("prompt", "field of a file's rows", default="prompt", metavar="NAME"),
            Flag("completion", "field of a file's rows", default="completion", metavar="NAME"),
            _JSON,
        ),
    ),
    "report": Command(
        "Compare",
        "Draw plots and tables from run folders, finished or not.",
        (
            "runs/tiny",
            "runs/gspo runs/grpo --out=runs/compared",
            "runs/gspo runs/grpo --panels=routing --out=runs/routes --table=runs/table.md",
        ),
        (
            _RUNS,
            Flag("panels", "page to show", default="training", choices=("training", "routing")),
            Flag("baseline", "run whose group the others are compared with; the first by default", metavar="RUN"),
            Flag("out", "folder for the report; RUN/report by default for a single run", metavar="DIR"),
            Flag("table", "also write a markdown table with a row per group of runs", metavar="FILE"),
            _JSON,
        ),
    ),
    "survival": Command(
        "Compare",
        "Show which runs collapsed, and how groups of runs differ seed by seed.",
        (
            "runs/a-0 runs/a-1 runs/b-0 runs/b-1 --baseline=runs/a-0",
            "runs/a-0 runs/b-0 --baseline=runs/a-0 --out=survival",
            "docs/evidence/confirm/survival.json --baseline=grpo --out=survival",
        ),
        (
            _RUNS._replace(help="folder of a run, record of a study (.csv), or survival.json"),
            Flag("baseline", "one of these, or a label; differences are from its group", metavar="RUN", required=True),
            Flag("primary", "comparisons that were registered, tested by themselves", metavar="'LABEL vs LABEL; …'"),
            Flag("margin", "reward difference that counts as none, for equivalence", float, metavar="X", low=0),
            Flag("out", "folder for the files", default="survival", metavar="DIR"),
        ),
    ),
    "plan": Command(
        "Prepare",
        "Compile every program of an iteration for a TPU slice that is not attached: does it fit, what does it cost?",
        (
            "--config=qwen3_30b_a3b --topology=v5p:4x4x4",
            "--config=one_host --topology=v5e:2x4 --programs=update --json=update.json",
            "--config=qwen3_30b_a3b:16k --topology=v5p:4x4x4 --lengths=lognormal:4096:0.8 --tune",
        ),
        (
            Flag("topology", "slice to compile for, such as v5p:4x4x4 or v6e:8x8", metavar="SLICE", required=True),
            Flag("slices", "number of such slices, joined by the data-center network", int, 1, metavar="N", low=1),
            Flag("programs", "only these, of update, score, deal, sample_prefill, sample_decode, reshard", list),
            Flag("lengths", "project a whole iteration for these lengths: lognormal:4096:0.8", metavar="KIND"),
            Flag("accepted", "with --lengths and drafts: tokens that a slot samples in a step", float, metavar="X"),
            Flag("figure", "with --lengths: draw the iteration to this PNG file", metavar="FILE"),
            Flag("tune", "with --lengths: search for the settings with the least projected iteration", bool, False),
            Flag("headroom", "with --tune: part of a chip's memory to leave free", float, 0.08, "X", low=0.0, high=0.9),
            Flag("rates", "rates of the chip, as bench --calibrate writes them; assumed without", metavar="FILE"),
            Flag("skew", "spread of routers' preferences for experts, 0 for none", float, 0.25, "X", low=0.0),
            Flag("cycles", "also print the executed times beside the compiler's estimates of cycles", bool, False),
            Flag("dump", "keep each program's compiled text in this folder, as PROGRAM.hlo", metavar="DIR"),
            Flag("cache", "folder of compiled programs; ~/.cache/gspo_jax/plan by default", default="", metavar="DIR"),
            _JSON,
        ),
        "required",
    ),
    "first": Command(
        "Prepare",
        "Tell in minutes whether devices, kernels, rates and programs of this machine are right.",
        (
            "",
            "--minutes=5 --out=first-v5e --json=first.json",
            "--model=Qwen3-30B-A3B",
        ),
        (
            Flag("minutes", "time for all stages, which have their limits", float, 10.0, metavar="N"),
            Flag("model", "published shape to time, with random weights; one that fits by default", default=""),
            Flag(
                "out",
                "folder for the page, the rates and the records; goes on where it was stopped",
                Path,
                Path("first"),
            ),
            Flag("devices", "devices to simulate where jax runs on CPU, over all processes", int, 8, metavar="N"),
            Flag("start_over", "run all stages again", bool, False),
            _JSON,
        ),
    ),
    "doctor": Command(
        "Prepare",
        "Check that this machine has what a run needs.",
        (
            "",
            "--config=tiny --workdir=runs/tiny",
            "--config=gsm8k --draws --json=findings.json",
        ),
        (
            _WORKDIR._replace(help="run folder to check: a local folder or gs://BUCKET/RUN", required=False),
            Flag("draws", "also test that sampled tokens follow their distribution", bool, False),
            _JSON._replace(help="also write the findings to this file"),
        ),
        "optional",
    ),
    "convert": Command(
        "Prepare",
        "Convert a model between Hugging Face format and an Orbax checkpoint, read a GGUF file, or export a run.",
        (
            "--from=runs/tiny --to=exported",
            "--from=model.gguf --to=Qwen3-0.6B",
            "--from=runs/adapters --to=merged --merge --dtype=bfloat16",
        ),
        (
            Flag("from", "folder, or .gguf file, to convert", Path, metavar="DIR", required=True, dest="source"),
            Flag("to", "new folder to write", Path, metavar="DIR", required=True, dest="target"),
            Flag("dtype", "float32 or bfloat16; the source's by default", metavar="NAME"),
            Flag("merge", "add a run's adapters to the weights of its model", bool, False),
            _JSON,
        ),
    ),
    "fields": Command(
        "Prepare",
        "List the config's fields with their defaults and ranges.",
        ("", "sampling", "'optimizer.*'"),
        (Flag("pattern", "part of a name, or a pattern with *", metavar="PATTERN", dashes=False),),
    ),
    "completion": Command(
        "Prepare",
        "Print a script that completes commands and flags in a shell.",
        ("bash >> ~/.bashrc", "zsh >> ~/.zshrc", "fish > ~/.config/fish/completions/gspo-jax.fish"),
        (Flag("shell", "the shell", metavar="SHELL", choices=("bash", "zsh", "fish"), required=True, dashes=False),),
    ),
}


def overview() -> str:
    """Return the list of commands for `gspo-jax --help`."""
    lines = ["usage: gspo-jax COMMAND [flags …]", "", "Group sequence policy optimization for mixtures of experts."]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", f"{group}:"]
        lines += _columns(name, command.says)
    return "\n".join([*lines, "", "gspo-jax COMMAND --help shows a command's flags and examples."])


def described(name: str) -> str:
    """Return the flags and examples for `gspo-jax NAME --help`."""
    command = COMMANDS[name]
    config = {"required": "--config=FILE[:arg] ", "optional": "[--config=FILE[:arg]] "}.get(command.config, "")
    lines = [f"usage: gspo-jax {name} {config}{_usage(command)}".rstrip(), "", *_wrapped(command.says)]
    for title, dashes in (("arguments", False), ("flags", True)):
        own = [flag for flag in command.flags if flag.dashes == dashes]
        lines += ["", f"{title}:"] * bool(own)
        for flag in own:
            lines += _columns(_spelled(flag), flag.help + _note(flag))
    if command.config:
        lines += _columns("--config=FILE[:arg]", "file of the config, or a name such as tiny, perhaps with an argument")
        lines += _columns("--config.a.b=VALUE", "change a field of the config; gspo-jax fields lists them")
    lines += ["", "examples:", *(f"  gspo-jax {name} {words}".rstrip() for words in command.examples)]
    return "\n".join(lines)


def answer_help(name: str, words: list[str]) -> None:
    """Print a command's help and exit, if asked for."""
    if name in COMMANDS and not {"--help", "-h", "--helpfull", "-help"}.isdisjoint(words):
        print(described(name))
        sys.exit(0)


def _usage(command: Command) -> str:
    words = []
    for flag in command.flags:
        if flag.dashes:
            words += [_spelled(flag)] * flag.required
        elif flag.repeated:
            words.append(f"{flag.metavar} [{flag.metavar} …]")
        else:
            words.append(flag.metavar if flag.required else f"[{flag.metavar}]")
    return " ".join([*words, *["[flags …]"] * any(flag.dashes for flag in command.flags)])


def _spelled(flag: Flag) -> str:
    if not flag.dashes:
        return flag.metavar
    return f"--{flag.name}" if flag.kind is bool else f"--{flag.name}={flag.metavar}"


def _note(flag: Flag) -> str:
    notes = [", ".join(flag.choices)] if flag.choices else []
    if flag.default not in (None, "", False):
        notes.append(f"default {flag.default}")
    if flag.required and flag.dashes:
        notes.append("required")
    return f" ({'; '.join(notes)})" if notes else ""


def _columns(name: str, text: str) -> list[str]:
    first, *rest = _wrapped(text, 88)
    head = f"  {name:<28}{first}" if len(name) < 27 else f"  {name}\n{'':<30}{first}"
    return [head, *(f"{'':<30}{line}" for line in rest)]


def _wrapped(text: str, width: int = 116) -> list[str]:
    return textwrap.wrap(text, width)
