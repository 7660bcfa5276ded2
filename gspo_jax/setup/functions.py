"""User functions: `functions.NAME = 'path/to/file.py:function'`."""

import inspect
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from gspo_jax import objectives, references
from gspo_jax.data import tasks
from gspo_jax.errors import UserError
from gspo_jax.objectives import mismatch
from gspo_jax.rewards import code, environments, functions, served, steps

Function = Callable[..., Any]


def own(config: ConfigDict) -> dict[str, str]:
    """Return the user functions, name -> reference."""
    return config.functions.to_dict()


def load(config: ConfigDict) -> dict[str, Function]:
    """Import the user functions, once.

    Raises:
      UserError: a name is in a catalogue, or a reference leads to no function.
    """
    if not len(config.functions):
        return {}
    from gspo_jax.rewards import isolated  # takes a second

    catalogues = {
        "reward": (*functions.__all__, *isolated.__all__, *code.__all__, *served.NAMES),
        "step reward": steps.NAMES,
        "environment": environments.__all__,
        "objective": objectives.catalogue.__all__,
        "mismatch correction": mismatch.__all__,
        "task": tasks.TASKS,
    }
    loaded = {}
    for name, reference in own(config).items():
        for kind, names in catalogues.items():
            if name in names:
                raise UserError(f"functions.{name} has the name of the catalogue's {kind} {name!r}; choose another")
        try:
            loaded[name] = references.function(reference)
        except references.BadReference as error:
            raise UserError(f"functions.{name}: {error}") from error
    return loaded


def check_calls(config: ConfigDict, kind: str, name: str, *arguments: str) -> None:
    """Raise a UserError unless a user function accepts these positional arguments. Other names pass.

    `kind` and `arguments` are names for messages.
    """
    function = load(config).get(name)
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # some extension functions have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"functions.{name}: {config.functions[name]} is {name}{signature}, but {kind}s are called with "
            f"({', '.join(arguments)}): {error}"
        ) from None
