"""Compares the metrics of runs value by value: python -m tests.same_numbers BEFORE AFTER

For changes that must not alter a number. Make each run twice, with the code of before and of after, on one machine:

    python -m gspo_jax.train --config=configs/tiny.py:dapo --config.iterations=5 --workdir=BEFORE/dapo

Every value in metrics.jsonl must be the same to the last bit, under the same names; times and throughput are left out.
"""

import sys
from pathlib import Path
from typing import Any

from gspo_jax.reporting.writers import read_metrics
from gspo_jax.types import UserError

TIMES = ("timing/", "compile/", "throughput/")
"""Prefixes of the metrics that differ from run to run."""
SHOWN = 5
"""Differences listed per run."""


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without times."""
    rows = read_metrics(folder)
    return [{n: x for n, x in row.items() if n != "time" and not n.startswith(TIMES)} for row in rows]


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """One line per value that differs between the rows of two runs."""
    found = [] if len(before) == len(after) else [f"{len(before)} rows before, {len(after)} after"]
    for a, b in zip(before, after, strict=False):
        names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
        found += [f"update {a['step']}: {name} {a.get(name)!r} -> {b.get(name)!r}" for name in names]
    return found


def main(before: str, after: str) -> int:
    """Prints a line per run of `before`; returns 1 if a value differs or a run is missing."""
    failed = False
    for folder in sorted(path.parent for path in Path(before).glob("*/metrics.jsonl")):
        old = numbers(folder)
        try:
            found = differences(old, numbers(Path(after) / folder.name))
        except UserError as error:
            found = [str(error)]
        failed |= bool(found)
        print(f"{folder.name}: {sum(map(len, old))} values in {len(old)} rows, {len(found)} differ")
        print("".join(f"  {line}\n" for line in found[:SHOWN]), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
