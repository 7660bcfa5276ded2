"""Plots and tables from run folders: `python -m gspo_jax.report RUN [RUN …] [--out=DIR] [--table=FILE] [--json=FILE]`.

Writes `report.png` and the self-contained `report.html`, to RUN/report for a single run and to --out for several. Runs
whose configs differ only in the seed are drawn as one line (mean) with a band (minimum to maximum); --table=FILE writes
a markdown table with a row for each such group. --panels=routing shows routing drift and its effects instead of
training progress. Runs still in progress can be reported. Only files are read: no model, no device. Metrics are
computed by reporting/runs.py, drawn by reporting/panels.py and written by reporting/pages.py.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo_jax.reporting import pages
from gspo_jax.reporting.drawing import GREY, Parser, picture
from gspo_jax.reporting.panels import MAX_BANDS, MAX_VALUE_LABELS, PANELS
from gspo_jax.reporting.progress import make_table
from gspo_jax.reporting.runs import Group, facts, group_runs, load_run
from gspo_jax.storage import check_links
from gspo_jax.types import UserError

WIDTH, HEAD, ROW = 11.6, 0.8, 3.2
"""Inches: width of the figure, height of its headline, height of a row of panels."""


def draw(groups: Sequence[Group], path: Path, *, panels: str = "training") -> None:
    """Draw all panels of a page that there are numbers for into one PNG."""
    shown = [panel for panel in PANELS[panels] if any(panel.read(group, panel.metric) for group in groups)]
    rows = -(-max(3, sum(panel.width for panel in shown)) // 3)
    with picture(path, width=WIDTH, height=HEAD + rows * ROW) as figure:
        cell = 0
        for panel in shown:
            room = 1.5 if panel.width == 2 else 0.98 if len(groups) > MAX_VALUE_LABELS else 0.7
            axes = figure.add_axes(_place(cell, panel.width, room, figure.get_figheight()))
            panel.draw(axes, groups, panel)
            cell += panel.width
        _headline(figure, groups)


def _place(cell: int, width: int, room: float, height: float) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of a panel's axes, leaving `room` inches for labels on its right."""
    left = WIDTH / 3 * (cell % 3) + 0.84
    right = WIDTH / 3 * (cell % 3 + width) - room
    top = height - HEAD - ROW * (cell // 3) - 0.32
    bottom = height - HEAD - ROW * (cell // 3 + 1) + 0.68
    return left / WIDTH, bottom / height, (right - left) / WIDTH, (top - bottom) / height


def _headline(figure: Any, groups: Sequence[Group]) -> None:
    """Write the names of the groups in their colours and how to read the lines."""
    height, left = figure.get_figheight(), 0.02
    many, seeds = len(groups) > MAX_BANDS, {len(group.runs) for group in groups}
    counted = "–".join(str(count) for count in sorted({min(seeds), max(seeds)}))
    names = [group.label if len(groups) > MAX_VALUE_LABELS else group.caption for group in groups]
    size = min(17.0, 1000 / sum(len(name) + 3 for name in names))
    for name, group in zip(names, groups, strict=True):
        style = {"color": group.color, "weight": "bold", "fontsize": size, "va": "top"}
        text = figure.text(left, 1 - 0.15 / height, name, **style)
        left = text.get_window_extent().x1 / figure.bbox.width + 0.02
    how = []
    if many:
        how.append(f"line: mean of {counted} runs, smoothed")
    elif max(seeds) > 1:
        of = f"{counted} seeds" if len(groups) > MAX_VALUE_LABELS else "the seeds"
        how.append(f"line: mean of {of}, band: minimum to maximum")
    if not many and min(seeds) == 1:
        how.append("thin line: each iteration, thick line: smoothed, band: standard error of the evaluation")
    if any(len({run.rows[-1]["step"] for run in group.runs}) > 1 for group in groups):
        how.append("lines of a group end where its shortest run does")
    figure.text(0.02, 1 - 0.52 / height, "  ·  ".join(how), color=GREY, fontsize=11, va="top")


def report(
    folders: Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str] | None = None,
    table: str | os.PathLike[str] | None = None,
    panels: str = "training",
) -> dict[str, Any]:
    """Write the report of some run folders and return {png, html, groups: facts(...)}.

    `out` is the target folder, by default RUN/report for a single run. `table` is a markdown file to write besides;
    `panels` is the name of a page in PANELS.

    Raises:
      UserError: several runs are given without `out`, a link leads out of RUN, or the report cannot be written.
    """
    unique = list({Path(folder).resolve(): folder for folder in folders}.values())
    if out is None and len(unique) > 1:
        raise UserError(f"a report of {len(unique)} runs needs a folder of its own; add --out=DIR")
    if out is None:
        check_links(Path(unique[0]))
    groups = group_runs([load_run(folder) for folder in unique])
    found = facts(groups)
    target = Path(unique[0]) / "report" if out is None else Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in ("report.png", "report.html"):
            (target / name).unlink(missing_ok=True)  # a link is replaced, not followed
        draw(groups, target / "report.png", panels=panels)
        text = pages.html_page(groups, found, (target / "report.png").read_bytes())
        (target / "report.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the report cannot be written to {target}: {error.strerror}; choose another --out") from None
    if table is not None:
        flags = [*([] if panels == "training" else [f"--panels={panels}"]), f"--out={target}", f"--table={table}"]
        command = pages.report_command(groups, flags=flags)
        _write(Path(table), pages.family_table(found, panels=panels, command=command))
    return {"png": str(target / "report.png"), "html": str(target / "report.html"), "groups": found}


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def parser() -> Parser:
    """Build the command-line parser."""
    parser = Parser("python -m gspo_jax.report", str(__doc__).partition("\n\n")[2])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (the --workdir of train)")
    parser.add_argument("--panels", choices=tuple(PANELS), default="training", help="page to show: %(choices)s")
    parser.add_argument("--out", metavar="DIR", help="folder for the report; RUN/report by default for a single run")
    parser.add_argument("--table", metavar="FILE", help="also write a markdown table with a row per group of runs")
    parser.add_argument("--json", metavar="FILE", help="also write the same facts as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        given = parser().parse_args(arguments)
        made = report(given.runs, out=given.out, table=given.table, panels=given.panels)
        if given.json is not None:
            _write(Path(given.json), json.dumps(made, indent=2) + "\n")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 120)
    found = made["groups"]
    rows = pages.family_rows(found, given.panels) if len(found) > MAX_VALUE_LABELS else pages.number_rows(found)
    console.print(make_table(rows))
    print("\n".join([made["png"], made["html"], *([given.table] if given.table else [])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
