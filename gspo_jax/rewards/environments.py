"""Environments for multi-turn episodes: (prompt, completion, record) -> the reply, or None to end the episode.

`completion` is everything since the prompt, earlier replies included. Environments run in the trainer's process, so
they must not hang; one of SANDBOXED returns a program instead, and what that prints in the sandbox is the reply
(replies.py). To add one, write a function here and list its name in `__all__`.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from gspo_jax import references
from gspo_jax.rewards import blocks
from gspo_jax.rewards.answers import final_answer
from gspo_jax.rewards.functions import Record, evaluate, expression_value
from gspo_jax.rewards.notation import MAX_CHARACTERS
from gspo_jax.rewards.scorer import check_names

__all__ = ["calculator", "countdown_feedback", "python"]

SANDBOXED = ("python",)
"""Environments whose text is a program for the sandbox."""

Environment = Callable[[str, str, Record], str | None]


_EXPRESSION_BEFORE_EQUALS = re.compile(rf"(?<![0-9+\-*/().])[0-9+\-*/().]{{1,{MAX_CHARACTERS}}}=\Z")


def calculator(prompt: str, completion: str, record: Record) -> str | None:
    """Reply to a trailing `=` with the value of the expression before it, `15` after `7+8=`; otherwise end the episode.

    The reply is empty if the expression has anything but whole numbers, + - * / and brackets, or divides by zero. Needs
    "=" in sampling.stop_ids.
    """
    del prompt, record
    if not completion.endswith("="):
        return None
    asked = _EXPRESSION_BEFORE_EQUALS.search(completion[-MAX_CHARACTERS - 2 :])
    value = None if asked is None else evaluate(asked[0][:-1])
    if value is None:
        return ""
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def countdown_feedback(prompt: str, completion: str, record: Record) -> str | None:
    r"""Reply to a wrong countdown answer with its value and the question again; end the episode after a right one.

    Replies look like `\n8 is wrong. 22 from 3 5 7:`, or `\nwrong. 22 from 3 5 7:` if the answer is not an expression
    that uses each number once.
    """
    answer = final_answer(prompt, completion)
    value = None if answer is None else expression_value(answer, record["numbers"])
    if value == Fraction(record["target"]):
        return None
    verdict = "wrong" if value is None else f"{value} is wrong"
    return f"\n{verdict}. {record['question']}"


def python(prompt: str, completion: str, record: Record) -> str | None:
    """Return the block of Python, or without a tag, that a turn ends in, to be run; end the episode if there is none.

    The reply is what the program prints, and after an error the error's last line; see replies.py. Each block is a
    program of its own, without the variables of earlier blocks.
    """
    del prompt, record
    return blocks.last_of_text(completion)


def find(name: str, own: Mapping[str, str] | None = None) -> Environment:
    """Return the environment called `name`, of this module or of `own`, which maps names to references.

    Raises:
      UserError: the name is unknown; the message lists the known ones.
      BadReference: its reference leads to no function.
    """
    own = own or {}
    check_names("environment", [name], [*__all__, *own])
    environment: Environment = references.function(own.get(name, f"{__name__}:{name}"))
    return environment
