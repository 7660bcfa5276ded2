"""Text encoding and decoding.

Prompts are never cut, and the pipeline pads. `guard` keeps contents from passing as the chat template's special tokens,
and a tool's from passing as any added token.
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from absl import logging
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from gspo_jax import foreign, thoughts, tool_calls
from gspo_jax.data import added_tokens, chat
from gspo_jax.data import backend as backends
from gspo_jax.data.added_tokens import SETTINGS, text_of
from gspo_jax.data.chat import Message, Rejected, ToolSchemas
from gspo_jax.data.templates import CLOCK
from gspo_jax.errors import UserError
from gspo_jax.models.config_json import CONFIG, read_if_any, token_id, token_ids

PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
"""Special tokens of a trained tokenizer, ids 0, 1 and 2."""
MARKS_OF_CALLS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
"""Added tokens of a trained tokenizer with a chat template, as of Qwen3's."""
CHATML = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0].content + '\n\n' if messages[0].role == 'system' else '' }}
    {{- 'Tools:\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
    {{- 'Call one:\n<tool_call>\n{"name": NAME, "arguments": {}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": ' + (call.function.name | tojson) }}
            {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""
"""ChatML with tools, calls and replies, as Hermes and Qwen3 write them: the chat template of a trained tokenizer."""

FILES = (
    "tokenizer.json",
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Tokenizer files of a Hugging Face folder, not all required."""
_SAVED = "AutoTokenizer.from_pretrained({folder}).save_pretrained({folder})"
_CONVERTED = {
    "tiktoken.model": "integrations.tiktoken.convert_tiktoken_to_fast(AutoTokenizer.from_pretrained({folder}, "
    "trust_remote_code=True).model, {folder}), for which it needs tiktoken and blobfile",
    "tokenizer.model": f"{_SAVED}, for which it needs sentencepiece",
    "merges.txt": _SAVED,
}
"""How tokenizer.json comes of other files: Kimi's and Moonlight's, SentencePiece's, and older byte-pair encodings'."""
_FAST = "give a folder with a fast (tokenizers) tokenizer"
THINKING = "enable_thinking", "thinking"
"""Variables by which chat templates switch thinking: of Qwen3, Qwen3.5 and GLM; of DeepSeek-V3.1 and Granite."""
GUARD = "\ufdd0"
"""Mark by which `encode` takes a special token for plain text, a Unicode noncharacter."""
_ALIAS = "\ufdd1%d\ufdd2"
"""Alias of a special token in guarded text, by id."""
_NO_CHARACTERS = re.compile("[\ufdd0-\ufdd2]")
_SAID = "\N{OBJECT REPLACEMENT CHARACTER}"
_ARGUMENT = "said in a call"
_TRIAL_TURNS: list[Message] = [{"role": "user", "content": "?"}, tool_calls.TRIAL_CALL]
_CONTENTS = "content", "reasoning_content"
_NO_TOOLS = "the chat template writes no tools; use a model whose own does, or give its folder a chat_template.jinja"
_MARKS = thoughts.MARKS | tool_calls.MARKS

_GENERATION = "generation_config.json"

_SPLIT = (  # Qwen's pre-tokenisation, with single digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer with its EOS ids, padding id and chat template.

    `eos_ids`: ids that end a response, the chat template's end of turn first. `unk_id`: None without an unknown token.
    `behind`: the chat template's text after a final assistant turn.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        settings: dict[str, Any],
        variables: Mapping[str, Any] | None = None,
        clock: str = CLOCK,
    ) -> None:
        """Wrap `backend`.

        `settings` is the content of `tokenizer_config.json`, with `chat_template` a string or None. The template gets
        `variables` and the time `clock` (ISO 8601).
        """
        backend.no_truncation()  # tokenizer.json may enable both
        backend.no_padding()
        self.pad_id = pad_id
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._unsaid = {i for i, token in added.items() if token.special and token.content not in _MARKS}
        self._settings = settings
        self._variables = dict(variables or {})
        source = settings.get("chat_template")
        time = datetime.datetime.fromisoformat(clock)
        self._template = None if source is None else chat.Template(source, time)
        unknown = text_of(settings.get("unk_token"))
        self.unk_id = None if unknown is None else backend.token_to_id(unknown)
        self._added = _any_of(token.content for token in added.values())
        self._marks = _any_of(token.content for token in added.values() if not _is_blank(token))
        self._in_parts = self._wants_parts()
        self.behind = self._written_behind()
        self.eos_ids = self._with_end_of_turn(eos_ids)
        special = {token.content for token in self._special_tokens().values()} | self._marks_of_turns()
        self._special, self._unsaid_marks = _any_of(special), _any_of(special - _MARKS)

    @classmethod
    def load(cls, folder: str | Path, *, clock: str = CLOCK, **variables: Any) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face folder.

        The chat template gets `variables`, such as Qwen3's `enable_thinking`, and the time `clock`. EOS ids are the
        union of its end-of-turn token, `eos_token` in `tokenizer_config.json`, and `eos_token_id` in
        `generation_config.json` and `config.json`.

        Raises:
          UserError: `tokenizer.json` or every EOS token is missing, a file is malformed, two files give a token
            different ids, the tokenizer can grow a text without bound, or the chat template fails on a user turn, omits
            it, takes too much, or writes an unknown special token.
        """
        folder = Path(folder)
        backend, settings = _read_backend(folder)
        settings["chat_template"] = _template_source(folder, settings.get("chat_template"))
        eos, pads = ([_token_id(backend, settings, f"{key}_token", folder)] for key in ("eos", "pad"))
        for file in (folder / _GENERATION, folder / CONFIG):
            content = read_if_any(file)
            eos += token_ids(file, "eos_token_id", content.get("eos_token_id"))
            pads.append(token_id(file, "pad_token_id", content.get("pad_token_id")))
        eos_ids = list(dict.fromkeys(i for i in eos if i is not None))
        if not eos_ids:
            raise UserError(f"{folder} defines no end-of-sequence token; set eos_token in its {SETTINGS}")
        pads.append(eos_ids[0])
        pad_id = next(i for i in pads if i is not None)
        tokenizer = cls(backend, eos_ids=eos_ids, pad_id=pad_id, settings=settings, variables=variables, clock=clock)
        if "strftime_now" in (settings["chat_template"] or ""):
            logging.warning("%s: the chat template asks for the time and is told data.clock, %s", folder, clock)
        tokenizer._check_prompt(folder)  # fail before a run has its devices
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, template: str | None = None) -> "Tokenizer":
        """Train a deterministic byte-level BPE tokenizer of at most `vocab_size` tokens, with single digits.

        With a chat `template`, which writes calls as Hermes does, MARKS_OF_CALLS are tokens. Special tokens and these
        are left out of the texts.
        """
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        specials = [PAD, EOS, TURN]
        marks = [] if template is None else [*MARKS_OF_CALLS]
        least = len(alphabet) + len(specials) + len(marks)
        if vocab_size < least:
            raise UserError(
                f"vocab_size is {vocab_size}, but all bytes and special tokens need {least}; use {least} or more"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
        backend.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [
                pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(marks),
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        added = _any_of([*specials, *marks])
        backend.train_from_iterator((part for text in texts for part in added.split(text)), trainer)
        backend.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks])
        settings = {"eos_token": EOS, "pad_token": PAD, "chat_template": template}
        pad, eos = backend.token_to_id(PAD), backend.token_to_id(EOS)
        assert pad is not None and eos is not None
        return cls(backend, eos_ids=[eos], pad_id=pad, settings=settings)

    @property
    def vocabulary(self) -> dict[int, str]:
        """All tokens by id, as tokenizer.json spells them."""
        return _vocabulary(self._backend)

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included."""
        return max(self.vocabulary) + 1

    @property
    def special(self) -> list[str]:
        """Texts of all special tokens."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def encode(self, text: str) -> list[int]:
        """Return token ids. Special tokens in the text count as such unless marked by `guard`."""
        if GUARD in text:
            return self._encode_guarded(text)
        with backends.panics_told():
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts on the library's threads."""
        with backends.panics_told():
            usual = iter(
                self._backend.encode_batch_fast([t for t in texts if GUARD not in t], add_special_tokens=False)
            )
        return [self._encode_guarded(t) if GUARD in t else next(usual).ids for t in texts]

    def ends(self) -> list[str]:
        """Return the texts of the EOS tokens."""
        return [end for index in self.eos_ids if (end := self.decode([index], skip_special=False))]

    def guard(self, content: str, role: str = "user") -> str:
        """Mark special tokens, and others with which the template writes turns, as plain text for `encode`.

        Exceptions are other added tokens that are not special, such as Qwen3's `<think>`, and marks of thoughts and
        calls that the assistant says. In what a tool says no added token counts, not even one that begins or ends in
        the template's text.
        """
        if role != "tool":
            return _marked(content, self._unsaid_marks if role == "assistant" else self._special)
        content = _marked(content, self._marks)
        said = content.strip()  # as templates strip it
        return content.replace(said, f"{GUARD}{said}{GUARD}", 1) if said else content

    def guarded(self, message: Message) -> Message:
        """Return a turn with guarded contents. In all but these, such as arguments of calls, no added token counts."""
        role = message["role"]
        said = {name: self.guard(message[name], role) for name in _CONTENTS if name in message}
        return self.guarded_json({name: value for name, value in message.items() if name not in said}) | said

    def guarded_json(self, value: Any) -> Any:
        """Return a JSON value, such as a list of tools, in whose texts no added token counts."""
        if isinstance(value, str):
            return _marked(value, self._marks)
        if isinstance(value, Mapping):
            return {self.guarded_json(name): self.guarded_json(inner) for name, inner in value.items()}
        return [self.guarded_json(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _encode_guarded(self, text: str) -> list[int]:
        """Encode a guarded text in one piece, as each piece would count as a text's beginning."""
        backend, added, of_alias = self._apart
        text = added.sub(lambda found: _ALIAS % self._backend.token_to_id(found[0]), text).replace(GUARD, "")
        with backends.panics_told():
            found = backend.encode(text, add_special_tokens=False).ids
        return [of_alias.get(i, i) for i in found]

    @functools.cached_property
    def _apart(self) -> tuple[tokenizers.Tokenizer, re.Pattern[str], dict[int, int]]:
        """Return a tokenizer that reads added tokens as text and aliases as tokens, their pattern, and aliases' ids."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        added = [
            (index, token)
            for index, token in self._backend.get_added_tokens_decoder().items()
            if len(token.content) > 1 and not _is_blank(token)
        ]
        added.sort(key=lambda each: len(each[1].content), reverse=True)
        aliases = [
            tokenizers.AddedToken(_ALIAS % index, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            for index, token in added
        ]
        backend.add_special_tokens([token for _, token in added])  # all at once, as each call looks at all tokens
        backend.add_tokens(aliases)
        backend.encode_special_tokens = True
        vocabulary = backend.get_vocab(with_added_tokens=True)
        of_alias = {vocabulary[_ALIAS % index]: index for index, _ in added}
        texts = [(re.escape(token.content), token.single_word) for _, token in added]
        pattern = "|".join(rf"(?<!\w){text}(?!\w)" if alone else text for text, alone in texts)
        return backend, re.compile(pattern or r"(?!)"), of_alias

    def _special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        added = self._backend.get_added_tokens_decoder()
        return {index: token for index, token in added.items() if token.special or index in self.eos_ids}

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`, by default without special tokens except thought marks.

        Ids beyond the vocabulary, which a padded model may sample, decode to nothing.
        """
        said = [int(i) for i in ids if not (skip_special and int(i) in self._unsaid)]
        with backends.panics_told():
            return self._backend.decode(said, skip_special_tokens=False)

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, *, tools: ToolSchemas | None = None
    ) -> str:
        """Apply the chat template, or concatenate the contents if there is none."""
        (text,) = self.chat_all([messages], add_generation_prompt, tools=[tools])
        if isinstance(text, Rejected):
            raise text
        return text

    def chat_all(
        self,
        conversations: Sequence[Sequence[Message]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[ToolSchemas | None] | None = None,
    ) -> list[str | Rejected]:
        """Return `chat` of each conversation, with its tools if given, or its Rejected.

        Raises:
          UserError: tools are given, and the chat template writes none.
        """
        if any(tools or ()) and not self.takes_tools:
            raise UserError(_NO_TOOLS)
        if self._template is None:
            return [_joined(messages) for messages in conversations]
        if any("tool_calls" in turn for turns in conversations for turn in turns) and self._writes_ids:
            conversations = [tool_calls.with_named_ids(turns) for turns in conversations]
        if self._in_parts:
            conversations = [[chat.in_parts(message) for message in messages] for messages in conversations]
        texts = self._template.render(conversations, tools=tools, **self._given(add_generation_prompt))
        lost = Rejected("the chat template leaves out tool calls; use a model whose own writes them")
        return [
            lost if isinstance(text, str) and any("tool_calls" in m for m in turns) and not self._writes_calls else text
            for text, turns in zip(texts, conversations, strict=True)
        ]

    @functools.cached_property
    def ignores_thinking(self) -> bool:
        """True if the chat template writes the same prompt with thinking and without."""
        if self._template is None:
            return False
        turn = chat.in_parts(_TRIAL_TURNS[0]) if self._in_parts else _TRIAL_TURNS[0]
        variables, prompts = self._given(add_generation_prompt=True), []
        for thinks in (True, False):
            variables.update(dict.fromkeys(THINKING, thinks))
            prompts.append(self._template.render([[turn]], **variables))
        return prompts[0] == prompts[1]

    @functools.cached_property
    def takes_tools(self) -> bool:
        """True if the chat template writes the tools that it is given."""
        return self._is_trial_written([{"role": "user", "content": "?"}], tool_calls.TRIAL_TOOLS)

    @functools.cached_property
    def _writes_calls(self) -> bool:
        return self._writes_ids or self._is_trial_written(_TRIAL_TURNS, None)

    @functools.cached_property
    def _writes_ids(self) -> bool:
        """True if the chat template writes the ids of calls in place of their names, as Kimi-K2-Thinking's does."""
        named = tool_calls.with_named_ids(_TRIAL_TURNS)
        return not self._is_trial_written(_TRIAL_TURNS, None) and self._is_trial_written(named, None)

    def _is_trial_written(self, turns: Sequence[Message], tools: ToolSchemas | None) -> bool:
        if self._template is None:
            return False
        turns = [chat.in_parts(turn) for turn in turns] if self._in_parts else turns
        (text,) = self._template.render([turns], tools=[tools], **self._given(add_generation_prompt=False))
        return isinstance(text, str) and tool_calls.TRIAL_NAME in text

    def tool_format(self, chosen: str = "") -> str:
        """Return the format in which the chat template writes calls, one of `tool_calls.FORMATS`, unless `chosen`.

        Raises:
          UserError: it is none of these.
        """
        if chosen:
            return chosen
        tools = tool_calls.TRIAL_TOOLS if self.takes_tools else None
        turns = [{"role": "user", "content": _SAID}, tool_calls.TRIAL_CALL]
        (text,) = self.chat_all([turns], add_generation_prompt=False, tools=[tools])
        found = None if isinstance(text, Rejected) else tool_calls.format_of(text.rpartition(_SAID)[2])
        if found is None:
            formats = ", ".join(tool_calls.FORMATS)
            raise UserError(
                f"the chat template writes tool calls in none of the formats {formats}; if the model writes them in "
                "one, set environment.tool_format to it"
            )
        return found

    def _given(self, add_generation_prompt: bool) -> dict[str, Any]:
        tokens = {key: text_of(value) for key, value in self._settings.items() if key.endswith("_token")}
        given = {key: token for key, token in tokens.items() if token is not None} | self._variables
        return given | {"add_generation_prompt": add_generation_prompt}

    def user_turn(self, content: str) -> str:
        """Return the text between an assistant's EOS and its next turn if the user says `content`."""
        return self.turns([{"role": "user", "content": content}])

    def turns(self, messages: Sequence[Message], *, ended: int | None = None, tools: ToolSchemas | None = None) -> str:
        """Return the text between the token that ends an assistant's turn and its next turn if others say `messages`.

        It is what the chat template writes behind a turn: the assistant's, with a call for each tool's reply.

        Args:
          messages: of a user or of tools, guarded.
          ended: id of the token that ended the turn. If it is no EOS token, the text closes the turn first. Some
            templates close no turn, and the token that opens the next one ends it, such as GLM's `<|observation|>`: it
            is part of the text unless it ended the turn. None: whichever the template writes.
          tools: as in the prompt.

        Raises:
          UserError: the template rejects the messages, omits one, or writes an answered turn in another way.
        """
        if self._template is None:
            return "".join(message["content"] for message in messages)
        replied = _with_ids(messages)
        calls = [_call_of(message) for message in replied if message["role"] == "tool"]
        behind = None
        if calls:
            calls[-1]["function"]["arguments"] = {"text": _ARGUMENT}
            said = {"role": "assistant", "content": "", "tool_calls": calls}
            with contextlib.suppress(Rejected):  # it may take replies alone
                behind = self._behind(said, _ARGUMENT, replied, tools)
        if behind is None:
            behind = self._behind({"role": "assistant", "content": _SAID}, _SAID, replied, tools)
        if behind is None:
            raise UserError("the chat template leaves out what the assistant says; correct it, or use the model's own")
        alone, answered = behind
        end = self._eos.search(alone)
        own = alone.rstrip() if end is None else alone[: end.start()]
        if not answered.startswith(own + ("" if end is None else end[0])):
            roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
            raise UserError(f"the chat template writes a turn in another way once a {roles} answers it; correct it")
        text = answered[len(own) :]
        for message in messages:
            if not _is_written(message["content"], text):
                raise UserError(
                    f"the chat template leaves out what a {message['role']} says; correct it, or use the model's own"
                )
        opened = self._eos.match(text.lstrip())
        if opened is None:
            return text
        index = self._backend.token_to_id(opened[0])
        is_end = end is not None or index == self._end_id
        is_said = ended is None or (ended in self.eos_ids if is_end else ended == index)
        return text.lstrip()[opened.end() :] if is_said else text

    def reply(
        self, messages: Sequence[Message], *, ended: int | None = None, tools: ToolSchemas | None = None
    ) -> list[int]:
        """Return the tokens of `turns`, from messages as they are. No added token in them counts.

        The text is read together with the token that ended the turn, so it does not count as a text's beginning.
        """
        guarded = [{**self.guarded(message), "content": self.guard(message["content"], "tool")} for message in messages]
        text = self.turns(guarded, ended=ended, tools=None if tools is None else self.guarded_json(tools))
        before = self.eos_ids[0] if ended is None else int(ended)
        found = self._encode_guarded(self.decode([before], skip_special=False) + text)
        return found[1:] if found[:1] == [before] else self._encode_guarded(text)

    def _behind(
        self, said: Message, mark: str, replies: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[str, str] | None:
        """Return the text behind `mark` in a turn of the assistant, at the end and with replies, None if it is lost."""
        turns = [{"role": "user", "content": "?"}, said]
        alone = self.chat(turns, add_generation_prompt=False, tools=tools).partition(mark)
        answered = self.chat([*turns, *replies], tools=tools).partition(mark)
        return (alone[2], answered[2]) if alone[1] and answered[1] else None

    @functools.cached_property
    def _eos(self) -> re.Pattern[str]:
        return _any_of(self.ends())

    def _wants_parts(self) -> bool:
        """Return True if the chat template needs contents as lists of parts."""
        turn = {"role": "user", "content": _SAID}
        return self._template is not None and not self._writes(turn) and self._writes(chat.in_parts(turn))

    def _writes(self, turn: Mapping[str, Any]) -> bool:
        assert self._template is not None
        (text,) = self._template.render([[turn]], **self._given(add_generation_prompt=True))
        return isinstance(text, str) and _SAID in text  # `load` reports a Rejected

    def _check_prompt(self, folder: Path) -> None:
        prompt = self.chat([{"role": "user", "content": _SAID}])
        if _SAID not in prompt:
            raise UserError(
                f"{folder}: the chat template leaves out what the user says; correct it, or use the model's own"
            )
        for key, value in self._settings.items():
            if key.endswith("_token") and (content := text_of(value)) and content in prompt:
                _token_id(self._backend, self._settings, key, folder)
        for turns, asks in itertools.product(chat.TRIALS, (True, False)):
            with contextlib.suppress(Rejected):
                self.chat(turns, add_generation_prompt=asks)

    def _written_behind(self) -> str:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        try:
            _, found, behind = self.chat(turns, add_generation_prompt=False).rpartition(_SAID)
        except Rejected:  # `load` reports it
            return ""
        return behind if found else ""

    def _written_between(self) -> str:
        """Return the template's text between an assistant turn and the next user turn's opening."""
        turns = [{"role": role, "content": _SAID} for role in ("user", "assistant", "user")]
        try:
            parts = self.chat(turns, add_generation_prompt=False).split(_SAID)
        except Rejected:
            return ""
        if len(parts) != 4:  # one is left out or repeated
            return ""
        first, _, between, _ = parts
        opening, closing = (re.split(f"({self._added.pattern})", text) for text in (first, between))
        while opening and closing and opening[-1] == closing[-1]:
            opening.pop()
            closing.pop()
        return "".join(closing)

    def _marks_of_turns(self) -> set[str]:
        """Return the added tokens that the template writes around contents, special or not: DeepSeek-V3's are not."""
        if self._template is None:
            return set()
        turns = [{"role": role, "content": _SAID} for role in ("user", "assistant", "user")]
        turns = [chat.in_parts(turn) for turn in turns] if self._in_parts else turns
        (text,) = self._template.render([turns], **self._given(add_generation_prompt=True))
        return set() if isinstance(text, Rejected) else {*self._marks.findall(text)} - _MARKS

    def _with_end_of_turn(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        written = self.behind.strip() or self._written_between().strip()
        found = self._added.match(written)
        self._end_id = end = None if found is None else self._backend.token_to_id(found[0])
        if end is None:
            if written:
                usual = self.decode(eos_ids[:1], skip_special=False)
                logging.warning(
                    "the chat template ends a turn with %r, which is no token: responses end with %r", written, usual
                )
            return tuple(eos_ids)
        if end not in eos_ids:
            logging.warning(
                "the chat template ends a turn with %r, which is none of the EOS tokens: it ends responses too",
                self.decode([end], skip_special=False),
            )
        return tuple(dict.fromkeys([end, *eos_ids]))

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {key: value for key, value in self._settings.items() if key != "chat_template"}
        _write_json(folder / SETTINGS, settings)
        template = self._settings.get("chat_template")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        self.save_stops(folder)

    def save_stops(self, folder: Path) -> None:
        """Write the EOS ids to `generation_config.json`, keeping its other keys."""
        ids = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
        _write_json(folder / _GENERATION, read_if_any(folder / _GENERATION) | ids)


def read_vocabulary(folder: Path) -> dict[int, str]:
    """Return the tokens of a Hugging Face folder's tokenizer by id. Raise as `Tokenizer.load` for damaged files."""
    return _vocabulary(_read_backend(folder)[0])


def _read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    path = folder / "tokenizer.json"
    if not foreign.is_file(path, inside=folder):
        written = next((how for name, how in _CONVERTED.items() if foreign.is_file(folder / name, inside=folder)), None)
        remedy = f"write it with transformers: {written.format(folder=repr(str(folder)))}" if written else _FAST
        raise UserError(f"{folder} has no tokenizer.json; {remedy}")
    backend, settings = backends.load(path), added_tokens.read_settings(folder)
    added_tokens.add(backend, folder, settings)
    return backend, settings


def _vocabulary(backend: tokenizers.Tokenizer) -> dict[int, str]:
    return {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise UserError if a token id has no embedding row."""
    if tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"the tokenizer's largest id {tokenizer.vocab_size - 1} does not fit the model's vocabulary of "
            f"{model_vocab_size}; use the model's own tokenizer, or a vocab_size of {tokenizer.vocab_size} or more"
        )
    for key, ids in (("eos_token_id", tokenizer.eos_ids), ("pad_token_id", (tokenizer.pad_id,))):
        if max(ids) >= model_vocab_size:
            raise UserError(
                f"{key} is {max(ids)}, beyond the model's vocabulary of {model_vocab_size}; correct it in "
                f"{_GENERATION} or {CONFIG}, beside the tokenizer"
            )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _template_source(folder: Path, setting: Any) -> str | None:
    path = folder / "chat_template.jinja"
    if foreign.is_file(path, inside=folder):
        try:
            source = path.read_text(encoding="utf-8-sig")
        except UnicodeError as error:
            raise UserError(f"{path} is not valid UTF-8 ({error!s:.200}); download it again") from error
        if isinstance(setting, str) and setting.strip() != source.strip():
            logging.warning("%s and the chat template of %s differ; the former is used", path, SETTINGS)
        return source
    if setting is None or isinstance(setting, str):
        return setting
    entries = setting if isinstance(setting, list) else []
    pairs: list[tuple[Any, Any]] = [(e.get("name"), e.get("template")) for e in entries if isinstance(e, dict)]
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise UserError(
            f"{folder / SETTINGS}: chat_template is {setting!r:.100}; it must be a string, or a list of objects with "
            "name and template"
        )
    named = dict(pairs)
    if "default" not in named:
        raise UserError(f"{folder} has the chat templates {', '.join(named)} but no 'default'; add chat_template.jinja")
    return named["default"]


def _joined(messages: Sequence[Message]) -> str | Rejected:
    if any(message.get("tool_calls") for message in messages):
        return Rejected("there is no chat template, which tool calls need; use a model that has one")
    return "".join(message["content"] for message in messages)


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tools' replies name their calls, as some templates need."""
    named = {"tool_call_id": "call{:05d}", "name": "tool"}
    return [
        {**{name: text.format(number) for name, text in named.items()}, **message}
        if message["role"] == "tool"
        else message
        for number, message in enumerate(messages)
    ]


def _call_of(reply: Message) -> dict[str, Any]:
    function = {"name": reply["name"], "arguments": {}}
    return {"id": reply["tool_call_id"], "type": "function", "function": function}


def _is_written(content: str, text: str) -> bool:
    said = content.strip()
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


def _marked(content: str, tokens: re.Pattern[str]) -> str:
    """Mark tokens in a text as plain text by GUARD."""
    content = _NO_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", content)
    while tokens.search(content):  # they may overlap
        content = tokens.sub(lambda found: f"{found[0][0]}{GUARD}{found[0][1:]}", content)
    return content


def _is_blank(token: tokenizers.AddedToken) -> bool:
    """Return True for runs of spaces or line ends, which are text: OLMoE's and Gemma's are added tokens."""
    return not token.content.strip(" \t\r\n▁")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of these texts. Guards need two characters."""
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True) if len(t) > 1) or r"(?!)")


def _token_id(backend: tokenizers.Tokenizer, settings: dict[str, Any], key: str, folder: Path) -> int | None:
    token = settings.get(key)
    if token is None:
        return None
    content = text_of(token)
    index = None if content is None else backend.token_to_id(content)
    if index is None:
        shown = token if content is None else content
        where = f"{key} {shown!r:.100} in {folder / SETTINGS}"
        raise UserError(f"{where} is not in the tokenizer's vocabulary; set it to a token that is")
    return index
