"""Small state files of a run folder."""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_jax import foreign
from gspo_jax.errors import UserError
from gspo_jax.folder.lines import write_atomically
from gspo_jax.versions import versions

CONFIG_FILE = "config.json"
STOPPED_FILE = "stopped.json"
"""The checkpoint `step` to resume from, the `phase` of the signal, and `seconds` from it until everything was saved.

Finished runs exit with code 0 too.
"""
FINISHED_FILE = "finished.json"
"""The last checkpoint's `step`."""
SAVED_FILE = "saved.json"
"""The newest checkpoint's `step`, to notice lost checkpoints."""
ORIGIN_FILE = "origin.json"
"""Of a run that began from another one's checkpoint: what was taken from where, see run/branch.py."""
CHANGES_FILE = "changes.json"
"""Fields changed on resuming: `field`, values `before` and `after`, first `update` and `iteration` with the latter."""


def write_config(workdir: str | os.PathLike[str], config: Mapping[str, Any], *, command: str) -> None:
    """Write `config.json`: the config's sections, `versions` and `command`."""
    start = {"command": command, "versions": versions()}
    if both := start.keys() & config.keys():
        raise ValueError(f"a config must not have a field named {min(both)}: config.json has the run's there")
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(workdir) / CONFIG_FILE, json.dumps(start | dict(config), indent=2, default=list) + "\n")


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the contents of `config.json`, if any."""
    return foreign.read_json(Path(workdir) / CONFIG_FILE, inside=workdir, remedy="restore it or delete it")


def fields_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the contents of `config.json`."""
    return {name: value for name, value in content.items() if name not in ("command", "versions")}


def by_field(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values as JSON has them, by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(config)).items():
        flat |= {f"{name}.{key}": x for key, x in by_field(value).items()} if isinstance(value, dict) else {name: value}
    return flat


def note(folder: str | os.PathLike[str], name: str, /, **facts: Any) -> None:
    """Write one of the small files."""
    write_atomically(Path(folder) / name, json.dumps(facts) + "\n")


def read_note(workdir: str | os.PathLike[str], name: str) -> dict[str, Any] | None:
    """Return the contents of one of the small files, if any. Raises UserError if it is damaged."""
    return foreign.read_json(Path(workdir) / name, inside=workdir, remedy="restore it or delete it")


def write_changes(workdir: str | os.PathLike[str], changes: Sequence[Mapping[str, Any]]) -> None:
    """Write all changes so far to `changes.json`. A run without any has no such file."""
    if changes:
        note(workdir, CHANGES_FILE, changes=list(changes))
    else:
        (Path(workdir) / CHANGES_FILE).unlink(missing_ok=True)


def read_changes(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the changes on resuming, oldest first."""
    found = read_note(workdir, CHANGES_FILE)
    return [] if found is None else found["changes"]


def change_line(change: Mapping[str, Any]) -> str:
    """Return a change on resuming as text: "optimizer.learning_rate 1e-06 → 5e-07 from update 121 on"."""
    values = f"{change['before']!r} → {change['after']!r}"
    return f"{change['field']} {values} from update {change['update']} on"


def clear_end(workdir: str | os.PathLike[str]) -> None:
    """Remove `stopped.json` and `finished.json`."""
    for name in (STOPPED_FILE, FINISHED_FILE):
        (Path(workdir) / name).unlink(missing_ok=True)


def read_saved(workdir: str | os.PathLike[str]) -> int | None:
    """Return the step in `saved.json`, if any. Raises UserError if it is damaged."""
    path = Path(workdir) / SAVED_FILE
    if not foreign.is_file(path, inside=workdir):
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged; delete it if the run's checkpoints are there") from None


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Return `folder` as a path. Raises UserError with a similar folder if missing."""
    foreign.check_name(folder, "the run folder")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UserError(f"{folder} is not a folder; give the --workdir of a run")
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the --workdir of a run"
        raise UserError(f"folder {folder} does not exist{hint}")
    return path
