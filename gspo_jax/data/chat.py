"""Render chat templates, which come with a checkpoint and are not trusted.

Every conversation is rendered in a process of its own (templates.py), within limits on time, memory and length. Tools
and documents are not supported: templates see them as absent.
"""

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax import limited
from gspo_jax.data.templates import REMEDY
from gspo_jax.errors import UserError

Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""

_QUESTION = "What is 47 + 28?\n\n```python\nprint('<b>é 日本</b>')\n```\n" * 16
_ASKED, _ANSWERED = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": "<think>\nHm.\n</think>75"}
TRIALS = (
    [_ASKED],
    [_ASKED, _ANSWERED, _ASKED],
    [{"role": "system", "content": "Add."}, _ASKED, _ANSWERED, _ASKED],
    [_ASKED, _ANSWERED] * 8,
)
"""Conversations that every template is tried with, beside those that tell how it writes a turn."""

_AT_ONCE = 64
"""Conversations of one question: going to another process and back takes longer than rendering one."""

_program = limited.Process("gspo_jax.data.templates")


class Rejected(UserError):
    """A template does not take a conversation, others it may."""


class Template:
    """A chat template that is told the time `clock`."""

    def __init__(self, source: str, clock: datetime.datetime) -> None:
        self._source, self._digest = source, hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._clock = clock.isoformat()

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt text of a conversation.

        Raises:
          Rejected: the template rejects the conversation, or fails on it.
          UserError: the template is invalid, or takes or writes too much.
        """
        (text,) = self.render_all([messages], **variables)
        if isinstance(text, Rejected):
            raise text
        return text

    def render_all(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], **variables: Any
    ) -> "list[str | Rejected]":
        """Return the prompt text of each conversation, or what `render` would raise for it alone.

        Raises:
          UserError: the template is invalid, or takes or writes too much.
        """
        texts: list[str | Rejected] = []
        for start in range(0, len(conversations), _AT_ONCE):
            given = [[dict(m) for m in messages] for messages in conversations[start : start + _AT_ONCE]]
            found = self._ask({"conversations": given, "variables": variables})
            texts += [
                reply["text"] if "text" in reply else Rejected(f"the chat template {reply['rejected']}")
                for reply in found
            ]
        return texts

    def _ask(self, question: dict[str, Any]) -> list[dict[str, str]]:
        """Return the answers of templates.py about conversations."""
        question |= {"template": self._digest, "clock": self._clock}
        try:
            reply = _program.ask(question)
            if "unknown" in reply:  # sent once: it is longer than most conversations
                reply = _program.ask(question | {"source": self._source})
        except limited.TooMuch as error:
            raise UserError(f"the chat template {error}; {REMEDY}") from None
        if "wrong" in reply:
            raise UserError(f"the chat template {reply['wrong']}")
        return reply["found"]


def in_parts(message: Message) -> dict[str, Any]:
    """Return a turn with its content as a list of one part, as templates of models that also see images take it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
