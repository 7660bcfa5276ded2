"""The config that a run folder keeps, and which of its fields a command that goes on from there may change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.config import base
from gspo_jax.errors import UserError
from gspo_jax.reporting.writers import fields_of, read_config
from gspo_jax.setup import fields, learning

MAY_CHANGE = (
    "iterations",
    "eval.",
    "log.",
    "checkpoint.",
    "scoring.",
    "data.data_dir",
    "cpu_devices",
    "processes.",
    "mesh.",
    "sampling.slots",
    "model.dispatch",
    "model.remat",
    "training.row_tokens",
    "training.max_skipped",
    "training.logprob_chunk",
)
"""Config fields, by prefix, that may differ between a checkpoint and the run that resumes from it: they do not change a
run's numbers, except by rounding. `iterations` may not where a learning rate falls over all of them.
"""


def of_folder(workdir: str | Path) -> ConfigDict | None:
    """Return the config that the run in a local folder was last started with; None if the folder keeps none.

    Raises:
      UserError: it was saved by another version of gspo_jax.
    """
    saved = read_config(workdir)
    if saved is None:
        return None
    kept = fields_of(saved)
    check_version(kept, workdir)
    config = base()
    with config.unlocked():
        for head in ("objective", "mismatch"):  # whose sections may leave fields out
            for name in [name for name, value in kept[head].items() if isinstance(value, dict)]:
                config[head][name] = ConfigDict()
        config.update(_as_configs(kept))
    return config


def _as_configs(tree: Any) -> Any:
    """JSON's lists as tuples, as configs have them."""
    if isinstance(tree, dict):
        return {name: _as_configs(value) for name, value in tree.items()}
    return tuple(map(_as_configs, tree)) if isinstance(tree, list) else tree


def check_version(saved: Mapping[str, Any], workdir: str | Path, *, flag: str = "--workdir") -> None:
    """Raise a UserError if a saved config has other fields than those of today."""
    ours, theirs = _flat(base().to_dict()), _flat(saved)
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
    """Raise a UserError if the config differs from the checkpoint's in a field outside `MAY_CHANGE`.

    `iterations` may not change either where a learning rate falls over all of them. `flag` is the one with which the
    user chooses the folder.
    """
    check_version(saved, workdir, flag=flag)
    ours, theirs = _flat(config.to_dict()), _flat(saved)
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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted names with plain JSON values."""
    flat: dict[str, Any] = {}
    for key, value in json.loads(json.dumps(tree)).items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
