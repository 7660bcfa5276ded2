"""Tokenizers of GGUF files, from their metadata."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[Any]:
    pattern = Regex(_WORDS.format(digits=digits))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(pattern, "isolated"), bytes_of]


def _pre_tokenizers(kind: Any) -> list[Any] | None:
    """Return the steps named by `tokenizer.ggml.pre`, None if they are not known here."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match kind:
        case "smollm":
            return [pre_tokenizers.Digits(individual_digits=True), gpt2]
        case "gpt-2" | "default":
            return [gpt2]
        case "llama-bpe" | "llama3" | "llama-v3":
            return _split("{1,3}")
        case "qwen2":
            return _split("")
    return None


class _Refusal(Exception):
    """Refusal of metadata: what is wrong, and the remedy."""

    def __init__(self, what: str, remedy: str = "download it again"):
        super().__init__(f"{what}; {remedy}")


def read(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a GGUF file's tokenizer.

    Raises:
      UserError: another kind than byte-level BPE, an unknown split into words, or inconsistent tokens.
    """
    prefix = "tokenizer."
    facts = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        return _tokenizer(facts)
    except _Refusal as error:
        raise UserError(f"{path} {error}") from None


def _tokenizer(facts: Mapping[str, Any]) -> Tokenizer:
    tokens = _list(facts, "ggml.tokens")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise _Refusal("has no list of tokens")
    ids = _special_ids(facts, len(tokens))
    template = facts.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise _Refusal("has a chat template that is no text")
    named = {name: tokens[index] for name, index in ids.items()}
    backend = _backend(facts, tokens)
    if facts.get("ggml.add_bos_token") and "bos" in ids:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{named['bos']} $A", pair=f"{named['bos']} $A $B", special_tokens=[(named["bos"], ids["bos"])]
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": named.get("bos"),
        "eos_token": named["eos"],
        "unk_token": named.get("unknown"),
        "pad_token": named.get("padding"),
        "chat_template": template,
    }
    return Tokenizer(backend, eos_ids=[ids["eos"]], pad_id=ids.get("padding", ids["eos"]), settings=settings)


def _special_ids(facts: Mapping[str, Any], count: int) -> dict[str, int]:
    found = {name: facts.get(f"ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    ids = {name: index for name, index in found.items() if index is not None}
    for name, index in ids.items():
        if not isinstance(index, int) or not 0 <= index < count:
            raise _Refusal(f"has {index!r:.100} as the id of its {name} token, outside its {count} tokens")
    if "eos" not in ids:
        raise _Refusal("names no end-of-sequence token")
    return ids


def _backend(facts: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    kind, words = facts.get("ggml.model"), facts.get("ggml.pre", "default")
    if kind != "gpt2":
        raise _Refusal(f"has a tokenizer of the kind {kind!r:.100}", "supported: gpt2, that is byte-level BPE")
    steps = _pre_tokenizers(words)
    if steps is None:
        raise _Refusal(f"splits text into words as {words!r:.100}", "supported: smollm, llama-bpe, qwen2 and gpt-2")
    types = _list(facts, "ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise _Refusal(f"has {len(tokens)} tokens and types of {len(types)}")
    kept = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if len(kept) != len(types) - types.count(_UNUSED):
        raise _Refusal("has two tokens of one text")
    pairs = [tuple(merge.split(" ")) for merge in _list(facts, "ggml.merges") if isinstance(merge, str)]
    if not all(len(pair) == 2 for pair in pairs):
        raise _Refusal("has merges that are no pairs")
    try:
        model = models.BPE(kept, pairs, ignore_merges=words.startswith("llama"))  # type: ignore[arg-type]
    except Exception as error:  # the library's own, of no type
        raise _Refusal(f"has merges outside its vocabulary ({error!s:.200})") from error
    backend = tokenizers.Tokenizer(model)
    if words == "qwen2":
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([tokenizers.AddedToken(token, normalized=False)])
    return backend


def _list(facts: Mapping[str, Any], name: str) -> list[Any]:
    value = facts.get(name, [])
    return value if isinstance(value, list) else []
