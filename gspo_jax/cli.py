"""Startup of config-driven commands: flags, config validation, devices.

A user error ends the program with one sentence and exit code 2, if possible before any device is touched. A disk fault
gives exit code 1: the same command may succeed later.
"""

import ctypes
import difflib
import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from logging import Formatter, LogRecord
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from gspo_jax import commands, exits, foreign, references, shell, signals
from gspo_jax.config import benchmark
from gspo_jax.config_files import config_flag, last_given, load_config
from gspo_jax.errors import Diverged, ScoringFailed, UserError, fault
from gspo_jax.folder import storage
from gspo_jax.folder.notes import existing_folder
from gspo_jax.parallel import compilation, processes
from gspo_jax.secrets import redacted
from gspo_jax.setup import same
from gspo_jax.setup.fields import NAMED, TYPES, at, check_fields, may_be_none, names, no_field

Main = Callable[[ConfigDict], int | None]
"""A command. Returns the exit code, None for 0."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Options of glibc's `mallopt`, from malloc.h."""
_HUGE, _MADV_HUGEPAGE = 2**21, 14
"""Size of a huge page, a multiple of smaller ones, and Linux's request for them."""


Fallback = Callable[[Sequence[str]], ConfigDict]
"""Makes the config of a command line where neither --config nor a run folder gives one."""


def run(main: Main, name: str, *, default: ConfigDict | None = None, fallback: Fallback | None = None) -> None:
    """Parse `--config=FILE[:arg]`, `--config.a.b=value` and the flags of command `name`, then call `main(config)`."""
    _run(lambda: _start(main, default), name, needs_config=default is None, fallback=fallback)


def run_alone(main: Callable[[ConfigDict], int], name: str) -> None:
    """As `run`, for a command that touches no device, makes no cache and meets no other process."""
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


def _run(start: Callable[[], int | None], name: str, *, needs_config: bool, fallback: Fallback | None = None) -> None:
    define(name)
    logging.use_absl_handler()  # removes an import's handler of sys.stderr, which is wrapped next
    shell.keep_streams()
    signals.in_order()
    references.refuse_exits()
    sys.excepthook = _say_without_secrets
    app.run(
        lambda _: _guarded(start),
        flags_parser=lambda argv: _guarded(
            lambda: _parse(argv, flags.FLAGS, needs_config=needs_config, trains=name == "train", fallback=fallback)
        ),
    )


def _say_without_secrets(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def read_config(words: Sequence[str]) -> ConfigDict:
    """Return the checked config of `train`'s command line.

    Raises:
      UserError: as the command with these flags.
    """
    values = flags.FlagValues()
    for name in ("workdir", "from"):
        flags.DEFINE_string(name, None, "", flag_values=values)
    _parse(["", *words], values, needs_config=True, trains=True)
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
    gc.freeze()
    gc.set_threshold(50_000)  # tracing creates many objects that live long
    count = processes.start()
    prepare(config)
    with processes.guarded(count):
        if code := _guarded(lambda: _called(main, config)):
            sys.exit(code)


def _called(main: Main, config: ConfigDict) -> int | None:
    try:
        return main(config)
    except signals.Ended:
        raise
    except SystemExit as error:
        frames = traceback.extract_tb(error.__traceback__)
        raise UserError(references.exit_asked(f"raises SystemExit({error.code!r})", frames)) from error


class _Plain(Formatter):
    def format(self, record: LogRecord) -> str:
        """Return "warning: …"."""
        return f"{record.levelname.lower()}: {super().format(record)}"


def _raised_later(record: LogRecord) -> bool:
    """Return False for tracebacks of Orbax's thread, which the checkpointer raises again."""
    return not (record.exc_info and "orbax" in record.pathname)


def prepare(config: ConfigDict) -> None:
    """Enable the compilation cache and, on CPU, simulate this process's share of `cpu_devices`.

    Raises:
      UserError: jax has already started with another number of CPU devices, or the cache is in a bucket that cannot be
        reached.
    """
    cache = compilation.use_cache()
    if cache is not None and cache.startswith(storage.BUCKET):
        storage.check_client(f"JAX_COMPILATION_CACHE_DIR={cache}")
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
    """Make a CPU backend present `count` devices. Call it before any device is used.

    Simulated devices share the cores and reach collectives late, so XLA's collective timeouts are raised.

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
    """Keep freed memory for the next allocation under glibc, except around compilations.

    XLA's CPU backend allocates a program's temporaries in every call. By default glibc maps and unmaps them each time,
    and touching fresh pages takes a fifth of an update. One arena without maps keeps the pages. Call it before any
    thread allocates memory: thread arenas cannot be taken back.

    Freed memory returns to the system around each compilation. Otherwise peak memory would be the sum of the largest
    compilation and the data. What is allocated next gets huge pages, where the kernel gives them to those who ask.
    """
    try:
        library = ctypes.CDLL(None)
        tune, trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
        tune(option, value)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _ask_for_huge_pages(library)

    def compiled(event: str, *_: Any, **__: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            trim(0)
            _ask_for_huge_pages(library)

    jax.monitoring.register_event_duration_secs_listener(compiled)


def _ask_for_huge_pages(library: ctypes.CDLL) -> None:
    """Reserve addresses above the heap, advise huge pages there, and leave them to the next allocations.

    Nothing is touched, so that no memory is taken.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if block := library.malloc(size):
        first = -(-block // _HUGE) * _HUGE
        library.madvise(first, block + size - first, _MADV_HUGEPAGE)
        library.free(block)


def write_facts(file: str | Path | None, facts: dict[str, Any]) -> None:
    """Write facts to the file of `--json=FILE`, if any, on process 0."""
    if file is not None and processes.is_first():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(file).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        except OSError as error:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(file)) from error


def check_facts_file(file: str | Path | None, *, flag: str = "json") -> None:
    """Check that `write_facts` can write to the flag's file, leaving nothing behind.

    Raises:
      UserError: it is a folder, lies below a file, or this account may not write it.
    """
    if file is None:
        return
    foreign.check_name(file, f"--{flag}")
    if Path(file).is_dir():
        raise UserError(f"--{flag}={file} is a folder; give a file in it")
    _check_writable(file, flag=flag)


def _check_writable(place: str | Path, *, flag: str) -> None:
    whole = Path(place).absolute()
    there = storage.nearest(whole)
    if there != whole and not there.is_dir():
        raise UserError(f"--{flag}={place} cannot be written, because {there} is not a folder; give another")
    if not os.access(there, os.W_OK):
        raise UserError(f"--{flag}={place} cannot be written, because this account may not write {there}; give another")


def check_new_file(file: str | Path | None, *, flag: str) -> None:
    """Check that the flag's file can be written and that none would be lost.

    Raises:
      UserError: as `check_facts_file`, or there is one.
    """
    check_facts_file(file, flag=flag)
    if file is not None and os.path.lexists(file):
        raise UserError(f"--{flag}={file} exists; give another file, or remove it")


def check_output_folder(folder: str | Path | None, *, flag: str) -> None:
    """Check that the flag's folder can be written to or created.

    Raises:
      UserError: it is or lies below a file, or this account may not write there.
    """
    if folder is None:
        return
    foreign.check_name(folder, f"--{flag}")
    if Path(folder).is_file():
        raise UserError(f"--{flag}={folder} is a file; give a folder")
    _check_writable(folder, flag=flag)


def _guarded(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except UserError as error:
        signals.say(f"error: {error}")
        sys.exit(exits.MISTAKE)
    except Diverged as error:
        signals.say(f"error: {error}")
        sys.exit(exits.DIVERGED)
    except ScoringFailed as error:
        signals.say(f"error: {error}")
        sys.exit(exits.UNSCORED)
    except Exception as error:
        says = fault(error, _workdir())
        if says is None:
            raise
        signals.say(f"error: {says}; then start the same command again")
        sys.exit(1)


def _workdir() -> str:
    return (flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else None) or os.getcwd()


def _parse(
    argv: list[str],
    values: flags.FlagValues,
    *,
    needs_config: bool,
    trains: bool,
    fallback: Fallback | None = None,
) -> list[str]:
    """Parse the command line into `values`. Return non-flag words.

    Without `--config`, a run in `--workdir` gives the config, else the one of `--from`, or `fallback`. A command that
    `trains` may adjust the run's config.
    """
    given = any(word.startswith(("--config", "-config")) for word in argv)
    workdir = None if last_given(argv, "config") is not None else last_given(argv, "workdir")
    kept = same.of_folder(workdir) if workdir and (needs_config or given) and Path(workdir).is_dir() else None
    config, saved = kept, None if kept is None else kept.to_dict()
    if config is None and trains and last_given(argv, "config") is None:
        config = _config_of_origin(last_given(argv, "from"))
    if config is None and (needs_config or given):
        if fallback is not None and last_given(argv, "config") is None:
            config = fallback(argv)
        else:
            config = load_config(config_flag(argv))
    if config is not None:
        argv = _without_config(argv)
        _open_added(argv, config)
        check_overrides(argv, config)
    words, nones = _without_nones(argv)
    command, sys.argv = sys.argv, words  # ml_collections looks for overrides there
    try:
        if config is None:
            flags.DEFINE_string("config", None, "", flag_values=values)
        else:
            config_flags.DEFINE_config_dict("config", config, flag_values=values)
        rest = values(words)
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
    for name in nones:
        section, _, key = name.rpartition(".")
        at(values.config, section)[key] = None
    if saved is not None and workdir is not None:
        same.check_same_run(values.config, saved, workdir, adjusts=trains)
    return rest


def _config_of_origin(given: str | None) -> ConfigDict | None:
    """Return the config of the local run of `--from`, if given."""
    run = storage.split_step(given)[0] if given else ""
    return None if not run or run.startswith(storage.BUCKET) else same.of_folder(existing_folder(run), flag="--from")


def _without_config(argv: list[str]) -> list[str]:
    kept, words = [], iter(argv)
    for word in words:
        if word in ("--config", "-config"):
            next(words, None)
        elif not word.startswith(("--config=", "-config=")):
            kept.append(word)
    return kept


def _open_added(argv: list[str], config: ConfigDict) -> None:
    """Open the fields that flags add to a section: `--config.rewards.NAME=0.1`, or those of a new benchmark."""
    for word in argv:
        match = re.match(r"--?config\.(\w+)\.(\w+)(\.\w+)?(=|$)", word)
        if match and match[1] in (("benchmarks",) if match[3] else NAMED):
            section = at(config, match[1])
            if match[2] not in section:
                with section.unlocked():
                    section[match[2]] = benchmark() if match[3] else NAMED[match[1]]()


def _without_nones(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return a command line without `--config.a.b=None` for fields that may be None, and those that it sets to None."""
    words: list[str] = []
    found: set[str] = set()
    for word in argv:
        if word == "None" and words and re.fullmatch(r"--?config\.[^=]+", words[-1]):
            word = f"{words.pop()}=None"
        match = re.fullmatch(r"--?config\.(.+)=None", word)
        if match and may_be_none(match[1]):
            found.add(match[1])
        else:
            words.append(word)
    return words, [name for name in found if last_given(argv, f"config.{name}") == "None"]


def _unknown_flag(name: str, config: ConfigDict, values: flags.FlagValues) -> str:
    last = name.rpartition(".")[2]
    fields = [field for field in names(config) if field.rpartition(".")[2] == last]
    fields.sort(key=lambda field: (not f".{field}".endswith(f".{name}"), field.count(".")))
    own = [flag for flag in values if not flag.startswith("config.")]
    near = difflib.get_close_matches(name, own, n=1) or [f"config.{field}" for field in fields]
    return f"unknown flag --{name}; " + (f"did you mean --{near[0]}?" if near else "--help lists the flags")


def _wrong_value(says: str, config: ConfigDict, values: flags.FlagValues) -> str:
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


def check_overrides(argv: list[str], config: ConfigDict) -> None:
    """Raise a UserError, with the nearest field, if a `--config.a.b` does not exist."""
    for word in argv:
        dashes, found, name = word.partition("config.")
        if found and dashes in ("-", "--", "-no", "--no"):
            name = name.partition("=")[0]
            node: Any = config
            for i, key in enumerate(name.split(".")):
                if not isinstance(node, ConfigDict) or key not in node:
                    no_field(name, name.split(".")[:i], config)
                node = node[key]
