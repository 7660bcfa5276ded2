"""The config in a run folder, and changes allowed on resuming."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.config import ADJUSTABLE, MAY_CHANGE, base
from gspo_jax.errors import UserError
from gspo_jax.folder.notes import by_field, fields_of, read_config
from gspo_jax.setup import fields, learning


def of_folder(workdir: str | Path, *, flag: str = "--workdir") -> ConfigDict | None:
    """Return the config of a local folder's run at its last start, if kept.

    Raises:
      UserError: it was saved by another version of gspo_jax.
    """
    saved = read_config(workdir)
    if saved is None or "model_type" in saved:  # none, or a model's
        return None
    kept = fields_of(saved)
    check_version(kept, workdir, flag=flag)
    return as_config(kept)


def as_config(saved: Mapping[str, Any]) -> ConfigDict:
    """Return a saved config of this version."""
    config = base()
    with config.unlocked():
        for head in ("objective", "mismatch"):  # their sections may leave fields out
            for name in [name for name, value in saved[head].items() if isinstance(value, dict)]:
                config[head][name] = ConfigDict()
        config.update(_as_configs(saved))
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


def may_change(name: str) -> bool:
    """Return True if a resumed run may have another value of this field."""
    return name.startswith(MAY_CHANGE) or any(fnmatchcase(name, pattern) for pattern in ADJUSTABLE)


def differences(config: ConfigDict, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the (saved, present) values of fields that differ, as JSON has them, None if missing."""
    ours, theirs = by_field(config.to_dict()), by_field(saved)
    pairs = {name: (theirs.get(name), ours.get(name)) for name in sorted(ours.keys() | theirs.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_same_run(
    config: ConfigDict,
    saved: Mapping[str, Any],
    workdir: str | Path,
    *,
    flag: str = "--workdir",
    adjusts: bool = True,
) -> None:
    """Raise a UserError if the config differs from the checkpoint's outside `MAY_CHANGE` and, if `adjusts`, ADJUSTABLE.

    `iterations` may not change under a cosine learning rate either. `flag` chose the folder.
    """
    check_version(saved, workdir, flag=flag)
    changed = differences(config, saved)
    fixed = by_field(config.to_dict()).keys() ^ by_field(saved).keys()  # hyper-parameters of another version
    fixed = {name for name in fixed if name.startswith(("objective.", "mismatch."))}
    if config.sampling.partial.prompts is not None:
        there, here = ("recompute" if learning.recomputes(each) else "sampler" for each in (as_config(saved), config))
        if there != here:
            raise UserError(
                f"training.old_logprobs amounts to {here!r} here and to {there!r} in the run in {workdir}, which has "
                f"partial rollouts with the router log-probs of that; set it to {there!r}, or start another run with "
                f"another {flag}"
            )
        fixed.add("sampling.keep_top")  # they have so many ids per token
    for name, (there, here) in changed.items():
        if name in fixed or not (may_change(name) if adjusts else name.startswith(MAY_CHANGE)):
            raise UserError(
                f"{name} is {here!r} here and {there!r} in the run in {workdir}; set it back, or start another run "
                f"with another {flag}" + (f", such as from this one's weights (--from={workdir})" if adjusts else "")
            )
    falling = learning.falling(config)
    if falling and "iterations" in changed:
        there, here = changed["iterations"]
        raise UserError(
            f"iterations is {here!r} here and {there!r} in the run in {workdir}, over which its learning rate falls to "
            f"0 ({falling[0]} is 'cosine'); set it back, or start another run with another {flag}, whose learning rate "
            f"falls over its own iterations, from this one's weights (--from={workdir})"
        )
