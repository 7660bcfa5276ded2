"""Run folders, read for reports: groups of runs that differ only in seed, their curves and numbers."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import METRICS_FILE, read_metrics
from gspo_jax.folder.notes import ORIGIN_FILE, by_field, fields_of, read_changes, read_config, read_note
from gspo_jax.studies.goodput import goodput
from gspo_jax.studies.looks import Look, looks

IGNORED_FIELDS = ("seed", "workdir")
"""Config fields, by last name part, that may differ within a group."""
LABELLED_BY_VALUE = ("name", "replay", "correction")
"""Settings, by last name part, that labels show by value alone."""


class Metric(NamedTuple):
    """A metric's name in reports, and the form of its values."""

    title: str
    unit: str
    """Begins with "share" for shares, 0 to 1."""
    how: str
    """Number format."""

    @property
    def is_share(self) -> bool:
        """True for shares, 0 to 1."""
        return self.unit.startswith("share")

    def write(self, value: float, *, signed: bool = False) -> str:
        """Format a value for a table."""
        if not value and self.how.endswith("e"):
            return "0"
        text = f"{value:{'+' if signed else ''},{self.how}}"
        return text.replace("-", "+" if signed else "", 1) if text.strip("-0.") == "" else text  # no negative zero

    def label(self, value: float) -> str:
        """Format a value for a picture: a table's digits, with shares in per cent."""
        digits = int(self.how[1:-1])
        return f"{value:.{digits - 2}%}" if self.is_share else self.write(value)


SUMMARY = {
    "eval/accuracy": Metric("Held-out accuracy", "share of problems", ".3f"),
    "eval/reward": Metric("Held-out reward", "per response", ".3f"),
    "reward/mean": Metric("Reward", "per response", ".3f"),
    "response_length/mean": Metric("Response length", "tokens", ".1f"),
    "actor/entropy": Metric("Entropy", "nats per token", ".3f"),
    "clip_fraction/token": Metric("Clip fraction", "share of tokens", ".4f"),
    "clip_fraction/sequence": Metric("Clip fraction", "share per response", ".4f"),
    "routing/flip_rate": Metric("Routing flip rate", "share of experts", ".4f"),
    "routing/router_kl": Metric("Router KL", "nats", ".1e"),
    "ratio/token_log_std": Metric("Ratio spread, tokens", "nats", ".4f"),
    "ratio/sequence_log_std": Metric("Ratio spread, responses", "nats per token", ".4f"),
    "mismatch/kl": Metric("Sampler to trainer KL", "nats per token", ".1e"),
}
"""Metrics of all reports."""
_LOGPROB = 16 * float(np.finfo(np.float32).eps)
"""Nats: twice the rounding of a float32 log-prob of up to 16 nats."""
RESOLUTION = {
    "actor/entropy": _LOGPROB,
    "ratio/token_log_std": _LOGPROB,
    "ratio/sequence_log_std": _LOGPROB,
    "mismatch/kl": _LOGPROB**2 / 2,  # log-ratios x that are rounding: expm1(x) − x is about x²/2
    "routing/router_kl": 2 * float(np.finfo(np.float32).eps),  # a sum of probabilities times log-ratios
}
"""Values below these are float32 rounding and count as 0."""
COLLAPSE_WINDOW = 5
"""Iterations in the moving average of the reward that tells a collapse."""
BY_MINIBATCH = ("routing/flip_rate",)
"""Metrics that `facts` also reports by mini-batch."""


@dataclass(frozen=True)
class RunData:
    """The contents of one run folder."""

    folder: Path
    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl, by step."""
    config: dict[str, Any] | None
    """Config by dotted field name, None without a config.json."""
    command: str
    origin: dict[str, Any] | None = None
    """What it took from another run's checkpoint, None if nothing, as in origin.json."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Fields changed on resuming, as in changes.json."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of packages, and the `machine` in a study's record. Empty if unknown."""

    @property
    def seed(self) -> int | None:
        """Seed of its config, None without one."""
        return None if self.config is None else self.config.get("seed")


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    look: Look
    runs: list[RunData]

    @property
    def caption(self) -> str:
        """Label, with the number of seeds if above one."""
        return f"{self.label} ({len(self.runs)} seeds)" if len(self.runs) > 1 else self.label

    def each(self) -> "list[Group]":
        """Return one group per run."""
        return [replace(self, runs=[run]) for run in self.runs]


@dataclass(frozen=True)
class Curve:
    """A metric of a group's R runs at their N common steps."""

    steps: np.ndarray
    raw: np.ndarray
    """[R, N], as logged."""
    smooth: np.ndarray
    """[R, N], centred moving average of each run."""
    seeds: list[int | None]
    """Length R, None where a run has no config."""


def load_run(folder: str | os.PathLike[str]) -> RunData:
    """Read a run folder, or raise UserError if it has no metrics yet."""
    rows = read_metrics(folder)
    if not rows:
        raise UserError(f"{Path(folder) / METRICS_FILE} has no complete line yet; wait for the run's first update")
    config = read_config(folder)
    command = "" if config is None else str(config.get("command", ""))
    fields = None if config is None else by_field(fields_of(config))
    past = {"origin": read_note(folder, ORIGIN_FILE), "changes": read_changes(folder)}
    made_by = {} if config is None else config.get("versions", {})
    return RunData(folder=Path(folder), rows=rows, config=fields, command=command, versions=made_by, **past)


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Group runs with equal settings, labelled by settings that differ, else by folders."""
    by_settings: dict[str, list[RunData]] = {}
    for run in runs:
        key = str(run.folder) if run.config is None else json.dumps(_settings(run.config), sort_keys=True)
        by_settings.setdefault(key, []).append(run)
    members = list(by_settings.values())
    differing = differences(runs)
    labels = []
    for group in members:
        label = _common_name([run.folder.resolve() for run in group])
        if 0 < len(differing) <= 3 and all(run.config is not None for run in runs):
            settings = group[0].config or {}
            objective_first = sorted(differing, key=lambda name: name != "objective.name")
            values = {name: settings.get(name) for name in objective_first}
            switched_on = {name: value for name, value in values.items() if not _is_off(value)}
            by_value = LABELLED_BY_VALUE if len(values) > 1 else ("name",)
            label = ", ".join(_setting_label(*item, by_value) for item in (switched_on or values).items())
        labels.append(label)
    labels = [
        str(group[0].folder) if labels.count(label) > 1 else label for label, group in zip(labels, members, strict=True)
    ]
    chosen = looks([(label, *_objective(group[0])) for label, group in zip(labels, members, strict=True)])
    return [Group(*parts) for parts in zip(labels, chosen, members, strict=True)]


def _objective(run: RunData) -> tuple[str | None, str]:
    config = run.config or {}
    return config.get("objective.name"), config.get("routing.replay") or "none"


def differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Return the settings that differ, with each run's value (None if missing)."""
    settings = [_settings(run.config or {}) for run in runs]
    names = sorted({name for one in settings for name in one})
    table = {name: [one.get(name) for one in settings] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def curve(group: Group, name: str, *, minibatch: int | None = None) -> Curve | None:
    """Return a metric by iteration: the mean over its mini-batches, or the value in one.

    Values below RESOLUTION are 0.
    """
    per_run = [(run, found) for run in group.runs if (found := _per_iteration(run.rows, name, minibatch))]
    shared = sorted(set.intersection(*(set(points) for _, points in per_run))) if per_run else []
    if not shared:
        return None
    raw = np.array([[points[step] for step in shared] for _, points in per_run], dtype=np.float64)
    raw = _resolved(raw, name)
    window = 1 if _is_evaluation(name) else max(1, len(shared) // 12) | 1
    kernel = np.ones(window)
    weight = np.convolve(np.ones(len(shared)), kernel, mode="same")
    smooth = np.stack([np.convolve(row, kernel, mode="same") / weight for row in raw]) if len(shared) >= window else raw
    return Curve(np.array(shared), raw, smooth, [run.seed for run, _ in per_run])


def list_curve(group: Group, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (steps [N], values [N, L]) of a list metric: smoothed means over runs and mini-batches."""
    rows = [row for row in group.runs[0].rows if isinstance(row.get(name), list)]
    columns = [curve(group, f"{name}/{i}") for i in range(len(rows[0][name]))] if rows else []
    present = [column for column in columns if column is not None]
    if not present:
        return None
    shared = sorted(set.intersection(*(set(column.steps.tolist()) for column in present)))
    values = [column.smooth.mean(axis=0)[np.isin(column.steps, shared)] for column in present]
    return (np.array(shared), np.stack(values, axis=1)) if shared else None


def tail_mean_by_minibatch(group: Group, name: str) -> dict[int, float]:
    """Return a metric's mean over runs and the last tenth of the iterations, by mini-batch."""
    numbers = {row.get("minibatch") for run in group.runs for row in run.rows}
    found = {i: curve(group, name, minibatch=i) for i in sorted(i for i in numbers if i is not None)}
    return {i: tail_mean(column.raw.mean(axis=0)) for i, column in found.items() if column is not None}


def tail_mean(values: np.ndarray) -> float:
    """Return the mean of the last tenth of the values."""
    return float(values[-max(1, len(values) // 10) :].mean())


def collapse(rewards: Float[np.ndarray, " N"]) -> int | None:
    """Return the first iteration, from 1, with the run collapsed at its end, or None.

    A run collapses when the mean reward of the last COLLAPSE_WINDOW iterations, or of all if fewer, falls below half of
    its highest value so far. Later recovery does not count.
    """
    means = moving_means(rewards)
    below = np.flatnonzero(means < np.maximum.accumulate(means) / 2)
    return int(below[0]) + 1 if len(below) else None


def moving_means(rewards: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Return the mean of the last COLLAPSE_WINDOW iterations, or of all if fewer, at each."""
    sums, end = np.cumsum([0.0, *rewards]), np.arange(1, len(rewards) + 1)
    first = np.maximum(end - COLLAPSE_WINDOW, 0)
    return (sums[end] - sums[first]) / (end - first)


def first_and_last(found: Curve, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return each run's initial and final values: first and last evaluation, or tenth of the iterations."""
    count = 1 if _is_evaluation(name) else max(1, found.raw.shape[1] // 10)
    first, last = found.raw[:, :count].mean(axis=1), found.raw[:, -count:].mean(axis=1)
    return _resolved(first, name), _resolved(last, name)


def final(group: Group, name: str) -> dict[int | None, float]:
    """Return each run's final value, by seed: last evaluation, or mean of the last iterations."""
    found = curve(group, name)
    if found is None:
        return {}
    last = first_and_last(found, name)[1]
    return {seed: float(np.mean(last[[other == seed for other in found.seeds]])) for seed in found.seeds}


def summary(groups: Sequence[Group]) -> list[str]:
    """Return the metrics that `facts` reports: results, then the rest of SUMMARY."""
    return list(dict.fromkeys([*results(groups), *SUMMARY]))


def results(groups: Sequence[Group]) -> list[str]:
    """Return the metrics of quality: accuracies and rewards."""
    return [quality(groups), *benchmarks(groups), "reward/mean", *reward_functions(groups)]


def quality(groups: Sequence[Group]) -> str:
    """Return the metric that ranks groups: the held-out accuracy, or the mean reward if no run has an accuracy."""
    named = _names(groups)
    return "eval/reward" if "eval/accuracy" not in named and "eval/reward" in named else "eval/accuracy"


def describe(name: str) -> Metric:
    """Return the description of a metric of SUMMARY, a benchmark or a reward function."""
    kind, _, own = name.partition("/")
    if kind == "benchmark":
        return SUMMARY["eval/accuracy"]._replace(title=f"Benchmark: {own}")
    if kind == "reward" and own != "mean":
        return SUMMARY["reward/mean"]._replace(title=f"Reward: {own}")
    return SUMMARY[name]


def benchmarks(groups: Sequence[Group]) -> list[str]:
    """Return the metrics of the runs' benchmarks."""
    named = _names(groups)
    return sorted(name for name in named if name.startswith("benchmark/") and f"{name}_low" in named)


def reward_functions(groups: Sequence[Group]) -> list[str]:
    """Return the metric of each reward function, none if a single one equals `reward/mean`."""
    runs = [run for group in groups for run in group.runs]
    functions = dict.fromkeys(
        f"reward/{field.partition('.')[2]}"
        for run in runs
        for field in run.config or {}
        if field.startswith(("rewards.", "step_rewards."))
    )
    found = [name for name in functions if name in _names(groups)]
    same = len(found) == 1 and all(row.get(found[0]) == row.get("reward/mean") for run in runs for row in run.rows)
    return [] if same else found


def facts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return each group's metrics (see `summary`): initial, final and change (mean, min and max over runs).

    Initial and final are the first and last evaluation, or means over the first and last tenth of the iterations.
    `seconds_per_iteration` is the median without each run's first iteration, which includes compilation.
    """
    names, found = summary(groups), []
    for group in groups:
        metrics = {}
        for name in names:
            column = curve(group, name)
            if column is not None:
                initial, last = first_and_last(column, name)
                values = {"initial": initial, "final": last, "change": last - initial}
                metrics[name] = {key: _statistics(value) for key, value in values.items()}
        seconds = [s for run in group.runs for s in _iteration_seconds(run)[1:]]
        found.append(
            {
                "label": group.label,
                "runs": [_run_facts(run) for run in group.runs],
                "metrics": metrics,
                "minibatches": {name: list(tail_mean_by_minibatch(group, name).values()) for name in BY_MINIBATCH},
                "seconds_per_iteration": float(np.median(seconds)) if seconds else None,
            }
        )
    return found


def _iteration_seconds(run: RunData) -> list[float]:
    return [seconds for _, seconds in sorted(_per_iteration(run.rows, "timing/iteration_s", None).items())]


def _run_facts(run: RunData) -> dict[str, Any]:
    rewards = [value for _, value in sorted(_per_iteration(run.rows, "reward/mean", None).items())]
    speeds = list(_per_iteration(run.rows, "throughput/tokens_per_s", None).values())
    return {
        "folder": str(run.folder),
        "seed": run.seed,
        "updates": run.rows[-1]["step"],
        "collapsed": collapse(np.array(rewards)) is not None,
        "skipped_updates": sum(row.get("update/skipped") or 0 for row in run.rows),
        # First and last times would include the pause of a resumed run.
        "seconds": round(sum(row.get("timing/iteration_s") or 0 for row in run.rows), 1),
        "goodput": goodput(run.rows),
        "tokens_per_s": float(np.median(speeds)) if speeds else None,
        "command": run.command,
        "origin": run.origin,
        "changes": list(run.changes),
    }


def _common_name(folders: Sequence[Path]) -> str:
    """Return the common name of folders of seeds: "tiny" for tiny-0, tiny-1 or tiny/seed0, tiny/seed1."""
    if len(folders) == 1:
        return folders[0].name
    names = {re.sub(r"[-_. =]*(seed)?[-_. =]*\d+$", "", folder.name) for folder in folders}
    return names.pop() if len(names) == 1 and "" not in names else folders[0].parent.name


def _per_iteration(rows: Sequence[Mapping[str, Any]], name: str, minibatch: int | None) -> dict[int, float]:
    """Return {last step of an iteration: mean of its rows}. `name/3` also finds element 3 of a list metric `name`."""
    parent, _, index = name.rpartition("/")
    points: dict[Any, list[tuple[int, float]]] = {}
    for row in rows:
        value = row.get(name)
        if value is None and index.isdigit() and isinstance(row.get(parent), list) and int(index) < len(row[parent]):
            value = row[parent][int(index)]
        if isinstance(value, (int, float)) and math.isfinite(value) and minibatch in (None, row.get("minibatch")):
            points.setdefault(row.get("iteration", f"step {row['step']}"), []).append((row["step"], value))
    return {found[-1][0]: float(np.mean([value for _, value in found])) for found in points.values()}


def _resolved(values: np.ndarray, name: str) -> np.ndarray:
    return np.where(np.abs(values) < RESOLUTION.get(name, 0.0), 0.0, values)


def _is_evaluation(name: str) -> bool:
    """Return True for metrics of held-out problems, where each value stands by itself."""
    return name.startswith(("eval/", "benchmark/"))


def _names(groups: Sequence[Group]) -> set[str]:
    return {name for group in groups for run in group.runs for row in run.rows for name in row}


def _statistics(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name.rpartition(".")[2] not in IGNORED_FIELDS}


def _setting_label(name: str, value: Any, by_value: Sequence[str]) -> str:
    last = name.rpartition(".")[2]
    return str(value) if last in by_value else f"{last}={value}"


def _is_off(value: Any) -> bool:
    """Return True for values that labels leave out. 0 is not one."""
    return value is None or value is False or value in ("", "none")
