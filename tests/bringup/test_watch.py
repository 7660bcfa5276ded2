"""The watching process: stages that die, hang or fail are named, and the others run; killed, it goes on where it was.

Workers are real processes, with stages of their own: a `sitecustomize` puts them in place of the catalogue's.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from gspo_jax import first
from gspo_jax.bringup import catalogue, worker
from gspo_jax.bringup.stages import Given, Stage
from gspo_jax.parallel import processes
from tests.pods import ROOT, free_port

STAGES = """
    import atexit, os, signal, sys, time
    import jax, jax.numpy as jnp
    from gspo_jax.bringup import catalogue, watch
    from gspo_jax.bringup.stages import Stage
    from gspo_jax.doctor import Finding

    def fine(given):
        with open(given.out / "ran", "a") as file:
            file.write(f"{os.environ.get('JAX_PROCESS_ID', '0')} ")
        total = jax.jit(lambda x: x.sum())(jnp.ones(8))
        return [Finding("sum", "ok", f"the sum is {total:.0f}")], {"devices": jax.device_count()}

    def dies(given):
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(given):
        (given.out / "hangs").touch()
        time.sleep(600 if not os.path.exists(given.out / "awake") else 0)
        return [Finding("sleep", "ok", "woke up")], {}

    def raises(given):
        raise RuntimeError("no such kernel")

    if "gspo_jax.bringup.worker" not in sys.orig_argv:
        watch.PAUSE_S = 0.1
    elif os.path.exists("starts"):
        starts = int(open("starts").read())
        if not starts:
            sys.exit("the devices are in use")
        open("starts", "w").write(str(starts - 1))
    elif os.path.exists("exits"):
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)

    catalogue.STAGES = tuple(Stage(name, name.title(), share, globals()[name]) for name, share in NAMES)
"""


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Callable[..., dict[str, Any]]:
    """Return the arguments of a process of `first` with these stages, and shares of its one minute."""

    def make(**shares: float) -> dict[str, Any]:
        text = "NAMES = " + repr(list(shares.items())) + "\n" + textwrap.dedent(STAGES)
        (tmp_path / "sitecustomize.py").write_text(text)
        words = [sys.executable, "-m", "gspo_jax.first", "--minutes=1", f"--out={tmp_path / 'first'}", "--devices=2"]
        words.append(f"--json={tmp_path / 'first.json'}")
        paths = os.pathsep.join([str(tmp_path), str(ROOT)])
        return {"args": words, "env": os.environ | {"PYTHONPATH": paths}, "cwd": tmp_path, "text": True}

    return make


@pytest.mark.slow
def test_a_stage_that_dies_hangs_or_fails_leaves_the_others(
    command: Callable[..., dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    shares = {"fine": 0.5, "dies": 0.2, "hangs": -0.2, "raises": 0.2}  # with its grace, 3 seconds
    done = subprocess.run(**command(**shares), capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    text = (tmp_path / "first" / "page.md").read_text()
    first = text.splitlines()[2:5]
    assert first[0].startswith("- **Failed**: Dies: the process was ended by signal 9: ") and "about to die" in first[0]
    assert first[1].startswith("- **Failed**: Hangs: it took more than its -12 s and was ended")
    assert first[2] == "- **Failed**: Raises: the stage failed: RuntimeError: no such kernel"
    assert "- ok: sum: the sum is 8" in text
    assert (tmp_path / "first" / "ran").read_text() == "0 ", "once"
    facts = json.loads((tmp_path / "first.json").read_text())
    assert facts["failed"] == ["dies", "hangs", "raises"] and not facts["ok"]
    assert facts["stages"]["fine"] == {"state": "ok", "figures": {"devices": 2}}
    assert done.stdout.splitlines()[-1] == f"page: {tmp_path / 'first' / 'page.md'}"


@pytest.mark.slow
def test_a_worker_that_cannot_start_again_leaves_the_records_that_there_are(
    command: Callable[..., dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    given = command(fine=0.4, dies=0.3, raises=0.3)
    (tmp_path / "starts").write_text("1")
    done = subprocess.run(**given, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    first = (tmp_path / "first" / "page.md").read_text().splitlines()[2:5]
    assert first[0].startswith("- **Failed**: Dies: the process was ended by signal 9")
    assert first[1].startswith("- **Failed**: Raises: the process ended with exit code 1: ")
    assert "the devices are in use" in first[1]
    assert json.loads((tmp_path / "first.json").read_text())["stages"]["fine"]["state"] == "ok"


@pytest.mark.slow
def test_a_death_behind_the_last_stage_is_none(command: Callable[..., dict[str, Any]], tmp_path: pathlib.Path) -> None:
    given = command(fine=1.0)
    (tmp_path / "exits").touch()
    done = subprocess.run(**given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "All 1 stages hold." in done.stdout


@pytest.mark.slow
def test_killed_it_goes_on_with_what_is_left(command: Callable[..., dict[str, Any]], tmp_path: pathlib.Path) -> None:
    given = command(fine=0.5, hangs=0.5)
    process = subprocess.Popen(**given, stdout=subprocess.DEVNULL)
    end = time.time() + 120
    hangs, page = tmp_path / "first" / "hangs", tmp_path / "first" / "page.md"
    while not (hangs.exists() and page.exists() and "- ok: sum" in page.read_text()) and time.time() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "- **Not run**: Hangs" in page.read_text()
    (tmp_path / "first" / "awake").touch()
    done = subprocess.run(**given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "first" / "ran").read_text() == "0 ", "the first stage has its record"
    assert "All 2 stages hold." in (tmp_path / "first" / "page.md").read_text()
    workers = subprocess.run(["pgrep", "-f", f"bringup.worker.*{tmp_path}"], capture_output=True, check=False)
    assert workers.returncode == 1, "no worker outlives its watcher"


@pytest.mark.slow
def test_two_processes_write_one_page(command: Callable[..., dict[str, Any]], tmp_path: pathlib.Path) -> None:
    given = command(fine=0.5, raises=0.5)
    port = free_port()
    pod = []
    for number in range(2):
        own = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
        pod.append(subprocess.Popen(**given | {"env": given["env"] | own}, stdout=subprocess.PIPE))
    said = [process.communicate(timeout=300)[0] for process in pod]
    assert [process.returncode for process in pod] == [1, 1]
    assert "Raises: failed" in said[0] and "page.md" not in said[1]
    assert sorted((tmp_path / "first" / "ran").read_text().split()) == ["0", "1"]
    record = json.loads((tmp_path / "first" / "stages" / "fine.json").read_text())
    assert record["figures"] == {"devices": 2} and record["machine"]["processes"] == 2


def test_a_stage_may_take_what_the_ones_before_it_left(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    told = []

    def look(given: Given) -> tuple[list[Any], dict[str, Any]]:
        told.append(json.loads((tmp_path / "status.json").read_text())["limit"])
        return [], {}

    monkeypatch.setattr(catalogue, "STAGES", tuple(Stage(name, name, 0.25, look) for name in ("a", "b", "c")))
    given = Given(tmp_path, minutes=2, model="", devices=1)
    assert worker.main(given, tmp_path / "status.json", again=False) == 0
    assert told == pytest.approx([30, 60, 90], abs=1)


FAULTS = """
    import sys
    if "gspo_jax.bringup.worker" in sys.orig_argv:
        import types
        from gspo_jax.bringup import catalogue, kernels
        from gspo_jax.planning import calibration
        from tests.bringup.test_kernels import planted

        planted(types.SimpleNamespace(setattr=setattr))
        every = kernels.tried
        kernels.tried = lambda: every(only=("grouped matmul",))
        calibration.LARGE, calibration.SIDES = {"cpu": 2**22}, {"cpu": (256,)}
        calibration.SENT, calibration.LOOP_S = {"cpu": 2**12}, 0.02
        bandwidth = calibration.bandwidth
        calibration.bandwidth = lambda device: bandwidth(device) / 10
        catalogue.STAGES = tuple(one for one in catalogue.STAGES if one.name in ("kernels", "rates", "programs"))
    else:
        from gspo_jax.bringup import catalogue
        catalogue.STAGES = tuple(one for one in catalogue.STAGES if one.name in ("kernels", "rates", "programs"))
"""


@pytest.mark.slow
def test_planted_faults_are_the_first_lines_of_the_page(
    command: Callable[..., dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    """A kernel wrong by 1% on skewed loads, memory ten times too slow, and a model that does not fit."""
    given = command()
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(FAULTS))
    given["args"] = [*given["args"], "--minutes=10", "--model=Qwen3-30B-A3B"]
    done = subprocess.run(**given, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    text = (tmp_path / "first" / "page.md").read_text()
    for fault in (
        r"- \*\*Failed\*\*: Kernels: grouped matmul, skewed load: wrong by 1% \(at most 0\.024%\)",
        r"- \*\*(Failed|Doubtful)\*\*: How fast it is: memory: \S+/s, \d+% of \S+ \(numpy's here",
        r"- \*\*Failed\*\*: How fast a run is: memory: Qwen3-30B-A3B does not fit: weights and optimizer take \S+ GB",
    ):
        assert any(re.match(fault, line) for line in text.splitlines()[2:5]), text


def test_a_wrong_environment_is_told_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name, value in zip(processes.VARIABLES, ("localhost:9911", "2", "abc"), strict=True):
        monkeypatch.setenv(name, value)
    assert first.main([f"--out={tmp_path / 'first'}"]) == 2
    assert "JAX_PROCESS_ID are localhost:9911, 2, abc; give" in capsys.readouterr().err


def test_wrong_flags(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for words, says in {
        "--minutes=0": "--minutes is 0; use 1 to 120",
        "--devices=0": "--devices is 0; use 1 or more",
        "--model=Qwen3-30B": "there is no published model 'Qwen3-30B' here; did you mean 'Qwen3-32B'?",
        f"--out={tmp_path / 'file'}": "is a file; give a folder",
        "--minute=3": "did you mean --minutes?",
    }.items():
        assert first.main([words]) == 2
        assert says in capsys.readouterr().err
