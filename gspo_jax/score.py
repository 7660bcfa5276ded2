"""Score the completions of a file with any reward functions: how one tries a reward before a run.

    python -m gspo_jax.score --reward=code_tests,my_rewards.py:polite --in=completions.jsonl --out=scores.jsonl

Each line of the file is a JSON object with `completion`, perhaps `prompt`, and the record's fields, such as `answer`.
`prompt` is the text that the model saw: one that ends with `<think>` has opened the thought that the completion goes
on. Lines are written with `scores`, a number or null by name, and `errors`, the reason for each null. NaN and Infinity,
which JSON does not have, are null, and the reference is read as in training (data/rows.py): a reward that needs one has
no score where there is none.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gspo_jax import cli, foreign, references, storage
from gspo_jax.data import files, rows
from gspo_jax.errors import UserError
from gspo_jax.parallel import processes
from gspo_jax.parser import make_parser
from gspo_jax.reporting.progress import make_table
from gspo_jax.rewards.scorer import Row, Scorer

_AT_A_TIME = 256
"""Rows that are scored before they are written."""
_OWN_FIELDS = ("prompt", "completion", "scores", "errors")
"""Fields of a line that do not belong to its record."""


class Line(NamedTuple):
    """A line of the file."""

    content: dict[str, Any]
    row: Row
    wrong: str
    """Defect of its reference; "" if there is none."""


def score(
    source: Path, target: Path, rewards: Sequence[str], *, timeout_s: float, workers: int, unsafe: bool = False
) -> dict[str, Any]:
    """Score the lines of `source` into `target`, see the module docstring.

    Args:
      source: completions, one JSON object per line.
      target: file to write.
      rewards: names of the catalogue, or references of functions, each of which is then called by its own name.
      timeout_s, workers, unsafe: as for Scorer.

    Returns:
      `rows`, `seconds`, `rows_per_s`, and `rewards`: by name, the `mean` of its scores, None if there are none, and how
      many `failed`.

    Raises:
      UserError: a line is no completion, a reward is unknown, or an option is out of range.
    """
    named = {reward.rpartition(":")[2]: reward for reward in rewards}
    if len(named) < len(rewards):
        raise UserError(f"--reward={','.join(rewards)} names two functions alike; rename one")
    if workers < 1 or not 0 < timeout_s < math.inf:
        raise UserError(f"--workers is {workers} and --timeout_s {timeout_s}; both must be above 0, and finite")
    own = {name: reference for name, reference in named.items() if ":" in reference}
    lines = list(_read(source))
    begun = time.monotonic()
    found: dict[str, list[float]] = {name: [] for name in named}
    try:
        scorer = Scorer(dict.fromkeys(named, 1.0), own=own, timeout_s=timeout_s, workers=workers, unsafe=unsafe)
    except references.BadReference as error:
        raise UserError(f"--reward: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with scorer, open(target, "w", encoding="utf-8") as file:
        for start in range(0, len(lines), _AT_A_TIME):
            part = lines[start : start + _AT_A_TIME]
            outcomes = scorer.outcomes([line.row for line in part])
            for place, line in enumerate(part):
                results = {name: outcomes[name][place] for name in named}
                scores = {name: result.value for name, result in results.items()}
                errors = {
                    name: (result.raised and line.wrong) or result.error
                    for name, result in results.items()
                    if result.value is None
                }
                file.write(json.dumps(line.content | {"scores": scores, "errors": errors}) + "\n")
                for name, value in scores.items():
                    found[name] += [] if value is None else [value]
    seconds = time.monotonic() - begun
    return {
        "rows": len(lines),
        "seconds": round(seconds, 3),
        "rows_per_s": round(len(lines) / seconds, 1),
        "rewards": {
            name: {"mean": float(np.mean(values)) if values else None, "failed": len(lines) - len(values)}
            for name, values in found.items()
        },
    }


def _read(source: Path) -> Iterator[Line]:
    try:
        foreign.is_file(source)
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        says = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{source} cannot be read: {says}; give a file of JSON Lines with --in") from None
    for number, written in enumerate(text.split("\n"), start=1):  # a text may have other ends of lines inside
        if not written.strip():
            continue
        try:
            line = json.loads(written, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{source}:{number} is not JSON ({error!s:.200}); each line has to be a JSON object"
            ) from None
        if not isinstance(line, dict) or not isinstance(line.get("completion"), str):
            raise UserError(f"{source}:{number} has no text `completion`; each line has to be a JSON object with one")
        if not isinstance(line.get("prompt"), str | None):
            raise UserError(f"{source}:{number} has a `prompt` that is no text; write the text that the model saw")
        try:
            record = files.plain({name: value for name, value in line.items() if name not in _OWN_FIELDS})
        except files.Defect as defect:
            raise UserError(f"{source}:{number}: {defect}; correct it") from None
        try:
            record["answer"], wrong = rows.answer_text(record), ""
        except files.Defect as defect:
            wrong = str(defect)
        yield Line(line, (line.get("prompt") or "", line["completion"], record), wrong)


def _finite(written: str) -> float | None:
    value = float(written)
    return value if math.isfinite(value) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        given = make_parser("score").parse_args(arguments)
        cli.check_facts_file(given.json)
        cli.check_facts_file(given.target, flag="out")
        workers = processes.own_cores() if given.workers is None else given.workers
        facts = score(
            given.source,
            given.target,
            given.reward.split(","),
            timeout_s=given.timeout_s,
            workers=workers,
            unsafe=given.unsafe,
        )
        cli.write_facts(given.json, facts)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        says = storage.fault(error, "--out")
        if says is None:
            raise
        print(f"error: {says}", file=sys.stderr)
        return 1
    from rich.console import Console

    Console().print(make_table([{"reward": name, **values} for name, values in facts["rewards"].items()]))
    print(f"{facts['rows']} rows in {facts['seconds']} s, {facts['rows_per_s']} a second: {given.target}")
    return 0


if __name__ == "__main__":
    references.refuse_exits()
    sys.exit(main())
