"""Lists the config's fields with default, range and meaning.

gspo-jax fields sampling
"""

import fnmatch
import inspect
import re
import sys
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from gspo_jax import config as config_lib
from gspo_jax.config import RANGES
from gspo_jax.errors import UserError, nearest
from gspo_jax.parser import make_parser
from gspo_jax.setup.fields import at, names
from gspo_jax.setup.same import may_change

_LINE = re.compile(r"\s+config\.([\w.]+)(?: = |\.update\()(.*)")
_PART = re.compile(r"(.*?)\s*(?:# (.*))?$")


def meanings(function: Callable[..., ConfigDict]) -> dict[str, str]:
    """Return the comments of a config function on its fields and sections, by dotted name."""
    found, above = {}, []
    for line in inspect.getsource(function).splitlines():
        if comment := re.match(r"\s+# (.*)", line):
            above.append(comment[1])
        elif field := _LINE.match(line):
            part = _PART.match(field[2])
            beside = [part[2]] if part and part[2] else []
            found[field[1]] = " ".join([*above, *beside]) or found.get(field[1], "")
            above = []
        else:
            above = []
    return found


def described(pattern: str = "") -> str:
    """Return a paragraph per field with the pattern in its name, or matching it if it has a `*`.

    Raises:
      UserError: no field matches.
    """
    config, said = config_lib.base(), meanings(config_lib.base)
    for section in ("optimizer", "coldstart.optimizer", "critic.optimizer"):
        said |= {f"{section}.{name}": says for name, says in meanings(config_lib.adamw).items()}
    every = [*names(config), *(name for name in said if at(config, name) == ConfigDict())]  # empty ones take any names
    chosen = [name for name in every if fnmatch.fnmatch(name, pattern) or ("*" not in pattern and pattern in name)]
    if not chosen:
        near = nearest(pattern, every) or nearest(pattern, {name.rpartition(".")[2] for name in every})
        hint = f"did you mean {near!r}?" if near else "gspo-jax fields lists all of them"
        raise UserError(f"no field of the config has {pattern!r} in its name; {hint}")
    return "\n".join(_paragraph(name, at(config, name), said) for name in chosen)


def _paragraph(name: str, default: object, said: dict[str, str]) -> str:
    allowed = f"   {RANGES[name].words}" if name in RANGES else ""
    resume = "   [may change on resume]" if may_change(name) else ""
    section = name.rpartition(".")[0]
    says = said.get(name) or said.get(section, "")
    shown = f"{name}.NAME" if isinstance(default, ConfigDict) else f"{name} = {default!r}"
    return f"{shown}{allowed}{resume}" + (f"\n    {says}" if says else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return make_parser("fields").run(lambda given: print(described(given.pattern or "")), arguments)


if __name__ == "__main__":
    sys.exit(main())
