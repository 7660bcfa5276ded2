"""Environments of multi-turn episodes, none of which can hang: (prompt, completion, record) -> what is said next.

The completion is all that has been said since the prompt, replies included. None ends the episode. A new environment is
a function here and its name in `__all__`.
"""

from collections.abc import Callable
from fractions import Fraction

from gspo_jax.rewards.functions import Record, expression_value, final_answer
from gspo_jax.types import UserError, choices

__all__ = ["countdown_feedback"]

Environment = Callable[[str, str, Record], str | None]


def countdown_feedback(prompt: str, completion: str, record: Record) -> str | None:
    r"""After a wrong answer to a countdown what it came to, and the question again; nothing more after a right one.

    Such as `\n8 is wrong. 22 from 3 5 7:`, or `\nwrong. 22 from 3 5 7:` where it is no expression of the numbers.
    """
    del prompt
    answer = final_answer(completion)
    value = None if answer is None else expression_value(answer, record["numbers"])
    if value == Fraction(record["target"]):
        return None
    verdict = "wrong" if value is None else f"{value} is wrong"
    return f"\n{verdict}. {record['question']}"


def find(name: str) -> Environment:
    """The environment of this name; raises a UserError that names those there are."""
    if name not in __all__:
        raise UserError(f"there is no environment {name!r}; {choices(name, __all__)}")
    environment: Environment = globals()[name]
    return environment
