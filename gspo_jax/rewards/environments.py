"""Environments for multi-turn episodes: (prompt, completion, record) -> the reply, or None to end the episode.

`completion` is everything since the prompt, including earlier replies. Environments run in the trainer's process, so
they must not hang. Those in SANDBOXED return a program, and its output in the sandbox is the reply (replies.py). Add
new ones to `__all__`.
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

Environment = Callable[[str, str, Record], str | None]


_EXPRESSION_BEFORE_EQUALS = re.compile(rf"(?<![0-9+\-*/().])[0-9+\-*/().]{{1,{MAX_CHARACTERS}}}=\Z")


def calculator(prompt: str, completion: str, record: Record) -> str | None:
    """Reply to a trailing `=` with the value of the expression before it, `15` after `7+8=`, otherwise end the episode.

    The reply is empty for division by zero and anything but whole numbers, + - * / and brackets. Needs "=" in
    sampling.stop_ids.
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
    r"""Reply to a wrong countdown answer with its value and the question again, and end the episode after a right one.

    Replies look like `\n8 is wrong. 22 from 3 5 7:`, or `\nwrong. 22 from 3 5 7:` if the answer does not use each
    number once.
    """
    answer = final_answer(prompt, completion)
    value = None if answer is None else expression_value(answer, record["numbers"])
    if value == Fraction(record["target"]):
        return None
    verdict = "wrong" if value is None else f"{value} is wrong"
    return f"\n{verdict}. {record['question']}"


def python(prompt: str, completion: str, record: Record) -> str | None:
    """Return the Python or untagged block that ends a turn, to be run, or end the episode if there is none.

    The reply is the program's output, and the last line of its error (replies.py). Blocks do not share variables.
    """
    del prompt, record
    return blocks.last_of_text(completion)


def find(name: str, own: Mapping[str, str] | None = None) -> Environment:
    """Return the environment `name` of this module or of `own` (name -> reference).

    Raises:
      UserError: the name is unknown.
      BadReference: its reference leads to no function.
    """
    own = own or {}
    check_names("environment", [name], [*__all__, *own])
    environment: Environment = references.function(own.get(name, f"{__name__}:{name}"))
    return environment
