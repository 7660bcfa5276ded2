"""Makes runs of many kinds, and compares the metrics of two such makings value by value.

For changes that must not alter a number. Make the runs with the code of before and of after, on one machine:

    python -m tests.tools.same_numbers --make=BEFORE      # there
    python -m tests.tools.same_numbers --make=AFTER       # here
    python -m tests.tools.same_numbers BEFORE AFTER

Every value in metrics.jsonl must be the same to the last bit, under the same names; times and throughput are left out.
`--within=1e-6` compares the first update alone, to that relative difference.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from gspo_jax import cli
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import read_metrics
from gspo_jax.train import train

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
RECOMPUTE = "training.old_logprobs=recompute"
CASES = {
    "tiny": ("", "adder", ()),
    "calculator": ("calculator,partial", "adder", ()),
    "dapo": ("dapo", "adder", ()),
    "steps": ("steps", "counter", ()),
    "ppo": ("", "adder", ("objective.name=ppo",)),
    "r2": ("", "adder", ("routing.replay=r2", RECOMPUTE)),
    "r3": ("", "adder", ("routing.replay=r3",)),
    "rspo": ("", "adder", ("objective.name=rspo", RECOMPUTE)),
    "int8": ("", "adder", ("adapter.rank=4", "adapter.expert_rank=2", "adapter.base_dtype=int8")),
}
"""Argument of configs/tiny.py, golden model, and fields of each run of one process, by the name of its folder."""
TIMES = ("timing/", "compile/", "throughput/")
"""Prefixes of the metrics that differ from run to run."""
SHOWN = 5
"""Differences listed per run."""


def words(case: tuple[str, str, tuple[str, ...]], data: Path) -> list[str]:
    """The arguments of gspo_jax.train for a case, but for the folder."""
    argument, model, fields = case
    short = ("iterations=3", "eval.every=3", "eval.prompts=32", "log.samples_every=3", f"data.data_dir={data}")
    fields = (f"model.folder={GOLDEN / model}", *short, *fields)
    return [f"--config={ROOT}/configs/tiny.py:{argument}", *(f"--config.{field}" for field in fields)]


def make(folder: Path) -> None:
    """Make a run of each case, in one process, and one of two processes."""
    for name, case in CASES.items():
        config = cli.read_config(words(case, folder / "data"))
        cli.prepare(config)
        train(config, folder / name)
    given = [f"--workdir={folder / 'two_processes'}", *words(CASES["tiny"], folder / "data")]
    subprocess.run(["bash", str(ROOT / "launch" / "cpu_pod.sh"), "2", *given], check=True)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without times."""
    rows = read_metrics(folder)
    return [{n: x for n, x in row.items() if n != "time" and not n.startswith(TIMES)} for row in rows]


def same(a: Any, b: Any, within: float) -> bool:
    """Whether two values are equal, or floats within a relative difference."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, within) for x, y in zip(a, b, strict=True))
    if within and isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=within, abs_tol=within)
    return a == b


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]], within: float = 0.0) -> list[str]:
    """One line per value that differs between the rows of two runs."""
    found = [] if len(before) == len(after) else [f"{len(before)} rows before, {len(after)} after"]
    for a, b in zip(before, after, strict=False):
        names = [name for name in sorted({*a, *b}) if not same(a.get(name), b.get(name), within)]
        found += [f"update {a['step']}: {name} {a.get(name)!r} -> {b.get(name)!r}" for name in names]
        if within and "minibatch" in a:
            break
    return found


def compare(before: Path, after: Path, within: float) -> int:
    """Print a line per run of `before`; return 1 if a value differs or a run is missing."""
    failed = False
    for folder in sorted(path.parent for path in before.glob("*/metrics.jsonl")):
        old = numbers(folder)
        try:
            found = differences(old, numbers(after / folder.name), within)
        except UserError as error:
            found = [str(error)]
        failed |= bool(found)
        print(f"{folder.name}: {sum(map(len, old))} values in {len(old)} rows, {len(found)} differ")
        print("".join(f"  {line}\n" for line in found[:SHOWN]), end="")
    return int(failed)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--within", type=float, default=0.0)
    given = parser.parse_args()
    if given.make is not None:
        make(given.make.absolute())
        return 0
    return compare(*given.folders, given.within)


if __name__ == "__main__":
    sys.exit(main())
