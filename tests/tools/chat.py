"""Record a chat with a run, as docs/chat.svg.

    python -m tests.tools.chat --workdir=runs/tiny --out=docs/chat.svg

Types LINES into `gspo-jax sample` on a terminal of tmux, each once the reply to the one before is there, and draws what
the terminal shows at the end.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 96, 40
LINES = ("584+605=?", "/reset", "812-357=?", "/reset", "306+607=?")
SESSION = "gspo_jax-chat"


def tmux(*words: str) -> str:
    return subprocess.run(["tmux", "-L", SESSION, *words], check=True, capture_output=True, text=True).stdout


def shown() -> str:
    """Return the terminal's lines, with colours."""
    return tmux("capture-pane", "-p", "-e", "-t", SESSION).rstrip()


def settle(prompts: int, timeout_s: float = 300) -> None:
    """Wait until so many prompts are there, the last of them empty."""
    until = time.monotonic() + timeout_s
    while True:
        lines = tmux("capture-pane", "-p", "-t", SESSION).rstrip().split("\n")
        if sum(line.startswith(">") for line in lines) == prompts and lines[-1].strip() == ">":
            return
        if time.monotonic() > until:
            raise TimeoutError("\n".join(lines))
        time.sleep(0.2)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", default="runs/tiny")
    parser.add_argument("--out", type=Path, default=Path("docs/chat.svg"))
    given = parser.parse_args()
    command = shlex.join([sys.executable, "-m", "gspo_jax", "sample", f"--workdir={given.workdir}"])
    tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(ROWS), command)
    try:
        for number, line in enumerate(LINES, start=1):
            settle(number)
            tmux("send-keys", "-t", SESSION, "-l", line)
            tmux("send-keys", "-t", SESSION, "Enter")
        settle(len(LINES) + 1)
        text = shown()
    finally:
        tmux("kill-session", "-t", SESSION)
    console = Console(record=True, file=StringIO(), width=COLUMNS, force_terminal=True)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=f"gspo-jax sample --workdir={given.workdir}")
    given.out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
