"""The lease of a run folder, `lease.json`: at most one run uses a folder at a time, on the local disk or in a bucket.

Process 0 renews the lease every few seconds. A lease whose run is known to be dead, or that nobody has renewed for
`EXPIRES_S` seconds, is taken over. A run that finds its lease taken ends at once. Clocks of different machines are
never compared: whoever waits for a lease to expire watches, by its own monotonic clock, whether the file changes.
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
from gspo_jax.parallel import processes
from gspo_jax.storage import LEASE, AnyPath, check_folder, explained, find

RENEWED_S = 5.0
"""Seconds between two renewals of a lease."""
EXPIRES_S = 60.0
"""Seconds without a renewal after which a lease may be taken over."""
SETTLES_S = 1.0
"""Seconds after which a lease written to a bucket is read back: of several that take it at once, the last has it."""
_LOOK_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The run that holds a lease, as written to `lease.json`."""

    owner: str
    """Unique id of this start of the run."""
    host: str
    """Name of its machine, for messages."""
    machine: str
    """Id of the machine since its boot, and of the namespace in which `pid` is valid."""
    pid: int
    """Id of its process 0."""
    started: str
    """Start of that process, which tells it from a later one with the same id."""
    since: str
    """Wall-clock time at which the lease was taken, for messages."""
    renewals: int = 0
    """Renewals so far, so that each changes the file."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine."""
        return self.machine == _machine()

    def is_dead(self) -> bool:
        """Whether its process is known to have ended."""
        return self.is_here() and _start_of(self.pid) != self.started


class Lease:
    """A lease that this process holds, and renews in a thread until it is released."""

    def __init__(self, folder: AnyPath, holder: Holder):
        """`holder` has just been written to the folder."""
        self._folder, self._holder = folder, holder
        self._confirmed = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """End the process if another run has taken the lease; call it before writing to the run folder.

        The folder is read only if the last renewal is so old that the lease may expire: after a suspension, say.
        """
        if time.monotonic() - self._confirmed > EXPIRES_S / 2:
            with suppress(Exception):  # storage that cannot be read cannot be written either
                self._check()

    def release(self) -> None:
        """Stop renewing the lease, and remove it."""
        self._over.set()
        self._thread.join()
        try:
            if self._is_ours(_read(self._folder)):
                (self._folder / LEASE).unlink()
        except Exception as error:  # storage, transport and credentials each raise their own types
            logging.warning("%s could not be removed (%s); it expires by itself", self._folder / LEASE, error)

    def _is_ours(self, text: str | None) -> bool:
        found = _parse(text)
        return found is not None and found.owner == self._holder.owner

    def _check(self) -> None:
        """End the process if the lease in the folder is not this run's."""
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
                self._confirmed = now
            except Exception as error:  # as in `release`; an hour without the bucket should not end a run
                logging.warning("%s could not be renewed (%s); will retry", self._folder / LEASE, error)


@contextmanager
def hold(workdir: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """Hold the lease of a run folder inside the block, for all processes of the run; process 0 takes and renews it.

    Yields `Lease.confirm`, which does nothing in the other processes.

    Raises:
      UserError: another run uses the folder, or the folder cannot be used.
    """
    place, held = find(workdir), list[Lease]()

    def take() -> None:
        if isinstance(place, Path):
            check_folder(place)
        with explained(os.fspath(workdir), place="its parent folder" if isinstance(place, Path) else "the bucket"):
            held.append(acquire(place))

    processes.check_first(take)
    try:
        yield held[0].confirm if held else lambda: None
    finally:
        for lease in held:
            lease.release()


def acquire(folder: AnyPath) -> Lease:
    """Take the lease of a run folder, which is created if it is missing; wait for an earlier lease to expire.

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
    """Let one process at a time read and replace the lease of a local folder. A bucket has no locks."""
    if not isinstance(folder, Path):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks either; the renewals then show who has it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(folder: AnyPath) -> str | None:
    """Return the lease's text; None if there is no lease."""
    try:
        return (folder / LEASE).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _parse(text: str | None) -> Holder | None:
    """Return the holder that a lease names; None if there is no lease, or it is not one that this module wrote."""
    try:
        holder = Holder(**json.loads(text or ""))
    except (ValueError, TypeError, RecursionError):
        return None
    return holder if isinstance(holder.pid, int) and holder.pid > 0 else None


def _write(folder: AnyPath, holder: Holder) -> None:
    """Replace the lease; a reader sees the old one or the new one."""
    text = json.dumps(dataclasses.asdict(holder)) + "\n"
    if not isinstance(folder, Path):
        (folder / LEASE).write_text(text)
        return
    # All writers use the same temporary file: that of a run suspended at this point is gone once another has written.
    temporary = folder / f"{LEASE}.tmp"
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8") as file:  # fails rather than follow a link
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
    """Return an id of this machine within which process ids are comparable; containers with equal names differ."""
    if sys.platform != "linux":
        return f"{platform.node()} {uuid.getnode()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: int) -> str | None:
    """Return when a process started, on a scale that no change of the clock moves; None if it does not run."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, but its parent has not noticed
            return None
        if sys.platform != "linux":
            return str(process.create_time())
        # psutil's times shift with the clock on Linux; field 22 counts from the boot.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (psutil.Error, OSError, OverflowError):
        return None
