"""Real multi-process runs: the numbers of one process, interchangeable checkpoints, and a clean end if one dies."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from gspo_jax import exits
from gspo_jax.parallel import processes
from gspo_jax.reporting.writers import read_samples
from gspo_jax.run.stragglers import describe
from gspo_jax.types import UserError
from tests import pod_rows
from tests.pods import (
    ROOT,
    Pod,
    assert_same_metrics,
    environment,
    field_run,
    free_port,
    rows_of,
    run_processes,
    train_flags,
    wait_for,
)

HEARTBEAT_S, LATE_S = 5, 5
"""The heartbeat of tests/pod_config.py, and the slack that a process gets beyond it."""
CONFIG = f"{ROOT}/tests/pod_config.py"
TRAIN = ("-m", "gspo_jax.train")
slow, faults = pytest.mark.slow, pytest.mark.faults


def test_processes_agree_on_rows_on_errors_and_on_where_to_stop():
    first, second = run_processes(2, "-m", "tests.pod_rows", "all")
    assert first == f"2 processes agree on prompts {pod_rows.prompt_ids()}\n"
    assert re.fullmatch(r".* SIGTERM caught .*\n", second)


@slow
def test_four_processes_agree():
    assert run_processes(4, "-m", "tests.pod_rows", "all")[0].startswith("4 processes agree")


@faults
def test_four_processes_take_the_prompts_of_one():
    """Each its own rows of every global batch, also from a position in the middle."""
    first, *_ = run_processes(4, "-m", "tests.pod_rows")
    assert first.splitlines()[-1] == f"4 processes agree on prompts {pod_rows.prompt_ids()}"


@slow
def test_two_processes_train_and_evaluate_as_one_does(data, tmp_path):
    """Two processes that shard rows, weights and experts log the metrics of one, and leave the same run folder."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {
        "model.folder": ROOT / "tests" / "golden" / "counter",
        "data.data_dir": data,
        "data.max_prompt_length": 16,
        "environment.name": "countdown_feedback",
        "training.old_logprobs": "recompute",
        "routing.replay": "r2",
        "iterations": 2,
    }
    run_processes(1, *TRAIN, *train_flags(f"{CONFIG}:steps", one, settings))
    words = train_flags(f"{CONFIG}:steps", two, settings)
    first, second = run_processes(2, *TRAIN, *words)
    assert_same_metrics(one, two)
    assert max(row["actor/grad_norm"] for row in rows_of(one)[1:]) > 0.1, "some update has a gradient"
    assert read_samples(two) == read_samples(one)
    assert "gspo_token 2/2" in first and "Gloo" not in first and second == ""
    files = {"checkpoints", "config.json", "metrics.jsonl", "samples", "saved.json", "tb"}
    assert {path.name for path in two.iterdir()} == files
    assert len(list((two / "tb").iterdir())) == 1
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["1", "2"]

    first, second = run_processes(2, "-m", "gspo_jax.evaluate", *words, f"--json={tmp_path}/facts.json")
    assert "iteration 2: mean@4" in first and second == ""
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["accuracy"] == pytest.approx(rows_of(one)[-1]["eval/accuracy"]) and facts["accuracy"] > 0


@slow
def test_a_cold_start_of_two_processes_is_that_of_one(data, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for count, folder in enumerate(folders, 1):
        words = train_flags(CONFIG, folder, {"data.data_dir": data})
        run_processes(count, "-m", "gspo_jax.coldstart", *words)
    one, two = ({path.name: path for path in folder.rglob("*") if path.is_file()} for folder in folders)
    assert one.keys() == two.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in one.keys() - {"model.safetensors"}:
        assert one[name].read_bytes() == two[name].read_bytes(), name
    ours, theirs = (load_file(each["model.safetensors"]) for each in (one, two))
    for name, weights in ours.items():
        np.testing.assert_allclose(weights, theirs[name], atol=1e-3, err_msg=name)  # rounding grows over the steps


@faults
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_is_killed_the_others_end(victim, data, tmp_path):
    with Pod(2, *TRAIN, *field_run(tmp_path, data, iterations=500)) as pod:
        dies, other = pod.processes[victim], pod.processes[1 - victim]
        wait_for((tmp_path / "checkpoints" / "1").exists, dies)
        dies.kill()
        killed = time.monotonic()
        said, _ = other.communicate(timeout=60)
        assert time.monotonic() - killed < HEARTBEAT_S + LATE_S
    assert other.returncode == exits.LOST, said
    assert re.search(r"error: .*lost.*start the run again with the same command: it resumes.*\n\Z", said), said


@faults
def test_a_second_run_on_a_folder_is_refused_and_the_first_goes_on(data, tmp_path):
    """All of its processes end with the same sentence, before they have written anything."""
    words = field_run(tmp_path, data, iterations=3)
    with Pod(1, *TRAIN, *words) as first:
        wait_for((tmp_path / "lease.json").exists, first.processes[0])
        with Pod(2, *TRAIN, *words) as second:
            said = second.finish()
        assert [process.returncode for process in second.processes] == [exits.MISTAKE] * 2, said
        refused = rf"error: {tmp_path} is in use by another run \(process {first.processes[0].pid} on .*\n\Z"
        assert all(re.search(refused, line) for line in said), said
        assert first.processes[0].poll() is None, "the first run was still going on"
        said = first.finish()
    assert first.processes[0].returncode == 0, said
    assert rows_of(tmp_path)[-1]["iteration"] == 3 and not (tmp_path / "lease.json").exists()


FAILS = """
from gspo_jax import exits
from gspo_jax.parallel import processes
count = processes.start(heartbeat_s=5, start_s=60)
with processes.guarded(count):
    import jax
    if jax.process_index():
        raise RuntimeError("only here")
    processes.wait_for_all("end")
"""


@faults
def test_when_a_process_fails_the_others_do_not_wait_for_it():
    with Pod(2, "-c", FAILS) as pod:
        first, second = pod.finish()
    assert [process.returncode for process in pod.processes] == [exits.LOST, 1]
    assert "RuntimeError: only here" in second and "error: one of several processes failed" in second
    assert "RuntimeError" not in first and "start the run again" in first


def test_an_error_that_gloo_caused_is_found_behind_it():
    try:
        try:
            raise jax.errors.JaxRuntimeError("Gloo AllGather failed: Connection closed by peer")
        finally:
            raise ValueError("the checkpoint cannot be closed")
    except ValueError as error:
        assert "closed by peer" in str(processes._gloo_error(error))
    assert processes._gloo_error(ValueError("Gloo")) is None


ALONE_S = 3


def start_alone(count: int, number: int, port: int, *, seconds: int = ALONE_S) -> subprocess.Popen:
    """Start a process of a run that waits `seconds` for the others; it prints a line when it begins to."""
    script = f"print(flush=True); processes.start(heartbeat_s=5, start_s={seconds})"
    words = [sys.executable, "-c", f"from gspo_jax.parallel import processes; {script}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=ROOT, env=environment(count, number, port), **pipes)


def assert_gives_up(process: subprocess.Popen, since: float) -> None:
    """Assert that a process ends ALONE_S after it began to wait, `since`, and says why."""
    _, said = process.communicate(timeout=60)
    assert ALONE_S - 1 < time.monotonic() - since < ALONE_S + LATE_S
    assert process.returncode == exits.LOST
    assert f"error: the other processes of the run have not joined after {ALONE_S} s; start the run again" in said


@faults
def test_who_is_left_alone_at_the_start_ends():
    """A process whose coordinator dies right after accepting the connection gives up after ALONE_S."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        process = start_alone(2, 1, listener.getsockname()[1])
        listener.accept()[0].close()
        connected = time.monotonic()
    assert_gives_up(process, connected)


@faults
@pytest.mark.parametrize("joins", [False, True])
def test_a_coordinator_that_is_left_alone_at_the_start_ends(joins):
    """Of a run of three, one process never comes; another does not either, or is killed while it waits for that one."""
    port = free_port()
    with contextlib.ExitStack() as stack:

        def start(number: int, seconds: int) -> subprocess.Popen:
            process = start_alone(3, number, port, seconds=seconds)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline()
            return process

        other = start(1, 60) if joins else None
        coordinator = start(0, ALONE_S)
        began = time.monotonic()
        if other is not None:
            there = psutil.Process(other.pid)
            wait_for(lambda: any(to.status == "ESTABLISHED" for to in there.net_connections("tcp")), coordinator)
            other.kill()
        assert_gives_up(coordinator, began)


@pytest.fixture
def alone(monkeypatch) -> pytest.MonkeyPatch:
    """Remove every variable that announces other processes from the environment."""
    for name in list(os.environ):
        if name.startswith(("JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS", "SLURM_")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_one_process_is_on_its_own(alone):
    assert processes.find() == {}
    for name, value in zip(processes.VARIABLES, ("localhost:1", "1", "0"), strict=True):
        alone.setenv(name, value)
    assert processes.find() == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("localhost:1", "", "0"), "JAX_NUM_PROCESSES is not set, but others of .* are; set all of them or none"),
        (("localhost", "2", "0"), "are localhost, 2, 0; give host:port, the number of processes"),
        (("localhost:1", "2", "2"), "are localhost:1, 2, 2; give host:port, the number of processes"),
        (("localhost:1", "two", "1"), "are localhost:1, two, 1; give host:port, the number of processes"),
    ],
)
def test_half_of_what_is_needed_is_refused(given, says, alone):
    for name, value in zip(processes.VARIABLES, given, strict=True):
        alone.setenv(name, value)
    with pytest.raises(UserError, match=says):
        processes.find()


def test_slurm_is_found(alone):
    job = {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in job.items():
        alone.setenv(f"SLURM_{name}", value)
    assert processes.find() == {"cluster_detection_method": "slurm"}
    alone.setenv("SLURM_NTASKS", "1")
    assert processes.find() == {}


@pytest.fixture
def repository(tmp_path) -> Path:
    """Return a copy of launch/ whose .venv runs the tests' own interpreter."""
    root = tmp_path / "repository"
    shutil.copytree(ROOT / "launch", root / "launch")
    shutil.copy(ROOT / "pyproject.toml", root)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    state = subprocess.run(
        ["bash", "-c", "source launch/venv.sh; install_state"], cwd=root, capture_output=True, check=True
    ).stdout
    (root / ".venv" / "installed-report").write_bytes(state)
    return root


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
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash keeps an inherited SIG_IGN
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
    assert process.returncode == 130 and said.endswith("the run is saved; start it again with the same command\n"), said
    assert (tmp_path / "run" / "stopped.json").exists() and list((tmp_path / "run" / "checkpoints").iterdir())
    assert not processes_of(tmp_path / "run") and not (tmp_path / "run" / "lease.json").exists()


def play(repository: Path, trainer: str) -> None:
    """Put a shell script in the place of the trainer, which appends its process number to `started`."""
    script = f'case $* in *gspo_jax.train*) ;; *report*) exit ;; *) exec {sys.executable} "$@" ;; esac'
    begin = 'echo "$JAX_PROCESS_ID" >>started; ready() { echo >"ready-$JAX_PROCESS_ID"; }'
    (repository / ".venv" / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{script}\n{begin}\n{trainer}\n")


WAITS = "trap : TERM; ready; sleep 60 & wait; kill $!"
SAVES = "echo {} >run/stopped.json"


def test_a_saved_run_is_started_again_by_the_launcher(repository, monkeypatch):
    """Although it may not restart a run that fails."""
    monkeypatch.setenv("RESTARTS", "0")
    play(repository, f"if [ -e run/stopped.json ]; then rm run/stopped.json; else {SAVES}; fi")
    process = launch(repository, "1", "--workdir=run")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("the run was stopped and saved: starting it again") == 1
    assert (repository / "started").read_text() == "0\n0\n"


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("ends", ["saved", "finished", "killed"])
def test_a_signal_to_the_launcher_stops_the_run(sign, code, ends, repository):
    """The launcher says whether the processes saved; if they finish, it goes on, and if they die, so does it."""
    play(repository, {"saved": f"{WAITS}; {SAVES}", "finished": WAITS, "killed": "ready; exec sleep 60"}[ends])
    process = launch(repository, "2", "--workdir=run")
    try:
        wait_for(lambda: all((repository / f"ready-{number}").exists() for number in range(2)), process)
        process.send_signal(sign)
        said, _ = process.communicate(timeout=30)
    finally:
        end(process)
    assert (repository / "started").read_text().count("\n") == 2
    if ends == "saved":
        assert process.returncode == code and said.endswith("the run is saved; start it again with the same command\n")
    elif ends == "finished":
        assert process.returncode == 0 and "saved" not in said and "error" not in said
    else:
        assert process.returncode == (code or 143) and "of 2 exited with code 143" in said


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
    ("codes", "says"),
    [
        ((exits.LOST, 7), "error: process 1 of 2 exited with code 7"),
        ((7, exits.LOST), "error: process 0 of 2 exited with code 7"),
        ((exits.LOST, exits.LOST), "error: process [01] of 2 exited with code 3"),
        ((0, 7), "error: process 1 of 2 exited with code 7"),
    ],
)
def test_the_launcher_names_who_was_lost(codes, says, repository, monkeypatch):
    """A process that loses a peer exits at once and may be seen first, yet the message names the one that failed."""
    python = repository / ".venv" / "bin" / "python"
    ends = "".join(
        f'if [ "${{JAX_PROCESS_ID:-}}" = {number} ]; then exit {code}; fi\n' for number, code in enumerate(codes)
    )
    python.write_text(python.read_text().replace("PYTHONPATH", f"{ends}PYTHONPATH"))
    monkeypatch.setenv("RESTARTS", "0")
    process = launch(repository, "2", "--workdir=run")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == max(codes) and re.match(says, said), said


@slow
def test_the_launcher_does_not_repeat_a_mistake(repository):
    process = launch(repository, "2", *train_flags(CONFIG, Path("run"), {"iterations": 0}))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.count("error: iterations is 0; use 1 to ") == 1 and "start again" not in said


def test_the_process_that_the_others_wait_for_is_named():
    assert describe(np.float32([1.0])) is None
    assert describe(np.float32([1.0, 1.1, 1.2])) is None
    assert describe(np.float32([0.1, 0.25])) is None, "too little to speak of"
    said = describe(np.float32([1.0, 4.0, 1.2, 0.8]))
    assert said is not None and said.startswith("process 1 is slow: it works 4.0 s of an iteration, 4.0 times as long")
