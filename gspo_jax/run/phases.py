"""The phase a run is in: shown on the progress bar, bounded by deadlines, and named when the run is stopped."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import exits
from gspo_jax.parallel import processes
from gspo_jax.parallel.preemption import Preemption
from gspo_jax.reporting.writers import STOPPED_FILE, write_stopped
from gspo_jax.storage import STACKS, RunFolder, unused
from gspo_jax.types import StopRequested

STOPPED = "GSPO_JAX_STOPPED"
"""Environment variable that names a second file for what `stopped.json` says, written by every process: a launcher may
be unable to read the run folder.
"""
SETTLED_S = 2.0
"""Seconds after which a process on its own stops without a poll, in a compilation say, if nothing has to be saved."""
_LOOK_S = 0.5
_PUBLISH_S = 10.0


class Phases:
    """Knows the phase that this process is in, and ends the process if a phase outlasts its deadline.

    The deadline of a phase is `factor` times the longest that it has taken so far in this process, and never less than
    `floor_s` seconds. After SIGTERM, the process has `grace_s` seconds to save its state and exit.
    """

    def __init__(self, files: RunFolder, *, floor_s: float, factor: float, grace_s: float):
        """Begin in the phase "start" of a run in the folder `files`."""
        self._files, self._floor_s, self._factor, self._grace_s = files, floor_s, factor, grace_s
        self._preemption = Preemption(self.take_notice)
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.show: Callable[[str], None] = lambda phase: None
        """Shows a phase's name; the progress bar's, once there is one."""
        self.name, self._begun = "start", time.monotonic()
        self.noticed_in: str | None = None
        """Phase in which SIGTERM arrived; None before."""
        self._noticed_at, self._stopping = 0.0, False
        self.saved: int | None = None
        """Checkpoint step that a stop saved, or found saved; None while there is none."""
        self.settled: Callable[[], bool] = lambda: True
        """Whether a stop has nothing to save; of an open run, whether its newest boundary is saved."""

    def enter(self, name: str) -> None:
        """Begin a phase, or begin it again."""
        now = time.monotonic()
        with self._lock:
            self._longest[self.name] = max(self._longest.get(self.name, 0.0), now - self._begun)
            self.name, self._begun = name, now
        self.show(name)

    def poll(self) -> None:
        """Raise `StopRequested` if all processes stop here; each has to call it at the same points of the program."""
        if self._preemption.agreed():
            self._stopping = True
            raise StopRequested

    def tick(self, name: str) -> Callable[[], None]:
        """A function for the steps of a phase: each call begins the phase again, and is a poll."""

        def step() -> None:
            self.enter(name)
            self.poll()

        return step

    def noticed(self) -> bool:
        """Whether SIGTERM has arrived, in any process; unlike `poll`, it may be called at any time."""
        return self.noticed_in is not None

    @property
    def stop_seconds(self) -> float:
        """Seconds since SIGTERM was noticed."""
        return time.monotonic() - self._noticed_at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen for SIGTERM, and enforce the deadlines, inside the block."""
        watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        with self._preemption.listening():
            watchdog.start()
            try:
                yield
            finally:
                self._over.set()
                watchdog.join()

    def take_notice(self) -> None:
        """Remember, and say, when SIGTERM came; only the first call counts."""
        if self.noticed_in is not None:
            return
        self._noticed_at, self.noticed_in = time.monotonic(), self.name
        _say(f"SIGTERM in phase {self.noticed_in}: saving at the next point where all processes can stop")

    def record_stop(self) -> None:
        """Write what was saved to `stopped.json` and to the file that the launcher named, and say it."""
        seconds, phase = self.stop_seconds, self.noticed_in
        files = [self._files.local / STOPPED_FILE] if processes.number() == 0 else []
        if told := os.environ.get(STOPPED):
            files.append(Path(told))
        for file in files:
            write_stopped(file, step=self.saved, phase=phase, seconds=seconds)
        what = "nothing to save yet" if self.saved is None else f"iteration {self.saved} is saved"
        _say(f"stopped: {what}, {seconds:.1f} s after SIGTERM in phase {phase}")

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            with self._lock:
                name, taken = self.name, time.monotonic() - self._begun
                deadline = max(self._floor_s, self._factor * self._longest.get(name, 0.0))
            told, late = self.noticed_in is not None, self.stop_seconds > self._grace_s
            soon = self._preemption.alone and not self._stopping and self.stop_seconds > SETTLED_S
            if told and self.settled() and (late or soon):
                self.record_stop()
                self._leave(0)
            if told and late:
                self._end(
                    f"nothing was saved within {self._grace_s:g} s of SIGTERM (processes.grace_s), which came in phase "
                    f"{self.noticed_in}; the process is still in phase {name}"
                )
            if taken > deadline:
                self._end(f"phase {name} has taken {taken:.0f} s, and its deadline is {deadline:.0f} s (watchdog)")

    def _end(self, why: str) -> None:
        """Write the stacks of all threads, and end the process at once."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-process-{processes.number()}.txt"
        path = unused(self._files.local / STACKS / name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{why}\n\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            _say(f"the stacks could not be written ({error})")
            faulthandler.dump_traceback()
        _say(f"error: {why}; its stacks are in {path}, and the run resumes from its newest checkpoint")
        self._leave(exits.LATE)

    def _leave(self, code: int) -> None:
        """End the process, whatever its other threads are doing; files of a run in a bucket reach it first."""
        publish = threading.Thread(target=self._files.publish, daemon=True)  # which may hang, too
        publish.start()
        publish.join(_PUBLISH_S)
        os._exit(code)


@contextmanager
def open_phases(config: ConfigDict, files: RunFolder) -> Iterator[Phases]:
    """Watch over a run in the folder `files`; a stop that reaches the end of the block is recorded."""
    watchdog, grace_s = config.watchdog, config.processes.grace_s
    phases = Phases(files, floor_s=watchdog.floor_s, factor=watchdog.factor, grace_s=grace_s)
    with phases.watched():
        try:
            yield phases
        except StopRequested:
            phases.record_stop()
            raise


def _say(text: str) -> None:
    print(f"process {processes.number()}: {text}", file=sys.stderr, flush=True)
