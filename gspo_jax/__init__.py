"""Group Sequence Policy Optimization for mixture-of-experts language models, in JAX/Flax."""

import sys

__version__ = "0.1.0"


def _is_command() -> bool:
    """Return True under `python -m gspo_jax.COMMAND`. sys.argv[0] is "-m" until that module is found."""
    words = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in words[:-1] and words[words.index("-m") + 1].count(".") == 1


if _is_command():  # a command's imports take seconds
    from gspo_jax import commands, signals

    commands.answer_help(sys.orig_argv[sys.orig_argv.index("-m") + 1].removeprefix("gspo_jax."), sys.argv[1:])
    signals.end_command()
