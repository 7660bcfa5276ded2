"""Config files: by path or by the name of one of our own."""

import difflib
import itertools
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax import references, signals
from gspo_jax.errors import UserError


def last_given(argv: Sequence[str], flag: str) -> str | None:
    """Return an absl flag's last value on a command line, or None."""
    value = None
    for word, after in itertools.zip_longest(argv, argv[1:]):
        name, equals, own = word.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            value = own if equals else after
    return value


def config_words(argv: Sequence[str]) -> list[str]:
    """Return the config flags of a command line, one word each, `--config.a.b=value`."""
    words = []
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, _ = word.lstrip("-").partition("=")
        if word.startswith("-") and re.fullmatch(r"(no)?config(\..*)?", name):
            is_value = after and not re.match(r"--?[a-z]", after)
            words.append(f"{word}={after}" if not equals and is_value else word)
    return words


def config_flag(argv: Sequence[str]) -> str:
    """Return the last `--config`, as absl does."""
    given = last_given(argv, "config")
    if given is None:
        raise UserError("--config is missing; for example --config=tiny")
    return given


def load_config(value: str) -> ConfigDict:
    """Load the ConfigDict of `FILE.py[:arg]`.

    Raises:
      UserError: with the nearest name, or the line of a mistake.
    """
    name = value.partition(":")[0]
    make = _function(value, "get_config")
    if make is None:
        raise UserError(f"{name} defines no function get_config; define one that returns a ConfigDict")
    config = make()
    if not isinstance(config, ConfigDict):
        raise UserError(f"get_config of {name} returns {config!r}; return a ConfigDict, such as gspo_jax.config.base()")
    return config


def sweep_function(value: str) -> Callable[[], Any] | None:
    """Return `get_sweep` of `FILE.py[:arg]`, if defined, with the argument bound.

    Raises:
      UserError: as `load_config`, here or when called.
    """
    return _function(value, "get_sweep")


def own_configs() -> dict[str, Path]:
    """Return the configs that come with gspo_jax, by name."""
    source = Path(__file__).resolve().parents[1]
    folder = Path(sysconfig.get_path("data")) / "share" / "gspo_jax" / "configs"
    if (source / "pyproject.toml").is_file():
        folder = source / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def own_config(name: str) -> Path | None:
    """Return the file of a config that comes with gspo_jax, unless a local file has that name."""
    found = own_configs().get(name)
    return None if found is None or Path(name).exists() else found


def _function(value: str, function: str) -> Callable[[], Any] | None:
    name, colon, arg = value.partition(":")
    path = own_config(name) or Path(name)
    if name and path.is_dir():
        raise UserError(f"config {name!r} is a folder; give a .py file in it")
    if path.is_file() and path.suffix != ".py":
        raise UserError(f"config {value!r} is not a .py file; give one, or a name such as tiny")
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py") if p.is_file()] if path.parent.is_dir() else []
        ours = own_configs()
        near = difflib.get_close_matches(str(path), beside, n=1)
        if not near:
            near = [path.stem] if path.stem in ours else difflib.get_close_matches(str(path), ours, n=1)
        remedy = f"did you mean {near[0]}{colon}{arg}?" if near else "give a .py file"
        raise UserError(f"config {value!r} not found; {remedy}")

    def call() -> Any:
        with _explained(path):
            return found(arg) if colon else found()

    with _explained(path):
        found: Any = getattr(references.load_file(path, "gspo_jax_config"), function, None)
    return call if callable(found) else None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, *signals.RAISED):
        raise
    except BaseException as error:  # user code may raise anything, even call sys.exit
        raise UserError(_mistake_in(path, error)) from error


def _mistake_in(path: Path, error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename == str(path):
        return f"config {str(path)!r} cannot be read: {error.strerror}; check its permissions"
    return f"the config cannot be made, {references.mistake(error, path)}"
