"""Records of studies: one CSV file with every iteration of every run, kept when the run folders are gone.

A row is an iteration of a run: its `run`, `seed` and `iteration` (0: the evaluation before training), `machine` and
`jax` version, the config fields that the study varies, and the METRICS, means over the iteration's
updates (maxima of those named `…max`), with four significant digits.
"""

import csv
import io
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_jax.errors import UserError
from gspo_jax.folder.lines import write_atomically
from gspo_jax.studies.runs import RunData

METRICS = (
    *("reward/mean", "eval/accuracy", "response_length/mean", "actor/entropy", "actor/grad_norm"),
    *("clip_fraction/token", "clip_fraction/sequence"),
    *("ratio/token_log_std", "ratio/token_log_max", "ratio/sequence_log_std", "ratio/sequence_log_max"),
    *("mismatch/kl", "mismatch/mean", "mismatch/beyond_2x", "mismatch/dropped"),
    *("mismatch/flip_rate", "mismatch/routers_changed", "routing/flip_rate", "update/skipped"),
)
"""Metrics that a record keeps of each iteration."""
KEYS = ("run", "seed", "iteration", "machine", "jax")

Row = dict[str, str]
"""A line of the file, as text."""


def read(path: Path) -> dict[str, list[Row]]:
    """Return the rows of each run, none if there is no file.

    Raises:
      UserError: it is no record.
    """
    if not path.exists():
        return {}
    with open(path, encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if not set(KEYS) <= set(lines.fieldnames or ()):
            raise UserError(f"{path} is no record of a study, which has the columns {', '.join(KEYS)}")
        rows = list(lines)
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["run"], []).append(row)
    return found


def iterations(rows: Sequence[Row]) -> int:
    """Return the last iteration of a run's rows."""
    return max(int(row["iteration"]) for row in rows)


def add(path: Path, name: str, run: RunData, fields: Sequence[str]) -> None:
    """Write a run into the record, in place of earlier rows of its name. `fields` are those that the study varies."""
    found = read(path)
    config = run.config or {}
    keys = {"run": name, "seed": str(run.seed), "machine": machine(), "jax": run.versions.get("jax", "")}
    found[name] = [keys | settings(config, fields) | row for row in _per_iteration(run.rows)]
    varied = dict.fromkeys(field for rows in found.values() for field in _fields(rows[0]))
    lines = [row for _, rows in sorted(found.items()) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _csv([*KEYS, *varied, *METRICS], lines))


def settings(config: Mapping[str, Any], fields: Sequence[str]) -> Row:
    """Return the values of config fields, by dotted name, as a record has them."""
    return {field: _text(config.get(field)) for field in fields}


def load(path: Path) -> list[RunData]:
    """Return the runs of a record, with one row for each iteration and the varied fields for a config.

    Raises:
      UserError: it is no record, or missing.
    """
    found = read(path)
    if not found:
        raise UserError(f"{path} has no run; train some with sweep --record={path}")
    return [_run(name, rows) for name, rows in found.items()]


def _run(name: str, rows: Sequence[Row]) -> RunData:
    first = rows[0]
    config = {"seed": int(first["seed"])}
    config |= {field: _value(first[field]) for field in _fields(first)}
    points = []
    for row in rows:
        iteration = int(row["iteration"])
        numbers = {key: float(row[key]) for key in METRICS if row.get(key)}
        points.append({"step": iteration} | ({"iteration": iteration} if iteration else {}) | numbers)
    versions = {"jax": first["jax"], "machine": first["machine"]}
    return RunData(Path(name), points, config, command="", versions=versions)


def _fields(row: Row) -> list[str]:
    return [key for key in row if key not in KEYS and "/" not in key]


def _per_iteration(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    values: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        own = values.setdefault(row.get("iteration", 0), {})
        for name in METRICS:
            value = row.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                own.setdefault(name, []).append(value)
    return [{"iteration": str(i)} | {name: _digits(name, own[name]) for name in own} for i, own in values.items()]


def _digits(name: str, values: Sequence[float]) -> str:
    whole = name == "eval/accuracy" or name == "reward/mean"  # of counts: no rounding that a test of ties could see
    return f"{max(values) if name.endswith('max') else sum(values) / len(values):.{8 if whole else 4}g}"


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _value(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return text


def _csv(names: Sequence[str], rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def machine() -> str:
    """Return this machine's kind of processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
