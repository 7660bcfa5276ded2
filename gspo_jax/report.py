"""Plots and tables from run folders: `python -m gspo_jax.report RUN [RUN …] [--out=DIR] [--table=FILE] [--json=FILE]`.

Writes `report.png`, `report-narrow.png` for phones and the self-contained `report.html`, to RUN/report for a single run
and to --out for several. Runs that differ only in the seed are a group: thin lines, and a thick one for their mean.
More than six groups are compared by dot plots. Groups are also compared seed by seed with a baseline, the group of the
first run or of --baseline=RUN. --table=FILE writes markdown tables with a row for each group. --panels=routing shows
routing drift and its effects. Unfinished runs may be reported. Only files are read.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo_jax.errors import UserError
from gspo_jax.folder.storage import check_contents
from gspo_jax.parser import make_parser
from gspo_jax.progress import make_table
from gspo_jax.studies import pages, paired
from gspo_jax.studies.panels import choose
from gspo_jax.studies.pictures import PAGE, PHONE, draw
from gspo_jax.studies.runs import facts, group_runs, load_run

LAYOUTS = {"report.png": PAGE, "report-narrow.png": PHONE}


def report(
    folders: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str] | None = None,
    table: str | os.PathLike[str] | None = None,
    panels: str = "training",
    baseline: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Write the report of some run folders.

    Returns {png, narrow, html, baseline, notes, verdicts, groups: facts(...)}, notes and verdicts being sentences.
    `table` is an additional markdown file, `panels` a page in PANELS, `baseline` a run's folder. Defaults are the
    command line's. Each group's facts include differences from the baseline's.

    Raises:
      UserError: several runs lack `out`, none is the baseline, a link leads out of RUN, or the report cannot be
        written.
    """
    unique = list({Path(folder).resolve(): folder for folder in folders}.values())
    if out is None and len(unique) > 1:
        raise UserError(f"a report of {len(unique)} runs needs a folder of its own; add --out=DIR")
    if out is None:
        check_contents(Path(unique[0]))
    groups = group_runs([load_run(folder) for folder in unique])
    base = paired.find(groups, unique[0] if baseline is None else baseline)
    found = [
        one | {"differences": {name: asdict(value) for name, value in own.items()}}
        for one, own in zip(facts(groups), paired.differences(groups, base), strict=True)
    ]
    below = pages.sections(groups, found, base=base, panels=panels)
    target = Path(unique[0]) / "report" if out is None else Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in ("report.html", *LAYOUTS):
            (target / name).unlink(missing_ok=True)  # a link is replaced, not followed
        shown, left_out = choose(groups, panels)
        for name, layout in LAYOUTS.items():
            draw(groups, shown, target / name, base=base, note=left_out, layout=layout)
        pictures = [(target / name).read_bytes() for name in LAYOUTS]
        described = f"{', '.join(panel.title for panel, _ in shown)}. {left_out}".strip()
        text = pages.html_page(groups, below, *pictures, described=described)
        (target / "report.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written to {target}: {error.strerror}; choose another --out") from None
    if table is not None:
        chosen = [] if panels == "training" else [f"--panels={panels}"]
        against = [] if baseline is None else [f"--baseline={baseline}"]
        command = pages.report_command(groups, flags=[*against, *chosen, f"--out={target}", f"--table={table}"])
        differing = pages.difference_table(groups, base)
        _write(Path(table), pages.family_table(found, panels=panels, differences=differing, command=command))
    files = {"png": "report.png", "narrow": "report-narrow.png", "html": "report.html"}
    made = {kind: str(target / name) for kind, name in files.items()}
    said = {"notes": pages.notes(groups), "verdicts": pages.verdicts(groups, base)}
    return made | {"baseline": base.label, **said, "groups": found}


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return make_parser("report").run(_command, arguments)


def _command(given: Namespace) -> None:
    made = report(given.runs, out=given.out, table=given.table, panels=given.panels, baseline=given.baseline)
    if given.json is not None:
        _write(Path(given.json), json.dumps(made, indent=2) + "\n")
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 120)
    found = made["groups"]
    rows = pages.family_rows(found, given.panels) if len(found) > pages.MAX_LISTED else pages.number_rows(found)
    console.print(make_table(rows))
    said = [*made["notes"], *made["verdicts"]]
    print(*said, sep="\n", end="\n\n" if said else "")
    print("\n".join([made["png"], made["narrow"], made["html"], *([given.table] if given.table else [])]))


if __name__ == "__main__":
    sys.exit(main())
