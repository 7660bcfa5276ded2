"""Processes of a sweep: cold starts and runs as children that end with it, or save when told to.

The main thread starts them: on Linux, a child that is to die with its parent dies with the *thread* that started it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from gspo_jax import exits, signals
from gspo_jax.folder import storage
from gspo_jax.folder.notes import STOPPED_FILE
from gspo_jax.parallel.processes import PARENT
from gspo_jax.run.phases import ENDED
from gspo_jax.sweeping.grid import ColdStart, SweepRun

FORCED_S = 30.0
"""Seconds after a stopped run's `processes.grace_s` until it is killed."""
_LOOK_S = 0.2
_BEFORE_IT_SAVED = (-signal.SIGTERM, exits.SIGNALLED + signal.SIGTERM)
"""Ended by SIGTERM before it had anything to save."""
_Task = ColdStart | SweepRun


@dataclass
class _Child:
    task: _Task
    process: subprocess.Popen
    ended: tempfile.TemporaryDirectory
    """Where it notes how it ended."""
    told: bool = False


class Children:
    """Child processes that train runs, a cold start before the first run that needs it."""

    def __init__(self, runs: Sequence[SweepRun], *, jobs: int, logs: Path, keep: Callable[[SweepRun], None]):
        """Train at most `jobs` of these runs at a time, and `keep` each that has finished.

        A single job's output goes where the sweep's goes, the output of several to files in `logs`.
        """
        self._keep = keep
        self._waiting, self._count = list(runs), len(runs)
        self._jobs, self._logs = jobs, logs
        self._grace_s = FORCED_S + max((run.config.processes.grace_s for run in runs), default=0)
        self._active: list[_Child] = []
        self._told_at, self._late = 0.0, False
        self._done = 0
        self.told: signal.Signals | None = None
        """Signal that told the sweep to stop."""
        self.failed: dict[str, int] = {}
        """Exit codes of failed cold starts and runs, negative for death by a signal."""

    def train(self) -> None:
        """Train all runs that have not failed. If told to stop, return once the children have ended."""
        with signals.heard(self._hear):
            while self._active or (self._waiting and self.told is None):
                while self.told is None and len(self._active) < self._jobs and (task := self._next()) is not None:
                    self._start(task)
                if self.told is not None:
                    self._stop()
                time.sleep(_LOOK_S)
                for child in [child for child in self._active if child.process.poll() is not None]:
                    self._active.remove(child)
                    self._ended(child)

    def _hear(self, number: signal.Signals, presses: int) -> None:
        """Note the signal. The third Ctrl-C kills the children."""
        if self.told is None:
            self._told_at, self.told = time.monotonic(), number
        self._late = presses >= signals.INSISTS

    def _next(self) -> _Task | None:
        under_way = [child.task.name for child in self._active]
        for run in list(self._waiting):
            cold = run.cold
            if cold is None or cold.folder.exists() or not run.needs_cold_start():
                self._waiting.remove(run)
                return run
            if cold.name in self.failed:
                self._waiting.remove(run)
            elif cold.name not in under_way:
                return cold
        return None

    def _start(self, task: _Task) -> None:
        if isinstance(task, SweepRun) and task.cold is not None and task.needs_cold_start():
            give(task.cold.folder, task.folder)
        log = None if self._jobs == 1 else self._logs / f"{task.name}.log"
        _say(f"{task.name}: starts" + (f", its output goes to {log}" if log is not None else ""))
        ended = tempfile.TemporaryDirectory(prefix="gspo_jax-ended-")
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if log is None else open(log, "a", encoding="utf-8") as output:
            process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {PARENT: str(os.getpid()), ENDED: ended.name},
                process_group=0,  # Ctrl-C reaches the sweep alone, which hands it on as SIGTERM
            )
        self._active.append(_Child(task, process, ended))

    def _stop(self) -> None:
        late = self._late or time.monotonic() - self._told_at > self._grace_s
        for child in self._active:
            if late:
                child.process.kill()
            elif not child.told:
                child.process.terminate()
                child.told = True

    def _ended(self, child: _Child) -> None:
        """Report how a child ended. Exit code and folder must agree."""
        task, code = child.task, child.process.returncode
        with child.ended as folder:
            saved = (Path(folder) / STOPPED_FILE).exists()
        if code == 0 and (task.is_done() if isinstance(task, SweepRun) else task.folder.exists()):
            if isinstance(task, SweepRun):
                self._done += 1
                self._keep(task)
            _say(f"{task.name}: finished" + (f", {self._done} of {self._count}" if isinstance(task, SweepRun) else ""))
        elif code == 0 and saved and isinstance(task, SweepRun):
            _say(f"{task.name}: stopped, and saved")
            self._waiting.append(task)
        elif child.told and code in _BEFORE_IT_SAVED:
            _say(f"{task.name}: stopped")
        else:
            self.failed[task.name] = code
            _say(f"{task.name}: failed, {describe(code)}")


def give(cold: Path, folder: Path) -> None:
    """Copy a cold start into a run folder atomically, in place of an earlier one."""
    unfinished, place = folder / "coldstart.partial", folder / "coldstart"
    for old in (unfinished, place):
        if old.exists():
            shutil.rmtree(old)
    shutil.copytree(cold, unfinished)
    storage.sync_tree(unfinished)
    os.replace(unfinished, place)


def commands(runs: Sequence[SweepRun]) -> Iterator[str]:
    """Yield the shell commands of these runs and their cold starts, run one at a time."""
    made = set()
    for run in runs:
        cold = run.cold
        if cold is not None and run.needs_cold_start():
            if cold.folder not in made and not cold.folder.exists():
                yield shlex.join(cold.command)
            made.add(cold.folder)
            yield f"{shlex.join(['mkdir', '-p', f'{run.folder}'])} && " + shlex.join(
                ["cp", "-R", f"{cold.folder}", f"{run.folder / 'coldstart'}"]
            )
        yield shlex.join(run.command)


def describe(code: int) -> str:
    """Describe the exit code of a failed child."""
    if code == 0:
        return "exit code 0, although it is not finished"
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def exit_code(failed: Sequence[int]) -> int:
    """Return a failed sweep's exit code: 1 if another start may help, else the first failure's."""
    return failed[0] if all(code in exits.FINAL for code in failed) else 1


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal is closed, but children must still save
        print(text, flush=True)
