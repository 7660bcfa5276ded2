"""Shell completion script for `gspo-jax`: commands, flags, and files.

gspo-jax completion bash >> ~/.bashrc
"""

import sys
from collections.abc import Sequence

from gspo_jax.commands import COMMANDS
from gspo_jax.parser import make_parser

_BASH = """_gspo_jax() {
  local word=${COMP_WORDS[COMP_CWORD]} words
  if [ "$COMP_CWORD" = 1 ]; then words="NAMES"; else
    case ${COMP_WORDS[1]} in
CASES
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [ ${#COMPREPLY[@]} = 0 ]; then COMPREPLY=($(compgen -f -- "${word#*=}")); fi
}
complete -o nospace -F _gspo_jax gspo-jax
"""


def flags_of(name: str) -> list[str]:
    """Return the flags of a command, as typed."""
    command = COMMANDS[name]
    found = [f"--{flag.name}" + ("" if flag.kind is bool else "=") for flag in command.flags if flag.dashes]
    return [*found, *["--config=", "--config."] * bool(command.config), "--help"]


def script(shell: str) -> str:
    """Return the completion script for bash, zsh or fish."""
    if shell == "fish":
        lines = [
            "complete -c gspo-jax -n __fish_use_subcommand -a " + f"{name} -d '{command.says}'".replace("'s", "")
            for name, command in COMMANDS.items()
        ]
        lines += [
            f"complete -c gspo-jax -n '__fish_seen_subcommand_from {name}' -l {flag.strip('-=')}"
            for name in COMMANDS
            for flag in flags_of(name)
            if flag != "--config."
        ]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'      {name}) words="{" ".join(flags_of(name))}" ;;' for name in COMMANDS)
    bash = _BASH.replace("NAMES", " ".join(COMMANDS)).replace("CASES", cases)
    return bash if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return make_parser("completion").run(lambda given: print(script(given.shell), end=""), arguments)


if __name__ == "__main__":
    sys.exit(main())
