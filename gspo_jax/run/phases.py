"""The phase a run is in: shown on the progress bar, bounded by deadlines, and named when the run is stopped."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import exits, signals
from gspo_jax.errors import StopRequested
from gspo_jax.parallel import processes
from gspo_jax.parallel.preemption import Preemption
from gspo_jax.reporting.writers import write_finished, write_stopped
from gspo_jax.storage import STACKS, RunFolder, unused

ENDED = "GSPO_JAX_ENDED"
"""Environment variable that names a second folder for `finished.json` and `stopped.json`, into which every process
writes: a launcher may be unable to read the run folder, and what it finds there may be of an earlier start.
"""
SETTLED_S = 2.0
"""Seconds after which a process on its own stops without a poll, in a compilation say, if nothing has to be saved."""
_LOOK_S = 0.5
_PUBLISH_S = 10.0

FACTOR = 10.0
"""Deadline of a phase, as a multiple of the longest that it has taken so far."""


class Phases:
    """Knows the phase that this process is in, and ends the process if a phase outlasts its deadline.

    The deadline of a phase is `FACTOR` times the longest that it has taken so far in this process, and never less than
    `deadline_s` seconds. After a signal, the process has `grace_s` seconds to save its state and exit.
    """

    def __init__(self, files: RunFolder, *, deadline_s: float, grace_s: float):
        """Begin in the phase "start" of a run in the folder `files`."""
        self._files, self._deadline_s, self._grace_s = files, deadline_s, grace_s
        self._preemption = Preemption(self.take_notice, self._press)
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.show: Callable[[str], None] = lambda phase: None
        """Shows a phase's name; the progress bar's, once there is one."""
        self.name, self._begun = "start", time.monotonic()
        self.noticed_in: str | None = None
        """Phase in which the signal arrived; None before."""
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
        """Whether a signal has arrived, in any process; unlike `poll`, it may be called at any time."""
        return self.noticed_in is not None

    @property
    def stop_seconds(self) -> float:
        """Seconds since the signal was noticed."""
        return time.monotonic() - self._noticed_at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen for signals, and enforce the deadlines, inside the block."""
        watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        with self._preemption.listening():
            watchdog.start()
            try:
                yield
            finally:
                self._over.set()
                watchdog.join()

    def take_notice(self) -> None:
        """Remember, and say, when the signal came; only the first call counts, and none once the run is finished."""
        if self.noticed_in is not None or self._over.is_set():
            return
        self._noticed_at, self.noticed_in = time.monotonic(), self.name
        _say(f"{self._signal} in phase {self.noticed_in}: saving at the next point where all processes can stop")

    @property
    def _signal(self) -> str:
        return self._preemption.signal.name

    def _press(self, presses: int) -> None:
        """Answer a second press of Ctrl-C or a later one; the third ends the process at once."""
        if presses < signals.INSISTS:
            _say(f"already stopping, which takes at most {self._grace_s:g} s; a third Ctrl-C ends the process unsaved")
            return
        _say("ended by the third Ctrl-C; the run resumes from its newest checkpoint")
        exits.leave(exits.SIGNALLED + signal.SIGINT)

    def record_stop(self) -> None:
        """Write what was saved to `stopped.json`, for the launcher too, and say it."""
        seconds, phase = self.stop_seconds, self.noticed_in
        for folder in self._told():
            write_stopped(folder, step=self.saved, phase=phase, seconds=seconds)
        what = "nothing to save yet" if self.saved is None else f"iteration {self.saved} is saved"
        _say(f"stopped: {what}, {seconds:.1f} s after {self._signal} in phase {phase}")
        signals.is_over()

    def record_finish(self) -> None:
        """Write `finished.json`, for the launcher too: all iterations are done and saved."""
        self._over.set()  # a signal from now on stops nothing
        for folder in self._told():
            write_finished(folder, step=self.saved)
        signals.is_over()

    def _told(self) -> list[Path]:
        """Folders in which this process says how the run has ended."""
        folders = [self._files.local] if processes.number() == 0 else []
        if launcher := os.environ.get(ENDED):
            folders.append(Path(launcher))
        return folders

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            with self._lock:
                name, taken = self.name, time.monotonic() - self._begun
                deadline = max(self._deadline_s, FACTOR * self._longest.get(name, 0.0))
            told, late = self.noticed_in is not None, self.stop_seconds > self._grace_s
            soon = self._preemption.alone and not self._stopping and self.stop_seconds > SETTLED_S
            if told and self.settled() and (late or soon):
                self.record_stop()
                self._leave(0)
            if told and late:
                self._end(
                    f"nothing was saved within {self._grace_s:g} s of {self._signal} (processes.grace_s), which came "
                    f"in phase {self.noticed_in}; the process is still in phase {name}"
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
        exits.leave(code)


@contextmanager
def open_phases(config: ConfigDict, files: RunFolder) -> Iterator[Phases]:
    """Watch over a run in the folder `files`; a stop that reaches the end of the block is recorded."""
    phases = Phases(files, deadline_s=config.processes.deadline_s, grace_s=config.processes.grace_s)
    with phases.watched():
        try:
            yield phases
        except StopRequested:
            phases.record_stop()
            raise


def _say(text: str) -> None:
    signals.say(f"process {processes.number()}: {text}")
