"""Scores the completions of a file with any reward functions, to try a reward before a run.

    python -m gspo_jax.score --reward=code_tests,my_rewards.py:polite --in=completions.jsonl --out=scores.jsonl

Each line of the file is a JSON object with `completion`, optionally `prompt`, and the record's fields, e.g. `answer`.
`prompt` is the text that the model saw: one that ends with `<think>` has opened a thought. Output lines add `scores`, a
number or null by name, and `errors`, the reason for each null. NaN and Infinity become null. References are read as in
training (data/rows.py): a reward has no score without the reference it needs.
"""

import collections
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from gspo_jax import cli, foreign, references
from gspo_jax.data import files, rows
from gspo_jax.errors import ScoringFailed, UserError
from gspo_jax.parallel import processes
from gspo_jax.parser import make_parser
from gspo_jax.progress import make_table
from gspo_jax.rewards.scorer import Row, Scorer, check_weights
from gspo_jax.rewards.scores import NONE
from gspo_jax.secrets import redacted

_AT_A_TIME = 256
_OWN_FIELDS = ("prompt", "completion", "scores", "errors")
"""Fields of a line outside its record."""


class FileLine(NamedTuple):
    """A line of the file."""

    content: dict[str, Any]
    row: Row
    wrong: str
    """Defect of its reference, or ""."""


def score(
    source: Path, target: Path, rewards: Sequence[str], *, timeout_s: float, workers: int, unsafe: bool = False
) -> dict[str, Any]:
    """Score the lines of `source` into `target`, see the module docstring.

    `rewards` are catalogue names, or references, known by their function's name. Other arguments are Scorer's.

    Returns:
      `rows`, `seconds`, `rows_per_s`, and `rewards`: by name, the `mean` score, None without scores, and the count
        `failed`, and the most frequent reason in `why`, if a function failed.

    Raises:
      UserError: a line is no completion, a reward is unknown, or an option is out of range.
    """
    named = {reward.rpartition(":")[2]: reward for reward in rewards}
    check_weights("reward", dict.fromkeys(named, 1.0))
    if len(named) < len(rewards):
        raise UserError(f"--reward={','.join(rewards)} names two functions alike; rename one")
    if workers < 1 or not 0 < timeout_s < math.inf:
        raise UserError(f"--workers is {workers} and --timeout_s {timeout_s}; both must be above 0, and finite")
    own = {name: reference for name, reference in named.items() if ":" in reference}
    lines = list(_read(source))
    begun = time.monotonic()
    found: dict[str, list[float]] = {name: [] for name in named}
    causes = {name: collections.Counter[str]() for name in named}
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
                for name, result in results.items():
                    found[name] += [] if result.value is None else [result.value]
                    if result.error not in (None, NONE) and not (result.raised and line.wrong):
                        causes[name][str(result.failed_by)] += 1
    seconds = time.monotonic() - begun
    return {
        "rows": len(lines),
        "seconds": round(seconds, 3),
        "rows_per_s": round(len(lines) / seconds, 1),
        "rewards": {
            name: {"mean": float(np.mean(values)) if values else None, "failed": len(lines) - len(values)}
            | ({"why": redacted(causes[name].most_common(1)[0][0])} if causes[name] else {})
            for name, values in found.items()
        },
    }


def _read(source: Path) -> Iterator[FileLine]:
    foreign.check_name(source, "--in")
    try:
        foreign.is_file(source)
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        says = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{source} cannot be read: {says}; give a file of JSON Lines with --in") from None
    for number, written in enumerate(text.split("\n"), start=1):  # texts may contain other line separators
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
        yield FileLine(line, (line.get("prompt") or "", line["completion"], record), wrong)


def _finite(written: str) -> float | None:
    value = float(written)
    return value if math.isfinite(value) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return make_parser("score").run(_command, arguments)


def _command(given: Namespace) -> None:
    cli.check_facts_file(given.json)
    cli.check_facts_file(given.target, flag="out")
    workers = processes.own_cores() if given.workers is None else given.workers
    options = {"timeout_s": given.timeout_s, "workers": workers, "unsafe": given.unsafe}
    facts = score(given.source, given.target, given.reward.split(","), **options)
    cli.write_facts(given.json, facts)
    Console().print(make_table([{"reward": name, **values} for name, values in facts["rewards"].items()]))
    print(f"{facts['rows']} rows in {facts['seconds']} s, {facts['rows_per_s']} a second: {given.target}")
    for name, values in facts["rewards"].items():
        if "why" in values and values["failed"] == facts["rows"]:
            raise ScoringFailed(f"reward {name!r} scored none of {facts['rows']} rows, most often by: {values['why']}")


if __name__ == "__main__":
    references.refuse_exits()
    sys.exit(main())
