"""Signals that ask a command to end: heard at once, and counted; in real commands, with a terminal and without."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gspo_jax import exits, signals
from gspo_jax.parallel import preemption

pytestmark = pytest.mark.usefixtures("hears_hangups")
SCRIPT = """
import os, sys, time
from gspo_jax import signals
{start}
try:
    print("begun", flush=True)
    time.sleep(30)
finally:
    print("closed", flush=True)
"""


ELSEWHERE = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKS)"
"""Has another thread get the signals, so that the main one learns of them as late as in a library of C++."""


def wait_for(found, seconds: float = 10) -> None:
    """Wait until `found()` holds, for as long as it may take on a busy machine."""
    deadline = time.monotonic() + seconds
    while not found() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert found()


def test_presses_are_counted_and_what_a_closing_terminal_sends_is_one():
    """SIGTERM is none: launchers hand it on beside a Ctrl-C. What was handled before is handled again afterwards."""
    before, heard = {number: signal.getsignal(number) for number in signals.ASKS}, []
    with signals.heard(lambda *told: heard.append(told)):
        for count, (number, presses) in enumerate(
            [
                (signal.SIGTERM, 0),
                (signal.SIGHUP, 1),
                (signal.SIGHUP, 1),
                (signal.SIGINT, 2),
                (signal.SIGTERM, 2),
                (signal.SIGINT, 3),
            ]
        ):
            os.kill(os.getpid(), number)
            wait_for(lambda count=count: len(heard) > count)
            assert heard[-1] == (number, presses)
    assert {number: signal.getsignal(number) for number in signals.ASKS} == before


@pytest.mark.parametrize("sent", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)], ids=str)
def test_a_stop_is_put_down_to_ctrl_c_whatever_its_launcher_sends_beside_it(sent):
    """In either order: a process that has waited for the CPU gets a SIGTERM first."""
    noticed = []
    stop = preemption.Preemption(lambda: noticed.append(True), lambda presses: None)
    with stop.listening():
        os.kill(os.getpid(), sent[0])
        wait_for(lambda: noticed)
        os.kill(os.getpid(), sent[1])
        wait_for(lambda: stop.signal == signal.SIGINT)
    assert stop.agreed() and noticed == [True]


def test_a_forked_process_dies_of_a_signal_and_its_parent_does_not_hear_of_it():
    """As multiprocessing's children do, which a pool in a function of the user's ends by SIGTERM."""
    heard = []
    with signals.heard(lambda *told: heard.append(told)):
        for number in (signal.SIGTERM, signal.SIGHUP):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.write(writer, b"!")
                time.sleep(30)
                os._exit(0)
            os.read(reader, 1)
            os.kill(child, number)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
            os.close(reader)
            os.close(writer)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: heard)
    assert heard == [(signal.SIGTERM, 0)]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("start", "ignored", "sent", "code", "closes"),
    [
        ("signals.end_command()", (), [signal.SIGINT], 130, False),
        ("signals.in_order()", (), [signal.SIGINT], 130, True),
        ("signals.in_order()", (), [signal.SIGHUP], 129, True),
        ("signals.in_order()", (), [signal.SIGTERM, signal.SIGTERM], 143, True),
        ("signals.in_order()", (signal.SIGHUP,), [signal.SIGHUP, signal.SIGTERM], 143, True),  # nohup
        (f"signals.in_order(); {ELSEWHERE}", (), [signal.SIGTERM], 143, False),
        ("signals.in_order(); signals.is_over()", (), [*[signal.SIGINT] * 2, signal.SIGKILL], -9, False),
        ("signals.in_order(); signals.is_over()", (), [signal.SIGINT] * 3, 130, False),
    ],
)
def test_a_command_ends_with_a_sentence(start, ignored, sent, code, closes):
    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(start=start)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    for number in sent:
        time.sleep(0.2)  # it is in `sleep`
        process.send_signal(number)
    said, warned = process.communicate(timeout=20)
    assert (process.returncode, said) == (code, "closed\n" if closes else "")
    name = signal.Signals(abs(code) % exits.SIGNALLED).name
    assert warned == ("" if code < 0 else f"\n{name} has ended this command before it was done\n")
