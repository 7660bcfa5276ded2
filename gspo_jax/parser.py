"""The parser of a command that takes no config: argparse, with the flags of commands.py and mistakes as UserErrors."""

import argparse
import difflib
from typing import Any, NoReturn

from gspo_jax import commands
from gspo_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises a UserError on a mistake, naming the nearest option if one is mistyped."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UserError, where argparse would print the usage and exit."""
        options = [option for action in self._actions for option in action.option_strings]
        words = [word.partition("=")[0].rstrip(",:") for word in message.split() if word.startswith("-")]
        mistyped = [word for word in words if word not in options]
        near = [match for word in mistyped for match in difflib.get_close_matches(word, options, n=1)]
        raise UserError(message + (f"; did you mean {near[0]}?" if near else ""))


def make_parser(name: str) -> Parser:
    """The parser of a command of commands.py."""
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
