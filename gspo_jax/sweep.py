"""Several runs of one config, and one page that compares them.

    python -m gspo_jax.sweep --config=configs/tiny.py --sweep objective.name=gspo,grpo --seeds=3

Trains every combination of the values of `--sweep` or, without it, the config file's `get_sweep`, for every seed. Each
run is a process, `python -m gspo_jax.train`, with a folder in `--runs`. The same command again skips finished runs and
resumes the others. The report is in RUNS/report. With --record=FILE each finished run is also added to a CSV file
(studies/records.py), and runs that are in it are not trained again, so that several machines may share a study.
"""

import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli, config_files, exits, report, signals
from gspo_jax.drawing import check_matplotlib
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import by_field
from gspo_jax.parallel import processes
from gspo_jax.studies import records
from gspo_jax.studies.runs import load_run
from gspo_jax.sweeping.grid import Page, SweepRun, comparisons, find_folder, make_plan
from gspo_jax.sweeping.processes import Children, commands, describe, exit_code

TABLE = "results.md"


def sweep(pages: Sequence[Page], folder: Path, *, jobs: int, record: Path | None = None) -> int:
    """Train unfinished runs, `jobs` at a time, write the report, and return the exit code.

    Each finished run is added to `record`.
    """
    runs, logs, code = [run for page in pages for run in page.runs], folder / "logs", 0

    def keep(run: SweepRun) -> None:
        if record is not None and not is_recorded(run, record):
            records.add(record, run.name, load_run(run.folder), run.varied)

    with locked(folder):
        print(summary(runs, folder), flush=True)
        for run in runs:
            if run.is_done():
                keep(run)
        children = Children([run for run in runs if not run.is_done()], jobs=jobs, logs=logs, keep=keep)
        children.train()
        if children.told is not None and not all(run.is_done() for run in runs):
            signals.say(f"stopped: {_count(runs)}; the same command goes on")
            code = exits.SIGNALLED + signal.SIGINT if children.told == signal.SIGINT else 0
        elif any(run.is_done() for run in runs):
            code = write_report(pages, folder)
    if children.failed:
        named = ", ".join(f"{name} ({describe(code)})" for name, code in children.failed.items())
        where = "the output above" if jobs == 1 else str(logs)
        print(f"error: failed: {named}; {_count(runs)}; see {where}, then use the same command again", file=sys.stderr)
        code = exit_code(list(children.failed.values()))
    return code


def is_recorded(run: SweepRun, record: Path) -> bool:
    """Return True if the record has all iterations of a run.

    Raises:
      UserError: the record has another run of this name.
    """
    rows = records.read(record).get(run.name)
    if rows is None:
        return False
    own = records.settings(by_field(run.config.to_dict()), run.varied)
    for field, value in own.items():
        if rows[0].get(field, "") != value:
            raise UserError(
                f"{record} has the run {run.name} with {field}={rows[0].get(field)!r}, and here it is {value!r}; "
                "give another --record"
            )
    return records.iterations(rows) >= run.config.iterations


def without_recorded(pages: Sequence[Page], record: Path) -> list[Page]:
    """Return the pages without runs that are only in the record: another machine has finished them."""
    return [
        replace(page, runs=[run for run in page.runs if run.is_done() or not is_recorded(run, record)])
        for page in pages
    ]


def write_report(pages: Sequence[Page], folder: Path) -> int:
    """Write a report of each page's finished runs, and return the exit code.

    Tables of several pages are also written to RUNS/report/results.md.
    """
    tables = []
    for page in pages:
        done = [run for run in page.runs if run.is_done()]
        if done:
            if code := report.main(report_flags(page, done)):
                return code
            tables.append(f"## {page.title}\n\n{(page.folder / TABLE).read_text(encoding='utf-8')}")
    if len(pages) > 1:
        target = folder / "report" / TABLE
        target.write_text("\n".join([f"# {folder.name}\n", *tables]), encoding="utf-8")
        print(target)
    return 0


def report_flags(page: Page, runs: Sequence[SweepRun]) -> list[str]:
    """Return the flags of `gspo_jax.report` for a page. The sweep's first setting is the baseline."""
    panels = [] if page.panels == "training" else [f"--panels={page.panels}"]
    first = [run for run in runs if run.settings == page.runs[0].settings]
    baseline = [f"--baseline={run.folder}" for run in first[:1]]
    out = [f"--out={page.folder}", f"--table={page.folder / TABLE}"]
    return [*(str(run.folder) for run in runs), *baseline, *panels, *out]


def summary(runs: Sequence[SweepRun], folder: Path) -> str:
    """Return the plan in one line."""
    left = [run for run in runs if not run.is_done()]
    cold = {run.cold.folder for run in left if run.cold is not None and run.needs_cold_start()}
    missing = sum(not place.exists() for place in cold)
    return f"{folder}: {_count(runs)}, {len(left)} to train; cold starts to train: {missing}"


def _count(runs: Sequence[SweepRun]) -> str:
    return f"{sum(run.is_done() for run in runs)} of {len(runs)} runs are finished"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder, creating it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another sweep uses {folder}; wait for its end, or give another --runs") from None
        yield
    finally:
        os.close(descriptor)


def main(config: ConfigDict) -> int:
    """Run the command."""
    del config  # each run has its own
    given, words = flags.FLAGS, config_files.config_words(sys.argv[1:])
    name = Path(config_files.config_flag(words).partition(":")[0]).stem
    folder = find_folder(f"runs/{name}-sweep" if given.runs is None else given.runs)
    if any(name in os.environ for name in processes.VARIABLES):
        raise UserError(f"a sweep runs on one machine, with a process for each run; unset {processes.VARIABLES[0]}")
    pages = make_plan(words, comparisons(words, given.sweep, given.seeds), folder)
    record = None if given.record is None else Path(given.record)
    if record is not None:
        pages = without_recorded(pages, record)
    if not given["dry-run"].value:
        check_matplotlib()
        processes.end_with_parent()
        return sweep(pages, folder, jobs=given.jobs, record=record)
    runs = [run for page in pages for run in page.runs]
    print(f"# {summary(runs, folder)}")
    print(*commands([run for run in runs if not run.is_done()]), sep="\n")
    for page in pages:
        if page.runs:
            print(shlex.join([sys.executable, "-m", "gspo_jax.report", *report_flags(page, page.runs)]))
    return 0


if __name__ == "__main__":
    cli.run_alone(main, "sweep")
