"""What messages, pages and scripts tell a user to type: it parses, and it mends what the message is about.

Texts of the package are collected from its source, with `{}` for what is filled in at run time. Remedies of configs are
read out of messages that faults provoke, and done.
"""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from packaging.requirements import Requirement

from gspo_jax import cli, commands, installs, objectives
from gspo_jax.config import base, source
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.setup import policy
from gspo_jax.setup.checks import check
from gspo_jax.setup.fields import at, is_open, names
from tests.pods import run_commands
from tests.test_cli import DENSE, MIXTURES, REFUSED
from tests.tiny import mostly_slow

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "gspo_jax").rglob("*.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PLACEHOLDER = re.compile(r"\{\}|[A-Z]{3,}|…")
"""A part of a command that a user fills in."""
MESSAGES = ("report", "wandb", "gguf", "mcp")
"""Extras that messages and pages name, beside those of devices."""


def texts() -> list[str]:
    """Return every text in the package's source."""
    found = []
    for file in SOURCES:
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))  # pyright: ignore[reportArgumentType]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                found.append(node.value)
    return found


TEXTS = texts()


def cases(pattern: str) -> list[tuple[str, ...]]:
    return sorted({match.groups("") for text in TEXTS for match in re.finditer(pattern, text)})


def test_fields_that_messages_name_exist_and_take_the_value():
    found = cases(r"--config\.([\w.]*\w)(=[^\s,;`'\")]*)?")
    known, refused = set(names(base())), []
    for field, value in found:
        if re.fullmatch(r"a\.b|.*(NAME|name|field).*", field) or is_open(field):
            continue
        assert field in known or any(name.startswith(f"{field}.") for name in known), field
        if value and not PLACEHOLDER.search(value):
            try:
                cli.read_config(["--config=tiny", f"--config.{field}{value.rstrip('.')}"])
            except UserError as error:
                refused.append(f"{field}{value}: {error}")
    assert len(found) > 20 and not refused


def test_commands_modules_and_scripts_that_messages_name_exist():
    assert {name for (name,) in cases(r"gspo-jax ([a-z]+)\b")} <= {*commands.COMMANDS}
    modules = {name for (name,) in cases(r"-m (gspo_jax[a-z_.]*[a-z])\b(?!\.)")}
    assert len(modules) > 10 and not [name for name in modules if importlib.util.find_spec(name) is None]
    scripts = cases(r"bash launch/(\w+\.sh)(?: ([a-z]+))?")
    known = re.findall(r"^COMMANDS='(.*)'$", (ROOT / "launch" / "tpu.sh").read_text("utf-8"), re.MULTILINE)[0].split()
    assert scripts and all((ROOT / "launch" / script).exists() for script, _ in scripts)
    assert {word for script, word in scripts if script == "tpu.sh"} <= {*known}


def test_flags_that_messages_name_exist():
    known = {flag.name for command in commands.COMMANDS.values() for flag in command.flags} | {"config", "no"}
    others = {
        "bias",
        "format",
        "help",
        "logdir",
        "name",
        "python",
        "query-gpu",
        "recursive",
    }  # of studies, scripts and other programs
    messages = [text for text in TEXTS if " " in text]
    named = {flag for text in messages for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text)}
    assert named - others <= known and len(named) > 30


@pytest.mark.parametrize("extra", ["tpu", "cuda", *MESSAGES])
def test_an_extra_is_installed_by_what_it_requires(extra, monkeypatch):
    """As pyproject.toml has it. The metadata of a wheel say the same, as setuptools writes them."""
    wheel = [f'{text}; extra == "{name}"' for name, texts in EXTRAS.items() for text in texts]
    monkeypatch.setattr(metadata, "requires", lambda _: ["jax>=0.10.2,<0.13", *wheel])
    python, *pip = shlex.split(installs.of_extra(extra))
    assert Path(python).absolute() == Path(sys.executable).absolute() and pip[:3] == ["-m", "pip", "install"]
    assert {Requirement(word) for word in pip[3:]} == {Requirement(text) for text in EXTRAS[extra]}


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """Return a folder of empty wheels of all that extras require, in the pinned versions."""
    folder = tmp_path_factory.mktemp("index")
    pinned = [
        Requirement(line) for line in (ROOT / "launch/constraints.txt").read_text("utf-8").splitlines() if "==" in line
    ]
    versions = {each.name: str(each.specifier)[2:] for each in pinned if each.marker is None or each.marker.evaluate()}
    for text in (*EXTRAS["tpu"], *EXTRAS["cuda"], *(text for name in MESSAGES for text in EXTRAS[name])):
        each = Requirement(text)
        named = f"{each.name}-{versions[each.name]}"
        with zipfile.ZipFile(folder / f"{named}-py3-none-any.whl", "w") as wheel:
            about = f"Metadata-Version: 2.1\nName: {each.name}\nVersion: {versions[each.name]}\n"
            about += "".join(f"Provides-Extra: {extra}\n" for extra in ("tpu", "cuda12"))
            wheel.writestr(f"{named}.dist-info/METADATA", about)
            wheel.writestr(f"{named}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{named}.dist-info/RECORD", "")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpu", "cuda", *MESSAGES, "gcsfs"])
def test_an_install_is_found_by_pip(name, index, monkeypatch):
    """As a shell reads it, in an index of empty wheels, and as far as pip's dry run goes."""
    wheel = [f'{text}; extra == "{extra}"' for extra, texts in EXTRAS.items() for text in texts]
    monkeypatch.setattr(metadata, "requires", lambda _: wheel)
    command = installs.of_package(name) if name == "gcsfs" else installs.of_extra(name)
    pip = {"NO_INDEX": "1", "FIND_LINKS": str(index), "DRY_RUN": "1", "IGNORE_INSTALLED": "1"}
    environment = os.environ | {f"PIP_{key}": value for key, value in pip.items()}
    done = subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    (found,) = re.findall("^Would install (.*)$", done.stdout, re.MULTILINE) or [done.stderr]
    wanted = ["gcsfs"] if name == "gcsfs" else [Requirement(text).name for text in EXTRAS[name]]
    assert [word.rpartition("-")[0] for word in found.split()] == sorted(wanted), done.stderr


def test_a_system_s_package_is_installed_by_a_command_that_a_shell_reads():
    """It is not run: it would need a network, and change this machine."""
    words = shlex.split(installs.of_system("bubblewrap"))
    assert words[-4:] == ["apt-get", "install", "-y", "bubblewrap"] and words[words.index("&&") - 1] == "update"


def test_an_install_fits_the_interpreter(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my venv" / "bin" / "python"))
    assert installs.of_package("gcsfs").startswith("'my venv/bin/python' -m pip install 'gcsfs<")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installs.of_package("other") == "uv pip install --python='my venv/bin/python' other"

    def missing(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", missing)
    assert shlex.split(installs.of_extra("tpu"))[-2:] == ["-e", f"{ROOT}[tpu]"]


def test_a_bucket_without_its_library_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    says = pytest.raises(UserError, match=r"^gs://b/run needs the package gcsfs, which is not installed; run .*gcsfs")
    with says, storage.explained("gs://b/run"):
        raise ImportError("fsspec")


def test_installs_that_are_written_down_name_what_there_is():
    """In code by `installs` alone, and elsewhere from the checkout: no index has the project."""
    code = "".join(file.read_text("utf-8") for file in SOURCES)
    assert set(re.findall(r'installs\.of_extra\(["\'](\w+)', code)) <= EXTRAS.keys()
    assert [file.name for file in SOURCES if "pip install" in file.read_text("utf-8")] == ["installs.py"]
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("launch/*"), *ROOT.glob("configs/*.py")]
    for place in filter(Path.is_file, [*places, *ROOT.glob("examples/*")]):
        text = place.read_text("utf-8")
        assert not re.search(r"pip\s+install\s+\S*gspo_jax\[", text), place
        for named in re.findall(r"pip_?\s?install\b[^`\n]*\.\[([\w,]+)\]", text):
            assert set(named.split(",")) <= EXTRAS.keys(), place


GOLDEN = str(ROOT / "tests" / "golden")
TEXT = r"'[^']*'|\(\)|(?!more|less|fewer|one\b)-?\w(?:[\w.:-]*\w)?"
"""A value in a message."""
WORDS = {
    "a finite number above 0": "1.0",
    "a finite number, 0 or above": "0.0",
    "a positive number": "1.0",
    "a fraction": "0.5",
    "a number": "0.5",
    "an even number": "8",
}
"""Values of ranges that messages put into words."""
OWN = {
    "--config.model.folder=DIR": f"--config.model.folder={GOLDEN}/adder",
    "set them to the folder's": "--config.adapter.rank=4",
    "there are q_proj, k_proj": "--config.adapter.targets=('q_proj','k_proj')",
    "choose sizes whose product": "--config.mesh.data=-1",
    "set all but one of them": "--config.mesh.data=2",
    "give a file of rows": "--config.benchmarks.aime25.data=rows.jsonl",
    "data.folder or data.sources, and none of them is set; set one": "--config.data.train=rows.jsonl",
    "set both, or give": "--config.data.train=rows.jsonl",
    "such as exact_answer: 1.0": "--config.rewards.exact_answer=1.0",
    "give it in model.folder": f"--config.model.folder={GOLDEN}/adapters",
    "choose one inside": "--config.model.architecture.experts_per_token=2",
    "give the width of one": "--config.model.architecture.moe_intermediate_size=16",
    "low=0.2 clips": "--config.objective.gspo.low=0.2",
}
"""What the user of a remedy does who has to fill in or choose something, by a part of the remedy."""
DEPENDENT: list[tuple[dict[str, Any], str]] = [
    ({"step_rewards.countdown_steps": 1.0}, "tiny"),
    ({"teacher.folder": f"{GOLDEN}/adder", "teacher.form": "advantage"}, "tiny"),
    ({"reference.place": "reward"}, "tiny"),
    ({"mismatch.correction": "tis", "training.old_logprobs": "sampler"}, "tiny"),
    ({"mismatch.center": True}, "tiny"),
    (
        {
            "mismatch.center": True,
            "sampling.keep_top": 20,
            "objective.name": "grpo",
            "training.old_logprobs": "sampler",
        },
        "tiny",
    ),
    ({"mismatch.bias_every": 5, "data.prompts_per_batch": 2}, "tiny"),
    ({"mismatch.bias_every": 5, "sampling.rounds": 2}, "tiny"),
    ({"sampling.keep_top": 400}, "tiny"),
    ({"routing.bias_rate": 0.1}, "tiny"),
    ({"routing.bias_rate": 0.1, "adapter.rank": 4}, "tiny"),
    ({"data.task": "jsonl"}, "tiny"),
    ({"data.task": "jsonl", "data.test": "rows.jsonl"}, "tiny"),
    ({"data.task": "jsonl", "data.sources.own": source("rows.jsonl", rewards=("other",))}, "tiny"),
    ({"mesh.data": -1, "mesh.fsdp": -1}, "tiny"),
    ({"sampling.slots": 512}, "tiny"),
    ({"sampling.slots": 12}, "tiny"),
    ({"model.random": True}, "tiny"),
    ({"model.random": True, "coldstart.steps": 0, "model.folder": f"{GOLDEN}/adder"}, "tiny"),
    ({"model.random": True}, "gsm8k"),
    ({"judge.pairwise": True, "sampling.group_size": 1, "rewards.judge": 1.0}, "tiny"),
    ({"adapter.rank": 4, "adapter.targets": ("in_proj_z",)}, "tiny"),
    ({"model.architecture.num_kv_heads": 3}, "tiny"),
    ({"model.architecture.head_dim": 7}, "tiny"),
    ({"model.architecture.experts_per_token": 99}, "tiny"),
    ({"model.architecture.moe_intermediate_size": 0}, "tiny"),
    ({"mesh.expert": 3, "mesh.data": 1, "mesh.fsdp": 1, "data.prompts_per_batch": 24, "coldstart.batch": 24}, "tiny"),
    ({"overlong.cache": 99}, "tiny"),
    ({"sampling.draft": "own"}, "one_host:Qwen3.5-35B-A3B"),
]
"""Changes of a config that its other fields do not allow, beside those of test_cli.py."""
FAULTS = [
    *((changes, "tiny") for changes, _ in REFUSED),
    *((changes | DENSE, "tiny") for changes, _ in MIXTURES),
    *DEPENDENT,
]


def remedies(message: str, changes: dict[str, Any], config: ConfigDict) -> list[str]:
    """Return the flags that a message about a config tells to give. `changes` made the config wrong."""
    problem, _, rest = message.partition("; ")
    rest = rest or message
    mentioned = [name for name in re.findall(r"[a-z_]\w*(?:\.\w+)+|\biterations\b", problem) if _is_field(name, config)]
    axes = [f"mesh.{axis}" for axis in re.findall(r"^mesh axis (\w+)", problem)]
    (subject, *_) = [*axes, *mentioned, *changes]
    found = [flag for part, flag in OWN.items() if part in message]
    if found:
        return found
    found = [shlex.split(flag)[0] for flag in re.findall(r"(--config\.[\w.]+=[^\s,;]+)", rest)]
    rest = re.sub(r"--config\S+", "", rest)
    chosen = []
    for field, value in re.findall(rf"([a-z][\w.]*) to ({TEXT})", rest):
        if field in ("it", "that") or _is_field(field, config):
            chosen.append(({"it": subject, "that": mentioned[-1] if mentioned else subject}.get(field, field), value))
    chosen += [(subject, value) for value in re.findall(rf"(?:such as|did you mean) ({TEXT})", rest)]
    for phrase in re.findall(r"\buse (?:one of |some of |num_kv_heads of |expert = )?([^;]*)", rest):
        worded = [value for words, value in WORDS.items() if phrase.startswith(words)]
        chosen += [(subject, value) for value in worded]
        for item in () if worded else re.split(r",? or |, ", phrase):
            if (value := re.fullmatch(rf"({TEXT})(?: (?:to|for) .*)?", item)) is None:
                break
            chosen.append((subject, value[1]))
    for field, value in re.findall(r"\bleave (\S+) (empty|None)", rest):
        chosen.append((subject if field == "it" else field, "''" if value == "empty" else value))
    if less := re.search(r"take (\d+) off either", rest):
        for field in mentioned[:2]:
            chosen.append((field, str(at(config, field) - int(less[1]))))
    return list(dict.fromkeys([*found, *(_flag(field, value.strip("'"), config) for field, value in chosen)]))


def _is_field(name: str, config: ConfigDict) -> bool:
    return name in names(config) or is_open(name)


def _flag(field: str, value: str, config: ConfigDict) -> str:
    if value in objectives.catalogue.__all__:
        return f"--config.objective.name={value}"
    section, _, key = field.rpartition(".")
    holder = at(config, section) if section else config
    is_list = isinstance(holder.get(key), tuple) and value != "()"
    word = value if re.fullmatch(r"[\d.]+", value) else repr(value)
    return f"--config.{field}={f'({word},)' if is_list else value}"


TRAIN, SWEEP = "train --config=tiny --workdir=TMP/run", "sweep --config=tiny --runs=TMP/sweep"
CONVERT, CUBE = f"convert --from={GOLDEN}/adder --to=TMP/new", "plan --config=qwen3_30b_a3b --topology=v5p:4x4x4"
DRAFTS = f"{CUBE} --lengths=lognormal:4096:0.8 --config.sampling.draft=own"
COMMANDS = [
    ("train --config=tiny --workdr=TMP/run", r"did you mean (--\w+)\?", "train --config=tiny {}=TMP/run", ""),
    (f"{TRAIN} --learning_rate=1e-5", r"did you mean (--\S+)\?", f"{TRAIN} {{}}=1e-5", ""),
    (f"{TRAIN} --config.iteratons=3", r"did you mean '(\w+)'", f"{TRAIN} --config.{{}}=3", ""),
    ("train --workdir=TMP/run", r"for example (\S+)$", "train {} --workdir=TMP/run", ""),
    (
        "train --config=README.md --workdir=TMP/run",
        r"or a name such as (\w+)$",
        "train --config={} --workdir=TMP/run",
        "",
    ),
    ("train --config=configs/tinny.py:single --workdir=x", r"mean (\S+)\?", "train --config={} --workdir=TMP/run", ""),
    (TRAIN.replace("tiny", "gsm8k"), r"(--config\S+=)DIR$", f"{TRAIN} {{}}{GOLDEN}/adder", ""),
    (SWEEP, r"give (--sweep) FIELD=VALUE,VALUE", f"{SWEEP} {{}} objective.name=grpo,gspo", ""),
    (SWEEP, r"or (--seeds)=N$", f"{SWEEP} {{}}=2", ""),
    (f"{SWEEP} --sweep seed=1,2", r"use (--seeds=\S+)$", f"{SWEEP} {{}}", ""),
    (f"{SWEEP} --sweep objective.name=grpo", r"set it by (--\S+)$", f"{SWEEP} --seeds=2 {{}}", ""),
    (f"{SWEEP} --seeds=two", r"such as 0,2,5$|such as (\d+)", f"{SWEEP} --seeds={{}}", ""),
    (f"{SWEEP} --sweep=objective", r"such as (\S+)$", f"{SWEEP} --sweep={{}}", ""),
    (f"{SWEEP} --seeds=0,1 --config.seed=3", r"leave out (--config.seed)$", f"{SWEEP} --seeds=0,1", ""),
    (f"{CONVERT} --dtype=int8", r"use (\w+) or", f"{CONVERT} --dtype={{}}", ""),
    (f"{CONVERT} --merge", r"leave out (--merge)$", CONVERT.replace("new", "newer"), ""),
    (
        "plan --config=tiny --topology=v5p-8",
        r"write the slice as (\S+)$",
        "plan --config=tiny --topology={}",
        "there are 4",
    ),
    (f"{CUBE} --tune --config.sampling.draft=own", r"such as (--lengths=\S+)$", f"{DRAFTS} --tune", "--tune does not"),
    (f"{DRAFTS} --tune", r"use (--config\S+), ", f"{CUBE} {{}} --tune --lengths=a", "--lengths is 'a'"),
    (f"{CUBE} --lengths=a", r"write it as (\S+) or", f"{CUBE} --lengths={{}} --programs=update", "--lengths needs all"),
    (DRAFTS, r"such as (--accepted=\S+) ", f"{DRAFTS} {{}} --programs=update", "--lengths needs all"),
    (DRAFTS, r"or use (--config\S+)$", f"{DRAFTS} {{}} --programs=update", "--lengths needs all"),
    (f"{CUBE} --rates=TMP/no", r"by python -m gspo_jax\.(bench --calibrate=\S+)$", "{} --model=x", "leave out --model"),
    ("bench --calibrate=TMP/r --model=x", r"leave out (--model)$", "bench --calibrate=TMP", "give a file in it"),
    (
        f"sample --model={GOLDEN}/adder --in=TMP/no",
        r"give one with (--out)=FILE$",
        f"sample --model={GOLDEN}/adder --in=TMP/no {{}}=TMP/o",
        "TMP/no does not exist",
    ),
]
"""A mistake; the part of what is said of it that is to be typed; a command with that part; how far it comes, "": on.

None of them trains, compiles or measures: training and sweeps are only checked, and plans are refused for another
reason.
"""


@pytest.mark.faults
def test_commands_do_what_messages_about_them_say(tmp_path):
    def run(commands: list[str]) -> list[tuple[int, str, str]]:
        return run_commands([shlex.split(f"gspo_jax.{command}".replace("TMP", str(tmp_path))) for command in commands])

    check_only = {"train": " --check_for=8", "sweep": " --dry-run"}
    mended = []
    for (mistake, pattern, command, _), (code, _, said) in zip(
        COMMANDS, run([row[0] for row in COMMANDS]), strict=True
    ):
        match = re.search(pattern, said.rstrip("\n"))
        assert code == 2 and match is not None, f"{mistake}: {said}"
        mended.append(command.format(match[1]) + check_only.get(command.partition(" ")[0], ""))
    for command, (*_, far), (code, _, said) in zip(mended, COMMANDS, run(mended), strict=True):
        assert (code, far.replace("TMP", str(tmp_path)) in said) == (2 if far else 0, True), f"{command}: {said}"


def _cause(error: UserError) -> tuple[str, int | None]:
    """Return the place in the code that an error comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno


def accept(words: list[str]) -> None:
    """Check a command's config as a run on 8 devices does. Raises its UserError."""
    config = cli.read_config(words)
    policy.check_weights(config)
    check(config, count_devices=lambda: 8)


def faulty(changes: dict[str, Any], base: str) -> ConfigDict:
    config = cli.load_config(base)
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    ("changes", "name"),
    mostly_slow(FAULTS, always=FAULTS[::3]),
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_a_message_about_a_config_says_is_possible_and_mends_it(changes, name, tmp_path):
    """The same command with the flags of the message gets past it: most often to the end, else to another refusal."""
    file, number = tmp_path / "faulty.py", FAULTS.index((changes, name))
    file.write_text(f"from tests import test_remedies as t\ndef get_config(): return t.faulty(*t.FAULTS[{number}])\n")
    words = [f"--config={file}"]
    with pytest.raises(UserError) as refused:
        accept(words)
    given = remedies(str(refused.value), changes, faulty(changes, name))
    assert given, refused.value
    for flag in given:
        try:
            accept([*words, flag])
        except UserError as error:
            assert _cause(error) != _cause(refused.value), flag
            assert not re.match(rf"{flag.partition('=')[0].removeprefix('--config.')} is '", str(error)), error
