"""Worker processes: what calls can see, what they cannot forge, and what of them stays. All processes are real."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gspo_jax import limited
from gspo_jax.rewards import pool
from gspo_jax.rewards.pool import Pool

CALLS = """
import json, mmap, os, resource, subprocess, sys, threading, time

def look(prompt, completion, record):
    names = "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE"
    seen = {
        "environment": dict(os.environ),
        "modules": sorted(sys.modules),
        "limits": {name: resource.getrlimit(getattr(resource, name))[0] for name in names},
        "input": sys.stdin.read(),
    }
    with open(record["file"], "w") as file:
        json.dump(seen, file)
    return 0.25

def forge(prompt, completion, record):
    lies = [b'{"score": 99.0}\\n' * 3, b'ready\\n', b'0' * 32 + b' {"score": 99.0}\\n']
    print('{"score": 99.0}', flush=True)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    for descriptor in {*descriptors, 1}:
        for lie in lies:
            try:
                os.write(descriptor, lie)
            except OSError:
                pass
    return 0.25

def forge_from_outside(prompt, completion, record):
    folder = f"/proc/{os.getppid()}/fd"
    try:
        descriptors = os.listdir(folder)
    except PermissionError:  # what all but root get
        return 0.25
    for descriptor in descriptors:
        if os.readlink(f"{folder}/{descriptor}").startswith("pipe:"):
            pipe = os.open(f"{folder}/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b'{"score": 99.0}\\n' + b'0' * 32 + b' {"score": 99.0}\\n')
    return 0.25

def leave(prompt, completion, record):
    # A child, its child, and one in a session of its own that nobody waits for.
    child = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    away = subprocess.Popen(["sh", "-c", "setsid sleep 60 & echo $!"], stdout=subprocess.PIPE, text=True)
    ids = [os.getpid(), child.pid, int(child.stdout.readline()), int(away.stdout.readline())]
    with open(record["file"] + ".part", "w") as file:
        json.dump(ids, file)
    os.rename(record["file"] + ".part", record["file"])
    if completion == "hang":
        10 ** 10 ** 10  # never gives the interpreter lock away
    if completion == "die":
        os._exit(3)
    if completion == "kill the worker":
        os.kill(os.getppid(), 9)
        time.sleep(60)
    return 0.25

def leave_a_thread(prompt, completion, record):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return float(os.getpid())

def own_id(prompt, completion, record):
    return float(os.getpid())

KEPT = []

def leak(prompt, completion, record):
    if completion == "files":
        KEPT.extend(open(os.devnull) for _ in range(60))
    elif completion == "pipes":
        KEPT.extend(os.pipe() for _ in range(30))
    else:
        KEPT.append(mmap.mmap(-1, int(completion)))  # address space alone: nobody writes to it
    return float(os.getpid())
"""
REPLIES = """
import json, os, sys, time
mode = sys.argv[2]
print("loading" if mode == "loading" else "ready", flush=True)
nonce = sys.stdin.readline().strip()
sys.stdin.readline()
if mode == "text":
    print(nonce, "no JSON")
if mode == "deep":
    print(nonce, "[" * 100_000)
if mode == "number":
    print(nonce, '{"score": 1' + "0" * 400 + "}")
if mode == "list":
    print(nonce, "[1.0]")
if mode == "stranger":
    print("0" * 32, '{"score": 99.0}')
if mode == "no end":
    sys.stdout.write(nonce + ' {"score": 1.0}')
if mode == "huge":
    try:
        for _ in range(1 << 10):
            os.write(1, b"x" * (1 << 20))
    except BrokenPipeError:
        os._exit(0)
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """Make the modules `pool_calls`, of functions, and `pool_replies`, a worker that misbehaves, importable."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "pool_calls.py").write_text(CALLS)
    (folder / "pool_replies.py").write_text(REPLIES)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def workers():
    with_one = Pool("pool_calls", workers=1, timeout_s=1.0)
    yield with_one
    with_one.close()


def call(workers, name, completion="", **record):
    return workers.submit(f"pool_calls:{name}", "", completion, record).result(timeout=30)


def wait_for(path, *, at_most_s=20.0):
    end = time.monotonic() + at_most_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)


def still_running(pids, *, within_s=0.0):
    """Return those of the processes that run after at most `within_s` seconds; a zombie has ended."""

    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    end = time.monotonic() + within_s
    while (running := [pid for pid in pids if runs(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return running


def test_a_call_sees_no_secrets_and_has_limits(workers, tmp_path, monkeypatch):
    secrets = "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "WANDB_API_KEY", "ANY_OTHER"
    for name in (*secrets, "LC_TIME", "TZ"):
        monkeypatch.setenv(name, "C")
    fresh = Pool("pool_calls", workers=1, timeout_s=1.5)
    assert call(fresh, "look", file=str(tmp_path / "seen")).value == 0.25
    seen = json.loads((tmp_path / "seen").read_text())
    home = Path(seen["environment"]["HOME"])
    assert home != Path.home() and home.stat().st_mode & 0o077 == 0 and not list(home.iterdir())
    fresh.close()
    assert not home.exists()
    added = {"HOME", "PYTHONPATH", "LC_CTYPE"}  # Python itself sets the last
    assert set(seen["environment"]) - added <= {*limited._KEPT, *(n for n in os.environ if n.startswith("LC_"))}
    assert seen["environment"]["LC_TIME"] == seen["environment"]["TZ"] == "C" and "PATH" in seen["environment"]
    assert "jax" not in seen["modules"] and "jax" in sys.modules
    assert seen["input"] == ""
    assert seen["limits"] == {
        "RLIMIT_AS": 4 << 30,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": 3,  # 1.5 s more than nearly none, rounded up, and one
        "RLIMIT_FSIZE": 1 << 30,
        "RLIMIT_NOFILE": 256,
    }


def test_a_call_cannot_forge_a_score_through_any_descriptor(capfd):
    """Lines that look like replies, in print, on descriptor 1 and on each that is open, change no score."""
    workers = Pool("pool_calls", workers=1, timeout_s=1.0)
    assert [call(workers, "forge").value for _ in range(3)] == [0.25] * 3
    workers.close()
    assert '{"score": 99.0}' in capfd.readouterr().err  # where prints go


def test_a_call_cannot_forge_a_score_through_its_worker_s_descriptors(workers):
    """Only root can open them at all, and can spoil a call, but does not know the nonce of the reply."""
    outcomes = [call(workers, name) for name in ("forge_from_outside", "own_id", "own_id")]
    assert outcomes[0].value == 0.25 or outcomes[0].error.startswith("the reward worker's reply does not belong")
    assert all(outcome.value not in (None, 99.0) for outcome in outcomes[1:])


@pytest.mark.faults
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("return", 0.25),
        ("hang", "killed after 1 s"),
        ("die", "the call's process ended with exit code 3, 2 times"),
        ("kill the worker", "the reward worker ended with signal 9, 2 times"),
    ],
)
def test_nothing_that_a_call_starts_outlives_it(workers, tmp_path, end, expected):
    outcome = call(workers, "leave", end, file=str(tmp_path / "ids"))
    assert expected in (outcome.value, outcome.error)
    ids = json.loads((tmp_path / "ids").read_text())
    if end == "kill the worker":
        ids = ids[:3]  # only the worker itself can find what has left its process group
    assert not still_running(ids, within_s=0.2)
    assert call(workers, "own_id").value not in (None, *ids)


def test_close_ends_what_a_call_has_started(workers, tmp_path):
    workers.submit("pool_calls:leave", "", "hang", {"file": str(tmp_path / "ids")})
    wait_for(tmp_path / "ids")
    ids = [*workers.pids, *json.loads((tmp_path / "ids").read_text())]
    workers.close()
    assert not still_running(ids, within_s=0.2)


def test_a_call_that_leaves_a_thread_is_the_last_of_its_process(workers):
    first = call(workers, "own_id").value
    assert call(workers, "leave_a_thread").value == first
    assert call(workers, "own_id").value != first


@pytest.mark.faults
@pytest.mark.parametrize(("what", "times"), [(str(100 << 20), 45), (str(700 << 20), 7), ("files", 6), ("pipes", 6)])
def test_a_call_that_leaks_gets_a_new_runner_and_loses_no_score(workers, what, times):
    """In all, the calls leak more than a runner may have: 4 GiB of address space, 256 open files."""
    runners = [call(workers, "leak", what).value for _ in range(times)]
    assert None not in runners and 2 < len(set(runners)) <= -(-times // 2)


@pytest.mark.faults
def test_a_call_that_finds_no_memory_left_is_made_again_in_a_new_runner(workers):
    first = call(workers, "leak", str(900 << 20)).value
    assert call(workers, "leak", str(3300 << 20)).value not in (None, first)
    own = call(workers, "leak", str(5000 << 20))
    assert own.raised and "Cannot allocate memory" in own.error, "and the second time it is its own fault"


def test_all_end_when_the_trainer_is_killed(tmp_path):
    """Workers, a call that holds the interpreter lock, and what it started end within 5 s of `kill -9`."""
    script = textwrap.dedent("""
        import sys
        from gspo_jax.rewards.pool import Pool
        workers = Pool("pool_calls", workers=2, timeout_s=60.0)
        print(workers._home.name, *workers.pids, flush=True)
        workers.submit("pool_calls:leave", "", "hang", {"file": sys.argv[1]}).result()
        """)
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "ids")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path) as trainer:
        assert trainer.stdout is not None
        home, *ids = trainer.stdout.readline().split()
        wait_for(tmp_path / "ids")
        ids += json.loads((tmp_path / "ids").read_text())
        assert len(still_running(ids)) == 6
        os.kill(trainer.pid, signal.SIGKILL)
    assert not still_running(ids, within_s=5)
    assert not Path(home).exists()


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("text", "the reward worker's reply is not JSON with a score, 2 times"),
        ("deep", "the reward worker's reply is not JSON with a score, 2 times"),
        ("number", "the reward worker's reply is not JSON with a score, 2 times"),
        ("list", "the reward worker's reply is not JSON with a score, 2 times"),
        ("stranger", "the reward worker's reply does not belong to the call, 2 times"),
        ("huge", "the reward worker's reply is longer than 131072 bytes, 2 times"),
        ("no end", "killed after 0.2 s"),
    ],
)
def test_a_reply_that_makes_no_sense_fails_the_call_alone(mode, reason, monkeypatch):
    """The worker is replaced, the reason is told, and no more of the reply is kept than a reply can have."""
    monkeypatch.setattr(pool, "_PROGRAM", "pool_replies")
    monkeypatch.setattr(pool, "_MARGIN_S", 0.2)
    workers = Pool(mode, workers=1, timeout_s=0.2)
    before, memory = workers.pids, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = call(workers, "any")
    assert (outcome.value, outcome.error, outcome.raised) == (None, reason, False)
    assert workers.pids != before and not still_running(before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000  # KiB
    workers.close()


def test_a_worker_that_prints_before_it_is_ready_is_an_error(monkeypatch):
    monkeypatch.setattr(pool, "_PROGRAM", "pool_replies")
    workers = Pool("loading", workers=1, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="the reward worker for loading printed before it was ready"):
        call(workers, "any")
    workers.close()
