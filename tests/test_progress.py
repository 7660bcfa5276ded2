"""Progress output on a real pseudo-terminal, through a pipe, and on a stream that breaks."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from rich.console import Console

from gspo_jax import progress
from gspo_jax.parallel.compilation import watch_compilation
from gspo_jax.progress import Progress, duration, make_table, printable

RUN = """
    import time
    from gspo_jax.progress import Progress
    with Progress(3, label="tiny") as bar:
        for reward in (0.25, 0.5, 0.75):
            bar.phase("sampling")
            time.sleep(0.3)
            bar.advance(reward=reward, accuracy=(0.125, 0) if reward == 0.25 else None, flip_rate=0.031)
        bar.say("saved [step] 12\\x1b[2J")
        bar.table([{"prompt": "1+1=", "reward": 1.0}, {"prompt": "2+2=", "reward": None}], title="samples")
"""


class _Clock:
    """A stand-in for the module `time` in progress.py."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def _on_a_terminal(program: str, **environment: str) -> str:
    """Run the program on a pty of 100 columns and return everything it wrote, escape codes included."""
    parent, child = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    variables = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=variables)
    os.close(child)
    written = b""
    while select.select([parent], [], [], 20)[0]:
        try:
            written += os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
    os.close(parent)
    assert process.wait(20) == 0, written.decode()
    return written.decode()


def test_terminal_shows_a_live_bar():
    written = _on_a_terminal(RUN)
    assert "\x1b[?25l" in written and "\x1b[?25h" in written  # the cursor is hidden and restored
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert "sampling" in plain and "1/3" in plain and "3/3" in plain
    assert re.search(r"2/3 +elapsed 0:00:0\d  ETA 0:00:0\d", plain)
    assert (
        "reward 0.750 · accuracy 12.5% (iteration 0) · flipped 3.1%" in plain
    )  # the last known accuracy stays on display
    assert r"saved [step] 12\x1b[2J" in plain  # neither markup nor escape codes in a message take effect
    assert plain.index("saved") < plain.rindex("3/3")  # above the bar


def test_dumb_terminal_gets_plain_lines():
    written = _on_a_terminal(RUN, TERM="dumb")
    assert "\x1b" not in written and "tiny 3/3" in written


def test_a_pipe_gets_one_line_per_iteration(clock):
    stream = io.StringIO()
    with Progress(4, label="tiny", stream=stream) as bar:
        for seconds, accuracy in ((60, (0.5, 0)), (10, None), (20, None), (3, (0.75, 3))):
            bar.phase("sampling")
            bar.phase("updating")
            clock.now += seconds
            bar.advance(reward=0.5, accuracy=accuracy, tokens_per_s=1234.4, entropy=0.12345)
    usual = "reward 0.500  1,234 tok/s  entropy 0.1235"
    assert stream.getvalue().splitlines() == [
        "tiny: 4 iterations; the first one compiles and does not count for the ETA",
        "tiny 1/4  reward 0.500  accuracy 50.0% (iteration 0)  1,234 tok/s  entropy 0.1235"
        "  elapsed 0:01:00  ETA after iteration 2",
        f"tiny 2/4  {usual}  elapsed 0:01:10  ETA 0:00:20",  # 2 left x 10 s; the minute of iteration 1 is left out
        f"tiny 3/4  {usual}  elapsed 0:01:30  ETA 0:00:15",  # 1 left x (10 + 20) / 2 s
        "tiny 4/4  reward 0.500  accuracy 75.0% (iteration 3)  1,234 tok/s  entropy 0.1235  elapsed 0:01:33",
    ]


def test_time_that_compiling_took_is_shown_once_wherever_it_was(clock):
    stream = io.StringIO()
    with Progress(3, label="tiny", stream=stream) as bar:
        for seconds in (75.0, 0.5, 2.0):
            bar._compiled.seconds += seconds
            bar.advance(reward=0.5)
    lines = stream.getvalue().splitlines()[1:]
    took = ["  compiling took 0:01:15", "", "  compiling took 0:00:02"]
    assert [re.findall("  compiling took [0-9:]+", line) for line in lines] == [[t] if t else [] for t in took]


def test_a_finished_run_does_not_say_that_it_begins():
    stream = io.StringIO()
    with Progress(3, label="tiny", stream=stream, done=3):
        pass
    assert stream.getvalue() == ""


def test_a_long_line_stays_one_line_in_a_pipe():
    stream = io.StringIO()
    with Progress(1, label="tiny", stream=stream) as bar:
        bar.say("word " * 100)
    assert stream.getvalue().splitlines()[1] == "word " * 100


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_says_so_while_a_program_compiles():
    seen = []

    def look(*_, **__):
        console = Console(file=io.StringIO(), width=100)
        console.print(bar._render())
        seen.append(console.file.getvalue().splitlines()[1].strip())

    with Progress(2, label="tiny", stream=_Terminal()) as bar:
        bar.phase("update")
        end = watch_compilation(look)  # called after the bar's own
        jax.jit(lambda x: x * 3)(np.float32(1))
        end()
        bar.advance(reward=0.5)
        look()
    jax.jit(lambda x: x * 4)(np.float32(1))
    assert seen == ["update · compiling", "update", "update · reward 0.500"]


def test_eta_counts_down_within_an_iteration_and_after_a_resume(clock):
    with Progress(100, label="tiny", stream=io.StringIO(), done=90) as bar:
        bar.advance()
        assert bar.eta_s is None
        clock.now += 10
        bar.advance()
        assert bar.eta_s == 80.0
        clock.now += 4
        assert bar.eta_s == 76.0
        clock.now += 60  # longer than any iteration so far: the ETA stops at the iterations still to come
        assert bar.eta_s == 70.0


class _Broken(io.StringIO):
    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > 3:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_closed_stream_does_not_end_the_run():
    stream = _Broken()
    with Progress(50, label="tiny", stream=stream) as bar:
        for _ in range(50):
            bar.advance(reward=0.5)
        bar.table([{"a": 1}])
    assert "tiny 1/50" in stream.getvalue()
    assert stream.writes == 4  # one failed attempt, then no more


def test_ascii_streams_get_something():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(1, label="tiny → x", stream=stream) as bar:
        bar.advance(reward=0.5)
    stream.seek(0)
    assert "tiny ? x 1/1  reward 0.500" in stream.read()


def test_table_cells_and_durations():
    table = make_table([{"text": "a", "n": 0.123456, "none": None}])
    assert [column.justify for column in table.columns] == ["left", "right", "right"]
    assert [str(next(iter(column.cells))) for column in table.columns] == ["a", "0.1235", "–"]
    assert [duration(s) for s in (0, 59.2, 3661, 90061)] == ["0:00:00", "0:01:00", "1:01:01", "1d 1:01"]
    assert printable("é\t\x1b[0m\n") == "é\\t\\x1b[0m\n"
