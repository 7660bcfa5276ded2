"""Startup shared by all config-driven entry points: flags, config validation, devices.

A user error ends the program with a one-sentence message and exit code 2, before any device is touched whenever
possible. A disk that is full, read-only or broken does too, with exit code 1: the same command may succeed later.
"""

import ctypes
import difflib
import itertools
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import Formatter, LogRecord
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from gspo_jax import commands, exits, foreign, references, shell, signals, storage
from gspo_jax.config import benchmark
from gspo_jax.errors import Diverged, UserError
from gspo_jax.parallel import compilation, processes
from gspo_jax.setup import same
from gspo_jax.setup.fields import NAMED, TYPES, at, check_fields, names, no_field

Main = Callable[[ConfigDict], int | None]
"""A command; the program ends with the exit code that it returns, 0 for None."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Options of glibc's `mallopt`, from malloc.h."""


def run(main: Main, name: str, *, default: ConfigDict | None = None) -> None:
    """Parse `--config=FILE[:arg]`, `--config.a.b=value` and the flags of the command `name`, then call `main(config)`.

    `default` is the config used if `--config` is missing; without a default, a missing `--config` is an error.
    """
    _run(lambda: _start(main, default), name, needs_config=default is None)


def run_alone(main: Callable[[ConfigDict], int], name: str) -> None:
    """As `run`, for a command that computes nothing itself; the program ends with the exit code that `main` returns.

    No device is touched, no cache made, and no other process of a run met.
    """
    _run(lambda: _called(main, flags.FLAGS.config), name, needs_config=True)


def define(name: str) -> None:
    """Define the flags of a command of commands.py."""
    for flag in commands.COMMANDS[name].flags:
        if flag.kind is list:
            flags.DEFINE_list(flag.name, [], flag.help)
        elif flag.repeated:
            flags.DEFINE_multi_string(flag.name, [], flag.help)
        elif flag.kind is bool:
            flags.DEFINE_bool(flag.name, flag.default, flag.help)
        elif flag.kind is int:
            flags.DEFINE_integer(flag.name, flag.default, flag.help, None if flag.low is None else int(flag.low))
        elif flag.kind is float:
            flags.DEFINE_float(flag.name, flag.default, flag.help, flag.low, flag.high)
        else:
            flags.DEFINE_string(flag.name, flag.default, flag.help, required=flag.required)


def _run(start: Callable[[], int | None], name: str, *, needs_config: bool) -> None:
    define(name)
    logging.use_absl_handler()  # takes away one that an import has made for sys.stderr, which is wrapped next
    shell.keep_streams()
    signals.in_order()
    references.refuse_exits()
    app.run(
        lambda _: _guarded(start),
        flags_parser=lambda argv: _guarded(lambda: _parse(argv, flags.FLAGS, needs_config=needs_config)),
    )


def read_config(words: Sequence[str]) -> ConfigDict:
    """Return the config that `--config=FILE[:arg]`, or `--workdir=RUN`, and `--config.a.b=value` make, checked.

    Raises:
      UserError: as the command with these flags.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    _parse(["", *words], values, needs_config=True)
    check_fields(values.config)
    return values.config


def _start(main: Main, default: ConfigDict | None) -> None:
    config: Any = default if flags.FLAGS.config is None else flags.FLAGS.config
    check_fields(config)
    if "json" in flags.FLAGS:
        check_facts_file(flags.FLAGS.json)
    shell.raise_limits()
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().addFilter(_raised_later)
    logging.get_absl_handler().setFormatter(_Plain())
    reuse_memory()
    count = processes.start()
    prepare(config)
    with processes.guarded(count):
        if code := _guarded(lambda: _called(main, config)):
            sys.exit(code)


def _called(main: Main, config: ConfigDict) -> int | None:
    """Return `main(config)`.

    Raises:
      UserError: code of the user's has called `sys.exit`, in whatever thread; a command ends when its work is done.
    """
    try:
        return main(config)
    except signals.Ended:
        raise
    except SystemExit as error:
        frames = traceback.extract_tb(error.__traceback__)
        raise UserError(references.exit_asked(f"raises SystemExit({error.code!r})", frames)) from error


class _Plain(Formatter):
    """Messages as a run's other lines are, without date, thread and source line."""

    def format(self, record: LogRecord) -> str:
        """Return "warning: …"."""
        return f"{record.levelname.lower()}: {super().format(record)}"


def _raised_later(record: LogRecord) -> bool:
    """Return False for the traceback of a save in Orbax's own thread, which the checkpointer raises once more."""
    return not (record.exc_info and "orbax" in record.pathname)


def prepare(config: ConfigDict) -> None:
    """Use the cache of compiled programs and, if jax runs on CPU, present this process's share of `cpu_devices`.

    Raises:
      UserError: jax has already started with another number of CPU devices.
    """
    compilation.use_cache()
    count = max(config.cpu_devices // processes.count(), 1)
    try:
        simulate_devices(count)
    except RuntimeError:  # jax has started
        here = jax.local_device_count()
        if jax.default_backend() == "cpu" and here != count:
            raise UserError(
                f"cpu_devices is {config.cpu_devices}, but jax has already started with {here}; set it to {here}, or "
                "start Python again and train before any device is used"
            ) from None


def simulate_devices(count: int) -> None:
    """Make the CPU backend present `count` devices, if jax runs on CPU. Call it before any device is used.

    The simulated devices share the cores and can reach a collective far later than real devices would, so XLA's
    timeouts for collectives are raised.

    Raises:
      RuntimeError: devices have been used, and this count was not set before.
    """
    if jax.config.jax_num_cpu_devices == count:
        return
    jax.config.update("jax_num_cpu_devices", count)
    patience = {"warn_stuck": 120, "terminate": 600}
    limits = [f"--xla_cpu_collective_call_{name}_timeout_seconds={s}" for name, s in patience.items()]
    os.environ["XLA_FLAGS"] = " ".join([*limits, os.environ.get("XLA_FLAGS", "")])


def reuse_memory() -> None:
    """Keep freed memory for the next allocation, if the C library is glibc, except around compilations.

    Call it before any device is used, and before any thread has allocated memory: an arena that a thread has cannot be
    taken back, and XLA's threads would share it. XLA's CPU backend allocates a program's temporaries anew in every
    call. By default glibc maps and unmaps so large a buffer each time, and touching its fresh pages takes a fifth of an
    update. One arena for all threads, without maps of their own, keeps the pages instead.

    Before and after each compilation freed memory returns to the system. Otherwise a process's peak memory would be the
    sum of its largest compilation and of its data.
    """
    try:
        library = ctypes.CDLL(None)
        tune, trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
        tune(option, value)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: trim(0) if event.startswith("/jax/core/compile/") else None
    )


def write_facts(file: str | Path | None, facts: dict[str, Any]) -> None:
    """Write facts to the file given by `--json=FILE`, if any; only process 0 writes."""
    if file is not None and processes.is_first():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(file).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        except OSError as error:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(file)) from error


def check_facts_file(file: str | Path | None, *, flag: str = "json") -> None:
    """Check, leaving nothing behind, that `write_facts` can write to the flag's file; call it before any work.

    Raises:
      UserError: the file is a folder, lies below a file, or this account may not write it.
    """
    if file is None:
        return
    foreign.check_name(file, f"--{flag}")
    place = Path(file).absolute()
    there = storage.nearest(place)
    if place.is_dir():
        raise UserError(f"--{flag}={file} is a folder; give a file in it")
    if there != place and not there.is_dir():
        raise UserError(f"--{flag}={file} cannot be written, because {there} is not a folder; give another file")
    if not os.access(there, os.W_OK):
        raise UserError(f"--{flag}={file} cannot be written, because this account may not write {there}; give another")


def check_output_folder(folder: str | Path | None, *, flag: str) -> None:
    """Check, leaving nothing behind, that files can be written in the flag's folder, which need not exist yet.

    Raises:
      UserError: it is a file or lies below one, or this account may not write there.
    """
    if folder is None:
        return
    foreign.check_name(folder, f"--{flag}")
    if Path(folder).is_file():
        raise UserError(f"--{flag}={folder} is a file; give a folder")
    check_facts_file(Path(folder) / "any", flag=flag)


def _guarded(step: Callable[[], Any]) -> Any:
    """Call `step`; end the program with one sentence for a mistake, code 2, and for a fault of a disk, code 1."""
    try:
        return step()
    except UserError as error:
        signals.say(f"error: {error}")
        sys.exit(exits.MISTAKE)
    except Diverged as error:
        signals.say(f"error: {error}")
        sys.exit(exits.DIVERGED)
    except Exception as error:
        says = storage.fault(error, _workdir())
        if says is None:
            raise
        signals.say(f"error: {says}; then start the same command again")
        sys.exit(1)


def _workdir() -> str:
    """Return `--workdir`, if the command has it, or else the current folder."""
    return (flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None) or os.getcwd()


def _parse(argv: list[str], values: flags.FlagValues, *, needs_config: bool) -> list[str]:
    """Parse the command line into `values`, which get a `config`, None if the command has none; return no flags.

    Without `--config`, it is the config of the run in `--workdir`, of which only what may change can be changed.
    """
    given = any(word.startswith(("--config", "-config")) for word in argv)
    workdir = None if _last(argv, "config") is not None else _last(argv, "workdir")
    kept = same.of_folder(workdir) if workdir and (needs_config or given) and Path(workdir).is_dir() else None
    config, added = kept, dict[str, str]()
    if config is None and (needs_config or given):
        config = load_config(config_flag(argv))
    if config is not None:
        argv, added = _take_added(_without_config(argv), config)
        check_overrides(argv, config)
    saved = None if kept is None else kept.to_dict()
    command, sys.argv = sys.argv, argv  # ml_collections looks for overrides there
    try:
        if config is None:
            flags.DEFINE_string("config", None, "", flag_values=values)
        else:
            config_flags.DEFINE_config_dict("config", config, flag_values=values)
        rest = values(argv)
    except flags.IllegalFlagValueError as error:
        raise UserError(_wrong_value(str(error), config or ConfigDict(), values)) from None
    except flags.UnrecognizedFlagError as error:
        raise UserError(_unknown_flag(error.flagname, config or ConfigDict(), values)) from None
    except flags.Error as error:
        raise UserError(str(error)) from None
    finally:
        sys.argv = command
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; flags are written --name=value")
    _add(added, values.config)
    if saved is not None and workdir is not None:
        same.check_same_run(values.config, saved, workdir)
    return rest


def _last(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a flag on a command line, with one dash or two; None if it is not given."""
    given = [word.partition("=")[2] for word in argv if word.startswith((f"--{flag}=", f"-{flag}="))]
    given += [after for word, after in itertools.pairwise(argv) if word in (f"--{flag}", f"-{flag}")]
    return given[-1] if given else None


def _without_config(argv: list[str]) -> list[str]:
    """The words of a command line but `--config=FILE`."""
    kept, words = [], iter(argv)
    for word in words:
        if word in ("--config", "-config"):
            next(words, None)
        elif not word.startswith(("--config=", "-config=")):
            kept.append(word)
    return kept


def _take_added(argv: list[str], config: ConfigDict) -> tuple[list[str], dict[str, str]]:
    """Take the flags out of `argv` that add to a section of names: `--config.rewards.NAME=0.1`, or a whole benchmark.

    Returns:
      The other words, and the text of each added field by its dotted name. ml_collections refuses fields that a config
      does not have.
    """
    kept, added = [], {}
    for word in argv:
        match = re.fullmatch(r"--?config\.((\w+)\.(\w+)(\.\w+)?)=(.*)", word, re.DOTALL)
        known = match and match[2] in (("benchmarks",) if match[4] else NAMED)
        if match and known and match[3] not in at(config, match[2]):
            added[match[1]] = match[5]
        else:
            kept.append(word)
    return kept, added


def _add(added: dict[str, str], config: ConfigDict) -> None:
    """Add fields given by flags to a config."""
    for name, text in added.items():
        section, key, *rest = name.split(".")
        holder: Any = at(config, section)
        if rest:  # of a benchmark
            if key not in holder:
                with holder.unlocked():
                    holder[key] = benchmark()
            holder, (key,) = holder[key], rest
            if key not in holder:
                no_field(name, [section, name.split(".")[1]], config)
        kind = type(holder[key]) if rest else NAMED[section]
        try:
            value = kind(text)
        except ValueError:
            raise UserError(f"{name} is {text!r}; use {TYPES[kind]}") from None
        with holder.unlocked():
            holder[key] = value


def _unknown_flag(name: str, config: ConfigDict, values: flags.FlagValues) -> str:
    """Return one sentence that names the nearest flag, or the field of the config that the flag was meant to set."""
    last = name.rpartition(".")[2]
    fields = [field for field in names(config) if field.rpartition(".")[2] == last]
    fields.sort(key=lambda field: (not f".{field}".endswith(f".{name}"), field.count(".")))
    own = [flag for flag in values if not flag.startswith("config.")]
    near = difflib.get_close_matches(name, own, n=1) or [f"config.{field}" for field in fields]
    return f"unknown flag --{name}; " + (f"did you mean --{near[0]}?" if near else "--help lists the flags")


def _wrong_value(says: str, config: ConfigDict, values: flags.FlagValues) -> str:
    """Return, for absl's message on the value of a flag or of a field of the config, what the value must be."""
    match = re.match(r"flag --([\w.]+)=(.*?): ", says, re.DOTALL)
    if match is None:
        return says
    name, value = match.groups()
    if not name.startswith("config."):
        flag = values[name]
        if value == "None":
            return f"--{name} is missing: {flag.help}"
        return f"--{name} is {value!r}; use {flag.parser.syntactic_help or 'true or false'}"
    name = name.removeprefix("config.")
    section, _, key = name.rpartition(".")
    holder: Any = at(config, section) if section else config
    kind = holder.get_type(key)
    if kind is ConfigDict:
        return f"{name} is a section and not {value!r}; set one of its fields, {', '.join(at(config, name))}"
    return f"{name} is {value!r}; use {TYPES.get(kind, kind.__name__)}"


def config_words(argv: Sequence[str]) -> list[str]:
    """Return the flags of a command line that make its config, each as one word, `--config.a.b=value`."""
    words = []
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, _ = word.lstrip("-").partition("=")
        if word.startswith("-") and re.fullmatch(r"(no)?config(\..*)?", name):
            is_value = after and not re.match(r"--?[a-z]", after)
            words.append(f"{word}={after}" if not equals and is_value else word)
    return words


def config_flag(argv: Sequence[str]) -> str:
    """Return the value of the last `--config`, with one dash or two, as absl does."""
    given = _last(argv, "config")
    if given is None:
        raise UserError("--config is missing; for example --config=configs/tiny.py")
    return given


def load_config(value: str) -> ConfigDict:
    """Load the ConfigDict of `FILE.py[:arg]`.

    Raises:
      UserError: there is no such file, or it makes no config: one sentence with the nearest name, or with the line.
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
    """Return `get_sweep` of `FILE.py[:arg]`, to be called without the argument; None if the file does not define it.

    Raises:
      UserError: as `load_config`, and so does the function.
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
    """Return the file of a config that comes with gspo_jax; None if there is none, or something here has that name."""
    found = own_configs().get(name)
    return None if found is None or Path(name).exists() else found


def _function(value: str, function: str) -> Callable[[], Any] | None:
    """Return a function of `FILE.py[:arg]`, to be called without the argument; None if the file does not define it."""
    name, colon, arg = value.partition(":")
    path = own_config(name) or Path(name)
    if name and path.is_dir():
        raise UserError(f"config {name!r} is a folder; give a .py file in it")
    if path.is_file() and path.suffix != ".py":
        raise UserError(f"config {value!r} is not a .py file; give one, such as configs/tiny.py")
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py") if p.is_file()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), [*beside, *own_configs()], n=1)
        raise UserError(f"config {value!r} not found; " + (f"did you mean {near[0]}?" if near else "give a .py file"))

    def call() -> Any:
        with _explained(path):
            return found(arg) if colon else found()

    with _explained(path):
        found: Any = getattr(references.load_file(path, "gspo_jax_config"), function, None)
    return call if callable(found) else None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what a config file raises inside the block into a UserError: the line, and what is wrong there."""
    try:
        yield
    except (UserError, *signals.RAISED):
        raise
    except BaseException as error:  # anything may go wrong in a file of the user's, and it may call sys.exit
        raise UserError(_mistake_in(path, error)) from error


def _mistake_in(path: Path, error: BaseException) -> str:
    """Return one sentence on an exception raised by a config file: the line, and what is wrong there."""
    if isinstance(error, OSError) and error.filename == str(path):
        return f"config {str(path)!r} cannot be read: {error.strerror}; check its permissions"
    return f"the config cannot be made, {references.mistake(error, path)}"


def check_overrides(argv: list[str], config: ConfigDict) -> None:
    """Raise a UserError that names the nearest field if a `--config.a.b` does not exist."""
    for word in argv:
        dashes, found, name = word.partition("config.")
        if found and dashes in ("-", "--", "-no", "--no"):
            name = name.partition("=")[0]
            node: Any = config
            for i, key in enumerate(name.split(".")):
                if not isinstance(node, ConfigDict) or key not in node:
                    no_field(name, name.split(".")[:i], config)
                node = node[key]
