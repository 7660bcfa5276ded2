"""One run per folder: who gets the lease, who is refused, and what becomes of a run that has lost it."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gspo_jax import exits
from gspo_jax.errors import UserError
from gspo_jax.folder import lease
from gspo_jax.folder.lease import Holder, acquire, hold
from gspo_jax.folder.storage import LEASE, open_folder
from tests.folder.test_storage import bucket, storage  # noqa: F401  fixtures
from tests.pods import ROOT

RUN = """
import logging, sys, time
from pathlib import Path
from gspo_jax.folder import lease
from gspo_jax.errors import UserError
workdir, machine, seconds, expires_s = sys.argv[1:]
lease.RENEWED_S, lease.EXPIRES_S = 0.2, float(expires_s)
logging.getLogger("gcsfs").setLevel("ERROR")  # it warns of the emulator at every call, until the pipe is full
if machine:
    lease._machine = lambda: machine
try:
    with lease.hold(workdir) as confirm:
        if not workdir.startswith("gs://"):
            (Path(workdir) / "metrics.jsonl").touch()
        print("holds", flush=True)
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            time.sleep(0.01)
            confirm()
            if not workdir.startswith("gs://"):
                with open(Path(workdir) / "metrics.jsonl", "a") as file:
                    file.write("line\\n")
except UserError as error:
    sys.exit(f"error: {error}")
"""
"""A run without a model: it holds the lease for some seconds and writes lines, on a machine named by an argument."""


def run(
    workdir: Path | str, *, machine: str = "", seconds: float = 0.0, expires_s: float = 1.0, **environment: str
) -> subprocess.Popen:
    """Start a run; without `machine`, on this one."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(workdir), machine, str(seconds), str(expires_s)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def holding(workdir: Path | str, **options) -> subprocess.Popen:
    """Start a run, and return it once it holds the lease."""
    process = run(workdir, seconds=60, **options)
    assert process.stdout is not None and process.stdout.readline() == "holds\n"
    return process


@pytest.fixture
def ends():
    """Return a list of processes that are killed after the test."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def left_by(folder: Path, **changes: object) -> str:
    """Write the lease of a run that did not release it; returns its text."""
    fields = {"owner": "a", "host": "elsewhere", "machine": "elsewhere", "pid": 7, "started": "1", "since": "then"}
    text = json.dumps(fields | changes)
    (folder / LEASE).write_text(text)
    return text


def test_a_lease_is_held_inside_the_block_and_removed_at_any_end(tmp_path):
    with hold(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LEASE).read_text())["pid"] == os.getpid()
    with pytest.raises(RuntimeError), hold(tmp_path / "run"):
        raise RuntimeError
    assert list((tmp_path / "run").iterdir()) == []


def test_a_second_run_is_refused_in_one_sentence_while_the_first_goes_on(tmp_path):
    with hold(tmp_path):
        before = (tmp_path / LEASE).read_text()
        with pytest.raises(UserError) as error, hold(tmp_path):
            pass
        assert (tmp_path / LEASE).read_text() == before
    said = str(error.value)
    assert said.startswith(f"{tmp_path} is in use by another run (process {os.getpid()} on ") and ", since 20" in said
    assert said.endswith("; stop that run, or use another --workdir") and "\n" not in said


@pytest.mark.parametrize("pid", ["gone", "reused", "zombie"])
def test_a_run_that_is_known_to_be_dead_is_replaced_at_once(tmp_path, pid):
    """The process id no longer exists, belongs to a later process, or to one that is dead but not reaped."""
    process = subprocess.Popen(["true"])
    number = os.getpid() if pid == "reused" else process.pid
    started = lease._start_of(process.pid) if pid == "zombie" else "1"
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if pid != "zombie":
        process.wait()
    left_by(tmp_path, machine=lease._machine(), pid=number, started=started or "1")
    with hold(tmp_path):
        assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()
    process.wait()


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"owner": "a"}'])
def test_a_lease_that_cannot_be_read_expires_like_any_other(tmp_path, monkeypatch, capsys, text):
    monkeypatch.setattr(lease, "EXPIRES_S", 0.2)
    (tmp_path / LEASE).write_text(text)
    with hold(tmp_path):
        assert "(unknown) did not end by itself: waiting 0 s" in capsys.readouterr().err


def test_a_lease_from_another_machine_expires_by_this_machine_s_clock(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lease, "EXPIRES_S", 1.0)
    left_by(tmp_path, since="2099-01-01 00:00:00+00:00")
    begun = time.monotonic()
    with hold(tmp_path):
        assert 1.0 < time.monotonic() - begun < 5.0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(process 7 on elsewhere, since 2099-01-01 00:00:00+00:00)" in said


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run cannot be a run folder, because .* is not a folder"):
        hold(tmp_path / "file" / "run").__enter__()


def test_a_link_in_place_of_the_lease_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run").mkdir()
    for name in (LEASE, f"{LEASE}.tmp"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    monkeypatch.setattr(lease, "EXPIRES_S", 0.2)
    with hold(tmp_path / "run"):
        assert not (tmp_path / "run" / LEASE).is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("stale", [False, True])
def test_of_runs_that_take_a_lease_at_once_one_gets_it(tmp_path, monkeypatch, stale):
    monkeypatch.setattr(lease, "EXPIRES_S", 0.6)
    if stale:
        left_by(tmp_path)
    write = lease._write
    monkeypatch.setattr(lease, "_write", lambda *words: (time.sleep(0.1), write(*words)))  # so that decisions overlap
    start, got, refused = threading.Barrier(8), [], []

    def take() -> None:
        start.wait()
        try:
            got.append(acquire(tmp_path))
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].release()
    assert not (tmp_path / LEASE).exists()


def test_a_lease_in_a_bucket_stays_there(bucket):  # noqa: F811
    """A copy in the local folder would be uploaded, or removed there, when the run is published."""
    bucket.mkdir(parents=True)
    (bucket / "config.json").write_text("{}")
    (bucket / LEASE).write_text("held")
    with open_folder("gs://bucket/run") as folder:
        assert [path.name for path in folder.local.iterdir()] == ["config.json"]
    assert (bucket / LEASE).read_text() == "held"


@pytest.mark.faults
def test_kill_9_and_an_immediate_restart(tmp_path, ends):
    ends.append(holding(tmp_path, expires_s=60))
    ends[0].kill()
    ends[0].wait()
    assert (tmp_path / LEASE).exists()
    begun = time.monotonic()
    with hold(tmp_path):
        assert time.monotonic() - begun < 5, "it did not wait for the lease to expire"


@pytest.mark.faults
def test_a_run_that_was_suspended_while_another_took_over_writes_nothing_more(tmp_path, ends):
    """A run on another machine waits and is refused while the first is alive, and takes over once it is suspended."""
    ends.append(holding(tmp_path, machine="a"))
    ends.append(run(tmp_path, machine="b"))
    _, errors = ends[1].communicate(timeout=60)
    assert ends[1].returncode == 1 and ends[0].poll() is None
    assert "waiting 1 s, to see whether it still runs" in errors and "is in use by another run (process " in errors

    ends[0].send_signal(signal.SIGSTOP)
    ends.append(holding(tmp_path, machine="b"))
    ends[2].send_signal(signal.SIGSTOP)  # so that no further line is its own
    before, owner = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / LEASE).read_bytes()
    ends[0].send_signal(signal.SIGCONT)
    _, errors = ends[0].communicate(timeout=20)
    assert ends[0].returncode == exits.TAKEN
    assert f"{LEASE}, is now held by process {ends[2].pid} on " in errors and errors.count("\n") == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and (tmp_path / LEASE).read_bytes() == owner


@pytest.mark.faults
def test_a_run_whose_lease_is_removed_ends(tmp_path, ends):
    ends.append(holding(tmp_path))
    (tmp_path / LEASE).unlink()
    _, errors = ends[0].communicate(timeout=20)
    assert ends[0].returncode == exits.TAKEN and "is gone; it ends without writing anything more" in errors


def test_a_lease_that_cannot_be_renewed_for_a_while_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lease, "RENEWED_S", 0.05)
    with hold(tmp_path) as confirm:
        with monkeypatch.context() as broken:
            broken.setattr(lease, "_read", lambda _: (_ for _ in ()).throw(OSError("503")))
            broken.setattr(lease, "EXPIRES_S", 0.0)
            time.sleep(0.3)
            confirm()
        assert "could not be renewed (503); will retry" in caplog.text
        time.sleep(0.3)
    assert not (tmp_path / LEASE).exists()


def test_a_run_suspended_while_it_renews_does_not_go_on(tmp_path, monkeypatch):
    """Another run may have taken the lease and released it; one that still holds it ends too."""
    monkeypatch.setattr(lease, "RENEWED_S", 0.01)
    left, write = queue.Queue(), lease._write

    def suspended(folder, holder):
        write(folder, holder)
        monkeypatch.setattr(lease, "EXPIRES_S", -1.0)

    monkeypatch.setattr(exits, "leave", lambda code: left.put((code, (tmp_path / LEASE).exists())))
    with hold(tmp_path):
        monkeypatch.setattr(lease, "_write", suspended)
        assert left.get(timeout=10) == (exits.TAKEN, False)


def test_a_process_is_recognised_by_its_start():
    assert lease._start_of(os.getpid()) == lease._start_of(os.getpid()) != lease._start_of(1)
    assert lease._start_of(2**22 + 1) is lease._start_of(2**80) is None
    here = Holder(owner="", host="", machine=lease._machine(), pid=2**80, started="", since="")
    assert here.is_dead()


@pytest.mark.faults
def test_in_a_bucket(storage, ends):  # noqa: F811
    """As on the local disk: waited for, refused, taken over from a suspended run, which then ends; released."""
    place = "gs://bucket/leased"
    ends.append(holding(place, machine="a", expires_s=3, **storage))
    ends.append(run(place, machine="b", expires_s=3, **storage))
    assert "is in use by another run" in ends[1].communicate(timeout=60)[1] and ends[1].returncode == 1
    ends[0].send_signal(signal.SIGSTOP)
    ends.append(run(place, machine="b", seconds=2, expires_s=3, **storage))
    said, errors = ends[2].communicate(timeout=60)
    assert ends[2].returncode == 0 and said == "holds\n" and "waiting 3 s" in errors
    ends[0].send_signal(signal.SIGCONT)
    assert "is gone" in ends[0].communicate(timeout=60)[1], "the run that took over has released the lease"
    assert ends[0].returncode == exits.TAKEN
