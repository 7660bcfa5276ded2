"""Checks of a config for another machine, and the plan that tells what they leave open."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from gspo_jax import installs
from gspo_jax.config_files import last_given
from gspo_jax.errors import UserError
from gspo_jax.planning import topology
from gspo_jax.setup.checks import check_elsewhere


def check_for(config: ConfigDict, where: str, words: Sequence[str]) -> str:
    """Check a config for a number of devices, 0 for any, or for slices such as "v5e-8" or "2xv5p-128".

    Return what was checked and, from the config's flags `words`, the `plan` that tells the rest: memory and time.

    Raises:
      UserError: `where` is none of these, or as `check_elsewhere`.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\D.*)|(\d+)", where)
    named = topology.of_type(match[2]) if match and match[2] else None
    if match is None or (match[2] and named is None):
        raise UserError(f"--check_for is {where!r}; use a number of devices, or a slice such as v5e-8 or 2xv5p-128")
    slices, count = int(match[1] or 1), int(match[3] or 0)
    kind, chips = named or ("v5e" if count <= 256 else "v5p", count)
    devices = slices * chips * (topology.CHIPS[kind].chiplets if named else 1)
    left = check_elsewhere(config, devices=devices, slices=slices)
    place = f" for {where}, {topology.counted(kind, devices)}" if named else f" for {count} devices" if count else ""
    says = f"the config is valid{place}: fields and mesh only"
    if left:
        says += f"; not checked here: {', '.join(left)}"
    says += "; run plan to see whether it fits and how long it takes"
    shape = topology.of_chips(kind, chips or 8)
    if shape is None or last_given(words, "config") is None:
        return says
    flags = [*_known_here(config, words), f"--topology={shape}", *[f"--slices={slices}"] * (slices > 1)]
    return f"{says}{'' if named else ', such as'}:\n  {installs.python()} -m gspo_jax.plan {shlex.join(flags)}"


def _known_here(config: ConfigDict, words: Sequence[str]) -> list[str]:
    """Return the config's flags without folders that only the other machine has."""
    kept = [word for word in words if not re.match("--?config.data.folder=", word)]
    model = Path(config.model.folder)
    if not config.model.folder or model.is_dir():
        return kept
    kept = [word for word in kept if not re.match("--?config.model.folder=", word)]
    return kept if config.model.published else [*kept, f"--config.model.published={model.name}"]  # named like its model
