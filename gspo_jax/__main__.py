"""The command `gspo-jax`: `gspo-jax COMMAND …` is `python -m gspo_jax.COMMAND …`."""

import difflib
import os
import runpy
import sys

from gspo_jax import commands, signals


def main() -> int:
    """Run the command."""
    signals.end_command()  # a command's imports take seconds
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print(commands.overview())
        return 0
    if name not in commands.COMMANDS:
        near = difflib.get_close_matches(name, commands.COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands.COMMANDS)}"
        print(f"error: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    commands.answer_help(name, words)
    sys.argv = [f"gspo-jax {name}", *words]
    if not sys.flags.safe_path and os.getcwd() not in sys.path:  # as `python -m` has it: own modules, configs
        sys.path.append(os.getcwd())
    runpy.run_module(f"gspo_jax.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
