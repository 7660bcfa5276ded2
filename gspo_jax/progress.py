"""Progress display of a run: a live bar with an ETA on a terminal, one plain line per iteration elsewhere.

If the stream breaks, e.g. because the terminal is closed, the run continues without output.
"""

import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gspo_jax.parallel.compilation import CompileCounter, watch_compilation

FORMATS: Mapping[str, Callable[[Any], str]] = {
    "reward": lambda x: f"reward {x:.3f}",
    "accuracy": lambda x: f"accuracy {x[0]:.1%} (iteration {x[1]})",  # evaluations are rare
    "held_out_reward": lambda x: f"held-out reward {x[0]:.3f} (iteration {x[1]})",
    "clip_fraction": lambda x: f"clipped {x:.1%}",
    "flip_rate": lambda x: f"flipped {x:.1%}",
    "tokens_per_s": lambda x: f"{x:,.0f} tok/s",
    "cross_entropy": lambda x: f"cross_entropy {x:.4g}",
    "stage": str,
    "compile_s": lambda x: f"compiling took {duration(x)}",
}
"""Formats for `Progress.advance`. Others are shown as `name value`."""
LEAST_COMPILE_S = 1.0
ETA_WINDOW = 50
"""Number of recent iterations used for the ETA."""


class _Console(Console):
    """Raises on a broken pipe, where rich would exit the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the pipe of the progress display is closed")


class Progress:
    """Displays completed iterations out of `total`, elapsed time and ETA. `done` counts earlier processes' iterations.

    The ETA is the mean duration of recent iterations times the number left, without a process's first, which compiles.
    """

    def __init__(self, total: int, *, label: str, stream: TextIO | None = None, done: int = 0):
        self._total, self._label, self._first, self._done = total, label, done, done
        self._stream = sys.stdout if stream is None else stream
        if isinstance(self._stream, io.TextIOWrapper) and self._stream.encoding.lower() != "utf-8":
            self._stream.reconfigure(errors="replace")
        self._phase = ""
        self._compiling = False
        self._stop_watching = lambda: None
        self._compiled = CompileCounter()
        self._compile_shown_s = 0.0
        self._shown: dict[str, Any] = {}
        self._durations: list[float] = []
        self._started = self._iteration_started = time.monotonic()
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        width = None if terminal else 120
        self._console = _Console(
            file=self._stream,
            force_terminal=terminal,
            force_jupyter=False,  # plain lines in a notebook
            width=width,
            highlight=False,
            emoji=False,
        )
        self._spinner = Spinner("dots")
        self._live = (
            Live(console=self._console, get_renderable=self._render, refresh_per_second=8) if terminal else None
        )
        self._broken = False

    def __enter__(self) -> "Progress":
        self._started = self._iteration_started = time.monotonic()
        if self._live is not None:
            self._stop_watching = watch_compilation(self._compile)
            self._safely(self._live.start)
        elif self._done < self._total:
            since = f" from iteration {self._done + 1}" if self._done else ""
            count = f"{self._total} iteration{'s' if self._total != 1 else ''}"
            self.say(f"{self._label}: {count}{since}; the first one compiles and does not count for the ETA")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_watching()
        self._compiled.stop()
        self._phase, self._compiling = "", False
        if self._live is not None:
            self._safely(self._live.stop)

    def phase(self, name: str) -> None:
        """Set the phase shown on a terminal, e.g. "sample"."""
        self._phase = name

    def _compile(self, begins: bool) -> None:
        self._compiling = begins

    def keep(self, **shown: Any) -> None:
        """Show numbers (see FORMATS) on a terminal until replaced; None removes one."""
        self._shown = {name: value for name, value in (self._shown | shown).items() if value is not None}

    def advance(self, **shown: Any) -> None:
        """End an iteration and show numbers (see FORMATS), and compilation time since the previous one.

        For None, a terminal keeps the previous number.
        """
        now = time.monotonic()
        if self._done > self._first:  # the first iteration compiles
            self._durations = [*self._durations, now - self._iteration_started][-ETA_WINDOW:]
        self._iteration_started = now
        self._done += 1
        fresh = {name: value for name, value in shown.items() if value is not None}
        self._shown.pop("compile_s", None)
        compiled_s, self._compile_shown_s = self._compiled.seconds - self._compile_shown_s, self._compiled.seconds
        if compiled_s >= LEAST_COMPILE_S:
            fresh["compile_s"] = compiled_s
        self.keep(**fresh)
        if self._live is None:
            numbers = "".join("  " + number for number in _shown(fresh))
            self.say(f"{self._label} {self._done}/{self._total}{numbers}  {self._clock()}")

    def say(self, text: str) -> None:
        """Print a line, on a terminal above the bar."""
        # Without a terminal, lines stay whole: rich's soft_wrap disables wrapping.
        self._safely(lambda: self._console.print(Text(printable(text)), soft_wrap=self._live is None))

    def table(self, rows: Sequence[Mapping[str, Any]], *, title: str = "") -> None:
        """Print a table with a line per row, and columns from the first row's keys."""
        if rows:
            self._safely(lambda: self._console.print(make_table(rows, title=title)))

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds left. None until the second iteration has ended."""
        left = self._total - self._done
        if left <= 0:
            return 0.0
        if not self._durations:
            return None
        mean = sum(self._durations) / len(self._durations)
        running = min(time.monotonic() - self._iteration_started, mean)
        return left * mean - running

    def _clock(self) -> str:
        elapsed = f"elapsed {duration(time.monotonic() - self._started)}"
        eta = self.eta_s
        if eta is not None:
            return f"{elapsed}  ETA {duration(eta)}" if self._done < self._total else elapsed
        return f"{elapsed}  ETA after iteration {self._first + 2}" if self._first + 2 < self._total else elapsed

    def _render(self) -> RenderableType:
        first = Table.grid(padding=(0, 1), expand=True)
        first.add_column(no_wrap=True)
        first.add_column(no_wrap=True)
        first.add_column(ratio=1, min_width=10)
        first.add_column(no_wrap=True)
        first.add_column(no_wrap=True)
        first.add_row(
            self._spinner if self._done < self._total else Text("✓", style="green"),
            Text(self._label, style="bold"),
            ProgressBar(total=self._total, completed=self._done, complete_style="cyan", finished_style="green"),
            Text(f"{self._done}/{self._total}"),
            Text(self._clock(), style="dim"),
        )
        words = [(self._phase, "cyan"), ("compiling" if self._compiling else "", "yellow")]
        words += [(number, "") for number in _shown(self._shown)]
        second = Text("  ") + Text(" · ").join(Text(*word) for word in words if word[0])
        second.no_wrap, second.overflow = True, "ellipsis"
        return Group(first, second)

    def _safely(self, show: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            show()
            self._stream.flush()
        except (OSError, ValueError):  # a closed terminal must not end a run of days
            self._broken = True


def make_table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """Return a rich table: numbers right-aligned, floats to four figures, texts without markup."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        numbers = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in rows[0]))
    return table


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, or from one day on as `Nd h:mm`."""
    whole = math.ceil(max(seconds, 0.0))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}"


def printable(text: str) -> str:
    """Escape control characters except line feeds."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _shown(numbers: Mapping[str, Any]) -> list[str]:
    usual = [write(numbers[name]) for name, write in FORMATS.items() if name in numbers]
    return usual + [f"{name} {value:.4g}" for name, value in numbers.items() if name not in FORMATS]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
