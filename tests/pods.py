"""Runs of several processes on this machine, and what they leave behind."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gspo_jax.reporting.writers import read_metrics

ROOT = Path(__file__).parent.parent
ROUNDED = ("mismatch/", "ratio/", "actor/kl", "actor/loss", "routing/router_kl")
"""Metrics that differences of log-probs are made of, which may be nothing but rounding."""


def free_port() -> int:
    """One that nobody listens to."""
    with socket.socket() as unbound:
        unbound.bind(("", 0))
        return unbound.getsockname()[1]


def environment(count: int = 1, number: int = 0, port: int = 0) -> Mapping[str, str]:
    """What a process of several is told. Most runs are of programs that another one has compiled."""
    cached = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    told = {"COORDINATOR_ADDRESS": f"localhost:{port}", "NUM_PROCESSES": str(count), "PROCESS_ID": str(number)}
    return cached if count == 1 else cached | {f"JAX_{name}": value for name, value in told.items()}


class Pod:
    """The processes of a run, each with its output; they are gone after the block."""

    def __init__(self, count: int, *words: str):
        """Begins `python WORDS…` so many times."""
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment(count, number, port),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(count)
        ]

    def __enter__(self) -> "Pod":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def finish(self) -> list[str]:
        """What each has said, once all have ended."""
        return [process.communicate(timeout=400)[0] for process in self.processes]


def succeed(count: int, *words: str) -> list[str]:
    """What each of `count` processes has said when all is well."""
    with Pod(count, *words) as pod:
        said = pod.finish()
    assert [process.returncode for process in pod.processes] == [0] * count, "\n".join(said)
    return said


def rows_of(workdir: Path) -> list[dict]:
    """The metrics but for wall-clock times and what was compiled; every step once and in order."""
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    clock = ("time", "timing/", "throughput/", "compile/")
    return [{name: value for name, value in row.items() if not name.startswith(clock)} for row in rows]


def assert_same_metrics(one: Path, other: Path, *, but: tuple[str, ...] = ()) -> None:
    """Every step's, up to rounding, but for those whose names begin so."""
    ours, theirs = rows_of(one), rows_of(other)
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        assert here.keys() == there.keys()
        for name, value in here.items():
            if but and name.startswith(but):
                continue
            least = 2e-5 if name.startswith(ROUNDED) else 1e-7
            x, y = (np.asarray(v, np.float64) for v in (value, there[name]))
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=least, err_msg=f"{name} of step {here['step']}")
