"""Wall-clock time of an iteration's phases, and the compilation during it."""

import time

from gspo_jax.parallel import processes
from gspo_jax.parallel.compilation import CompileCounter
from gspo_jax.run.phases import Phases


class Clock:
    """Times the phases of one iteration."""

    def __init__(self, phases: Phases):
        self._phases = phases
        self._begun = self._phase_begun = time.perf_counter()
        self._phase = ""
        self.compiled = CompileCounter()
        """Compilation during the iteration."""
        self.seconds: dict[str, float] = {}
        """Seconds by phase and, once stopped, of the whole "iteration"."""

    def phase(self, name: str) -> None:
        """End the running phase once all processes are here, and begin `name`; a phase that recurs adds up."""
        processes.meet()
        self._end()
        self._phase = name
        self._phases.enter(name)

    def stop(self) -> None:
        """End the running phase and the iteration."""
        processes.meet()
        self._end()
        self.seconds["iteration"] = time.perf_counter() - self._begun
        self.compiled.stop()

    def _end(self) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._phase_begun
        self._phase_begun = now
