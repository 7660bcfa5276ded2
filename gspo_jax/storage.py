"""Where a run's files are: a folder of this machine, or one in a bucket (`--workdir=gs://BUCKET/RUN`).

Nothing can be appended to what is in a bucket. So a run there keeps its files in a temporary folder of this machine:
they are fetched when the run is opened, and published as it goes on, before every checkpoint above all. Checkpoints,
which every process writes its part of, go straight to the bucket. What a preempted machine takes along is no older
than the newest checkpoint, and is computed again.
"""

import dataclasses
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import jax
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from gspo_jax.types import UserError

AnyPath: TypeAlias = Path | epath.Path
"""Of a file on this machine, or in a bucket."""

BUCKET = "gs://"
CHECKPOINTS = "checkpoints"
PUBLISH_S = 60.0
"""Between two copies of a run's files to its bucket, where no checkpoint asks for one before."""
_PROBE = ".writable-"


def find(folder: str | os.PathLike[str]) -> AnyPath:
    """The path of a folder, an absolute one where it is on this machine.

    Raises:
      UserError: a place that is neither this machine nor a bucket of Google Cloud Storage.
    """
    name = os.fspath(folder)
    if name.startswith(BUCKET):
        return epath.Path(name)
    if "://" in name:
        raise UserError(f"{name} is neither a folder of this machine nor a bucket; write a bucket as {BUCKET}NAME/RUN")
    return Path(name).absolute()


@contextmanager
def open_folder(workdir: str | os.PathLike[str]) -> Iterator["RunFolder"]:
    """The folder `--workdir`, with what the bucket has; published once more at the end.

    Raises:
      UserError: as `find` and `RunFolder.fetch`.
    """
    place = find(workdir)
    if isinstance(place, Path):
        yield RunFolder(name=os.fspath(workdir), local=place)
        return
    with tempfile.TemporaryDirectory(prefix="gspo_jax-run-", ignore_cleanup_errors=True) as local:
        folder = RunFolder(name=str(place), local=Path(local), bucket=place)
        folder.fetch()
        try:
            yield folder
        finally:
            folder.publish()


@dataclasses.dataclass(kw_only=True)
class RunFolder:
    """The files of a run."""

    name: str
    """As the user gave it, for messages."""
    local: Path
    """Where everything but checkpoints is read and written."""
    bucket: epath.Path | None = None
    """Where all of it is kept; None where `local` is that place."""
    _published: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By name in the bucket: when its local twin was written, in ns, and its size in bytes."""
    _published_at: float = -float("inf")

    @property
    def checkpoints(self) -> AnyPath:
        """Where they are."""
        return (self.local if self.bucket is None else self.bucket) / CHECKPOINTS

    def fetch(self) -> None:
        """Copies what the bucket has to this machine, but for checkpoints.

        Raises:
          UserError: the bucket cannot be read, or not be written to.
        """
        if self.bucket is None:
            return
        try:
            check_writable(self.bucket)
            for name in _names(self.bucket):
                file = self.local / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes((self.bucket / name).read_bytes())
                self._published[name] = _version(file)
        except Exception as error:  # storage, its transport and its credentials each have their own
            raise UserError(
                f"cannot use {self.name} ({error}); check that the bucket exists and that this machine may write to it"
            ) from error

    def publish(self, *, every_s: float = 0.0) -> None:
        """Copies what has changed to the bucket, unless that was done less than `every_s` seconds ago.

        Process 0 does, which alone writes what is to be kept. A failure is a warning, and the next call tries again.
        """
        if self.bucket is None or jax.process_index() or time.monotonic() - self._published_at < every_s:
            return
        try:
            self._upload(self.bucket)
            self._published_at = time.monotonic()
        except Exception as error:  # as in `fetch`; an hour without the bucket is no reason to end a run
            logging.warning("%s is not up to date (%s); trying again later", self.name, error)

    def share(self) -> None:
        """Gives all processes what process 0 has written, such as the model of a cold start."""
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


def check_writable(folder: AnyPath) -> None:
    """Writes, reads and deletes a small file; raises whatever the storage raises."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_PROBE}{uuid.uuid4().hex}"
    file.write_text("gspo_jax", encoding="utf-8")
    try:
        if file.read_text(encoding="utf-8") != "gspo_jax":
            raise OSError(f"{file} was written and reads otherwise")
    finally:
        file.unlink()


def _names(folder: epath.Path) -> Iterator[str]:
    """Of all files below the folder of a run, but for checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():  # a bucket has no empty folders
        if path.name == CHECKPOINTS or path.name.startswith(_PROBE):  # another process may delete its own by now
            continue
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in _names(path))
        else:
            yield path.name


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
