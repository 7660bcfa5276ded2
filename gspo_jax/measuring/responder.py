"""A policy that answers prompts, rows and conversations, with the sampler of training and evaluation.

A response depends on the seed and its number alone, not on the prompts beside it, except for rounding.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import jax
import numpy as np
from ml_collections import ConfigDict

from gspo_jax import engine
from gspo_jax.data import files, rows, tasks
from gspo_jax.data.chat import Message
from gspo_jax.data.pipeline import prompt_text
from gspo_jax.data.records import Record
from gspo_jax.data.tokenizer import GUARD
from gspo_jax.errors import UserError
from gspo_jax.measuring.completions import Response, responses_of
from gspo_jax.measuring.opened import OpenPolicy
from gspo_jax.parallel import hosts
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.rollout.episodes import Player
from gspo_jax.rollout.sampler import POLL_STEPS
from gspo_jax.setup import data, players
from gspo_jax.types import Prompts

Prompt: TypeAlias = str | Sequence[Message] | Record
"""What is answered: a question, the turns of a conversation, or a row's record (data/rows.py)."""
_LEAST = 64
"""Fewest tokens that prompts are padded to."""


class PromptTooLong(UserError):
    """A prompt that leaves a response too little room."""

    def __init__(self, facts: str) -> None:
        super().__init__(f"{facts}; shorten it, or lower max_tokens")
        self.facts = facts
        """Without a remedy."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt, ready to be sampled from."""

    record: Record
    text: str
    """Under the chat template."""
    tokens: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a call samples."""

    n: int
    """Responses per prompt."""
    temperature: float
    max_tokens: int
    """Most tokens of a response, or of an episode with its replies."""

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} is {value}; use 1 or more")


class Responder(AbstractContextManager["Responder"]):
    """A policy that answers. Close it, or use it in a `with` block."""

    def __init__(self, opened: OpenPolicy, name: str, stack: ExitStack) -> None:
        """Take a policy with weights in its sampler, their name, and what `close` closes."""
        self.opened, self.name, self._stack = opened, name, stack
        self.tokenizer, self._style = opened.tokenizer, data.prompt_style(opened.config)
        given = opened.config.data.instruction
        self._instruction = tasks.own_instruction(opened.config.data.task) if given is None else given
        self._players: dict[tuple[Any, ...], Player] = {}
        self._scorer: BatchScorer | None = None
        self.poll: Callable[[], None] = lambda: None
        """Called before every sampling call and every `poll_steps` decode steps; may raise to end the call."""
        self.poll_steps: int | None = POLL_STEPS

    def close(self) -> None:
        """End the environment and reward workers, and free the weights."""
        self.opened.engine.sampler.release()
        self._players.clear()
        self._stack.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        first: int = 0,
        score: bool = False,
        routes: bool = False,
    ) -> list[list[Response]]:
        """Return n responses to every prompt, under the run's chat template, system prompt and `data.*` style.

        Args:
          prompts: questions, conversations that end with the user's turn, or records.
          temperature: 0 for greedy decoding. None: the run's.
          max_tokens: of a response, EOS included; an episode's of all turns and replies. None: the run's.
          seed: with it, a prompt's response i, counted over the call, has the key `fold_in(key(seed), first + i)`.
          score: score with the run's rewards, which read the records.
          routes: also return the experts that computed each token.

        Raises:
          UserError: a prompt is empty or too long, the chat template rejects it, or an option is out of range.
        """
        sampling = self.sampling(n=n, temperature=temperature, max_tokens=max_tokens)
        asked = [self.ask(prompt, sampling) for prompt in prompts]
        options = {"seed": seed, "first": first, "score": score, "routes": routes}
        return [responses for part in self.respond(asked, sampling, **options) for responses in part]

    def chat(self, messages: Sequence[Message], **options: Any) -> Response:
        """Return the response to a conversation; options and errors as in `sample`."""
        return self.sample([messages], **options)[0][0]

    def sampling(self, *, n: int = 1, temperature: float | None = None, max_tokens: int | None = None) -> Sampling:
        """Return sampling settings, the run's where None. Raises UserError if one is out of range."""
        own = self.opened.config.sampling
        found = Sampling(
            n=n,
            temperature=own.temperature if temperature is None else temperature,
            max_tokens=own.max_response_length if max_tokens is None else max_tokens,
        )
        changed = self._changed(found, prompts=1, width=1)
        players.make_sampling(changed)
        players.opening(changed, self.tokenizer)
        if self._room(found) < 1:
            raise UserError(
                f"max_tokens is {found.max_tokens} and the model has {self._positions} positions, its "
                "max_position_embeddings, for prompt and response; use fewer"
            )
        return found

    def ask(self, prompt: Prompt, sampling: Sampling) -> Asked:
        """Return a prompt in tokens.

        Raises:
          PromptTooLong: it leaves no room for the response.
          UserError: it is empty, no conversation, or rejected by the chat template.
        """
        record = self._record(prompt)
        if not record["question"].strip():
            raise UserError("the prompt is empty; write something")
        text = prompt_text(record, self.tokenizer, self._style)
        tokens = self.tokenizer.encode(text)
        if len(tokens) > (room := self._room(sampling)):
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, and a response of up to {sampling.max_tokens} leaves it {room} "
                f"of the model's {self._positions} positions"
            )
        return Asked(record, text.replace(GUARD, ""), tokens)

    def respond(
        self,
        asked: Sequence[Asked],
        sampling: Sampling,
        *,
        seed: int = 0,
        first: int = 0,
        score: bool = False,
        routes: bool = False,
    ) -> Iterator[list[list[Response]]]:
        """Yield the responses to prompts, in order, as their sampling calls return, `at_a_time` prompts each.

        Prompts are padded to the power of two that holds the longest: few programs are compiled.
        """
        if not asked:
            return
        P, n, shards = self.at_a_time(len(asked), sampling), sampling.n, self.opened.player.shards
        P = -(-P // shards) * shards
        longest = max(len(one.tokens) for one in asked)
        width = min(max(_LEAST, 1 << (longest - 1).bit_length()), self._room(sampling))
        player = self._player(sampling, prompts=P, width=width)
        for start in range(0, len(asked), P):
            part = asked[start : start + P]
            prompts = self._padded(part, P, width)
            episodes = player.begin(prompts, jax.random.key(seed), first=first + start * n)
            episodes = dataclasses.replace(episodes, ended=np.repeat(~prompts.valid, n))
            batch = player.to_batch(player.finish(episodes))
            rewards = self._rewards().score(batch) if score else None
            found = responses_of(batch, self.tokenizer, rewards, routes=routes)
            yield [found[row * n : (row + 1) * n] for row in range(len(part))]

    def at_a_time(self, count: int, sampling: Sampling) -> int:
        """Return how many of `count` prompts a sampling call takes: about as many responses as the run's calls."""
        config, shards = self.opened.config, self.opened.player.shards
        most = max(shards, config.data.prompts_per_batch * config.sampling.group_size // sampling.n // shards * shards)
        return min(most, config.data.prompts_per_batch, count)

    @property
    def _positions(self) -> int:
        return self.opened.model.max_position_embeddings

    def _room(self, sampling: Sampling) -> int:
        """Return the most tokens of a prompt."""
        return self._positions - sampling.max_tokens

    def _record(self, prompt: Prompt) -> Record:
        added: Record = {"id": "", "answer": "", "worked": "", "instruction": self._instruction}
        if isinstance(prompt, str):
            return added | {"question": prompt}
        if isinstance(prompt, Mapping):
            return added | dict(prompt)
        try:
            turns = rows.parse_messages(list(prompt))
        except files.Defect as defect:
            raise UserError(f"the conversation cannot be answered: {defect}; {defect.remedy}") from None
        if turns[-1]["role"] != "user":
            raise UserError(f"the conversation ends with the {turns[-1]['role']}'s turn; add the user's")
        return added | {"question": turns[-1]["content"], "messages": turns}

    def _padded(self, asked: Sequence[Asked], P: int, width: int) -> Prompts:
        """Return prompts [P, width], with the last repeated where `valid` is False."""
        chosen = [asked[min(row, len(asked) - 1)] for row in range(P)]
        tokens = np.full((P, width), self.tokenizer.pad_id, np.int32)
        for row, one in zip(tokens, chosen, strict=True):
            row[: len(one.tokens)] = one.tokens
        arrays: Any = tokens, np.array([len(one.tokens) for one in chosen], np.int32)
        texts, records = [one.text for one in chosen], [one.record for one in chosen]
        return Prompts(*arrays, texts=texts, records=records, valid=np.arange(P) < len(asked))

    def _player(self, sampling: Sampling, *, prompts: int, width: int) -> Player:
        """Return the player of such calls, with the loaded weights."""
        key = sampling, prompts, width, self.poll_steps
        if key not in self._players:
            opened, config = self.opened, self._changed(sampling, prompts=prompts, width=width)
            stop, memory = players.stop_rule_of(config, self.tokenizer), hosts.memory_of(opened.engine.meshes.sampler)
            made = engine.build(config, opened.model, opened.engine.meshes, stop, memory=memory, trains=False).sampler
            made.share(opened.engine.sampler)
            made.poll, made.poll_steps, made.cuts_prompts = lambda: self.poll(), self.poll_steps, False
            self._players[key] = players.make_player(config, self.tokenizer, made, opened.replies)
        return self._players[key]

    def _changed(self, sampling: Sampling, *, prompts: int, width: int) -> ConfigDict:
        """Return the config of an engine for such calls, which trains nothing."""
        config = self.opened.config.copy_and_resolve_references()
        config.data.prompts_per_batch, config.data.max_prompt_length = prompts, width
        config.sampling.group_size, config.sampling.max_response_length = sampling.n, sampling.max_tokens
        config.sampling.temperature = float(sampling.temperature)
        config.sampling.pool_tokens = config.sampling.partial.prompts = config.training.row_tokens = None
        config.sampling.keep_top = 0
        config.training.minibatches, config.training.old_logprobs = 1, "recompute"
        return config

    def _rewards(self) -> BatchScorer:
        """Return the run's reward functions, started at their first use. All of them score every record."""
        if self._scorer is None:
            opened = self.opened
            scorer = self._stack.enter_context(data.make_scorer(opened.config, scores=lambda name, record: True))
            self._scorer = BatchScorer(scorer, self.tokenizer.decode, opened.engine.meshes.trainer)
        return self._scorer
