"""Helpers to run several processes on one machine and to compare the runs' metrics."""

import fcntl
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspo_jax.folder.metrics import read_metrics
from gspo_jax.training.checkpoint import describe, load_newest

ROOT = Path(__file__).parent.parent
ROUNDING_SENSITIVE = ("mismatch/", "ratio/", "actor/kl", "actor/loss", "routing/router_kl", "routing/margin")
"""Metrics of differences of log-probs or probabilities, which may consist of rounding errors alone."""


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as unbound:
        unbound.bind(("", 0))
        return unbound.getsockname()[1]


def environment(
    count: int = 1, number: int = 0, port: int = 0, inherited: Mapping[str, str] = os.environ
) -> Mapping[str, str]:
    """Return the environment of process `number` of `count`."""
    told = {"COORDINATOR_ADDRESS": f"localhost:{port}", "NUM_PROCESSES": str(count), "PROCESS_ID": str(number)}
    return {**inherited} | ({} if count == 1 else {f"JAX_{name}": value for name, value in told.items()})


def train_flags(config: str, workdir: Path, settings: Mapping[str, object]) -> list[str]:
    """Return the flags of a run of `--config` in a folder, with fields of the config by their dotted names."""
    return [f"--config={config}", f"--workdir={workdir}", *(f"--config.{name}={x}" for name, x in settings.items())]


def field_run(workdir: Path, data: Path, *, iterations: int = 6, **settings: object) -> list[str]:
    """Return the flags of a run of DAPO with partial rollouts and a KL; all its runs share their compiled programs."""
    chosen = {"model.folder": ROOT / "tests" / "golden" / "adder", "data.data_dir": data, "iterations": iterations}
    chosen |= {"sampling.slots": 32, "sampling.page": 8, "sampling.pool_tokens": 512}  # half of what slots may need
    chosen |= {"reference.kl_weight": 0.01, "log.samples_every": 1, "log.samples": 1000}
    return train_flags(f"{ROOT}/tests/pod_config.py:dapo,partial", workdir, chosen | settings)


def small_run(workdir: Path, data: Path, **settings: object) -> list[str]:
    """Return the flags of an iteration on one device, with the fewest programs: it takes a third of a `field_run`."""
    chosen = {"model.folder": ROOT / "tests" / "golden" / "adder", "data.data_dir": data, "iterations": 1}
    chosen |= {"sampling.slots": 4}  # never halved, so that the decoder compiles one loop
    return train_flags(f"{ROOT}/tests/pod_config.py:single", workdir, chosen | settings)


def undisturbed(folder: Path, data: Path) -> Path:
    """Return the folder of a `field_run` of one process, which the first call makes for all workers of a session."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            run_processes(1, "-m", "gspo_jax.train", *field_run(folder / "run", data))
            (folder / "made").touch()
    return folder / "run"


class Pod:
    """The processes of a run and their output; leaving the `with` block kills them."""

    def __init__(self, count: int, *words: str, inherited: Mapping[str, str] = os.environ):
        """Start `count` processes of `python WORDS…`."""
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment(count, number, port, inherited),
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

    def finish(self, seconds: float = 400) -> list[str]:
        """Wait for all processes and return their outputs."""
        return [process.communicate(timeout=seconds)[0] for process in self.processes]


def run_processes(count: int, *words: str, seconds: float = 400) -> list[str]:
    """Run `count` processes, assert that all exit with code 0 within `seconds`, and return their outputs."""
    with Pod(count, *words) as pod:
        said = pod.finish(seconds)
    assert [process.returncode for process in pod.processes] == [0] * count, "\n".join(said)
    return said


def launch_faulty(
    fault: str, words: list[str], *, count: int, root: Path, restarts: bool = False
) -> tuple[list[int], str]:
    """As `run_faulty`, through the launcher for `count` processes, in a session of its own; return the launcher's code.

    With `restarts`, through the launcher that restarts processes, however many there are.

    `root` is a `copy_of_launchers`.
    """
    trainer = f'case $* in *gspo_jax.train*) shift 2; set -- -m tests.faulty {fault} "$@";; *report*) exit;; esac'
    python = f'cd {ROOT} && PYTHONPATH={ROOT} exec {sys.executable} "$@"'
    (root / ".venv" / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{trainer}\n{python}\n")
    script = ["local.sh"] if count == 1 and not restarts else ["cpu_pod.sh", str(count)]
    done = subprocess.run(
        ["bash", str(root / "launch" / script[0]), *script[1:], *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        start_new_session=True,
    )
    return [done.returncode], done.stdout


def run_faulty(fault: str, words: list[str], *, count: int = 1) -> tuple[list[int], str]:
    """Run training with a fault of tests/faulty.py to its end; return the exit codes and all output."""
    with Pod(count, "-m", "tests.faulty", fault, *words) as pod:
        said = pod.finish()
    return [process.returncode for process in pod.processes], "\n".join(said)


def run_commands(commands: list[list[str]], seconds: float = 500) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each command, which tests/commands.py runs after importing once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.commands"],
        cwd=ROOT,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    ended = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands), done.stderr
    return ended


def drawer(name: str) -> Any:
    """Load the module docs/draw/NAME.py, which draws pages of the documentation."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "draw" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def copy_of_launchers(root: Path) -> Path:
    """Copy launch/ into the new folder `root`, with a .venv that runs this interpreter; return `root`."""
    shutil.copytree(ROOT / "launch", root / "launch")
    shutil.copy(ROOT / "pyproject.toml", root)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = ["bash", "-c", "source launch/venv.sh; install_state"]
    state = subprocess.run(script, cwd=root, capture_output=True, check=True).stdout
    (root / ".venv" / "installed-report").write_bytes(state)
    return root


def stopped(folder: Path) -> dict:
    """Return what `stopped.json` of a run folder says."""
    return json.loads((folder / "stopped.json").read_text())


def wait_for(found: Callable[[], bool], process: subprocess.Popen, seconds: float = 300) -> None:
    """Wait until `found()` holds; fail if the process ends before, or the time is up."""
    deadline = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows_of(workdir: Path) -> list[dict]:
    """Return a run's metrics without times and compilation counts; asserts that every step appears once, in order."""
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    clock = ("time", "timing/", "throughput/", "compile/")
    return [{name: value for name, value in row.items() if not name.startswith(clock)} for row in rows]


def assert_same_bits(one: Path, other: Path, *, step: int) -> None:
    """Assert that two runs have the same metrics and the same training state at a step, their newest, bit by bit."""
    assert rows_of(one) == rows_of(other)
    ours, theirs = (state_of(folder / "checkpoints", step) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(theirs[name]), err_msg=name)


def state_of(checkpoints: Path, step: int) -> dict[str, jax.Array]:
    """Return the leaves of a folder's newest checkpoint, which must be of this step, on one device."""
    leaves = describe(str(checkpoints / str(step)))["state"]
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype, _) in leaves.items()}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored = load_newest(checkpoints, shapes, dict.fromkeys(shapes, here))
    assert restored is not None and restored.step == step
    return restored.state


def assert_same_metrics(one: Path, other: Path, *, but: tuple[str, ...] = ()) -> None:
    """Assert equal metrics of two runs up to rounding, except for names that begin with one of `but`."""
    ours, theirs = rows_of(one), rows_of(other)
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        assert here.keys() == there.keys()
        for name, value in here.items():
            if but and name.startswith(but):
                continue
            least = 2e-5 if name.startswith(ROUNDING_SENSITIVE) else 1e-7
            x, y = (np.asarray(v, np.float64) for v in (value, there[name]))
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=least, err_msg=f"{name} of step {here['step']}")
