"""A training run in which something goes wrong at an exact point: `python -m tests.faulty FAULT [flags of train]`.

FAULT is ACTION:POINT:NUMBER[:PROCESS]. When process PROCESS (default 0) reaches POINT for the NUMBER-th time, it

- `TERM`, `KILL` …: gets that signal, and goes on once it has noticed a SIGTERM;
- `slow`: sleeps for three seconds, then and every time it reaches the point.

A point is the beginning of a phase, by its name, or `updated`, after an update of the policy.
"""

import os
import runpy
import signal
import sys
import time
from typing import Any

from gspo_jax.parallel import processes
from gspo_jax.run.phases import Phases
from gspo_jax.run.session import Run


def inject(fault: str) -> None:
    """Make this process suffer `fault`."""
    action, point, number, *process = fault.split(":")
    enter, update, seen = Phases.enter, Run.update, []

    def reached(name: str, phases: Phases) -> None:
        if name != point or processes.number() != int(process[0] if process else 0):
            return
        seen.append(name)
        if action == "slow" and len(seen) >= int(number):
            time.sleep(3)
        elif len(seen) == int(number):
            os.kill(os.getpid(), signal.Signals[f"SIG{action}"])
            while not phases.noticed():
                time.sleep(0.01)

    def enter_and_suffer(self: Phases, name: str) -> None:
        enter(self, name)
        reached(name, self)

    def update_and_suffer(self: Run, *given: Any) -> Any:
        updated = update(self, *given)
        reached("updated", self.phases)
        return updated

    Phases.enter, Run.update = enter_and_suffer, update_and_suffer


if __name__ == "__main__":
    inject(sys.argv.pop(1))
    runpy.run_module("gspo_jax.train", run_name="__main__")
