"""Encode and decode text with the `tokenizers` library: load a tokenizer from a Hugging Face folder, or train one.

No truncation and no padding here: prompts are never cut, and the pipeline pads.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Bool, Int
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from gspo_jax import thoughts
from gspo_jax.data import chat
from gspo_jax.models.config_json import CONFIG, read_json, token_id, token_ids
from gspo_jax.types import UserError

PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
"""Special tokens of a trained tokenizer, with ids 0, 1 and 2."""

_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"

_SPLIT = (  # Qwen's pre-tokenisation: splits digits, so that a digit is the same token in every number.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer with its EOS ids, padding id and chat template.

    `eos_ids`: all ids that end a response; the first is the one to append. `pad_id`: pads rows on the right. `unk_id`:
    the unknown token, or None if the tokenizer has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        settings: dict[str, Any],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap `backend`; `settings` is the content of `tokenizer_config.json`, `chat_template` a string or None.

        `variables` are passed to the chat template of every conversation.
        """
        backend.no_truncation()  # tokenizer.json may enable both, and prompts must never be cut silently
        backend.no_padding()
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._unsaid = {i for i, token in added.items() if token.special and token.content not in thoughts.MARKS}
        self._settings = settings
        self._variables = dict(variables or {})
        source = settings.get("chat_template")
        self._template = None if source is None else chat.compile_template(source)
        unknown = _text(settings.get("unk_token"))
        self.unk_id = None if unknown is None else backend.token_to_id(unknown)

    @classmethod
    def load(cls, folder: str | Path, **variables: Any) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face folder: `tokenizer.json`, and the configuration files that are present.

        `variables` are passed to the chat template, such as Qwen3's `enable_thinking`.

        EOS ids are the union of `eos_token` in `tokenizer_config.json` and `eos_token_id` (one id or a list) in
        `generation_config.json` and `config.json`. Raises UserError if `tokenizer.json` or every EOS token is missing,
        a file is malformed, or the chat template fails on a user's turn.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder} has no tokenizer.json; give a folder with a fast (tokenizers) tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} cannot be read as a tokenizer ({error}); download or save it again") from error
        settings = _read_json(folder / _SETTINGS)
        settings["chat_template"] = _template_source(folder, settings.get("chat_template"))
        eos, pads = ([_token_id(backend, settings, f"{key}_token", folder)] for key in ("eos", "pad"))
        for file in (folder / _GENERATION, folder / CONFIG):
            content = _read_json(file)
            eos += token_ids(file, "eos_token_id", content.get("eos_token_id"))
            pads.append(token_id(file, "pad_token_id", content.get("pad_token_id")))
        eos_ids = list(dict.fromkeys(i for i in eos if i is not None))
        if not eos_ids:
            raise UserError(f"{folder} defines no end-of-sequence token; set eos_token in its {_SETTINGS}")
        pads.append(eos_ids[0])
        pad_id = next(i for i in pads if i is not None)
        tokenizer = cls(backend, eos_ids=eos_ids, pad_id=pad_id, settings=settings, variables=variables)
        tokenizer.chat([{"role": "user", "content": "?"}])  # as every prompt; fails now, not once a run has its devices
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, with single digits; deterministic."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        specials = [PAD, EOS, TURN]
        least = len(alphabet) + len(specials)
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
            vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
        settings = {"eos_token": EOS, "pad_token": PAD, "chat_template": None}
        pad, eos = backend.token_to_id(PAD), backend.token_to_id(EOS)
        assert pad is not None and eos is not None  # both are special tokens of the trainer
        return cls(backend, eos_ids=[eos], pad_id=pad, settings=settings)

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included: the minimum number of rows of an embedding."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; no special tokens are added, but those written in the text are recognised."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, on the library's threads."""
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`, by default without special tokens, but for those that open or close a thought.

        Ids beyond the vocabulary, which a padded model may sample, decode to nothing.
        """
        said = [int(i) for i in ids if not (skip_special and int(i) in self._unsaid)]
        return self._backend.decode(said, skip_special_tokens=False)

    def chat(self, messages: Sequence[chat.Message], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation under the chat template; without a template, the contents concatenated."""
        if self._template is None:
            return "".join(message["content"] for message in messages)
        texts = {key: _text(value) for key, value in self._settings.items() if key.endswith("_token")}
        given = {key: text for key, text in texts.items() if text is not None} | self._variables
        return chat.render(self._template, messages, add_generation_prompt=add_generation_prompt, **given)

    def user_turn(self, content: str) -> str:
        """Return the text between an assistant's EOS and its next turn for a user turn that says `content`."""
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"  # placeholder for the assistant's turn
        turns = (("user", "?"), ("assistant", mark), ("user", content))
        text = self.chat([{"role": role, "content": said} for role, said in turns])
        end = self.decode(self.eos_ids[:1], skip_special=False)
        return text.partition(mark)[2].removeprefix(end)

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` reads; an existing `generation_config.json` keeps its other keys."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {key: value for key, value in self._settings.items() if key != "chat_template"}
        _write_json(folder / _SETTINGS, settings)
        template = self._settings.get("chat_template")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        ids = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
        _write_json(folder / _GENERATION, _read_json(folder / _GENERATION) | ids)


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise UserError if the tokenizer has ids without an embedding row; a model may have more rows than ids."""
    if tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"the tokenizer's largest id {tokenizer.vocab_size - 1} does not fit the model's vocabulary of "
            f"{model_vocab_size}; use the model's own tokenizer, or a vocab_size of {tokenizer.vocab_size} or more"
        )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, f"{path} does not exist; download it again") if path.is_file() else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _template_source(folder: Path, setting: Any) -> str | None:
    """Return `chat_template.jinja` if it exists, else the setting, which is a string or a list of named templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeError as error:
            raise UserError(f"{path} is not valid UTF-8 ({error}); download it again") from error
    if setting is None or isinstance(setting, str):
        return setting
    entries = setting if isinstance(setting, list) else []
    pairs: list[tuple[Any, Any]] = [(e.get("name"), e.get("template")) for e in entries if isinstance(e, dict)]
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise UserError(
            f"{folder / _SETTINGS}: chat_template is {setting!r:.100}; it must be a string, or a list of objects with "
            "name and template"
        )
    named = dict(pairs)
    if "default" not in named:
        raise UserError(f"{folder} has the chat templates {', '.join(named)} but no 'default'; add chat_template.jinja")
    return named["default"]


def _text(token: Any) -> str | None:
    """Return a special token's text; older folders store an object with the text as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token_id(backend: tokenizers.Tokenizer, settings: dict[str, Any], key: str, folder: Path) -> int | None:
    """Return the id of a special token of `tokenizer_config.json`, None if it is not set."""
    token = settings.get(key)
    if token is None:
        return None
    text = _text(token)
    index = None if text is None else backend.token_to_id(text)
    if index is None:
        shown = token if text is None else text
        where = f"{key} {shown!r:.100} in {folder / _SETTINGS}"
        raise UserError(f"{where} is not in the tokenizer's vocabulary; set it to a token that is")
    return index


def decode_responses(tokenizer: Tokenizer, tokens: Int[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> list[str]:
    """Text of each response, without special tokens."""
    return [tokenizer.decode(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]
