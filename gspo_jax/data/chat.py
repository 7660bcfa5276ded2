"""Rendering of untrusted chat templates.

A separate process (templates.py) renders them, with limits on time, memory and length. Documents are unsupported:
templates see them as absent.
"""

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax import limited
from gspo_jax.data.templates import REMEDY
from gspo_jax.errors import UserError

Message = Mapping[str, Any]
"""One turn of a conversation: texts `role` and `content`.

An assistant's may also have `reasoning_content`, and `tool_calls`, a list of {"type": "function", "function": {"name",
"arguments"}}, whose arguments are an object; a tool's, `tool_call_id` and `name`.
"""
ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""

_QUESTION = "What is 47 + 28?\n\n```python\nprint('<b>é 日本</b>')\n```\n" * 16
_ASKED, _ANSWERED = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": "<think>\nHm.\n</think>75"}
TRIALS = (
    [_ASKED],
    [_ASKED, _ANSWERED, _ASKED],
    [{"role": "system", "content": "Add."}, _ASKED, _ANSWERED, _ASKED],
    [_ASKED, _ANSWERED] * 8,
)
"""Trial conversations for every template."""

_AT_ONCE = 64
"""Conversations per request, as a round trip takes longer than rendering one."""

_program = limited.Process("gspo_jax.data.templates")


class Rejected(UserError):
    """A conversation rejected by the template, which may take others."""


class Template:
    """A chat template that sees the time `clock`."""

    def __init__(self, source: str, clock: datetime.datetime) -> None:
        self._source, self._digest = source, hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._clock = clock.isoformat()

    def render(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        tools: Sequence[ToolSchemas | None] | None = None,
        **variables: Any,
    ) -> list[str | Rejected]:
        """Render conversations as prompt texts, with a Rejected for each that the template rejects or fails on.

        Args:
          tools: of each conversation. None: no tools.
          variables: of all conversations.

        Raises:
          UserError: the template is invalid, or takes or writes too much.
        """
        texts: list[str | Rejected] = []
        tools = [None] * len(conversations) if tools is None else tools
        for start in range(0, len(conversations), _AT_ONCE):
            given = [[dict(m) for m in messages] for messages in conversations[start : start + _AT_ONCE]]
            found = self._ask(
                {
                    "conversations": given,
                    "tools": [own or None for own in tools[start : start + _AT_ONCE]],
                    "variables": variables,
                }
            )
            texts += [
                reply["text"] if "text" in reply else Rejected(f"the chat template {reply['rejected']}")
                for reply in found
            ]
        return texts

    def _ask(self, question: dict[str, Any]) -> list[dict[str, str]]:
        question |= {"template": self._digest, "clock": self._clock}
        try:
            reply = _program.ask(question)
            if "unknown" in reply:  # sent once: longer than most conversations
                reply = _program.ask(question | {"source": self._source})
        except limited.TooMuch as error:
            raise UserError(f"the chat template {error}; {REMEDY}") from None
        if "wrong" in reply:
            raise UserError(f"the chat template {reply['wrong']}")
        return reply["found"]


def in_parts(message: Message) -> dict[str, Any]:
    """Wrap a turn's content in a list of one part, as templates of vision models take it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
