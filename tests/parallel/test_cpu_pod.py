"""The launcher of several processes on one machine: restarts, signals, and an end that leaves nothing behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gspo_jax import exits
from gspo_jax.parallel import processes
from tests.pods import (
    ROOT,
    assert_same_metrics,
    copy_of_launchers,
    environment,
    field_run,
    train_flags,
    wait_for,
)

CONFIG = f"{ROOT}/tests/pod_config.py"
slow, faults = pytest.mark.slow, pytest.mark.faults


@pytest.fixture
def repository(tmp_path) -> Path:
    """Return a copy of launch/ whose .venv runs the tests' own interpreter."""
    return copy_of_launchers(tmp_path / "repository")


def launch(repository: Path, *words: str) -> subprocess.Popen:
    """Start launch/cpu_pod.sh in a session of its own."""
    script = str(repository / "launch" / "cpu_pod.sh")
    return subprocess.Popen(
        ["bash", script, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    """Kill the launcher and its whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes_of(workdir: Path) -> dict[int, int]:
    """Return the process ids of the trainers of a run folder, by process index."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, told = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        number = re.search(rb"JAX_PROCESS_ID=(\d)", told)
        if b"gspo_jax.train" in words and str(workdir).encode() in words and number:
            found[int(number[1])] = int(entry.name)
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


@faults
@needs_proc
def test_the_launcher_starts_a_run_again(repository, whole, data, tmp_path):
    """After one process is killed, the launcher resumes the run, and its metrics equal those of an undisturbed run."""
    workdir = tmp_path / "run"
    process = launch(repository, "2", *field_run(workdir, data))
    try:
        wait_for((workdir / "checkpoints" / "2").exists, process)
        os.kill(processes_of(workdir)[1], signal.SIGKILL)
        said, _ = process.communicate(timeout=400)
    finally:
        end(process)
    assert process.returncode == 0, said
    assert "process 1 of 2 exited with code 137: restarting all" in said
    assert re.search(r"resuming from iteration [23]", said)
    assert (workdir / "report").is_dir() and (workdir / "processes" / "1.log").exists()
    assert_same_metrics(whole, workdir)
    assert not processes_of(workdir)


@faults
def test_an_elastic_pod_needs_a_mesh_for_the_processes_that_would_be_left(repository, tmp_path):
    words = ["--elastic", "--config=tiny", f"--workdir={tmp_path / 'run'}"]
    process = launch(repository, "2", *words, "--config.iteration=1")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == exits.MISTAKE and said.startswith("error: the config has no field 'iteration'")
    process = launch(repository, "2", *words)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == exits.MISTAKE and said.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "error: --elastic could not go on with fewer than 2 processes; with 1: mesh data=2, fsdp=2" in said
    assert "needs 8 devices but there are 4; choose sizes whose product is 4, or set one axis to -1" in said


@faults
@needs_proc
def test_ctrl_c_saves_the_run_and_ends_all_processes(repository, data, tmp_path):
    process = launch(repository, "2", *field_run(tmp_path / "run", data, iterations=500))
    try:
        wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
        assert len(processes_of(tmp_path / "run")) == 2
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    finally:
        end(process)
    assert process.returncode == 0 and said.endswith("the run is saved; start it again with the same command\n"), said
    assert (tmp_path / "run" / "stopped.json").exists() and list((tmp_path / "run" / "checkpoints").iterdir())
    assert not processes_of(tmp_path / "run") and not (tmp_path / "run" / "lease.json").exists()


def play(repository: Path, trainer: str) -> None:
    """Put a shell script in the place of the trainer, which appends its process number to `started`."""
    script = f'case $* in *gspo_jax.train*) ;; *report*) exit ;; *) exec {sys.executable} "$@" ;; esac'
    begin = 'echo "$JAX_PROCESS_ID" >>started; ready() { echo >"ready-$JAX_PROCESS_ID"; }'
    (repository / ".venv" / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{script}\n{begin}\n{trainer}\n")


WAITS = "trap : TERM; ready; sleep 60 & wait; kill $!"
SAVES = 'echo {} >"$GSPO_JAX_ENDED/stopped.json"'
FINISHES = 'echo {} >"$GSPO_JAX_ENDED/finished.json"'


def test_a_saved_run_is_started_again_by_the_launcher(repository, monkeypatch):
    """Although it may not restart a run that fails."""
    monkeypatch.setenv("RESTARTS", "0")
    play(repository, f"if [ -e saved ]; then {FINISHES}; else {SAVES}; touch saved; fi")
    process = launch(repository, "1", "--workdir=run")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("the run was stopped and saved: starting it again") == 1
    assert (repository / "started").read_text() == "0\n0\n"


@pytest.mark.usefixtures("hears_hangups")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("ends", ["saved", "finished", "killed"])
def test_a_signal_to_the_launcher_stops_the_run(sign, ends, repository):
    """The launcher says whether the processes saved; if they finish, it goes on, and if they die, so does it."""
    trainers = {"saved": f"{WAITS}; {SAVES}", "finished": f"{WAITS}; {FINISHES}", "killed": "ready; exec sleep 60"}
    play(repository, trainers[ends])
    process = launch(repository, "2", "--workdir=run")
    try:
        wait_for(lambda: all((repository / f"ready-{number}").exists() for number in range(2)), process)
        process.send_signal(sign)
        said, _ = process.communicate(timeout=30)
    finally:
        end(process)
    assert (repository / "started").read_text().count("\n") == 2
    if ends == "saved":
        assert process.returncode == 0 and said.endswith("the run is saved; start it again with the same command\n")
    elif ends == "finished":
        assert process.returncode == 0 and "saved" not in said and "error" not in said
    else:
        assert process.returncode == 143 and "of 2 exited with code 143" in said


@pytest.mark.parametrize("code", [exits.DIVERGED, exits.TAKEN])
def test_the_launcher_does_not_repeat_what_would_fail_again(code, repository):
    play(repository, f"exit {code}")
    process = launch(repository, "1", "--workdir=run")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code and said.startswith(f"error: process 0 of 1 exited with code {code};")
    assert (repository / "started").read_text() == "0\n"


HANGS = """
import signal, sys, time
from pathlib import Path
from gspo_jax.parallel import processes
processes.end_with_parent()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1]).touch()
time.sleep(120)
"""


@faults
@pytest.mark.parametrize("launcher", ["cpu_pod.sh", "pod_job.sh"])
def test_when_the_launcher_is_killed_its_processes_end(launcher, repository):
    """Within five seconds, although they ignore SIGTERM. pod_job.sh runs a trainer as the other launchers do."""
    (repository / "hangs.py").write_text(HANGS)
    hangs = f'PYTHONPATH={ROOT} exec {sys.executable} hangs.py "ready-$JAX_PROCESS_ID"'
    play(repository, f'echo $$ >"pid-$JAX_PROCESS_ID"; {hangs}')
    words = {"cpu_pod.sh": ["2"], "pod_job.sh": [".venv/bin/python", "-m", "gspo_jax.train"]}[launcher]
    process = subprocess.Popen(
        ["bash", str(repository / "launch" / launcher), *words, "--workdir=run"],
        cwd=repository,
        env=environment() | {"JAX_PROCESS_ID": "0"},
    )
    numbers = range(2 if launcher == "cpu_pod.sh" else 1)
    try:
        wait_for(lambda: all((repository / f"ready-{number}").exists() for number in numbers), process)
    finally:
        process.kill()
        process.wait()
    trainers = [int((repository / f"pid-{number}").read_text()) for number in numbers]
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in trainers if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


@faults
def test_a_process_whose_launcher_is_gone_already_ends_at_once(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    told = environment() | {"PYTHONPATH": str(ROOT), processes.PARENT: "1"}
    done = subprocess.run(
        [sys.executable, "hangs.py", "ready"], cwd=tmp_path, env=told, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == exits.LOST and "the launcher of this process (GSPO_JAX_PARENT=1) has ended" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "error: the first argument is missing; give the number of processes"),
        (
            ["--config=configs/tiny.py"],
            "error: the first argument is --config=configs/tiny.py; give the number of processes",
        ),
    ],
)
def test_the_launcher_asks_for_a_number(words, says, repository):
    said, _ = launch(repository, *words).communicate(timeout=30)
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ((f"exit {exits.LOST}", "exit 7"), "error: process 1 of 2 exited with code 7"),
        (("exit 7", f"exit {exits.LOST}"), "error: process 0 of 2 exited with code 7"),
        ((f"exit {exits.LOST}", f"exit {exits.LOST}"), "error: process [01] of 2 exited with code 3"),
        ((f"{FINISHES}; exit 0", "exit 7"), "error: process 1 of 2 exited with code 7"),
        ((f"exit {exits.LOST}", "exit 0"), "error: the trainer ended with exit code 0, .*\nerror: process 1 .* code 1"),
    ],
)
def test_the_launcher_names_who_was_lost(ends, says, repository, monkeypatch):
    """A process that loses a peer exits at once and may be seen first, yet the message names the one that failed."""
    python = repository / ".venv" / "bin" / "python"
    play = "".join(f'if [ "${{JAX_PROCESS_ID:-}}" = {number} ]; then {end}; fi\n' for number, end in enumerate(ends))
    python.write_text(python.read_text().replace("PYTHONPATH", f"{play}PYTHONPATH"))
    monkeypatch.setenv("RESTARTS", "0")
    process = launch(repository, "2", "--workdir=run")
    said, _ = process.communicate(timeout=60)
    assert re.match(says, said) and f"code {process.returncode};" in said, said


@slow
def test_the_launcher_does_not_repeat_a_mistake(repository):
    process = launch(repository, "2", *train_flags(CONFIG, Path("run"), {"iterations": 0}))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.count("error: iterations is 0; use 1 to ") == 1 and "start again" not in said
