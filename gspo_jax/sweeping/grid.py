"""Runs of a sweep: from flags or a config's `get_sweep` to commands and folders, checked before any work."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax import cli, coldstart, config_files
from gspo_jax.errors import UserError
from gspo_jax.folder.metrics import METRICS_FILE
from gspo_jax.folder.notes import fields_of, read_config, read_saved
from gspo_jax.setup.checks import check_elsewhere
from gspo_jax.setup.fields import at, check_value
from gspo_jax.setup.policy import model_config
from gspo_jax.setup.same import check_same_run
from gspo_jax.studies.panels import PANELS
from gspo_jax.types import Comparison

NAMED_BY_VALUE = ("name", "replay")
"""Fields, by last name part, that run names show by value alone."""
_OFF = ("", "none", "None", "False")


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """An initial policy shared by runs."""

    folder: Path
    words: tuple[str, ...]
    """Config flags of the first of these runs."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.folder.name

    @property
    def command(self) -> list[str]:
        """Training command."""
        return [sys.executable, "-m", "gspo_jax.coldstart", *self.words, f"--workdir={self.folder}"]


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """A run of a sweep."""

    name: str
    """Path in the sweep's folder, and name for messages."""
    folder: Path
    words: tuple[str, ...]
    config: ConfigDict
    cold: ColdStart | None
    """None if the run starts from `model.folder`."""
    varied: tuple[str, ...] = ()
    """Config fields, by dotted name, in which runs of the comparison differ."""

    @property
    def command(self) -> list[str]:
        """Command that trains or resumes it."""
        return [sys.executable, "-m", "gspo_jax.train", *self.words, f"--workdir={self.folder}"]

    @property
    def settings(self) -> dict[str, Any]:
        """Config without the seed."""
        return {name: value for name, value in self.config.to_dict().items() if name != "seed"}

    def is_done(self) -> bool:
        """Return True if all iterations are saved."""
        saved = read_saved(self.folder)
        return saved is not None and saved >= self.config.iterations

    def needs_cold_start(self) -> bool:
        """Return True if it starts from a cold start, not from a checkpoint or `model.folder`."""
        return self.cold is not None and read_saved(self.folder) is None


@dataclass(frozen=True, kw_only=True)
class Page:
    """Runs reported on one page."""

    title: str
    panels: str
    folder: Path
    """Report folder."""
    runs: list[SweepRun]


def comparisons(words: Sequence[str], settings: Sequence[str], seeds: str | None) -> list[Comparison]:
    """Return the comparisons of `--sweep` and `--seeds`, or else of the config file's `get_sweep`.

    Args:
      words: config flags of all runs.
      settings: values of `--sweep`, FIELD=VALUE,VALUE….
      seeds: value of `--seeds`.

    Raises:
      UserError: a flag, or the result of `get_sweep`, is no sweep.
    """
    file = config_files.config_flag(words)
    if settings:
        found = [Comparison(runs=_product(settings))]
    else:
        get_sweep = config_files.sweep_function(file)
        found = [Comparison(runs=[{}])] if get_sweep is None else _listed(get_sweep(), file)
        if get_sweep is None and seeds is None:
            raise UserError(
                f"{file} has no get_sweep(), so nothing to compare; give --sweep FIELD=VALUE,VALUE, or --seeds=N"
            )
    if seeds is None:
        return found
    if any("seed" in run for comparison in found for run in comparison.runs):
        raise UserError(f"get_sweep of {file} sets the seed of each run; leave out --seeds")
    counted = _seeds(seeds, words)
    if isinstance(counted, int):
        return [replace(comparison, seeds=counted) for comparison in found]
    return [
        replace(comparison, seeds=1, runs=[{"seed": seed, **run} for seed in counted for run in comparison.runs])
        for comparison in found
    ]


def make_plan(words: Sequence[str], found: Sequence[Comparison], folder: Path) -> list[Page]:
    """Return the runs of each comparison, in starting order. Nothing is written.

    Raises:
      UserError: a run's config is wrong, or its folder holds another run.
    """
    pages = [_page(words, comparison, folder) for comparison in found]
    for page in pages:
        by_settings: dict[str, SweepRun] = {}
        by_folder: dict[Path, SweepRun] = {}
        for run in page.runs:
            same = by_settings.setdefault(json.dumps(run.config.to_dict(), sort_keys=True), run)
            if same is not run:
                raise UserError(f"the runs {same.name} and {run.name} have the same settings; leave one of them out")
            if by_folder.setdefault(run.folder, run) is not run:
                raise UserError(f"two runs would have the folder {run.folder}, named after what varies; change a value")
            saved = read_config(run.folder)
            if saved is not None and read_saved(run.folder) is not None:
                check_same_run(run.config, fields_of(saved), run.folder, flag="--runs", adjusts=False)
    return pages


def find_folder(name: str) -> Path:
    """Return the folder of a sweep, `--runs`, without creating it.

    Raises:
      UserError: it is in a bucket, not writable, or the folder of a run.
    """
    if not name or "://" in name:
        raise UserError(f"--runs is {name!r}, but the runs of a sweep are on this machine; give a local folder")
    folder = Path(name)
    cli.check_output_folder(folder, flag="runs")
    if (folder / METRICS_FILE).exists():
        raise UserError(f"--runs={folder} is the folder of a run; give the sweep a folder of its own")
    return folder


def _product(settings: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination, the last field changing fastest."""
    runs: list[dict[str, str]] = [{}]
    for setting in settings:
        field, equals, listed = setting.partition("=")
        field, values = field.removeprefix("--").removeprefix("config."), listed.split(",")
        if not equals or not field:
            raise UserError(f"--sweep is {setting!r}; use FIELD=VALUE,VALUE, such as objective.name=gspo,grpo")
        if field == "seed":
            raise UserError(f"--sweep {setting} sweeps the seed; use --seeds={listed}")
        if field in runs[0]:
            raise UserError(f"--sweep {field} is given twice; give all its values at once")
        if len(values) == 1:
            raise UserError(f"--sweep {setting} has a single value; give several, or set it by --config.{setting}")
        if len(set(values)) < len(values):
            raise UserError(f"--sweep {setting} has a value twice; give each once")
        runs = [{**run, field: value} for run in runs for value in values]
    return runs


def _seeds(text: str, words: Sequence[str]) -> int | list[int]:
    listed = text.split(",")
    if not all(re.fullmatch(r"\d+", seed) for seed in listed) or (len(listed) == 1 and int(text) == 0):
        raise UserError(f"--seeds is {text!r}; use how many, such as 3, or which, such as 0,2,5")
    seeds = [int(seed) for seed in listed]
    if len(seeds) == 1:
        return seeds[0]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds={text} has a seed twice; give each once")
    if "seed" in map(_field, words):
        raise UserError(f"--seeds={text} lists the seeds; leave out --config.seed")
    return seeds


def _listed(made: Any, file: str) -> list[Comparison]:
    made = [made] if isinstance(made, Comparison) else made
    if isinstance(made, Sequence) and made and all(isinstance(run, Mapping) for run in made):
        made = [Comparison(runs=made)]
    if not (isinstance(made, Sequence) and made and all(isinstance(one, Comparison) for one in made)):
        raise UserError(
            f"get_sweep of {file} returns {made!r}; return a list of overrides, such as "
            '[{"objective.name": "gspo"}, {"objective.name": "grpo"}], or gspo_jax.types.Comparison'
        )
    names = [one.name for one in made]
    for one in made:
        where = f"get_sweep of {file}: the comparison {one.name!r}"
        if one.panels not in PANELS:
            raise UserError(f"{where} has panels {one.panels!r}; use {' or '.join(map(repr, PANELS))}")
        if not (isinstance(one.runs, Sequence) and one.runs and all(isinstance(run, Mapping) for run in one.runs)):
            raise UserError(f"{where} has runs {one.runs!r}; use a list of overrides, {{field: value}}")
        check_value(f"get_sweep of {file}: seeds", one.seeds, int)
        if one.seeds < 1 or (one.seeds > 1 and any("seed" in run for run in one.runs)):
            raise UserError(f"{where} has {one.seeds} seeds; use 1 or more, and 1 if its runs set the seed")
        if len(made) > 1 and (names.count(one.name) > 1 or not re.fullmatch(r"\w[\w.-]*", one.name)):
            raise UserError(f"{where} needs a name of its own, of letters, digits and _; give it one by name=")
    return list(made)


def _page(words: Sequence[str], comparison: Comparison, folder: Path) -> Page:
    varied = [field for field in dict.fromkeys(field for run in comparison.runs for field in run) if field != "seed"]
    for word in words:
        if _field(word) in varied:
            raise UserError(f"{word} sets a field that the sweep varies; leave it out")
    first = cli.read_config(words).seed
    runs = []
    for seed in range(first, first + comparison.seeds):
        for overrides in comparison.runs:
            made = _words({"seed": seed, **overrides}, words)
            config = _config(made, overrides)
            place = f"{_name(overrides, comparison.runs, varied) or 'seed'}-{config.seed}"
            name = f"{comparison.name}/{place}" if comparison.name else place
            cold = None
            if not config.model.folder:
                cold = ColdStart(folder=folder / f"coldstart-{config.seed}-{coldstart.digest(config)}", words=made)
            own: dict[str, Any] = {"words": made, "config": config, "cold": cold, "varied": tuple(varied)}
            runs.append(SweepRun(name=name, folder=folder / name, **own))
    report = folder / "report" / comparison.name
    return Page(title=comparison.title or comparison.name, panels=comparison.panels, folder=report, runs=runs)


def _field(word: str) -> str:
    """Return the config field of a flag, "" for `--config` itself."""
    name = word.lstrip("-").partition("=")[0].removeprefix("no")
    return name.removeprefix("config").removeprefix(".")


def _words(overrides: Mapping[str, Any], words: Sequence[str]) -> tuple[str, ...]:
    shared = [word for word in words if _field(word) != "seed"]
    return (*shared, *(f"--config.{field}={value}" for field, value in overrides.items()))


def _config(words: Sequence[str], overrides: Mapping[str, Any]) -> ConfigDict:
    config = cli.read_config(words)
    for field, value in overrides.items():
        is_text = isinstance(value, str)  # as flag values are
        if not is_text and at(config, field) != value:
            raise UserError(f"{field} is {value!r} in a run of get_sweep, which no flag can say; set it in get_config")
    model_config(config)
    check_elsewhere(config, devices=0)
    return config


def _name(overrides: Mapping[str, Any], runs: Iterable[Mapping[str, Any]], varied: Sequence[str]) -> str:
    """Name a run by the values that differ, without those that mean "off"."""
    values = {field: {str(run.get(field)) for run in runs} for field in varied}
    differing = [field for field in varied if field in overrides and len(values[field]) > 1]
    on = [field for field in differing if str(overrides[field]) not in _OFF] or differing
    last = [field.rpartition(".")[2] for field in varied]
    parts = []
    for field in on:
        short = field.rpartition(".")[2]
        name = short if last.count(short) == 1 else field
        by_value = name in (NAMED_BY_VALUE if len(differing) > 1 else ("name",))
        parts.append(str(overrides[field]) if by_value else f"{name}={overrides[field]}")
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))
