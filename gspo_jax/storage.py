"""Run folders on the local disk or in a bucket (`--workdir=gs://BUCKET/RUN`).

Objects in a bucket cannot be appended to. A run in a bucket therefore works on a temporary local folder: its files are
fetched when the run is opened and published as it proceeds, in particular before every checkpoint. Checkpoints, of
which every process writes its own part, go straight to the bucket. Files lost with a preempted machine are newer than
the newest checkpoint, so the resumed run produces them again.
"""

import dataclasses
import errno
import glob
import itertools
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import jax
from absl import logging
from etils import epath
from etils.epath import gpath
from jax.experimental import multihost_utils

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.limited import quoted

AnyPath: TypeAlias = Path | epath.Path
"""Path on the local disk or in a bucket."""


def _glob(path: gpath.PosixGPath, pattern: str, *, matches: Any = gpath.PosixGPath.glob) -> Iterator[gpath.PosixGPath]:
    """Return the matches of a pattern below a path, whose own name is taken as it is."""
    return matches(path if "://" in str(path) else type(path)(glob.escape(str(path))), pattern)


# etils takes the folder's own name for a part of the pattern, so Orbax would save below `[` what it cannot read again.
# TFDS and jax's cache of compiled programs list files in this way too.
gpath.PosixGPath.glob = _glob

BUCKET = "gs://"
CHECKPOINTS = "checkpoints"
DAMAGED = "damaged"
"""Folder of a run to which damaged checkpoints are moved."""
SAMPLES = "samples"
TENSORBOARD = "tb"
STACKS = "stacks"
"""Folder of the stacks of processes that missed a deadline."""
COLD_START = "coldstart"
"""Folder of the model that a run without one makes first."""
BENCHMARKS = "benchmarks"
"""Folder of the answers to benchmarks."""
FOLDERS = CHECKPOINTS, DAMAGED, SAMPLES, TENSORBOARD, STACKS, COLD_START, BENCHMARKS
"""Folders that a run makes in its own."""
PUBLISH_S = 60.0
"""Seconds between uploads of a run's files to its bucket, unless a checkpoint requires one earlier."""
LEASE = "lease.json"
"""File of the run that uses a run folder; in a bucket, it is never copied to the local folder."""
_PROBE = ".writable-"
_LONGEST_BELOW = 300
"""Bytes that a run adds to its folder's path at most; Orbax names folders inside folders."""
_FULL_OR_BROKEN = {
    errno.ENOSPC: "make room on that disk, for data and for inodes",
    errno.EDQUOT: "make room within the quota of this account",
    errno.EFBIG: "raise this machine's limit on the size of files (ulimit -f)",
    errno.EROFS: "make that file system writable, or use another",
    errno.EIO: "check that disk, or use another",
    errno.EMFILE: "raise the limit on the open files of a process (ulimit -n)",
    errno.ENFILE: "raise this machine's limit on open files (fs.file-max)",
}
"""Errors of a disk, which no program handles, and their remedies."""
_REFUSED = {
    errno.EACCES: "give this account access to it, or use another place",
    errno.EPERM: "give this account access to it, or use another place",
    errno.ENOENT: "check that it exists, and that nothing removed it meanwhile",
}
"""Errors that programs also meet in passing, when they look whether they may use a file."""


def find(folder: str | os.PathLike[str], *, flag: str = "--workdir") -> AnyPath:
    """Return the path of a folder, absolute if it is on the local disk; messages name the `flag` that gave it.

    Raises:
      UserError: the folder is neither local nor in a Google Cloud Storage bucket, or its name is empty, or one that a
        library reads in another way.
    """
    name = os.fspath(folder)
    if not name:
        raise UserError(f"the name of the run folder is empty; give one, such as {flag}=runs/first")
    if name.startswith(BUCKET):
        if odd := re.search(r"[][*?{}#\\\x00-\x1f\x7f]", name):
            raise UserError(f"{name!r} has {odd[0]!r}, which storage libraries read as a pattern; give another folder")
        return epath.Path(name)
    if "://" in name:
        raise UserError(f"{name} is neither a local folder nor a bucket; write a bucket as {BUCKET}NAME/RUN")
    foreign.check_name(name, flag)
    # Orbax takes `a/../b` for `b`, which it is not where `a` is a link.
    place = Path("/", (os.path.realpath if ".." in Path(name).parts else os.path.abspath)(name).lstrip("/"))
    longest = os.pathconf("/", "PC_PATH_MAX") - _LONGEST_BELOW
    if (length := len(os.fsencode(place))) > longest:
        raise UserError(f"the path of the run folder has {length} bytes; give a {flag} of at most {longest}")
    if "\\" in str(place):
        raise UserError(f"{place} has a backslash, which TensorStore reads as /; give another {flag}")
    if "gs:/" in f"{place}/" or str(epath.Path(place)) != str(place):
        what = "has gs:/ in it" if "gs:/" in f"{place}/" else f"begins with /{place.parts[1]}"
        raise UserError(
            f"{place} {what}, which libraries read as a bucket; give another {flag}, or a bucket as {BUCKET}NAME/RUN"
        )
    return place


def check_place(folder: str | os.PathLike[str]) -> None:
    """Check the name of a run folder and, if it is on the local disk, what is in it, and that a run can write there.

    Leaves nothing behind.

    Raises:
      UserError: as `find`, `check_contents` and `check_folder`.
      OSError: as `check_folder`.
    """
    place = find(folder)
    if isinstance(place, Path):
        check_contents(place)
        check_folder(place)


def check_contents(folder: Path) -> None:
    """Raise UserError unless a run folder has only files and folders, of which a run only ever uses those inside.

    So there is neither a link out of it nor a FIFO, a socket or a device, and its own files and folders are no folders
    and files. The folder itself may be a link.
    """
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(root):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(root):
                raise UserError(
                    f"{path} is a link to {os.readlink(path)}, outside the run folder, where the run would write; "
                    "remove it (only the run folder as a whole may be a link)"
                )
            if other := foreign.kind_of_other(path):
                raise UserError(f"{path} is {other}, and a run folder has only files and folders; remove it")
        if place == root:
            _check_own(root, folders, files)


def _check_own(root: str, folders: Sequence[str], files: Sequence[str]) -> None:
    """Raise UserError if a run's own file is a folder in this place, or its own folder a file."""
    for name in (*folders, *files):
        is_folder = name in folders
        if is_folder and name.endswith((".json", ".jsonl")):
            raise UserError(f"{os.path.join(root, name)} is a folder, and a run has a file of that name; remove it")
        if not is_folder and name in FOLDERS:
            raise UserError(f"{os.path.join(root, name)} is a file, and a run has a folder of that name; remove it")


@contextmanager
def open_folder(workdir: str | os.PathLike[str], *, write: bool = True) -> Iterator["RunFolder"]:
    """Open the run folder `--workdir`, fetching it from a bucket at the start and publishing it at the end.

    Without `write` the folder need not be writable, and nothing is created or published in it.

    Raises:
      UserError: as `find`, `check_contents`, `check_folder` and `RunFolder.fetch`, or the bucket cannot be written.
      OSError: as `check_folder`.
    """
    place = find(workdir)
    if isinstance(place, Path):
        check_contents(place)
        if write:
            check_folder(place)
        yield RunFolder(name=os.fspath(workdir), local=place)
        return
    with tempfile.TemporaryDirectory(prefix="gspo_jax-run-", ignore_cleanup_errors=True) as local:
        folder = RunFolder(name=str(place), local=Path(local), bucket=place)
        if write:
            with explained(folder.name):
                check_writable(place)
        folder.fetch()
        try:
            yield folder
        finally:
            if write:
                folder.publish()


@dataclasses.dataclass(kw_only=True)
class RunFolder:
    """Files of a run, with their copy in a bucket if it has one."""

    name: str
    """Folder as the user gave it, for messages."""
    local: Path
    """Local folder in which everything but checkpoints is read and written."""
    bucket: epath.Path | None = None
    """Bucket folder where the run is kept; None if it is kept in `local`."""
    _published: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Modification time in ns and size in bytes of the local file, by name of its copy in the bucket."""
    _published_at: float = -float("inf")

    @property
    def checkpoints(self) -> AnyPath:
        """Folder of the checkpoints."""
        return (self.local if self.bucket is None else self.bucket) / CHECKPOINTS

    def fetch(self) -> None:
        """Copy the run's files, except checkpoints, from the bucket to the local folder.

        Raises:
          UserError: the bucket cannot be read.
        """
        if self.bucket is None:
            return
        with explained(self.name):
            for name in _names(self.bucket):
                file = self.local / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes((self.bucket / name).read_bytes())
                self._published[name] = _version(file)

    def publish(self, *, every_s: float = 0.0) -> None:
        """Upload changed files to the bucket, unless the last upload was less than `every_s` seconds ago.

        Only process 0 does, since it alone writes files worth keeping. A failure is logged as a warning, and the next
        call retries.
        """
        if self.bucket is None or jax.process_index() or time.monotonic() - self._published_at < every_s:
            return
        try:
            self._upload(self.bucket)
            self._published_at = time.monotonic()
        except Exception as error:  # as in `fetch`; an hour without the bucket should not end a run
            logging.warning("%s is not up to date (%s); will retry", self.name, error)

    def share(self) -> None:
        """Make files written by process 0, such as a cold-start model, available to all processes."""
        if self.bucket is None:
            return
        self.publish()
        multihost_utils.sync_global_devices("share the run folder")
        if jax.process_index():
            self.fetch()

    def _upload(self, bucket: epath.Path) -> None:
        files = {str(file.relative_to(self.local)): file for file in self.local.rglob("*") if file.is_file()}
        for name, file in files.items():
            version = _version(file)
            if self._published.get(name) != version and file.suffix != ".tmp":
                (bucket / name).parent.mkdir(parents=True, exist_ok=True)
                (bucket / name).write_bytes(file.read_bytes())
                self._published[name] = version
        for name in self._published.keys() - files.keys():
            (bucket / name).unlink(missing_ok=True)
            del self._published[name]


def sync(path: Path) -> None:
    """Return once a file's content, or the names in a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir():  # some network file systems do not sync folders
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return once a folder, all that is in it, and its own name would survive a loss of power."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)


def unused(path: AnyPath) -> AnyPath:
    """Return the path or, if it exists, the first of PATH-2, PATH-3 … that does not: a clock set back repeats names."""
    names = (path.name if i == 1 else f"{path.stem}-{i}{path.suffix}" for i in itertools.count(1))
    return next(found for found in (path.parent / name for name in names) if not found.exists())


@contextmanager
def explained(name: str, *, place: str = "the bucket") -> Iterator[None]:
    """Turn what the storage raises inside the block into a UserError of one sentence about the run folder `name`.

    `place` is what should exist.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # storage, transport and credentials each raise their own types
        raise UserError(
            f"cannot use {name} ({quoted(error)}); check that {place} exists and that this machine may write to it"
        ) from error


def check_writable(folder: AnyPath) -> None:
    """Write, read back and delete a small file; raise whatever the storage raises."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_PROBE}{uuid.uuid4().hex}"
    try:
        file.write_text("gspo_jax", encoding="utf-8")
        if file.read_text(encoding="utf-8") != "gspo_jax":
            raise OSError(f"{file} does not read back as written")
    finally:
        file.unlink(missing_ok=True)  # a full disk still takes the name of a file


def check_folder(folder: Path) -> None:
    """Check, leaving nothing behind, that a local folder can be created and files be written in it.

    Raises:
      UserError: the folder or one above it is a file, or this account may not write there.
      OSError: the disk is full or broken; `filename` is the folder that was tried.
    """
    there = nearest(folder)
    if not there.is_dir():
        raise UserError(f"{folder} cannot be a run folder, because {there} is not a folder; give another --workdir")
    try:
        check_writable(there)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"{folder} cannot be a run folder, because {there} cannot be written ({error.strerror}); give another "
                "--workdir, or this account the right to write there"
            ) from error
        raise OSError(error.errno, error.strerror, str(there)) from error


def nearest(path: Path) -> Path:
    """Return a path or, if it does not exist, the nearest folder above it that does."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def fault(error: BaseException, place: str) -> str | None:
    """Return one sentence with path and remedy if a disk is the cause of an error; None for any other cause.

    Args:
      error: an exception; its causes, and the members of a group, may be the disk's error too.
      place: what to name where that error names no path.
    """
    for known, contexts in ((_FULL_OR_BROKEN | _REFUSED, False), (_FULL_OR_BROKEN, True)):
        for each in _causes(error, contexts=contexts):
            code, path = _system_error(each)
            if code in known:
                return f"{path or f'a file, probably in {place}'}: {os.strerror(code)}; {known[code]}"
    return None


def _causes(error: BaseException, *, contexts: bool) -> Iterator[BaseException]:
    """Yield an exception, the members of a group and all causes; with `contexts` also what was being handled then."""
    left: list[BaseException | None] = [error]
    seen = set()
    while left:
        each = left.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
        if contexts:
            left.append(each.__context__)


def _system_error(error: BaseException) -> tuple[int, str | None]:
    """Return errno and path of an error of the operating system, 0 for others; TensorStore and Rust give it as text."""
    if isinstance(error, OSError):
        return error.errno or 0, None if error.filename is None else str(error.filename)
    code, path = re.search(r"os[_ ]error(?:_code='| )(\d+)", str(error)), re.search(r'"(/[^"]+)"', str(error))
    return (0, None) if code is None else (int(code[1]), None if path is None else path[1])


def _names(folder: epath.Path) -> Iterator[str]:
    """Yield the relative names of all files in a run folder, except checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():  # a bucket has no empty folders
        # Other processes delete their probes at any time.
        if path.name in (CHECKPOINTS, LEASE) or path.name.startswith(_PROBE):
            continue
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in _names(path))
        else:
            yield path.name


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
