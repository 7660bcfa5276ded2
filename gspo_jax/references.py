"""Functions named by reference: `package.module:function`, or `path/to/file.py:function`.

Reward workers import this module, so it must not import jax.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from gspo_jax import exits, signals


class BadReference(ValueError):
    """A reference to no function, with a one-sentence message."""


@functools.cache
def function(reference: str) -> Callable[..., Any]:
    """Return the function that a reference names, the same one each time.

    Relative paths start at the current folder. A file's folder is searched last for its imports.

    Raises:
      BadReference: it is malformed, its module cannot be imported, or has no such function.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise BadReference(
            f"{reference!r} names no function; use 'path/to/file.py:function' or 'package.module:function'"
        )
    found = module(place)
    if not callable(getattr(found, name, None)):
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
        there = f"it has {', '.join(own)}" if own else "it defines none"
        raise BadReference(f"{place} has no function {name!r}; {there}")
    return getattr(found, name)


@functools.cache
def module(place: str) -> ModuleType:
    """Import a module by dotted name or .py path, once.

    Raises:
      BadReference: it does not exist, or importing it fails.
    """
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except signals.RAISED:
            raise
        except BaseException as error:  # user modules may raise anything, even call sys.exit
            if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
                raise BadReference(
                    f"there is no module {error.name!r}; install it, start where it can be imported, or give the path "
                    "of a .py file"
                ) from None
            raise BadReference(f"module {place!r} cannot be imported, {mistake(error)}") from error
    path = Path(place).absolute()
    if not path.is_file():
        raise BadReference(f"there is no file {place!r}; give the path of a .py file from the current folder")
    # folders may have files of the same name
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        return load_file(path, name)
    except signals.RAISED:
        raise
    except BaseException as error:
        raise BadReference(f"{place} cannot be imported, {mistake(error, path)}") from error


def files(reference: str) -> list[Path]:
    """Return a function's source files, the referenced module's first.

    The defining file and these files' imports follow, recursively, found in the text unless names are computed. The
    standard library and installed packages are left out: versions cover them.
    """
    place = reference.rpartition(":")[0]
    named = [getattr(module(place), "__file__", None)]
    with contextlib.suppress(TypeError):  # of an extension module, or a callable object
        named.append(inspect.getsourcefile(inspect.unwrap(function(reference))))
    found = list(dict.fromkeys(Path(file).absolute() for file in named if file is not None))
    left = [*found, *([] if place.endswith(".py") else _found(place))]  # with the module's packages
    own = set[Path]()
    while left:
        file = left.pop()
        if file not in own and _is_own(file):
            own.add(file)
            left += _imported(file)
    return [*found, *sorted(own.difference(found))]


def _is_own(file: Path) -> bool:
    """Return True for files outside Python, installed packages and this package."""
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not installed and not any(map(file.is_relative_to, (sysconfig.get_path("stdlib"), Path(__file__).parent)))


def _imported(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # e.g. an extension module
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _found(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # a name of the module, or a module of the package
                dotted = f"{node.module}.{alias.name}" if node.module else alias.name
                if not node.level:
                    yield from _found(dotted)
                for package in list(file.parents)[node.level - 1 : node.level]:
                    yield from _below([package.parent], f"{package.name}.{dotted}")


def _found(dotted: str) -> Iterator[Path]:
    """Yield the files that importing a dotted name would run."""
    first, _, rest = dotted.partition(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError, AttributeError):  # a hand-made module
        return
    if spec is None:
        return
    if spec.has_location and spec.origin is not None:
        yield Path(spec.origin).absolute()
    yield from _below([Path(folder) for folder in spec.submodule_search_locations or ()], rest)


def _below(folders: Sequence[Path], dotted: str) -> Iterator[Path]:
    for part in dotted.split("."):
        folders = [folder.absolute() / part for folder in folders if part]
        files = [file for folder in folders for file in (folder / "__init__.py", folder.with_name(f"{part}.py"))]
        yield from filter(Path.is_file, files)


def load_file(path: Path, name: str) -> ModuleType:
    """Run a .py file as module `name`. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true for any .py file
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def mistake(error: BaseException, path: Path | None = None) -> str:
    """Return `file.py:3 raises NameError: …`, for the last line of `path` in the traceback.

    Without `path`, for the place that raised it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if path is None or frame.filename in (str(path), str(path.absolute()))]
    place = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(path)
    if isinstance(error, SyntaxError):
        place = f"{error.filename or place}:{error.lineno}" if error.lineno else place
        return f"{place} raises {type(error).__name__}: {error.msg}"
    return f"{place} raises {type(error).__name__}: {' '.join(str(error).split())}"


def refuse_exits() -> None:
    """Make `os._exit` end this process with an error that names its caller.

    Forked processes may call it.
    """
    here = os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() == here:
            says = exit_asked(f"calls os._exit({status!r})", traceback.extract_stack()[:-1])
            signals.say(f"\nerror: {says}")
            exits.leave(exits.MISTAKE)
        exits.leave(status)

    os._exit = refused


def exit_asked(what: str, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return a sentence on where code asked to end the process, with the remedy.

    The place is the innermost frame outside installed packages and this one, if any.
    """
    own = [frame for frame in frames if not frame.filename.startswith("<") and _is_own(Path(frame.filename))]
    frame = (own or frames)[-1]
    return (
        f"{frame.filename}:{frame.lineno}, in {frame.name}, {what}; a command ends once its work is done, so return a "
        "value there, or raise an exception that says what is wrong"
    )
