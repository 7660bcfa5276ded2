"""Replies of an environment to turns of many episodes, side by side.

An environment is a function of the text so far, or a class with an object per episode (environments.py). An object's
state is nowhere but in it: after a resume, or in another process, a new one is given the episode's earlier turns again.
"""

import collections
import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from absl import logging

from gspo_jax import tool_calls
from gspo_jax.calls.calls import Calls, Limits, called
from gspo_jax.calls.outcomes import Outcome, mapped, settled
from gspo_jax.errors import StopRequested, UserError
from gspo_jax.rewards import environments, scores
from gspo_jax.rewards.scorer import LOOK_S, BrokenWatch, check_loop, check_share, unless_stopped
from gspo_jax.rewards.tools import shortened
from gspo_jax.sandbox import Request, Sandbox, Verdict
from gspo_jax.secrets import redacted

NO_OUTPUT = "(no output)\n"
BROKEN = "(the program could not be run)\n"
CLOSING_S = 5.0
"""Seconds at the end for environments to close."""
_CLOSING_AT_ONCE = 1024
"""Environments; most close at once, and one that hangs holds up no other."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TurnOver:
    """An episode whose turn is over."""

    id: bytes
    """The same for all turns of an episode, and of no other."""
    prompt: str
    record: dict[str, Any]
    completion: str
    """Everything since the prompt, earlier replies included."""
    turns: tuple[str, ...]
    """The policy's own turns, the newest last."""
    befores: tuple[str, ...]
    """The completion's text before each of these; not read without tools."""


@dataclass(frozen=True)
class Reply:
    """A reply to a turn, and the turn's reward."""

    said: "str | Sequence[Message] | None"
    """A text, or messages of a user or of tools; None ends the episode."""
    reward: float | None = None


@dataclass
class _Live:
    """An episode's environment object."""

    made: Any
    turns: int = 0
    """Turns it was given."""


@dataclass(frozen=True)
class Setting:
    """Limits, rights and references of an environment."""

    own: Mapping[str, str] = field(default_factory=dict)
    """name -> reference (references.py)."""
    limits: Limits = Limits()  # noqa: RUF009  frozen
    """Limits of calls of functions. Calls of an object are made once: it may have changed meanwhile."""
    most_failed: float = 1.0
    """Share of the episodes asked about at a time that may fail."""
    timeout_s: float = 2.0
    """Seconds per program."""
    workers: int = 1
    """Number of sandboxes."""
    unsafe: bool = False
    """Run programs without a sandbox, with this account's rights."""


class Replies(AbstractContextManager["Replies"]):
    """Replies of one environment, with sandboxes if it runs programs."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Look up the environment, and start sandboxes if it needs them.

        Raises:
          UserError: the environment is unknown, its tools are malformed, or there is no sandbox.
        """
        self._name, self._setting, self._answer = name, setting, environments.find(name, setting.own)
        self.is_object: bool = inspect.isclass(self._answer)
        """True for an object per episode. It is also asked after the last turn, for its reward."""
        self.tools = environments.tools_of(self._answer)
        limits = setting.limits
        if self.is_object:
            limits = dataclasses.replace(limits, tries=1)
        self.tool_format = ""
        """Format of tool calls, one of `tool_calls.FORMATS`; to be set for an environment with tools."""
        self._calls, self._watch = Calls(limits), BrokenWatch("environment", name)
        self._closing = Calls(dataclasses.replace(limits, concurrency=_CLOSING_AT_ONCE))  # never behind other calls
        self._live: dict[bytes, _Live] = {}
        self._ending = set[Future[Outcome[Any]]]()
        sandboxed = name in environments.SANDBOXED
        self._sandbox = Sandbox(workers=setting.workers, unsafe=setting.unsafe) if sandboxed else None
        self.interrupted: Callable[[], bool] = lambda: False
        """Polled while replies are awaited. True ends the waiting."""

    @property
    def opens(self) -> bool:
        """True if the environment may begin episodes with messages of its own."""
        return self.is_object and hasattr(self._answer, "reset")

    def renew(self) -> None:
        """Call again whoever did not answer before."""
        self._calls.renew()

    def open(self, id: bytes, record: dict[str, Any]) -> "Future[Outcome[Any]]":
        """Make an episode's environment, and return what it begins with: messages, a text, or None."""
        return self._calls.submit(self._opened, id, record)

    def begin(self, turn: TurnOver) -> "Future[Outcome[Reply]]":
        """Begin to reply. The future never raises."""
        if self.is_object:
            live = self._live.get(turn.id)
            given = 0 if live is None else live.turns
            parts = len(turn.turns) - (given if given < len(turn.turns) else 0)  # as in _stepped
            return mapped(self._calls.submit(self._stepped, turn, parts=parts), _reply_of)
        if self._sandbox is None:
            asked = self._calls.submit(self._answer, turn.prompt, turn.completion, turn.record)
            return mapped(asked, lambda outcome: self._checked(_reply_of(outcome)))
        program = self._answer(turn.prompt, turn.completion, turn.record)
        if not isinstance(program, str):
            return settled(Outcome(Reply(None)))
        request = Request(program, {"inputs": [""]}, self._setting.timeout_s)
        return self._sandbox.submit(request, lambda verdict: Outcome(Reply(shown(verdict))))

    def wait(self, pending: Sequence["Future[Any]"], *, until: float = math.inf) -> None:
        """Wait for replies, at most until a time by `time.monotonic`. Every process calls it, with its own.

        Raises:
          ScoringFailed: a coroutine function keeps all others waiting; in all processes if in any.
          StopRequested: the waiting was interrupted in any process.
        """
        unless_stopped(lambda: self._wait(pending, until))

    def told(self, turns: Sequence[TurnOver], outcomes: Sequence[Outcome[Any]]) -> None:
        """Log failures.

        Raises, in all processes if in any:
          ScoringFailed: the environment is broken, or too many of these episodes failed.
          UserError: a function replied with what is no text.
        """
        unless_stopped(lambda: self._told(turns, outcomes))

    def finish(self, ids: Sequence[bytes]) -> None:
        """Close the environments of episodes that are over, without waiting for it."""
        for id in ids:
            self._end(self._live.pop(id, None))

    def close(self) -> None:
        """End all calls, close all environments and end the sandboxes. Idempotent."""
        self._calls.close()
        self.finish(list(self._live))
        wait(set(self._ending), timeout=CLOSING_S)
        self._closing.close()
        if self._sandbox is not None:
            self._sandbox.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _end(self, live: _Live | None) -> None:
        """Begin to close an environment, if there is one."""
        if live is not None and hasattr(live.made, "close"):
            end = self._closing.submit(live.made.close)
            self._ending.add(end)
            end.add_done_callback(self._closed)

    async def _opened(self, id: bytes, record: dict[str, Any]) -> Any:
        self._end(self._live.pop(id, None))
        live = self._live[id] = _Live(await called(self._answer))
        return await called(live.made.reset, record) if hasattr(live.made, "reset") else None

    async def _stepped(self, turn: TurnOver) -> Reply:
        live = self._live.get(turn.id)
        if live is None or live.turns >= len(turn.turns):
            await self._opened(turn.id, turn.record)
            live = self._live[turn.id]
        reply = Reply(None)
        for place in range(live.turns, len(turn.turns)):
            live.turns += 1
            reply = await self._step(live.made, turn, place)
        return reply

    async def _step(self, made: Any, turn: TurnOver, place: int) -> Reply:
        said = turn.turns[place]
        if self.tools is None:
            return self._understood(await called(made.step, {"role": "assistant", "content": said}))
        before = turn.befores[place] if place else turn.prompt + turn.befores[place]
        content, calls = tool_calls.parse(said, self.tool_format, self.tools, before=before)
        wrong = [_tool_message(i, call, call.error) for i, call in enumerate(calls) if call.error]
        right = [(i, call) for i, call in enumerate(calls) if not call.error]
        if wrong and not right:
            return Reply(wrong)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if right:
            message["tool_calls"] = [
                {"id": _id(i, call), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in right
            ]
        reply = self._understood(await called(made.step, message), call=right[0] if right else None)
        if not wrong or reply.said is None:
            return reply
        return Reply([*reply.said, *wrong], reply.reward)  # type: ignore[list-item]

    def _understood(self, returned: Any, *, call: "tuple[int, tool_calls.Call] | None" = None) -> Reply:
        """Return what `step` returned as a reply; a text alone is that to `call`, with its number."""
        with_reward = isinstance(returned, tuple) and len(returned) == 2 and not environments.are_messages(returned)
        said, reward = returned if with_reward else (returned, None)
        score = scores.as_float(reward)
        if score is not None and (wrong := scores.fault(score)):
            raise ValueError(f"the environment {wrong} as a reward")
        if isinstance(said, str) and call is not None:
            said = [_tool_message(*call, said)]
        if isinstance(said, Mapping):
            said = [said]
        if said is not None and not isinstance(said, str) and not environments.are_messages(said):
            raise TypeError(
                f"step returned {said!r:.100}; return a text, messages with role and content, or None to end the "
                "episode, alone or with a reward: (reply, reward)"
            )
        return Reply(said, score)

    def _checked(self, outcome: Outcome[Reply]) -> Outcome[Reply]:
        said = None if outcome.value is None else outcome.value.said
        if said is None or isinstance(said, str):
            return outcome
        text = redacted(f"environment {self._name} replied {said!r:.200}; return a text, or None to end the episode")
        return Outcome(None, text, cause=text)

    def _wait(self, pending: Sequence["Future[Any]"], until: float) -> None:
        waiting = set(pending)
        while waiting and (left_s := until - time.monotonic()) > 0:
            waiting = wait(waiting, timeout=min(LOOK_S, left_s)).not_done
            if self.interrupted():
                raise StopRequested
            check_loop(self._setting.limits, self._name)

    def _told(self, turns: Sequence[TurnOver], outcomes: Sequence[Outcome[Any]]) -> None:
        rows = [(turn.prompt, turn.completion, turn.record) for turn in turns]
        wrong = [o.error for o in outcomes if o.error is not None and o.error.startswith(f"environment {self._name} ")]
        if wrong:
            raise UserError(wrong[0])
        self._watch.report(rows, outcomes)
        failed = collections.Counter(str(o.failed_by) for o in outcomes if o.error is not None)
        what, most = f"environment {self._name!r} failed in", self._setting.most_failed
        check_share(what, failed.total(), len(outcomes), "episodes", most, failed)

    def _closed(self, end: "Future[Outcome[Any]]") -> None:
        self._ending.discard(end)
        outcome = end.result()
        if outcome.error is not None:
            self._closing.renew()  # one that fails keeps no other from being closed
            logging.warning("environment %r could not be closed: %s", self._name, outcome.failed_by)


def _reply_of(outcome: Outcome[Any]) -> Outcome[Reply]:
    """Return a call's outcome with its value as a reply."""
    if outcome.error is not None or isinstance(outcome.value, Reply):
        return outcome
    return Outcome(Reply(outcome.value), queued_s=outcome.queued_s)


def _id(number: int, call: tool_calls.Call) -> str:
    return call.id or f"call{number:05d}"


def _tool_message(number: int, call: tool_calls.Call, content: str) -> dict[str, str]:
    named = {"name": call.name} if call.name else {}
    return {"role": "tool", "tool_call_id": _id(number, call), "content": content} | named


def shown(verdict: Verdict) -> str:
    """Return the reply with a program's result, with a long output shortened."""
    if verdict.broken:
        logging.warning("a program of an environment could not be run: %s", verdict.broken)
        return BROKEN
    output = shortened(verdict.output.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    if output and not output.endswith("\n"):
        output += "\n"
    return output + (f"{verdict.why}\n" if verdict.why else "") or NO_OUTPUT
