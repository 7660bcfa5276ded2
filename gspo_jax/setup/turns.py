"""An environment on token ids: turns to text, replies to tokens."""

import collections
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from gspo_jax.calls import failures
from gspo_jax.calls.outcomes import Outcome, mapped
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.rewards.replies import Replies, Reply
from gspo_jax.rewards.replies import TurnOver as Said
from gspo_jax.rollout.episodes import Answer, TurnOver

Encode = Callable[[Record], list[int]]
"""A record's prompt -> token ids."""
_NO_ANSWER = Answer(None, failed=True)


class TokenTurns:
    """`rollout.episodes.Environment` of `Replies` and a tokenizer."""

    def __init__(self, replies: Replies, tokenizer: Tokenizer, encode: Encode, max_prompt_length: int) -> None:
        """Wrap an environment. `encode` is for prompts that it writes, of at most `max_prompt_length` tokens."""
        self._replies, self._tokenizer, self._encode, self._longest = replies, tokenizer, encode, max_prompt_length
        self.asks_last: bool = replies.is_object
        self._told: collections.deque[tuple[Said, Outcome[Any]]] = collections.deque()
        self._tools = None if replies.tools is None else replies.tools.schemas

    def open(self, turns: Sequence[TurnOver]) -> list[tuple[list[int] | None, bool]]:
        """Let the environment begin episodes; see `Environment`."""
        if not self._replies.opens:
            return [(None, False)] * len(turns)
        self._replies.renew()
        pending = [self._replies.open(turn.id, turn.record) for turn in turns]
        self._replies.wait(pending)
        outcomes = [self._opened(turn, each.result()) for turn, each in zip(turns, pending, strict=True)]
        self._replies.told([self._said(turn) for turn in turns], outcomes)
        return [(outcome.value, outcome.error is not None) for outcome in outcomes]

    def text(self, prompt: list[int]) -> str:
        """Return a prompt's text, special tokens included; see `Environment`."""
        return self._tokenizer.decode(prompt, skip_special=False)

    def begin(self, turns: Sequence[TurnOver]) -> "list[Future[Answer]]":
        """Begin to answer turns; see `Environment`."""
        self._replies.renew()
        return [self._begin(turn, self._said(turn)) for turn in turns]

    def wait(self, pending: "Sequence[Future[Answer]]", *, within_s: float = math.inf) -> None:
        """Wait for answers, and check what has failed; see `Environment`."""
        self._replies.wait(pending, until=time.monotonic() + within_s)
        told = [self._told.popleft() for _ in range(len(self._told))]  # another thread goes on to add some
        self._replies.told([said for said, _ in told], [outcome for _, outcome in told])

    def finish(self, ids: Sequence[bytes]) -> None:
        """Close environments; see `Environment`."""
        self._replies.finish(ids)

    def _said(self, turn: TurnOver) -> Said:
        decode = self._tokenizer.decode
        befores = () if self._tools is None else tuple(decode(turn.tokens[:start]) for start in turn.starts)
        return Said(turn.id, turn.text, turn.record, decode(turn.tokens), tuple(map(decode, turn.turns)), befores)

    def _begin(self, turn: TurnOver, said: Said) -> "Future[Answer]":
        def answered(outcome: Outcome[Reply]) -> Answer:
            try:
                answer = self._answer(outcome, turn.tokens[-1])
            except Exception as error:  # a reply that the chat template or the tokenizer rejects
                cause = f"the reply cannot be written as tokens: {failures.cause_of(error)}"
                outcome, answer = Outcome(None, cause, cause=cause), _NO_ANSWER
            self._told.append((said, outcome))
            return answer

        return mapped(self._replies.begin(said), answered)

    def _answer(self, outcome: Outcome[Reply], last: int) -> Answer:
        reply = outcome.value
        if reply is None:
            return _NO_ANSWER
        reward = math.nan if reply.reward is None else reply.reward
        return Answer(None if reply.said is None else self._tokens(_mended(reply.said), last), reward)

    def _tokens(self, said: Any, last: int) -> list[int]:
        tokenizer = self._tokenizer
        if not isinstance(said, str):
            return tokenizer.reply(said, ended=last, tools=self._tools)
        if last in tokenizer.eos_ids:
            return tokenizer.reply([{"role": "user", "content": said}], ended=last, tools=self._tools)
        # After one of sampling.stop_ids, e.g. the end of an expression, the reply is inserted as it is.
        return tokenizer.encode(tokenizer.guard(said, "tool"))

    def _opened(self, turn: TurnOver, outcome: Outcome[Any]) -> Outcome[list[int]]:
        """Return the prompt that the environment writes, if any, with an error where it cannot be one."""
        said = outcome.value
        if outcome.error is not None or said is None:
            return outcome
        try:
            said = _mended(said)
            own = {"question": said} if isinstance(said, str) else {"messages": said}
            tokens = self._encode({**turn.record, "messages": None} | own)
        except Exception as error:
            cause = f"reset returned no prompt: {failures.cause_of(error)}"
            return Outcome(None, cause, cause=cause)
        if 0 < len(tokens) <= self._longest:
            return Outcome(tokens)
        cause = "reset returned an empty prompt"
        if tokens:
            cause = f"reset returned a prompt longer than data.max_prompt_length, {self._longest} tokens"
        return Outcome(None, cause, cause=cause)


def _mended(said: Any) -> Any:
    """Return a text, or messages, without lone surrogates, which JSON can spell and tokenizers refuse."""
    if isinstance(said, str):
        return said.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return [{**message, "content": _mended(message["content"])} for message in said]
