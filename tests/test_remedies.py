"""What messages, pages and scripts tell a user to type: it parses, by the parser that would read it.

Texts of the package are collected from its source, with `{}` for what is filled in at run time.
"""

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gspo_jax import cli, commands, installs
from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.folder import storage
from gspo_jax.setup.fields import is_open, names

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "gspo_jax").rglob("*.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PLACEHOLDER = re.compile(r"\{\}|[A-Z]{3,}|…")
"""A part of a command that a user fills in."""


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
    }  # of studies, scripts and other programs
    messages = [text for text in TEXTS if " " in text]
    named = {flag for text in messages for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text)}
    assert named - others <= known and len(named) > 30


@pytest.mark.parametrize("extra", ["tpu", "cuda", "report", "wandb", "gguf", "mcp"])
def test_an_extra_is_installed_by_what_it_requires(extra, monkeypatch):
    """As pyproject.toml has it. The metadata of a wheel say the same, as setuptools writes them."""
    wheel = [f'{text}; extra == "{name}"' for name, texts in EXTRAS.items() for text in texts]
    monkeypatch.setattr(metadata, "requires", lambda _: ["jax>=0.10.2,<0.13", *wheel])
    python, *pip = shlex.split(installs.of_extra(extra))
    assert Path(python).absolute() == Path(sys.executable).absolute() and pip[:3] == ["-m", "pip", "install"]
    assert {Requirement(word) for word in pip[3:]} == {Requirement(text) for text in EXTRAS[extra]}


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
