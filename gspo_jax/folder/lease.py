"""The lease of a run folder, `lease.json`: at most one run uses a folder at a time, local or in a bucket.

It is taken over if its run is known to be dead, or after `EXPIRES_S` seconds without renewal. A run that finds its
lease taken ends at once. Clocks of different machines are never compared: a waiting process uses its own monotonic
clock.
"""

import dataclasses
import datetime
import fcntl
import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from absl import logging

from gspo_jax import exits, signals
from gspo_jax.errors import UserError
from gspo_jax.folder.storage import LEASE, AnyPath, check_folder, explained, find
from gspo_jax.parallel import processes

RENEWED_S = 5.0
"""Seconds between renewals."""
EXPIRES_S = 60.0
"""Seconds without renewal until a takeover."""
SETTLES_S = 1.0
"""Seconds until a lease in a bucket is read back. Of several writers, the last holds it."""
_LOOK_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The run that holds a lease, as in `lease.json`."""

    owner: str
    host: str
    """Host name, for messages."""
    machine: str
    """Id of the machine's boot and pid namespace."""
    pid: int
    """Process id of process 0."""
    started: str
    """Start of process 0, as ids are reused."""
    since: str
    """Begin of the lease as text, for messages."""
    renewals: int = 0
    """Each renewal changes the file."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_here(self) -> bool:
        """Return True if it is on this machine."""
        return self.machine == _machine()

    def is_dead(self) -> bool:
        """Return True if its process is known to have ended."""
        return self.is_here() and _start_of(self.pid) != self.started


class Lease:
    """A lease of this process, renewed in a thread."""

    def __init__(self, folder: AnyPath, holder: Holder):
        """Start renewing a just written lease."""
        self._folder, self._holder = folder, holder
        self._confirmed = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """End the process if another run has taken the lease. Call it before writing to the folder.

        Reads the folder only if the lease may soon expire, e.g. after a suspension.
        """
        if time.monotonic() - self._confirmed > EXPIRES_S / 2:
            with suppress(Exception):  # unreadable storage is not writable either
                self._check()

    def release(self) -> None:
        """Stop renewing, and remove the lease."""
        self._over.set()
        self._thread.join()
        try:
            if self._is_ours(_read(self._folder)):
                (self._folder / LEASE).unlink()
        except Exception as error:  # each library raises its own types
            logging.warning("%s could not be removed (%s); it expires by itself", self._folder / LEASE, error)

    def _is_ours(self, text: str | None) -> bool:
        found = _parse(text)
        return found is not None and found.owner == self._holder.owner

    def _check(self) -> None:
        text = _read(self._folder)
        if self._is_ours(text):
            return
        what = "is gone" if text is None else f"is now held by {_parse(text) or 'another run'}"
        signals.say(
            f"error: the lease of this run, {self._folder / LEASE}, {what}; it ends without writing anything more, as "
            "only one run can use a folder"
        )
        exits.leave(exits.TAKEN)

    def _renew(self) -> None:
        while not self._over.wait(RENEWED_S):
            now = time.monotonic()
            try:
                self._check()
                self._holder = dataclasses.replace(self._holder, renewals=self._holder.renewals + 1)
                _write(self._folder, self._holder)
                if time.monotonic() - now > EXPIRES_S:  # suspended on the way: another run may have taken the lease
                    (self._folder / LEASE).unlink()
                    self._check()
                self._confirmed = now
            except Exception as error:  # an hour without the bucket should not end a run
                logging.warning("%s could not be renewed (%s); will retry", self._folder / LEASE, error)


@contextmanager
def hold(workdir: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """Hold the lease of a run folder inside the block, for all processes.

    Yields `Lease.confirm`, a no-op except in process 0.

    Raises:
      UserError: another run uses the folder, or it is unusable.
    """
    place, held = find(workdir), list[Lease]()

    def take() -> None:
        if isinstance(place, Path):
            check_folder(place)
        with explained(os.fspath(workdir), place="its parent folder" if isinstance(place, Path) else "the bucket"):
            held.append(acquire(place))

    processes.ask_first(take)
    try:
        yield held[0].confirm if held else lambda: None
    finally:
        for lease in held:
            lease.release()


def acquire(folder: AnyPath) -> Lease:
    """Take a run folder's lease, after an earlier one has expired.

    Raises:
      UserError: another run uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = _myself()
    watched, since = None, 0.0
    while True:
        with _locked(folder):
            text = _read(folder)
            other = _parse(text)
            expired = text == watched and time.monotonic() - since > EXPIRES_S
            if text is None or expired or (other is not None and other.is_dead()):
                _write(folder, mine)
                break
        if (other is not None and other.is_here()) or (watched is not None and text != watched):
            raise UserError(_in_use(folder, other))
        if watched is None:
            watched, since = text, time.monotonic()
            print(
                f"the last run in {folder} ({other or 'unknown'}) did not end by itself: waiting {EXPIRES_S:.0f} s, to "
                "see whether it still runs on its machine",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_LOOK_S)
    lease = Lease(folder, mine)
    if not isinstance(folder, Path):
        time.sleep(SETTLES_S)
        other = _parse(_read(folder))
        if other is None or other.owner != mine.owner:
            lease.release()
            raise UserError(_in_use(folder, other))
    return lease


def _in_use(folder: AnyPath, other: Holder | None) -> str:
    return f"{folder} is in use by another run ({other or 'unknown'}); stop that run, or use another --workdir"


@contextmanager
def _locked(folder: AnyPath) -> Iterator[None]:
    """Lock a local folder. A bucket has no locks."""
    if not isinstance(folder, Path):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks, so renewals decide
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(folder: AnyPath) -> str | None:
    try:
        return (folder / LEASE).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _parse(text: str | None) -> Holder | None:
    try:
        holder = Holder(**json.loads(text or ""))
    except (ValueError, TypeError, RecursionError):
        return None
    return holder if isinstance(holder.pid, int) and holder.pid > 0 else None


def _write(folder: AnyPath, holder: Holder) -> None:
    text = json.dumps(dataclasses.asdict(holder)) + "\n"
    if not isinstance(folder, Path):
        (folder / LEASE).write_text(text)
        return
    # Shared by all writers: if a run is suspended here, the next one removes its file.
    temporary = folder / f"{LEASE}.tmp"
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8") as file:  # do not follow a link
        file.write(text)
    os.replace(temporary, folder / LEASE)


def _myself() -> Holder:
    return Holder(
        owner=uuid.uuid4().hex,
        host=platform.node(),
        machine=_machine(),
        pid=os.getpid(),
        started=_start_of(os.getpid()) or "",
        since=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    )


def _machine() -> str:
    """Return the scope of process ids. Containers with equal names differ."""
    if sys.platform != "linux":
        return f"{platform.node()} {uuid.getnode()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: int) -> str | None:
    """Return a process's start, independent of clock changes. None if not running."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, but not reaped
            return None
        if sys.platform != "linux":
            return str(process.create_time())
        # psutil's times shift with the clock on Linux. Field 22 counts from boot.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (psutil.Error, OSError, OverflowError):
        return None
