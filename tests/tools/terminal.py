"""Draw what the terminal shows during a run, as docs/terminal.svg.

    python -m tests.tools.terminal --at=40 --out=docs/terminal.svg

Trains configs/tiny.py, as `bash launch/local.sh` does, and ends in the updates after iteration `--at`. What is drawn is
what the run's own `Progress` prints and renders.
"""

import argparse
import io
import re
import tempfile
from contextlib import chdir, suppress
from pathlib import Path

from rich.console import Console

from gspo_jax import cli
from gspo_jax.progress import Progress
from gspo_jax.train import train

COLUMNS = 112


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Drawn(Exception):
    pass


def record(console: Console, *, at: int) -> None:
    """Have every `Progress` print to `console` too, and raise `_Drawn` after its bar at iteration `at`."""
    begin, say, phase, leave = Progress.__init__, Progress.say, Progress.phase, Progress.__exit__

    def on_a_terminal(bar: Progress, *given, **named) -> None:
        begin(bar, *given, **named, stream=_Terminal())

    def also_say(bar: Progress, text: str) -> None:
        say(bar, text)
        console.print(text, markup=False, highlight=False)

    def look(bar: Progress, name: str) -> None:
        phase(bar, name)
        if name == "update" and bar._done == at:
            console.print(bar._render())
            raise _Drawn

    def end(bar: Progress, *exception: object) -> None:
        leave(bar, *exception)
        if exception[0] is None:
            console.print(bar._render())

    Progress.__init__, Progress.say, Progress.phase, Progress.__exit__ = on_a_terminal, also_say, look, end


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/terminal.svg"))
    given = parser.parse_args()
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True)
    record(console, at=given.at)
    config = cli.load_config("configs/tiny.py")
    out = given.out.absolute()
    cli.prepare(config)
    with tempfile.TemporaryDirectory() as folder, chdir(folder), suppress(_Drawn):
        train(config, "runs/tiny")
    svg = console.export_svg(title="bash launch/local.sh")
    out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
