"""Wall-clock time and compilation per iteration."""

import time
from collections.abc import Iterator

from gspo_jax.iteration import Observer
from gspo_jax.parallel import processes
from gspo_jax.parallel.compilation import CompileCounter
from gspo_jax.run.phases import Phases
from gspo_jax.types import Prompts


class Clock(Observer):
    """Timer of an iteration's phases. All processes may stop at the start of each."""

    def __init__(self, phases: Phases):
        self._phases = phases
        self._begun = self._phase_begun = time.perf_counter()
        self._phase = ""
        self.compiled = CompileCounter()
        processes.waited_s()  # what came before this iteration does not count
        self.seconds: dict[str, float] = {}
        """Seconds by phase, and "iteration" for the total once stopped."""

    def enter(self, phase: str) -> None:
        """Wait for all processes, then begin a phase. Times of a repeated phase add up."""
        processes.meet()
        self._end()
        self._phase = phase
        self._phases.enter(phase)
        self._phases.poll()

    def timed(self, prompts: Iterator[Prompts]) -> Iterator[Prompts]:
        """Yield the prompts, timing each read as the phase "data"."""
        while True:
            self.enter("data")
            batch = next(prompts)
            self.enter("sample")
            yield batch

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
