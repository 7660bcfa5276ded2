"""A training run in which something goes wrong at an exact point: `python -m tests.faulty FAULTS [flags of train]`.

FAULTS are joined by commas; each is ACTION:POINT:NUMBER[:PROCESS]. When process PROCESS (default 0) reaches POINT for
the NUMBER-th time, it

- `TERM`, `KILL` …: gets that signal, and goes on once it has noticed, if it ever does; `INTx2` …: gets it twice;
- `group-INT` …: its whole process group does, launcher and all, as from a terminal;
- `slow`: sleeps for a second, then and every time it reaches the point;
- `skip`: has its updates counted as skipped, then and every time it reaches the point `updated`;
- `clock`: has its clock set back by five hours or ahead by nine, in turn, then and every time it reaches the point;
- `power`: loses its power. What was not synced is lost, or cut where more was added to what was; checkpoints stay.

A point is the beginning of a phase, by its name, or `updated`, after an update of the policy.
"""

import os
import runpy
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

from gspo_jax.parallel import processes
from gspo_jax.run.phases import Phases
from gspo_jax.run.session import Watch


def inject(fault: str) -> None:
    """Make this process suffer `fault`."""
    action, point, number, *process = fault.split(":")
    enter, update, seen = Phases.enter, Watch.updated, []
    synced = watch_syncs() if action == "power" else {}

    def reached(name: str, phases: Phases) -> None:
        if name != point or processes.number() != int(process[0] if process else 0):
            return
        seen.append(name)
        if action == "slow" and len(seen) >= int(number):
            time.sleep(1)
        elif action == "clock" and len(seen) >= int(number):
            set_clock(hours=9 if len(seen) % 2 else -5)
        elif action == "power" and len(seen) == int(number):
            cut_power(phases._files.local, synced)
        elif len(seen) == int(number) and action != "skip":
            where, _, asked = action.rpartition("-")
            sign, _, times = asked.partition("x")
            for _ in range(int(times or 1)):
                (os.killpg if where else os.kill)(os.getpgrp() if where else os.getpid(), signal.Signals[f"SIG{sign}"])
                deadline = time.monotonic() + 5
                while not phases.noticed() and time.monotonic() < deadline:
                    time.sleep(0.01)

    def enter_and_suffer(self: Phases, name: str) -> None:
        enter(self, name)
        reached(name, self)

    def update_and_suffer(self: Watch, *given: Any) -> None:
        if action == "skip" and len(seen) + 1 >= int(number):
            given[-1]["update/skipped"] = 1
        update(self, *given)
        reached("updated", self._phases)

    Phases.enter, Watch.updated = enter_and_suffer, update_and_suffer


def set_clock(*, hours: float) -> None:
    """Shift the time that Python code of this process sees from now on."""
    earlier = time.time
    time.time = lambda: earlier() + 3600 * hours
    time.time_ns = lambda: int(time.time() * 1e9)


def watch_syncs() -> dict[int, bytes]:
    """Return what every file holds when it is synced, by inode, from now on."""
    synced, fsync = {}, os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        file = os.fstat(descriptor)
        if stat.S_ISREG(file.st_mode):
            if file.st_ino not in synced:
                os.dup(descriptor)  # as long as it is open, no other file gets its inode
            synced[file.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    os.fsync = watched
    return synced


def cut_power(folder: Path, synced: dict[int, bytes]) -> None:
    """End the process, and leave in a run folder what a disk may hold after a loss of power."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_relative_to(folder / "checkpoints"):
            kept, whole = synced.get(path.stat().st_ino, b""), path.read_bytes()
            added = whole[len(kept) :] if kept and whole.startswith(kept) else b""
            path.write_bytes(kept + added[: len(added) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for each in sys.argv.pop(1).split(","):
        inject(each)
    runpy.run_module("gspo_jax.train", run_name="__main__")
