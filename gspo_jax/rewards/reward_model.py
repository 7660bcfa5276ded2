"""A reward model behind a server that scores texts.

The requests and replies are those of vLLM 0.18 (`/classify`, `/pooling`, `/score`) and of SGLang's native `/classify`.
Each response is a request of its own: these servers batch what is in flight, and a failure concerns one response.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from gspo_jax.calls.failures import CallFailed
from gspo_jax.errors import UserError, choices
from gspo_jax.rewards import rubric
from gspo_jax.rewards.served import Endpoint, Server
from gspo_jax.thoughts import answer_part

Turn = dict[str, Any]
"""A message, with `role` and `content`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Endpoint):
    """Settings of a reward model; config.py has the defaults."""

    form: str
    """One of FORMS."""
    template: str
    """Path of the text's template (rubric.py). Empty: a conversation, to which the server applies its chat template."""


def make_reward_model(settings: Settings) -> "RewardModel":
    """Return a reward model, without asking the server anything.

    Raises:
      UserError: a setting, the template or the key cannot be used.
    """
    return RewardModel(settings, Server("reward_model", settings))


class RewardModel:
    """Scores a response by the number that the server returns for it, on the model's own scale.

    What follows its last thought is scored; a thought that is left open, as an empty response.
    """

    def __init__(self, settings: Settings, server: Server) -> None:
        if settings.form not in FORMS:
            raise UserError(f"reward_model.form is {settings.form!r}; {choices(settings.form, FORMS)}")
        self._form, self._server, self._template = FORMS[settings.form], server, None
        if settings.template and self._form.of_text is None:
            raise UserError(
                f"reward_model.template is {settings.template!r}, and the form {settings.form!r} sends prompt and "
                "response apart; leave it empty"
            )
        if not settings.template and self._form.of_turns is None:
            raise UserError(
                f"reward_model.template is empty, and the form {settings.form!r} takes texts only; set it to the path "
                "of a template with {prompt} and {completion}, in the model's chat format"
            )
        if settings.template:
            self._template = rubric.read(
                settings.template,
                field="reward_model.template",
                names=("prompt", "completion"),
                needs=("completion",),
            )
        self.fields = frozenset[str]() if self._template is None else self._template.fields

    async def __call__(self, prompt: str, completion: str, record: dict[str, Any]) -> float:
        """Return the score of a response.

        Raises:
          CallFailed: the server gives none.
          UserError: the template asks for a field that the record lacks.
        """
        reply = await self._server.post(self._form.path, self._request(prompt, completion, record))
        try:
            score = float(self._form.read(reply))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise CallFailed("the reward model's reply has no score of the form asked for") from None
        if not math.isfinite(score):
            raise CallFailed("the reward model's score is not finite")
        return score

    def take_metrics(self) -> dict[str, float]:
        """Return requests, retries included, and tokens since the last call."""
        return self._server.take_metrics()

    def _request(self, prompt: str, completion: str, record: dict[str, Any]) -> dict[str, Any]:
        answer = answer_part(prompt, completion) or ""
        if self._template is not None:
            assert self._form.of_text is not None
            return self._form.of_text(self._template.fill({"prompt": prompt, "completion": answer}, record))
        assert self._form.of_turns is not None
        return self._form.of_turns([*_turns(prompt, record), {"role": "assistant", "content": answer}])


def _turns(prompt: str, record: dict[str, Any]) -> list[Turn]:
    """Return the turns that a response answers, those of a record, else the whole prompt as one."""
    if not record.get("messages") and "question" not in record:
        return [{"role": "user", "content": prompt}]
    turns = list(record.get("messages") or [{"role": "user", "content": record["question"]}])
    if instruction := record.get("instruction"):
        last = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
        turns[last] = {"role": "user", "content": f"{turns[last]['content']}\n{instruction}"}
    return turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Form:
    """How a server is asked for a score."""

    path: str
    of_text: Callable[[str], dict[str, Any]] | None
    """Text -> request. None: the server takes prompt and response apart."""
    of_turns: Callable[[list[Turn]], dict[str, Any]] | None
    """Conversation -> request. None: the server takes texts only."""
    read: Callable[[Any], Any]
    """Reply -> score, or KeyError and the like."""


def _one(values: Any) -> Any:
    """Return the only value; a classifier of several classes has no score."""
    (value,) = values
    return value


def _last(values: Any) -> Any:
    """Return the last of nested lists: of the last token, where each has a value."""
    while isinstance(values, list):
        values = values[-1]
    return values


_RAW = {"use_activation": False}
"""vLLM: the model's own number, without a sigmoid or softmax."""
FORMS = {
    "classify": _Form(
        path="/classify",
        of_text=lambda text: {"input": text, **_RAW},
        of_turns=lambda turns: {"messages": turns, **_RAW},
        read=lambda reply: _one(reply["data"][0]["probs"]),
    ),
    "pooling": _Form(
        path="/pooling",
        of_text=lambda text: {"input": text, "encoding_format": "float", **_RAW},
        of_turns=lambda turns: {"messages": turns, "encoding_format": "float", **_RAW},
        read=lambda reply: _last(reply["data"][0]["data"]),
    ),
    "score": _Form(
        path="/score",
        of_text=None,
        of_turns=lambda turns: {"text_1": turns[-2]["content"], "text_2": turns[-1]["content"], **_RAW},
        read=lambda reply: reply["data"][0]["score"],
    ),
    "sglang": _Form(
        path="/classify",
        of_text=lambda text: {"text": [text]},
        of_turns=None,
        read=lambda reply: _one(reply[0]["embedding"]),
    ),
}
"""Forms of requests and replies, by name: three of vLLM, one of SGLang."""
