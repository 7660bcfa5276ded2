"""The page of `first`: the verdict first, then every stage with its findings."""

from collections.abc import Sequence

from gspo_jax.bringup.stages import FAILED, OK, WARNING, Record
from gspo_jax.doctor import Finding

ORDER = (FAILED, WARNING, OK)


def verdict(titles: dict[str, str], records: Sequence[Record]) -> list[str]:
    """Return the first lines: what failed, what is doubtful, what is missing, or that all holds."""
    lines = []
    for state, heading in ((FAILED, "Failed"), (WARNING, "Doubtful")):
        lines += [
            f"- **{heading}**: {titles[record.stage]}: {_said(record, one)}"
            for record in records
            for one in record.findings
            if one.state == state
        ]
    ended = {record.stage for record in records}
    missing = [title for name, title in titles.items() if name not in ended]
    if missing:
        lines.append(f"- **Not run**: {', '.join(missing)}")
    return lines or [f"All {len(records)} stages hold."]


def page(titles: dict[str, str], records: Sequence[Record], *, rates: str) -> str:
    """Return the page in Markdown."""
    lines = ["# First contact", "", *verdict(titles, records), ""]
    if records:
        machine = records[0].machine
        lines += [f"{machine.get('devices', 'unknown devices')}, {machine.get('processes', 1)} process(es).", ""]
    lines += ["| stage | verdict | s |", "|---|---|---|"]
    lines += [f"| {titles[record.stage]} | {record.state} | {record.seconds:.0f} |" for record in records]
    for record in records:
        lines += ["", f"## {titles[record.stage]}", ""]
        for one in sorted(record.findings, key=lambda one: ORDER.index(one.state)):
            end = "" if one.found.endswith(".") else "."
            lines.append(f"- {one.state}: {_said(record, one)}" + (f"{end} {one.remedy}" if one.remedy else ""))
    lines += [
        "",
        "## What next",
        "",
        f"`gspo-jax plan … --rates={rates}` counts with the rates of this machine. If something failed that no remedy "
        "mends, send `page.md` and the folder `stages` to the project.",
        "",
    ]
    return "\n".join(lines)


def _said(record: Record, one: Finding) -> str:
    return one.found if one.check == record.stage else f"{one.check}: {one.found}"
