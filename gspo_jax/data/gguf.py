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


def _pre_tokenizers(kind: str) -> list[Any] | None:
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


def read(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a GGUF file's tokenizer.

    Raises:
      UserError: another kind than byte-level BPE, an unknown split into words, or inconsistent tokens.
    """

    def refuse(what: str, remedy: str = "download it again") -> Any:
        raise UserError(f"{path} {what}; {remedy}")

    facts = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    kind, words = facts.get("ggml.model"), facts.get("ggml.pre", "default")
    if kind != "gpt2":
        refuse(f"has a tokenizer of the kind {kind!r:.100}", "supported: gpt2, that is byte-level BPE")
    steps = _pre_tokenizers(words) if isinstance(words, str) else None
    if steps is None:
        refuse(f"splits text into words as {words!r:.100}", "supported: smollm, llama-bpe, qwen2 and gpt-2")
    tokens, merges, types = (_texts(facts, name) for name in ("ggml.tokens", "ggml.merges", "ggml.token_type"))
    types = types or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        refuse(f"has {len(tokens)} tokens and types of {len(types)}")
    kept = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    if len(kept) != sum(kind != _UNUSED for kind in types):
        refuse("has two tokens of one text")
    pairs = [tuple(merge.split(" ")) for merge in merges if isinstance(merge, str)]
    if len(pairs) != len(merges) or not all(len(pair) == 2 for pair in pairs):
        refuse("has merges that are no pairs")
    ids = {name: facts.get(f"ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    for name, index in ids.items():
        if index is not None and not (isinstance(index, int) and 0 <= index < len(tokens)):
            refuse(f"has {index!r:.100} as the id of its {name} token, outside its {len(tokens)} tokens")
    if ids["eos"] is None:
        refuse("names no end-of-sequence token")
    try:
        model = models.BPE(kept, pairs, ignore_merges=words.startswith("llama"))  # type: ignore[arg-type]
    except Exception as error:  # the library's own, of no type
        refuse(f"has merges outside its vocabulary ({error!s:.200})")
    backend = tokenizers.Tokenizer(model)
    if words == "qwen2":
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in defined])
    named = {name: None if index is None else tokens[index] for name, index in ids.items()}
    if facts.get("ggml.add_bos_token") and named["bos"]:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{named['bos']} $A", pair=f"{named['bos']} $A $B", special_tokens=[(named["bos"], ids["bos"])]
        )
    template = facts.get("chat_template")
    if template is not None and not isinstance(template, str):
        refuse("has a chat template that is no text")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "unk_token": named["unknown"],
        "pad_token": named["padding"],
        "chat_template": template,
    }
    pad = ids["eos"] if ids["padding"] is None else ids["padding"]
    return Tokenizer(backend, eos_ids=[ids["eos"]], pad_id=pad, settings=settings)


def _texts(facts: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = facts.get(name, [])
    return value if isinstance(value, list) else []
