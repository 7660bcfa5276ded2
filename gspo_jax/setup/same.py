"""The config in a run folder, and changes allowed on resuming."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.config import MAY_CHANGE, base
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import by_field, fields_of, read_config
from gspo_jax.setup import fields, learning


def of_folder(workdir: str | Path) -> ConfigDict | None:
    """Return the config of a local folder's run at its last start, if kept.

    Raises:
      UserError: it was saved by another version of gspo_jax.
    """
    saved = read_config(workdir)
    if saved is None or "model_type" in saved:  # none, or a model's
        return None
    kept = fields_of(saved)
    check_version(kept, workdir)
    config = base()
    with config.unlocked():
        for head in ("objective", "mismatch"):  # their sections may leave fields out
            for name in [name for name, value in kept[head].items() if isinstance(value, dict)]:
                config[head][name] = ConfigDict()
        config.update(_as_configs(kept))
    return config


def _as_configs(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _as_configs(value) for name, value in tree.items()}
    return tuple(map(_as_configs, tree)) if isinstance(tree, list) else tree


def check_version(saved: Mapping[str, Any], workdir: str | Path, *, flag: str = "--workdir") -> None:
    """Raise a UserError unless a saved config has today's fields."""
    ours, theirs = by_field(base().to_dict()), by_field(saved)
    for name in sorted(ours.keys() ^ theirs.keys()):
        if not fields.is_open(name):
            has = "has" if name in theirs else "lacks"
            raise UserError(
                f"the run in {workdir} was saved by another version of gspo_jax, whose config {has} {name}; go on with "
                f"that version, or start another run with another {flag}"
            )


def check_same_run(
    config: ConfigDict, saved: Mapping[str, Any], workdir: str | Path, *, flag: str = "--workdir"
) -> None:
    """Raise a UserError if the config differs from the checkpoint's outside `MAY_CHANGE`.

    `iterations` may not change under a cosine learning rate either. `flag` chose the folder.
    """
    check_version(saved, workdir, flag=flag)
    ours, theirs = by_field(config.to_dict()), by_field(saved)
    for name in sorted(ours.keys() | theirs.keys()):
        if not name.startswith(MAY_CHANGE) and ours.get(name) != theirs.get(name):
            raise UserError(
                f"{name} is {ours.get(name)!r} here and {theirs.get(name)!r} in the run in {workdir}; "
                f"set it back, or start another run with another {flag}"
            )
    falling = learning.falling(config)
    if falling and ours["iterations"] != theirs["iterations"]:
        raise UserError(
            f"iterations is {ours['iterations']} here and {theirs['iterations']} in the run in {workdir}, over which "
            f"its learning rate falls to 0 ({falling[0]} is 'cosine'); set it back, or start another run with another "
            f"{flag}, such as from these weights (python -m gspo_jax.convert --from={workdir} --to=FOLDER)"
        )
