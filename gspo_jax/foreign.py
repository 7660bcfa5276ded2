"""Checks of foreign files by name and kind, before anything opens them, and reading of their JSON.

Opening a FIFO waits for ever, and a link may lead to any file of this machine. Paths written out by the user may be
links, but files found in a folder must lie in it. Exception: a Hugging Face cache links to `blobs/` of the same
repository.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from gspo_jax.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO, which nothing may ever fill",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
URL = re.compile(r"([A-Za-z][\w+.-]+):/+(.*)")
"""A place on another machine; a `Path` has kept one slash of two."""
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
"""Repository folders in Hugging Face's cache."""


def is_file(path: str | os.PathLike[str], *, inside: str | os.PathLike[str] | None = None) -> bool:
    """Return True if a plain file is at `path`, False if nothing is.

    `inside` is the folder it must lie in, links followed. None for a path written out by the user.

    Raises:
      UserError: something else is there, or the path leads out of the folder.
    """
    mode = _mode(path)
    if inside is not None:
        _check_inside(path, inside)
    if mode is None:
        return False
    if not stat.S_ISREG(mode):
        raise UserError(f"{os.fspath(path)} is {_kind(mode)}, where a file is expected; remove it, or give another")
    return True


def read_json(path: str | os.PathLike[str], *, inside: str | os.PathLike[str], remedy: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, None if nothing is there.

    Raises:
      UserError: as `is_file`, or the file holds anything else, with `remedy` at the sentence's end.
    """
    if not is_file(path, inside=inside):
        return None
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error!s:.200}); {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object; {remedy}")
    return value


def kind_of_other(path: str | os.PathLike[str]) -> str:
    """Return a name for what is at a path, "" for a file, a folder, or nothing."""
    mode = _mode(path)
    return "" if mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _kind(mode)


def check_name(path: str | os.PathLike[str], name: str) -> None:
    """Raise a UserError if libraries would misread a local path, or it is none. `name` is for messages."""
    text = os.fspath(path)
    if match := URL.match(text):
        place = "://".join(match.groups())
        copy = f" (gcloud storage cp --recursive {place} . copies what is there)" if match[1] == "gs" else ""
        raise UserError(f"{name} is {place}, where a path on this machine is needed; give one{copy}")
    if text.startswith("~"):
        whole = os.path.expanduser(text)
        flag = f"{name}=" if name.startswith("--") else ""
        instead = "the path of the home folder instead" if whole == text else f"{flag}{whole}"
        raise UserError(
            f"{flag}{text}: the shell has left ~ as it is, so it would be a folder's name; write {instead} (or "
            f"./{text}, if that is its name)"
        )
    if "\0" in text:
        raise UserError(f"{name} is {text!r}, and no path has a zero byte; give another")
    try:
        os.path.abspath(text).encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} is {os.path.abspath(text)!r}, which is not UTF-8; give another path") from None


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # e.g. a loop of links
        raise UserError(f"{os.fspath(path)} cannot be used: {error.strerror}; give another") from error


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def _check_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Raise a UserError if a path leads out of a folder, except into a hub's cache."""
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs, repository = target.parent, target.parent.parent
    is_cached = _REPOSITORY.fullmatch(repository.name) or root.is_relative_to(repository / "snapshots")
    if target.is_relative_to(root) or (blobs.name == "blobs" and is_cached):
        return
    raise UserError(
        f"{os.fspath(path)} leads to {target}, outside {os.fspath(folder)}; put the file itself there, or remove it"
    )
