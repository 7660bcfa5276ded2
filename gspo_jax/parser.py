"""Argument parser for commands without a config."""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gspo_jax import commands, exits
from gspo_jax.errors import ScoringFailed, UserError, fault


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UserErrors, with the nearest option."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of exiting."""
        options = [option for action in self._actions for option in action.option_strings]
        words = [word.partition("=")[0].rstrip(",:") for word in message.split() if word.startswith("-")]
        mistyped = [word for word in words if word not in options]
        near = [match for word in mistyped for match in difflib.get_close_matches(word, options, n=1)]
        raise UserError(message + (f"; did you mean {near[0]}?" if near else ""))

    def run(
        self, command: Callable[[argparse.Namespace], None], given: Sequence[str] | None, *, place: str = "--out"
    ) -> int:
        """Run a command on the given arguments, None for the command line's, and return its exit code.

        It is 2 after a mistake, 7 if a reward scored nothing, and 1 after a fault of a disk, and each is one sentence.
        `place` is named if the disk's error has no path.
        """
        try:
            command(self.parse_args(given))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return exits.MISTAKE
        except ScoringFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return exits.UNSCORED
        except Exception as error:
            says = fault(error, place)
            if says is None and not isinstance(error, OSError):
                raise
            print(f"error: {says or error}", file=sys.stderr)
            return exits.MISTAKE if says is None else 1
        return 0


def make_parser(name: str) -> Parser:
    """Return the parser of a command of commands.py."""
    command = commands.COMMANDS[name]
    parser = Parser(f"gspo-jax {name}", command.says)
    for flag in command.flags:
        given: dict[str, Any] = {"help": flag.help}
        if flag.choices:
            given["choices"] = flag.choices
        if not flag.dashes:
            many = "+" if flag.repeated else None if flag.required else "?"
            parser.add_argument(flag.name, metavar=flag.metavar, nargs=many, **given)
        elif flag.kind is bool:
            parser.add_argument(f"--{flag.name}", action="store_true", **given)
        else:
            dest = flag.dest or flag.name
            given |= {"type": flag.kind, "default": flag.default, "required": flag.required, "dest": dest}
            parser.add_argument(f"--{flag.name}", metavar=flag.metavar, **given)
    return parser
