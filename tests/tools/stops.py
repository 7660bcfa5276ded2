"""A signal at twelve points of a run of one process and of two: what it saves, how soon, and what is done again.

    JAX_PLATFORMS=cpu python -m tests.tools.stops --json=stops.json
    JAX_PLATFORMS=cpu python -m tests.tools.stops --signal=INT --signal=INTx2 --signal=HUP --signal=HUPx2 --launcher

Each start of the run goes on from the stop before it; its programs were compiled by an undisturbed run. With
`--launcher`, local.sh or cpu_pod.sh starts the processes, and all of them get the signal, as from a terminal. Prints a
line per stop. Exits with code 1 unless every process exited with code 0, no finished iteration was lost, a process on
its own named the phase, and the run ended with the same bits as the undisturbed one.
"""

import argparse
import json
import os
import signal as signal_lib
import sys
import tempfile
from pathlib import Path

from tests.pods import (
    assert_same_bits,
    copy_of_launchers,
    field_run,
    launch_faulty,
    rows_of,
    run_faulty,
    run_processes,
    stopped,
)

ITERATIONS = 8
POINTS = (
    ("evaluate", 1),
    ("reshard", 1),
    ("data", 1),
    ("sample", 1),
    ("sample", 2),
    ("reward", 1),
    ("score", 1),
    ("update", 1),
    ("updated", 1),
    ("evaluate", 1),
    ("reshard", 2),
    ("reward", 2),
)
"""Points of tests/faulty.py, and which of their occurrences after the start."""


def stop_everywhere(signal: str, count: int, folder: Path, data: Path, launchers: Path | None) -> list[dict]:
    """Stop a run of `count` processes at every point, and let it end; return what each stop did."""
    words, facts = field_run(folder, data, iterations=ITERATIONS, **{"checkpoint.every": 5}), []
    for point, number in POINTS:
        fault = f"{signal}:{point}:{number}:{count - 1}"
        if launchers is None:
            codes, said = run_faulty(fault, words, count=count)
        else:
            codes, said = launch_faulty(f"group-{fault}", words, count=count, root=launchers)
        assert not any(codes), said
        assert launchers is None or said.endswith("the run is saved; start it again with the same command\n"), said
        at = stopped(folder)
        assert count > 1 or at["phase"] == ("update" if point == "updated" else point), at
        done = max((row.get("iteration", 0) for row in rows_of(folder)), default=0)
        facts.append({"signal": signal, "processes": count, "point": f"{point}:{number}", **at})
        facts[-1]["lost"] = done - (at["step"] or 0)
        print(json.dumps(facts[-1]), flush=True)
    run_processes(count, "-m", "gspo_jax.train", *words)
    return facts


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--signal", action="append", help="TERM by default; INTx2: SIGINT twice; may be given again")
    parser.add_argument("--launcher", action="store_true")
    parser.add_argument("--processes", type=int, action="append", help="1 and 2 by default; may be given again")
    given, facts = parser.parse_args(), []
    for ignored in (signal_lib.SIGINT, signal_lib.SIGHUP):  # by nohup, or a shell that starts this in its background
        signal_lib.signal(ignored, signal_lib.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="gspo_jax-stops-") as name:
        folder = Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        data = folder / "data"
        launchers = copy_of_launchers(folder / "repository") if given.launcher else None
        for count in given.processes or (1, 2):
            whole = folder / f"whole-{count}"
            run_processes(count, "-m", "gspo_jax.train", *field_run(whole, data, iterations=ITERATIONS))
            for signal in given.signal or ["TERM"]:
                torn = folder / f"stopped-{count}-{signal}"
                facts += stop_everywhere(signal, count, torn, data, launchers)
                assert_same_bits(whole, torn, step=ITERATIONS)
    if given.json is not None:
        given.json.write_text(json.dumps(facts, indent=2) + "\n")
    worst = max(fact["seconds"] for fact in facts)
    print(
        f"{len(facts)} stops, {sum(fact['lost'] for fact in facts)} iterations lost, at most {worst:.1f} s to the end"
    )
    return 1 if any(fact["lost"] for fact in facts) else 0


if __name__ == "__main__":
    sys.exit(main())
