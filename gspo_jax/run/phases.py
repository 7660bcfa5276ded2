"""Phases of a run, with deadlines."""

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
from gspo_jax.folder.notes import FINISHED_FILE, STOPPED_FILE, note
from gspo_jax.folder.storage import STACKS, RunFolder, unused
from gspo_jax.parallel import processes
from gspo_jax.parallel.preemption import Preemption

ENDED = "GSPO_JAX_ENDED"
"""Environment variable with a launcher's folder, where every process also writes `finished.json` or `stopped.json`.

The launcher may be unable to read the run folder, or find old files there.
"""
SETTLED_S = 2.0
"""Seconds until a lone process with nothing to save stops without a poll, e.g. in a compilation."""
_LOOK_S = 0.5
_PUBLISH_S = 10.0

OUTSIDE = {
    "start": "start",
    "cold start": "start",
    "evaluate": "evaluate",
    "benchmark": "evaluate",
    "save": "save",
}
"""Metrics of the phases outside of iterations, as in `timing/save_s`."""
FACTOR = 10.0
"""Deadline of a phase, as a multiple of its longest duration so far."""


class Phases:
    """Tracks this process's phase, and ends the process if a deadline passes.

    A phase may take `FACTOR` times its longest duration so far, and at least `deadline_s` seconds. After a signal, the
    process has `grace_s` seconds to save its state and exit.
    """

    def __init__(self, files: RunFolder, *, deadline_s: float, grace_s: float):
        self._files, self._deadline_s, self._grace_s = files, deadline_s, grace_s
        self._preemption = Preemption(self.take_notice, self._press)
        self._longest: dict[str, float] = {}
        self._outside: dict[str, float] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.show: Callable[[str], None] = lambda phase: None
        self.name, self._begun = "start", time.monotonic()
        self.noticed_in: str | None = None
        """Phase of the signal's arrival."""
        self._noticed_at, self._stopping = 0.0, False
        self.saved: int | None = None
        """Newest saved step."""
        self.settled: Callable[[], bool] = lambda: True
        """True if a stop has nothing to save."""

    def enter(self, name: str) -> None:
        """Begin a phase, or begin it again."""
        now = time.monotonic()
        with self._lock:
            self._longest[self.name] = max(self._longest.get(self.name, 0.0), now - self._begun)
            if (outside := OUTSIDE.get(self.name)) is not None:
                self._outside[outside] = self._outside.get(outside, 0.0) + now - self._begun
            self.name, self._begun = name, now
        self.show(name)

    def outside(self) -> dict[str, float]:
        """Return the metrics of phases outside of iterations since the last call."""
        found = {f"timing/{name}_s": seconds for name, seconds in self._outside.items()}
        self._outside = {}
        return found

    def poll(self) -> None:
        """Raise `StopRequested` if all processes stop here. Each must call it at the same points."""
        if self._preemption.agreed():
            self._stopping = True
            raise StopRequested

    def tick(self, name: str) -> Callable[[], None]:
        """Return a function for each step of a phase, which restarts the deadline and polls."""

        def step() -> None:
            self.enter(name)
            self.poll()

        return step

    def noticed(self) -> bool:
        """Return True if a signal has arrived in any process. May be called at any time."""
        return self.noticed_in is not None

    @property
    def stop_seconds(self) -> float:
        """Seconds since the signal was noticed."""
        return time.monotonic() - self._noticed_at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen for signals and enforce deadlines inside the block."""
        watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        with self._preemption.listening():
            watchdog.start()
            try:
                yield
            finally:
                self._over.set()
                watchdog.join()

    def take_notice(self) -> None:
        """Record and print the first signal, unless finished."""
        if self.noticed_in is not None or self._over.is_set():
            return
        self._noticed_at, self.noticed_in = time.monotonic(), self.name
        _say(f"{self._signal} in phase {self.noticed_in}: saving at the next point where all processes can stop")

    @property
    def _signal(self) -> str:
        return self._preemption.signal.name

    def _press(self, presses: int) -> None:
        if presses < signals.INSISTS:
            _say(f"already stopping, which takes at most {self._grace_s:g} s; a third Ctrl-C ends the process unsaved")
            return
        _say("ended by the third Ctrl-C; the run resumes from its newest checkpoint")
        exits.leave(exits.SIGNALLED + signal.SIGINT)

    def record_stop(self) -> None:
        """Record in `stopped.json` what was saved, and print it."""
        seconds, phase = self.stop_seconds, self.noticed_in
        for folder in self._told():
            note(folder, STOPPED_FILE, step=self.saved, phase=phase, seconds=round(seconds, 3))
        what = "nothing to save yet" if self.saved is None else f"iteration {self.saved} is saved"
        _say(f"stopped: {what}, {seconds:.1f} s after {self._signal} in phase {phase}")
        signals.is_over()

    def record_finish(self) -> None:
        """Write `finished.json`."""
        self._over.set()  # ignore later signals
        for folder in self._told():
            note(folder, FINISHED_FILE, step=self.saved)
        signals.is_over()

    def _told(self) -> list[Path]:
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
        """Publish the files and end the process."""
        publish = threading.Thread(target=self._files.publish, daemon=True)  # this may hang too
        publish.start()
        publish.join(_PUBLISH_S)
        exits.leave(code)


@contextmanager
def open_phases(config: ConfigDict, files: RunFolder) -> Iterator[Phases]:
    """Watch over a run inside the block. A stop is recorded."""
    phases = Phases(files, deadline_s=config.processes.deadline_s, grace_s=config.processes.grace_s)
    with phases.watched():
        try:
            yield phases
        except StopRequested:
            phases.record_stop()
            raise


def _say(text: str) -> None:
    signals.say(f"process {processes.number()}: {text}")
