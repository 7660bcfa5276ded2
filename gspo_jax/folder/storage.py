"""Run folders on the local disk or in a bucket (`--workdir=gs://BUCKET/RUN`).

Bucket objects cannot be appended to. A run in a bucket works on a temporary local folder, fetched at the start and
published as it proceeds, always before a checkpoint. Every process writes its part of a checkpoint straight to the
bucket. A resumed run reproduces files lost with a preempted machine.
"""

import dataclasses
import errno
import glob
import importlib.util
import itertools
import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies

import jax
from absl import logging
from etils import epath
from etils.epath import gpath
from jax.experimental import multihost_utils

from gspo_jax import foreign, installs
from gspo_jax.errors import UserError
from gspo_jax.limited import quoted

AnyPath: TypeAlias = Path | epath.Path
"""Local or in a bucket."""


def _glob(path: gpath.PosixGPath, pattern: str, *, matches: Any = gpath.PosixGPath.glob) -> Iterator[gpath.PosixGPath]:
    return matches(path if "://" in str(path) else type(path)(glob.escape(str(path))), pattern)


# etils reads the folder's own name as part of the pattern: Orbax could not read back what it saves below `[`. TFDS and
# jax's compilation cache list files this way too.
gpath.PosixGPath.glob = _glob

getLogger("gcsfs").addFilter(lambda record: not record.exc_info)  # errors that it also raises

BUCKET = "gs://"
CHECKPOINTS = "checkpoints"
DAMAGED = "damaged"
SAMPLES = "samples"
HELD_OUT = "held_out"
TENSORBOARD = "tb"
STACKS = "stacks"
"""Stacks of processes that missed a deadline."""
COLD_START = "coldstart"
BENCHMARKS = "benchmarks"
PROFILE = "profile"
"""Traces. Each process writes its own, straight to the bucket."""
FOLDERS = CHECKPOINTS, DAMAGED, SAMPLES, HELD_OUT, TENSORBOARD, STACKS, COLD_START, BENCHMARKS, PROFILE
PUBLISH_S = 60.0
"""Maximum seconds between uploads to the bucket."""
LEASE = "lease.json"
"""Never copied from a bucket to the local folder."""
REACH_S = 8.0
"""Seconds in which a server of buckets is tried; a machine that has just started may be without its network."""
_PORTS = {"https": 443, "http": 80}
_PROBE = ".writable-"
_LONGEST_BELOW = 300
"""Maximum bytes that a run, with Orbax's nested folders, adds to its path."""


def find(folder: str | os.PathLike[str], *, flag: str = "--workdir") -> AnyPath:
    """Return a folder's path, absolute if local. Messages name `flag`.

    Raises:
      UserError: neither local nor in a Google Cloud Storage bucket, empty, or misread by a library.
    """
    name = os.fspath(folder)
    if not name:
        raise UserError(f"the name of the run folder is empty; give one, such as {flag}=runs/first")
    if name.startswith(BUCKET):
        if odd := re.search(r"[][*?{}#\\\x00-\x1f\x7f]", name):
            raise UserError(f"{name!r} has {odd[0]!r}, which storage libraries read as a pattern; give another folder")
        return epath.Path(name)
    if "://" in name or foreign.URL.match(name):
        raise UserError(f"{name} is neither a local folder nor a bucket; write a bucket as {BUCKET}NAME/RUN")
    foreign.check_name(name, flag)
    # Orbax takes `a/../b` for `b`, which is wrong if `a` is a link.
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


def split_step(name: str) -> tuple[str, int | None]:
    """Split RUN@STEP into a run's folder and the step of a checkpoint, None without one.

    Only digits after the last @ are a step: a folder `a@5` is written `a@5/`.
    """
    run, at, step = name.rpartition("@")
    return (run, int(step)) if at and step.isdecimal() and step.isascii() else (name, None)


def check_place(folder: str | os.PathLike[str]) -> None:
    """Check a run folder's name and, if local, contents and write access.

    Raises:
      UserError, OSError: as `find`, `check_contents` and `check_folder`.
    """
    place = find(folder)
    if isinstance(place, Path):
        check_contents(place)
        check_folder(place)


def check_contents(folder: Path) -> None:
    """Raise UserError unless a run folder has only files and folders, named as expected, and no links to outside.

    The folder itself may be a link.
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
    for name in (*folders, *files):
        is_folder = name in folders
        if is_folder and name.endswith((".json", ".jsonl")):
            raise UserError(f"{os.path.join(root, name)} is a folder, and a run has a file of that name; remove it")
        if not is_folder and name in FOLDERS:
            raise UserError(f"{os.path.join(root, name)} is a file, and a run has a folder of that name; remove it")


@contextmanager
def open_folder(workdir: str | os.PathLike[str], *, write: bool = True) -> Iterator["RunFolder"]:
    """Open the run folder `--workdir`. A bucket is fetched at the start and published at the end.

    Without `write` nothing is created or published.

    Raises:
      UserError, OSError: as `check_place` and `RunFolder.fetch`, or the bucket cannot be written.
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
    """Files of a run, perhaps with a copy in a bucket."""

    name: str
    """Folder as the user gave it."""
    local: Path
    """Everything but checkpoints and traces."""
    bucket: epath.Path | None = None
    _published: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Modification time in ns and bytes of local files, by name."""
    _published_at: float = -float("inf")

    @property
    def checkpoints(self) -> AnyPath:
        """Folder of the checkpoints."""
        return (self.local if self.bucket is None else self.bucket) / CHECKPOINTS

    @property
    def profile(self) -> AnyPath:
        """Folder of the traces."""
        return (self.local if self.bucket is None else self.bucket) / PROFILE

    def fetch(self) -> None:
        """Copy the run's files, except checkpoints and traces, from the bucket.

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
        """Upload changed files to the bucket, at most every `every_s` seconds.

        Only process 0 uploads. A failure is logged, and the next call retries.
        """
        if self.bucket is None or jax.process_index() or time.monotonic() - self._published_at < every_s:
            return
        try:
            self._upload(self.bucket)
            self._published_at = time.monotonic()
        except Exception as error:  # an hour without the bucket should not end a run
            logging.warning("%s is not up to date (%s); will retry", self.name, error)

    def share(self) -> None:
        """Give all processes the files written by process 0."""
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
    """Return once a file, or a folder's names, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir():  # some network file systems do not sync folders
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return once a folder and its contents would survive a power loss."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)


def unused(path: AnyPath) -> AnyPath:
    """Return the path, or the first free of PATH-2, PATH-3 … (a clock set back repeats names)."""
    names = (path.name if i == 1 else f"{path.stem}-{i}{path.suffix}" for i in itertools.count(1))
    return next(found for found in (path.parent / name for name in names) if not found.exists())


@contextmanager
def explained(name: str, *, place: str = "the bucket") -> Iterator[None]:
    """Turn storage errors inside the block into a UserError about `name`."""
    if name.startswith(BUCKET):
        check_client(name)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library raises its own types
        raise UserError(
            f"cannot use {name} ({quoted(error)}); check that {place} exists and that this machine may write to it"
        ) from error


def check_client(name: str) -> None:
    """Raise a UserError if the library that reads and writes buckets is missing, or nothing answers it.

    The library would try each request for half a minute. Behind a proxy nothing is tried here.
    """
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{name} needs the package gcsfs, which is not installed; run {installs.of_package('gcsfs')}")
    server = os.environ.get("STORAGE_EMULATOR_HOST", "default")
    if server in ("", "default"):
        server = f"https://storage.{os.environ.get('GOOGLE_CLOUD_UNIVERSE_DOMAIN', 'googleapis.com')}"
    place = urlsplit(server if "://" in server else f"http://{server}")
    if place.scheme in getproxies():
        return
    until = time.monotonic() + REACH_S
    while True:
        try:
            socket.create_connection((place.hostname, place.port or _PORTS[place.scheme]), REACH_S).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"cannot use {name}: {place.hostname} cannot be reached ({error.strerror or error}); connect this "
                    "machine to it, or give a local folder"
                ) from error
            time.sleep(1)


def check_writable(folder: AnyPath) -> None:
    """Write, read back and delete a small file. Raises the storage's errors."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_PROBE}{uuid.uuid4().hex}"
    try:
        file.write_text("gspo_jax", encoding="utf-8")
        if file.read_text(encoding="utf-8") != "gspo_jax":
            raise OSError(f"{file} does not read back as written")
    finally:
        file.unlink(missing_ok=True)  # a full disk still takes the name


def check_folder(folder: Path) -> None:
    """Check that a local folder can be created and written to. Leave nothing behind.

    Raises:
      UserError: it is or lies below a file, or this account may not write there.
      OSError: the disk is full or broken. `filename` is the tried folder.
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
    """Return the path or its nearest existing parent."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def _names(folder: epath.Path) -> Iterator[str]:
    for path in folder.iterdir() if folder.exists() else ():  # a bucket has no empty folders; is_dir hides its errors
        # Other processes delete their probes at any time.
        if path.name in (CHECKPOINTS, PROFILE, LEASE) or path.name.startswith(_PROBE):
            continue
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in _names(path))
        else:
            yield path.name


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
