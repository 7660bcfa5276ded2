"""Environments of multi-turn episodes, none of which can hang: (prompt, completion, record) -> what is said next.

The completion is all that has been said since the prompt, replies included. None ends the episode. A new environment is
a function here and its name in `__all__`.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from gspo_jax.rewards.functions import LONGEST, Record, evaluate, expression_value, final_answer
from gspo_jax.rewards.scorer import check_names

__all__ = ["calculator", "countdown_feedback"]

Environment = Callable[[str, str, Record], str | None]


_ASKED = re.compile(rf"(?<![0-9+\-*/().])[0-9+\-*/().]{{1,{LONGEST}}}=\Z")


def calculator(prompt: str, completion: str, record: Record) -> str | None:
    """The value of what stands right before an `=` at the end, such as `15` after `7+8=`; ends nothing else.

    Nothing is said where it is no expression of whole numbers, + - * / and brackets. Needs "=" in sampling.stop_ids.
    """
    del prompt, record
    if not completion.endswith("="):
        return None
    asked = _ASKED.search(completion[-LONGEST - 2 :])
    value = None if asked is None else evaluate(asked[0][:-1])
    if value is None:
        return ""
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


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
    check_names("environment", [name], __all__)
    environment: Environment = globals()[name]
    return environment
