"""Startup shared by all config-driven entry points: flags, config validation, devices.

A user error ends the program with a one-sentence message, before any device is touched whenever possible.
"""

import ctypes
import difflib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from gspo_jax import exits
from gspo_jax.parallel import processes
from gspo_jax.types import Diverged, UserError

Main = Callable[[ConfigDict], None]


def run(main: Main, *, default: ConfigDict | None = None) -> None:
    """Parse `--config=FILE[:arg]`, `--config.a.b=value` and the entry point's own flags, then call `main(config)`.

    `default` is the config used if `--config` is missing; without a default, a missing `--config` is an error.
    """
    config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:arg]; --config.a.b=value changes a field.")
    app.run(
        lambda _: _guarded(lambda: _start(main, default)),
        flags_parser=lambda argv: _guarded(lambda: _parse(argv, needs_config=default is None)),
    )


def _start(main: Main, default: ConfigDict | None) -> None:
    config: Any = default if flags.FLAGS.config is None else flags.FLAGS.config
    logging.set_verbosity(logging.WARNING)
    trim_around_compiling()
    count = processes.start(heartbeat_s=config.processes.heartbeat_s, start_s=config.processes.start_s)
    simulate_devices(max(config.cpu_devices // count, 1))
    with processes.guarded(count):
        _guarded(lambda: main(config))


def simulate_devices(count: int) -> None:
    """Make the CPU backend present `count` devices, if jax runs on CPU. Call it before any device is used.

    The simulated devices share the cores and can reach a collective far later than real devices would, so XLA's
    timeouts for collectives are raised.
    """
    jax.config.update("jax_num_cpu_devices", count)
    patience = {"warn_stuck": 120, "terminate": 600}
    limits = [f"--xla_cpu_collective_call_{name}_timeout_seconds={s}" for name, s in patience.items()]
    os.environ["XLA_FLAGS"] = " ".join([*limits, os.environ.get("XLA_FLAGS", "")])


def trim_around_compiling() -> None:
    """Return freed memory to the system before and after each compilation, if the C library is glibc.

    Otherwise glibc keeps it, and a process's peak memory is the sum of its largest compilation and of its data.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: trim(0) if event.startswith("/jax/core/compile/") else None
    )


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def write_facts(file: str | None, facts: dict[str, Any]) -> None:
    """Write facts to the file given by `--json=FILE`, if any; only process 0 writes."""
    if file is not None and processes.is_first():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _guarded(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exits.MISTAKE)
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exits.DIVERGED)


def _parse(argv: list[str], *, needs_config: bool) -> list[str]:
    uses_config = needs_config or any(word.startswith(("--config", "-config")) for word in argv)
    if uses_config and "--help" not in argv and "--helpfull" not in argv:
        check_overrides(argv, load_config(_config_flag(argv)))
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise UserError(str(error)) from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; flags are written --name=value")
    return rest


def _config_flag(argv: list[str]) -> str:
    """Return the value of the last `--config`, with one dash or two, as absl does."""
    given = [word.partition("=")[2] for word in argv if word.startswith(("--config=", "-config="))]
    given += [after for word, after in itertools.pairwise(argv) if word in ("--config", "-config")]
    if not given:
        raise UserError("--config is missing; for example --config=configs/tiny.py")
    return given[-1]


def load_config(value: str) -> ConfigDict:
    """Load the ConfigDict of `FILE.py[:arg]`; raise a UserError with the nearest name if there is no such file."""
    path = Path(value.partition(".py")[0] + ".py")
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), beside, n=1)
        raise UserError(f"config {value!r} not found; " + (f"did you mean {near[0]}?" if near else "give a .py file"))
    spec = importlib.util.spec_from_file_location("config", path)
    assert spec is not None and spec.loader is not None  # true for any .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(value.removeprefix(f"{path}").removeprefix(":"))


def check_overrides(argv: list[str], config: ConfigDict) -> None:
    """Raise a UserError that names the nearest field if a `--config.a.b` does not exist."""
    for word in argv:
        if word.startswith("--config."):
            name = word.removeprefix("--config.").partition("=")[0]
            node: Any = config
            for i, key in enumerate(name.split(".")):
                if not isinstance(node, ConfigDict) or key not in node:
                    _no_field(name, name.split(".")[:i], config)
                node = node[key]


def _no_field(name: str, found: list[str], config: ConfigDict) -> None:
    """Raise a UserError that suggests the nearest key of the section reached, or that field in another section."""
    section: Any = config
    for key in found:
        section = section[key]
    if not isinstance(section, ConfigDict):
        raise UserError(f"the config has no field {name!r}; {'.'.join(found)!r} is a single value")
    key = name.split(".")[len(found)]
    near = [".".join([*found, k]) for k in difflib.get_close_matches(key, list(section), n=1)]
    near += [field for field in _fields(config) if field.split(".")[-1] == name.split(".")[-1]]
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = f"section {'.'.join(found)!r}" if found else "the config"
    raise UserError(f"the config has no field {name!r}; {hint}{where} has {', '.join(section)}")


def _fields(config: ConfigDict, prefix: str = "") -> list[str]:
    names = []
    for key, value in config.items():
        names += _fields(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else [prefix + key]
    return names
