"""SIGTERM at twelve points of a run of one process and of two: what it saves, how soon, and what is done again.

    JAX_PLATFORMS=cpu python -m tests.stops --json=stops.json

Each start of the run goes on from the stop before it; its programs were compiled by an undisturbed run. Prints a line
per stop. Exits with code 1 unless every process exited with code 0, no finished iteration was lost, a process on its
own named the phase, and the run ended with the same bits as the undisturbed one.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.pods import (
    assert_same_bits,
    field_run,
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


def stop_everywhere(count: int, folder: Path, data: Path) -> list[dict]:
    """Stop a run of `count` processes at every point, and let it end; return what each stop did."""
    words, facts = field_run(folder, data, iterations=ITERATIONS, **{"checkpoint.every": 5}), []
    for point, number in POINTS:
        codes, said = run_faulty(f"TERM:{point}:{number}:{count - 1}", words, count=count)
        assert codes == [0] * count, said
        at = stopped(folder)
        assert count > 1 or at["phase"] == ("update" if point == "updated" else point), at
        done = max((row.get("iteration", 0) for row in rows_of(folder)), default=0)
        facts.append({"processes": count, "point": f"{point}:{number}", **at, "lost": done - (at["step"] or 0)})
        print(json.dumps(facts[-1]), flush=True)
    run_processes(count, "-m", "gspo_jax.train", *words)
    return facts


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given, facts = parser.parse_args(), []
    with tempfile.TemporaryDirectory(prefix="gspo_jax-stops-") as name:
        folder = Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        data = folder / "data"
        for count in (1, 2):
            whole, torn = folder / f"whole-{count}", folder / f"stopped-{count}"
            run_processes(count, "-m", "gspo_jax.train", *field_run(whole, data, iterations=ITERATIONS))
            facts += stop_everywhere(count, torn, data)
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
