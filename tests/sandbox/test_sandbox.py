"""The sandbox's filter of system calls, and who waits for whom: without a sandbox."""

import errno
import platform
import random
import struct
import threading
import time

import pytest

from gspo_jax import sandbox as sandboxes
from gspo_jax.sandbox.box import BoxFailed
from gspo_jax.sandbox.inside import calls

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
REFUSED, ALLOWED, PRETENDED = 0x50000 | errno.ENOSYS, 0x7FFF0000, 0x50000


def answer(program, machine, number, *arguments):
    """Run a filter as the kernel does: docs.kernel.org/networking/filter.html."""
    data = struct.pack("<IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    place, held = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("<HBBI", program, 8 * place)
        place += 1
        match code:
            case 0x20:
                (held,) = struct.unpack_from("<I", data, value)
            case 0x54:
                held &= value
            case 0x06:
                return value
            case _:
                place += yes if {0x15: held == value, 0x35: held >= value, 0x45: held & value != 0}[code] else no


@pytest.fixture(params=["x86_64", "aarch64"])
def answers(request, monkeypatch):
    """What the filter for a machine answers to a call, by its name or number."""
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    program, column = calls.call_filter(), ("x86_64", "aarch64").index(request.param)
    machine = (X86_64, AARCH64)[column]

    def answers(call, *arguments, machine=machine):
        number = call if isinstance(call, int) else (calls._LOOKED_AT | calls._REFUSED)[call][column]
        return answer(program, machine, number, *arguments)

    return answers


@pytest.mark.parametrize(
    ("call", "arguments", "wanted"),
    [
        ("clone", (17,), ALLOWED),
        ("clone", (0x10000000 | 17,), REFUSED),  # CLONE_NEWUSER
        ("clone", (0x40000000 | 17,), REFUSED),  # CLONE_NEWNET
        ("fcntl", (3, 5), ALLOWED),  # F_GETLK
        ("fcntl", (3, 6), PRETENDED),
        ("fcntl", (3, 38), PRETENDED),
        ("fcntl", (3, 1024), REFUSED),
        ("fcntl", (3, 1030), ALLOWED),  # F_DUPFD_CLOEXEC
        ("fcntl", (3, 1031), PRETENDED),
        ("flock", (3, 2), PRETENDED),
        ("mmap", (0, 4096, 3, 0x22), ALLOWED),  # private and anonymous
        ("mmap", (0, 4096, 3, 0x01), ALLOWED),  # a shared file
        ("mmap", (0, 4096, 3, 0x21), REFUSED),
        ("mmap", (0, 4096, 3, 0x23), REFUSED),  # MAP_SHARED_VALIDATE
        ("mmap", (0, 4096, 3, 0x40022), REFUSED),
        ("rt_sigaction", (2, 1 << 20), ALLOWED),
        ("rt_sigaction", (17, 0), ALLOWED),
        ("rt_sigaction", (17, 1 << 20), PRETENDED),
        ("rt_sigaction", (17, 1 << 32), PRETENDED),
        ("setsid", (), PRETENDED),
        ("setsockopt", (3, 1, 2), ALLOWED),  # SO_REUSEADDR
        ("setsockopt", (3, 6, 7), ALLOWED),  # of TCP
        ("setsockopt", (3, 1, 7), PRETENDED),
        ("setsockopt", (3, 1, 33), PRETENDED),
        ("socket", (1, 1), ALLOWED),
        ("socket", (2, 1), REFUSED),
        ("socket", (40, 1), REFUSED),  # AF_VSOCK
        ("socketpair", (1, 1), ALLOWED),
        ("socketpair", (30, 5), REFUSED),  # AF_TIPC
        *((name, (), REFUSED) for name in ("memfd_create", "ptrace", "quotactl_fd", "unshare", "vmsplice")),
        *((number, (), REFUSED) for number in (457, 458, 467, 470, 600, 1 << 30, (1 << 30) + 9, (1 << 32) - 1)),
        *((number, (), ALLOWED) for number in (436, 437, 439, 449, 456)),  # close_range to futex_requeue
    ],
)
def test_the_filter_decides_by_number_and_arguments(answers, call, arguments, wanted):
    assert answers(call, *arguments) == wanted
    assert answers(call, *arguments, machine=0x40000003) == REFUSED, "a call of 32-bit x86"


class FakeBox:
    """Replies what a program says, the second time what it says last; keeps how many were beside one that was alone."""

    busy = beside = 0
    lock = threading.Lock()

    def __init__(self, *, unsafe):
        self.pid = id(self)

    def judge(self, request, *, within_s):
        alone = request["limits"]["final"]
        if request["program"] == ["print(1)"]:
            return {"output": "1\n", "why": ""}
        with FakeBox.lock:
            FakeBox.busy += 1
        time.sleep(0.001)
        with FakeBox.lock:
            FakeBox.beside = max(FakeBox.beside, alone * (FakeBox.busy - 1))
            FakeBox.busy -= 1
        reply = request["program"][0] if not alone else request["program"][-1]
        if reply == "fails":
            raise BoxFailed("the sandbox has ended")
        return {"starved": True} if reply == "starved" else {"passed": [reply == "passes"], "why": ""}

    def close(self):
        pass


def test_a_second_try_has_nothing_beside_it(monkeypatch):
    """Of any number at a time, and none waits forever; a program that only then passes has passed."""
    monkeypatch.setattr(sandboxes, "Box", FakeBox)
    kinds = [("passes",), ("sleeps",), ("starved", "passes"), ("starved", "sleeps"), ("fails", "passes"), ("fails",)]
    wanted = [(True,), (False,), (True,), (False,), (True,), ()]
    order = random.Random(0).choices(range(6), k=120)
    with sandboxes.Sandbox(workers=8, unsafe=True) as sandbox:
        asked = [sandbox.submit(sandboxes.Request(kinds[kind], {"tests": []}, 1.0), lambda v: v) for kind in order]
        verdicts = [future.result(timeout=30) for future in asked]
    assert [verdict.passed for verdict in verdicts] == [wanted[kind] for kind in order]
    assert FakeBox.beside == 0 and all(bool(v.broken) == (k == 5) for v, k in zip(verdicts, order, strict=True))


def test_closing_ends_those_that_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(sandboxes, "Box", FakeBox)
    sandbox = sandboxes.Sandbox(workers=4, unsafe=True)
    with sandbox._alone():
        asked = [sandbox.submit(sandboxes.Request("passes", {"tests": []}, 1.0), lambda v: v) for _ in range(8)]
        sandbox.close()
    assert all(future.cancelled() or future.result(timeout=5).passed == (True,) for future in asked)
