"""Programs that attack the sandbox: each is contained and passes no test, and the same sandbox judges the next one."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from gspo_jax.errors import UserError
from gspo_jax.sandbox import Request, Sandbox

pytestmark = pytest.mark.faults

WALL_S = 1.0
TESTS = ["assert f(1) == 2", "assert all(x in (2,) for x in [f(1)]) and len(str(f(1))) == 1"]
OF_OBJECTS = [
    *("assert V(1) + V(2) == V(3) and V(1) != V(2)", "assert 1 < V(2) + V(3) < 9 and 4 in (V(2) + V(3),)"),
    "with V(1):\n    assert V(1) is None",
]
"""Tests of a class, that name it: a program may answer what it is asked, and must not decide what is right."""
RIGHT = "def f(x):\n    return x + 1"
SECRET = "the expected output is 7319"

ATTACKS = Path(__file__).parents[1] / "attacks"
"""Programs that try to pass the tests without the function, or use up what there is (forgeries); that print what they
got hold of, and an empty list if that is nothing (escapes), or how many MiB they hold that no process of theirs is seen
to hold, if that is much (memory); classes that try to be what a test compares them with (objects); hostile checkers;
and, beside them, programs that are right and use much of what there is."""


def attacks(group):
    """Mark a test that is run with the source of each attack of a group."""
    files = sorted((ATTACKS / group).iterdir())
    return pytest.mark.parametrize("attack", [file.read_text() for file in files], ids=[file.stem for file in files])


@pytest.fixture(scope="module")
def sandbox():
    try:
        started = Sandbox(workers=1)
    except UserError as error:
        pytest.skip(str(error))
    with started:
        yield started


@pytest.fixture(autouse=True)
def the_next_one_is_judged(sandbox):
    (box,) = sandbox.pids
    yield
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and len(inside(box)) > 3:
        time.sleep(0.05)
    assert len(inside(box)) <= 3, "bubblewrap's first process, the judge and the spawner"
    assert functions(sandbox, RIGHT).passed == (True, True)
    assert sandbox.pids == [box], "the same sandbox"


def inside(box):
    """Return all processes in a box."""
    return psutil.Process(box).children(recursive=True)


def processor_s(processes):
    """Return the processor seconds of processes and of those that they waited for."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def functions(sandbox, program, wall_s=WALL_S, tests=TESTS):
    asked = {"tests": tests, "given": [], "setup": "", "entry_point": None}
    return sandbox.judge(Request(program, asked, wall_s))


def run(sandbox, program, text="", wall_s=WALL_S):
    return sandbox.judge(Request(program, {"inputs": [text]}, wall_s))


@attacks("forgeries")
def test_no_test_is_passed(sandbox, attack):
    begun = time.monotonic()
    verdict = functions(sandbox, attack)
    assert verdict.passed == (False, False) and not verdict.broken, verdict
    assert time.monotonic() - begun < WALL_S + 7  # on a busy machine, too, where it is tried twice


@attacks("objects")
def test_no_object_passes_for_another(sandbox, attack):
    """A comparison that only the program could decide leaves no verdict; none is ever decided for it."""
    for test in OF_OBJECTS:
        verdict = functions(sandbox, attack, tests=[test])
        assert verdict.passed == (False,) or (verdict.broken and not verdict.passed), verdict


def test_a_program_sees_no_test_and_changes_nothing_that_it_was_not_handed(sandbox):
    """What a test expects stays what it is, and the source of its classes with methods stays where it is."""
    look = "import gc\ndef f(x):\n    x.clear()\n    secret = str(7300 + len('x' * 19))\n"
    look += "    return any(secret in repr(o) for o in gc.get_objects())"
    test = "class Secret:\n    def reveal(self):\n        return 7319\nwanted, given = [7319], [1]\n"
    unseen, kept = test + "assert f(given) is False and given == []", test + "f(given)\nassert wanted == []"
    assert functions(sandbox, look, tests=[unseen, kept]).passed == (True, False)
    handed = functions(sandbox, "def f(x):\n    return 1", tests=[test + "assert f(Secret()) == 1"])
    assert "a class that the program does not have" in handed.broken


@attacks("escapes")
def test_nothing_is_found(sandbox, attack):
    verdict = run(sandbox, attack, wall_s=5)
    assert verdict.output.strip().replace(" 0", "") == "[]", verdict


@attacks("right")
def test_a_program_that_means_no_harm_passes(sandbox, attack):
    assert functions(sandbox, attack, wall_s=5).passed == (True, True)


@attacks("memory")
def test_no_memory_is_held_that_is_not_counted(sandbox, attack):
    verdict = run(sandbox, attack, wall_s=10)
    assert verdict.output == "[]\n" or "MiB of memory" in verdict.why, verdict


@pytest.mark.parametrize("seconds", [99, 0.05], ids=["that_stay", "that_end"])
def test_processes_share_one_budget_of_processor_time(sandbox, seconds):
    """They get no more than that though none of them uses it up, and on a busy machine less."""
    program = (
        "import os, time\nfor number in range(1000):\n    if os.fork() == 0:\n"
        f"        while time.process_time() < {seconds}:\n            pass\n"
        "        os._exit(0)\n    if number >= 6:\n        os.wait()"
    )
    (box,), wall_s, budget_s, slack_s, used_s = sandbox.pids, 2, 3, 0.5, 0.0
    standing = set(inside(box))  # left out: they have waited for an earlier try's processes
    future = sandbox.submit(Request(program, {"inputs": [""]}, wall_s), lambda verdict: verdict)
    while not future.done():
        used_s = max(used_s, processor_s(set(inside(box)) - standing))
        time.sleep(0.02)
    why = future.result().why
    assert wall_s / 4 < used_s < budget_s + slack_s, why
    assert "of processor time" in why or (used_s < budget_s and "no end within" in why), (why, used_s)


def test_a_lock_is_seen_by_no_other_program():
    """Of a file that all see; what locks its own files, as sqlite3 does, goes on."""
    take = (
        "import fcntl, os, sqlite3, time\nf = open(os.__file__)\nfcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)\ntime.sleep(0.5)\nd = sqlite3.connect('/tmp/d')\n"
        "d.execute('create table t (a)')\nd.commit()\nprint('taken')"
    )
    with Sandbox(workers=2) as two:
        asked = [two.submit(Request(take, {"inputs": [""]}, 5.0), lambda verdict: verdict) for _ in range(2)]
        assert [future.result().output for future in asked] == ["taken\n"] * 2


@pytest.mark.parametrize(
    "attack", ["loops_in_sixty_sessions", "loops_in_children_that_end", "starts_threads_without_end"]
)
def test_a_right_program_beside_attacks_passes(attack):
    """On the one processor that it shares with them."""
    right = "import time\ndef f(x):\n    while time.process_time() < 0.1:\n        pass\n    return x + 1"
    attacks_on = (ATTACKS / "forgeries" / f"{attack}.py").read_text()
    asked = {"tests": TESTS[:1], "given": [], "setup": "", "entry_point": None}
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        with Sandbox(workers=3) as three:
            programs = [attacks_on, attacks_on, right] * 2
            futures = [three.submit(Request(p, asked, WALL_S), lambda verdict: verdict) for p in programs]
            assert [future.result().passed == (True,) for future in futures] == [False, False, True] * 2
    finally:
        os.sched_setaffinity(0, processors)


def test_a_program_that_waited_for_a_processor_is_tried_again():
    """While everything else on this machine, for a while, takes what there is."""
    right = "import time\nwhile time.process_time() < 0.1:\n    pass\nprint(1)"
    hog = "import os, time\nuntil = time.monotonic() + 1.8\nfor _ in range(6):\n    os.fork()\nos.setsid()\n"
    hog += "while time.monotonic() < until:\n    pass"
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        with Sandbox(workers=1) as one, subprocess.Popen([sys.executable, "-c", hog]):
            time.sleep(0.3)
            assert run(one, right).output == "1\n"
    finally:
        os.sched_setaffinity(0, processors)


def test_a_flood_of_output_is_cut(sandbox):
    assert "bytes of output" in run(sandbox, "while True:\n    print('x' * 10000)").why


def test_a_flood_of_errors_is_cut(sandbox):
    verdict = run(sandbox, "import sys\nwhile True:\n    sys.stderr.write('x' * 10000)")
    assert "bytes of output" in verdict.why


@pytest.mark.parametrize("kind", ["TCP", "UDP", "abstract"])
def test_no_socket_reaches_out(sandbox, kind):
    """A listener of the test's own on this machine hears nothing."""
    family = socket.AF_UNIX if kind == "abstract" else socket.AF_INET
    heard = []
    with socket.socket(family, socket.SOCK_DGRAM if kind == "UDP" else socket.SOCK_STREAM) as listener:
        listener.bind("\0gspo_jax-test" if kind == "abstract" else ("127.0.0.1", 0))
        listener.settimeout(1)
        if kind != "UDP":
            listener.listen()

        def listen():
            with contextlib.suppress(OSError):
                heard.append(listener.recv(10) if kind == "UDP" else listener.accept())

        thread = threading.Thread(target=listen)
        thread.start()
        where = "'\\0gspo_jax-test'" if kind == "abstract" else f"('127.0.0.1', {listener.getsockname()[1]})"
        sort = "SOCK_DGRAM" if kind == "UDP" else "SOCK_STREAM"
        program = (
            f"import socket\ns = socket.socket(socket.{family.name}, socket.{sort})\ntry:\n    s.connect({where})\n"
            "    s.send(b'hello')\n    print('sent')\nexcept OSError as error:\n    print(error)"
        )
        verdict = run(sandbox, program)
        assert kind == "UDP" or "sent" not in verdict.output, verdict
        thread.join()
    assert not heard


def test_nothing_is_left_for_the_next_program(sandbox):
    names = ["a\nb", "-rf", "$(reboot)", "\u202e", "x" * 200]
    leave = f"for name in {names!r}:\n    open('/tmp/' + name, 'w').close()\nprint('left')"
    assert run(sandbox, leave).output == "left\n"
    assert run(sandbox, "import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))").output == "[] []\n"


def test_expected_outputs_are_not_in_reach(sandbox):
    """Not of this test, nor of one before it: a program looks at all text and bytes that its process holds."""
    find = "import gc\nprint(any('output is ' + str(7300 + len('x' * 19)) in repr(o) for o in gc.get_objects()))"
    asked = {"inputs": ["1"], "expected": [SECRET], "compare": "token", "checker": "", "stop": False}
    assert sandbox.judge(Request(find, asked, WALL_S)).passed == (False,)
    asked["expected"] = ["False"]
    assert sandbox.judge(Request(find, asked, WALL_S)).passed == (True,)


def test_input_that_is_not_read_does_no_harm(sandbox):
    assert run(sandbox, "print(1)", text="x" * (1 << 22)).output == "1\n"
    assert "no end" in run(sandbox, "import os\nos.close(1)\nos.close(2)\nwhile True:\n    pass").why
    assert run(sandbox, "import os\nos.close(0)\nos.close(1)\nos.close(2)", text="x" * (1 << 22)).output == ""


@attacks("checkers")
def test_a_hostile_checker_gives_no_score(sandbox, attack):
    asked = {"inputs": ["1"], "expected": ["2"], "compare": "token", "checker": attack, "stop": False}
    verdict = sandbox.judge(Request("print(2)", asked, WALL_S))
    assert verdict.broken and not verdict.passed


@pytest.mark.parametrize(
    ("reads", "output"),
    [
        ("10 ** int(output)", "10 ** 9"),
        ("[0] * int(output)", "2 * 10 ** 9"),
        ("__import__('re').match('(a+)+$', output)", "'a' * 60 + 'b'"),
        ("eval(output)", "'__import__(\"os\")._exit(0)'"),
        ("__import__('json').loads(output)", "'[' * 10 ** 6"),
    ],
)
def test_output_that_breaks_a_checker_is_wrong(sandbox, reads, output):
    """It hangs, eats memory, ends or raises on the output, and not on what is expected: 0 and no missing score."""
    checker = f"def check(input, expected, output):\n    {reads}\n    return output.strip() == expected"
    asked = {"inputs": ["1"] * 2, "expected": ["3", "4"], "compare": "token", "checker": checker, "stop": False}
    verdict = sandbox.judge(Request(f"print({output})", asked, WALL_S))
    assert verdict.passed == (False, False) and not verdict.broken, verdict
    assert sandbox.judge(Request("print(3)", asked, WALL_S)).passed == (True, False)


def test_a_judge_that_is_killed_is_replaced(sandbox):
    """Killed from outside, as the kernel does when memory is short; the program is judged all the same."""
    with Sandbox(workers=1) as own:
        (box,) = own.pids
        threading.Timer(0.3, lambda: os.kill(box, 9)).start()
        asked = {"inputs": ["1"], "expected": ["2"], "compare": "token", "checker": "", "stop": False}
        verdict = own.judge(Request("import time\ntime.sleep(0.6)\nprint(2)", asked, 5.0))
        assert verdict.passed == (True,) and own.pids != [box]
        assert not psutil.pid_exists(box)


def test_boxes_end_with_the_process_that_started_them(tmp_path):
    """Also if that is killed while a program runs."""
    program = (
        "from gspo_jax.sandbox import Request, Sandbox\ns = Sandbox(workers=2)\nprint(*s.pids, flush=True)\n"
        "s.judge(Request('while True: pass', {'inputs': ['']}, 100.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    boxes = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)
    everything = [child for box in boxes for child in inside(box)]
    assert len(everything) > 6
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(everything, timeout=2)
    assert not alive
