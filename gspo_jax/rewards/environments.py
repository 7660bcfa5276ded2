"""Environments for multi-turn episodes: functions of the text so far, or classes with an object per episode.

A function takes (prompt, completion, record) and returns the reply, or None to end the episode. `completion` is
everything since the prompt, including earlier replies. It may be a coroutine function.

A class is made without arguments for each episode. Its methods may be coroutine functions:

    reset(record)     what the episode begins with: None for the record's own prompt, or in its place a question or a
                      conversation, the same for each episode of a group
    step(message)     the reply to the policy's turn, a text, a message or several; None ends the episode. With a reward
                      of the turn: (reply, reward). Also called after the last turn, for its reward alone
    close()           the episode is over

`reset` and `close` may be left out. With a class attribute `tools`, schemas in OpenAI's form or a static method that
returns them, the chat template shows them, and a message has the turn's `tool_calls` (tools.py runs them).

Those in SANDBOXED return a program, and its output in the sandbox is the reply (replies.py). Add new ones to `__all__`;
a class has the name that configs give it.
"""

import asyncio
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from gspo_jax import references
from gspo_jax.calls import calls, failures
from gspo_jax.errors import UserError
from gspo_jax.rewards import blocks
from gspo_jax.rewards.answers import final_answer
from gspo_jax.rewards.functions import Record, evaluate, exact_answer, expression_value
from gspo_jax.rewards.notation import MAX_CHARACTERS
from gspo_jax.rewards.scorer import check_names
from gspo_jax.tool_calls import Tools

__all__ = ["calculator", "countdown_feedback", "python", "rooms"]

SANDBOXED = ("python",)
LISTING_S = 60.0
"""Seconds for a class to list its tools."""

Environment = Callable[[str, str, Record], Any]
"""A function, or a class."""


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


class rooms:
    """A key behind several doors, of the task `rooms`: the tool `open` leads from room to room.

    Through the right door of a room one sees the number of the next, or the key. A wrong one stays closed. A turn
    without calls ends the episode, with reward 1 if its answer is the key, else 0.
    """

    tools: ClassVar = [
        {
            "type": "function",
            "function": {
                "name": "open",
                "parameters": {"type": "object", "properties": {"door": {"type": "integer"}}, "required": ["door"]},
            },
        }
    ]

    def reset(self, record: Record) -> None:
        """Begin at the first door."""
        self._record, self._doors = record, [int(door) for door in record["doors"].split()]

    def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, str]] | None, float]:
        """Open doors, or judge the answer."""
        if "tool_calls" not in message:
            return None, exact_answer(self._record["question"], message["content"], self._record)
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": self._open(call["function"]["arguments"]["door"])}
            for call in message["tool_calls"]
        ], 0.0

    def _open(self, door: int) -> str:
        if door not in self._doors[:1]:
            return "closed"
        del self._doors[0]
        return f"door {self._doors[0]}" if self._doors else f"key {self._record['answer']}"


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


@functools.cache
def tools_of(environment: Any) -> Tools | None:
    """Return the tools of an environment's class, None without. A method that lists them is called once.

    Raises:
      UserError: they are malformed, or cannot be listed within LISTING_S.
    """
    schemas = getattr(environment, "tools", None)
    if callable(schemas):
        try:
            schemas = calls.run(asyncio.wait_for(calls.called(schemas), LISTING_S))
        except Exception as error:
            raise UserError(
                f"{environment.__name__}.tools failed: {failures.cause_of(error)}; mend it, or start what it asks"
            ) from error
    return None if not schemas else Tools(schemas)


def check_class(name: str, reference: str, environment: type) -> None:
    """Raise a UserError unless a class is an environment."""
    if not callable(getattr(environment, "step", None)):
        raise UserError(
            f"functions.{name}: the class {reference} has no method step; an environment's class has step(message), "
            "and perhaps reset(record) and close()"
        )


def are_messages(said: Any) -> bool:
    """Return True for a sequence of messages of a user or of tools."""
    return (
        isinstance(said, Sequence)
        and len(said) > 0
        and all(
            isinstance(each, Mapping) and each.get("role") in ("user", "tool") and isinstance(each.get("content"), str)
            for each in said
        )
    )
