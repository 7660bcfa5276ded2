"""The command `gspo-jax`: help at once, examples that parse, fields, completion, configs by name, and a run's own."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl import flags

from gspo_jax import cli, commands, completion, fields
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import write_config
from gspo_jax.parser import make_parser
from gspo_jax.planning import programs
from gspo_jax.setup.fields import names
from gspo_jax.studies.panels import PANELS
from tests.pods import ROOT


def said(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=cwd, timeout=60)


@pytest.mark.parametrize("words", [("gspo_jax", "train", "--help"), ("gspo_jax.train", "--help"), ("gspo_jax",)])
def test_help_takes_no_imports(words):
    """It is there before jax could be imported: with jax it takes some two seconds here."""
    begun = time.perf_counter()
    done = said(*words)
    assert done.returncode == 0 and done.stdout.startswith("usage: gspo-jax") and not done.stderr
    assert time.perf_counter() - begun < 1


def test_commands_import_the_standard_library_alone():
    program = "import sys, gspo_jax.commands; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    others = set(done.stdout.split()) - sys.stdlib_module_names
    assert {name for name in others if not name.startswith("__")} == {"gspo_jax"}


def test_every_command_is_a_module_with_three_examples():
    for name, command in commands.COMMANDS.items():
        assert (ROOT / "gspo_jax" / f"{name}.py").is_file()
        assert len(set(command.examples)) == 3
        text = commands.described(name)
        assert all(len(line) <= 120 for line in text.splitlines()), text
        assert text.splitlines()[2].startswith(command.says[:40])


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, each in commands.COMMANDS.items() for words in each.examples]
)
def test_the_examples_of_help_parse(name, words):
    given = words.partition(" >")[0].replace("'", "").split()
    if not commands.COMMANDS[name].config:
        make_parser(name).parse_args(given)
        return
    flags = {flag.name for flag in commands.COMMANDS[name].flags}
    own = [word for word in given if word.startswith("--config")]
    used = {word.partition("=")[0].removeprefix("--") for word in given if word.startswith("--") and word not in own}
    assert used <= flags
    if own:
        cli.read_config(own)


def test_help_names_what_the_code_has():
    said = {name: {flag.name: flag for flag in command.flags} for name, command in commands.COMMANDS.items()}
    assert all(name in said["plan"]["programs"].help for name in programs.NAMES)
    assert said["report"]["panels"].choices == tuple(PANELS)


def test_fields_are_listed_with_what_config_py_says(capsys):
    assert fields.main(["group_size"]) == 0
    assert capsys.readouterr().out == "sampling.group_size = 8   1 to 2147483647\n    responses per prompt\n"
    listed = fields.described()
    assert all(f"{name} = " in listed for name in names(base()))
    silent = [part for part in listed.split("\n") if " = " in part and not part.startswith(" ")]
    assert len(silent) == len(list(names(base())))
    assert fields.main(["poll"]) == 2
    assert capsys.readouterr().err.endswith("has 'poll' in its name; gspo-jax fields lists all of them\n")
    assert fields.main(["learning_rat_"]) == 2
    assert capsys.readouterr().err.endswith("did you mean 'optimizer.learning_rate'?\n")


def test_every_field_of_its_own_has_a_meaning():
    """Hyper-parameters have theirs in the docstrings of their functions."""
    own = [name for name in names(base()) if not name.startswith(("objective.", "mismatch."))]
    assert not [name for name in own if "\n    " not in fields.described(name)]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_flags(shell):
    script = completion.script("bash")
    assert completion.script(shell).endswith(script)
    program = script + '\nCOMP_WORDS=(gspo-jax train --work); COMP_CWORD=2; _gspo_jax; echo "${COMPREPLY[*]}"'
    program += '\nCOMP_WORDS=(gspo-jax ev); COMP_CWORD=1; _gspo_jax; echo "${COMPREPLY[*]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["--workdir=", "evaluate"]


def test_modules_of_the_current_folder_are_found_as_python_m_finds_them(tmp_path):
    (tmp_path / "mine.py").write_text("PROMPTS = 3\n")
    text = "import mine\nfrom gspo_jax.config import base\n\ndef get_config():\n    raise ValueError(mine.PROMPTS)\n"
    (tmp_path / "config.py").write_text(text)
    command = shutil.which("gspo-jax", path=Path(sys.executable).parent)
    assert command is not None
    words = [command, "train", "--config=config.py", "--workdir=run"]
    for safe, says in (("", "raises ValueError: 3"), ("1", "raises ModuleNotFoundError: No module named 'mine'")):
        environment = os.environ | ({"PYTHONSAFEPATH": safe} if safe else {})
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and says in done.stderr, done.stderr


def test_a_config_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = cli.read_config(["--config=tiny:single", "--config.seed=3"])
    assert (config.seed, config.cpu_devices, config.coldstart.steps) == (3, 1, 1000)
    with pytest.raises(UserError, match="config 'tinny' not found; did you mean tiny"):
        cli.read_config(["--config=tinny"])
    (tmp_path / "tiny").mkdir()
    with pytest.raises(UserError, match=r"config 'tiny' is a folder; give a .py file in it"):
        cli.read_config(["--config=tiny"])


def test_a_run_folder_is_enough(tmp_path):
    """Its config is the run's, and flags change what a run may change."""
    words = ["--config=configs/tiny.py:dapo", "--config.seed=5", "--config.rewards.exact_answer=0.5"]
    words += ["--config.benchmarks.aime24.samples=32", "--config.optimizer.max_grad_norm=inf"]
    config = cli.read_config(words)
    write_config(tmp_path, config.to_dict(), command="train")
    again = cli.read_config([f"--workdir={tmp_path}"])
    assert again.to_dict() == config.to_dict()
    assert again.coldstart.terse == (0.0, 0.0, 0.0, 0.6)
    assert cli.read_config([f"--workdir={tmp_path}", "--config.eval.prompts=7"]).eval.prompts == 7
    with pytest.raises(UserError, match=r"seed is 6 here and 5 in the run in .*; set it back, or start another run"):
        cli.read_config([f"--workdir={tmp_path}", "--config.seed=6"])
    with pytest.raises(UserError, match="--config is missing"):
        cli.read_config([f"--workdir={tmp_path / 'none'}"])
    begun = cli.read_config([f"--workdir={tmp_path / 'none'}", f"--from={tmp_path}@3", "--config.seed=6"])
    assert (begun.seed, begun.rewards.exact_answer) == (6, 0.5)
    with pytest.raises(UserError, match=r"^folder .*none does not exist"):
        cli.read_config([f"--from={tmp_path / 'none'}", "--config.seed=6"])


def test_only_training_goes_on_with_other_hyper_parameters(tmp_path):
    """Other commands measure what a run has."""
    write_config(tmp_path, cli.read_config(["--config=tiny"]).to_dict(), command="train")
    words = [f"--workdir={tmp_path}", "--config.sampling.temperature=0.5"]
    assert cli.read_config(words).sampling.temperature == 0.5
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    with pytest.raises(UserError, match=r"^sampling.temperature is 0.5 here and 1.0 in .* with another --workdir$"):
        cli._parse(["", *words], values, needs_config=True, trains=False)
