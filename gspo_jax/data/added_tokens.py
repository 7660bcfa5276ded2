"""Tokens that a Hugging Face folder adds to `tokenizer.json`, as in transformers.

`tokenizer_config.json` may list more in `added_tokens_decoder` and as special tokens, older folders in
`special_tokens_map.json` and `added_tokens.json`. Without them, `<think>` would be split into pieces.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from absl import logging

from gspo_jax.errors import UserError
from gspo_jax.models.config_json import read_if_any, token_id

SETTINGS = "tokenizer_config.json"
_MAP, _ADDED, _DECODER = "special_tokens_map.json", "added_tokens.json", "added_tokens_decoder"
_EXTRA = "additional_special_tokens", "extra_special_tokens"
"""Settings of special tokens without a role."""
_FLAGS = "special", "lstrip", "rstrip", "single_word", "normalized"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json` with the special tokens of `special_tokens_map.json`.

    In conflicts the former wins if it describes added tokens, as in current folders, else the latter.
    """
    settings, named = (read_if_any(folder / name) for name in (SETTINGS, _MAP))
    first, second = (settings, named) if _DECODER in settings else (named, settings)
    for key in sorted(settings.keys() & named.keys()):
        if key.endswith("_token") and text_of(settings[key]) != text_of(named[key]):
            chosen = text_of(first[key])
            logging.warning("%s: %s and %s differ in %s; %r is used", folder, SETTINGS, _MAP, key, chosen)
    return second | first


def add(backend: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add tokens that `tokenizer.json` lacks or has with other flags.

    Raises:
      UserError: a token is malformed, or its id would differ from its file's.
    """
    special = {content for key, value in settings.items() if key.endswith("_token") and (content := text_of(value))}
    extra = [content for key in _EXTRA for value in _listed(settings.get(key)) if (content := text_of(value))]
    there = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    for index, (file, token) in sorted(_declared(folder, settings, special).items()):
        if there.get(token.content) != repr(token):
            _check_free(backend, file, index, token.content)
            token.special |= token.content in special
            backend.add_tokens([token])
            there[token.content] = repr(token)
        if (found := backend.token_to_id(token.content)) != index:
            raise UserError(_conflict(file, index, token.content, f"is {found} with its tokenizer.json"))
    for content in [*sorted(name for name in special if backend.token_to_id(name) is not None), *extra]:
        if content not in there:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
            there[content] = ""


def text_of(token: Any) -> str | None:
    """Return a special token's text, in older folders an object's `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _declared(
    folder: Path, settings: Mapping[str, Any], special: set[str]
) -> dict[int, tuple[Path, tokenizers.AddedToken]]:
    file = folder / SETTINGS
    if _DECODER not in settings:  # an older folder
        file = folder / _ADDED
        kinds = {content: {"special": content in special, "normalized": content not in special} for content in special}
        usual = {"special": False, "normalized": True}
        given = [(index, {"content": name} | kinds.get(name, usual)) for name, index in read_if_any(file).items()]
    elif isinstance(settings[_DECODER], dict):
        given = list(settings[_DECODER].items())
    else:
        raise UserError(f"{file}: {_DECODER} is no object of tokens by id; download it again")
    found = {}
    for index, value in given:
        content = text_of(value) if isinstance(value, dict) else None
        number = int(index) if isinstance(index, str) and index.isdecimal() else index
        if not content or token_id(file, f"the id of {content!r}", number) is None:
            raise UserError(f"{file}: {value!r:.100} under {index!r} is no token; download it again")
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        found[number] = file, tokenizers.AddedToken(content, **flags)
    return found


def _check_free(backend: tokenizers.Tokenizer, file: Path, index: int, content: str) -> None:
    other = backend.id_to_token(index)
    if other not in (None, content):
        raise UserError(_conflict(file, index, content, f"is that of {other!r} in its tokenizer.json"))


def _conflict(file: Path, index: int, content: str, says: str) -> str:
    return f"{file}: {content!r} has the id {index}, which {says}; download both from one revision of the model"


def _listed(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
