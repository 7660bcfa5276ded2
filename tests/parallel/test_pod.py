"""Real multi-process runs: the numbers of one process, interchangeable checkpoints, and a clean end if one dies."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from examples import http_server
from gspo_jax import exits
from gspo_jax.errors import UserError
from gspo_jax.folder.samples import read_samples
from gspo_jax.parallel import processes
from gspo_jax.run.stragglers import describe
from tests import pod_agreement
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
from tests.tiny import blurred

HEARTBEAT_S, LATE_S = 5, 5
"""The heartbeat of tests/pod_config.py, and the slack that a process gets beyond it."""
CONFIG = f"{ROOT}/tests/pod_config.py"
COUNTER = ROOT / "tests" / "golden" / "counter"
TRAIN = ("-m", "gspo_jax.train")
FOUR = {"cpu_devices": 4, "mesh.data": 1}
"""Fields of a run on four devices, whose weights are sharded over two processes, and whose experts within each."""
slow, faults = pytest.mark.slow, pytest.mark.faults


def test_processes_agree_on_rows_on_errors_and_on_where_to_stop():
    """Each takes its own rows of every global batch, also from a position in the middle."""
    first, last = run_processes(2, "-m", "tests.pod_agreement")
    assert first == f"2 processes agree on prompts {pod_agreement.prompt_ids()}\n"
    assert re.fullmatch(r".* SIGTERM caught .*\n", last)


@slow
def test_two_processes_train_and_evaluate_as_one_does(data, tmp_path, monkeypatch):
    """Two processes that shard rows, weights and experts log the metrics of one, and leave the same run folder.

    In the second iteration, over the same prompts, drafts are copied from the first one's responses. Each process has
    the environment's objects of its own episodes, which reward turns, and asks a server about these episodes. A teacher
    is sharded like the policy.
    """
    monkeypatch.setenv("SCORES_URL", http_server.start())
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {
        "model.folder": COUNTER,
        "teacher.folder": blurred(COUNTER, tmp_path / "teacher"),
        "functions.terse": ROOT / "examples" / "async_reward.py:terse",
        "rewards.terse": 0.1,
        "data.data_dir": data,
        "data.max_prompt_length": 16,
        "data.prompts_per_batch": 16,
        "data.limit": 16,
        "eval.every": 2,
        "functions.feedback": ROOT / "tests" / "feedback.py:Feedback",
        "environment.name": "feedback",
        "step_rewards.environment": 0.5,
        "objective.turn_discount": 0.9,
        "scoring.concurrency": 2,
        "sampling.slots": 16,
        "sampling.draft": "history",
        "training.old_logprobs": "recompute",
        "routing.replay": "r2",
        "iterations": 2,
    } | FOUR
    run_processes(1, *TRAIN, *train_flags(f"{CONFIG}:steps", one, settings))
    words = train_flags(f"{CONFIG}:steps", two, settings)
    first, second = run_processes(2, *TRAIN, *words)
    assert_same_metrics(one, two)
    assert max(row["actor/grad_norm"] for row in rows_of(one)[1:]) > 0.1, "some update has a gradient"
    assert min(row["teacher/kl"] for row in rows_of(one)[1:]) > 0.1
    assert 0 < rows_of(one)[-1]["reward/terse"] <= 1 and abs(rows_of(one)[-1]["reward/environment"]) > 0.01
    assert rows_of(two)[-1]["decode/accepted"] > 0
    for folder in ("samples", "held_out"):
        assert read_samples(two, folder) == read_samples(one, folder) != {}
    assert "gspo_token 2/2" in first and "Gloo" not in first and second == ""
    files = {"checkpoints", "config.json", "metrics.jsonl", "samples", "held_out", "saved.json", "finished.json", "tb"}
    assert {path.name for path in two.iterdir()} == files
    assert len(list((two / "tb").iterdir())) == 1
    kept = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (one, two)]
    assert kept[0] == kept[1] and kept[1][-1] == "2"

    first, second = run_processes(2, "-m", "gspo_jax.evaluate", *words, f"--json={tmp_path}/facts.json")
    assert "iteration 2: mean@4" in first and second == ""
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["accuracy"] == pytest.approx(rows_of(one)[-1]["eval/accuracy"]) and facts["accuracy"] > 0


@slow
def test_a_cold_start_of_two_processes_is_that_of_one(data, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for count, folder in enumerate(folders, 1):
        words = train_flags(CONFIG, folder, {"data.data_dir": data} | FOUR)
        run_processes(count, "-m", "gspo_jax.coldstart", *words)
    one, two = ({path.name: path for path in folder.rglob("*") if path.is_file()} for folder in folders)
    assert one.keys() == two.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in one.keys() - {"model.safetensors"}:
        assert one[name].read_bytes() == two[name].read_bytes(), name
    ours, theirs = (load_file(each["model.safetensors"]) for each in (one, two))
    for name, weights in ours.items():
        np.testing.assert_allclose(weights, theirs[name], atol=1e-3, err_msg=name)  # rounding grows over the steps


SUMS = """
import sys
import numpy as np
from jax.experimental import multihost_utils
from gspo_jax.parallel import processes
with processes.guarded(processes.start(heartbeat_s=5, start_s=60)):
    for number in range(10**6):
        multihost_utils.process_allgather(np.ones(1))
        if number == 1:
            print("begun", file=sys.stderr)
"""


@faults
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_is_killed_the_others_end(victim, data, tmp_path):
    """If process 0, which coordinates, is killed in a run, and if another one is between sums of all."""
    words = ["-c", SUMS] if victim else [*TRAIN, *field_run(tmp_path, data, iterations=500)]
    with Pod(2, *words) as pod:
        dies, other = pod.processes[victim], pod.processes[1 - victim]
        if victim:
            assert dies.stdout is not None and "begun\n" in iter(dies.stdout.readline, "")
        else:
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


NOTICED = {
    "gloo": "Gloo AllGather failed: Connection closed by peer",
    "a library's barrier": "INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 heartbeat "
    "timeout.\n\nRPC: /xla.coordination.CoordinationService/Barrier "
    "[type.googleapis.com/tensorflow.CoordinationServiceError='']",
}


@pytest.mark.parametrize("noticed", NOTICED.values(), ids=list(NOTICED))
def test_that_a_process_is_lost_is_found_behind_other_errors(noticed):
    try:
        try:
            raise jax.errors.JaxRuntimeError(noticed)
        finally:
            raise ValueError("the checkpoint cannot be closed")
    except ValueError as error:
        assert str(processes._lost(error)) == noticed
    assert processes._lost(ValueError(noticed)) is None


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
    """Process 0 of three, if one never comes, and the other does not either or is killed while it waits."""
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


def test_the_process_that_the_others_wait_for_is_named():
    assert describe(np.float32([1.0])) is None
    assert describe(np.float32([1.0, 1.1, 1.2])) is None
    assert describe(np.float32([0.1, 0.25])) is None, "too little to speak of"
    said = describe(np.float32([1.0, 4.0, 1.2, 0.8]))
    assert said is not None and said.startswith("process 1 is slow: it works 4.0 s of an iteration, 4.0 times as long")
