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
    """A reference that leads to no function; the message is one sentence with the remedy."""


@functools.cache
def function(reference: str) -> Callable[..., Any]:
    """Return the function that a reference names, and the same one each time.

    A relative path starts at the current folder. The folder of a file is searched last for what the file imports.

    Raises:
      BadReference: the reference is malformed, its file or module cannot be imported, or it has no such function.
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
    """Import a module by its dotted name or the path of its .py file, once.

    Raises:
      BadReference: there is no such file or module, or importing it fails.
    """
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except signals.RAISED:
            raise
        except BaseException as error:  # anything may go wrong in a user's module, and it may call sys.exit
            if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
                raise BadReference(
                    f"there is no module {error.name!r}; install it, start where it can be imported, or give the path "
                    "of a .py file"
                ) from None
            raise BadReference(f"module {place!r} cannot be imported, {mistake(error)}") from error
    path = Path(place).absolute()
    if not path.is_file():
        raise BadReference(f"there is no file {place!r}; give the path of a .py file from the current folder")
    # A name of its own: files of the same name may lie in several folders.
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
    """Return the source files behind a function, that of the module which the reference names first.

    The others are where the function is defined, and what these files import of the user's own, and so on. Imports are
    found in the text, inside functions too; names that are computed are not. Python's own modules have no files, and
    what is installed is not followed: of it, versions tell.
    """
    place = reference.rpartition(":")[0]
    named = [getattr(module(place), "__file__", None)]
    with contextlib.suppress(TypeError):  # of an extension module, or an object that can be called
        named.append(inspect.getsourcefile(inspect.unwrap(function(reference))))
    found = list(dict.fromkeys(Path(file).absolute() for file in named if file is not None))
    left = [*found, *([] if place.endswith(".py") else _found(place))]  # the packages that the module is in, too
    own = set[Path]()
    while left:
        file = left.pop()
        if file not in own and _is_own(file):
            own.add(file)
            left += _imported(file)
    return [*found, *sorted(own.difference(found))]


def _is_own(file: Path) -> bool:
    """Return whether a source file belongs neither to Python, to what is installed, nor to this package."""
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not installed and not any(map(file.is_relative_to, (sysconfig.get_path("stdlib"), Path(__file__).parent)))


def _imported(file: Path) -> Iterator[Path]:
    """Yield the files of the modules that a source file's text imports, packages' `__init__.py` included."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # an extension module, say
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
    """Yield the files that importing a dotted name would run, without running any."""
    first, _, rest = dotted.partition(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError, AttributeError):  # a module that was put together by hand
        return
    if spec is None:
        return
    if spec.has_location and spec.origin is not None:
        yield Path(spec.origin).absolute()
    yield from _below([Path(folder) for folder in spec.submodule_search_locations or ()], rest)


def _below(folders: Sequence[Path], dotted: str) -> Iterator[Path]:
    """Yield the files that importing a dotted name from a package's folders would run."""
    for part in dotted.split("."):
        folders = [folder.absolute() / part for folder in folders if part]
        files = [file for folder in folders for file in (folder / "__init__.py", folder.with_name(f"{part}.py"))]
        yield from filter(Path.is_file, files)


def load_file(path: Path, name: str) -> ModuleType:
    """Run a .py file as a module called `name`; raises what the file raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true for any .py file
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def mistake(error: BaseException, path: Path | None = None) -> str:
    """Describe an exception in half a sentence, `file.py:3 raises NameError: …`, with the last line of `path` in it.

    Without `path`, the file and line that raised it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if path is None or frame.filename in (str(path), str(path.absolute()))]
    place = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(path)
    if isinstance(error, SyntaxError):
        place = f"{error.filename or place}:{error.lineno}" if error.lineno else place
        return f"{place} raises {type(error).__name__}: {error.msg}"
    return f"{place} raises {type(error).__name__}: {' '.join(str(error).split())}"


def refuse_exits() -> None:
    """Have `os._exit` end this process, from now on, with an error that names who calls it; see `exit_asked`.

    Processes that are forked from this one may call it.
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
    """Describe in one sentence that code has asked for the end of the process: where, and what to do instead.

    The place is the innermost frame outside of installed packages and this one; without any, the innermost.
    """
    own = [frame for frame in frames if not frame.filename.startswith("<") and _is_own(Path(frame.filename))]
    frame = (own or frames)[-1]
    return (
        f"{frame.filename}:{frame.lineno}, in {frame.name}, {what}; a command ends once its work is done, so return a "
        "value there, or raise an exception that says what is wrong"
    )
