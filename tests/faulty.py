"""A training run in which something goes wrong at an exact point: `python -m tests.faulty FAULT [flags of train]`.

FAULT is ACTION:PHASE:NUMBER[:PROCESS]. When process PROCESS (default 0) enters PHASE for the NUMBER-th time, it

- `TERM`, `KILL` …: gets that signal;
- `slow`: sleeps for three seconds, then and every time it enters the phase.
"""

import os
import runpy
import signal
import sys
import time

from gspo_jax.parallel import processes
from gspo_jax.run.phases import Phases


def inject(fault: str) -> None:
    """Make this process suffer `fault`."""
    action, phase, number, *process = fault.split(":")
    enter, seen = Phases.enter, []

    def faulty(self: Phases, name: str) -> None:
        enter(self, name)
        if name != phase or processes.number() != int(process[0] if process else 0):
            return
        seen.append(name)
        if action == "slow" and len(seen) >= int(number):
            time.sleep(3)
        elif len(seen) == int(number):
            os.kill(os.getpid(), signal.Signals[f"SIG{action}"])

    Phases.enter = faulty


if __name__ == "__main__":
    inject(sys.argv.pop(1))
    runpy.run_module("gspo_jax.train", run_name="__main__")
