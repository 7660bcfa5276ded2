"""Many programs in one sandbox, every tenth an attack: `python -m tests.tools.soak_sandbox --minutes=15 --json=FILE`.

Prints, once a minute, how many programs were judged, how many of them right ones, how many processes, descriptors and
bytes the boxes and this process hold, and how many bytes of the machine no process is seen to hold; ends with exit code
1 if a verdict was wrong, or if any of these has grown since the first minute.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import psutil

from gspo_jax.parallel import processes
from gspo_jax.sandbox import Request, Sandbox, Verdict

FOLDER = Path(__file__).parents[1] / "attacks"
ATTACKS = [file.read_text() for group in ("forgeries", "memory") for file in sorted((FOLDER / group).iterdir())]
RIGHT = [file.read_text() for file in sorted((FOLDER / "right").iterdir())]
TESTS = {"tests": ["assert f(1) == 2"], "given": [], "setup": "", "entry_point": None}
WALL_S = 1.0
SLACK = {"processes": 4, "descriptors": 4, "bytes": 64 << 20, "unseen": 256 << 20}
"""How much each may be above its value after the first minute: a program may be running at the time of a look."""


def programs() -> Iterator[tuple[Request, bool]]:
    """Endless programs, with whether they pass."""
    attacks, rights = itertools.cycle(ATTACKS), itertools.cycle(RIGHT)
    for number in itertools.count():
        if number % 10 == 9:
            yield Request(next(attacks), TESTS, WALL_S), False
        else:
            right = number % 3 > 0
            yield Request(next(rights) if right else f"def f(x):\n    return x + {number + 2}", TESTS, WALL_S), right


def held(boxes: list[int]) -> dict[str, int]:
    """Return what boxes and this process hold."""
    tree = [psutil.Process(), *(psutil.Process(box) for box in boxes)]
    tree += [child for box in boxes for child in psutil.Process(box).children(recursive=True)]
    total = 0
    for process in tree:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # a program that has just ended
            continue
    with open("/proc/meminfo", encoding="ascii") as file:
        machine = {name: int(size.split()[0]) << 10 for name, size in (line.split(":") for line in file)}
    unseen = machine["Shmem"] + machine["SUnreclaim"]
    return {"processes": len(tree), "descriptors": len(os.listdir("/proc/self/fd")), "bytes": total, "unseen": unseen}


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begun, looks, wrong, endless = time.monotonic(), [], [], programs()
    judged = {True: 0, False: 0}

    def take(request: Request, passes: bool, verdict: Verdict) -> None:
        judged[passes] += 1
        if verdict.passed != (passes,):
            wrong.append((request.program, str(verdict)))

    with Sandbox(workers=processes.own_cores()) as sandbox:
        while time.monotonic() - begun < 60 * given.minutes:
            until = time.monotonic() + 60
            asked: dict[Future[Verdict], tuple[Request, bool]] = {}
            while time.monotonic() < until:
                request, passes = next(endless)
                asked[sandbox.submit(request, lambda verdict: verdict)] = (request, passes)
                while len(asked) >= 4 * processes.own_cores():
                    for future in wait(asked, return_when="FIRST_COMPLETED").done:
                        take(*asked.pop(future), future.result())
            for future, (request, passes) in asked.items():
                take(request, passes, future.result())
            counts = {"judged": sum(judged.values()), "right": judged[True], "wrong": len(wrong)}
            looks.append({**counts, **held(sandbox.pids)})
            print(looks[-1], flush=True)
    first, last = looks[0], looks[-1]
    grown = [name for name, more in SLACK.items() if last[name] > first[name] + more]
    facts = {"seconds": round(time.monotonic() - begun), "looks": looks, "wrong": wrong, "grown": grown}
    if given.json:
        given.json.write_text(json.dumps(facts, indent=2))
    for program, verdict in wrong[:5]:
        print(program, verdict, sep="\n")
    return int(bool(wrong or grown))


if __name__ == "__main__":
    sys.exit(main())
