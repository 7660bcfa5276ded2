"""First contact with a machine: in minutes, which of the project's figures hold on it.

    gspo-jax first --out=first

Stages, each with a time limit, check devices, kernels, rates, programs and a short training. The folder of `--out` has
the page, and a record of every stage: the same command goes on where it was killed, and tries failed stages again. On a
pod every host runs it, with a folder that process 0 can write. The exit code is 1 on all if a stage failed.
"""

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from gspo_jax import cli
from gspo_jax.bringup import catalogue, page, rates, stages, watch
from gspo_jax.bringup.stages import Given, Record
from gspo_jax.errors import UserError
from gspo_jax.models import published
from gspo_jax.parallel import processes
from gspo_jax.parser import make_parser

PAGE = "page.md"


def first(given: Given, json_file: str | None = None) -> int:
    """Run the stages, and write the page as they end. Return the exit code."""
    given.out.mkdir(parents=True, exist_ok=True)
    titles = {stage.name: stage.title for stage in catalogue.STAGES}

    def show() -> list[Record]:
        found = [stages.read(given.out, name) for name in titles]
        records = [record for record in found if record is not None]
        text = page.page(titles, records, rates=str(given.out / rates.FILE))
        (given.out / PAGE).write_text(text, encoding="utf-8")
        return records

    code = watch.watch(given, given.out / watch.LOG, show)
    if code is not None:
        return code
    records = show()
    print("\n".join([*page.verdict(titles, records), f"page: {given.out / PAGE}"]))
    failed = [record.stage for record in records if record.state == stages.FAILED]
    facts = {"ok": not failed and len(records) == len(titles), "failed": failed}
    if json_file is not None:
        by_stage = {record.stage: {"state": record.state, "figures": record.figures} for record in records}
        Path(json_file).write_text(json.dumps(facts | {"stages": by_stage}, indent=2) + "\n", encoding="utf-8")
    return int(not facts["ok"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    codes: list[int] = []

    def command(given: Namespace) -> None:
        if not 1 <= given.minutes <= 120:
            raise UserError(f"--minutes is {given.minutes:g}; use 1 to 120")
        if given.devices < 1:
            raise UserError(f"--devices is {given.devices}; use 1 or more")
        if given.model:
            published.find(given.model)
        if any(os.environ.get(name) for name in processes.VARIABLES):
            processes.find()
        cli.check_output_folder(given.out, flag="out")
        cli.check_facts_file(given.json)
        if given.start_over:
            shutil.rmtree(given.out / stages.FOLDER, ignore_errors=True)
        asked = Given(given.out, given.minutes, given.model, given.devices)
        codes.append(first(asked, given.json))

    return make_parser("first").run(command, arguments) or codes[0]


if __name__ == "__main__":
    sys.exit(main())
