"""Files and folders from elsewhere: their names and kinds are checked before anything opens them.

A FIFO that is opened waits for ever, a device may do anything, and a link may lead to any file of this machine. The
paths that a user writes out may be links; what is found in a folder has to lie in it. A cache of Hugging Face's is the
exception: its files are links to `blobs/` of the same repository's cache, which hold them under their hashes.
"""

import os
import re
import stat
from pathlib import Path

from gspo_jax.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO, which nothing may ever fill",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
"""Names of the folders of repositories in Hugging Face's cache."""


def is_file(path: str | os.PathLike[str], *, inside: str | os.PathLike[str] | None = None) -> bool:
    """Whether a plain file is at `path`, which may then be opened; False if nothing is there.

    Args:
      path: the file.
      inside: the folder it has to lie in, links followed; None if the user wrote out the path of the file itself.

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


def kind_of_other(path: str | os.PathLike[str]) -> str:
    """Return what is at a path, for messages; "" for a file, a folder, or nothing."""
    mode = _mode(path)
    return "" if mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _kind(mode)


def check_name(path: str | os.PathLike[str], name: str) -> None:
    """Raise a UserError if a local path, which messages call `name`, is not written as libraries here can open it."""
    text = os.fspath(path)
    if text.startswith("~"):
        whole = os.path.expanduser(text)
        instead = "the path of the home folder instead" if whole == text else f"{name}={whole}"
        raise UserError(
            f"{name}={text}: the shell has left ~ as it is, so it would be a folder's name; write {instead} (or "
            f"./{text}, if that is its name)"
        )
    if "\0" in text:
        raise UserError(f"{name} is {text!r}, and no path has a zero byte; give another")
    try:
        os.path.abspath(text).encode()
    except UnicodeEncodeError:
        raise UserError(f"{name} is {os.path.abspath(text)!r}, which is not UTF-8; give another path") from None


def _mode(path: str | os.PathLike[str]) -> int | None:
    """The mode of what is at a path, links followed; None if nothing is there."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a chain of links that has no end, say
        raise UserError(f"{os.fspath(path)} cannot be used: {error.strerror}; give another") from error


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def _check_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Raise a UserError if a path leads out of a folder, but to no file of the folder's own or another hub's cache."""
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs, repository = target.parent, target.parent.parent
    is_cached = _REPOSITORY.fullmatch(repository.name) or root.is_relative_to(repository / "snapshots")
    if target.is_relative_to(root) or (blobs.name == "blobs" and is_cached):
        return
    raise UserError(
        f"{os.fspath(path)} leads to {target}, outside {os.fspath(folder)}; put the file itself there, or remove it"
    )
