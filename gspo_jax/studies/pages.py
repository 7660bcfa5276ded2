"""Report texts: the HTML page, the markdown table, and tables of the documentation."""

import base64
import html
import re
import shlex
import string
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gspo_jax.errors import UserError
from gspo_jax.folder.notes import change_line
from gspo_jax.folder.samples import read_samples
from gspo_jax.folder.storage import HELD_OUT
from gspo_jax.measuring.gamed import gamed
from gspo_jax.measuring.held_out import is_evaluated, rewards_in
from gspo_jax.progress import duration
from gspo_jax.studies import goodput, paired
from gspo_jax.studies.runs import COLLAPSE_WINDOW, RESOLUTION, Group, RunData, describe, differences, quality, results

MAX_LISTED = 3
"""Maximum groups listed with all numbers, runs and samples."""
SHOWN = 1500
"""Characters shown of a sampled text."""
_Facts = Mapping[str, Any]
"""Numbers of one group, from `runs.facts`."""
PAGE = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p, caption { color: #6b6b6b; text-align: left; } img { width: 100%; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e8e8e8; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
b.token { color: #0072B2; background: #eaf3f9; font-weight: normal; border-radius: 3px; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 7rem; } pre.long { min-width: 16rem; }
summary { color: #6b6b6b; } td:first-child { min-width: 6.5rem; }
@media (max-width: 700px) {
  body { margin: 1rem auto; padding: 0 .7rem; font-size: 14px; }
  h1 { font-size: 1.2rem; } th, td { padding-right: .5rem; }
}
</style></head><body>
<h1>$title</h1><p>$written</p>
$parts
</body></html>
""")


def sections(groups: Sequence[Group], found: Sequence[_Facts], *, base: Group, panels: str) -> list[tuple[str, str]]:
    """Return the titles and contents of the page below the picture.

    More than MAX_LISTED groups are compared in the table of the page `panels`, with details folded.

    Raises:
      UserError: a file of samples is damaged.
    """
    numbers = _html_table(number_rows(found)) + (
        "<p>Held-out prompts and benchmarks: first and last evaluation. Other metrics: mean over the first and over "
        f"the last tenth of the iterations. In brackets: minimum and maximum over seeds. {ROUNDING}</p>"
    )
    firsts = [group.runs[0] for group in groups]
    samples = [
        (f"{title}: {group.label}", shown)
        for group in groups
        for title, made in (("Before and after", _before_and_after), ("Samples", _samples))
        if (shown := made(group.runs[0]))
    ]
    ran = _html_table(_run_rows(found))
    if len(groups) > MAX_LISTED:
        first, ran = _html_table(family_rows(found, panels)), _folded("folders, times and commands", ran)
        numbers = f"{first}<p>{HOW_TO_READ[panels]}</p>" + _folded("before and after, metric by metric", numbers)
        samples = [(title, _folded("completions", shown)) for title, shown in samples]
    parts = [("Numbers", numbers), ("Runs", ran)]
    if times := _goodput_rows(found):
        table = _html_table(times)
        table = _folded("shares of each run's time", table) if len(groups) > MAX_LISTED else table
        parts.append(("Where the time went", f"{table}<p>{goodput.HOW_TO_READ}</p>"))
    if past := histories([run for group in groups for run in group.runs]):
        parts.append(("Where runs began, and what changed", "".join(f"<p>{html.escape(text)}</p>" for text in past)))
    if rows := difference_rows(groups, base):
        answers = "".join(f"<p><b>{html.escape(text)}</b></p>" for text in verdicts(groups, base))
        table = re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", _html_table(rows))
        below = f"<p>{html.escape(paired.how_to_read(groups, base))}</p>"
        parts.insert(0, (f"Differences from {base.label}, seed by seed", answers + table + below))
    if warnings := notes(groups):
        parts.insert(0, ("Read this first", "".join(f"<p><b>{html.escape(text)}</b></p>" for text in warnings)))
    labels = [group.label for group in groups]
    differing = [{"setting": name, **dict(zip(labels, x, strict=True))} for name, x in differences(firsts).items()]
    if differing:
        parts.append(("Settings that differ", _html_table(differing)))
    parts += samples
    settings = [{"setting": name, "value": value} for name, value in (firsts[0].config or {}).items()]
    if settings:
        parts.append(("Config", _folded(f"all settings of {firsts[0].folder}", _html_table(settings))))
    return parts


def html_page(
    groups: Sequence[Group], below: Sequence[tuple[str, str]], png: bytes, narrow: bytes, *, described: str
) -> str:
    """Return a self-contained HTML page: the picture, and its `sections` below.

    `narrow` is for phones, `described` the alternative text.
    """
    wide, phone = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (png, narrow))
    source = f'<source media="(max-width: 700px)" srcset="{phone}">'
    picture = f'<picture>{source}<img alt="{html.escape(described)}" src="{wide}"></picture>'
    body = "\n".join([picture, *(f"<h2>{html.escape(title)}</h2>{part}" for title, part in below)])
    runs = [run for group in groups for run in group.runs]
    updates = _format_count({run.rows[-1]["step"] for run in runs}, "update")
    title = f"{_format_count({len(runs)}, 'run')} of {updates}"  # the picture names them
    return PAGE.substitute(title=title, written=f"drawn {time.strftime('%Y-%m-%d %H:%M')}", parts=body)


def number_rows(found: Sequence[_Facts]) -> list[dict[str, str]]:
    """Return a row per metric and group, with initial value, final value and change."""
    rows = []
    for name in dict.fromkeys(name for group in found for name in group["metrics"]):
        metric = describe(name)
        for group in found:
            if name in group["metrics"]:
                several = len(group["runs"]) > 1
                who = {"runs": group["label"]} if len(found) > 1 else {}
                ends = group["metrics"][name]
                cells = {
                    key: _mean_and_range(ends[key], partial(metric.write, signed=key == "change"), several)
                    for key in ends
                }
                rows.append({"metric": f"{metric.title}, {metric.unit}", **who, **cells})
    return rows


def difference_rows(groups: Sequence[Group], base: Group) -> list[dict[str, str]]:
    """Return a markdown row of differences per group other than `base`, none without common seeds."""
    rows, names = [], results(groups)
    found = paired.differences(groups, base)
    names = [name for name in names if any(name in own for own in found)]
    for group, own in zip(groups, found, strict=True):
        if own:
            seeds = max(one.seeds for one in own.values())
            cells = {
                metric.title.lower(): paired.in_markdown(own.get(name), metric.how)
                for name, metric in zip(names, map(describe, names), strict=True)
            }
            rows.append({"runs": group.label, "seeds": str(seeds), **cells})
    return rows


def difference_table(groups: Sequence[Group], base: Group) -> str:
    """Return `difference_rows` as markdown, with heading and notes, "" without any."""
    rows = difference_rows(groups, base)
    if not rows:
        return ""
    title = f"Differences from {base.label}, seed by seed:"
    return "\n\n".join([title, _markdown_table(rows), paired.how_to_read(groups, base)])


def verdicts(groups: Sequence[Group], base: Group) -> list[str]:
    """Return sentences on whether each of a few groups is better than `base`, none for many."""
    if len(groups) > MAX_LISTED:
        return []
    found, name = zip(groups, paired.differences(groups, base), strict=True), quality(groups)
    return [paired.verdict(group.label, base.label, own[name], of=name) for group, own in found if name in own]


def family_rows(found: Sequence[_Facts], panels: str) -> list[dict[str, str]]:
    """Return a row of final values per group, the best first. `panels` selects the columns."""
    name = _quality(found)
    ordered = sorted(found, key=lambda group: (-_final(group, name), group["label"]))
    columns = {describe(name).title.lower(): _final_cell(name, ".3f", spread=True)} | COLUMNS[panels]
    return [{"runs": group["label"]} | {name: cell(group) for name, cell in columns.items()} for group in ordered]


def family_table(found: Sequence[_Facts], *, panels: str, differences: str, command: Sequence[str]) -> str:
    """Return `family_rows` as markdown, with notes and the command that reproduces it."""
    table = _markdown_table(family_rows(found, panels))
    runs = [run for group in found for run in group["runs"]]
    updates, seeds = {run["updates"] for run in runs}, {len(group["runs"]) for group in found}
    how = f"{_format_count(seeds, 'run')} per row, {_format_count(updates, 'update')} per run. {HOW_TO_READ[panels]}"
    made = " \\\n    ".join(command)
    parts = [table, how, *([differences] if differences else []), f"```bash\n{made}\n```"]
    if runs[0]["command"]:
        parts.append(f"The first of these runs was made with\n\n```bash\n{runs[0]['command']}\n```")
    return "\n\n".join(parts) + "\n"


def replaced(page: str, name: str, lines: Sequence[str]) -> str:
    """Return pages with the table of this name replaced.

    Raises:
      UserError: the pages do not have one such table.
    """
    begin = f"<!-- table: {name} -->"
    table = "\n".join([begin, "", *lines, "", "<!-- end -->"])
    page, count = re.subn(rf"{begin}\n.*?<!-- end -->", lambda _: table, page, flags=re.DOTALL)
    if count != 1:
        raise UserError(f"the pages have {count} tables {name!r}; they need one {begin} with an <!-- end -->")
    return page


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    lines = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _final_cell(name: str, how: str, *, spread: bool = False) -> Callable[[_Facts], str]:

    def cell(group: _Facts) -> str:
        if name not in group["metrics"]:
            return "–"
        write = describe(name)._replace(how=how).write
        return _mean_and_range(group["metrics"][name]["final"], write, spread and len(group["runs"]) > 1)

    return cell


def _minibatch_cell(name: str, how: str) -> Callable[[_Facts], str]:

    def cell(group: _Facts) -> str:
        values = group["minibatches"][name]
        shown = [*values[:2], *values[2:][-1:]]
        return " / ".join(f"{value:{how}}" for value in shown) or "–"

    return cell


def _seconds_cell(group: _Facts) -> str:
    seconds = group["seconds_per_iteration"]
    return "–" if seconds is None else f"{seconds:.2f}"


def _collapsed_cell(group: _Facts) -> str:
    return f"{sum(run['collapsed'] for run in group['runs'])} of {len(group['runs'])}"


ROUNDING = f"KLs of log-probabilities below {RESOLUTION['mismatch/kl']:.0e} are float32 rounding and count as 0."
COLUMNS = {
    "training": {
        "clip fraction, token": _final_cell("clip_fraction/token", ".2%"),
        "clip fraction, sequence": _final_cell("clip_fraction/sequence", ".2%"),
        "flip rate": _final_cell("routing/flip_rate", ".2%"),
        "entropy": _final_cell("actor/entropy", ".3f"),
        "s per iteration": _seconds_cell,
    },
    "routing": {
        "reward": _final_cell("reward/mean", ".3f"),
        "collapsed": _collapsed_cell,
        "flip rate, 0 / 1 / last": _minibatch_cell("routing/flip_rate", ".2%"),
        "ratio spread, token": _final_cell("ratio/token_log_std", ".4f"),
        "ratio spread, sequence": _final_cell("ratio/sequence_log_std", ".5f"),
        "clipped, token": _final_cell("clip_fraction/token", ".3%"),
        "clipped, sequence": _final_cell("clip_fraction/sequence", ".3%"),
        "mismatch KL": _final_cell("mismatch/kl", ".1e"),
    },
}
"""Page -> table heading -> formatter of a group's cell, after the first, the held-out accuracy or reward."""
HOW_TO_READ = {
    "training": (
        "Held-out prompts: last evaluation, mean over the runs and in brackets their minimum and maximum. Clip "
        "fractions, flip rate and entropy: mean over the last tenth of the iterations. Seconds: median over all "
        "iterations except each run's first, which includes compilation."
    ),
    "routing": (
        "Held-out prompts: last evaluation, mean over the runs and in brackets their minimum and maximum. Collapsed: "
        f"runs whose mean reward of {COLLAPSE_WINDOW} iterations fell below half of its highest so far. All else: mean "
        "over the last tenth of the iterations. Flip rate: in mini-batches 0, 1 and the last of an iteration, that is "
        "after none, one, and all but one of its updates. Ratio spread: standard deviation of log π_new − log π_old "
        "over tokens, and over responses of its per-token mean. Mismatch: KL of the trainer's log-probabilities to the "
        f"sampler's, with the same weights. {ROUNDING}"
    ),
}
"""Notes under the table, by page."""


def report_command(groups: Sequence[Group], *, flags: Sequence[str]) -> list[str]:
    """Return the report's command line in parts: one per group, and one for the flags."""
    folders = [shlex.join(str(run.folder) for run in group.runs) for group in groups]
    return ["python -m gspo_jax.report", *folders, shlex.join(flags)]


def _quality(found: Sequence[_Facts]) -> str:
    """Return `runs.quality` of the groups of these facts."""
    named = {name for group in found for name in group["metrics"]}
    return "eval/reward" if "eval/accuracy" not in named and "eval/reward" in named else "eval/accuracy"


def _final(group: _Facts, name: str) -> float:
    value = group["metrics"].get(name)
    return -np.inf if value is None else value["final"]["mean"]


def _format_count(numbers: set[int], noun: str) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low} {noun}{'s' * (high != 1)}" if low == high else f"{low} to {high} {noun}s"


def _mean_and_range(value: Mapping[str, float], write: Callable[[float], str], several: bool) -> str:
    text = write(value["mean"])
    return f"{text} [{write(value['min'])}, {write(value['max'])}]" if several else text


def _run_rows(found: Sequence[_Facts]) -> list[dict[str, Any]]:
    return [
        {
            "folder": run["folder"],
            "seed": run["seed"],
            "updates": run["updates"],
            "skipped": run["skipped_updates"],
            "time": duration(run["seconds"]),
            "tokens/s": run["tokens_per_s"] and f"{run['tokens_per_s']:,.0f}",
            "command": run["command"],
        }
        for group in found
        for run in group["runs"]
    ]


def _goodput_rows(found: Sequence[_Facts]) -> list[dict[str, str]]:
    rows = []
    for group in found:
        for run in group["runs"]:
            if (shares := run["goodput"]) is not None:
                shown = {name: share for name, share in shares.items() if name != "seconds"}
                time = {"folder": run["folder"], "time": duration(shares["seconds"])}
                rows.append(time | {name: f"{share:.1%}" for name, share in shown.items()})
    return rows


def _samples(run: RunData) -> str:
    samples = {step: rows for step, rows in read_samples(run.folder).items() if rows}
    shown, special = [], set()
    for step in sorted({min(samples), max(samples)}) if samples else []:
        ordered = sorted(samples[step], key=lambda row: -(row["reward"] if row["reward"] is not None else -np.inf))
        for row in (ordered[i] for i in sorted({0, len(ordered) // 2, len(ordered) - 1})):
            texts = {name: _shortened(row[name]) for name in ("prompt", "completion", "answer")}
            shown.append({"update": step, **texts, "reward": _written(row["reward"])})
            special |= {*row["special"]}
    return _html_table(shown, preformatted=("prompt", "completion", "answer"), special=special) if shown else ""


def _before_and_after(run: RunData) -> str:
    """Return the first and the last evaluation's scores, and completions of the same prompts side by side."""
    kept = read_samples(run.folder, HELD_OUT)
    measured = [row for row in run.rows if is_evaluated(row) and kept.get(row["step"])]
    if len(measured) < 2:
        return ""
    first, last = measured[0], measured[-1]
    scores = [
        {"function": name, "initial": _mean(first.get(metric)), "final": _mean(last[metric])}
        for name, metric in rewards_in(last).items()
    ]
    before, after = (f"update {row['step']}" for row in (first, last))
    rows, special = [], set()
    for one, other in zip(kept[first["step"]], kept[last["step"]], strict=False):
        if one["prompt"] == other["prompt"]:
            texts = {before: _shortened(one["completion"]), after: _shortened(other["completion"])}
            changed = {"reward before": _written(one["reward"]), "reward after": _written(other["reward"])}
            rows.append({"prompt": _shortened(one["prompt"])} | texts | changed)
            special |= {*one["special"], *other["special"]}
    return (
        f"{_html_table(scores) if scores else ''}<p>Means of the reward functions over the held-out responses. Below: "
        "the first response to some of the prompts, not chosen by reward.</p>"
        f"{_html_table(rows, preformatted=('prompt', before, after), special=special) if rows else ''}"
    )


def _mean(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def histories(runs: Sequence[RunData]) -> list[str]:
    """Return a sentence for each run that began from another one, and for each field changed on resuming."""
    found = []
    for run in runs:
        if run.origin is not None:
            taken = ", ".join(run.origin["taken"])
            found.append(f"{run.folder} began from {run.origin['folder']}@{run.origin['iteration']}: {taken}")
        found += [f"{run.folder}: {change_line(change)}" for change in run.changes]
    return found


def notes(groups: Sequence[Group]) -> list[str]:
    """Return a sentence for each run whose reward may be gamed."""
    found = []
    for run in (run for group in groups for run in group.runs):
        measured = [row for row in run.rows if is_evaluated(row)]
        if measured and (note := gamed(measured[0], measured[-1])):
            found.append(f"{run.folder}: {note}")
    return found


def _written(reward: float | None) -> str | None:
    return None if reward is None else f"{reward:.4g}"


def _shortened(text: str) -> str:
    """Leave out the middle of a long text. The end has the answer."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def _html_table(
    rows: Sequence[Mapping[str, Any]], preformatted: Sequence[str] = ("command",), special: Collection[str] = ()
) -> str:
    numeric = {
        name
        for name in rows[0]
        if name in ("initial", "final", "change", "time", "tokens/s", "reward", "reward before", "reward after")
        or _is_number(rows[0][name])
    }
    head = "".join(f"<th{' class=n' if name in numeric else ''}>{html.escape(name)}</th>" for name in rows[0])
    body = []
    for row in rows:
        cells = []
        for name in rows[0]:
            text = "–" if row[name] is None else str(row[name])
            text = _marked(text, special) if name in preformatted else html.escape(text)
            kind = " class=long" if name in ("command", "completion") or name.startswith("update ") else ""
            text = f"<pre{kind}>{text}</pre>" if name in preformatted else text
            cells.append(f"<td{' class=n' if name in numeric else ''}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=wide><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _marked(text: str, special: Collection[str]) -> str:
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special else [text]
    return "".join(
        f"<b class=token>{html.escape(part)}</b>" if part in special else html.escape(part) for part in parts
    )


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
