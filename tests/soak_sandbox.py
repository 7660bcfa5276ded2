"""Many programs in one sandbox, every tenth an attack: `python -m tests.soak_sandbox --minutes=15 --json=FILE`.

Prints, once a minute, how many programs were judged, and how many processes, descriptors and bytes the boxes and this
process hold; ends with exit code 1 if a verdict was wrong, or if any of these has grown since the first minute.
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

ATTACKS = [file.read_text() for file in sorted((Path(__file__).parent / "attacks" / "forgeries").iterdir())]
TESTS = {"tests": ["assert f(1) == 2"], "given": [], "setup": "", "entry_point": None}
WALL_S = 1.0
SLACK = {"processes": 4, "descriptors": 4, "bytes": 64 << 20}
"""How much each may be above its value after the first minute: a program may be running at the time of a look."""


def programs() -> Iterator[tuple[Request, bool]]:
    """Endless programs, with whether they pass."""
    attacks = itertools.cycle(ATTACKS)
    for number in itertools.count():
        if number % 10 == 9:
            yield Request(next(attacks), TESTS, WALL_S), False
        else:
            right = number % 3 > 0
            yield Request(f"def f(x):\n    return x + {1 if right else number + 2}", TESTS, WALL_S), right


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
    return {"processes": len(tree), "descriptors": len(os.listdir("/proc/self/fd")), "bytes": total}


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begun, looks, wrong, judged, endless = time.monotonic(), [], [], 0, programs()
    with Sandbox(workers=processes.own_cores()) as sandbox:
        while time.monotonic() - begun < 60 * given.minutes:
            until = time.monotonic() + 60
            asked: dict[Future[Verdict], tuple[Request, bool]] = {}
            while time.monotonic() < until:
                request, passes = next(endless)
                asked[sandbox.submit(request, lambda verdict: verdict)] = (request, passes)
                while len(asked) >= 4 * processes.own_cores():
                    for future in wait(asked, return_when="FIRST_COMPLETED").done:
                        request, passes = asked.pop(future)
                        judged += 1
                        if future.result().passed != (passes,):
                            wrong.append((request.program, str(future.result())))
            for future, (request, passes) in asked.items():
                judged += 1
                if future.result().passed != (passes,):
                    wrong.append((request.program, str(future.result())))
            looks.append({"judged": judged, "wrong": len(wrong), **held(sandbox.pids)})
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
